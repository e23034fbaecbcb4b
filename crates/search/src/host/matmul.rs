//! The product of an input and a packed weight, which is decoded on the fly.

use core::array::from_fn;

use burn_fp4_formats::check_length;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::arch::arch;
use super::decode::{GROUP, PackedRow};
use super::dequantize::PackedView;
use super::element::HostElement;
use super::view::View;
use crate::error::SearchError;

/// Number of packed rows that are decoded, and multiplied by rows of the input, at a time.
const ROWS: usize = 4;
/// Number of rows of the input that are multiplied at a time.
const INPUTS: usize = 4;
/// Number of packed rows that are decoded before the input is read again.
const DECODED: usize = 4 * ROWS;
/// Number of packed rows decoded side by side if the input is read once.
const TOGETHER: usize = 2;
/// Number of packed rows per parallel task.
const TASK_ROWS: usize = 2 * DECODED;
/// Number of multiplications that one thread completes before another one would have woken up:
/// about 10 us.
const ONE_THREAD: usize = 1 << 17;

/// Computes `input x weight^T` for an input `[inputs, channels]` and a packed weight of `outputs`
/// rows of `channels` elements, without its dense values: `[inputs, outputs]`, summed in f32 and
/// rounded once.
///
/// ```
/// use burn_fp4_search::host::matmul;
/// use burn_fp4_search::{Fp4Scheme, quantize};
///
/// let weight = quantize(&[1.0; 2 * 16], 2, 16, &Fp4Scheme::nvfp4())?;
/// let mut output = [0.0; 2];
/// matmul(&[0.5; 16], (&weight).into(), [2, 16], &mut output)?;
/// assert_eq!(output, [8.0, 8.0]);
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
///
/// # Errors
/// A block size that the format does not allow or that does not divide the channels, or a slice of
/// the wrong length.
pub fn matmul<T: HostElement>(
    input: &[T],
    weight: PackedView<'_>,
    [outputs, channels]: [usize; 2],
    output: &mut [T],
) -> Result<(), SearchError> {
    weight.check(View::rows(outputs, channels))?;
    let inputs = input.len().checked_div(channels).unwrap_or(0);
    check_length("input", inputs * channels, input.len())?;
    check_length("output", inputs * outputs, output.len())?;
    if output.is_empty() {
        return Ok(());
    }
    let input = Interleaved::new(input, inputs, channels);
    let products = multiply(&input, weight, [outputs, channels]);
    if inputs == 1 {
        T::write(&products, output);
        return Ok(());
    }
    output.par_chunks_mut(outputs).enumerate().for_each(|(row, output)| {
        let values: Vec<_> = products.iter().skip(row).step_by(inputs).copied().collect();
        T::write(&values, output);
    });
    Ok(())
}

/// Computes `weight x input^T`, `[outputs, inputs]`. Not generic, so that it is compiled once.
fn multiply(
    input: &Interleaved,
    weight: PackedView<'_>,
    [outputs, channels]: [usize; 2],
) -> Vec<f32> {
    let inputs = input.rows;
    // A row for each row of the weight: the tasks write contiguous memory.
    let mut products = vec![0.0; outputs * inputs];
    // If the input is read once, decoded values are not kept.
    let rows = if inputs <= INPUTS { 0 } else { DECODED };
    let memory = || vec![0.0; rows * input.len];
    let multiply = |decoded: &mut Vec<f32>, first, products: &mut [f32]| {
        arch().dispatch(Products { input, weight, channels, first, decoded, products });
    };
    if outputs * channels * inputs <= ONE_THREAD {
        multiply(&mut memory(), 0, &mut products);
    } else {
        let tasks = products.par_chunks_mut(TASK_ROWS * inputs).enumerate();
        tasks.for_each_init(memory, |decoded, (task, products)| {
            multiply(decoded, task * TASK_ROWS, products);
        });
    }
    products
}

/// Holds an input in f32, in the order of decoded codes: of every 32 channels the even ones first.
/// Zeros complete the last group.
struct Interleaved {
    values: Vec<f32>,
    rows: usize,
    /// Number of values of a row.
    len: usize,
}

impl Interleaved {
    fn new<T: HostElement>(input: &[T], rows: usize, channels: usize) -> Self {
        let len = channels.next_multiple_of(GROUP);
        let mut values = vec![0.0; rows * len];
        let row = |(values, input): (&mut [f32], &[T])| {
            for (values, input) in values.chunks_mut(GROUP).zip(input.chunks(GROUP)) {
                let (even, odd) = values.split_at_mut(GROUP / 2);
                let pairs = input.chunks_exact(2).zip(even.iter_mut().zip(odd));
                for (pair, (even, odd)) in pairs {
                    (*even, *odd) = (pair[0].to_f32(), pair[1].to_f32());
                }
            }
        };
        if rows * len <= ONE_THREAD {
            values.chunks_mut(len).zip(input.chunks(channels)).for_each(row);
        } else {
            values.par_chunks_mut(len).zip(input.par_chunks(channels)).for_each(row);
        }
        Self { values, rows, len }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.len..][..self.len]
    }
}

/// Computes the products of packed rows from `first` on.
struct Products<'a> {
    input: &'a Interleaved,
    weight: PackedView<'a>,
    channels: usize,
    first: usize,
    /// Memory for some decoded rows.
    decoded: &'a mut [f32],
    products: &'a mut [f32],
}

impl WithSimd for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.weight.block_size {
            GROUP => self.in_blocks::<S, 1>(simd),
            _ => self.in_blocks::<S, 2>(simd),
        }
    }
}

impl Products<'_> {
    /// Multiplies a weight with `BLOCKS` blocks in a group.
    #[inline(always)]
    fn in_blocks<S: Simd, const BLOCKS: usize>(self, simd: S) {
        match self.input.rows {
            1 => self.straight::<S, BLOCKS, 1>(simd),
            2 => self.straight::<S, BLOCKS, 2>(simd),
            3 => self.straight::<S, BLOCKS, 3>(simd),
            INPUTS => self.straight::<S, BLOCKS, INPUTS>(simd),
            _ => self.decoded::<S, BLOCKS>(simd),
        }
    }

    /// Multiplies an input with few rows, so that nothing decoded is read again.
    #[inline(always)]
    fn straight<S: Simd, const BLOCKS: usize, const M: usize>(self, simd: S) {
        let Self { input, weight, channels, first, products, .. } = self;
        let inputs: [_; M] = from_fn(|row| input.row(row));
        for (part, products) in products.chunks_mut(TOGETHER * M).enumerate() {
            let (first, rows) = (first + part * TOGETHER, products.len() / M);
            // Rows beyond the last repeat it.
            let packed: [_; TOGETHER] = from_fn(|index| {
                PackedRow::<BLOCKS>::new(weight, first + index.min(rows - 1), channels)
            });
            let sums = straight_dots::<S, BLOCKS, M>(simd, &packed, inputs);
            for (to, sums) in sums.into_iter().enumerate() {
                for (index, (sum, row)) in sums.into_iter().zip(&packed).enumerate().take(rows) {
                    products[index * M + to] = sum * row.tensor_scale;
                }
            }
        }
    }

    /// Multiplies an input with any number of rows.
    #[inline(always)]
    fn decoded<S: Simd, const BLOCKS: usize>(self, simd: S) {
        let Self { input, weight, channels, first, decoded, products } = self;
        for (part, products) in products.chunks_mut(DECODED * input.rows).enumerate() {
            let first = first + part * DECODED;
            let rows = products.len() / input.rows;
            let mut scales = [0.0; DECODED];
            for (row, decoded) in decoded.chunks_mut(input.len).take(rows).enumerate() {
                let packed = PackedRow::<BLOCKS>::new(weight, first + row, channels);
                scales[row] = packed.tensor_scale;
                for (group, decoded) in decoded.as_chunks_mut().0.iter_mut().enumerate() {
                    *decoded = packed.group(simd, group);
                }
            }
            for from in (0..input.rows).step_by(INPUTS) {
                for row in (0..rows).step_by(ROWS) {
                    // Rows beyond the last repeat it.
                    let decoded: [&[f32]; ROWS] = from_fn(|index| {
                        let row = (row + index).min(rows - 1);
                        &decoded[row * input.len..][..input.len]
                    });
                    let (products, scales) = (&mut products[row * input.rows..], &scales[row..]);
                    let mut store = |to: usize, sums: [f32; ROWS]| {
                        for (index, sum) in sums.into_iter().enumerate().take(rows - row) {
                            products[index * input.rows + to] = sum * scales[index];
                        }
                    };
                    if from + INPUTS <= input.rows {
                        let rows = from_fn(|index| input.row(from + index));
                        let sums = dots::<S, INPUTS>(simd, decoded, rows);
                        sums.into_iter().enumerate().for_each(|(at, sums)| store(from + at, sums));
                    } else {
                        for to in from..input.rows {
                            let [sums] = dots::<S, 1>(simd, decoded, [input.row(to)]);
                            store(to, sums);
                        }
                    }
                }
            }
        }
    }
}

/// Sums the products of each row of the input with each row of the weight.
#[inline(always)]
fn dots<S: Simd, const M: usize>(
    simd: S,
    weights: [&[f32]; ROWS],
    inputs: [&[f32]; M],
) -> [[f32; ROWS]; M] {
    // Both lengths are multiples of any vector.
    let weights = weights.map(|row| S::as_simd_f32s(row).0);
    let inputs = inputs.map(|row| S::as_simd_f32s(row).0);
    let len = weights[0].len();
    let (weights, inputs) = (weights.map(|row| &row[..len]), inputs.map(|row| &row[..len]));
    let mut sums = [[simd.splat_f32s(0.0); ROWS]; M];
    for k in 0..len {
        for (sums, input) in sums.iter_mut().zip(&inputs) {
            for (sum, weight) in sums.iter_mut().zip(&weights) {
                *sum = simd.mul_add_f32s(weight[k], input[k], *sum);
            }
        }
    }
    reduced::<S, ROWS, M>(simd, sums)
}

/// Computes [`dots`] of rows that are decoded on the fly: the same sums, in the same order.
#[inline(always)]
fn straight_dots<S: Simd, const BLOCKS: usize, const M: usize>(
    simd: S,
    weights: &[PackedRow<'_, BLOCKS>; TOGETHER],
    inputs: [&[f32]; M],
) -> [[f32; TOGETHER]; M] {
    let mut sums = [[simd.splat_f32s(0.0); TOGETHER]; M];
    let mut add = |row: usize, decoded: [f32; GROUP], inputs: [&[f32; GROUP]; M]| {
        let decoded = S::as_simd_f32s(&decoded).0;
        for to in 0..M {
            let input = S::as_simd_f32s(inputs[to]).0;
            for k in 0..decoded.len() {
                sums[to][row] = simd.mul_add_f32s(decoded[k], input[k], sums[to][row]);
            }
        }
    };
    // Known lengths avoid bounds checks in the loop.
    let whole = weights[0].codes.len() / (GROUP / 2);
    let codes: [_; TOGETHER] = from_fn(|row| &weights[row].codes.as_chunks().0[..whole]);
    let scales: [_; TOGETHER] = from_fn(|row| &weights[row].scales.as_chunks().0[..whole]);
    let groups = inputs.map(|row| &row.as_chunks().0[..whole]);
    for group in 0..whole {
        for row in 0..TOGETHER {
            let decoded = weights[row].decode(simd, &codes[row][group], &scales[row][group]);
            add(row, decoded, groups.map(|row| &row[group]));
        }
    }
    if inputs[0].len() > whole * GROUP {
        for row in 0..TOGETHER {
            let decoded = weights[row].group(simd, whole);
            add(row, decoded, inputs.map(|row| row.last_chunk().expect("a whole group")));
        }
    }
    reduced::<S, TOGETHER, M>(simd, sums)
}

/// Sums each vector. Loops instead of `map`: its closures are compiled without the instructions of
/// `S`, so that every intrinsic in them is a call.
#[inline(always)]
fn reduced<S: Simd, const N: usize, const M: usize>(
    simd: S,
    vectors: [[S::f32s; N]; M],
) -> [[f32; N]; M] {
    let mut sums = [[0.0; N]; M];
    for (sums, vectors) in sums.iter_mut().zip(&vectors) {
        for (sum, vector) in sums.iter_mut().zip(vectors) {
            *sum = simd.reduce_sum_f32s(*vector);
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use burn_fp4_formats::Fp4Format;

    use super::*;

    /// Includes a last group that is not whole, and fewer last rows of the weight than are decoded
    /// together.
    #[test]
    fn sums_do_not_depend_on_how_many_rows_there_are() {
        const INPUT_ROWS: usize = 9;
        // The last shape exceeds the limit of one thread.
        let shapes = [(16, 80, 37), (16, 96, 40), (32, 96, 37), (16, 4096, 37)];
        for (block_size, channels, outputs) in shapes {
            let codes: Vec<_> =
                (0..outputs * channels / 2).map(|at| (at * 37 % 251) as u8).collect();
            let blocks = outputs * channels / block_size;
            let scales: Vec<_> = (0..blocks).map(|at| 0x30 + (at * 7 % 32) as u8).collect();
            let tensor_scale: Vec<_> = (0..outputs).map(|row| 1.0 / (row + 3) as f32).collect();
            let weight = PackedView {
                format: Fp4Format::NvFp4,
                block_size,
                codes: &codes,
                scales: &scales,
                tensor_scale: &tensor_scale,
            };
            let input: Vec<_> =
                (0..INPUT_ROWS * channels).map(|at| (at * 13 % 101) as f32 / 7.0 - 6.0).collect();
            let of = |rows: usize| {
                let mut output = vec![f32::NAN; rows * outputs];
                let input = &input[..rows * channels];
                matmul(input, weight, [outputs, channels], &mut output).unwrap();
                output
            };
            let all = of(INPUT_ROWS);
            assert!(all.iter().all(|sum| sum.is_finite()));
            for rows in 1..INPUT_ROWS {
                assert_eq!(of(rows), all[..rows * outputs], "{rows} x {channels}, {block_size}");
            }
        }
    }
}
