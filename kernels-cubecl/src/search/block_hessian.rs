//! The Hessian of a block, as searches read it: `r^T H r` is what errors `r` cost.

use cubecl::prelude::*;

/// The Hessian of a block.
#[derive(CubeType)]
pub(crate) struct BlockHessian<'a, H: Size> {
    /// The rows of the matrix in vectors of four, from `first` on.
    values: &'a [Vector<f32, H>],
    first: u32,
    /// 0, which the compiler does not know; see [`again`].
    stay: u32,
    /// Lower bounds of the cost of an error of each channel, from `channel` on.
    bounds: &'a [f32],
    channel: u32,
}

/// The Hessian of the block that starts at a channel.
#[cube]
pub(crate) fn block_hessian<'a, H: Size>(
    values: &'a [Vector<f32, H>],
    first: u32,
    stay: u32,
    bounds: &'a [f32],
    channel: u32,
) -> BlockHessian<'a, H> {
    BlockHessian::<'a, H> { values, first, stay, bounds, channel }
}

/// The same for each turn of a loop: the compiler would load all of the matrix before the loop, and
/// spill it, if it knew that nothing of it changes.
#[cube]
pub(crate) fn again<'a, H: Size>(hessian: &BlockHessian<'a, H>, turn: u32) -> BlockHessian<'a, H> {
    BlockHessian::<'a, H> {
        values: hessian.values,
        first: hessian.first + turn * hessian.stay,
        stay: hessian.stay,
        bounds: hessian.bounds,
        channel: hessian.channel,
    }
}

/// Four values of the matrix, counted row by row.
#[cube]
pub(crate) fn row_vector<H: Size>(
    hessian: &BlockHessian<'_, H>,
    #[comptime] vector: u32,
) -> Vector<f32, H> {
    hessian.values[(hessian.first + vector) as usize]
}

/// The bound of an element.
#[cube]
pub(crate) fn bound<H: Size>(hessian: &BlockHessian<'_, H>, #[comptime] element: u32) -> f32 {
    hessian.bounds[(hessian.channel + element) as usize]
}

/// `r^T H r`, in the order of the reference.
#[cube]
pub(crate) fn cost<H: Size>(
    errors: &Array<f32>,
    hessian: &BlockHessian<'_, H>,
    #[comptime] size: u32,
) -> f32 {
    let mut cost = 0.0f32.runtime();
    #[unroll]
    for i in 0..size {
        let mut sum = 0.0f32.runtime();
        #[unroll]
        for vector in 0..comptime!(i / 4 + 1) {
            let row = row_vector::<H>(hessian, comptime!(i * size / 4 + vector));
            #[unroll]
            for index in 0..4u32 {
                let j = comptime!(vector * 4 + index);
                let curvature = row.extract(comptime!(index as usize));
                if comptime!(j < i) {
                    // Twice either factor is exact.
                    sum = fma(curvature, 2.0f32 * errors[j as usize], sum);
                } else if comptime!(j == i) {
                    sum = fma(curvature, errors[j as usize], sum);
                }
            }
        }
        cost = fma(errors[i as usize], sum, cost);
    }
    cost
}
