use burn_fp4_formats::check_length;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::strip::{scale_values, twice_element};
use super::{HostElement, PackedView, View};
use crate::SearchError;

/// Packed rows that are decoded, and multiplied with rows of the input, at a time.
const ROWS: usize = 4;
/// Rows of the input that they are multiplied with at a time.
const INPUTS: usize = 4;
/// Packed rows that are decoded before the input is looked at again.
const DECODED: usize = 4 * ROWS;
/// Packed rows per parallel task.
const TASK_ROWS: usize = 2 * DECODED;
/// Channels that are decoded together: two codes of each of 16 bytes.
const GROUP: usize = 32;

/// `input x weight^T` for an input `[inputs, channels]` and a packed weight of `outputs` rows of `channels`
/// elements, without its dense values: `[inputs, outputs]`, sums in f32, rounded once.
///
/// # Errors
/// A block size that the format does not allow or the channels are not a multiple of, or a slice of the wrong
/// length.
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
    // A row for each of the weight: the tasks write contiguous memory.
    let mut products = vec![0.0; outputs * inputs];
    // Where the input is looked at once, what is decoded stays as close as it can.
    let rows = if inputs <= INPUTS { ROWS } else { DECODED };
    let tasks = products.par_chunks_mut(TASK_ROWS * inputs).enumerate();
    tasks.for_each_init(
        || vec![0.0; rows * input.len],
        |decoded, (task, products)| {
            let (input, first) = (&input, task * TASK_ROWS);
            Arch::new().dispatch(Products { input, weight, channels, first, decoded, products });
        },
    );
    output.par_chunks_mut(outputs).enumerate().for_each(|(row, output)| {
        let values: Vec<_> = products.iter().skip(row).step_by(inputs).copied().collect();
        T::write(&values, output);
    });
    Ok(())
}

/// An input in f32, in the order in which codes are decoded: of every 32 channels first the even ones. Zeros
/// complete the last.
struct Interleaved {
    values: Vec<f32>,
    rows: usize,
    /// Values of a row.
    len: usize,
}

impl Interleaved {
    fn new<T: HostElement>(input: &[T], rows: usize, channels: usize) -> Self {
        let len = channels.next_multiple_of(GROUP);
        let mut values = vec![0.0; rows * len];
        values.par_chunks_mut(len).zip(input.par_chunks(channels)).for_each(|(values, input)| {
            for (values, input) in values.chunks_mut(GROUP).zip(input.chunks(GROUP)) {
                let (even, odd) = values.split_at_mut(GROUP / 2);
                let pairs = input.chunks_exact(2).zip(even.iter_mut().zip(odd));
                for (pair, (even, odd)) in pairs {
                    (*even, *odd) = (pair[0].to_f32(), pair[1].to_f32());
                }
            }
        });
        Self { values, rows, len }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.len..][..self.len]
    }
}

/// The products of packed rows from `first` on.
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
        let Self { input, weight, channels, first, decoded, products } = self;
        let together = decoded.len() / input.len;
        for (part, products) in products.chunks_mut(together * input.rows).enumerate() {
            let first = first + part * together;
            let rows = products.len() / input.rows;
            for (row, decoded) in decoded.chunks_mut(input.len).take(rows).enumerate() {
                decode_row(weight, first + row, channels, decoded);
            }
            for from in (0..input.rows).step_by(INPUTS) {
                for row in (0..rows).step_by(ROWS) {
                    // Rows beyond the last repeat it.
                    let decoded: [&[f32]; ROWS] = core::array::from_fn(|index| {
                        let row = (row + index).min(rows - 1);
                        &decoded[row * input.len..][..input.len]
                    });
                    let scales: [f32; ROWS] = core::array::from_fn(|index| {
                        let row = first + (row + index).min(rows - 1);
                        weight.tensor_scale[if weight.tensor_scale.len() == 1 { 0 } else { row }]
                    });
                    let products = &mut products[row * input.rows..];
                    let mut store = |to: usize, sums: [f32; ROWS]| {
                        for (index, sum) in sums.into_iter().enumerate().take(rows - row) {
                            products[index * input.rows + to] = sum * scales[index];
                        }
                    };
                    if from + INPUTS <= input.rows {
                        let rows = core::array::from_fn(|index| input.row(from + index));
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

/// The sums of products of each row of the input with each of the weight.
#[inline(always)]
fn dots<S: Simd, const M: usize>(
    simd: S,
    weights: [&[f32]; ROWS],
    inputs: [&[f32]; M],
) -> [[f32; ROWS]; M] {
    // Both are a multiple of any vector.
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
    sums.map(|sums| sums.map(|sum| simd.reduce_sum_f32s(sum)))
}

/// `element x block scale` of a packed row, in the order of [`Interleaved`].
#[inline(always)]
fn decode_row(weight: PackedView<'_>, row: usize, channels: usize, decoded: &mut [f32]) {
    let blocks = channels / weight.block_size;
    let codes = &weight.codes[row * channels / 2..][..channels / 2];
    let scales = &weight.scales[row * blocks..][..blocks];
    // Elements come out twice as large.
    let values = scale_values(weight.format);
    let half = |scale: u8| 0.5 * values[scale as usize];
    let per_group = GROUP / weight.block_size;
    let groups = codes.chunks(GROUP / 2).zip(scales.chunks(per_group));
    for ((codes, scales), decoded) in groups.zip(decoded.chunks_exact_mut(GROUP)) {
        let first = half(scales[0]);
        let second = if per_group == 1 { first } else { scales.get(1).map_or(0.0, |&s| half(s)) };
        match <&[u8; GROUP / 2]>::try_from(codes) {
            Ok(codes) => decode_group(codes, [first, second], decoded),
            Err(_) => {
                let mut padded = [0; GROUP / 2];
                padded[..codes.len()].copy_from_slice(codes);
                decode_group(&padded, [first, second], decoded);
            }
        }
    }
}

/// The elements of 16 bytes, the lower codes first, times a factor for each half of the bytes.
#[inline(always)]
fn decode_group(codes: &[u8; GROUP / 2], factors: [f32; 2], decoded: &mut [f32]) {
    let (even, odd) = decoded.split_at_mut(GROUP / 2);
    let (even, odd) = (&mut even[..GROUP / 2], &mut odd[..GROUP / 2]);
    for (half, factor) in factors.into_iter().enumerate() {
        for index in half * GROUP / 4..(half + 1) * GROUP / 4 {
            let code = u32::from(codes[index]);
            even[index] = twice_element(code) * factor;
            odd[index] = twice_element(code >> 4) * factor;
        }
    }
}
