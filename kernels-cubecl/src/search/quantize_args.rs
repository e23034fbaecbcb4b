//! [`QuantizeArgs`]: arguments that all quantization kernels share.

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::numeric::rule::{TensorScaleArgs, tensor_scale_args};
use crate::plan::{Blueprint, Launch, Problem, ThreadTile};
use crate::tensor::indexing::{Dims, dims};

/// The tensor that is quantized, and the choices that decide how.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct QuantizeArgs<E: Int, N: Size> {
    /// The dense tensor, in vectors of words.
    pub(crate) values: &'static [Vector<E, N>],
    /// Largest magnitude of the tensor, or of each packed row.
    pub(crate) amax: &'static [f32],
    /// Weight of every channel's squared errors; a dummy binding without weights, never read.
    pub(crate) weights: &'static [f32],
    pub(crate) dims: Dims,
    pub(crate) scale_args: TensorScaleArgs,
    #[cube(comptime)]
    pub(crate) blueprint: Blueprint,
    #[cube(comptime)]
    pub(crate) thread_tile: ThreadTile,
}

/// Returns the arguments of a launch. `weights` are f32, one for every element along the axis.
pub(crate) fn quantize_args<E: Int, N: Size>(
    values: Handle,
    amax: Handle,
    weights: Option<Handle>,
    blueprint: Blueprint,
    problem: &Problem,
    launch: &Launch,
) -> QuantizeArgsLaunch<E, N> {
    let Problem { view, scheme, .. } = problem;
    let tensor_scales = scheme.tensor_scales(view.packed_rows());
    // SAFETY: the lengths match the problem.
    unsafe {
        QuantizeArgsLaunch::new(
            BufferArg::from_raw_parts(values, view.len() / launch.thread_tile.vector as usize),
            BufferArg::from_raw_parts(amax.clone(), tensor_scales),
            match weights {
                Some(weights) => BufferArg::from_raw_parts(weights, view.axis),
                None => BufferArg::from_raw_parts(amax, tensor_scales),
            },
            dims(problem, launch),
            tensor_scale_args(problem),
            blueprint,
            launch.thread_tile,
        )
    }
}
