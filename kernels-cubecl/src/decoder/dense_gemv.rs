//! GEMV with a dense weight, for the few rows of an output layer.
//!
//! ```text
//! weight [n, k]: a plane takes some rows of it; its units take turns along k
//!     load a vector of every row of the weight, and of every row of the input
//!     sums[row][input] += weight x input, in f32
//!     add the sums of the units of the plane
//! weight [k, n]: a unit takes a vector of columns; the planes of a cube take turns along k
//!     load its vectors of some rows
//!     sums[input][column] += weight x input, in f32
//!     add the sums of the planes, in order
//! ```

use burn_fp4_search::host::View;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::row::widest_vector;
use crate::memory::check_memory;
use crate::numeric::element::narrow;
use crate::plan::{Capability, Conversion, Dtype, Refusal, UNITS};

/// Largest number of rows of the input of [`dense_gemv`]. Each is read again for every plane.
pub const MAX_DENSE_GEMV_ROWS: usize = 8;

/// Rows of the weight whose loads are in flight together.
const LOADS: u32 = 4;

/// Computes `[m, n]`, the product of an input `[m, k]` of at most [`MAX_DENSE_GEMV_ROWS`] rows and
/// a weight `[k, n]`, which is `[n, k]` in memory if it is `transposed`. All have one dtype; sums
/// are f32, in an order that depends only on shape, layout, dtype and device.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, dense_gemv};
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let upload = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
/// let input = upload(&[1.0, 2.0, 3.0, 4.0]);
/// let weight = upload(&[1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, -1.0]); // `[n, k]` in memory
/// let output = dense_gemv(&client, &device, input, weight, [1, 2, 4], true, Dtype::F32)?;
/// assert_eq!(f32::from_bytes(&client.read_one_unchecked(output)), [10.0, -3.0]);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn dense_gemv(
    client: &Client,
    device: &Capability,
    input: Handle,
    weight: Handle,
    [m, n, k]: [usize; 3],
    transposed: bool,
    dtype: Dtype,
) -> Result<Handle, Refusal> {
    device.check_decoder(dtype)?;
    if m > MAX_DENSE_GEMV_ROWS {
        let (expected, found) = (MAX_DENSE_GEMV_ROWS, m);
        return Err(Refusal::Mismatch { what: "rows of the input", expected, found });
    }
    let (found, expected) = (n.max(m).saturating_mul(k).max(m.saturating_mul(n)), View::MAX_LEN);
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    check_memory("input", &input, m * k * dtype.size())?;
    check_memory("weight", &weight, n * k * dtype.size())?;
    let output = client.empty(m * n * dtype.size());
    if m * n > 0 {
        let launch = match (dtype, transposed) {
            (Dtype::F32, true) => launch_rows::<f32>,
            (Dtype::F16, true) => launch_rows::<f16>,
            (Dtype::Bf16, true) => launch_rows::<bf16>,
            (Dtype::F32, false) => launch_columns::<f32>,
            (Dtype::F16, false) => launch_columns::<f16>,
            (Dtype::Bf16, false) => launch_columns::<bf16>,
        };
        let vector = widest_vector(if transposed { k } else { n }, dtype);
        let form = (vector, Conversion::to(dtype, device));
        launch(client, device, [input, weight, output.clone()], [m, n, k], form);
    }
    Ok(output)
}

fn launch_rows<F: Float>(
    client: &Client,
    device: &Capability,
    [input, weight, output]: [Handle; 3],
    [m, n, k]: [usize; 3],
    (vector, conversion): (usize, Conversion),
) {
    let vectors = k / vector;
    let [x, y] = device.two_dimensions((n as u32).div_ceil(LOADS * (UNITS / device.plane)));
    // SAFETY: the lengths match the shape; rows beyond the last repeat it and are not stored.
    unsafe {
        rows_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(UNITS),
            vector,
            BufferArg::from_raw_parts(input, m * vectors),
            BufferArg::from_raw_parts(weight, n * vectors),
            BufferArg::from_raw_parts(output, m * n),
            n as u32,
            vectors as u32,
            m as u32,
            vector as u32,
            conversion,
            device.plane,
        );
    }
}

#[cube(launch_unchecked)]
fn rows_kernel<F: Float, N: Size>(
    input: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    output: &mut [F],
    rows: u32,
    vectors: u32,
    #[comptime] m: u32,
    #[comptime] vector: u32,
    #[comptime] conversion: Conversion,
    #[comptime] plane: u32,
) {
    let lane = UNIT_POS % plane;
    let group = CUBE_POS as u32 * comptime!(UNITS / plane) + UNIT_POS / plane;
    let first = group * LOADS;
    let mut sums = Array::<f32>::new(comptime!((LOADS * m) as usize));
    #[unroll]
    for index in 0..comptime!(LOADS * m) {
        sums[index as usize] = 0.0f32.runtime();
    }
    let mut at = lane;
    while at < vectors {
        let mut loaded = Array::<Vector<F, N>>::new(comptime!(LOADS as usize));
        #[unroll]
        for row in 0..LOADS {
            let from = min(first + row, rows - 1) * vectors + at;
            loaded[row as usize] = weight[from as usize];
        }
        #[unroll]
        for of_input in 0..m {
            let values = input[(of_input * vectors + at) as usize];
            #[unroll]
            for index in 0..comptime!(vector as usize) {
                let value = f32::cast_from(values.extract(index));
                #[unroll]
                for row in 0..LOADS {
                    let weight = f32::cast_from(loaded[row as usize].extract(index));
                    let sum = comptime!((row * m + of_input) as usize);
                    sums[sum] = fma(weight, value, sums[sum]);
                }
            }
        }
        at += plane;
    }
    #[unroll]
    for row in 0..LOADS {
        #[unroll]
        for of_input in 0..m {
            let own = sums[comptime!((row * m + of_input) as usize)];
            let sum = if comptime!(plane > 1) { plane_sum(own) } else { own };
            if lane == 0u32 && first + row < rows {
                output[(of_input * rows + first + row) as usize] = narrow::<F>(sum, conversion);
            }
        }
    }
}

fn launch_columns<F: Float>(
    client: &Client,
    device: &Capability,
    [input, weight, output]: [Handle; 3],
    [m, n, k]: [usize; 3],
    (vector, conversion): (usize, Conversion),
) {
    let vectors = n / vector;
    // Without planes barriers are slow: a unit takes all of k.
    let units = if device.plane > 1 { UNITS } else { 1 };
    let [x, y] = device.two_dimensions((vectors as u32).div_ceil(device.plane));
    // SAFETY: the lengths match the shape; columns beyond the last repeat it and are not stored.
    unsafe {
        columns_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(units),
            vector,
            BufferArg::from_raw_parts(input, m * k),
            BufferArg::from_raw_parts(weight, k * vectors),
            BufferArg::from_raw_parts(output, m * n),
            k as u32,
            vectors as u32,
            m as u32,
            vector as u32,
            conversion,
            device.plane,
            units,
        );
    }
}

#[cube(launch_unchecked)]
fn columns_kernel<F: Float, N: Size>(
    input: &[F],
    weight: &[Vector<F, N>],
    output: &mut [F],
    k: u32,
    vectors: u32,
    #[comptime] m: u32,
    #[comptime] vector: u32,
    #[comptime] conversion: Conversion,
    #[comptime] plane: u32,
    #[comptime] units: u32,
) {
    let planes = comptime!(units / plane);
    let (lane, part) = (UNIT_POS % plane, UNIT_POS / plane);
    let column = min(CUBE_POS as u32 * plane + lane, vectors - 1);
    let mut sums = Array::<f32>::new(comptime!((m * vector) as usize));
    #[unroll]
    for index in 0..comptime!(m * vector) {
        sums[index as usize] = 0.0f32.runtime();
    }
    let mut at = part;
    while at < k {
        let mut loaded = Array::<Vector<F, N>>::new(comptime!(LOADS as usize));
        #[unroll]
        for load in 0..LOADS {
            let row = min(at + comptime!(load * planes), k - 1);
            loaded[load as usize] = weight[(row * vectors + column) as usize];
        }
        #[unroll]
        for load in 0..LOADS {
            let row = at + comptime!(load * planes);
            if row < k {
                #[unroll]
                for of_input in 0..m {
                    let value = f32::cast_from(input[(of_input * k + row) as usize]);
                    #[unroll]
                    for index in 0..vector {
                        let loaded = loaded[load as usize].extract(comptime!(index as usize));
                        let sum = comptime!((of_input * vector + index) as usize);
                        sums[sum] = fma(f32::cast_from(loaded), value, sums[sum]);
                    }
                }
            }
        }
        at += comptime!(LOADS * planes);
    }
    let width = comptime!(plane * vector);
    let mut shared = Shared::<[f32]>::new_slice(comptime!((planes * width) as usize));
    let first = CUBE_POS as u32 * width;
    #[unroll]
    for of_input in 0..m {
        #[unroll]
        for index in 0..vector {
            shared[(part * width + lane * vector + index) as usize] =
                sums[comptime!((of_input * vector + index) as usize)];
        }
        if comptime!(units > 1) {
            sync_cube();
        }
        let mut at = UNIT_POS;
        while at < width {
            let mut sum = shared[at as usize];
            #[unroll]
            for part in 1..planes {
                sum += shared[(comptime!(part * width) + at) as usize];
            }
            if first + at < vectors * vector {
                output[(of_input * vectors * vector + first + at) as usize] =
                    narrow::<F>(sum, conversion);
            }
            at += units;
        }
        if comptime!(units > 1) {
            sync_cube();
        }
    }
}
