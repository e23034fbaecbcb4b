//! Input and result of the reference searches: a block, and the choice for it.

use burn_fp4_formats::E2M1;

use crate::rule::TensorFactor;
use crate::scale_grid::{BlockNormalization, is_zero};
use crate::scheme::Fp4Scheme;

/// A block, or the rows of a tile, with one tensor factor.
pub(super) struct Block<'a> {
    pub(super) scheme: &'a Fp4Scheme,
    pub(super) rows: &'a [&'a [f32]],
    pub(super) tensor: TensorFactor,
    pub(super) amax: f32,
    pub(super) normalization: BlockNormalization,
}

/// The scale of a block, and the E2M1 values of its codes if they are not the nearest ones.
pub(super) struct Choice {
    pub(super) scale: u8,
    pub(super) elements: Option<Vec<f32>>,
}

impl Choice {
    /// Chooses a scale with the nearest codes.
    pub(super) fn nearest(scale: u8) -> Self {
        Self { scale, elements: None }
    }
}

impl<'a> Block<'a> {
    pub(super) fn new(
        scheme: &'a Fp4Scheme,
        rows: &'a [&'a [f32]],
        tensor: TensorFactor,
        amax: f32,
    ) -> Self {
        let normalization =
            BlockNormalization::new(scheme.format().row().scale_grid(), amax, tensor.encode);
        Self { scheme, rows, tensor, amax, normalization }
    }

    /// Returns the scale of the rule for the amax.
    pub(super) fn rule_scale(&self) -> u8 {
        self.scheme.rule.block_scale(self.amax, self.tensor)
    }

    /// Returns the scale with the smallest cost. Of equals the rule's own wins, then the smallest.
    pub(super) fn cheapest(&self, cost: impl Fn(u8) -> f32) -> u8 {
        let mut best = self.start(&cost);
        if self.normalization.searchable {
            for scale in self.normalization.scales() {
                let cost = cost(scale);
                if cost < best.0 {
                    best = (cost, scale);
                }
            }
        }
        best.1
    }

    /// Returns the rule's scale, from which a search starts, with its cost: infinite if the block
    /// is not searchable, if the scale is 0, or if the cost is NaN.
    pub(super) fn start(&self, cost: impl FnOnce(u8) -> f32) -> (f32, u8) {
        let scale = self.rule_scale();
        let counts =
            self.normalization.searchable && !is_zero(self.normalization.grid, scale.into());
        (if counts { finite(cost(scale)) } else { f32::INFINITY }, scale)
    }

    /// Normalizes the elements of a row.
    pub(super) fn scaled(&self, row: usize) -> Vec<f32> {
        self.rows[row].iter().map(|element| element * self.normalization.factor).collect()
    }

    /// Returns the E2M1 values nearest to the elements of a row, rounded by the rule.
    pub(super) fn nearest(&self, row: usize, scale: u8) -> Vec<f32> {
        let rule = self.scheme.rule;
        let multiplier = rule.multiplier(scale, self.tensor);
        let code = |&element: &f32| rule.code(element, scale, multiplier);
        self.rows[row].iter().map(|element| E2M1.decode(code(element))).collect()
    }

    /// Computes the errors of a normalized row, each rounded once.
    pub(super) fn errors(&self, row: usize, scale: u8, values: &[f32]) -> Vec<f32> {
        let scale = self.normalization.value(scale);
        let scaled = self.scaled(row);
        scaled.iter().zip(values).map(|(x, value)| (-value).mul_add(scale, *x)).collect()
    }
}

/// Makes a cost comparable: NaN and infinity are worse than everything.
fn finite(cost: f32) -> f32 {
    if cost < f32::INFINITY { cost } else { f32::INFINITY }
}
