use serde::{Deserialize, Serialize};

use crate::{Fp4Scheme, ScaleRule, SearchError};

/// Where the tensor scale comes from, for rules that have one.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TensorScaling {
    /// The amax of the whole tensor.
    #[default]
    Tensor,
    /// The amax of each row, a tensor scale per row ("per-token", TransformerEngine >= 2.16).
    Row,
    /// A given amax, as tensors that share a scale or were calibrated have.
    Amax(f32),
    /// A given multiplier, as a checkpoint holds it.
    Multiplier(f32),
}

/// The tensor scale as the two factors that the rules use, and the amax it came from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TensorFactor {
    /// Largest magnitude the factor was made for.
    pub amax: f32,
    /// What block scales are multiplied with before they are rounded ("S_enc").
    pub encode: f32,
    /// What dequantization multiplies with: the stored tensor scale ("S_dec").
    pub decode: f32,
}

impl TensorFactor {
    /// The factor of a tensor that has none.
    pub const ONE: Self = Self { amax: 1.0, encode: 1.0, decode: 1.0 };

    /// The factor for a tensor or row with this amax.
    ///
    /// amax 0 and amaxes so small that the quotient overflows give `encode` = FLT_MAX; an infinite
    /// amax gives 1; NaN gives NaN (TransformerEngine's reference, section "global scales").
    pub fn new(scheme: &Fp4Scheme, amax: f32) -> Self {
        if !scheme.rule.row().tensor_scale {
            return Self::ONE;
        }
        let range = scheme.largest_code_product();
        if let TensorScaling::Multiplier(multiplier) = scheme.tensor_scale {
            let encode = saturate(1.0 / multiplier);
            return Self { amax: multiplier * range, encode, decode: multiplier };
        }
        let encode = match scheme.rule {
            ScaleRule::Gist => range * (1.0 / amax),
            _ => range / amax,
        };
        let encode = if encode == 0.0 { 1.0 } else { saturate(encode) };
        Self { amax, encode, decode: 1.0 / encode }
    }
}

/// `min(value, FLT_MAX)` that keeps NaN.
fn saturate(value: f32) -> f32 {
    if value > f32::MAX { f32::MAX } else { value }
}

impl TensorScaling {
    /// # Errors
    /// [`SearchError::TensorScale`] if a given value is not finite and positive.
    pub(crate) fn validate(self) -> Result<(), SearchError> {
        let (what, found) = match self {
            Self::Tensor | Self::Row => return Ok(()),
            Self::Amax(found) => ("amax", found),
            Self::Multiplier(found) => ("multiplier", found),
        };
        // An amax of 0 is what an all-zero tensor has.
        if found.is_finite() && (found > 0.0 || (found == 0.0 && what == "amax")) {
            Ok(())
        } else {
            Err(SearchError::TensorScale { what, found })
        }
    }
}
