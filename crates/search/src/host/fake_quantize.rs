//! Quantization and back in one call.

use burn_fp4_formats::check_length;

use super::dense::{HostElement, View};
use super::dequantize::{PackedView, dequantize};
use super::quantize::quantize_packed;
use crate::error::SearchError;
use crate::importance::Importance;
use crate::scheme::Fp4Scheme;

/// Sets the values that fake quantization computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DequantTarget {
    /// `(element x block scale) x tensor scale`.
    #[default]
    Full,
    /// `element x block scale`, exact in bf16 and even shorter floats. Products of quantized
    /// matrices multiply these values, then the sums by both tensor scales.
    WithoutTensorScale,
}

/// Quantizes values as [`quantize`](super::quantize) does, and writes the result of [`dequantize`].
///
/// # Errors
/// As [`quantize`](super::quantize).
pub fn fake_quantize<T: HostElement>(
    values: &[T],
    view: View,
    scheme: &Fp4Scheme,
    amax: &[f32],
    target: DequantTarget,
    output: &mut [T],
) -> Result<(), SearchError> {
    scheme.check_columns(view.axis)?;
    check_length("values", view.len(), values.len())?;
    check_length("output", view.len(), output.len())?;
    check_length("amax", scheme.tensor_scales(view.packed_rows()), amax.len())?;
    let packed = quantize_packed(values, view, scheme, amax, Importance::Uniform)?;
    let packed = PackedView::from(&packed);
    let packed = match target {
        DequantTarget::Full => packed,
        DequantTarget::WithoutTensorScale => PackedView { tensor_scale: &[1.0], ..packed },
    };
    dequantize(packed, view, output)
}
