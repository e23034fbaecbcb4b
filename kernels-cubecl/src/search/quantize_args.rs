//! The arguments of kernels that choose scales.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::arith::rule::{Factors, factors};
use crate::layout::place::{Extent, extent};
use crate::plan::{Launch, Problem, Recipe, Share};

/// A tensor to quantize, and how.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct QuantizeArgs<E: Int, N: Size> {
    /// The dense tensor, in vectors of words.
    pub(crate) values: &'static [Vector<E, N>],
    /// Largest magnitude of the tensor, or of each packed row.
    pub(crate) amax: &'static [f32],
    /// Weight of squared errors, for every channel; a dummy binding, never read, where there is
    /// none.
    pub(crate) weights: &'static [f32],
    pub(crate) extent: Extent,
    pub(crate) factors: Factors,
    #[cube(comptime)]
    pub(crate) recipe: Recipe,
    #[cube(comptime)]
    pub(crate) share: Share,
}

/// The arguments of a launch; `weights` are f32, one for every element along the axis.
pub(crate) fn quantize_args<E: Int, N: Size>(
    values: Handle,
    amax: Handle,
    weights: Option<Handle>,
    recipe: Recipe,
    problem: &Problem,
    launch: &Launch,
) -> QuantizeArgsLaunch<E, N> {
    let Problem { view, scheme, .. } = problem;
    let tensor_scales = scheme.tensor_scales(view.packed_rows());
    // SAFETY: the lengths are those of the problem.
    unsafe {
        QuantizeArgsLaunch::new(
            BufferArg::from_raw_parts(values, view.len() / launch.share.vector as usize),
            BufferArg::from_raw_parts(amax.clone(), tensor_scales),
            match weights {
                Some(weights) => BufferArg::from_raw_parts(weights, view.axis),
                None => BufferArg::from_raw_parts(amax, tensor_scales),
            },
            extent(problem, launch),
            factors(problem),
            recipe,
            launch.share,
        )
    }
}
