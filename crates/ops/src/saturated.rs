//! [`Saturated`]: the gradient of elements beyond the largest code.

use serde::{Deserialize, Serialize};

/// Gradient of an element beyond the largest code of its block, which fake quantization clips.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Saturated {
    /// The gradient of its quantized value, as for any other element.
    #[default]
    PassThrough,
    /// Zero, since a small change of the element changes nothing.
    Zero,
}
