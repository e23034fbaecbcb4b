//! Quantization and back in one call.

use burn_fp4_formats::check_length;

use super::dequantize::{PackedView, dequantize};
use super::element::HostElement;
use super::quantize::quantize_packed;
use super::view::View;
use crate::error::SearchError;
use crate::importance::Importance;
use crate::scheme::Fp4Scheme;

/// What fake quantization dequantizes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DequantTarget {
    /// To values: `(element x block scale) x tensor scale`.
    #[default]
    Full,
    /// To `element x block scale`, which bf16 and even shorter floats hold exactly: what a product
    /// of quantized matrices multiplies, before it is multiplied by both tensor scales.
    WithoutTensorScale,
}

/// Writes what [`dequantize`] makes of what [`quantize`](super::quantize) makes of the values.
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
