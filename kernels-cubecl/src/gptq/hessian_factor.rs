//! Cholesky factor for GPTQ, from a Gram matrix; see `hessian_factor.rs` in the search crate.
//!
//! `H^-1 = U^T U` needs no inverse of H. With H reversed in both axes, and L its lower Cholesky
//! factor, U is the inverse of L, reversed again. Both come from one pass over panels of 64
//! columns, in place and in f64:
//!
//! ```text
//!              panel `step`
//!  +---------+-----+               X: known rows of L^-1
//!  |    X    |     |               S: rest of H on the diagonal of the panel
//!  +---------+-----+               A: rest of H below S
//!  |    X'   |  S  |               B: rest of H right of A
//!  +---------+-----+---------+
//!  |    X"   |  A  |    B    |
//!  +---------+-----+---------+
//! arrange_kernel:                H, reversed, in f64
//! for step in panels:
//!     diagonal_kernel:           D^-1, where D D^T = S
//!     panel_kernel:              Q = D^-1 [X', 1, A^T]
//!     update_kernel:             [X', S] = the first two parts of Q: rows of L^-1
//!                                [X", A, B] -= (the last part of Q)^T x Q, with A = 0 before
//! finish_kernel:                 U, reversed, in f32, and the channel weights
//! ```

use burn_fp4_search::{DampedHessian, Gram};
use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::plan::{Capability, FactorPlan, PANEL, Refusal, UNITS, plan_factor};
use crate::quantize_by_hessian::Hessians;

/// A [`HessianFactor`](burn_fp4_search::HessianFactor) in device memory, as f32 except for the
/// order.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::cubecl::server::Handle;
/// use burn_fp4_cubecl::{Capability, hessian_factor};
/// use burn_fp4_search::{Gptq, Gram};
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// // Sums of 8 and a damping of as much: H is 16 times the identity.
/// let mut squares = [0.0; 16 * 16];
/// (0..16).for_each(|channel| squares[channel * 17] = 8.0);
/// let gram = Gram::from_values(&squares, 16, 16, 64, 1.0)?;
/// let options = Gptq { damping: 1.0, ..Gptq::DEFAULT };
/// let damped = options.damped_hessian(&gram, 16)?;
///
/// let found = hessian_factor(&client, &device, &gram, &damped)?;
/// let read = |handle: &Handle| client.read_one_unchecked(handle.clone());
/// assert_eq!(u32::from_bytes(&read(found.definite())), [1]);
/// assert_eq!(f32::from_bytes(&read(found.hessian()))[0], 16.0);
/// assert_eq!(f32::from_bytes(&read(found.factor()))[0], 0.25); // the root of the inverse
/// assert_eq!(f32::from_bytes(&read(found.channel_weights()))[0], 16.0);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
#[derive(Debug, Clone)]
pub struct HessianFactorHandles {
    /// Channels of the weight.
    pub(super) channels: usize,
    /// Channels of a block.
    pub(super) block_size: usize,
    pub(super) factor: Handle,
    pub(super) channel_weights: Handle,
    pub(super) hessian: Handle,
    /// [`blocks`](burn_fp4_search::DampedHessian::blocks).
    pub(super) blocks: Hessians,
    /// [`inverses`](burn_fp4_search::DampedHessian::inverses).
    pub(super) inverses: Handle,
    /// Position of each block in a packed row, u32.
    pub(super) order: Handle,
    definite: Handle,
}

/// Factorizes H on the device, in f64, from a Gram matrix that is rounded to f32.
///
/// # Errors
/// [`Refusal`], also if the damping belongs to another Gram matrix, or to one that is kept in
/// blocks; nothing is launched then.
pub fn hessian_factor(
    client: &Client,
    device: &Capability,
    gram: &Gram,
    damped: &DampedHessian,
) -> Result<HessianFactorHandles, Refusal> {
    let channels = damped.channels();
    let plan = plan_factor(channels, device)?;
    let found = if gram.is_whole() { gram.channels() } else { 0 };
    if found != channels {
        let what = "channels of a whole Gram matrix";
        return Err(Refusal::Mismatch { what, expected: channels, found });
    }
    let hessian_factor = HessianFactorHandles::empty(client, damped);
    if channels > 0 {
        let side = plan.side();
        let factorization = Factorization {
            client,
            plan,
            channels,
            work: client.empty(8 * side * side),
            panel: client.empty(8 * PANEL as usize * side),
            inverse: client.empty(8 * (PANEL * PANEL) as usize),
            into: &hessian_factor,
        };
        factorization.arrange(gram, damped);
        for step in 0..plan.panels {
            factorization.eliminate(step);
        }
        factorization.finish();
    }
    Ok(hessian_factor)
}

impl HessianFactorHandles {
    /// Returns the [`factor`](burn_fp4_search::HessianFactor::factor), f32 `[channels, channels]`.
    #[must_use]
    pub fn factor(&self) -> &Handle {
        &self.factor
    }

    /// Returns the weight of each channel's squared error, f32 `[channels]`: its cost if all later
    /// channels compensate the error as well as they can. It is the diagonal of the factor to the
    /// power of -2.
    #[must_use]
    pub fn channel_weights(&self) -> &Handle {
        &self.channel_weights
    }

    /// Returns the [`hessian`](burn_fp4_search::HessianFactor::hessian), f32 `[channels,
    /// channels]`.
    #[must_use]
    pub fn hessian(&self) -> &Handle {
        &self.hessian
    }

    /// Returns a u32 in device memory: 1, or 0 if H is singular and everything else arbitrary.
    #[must_use]
    pub fn definite(&self) -> &Handle {
        &self.definite
    }

    /// Uploads the host's results, and allocates the rest.
    fn empty(client: &Client, damped: &DampedHessian) -> Self {
        let channels = damped.channels();
        let upload = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
        let (blocks, size) = (damped.blocks(), damped.blocks().block_size());
        let of_blocks = damped.order().iter().step_by(size).map(|&channel| (channel / size) as u32);
        Self {
            channels,
            block_size: size,
            factor: client.empty(4 * channels * channels),
            channel_weights: client.empty(4 * channels),
            hessian: client.empty(4 * channels * channels),
            blocks: Hessians { values: upload(blocks.values()), bounds: upload(blocks.bounds()) },
            inverses: upload(damped.inverses()),
            order: client.create_from_slice(u32::as_bytes(&of_blocks.collect::<Vec<_>>())),
            definite: client.create_from_slice(u32::as_bytes(&[1])),
        }
    }
}

/// A factorization in progress. Its matrices are f64.
struct Factorization<'a> {
    client: &'a Client,
    plan: FactorPlan,
    channels: usize,
    /// H, which is replaced with L^-1, `[side, side]`.
    work: Handle,
    /// Q of a step, `[PANEL, side]`.
    panel: Handle,
    /// `D^-1` of a step, `[PANEL, PANEL]`.
    inverse: Handle,
    into: &'a HessianFactorHandles,
}

impl Factorization<'_> {
    /// Returns H in vectors of this many values.
    fn work(&self, vector: usize) -> BufferArg {
        let side = self.plan.side();
        // SAFETY: the length is that of the allocation.
        unsafe { BufferArg::from_raw_parts(self.work.clone(), side * side / vector) }
    }

    /// Returns Q in vectors of this many values.
    fn panel(&self, vector: usize) -> BufferArg {
        let length = PANEL as usize * self.plan.side();
        // SAFETY: the length is that of the allocation.
        unsafe { BufferArg::from_raw_parts(self.panel.clone(), length / vector) }
    }

    fn inverse(&self) -> BufferArg {
        // SAFETY: the length is that of the allocation.
        unsafe { BufferArg::from_raw_parts(self.inverse.clone(), (PANEL * PANEL) as usize) }
    }

    fn definite(&self) -> BufferArg {
        // SAFETY: the length is that of the allocation.
        unsafe { BufferArg::from_raw_parts(self.into.definite.clone(), 1) }
    }

    /// Returns the cubes of a launch with a unit for every value of a square matrix.
    fn values_of(side: usize) -> CubeCount {
        CubeCount::Static((side as u32).div_ceil(UNITS), side as u32, 1)
    }

    /// Writes H in its order in f32 and, reversed in both axes, in f64.
    fn arrange(&self, gram: &Gram, damped: &DampedHessian) {
        let Self { client, channels, .. } = *self;
        let side = self.plan.side();
        let sums = gram.to_f32();
        let tiles = sums.len();
        let order: Vec<u32> = damped.order().iter().map(|&channel| channel as u32).collect();
        let order = client.create_from_slice(u32::as_bytes(&order));
        // SAFETY: the lengths match the matrices; units beyond them do nothing.
        unsafe {
            arrange_kernel::launch_unchecked(
                client,
                Self::values_of(side),
                CubeDim::new_1d(UNITS),
                BufferArg::from_raw_parts(client.create(Bytes::from_elems(sums)), tiles),
                BufferArg::from_raw_parts(order, channels),
                self.work(1),
                BufferArg::from_raw_parts(self.into.hessian.clone(), channels * channels),
                channels as u32,
                gram.layout().side() as u32,
                side as u32,
                damped.added(),
            );
        }
    }

    /// Eliminates the columns of a panel.
    fn eliminate(&self, step: u32) {
        let Self { client, plan, .. } = *self;
        let side = plan.side() as u32;
        let dim = CubeDim::new_1d(UNITS);
        // SAFETY: the lengths match the allocations.
        unsafe {
            diagonal_kernel::launch_unchecked(
                client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(plan.units),
                self.work(1),
                self.inverse(),
                self.definite(),
                step,
                side,
            );
            panel_kernel::launch_unchecked(
                client,
                CubeCount::Static(plan.panels, 1, 1),
                dim,
                self.work(1),
                self.inverse(),
                self.panel(1),
                step,
                side,
            );
            update_kernel::launch_unchecked(
                client,
                CubeCount::Static(plan.panels, plan.panels - step, 1),
                dim,
                2,
                self.work(2),
                self.panel(2),
                step,
                side,
            );
        }
    }

    /// Writes U in f32, and the channel weights.
    fn finish(&self) {
        let Self { client, channels, .. } = *self;
        // SAFETY: the lengths match the matrices; units beyond them do nothing.
        unsafe {
            finish_kernel::launch_unchecked(
                client,
                Self::values_of(channels),
                CubeDim::new_1d(UNITS),
                self.work(1),
                BufferArg::from_raw_parts(self.into.factor.clone(), channels * channels),
                BufferArg::from_raw_parts(self.into.channel_weights.clone(), channels),
                self.definite(),
                channels as u32,
                self.plan.side() as u32,
            );
        }
    }
}

/// Side of a cube's square of units, and of the square of values that a unit computes of a
/// [`PANEL`] x [`PANEL`] square.
const LANES: u32 = 16;
const OWN: u32 = PANEL / LANES;

/// Writes H in its order, from the tiles of a Gram matrix, and in f64 reversed. The diagonal is
/// padded with ones to whole panels.
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
            // Position in the tiles of the upper half.
            let column = below / tile;
            let before = (column * (column + 1u32) / 2u32 + above / tile) * tile * tile;
            let from = before + above % tile * tile + below % tile;
            value = f64::cast_from(gram[from as usize]) + select(row == col, added, 0.0f64);
            hessian[(ahead_row * channels + ahead_col) as usize] = f32::cast_from(value);
        }
        work[(row * side + col) as usize] = value;
    }
}

/// Inverts the lower Cholesky factor of a square on the diagonal, by the same steps as the whole,
/// one column at a time.
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

/// Computes Q, a square per cube: the inverse of a factor times rows of X, the identity, or the
/// columns of A below.
#[cube(launch_unchecked)]
fn panel_kernel(work: &[f64], inverse: &[f64], panel: &mut [f64], step: u32, side: u32) {
    let square = CUBE_POS_X;
    let row = UNIT_POS / LANES * OWN;
    let col = UNIT_POS % LANES;
    // Index of the first value that a column of D^-1 is multiplied with, and the distance to the
    // next.
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

/// Updates a square of the rows below to `A - Q^T Q`, up to the diagonal, or copies Q to the rows
/// it came from.
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
                // The old values of this column are in Q.
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

/// Writes U in f32, and the channel weights.
#[cube(launch_unchecked)]
fn finish_kernel(
    work: &[f64],
    factor: &mut [f32],
    channel_weights: &mut [f32],
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
            channel_weights[row as usize] = 1.0f32 / (value * value);
        }
    }
}
