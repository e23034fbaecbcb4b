//! [`Saturated`]: which gradient an element beyond the largest code has.

use serde::{Deserialize, Serialize};

/// The gradient of an element beyond the largest code of its block, which fake quantization cuts
/// off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Saturated {
    /// That of its quantized value, as for any other.
    #[default]
    PassThrough,
    /// Zero: to change the element changes nothing.
    Zero,
}
