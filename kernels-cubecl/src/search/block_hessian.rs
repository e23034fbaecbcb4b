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

/// `r^T H r` of the errors of a block with several scales, one after the other, each in the order
/// of the reference. What is loaded of H serves all of them.
#[cube]
pub(crate) fn costs<H: Size>(
    errors: &Array<f32>,
    hessian: &BlockHessian<'_, H>,
    #[comptime] size: u32,
    #[comptime] scales: u32,
) -> Array<f32> {
    let mut costs = Array::<f32>::new(comptime!(scales as usize));
    let mut sums = Array::<f32>::new(comptime!(scales as usize));
    #[unroll]
    for scale in 0..scales {
        costs[scale as usize] = 0.0f32;
    }
    #[unroll]
    for i in 0..size {
        #[unroll]
        for scale in 0..scales {
            sums[scale as usize] = 0.0f32;
        }
        #[unroll]
        for vector in 0..comptime!(i / 4 + 1) {
            let row = row_vector::<H>(hessian, comptime!(i * size / 4 + vector));
            #[unroll]
            for index in 0..4u32 {
                let j = comptime!(vector * 4 + index);
                let curvature = row.extract(comptime!(index as usize));
                #[unroll]
                for scale in 0..scales {
                    if comptime!(j < i) {
                        let error = errors[comptime!((scale * size + j) as usize)];
                        // Twice either factor is exact.
                        sums[scale as usize] = fma(curvature, 2.0f32 * error, sums[scale as usize]);
                    } else if comptime!(j == i) {
                        let error = errors[comptime!((scale * size + j) as usize)];
                        sums[scale as usize] = fma(curvature, error, sums[scale as usize]);
                    }
                }
            }
        }
        #[unroll]
        for scale in 0..scales {
            let error = errors[comptime!((scale * size + i) as usize)];
            costs[scale as usize] = fma(error, sums[scale as usize], costs[scale as usize]);
        }
    }
    costs
}

/// What errors that begin at `start` cost at least.
#[cube]
pub(crate) fn least_cost<H: Size>(
    errors: &Array<f32>,
    #[comptime] start: u32,
    hessian: &BlockHessian<'_, H>,
    #[comptime] size: u32,
) -> f32 {
    let mut largest = 0.0f32.runtime();
    #[unroll]
    for k in 0..size {
        let error = errors[comptime!((start + k) as usize)];
        largest = max(largest, error.abs() * bound::<H>(hessian, k));
    }
    largest * largest
}
