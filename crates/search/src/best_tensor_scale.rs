//! The search for a tensor scale, which shifts the grid of block scales.
//!
//! NVFP4 has eight block scales in every binade, so one of them is within 6 % of any real number.
//! The tensor scale decides which. The candidates are amaxes from the tensor's own to twice it, in
//! equal steps of the logarithm; beyond, the same grid repeats. Larger ones also leave room for
//! scales above the one that puts the largest element on 6.

use std::iter::{once, successors};

use burn_fp4_formats::Packed;
use rayon::prelude::*;

use crate::error::SearchError;
use crate::host::{self, HostElement, PackedView, View};
use crate::importance::{BlockImportance, Importance};
use crate::scheme::Fp4Scheme;

/// Number of tensor scales to try.
const TENSOR_SCALES: usize = 16;

/// Yields the amaxes to try for a tensor with this amax, itself first. Candidates that overflow are
/// left out.
///
/// ```
/// use burn_fp4_search::tensor_scale_candidates;
///
/// let candidates: Vec<f32> = tensor_scale_candidates(3.0).collect();
/// assert_eq!((candidates.len(), candidates[0]), (16, 3.0));
/// assert!(candidates.is_sorted() && candidates[15] < 6.0);
/// ```
pub fn tensor_scale_candidates(amax: f32) -> impl Iterator<Item = f32> {
    // Roots and products are the same on every machine, which `exp2` is not.
    let ratio = (0..TENSOR_SCALES.ilog2()).fold(2.0f64, |root, _| root.sqrt());
    let powers = successors(Some(1.0), move |power| Some(power * ratio));
    let larger = powers.take(TENSOR_SCALES).skip(1).map(move |power| amax * power as f32);
    once(amax).chain(larger.filter(|amax| amax.is_finite()))
}

/// Quantizes a tensor with the tensor scale that has the smallest total cost, and returns it
/// packed.
///
/// # Errors
/// As [`host::quantize_by_importance`], and [`SearchError::Scheme`] if the scheme has no tensor
/// scale to choose.
pub fn quantize_with_best_tensor_scale<T: HostElement>(
    values: &[T],
    view: View,
    scheme: &Fp4Scheme,
    importance: Importance<'_>,
) -> Result<Packed, SearchError> {
    scheme.check_tensor_scale()?;
    let amax = host::amax(values, view, scheme)[0];
    let mut best: Option<(f64, Packed)> = None;
    for amax in tensor_scale_candidates(amax) {
        let scheme = scheme.with_chosen_amax(amax);
        let packed = host::quantize_packed(values, view, &scheme, &[amax], importance)?;
        let cost = total_cost(values, view, &packed, importance)?;
        if best.as_ref().is_none_or(|(least, _)| cost < *least) {
            best = Some((cost, packed));
        }
    }
    let (_, packed) = best.expect("there are candidates");
    Ok(packed)
}

/// Computes the total cost of the errors of a packed tensor, in f64.
fn total_cost<T: HostElement>(
    values: &[T],
    view: View,
    packed: &Packed,
    importance: Importance<'_>,
) -> Result<f64, SearchError> {
    let size = packed.block_size;
    if let Importance::Uniform = importance {
        return Ok(host::squared_error(values, PackedView::from(packed), view)?[0]);
    }
    let quantized = packed.dequantize();
    let row_cost = |(row, quantized): (usize, &[f32])| {
        let start = row / view.inner * view.axis * view.inner + row % view.inner;
        let errors: Vec<f32> = quantized
            .iter()
            .enumerate()
            .map(|(k, quantized)| values[start + k * view.inner].to_f32() - quantized)
            .collect();
        let blocks = errors.chunks_exact(size).enumerate();
        blocks
            .map(|(block, errors)| match importance.of_block(block, size) {
                BlockImportance::Hessian(hessian) => f64::from(hessian.cost(errors)),
                BlockImportance::Channels(weights) => errors
                    .iter()
                    .zip(weights)
                    .map(|(&error, &weight)| f64::from(weight) * f64::from(error).powi(2))
                    .sum(),
                BlockImportance::Uniform => errors.iter().map(|&x| f64::from(x).powi(2)).sum(),
            })
            .sum::<f64>()
    };
    let costs: Vec<f64> =
        quantized.par_chunks_exact(view.axis.max(1)).enumerate().map(row_cost).collect();
    Ok(costs.iter().sum())
}
