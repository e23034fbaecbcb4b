//! What of a scheme a kernel is compiled for.

use burn_fp4_search::formats::ScaleGrid;
use burn_fp4_search::{Fp4Scheme, Rounding, ScaleRule, ScaleSearch, TensorScaling};

/// The choices of a scheme that a kernel is compiled for, and whether there are weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    pub(crate) rule: ScaleRule,
    pub(crate) search: ScaleSearch,
    /// Whether codes are drawn.
    pub(crate) stochastic: bool,
    pub(crate) block_size: u32,
    /// Whether errors have a weight per input channel.
    pub(crate) weighted: bool,
    /// Whether the tensor scale is given.
    pub(crate) given: bool,
    /// Whether there is one per packed row.
    pub(crate) by_row: bool,
}

impl Blueprint {
    /// The grid of the block scales.
    pub(crate) fn grid(&self) -> ScaleGrid {
        self.rule.row().format.row().scale_grid()
    }

    /// Whether elements are divided by their factor.
    pub(crate) fn divides(&self) -> bool {
        self.rule.row().normalization.divides()
    }

    pub(crate) fn of(scheme: &Fp4Scheme, weighted: bool) -> Self {
        let has_tensor_scale = scheme.rule.row().tensor_scale;
        Self {
            rule: scheme.rule,
            search: scheme.search,
            stochastic: scheme.rounding != Rounding::Nearest,
            block_size: scheme.block_size as u32,
            weighted,
            given: matches!(scheme.tensor_scale, TensorScaling::Multiplier(_)),
            by_row: has_tensor_scale && scheme.tensor_scale == TensorScaling::Row,
        }
    }
}
