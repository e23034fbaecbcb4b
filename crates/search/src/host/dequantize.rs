//! From codes and scales to values, and the error of these values.

use burn_fp4_formats::{FormatError, Fp4Format, Packed, check_length};
use pulp::NullaryFnOnce;
use rayon::prelude::*;

use super::arch::arch;
use super::dense::{HostElement, View};
use super::simd_batch::{BATCH, BatchOrder, BlockBatch};
use super::threads::TASK;
use crate::error::SearchError;

/// Borrows a quantized tensor in host memory, for the functions of the host engine; [`Packed`] owns
/// its memory.
#[derive(Debug, Clone, Copy)]
pub struct PackedView<'a> {
    /// Format of the codes and scales.
    pub format: Fp4Format,
    /// Number of elements that share a block scale, 16 or 32.
    pub block_size: usize,
    /// `[rows, axis / 2]` bytes.
    pub codes: &'a [u8],
    /// `[rows, axis / block_size]` bytes.
    pub scales: &'a [u8],
    /// One multiplier, or one per row.
    pub tensor_scale: &'a [f32],
}

impl<'a> From<&'a Packed> for PackedView<'a> {
    fn from(packed: &'a Packed) -> Self {
        Self {
            format: packed.format,
            block_size: packed.block_size,
            codes: &packed.codes,
            scales: &packed.scales,
            tensor_scale: packed.tensor_scale.as_slice(),
        }
    }
}

impl PackedView<'_> {
    pub(super) fn check(&self, view: View) -> Result<(), SearchError> {
        self.format.check_block_size(self.block_size)?;
        if !view.axis.is_multiple_of(self.block_size) {
            let (cols, block_size) = (view.axis, self.block_size);
            return Err(FormatError::Indivisible { cols, block_size }.into());
        }
        check_length("codes", view.len() / 2, self.codes.len())?;
        check_length("block scales", view.len() / self.block_size, self.scales.len())?;
        if self.tensor_scale.len() != 1 {
            check_length("tensor scales", view.packed_rows(), self.tensor_scale.len())?;
        }
        Ok(())
    }

    #[inline(always)]
    fn load<const B: usize>(
        &self,
        batch: &mut BlockBatch<B>,
        index: usize,
        at: usize,
        blocks: usize,
    ) {
        batch.scales[index] = self.scales[at];
        batch.read_codes(index, &self.codes[at * B / 2..][..B / 2]);
        let row = if self.tensor_scale.len() == 1 { 0 } else { at / blocks };
        batch.decode[index] = self.tensor_scale[row];
    }
}

/// Writes the values of a packed tensor: the oracle's bits in f32, rounded once to narrower types.
///
/// # Errors
/// A block size that the format does not allow or that does not divide the axis, or a slice of the
/// wrong length.
pub fn dequantize<T: HostElement>(
    packed: PackedView<'_>,
    view: View,
    output: &mut [T],
) -> Result<(), SearchError> {
    packed.check(view)?;
    check_length("output", view.len(), output.len())?;
    if !view.is_empty() {
        let slab = slab_len(view, packed.block_size);
        output.par_chunks_mut(slab).enumerate().for_each(|(index, output)| {
            let slab = Slab { packed, view, first: index * slab };
            match packed.block_size {
                16 => arch().dispatch(Dequantize::<T, 16> { slab, output }),
                _ => arch().dispatch(Dequantize::<T, 32> { slab, output }),
            }
        });
    }
    Ok(())
}

/// Sums the squared differences between a tensor and its packed form, and the squares of the
/// tensor, in f64 and in an order that does not depend on the number of threads. A value that
/// overflows the type of the tensor counts as infinite.
///
/// # Errors
/// As [`dequantize`].
pub fn squared_error<T: HostElement>(
    values: &[T],
    packed: PackedView<'_>,
    view: View,
) -> Result<[f64; 2], SearchError> {
    packed.check(view)?;
    check_length("values", view.len(), values.len())?;
    if view.is_empty() {
        return Ok([0.0; 2]);
    }
    let slab = slab_len(view, packed.block_size);
    let sums: Vec<[f64; 2]> = values
        .par_chunks(slab)
        .enumerate()
        .map(|(index, values)| {
            let slab = Slab { packed, view, first: index * slab };
            match packed.block_size {
                16 => arch().dispatch(SquaredError::<T, 16> { slab, values }),
                _ => arch().dispatch(SquaredError::<T, 32> { slab, values }),
            }
        })
        .collect();
    Ok(sums.iter().fold([0.0; 2], |sum, part| [sum[0] + part[0], sum[1] + part[1]]))
}

/// Values per parallel task: whole rows, or whole blocks of lines where the axis is strided.
fn slab_len(view: View, block_size: usize) -> usize {
    if view.inner == 1 {
        view.axis * (TASK / view.axis).max(1)
    } else {
        // Up to 8 blocks of the axis, if they divide it evenly: their codes share cache lines.
        let blocks = view.axis / block_size;
        let together = [8, 4, 2].into_iter().find(|&n| blocks.is_multiple_of(n)).unwrap_or(1);
        together * block_size * view.inner
    }
}

/// A contiguous part of the dense tensor, from value `first` on.
#[derive(Clone, Copy)]
struct Slab<'a> {
    packed: PackedView<'a>,
    view: View,
    first: usize,
}

/// Consumes dequantized batches. A trait instead of a closure, because only a function can be
/// `inline(always)`, and so compiled for the instruction set of its caller.
trait Sink<const B: usize> {
    /// Takes `n` blocks of the slab, the first starting at value `start`. They follow each other,
    /// or are adjacent columns.
    fn take(&mut self, batch: &BlockBatch<B>, start: usize, n: usize);
}

impl Slab<'_> {
    fn order(&self) -> BatchOrder {
        if self.view.inner == 1 { BatchOrder::Along } else { BatchOrder::Across }
    }

    /// Hands every batch of the first `len` values to a sink.
    #[inline(always)]
    fn for_each_batch<const B: usize>(self, len: usize, sink: &mut impl Sink<B>) {
        let View { axis, inner, .. } = self.view;
        let blocks = axis / B;
        let mut batch = BlockBatch::<B>::new(self.order());
        if inner == 1 {
            let first = self.first / B;
            for start in (0..len / B).step_by(BATCH) {
                let n = BATCH.min(len / B - start);
                for index in 0..n {
                    let at = first + start + index;
                    self.packed.load(&mut batch, index, at, blocks);
                }
                batch.dequantize(self.packed.format);
                sink.take(&batch, start * B, n);
            }
        } else {
            // Neighbouring batches share cache lines of the dense tensor, and the blocks of a row
            // share lines of the codes. A window of both stays cached.
            const WINDOW: usize = 8 * BATCH;
            for window in (0..inner).step_by(WINDOW) {
                for line in (0..len / inner).step_by(B) {
                    let line_of_all = self.first / inner + line;
                    let (slab, block) = (line_of_all / axis, line_of_all % axis / B);
                    for column in (window..inner.min(window + WINDOW)).step_by(BATCH) {
                        let n = BATCH.min(inner - column);
                        for index in 0..n {
                            let row = slab * inner + column + index;
                            self.packed.load(&mut batch, index, row * blocks + block, blocks);
                        }
                        batch.dequantize(self.packed.format);
                        sink.take(&batch, line * inner + column, n);
                    }
                }
            }
        }
    }
}

struct Dequantize<'a, T, const B: usize> {
    slab: Slab<'a>,
    output: &'a mut [T],
}

impl<T: HostElement, const B: usize> NullaryFnOnce for Dequantize<'_, T, B> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let (len, inner) = (self.output.len(), self.slab.view.inner);
        self.slab.for_each_batch::<B>(len, &mut Write { output: self.output, inner });
    }
}

struct Write<'a, T> {
    output: &'a mut [T],
    inner: usize,
}

impl<T: HostElement, const B: usize> Sink<B> for Write<'_, T> {
    #[inline(always)]
    fn take(&mut self, batch: &BlockBatch<B>, start: usize, n: usize) {
        let output = &mut self.output[start..];
        if self.inner == 1 {
            T::write(&batch.values()[..n * B], &mut output[..n * B]);
        } else {
            batch.write_columns(output, self.inner, 0, n);
        }
    }
}

struct SquaredError<'a, T, const B: usize> {
    slab: Slab<'a>,
    values: &'a [T],
}

impl<T: HostElement, const B: usize> NullaryFnOnce for SquaredError<'_, T, B> {
    type Output = [f64; 2];

    #[inline(always)]
    fn call(self) -> [f64; 2] {
        let mut compare = Compare {
            values: self.values,
            inner: self.slab.view.inner,
            original: BlockBatch::<B>::new(self.slab.order()),
            sums: [[0.0; LANES]; 2],
        };
        self.slab.for_each_batch::<B>(self.values.len(), &mut compare);
        compare.sums.map(|lanes| lanes.iter().sum())
    }
}

/// Number of sums in parallel: with one sum every value would wait for the one before it.
const LANES: usize = 8;

struct Compare<'a, T, const B: usize> {
    values: &'a [T],
    inner: usize,
    original: BlockBatch<B>,
    sums: [[f64; LANES]; 2],
}

/// Adds the squares of differences, and of the exact values, for up to `LANES` values. Values from
/// `overflow` on are infinite in the type that they are written in.
#[inline(always)]
fn add_squares(sums: &mut [[f64; LANES]; 2], exact: &[f32], values: &[f32], overflow: f32) {
    let [errors, energies] = sums;
    for lane in 0..exact.len() {
        let overflows = values[lane].abs() >= overflow;
        let value = if overflows { f64::INFINITY } else { f64::from(values[lane]) };
        let exact = f64::from(exact[lane]);
        let difference = exact - value;
        errors[lane] += difference * difference;
        energies[lane] += exact * exact;
    }
}

impl<T: HostElement, const B: usize> Sink<B> for Compare<'_, T, B> {
    #[inline(always)]
    fn take(&mut self, batch: &BlockBatch<B>, start: usize, n: usize) {
        let values = &self.values[start..];
        // The first blocks of the batch, or the first columns of each line: the rest is left from
        // the batch before.
        let (line, used) = if self.inner == 1 { (BATCH * B, n * B) } else { (BATCH, n) };
        if self.inner == 1 {
            T::read(&values[..n * B], &mut self.original.values_mut()[..n * B]);
        } else {
            self.original.read_columns(values, self.inner, 0, n);
        }
        let lines =
            self.original.values().chunks_exact(line).zip(batch.values().chunks_exact(line));
        for (exact, values) in lines {
            let (exact, exact_rest) = exact[..used].as_chunks::<LANES>();
            let (values, rest) = values[..used].as_chunks::<LANES>();
            for (exact, values) in exact.iter().zip(values) {
                add_squares(&mut self.sums, exact, values, T::OVERFLOW);
            }
            add_squares(&mut self.sums, exact_rest, rest, T::OVERFLOW);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::quantize_packed;
    use crate::importance::Importance;
    use crate::scheme::Fp4Scheme;

    #[test]
    fn blocks_that_do_not_fill_a_batch_are_measured_once() {
        for (block_size, scheme) in [(16, Fp4Scheme::nvfp4()), (32, Fp4Scheme::mxfp4())] {
            for rows in [1, 16, 31, 32, 33, 40, 48, 49, 65, 80] {
                let view = View::rows(rows, block_size);
                let values: Vec<f32> =
                    (0..view.len()).map(|at| ((at * 37 + 11) % 101) as f32 / 17.0 - 3.0).collect();
                let importance = Importance::Uniform;
                let packed = quantize_packed(&values, view, &scheme, &[3.0], importance).unwrap();
                let mut decoded = vec![0f32; values.len()];
                dequantize(PackedView::from(&packed), view, &mut decoded).unwrap();
                let pairs =
                    values.iter().zip(&decoded).map(|(&a, &b)| (f64::from(a), f64::from(b)));
                let expected = pairs.fold([0.0; 2], |sum, (exact, value)| {
                    [sum[0] + (exact - value).powi(2), sum[1] + exact * exact]
                });
                let found = squared_error(&values, PackedView::from(&packed), view).unwrap();
                for (found, expected) in found.into_iter().zip(expected) {
                    let near = (found - expected).abs() <= 1e-12 * expected;
                    assert!(near, "{rows} blocks of {block_size}: {found}, not {expected}");
                }
            }
        }
    }
}
