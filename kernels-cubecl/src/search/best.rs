//! Candidates for the scale of a block, and the best so far.

use burn_fp4_search::formats::ScaleGrid;
use cubecl::prelude::*;

use crate::numeric::rule::{BlockScale, TensorFactor, factor_of};
use crate::numeric::scale_grid::{BlockNormalization, is_positive, value_in};
use crate::plan::Blueprint;

/// A scale that a search tries.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Candidate {
    pub(crate) code: u32,
    /// Its value, relative to the block's normalization.
    pub(crate) value: f32,
    /// Factor that elements are multiplied by, or divided by.
    pub(crate) factor: f32,
}

/// Returns a scale as a candidate.
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

/// Returns the rule's own scale as a candidate.
#[cube]
pub(crate) fn own_candidate(
    own: &BlockScale,
    normalization: &BlockNormalization,
    #[comptime] blueprint: Blueprint,
) -> Candidate {
    let value = value_in(normalization, own.code, comptime!(blueprint.grid()));
    Candidate { code: own.code, value, factor: own.factor }
}

/// Returns the value that is rounded to a code with a scale.
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

/// Returns the start of a search: the rule's own scale, at infinite cost if it is 0.
#[cube]
pub(crate) fn start(cost: f32, own: u32, #[comptime] grid: ScaleGrid) -> Best {
    let infinity = f32::reinterpret(0x7F80_0000u32);
    let positive = is_positive(own, grid);
    let counts = cost < infinity && positive;
    Best { cost: select(counts, cost, infinity), code: own }
}

/// Replaces the best scale if this one, tried after all larger ones, is better. With equal costs
/// the rule's own stays, otherwise the smallest wins.
#[cube]
pub(crate) fn improve(best: &mut Best, cost: f32, code: u32, own: u32) {
    // The cost of any code but the rule's own is finite.
    let is_better = cost < best.cost || (cost == best.cost && best.code != own);
    best.cost = select(is_better, cost, best.cost);
    best.code = select(is_better, code, best.code);
}
