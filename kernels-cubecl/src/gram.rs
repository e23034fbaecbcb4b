//! Gram matrix `X^T X` of activations, the second moments of a layer's inputs. The order of the
//! sums is fixed, not autotuned, so that results are identical on every device of a kind.

use core::ops::Range;

use burn_fp4_search::GramLayout;
use cubecl::client::Client;
use cubecl::cmma::{MatrixIdent, MmaDefinition};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::memory::check_memory;
use crate::plan::{Capability, Dtype, GramPlan, Refusal, UNITS, plan_gram};

/// Activations `[rows, channels]`.
#[derive(Debug, Clone)]
pub struct Activations {
    /// Contiguous, row after row.
    pub values: Handle,
    /// The dtype of the values.
    pub dtype: Dtype,
    /// Number of rows. The [`GramLayout`] knows the channels.
    pub rows: usize,
}

/// Adds `X^T X` of activations to `sums`, f64 `[tiles, SIDE, SIDE]`, for some tiles of a device's
/// layout ([`GramLayout::of_device`]).
///
/// Without matrix instructions every product is added in f64. With them, 1024 products are added in
/// f32 and their sum in f64. The instructions take f16 and bf16 directly, and an f32 as the sum of
/// three bf16. Leaving out the smallest products costs an error of 2^-24 relative to the largest.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Activations, Capability, Dtype, add_gram};
/// use burn_fp4_search::{Gram, GramLayout};
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let x = [1.0f32, 2.0, 3.0, 0.0]; // two rows of two channels
/// let values = client.create_from_slice(f32::as_bytes(&x));
/// let activations = Activations { values, dtype: Dtype::F32, rows: 2 };
/// let layout = GramLayout::of_device(2, 2); // one tile
/// let sums = client.create_from_slice(f64::as_bytes(&vec![0.0; layout.tile_len()]));
/// add_gram(&client, &device, &activations, sums.clone(), layout, 0..1)?;
///
/// let tile = client.read_one_unchecked(sums);
/// let gram = Gram::from_tiles(&[f64::from_bytes(&tile)], layout, 2, 2, 3.0)?;
/// let found = [(0, 0), (0, 1), (1, 1)].map(|(row, col)| gram.get(row, col));
/// assert_eq!(found, [10.0, 2.0, 4.0].map(Some));
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn add_gram(
    client: &Client,
    device: &Capability,
    activations: &Activations,
    sums: Handle,
    layout: GramLayout,
    tiles: Range<usize>,
) -> Result<(), Refusal> {
    let Activations { values: x, dtype, rows } = activations.clone();
    let channels = layout.channels();
    let plan = plan_gram(rows, channels, dtype, device)?;
    let mismatch = |what, expected, found| Err(Refusal::Mismatch { what, expected, found });
    if layout.side() != GramLayout::SIDE {
        return mismatch("the side of a tile", GramLayout::SIDE, layout.side());
    }
    if tiles.end > layout.count() {
        return mismatch("tiles", layout.count(), tiles.end);
    }
    check_memory("activations", &x, rows * channels * dtype.size())?;
    check_memory("sums", &sums, 8 * tiles.len() * TILE)?;
    if rows * tiles.len() == 0 {
        return Ok(());
    }
    let sum = Sum { client, rows, sums, layout, tiles };
    match (plan, dtype) {
        (GramPlan::MmaParts, _) => {
            let parts = split(client, x, rows * channels);
            for (left, right) in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)] {
                sum.mma::<bf16>(&parts[left], &parts[right]);
            }
        }
        (GramPlan::Mma, Dtype::F16) => sum.mma::<f16>(&x, &x),
        (GramPlan::Mma, _) => sum.mma::<bf16>(&x, &x),
        (GramPlan::Plain, Dtype::F32) => sum.plain::<f32>(x),
        (GramPlan::Plain, Dtype::F16) => sum.plain::<f16>(x),
        (GramPlan::Plain, Dtype::Bf16) => sum.plain::<bf16>(x),
    }
    Ok(())
}

/// A sum and its arguments.
struct Sum<'a> {
    client: &'a Client,
    rows: usize,
    sums: Handle,
    layout: GramLayout,
    tiles: Range<usize>,
}

/// Channels of a tile.
const SIDE: u32 = GramLayout::SIDE as u32;

/// Rows whose products are added in f32.
const CHUNK: u32 = 1024;

impl Sum<'_> {
    fn mma<F: Float>(&self, left: &Handle, right: &Handle) {
        let Self { client, rows, sums, layout, tiles } = self;
        let vectors = layout.channels() / 8;
        // SAFETY: the lengths match activations and tiles; values beyond the activations
        // count as 0.
        unsafe {
            mma_kernel::launch_unchecked::<F>(
                client,
                CubeCount::Static(tiles.len() as u32, 1, 1),
                CubeDim::new_1d(UNITS),
                8,
                2,
                BufferArg::from_raw_parts(left.clone(), rows * vectors),
                BufferArg::from_raw_parts(right.clone(), rows * vectors),
                BufferArg::from_raw_parts(sums.clone(), tiles.len() * TILE / 2),
                *rows as u32,
                vectors as u32,
                tiles.start as u32,
                layout.is_diagonal(),
            );
        }
    }

    fn plain<F: Float>(&self, x: Handle) {
        let Self { client, rows, sums, layout, tiles } = self;
        let channels = layout.channels();
        // SAFETY: as above; units beyond the activations do nothing.
        unsafe {
            plain_kernel::launch_unchecked::<F>(
                client,
                CubeCount::Static(tiles.len() as u32, TILE as u32 / UNITS, 1),
                CubeDim::new_1d(UNITS),
                BufferArg::from_raw_parts(x, rows * channels),
                BufferArg::from_raw_parts(sums.clone(), tiles.len() * TILE),
                *rows as u32,
                channels as u32,
                tiles.start as u32,
                layout.is_diagonal(),
            );
        }
    }
}

/// Elements of a tile.
const TILE: usize = GramLayout::SIDE * GramLayout::SIDE;

/// Returns row and column of a tile, in tiles.
#[cube]
fn place(tile: u32, #[comptime] diagonal: bool) -> (u32, u32) {
    let mut column = tile;
    let mut row = tile;
    if comptime!(!diagonal) {
        // First tile of the column.
        let mut start = 0u32.runtime();
        column = 0u32.runtime();
        while start + column < tile {
            column += 1u32;
            start += column;
        }
        row = tile - start;
    }
    (row, column)
}

/// Sums one element per unit, in f64.
#[cube(launch_unchecked)]
fn plain_kernel<F: Float>(
    x: &[F],
    sums: &mut [f64],
    rows: u32,
    channels: u32,
    first: u32,
    #[comptime] diagonal: bool,
) {
    let (row, column) = place(first + CUBE_POS_X, diagonal);
    let at = CUBE_POS_Y * UNITS + UNIT_POS;
    let left = row * SIDE + at / SIDE;
    let right = column * SIDE + at % SIDE;
    if left <= right && right < channels {
        let at = (CUBE_POS_X * comptime!(SIDE * SIDE) + at) as usize;
        let mut total = sums[at];
        for row in 0..rows {
            let row = row * channels;
            let left = f64::cast_from(x[(row + left) as usize]);
            total = fma(left, f64::cast_from(x[(row + right) as usize]), total);
        }
        sums[at] = total;
    }
}

/// Rows that a cube multiplies at a time.
const STEP: u32 = 32;

/// Vectors of eight channels of a row of a tile.
const TILE_VECTORS: u32 = SIDE / 8;

/// Distance between rows in shared memory: padded, so that eight rows are in different banks.
const STRIDE: u32 = TILE_VECTORS + 1;

/// Vectors that a unit copies at a time, of either operand.
const COPIED: u32 = STEP * TILE_VECTORS / UNITS;

/// Loads a unit's copies of a step, with zeros beyond the activations.
#[cube]
fn load_step<F: Float, X: Size>(
    x: &[Vector<F, X>],
    copies: &mut Array<Vector<F, X>>,
    step: u32,
    column: u32,
    rows: u32,
    vectors: u32,
) {
    let vector = column * TILE_VECTORS + UNIT_POS % TILE_VECTORS;
    #[unroll]
    for copy in 0..COPIED {
        let row = step * STEP + UNIT_POS / TILE_VECTORS + comptime!(copy * UNITS / TILE_VECTORS);
        copies[copy as usize] = Vector::new(F::from_int(0));
        if row < rows && vector < vectors {
            copies[copy as usize] = x[(row * vectors + vector) as usize];
        }
    }
}

/// Sums a tile per cube, 64 x 32 of it per plane. The next rows are loaded while some are
/// multiplied.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_lines, reason = "one loop over registers that all of it uses")]
fn mma_kernel<F: Float, X: Size, W: Size>(
    left: &[Vector<F, X>],
    right: &[Vector<F, X>],
    sums: &mut [Vector<f64, W>],
    rows: u32,
    vectors: u32,
    first: u32,
    #[comptime] diagonal: bool,
) {
    let (row, column) = place(first + CUBE_POS_X, diagonal);
    let plane = UNIT_POS / 32;
    let lane = UNIT_POS % 32;
    let (plane_row, plane_column) = (plane % 2 * 64, plane / 2 * 32);
    // An instruction multiplies 16 channels of the left operand with 8 of the right along 16 rows.
    let definition = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let size!(NA) = definition.vector_size(MatrixIdent::A);
    let size!(NB) = definition.vector_size(MatrixIdent::B);
    let size!(NC) = definition.vector_size(MatrixIdent::Accumulator);
    let mut products = Sequence::<Array<Vector<f32, NC>>>::new();
    #[unroll]
    for _ in 0..16u32 {
        let mut zeros = Array::<Vector<f32, NC>>::new(2usize);
        zeros[0] = Vector::new(0.0f32);
        zeros[1] = Vector::new(0.0f32);
        products.push(zeros);
    }
    let side = comptime!(STEP * STRIDE);
    let mut shared = Shared::<[Vector<F, X>]>::new_slice(comptime!((4 * side) as usize));
    let written = UNIT_POS / TILE_VECTORS * STRIDE + UNIT_POS % TILE_VECTORS;
    // Four matrices of 8 x 8 are read at a time, each row by one of eight lanes. For the left
    // operand the next channels come first, for the right one the next rows.
    let (matrix, line) = (lane / 8, lane % 8);
    let left_read = (matrix / 2 * 8 + line) * STRIDE + plane_row / 8 + matrix % 2;
    let right_read = side + (matrix % 2 * 8 + line) * STRIDE + plane_column / 8 + matrix / 2;

    let mut left_copies = Array::<Vector<F, X>>::new(COPIED as usize);
    let mut right_copies = Array::<Vector<F, X>>::new(COPIED as usize);
    load_step::<F, X>(left, &mut left_copies, 0u32.runtime(), row, rows, vectors);
    load_step::<F, X>(right, &mut right_copies, 0u32.runtime(), column, rows, vectors);
    let steps = rows.div_ceil(STEP);
    let mut step = 0u32.runtime();
    while step < steps {
        let buffer = (step & 1u32) * comptime!(2 * side);
        #[unroll]
        for copy in 0..COPIED {
            let at = buffer + written + comptime!(copy * UNITS / TILE_VECTORS * STRIDE);
            shared[at as usize] = left_copies[copy as usize];
            shared[(at + side) as usize] = right_copies[copy as usize];
        }
        load_step::<F, X>(left, &mut left_copies, step + 1, row, rows, vectors);
        load_step::<F, X>(right, &mut right_copies, step + 1, column, rows, vectors);
        sync_cube();
        #[unroll]
        for half in 0..comptime!(STEP / 16) {
            let from = buffer + comptime!(half * 16 * STRIDE);
            let mut rights = Sequence::<Array<Vector<F, NB>>>::new();
            #[unroll]
            for pair in 0..2u32 {
                let at = (from + right_read + comptime!(pair * 2)) as usize;
                let four = definition.load_matrix::<Vector<F, X>, NB>(
                    &shared[at..at + 1],
                    MatrixIdent::B,
                    4usize,
                    true,
                );
                #[unroll]
                for tile in 0..2usize {
                    let mut two = Array::<Vector<F, NB>>::new(2usize);
                    two[0] = four[comptime!(2 * tile)];
                    two[1] = four[comptime!(2 * tile + 1)];
                    rights.push(two);
                }
            }
            #[unroll]
            for left_tile in 0..4u32 {
                let at = (from + left_read + comptime!(left_tile * 2)) as usize;
                let four = definition.load_matrix::<Vector<F, X>, NA>(
                    &shared[at..at + 1],
                    MatrixIdent::A,
                    4usize,
                    true,
                );
                #[unroll]
                for tile in 0..4u32 {
                    let product = comptime!((left_tile * 4 + tile) as usize);
                    definition.execute_inplace(
                        &four,
                        rights.index(comptime!(tile as usize)),
                        products.index_mut(product),
                    );
                }
            }
        }
        step += 1u32;
        if step & comptime!(CHUNK / STEP - 1) == 0 || step == steps {
            add_products::<NC, W>(&mut products, sums, plane_row, plane_column);
        }
    }
}

/// Adds the f32 sums of a plane to the sums in f64, and zeroes them.
#[cube]
fn add_products<NC: Size, W: Size>(
    products: &mut Sequence<Array<Vector<f32, NC>>>,
    sums: &mut [Vector<f64, W>],
    plane_row: u32,
    plane_column: u32,
) {
    let lane = UNIT_POS % 32;
    #[unroll]
    for left_tile in 0..4u32 {
        #[unroll]
        for tile in 0..4u32 {
            let product = comptime!((left_tile * 4 + tile) as usize);
            let of_tile = products.index_mut(product);
            #[unroll]
            for half in 0..2u32 {
                let in_row = plane_row + comptime!(left_tile * 16 + half * 8) + lane / 4;
                let in_column = plane_column + comptime!(tile * 8) + lane % 4 * 2;
                let at = CUBE_POS_X * comptime!(SIDE * SIDE) + in_row * SIDE + in_column;
                let at = (at / 2) as usize;
                let found = of_tile[comptime!(half as usize)];
                let mut sum = sums[at];
                #[unroll]
                for index in 0..2usize {
                    let product = f64::cast_from(found.extract(index));
                    sum.insert(index, sum.extract(index) + product);
                }
                sums[at] = sum;
                of_tile[comptime!(half as usize)] = Vector::new(0.0f32);
            }
        }
    }
}

/// Splits an f32 into three bf16 with the same sum: the upper half of its bits, the upper half of
/// the remainder, and the rest.
fn split(client: &Client, x: Handle, len: usize) -> [Handle; 3] {
    let parts = [(); 3].map(|()| client.empty(2 * len));
    let [high, middle, low] = parts.each_ref();
    // SAFETY: as many of each; units beyond do nothing.
    unsafe {
        split_kernel::launch_unchecked(
            client,
            CubeCount::Static((len as u32).div_ceil(UNITS), 1, 1),
            CubeDim::new_1d(UNITS),
            BufferArg::from_raw_parts(x, len),
            BufferArg::from_raw_parts(high.clone(), len),
            BufferArg::from_raw_parts(middle.clone(), len),
            BufferArg::from_raw_parts(low.clone(), len),
            len as u32,
        );
    }
    parts
}

#[cube(launch_unchecked)]
fn split_kernel(x: &[f32], high: &mut [u16], middle: &mut [u16], low: &mut [u16], len: u32) {
    let at = CUBE_POS_X * UNITS + UNIT_POS;
    if at < len {
        let at = at as usize;
        let mut rest = x[at];
        let bits = u32::reinterpret(rest) & 0xFFFF_0000u32;
        high[at] = u16::cast_from(bits >> 16u32);
        rest -= f32::reinterpret(bits);
        let bits = u32::reinterpret(rest) & 0xFFFF_0000u32;
        middle[at] = u16::cast_from(bits >> 16u32);
        rest -= f32::reinterpret(bits);
        low[at] = u16::cast_from(u32::reinterpret(rest) >> 16u32);
    }
}
