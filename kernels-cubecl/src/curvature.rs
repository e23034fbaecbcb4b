//! What GPTQ makes of a Gram matrix; see `curvature.rs` in the search crate.
//!
//! `H^-1 = U^T U` needs no inverse of H: with H backward in both axes, and L its lower Cholesky factor, U is the
//! inverse of L, backward again. Both come from one pass over blocks of columns, in place and in f64. Of each block,
//! with D the lower factor of what is left on the diagonal, `Q = D^-1 [X, I, A^T]` is made of the rows of X, the part
//! of `L^-1` that is known, and of the column of A below. `Q` holds the next rows of X, and `A - Q^T Q` is what
//! is left of A and of the rows of X below: no more than one product for every block.

use burn_fp4_search::{Damped, Gram};
use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::plan::{FactorPlan, UNITS, plan_factor};
use crate::{Capability, Hessians, Refusal};

/// A [`Curvature`](burn_fp4_search::Curvature) in device memory, f32 but for the order.
#[derive(Debug, Clone)]
pub struct Curvature {
    /// [`factor`](burn_fp4_search::Curvature::factor), `[channels, channels]`.
    pub factor: Handle,
    /// What an error of a channel costs that nothing makes up for: the diagonal of the factor to the power of -2.
    pub costs: Handle,
    /// [`hessian`](burn_fp4_search::Curvature::hessian), `[channels, channels]`.
    pub hessian: Handle,
    /// [`blocks`](burn_fp4_search::Damped::blocks).
    pub blocks: Hessians,
    /// [`inverses`](burn_fp4_search::Damped::inverses).
    pub inverses: Handle,
    /// Where each block stands in a packed row, u32.
    pub order: Handle,
    /// u32: 1, or 0 if H is singular; the rest means nothing then.
    pub definite: Handle,
}

/// Factorizes H in f64, on the device, given the Gram matrix in f32: as devices sum it.
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn curvature(
    client: &Client,
    device: &Capability,
    gram: &Gram,
    damped: &Damped,
) -> Result<Curvature, Refusal> {
    let channels = damped.channels();
    let plan = plan_factor(channels, device)?;
    let side = plan.side();
    let upload = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
    let (blocks, size) = (damped.blocks(), damped.blocks().block_size());
    let of_blocks = damped.order().iter().step_by(size).map(|&channel| (channel / size) as u32);
    let curvature = Curvature {
        factor: client.empty(4 * channels * channels),
        costs: client.empty(4 * channels),
        hessian: client.empty(4 * channels * channels),
        blocks: Hessians { values: upload(blocks.values()), bounds: upload(blocks.bounds()) },
        inverses: upload(damped.inverses()),
        order: client.create_from_slice(u32::as_bytes(&of_blocks.collect::<Vec<_>>())),
        definite: client.create_from_slice(u32::as_bytes(&[1])),
    };
    if channels == 0 {
        return Ok(curvature);
    }
    let order: Vec<u32> = damped.order().iter().map(|&channel| channel as u32).collect();
    let square = channels * channels;
    let work = client.empty(8 * side * side);
    let panel = client.empty(8 * PANEL as usize * side);
    let inverse = client.empty(8 * (PANEL * PANEL) as usize);
    // SAFETY: the lengths are those that memory was just made with.
    let (of_work, of_panel, of_inverse, definite) = unsafe {
        (
            |vector: usize| BufferArg::from_raw_parts(work.clone(), side * side / vector),
            |vector: usize| {
                BufferArg::from_raw_parts(panel.clone(), PANEL as usize * side / vector)
            },
            || BufferArg::from_raw_parts(inverse.clone(), (PANEL * PANEL) as usize),
            || BufferArg::from_raw_parts(curvature.definite.clone(), 1),
        )
    };
    let dim = CubeDim::new_1d(UNITS);
    let rows_of = |side: usize| CubeCount::Static((side as u32).div_ceil(UNITS), side as u32, 1);
    let sums = gram.to_f32();
    let tiles = sums.len();
    // SAFETY: the lengths are those of the matrices; units beyond them do nothing.
    unsafe {
        arrange_kernel::launch_unchecked(
            client,
            rows_of(side),
            dim,
            BufferArg::from_raw_parts(client.create(Bytes::from_elems(sums)), tiles),
            BufferArg::from_raw_parts(client.create_from_slice(u32::as_bytes(&order)), channels),
            of_work(1),
            BufferArg::from_raw_parts(curvature.hessian.clone(), square),
            channels as u32,
            gram.layout().side() as u32,
            side as u32,
            damped.added(),
        );
    }
    for step in 0..plan.panels {
        // SAFETY: as above.
        unsafe {
            diagonal_kernel::launch_unchecked(
                client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(plan.units),
                of_work(1),
                of_inverse(),
                definite(),
                step,
                side as u32,
            );
            panel_kernel::launch_unchecked(
                client,
                CubeCount::Static(plan.panels, 1, 1),
                dim,
                of_work(1),
                of_inverse(),
                of_panel(1),
                step,
                side as u32,
            );
            update_kernel::launch_unchecked(
                client,
                CubeCount::Static(plan.panels, plan.panels - step, 1),
                dim,
                2,
                of_work(2),
                of_panel(2),
                step,
                side as u32,
            );
        }
    }
    // SAFETY: as above.
    unsafe {
        finish_kernel::launch_unchecked(
            client,
            rows_of(channels),
            dim,
            of_work(1),
            BufferArg::from_raw_parts(curvature.factor.clone(), square),
            BufferArg::from_raw_parts(curvature.costs.clone(), channels),
            definite(),
            channels as u32,
            side as u32,
        );
    }
    Ok(curvature)
}

/// Columns that are eliminated at a time.
pub(crate) const PANEL: u32 = 64;

/// Units of a cube beside each other, and what each computes of a square of [`PANEL`], both ways.
const LANES: u32 = 16;
const OWN: u32 = PANEL / LANES;

impl FactorPlan {
    /// Rows and columns of the matrix in whole panels.
    fn side(&self) -> usize {
        (self.panels * PANEL) as usize
    }
}

/// H in its order, from the tiles of a Gram matrix, and in f64 backward, with ones on what is left of the diagonal of
/// whole panels.
#[cube(launch_unchecked)]
fn arrange_kernel(
    gram: &[f32],
    order: &[u32],
    work: &mut [f64],
    hessian: &mut [f32],
    channels: u32,
    tile: u32,
    side: u32,
    added: f64,
) {
    let col = CUBE_POS_X * CUBE_DIM + UNIT_POS;
    let row = CUBE_POS_Y;
    if col < side {
        let mut value = select(row == col, 1.0f64, 0.0f64);
        if row < channels && col < channels {
            let (ahead_row, ahead_col) = (channels - 1 - row, channels - 1 - col);
            let (one, other) = (order[ahead_row as usize], order[ahead_col as usize]);
            let (above, below) = (min(one, other), max(one, other));
            // As tiles of the upper half lie.
            let column = below / tile;
            let before = (column * (column + 1u32) / 2u32 + above / tile) * tile * tile;
            let from = before + above % tile * tile + below % tile;
            value = f64::cast_from(gram[from as usize]) + select(row == col, added, 0.0f64);
            hessian[(ahead_row * channels + ahead_col) as usize] = f32::cast_from(value);
        }
        work[(row * side + col) as usize] = value;
    }
}

/// The inverse of the lower factor of a square on the diagonal, by the same steps as the whole, one column at a time.
#[cube(launch_unchecked)]
fn diagonal_kernel(work: &[f64], inverse: &mut [f64], definite: &mut [u32], step: u32, side: u32) {
    let first = step * PANEL * (side + 1);
    let all = comptime!(PANEL * PANEL);
    let mut square = Shared::<[f64]>::new_slice(comptime!(all as usize));
    let mut line = Shared::<[f64]>::new_slice(comptime!(PANEL as usize));
    let mut at = UNIT_POS;
    while at < all {
        square[at as usize] = work[(first + at / PANEL * side + at % PANEL) as usize];
        at += CUBE_DIM;
    }
    sync_cube();
    for k in 0..PANEL {
        let pivot = square[(k * PANEL + k) as usize];
        let positive = pivot > 0.0f64;
        if UNIT_POS == 0u32 && !positive {
            definite[0] = 0u32;
        }
        let mut at = UNIT_POS;
        while at < PANEL {
            let known = square[(k * PANEL + at) as usize];
            let below = square[(at * PANEL + k) as usize];
            let value = select(at < k, known, below);
            line[at as usize] = select(at == k, 1.0f64, value) / pivot.sqrt();
            at += CUBE_DIM;
        }
        sync_cube();
        let mut at = k * PANEL + UNIT_POS;
        while at < all {
            let (row, col) = (at / PANEL, at % PANEL);
            if row == k && col <= k {
                square[at as usize] = line[col as usize];
            } else if row > k && col <= row {
                let left = select(col == k, 0.0f64, square[at as usize]);
                square[at as usize] = fma(-line[row as usize], line[col as usize], left);
            }
            at += CUBE_DIM;
        }
        sync_cube();
    }
    let mut at = UNIT_POS;
    while at < all {
        inverse[at as usize] = select(at % PANEL > at / PANEL, 0.0f64, square[at as usize]);
        at += CUBE_DIM;
    }
}

/// Q, a square of each cube: the inverse of a factor times the rows of X, the identity, or the column of A below.
#[cube(launch_unchecked)]
fn panel_kernel(work: &[f64], inverse: &[f64], panel: &mut [f64], step: u32, side: u32) {
    let square = CUBE_POS_X;
    let row = UNIT_POS / LANES * OWN;
    let col = UNIT_POS % LANES;
    // Where the first value is that meets a column, and how far the next one.
    let is_below = square > step;
    let rows = step * PANEL * side + square * PANEL + col;
    let column = (square * PANEL + col) * side + step * PANEL;
    let first = select(is_below, column, rows);
    let next = select(is_below, 1u32, side);
    let beside = select(is_below, side, 1u32) * LANES;
    let mut sums = Array::<f64>::new(comptime!((OWN * OWN) as usize));
    #[unroll]
    for index in 0..comptime!(OWN * OWN) {
        sums[index as usize] = 0.0f64;
    }
    for k in 0..PANEL {
        let mut values = Array::<f64>::new(comptime!(OWN as usize));
        #[unroll]
        for c in 0..OWN {
            let known = work[(first + k * next + c * beside) as usize];
            let one = select(col + c * LANES == k, 1.0f64, 0.0f64);
            values[c as usize] = select(square == step, one, known);
        }
        #[unroll]
        for r in 0..OWN {
            let factor = inverse[((row + r) * PANEL + k) as usize];
            #[unroll]
            for c in 0..OWN {
                let own = comptime!((r * OWN + c) as usize);
                sums[own] = fma(factor, values[c as usize], sums[own]);
            }
        }
    }
    #[unroll]
    for r in 0..OWN {
        #[unroll]
        for c in 0..OWN {
            let at = (row + r) * side + square * PANEL + col + c * LANES;
            panel[at as usize] = sums[comptime!((r * OWN + c) as usize)];
        }
    }
}

/// `A - Q^T Q` for a square of the rows below, up to the diagonal, and Q itself for those that it was made of.
#[cube(launch_unchecked)]
fn update_kernel<V: Size>(
    work: &mut [Vector<f64, V>],
    panel: &[Vector<f64, V>],
    step: u32,
    side: u32,
) {
    let (col_square, row_square) = (CUBE_POS_X, step + CUBE_POS_Y);
    if row_square == step && col_square <= step {
        let mut at = UNIT_POS;
        while at < comptime!(PANEL * PANEL / 2) {
            let row = at / comptime!(PANEL / 2);
            let col = (col_square * PANEL) / 2 + at % comptime!(PANEL / 2);
            let from = row * side / 2 + col;
            work[(step * PANEL * side / 2 + from) as usize] = panel[from as usize];
            at += CUBE_DIM;
        }
    } else if col_square <= row_square {
        let vectors = comptime!(OWN / 2);
        let row = row_square * PANEL + UNIT_POS / LANES * OWN;
        let col = col_square * PANEL + UNIT_POS % LANES * OWN;
        let mut sums = Array::<Vector<f64, V>>::new(comptime!((OWN * vectors) as usize));
        #[unroll]
        for r in 0..OWN {
            #[unroll]
            for v in 0..vectors {
                let at = ((row + r) * side + col) / 2 + v;
                // What was in the place of the column is in Q.
                let left = if col_square == step {
                    Vector::<f64, V>::empty().fill(0.0f64)
                } else {
                    work[at as usize]
                };
                sums[comptime!((r * vectors + v) as usize)] = left;
            }
        }
        for k in 0..PANEL {
            let line = k * side;
            let mut below = Array::<Vector<f64, V>>::new(comptime!(vectors as usize));
            #[unroll]
            for v in 0..vectors {
                below[v as usize] = panel[((line + col) / 2 + v) as usize];
            }
            #[unroll]
            for half in 0..vectors {
                let beside = panel[((line + row) / 2 + half) as usize];
                #[unroll]
                for r in 0..2u32 {
                    let negative =
                        Vector::<f64, V>::empty().fill(-beside.extract(comptime!(r as usize)));
                    #[unroll]
                    for v in 0..vectors {
                        let sum = comptime!(((half * 2 + r) * vectors + v) as usize);
                        sums[sum] = fma(negative, below[v as usize], sums[sum]);
                    }
                }
            }
        }
        #[unroll]
        for r in 0..OWN {
            #[unroll]
            for v in 0..vectors {
                let at = ((row + r) * side + col) / 2 + v;
                work[at as usize] = sums[comptime!((r * vectors + v) as usize)];
            }
        }
    }
}

/// U in f32, and the costs of errors.
#[cube(launch_unchecked)]
fn finish_kernel(
    work: &[f64],
    factor: &mut [f32],
    costs: &mut [f32],
    definite: &mut [u32],
    channels: u32,
    side: u32,
) {
    let col = CUBE_POS_X * CUBE_DIM + UNIT_POS;
    let row = CUBE_POS_Y;
    if col < channels {
        let from = (channels - 1 - row) * side + channels - 1 - col;
        let known = f32::cast_from(work[from as usize]);
        let value = select(col < row, 0.0f32, known);
        factor[(row * channels + col) as usize] = value;
        let finite = value.abs() < f32::reinterpret(0x7F80_0000u32);
        if !finite {
            definite[0] = 0u32;
        }
        if row == col {
            costs[row as usize] = 1.0f32 / (value * value);
        }
    }
}
