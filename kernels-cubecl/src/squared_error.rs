//! Squared error of a packed tensor.

use burn_fp4_search::formats::Fp4Format;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::memory::{PackedHandles, PackedIn};
use crate::numeric::element::element_value;
use crate::numeric::scale_grid::scale_value;
use crate::plan::{Capability, Launch, Operation, Problem, Refusal, ThreadTile, UNITS, plan};
use crate::tensor::indexing::{Dims, dims};
use crate::tensor::load_store::widen;

/// Partial sums, f32 `[2, count]`: in the first row of the squared differences between a tensor and
/// its packed form, in the second of the squares of the tensor. The caller adds up each row.
#[derive(Debug, Clone)]
pub struct PartialSums {
    /// The sums.
    pub sums: Handle,
    /// Length of each of the two rows.
    pub count: usize,
}

/// Sums the squared error of a packed tensor against its original. Only format and block size of
/// the scheme matter.
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
        let sums = client.create_from_slice(f32::as_bytes(&[0.0; 2]));
        return PartialSums { sums, count: 1 };
    }
    let by_row = packed.tensor_scales > 1;
    let count = launch.items as usize;
    let sums = client.empty(2 * 4 * count);
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
            BufferArg::from_raw_parts(sums.clone(), 2 * count),
            dims(problem, &launch),
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
    let mut error = 0.0f32.runtime();
    let mut energy = 0.0f32.runtime();
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
            let difference = (element * scale) * decode - value;
            error += difference * difference;
            energy += value * value;
        }
        at += dims.items;
    }
    sums[item as usize] = error;
    sums[(dims.items + item) as usize] = energy;
}
