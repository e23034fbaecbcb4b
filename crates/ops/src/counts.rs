//! Counters of products and lookups, straight from the codes or dense.

use core::sync::atomic::{AtomicU64, Ordering};

/// Counts of products with packed weights and of lookups of their rows, since the program started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FusedProducts {
    /// Products straight from the codes.
    pub fused: u64,
    /// Lookups of rows straight from the codes.
    pub lookups: u64,
    /// Products and lookups of a dequantized weight, because a dense product is faster, a plan
    /// refused, or the device has no kernels.
    pub dense: u64,
}

pub(crate) static FUSED: AtomicU64 = AtomicU64::new(0);
pub(crate) static LOOKUPS: AtomicU64 = AtomicU64::new(0);
pub(crate) static DENSE: AtomicU64 = AtomicU64::new(0);

/// Returns the counts of products with packed weights and of lookups since the program started.
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
