use burn_fp4_search::host::View;
use burn_fp4_search::{Blocks, ScaleSearch, SearchError};
use cubecl::client::Client;
use cubecl::features::{Features, MmaConfig, Plane};
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::CubeCount;

use crate::curvature::PANEL;
use crate::{Dtype, Problem};

/// What is to be launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Largest magnitude of the tensor.
    Amax,
    /// Largest magnitude of each packed row.
    RowAmax,
    /// Codes and scales.
    Quantize,
    /// Codes and scales by the activations that meet each block.
    QuantizeByHessian,
    /// Codes and scales that make up for the errors of others.
    Gptq,
    /// The values of codes and scales, from the dense tensor.
    FakeQuantize,
    /// The transform of every 16 neighbours.
    Hadamard,
    /// Values of codes and scales.
    Dequantize,
    /// Sums of squares.
    SquaredError,
}

/// What a plan needs to know about a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Capability {
    /// Units that exchange values directly; 1 if none do.
    pub plane: u32,
    /// Cubes that fill the device, with [`UNITS`] units each.
    pub cubes: u32,
    /// Largest number of cubes along one dimension of a launch.
    pub max_cubes: u32,
    /// Whether its conversion to bf16 keeps subnormals.
    pub converts_bf16: bool,
    /// Whether planes multiply matrices of 16 x 16 and 16 x 8 halves.
    pub mma: bool,
    /// Whether units gain by exchanging what they load or store through shared memory.
    pub stages: bool,
    /// Whether it computes in f64.
    pub doubles: bool,
}

impl Capability {
    /// What the device of a client can do.
    pub fn of(client: &Client) -> Self {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let one_size = hardware.plane_size_min == hardware.plane_size_max;
        let planes = one_size && properties.features.plane.contains(Plane::Ops);
        let cpu = hardware.num_cpu_cores.is_some();
        Self {
            plane: if planes { hardware.plane_size_min } else { 1 },
            // Each with several loads of 16 bytes a unit under way.
            cubes: 4 * hardware.num_streaming_multiprocessors.unwrap_or(32),
            max_cubes: hardware.max_cube_count.0,
            converts_bf16: !cpu,
            mma: planes && hardware.plane_size_min == 32 && multiplies_halves(&properties.features),
            // There the units of a cube run one after the other, and meeting costs them dearly.
            stages: !cpu,
            doubles: properties.supports_type(ElemType::Float(FloatKind::F64)),
        }
    }
}

/// Whether bf16 and f16 have the instruction that `mma.rs` uses.
fn multiplies_halves(features: &Features) -> bool {
    [FloatKind::BF16, FloatKind::F16].into_iter().all(|half| {
        let (half, full) = (ElemType::Float(half), ElemType::Float(FloatKind::F32));
        let config = MmaConfig { a_type: half, b_type: half, cd_type: full, m: 16, n: 8, k: 16 };
        features.matmul.mma.contains(&config)
    })
}

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

/// The part of a tensor that a unit works on, one block of neighbouring packed rows, and which parts
/// its neighbours work on.
///
/// What the units of a plane load and store together should be contiguous, at least 32 bytes at a
/// time. Along a contiguous axis neighbours take the blocks of a row one after the other. Otherwise
/// `lanes` units take neighbouring rows of a block, and `spread` times as many the next blocks of
/// these rows; all that together is a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Share {
    /// Values that one load or store of the dense tensor moves.
    pub vector: u32,
    /// Whether it moves them along the blocked axis, which is contiguous then, or across rows.
    pub along: bool,
    /// Packed rows.
    pub rows: u32,
    /// Units beside each other across rows.
    pub lanes: u32,
    /// Units beside each other along rows.
    pub spread: u32,
    /// Whether the units of a cube exchange packed blocks through shared memory; see `stage.rs`.
    pub staged: bool,
    /// What shares a block scale.
    pub tile: Tile,
    /// dtype of the dense tensor.
    pub dtype: Dtype,
    /// How f32 becomes this dtype.
    pub conversion: Conversion,
}

impl Share {
    /// A block of one row, loaded and stored a value at a time.
    pub(crate) fn one_row(along: bool, dtype: Dtype, device: &Capability) -> Self {
        Self {
            vector: 1,
            along,
            rows: 1,
            lanes: 1,
            spread: 1,
            staged: false,
            tile: Tile::None,
            dtype,
            conversion: Conversion::to(dtype, device),
        }
    }

    /// Values of a word: a dense tensor is loaded in words of 32 bits, or of 16 where a vector is a
    /// single value of 16 bits.
    pub const fn word_values(&self) -> u32 {
        if self.dtype.size() == 2 && self.vector > 1 { 2 } else { 1 }
    }

    /// Words of a vector.
    pub const fn words(&self) -> u32 {
        self.vector / self.word_values()
    }

    /// Whether words have 32 bits.
    pub const fn wide(&self) -> bool {
        self.dtype.size() == 4 || self.vector > 1
    }
}

/// How f32 is rounded to a dtype, to nearest even.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Conversion {
    /// By the instructions of the device.
    Device,
    /// bf16, on bits: the instruction of an x86 processor takes subnormals for zero.
    Bf16Bits,
}

impl Conversion {
    /// The one to a dtype on a device.
    pub(crate) fn to(dtype: Dtype, device: &Capability) -> Self {
        let bits = dtype == Dtype::Bf16 && !device.converts_bf16;
        if bits { Self::Bf16Bits } else { Self::Device }
    }
}

/// How units come to share a scale: those that hold the rows of a 16 x 16 tile, or the halves of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tile {
    /// There are no tiles.
    None,
    /// Units that hold the rows of a tile are neighbours and exchange what they found.
    Exchanged,
    /// There are no tiles, but a block of 32 is divided between two neighbours, which exchange what they found: shares
    /// are of 16, so that what they store together is as contiguous as where blocks are.
    Halves,
    /// Every unit looks at the whole tile.
    Repeated,
}

/// Why an operation is not launched.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The scheme is inconsistent, or its blocks do not divide the axis.
    #[error(transparent)]
    Scheme(#[from] SearchError),
    /// The operation does not search that way.
    #[error("there is no kernel for ScaleSearch::{found:?} in {operation:?}")]
    Search {
        /// The operation.
        operation: Operation,
        /// The search asked for.
        found: ScaleSearch,
    },
    /// The product does not fit matrix instructions.
    #[error("no matrix instructions: {reason}")]
    Instructions {
        /// Why.
        reason: &'static str,
    },
    /// The device does not compute in f64.
    #[error("the device has no f64")]
    NoDoubles,
    /// More values than [`View::MAX_LEN`].
    #[error("a tensor of {found} values: at most {expected} are quantized as one")]
    TooLarge {
        /// Values of the tensor.
        found: usize,
        /// Largest number supported.
        expected: usize,
    },
}

/// Units of a cube.
pub const UNITS: u32 = 256;

/// Units of a cube where each has a long way to go and there are few.
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
    let Problem { view, scheme, dtype } = problem;
    if !matches!(operation, Operation::Amax | Operation::RowAmax) {
        scheme.check_columns(view.axis)?;
        let by_hessian = matches!(operation, Operation::QuantizeByHessian | Operation::Gptq);
        let fits = match scheme.search {
            ScaleSearch::Hessian | ScaleSearch::CoordinateDescent => by_hessian,
            search => !by_hessian && !search.needs_hessians(),
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
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    let [rows, axis, inner] = [view.packed_rows(), view.axis, view.inner].map(|n| n as u32);
    let blocks = problem.blocks() as u32;
    let widest = LOAD / dtype.size() as u32;
    let along = inner == 1;
    let one_row = Share::one_row(along, *dtype, device);
    let mut units = UNITS;
    let (items, share) = match operation {
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
        Operation::Dequantize => {
            let share = strided(operation, problem, device, one_row);
            (rows / share.rows * blocks, share)
        }
        Operation::QuantizeByHessian => {
            // A cube for every block of as many rows as it has units: fewer where there would be too few cubes to
            // keep the device busy.
            let share =
                Share { vector: if along { widest } else { 1 }, staged: device.stages, ..one_row };
            if rows.div_ceil(units) * blocks < device.cubes {
                units = FEW_UNITS;
            }
            (rows.div_ceil(units) * blocks * units, share)
        }
        Operation::Gptq => {
            units = FEW_UNITS;
            (rows, one_row)
        }
        Operation::Hadamard if along => (rows * blocks, Share { vector: widest, ..one_row }),
        Operation::Hadamard => {
            let share = strided(operation, problem, device, one_row);
            (rows / share.rows * blocks, share)
        }
        Operation::Quantize | Operation::FakeQuantize => {
            let tile = tile(operation, problem, device);
            let mut share = match (tile, along) {
                (Tile::Repeated, _) => one_row,
                (Tile::Exchanged, true) => {
                    let spread = common_power_of_two(blocks, 8);
                    Share { vector: widest, rows: 4, lanes: 4, spread, ..one_row }
                }
                (Tile::None | Tile::Halves, true) => Share { vector: widest, ..one_row },
                (_, false) => strided(operation, problem, device, one_row),
            };
            let rows = match tile {
                Tile::Exchanged => {
                    share.lanes = 16 / share.rows;
                    // Rows that are missing from a last tile are idle units.
                    rows.next_multiple_of(16)
                }
                _ => rows,
            };
            let blocks = if tile == Tile::Halves { 2 * blocks } else { blocks };
            (rows / share.rows * blocks, Share { tile, ..share })
        }
    };
    let cubes = items.div_ceil(units);
    let cubes = match operation {
        Operation::Amax | Operation::SquaredError => cubes.min(device.cubes),
        _ => cubes,
    };
    let lines = cubes.div_ceil(device.max_cubes).max(1);
    Ok(Launch { cubes: [cubes.div_ceil(lines), lines], units, items, share })
}

/// How a square matrix is factorized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FactorPlan {
    /// Blocks of [`PANEL`] columns, the last filled up.
    pub(crate) panels: u32,
    /// Units that eliminate one column after the other, and meet after each.
    pub(crate) units: u32,
}

/// Decides how the curvature of this many channels is found.
///
/// # Errors
/// [`Refusal`] if the matrix is too large, or the device has no f64.
pub(crate) fn plan_factor(channels: usize, device: &Capability) -> Result<FactorPlan, Refusal> {
    let (expected, found) = (View::MAX_LEN, channels * channels);
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    if !device.doubles {
        return Err(Refusal::NoDoubles);
    }
    let units = if device.stages { UNITS } else { 1 };
    Ok(FactorPlan { panels: (channels as u32).div_ceil(PANEL), units })
}

/// How products of activations are summed up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GramPlan {
    /// By matrix instructions.
    Mma,
    /// By matrix instructions, of f32 in three parts.
    MmaParts,
    /// Element by element.
    Plain,
}

/// How products of activations `[rows, channels]` are summed up.
///
/// # Errors
/// [`Refusal`] if there are too many values, or the device has no f64.
pub(crate) fn plan_gram(
    rows: usize,
    channels: usize,
    dtype: Dtype,
    device: &Capability,
) -> Result<GramPlan, Refusal> {
    let (expected, found) = (View::MAX_LEN, rows.saturating_mul(channels));
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    if !device.doubles {
        return Err(Refusal::NoDoubles);
    }
    Ok(match dtype {
        _ if !device.mma || !channels.is_multiple_of(8) => GramPlan::Plain,
        Dtype::F32 => GramPlan::MmaParts,
        Dtype::F16 | Dtype::Bf16 => GramPlan::Mma,
    })
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
    // Neighbours that load and store whole sectors of 32 bytes on either side; those of other planes
    // of the cube complete the lines.
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

/// Neighbours in a plane can exchange only if the rows of a tile are neighbours. Halves of a block are for what writes
/// no packed blocks, and needs no more of one than its amax.
fn tile(operation: Operation, problem: &Problem, device: &Capability) -> Tile {
    let Problem { view, scheme, .. } = problem;
    let whole = view.inner == 1 || view.outer == 1 || view.inner.is_multiple_of(16);
    let by_amax = operation == Operation::FakeQuantize && scheme.search == ScaleSearch::Amax;
    let halves = by_amax && view.inner == 1 && scheme.block_size == 32 && device.plane >= 2;
    match scheme.blocks {
        Blocks::Row if halves => Tile::Halves,
        Blocks::Row => Tile::None,
        Blocks::Tile16x16 if whole && device.plane >= 16 => Tile::Exchanged,
        Blocks::Tile16x16 => Tile::Repeated,
    }
}

/// The largest power of two that divides a number, `limit` at most.
pub(crate) fn common_power_of_two(number: u32, limit: u32) -> u32 {
    1 << number.trailing_zeros().min(limit.ilog2())
}

#[cfg(test)]
mod tests {
    use burn_fp4_search::Fp4Scheme;

    use super::*;

    const GPU: Capability = Capability {
        plane: 32,
        cubes: 528,
        max_cubes: u32::MAX,

        converts_bf16: true,
        mma: true,
        stages: true,
        doubles: true,
    };
    const CPU: Capability =
        Capability { plane: 1, cubes: 256, converts_bf16: false, stages: false, ..GPU };

    const ONE_ROW: Share = Share {
        vector: 1,
        along: false,
        rows: 1,
        lanes: 1,
        spread: 1,
        staged: false,
        tile: Tile::None,
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
        assert_eq!(of(Fp4Scheme::mxfp4(), &GPU), (Tile::Halves, 12));
        assert_eq!(of(Fp4Scheme::mxfp4(), &CPU), (Tile::None, 6));
        let sse = Fp4Scheme::mxfp4().with_search(ScaleSearch::Sse);
        assert_eq!(of(sse, &GPU), (Tile::None, 6));
        assert_eq!(of(Fp4Scheme::nvfp4(), &GPU), (Tile::None, 12));
    }

    #[test]
    fn tiles_need_planes_and_neighbouring_rows() {
        let tiles = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
        let plan = |view, device| plan(Operation::Quantize, &problem(view, tiles), device).unwrap();
        let ragged = plan(View::rows(17, 32), &GPU);
        assert_eq!((ragged.share.tile, ragged.items), (Tile::Exchanged, 16));
        assert_eq!(plan(View::rows(17, 32), &CPU).share.tile, Tile::Repeated);
        let straddling = View { outer: 2, axis: 32, inner: 8 };
        assert_eq!(plan(straddling, &GPU).share.tile, Tile::Repeated);
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
        let (units, cubes) = (UNITS, 157 * 4);
        let launch = of(ScaleSearch::Hessian, View::rows(40_000, 64)).unwrap();
        assert_eq!(launch, Launch { cubes: [cubes, 1], units, items: cubes * units, share });
        for search in [ScaleSearch::Joint, ScaleSearch::Admm, ScaleSearch::Sse] {
            let refused = of(search, View::rows(300, 64));
            assert!(matches!(refused, Err(Refusal::Search { .. })), "{search:?}: {refused:?}");
        }
        // Few values, but more than 2^32 elements of Hessians.
        let refused = of(ScaleSearch::Hessian, View::rows(1, 1 << 28));
        assert!(matches!(refused, Err(Refusal::TooLarge { .. })), "{refused:?}");
    }

    #[test]
    fn gptq_takes_rows_one_by_one_and_panels_of_its_hessian() {
        let search = ScaleSearch::CoordinateDescent;
        let scheme = Fp4Scheme::nvfp4().with_search(search);
        let launch = plan(Operation::Gptq, &problem(View::rows(300, 64), scheme), &GPU).unwrap();
        assert_eq!((launch.cubes, launch.units, launch.items), ([5, 1], FEW_UNITS, 300));
        let wide = problem(View::rows(1, 1 << 16), scheme);
        assert!(matches!(plan(Operation::Gptq, &wide, &GPU), Err(Refusal::TooLarge { .. })));
        assert_eq!(plan_factor(65, &GPU), Ok(FactorPlan { panels: 2, units: UNITS }));
        assert_eq!(plan_factor(65, &CPU), Ok(FactorPlan { panels: 2, units: 1 }));
        assert!(matches!(plan_factor(1 << 16, &GPU), Err(Refusal::TooLarge { .. })));
        let single = Capability { doubles: false, ..GPU };
        assert_eq!(plan_factor(64, &single), Err(Refusal::NoDoubles));
    }

    #[test]
    fn gram_matrices_take_matrix_instructions_where_vectors_are_whole() {
        use Dtype::{Bf16, F32};
        assert_eq!(plan_gram(100, 64, Bf16, &GPU), Ok(GramPlan::Mma));
        assert_eq!(plan_gram(100, 64, F32, &GPU), Ok(GramPlan::MmaParts));
        assert_eq!(plan_gram(100, 60, Bf16, &GPU), Ok(GramPlan::Plain));
        let plain = Capability { mma: false, ..GPU };
        assert_eq!(plan_gram(100, 64, Bf16, &plain), Ok(GramPlan::Plain));
        let single = Capability { doubles: false, ..GPU };
        assert_eq!(plan_gram(100, 64, Bf16, &single), Err(Refusal::NoDoubles));
        let refused = plan_gram(1 << 16, 1 << 16, Bf16, &GPU);
        assert!(matches!(refused, Err(Refusal::TooLarge { .. })), "{refused:?}");
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
