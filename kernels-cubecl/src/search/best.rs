//! Candidates for the scale of a block, and the best so far.

use burn_fp4_search::formats::ScaleGrid;
use cubecl::prelude::*;

use crate::numeric::rule::{BlockScale, TensorFactor, factor_of};
use crate::numeric::scale_grid::{BlockNormalization, is_positive, value_in};
use crate::plan::Blueprint;

/// A scale to try.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Candidate {
    pub(crate) code: u32,
    /// Its value, relative to the block's normalization.
    pub(crate) value: f32,
    /// What elements are multiplied with, or divided by.
    pub(crate) factor: f32,
}

/// A scale that a search tries.
#[cube]
pub(crate) fn candidate(
    code: u32,
    normalization: &BlockNormalization,
    tensor: &TensorFactor,
    #[comptime] blueprint: Blueprint,
) -> Candidate {
    let value = value_in(normalization, code, comptime!(blueprint.grid()));
    Candidate { code, value, factor: factor_of(code, value, tensor, comptime!(blueprint.rule)) }
}

/// The rule's own scale.
#[cube]
pub(crate) fn own_candidate(
    own: &BlockScale,
    normalization: &BlockNormalization,
    #[comptime] blueprint: Blueprint,
) -> Candidate {
    let value = value_in(normalization, own.code, comptime!(blueprint.grid()));
    Candidate { code: own.code, value, factor: own.factor }
}

/// What an element is rounded from with a scale.
#[cube]
pub(crate) fn normalized(element: f32, tried: &Candidate, #[comptime] blueprint: Blueprint) -> f32 {
    if comptime!(blueprint.divides()) { element / tried.factor } else { element * tried.factor }
}

/// The best scale so far.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Best {
    pub(crate) cost: f32,
    pub(crate) code: u32,
}

/// What a search starts with: the rule's own scale, if it is one.
#[cube]
pub(crate) fn start(cost: f32, own: u32, #[comptime] grid: ScaleGrid) -> Best {
    let infinity = f32::reinterpret(0x7F80_0000u32);
    let positive = is_positive(own, grid);
    let counts = cost < infinity && positive;
    Best { cost: select(counts, cost, infinity), code: own }
}

/// Takes a scale, tried after all larger ones, if it is better: of equals the rule's own stays, of
/// others the smallest.
#[cube]
pub(crate) fn improve(best: &mut Best, cost: f32, code: u32, own: u32) {
    // Of a code that is not the rule's own, the cost is finite.
    let is_better = cost < best.cost || (cost == best.cost && best.code != own);
    best.cost = select(is_better, cost, best.cost);
    best.code = select(is_better, code, best.code);
}
