//! From one FP4 format to the other, exactly where that is possible, counted where it is not; and
//! a tensor scale folded into the block scales.
//!
//! **MXFP4 to NVFP4.** With k the exponent of a block and k_max the largest of a weight, the
//! tensor scale is 2^(k_max - 8) and the two blocks of 16 get the scale 2^(k - k_max + 8), which
//! E4M3 has while k_max - k <= 17: the codes stay as they are. This is the closed form of
//! ModelOpt's `MXFP4 -> NVFP4` cast. Blocks further down are quantized again.
//!
//! **NVFP4 to MXFP4.** The values of two blocks of 16 need one power of two. Where one makes all
//! of them elements of E2M1 it is taken; otherwise the one with the smallest squared error, the
//! smaller where two are equal.

use std::path::Path;

use burn_fp4_formats::{E2M1, E4M3, E8M0, FormatError, Fp4Format, check_scales};

use crate::error::CheckpointError;
use crate::fp4::{Fp4Weight, Numbers, Order, TensorScale};
use crate::storage::Storage;

/// Counts of what a cast changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct CastReport {
    /// Blocks of the new format.
    pub blocks: u64,
    /// Blocks of which some value changed.
    pub changed_blocks: u64,
    /// Values that changed.
    pub changed_values: u64,
}

impl CastReport {
    /// Adds the numbers of another weight.
    pub fn add(&mut self, other: Self) {
        self.blocks += other.blocks;
        self.changed_blocks += other.changed_blocks;
        self.changed_values += other.changed_values;
    }

    fn count(&mut self, changed: usize) {
        self.blocks += 1;
        self.changed_blocks += u64::from(changed > 0);
        self.changed_values += changed as u64;
    }
}

const NVFP4_BLOCK: usize = 16;
const MXFP4_BLOCK: usize = 32;
/// E4M3 has the powers of two from 2^-9 to 2^8.
const TOP: i32 = 8;

/// A weight in this format, in its block size of definition.
///
/// One that has the format already keeps its values, unless its blocks become larger.
///
/// ```
/// use burn_fp4_checkpoints::{Fp4Weight, cast::cast};
/// use burn_fp4_formats::Fp4Format;
///
/// let mut weight = Fp4Weight::outline(Fp4Format::MxFp4, 32, vec![1, 32], false, false);
/// (weight.codes, weight.scales) = (vec![0x22; 16].into(), vec![128].into()); // 32 times 1 x 2^1
/// let (cast, report) = cast("up.weight", &weight, Fp4Format::NvFp4)?;
/// assert_eq!((report.blocks, report.changed_values), (2, 0));
/// assert_eq!(cast.dequantize(), weight.dequantize());
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
///
/// # Errors
/// [`FormatError::Indivisible`] of the weight if the blocks do not fit the columns.
pub fn cast(
    name: &str,
    weight: &Fp4Weight<'_>,
    format: Fp4Format,
) -> Result<(Fp4Weight<'static>, CastReport), CheckpointError> {
    let block_size = format.row().block_size;
    let cols = weight.cols();
    if !cols.is_multiple_of(block_size) {
        let problem = FormatError::Indivisible { cols, block_size };
        return Err(CheckpointError::tensor(Path::new(""), name, problem));
    }
    check(name, weight)?;
    let (codes, scales, multipliers, report) = match format {
        _ if weight.format == format && block_size <= weight.block_size => {
            divided(weight, block_size)
        }
        Fp4Format::NvFp4 => to_nvfp4(weight),
        Fp4Format::MxFp4 => to_mxfp4(weight),
    };
    let scaled = format.row().tensor_scale;
    let cast = Fp4Weight {
        format,
        block_size,
        shape: weight.shape.clone(),
        transposed: weight.transposed,
        storage: Storage::Rows,
        codes: codes.into(),
        scales: scales.into(),
        tensor_scale: scaled.then(|| TensorScale::Multiplier(Numbers::new(&multipliers))),
        hadamard: weight.hadamard,
        order: Order::ElementFirst,
    };
    Ok((cast, report))
}

/// Scales that are NaN, negative or not finite have no counterpart.
fn check(name: &str, weight: &Fp4Weight<'_>) -> Result<(), CheckpointError> {
    let blocks = weight.cols() / weight.block_size;
    let multipliers = weight.multipliers();
    // GGUF states a tensor scale with any format.
    check_scales(weight.format, blocks, &weight.plain_scales(), &[])
        .and_then(|()| check_scales(Fp4Format::NvFp4, blocks, &[], &multipliers))
        .map_err(|problem| CheckpointError::tensor(Path::new(""), name, problem))
}

type Cast = (Vec<u8>, Vec<u8>, Vec<f32>, CastReport);

/// The 4-bit code of a position.
fn code(codes: &[u8], at: usize) -> u8 {
    codes[at / 2] >> (4 * (at % 2)) & 0xF
}

/// The values of a run in f64, where every product of code, block scale and tensor scale is exact.
fn values(
    weight: &Fp4Weight<'_>,
    codes: &[u8],
    scales: &[u8],
    g: f64,
    run: std::ops::Range<usize>,
) -> Vec<f64> {
    let row = weight.format.row();
    let value = |at: usize| {
        let scale = row.block_scale.decode(scales[at / weight.block_size]);
        f64::from(E2M1.decode(code(codes, at))) * f64::from(scale) * g
    };
    run.map(value).collect()
}

/// Writes the codes of a block; how many of its values change.
fn requantize(values: &[f64], scale: f64, codes: &mut Vec<u8>) -> usize {
    let quantized: Vec<u8> =
        values.iter().map(|value| E2M1.encode((value / scale) as f32)).collect();
    codes.extend(quantized.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4));
    let changed = |(value, code): (&f64, &u8)| f64::from(E2M1.decode(*code)) * scale != *value;
    values.iter().zip(&quantized).filter(|pair| changed(*pair)).count()
}

/// The same in smaller blocks, each with the scale of the block that it is part of.
fn divided(weight: &Fp4Weight<'_>, block_size: usize) -> Cast {
    let parts = weight.block_size / block_size;
    let repeated = |&scale: &u8| std::iter::repeat_n(scale, parts);
    let scales: Vec<u8> = weight.plain_scales().iter().flat_map(repeated).collect();
    let report = CastReport { blocks: scales.len() as u64, ..CastReport::default() };
    (weight.plain_codes().into_owned(), scales, weight.multipliers(), report)
}

fn to_nvfp4(weight: &Fp4Weight<'_>) -> Cast {
    let (old_codes, old_scales) = (weight.plain_codes(), weight.plain_scales());
    let matrix = weight.rows() * weight.cols();
    let given = weight.multipliers();
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    let (mut multipliers, mut report) = (Vec::new(), CastReport::default());
    for (stack, given) in given.into_iter().enumerate() {
        let begin = stack * matrix;
        let blocks = || (begin..begin + matrix).step_by(weight.block_size);
        let is_zero = |at: usize| {
            (at..at + weight.block_size).all(|at| E2M1.decode(code(&old_codes, at)) == 0.0)
        };
        let exponent = |at: usize| i32::from(old_scales[at / weight.block_size]) - E8M0.bias;
        let nonzero = blocks().filter(|&at| !is_zero(at)).map(exponent);
        let top = nonzero.max().unwrap_or(TOP);
        let g = exp2(top - TOP);
        multipliers.push(g as f32 * given);
        for at in blocks() {
            let shift = exponent(at) - top + TOP;
            for half in (at..at + weight.block_size).step_by(NVFP4_BLOCK) {
                let run = half..half + NVFP4_BLOCK;
                let zero = run.clone().all(|at| E2M1.decode(code(&old_codes, at)) == 0.0);
                if zero || (-9..=TOP).contains(&shift) {
                    scales.push(E4M3.encode(exp2(shift.clamp(-9, TOP)) as f32));
                    codes.extend(&old_codes[half / 2..(half + NVFP4_BLOCK) / 2]);
                    report.count(0);
                } else {
                    let values = values(weight, &old_codes, &old_scales, 1.0, run);
                    let amax = values.iter().fold(0.0_f64, |amax, value| amax.max(value.abs()));
                    let scale = E4M3.encode((amax / 6.0 / g) as f32).max(1);
                    let product = f64::from(E4M3.decode(scale)) * g;
                    scales.push(scale);
                    report.count(requantize(&values, product, &mut codes));
                }
            }
        }
    }
    (codes, scales, multipliers, report)
}

fn to_mxfp4(weight: &Fp4Weight<'_>) -> Cast {
    let (old_codes, old_scales) = (weight.plain_codes(), weight.plain_scales());
    let matrix = weight.rows() * weight.cols();
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    let mut report = CastReport::default();
    for (stack, g) in weight.multipliers().into_iter().enumerate() {
        let begin = stack * matrix;
        for at in (begin..begin + matrix).step_by(MXFP4_BLOCK) {
            let run = at..at + MXFP4_BLOCK;
            let values = values(weight, &old_codes, &old_scales, f64::from(g), run);
            let exponent = best_exponent(&values);
            scales.push((exponent + E8M0.bias) as u8);
            report.count(requantize(&values, exp2(exponent), &mut codes));
        }
    }
    (codes, scales, Vec::new(), report)
}

/// The power of two that makes the values elements, or comes nearest to that.
fn best_exponent(values: &[f64]) -> i32 {
    let amax = values.iter().fold(0.0_f64, |amax, value| amax.max(value.abs()));
    if amax == 0.0 || !amax.is_finite() {
        return 0;
    }
    // 6 is the largest element: below amax / 8 the largest value is cut off by a quarter and more,
    // above amax / 0.5 it is lost.
    let floor = amax.log2().floor() as i32;
    let candidates = (floor - 3..=floor + 1).map(|exponent| exponent.clamp(-E8M0.bias, E8M0.bias));
    let error = |exponent: i32| {
        let mut codes = Vec::with_capacity(values.len() / 2);
        requantize(values, exp2(exponent), &mut codes);
        let error = |(at, value): (usize, &f64)| {
            let error = f64::from(E2M1.decode(code(&codes, at))) * exp2(exponent) - value;
            error * error
        };
        values.iter().enumerate().map(error).sum::<f64>()
    };
    let mut best = (f64::INFINITY, 0);
    for exponent in candidates {
        let found = error(exponent);
        if found < best.0 {
            best = (found, exponent);
        }
    }
    best.1
}

/// 2^exponent, exact for what the formats hold.
fn exp2(exponent: i32) -> f64 {
    f64::from_bits(((1023 + i64::from(exponent)) as u64) << 52)
}

/// A weight whose tensor scale is folded into its block scales.
///
/// Exact where every product of block scale and tensor scale is an E4M3 number: for a tensor scale
/// that is a power of two in range. Otherwise each product is rounded to the nearest, the codes
/// stay, and the values of such blocks change.
///
/// ```
/// use burn_fp4_checkpoints::{Fp4Weight, Numbers, TensorScale, cast::fold};
/// use burn_fp4_formats::Fp4Format;
///
/// let mut weight = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![1, 16], false, false);
/// (weight.codes, weight.scales) = (vec![0x22; 8].into(), vec![0x38].into()); // 16 times 1 x 1
/// weight.tensor_scale = Some(TensorScale::Multiplier(Numbers::new(&[0.5])));
/// let (folded, report) = fold("up.weight", &weight)?;
/// assert!(folded.tensor_scale.is_none() && report.changed_values == 0);
/// assert_eq!(folded.dequantize(), [0.5; 16]);
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
///
/// # Errors
/// A scale that is NaN, negative or not finite.
pub fn fold(
    name: &str,
    weight: &Fp4Weight<'_>,
) -> Result<(Fp4Weight<'static>, CastReport), CheckpointError> {
    check(name, weight)?;
    let old = weight.plain_scales();
    let matrix = weight.rows() * weight.cols() / weight.block_size;
    let multipliers = weight.multipliers();
    let codes = weight.plain_codes();
    let grid = weight.format.row().block_scale;
    let mut report = CastReport::default();
    let mut scales = Vec::with_capacity(old.len());
    for (at, &scale) in old.iter().enumerate() {
        let product = f64::from(grid.decode(scale)) * f64::from(multipliers[at / matrix]);
        let folded = grid.encode(product as f32);
        scales.push(folded);
        let exact = f64::from(grid.decode(folded)) == product;
        let block = at * weight.block_size..(at + 1) * weight.block_size;
        let nonzero = block.filter(|&at| E2M1.decode(code(&codes, at)) != 0.0).count();
        report.count(if exact { 0 } else { nonzero });
    }
    let folded = Fp4Weight {
        format: weight.format,
        block_size: weight.block_size,
        shape: weight.shape.clone(),
        transposed: weight.transposed,
        storage: Storage::Rows,
        codes: codes.to_vec().into(),
        scales: scales.into(),
        tensor_scale: None,
        hadamard: weight.hadamard,
        order: Order::ElementFirst,
    };
    Ok((folded, report))
}

/// Sums the squares of what differs between a weight and the same weight in another form, and of
/// the values of the first, in f64.
///
/// ```
/// use burn_fp4_checkpoints::{Fp4Weight, cast::squared_difference};
/// use burn_fp4_formats::Fp4Format;
///
/// let weight = |scale: u8| {
///     let mut weight = Fp4Weight::outline(Fp4Format::MxFp4, 32, vec![1, 32], false, false);
///     (weight.codes, weight.scales) = (vec![0x22; 16].into(), vec![scale].into());
///     weight
/// };
/// assert_eq!(squared_difference(&weight(128), &weight(127)), [32.0, 4.0 * 32.0]); // 2 and 1
/// ```
///
/// # Panics
/// If they have different shapes.
#[must_use]
pub fn squared_difference(weight: &Fp4Weight<'_>, other: &Fp4Weight<'_>) -> [f64; 2] {
    assert_eq!(weight.shape, other.shape, "two forms of a weight");
    let both = [weight, other];
    let codes = both.map(Fp4Weight::plain_codes);
    let scales = both.map(Fp4Weight::plain_scales);
    let multipliers = both.map(Fp4Weight::multipliers);
    let matrix = weight.rows() * weight.cols();
    let mut sums = [0.0; 2];
    for at in (0..weight.stacked() * matrix).step_by(NVFP4_BLOCK) {
        let run = at..at + NVFP4_BLOCK;
        let [exact, other] = [0, 1].map(|form| {
            let g = f64::from(multipliers[form][at / matrix]);
            values(both[form], &codes[form], &scales[form], g, run.clone())
        });
        for (exact, other) in exact.iter().zip(&other) {
            sums[0] += (other - exact).powi(2);
            sums[1] += exact.powi(2);
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row of blocks with these scales.
    fn row(format: Fp4Format, block_size: usize, scales: &[u8]) -> Fp4Weight<'static> {
        let cols = block_size * scales.len();
        let mut row = Fp4Weight::outline(format, block_size, vec![1, cols], false, false);
        row.codes = (0..cols / 2).map(|at| 7 * at as u8).collect();
        row.scales = scales.to_vec().into();
        row
    }

    #[test]
    fn a_weight_that_has_the_format_keeps_its_values() {
        let (nv, mx) = (Fp4Format::NvFp4, Fp4Format::MxFp4);
        for (format, block_size, scales) in
            [(nv, 16, [0x38, 0x31]), (nv, 32, [0x38, 0x31]), (mx, 32, [127, 125])]
        {
            let mut given = row(format, block_size, &scales);
            let scale = TensorScale::Multiplier(Numbers::new(&[0.3]));
            given.tensor_scale = format.row().tensor_scale.then_some(scale);
            let (found, report) = cast("w", &given, format).expect("a cast");
            assert_eq!(
                found.dequantize(),
                given.dequantize(),
                "{format} in blocks of {block_size}"
            );
            assert_eq!(found.block_size, format.row().block_size);
            let blocks = given.cols() / found.block_size;
            let unchanged = CastReport { blocks: blocks as u64, ..CastReport::default() };
            assert_eq!(report, unchanged);
        }
    }
}
