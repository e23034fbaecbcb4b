//! The Hessian of a block, as searches read it: `r^T H r` is what errors `r` cost.
//!
//! What the units of a cube share of a block lies in shared memory where the device gains by that,
//! in vectors of four:
//!
//! ```text
//! | H, row by row: size x size / 4 | bounds: size / 4 | steps: size / 4 |
//! ```

use cubecl::prelude::*;

/// The Hessian of a block.
#[derive(CubeType)]
pub(crate) struct BlockHessian<'a, H: Size> {
    /// The rows of the matrix in vectors of four, from `first` on; if staged, what [`stage`] adds.
    values: &'a [Vector<f32, H>],
    first: u32,
    /// 0, of which the compiler knows no more than that it is 0 or 1; see [`again`].
    stay: u32,
    /// Lower bounds of the cost of an error of each channel, from `channel` on; not read if staged.
    bounds: &'a [f32],
    channel: u32,
    #[cube(comptime)]
    in_shared_memory: bool,
}

/// The Hessian of the block that starts at a channel.
#[cube]
pub(crate) fn block_hessian<'a, H: Size>(
    values: &'a [Vector<f32, H>],
    first: u32,
    stay: u32,
    bounds: &'a [f32],
    channel: u32,
    #[comptime] in_shared_memory: bool,
) -> BlockHessian<'a, H> {
    BlockHessian::<'a, H> { values, first, stay, bounds, channel, in_shared_memory }
}

/// Vectors that are staged of a block.
pub(crate) const fn shared_vectors(size: u32) -> u32 {
    (size * size + 2 * size) / 4
}

/// Puts into shared memory what the units of a cube read of a block. The bounds are those of all
/// channels.
#[cube]
pub(crate) fn load_shared<H: Size>(
    shared: &mut [Vector<f32, H>],
    hessians: &[Vector<f32, H>],
    bounds: &[f32],
    block: u32,
    #[comptime] size: u32,
) {
    let vectors = comptime!(size * size / 4);
    let quads = comptime!(size / 4);
    let first = block * vectors;
    let mut at = UNIT_POS;
    while at < vectors {
        shared[at as usize] = hessians[(first + at) as usize];
        at += CUBE_DIM;
    }
    if UNIT_POS < quads {
        let mut four_bounds = Vector::<f32, H>::empty();
        let mut four_steps = Vector::<f32, H>::empty();
        #[unroll]
        for index in 0..4u32 {
            let element = UNIT_POS * 4 + index;
            let bound = bounds[(block * size + element) as usize];
            let diagonal = hessians[(first + element * quads + UNIT_POS) as usize];
            let step = step_by(diagonal.extract(comptime!(index as usize)));
            four_bounds.insert(comptime!(index as usize), bound);
            four_steps.insert(comptime!(index as usize), step);
        }
        shared[(UNIT_POS + vectors) as usize] = four_bounds;
        shared[(UNIT_POS + comptime!(vectors + quads)) as usize] = four_steps;
    }
}

/// The same for another pass over the matrix, given a number that the compiler cannot know to be
/// the same as that of another pass: if it knew that nothing changes, it would keep all of the
/// matrix from one pass to the next, and spill it.
#[cube]
pub(crate) fn again<'a, H: Size>(hessian: &BlockHessian<'a, H>, turn: u32) -> BlockHessian<'a, H> {
    BlockHessian::<'a, H> {
        values: hessian.values,
        first: anew::<H>(hessian.first, hessian, turn),
        stay: hessian.stay,
        bounds: hessian.bounds,
        channel: hessian.channel,
        in_shared_memory: comptime!(hessian.in_shared_memory),
    }
}

/// The same bits for another pass, as by [`again`]: what is made of them is computed in each pass,
/// and no register keeps it.
#[cube]
pub(crate) fn anew<H: Size>(bits: u32, hessian: &BlockHessian<'_, H>, turn: u32) -> u32 {
    bits + (turn & hessian.stay)
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
pub(crate) fn bound<H: Size>(
    hessian: &BlockHessian<'_, H>,
    #[comptime] element: u32,
    #[comptime] size: u32,
) -> f32 {
    if comptime!(hessian.in_shared_memory) {
        let four = row_vector::<H>(hessian, comptime!(size * size / 4 + element / 4));
        four.extract(comptime!((element % 4) as usize))
    } else {
        hessian.bounds[(hessian.channel + element) as usize]
    }
}

/// What the gradient of an element is multiplied by for the step that takes it to 0.
#[cube]
pub(crate) fn step<H: Size>(
    hessian: &BlockHessian<'_, H>,
    #[comptime] element: u32,
    #[comptime] size: u32,
) -> f32 {
    if comptime!(hessian.in_shared_memory) {
        let four = row_vector::<H>(hessian, comptime!((size + 1) * size / 4 + element / 4));
        four.extract(comptime!((element % 4) as usize))
    } else {
        let diagonal = row_vector::<H>(hessian, comptime!(element * size / 4 + element / 4));
        step_by(diagonal.extract(comptime!((element % 4) as usize)))
    }
}

/// [`step`] by an element of the diagonal.
#[cube]
fn step_by(curvature: f32) -> f32 {
    select(curvature > 0.0f32, 1.0f32 / curvature, 0.0f32)
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
        largest = max(largest, error.abs() * bound::<H>(hessian, k, size));
    }
    largest * largest
}
