//! Matrices of signed bytes: an output layer in 28 % of its memory.

use core::array::from_fn;

use burn_fp4_formats::check_length;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::arch::arch;
use super::decode::{AHEAD, prefetch};
use super::dots::total;
use super::int8_input::LANES;
use super::int8_instructions::Instructions;
use super::int8_lanes::{LaneWork, Lanes};
use super::panels::{self, PANEL};
use super::threads::{Work, for_each_chunk, per_microsecond, rows_of_stretch};
use crate::activations::Activations;
use crate::error::SearchError;

/// Number of neighbours in a row that share a scale.
pub const INT8_BLOCK: usize = 32;

/// Number of rows of the input that are multiplied while a row of the weight is decoded.
const INPUTS: usize = 4;
/// Number of bytes per parallel task, of one panel at least: a part of the second-level cache.
const TASK_BYTES: usize = 1 << 15;
/// Number of blocks whose scales lie in a line of the cache.
const LINE_BLOCKS: usize = 16;
/// Number of blocks that are multiplied together, if the input is rounded.
const PAIR: usize = 2;

/// Borrows a matrix of signed bytes, in row-major order.
///
/// ```
/// use burn_fp4_search::Activations;
/// use burn_fp4_search::host::{Int8Weight, int8_weight_matmul, quantize_int8};
///
/// let (codes, scales) = quantize_int8(&[254.0; 32])?;
/// assert_eq!((codes[0], scales[0]), (127, 2.0));
/// let weight = Int8Weight { codes: &codes, scales: &scales };
/// let mut output = [0.0];
/// int8_weight_matmul(&[0.5; 32], weight, [1, 32], Activations::F32, &mut output)?;
/// assert_eq!(output, [32.0 * 0.5 * 254.0]);
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Int8Weight<'a> {
    /// A value is its code times its scale.
    pub codes: &'a [i8],
    /// A scale for each [`INT8_BLOCK`] codes.
    pub scales: &'a [f32],
}

/// Rounds each value to the nearest of 255 multiples of its scale, 1/127 of the largest magnitude
/// in its block: codes, and scales. A block with a value that is not finite has a scale that is not
/// finite.
///
/// # Errors
/// The length of the values is not a multiple of [`INT8_BLOCK`].
pub fn quantize_int8(values: &[f32]) -> Result<(Vec<i8>, Vec<f32>), SearchError> {
    let (blocks, tail) = values.as_chunks::<INT8_BLOCK>();
    check_length("values", values.len() - tail.len(), values.len())?;
    let (mut codes, mut scales) = (vec![0; values.len()], vec![0.0; blocks.len()]);
    let (code_blocks, _) = codes.as_chunks_mut::<INT8_BLOCK>();
    const TASK: usize = TASK_BYTES / INT8_BLOCK;
    let outputs = code_blocks.par_chunks_mut(TASK).zip(scales.par_chunks_mut(TASK));
    blocks.par_chunks(TASK).zip(outputs).for_each(|(blocks, (codes, scales))| {
        arch().dispatch(Rounding { blocks, codes, scales });
    });
    Ok((codes, scales))
}

/// Rounds blocks.
struct Rounding<'a> {
    blocks: &'a [[f32; INT8_BLOCK]],
    codes: &'a mut [[i8; INT8_BLOCK]],
    scales: &'a mut [f32],
}

impl WithSimd for Rounding<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self { blocks, codes, scales } = self;
        for ((block, codes), scale) in blocks.iter().zip(codes).zip(scales) {
            // As bits, a NaN is larger than every number.
            let mut largest = 0;
            for value in block {
                largest = largest.max(value.abs().to_bits());
            }
            *scale = f32::from_bits(largest) / 127.0;
            let inverse = if *scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / *scale };
            for (code, value) in codes.iter_mut().zip(block) {
                *code = (value * inverse).round_ties_even() as i8;
            }
        }
    }
}

/// Computes `input x weight^T` for an input `[inputs, channels]` and a weight of `outputs` rows:
/// `[inputs, outputs]`. If the input is rounded, its blocks are as long as the weight's.
///
/// # Errors
/// A slice of the wrong length, or channels that are not a multiple of [`INT8_BLOCK`].
pub fn int8_weight_matmul(
    input: &[f32],
    weight: Int8Weight<'_>,
    [outputs, channels]: [usize; 2],
    activations: Activations,
    output: &mut [f32],
) -> Result<(), SearchError> {
    let inputs = input.len().checked_div(channels).unwrap_or(0);
    check_length("input", inputs * channels, input.len())?;
    check_length("output", inputs * outputs, output.len())?;
    check_length("codes", outputs * channels, weight.codes.len())?;
    check_length("scales", outputs * (channels / INT8_BLOCK), weight.scales.len())?;
    check_length("channels", channels / INT8_BLOCK * INT8_BLOCK, channels)?;
    if output.is_empty() {
        return Ok(());
    }
    // A row of the input has its products in this order in the output, too.
    let mut panels = Vec::new();
    let products = if inputs == 1 {
        &mut *output
    } else {
        panels = vec![0.0; outputs.next_multiple_of(PANEL) * inputs];
        &mut panels[..]
    };
    let rows = match inputs {
        // More rows wait for the memory less.
        1 => rows_of_stretch(outputs, channels, PANEL),
        _ => (TASK_BYTES / channels).max(1).next_multiple_of(PANEL),
    };
    let multiplications = outputs * channels * inputs;
    match activations {
        Activations::F32 | Activations::Fp8 | Activations::Fp8Rounded => {
            let task = |(): &mut (), task: usize, products: &mut [f32]| {
                let (first, inputs) = (task * rows, inputs);
                arch().dispatch(WeightRows {
                    input,
                    weight,
                    outputs,
                    channels,
                    first,
                    inputs,
                    products,
                });
            };
            let work = Work::new(multiplications, per_microsecond::SIGNED_BYTES);
            for_each_chunk(work, products, rows * inputs, || (), task);
        }
        Activations::Int8 => {
            let input = &RoundedInput::new(input, [inputs, channels]);
            let task = |(): &mut (), task: usize, products: &mut [f32]| {
                let first = task * rows;
                let rows = IntegerRows { input, weight, outputs, channels, first, products };
                Instructions::best().run(rows).expect("instructions that the processor has");
            };
            let work = Work::new(multiplications, per_microsecond::PACKED_INT8);
            for_each_chunk(work, products, rows * inputs, || (), task);
        }
    }
    if inputs > 1 {
        panels::write(&panels, inputs, output);
    }
    Ok(())
}

/// Computes the products of rows of the weight from `first` on.
struct WeightRows<'a> {
    input: &'a [f32],
    weight: Int8Weight<'a>,
    outputs: usize,
    channels: usize,
    first: usize,
    inputs: usize,
    /// `[panels, inputs, PANEL]`.
    products: &'a mut [f32],
}

impl WithSimd for WeightRows<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { input, weight, outputs, channels, first, inputs, products } = self;
        let (codes, _) = weight.codes.as_chunks::<INT8_BLOCK>();
        let blocks = channels / INT8_BLOCK;
        let last = outputs.min(first + products.len() / inputs);
        for row in first..last {
            let codes = &codes[row * blocks..][..blocks];
            let scales = &weight.scales[row * blocks..][..blocks];
            let (panel, lane) = ((row - first) / PANEL * PANEL, row % PANEL);
            for (from, input) in input.chunks(INPUTS * channels).enumerate() {
                let mut dots = [0.0; INPUTS];
                match input.len() / channels {
                    1 => dots[..1].copy_from_slice(&row_dots::<S, 1>(simd, input, codes, scales)),
                    2 => dots[..2].copy_from_slice(&row_dots::<S, 2>(simd, input, codes, scales)),
                    3 => dots[..3].copy_from_slice(&row_dots::<S, 3>(simd, input, codes, scales)),
                    _ => dots = row_dots::<S, INPUTS>(simd, input, codes, scales),
                }
                let to = INPUTS * from..inputs.min(INPUTS * (from + 1));
                for (to, dot) in to.zip(dots) {
                    products[panel * inputs + to * PANEL + lane] = dot;
                }
            }
        }
    }
}

/// Computes the products of `M` rows of the input with a row of the weight.
#[inline(always)]
fn row_dots<S: Simd, const M: usize>(
    simd: S,
    input: &[f32],
    codes: &[[i8; INT8_BLOCK]],
    scales: &[f32],
) -> [f32; M] {
    let channels = codes.len() * INT8_BLOCK;
    let inputs: [_; M] = from_fn(|row| {
        &input[row * channels..][..channels].as_chunks::<INT8_BLOCK>().0[..codes.len()]
    });
    let mut sums = [[simd.splat_f32s(0.0); 2]; M];
    for (at, (codes, scale)) in codes.iter().zip(scales).enumerate() {
        prefetch(codes, AHEAD);
        if at % LINE_BLOCKS == 0 {
            prefetch(&scales[at..], AHEAD / INT8_BLOCK * size_of::<f32>());
        }
        let mut values = [0f32; INT8_BLOCK];
        for (value, code) in values.iter_mut().zip(codes) {
            *value = f32::from(*code) * scale;
        }
        let values = S::as_simd_f32s(&values).0;
        for row in 0..M {
            let input = S::as_simd_f32s(&inputs[row][at]).0;
            for vector in 0..values.len() {
                let sum = &mut sums[row][vector % 2];
                *sum = simd.mul_add_f32s(values[vector], input[vector], *sum);
            }
        }
    }
    total::<S, M, 2>(simd, &sums)
}

/// Holds an input rounded to 8-bit integers. A block of zeros completes the last pair of a row.
struct RoundedInput {
    codes: Vec<[i8; INT8_BLOCK]>,
    /// The scales of a pair of blocks, for each lane of their products.
    scales: Vec<[f32; LANES]>,
    rows: usize,
    /// Number of pairs of a row.
    pairs: usize,
}

impl RoundedInput {
    fn new(input: &[f32], [rows, channels]: [usize; 2]) -> Self {
        let (blocks, pairs) = (channels / INT8_BLOCK, channels.div_ceil(PAIR * INT8_BLOCK));
        let mut codes = vec![[0; INT8_BLOCK]; rows * PAIR * pairs];
        let mut scales = vec![0.0; rows * PAIR * pairs];
        for row in 0..rows {
            let input = &input[row * channels..][..channels];
            let to = row * PAIR * pairs..row * PAIR * pairs + blocks;
            let (codes, scales) = (&mut codes[to.clone()], &mut scales[to]);
            arch().dispatch(Rounding { blocks: input.as_chunks().0, codes, scales });
        }
        let (pairs_of_scales, _) = scales.as_chunks::<PAIR>();
        let scales = pairs_of_scales.iter().map(lane_scales).collect();
        Self { codes, scales, rows, pairs }
    }

    fn row(&self, row: usize) -> (&[[i8; 4 * LANES]], &[[f32; LANES]]) {
        let codes = &self.codes[row * PAIR * self.pairs..][..PAIR * self.pairs];
        let (codes, _) = codes.as_flattened().as_chunks();
        (codes, &self.scales[row * self.pairs..][..self.pairs])
    }
}

/// Returns the scales of two blocks for each lane of their products.
#[inline(always)]
fn lane_scales([first, second]: &[f32; PAIR]) -> [f32; LANES] {
    let mut scales = [*first; LANES];
    scales[LANES / PAIR..].fill(*second);
    scales
}

/// Computes the products of rows of the weight from `first` on, with a rounded input. Sums of
/// products of codes are exact, and f32 operations have one order, on every processor.
struct IntegerRows<'a> {
    input: &'a RoundedInput,
    weight: Int8Weight<'a>,
    outputs: usize,
    channels: usize,
    first: usize,
    /// `[panels, inputs, PANEL]`.
    products: &'a mut [f32],
}

impl LaneWork for IntegerRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { input, weight, outputs, channels, first, products } = self;
        let (inputs, blocks) = (input.rows, channels / INT8_BLOCK);
        let last = outputs.min(first + products.len() / inputs);
        for row in first..last {
            let codes = &weight.codes[row * channels..][..channels];
            let scales = &weight.scales[row * blocks..][..blocks];
            let (panel, lane) = ((row - first) / PANEL * PANEL, row % PANEL);
            for to in 0..inputs {
                let dot = integer_row_dot(lanes, input.row(to), codes, scales);
                products[panel * inputs + to * PANEL + lane] = dot;
            }
        }
    }
}

/// Adds the products of two blocks to the sums of their lanes.
#[inline(always)]
fn add_pair<L: Lanes>(
    lanes: L,
    sums: L::Floats,
    dots: L::Ints,
    scales: &[f32; PAIR],
    input_scales: &[f32; LANES],
) -> L::Floats {
    let scales = lanes.mul(lanes.floats(&lane_scales(scales)), lanes.floats(input_scales));
    lanes.mul_add(lanes.to_floats(dots), scales, sums)
}

/// Computes the product of a row of the input with a row of the weight.
#[inline(always)]
fn integer_row_dot<L: Lanes>(
    lanes: L,
    (inputs, input_scales): (&[[i8; 4 * LANES]], &[[f32; LANES]]),
    codes: &[i8],
    scales: &[f32],
) -> f32 {
    let ((codes, last_codes), (pairs, last_scale)) = (codes.as_chunks(), scales.as_chunks());
    let mut sums = lanes.repeat_float(0.0);
    for (at, (codes, scales)) in codes.iter().zip(pairs).enumerate() {
        prefetch(codes, AHEAD);
        if at % (LINE_BLOCKS / PAIR) == 0 {
            prefetch(scales, AHEAD / INT8_BLOCK * size_of::<f32>());
        }
        let dots = lanes.integer_dot(lanes.bytes(codes), lanes.bytes(&inputs[at]));
        sums = add_pair(lanes, sums, dots, scales, &input_scales[at]);
    }
    if let [scale] = last_scale {
        let at = codes.len();
        let mut block = [0; 4 * LANES];
        block[..INT8_BLOCK].copy_from_slice(last_codes);
        let dots = lanes.integer_dot(lanes.bytes(&block), lanes.bytes(&inputs[at]));
        sums = add_pair(lanes, sums, dots, &[*scale, 0.0], &input_scales[at]);
    }
    let mut sums = lanes.store(sums);
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            sums[lane] += sums[lane + half];
        }
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Includes fewer rows than a task and a panel have, several tasks for one input and for more,
    /// and rows that are longer than a task.
    #[test]
    fn products_are_those_of_the_codes_times_their_scales() {
        for (inputs, outputs, channels) in
            [(1, 3, 32), (3, 40, 96), (1, 701, 576), (9, 301, 64), (5, 701, 576), (2, 17, 32_800)]
        {
            let weight: Vec<_> =
                (0..outputs * channels).map(|at| (at * 37 % 1009) as f32 / 250.0 - 2.0).collect();
            let input: Vec<_> =
                (0..inputs * channels).map(|at| (at * 13 % 101) as f32 / 7.0 - 6.0).collect();
            let (codes, scales) = quantize_int8(&weight).unwrap();
            let value = |at: usize| f64::from(codes[at]) * f64::from(scales[at / INT8_BLOCK]);
            for (at, expected) in weight.iter().enumerate() {
                let half_a_step = 0.5001 * f64::from(scales[at / INT8_BLOCK]);
                assert!((value(at) - f64::from(*expected)).abs() <= half_a_step);
            }
            let view = Int8Weight { codes: &codes, scales: &scales };
            let (input_codes, input_scales) = quantize_int8(&input).unwrap();
            for activations in [Activations::F32, Activations::Int8] {
                let mut found = vec![f32::NAN; inputs * outputs];
                let (shape, output) = ([outputs, channels], &mut found);
                rayon::scope(|_| {
                    int8_weight_matmul(&input, view, shape, activations, output).unwrap();
                });
                for (at, found) in found.into_iter().enumerate() {
                    let (row, output) = (at / outputs, at % outputs);
                    let terms = (0..channels).map(|channel| {
                        let at = row * channels + channel;
                        let factor = match activations {
                            Activations::F32 | Activations::Fp8 | Activations::Fp8Rounded => {
                                f64::from(input[at])
                            }
                            Activations::Int8 => {
                                let scale = f64::from(input_scales[at / INT8_BLOCK]);
                                f64::from(input_codes[at]) * scale
                            }
                        };
                        value(output * channels + channel) * factor
                    });
                    let expected: f64 = terms.sum();
                    assert!((f64::from(found) - expected).abs() < 1e-5 * channels as f64, "{at}");
                }
            }
        }
    }

    #[test]
    fn products_of_a_rounded_input_have_the_same_bits_with_every_instruction_set() {
        let (rows, outputs, channels) = (2, 19, 160);
        // The largest codes of both signs, and values that are not finite.
        let codes: Vec<i8> =
            (0..outputs * channels).map(|at| [127, -127, 5, -90, 0][at * 7 % 11 % 5]).collect();
        let scales: Vec<f32> =
            (0..outputs * channels / INT8_BLOCK).map(|at| 0.01 * (at % 13) as f32).collect();
        let mut input: Vec<f32> =
            (0..rows * channels).map(|at| [1.0, -1.0, 0.3, 0.0][at * 5 % 7 % 4]).collect();
        input[channels + 3] = f32::INFINITY;
        let input = RoundedInput::new(&input, [rows, channels]);
        let weight = Int8Weight { codes: &codes, scales: &scales };
        let products = |instructions: &Instructions| {
            let mut products = vec![0.0; outputs.next_multiple_of(PANEL) * rows];
            let (input, first, to) = (&input, 0, &mut products[..]);
            let rows = IntegerRows { input, weight, outputs, channels, first, products: to };
            instructions.run(rows)?;
            let nan = products.iter().filter(|product| product.is_nan()).count();
            assert_eq!(nan, outputs, "the second row");
            // A NaN may have any bits.
            let bits = |product: f32| (!product.is_nan()).then(|| product.to_bits());
            Some(products.into_iter().map(bits).collect::<Vec<_>>())
        };
        let found: Vec<_> = Instructions::ALL.iter().filter_map(products).collect();
        for other in &found {
            assert_eq!(*other, found[0]);
        }
    }

    #[test]
    fn blocks_of_zeros_and_of_values_that_are_not_finite_keep_what_they_are() {
        let mut values = vec![0.0; 3 * INT8_BLOCK];
        (values[40], values[70]) = (f32::NAN, f32::INFINITY);
        let (codes, scales) = quantize_int8(&values).unwrap();
        assert_eq!((codes[0], scales[0]), (0, 0.0));
        assert!(scales[1].is_nan() && scales[2].is_infinite());
        assert!(quantize_int8(&[1.0; 33]).is_err());
    }
}
