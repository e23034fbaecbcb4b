//! Where the tensor scale comes from, and the pair of factors that stand for it.

use burn_fp4_formats::TensorScale;
use serde::{Deserialize, Serialize};

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
    /// What block scales are multiplied by before they are rounded ("S_enc").
    pub encode: f32,
    /// What dequantization multiplies by: the stored tensor scale ("S_dec").
    pub decode: f32,
}

impl TensorFactor {
    /// The factor of a tensor that has none.
    pub const ONE: Self = Self { amax: 1.0, encode: 1.0, decode: 1.0 };
}

impl TensorScaling {
    /// The tensor scale that is stored: of the tensor, or of its rows.
    pub(crate) fn stored(self, factors: &[TensorFactor]) -> TensorScale {
        match self {
            Self::Row => TensorScale::PerRow(factors.iter().map(|f| f.decode).collect()),
            Self::Tensor | Self::Amax(_) | Self::Multiplier(_) => {
                TensorScale::One(factors[0].decode)
            }
        }
    }
}
