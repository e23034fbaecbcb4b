//! The product of an input and a packed weight, which is decoded on the fly.

use core::array::from_fn;

use burn_fp4_formats::check_length;
use pulp::{Simd, WithSimd};

use super::arch::arch;
use super::decode::{GROUP, PackedRow, prefetch, prefetch_distance};
use super::dense::{HostElement, View};
use super::dequantize::PackedView;
use super::int8_instructions::Instructions;
use super::int8_matmul::int8_matmul;
use super::panels::{self, PANEL};
use super::threads::{Work, for_each_chunk, per_microsecond, rows_of_stretch};
use crate::activations::Activations;
use crate::error::SearchError;

/// Number of packed rows that are decoded, and multiplied by rows of the input, at a time.
const ROWS: usize = 4;
/// Largest number of rows of the input for which nothing decoded is kept.
const INPUTS: usize = 4;
/// Number of packed rows that are decoded before the input is read again.
const DECODED: usize = PANEL;
/// Largest number of channels that are decoded at a time: of a few rows of the input they stay in
/// the first-level cache, of `DECODED` rows in the second.
const CHANNELS: usize = 768;
/// Largest number of rows of the input, whose sums and values stay in the second-level cache, for
/// which decoded channels are kept.
const INPUT_ROWS: usize = 64;
/// Largest number of lanes of f32.
const MAX_LANES: usize = 16;
/// Number of packed rows decoded side by side if the input is read once.
const TOGETHER: usize = 2;
/// Number of packed rows per parallel task for an input of many rows.
const TASK_ROWS: usize = 2 * DECODED;

/// Computes `input x weight^T` for an input `[inputs, channels]` and a packed weight of `outputs`
/// rows of `channels` elements, without its dense values: `[inputs, outputs]`, summed in f32 and
/// rounded once. A row of the output does not depend on how many there are.
///
/// ```
/// use burn_fp4_search::host::matmul;
/// use burn_fp4_search::{Activations, Fp4Scheme, quantize};
///
/// let weight = quantize(&[1.0; 2 * 16], 2, 16, &Fp4Scheme::nvfp4())?;
/// let mut output = [0.0; 2];
/// matmul(&[0.5; 16], (&weight).into(), [2, 16], Activations::F32, &mut output)?;
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
    activations: Activations,
    output: &mut [T],
) -> Result<(), SearchError> {
    weight.check(View::rows(outputs, channels))?;
    let inputs = input.len().checked_div(channels).unwrap_or(0);
    check_length("input", inputs * channels, input.len())?;
    check_length("output", inputs * outputs, output.len())?;
    if output.is_empty() {
        return Ok(());
    }
    if activations == Activations::Int8 {
        let instructions = Instructions::best();
        int8_matmul(instructions, input, weight, [outputs, channels], output);
        return Ok(());
    }
    let input = Interleaved::new(input, inputs, channels);
    let products = multiply(&input, weight, [outputs, channels]);
    panels::write(&products, inputs, output);
    Ok(())
}

/// Computes products `[panels, inputs, PANEL]`. Not generic, so that it is compiled once.
fn multiply(
    input: &Interleaved,
    weight: PackedView<'_>,
    [outputs, channels]: [usize; 2],
) -> Vec<f32> {
    let inputs = input.rows;
    let mut products = vec![0.0; outputs.next_multiple_of(DECODED) * inputs];
    let task_rows = match inputs {
        0..=INPUTS => rows_of_stretch(outputs, channels / 2, DECODED),
        _ => TASK_ROWS,
    };
    let multiply = |memory: &mut Memory, task: usize, products: &mut [f32]| {
        let first = task * task_rows;
        arch().dispatch(Products { input, weight, outputs, channels, first, memory, products });
    };
    let work = Work::new(outputs * channels * inputs, per_microsecond::PACKED);
    let memory = || Memory::new(input);
    for_each_chunk(work, &mut products, task_rows * inputs, memory, multiply);
    products
}

/// Memory of a thread. Empty if the input is read once, as then nothing decoded is kept.
struct Memory {
    /// A step of `DECODED` rows.
    decoded: Aligned,
    /// Sums of these rows with each row of the input, a vector each, between steps.
    sums: Aligned,
    /// Number of channels of a step.
    step: usize,
}

impl Memory {
    fn new(input: &Interleaved) -> Self {
        let steps = input.len.div_ceil(CHANNELS);
        let step = input.len.div_ceil(steps).next_multiple_of(GROUP);
        let [decoded, sums] = match (input.rows <= INPUTS, steps) {
            (true, _) => [0, 0],
            (false, 1) => [DECODED * step, 0],
            (false, _) => [DECODED * step, DECODED * INPUT_ROWS * MAX_LANES],
        };
        Self { decoded: Aligned::zeros(decoded), sums: Aligned::zeros(sums), step }
    }
}

/// Values that begin with a line of the cache, so that no vector lies in two.
struct Aligned {
    values: Vec<f32>,
    first: usize,
}

impl Aligned {
    fn zeros(len: usize) -> Self {
        let values = vec![0.0; len + MAX_LANES - 1];
        let first = values.as_ptr().align_offset(64).min(MAX_LANES - 1);
        Self { values, first }
    }

    #[inline(always)]
    fn slice(&self) -> &[f32] {
        &self.values[self.first..]
    }

    #[inline(always)]
    fn slice_mut(&mut self) -> &mut [f32] {
        &mut self.values[self.first..]
    }
}

/// Holds an input in f32, in the order of decoded codes: of every 32 channels the even ones first.
/// Zeros complete the last group.
struct Interleaved {
    values: Aligned,
    rows: usize,
    /// Number of values of a row.
    len: usize,
}

impl Interleaved {
    fn new<T: HostElement>(input: &[T], rows: usize, channels: usize) -> Self {
        let len = channels.next_multiple_of(GROUP);
        let mut all_values = Aligned::zeros(rows * len);
        let values = &mut all_values.slice_mut()[..rows * len];
        let work = Work::new(rows * len, per_microsecond::VALUES);
        for_each_chunk(
            work,
            values,
            len,
            || (),
            |(), row, values| {
                let input = &input[row * channels..][..channels];
                for (values, input) in values.chunks_mut(GROUP).zip(input.chunks(GROUP)) {
                    let (even, odd) = values.split_at_mut(GROUP / 2);
                    let pairs = input.chunks_exact(2).zip(even.iter_mut().zip(odd));
                    for (pair, (even, odd)) in pairs {
                        (*even, *odd) = (pair[0].to_f32(), pair[1].to_f32());
                    }
                }
            },
        );
        Self { values: all_values, rows, len }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values.slice()[row * self.len..][..self.len]
    }
}

/// Computes the products of packed rows from `first` on.
struct Products<'a> {
    input: &'a Interleaved,
    weight: PackedView<'a>,
    outputs: usize,
    channels: usize,
    first: usize,
    memory: &'a mut Memory,
    products: &'a mut [f32],
}

impl WithSimd for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match self.weight.block_size {
            _ if self.input.rows > INPUTS => self.decoded(simd),
            GROUP => self.in_blocks::<S, 1>(simd),
            _ => self.in_blocks::<S, 2>(simd),
        }
    }
}

impl Products<'_> {
    /// Multiplies an input with few rows by a weight with `BLOCKS` blocks in a group.
    #[inline(always)]
    fn in_blocks<S: Simd, const BLOCKS: usize>(self, simd: S) {
        match self.input.rows {
            1 => self.straight::<S, BLOCKS, 1>(simd),
            2 => self.straight::<S, BLOCKS, 2>(simd),
            _ => self.straight::<S, BLOCKS, INPUTS>(simd),
        }
    }

    /// Multiplies an input with few rows, so that nothing decoded is read again.
    #[inline(always)]
    fn straight<S: Simd, const BLOCKS: usize, const M: usize>(self, simd: S) {
        let Self { input, weight, outputs, channels, first, products, .. } = self;
        // Rows beyond the last repeat it; their products are not written.
        let inputs: [_; M] = from_fn(|row| input.row(row.min(input.rows - 1)));
        let (last, distance) = (outputs - 1, prefetch_distance(TOGETHER * channels / 2));
        for (part, products) in products.chunks_mut(DECODED * input.rows).enumerate() {
            let first = first + part * DECODED;
            for row in (0..DECODED.min(outputs - first)).step_by(TOGETHER) {
                // Rows beyond the last repeat it; their products are not read.
                let packed: [_; TOGETHER] = [
                    PackedRow::<BLOCKS>::new(weight, first + row, channels),
                    PackedRow::<BLOCKS>::new(weight, last.min(first + row + 1), channels),
                ];
                let sums = straight_dots::<S, BLOCKS, M>(simd, &packed, inputs, distance);
                for (to, sums) in sums.into_iter().enumerate().take(input.rows) {
                    for (index, (sum, packed)) in sums.into_iter().zip(&packed).enumerate() {
                        products[to * DECODED + row + index] = sum * packed.tensor_scale;
                    }
                }
            }
        }
    }

    /// Multiplies an input with any number of rows.
    #[inline(always)]
    fn decoded<S: Simd>(self, simd: S) {
        let Self { input, weight, outputs, channels, first, memory, products } = self;
        let block = input.rows.div_ceil(input.rows.div_ceil(INPUT_ROWS));
        for from in (0..input.rows).step_by(block) {
            let inputs = from..input.rows.min(from + block);
            for (part, products) in products.chunks_mut(DECODED * input.rows).enumerate() {
                let first = first + part * DECODED;
                let rows = DECODED.min(outputs - first);
                let mut scales = [0.0; DECODED];
                let Memory { decoded, sums, step } = &mut *memory;
                let mut begin = 0;
                while begin < input.len {
                    let end = input.len.min(begin + *step);
                    let decoded = decoded.slice_mut();
                    for (row, decoded) in decoded.chunks_mut(end - begin).take(rows).enumerate() {
                        let (place, scale) = ([first + row, channels], &mut scales[row]);
                        *scale = match weight.block_size {
                            GROUP => decode::<S, 1>(simd, weight, place, begin, decoded),
                            _ => decode::<S, 2>(simd, weight, place, begin, decoded),
                        };
                    }
                    let mut from = inputs.start;
                    while from < inputs.end {
                        // As many sums as there are registers: 32 with AVX-512, else 16.
                        let tile = match (S::F32_LANES == MAX_LANES, inputs.end - from) {
                            (true, 6..) => 6,
                            (_, 3..) => 3,
                            _ => 1,
                        };
                        for row in (0..rows).step_by(ROWS) {
                            let place =
                                OutputTile { block: inputs.start, from, row, rows, begin, end };
                            let (decoded, sums) = (&decoded[..], sums.slice_mut());
                            match tile {
                                6 => place
                                    .dots::<S, 6>(simd, decoded, input, sums, &scales, products),
                                3 => place
                                    .dots::<S, 3>(simd, decoded, input, sums, &scales, products),
                                _ => place
                                    .dots::<S, 1>(simd, decoded, input, sums, &scales, products),
                            }
                        }
                        from += tile;
                    }
                    begin = end;
                }
            }
        }
    }
}

/// Decodes channels of a row, from `begin` on. Returns its tensor scale.
#[inline(always)]
fn decode<S: Simd, const BLOCKS: usize>(
    simd: S,
    weight: PackedView<'_>,
    [row, channels]: [usize; 2],
    begin: usize,
    decoded: &mut [f32],
) -> f32 {
    let packed = PackedRow::<BLOCKS>::new(weight, row, channels);
    let groups = decoded.as_chunks_mut().0.iter_mut();
    for (group, decoded) in (begin / GROUP..).zip(groups) {
        *decoded = packed.group(simd, group);
    }
    packed.tensor_scale
}

/// Some rows of the input and decoded rows, in some channels.
struct OutputTile {
    /// First row of the input whose sums are kept.
    block: usize,
    from: usize,
    row: usize,
    /// Number of decoded rows.
    rows: usize,
    begin: usize,
    end: usize,
}

impl OutputTile {
    /// Sums the products of each of `M` rows of the input with each of `ROWS` rows of the weight.
    #[inline(always)]
    fn dots<S: Simd, const M: usize>(
        self,
        simd: S,
        decoded: &[f32],
        input: &Interleaved,
        kept: &mut [f32],
        scales: &[f32; DECODED],
        products: &mut [f32],
    ) {
        let Self { block, from, row, rows, begin, end } = self;
        // Rows beyond the last repeat it; their products are not read.
        // All lengths are multiples of any vector.
        let step = end - begin;
        let mut weights = [S::as_simd_f32s(&decoded[row * step..][..step]).0; ROWS];
        let len = weights[0].len();
        for (index, weights) in weights.iter_mut().enumerate() {
            let row = (row + index).min(rows - 1);
            *weights = &S::as_simd_f32s(&decoded[row * step..][..step]).0[..len];
        }
        let mut inputs = [&S::as_simd_f32s(&input.row(from)[begin..end]).0[..len]; M];
        for (index, inputs) in inputs.iter_mut().enumerate() {
            *inputs = &S::as_simd_f32s(&input.row(from + index)[begin..end]).0[..len];
        }
        let mut sums = [[simd.splat_f32s(0.0); ROWS]; M];
        let kept_of = |to: usize| ((from - block + to) * DECODED + row) * S::F32_LANES;
        if begin > 0 {
            for to in 0..M {
                let kept = S::as_simd_f32s(&kept[kept_of(to)..][..ROWS * S::F32_LANES]).0;
                sums[to].copy_from_slice(kept);
            }
        }
        for k in 0..len {
            // Inputs stay in registers, and each vector of the weight is read once: 12 sums, 3
            // inputs and a weight fill the 16 registers of AVX2; 24, 6 and 1 fit the 32 of
            // AVX-512.
            let mut vectors = [simd.splat_f32s(0.0); M];
            for (vector, input) in vectors.iter_mut().zip(&inputs) {
                *vector = input[k];
            }
            for (index, weight) in weights.iter().enumerate() {
                let weight = weight[k];
                for (sums, vector) in sums.iter_mut().zip(&vectors) {
                    sums[index] = simd.mul_add_f32s(weight, *vector, sums[index]);
                }
            }
        }
        if end < input.len {
            for to in 0..M {
                let kept = &mut kept[kept_of(to)..][..ROWS * S::F32_LANES];
                S::as_mut_simd_f32s(kept).0.copy_from_slice(&sums[to]);
            }
            return;
        }
        for (to, sums) in reduced::<S, ROWS, M>(simd, sums).into_iter().enumerate() {
            for (index, sum) in sums.into_iter().enumerate() {
                let row = row + index;
                products[(from + to) * DECODED + row] = sum * scales[row];
            }
        }
    }
}

/// Sums products of rows that are decoded on the fly: the same sums as [`OutputTile::dots`], in the
/// same order.
#[inline(always)]
fn straight_dots<S: Simd, const BLOCKS: usize, const M: usize>(
    simd: S,
    weights: &[PackedRow<'_, BLOCKS>; TOGETHER],
    inputs: [&[f32]; M],
    distance: usize,
) -> [[f32; TOGETHER]; M] {
    let mut sums = [[simd.splat_f32s(0.0); TOGETHER]; M];
    // Known lengths avoid bounds checks in the loop.
    let whole = weights[0].codes.len() / (GROUP / 2);
    let codes: [_; TOGETHER] =
        from_fn(|row| &weights[row].codes.as_chunks::<{ GROUP / 2 }>().0[..whole]);
    let scales: [_; TOGETHER] = from_fn(|row| &weights[row].scales.as_chunks().0[..whole]);
    let groups = inputs.map(|row| &row.as_chunks().0[..whole]);
    for group in 0..whole {
        for row in 0..TOGETHER {
            prefetch(&codes[row][group], distance);
            let decoded = weights[row].decode(simd, &codes[row][group], &scales[row][group]);
            add_group::<S, M>(simd, row, &decoded, groups.map(|row| &row[group]), &mut sums);
        }
    }
    if inputs[0].len() > whole * GROUP {
        for row in 0..TOGETHER {
            let decoded = weights[row].group(simd, whole);
            let last = inputs.map(|row| row.last_chunk().expect("a whole group"));
            add_group::<S, M>(simd, row, &decoded, last, &mut sums);
        }
    }
    reduced::<S, TOGETHER, M>(simd, sums)
}

/// Adds the products of a group of a row. A function, as [`reduced`] is one without closures.
#[inline(always)]
fn add_group<S: Simd, const M: usize>(
    simd: S,
    row: usize,
    decoded: &[f32; GROUP],
    inputs: [&[f32; GROUP]; M],
    sums: &mut [[S::f32s; TOGETHER]; M],
) {
    let decoded = S::as_simd_f32s(decoded).0;
    for to in 0..M {
        let input = S::as_simd_f32s(inputs[to]).0;
        for k in 0..decoded.len() {
            sums[to][row] = simd.mul_add_f32s(decoded[k], input[k], sums[to][row]);
        }
    }
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

    /// Includes a last group that is not whole, fewer last rows of the weight than are decoded
    /// together, more rows of the input than are summed together, and tasks of several threads.
    #[test]
    fn sums_do_not_depend_on_how_many_rows_there_are() {
        const ALL: usize = INPUT_ROWS + 1;
        // The last shape exceeds the limit of one thread.
        let shapes = [(16, 80, 37), (16, 96, 40), (32, 96, 37), (16, 800, 37), (16, 4096, 37)];
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
                (0..ALL * channels).map(|at| (at * 13 % 101) as f32 / 7.0 - 6.0).collect();
            let of = |rows: usize| {
                let mut output = vec![f32::NAN; rows * outputs];
                let input = &input[..rows * channels];
                let shape = [outputs, channels];
                matmul(input, weight, shape, Activations::F32, &mut output).unwrap();
                output
            };
            let all = of(ALL);
            assert!(all.iter().all(|sum| sum.is_finite()));
            for rows in (1..10).chain([INPUT_ROWS - 1, INPUT_ROWS, ALL]) {
                let expected = &all[..rows * outputs];
                assert_eq!(of(rows), expected, "{rows} x {channels}, {block_size}");
                let in_pool = rayon::scope(|_| of(rows));
                assert_eq!(in_pool, expected, "{rows} x {channels}, {block_size}, in the pool");
            }
        }
    }
}
