//! The Hadamard transform that spreads outliers before values are quantized.

use serde::{Deserialize, Serialize};

use crate::error::SearchError;
use crate::rounding::Draw;

/// Transforms every `n` neighbours `x` along an axis: `y_j = sum_i x_i s_i H_ij / sqrt(n)`, where
/// `H_ij` is -1 to the power of the number of bits that i and j share (Sylvester's order), and `s`
/// are signs, which are all 1 if more than 16 are transformed.
///
/// The matrix is orthogonal: if both operands of a product are transformed, the product stays the
/// same. Sources: TransformerEngine's reference quantizer, `with_rht`, for 16 neighbours with
/// signs, which training uses; FP-Quant's `hadamard_group_size` for 16 to 128 without signs, which
/// weights are quantized with (arXiv 2509.23202).
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
///
/// assert_eq!(Hadamard::with_signs(0), Hadamard::of_size(16)?);
/// let wide = Hadamard::of_size(64)?;
/// assert_eq!((wide.size(), wide.signs(), wide.factor(1, 1)), (64, 0, -0.125));
/// assert_eq!(wide.scale(), 0.125);
/// assert!(Hadamard::of_size(48).is_err());
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "WrittenHadamard")]
pub struct Hadamard {
    size: usize,
    signs: u16,
}

impl Default for Hadamard {
    fn default() -> Self {
        Self::TRANSFORMER_ENGINE
    }
}

impl Hadamard {
    /// Numbers of values that can be transformed together.
    pub const SIZES: [usize; 4] = [16, 32, 64, 128];

    /// The 16 neighbours and the one vector of signs of TransformerEngine.
    pub const TRANSFORMER_ENGINE: Self = Self::with_signs(0xD7E8);

    /// Transforms 16 neighbours with signs: bit i is set where `s_i` is -1.
    #[must_use]
    pub const fn with_signs(signs: u16) -> Self {
        Self { size: 16, signs }
    }

    /// Transforms 16 neighbours with random signs.
    #[must_use]
    pub fn seeded(seed: u64) -> Self {
        let [signs, ..] = Draw { seed, step: 0 }.group(0);
        Self::with_signs(signs)
    }

    /// Transforms this many neighbours without signs. The transform is its own inverse.
    ///
    /// # Errors
    /// [`SearchError::HadamardSize`] for a number other than [`SIZES`](Self::SIZES).
    pub fn of_size(size: usize) -> Result<Self, SearchError> {
        match Self::SIZES.contains(&size) {
            true => Ok(Self { size, signs: 0 }),
            false => Err(Self::unknown(size)),
        }
    }

    /// The error of a size that no transform has, or none with signs.
    const fn unknown(found: usize) -> SearchError {
        SearchError::HadamardSize { expected: &Self::SIZES, found }
    }

    /// Number of values transformed together.
    #[must_use]
    pub const fn size(self) -> usize {
        self.size
    }

    /// Returns the signs: bit i is set where `s_i` is -1.
    #[must_use]
    pub const fn signs(self) -> u16 {
        self.signs
    }

    /// Returns element (i, j) of the matrix: `1 / sqrt(n)`, or its negative.
    #[inline(always)]
    #[must_use]
    pub fn factor(self, i: usize, j: usize) -> f32 {
        let sign = if self.size == 16 { self.signs as u32 >> i & 1 } else { 0 };
        let negative = sign ^ ((i & j).count_ones() & 1);
        if negative == 1 { -self.scale() } else { self.scale() }
    }

    /// Returns `1 / sqrt(n)`, which is exact for 16 and 64.
    #[must_use]
    pub fn scale(self) -> f32 {
        1.0 / (self.size as f32).sqrt()
    }
}

/// A [`Hadamard`] in a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenHadamard {
    size: usize,
    signs: u16,
}

impl TryFrom<WrittenHadamard> for Hadamard {
    type Error = SearchError;

    fn try_from(written: WrittenHadamard) -> Result<Self, SearchError> {
        match written {
            WrittenHadamard { size: 16, signs } => Ok(Self::with_signs(signs)),
            WrittenHadamard { size, signs: 0 } => Self::of_size(size),
            WrittenHadamard { size, .. } => Err(Self::unknown(size)),
        }
    }
}
