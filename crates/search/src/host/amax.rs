//! The amax of tensors and blocks, and the rule's scales and multipliers.

use pulp::NullaryFnOnce;
use rayon::prelude::*;

use super::arch::{TASK, arch};
use super::element::HostElement;
use super::scale_grid::{ByFormat, Scales, by_format};
use super::simd_batch::{BATCH, BlockBatch, MAX_BLOCK, Order};
use super::view::View;
use crate::rule::{Normalization, ScaleForm, ScaleRule, at_least_smallest, reciprocal};
use crate::scale_grid::SIXTH;
use crate::scheme::Fp4Scheme;
use crate::tensor_scale::TensorScaling;

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

struct FindScales<'a, const B: usize> {
    batch: &'a mut BlockBatch<B>,
    rule: ScaleRule,
}

impl<const B: usize> ByFormat for FindScales<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<const FORMAT: usize>(self) {
        self.batch.find_scales_of::<FORMAT>(self.rule);
    }
}

impl<const B: usize> BlockBatch<B> {
    /// Fills `amax` from the values.
    ///
    /// Compared as integers, magnitudes order like the floats, and NaN is the largest.
    #[inline(always)]
    pub(super) fn find_amax(&mut self) {
        let magnitude = |value: f32| value.to_bits() & 0x7FFF_FFFF;
        let mut largest = [0; BATCH];
        match self.order {
            // Takes the larger of neighbours repeatedly. The compiler would vectorize a loop over
            // blocks by gathering their values from all over the batch.
            Order::Along => {
                let mut magnitudes = [0; BATCH * MAX_BLOCK];
                for (magnitude_bits, &value) in magnitudes.iter_mut().zip(self.values()) {
                    *magnitude_bits = magnitude(value);
                }
                let sixteens = match B {
                    16 => *magnitudes.first_chunk().expect("a batch of blocks of 16"),
                    _ => larger_of_pairs::<{ BATCH * 16 }>(&magnitudes),
                };
                let eights = larger_of_pairs::<{ BATCH * 8 }>(&sixteens);
                let fours = larger_of_pairs::<{ BATCH * 4 }>(&eights);
                let twos = larger_of_pairs::<{ BATCH * 2 }>(&fours);
                largest = larger_of_pairs(&twos);
            }
            Order::Across => {
                for line in self.values().chunks_exact(BATCH) {
                    for (largest, &value) in largest.iter_mut().zip(line) {
                        *largest = magnitude(value).max(*largest);
                    }
                }
            }
        }
        self.amax = largest.map(f32::from_bits);
    }

    /// Gives the blocks of each group of 16 neighbouring rows the largest amax among them.
    #[inline(always)]
    pub(super) fn share_amax(&mut self, n: usize) {
        for tile in self.amax[..n].chunks_mut(16) {
            let largest = tile.iter().fold(0.0, |largest, &amax| larger(largest, amax));
            tile.fill(largest);
        }
    }

    /// Fills `scales` and the multipliers from `amax`, using the rule.
    #[inline(always)]
    pub(super) fn find_scales(&mut self, rule: ScaleRule) {
        by_format(rule.row().format, FindScales { batch: self, rule });
    }

    /// Does the same as [`find_scales`](Self::find_scales) for a rule of this format.
    #[inline(always)]
    pub(super) fn find_scales_of<const FORMAT: usize>(&mut self, rule: ScaleRule) {
        match rule.row().scale {
            ScaleForm::TimesSixth => {
                self.round_scales::<FORMAT>(rule, |amax, encode| amax * (encode * SIXTH));
            }
            ScaleForm::DividedBySix => {
                self.round_scales::<FORMAT>(rule, |amax, encode| (amax / 6.0) * encode);
            }
            ScaleForm::WithoutTensorScale => {
                self.round_scales::<FORMAT>(rule, |amax, _| at_least_smallest(amax / 6.0));
            }
            ScaleForm::PowerOfTwo(rounding) => {
                for block in 0..BATCH {
                    self.scales[block] = Scales::<FORMAT>::power_of_two(self.amax[block], rounding);
                }
                let (_, multipliers) =
                    self.scales_of::<FORMAT>(rule, &self.scales.map(u32::from), &[0; BATCH]);
                self.multipliers = multipliers;
            }
        }
    }

    /// Rounds to the nearest scales, given their exact values, and sets the multipliers.
    #[inline(always)]
    fn round_scales<const FORMAT: usize>(
        &mut self,
        rule: ScaleRule,
        exact: impl Fn(f32, f32) -> f32,
    ) {
        let mut values = [0.0; BATCH];
        for block in 0..BATCH {
            let exact = exact(self.amax[block], self.encode[block]);
            (self.scales[block], values[block]) = Scales::<FORMAT>::round(exact);
        }
        self.multipliers =
            self.multipliers_of::<FORMAT>(rule, &self.scales.map(u32::from), &values);
    }

    /// Returns the multipliers, or divisors, of the elements of each block, given scales and their
    /// values without the tensor scale.
    #[inline(always)]
    pub(super) fn multipliers_of<const FORMAT: usize>(
        &self,
        rule: ScaleRule,
        codes: &[u32; BATCH],
        values: &[f32; BATCH],
    ) -> [f32; BATCH] {
        let mut multipliers = [0.0; BATCH];
        match rule.row().normalization {
            Normalization::Reciprocal => {
                for block in 0..BATCH {
                    multipliers[block] = reciprocal(values[block], self.decode[block]);
                }
            }
            Normalization::EncodeOverScale => {
                for block in 0..BATCH {
                    multipliers[block] = self.encode[block] / at_least_smallest(values[block]);
                }
            }
            Normalization::Division => multipliers = *values,
            Normalization::PowerReciprocal => {
                for block in 0..BATCH {
                    multipliers[block] = Scales::<FORMAT>::reciprocal_power(codes[block]);
                }
            }
            Normalization::PowerReciprocalOrOne => {
                for block in 0..BATCH {
                    let reciprocal = Scales::<FORMAT>::reciprocal_power(codes[block]);
                    multipliers[block] = if codes[block] == 0 { 1.0 } else { reciprocal };
                }
            }
        }
        multipliers
    }

    /// Returns the values of scales, relative to the normalization of the blocks, and the
    /// multipliers.
    #[inline(always)]
    pub(super) fn scales_of<const FORMAT: usize>(
        &self,
        rule: ScaleRule,
        codes: &[u32; BATCH],
        bases: &[u32; BATCH],
    ) -> ([f32; BATCH], [f32; BATCH]) {
        let mut values = [0.0; BATCH];
        for block in 0..BATCH {
            values[block] = Scales::<FORMAT>::value(codes[block], bases[block]);
        }
        (values, self.multipliers_of::<FORMAT>(rule, codes, &values))
    }

    /// Sets the scales and the multipliers.
    #[inline(always)]
    pub(super) fn take_scales<const FORMAT: usize>(
        &mut self,
        rule: ScaleRule,
        codes: &[u32; BATCH],
    ) {
        let kept = self.multipliers;
        let (_, multipliers) = self.scales_of::<FORMAT>(rule, codes, &[0; BATCH]);
        for block in 0..BATCH {
            let code = codes[block] as u8;
            // The rule's own scale keeps the rule's multiplier.
            let changed = code != self.scales[block];
            self.multipliers[block] = if changed { multipliers[block] } else { kept[block] };
            self.scales[block] = code;
        }
    }
}

/// Returns the larger of two magnitudes; NaN if one is.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    f32::from_bits(a.to_bits().max(b.to_bits()))
}

#[inline(always)]
fn larger_of_pairs<const N: usize>(values: &[u32]) -> [u32; N] {
    let mut larger = [0; N];
    for (larger, pair) in larger.iter_mut().zip(values.chunks_exact(2)) {
        *larger = pair[0].max(pair[1]);
    }
    larger
}
