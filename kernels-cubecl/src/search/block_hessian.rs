//! The Hessian H of a block, as searches read it: `r^T H r` is the cost of errors `r`.
//!
//! The units of a cube share the data of a block, in shared memory if that is faster on the device,
//! as vectors of four:
//!
//! ```text
//! | H, row by row: size x size / 4 | bounds: size / 4 | steps: size / 4 |
//! ```

use cubecl::prelude::*;

/// The Hessian of a block.
#[derive(CubeType)]
pub(crate) struct BlockHessian<'a, H: Size> {
    /// Rows of the matrix in vectors of four, from `first` on. In shared memory, bounds and steps
    /// follow; see [`load_shared`].
    values: &'a [Vector<f32, H>],
    first: u32,
    /// 0, but the compiler only knows that it is 0 or 1; see [`again`].
    stay: u32,
    /// Lower bounds of the cost of each channel's error, from `channel` on; unread in shared
    /// memory.
    bounds: &'a [f32],
    channel: u32,
    #[cube(comptime)]
    in_shared_memory: bool,
}

/// Returns the Hessian of the block that starts at a channel.
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

/// Returns the number of vectors in shared memory.
pub(crate) const fn shared_vectors(size: u32) -> u32 {
    (size * size + 2 * size) / 4
}

/// Loads the data of a block into shared memory. `hessians` and `bounds` are of all blocks.
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

/// Returns the same Hessian for another pass. `turn` differs from pass to pass, so that the
/// compiler cannot prove that the loads repeat. Otherwise it would keep the whole matrix in
/// registers between passes, and spill.
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

/// Returns the same bits for another pass; see [`again`]. Values derived from them are computed in
/// each pass and occupy no registers between.
#[cube]
pub(crate) fn anew<H: Size>(bits: u32, hessian: &BlockHessian<'_, H>, turn: u32) -> u32 {
    bits + (turn & hessian.stay)
}

/// Returns four values of the matrix, counted row by row.
#[cube]
pub(crate) fn row_vector<H: Size>(
    hessian: &BlockHessian<'_, H>,
    #[comptime] vector: u32,
) -> Vector<f32, H> {
    hessian.values[(hessian.first + vector) as usize]
}

/// Returns the bound of an element.
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

/// Returns the factor that turns an element's gradient into the step that makes it 0.
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

/// Returns the [`step`] of an element from the diagonal.
#[cube]
fn step_by(diagonal: f32) -> f32 {
    select(diagonal > 0.0f32, 1.0f32 / diagonal, 0.0f32)
}

/// Returns `r^T H r` of a block's errors `r` with each of several scales, in the order of the
/// reference. A value of H is loaded once for all of them.
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
                let entry = row.extract(comptime!(index as usize));
                #[unroll]
                for scale in 0..scales {
                    if comptime!(j < i) {
                        let error = errors[comptime!((scale * size + j) as usize)];
                        // Doubling either factor is exact.
                        sums[scale as usize] = fma(entry, 2.0f32 * error, sums[scale as usize]);
                    } else if comptime!(j == i) {
                        let error = errors[comptime!((scale * size + j) as usize)];
                        sums[scale as usize] = fma(entry, error, sums[scale as usize]);
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

/// Returns a lower bound of the cost of the errors from `start` on.
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
