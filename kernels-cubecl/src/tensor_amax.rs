//! Largest magnitude of a tensor, or of each of its rows.

use burn_fp4_search::Fp4Scheme;
use burn_fp4_search::host::View;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::plan::{
    COLUMN_CHUNK, Capability, Dtype, Launch, Operation, Problem, Refusal, ThreadTile, UNITS, plan,
};
use crate::tensor::load_store::widen;

/// Computes the largest magnitude of the tensor, or of each of its packed rows, in f32. It is NaN
/// if a value is.
///
/// `values` is the contiguous tensor; the result holds 1 or `packed_rows` f32.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, amax};
/// use burn_fp4_search::host::View;
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let read = |handle| f32::from_bytes(&client.read_one_unchecked(handle)).to_vec();
/// let values = client.create_from_slice(f32::as_bytes(&[1.0, -6.0, 2.0, 0.5]));
/// let view = View::rows(2, 2);
/// let of_all = amax(&client, &device, values.clone(), view, Dtype::F32, false)?;
/// assert_eq!(read(of_all), [6.0]);
/// let of_rows = amax(&client, &device, values, view, Dtype::F32, true)?;
/// assert_eq!(read(of_rows), [6.0, 2.0]);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn amax(
    client: &Client,
    device: &Capability,
    values: Handle,
    view: View,
    dtype: Dtype,
    by_row: bool,
) -> Result<Handle, Refusal> {
    // The amax does not depend on the scheme.
    let problem = Problem { view, dtype, scheme: Fp4Scheme::default() };
    let operation = if by_row { Operation::RowAmax } else { Operation::Amax };
    device.check_portable(dtype)?;
    let planned = plan(operation, &problem, device)?;
    problem.check_values(&values)?;
    Ok(if planned.thread_tile.wide() {
        launch::<u32>(client, values, view, by_row, planned, device)
    } else {
        launch::<u16>(client, values, view, by_row, planned, device)
    })
}

fn launch<E: Int>(
    client: &Client,
    values: Handle,
    view: View,
    by_row: bool,
    launch: Launch,
    &Capability { plane, cubes, .. }: &Capability,
) -> Handle {
    let results = if by_row { view.packed_rows() } else { 1 };
    let result = client.empty(4 * results);
    // Along a contiguous axis one plane writes the amax of a row. The other kernels use atomics and
    // need zeros first.
    if results > 0 && (launch.items == 0 || !by_row || view.inner > 1) {
        set_to_zero(client, &result, results, cubes);
    }
    if launch.items == 0 {
        return result;
    }
    let count = launch.count();
    let dim = CubeDim::new_1d(UNITS);
    let vector = launch.thread_tile.vector as usize;
    // SAFETY: the lengths match the problem, and units beyond `items` do nothing.
    unsafe {
        let values = BufferArg::from_raw_parts(values, view.len() / vector);
        let output = BufferArg::from_raw_parts(result.clone(), results);
        if !by_row {
            amax_kernel::launch_unchecked::<E>(
                client,
                count,
                dim,
                launch.thread_tile.words() as usize,
                values,
                output,
                launch.items,
                launch.thread_tile,
                plane,
            );
        } else if view.inner == 1 {
            row_amax_kernel::launch_unchecked::<E>(
                client,
                count,
                dim,
                launch.thread_tile.words() as usize,
                values,
                output,
                (view.axis / vector) as u32,
                results as u32,
                launch.cubes[0] * launch.cubes[1] * UNITS / plane,
                launch.thread_tile,
                plane,
            );
        } else {
            column_amax_kernel::launch_unchecked::<E>(
                client,
                count,
                dim,
                launch.thread_tile.words() as usize,
                values,
                output,
                view.axis as u32,
                (view.inner / vector) as u32,
                launch.items,
                launch.thread_tile,
            );
        }
    }
    result
}

/// Zeroes the result on the device: an upload takes longer.
fn set_to_zero(client: &Client, result: &Handle, results: usize, cubes: u32) {
    let count = CubeCount::Static((results as u32).div_ceil(UNITS).min(cubes), 1, 1);
    // SAFETY: the length is that of the memory.
    unsafe {
        let result = BufferArg::from_raw_parts(result.clone(), results);
        zero_kernel::launch_unchecked(
            client,
            count,
            CubeDim::new_1d(UNITS),
            result,
            results as u32,
        );
    }
}

#[cube(launch_unchecked)]
fn zero_kernel(result: &mut [u32], count: u32) {
    let mut at = ABSOLUTE_POS as u32;
    while at < count {
        result[at as usize] = 0u32;
        at += CUBE_COUNT as u32 * CUBE_DIM;
    }
}

/// Returns the largest of the bits of a magnitude and those of a vector.
#[cube]
fn larger<E: Int, N: Size>(
    largest: u32,
    values: Vector<E, N>,
    #[comptime] thread_tile: ThreadTile,
) -> u32 {
    let mut largest = largest;
    #[unroll]
    for index in 0..thread_tile.vector {
        largest = max(largest, magnitude_bits(widen::<E, N>(values, index, thread_tile)));
    }
    largest
}

/// Returns the bits of a magnitude. They order like magnitudes, with NaN above all, so that an
/// integer maximum finds the largest, also where drivers flush subnormals.
#[cube]
fn magnitude_bits(value: f32) -> u32 {
    u32::reinterpret(value) & 0x7FFF_FFFFu32
}

/// Returns the largest bits in a plane.
#[cube]
fn largest_of_plane(bits: u32, #[comptime] plane: u32) -> u32 {
    if comptime!(plane > 1) { plane_max(bits) } else { bits }
}

/// Every unit takes every `stride`-th vector.
#[cube(launch_unchecked)]
fn amax_kernel<E: Int, N: Size>(
    values: &[Vector<E, N>],
    result: &mut [Atomic<u32>],
    count: u32,
    #[comptime] thread_tile: ThreadTile,
    #[comptime] plane: u32,
) {
    let stride = CUBE_COUNT as u32 * CUBE_DIM;
    let mut largest = 0u32.runtime();
    let last = count - 1;
    let mut at = ABSOLUTE_POS as u32;
    // Four loads are in flight at once. At the end the last vector stands in for missing ones.
    while at < count {
        let first = values[at as usize];
        let second = values[min(at + stride, last) as usize];
        let third = values[min(at + 2 * stride, last) as usize];
        let fourth = values[min(at + 3 * stride, last) as usize];
        largest = larger::<E, N>(largest, first, thread_tile);
        largest = larger::<E, N>(largest, second, thread_tile);
        largest = larger::<E, N>(largest, third, thread_tile);
        largest = larger::<E, N>(largest, fourth, thread_tile);
        at += 4 * stride;
    }
    let of_plane = largest_of_plane(largest, plane);
    let lane = ABSOLUTE_POS as u32 % plane;
    if lane == 0u32 {
        result[0].fetch_max(of_plane);
    }
}

/// Every plane takes every `planes`-th packed row, of `vectors` vectors.
#[cube(launch_unchecked)]
fn row_amax_kernel<E: Int, N: Size>(
    values: &[Vector<E, N>],
    result: &mut [u32],
    vectors: u32,
    rows: u32,
    planes: u32,
    #[comptime] thread_tile: ThreadTile,
    #[comptime] plane: u32,
) {
    let lane = ABSOLUTE_POS as u32 % plane;
    let mut row = ABSOLUTE_POS as u32 / plane;
    while row < rows {
        let mut largest = 0u32.runtime();
        let mut at = lane;
        while at < vectors {
            largest = larger::<E, N>(largest, values[(row * vectors + at) as usize], thread_tile);
            at += plane;
        }
        let of_row = largest_of_plane(largest, plane);
        if lane == 0u32 {
            result[row as usize] = of_row;
        }
        row += planes;
    }
}

/// Every unit takes [`COLUMN_CHUNK`] vectors of neighbouring packed rows.
#[cube(launch_unchecked)]
fn column_amax_kernel<E: Int, N: Size>(
    values: &[Vector<E, N>],
    result: &mut [Atomic<u32>],
    axis: u32,
    columns: u32,
    count: u32,
    #[comptime] thread_tile: ThreadTile,
) {
    let item = ABSOLUTE_POS as u32;
    if item >= count {
        terminate!();
    }
    let chunks = axis.div_ceil(COLUMN_CHUNK);
    let column = item % columns;
    let outer = item / columns / chunks;
    let start = item / columns % chunks * COLUMN_CHUNK;
    let mut largest = Array::<u32>::new(comptime!(thread_tile.vector as usize));
    #[unroll]
    for index in 0..thread_tile.vector {
        largest[index as usize] = 0u32;
    }
    for k in start..min(start + COLUMN_CHUNK, axis) {
        let loaded = values[((outer * axis + k) * columns + column) as usize];
        #[unroll]
        for index in 0..thread_tile.vector {
            let bits = magnitude_bits(widen::<E, N>(loaded, index, thread_tile));
            largest[index as usize] = max(largest[index as usize], bits);
        }
    }
    #[unroll]
    for index in 0..thread_tile.vector {
        let row = (outer * columns + column) * thread_tile.vector + index;
        result[row as usize].fetch_max(largest[index as usize]);
    }
}
