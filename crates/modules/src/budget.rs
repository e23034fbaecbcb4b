//! [`Budget`]: the size that quantized weights may have.

use core::fmt;

use serde::{Deserialize, Serialize};

/// Limit on the size of all selected weights together, including those that stay dense. A tied
/// weight counts once for each place.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Budget {
    /// Mean bits per value, without tensor scales: NVFP4 takes 4.5, MXFP4 4.25.
    BitsPerWeight(f64),
    /// Bytes, with tensor scales.
    Bytes(usize),
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BitsPerWeight(bits) => write!(f, "a budget of {bits} bits per weight"),
            Self::Bytes(bytes) => write!(f, "a budget of {bytes} bytes"),
        }
    }
}
