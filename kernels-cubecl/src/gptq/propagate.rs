//! Propagates errors, or changes, of some channels to others: `target -= matrix x errors`.
//!
//! ```text
//! target[c][n] -= sum over k of matrix[k][c] x errors[k][n]
//!
//!                errors                    n: rows of the weight, in vectors
//!        k    +---------+
//! matrix ..   |         |                  a cube has 16 x 16 units, a unit some channels c by
//!   c         +---------+                  some vectors of rows:
//! +-----+     +---------+
//! |     |     |  |unit| |                      few channels:         4 x 1 vectors
//! |     |  c  |  +----+ |  target              many:                 8 x 2 vectors
//! +-----+     +---------+                      many, of many rows:   8 x 4 vectors
//! ```
//!
//! The sum is in the order of k, each product fused with its addition, for every tile. A tile of 8
//! x 2 vectors takes as long to load as to compute, one of 8 x 4 three quarters of that, but then
//! only one cube fits on a multiprocessor.

use core::ops::Range;

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::plan::{Capability, common_power_of_two};

/// Errors, or changes of the values, of a group of channels, f32 `[group, rows]`.
pub(crate) struct Errors<'a> {
    pub(crate) values: &'a Handle,
    /// Channels that `values` holds.
    pub(crate) group: usize,
    /// The range of these channels that is propagated.
    pub(crate) from: Range<usize>,
    /// First channel of the range, counted among all channels.
    pub(crate) first: usize,
}

/// Channels that are updated.
pub(crate) struct Region {
    pub(crate) channels: Range<usize>,
    /// Channels among them that are left out.
    pub(crate) skipped: Range<usize>,
    /// True if the target is 0 before: its memory is not initialized.
    pub(crate) fresh: bool,
}

impl Region {
    pub(crate) fn of(channels: Range<usize>) -> Self {
        Self { skipped: channels.end..channels.end, channels, fresh: false }
    }
}

/// Number of channels up to which the work is divided among more units.
const FEW_CHANNELS: u32 = 128;

/// Subtracts the product of a matrix and errors from the channels of a region. `target` is f32
/// `[channels, rows]`, `matrix` f32 `[channels, channels]`. The errors are of whole blocks.
pub(crate) fn propagate(
    client: &Client,
    device: &Capability,
    target: &Handle,
    matrix: &Handle,
    errors: Errors<'_>,
    [rows, channels]: [usize; 2],
    region: Region,
) {
    let count = region.channels.len() - region.skipped.len();
    if count == 0 {
        return;
    }
    let vector = common_power_of_two(rows as u32, 4);
    let row_vectors = rows as u32 / vector;
    let tile = PropagateTile::of(count as u32, row_vectors, device);
    let cubes = tile.cubes(count as u32, row_vectors);
    let Region { channels: updated, skipped, fresh } = region;
    let [start, count, skipped, skip] =
        [updated.start, count, skipped.start, skipped.len()].map(|length| length as u32);
    let updated = UpdatedChannelsLaunch::new(start, count, skipped, skip);
    let [all, first, width, first_error] =
        [channels, errors.first, errors.from.len(), errors.from.start].map(|length| length as u32);
    // SAFETY: the lengths match the matrices; values beyond them are not stored.
    unsafe {
        propagate_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(SIDE * SIDE),
            vector as usize,
            4,
            BufferArg::from_raw_parts(target.clone(), channels * row_vectors as usize),
            BufferArg::from_raw_parts(matrix.clone(), channels * channels / 4),
            BufferArg::from_raw_parts(errors.values.clone(), errors.group * row_vectors as usize),
            PropagateArgsLaunch::new(row_vectors, all, updated, first, width, first_error),
            tile,
            fresh,
        );
    }
}

/// Side of the square of units in a cube of [`propagate_kernel`].
const SIDE: u32 = 16;

/// The part of the target that a unit of [`propagate_kernel`] computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PropagateTile {
    channels: u32,
    /// Vectors of rows.
    vectors: u32,
    /// Errors that are loaded before the first of them is added; divides the size of a block.
    unroll_k: u32,
}

impl PropagateTile {
    /// Chooses the tile that waits least for memory if there are few channels, otherwise the
    /// largest that leaves enough cubes to keep the device busy.
    fn of(channels: u32, row_vectors: u32, device: &Capability) -> Self {
        let few = Self { channels: 4, vectors: 1, unroll_k: 8 };
        let many = Self { channels: 8, vectors: 2, unroll_k: 1 };
        let most = Self { channels: 8, vectors: 4, unroll_k: 2 };
        if channels <= FEW_CHANNELS {
            few
        } else if most.cubes(channels, row_vectors) >= device.cubes / 2 {
            most
        } else {
            many
        }
    }

    /// Returns the cubes for this many channels and vectors of rows.
    const fn cubes(self, channels: u32, row_vectors: u32) -> u32 {
        row_vectors.div_ceil(SIDE * self.vectors) * channels.div_ceil(SIDE * self.channels)
    }
}

/// Channels that are updated.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct UpdatedChannels {
    /// First channel.
    start: u32,
    /// Number of channels.
    count: u32,
    /// From this channel on, `skip` channels are left out.
    skipped: u32,
    skip: u32,
}

/// Lengths and offsets of the product of a matrix and errors.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct PropagateArgs {
    row_vectors: u32,
    /// Channels of the matrix.
    channels: u32,
    updated: UpdatedChannels,
    /// First channel with an error.
    first: u32,
    /// Number of channels with an error.
    width: u32,
    /// Index of the first channel's errors.
    first_error: u32,
}

/// Computes `target[c, n] -= sum of matrix[k, c] errors[k, n]`, in the order of k.
#[cube(launch_unchecked)]
fn propagate_kernel<V: Size, Q: Size>(
    target: &mut [Vector<f32, V>],
    matrix: &[Vector<f32, Q>],
    errors: &[Vector<f32, V>],
    args: PropagateArgs,
    #[comptime] tile: PropagateTile,
    #[comptime] fresh: bool,
) {
    let PropagateTile { channels, vectors, unroll_k } = comptime!(tile);
    let row_tiles = args.row_vectors.div_ceil(comptime!(SIDE * vectors));
    let cube = CUBE_POS as u32;
    let own = (cube / row_tiles * SIDE + UNIT_POS / SIDE) * channels;
    let first_vector = cube % row_tiles * comptime!(SIDE * vectors) + UNIT_POS % SIDE;
    if own < args.updated.count {
        let unskipped = args.updated.start + own;
        let skips = unskipped >= args.updated.skipped;
        let channel = unskipped + select(skips, args.updated.skip, 0u32);
        let mut sums = Array::<Vector<f32, V>>::new(comptime!((channels * vectors) as usize));
        #[unroll]
        for c in 0..channels {
            #[unroll]
            for v in 0..vectors {
                let vector = min(first_vector + v * SIDE, args.row_vectors - 1);
                let at = ((channel + c) * args.row_vectors + vector) as usize;
                let sum = comptime!((c * vectors + v) as usize);
                sums[sum] =
                    if comptime!(fresh) { Vector::empty().fill(0.0f32) } else { target[at] };
            }
        }
        let quads = comptime!(channels / 4);
        let mut k = 0u32;
        while k < args.width {
            let mut row_errors =
                Array::<Vector<f32, V>>::new(comptime!((unroll_k * vectors) as usize));
            let mut coefficients =
                Array::<Vector<f32, Q>>::new(comptime!((unroll_k * quads) as usize));
            #[unroll]
            for next in 0..unroll_k {
                let error = args.first_error + k + next;
                #[unroll]
                for v in 0..vectors {
                    let vector = min(first_vector + v * SIDE, args.row_vectors - 1);
                    row_errors[comptime!((next * vectors + v) as usize)] =
                        errors[(error * args.row_vectors + vector) as usize];
                }
                let first = ((args.first + k + next) * args.channels + channel) / 4;
                #[unroll]
                for quad in 0..quads {
                    coefficients[comptime!((next * quads + quad) as usize)] =
                        matrix[(first + quad) as usize];
                }
            }
            #[unroll]
            for next in 0..unroll_k {
                #[unroll]
                for c in 0..channels {
                    let coefficient = coefficients[comptime!((next * quads + c / 4) as usize)];
                    let coefficient = coefficient.extract(comptime!((c % 4) as usize));
                    let negative = Vector::<f32, V>::empty().fill(-coefficient);
                    #[unroll]
                    for v in 0..vectors {
                        let error = row_errors[comptime!((next * vectors + v) as usize)];
                        let sum = comptime!((c * vectors + v) as usize);
                        sums[sum] = fma(negative, error, sums[sum]);
                    }
                }
            }
            k += comptime!(unroll_k);
        }
        #[unroll]
        for c in 0..channels {
            #[unroll]
            for v in 0..vectors {
                let vector = first_vector + v * SIDE;
                if vector < args.row_vectors {
                    let at = ((channel + c) * args.row_vectors + vector) as usize;
                    target[at] = sums[comptime!((c * vectors + v) as usize)];
                }
            }
        }
    }
}
