//! How often products and lookups ran straight from the codes.

use core::sync::atomic::{AtomicU64, Ordering};

/// How often products with packed weights and lookups of their rows ran, since the program started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FusedProducts {
    /// Products straight from the codes.
    pub fused: u64,
    /// Lookups of rows straight from the codes.
    pub lookups: u64,
    /// Dequantized first: a dense product is faster, a plan refused, or the device has no kernels.
    pub dense: u64,
}

pub(crate) static FUSED: AtomicU64 = AtomicU64::new(0);
pub(crate) static LOOKUPS: AtomicU64 = AtomicU64::new(0);
pub(crate) static DENSE: AtomicU64 = AtomicU64::new(0);

/// How often products with packed weights and lookups of their rows ran, since the program started.
///
/// ```
/// use burn_fp4_ops::{FusedProducts, fused_products};
///
/// assert_eq!(fused_products(), FusedProducts::default()); // nothing ran yet
/// ```
#[must_use]
pub fn fused_products() -> FusedProducts {
    FusedProducts {
        fused: FUSED.load(Ordering::Relaxed),
        lookups: LOOKUPS.load(Ordering::Relaxed),
        dense: DENSE.load(Ordering::Relaxed),
    }
}
