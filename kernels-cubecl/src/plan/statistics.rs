//! How matrices of statistics are summed up and factorized.

use burn_fp4_search::host::View;

use super::capability::{Capability, UNITS};
use super::problem::Dtype;
use super::refusal::Refusal;

/// Columns of a matrix that are eliminated at a time.
pub(crate) const PANEL: u32 = 64;

/// How a square matrix is factorized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FactorPlan {
    /// Blocks of [`PANEL`] columns, the last filled up.
    pub(crate) panels: u32,
    /// Units that eliminate one column after the other, with a barrier after each.
    pub(crate) units: u32,
}

impl FactorPlan {
    /// Rows and columns of the matrix in whole panels.
    pub(crate) fn side(&self) -> usize {
        (self.panels * PANEL) as usize
    }
}

/// Decides how the Hessian factor of this many channels is computed.
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

/// How products of activations are summed up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GramPlan {
    /// By matrix instructions.
    Mma,
    /// By matrix instructions, of f32 in three parts.
    MmaParts,
    /// Element by element.
    Plain,
}

/// How products of activations `[rows, channels]` are summed up.
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
