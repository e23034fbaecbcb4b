//! [`TensorScaling`]: the source of the tensor scale, and the pair of factors computed from it.

use burn_fp4_formats::TensorScale;
use serde::{Deserialize, Serialize};

/// Sets the source of the tensor scale, for rules that have one.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TensorScaling {
    /// The amax of the whole tensor.
    #[default]
    Tensor,
    /// The amax of each row, a tensor scale per row ("per-token", TransformerEngine >= 2.16).
    Row,
    /// A given amax, for tensors that share a scale or were calibrated.
    Amax(f32),
    /// A given multiplier, such as one from a checkpoint.
    Multiplier(f32),
}

/// Holds the tensor scale as the two factors that the rules use, with the amax it came from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TensorFactor {
    /// Largest magnitude that the factor was made for.
    pub amax: f32,
    /// Multiplier of block scales before they are rounded ("S_enc").
    pub encode: f32,
    /// Multiplier of dequantization: the stored tensor scale ("S_dec").
    pub decode: f32,
}

impl TensorFactor {
    /// The factor of a tensor without a tensor scale.
    pub const ONE: Self = Self { amax: 1.0, encode: 1.0, decode: 1.0 };
}

impl TensorScaling {
    /// Returns the tensor scale to store: one, or one per row.
    pub(crate) fn stored(self, factors: &[TensorFactor]) -> TensorScale {
        match self {
            Self::Row => TensorScale::PerRow(factors.iter().map(|f| f.decode).collect()),
            Self::Tensor | Self::Amax(_) | Self::Multiplier(_) => {
                TensorScale::One(factors[0].decode)
            }
        }
    }
}
