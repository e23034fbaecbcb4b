//! The random Hadamard transform that spreads outliers before a product is quantized.

use serde::{Deserialize, Serialize};

use crate::rounding::Draw;

/// Transforms every 16 neighbours `x` along an axis: `y_j = sum_i x_i s_i H_ij / 4`, where `s` are
/// signs and `H_ij` is -1 to the power of the number of bits that i and j share (Sylvester's
/// order).
///
/// The matrix is orthogonal: if both operands of a product are transformed, the product stays the
/// same. Source: TransformerEngine's reference quantizer, `with_rht`.
///
/// ```
/// use burn_fp4_search::Hadamard;
/// use burn_fp4_search::host::{View, hadamard};
///
/// let (view, transform) = (View::rows(1, 16), Hadamard::default());
/// let mut outlier = [0.0f32; 16];
/// outlier[3] = 8.0;
/// let (mut spread, mut back) = ([0.0; 16], [0.0; 16]);
/// hadamard(&outlier, view, transform, false, &mut spread)?;
/// assert!(spread.iter().all(|value| value.abs() == 2.0));
/// assert!((0..16).all(|j| spread[j] == 8.0 * transform.factor(3, j)));
/// hadamard(&spread, view, transform, true, &mut back)?;
/// assert_eq!(back, outlier);
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Hadamard {
    /// Bit i is set where `s_i` is -1.
    pub signs: u16,
}

impl Default for Hadamard {
    fn default() -> Self {
        Self::TRANSFORMER_ENGINE
    }
}

impl Hadamard {
    /// Number of values transformed together.
    pub const SIZE: usize = 16;

    /// The one vector of signs of TransformerEngine.
    pub const TRANSFORMER_ENGINE: Self = Self { signs: 0xD7E8 };

    /// Draws random signs.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        let [signs, ..] = Draw { seed, step: 0 }.group(0);
        Self { signs }
    }

    /// Returns element (i, j) of the matrix, 1/4 or -1/4.
    #[inline(always)]
    #[must_use]
    pub const fn factor(self, i: usize, j: usize) -> f32 {
        let negative = (self.signs as u32 >> i & 1) ^ ((i & j).count_ones() & 1);
        if negative == 1 { -0.25 } else { 0.25 }
    }
}
