//! A block as the reference searches see it, and what they choose for it.

use burn_fp4_formats::E2M1;

use crate::scale_grid::{BlockNormalization, is_zero};
use crate::scheme::Fp4Scheme;
use crate::tensor_scale::TensorFactor;

/// A block, or the rows of a tile, of one tensor factor.
pub(super) struct Block<'a> {
    pub(super) scheme: &'a Fp4Scheme,
    pub(super) rows: &'a [&'a [f32]],
    pub(super) tensor: TensorFactor,
    pub(super) amax: f32,
    pub(super) normalization: BlockNormalization,
}

/// The scale of a block, and the E2M1 values of its codes where they need not be the nearest.
pub(super) struct Choice {
    pub(super) scale: u8,
    pub(super) elements: Option<Vec<f32>>,
}

impl Choice {
    /// A scale with the nearest codes.
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

    /// The scale that the rule makes of the amax.
    pub(super) fn rule_scale(&self) -> u8 {
        self.scheme.rule.block_scale(self.amax, self.tensor)
    }

    /// The scale with the smallest cost: the rule's own unless another is better, of several such
    /// the smallest.
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

    /// The scale that a search starts from, the rule's, with its cost: infinite if there is nothing
    /// to search for, if it is 0, or if the cost is NaN.
    pub(super) fn start(&self, cost: impl FnOnce(u8) -> f32) -> (f32, u8) {
        let scale = self.rule_scale();
        let counts =
            self.normalization.searchable && !is_zero(self.normalization.grid, scale.into());
        (if counts { finite(cost(scale)) } else { f32::INFINITY }, scale)
    }

    /// The elements of a row in the units of the block.
    pub(super) fn scaled(&self, row: usize) -> Vec<f32> {
        self.rows[row].iter().map(|element| element * self.normalization.factor).collect()
    }

    /// The E2M1 values nearest to the elements of a row, as the rule rounds them.
    pub(super) fn nearest(&self, row: usize, scale: u8) -> Vec<f32> {
        let rule = self.scheme.rule;
        let multiplier = rule.multiplier(scale, self.tensor);
        let code = |&element: &f32| rule.code(element, scale, multiplier);
        self.rows[row].iter().map(|element| E2M1.decode(code(element))).collect()
    }

    /// The errors of a row, in the units of the block, each rounded once.
    pub(super) fn errors(&self, row: usize, scale: u8, values: &[f32]) -> Vec<f32> {
        let scale = self.normalization.value(scale);
        let scaled = self.scaled(row);
        scaled.iter().zip(values).map(|(x, value)| (-value).mul_add(scale, *x)).collect()
    }
}

/// A cost that can be compared: NaN and infinity are worse than everything.
fn finite(cost: f32) -> f32 {
    if cost < f32::INFINITY { cost } else { f32::INFINITY }
}
