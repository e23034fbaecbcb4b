//! Formats of 4 and 8 bits, exhaustively, against hand-written values.

use burn_fp4_formats::{
    E2M1, E2M1_VALUES, E4M3, E4M3_VALUES, E8M0, E8M0_VALUES, FormatError, Fp4Format, Minifloat,
    Packed, ScaleLayout, TensorScale, pack_nibbles, unpack_nibbles,
};

/// The magnitudes of E2M1, from the OCP specification.
const E2M1_MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Computes 2^exponent. `powi` has no guaranteed precision, and Miri makes use of that.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((1023 + exponent) as u64) << 52)
}

/// The magnitudes of E4M3, from the OFP8 specification: multiples of 2^-9 up to 2^-6, then eight to
/// a binade up to 448.
fn e4m3_magnitudes() -> Vec<f64> {
    let mut magnitudes: Vec<f64> = (0..8).map(|step| step as f64 / 512.0).collect();
    for binade in -6..=8i32 {
        for eighth in 8..16 {
            magnitudes.push(eighth as f64 / 8.0 * power(binade));
        }
    }
    assert_eq!(magnitudes.pop(), Some(480.0), "the last code is NaN");
    magnitudes
}

/// The values of E8M0: powers of two.
fn e8m0_magnitudes() -> Vec<f64> {
    (0..255).map(|code| power(code - 127)).collect()
}

#[test]
fn formats_have_their_landmark_values() {
    for (row, code, value) in [
        (E4M3, 0x00, 0.0),
        (E4M3, 0x01, 1.0 / 512.0),
        (E4M3, 0x07, 7.0 / 512.0),
        (E4M3, 0x08, 1.0 / 64.0),
        (E4M3, 0x38, 1.0),
        (E4M3, 0x3C, 1.5),
        (E4M3, 0x7E, 448.0),
        (E4M3, 0xB8, -1.0),
        (E8M0, 0x00, power(-127) as f32),
        (E8M0, 0x7F, 1.0),
        (E8M0, 0xFE, power(127) as f32),
    ] {
        assert_eq!(row.decode(code), value, "{} {code:#04x}", row.name);
    }
    assert_eq!((E2M1.bits(), E4M3.bits(), E8M0.bits()), (4, 8, 8));
    assert_eq!(
        (E2M1.max_value(), E4M3.max_value(), E8M0.max_value()),
        (6.0, 448.0, power(127) as f32)
    );
    let nans =
        |row: &Minifloat| -> Vec<u8> { (0..=255).filter(|&code| row.is_nan(code)).collect() };
    assert!(nans(&E2M1).is_empty());
    assert_eq!(nans(&E4M3), [0x7F, 0xFF]);
    assert_eq!(nans(&E8M0), [0xFF]);
}

#[test]
fn every_code_decodes_to_its_value() {
    for code in 0..16u8 {
        let sign = if code < 8 { 1.0 } else { -1.0 };
        let expected = (sign * E2M1_MAGNITUDES[code as usize % 8]) as f32;
        assert_eq!(E2M1.decode(code).to_bits(), expected.to_bits(), "code {code}");
        assert_eq!(E2M1_VALUES[code as usize].to_bits(), expected.to_bits());
    }
    let magnitudes = e4m3_magnitudes();
    for code in 0..=255u8 {
        let sign = if code < 0x80 { 1.0 } else { -1.0 };
        match magnitudes.get(code as usize & 0x7F) {
            Some(magnitude) => {
                let expected = (sign * magnitude) as f32;
                assert_eq!(E4M3.decode(code).to_bits(), expected.to_bits(), "code {code:#04x}");
                assert_eq!(E4M3_VALUES[code as usize].to_bits(), expected.to_bits());
            }
            None => assert!(E4M3.decode(code).is_nan() && E4M3_VALUES[code as usize].is_nan()),
        }
    }
    for (code, &expected) in e8m0_magnitudes().iter().enumerate() {
        assert_eq!(E8M0.decode(code as u8) as f64, expected, "code {code:#04x}");
        assert_eq!(E8M0_VALUES[code] as f64, expected);
    }
    assert!(E8M0.decode(0xFF).is_nan() && E8M0_VALUES[0xFF].is_nan());
}

/// Rounds to the nearest of all magnitudes, ties to the even code.
fn nearest(magnitudes: &[f64], value: f64) -> u8 {
    let distance = |code: usize| (magnitudes[code] - value).abs();
    let better = |best: usize, code: usize| {
        let closer = distance(code) < distance(best);
        let even = distance(code) == distance(best) && code.is_multiple_of(2);
        if closer || even { code } else { best }
    };
    (0..magnitudes.len()).reduce(better).expect("there are magnitudes") as u8
}

#[test]
fn every_midpoint_and_its_neighbours_round_to_nearest_even() {
    let tables =
        [(E2M1, E2M1_MAGNITUDES.to_vec()), (E4M3, e4m3_magnitudes()), (E8M0, e8m0_magnitudes())];
    let mut compared = 0;
    for (row, magnitudes) in tables {
        let midpoints = magnitudes.windows(2).map(|pair| ((pair[0] + pair[1]) / 2.0) as f32);
        let exact = magnitudes.iter().map(|&magnitude| magnitude as f32);
        let beyond = [row.max_value() * 1.25, f32::MAX, f32::INFINITY];
        for middle in midpoints.chain(exact).chain(beyond) {
            for value in [middle.next_down(), middle, middle.next_up()] {
                if value.is_nan() || value < 0.0 {
                    continue;
                }
                let expected = nearest(&magnitudes, (value as f64).min(row.max_value() as f64));
                assert_eq!(row.encode(value), expected, "{} of {value:e}", row.name);
                let negative = if row.signed { expected | row.sign_bit() } else { 0 };
                assert_eq!(row.encode(-value), negative, "{} of -{value:e}", row.name);
                compared += 1;
            }
        }
    }
    println!("{compared} values rounded");
    assert_eq!(E2M1.encode(f32::NAN), 0);
    assert_eq!(E4M3.encode(f32::NAN), 0x7F);
    assert_eq!(E8M0.encode(f32::NAN), 0xFF);
}

#[test]
fn ties_of_e2m1_round_to_even() {
    let ties = [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)];
    for (value, code) in ties {
        assert_eq!(E2M1.encode(value), code, "{value}");
        assert_eq!(E2M1.encode(-value), code | 8, "-{value}");
    }
}

#[test]
fn nibbles_go_low_first_and_come_back() {
    let mut bytes = [0; 2];
    pack_nibbles(&[0x1, 0x2, 0xF, 0x8], &mut bytes);
    assert_eq!(bytes, [0x21, 0x8F]);
    let all: Vec<u8> = (0..=255).collect();
    let mut codes = vec![0; 512];
    unpack_nibbles(&all, &mut codes);
    let mut packed = vec![0; 256];
    pack_nibbles(&codes, &mut packed);
    assert_eq!(packed, all);
}

/// Lays out scales as torch code does: reshape (R/128, 4, 32, C/4, 4), permute (0, 3, 2, 1, 4).
fn tiled_by_permutation(scales: &[u8], rows: usize, blocks: usize) -> Vec<u8> {
    let (padded_rows, padded_blocks) = (rows.div_ceil(128) * 128, blocks.div_ceil(4) * 4);
    let mut tiled = Vec::new();
    for row_tile in 0..padded_rows / 128 {
        for block_tile in 0..padded_blocks / 4 {
            for low in 0..32 {
                for high in 0..4 {
                    for block in 0..4 {
                        let (row, block) =
                            (row_tile * 128 + high * 32 + low, block_tile * 4 + block);
                        let inside = row < rows && block < blocks;
                        tiled.push(if inside { scales[row * blocks + block] } else { 0 });
                    }
                }
            }
        }
    }
    tiled
}

#[test]
fn tiled_scales_are_a_permutation_with_zero_padding() {
    for (rows, blocks) in [(128, 4), (1, 1), (130, 5), (300, 9), (256, 8), (127, 3)] {
        let scales: Vec<u8> = (0..rows * blocks).map(|index| (index % 251 + 1) as u8).collect();
        let tiled = ScaleLayout::Tiled128x4.arrange(&scales, rows, blocks).unwrap();
        assert_eq!(tiled, tiled_by_permutation(&scales, rows, blocks));
        assert_eq!(ScaleLayout::Tiled128x4.restore(&tiled, rows, blocks).unwrap(), scales);
        assert_eq!(ScaleLayout::RowMajor.arrange(&scales, rows, blocks).unwrap(), scales);
        assert_eq!(ScaleLayout::RowMajor.restore(&scales, rows, blocks).unwrap(), scales);
    }
    let short = ScaleLayout::Tiled128x4.restore(&[0; 511], 128, 4);
    assert_eq!(short, Err(FormatError::Length { what: "block scales", expected: 512, found: 511 }));
}

fn valid() -> Packed {
    Packed {
        format: Fp4Format::NvFp4,
        block_size: 16,
        rows: 2,
        cols: 32,
        codes: vec![0x21; 32],
        scales: vec![0x38; 4],
        tensor_scale: TensorScale::One(0.5),
    }
}

#[test]
fn packed_matrices_are_validated_strictly() {
    assert_eq!(valid().validate(), Ok(()));
    let rejects = |change: fn(&mut Packed)| {
        let mut packed = valid();
        change(&mut packed);
        packed.validate().unwrap_err().to_string()
    };
    assert_eq!(rejects(|p| p.block_size = 8), "nvfp4: block size 8 is not one of [16, 32]");
    assert_eq!(rejects(|p| p.cols = 24), "24 columns are not a multiple of the block size 16");
    assert_eq!(rejects(|p| p.codes.truncate(31)), "codes: expected 32 values, found 31");
    assert_eq!(rejects(|p| p.scales.push(0)), "block scales: expected 4 values, found 5");
    assert_eq!(rejects(|p| p.scales[3] = 0x7F), "block scale at row 1, block 1: code 0x7f is NaN");
    assert_eq!(
        rejects(|p| p.scales[1] = 0xB8),
        "block scale at row 0, block 1: code 0xb8 is negative"
    );
    for bad in [f32::NAN, f32::INFINITY, -1.0, -0.0] {
        let mut packed = valid();
        packed.tensor_scale = TensorScale::One(bad);
        assert!(matches!(packed.validate(), Err(FormatError::TensorScale { row: 0, .. })), "{bad}");
    }
    assert_eq!(
        rejects(|p| p.tensor_scale = TensorScale::PerRow(vec![1.0; 3])),
        "tensor scales: expected 2 values, found 3"
    );
    let has_none = rejects(|p| p.format = Fp4Format::MxFp4);
    assert!(has_none.contains("the format has no tensor scale"), "{has_none}");
    // 0xFF is NaN in E8M0, and its top bit is no sign.
    let mut packed = valid();
    (packed.format, packed.tensor_scale) = (Fp4Format::MxFp4, TensorScale::One(1.0));
    packed.scales[2] = 0xFE;
    assert_eq!(packed.validate(), Ok(()));
    packed.scales[2] = 0xFF;
    assert!(packed.validate().is_err());
}

#[test]
fn dequantization_matches_values_computed_by_hand() {
    let mut packed = valid();
    packed.codes[0] = 0xF7; // 6 and -6
    packed.scales[0] = 0x40; // 2
    let values = packed.dequantize();
    assert_eq!(values[..4], [6.0, -6.0, 0.5 * 2.0 * 0.5, 1.0 * 2.0 * 0.5]);
    assert_eq!(values[16..18], [0.25, 0.5]);
    packed.tensor_scale = TensorScale::PerRow(vec![1.0, 3.0]);
    assert_eq!(packed.dequantize()[32..34], [1.5, 3.0]);
    let json = serde_json::to_string(&packed).unwrap();
    assert_eq!(serde_json::from_str::<Packed>(&json).unwrap(), packed);
}
