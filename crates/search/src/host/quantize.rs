//! Quantization of a tensor along any axis, and its amax: its division into tasks and batches.

use burn_fp4_formats::{Packed, TensorScale, check_length};
use pulp::NullaryFnOnce;
use rayon::prelude::*;

use super::arch::arch;
use super::dense::{HostElement, View};
use super::search::Choose;
use super::simd_batch::{BATCH, BatchOrder, BlockBatch, MAX_BLOCK, larger};
use super::threads::{SEARCH_TASK, TASK};
use crate::error::SearchError;
use crate::importance::Importance;
use crate::method::Method;
use crate::rounding::Rounding;
use crate::rule::TensorFactor;
use crate::scheme::{Blocks, Fp4Scheme, TensorScaling};

/// Computes the amax for the tensor scale: one value, or one per packed row.
///
/// A NaN among the values makes the result NaN.
#[must_use]
pub fn amax<T: HostElement>(values: &[T], view: View, scheme: &Fp4Scheme) -> Vec<f32> {
    match scheme.tensor_scale {
        TensorScaling::Amax(amax) => vec![amax],
        TensorScaling::Row if scheme.rule.row().tensor_scale => row_amax(values, view),
        _ => vec![tensor_amax(values)],
    }
}

/// Returns the largest magnitude of all values, NaN if one of them is.
#[must_use]
pub fn tensor_amax<T: HostElement>(values: &[T]) -> f32 {
    let largest =
        values.par_chunks(TASK).map(|values| arch().dispatch(LargestMagnitude { values })).max();
    T::from_bits(largest.unwrap_or_default()).to_f32()
}

/// Returns the largest magnitude of each packed row, NaN if one of its values is.
///
/// ```
/// use burn_fp4_search::host::{View, row_amax, tensor_amax};
///
/// let values = [1.0f32, -4.0, 3.0, 2.0];
/// assert_eq!(tensor_amax(&values), 4.0);
/// assert_eq!(row_amax(&values, View::rows(2, 2)), [4.0, 3.0]);
/// assert_eq!(row_amax(&values, View::along(&[2, 2], 0)), [3.0, 4.0]); // of the columns
/// ```
#[must_use]
pub fn row_amax<T: HostElement>(values: &[T], view: View) -> Vec<f32> {
    if view.is_empty() {
        return vec![0.0; view.packed_rows()];
    }
    let slabs = values.par_chunks(view.axis * view.inner);
    let largest = slabs.flat_map_iter(|slab| {
        let mut largest = vec![T::Bits::default(); view.inner];
        for line in slab.chunks_exact(view.inner) {
            for (largest, value) in largest.iter_mut().zip(line) {
                *largest = value.magnitude().max(*largest);
            }
        }
        largest.into_iter().map(|bits| T::from_bits(bits).to_f32())
    });
    largest.collect()
}

struct LargestMagnitude<'a, T> {
    values: &'a [T],
}

impl<T: HostElement> NullaryFnOnce for LargestMagnitude<'_, T> {
    type Output = T::Bits;

    #[inline(always)]
    fn call(self) -> T::Bits {
        self.values.iter().fold(T::Bits::default(), |largest, value| value.magnitude().max(largest))
    }
}

/// Quantizes a tensor into packed rows, given the result of [`amax`], and returns its
/// tensor scale.
///
/// `codes` takes `[packed_rows, axis / 2]` bytes and `scales` `[packed_rows, axis / block_size]`.
/// The result has the bits of [`quantize_with_amax`](crate::quantize_with_amax).
///
/// ```
/// use burn_fp4_search::host::{View, amax, quantize, quantize_packed};
/// use burn_fp4_search::{Fp4Scheme, Importance};
///
/// let weight: Vec<f32> = (0..64).map(|at| at as f32).collect();
/// let (view, scheme) = (View::rows(2, 32), Fp4Scheme::nvfp4());
/// let (mut codes, mut scales) = ([0; 2 * 32 / 2], [0; 2 * 32 / 16]);
/// let amax = amax(&weight, view, &scheme);
/// quantize(&weight, view, &scheme, &amax, &mut codes, &mut scales)?;
/// assert_eq!(scales[3], 0x7E, "the block of the largest magnitude has the largest scale, 448");
/// // The same in memory of its own.
/// let packed = quantize_packed(&weight, view, &scheme, &amax, Importance::Uniform)?;
/// assert!(packed.codes == codes && packed.scales == scales);
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
///
/// # Errors
/// An inconsistent scheme, an axis that the blocks do not divide, or a slice of the wrong length.
pub fn quantize<T: HostElement>(
    values: &[T],
    view: View,
    scheme: &Fp4Scheme,
    amax: &[f32],
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<TensorScale, SearchError> {
    quantize_by_importance(values, view, scheme, amax, Importance::Uniform, codes, scales)
}

/// Quantizes a tensor as [`quantize`] does, for errors with different costs; see
/// [`quantize_by_importance`](crate::quantize_by_importance).
///
/// # Errors
/// As [`quantize`], and [`SearchError::Importance`] if the search of the scheme takes another kind.
pub fn quantize_by_importance<T: HostElement>(
    values: &[T],
    view: View,
    scheme: &Fp4Scheme,
    amax: &[f32],
    importance: Importance<'_>,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<TensorScale, SearchError> {
    scheme.check_columns(view.axis)?;
    importance.check(scheme, view.axis)?;
    let blocks = view.axis / scheme.block_size;
    check_length("values", view.len(), values.len())?;
    check_length("amax", scheme.tensor_scales(view.packed_rows()), amax.len())?;
    check_length("codes", view.len() / 2, codes.len())?;
    check_length("block scales", view.packed_rows() * blocks, scales.len())?;

    let factors: Vec<_> = amax.iter().map(|&amax| TensorFactor::new(scheme, amax)).collect();
    if !view.is_empty() {
        // Across the rows of a strided axis a task takes whole cache lines.
        let task = if scheme.method == Method::Amax { TASK } else { SEARCH_TASK };
        let rows = (task / view.axis).max(if view.inner == 1 { 1 } else { 8 * BATCH });
        let rows = rows.next_multiple_of(BATCH);
        codes
            .par_chunks_mut(rows * view.axis / 2)
            .zip(scales.par_chunks_mut(rows * blocks))
            .enumerate()
            .for_each(|(task, (codes, scales))| {
                let first = task * rows;
                let task = Rows { values, view, scheme, factors: &factors, importance, first };
                match scheme.block_size {
                    16 => arch().dispatch(Quantize::<T, 16> { task, codes, scales }),
                    _ => arch().dispatch(Quantize::<T, 32> { task, codes, scales }),
                }
            });
    }
    Ok(scheme.tensor_scale.stored(&factors))
}

/// Quantizes a tensor as [`quantize_by_importance`] does, into memory of its own.
///
/// # Errors
/// As [`quantize_by_importance`].
pub fn quantize_packed<T: HostElement>(
    values: &[T],
    view: View,
    scheme: &Fp4Scheme,
    amax: &[f32],
    importance: Importance<'_>,
) -> Result<Packed, SearchError> {
    scheme.check_columns(view.axis)?;
    let mut codes = vec![0; view.len() / 2];
    let mut scales = vec![0; view.len() / scheme.block_size];
    let tensor_scale =
        quantize_by_importance(values, view, scheme, amax, importance, &mut codes, &mut scales)?;
    Ok(Packed {
        format: scheme.format(),
        block_size: scheme.block_size,
        rows: view.packed_rows(),
        cols: view.axis,
        codes,
        scales,
        tensor_scale,
    })
}

/// Packed rows from `first` on, to be computed from a dense tensor.
#[derive(Clone, Copy)]
struct Rows<'a, T> {
    values: &'a [T],
    view: View,
    scheme: &'a Fp4Scheme,
    factors: &'a [TensorFactor],
    importance: Importance<'a>,
    first: usize,
}

impl<T: HostElement> Rows<'_, T> {
    #[inline(always)]
    fn factor(&self, row: usize) -> TensorFactor {
        if self.factors.len() == 1 { self.factors[0] } else { self.factors[row] }
    }

    /// Reads a block of `n` packed rows from `row` on, along any axis.
    #[inline(always)]
    fn read<const B: usize>(&self, batch: &mut BlockBatch<B>, row: usize, block: usize, n: usize) {
        let View { axis, inner, .. } = self.view;
        let (slab, column) = (row / inner, row % inner);
        if inner > 1 && column + n <= inner {
            let slab = &self.values[(slab * axis + block * B) * inner..][..B * inner];
            return batch.read_columns(slab, inner, column, n);
        }
        let mut elements = [0.0; MAX_BLOCK];
        for index in 0..n {
            let (slab, column) = ((row + index) / inner, (row + index) % inner);
            let start = (slab * axis + block * B) * inner + column;
            if inner == 1 {
                T::read(&self.values[start..][..B], &mut elements[..B]);
            } else {
                for (k, element) in elements[..B].iter_mut().enumerate() {
                    *element = self.values[start + k * inner].to_f32();
                }
            }
            for (line, &element) in batch.values_mut().chunks_exact_mut(BATCH).zip(&elements) {
                line[index] = element;
            }
        }
    }
}

struct Quantize<'a, T, const B: usize> {
    task: Rows<'a, T>,
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

impl<T: HostElement, const B: usize> NullaryFnOnce for Quantize<'_, T, B>
where
    BlockBatch<B>: Choose,
{
    type Output = ();

    #[inline(always)]
    fn call(self) {
        if self.task.view.inner == 1 && self.task.scheme.method == Method::Amax {
            self.along_rows();
        } else {
            self.across_rows();
        }
    }
}

impl<T: HostElement, const B: usize> Quantize<'_, T, B>
where
    BlockBatch<B>: Choose,
{
    /// Quantizes along a contiguous axis: a batch is 32 blocks of one row.
    #[inline(always)]
    fn along_rows(self) {
        let Rows { values, view, scheme, first, .. } = self.task;
        let blocks = view.axis / B;
        let tile_rows = scheme.tile_rows();
        let mut batch = BlockBatch::<B>::new(BatchOrder::Along);
        let mut tile_amax = vec![0.0; if tile_rows > 1 { blocks } else { 0 }];
        let tiles = self.codes.chunks_mut(tile_rows * view.axis / 2);
        for (tile, (codes, scales)) in
            tiles.zip(self.scales.chunks_mut(tile_rows * blocks)).enumerate()
        {
            let first = first + tile * tile_rows;
            let read = |batch: &mut BlockBatch<B>, row: usize, start: usize, n: usize| {
                let at = (first + row) * view.axis + start * B;
                T::read(&values[at..][..n * B], &mut batch.values_mut()[..n * B]);
            };
            let rows = scales.len() / blocks;
            if tile_rows > 1 {
                tile_amax.fill(0.0);
                for row in 0..rows {
                    for start in (0..blocks).step_by(BATCH) {
                        let n = BATCH.min(blocks - start);
                        read(&mut batch, row, start, n);
                        batch.find_amax();
                        for (tile, &block) in tile_amax[start..][..n].iter_mut().zip(&batch.amax) {
                            *tile = larger(*tile, block);
                        }
                    }
                }
            }
            let lines = codes.chunks_exact_mut(view.axis / 2).zip(scales.chunks_exact_mut(blocks));
            for (row, (codes, scales)) in lines.enumerate() {
                let factor = self.task.factor(first + row);
                (0..BATCH).for_each(|block| batch.set_factor(block, factor));
                for start in (0..blocks).step_by(BATCH) {
                    let n = BATCH.min(blocks - start);
                    read(&mut batch, row, start, n);
                    if tile_rows > 1 {
                        batch.amax[..n].copy_from_slice(&tile_amax[start..][..n]);
                    } else {
                        batch.find_amax();
                    }
                    batch.find_scales(scheme.rule);
                    if let Rounding::Stochastic(draw) = scheme.rounding {
                        for block in 0..n {
                            let at = (first + row) * view.axis + (start + block) * B;
                            batch.draw(block, at, draw);
                        }
                    }
                    batch.find_codes(scheme);
                    scales[start..][..n].copy_from_slice(&batch.scales[..n]);
                    let codes = codes[start * B / 2..][..n * B / 2].chunks_exact_mut(B / 2);
                    codes.enumerate().for_each(|(block, bytes)| batch.write_codes(block, bytes));
                }
            }
        }
    }

    /// Quantizes along a strided axis, or for a search that compares neighbouring rows: a batch is
    /// one block of each of 32 rows.
    #[inline(always)]
    fn across_rows(self) {
        let Rows { view, scheme, importance, first, .. } = self.task;
        let blocks = view.axis / B;
        let rows = self.scales.len() / blocks;
        let mut batch = BlockBatch::<B>::new(BatchOrder::Across);
        // All batches of a block before the next block: neighbours share the lines they read, and a
        // task is narrow enough that the lines it writes stay cached until the next block.
        for block in 0..blocks {
            let importance = importance.of_block(block, B);
            for at in (0..rows).step_by(BATCH) {
                let n = BATCH.min(rows - at);
                for index in 0..n {
                    batch.set_factor(index, self.task.factor(first + at + index));
                }
                self.task.read(&mut batch, first + at, block, n);
                batch.find_amax();
                if scheme.blocks == Blocks::Tile16x16 {
                    batch.share_amax(n);
                }
                if let Rounding::Stochastic(draw) = scheme.rounding {
                    for index in 0..n {
                        batch.draw(index, (first + at + index) * view.axis + block * B, draw);
                    }
                }
                if scheme.method == Method::Amax {
                    batch.find_scales(scheme.rule);
                    batch.find_codes(scheme);
                } else {
                    batch.choose(scheme, importance, n);
                }
                for index in 0..n {
                    self.scales[(at + index) * blocks + block] = batch.scales[index];
                    let start = ((at + index) * view.axis + block * B) / 2;
                    batch.write_codes(index, &mut self.codes[start..start + B / 2]);
                }
            }
        }
    }
}
