//! Plans of Gram matrices and of their factorization.

use burn_fp4_search::host::View;

use super::capability::{Capability, UNITS};
use super::problem::Dtype;
use super::refusal::Refusal;

/// Columns of a matrix that are eliminated together.
pub(crate) const PANEL: u32 = 64;

/// Plan of the factorization of a square matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FactorPlan {
    /// Panels of [`PANEL`] columns; the last one is padded.
    pub(crate) panels: u32,
    /// Units that eliminate the columns of a panel in turn, with a barrier after each.
    pub(crate) units: u32,
}

impl FactorPlan {
    /// Returns the side of the matrix in whole panels.
    pub(crate) fn side(&self) -> usize {
        (self.panels * PANEL) as usize
    }
}

/// Plans the Hessian factor of this many channels.
///
/// # Errors
/// [`Refusal`] if the matrix is too large, or the device has no f64.
pub(crate) fn plan_factor(channels: usize, device: &Capability) -> Result<FactorPlan, Refusal> {
    let (expected, found) = (View::MAX_LEN, channels * channels);
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    if !device.doubles {
        return Err(Refusal::NoDoubles);
    }
    let units = if device.fast_shared_memory { UNITS } else { 1 };
    Ok(FactorPlan { panels: (channels as u32).div_ceil(PANEL), units })
}

/// Kernel that sums products of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GramPlan {
    /// Matrix instructions.
    Mma,
    /// Matrix instructions, with an f32 as three bf16.
    MmaParts,
    /// Scalar multiplications in f64.
    Plain,
}

/// Plans the sum of products of activations `[rows, channels]`.
///
/// # Errors
/// [`Refusal`] if there are too many values, or the device has no f64.
pub(crate) fn plan_gram(
    rows: usize,
    channels: usize,
    dtype: Dtype,
    device: &Capability,
) -> Result<GramPlan, Refusal> {
    let (expected, found) = (View::MAX_LEN, rows.saturating_mul(channels));
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    if !device.doubles {
        return Err(Refusal::NoDoubles);
    }
    Ok(match dtype {
        _ if !device.mma || !channels.is_multiple_of(8) => GramPlan::Plain,
        Dtype::F32 => GramPlan::MmaParts,
        Dtype::F16 | Dtype::Bf16 => GramPlan::Mma,
    })
}

#[cfg(test)]
mod tests {
    use super::super::capability::{CPU, GPU};
    use super::*;

    #[test]
    fn a_matrix_is_factorized_in_panels() {
        assert_eq!(plan_factor(65, &GPU), Ok(FactorPlan { panels: 2, units: UNITS }));
        assert_eq!(plan_factor(65, &CPU), Ok(FactorPlan { panels: 2, units: 1 }));
        assert!(matches!(plan_factor(1 << 16, &GPU), Err(Refusal::TooLarge { .. })));
        let single = Capability { doubles: false, ..GPU };
        assert_eq!(plan_factor(64, &single), Err(Refusal::NoDoubles));
    }

    #[test]
    fn gram_matrices_take_matrix_instructions_where_vectors_are_whole() {
        use Dtype::{Bf16, F32};
        assert_eq!(plan_gram(100, 64, Bf16, &GPU), Ok(GramPlan::Mma));
        assert_eq!(plan_gram(100, 64, F32, &GPU), Ok(GramPlan::MmaParts));
        assert_eq!(plan_gram(100, 60, Bf16, &GPU), Ok(GramPlan::Plain));
        let plain = Capability { mma: false, ..GPU };
        assert_eq!(plan_gram(100, 64, Bf16, &plain), Ok(GramPlan::Plain));
        let single = Capability { doubles: false, ..GPU };
        assert_eq!(plan_gram(100, 64, Bf16, &single), Err(Refusal::NoDoubles));
        let refused = plan_gram(1 << 16, 1 << 16, Bf16, &GPU);
        assert!(matches!(refused, Err(Refusal::TooLarge { .. })), "{refused:?}");
    }
}
