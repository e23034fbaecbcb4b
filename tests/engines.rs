//! Every engine against the oracle, on inputs that have broken quantizers; and properties of any
//! shape, axis and dtype.

use burn::backend::Backend;
use burn::tensor::{FloatDType, TensorData, read_sync};
use burn_fp4_formats::{
    BLOCK_SIZES, E2M1, Fp4Format, Packed, TensorScale, element_value, unpack_nibbles,
};
use burn_fp4_ops::{Fp4Layout, Fp4Primitive, portable};
use burn_fp4_search::host::{self, PackedView, View};
use burn_fp4_search::{
    Blocks, Draw, E4m3Range, ErrorMetric, Fp4Scheme, Method, Needs, NonFinite, Rounding, ScaleRule,
    TensorScaling, quantize,
};
use proptest::prelude::*;
use tests::compare::{assert_bits, assert_same};
use tests::engines::{Axis, engines};
use tests::inputs::{Dense, Dtype, Kind};

/// Returns schemes with every rule, search, granularity and source of the tensor scale, and both
/// block sizes.
fn schemes() -> Vec<Fp4Scheme> {
    let mut schemes = Vec::new();
    for rule in ScaleRule::ALL {
        for block_size in BLOCK_SIZES {
            schemes.push(Fp4Scheme::of(rule).with_block_size(block_size));
        }
        schemes.push(Fp4Scheme::of(rule).with_block_size(16).with_blocks(Blocks::Tile16x16));
    }
    for rule in [ScaleRule::Te, ScaleRule::TeDivision, ScaleRule::TorchRecipe] {
        for scaling in
            [TensorScaling::Row, TensorScaling::Amax(3.0), TensorScaling::Multiplier(1e-3)]
        {
            schemes.push(Fp4Scheme::of(rule).with_tensor_scale(scaling));
        }
    }
    for range in [E4m3Range::E448, E4m3Range::E256] {
        for error in [ErrorMetric::Mae, ErrorMetric::Mse] {
            let search = Method::FourOverSix { range, error };
            schemes.push(Fp4Scheme::nvfp4().with_method(search));
            schemes.push(Fp4Scheme::nvfp4().with_method(search).with_blocks(Blocks::Tile16x16));
        }
    }
    let tiles = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
    for search in searches() {
        for rule in ScaleRule::ALL {
            let scheme = Fp4Scheme::of(rule).with_method(search);
            schemes.extend(BLOCK_SIZES.map(|block_size| scheme.with_block_size(block_size)));
        }
        for scaling in
            [TensorScaling::Row, TensorScaling::Amax(3.0), TensorScaling::Multiplier(1e-3)]
        {
            schemes.push(Fp4Scheme::nvfp4().with_tensor_scale(scaling).with_method(search));
        }
        schemes.push(tiles.with_method(search));
    }
    let drawn = Rounding::Stochastic(Draw { seed: 7 << 40 | 3, step: 5 << 33 | 1 });
    schemes.extend(ScaleRule::ALL.map(|rule| Fp4Scheme::of(rule).with_rounding(drawn)));
    schemes.push(tiles.with_rounding(drawn));
    schemes.push(Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row).with_rounding(drawn));
    schemes.iter().for_each(|scheme| scheme.validate().expect("a consistent scheme"));
    schemes
}

/// Returns the searches that work with every rule and need only the weight.
fn searches() -> impl Iterator<Item = Method> {
    let rows = Method::NAMED
        .into_iter()
        .filter(|row| row.needs == Needs::Nothing && row.formats.len() == Fp4Format::ALL.len());
    rows.map(|row| row.method).filter(|method| *method != Method::Amax)
}

#[test]
fn every_engine_gives_the_bits_of_the_oracle() {
    assert!(compare_all_schemes(&[Dtype::F32]) > 3_000_000);
}

#[test]
#[ignore = "slow"]
fn every_engine_gives_the_bits_of_the_oracle_in_half_precision() {
    assert!(compare_all_schemes(&[Dtype::F16, Dtype::Bf16]) > 6_000_000);
}

/// Returns the number of compared values.
fn compare_all_schemes(dtypes: &[Dtype]) -> usize {
    let mut compared = 0;
    for scheme in schemes() {
        let scheme = scheme.with_non_finite(NonFinite::FollowReference);
        for (seed, kind) in Kind::ALL.into_iter().enumerate() {
            for &dtype in dtypes {
                let dense = Dense::new(32, 64, &kind.values(32 * 64, seed as u64), dtype);
                for axis in [Axis::First, Axis::Last] {
                    compared += compare_engines(&format!("{kind:?}"), &dense, axis, &scheme);
                }
            }
        }
    }
    println!("{compared} values compared");
    compared
}

#[test]
fn engines_take_shapes_that_do_not_fill_a_batch_or_a_tile() {
    for (rows, cols) in [(1, 16), (3, 48), (17, 32), (48, 16), (33, 1056), (1, 544)] {
        let values = Kind::Outliers.values(rows * cols, 7);
        for scheme in [
            Fp4Scheme::nvfp4(),
            Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16),
            Fp4Scheme::mxfp4().with_block_size(16),
        ] {
            let dense = Dense::new(rows, cols, &values, Dtype::F32);
            compare_engines("ragged", &dense, Axis::Last, &scheme);
            compare_engines("ragged", &dense.transposed(), Axis::First, &scheme);
        }
    }
}

#[test]
#[ignore = "slow"]
fn special_values_follow_the_reference_in_every_engine() {
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-45, -f32::MAX] {
        let mut values = Kind::Weights.values(32 * 32, 5);
        values[70] = special;
        let dense = Dense::new(32, 32, &values, Dtype::F32);
        for scheme in schemes() {
            let scheme = scheme.with_non_finite(NonFinite::FollowReference);
            for axis in [Axis::First, Axis::Last] {
                compare_engines(&format!("with {special}"), &dense, axis, &scheme);
            }
        }
    }
}

#[test]
fn all_zeros_quantize_to_zeros() {
    for scheme in schemes() {
        let dense = Dense::new(32, 32, &[0.0; 1024], Dtype::Bf16);
        compare_engines("zeros", &dense, Axis::Last, &scheme);
        let packed = quantize(&[0.0; 1024], 32, 32, &scheme).unwrap();
        assert!(packed.dequantize().iter().all(|&value| value == 0.0), "{scheme:?}");
        packed.validate().expect("zeros are valid");
    }
    let scale = quantize(&[0.0; 16], 1, 16, &Fp4Scheme::nvfp4()).unwrap().tensor_scale;
    assert_eq!(scale, TensorScale::One(f32::from_bits(0x0020_0000)), "as TransformerEngine has it");
}

/// Compares all engines with the oracle. Returns the number of compared values.
fn compare_engines(what: &str, dense: &Dense, axis: Axis, scheme: &Fp4Scheme) -> usize {
    let engines = engines();
    let oracle = engines[0].quantize(dense, axis, scheme).expect("the oracle takes everything");
    let mut compared = 0;
    for engine in &engines[1..] {
        if let Some(packed) = engine.quantize(dense, axis, scheme) {
            let what = format!("{}: {what} {:?} {axis:?} {scheme:?}", engine.name, dense.dtype());
            assert_same(&what, &packed, &oracle);
            compared += dense.rows * dense.cols;
        }
    }
    compared
}

/// Every exponent is a tensor scale of a row, including subnormal ones.
#[test]
fn tensor_operations_dequantize_by_tensor_scales_of_every_exponent() {
    let significands = [0, 1, 0x2A_AAAA, 0x7F_FFFF];
    let scales: Vec<_> = (0..255u32 << 23)
        .step_by(1 << 23)
        .flat_map(|exponent| significands.map(|significand| f32::from_bits(exponent | significand)))
        .collect();
    let rows = scales.len();
    let packed = Packed {
        format: Fp4Format::NvFp4,
        block_size: 16,
        rows,
        cols: 16,
        codes: (0..rows).flat_map(|_| (0..8).map(|pair| 0x10 + 0x22 * pair)).collect(),
        scales: vec![0x38; rows],
        tensor_scale: TensorScale::PerRow(scales),
    };
    let expected = packed.dequantize();
    assert_bits(
        "flex",
        &dequantize_by_tensor_operations::<burn::backend::Flex>(&packed),
        &expected,
    );
    // Burn 0.22 deprecates `NdArray`.
    #[allow(deprecated)]
    let found = dequantize_by_tensor_operations::<burn::backend::NdArray>(&packed);
    assert_bits("ndarray", &found, &expected);
}

fn dequantize_by_tensor_operations<B: Backend>(packed: &Packed) -> Vec<f32> {
    let device = B::Device::default();
    let (rows, blocks) = (packed.rows, packed.blocks());
    let bits: Vec<_> =
        packed.tensor_scale.as_slice().iter().map(|scale| scale.to_bits() as i32).collect();
    let tensor_scales = TensorData::new(bits, [packed.tensor_scale.as_slice().len()]);
    let codes = TensorData::new(packed.codes.clone(), [rows, packed.cols / 2]);
    let scales = TensorData::new(packed.scales.clone(), [rows, blocks]);
    let primitive = Fp4Primitive::<B> {
        codes: B::int_from_data(codes, &device),
        scales: B::int_from_data(scales, &device),
        tensor_scale: B::int_from_data(tensor_scales, &device),
    };
    let layout = Fp4Layout {
        format: packed.format,
        block_size: packed.block_size,
        shape: vec![rows, packed.cols],
        axis: 1,
        hadamard: None,
    };
    let values = portable::dequantize::<B>(primitive, layout, FloatDType::F32);
    read_sync(B::float_into_data(values)).expect("host memory").iter::<f32>().collect()
}

/// Dequantizes a packed matrix with the host engine, along an axis of a matrix of this shape.
fn host_dequantize(packed: &Packed, view: View) -> Vec<f32> {
    let mut values = vec![0.0; view.len()];
    let view_of = PackedView {
        format: packed.format,
        block_size: packed.block_size,
        codes: &packed.codes,
        scales: &packed.scales,
        tensor_scale: packed.tensor_scale.as_slice(),
    };
    host::dequantize(view_of, view, &mut values).expect("a valid problem");
    values
}

prop_compose! {
    /// A matrix with a whole number of blocks along its rows, and a scheme for it.
    fn problem()(
        rows in 1usize..40,
        blocks in 1usize..40,
        kind in 0..Kind::ALL.len(),
        dtype in 0..3usize,
        scheme in 0..schemes().len(),
        seed in any::<u64>(),
    ) -> (Dense, Fp4Scheme) {
        let scheme = schemes()[scheme];
        let cols = blocks * scheme.block_size;
        let values = Kind::ALL[kind].values(rows * cols, seed);
        // Half precision may overflow to infinity, which other tests look at.
        let dtype = if Kind::ALL[kind] == Kind::WideRange { Dtype::F32 } else { Dtype::ALL[dtype] };
        (Dense::new(rows, cols, &values, dtype), scheme)
    }
}

/// Returns the number of random problems of a property: `PROPTEST_CASES`, or few.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").map_or(64, |cases| cases.parse().expect("a number"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn packed_lengths_and_validity((dense, scheme) in problem()) {
        let packed = quantize(&dense.to_f32(), dense.rows, dense.cols, &scheme).unwrap();
        prop_assert_eq!(packed.codes.len(), dense.rows * dense.cols / 2);
        prop_assert_eq!(packed.scales.len(), dense.rows * dense.cols / scheme.block_size);
        prop_assert!(packed.validate().is_ok());
    }

    #[test]
    fn any_engine_any_axis_equals_the_oracle(
        (dense, scheme) in problem(),
        across in any::<bool>(),
    ) {
        if across {
            compare_engines("property", &dense.transposed(), Axis::First, &scheme);
        } else {
            compare_engines("property", &dense, Axis::Last, &scheme);
        }
    }

    #[test]
    fn dequantization_of_the_host_equals_the_oracle(
        (dense, scheme) in problem(),
        across in any::<bool>(),
    ) {
        let packed = quantize(&dense.to_f32(), dense.rows, dense.cols, &scheme).unwrap();
        let expected = packed.dequantize();
        if across {
            let view = View::along(&[dense.cols, dense.rows], 0);
            let transposed = Dense::new(dense.rows, dense.cols, &expected, Dtype::F32).transposed();
            assert_bits("across", &host_dequantize(&packed, view), &transposed.to_f32());
        } else {
            let view = View::rows(dense.rows, dense.cols);
            assert_bits("along", &host_dequantize(&packed, view), &expected);
        }
    }

    /// Within half a step of the grid of its block, or a whole one if it is rounded at random,
    /// unless the block saturates. The quantizer may be off by the rounding of the products, hence
    /// the last factor.
    #[test]
    fn values_are_within_half_a_step((dense, scheme) in problem()) {
        let values = dense.to_f32();
        let packed = quantize(&values, dense.rows, dense.cols, &scheme).unwrap();
        for (index, (&value, restored)) in values.iter().zip(packed.dequantize()).enumerate() {
            let row = index / dense.cols;
            let scale = packed.scales[index / scheme.block_size];
            let tensor_scale = packed.tensor_scale.of_row(row);
            let grid = |code: u8| element_value(packed.format, code, scale, tensor_scale);
            // Below the smallest normal f32 torchao encodes with another scale than it decodes.
            if value.abs() > grid(7) || grid(1) < f32::MIN_POSITIVE {
                continue;
            }
            let step = (0..7).map(|code| (grid(code), grid(code + 1)))
                .find(|(low, high)| (*low..=*high).contains(&value.abs()))
                .map_or(0.0, |(low, high)| high - low);
            let error = (value as f64 - restored as f64).abs();
            let share = if scheme.rounding == Rounding::Nearest { 0.5 } else { 1.0 };
            prop_assert!(
                error <= share * step as f64 * (1.0 + 1e-5),
                "{value:e} became {restored:e}, step {step:e}"
            );
        }
    }

    /// Rounding to the grid of given scales is idempotent.
    #[test]
    fn requantizing_with_the_same_scales_changes_nothing((dense, scheme) in problem()) {
        let packed = quantize(&dense.to_f32(), dense.rows, dense.cols, &scheme).unwrap();
        let mut codes = vec![0; dense.rows * dense.cols];
        unpack_nibbles(&packed.codes, &mut codes);
        for (index, value) in packed.dequantize().into_iter().enumerate() {
            let scale = packed.scales[index / scheme.block_size];
            let tensor_scale = packed.tensor_scale.of_row(index / dense.cols);
            let unit = element_value(packed.format, 2, scale, tensor_scale);
            // Where the unit is subnormal the value itself is rounded by more than a quarter step.
            if unit < 2f32.powi(-120) || !value.is_finite() {
                continue;
            }
            let again = E2M1.decode(E2M1.encode(value / unit));
            prop_assert_eq!(again, E2M1.decode(codes[index]), "value {:e}", value);
        }
    }
}
