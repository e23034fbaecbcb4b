//! Squared error of a packed tensor.

use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::squares::{RANGES, SUMS};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::memory::{PackedHandles, PackedIn};
use crate::numeric::element::element_value;
use crate::numeric::scale_grid::scale_value;
use crate::plan::{Capability, Launch, Operation, Problem, Refusal, ThreadTile, UNITS, plan};
use crate::tensor::indexing::{Dims, dims};
use crate::tensor::load_store::widen;

/// Partial sums, f32 `[6, count]`: three rows of the squared differences between a tensor and its
/// packed form, a row for each of [`RANGES`], then three of the squares of the tensor. The caller
/// adds up each row.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PartialSums {
    /// The sums.
    pub sums: Handle,
    /// Length of each row.
    pub count: usize,
}

/// Sums the squared error of a packed tensor against its original. Only format and block size of
/// the scheme matter. A value that overflows the dtype of the tensor counts as infinite.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, Problem, amax, quantize, squared_error};
/// use burn_fp4_search::Fp4Scheme;
/// use burn_fp4_search::host::View;
/// use burn_fp4_search::squares::squared_sums;
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let mut block = [8.0f32; 16]; // quantized to 7, but for the first
/// block[0] = 84.0;
/// let values = client.create_from_slice(f32::as_bytes(&block));
/// let (view, dtype, scheme) = (View::rows(1, 16), Dtype::F32, Fp4Scheme::nvfp4());
/// let problem = Problem { view, dtype, scheme };
/// let largest = amax(&client, &device, values.clone(), view, dtype, false)?;
/// let packed = quantize(&client, &device, values.clone(), largest, &problem)?;
///
/// let partial = squared_error(&client, &device, values, packed, &problem)?;
/// let sums = client.read_one_unchecked(partial.sums);
/// let rows = f32::from_bytes(&sums).chunks(partial.count);
/// let totals: Vec<f32> = rows.map(|row| row.iter().sum()).collect();
/// let energy = 84.0 * 84.0 + 15.0 * 8.0 * 8.0;
/// assert_eq!(squared_sums(&totals), Some([15.0, energy]));
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn squared_error(
    client: &Client,
    device: &Capability,
    values: Handle,
    packed: PackedHandles,
    problem: &Problem,
) -> Result<PartialSums, Refusal> {
    let planned = plan(Operation::SquaredError, problem, device)?;
    problem.check_values(&values)?;
    problem.check_packed(&packed)?;
    Ok(if planned.thread_tile.wide() {
        launch::<u32>(client, values, packed, problem, planned)
    } else {
        launch::<u16>(client, values, packed, problem, planned)
    })
}

fn launch<E: Int>(
    client: &Client,
    values: Handle,
    packed: PackedHandles,
    problem: &Problem,
    launch: Launch,
) -> PartialSums {
    let Problem { view, scheme, .. } = problem;
    if launch.items == 0 {
        let sums = client.create_from_slice(f32::as_bytes(&[0.0; SUMS]));
        return PartialSums { sums, count: 1 };
    }
    let by_row = packed.tensor_scales > 1;
    let count = launch.items as usize;
    let sums = client.empty(SUMS * 4 * count);
    // SAFETY: the lengths match the problem, and units beyond `items` do nothing.
    unsafe {
        squared_error_kernel::launch_unchecked::<E>(
            client,
            launch.count(),
            CubeDim::new_1d(UNITS),
            1,
            1,
            BufferArg::from_raw_parts(values, view.len()),
            packed.read(view.len(), 8, scheme.block_size),
            BufferArg::from_raw_parts(sums.clone(), SUMS * count),
            dims(problem, &launch),
            problem.dtype.overflow(),
            scheme.block_size as u32,
            launch.thread_tile,
            scheme.format(),
            by_row,
        );
    }
    PartialSums { sums, count }
}

/// Every unit takes every `dims.items`-th word of eight codes. Neighbouring units take neighbouring
/// columns or words.
#[cube(launch_unchecked)]
fn squared_error_kernel<E: Int, N: Size, W: Size>(
    values: &[Vector<E, N>],
    packed: &PackedIn<u8, W>,
    sums: &mut [f32],
    dims: Dims,
    overflow: f32,
    #[comptime] block_size: u32,
    #[comptime] thread_tile: ThreadTile,
    #[comptime] format: Fp4Format,
    #[comptime] by_row: bool,
) {
    let item = ABSOLUTE_POS as u32;
    if item >= dims.items {
        terminate!();
    }
    let block_words = comptime!(block_size / 8);
    let grid = comptime!(format.row().scale_grid());
    let row_words = dims.blocks * block_words;
    let words = dims.rows * row_words;
    let mut of_item = Array::<f32>::new(comptime!(SUMS));
    #[unroll]
    for sum in 0..SUMS {
        of_item[sum] = 0.0f32.runtime();
    }
    let mut at = item;
    while at < words {
        let column = at % dims.inner;
        let word = at / dims.inner % row_words;
        let outer = at / dims.inner / row_words;
        let first = (outer * row_words + word) * 8 * dims.inner + column;
        let row = outer * dims.inner + column;
        let factor = if comptime!(by_row) { row } else { 0u32.runtime() };
        let decode = f32::reinterpret(packed.tensor_scale[factor as usize]);
        let block = row * dims.blocks + word / block_words;
        let scale = scale_value(u32::cast_from(packed.scales[block as usize]), grid);
        let word = packed.codes[(row * row_words + word) as usize].extract(0usize);
        #[unroll]
        for index in 0..8u32 {
            let value =
                widen::<E, N>(values[(first + index * dims.inner) as usize], 0u32, thread_tile);
            let element = element_value(word << comptime!(28 - 4 * index));
            let restored = (element * scale) * decode;
            let infinity = f32::reinterpret(0x7F80_0000u32);
            let restored = select(restored.abs() >= overflow, infinity, restored);
            add_square(&mut of_item, 0usize, restored - value);
            add_square(&mut of_item, comptime!(RANGES.len()), value);
        }
        at += dims.items;
    }
    #[unroll]
    for sum in 0..SUMS {
        sums[sum * dims.items as usize + item as usize] = of_item[sum];
    }
}

/// Adds the square of a value to the sum of its range.
#[cube]
fn add_square(sums: &mut Array<f32>, #[comptime] first: usize, value: f32) {
    let magnitude = value.abs();
    let small = magnitude < comptime!(RANGES[0].end);
    // NaN is not.
    let bounded = magnitude < comptime!(RANGES[1].end);
    let middle = bounded && !small;
    let factor = select(bounded, comptime!(RANGES[1].factor), comptime!(RANGES[2].factor));
    let factor = select(small, comptime!(RANGES[0].factor), factor);
    let scaled = value * factor;
    let square = scaled * scaled;
    sums[first] += select(small, square, 0.0f32);
    sums[comptime!(first + 1)] += select(middle, square, 0.0f32);
    sums[comptime!(first + 2)] += select(bounded, 0.0f32, square);
}
