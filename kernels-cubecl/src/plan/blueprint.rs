//! The compile-time key of the quantization kernels.

use burn_fp4_search::formats::ScaleGrid;
use burn_fp4_search::{Fp4Scheme, Method, Rounding, ScaleRule, TensorScaling};

/// The parts of a scheme that a kernel is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Blueprint {
    pub(crate) rule: ScaleRule,
    pub(crate) method: Method,
    /// True if codes are rounded stochastically.
    pub(crate) stochastic: bool,
    pub(crate) block_size: u32,
    /// True if errors are weighted by input channel.
    pub(crate) weighted: bool,
    /// True if the scheme fixes the tensor scale.
    pub(crate) given: bool,
    /// True if each packed row has a tensor scale.
    pub(crate) by_row: bool,
}

impl Blueprint {
    /// Returns the grid of the block scales.
    pub(crate) fn grid(&self) -> ScaleGrid {
        self.rule.row().format.row().scale_grid()
    }

    /// Returns true if the rule divides elements by a factor instead of multiplying.
    pub(crate) fn divides(&self) -> bool {
        self.rule.row().normalization.divides()
    }

    pub(crate) fn of(scheme: &Fp4Scheme, weighted: bool) -> Self {
        let has_tensor_scale = scheme.rule.row().tensor_scale;
        Self {
            rule: scheme.rule,
            // What tells the kinds apart is outside of kernels.
            method: match scheme.method {
                Method::Sse(_) => Method::SSE,
                other => other,
            },
            stochastic: scheme.rounding != Rounding::Nearest,
            block_size: scheme.block_size as u32,
            weighted,
            given: matches!(scheme.tensor_scale, TensorScaling::Multiplier(_)),
            by_row: has_tensor_scale && scheme.tensor_scale == TensorScaling::Row,
        }
    }
}
