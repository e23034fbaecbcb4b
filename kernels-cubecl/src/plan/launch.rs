//! How an operation is launched: [`plan`].

use burn_fp4_search::host::View;
use burn_fp4_search::{Blocks, ScaleSearch};
use cubecl::prelude::CubeCount;

use super::capability::{Capability, UNITS};
use super::problem::{Operation, Problem};
use super::refusal::Refusal;
use super::share::{Share, TileSharing};

/// How an operation is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Cubes in two dimensions; one where the device allows that many.
    pub cubes: [u32; 2],
    /// Units of a cube.
    pub units: u32,
    /// Work items; units beyond have nothing to do.
    pub items: u32,
    /// The part of the tensor that is one item.
    pub share: Share,
}

impl Launch {
    pub(crate) fn count(&self) -> CubeCount {
        CubeCount::Static(self.cubes[0], self.cubes[1], 1)
    }
}

/// Units of a cube where each has a long way to go.
pub(crate) const FEW_UNITS: u32 = 64;

/// Bytes that one load or store moves at most.
const LOAD: u32 = 16;

/// Values of a column that a unit of the row amax looks at when the axis is strided.
pub(crate) const COLUMN_CHUNK: u32 = 128;

/// Decides how an operation is launched, from the problem and the device alone.
///
/// # Errors
/// [`Refusal`] if it cannot be.
pub fn plan(
    operation: Operation,
    problem: &Problem,
    device: &Capability,
) -> Result<Launch, Refusal> {
    check(operation, problem)?;
    let units = units(operation);
    let (items, share) = items(operation, problem, device, units);
    let cubes = items.div_ceil(units);
    let cubes = match operation {
        Operation::Amax | Operation::SquaredError => cubes.min(device.cubes),
        _ => cubes,
    };
    let lines = cubes.div_ceil(device.max_cubes).max(1);
    Ok(Launch { cubes: [cubes.div_ceil(lines), lines], units, items, share })
}

/// Whether an operation fits its problem.
fn check(operation: Operation, problem: &Problem) -> Result<(), Refusal> {
    let Problem { view, scheme, .. } = problem;
    if !matches!(operation, Operation::Amax | Operation::RowAmax) {
        scheme.check_columns(view.axis)?;
    }
    // Values of codes and scales are the same however these were chosen.
    let reads_codes = matches!(operation, Operation::Dequantize | Operation::SquaredError);
    if !reads_codes && !matches!(operation, Operation::Amax | Operation::RowAmax) {
        let by_hessian = matches!(operation, Operation::QuantizeByHessian | Operation::Gptq);
        let fits = match scheme.search {
            ScaleSearch::Hessian | ScaleSearch::CoordinateDescent => by_hessian,
            ScaleSearch::Amax | ScaleSearch::FourOverSix { .. } | ScaleSearch::Sse => !by_hessian,
            // The host's.
            ScaleSearch::Admm | ScaleSearch::AdmmPublished => false,
        };
        if !fits {
            return Err(Refusal::Search { operation, found: scheme.search });
        }
    }
    let expected = View::MAX_LEN;
    let found = match operation {
        // The Hessians are indexed by 32 bits like the values.
        Operation::QuantizeByHessian => view.len().max(view.axis * scheme.block_size),
        Operation::Gptq => view.len().max(view.axis * view.axis),
        _ => view.len(),
    };
    if found > expected { Err(Refusal::TooLarge { found, expected }) } else { Ok(()) }
}

/// Units of a cube.
fn units(operation: Operation) -> u32 {
    match operation {
        // Their units need many registers: of small cubes more fit on a multiprocessor together.
        Operation::QuantizeByHessian | Operation::Gptq => FEW_UNITS,
        _ => UNITS,
    }
}

/// How many shares there are, and what one is.
fn items(operation: Operation, problem: &Problem, device: &Capability, units: u32) -> (u32, Share) {
    let Problem { view, dtype, .. } = problem;
    let [rows, axis, inner] = [view.packed_rows(), view.axis, view.inner].map(|n| n as u32);
    let blocks = problem.blocks() as u32;
    let widest = LOAD / dtype.size() as u32;
    let along = inner == 1;
    let one_row = Share::one_row(along, *dtype, device);
    match operation {
        Operation::Amax => {
            let vector = common_power_of_two(view.len() as u32, widest);
            (view.len() as u32 / vector, Share { vector, ..one_row })
        }
        Operation::RowAmax if along => {
            let vector = common_power_of_two(axis, widest);
            // As many planes as the device keeps busy; each takes several rows if there are more.
            let planes = rows.min(device.cubes * UNITS / device.plane);
            (planes * device.plane, Share { vector, ..one_row })
        }
        Operation::RowAmax => {
            let vector = common_power_of_two(inner, widest / 4);
            let chunks = axis.div_ceil(COLUMN_CHUNK);
            (rows / vector * chunks, Share { vector, rows: vector, ..one_row })
        }
        Operation::SquaredError => {
            ((view.len() / 8).min((device.cubes * UNITS) as usize) as u32, one_row)
        }
        Operation::Dequantize if along => {
            let share = Share { vector: widest.min(8), ..one_row };
            (view.len() as u32 / 8, share)
        }
        Operation::QuantizeByHessian => {
            let vector = if along { widest } else { 1 };
            let share = Share { vector, staged: device.stages, ..one_row };
            (rows.div_ceil(units) * blocks * units, share)
        }
        Operation::Gptq => (rows, one_row),
        Operation::Hadamard if along => (rows * blocks, Share { vector: widest, ..one_row }),
        Operation::Dequantize | Operation::Hadamard => {
            let share = strided(operation, problem, device, one_row);
            (rows / share.rows * blocks, share)
        }
        Operation::Quantize | Operation::FakeQuantize => {
            quantized(operation, problem, device, one_row)
        }
    }
}

/// How many shares are quantized, and what one is: by tiles where the scheme has them.
fn quantized(
    operation: Operation,
    problem: &Problem,
    device: &Capability,
    one_row: Share,
) -> (u32, Share) {
    let [rows, blocks] = [problem.view.packed_rows(), problem.blocks()].map(|n| n as u32);
    let widest = LOAD / problem.dtype.size() as u32;
    let tile = tile(operation, problem, device);
    let mut share = match (tile, one_row.along) {
        (TileSharing::Repeated, _) => one_row,
        (TileSharing::Exchanged, true) => {
            let spread = common_power_of_two(blocks, 8);
            Share { vector: widest, rows: 4, lanes: 4, spread, ..one_row }
        }
        (TileSharing::None | TileSharing::Halves, true) => Share { vector: widest, ..one_row },
        (_, false) => strided(operation, problem, device, one_row),
    };
    let rows = match tile {
        TileSharing::Exchanged => {
            share.lanes = 16 / share.rows;
            // Rows that are missing from a last tile are idle units.
            rows.next_multiple_of(16)
        }
        _ => rows,
    };
    let blocks = if tile == TileSharing::Halves { 2 * blocks } else { blocks };
    (rows / share.rows * blocks, Share { tile, ..share })
}

/// How a strided axis is divided. Rows, lanes and what is staged are what was fastest on an H200.
fn strided(operation: Operation, problem: &Problem, device: &Capability, one_row: Share) -> Share {
    let block_size = problem.scheme.block_size as u32;
    let [inner, blocks] = [problem.view.inner, problem.blocks()].map(|n| n as u32);
    let (most_rows, lanes) = match operation {
        Operation::Dequantize => (32 / block_size, block_size),
        Operation::FakeQuantize | Operation::Hadamard => (64 / block_size, 8),
        _ => (4, 32),
    };
    let rows = common_power_of_two(inner, most_rows);
    let share = Share { vector: rows, rows, ..one_row };
    // Neighbours that load and store whole sectors of 32 bytes on either side; those of other
    // planes of the cube complete the lines.
    let unstaged = Share {
        lanes: common_power_of_two(inner / rows, 8),
        spread: common_power_of_two(blocks, 256 / block_size),
        ..share
    };
    let spread = UNITS / lanes;
    let fits = (inner / rows).is_multiple_of(lanes) && blocks.is_multiple_of(spread);
    match operation {
        // Only the dense tensor is written: one block after the other.
        Operation::FakeQuantize | Operation::Hadamard => Share { spread: 1, ..unstaged },
        // The registers that blocks of 16 need leave too few units to hide the exchange.
        Operation::Quantize if block_size == 16 => unstaged,
        _ if fits && device.stages => Share { lanes, spread, staged: true, ..share },
        _ => unstaged,
    }
}

/// Neighbours in a plane can exchange only if the rows of a tile are neighbours. Halves of a block
/// are for what writes no packed blocks, and needs no more of one than its amax.
fn tile(operation: Operation, problem: &Problem, device: &Capability) -> TileSharing {
    let Problem { view, scheme, .. } = problem;
    let whole = view.inner == 1 || view.outer == 1 || view.inner.is_multiple_of(16);
    let by_amax = operation == Operation::FakeQuantize && scheme.search == ScaleSearch::Amax;
    let halves = by_amax && view.inner == 1 && scheme.block_size == 32 && device.plane >= 2;
    match scheme.blocks {
        Blocks::Row if halves => TileSharing::Halves,
        Blocks::Row => TileSharing::None,
        Blocks::Tile16x16 if whole && device.plane >= 16 => TileSharing::Exchanged,
        Blocks::Tile16x16 => TileSharing::Repeated,
    }
}

/// The largest power of two that divides a number, `limit` at most.
pub(crate) fn common_power_of_two(number: u32, limit: u32) -> u32 {
    1 << number.trailing_zeros().min(limit.ilog2())
}

#[cfg(test)]
mod tests {
    use burn_fp4_search::Fp4Scheme;

    use super::super::capability::{CPU, GPU};
    use super::*;
    use crate::plan::{Conversion, Dtype};

    const ONE_ROW: Share = Share {
        vector: 1,
        along: false,
        rows: 1,
        lanes: 1,
        spread: 1,
        staged: false,
        tile: TileSharing::None,
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
        let share = Share { vector: 8, along: true, ..ONE_ROW };
        assert_eq!(quantize, Launch { cubes: [1, 1], units: UNITS, items: 192, share });
        assert_eq!(plan(Operation::Dequantize, &problem, &GPU).unwrap().items, 384);
        assert_eq!(plan(Operation::RowAmax, &problem, &GPU).unwrap().items, 96);
        assert_eq!(plan(Operation::RowAmax, &problem, &CPU).unwrap().items, 3);
        let short = self::problem(View::rows(1 << 27, 16), Fp4Scheme::nvfp4());
        assert_eq!(plan(Operation::RowAmax, &short, &GPU).unwrap().items, 528 * UNITS);
    }

    #[test]
    fn a_strided_axis_is_read_across_columns() {
        let share = |inner, axis| {
            let view = View { outer: 1, axis, inner };
            plan(Operation::Quantize, &problem(view, Fp4Scheme::nvfp4()), &GPU).unwrap().share
        };
        let wide = Share { vector: 4, rows: 4, lanes: 8, spread: 16, ..ONE_ROW };
        assert_eq!(share(1024, 1024), wide);
        assert_eq!(share(1023, 48), ONE_ROW);
    }

    #[test]
    fn packed_blocks_are_staged_where_rectangles_of_a_cube_fit() {
        let of = |operation, scheme, inner, device: &Capability| {
            let problem = problem(View { outer: 1, axis: 1024, inner }, scheme);
            plan(operation, &problem, device).unwrap().share
        };
        let staged = Share { vector: 2, rows: 2, lanes: 16, spread: 16, staged: true, ..ONE_ROW };
        assert_eq!(of(Operation::Dequantize, Fp4Scheme::nvfp4(), 1024, &GPU), staged);
        let staged = Share { vector: 4, rows: 4, lanes: 32, spread: 8, staged: true, ..ONE_ROW };
        assert_eq!(of(Operation::Quantize, Fp4Scheme::mxfp4(), 1024, &GPU), staged);
        assert!(!of(Operation::Quantize, Fp4Scheme::mxfp4(), 1024, &CPU).staged);
        assert!(!of(Operation::Quantize, Fp4Scheme::mxfp4(), 96, &GPU).staged);
        let fake = of(Operation::FakeQuantize, Fp4Scheme::mxfp4(), 1024, &GPU);
        assert_eq!((fake.rows, fake.lanes, fake.spread), (2, 8, 1));
    }

    #[test]
    fn a_block_of_32_is_divided_where_neighbours_exchange() {
        let of = |scheme, device: &Capability| {
            let problem = problem(View::rows(3, 64), scheme);
            let launch = plan(Operation::FakeQuantize, &problem, device).unwrap();
            (launch.share.tile, launch.items)
        };
        assert_eq!(of(Fp4Scheme::mxfp4(), &GPU), (TileSharing::Halves, 12));
        assert_eq!(of(Fp4Scheme::mxfp4(), &CPU), (TileSharing::None, 6));
        let sse = Fp4Scheme::mxfp4().with_search(ScaleSearch::Sse);
        assert_eq!(of(sse, &GPU), (TileSharing::None, 6));
        assert_eq!(of(Fp4Scheme::nvfp4(), &GPU), (TileSharing::None, 12));
    }

    #[test]
    fn tiles_need_planes_and_neighbouring_rows() {
        let tiles = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
        let plan = |view, device| plan(Operation::Quantize, &problem(view, tiles), device).unwrap();
        let ragged = plan(View::rows(17, 32), &GPU);
        assert_eq!((ragged.share.tile, ragged.items), (TileSharing::Exchanged, 16));
        assert_eq!(plan(View::rows(17, 32), &CPU).share.tile, TileSharing::Repeated);
        let straddling = View { outer: 2, axis: 32, inner: 8 };
        assert_eq!(plan(straddling, &GPU).share.tile, TileSharing::Repeated);
    }

    #[test]
    fn a_search_by_hessian_takes_a_cube_for_the_blocks_of_many_rows() {
        let of = |search, view| {
            let scheme = Fp4Scheme::nvfp4().with_search(search);
            plan(Operation::QuantizeByHessian, &problem(view, scheme), &GPU)
        };
        let launch = of(ScaleSearch::Hessian, View::rows(300, 64)).unwrap();
        let share = Share { vector: 8, along: true, staged: true, ..ONE_ROW };
        let (units, cubes) = (FEW_UNITS, 5 * 4);
        assert_eq!(launch, Launch { cubes: [cubes, 1], units, items: cubes * units, share });
        let cubes = 625 * 4;
        let launch = of(ScaleSearch::Hessian, View::rows(40_000, 64)).unwrap();
        assert_eq!(launch, Launch { cubes: [cubes, 1], units, items: cubes * units, share });
        for search in [ScaleSearch::Admm, ScaleSearch::AdmmPublished, ScaleSearch::Sse] {
            let refused = of(search, View::rows(300, 64));
            assert!(matches!(refused, Err(Refusal::Search { .. })), "{search:?}: {refused:?}");
        }
        // Few values, but more than 2^32 elements of Hessians.
        let refused = of(ScaleSearch::Hessian, View::rows(1, 1 << 28));
        assert!(matches!(refused, Err(Refusal::TooLarge { .. })), "{refused:?}");
    }

    #[test]
    fn gptq_takes_rows_one_by_one() {
        let search = ScaleSearch::CoordinateDescent;
        let scheme = Fp4Scheme::nvfp4().with_search(search);
        let launch = plan(Operation::Gptq, &problem(View::rows(300, 64), scheme), &GPU).unwrap();
        assert_eq!((launch.cubes, launch.units, launch.items), ([5, 1], FEW_UNITS, 300));
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
