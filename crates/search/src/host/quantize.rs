use pulp::{Arch, NullaryFnOnce};
use rayon::prelude::*;

use super::strip::{MAX_BLOCK, Order, STRIP, Strip};
use super::{HostElement, SEARCH_TASK, TASK, View};
use crate::importance::BlockImportance;
use crate::{
    Blocks, Fp4Scheme, Importance, Rounding, ScaleSearch, SearchError, TensorFactor, TensorScaling,
};
use burn_fp4_formats::{Packed, TensorScale, check_length};

/// The amax that the tensor scale is made from: one value, or one per packed row.
///
/// A NaN among the values makes the result NaN.
pub fn amax<T: HostElement>(values: &[T], view: View, scheme: &Fp4Scheme) -> Vec<f32> {
    match scheme.tensor_scale {
        TensorScaling::Amax(amax) => vec![amax],
        TensorScaling::Row if scheme.rule.row().tensor_scale => row_amax(values, view),
        _ => {
            let largest = values
                .par_chunks(TASK)
                .map(|values| Arch::new().dispatch(LargestMagnitude { values }))
                .max();
            vec![T::from_bits(largest.unwrap_or_default()).to_f32()]
        }
    }
}

fn row_amax<T: HostElement>(values: &[T], view: View) -> Vec<f32> {
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

/// Quantizes a tensor into packed rows, given the amax of [`amax`], and returns its tensor scale.
///
/// `codes` takes `[packed_rows, axis / 2]` bytes and `scales` `[packed_rows, axis / block_size]`.
/// The result is bit for bit that of [`quantize_with_amax`](crate::quantize_with_amax).
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

/// [`quantize`] for errors that do not all cost the same; see
/// [`quantize_by_importance`](crate::quantize_by_importance).
///
/// # Errors
/// As there, and [`SearchError::Importance`] if the search of the scheme takes another kind.
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
        let task = if scheme.search == ScaleSearch::Amax { TASK } else { SEARCH_TASK };
        let rows = (task / view.axis).max(if view.inner == 1 { 1 } else { 8 * STRIP });
        let rows = rows.next_multiple_of(STRIP);
        codes
            .par_chunks_mut(rows * view.axis / 2)
            .zip(scales.par_chunks_mut(rows * blocks))
            .enumerate()
            .for_each(|(task, (codes, scales))| {
                let first = task * rows;
                let task = Rows { values, view, scheme, factors: &factors, importance, first };
                match scheme.block_size {
                    16 => Arch::new().dispatch(Quantize::<T, 16> { task, codes, scales }),
                    _ => Arch::new().dispatch(Quantize::<T, 32> { task, codes, scales }),
                }
            });
    }
    Ok(match scheme.tensor_scale {
        TensorScaling::Row => TensorScale::PerRow(factors.iter().map(|f| f.decode).collect()),
        _ => TensorScale::One(factors[0].decode),
    })
}

/// [`quantize_by_importance`] into memory of its own.
///
/// # Errors
/// As there.
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

/// Packed rows from `first` on, to be made from a dense tensor.
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

    /// Reads a block of `n` packed rows from `row` on, wherever they lie.
    #[inline(always)]
    fn read<const B: usize>(&self, strip: &mut Strip<B>, row: usize, block: usize, n: usize) {
        let View { axis, inner, .. } = self.view;
        let (slab, column) = (row / inner, row % inner);
        if inner > 1 && column + n <= inner {
            let slab = &self.values[(slab * axis + block * B) * inner..][..B * inner];
            return strip.read_columns(slab, inner, column, n);
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
            for (line, &element) in strip.values_mut().chunks_exact_mut(STRIP).zip(&elements) {
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

impl<T: HostElement, const B: usize> NullaryFnOnce for Quantize<'_, T, B> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        if self.task.view.inner == 1 && self.task.scheme.search == ScaleSearch::Amax {
            self.along_rows();
        } else {
            self.across_rows();
        }
    }
}

impl<T: HostElement, const B: usize> Quantize<'_, T, B> {
    /// The blocked axis is contiguous: a strip is 32 blocks of one row.
    #[inline(always)]
    fn along_rows(self) {
        let Rows { values, view, scheme, first, .. } = self.task;
        let blocks = view.axis / B;
        let tile_rows = scheme.tile_rows();
        let mut strip = Strip::<B>::new(Order::Along);
        let mut tile_amax = vec![0.0; if tile_rows > 1 { blocks } else { 0 }];
        let tiles = self.codes.chunks_mut(tile_rows * view.axis / 2);
        for (tile, (codes, scales)) in
            tiles.zip(self.scales.chunks_mut(tile_rows * blocks)).enumerate()
        {
            let first = first + tile * tile_rows;
            let read = |strip: &mut Strip<B>, row: usize, start: usize, n: usize| {
                let at = (first + row) * view.axis + start * B;
                T::read(&values[at..][..n * B], &mut strip.values_mut()[..n * B]);
            };
            let rows = scales.len() / blocks;
            if tile_rows > 1 {
                tile_amax.fill(0.0);
                for row in 0..rows {
                    for start in (0..blocks).step_by(STRIP) {
                        let n = STRIP.min(blocks - start);
                        read(&mut strip, row, start, n);
                        strip.find_amax();
                        for (tile, &block) in tile_amax[start..][..n].iter_mut().zip(&strip.amax) {
                            *tile = larger(*tile, block);
                        }
                    }
                }
            }
            let lines = codes.chunks_exact_mut(view.axis / 2).zip(scales.chunks_exact_mut(blocks));
            for (row, (codes, scales)) in lines.enumerate() {
                let factor = self.task.factor(first + row);
                (0..STRIP).for_each(|block| strip.set_factor(block, factor));
                for start in (0..blocks).step_by(STRIP) {
                    let n = STRIP.min(blocks - start);
                    read(&mut strip, row, start, n);
                    if tile_rows > 1 {
                        strip.amax[..n].copy_from_slice(&tile_amax[start..][..n]);
                    } else {
                        strip.find_amax();
                    }
                    strip.find_scales(scheme);
                    if let Rounding::Stochastic(draw) = scheme.rounding {
                        for block in 0..n {
                            let at = (first + row) * view.axis + (start + block) * B;
                            strip.draw(block, at, draw);
                        }
                    }
                    strip.find_codes(scheme);
                    scales[start..][..n].copy_from_slice(&strip.scales[..n]);
                    let codes = codes[start * B / 2..][..n * B / 2].chunks_exact_mut(B / 2);
                    codes.enumerate().for_each(|(block, bytes)| strip.write_codes(block, bytes));
                }
            }
        }
    }

    /// The blocked axis is strided, or a search looks at neighbouring rows: a strip is one block of each of
    /// 32 of them.
    #[inline(always)]
    fn across_rows(self) {
        let Rows { view, scheme, importance, first, .. } = self.task;
        let blocks = view.axis / B;
        let rows = self.scales.len() / blocks;
        let mut strip = Strip::<B>::new(Order::Across);
        // All strips of a block before the next block: neighbours share the lines they read, and a
        // task is narrow enough that the lines it writes stay cached until the next block.
        for block in 0..blocks {
            let importance = importance.of_block(block, B);
            for at in (0..rows).step_by(STRIP) {
                let n = STRIP.min(rows - at);
                for index in 0..n {
                    strip.set_factor(index, self.task.factor(first + at + index));
                }
                self.task.read(&mut strip, first + at, block, n);
                strip.find_amax();
                if scheme.blocks == Blocks::Tile16x16 {
                    strip.share_amax(n);
                }
                if let Rounding::Stochastic(draw) = scheme.rounding {
                    for index in 0..n {
                        strip.draw(index, (first + at + index) * view.axis + block * B, draw);
                    }
                }
                strip.choose(scheme, importance, n);
                for index in 0..n {
                    self.scales[(at + index) * blocks + block] = strip.scales[index];
                    let start = ((at + index) * view.axis + block * B) / 2;
                    strip.write_codes(index, &mut self.codes[start..start + B / 2]);
                }
            }
        }
    }
}

impl<const B: usize> Strip<B> {
    /// Chooses scales and codes of the first `n` blocks from amax and values.
    #[inline(always)]
    fn choose(&mut self, scheme: &Fp4Scheme, importance: BlockImportance<'_>, n: usize) {
        self.find_scales(scheme);
        match (scheme.search, importance) {
            (ScaleSearch::Amax, _) => {}
            (ScaleSearch::FourOverSix { error, .. }, _) => {
                self.search_four_over_six(scheme, error, n);
            }
            (ScaleSearch::Sse, BlockImportance::Channels(weights)) => {
                self.search_sse(scheme, Some(weights), n);
            }
            (ScaleSearch::Sse, _) => self.search_sse(scheme, None, n),
            (ScaleSearch::Hessian, BlockImportance::Hessian(hessian)) => {
                self.search_hessian(scheme, hessian, n);
            }
            (ScaleSearch::CoordinateDescent, BlockImportance::Hessian(hessian)) => {
                self.search_coordinate_descent(scheme, hessian, n);
                return;
            }
            (
                ScaleSearch::Joint | ScaleSearch::Admm | ScaleSearch::AdmmPublished,
                BlockImportance::Hessian(hessian),
            ) => return self.search_points(scheme, hessian, n),
            (search, importance) => unreachable!("checked before: {search:?} with {importance:?}"),
        }
        self.find_codes(scheme);
    }

    /// Reads `n` columns from `column` on of a `[B, inner]` slab, one block each.
    #[inline(always)]
    pub(super) fn read_columns<T: HostElement>(
        &mut self,
        slab: &[T],
        inner: usize,
        column: usize,
        n: usize,
    ) {
        for (k, line) in self.values_mut().chunks_exact_mut(STRIP).enumerate() {
            let source = &slab[k * inner + column..][..n];
            // A whole line, of known length, is a few instructions instead of a call.
            if n == STRIP {
                T::read(&source[..STRIP], &mut line[..STRIP]);
            } else {
                T::read(source, &mut line[..n]);
            }
        }
    }

    /// Writes the first `n` blocks as columns of a `[B, inner]` slab.
    #[inline(always)]
    pub(super) fn write_columns<T: HostElement>(
        &self,
        slab: &mut [T],
        inner: usize,
        column: usize,
        n: usize,
    ) {
        for (k, line) in self.values().chunks_exact(STRIP).enumerate() {
            let target = &mut slab[k * inner + column..][..n];
            if n == STRIP {
                T::write(&line[..STRIP], &mut target[..STRIP]);
            } else {
                T::write(&line[..n], target);
            }
        }
    }

    /// Gives the blocks of each group of 16 neighbouring rows the largest amax among them.
    #[inline(always)]
    fn share_amax(&mut self, n: usize) {
        for tile in self.amax[..n].chunks_mut(16) {
            let largest = tile.iter().fold(0.0, |largest, &amax| larger(largest, amax));
            tile.fill(largest);
        }
    }
}

/// The larger of two magnitudes; NaN if one is.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    f32::from_bits(a.to_bits().max(b.to_bits()))
}

/// How far fake quantization goes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Restore {
    /// To values: `(element x block scale) x tensor scale`.
    #[default]
    Values,
    /// To `element x block scale`, which bf16 and even shorter floats hold exactly: what a product of
    /// quantized matrices multiplies, before it is multiplied with both tensor scales.
    BlockScaled,
}

/// Writes what [`dequantize`](super::dequantize) makes of [`quantize`], without the packed form.
///
/// # Errors
/// As [`quantize`].
pub fn fake_quantize<T: HostElement>(
    values: &[T],
    view: View,
    scheme: &Fp4Scheme,
    amax: &[f32],
    restore: Restore,
    output: &mut [T],
) -> Result<(), SearchError> {
    scheme.check_columns(view.axis)?;
    check_length("values", view.len(), values.len())?;
    check_length("output", view.len(), output.len())?;
    check_length("amax", scheme.tensor_scales(view.packed_rows()), amax.len())?;
    let packed = quantize_packed(values, view, scheme, amax, Importance::Uniform)?;
    let packed = super::PackedView {
        format: packed.format,
        block_size: packed.block_size,
        codes: &packed.codes,
        scales: &packed.scales,
        tensor_scale: match restore {
            Restore::Values => packed.tensor_scale.as_slice(),
            Restore::BlockScaled => &[1.0],
        },
    };
    super::dequantize(packed, view, output)
}
