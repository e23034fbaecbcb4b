//! Comparison of packed matrices, bits first.

use burn_fp4_formats::{E4M3, Fp4Format, Packed};

/// Number of codes and scales compared, over all cases.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    /// Matrices.
    pub cases: usize,
    /// Codes.
    pub codes: usize,
    /// Block scales.
    pub scales: usize,
}

impl Tally {
    /// Asserts that codes and scales equal a golden file.
    pub fn check(&mut self, what: &str, packed: &Packed, codes: &[u8], scales: &[u8]) {
        assert_eq!(packed.codes.len(), codes.len(), "{what}: length of codes");
        assert_eq!(packed.scales.len(), scales.len(), "{what}: length of scales");
        for (index, (&found, &expected)) in packed.scales.iter().zip(scales).enumerate() {
            // The sign of a NaN scale depends on the machine that wrote it.
            let same = found == expected
                || (packed.format == Fp4Format::NvFp4
                    && E4M3.is_nan(found)
                    && E4M3.is_nan(expected));
            let (row, block) = (index / packed.blocks(), index % packed.blocks());
            assert!(same, "{what}: scale ({row}, {block}) {found:#04x}, expected {expected:#04x}");
        }
        for (index, (&found, &expected)) in packed.codes.iter().zip(codes).enumerate() {
            let (row, col) = (2 * index / packed.cols, 2 * index % packed.cols);
            assert!(
                found == expected,
                "{what}: codes ({row}, {col}) {found:#04x}, expected {expected:#04x}"
            );
        }
        self.cases += 1;
        self.codes += 2 * codes.len();
        self.scales += scales.len();
    }

    /// Prints the count and fails if nothing was compared.
    pub fn finish(self, what: &str) {
        println!(
            "{what}: {} cases, {} codes, {} scales equal",
            self.cases, self.codes, self.scales
        );
        assert!(self.cases > 0, "{what}: nothing was compared");
    }
}

/// Asserts that two packed matrices are the same, tensor scale included.
pub fn assert_same(what: &str, found: &Packed, expected: &Packed) {
    Tally::default().check(what, found, &expected.codes, &expected.scales);
    let bits = |packed: &Packed| -> Vec<u32> {
        packed.tensor_scale.as_slice().iter().map(|scale| canonical_bits(*scale)).collect()
    };
    assert_eq!(bits(found), bits(expected), "{what}: tensor scale");
}

/// Returns the bits of an f32, the same for every NaN.
pub fn canonical_bits(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

/// Asserts that two slices hold the same f32 bits.
pub fn assert_bits(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            canonical_bits(found) == canonical_bits(expected),
            "{what}: value {index} is {found:e}, expected {expected:e}"
        );
    }
}

/// Largest allowed difference of f32 products, relative to the largest product.
pub const ROUNDING: f64 = 2e-6;

/// The same on CUDA, where Burn rounds factors to 11 bits. Quantized factors have fewer.
pub const ROUNDING_OF_FACTORS: f64 = 1e-3;

/// Asserts that two slices differ by at most `tolerance`, relative to the largest expected value.
pub fn assert_near(what: &str, found: &[f32], expected: &[f32], tolerance: f64) {
    let scale = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (&expected, &found)) in expected.iter().zip(found).enumerate() {
        let near = f64::from(expected - found).abs() <= tolerance * f64::from(scale);
        assert!(near, "{what}, element {at}: {found}, not {expected} (of {scale})");
    }
}
