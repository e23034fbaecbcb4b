//! [`plan`]: the launch of an operation.

use burn_fp4_search::host::View;
use burn_fp4_search::{Blocks, Method, Needs};
use cubecl::prelude::CubeCount;

use super::capability::{Capability, UNITS};
use super::problem::{Operation, Problem};
use super::refusal::Refusal;
use super::thread_tile::{ThreadTile, TileSharing};

/// Launch configuration of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launch {
    /// Cubes in two dimensions; the second is 1 if the device allows that many in the first.
    pub cubes: [u32; 2],
    /// Units of a cube.
    pub units: u32,
    /// Work items. Units beyond the last one idle.
    pub items: u32,
    /// The part of the tensor that a work item is.
    pub thread_tile: ThreadTile,
}

impl Launch {
    pub(crate) fn count(&self) -> CubeCount {
        CubeCount::Static(self.cubes[0], self.cubes[1], 1)
    }
}

/// Units of a cube whose units do long work with many registers.
pub(crate) const SMALL_CUBE_UNITS: u32 = 64;

/// Largest number of bytes that one load or store moves.
const MAX_LOAD_BYTES: u32 = 16;

/// Values of a column that a unit of the row amax reads on a strided axis.
pub(crate) const COLUMN_CHUNK: u32 = 128;

/// Plans the launch of an operation from the problem and the device alone.
///
/// ```
/// use burn_fp4_cubecl::{Capability, Dtype, Operation, Problem, Refusal, plan};
/// use burn_fp4_search::Fp4Scheme;
/// use burn_fp4_search::host::View;
/// # let gpu = Capability {
/// #     plane: 32, cubes: 528, max_cubes: u32::MAX, converts_bf16: true, mma: true,
/// #     wgmma: burn_fp4_cubecl::WgmmaSupport::None, fast_shared_memory: true, doubles: true,
/// #     decoding: burn_fp4_cubecl::Decoding::Subnormals, portable: None,
/// # };
///
/// // `gpu` is the one in the example of `Capability`.
/// let (view, scheme) = (View::rows(3, 1024), Fp4Scheme::nvfp4());
/// let problem = Problem { view, dtype: Dtype::Bf16, scheme };
/// let launch = plan(Operation::Quantize, &problem, &gpu)?;
/// assert_eq!((launch.items, launch.units), (3 * 1024 / 16, 256)); // a unit for each block
/// assert_eq!(launch.cubes, [1, 1]);
///
/// let odd = Problem { view: View::rows(3, 24), ..problem };
/// assert!(matches!(plan(Operation::Quantize, &odd, &gpu), Err(Refusal::Scheme(_))));
/// # Ok::<(), Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`] if no kernel runs the operation.
pub fn plan(
    operation: Operation,
    problem: &Problem,
    device: &Capability,
) -> Result<Launch, Refusal> {
    check(operation, problem)?;
    let units = units(operation);
    let (items, thread_tile) = items(operation, problem, device, units);
    let cubes = items.div_ceil(units);
    let cubes = match operation {
        Operation::Amax | Operation::SquaredError => cubes.min(device.cubes),
        _ => cubes,
    };
    Ok(Launch { cubes: device.two_dimensions(cubes), units, items, thread_tile })
}

/// Checks that an operation has a kernel for its problem.
fn check(operation: Operation, problem: &Problem) -> Result<(), Refusal> {
    let Problem { view, scheme, .. } = problem;
    if !matches!(operation, Operation::Amax | Operation::RowAmax) {
        scheme.check_columns(view.axis)?;
    }
    // Values of codes and scales do not depend on the search that chose them.
    let reads_codes = matches!(operation, Operation::Dequantize | Operation::SquaredError);
    if !reads_codes && !matches!(operation, Operation::Amax | Operation::RowAmax) {
        let by_hessian = matches!(operation, Operation::QuantizeByHessian | Operation::Gptq);
        let method = scheme.method;
        let fits = match method.needs() {
            // Others have no kernel: the host runs them, or calls one for every tensor scale.
            Needs::Nothing => method.is_blockwise() && !by_hessian,
            Needs::SecondMoments => operation == Operation::Quantize,
            Needs::BlockHessians => by_hessian && !matches!(method, Method::Admm(_)),
            Needs::Gram => false,
        };
        if !fits {
            return Err(Refusal::Method { operation, found: method });
        }
    }
    let expected = View::MAX_LEN;
    let found = match operation {
        // Kernels index the Hessians with 32 bits, like the values.
        Operation::QuantizeByHessian => view.len().max(view.axis * scheme.block_size),
        Operation::Gptq => view.len().max(view.axis * view.axis),
        _ => view.len(),
    };
    if found > expected { Err(Refusal::TooLarge { found, expected }) } else { Ok(()) }
}

/// Returns the units of a cube.
fn units(operation: Operation) -> u32 {
    match operation {
        // A unit needs many registers. More small cubes fit on a multiprocessor.
        Operation::QuantizeByHessian | Operation::Gptq => SMALL_CUBE_UNITS,
        _ => UNITS,
    }
}

/// Returns the number of work items, and the tile of one.
fn items(
    operation: Operation,
    problem: &Problem,
    device: &Capability,
    units: u32,
) -> (u32, ThreadTile) {
    let Problem { view, dtype, .. } = problem;
    let [rows, axis, inner] = [view.packed_rows(), view.axis, view.inner].map(|n| n as u32);
    let blocks = problem.blocks() as u32;
    let widest = MAX_LOAD_BYTES / dtype.size() as u32;
    let contiguous_axis = inner == 1;
    let one_row = ThreadTile::one_row(contiguous_axis, *dtype, device);
    match operation {
        Operation::Amax => {
            let vector = common_power_of_two(view.len() as u32, widest);
            (view.len() as u32 / vector, ThreadTile { vector, ..one_row })
        }
        Operation::RowAmax if contiguous_axis => {
            let vector = common_power_of_two(axis, widest);
            // One plane per row, at most as many planes as keep the device busy: then each takes
            // several rows.
            let planes = rows.min(device.cubes * UNITS / device.plane);
            (planes * device.plane, ThreadTile { vector, ..one_row })
        }
        Operation::RowAmax => {
            let vector = common_power_of_two(inner, widest / 4);
            let chunks = axis.div_ceil(COLUMN_CHUNK);
            (rows / vector * chunks, ThreadTile { vector, rows: vector, ..one_row })
        }
        Operation::SquaredError => {
            ((view.len() / 8).min((device.cubes * UNITS) as usize) as u32, one_row)
        }
        Operation::Dequantize if contiguous_axis => {
            let thread_tile = ThreadTile { vector: widest.min(8), ..one_row };
            (view.len() as u32 / 8, thread_tile)
        }
        Operation::QuantizeByHessian => {
            let vector = if contiguous_axis { widest } else { 1 };
            let thread_tile =
                ThreadTile { vector, through_shared_memory: device.fast_shared_memory, ..one_row };
            (rows.div_ceil(units) * blocks * units, thread_tile)
        }
        Operation::Gptq => (rows, one_row),
        Operation::Hadamard if contiguous_axis => {
            (rows * blocks, ThreadTile { vector: widest, ..one_row })
        }
        Operation::Dequantize | Operation::Hadamard => {
            let thread_tile = strided(operation, problem, device, one_row);
            (rows / thread_tile.rows * blocks, thread_tile)
        }
        Operation::Quantize | Operation::FakeQuantize => {
            quantized(operation, problem, device, one_row)
        }
    }
}

/// Returns the number and the tile of the work items that are quantized.
fn quantized(
    operation: Operation,
    problem: &Problem,
    device: &Capability,
    one_row: ThreadTile,
) -> (u32, ThreadTile) {
    let [rows, blocks] = [problem.view.packed_rows(), problem.blocks()].map(|n| n as u32);
    let widest = MAX_LOAD_BYTES / problem.dtype.size() as u32;
    let sharing = tile_sharing(operation, problem, device);
    let mut thread_tile = match (sharing, one_row.contiguous_axis) {
        (TileSharing::Repeated, _) => one_row,
        (TileSharing::Exchanged, true) => {
            let units_over_blocks = common_power_of_two(blocks, 8);
            ThreadTile { vector: widest, rows: 4, units_over_rows: 4, units_over_blocks, ..one_row }
        }
        (TileSharing::None | TileSharing::Halves, true) => ThreadTile { vector: widest, ..one_row },
        (_, false) => strided(operation, problem, device, one_row),
    };
    let rows = match sharing {
        TileSharing::Exchanged => {
            thread_tile.units_over_rows = 16 / thread_tile.rows;
            // Units of rows that the last 16 x 16 tile lacks idle.
            rows.next_multiple_of(16)
        }
        _ => rows,
    };
    let blocks = if sharing == TileSharing::Halves { 2 * blocks } else { blocks };
    (rows / thread_tile.rows * blocks, ThreadTile { sharing, ..thread_tile })
}

/// Returns the tile along a strided axis. The constants are the fastest on an H200.
fn strided(
    operation: Operation,
    problem: &Problem,
    device: &Capability,
    one_row: ThreadTile,
) -> ThreadTile {
    let block_size = problem.scheme.block_size as u32;
    let [inner, blocks] = [problem.view.inner, problem.blocks()].map(|n| n as u32);
    let (most_rows, units_over_rows) = match operation {
        Operation::Dequantize => (32 / block_size, block_size),
        Operation::FakeQuantize | Operation::Hadamard => (64 / block_size, 8),
        _ => (4, 32),
    };
    let rows = common_power_of_two(inner, most_rows);
    let thread_tile = ThreadTile { vector: rows, rows, ..one_row };
    // Neighbours load and store whole sectors of 32 bytes on either side. The other planes of the
    // cube complete the cache lines.
    let direct = ThreadTile {
        units_over_rows: common_power_of_two(inner / rows, 8),
        units_over_blocks: common_power_of_two(blocks, 256 / block_size),
        ..thread_tile
    };
    let units_over_blocks = UNITS / units_over_rows;
    let fits =
        (inner / rows).is_multiple_of(units_over_rows) && blocks.is_multiple_of(units_over_blocks);
    match operation {
        // Only the dense tensor is written, one block after the other.
        Operation::FakeQuantize | Operation::Hadamard => {
            ThreadTile { units_over_blocks: 1, ..direct }
        }
        // Blocks of 16 need so much register space that too few units are left to hide the
        // transpose.
        Operation::Quantize if block_size == 16 => direct,
        _ if fits && device.fast_shared_memory => ThreadTile {
            units_over_rows,
            units_over_blocks,
            through_shared_memory: true,
            ..thread_tile
        },
        _ => direct,
    }
}

/// Returns how units share a block scale. Units of a plane can exchange amaxes only if the rows of
/// a 16 x 16 tile are neighbours. `Halves` is for operations that write no packed blocks and need
/// only the amax of a block.
fn tile_sharing(operation: Operation, problem: &Problem, device: &Capability) -> TileSharing {
    let Problem { view, scheme, .. } = problem;
    let whole = view.inner == 1 || view.outer == 1 || view.inner.is_multiple_of(16);
    let by_amax = operation == Operation::FakeQuantize && scheme.method == Method::Amax;
    let halves = by_amax && view.inner == 1 && scheme.block_size == 32 && device.plane >= 2;
    match scheme.blocks {
        Blocks::Row if halves => TileSharing::Halves,
        Blocks::Row => TileSharing::None,
        Blocks::Tile16x16 if whole && device.plane >= 16 => TileSharing::Exchanged,
        Blocks::Tile16x16 => TileSharing::Repeated,
    }
}

/// Returns the largest power of two that divides a number, at most `limit`.
pub(crate) fn common_power_of_two(number: u32, limit: u32) -> u32 {
    1 << number.trailing_zeros().min(limit.ilog2())
}

#[cfg(test)]
mod tests {
    use burn_fp4_search::{Admm, Fp4Scheme};

    use super::super::capability::{CPU, GPU};
    use super::*;
    use crate::plan::{Conversion, Dtype};

    const ONE_ROW: ThreadTile = ThreadTile {
        vector: 1,
        contiguous_axis: false,
        rows: 1,
        units_over_rows: 1,
        units_over_blocks: 1,
        through_shared_memory: false,
        sharing: TileSharing::None,
        dtype: Dtype::Bf16,
        conversion: Conversion::Device,
    };

    fn problem(view: View, scheme: Fp4Scheme) -> Problem {
        Problem { view, dtype: Dtype::Bf16, scheme }
    }

    #[test]
    fn a_contiguous_axis_is_read_16_bytes_at_a_time() {
        let problem = problem(View::rows(3, 1024), Fp4Scheme::nvfp4());
        let quantize = plan(Operation::Quantize, &problem, &GPU).unwrap();
        let thread_tile = ThreadTile { vector: 8, contiguous_axis: true, ..ONE_ROW };
        assert_eq!(quantize, Launch { cubes: [1, 1], units: UNITS, items: 192, thread_tile });
        assert_eq!(plan(Operation::Dequantize, &problem, &GPU).unwrap().items, 384);
        assert_eq!(plan(Operation::RowAmax, &problem, &GPU).unwrap().items, 96);
        assert_eq!(plan(Operation::RowAmax, &problem, &CPU).unwrap().items, 3);
        let short = self::problem(View::rows(1 << 27, 16), Fp4Scheme::nvfp4());
        assert_eq!(plan(Operation::RowAmax, &short, &GPU).unwrap().items, 528 * UNITS);
    }

    #[test]
    fn a_strided_axis_is_read_across_columns() {
        let thread_tile = |inner, axis| {
            let view = View { outer: 1, axis, inner };
            plan(Operation::Quantize, &problem(view, Fp4Scheme::nvfp4()), &GPU).unwrap().thread_tile
        };
        let wide =
            ThreadTile { vector: 4, rows: 4, units_over_rows: 8, units_over_blocks: 16, ..ONE_ROW };
        assert_eq!(thread_tile(1024, 1024), wide);
        assert_eq!(thread_tile(1023, 48), ONE_ROW);
    }

    #[test]
    fn packed_blocks_are_staged_where_rectangles_of_a_cube_fit() {
        let of = |operation, scheme, inner, device: &Capability| {
            let problem = problem(View { outer: 1, axis: 1024, inner }, scheme);
            plan(operation, &problem, device).unwrap().thread_tile
        };
        let staged = ThreadTile {
            vector: 2,
            rows: 2,
            units_over_rows: 16,
            units_over_blocks: 16,
            through_shared_memory: true,
            ..ONE_ROW
        };
        assert_eq!(of(Operation::Dequantize, Fp4Scheme::nvfp4(), 1024, &GPU), staged);
        let staged = ThreadTile {
            vector: 4,
            rows: 4,
            units_over_rows: 32,
            units_over_blocks: 8,
            through_shared_memory: true,
            ..ONE_ROW
        };
        assert_eq!(of(Operation::Quantize, Fp4Scheme::mxfp4(), 1024, &GPU), staged);
        assert!(!of(Operation::Quantize, Fp4Scheme::mxfp4(), 1024, &CPU).through_shared_memory);
        assert!(!of(Operation::Quantize, Fp4Scheme::mxfp4(), 96, &GPU).through_shared_memory);
        let fake = of(Operation::FakeQuantize, Fp4Scheme::mxfp4(), 1024, &GPU);
        assert_eq!((fake.rows, fake.units_over_rows, fake.units_over_blocks), (2, 8, 1));
    }

    #[test]
    fn a_block_of_32_is_divided_where_neighbours_exchange() {
        let of = |scheme, device: &Capability| {
            let problem = problem(View::rows(3, 64), scheme);
            let launch = plan(Operation::FakeQuantize, &problem, device).unwrap();
            (launch.thread_tile.sharing, launch.items)
        };
        assert_eq!(of(Fp4Scheme::mxfp4(), &GPU), (TileSharing::Halves, 12));
        assert_eq!(of(Fp4Scheme::mxfp4(), &CPU), (TileSharing::None, 6));
        let sse = Fp4Scheme::mxfp4().with_method(Method::SSE);
        assert_eq!(of(sse, &GPU), (TileSharing::None, 6));
        assert_eq!(of(Fp4Scheme::nvfp4(), &GPU), (TileSharing::None, 12));
    }

    #[test]
    fn tiles_need_planes_and_neighbouring_rows() {
        let tiles = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
        let plan = |view, device| plan(Operation::Quantize, &problem(view, tiles), device).unwrap();
        let ragged = plan(View::rows(17, 32), &GPU);
        assert_eq!((ragged.thread_tile.sharing, ragged.items), (TileSharing::Exchanged, 16));
        assert_eq!(plan(View::rows(17, 32), &CPU).thread_tile.sharing, TileSharing::Repeated);
        let straddling = View { outer: 2, axis: 32, inner: 8 };
        assert_eq!(plan(straddling, &GPU).thread_tile.sharing, TileSharing::Repeated);
    }

    #[test]
    fn a_search_by_hessian_takes_a_cube_for_the_blocks_of_many_rows() {
        let of = |search, view| {
            let scheme = Fp4Scheme::nvfp4().with_method(search);
            plan(Operation::QuantizeByHessian, &problem(view, scheme), &GPU)
        };
        let launch = of(Method::Hessian, View::rows(300, 64)).unwrap();
        let thread_tile =
            ThreadTile { vector: 8, contiguous_axis: true, through_shared_memory: true, ..ONE_ROW };
        let (units, cubes) = (SMALL_CUBE_UNITS, 5 * 4);
        assert_eq!(launch, Launch { cubes: [cubes, 1], units, items: cubes * units, thread_tile });
        let cubes = 625 * 4;
        let launch = of(Method::Hessian, View::rows(40_000, 64)).unwrap();
        assert_eq!(launch, Launch { cubes: [cubes, 1], units, items: cubes * units, thread_tile });
        for method in [Method::ADMM, Method::Admm(Admm::Published), Method::SSE] {
            let refused = of(method, View::rows(300, 64));
            assert!(matches!(refused, Err(Refusal::Method { .. })), "{method:?}: {refused:?}");
        }
        // Few values, but more than 2^32 elements of Hessians.
        let refused = of(Method::Hessian, View::rows(1, 1 << 28));
        assert!(matches!(refused, Err(Refusal::TooLarge { .. })), "{refused:?}");
    }

    #[test]
    fn gptq_takes_rows_one_by_one() {
        let search = Method::CoordinateDescent;
        let scheme = Fp4Scheme::nvfp4().with_method(search);
        let launch = plan(Operation::Gptq, &problem(View::rows(300, 64), scheme), &GPU).unwrap();
        assert_eq!((launch.cubes, launch.units, launch.items), ([5, 1], SMALL_CUBE_UNITS, 300));
        let wide = problem(View::rows(1, 1 << 16), scheme);
        assert!(matches!(plan(Operation::Gptq, &wide, &GPU), Err(Refusal::TooLarge { .. })));
    }

    #[test]
    fn refusals_name_the_reason() {
        let odd = problem(View::rows(3, 24), Fp4Scheme::nvfp4());
        assert!(matches!(plan(Operation::Quantize, &odd, &GPU), Err(Refusal::Scheme(_))));
        let large = problem(View::rows(1 << 16, 1 << 16), Fp4Scheme::nvfp4());
        assert!(matches!(plan(Operation::Amax, &large, &GPU), Err(Refusal::TooLarge { .. })));
    }

    #[test]
    fn cubes_take_a_second_dimension_where_one_is_too_short() {
        let few = Capability { max_cubes: 50, ..GPU };
        let problem = problem(View::rows(512, 1024), Fp4Scheme::nvfp4());
        assert_eq!(plan(Operation::Quantize, &problem, &GPU).unwrap().cubes, [128, 1]);
        assert_eq!(plan(Operation::Quantize, &problem, &few).unwrap().cubes, [43, 3]);
    }
}
