//! GEMV with a matrix of signed bytes, for the few rows of an output layer.
//!
//! ```text
//! codes [n, k], a scale for each 32 of a row
//! a plane takes some rows; its units take turns along k:
//!     load 16 codes and their scale of every row
//!     for every row of the input: load its 16 values
//!         sums[row][input] += scale x (codes x values), in f32
//! add the sums of the units of the plane
//! ```

use burn_fp4_search::host::{INT8_BLOCK, View};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::memory::check_memory;
use crate::numeric::element::narrow;
use crate::plan::{Capability, Conversion, Dtype, Refusal, UNITS};

/// Largest number of rows of the input of [`int8_gemv`]. A unit has a sum in registers for each row
/// of the input and of the weight.
pub const MAX_INT8_GEMV_ROWS: usize = 16;

/// Codes that a unit loads of a row at a time.
const CODES: usize = 16;
/// Words of four codes.
const WORDS: u32 = CODES as u32 / 4;

/// Computes `[m, n]`, the product of an input `[m, k]` of at most [`MAX_INT8_GEMV_ROWS`] rows and
/// the transpose of a matrix of signed bytes: codes `[n, k]` with an f32 scale for each
/// [`INT8_BLOCK`] of a row. Sums are f32, in an order that depends only on shape and device.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, int8_gemv};
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let input = client.create_from_slice(f32::as_bytes(&[0.5; 32]));
/// let codes = client.create_from_slice(&[127; 32]);
/// let scales = client.create_from_slice(f32::as_bytes(&[2.0]));
/// let output = int8_gemv(&client, &device, input, [codes, scales], [1, 1, 32], Dtype::F32)?;
/// assert_eq!(f32::from_bytes(&client.read_one_unchecked(output)), [32.0 * 0.5 * 254.0]);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn int8_gemv(
    client: &Client,
    device: &Capability,
    input: Handle,
    [codes, scales]: [Handle; 2],
    [m, n, k]: [usize; 3],
    dtype: Dtype,
) -> Result<Handle, Refusal> {
    device.check_decoder(dtype)?;
    let same = |what, expected, found| match expected == found {
        true => Ok(()),
        false => Err(Refusal::Mismatch { what, expected, found }),
    };
    same("rows of the input", m.min(MAX_INT8_GEMV_ROWS), m)?;
    same("channels of whole blocks", k / INT8_BLOCK * INT8_BLOCK, k)?;
    let (found, expected) = (n.max(m).saturating_mul(k).max(m.saturating_mul(n)), View::MAX_LEN);
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    check_memory("input", &input, m * k * dtype.size())?;
    check_memory("codes", &codes, n * k)?;
    check_memory("scales", &scales, 4 * (n * k / INT8_BLOCK))?;
    let output = client.empty(m * n * dtype.size());
    if m * n > 0 {
        let launch = match dtype {
            Dtype::F32 => launch::<f32>,
            Dtype::F16 => launch::<f16>,
            Dtype::Bf16 => launch::<bf16>,
        };
        launch(client, device, [input, codes, scales, output.clone()], [m, n, k], dtype);
    }
    Ok(output)
}

fn launch<F: Float>(
    client: &Client,
    device: &Capability,
    [input, codes, scales, output]: [Handle; 4],
    [m, n, k]: [usize; 3],
    dtype: Dtype,
) {
    // A vector of the input has 16 bytes.
    let vector = 16 / dtype.size();
    // More rows of the weight have their loads in flight together if there are few sums for each.
    let rows = if m > 4 { 2 } else { 4 };
    let [x, y] = device.two_dimensions((n as u32).div_ceil(rows * (UNITS / device.plane)));
    // SAFETY: the lengths match the shape; rows beyond the last repeat it and are not stored.
    unsafe {
        int8_gemv_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(UNITS),
            WORDS as usize,
            vector,
            BufferArg::from_raw_parts(input, m * k / vector),
            BufferArg::from_raw_parts(codes, n * k / CODES),
            BufferArg::from_raw_parts(scales, n * k / INT8_BLOCK),
            BufferArg::from_raw_parts(output, m * n),
            n as u32,
            (k / CODES) as u32,
            m as u32,
            rows,
            vector as u32,
            Conversion::to(dtype, device),
            device.plane,
        );
    }
}

#[cube(launch_unchecked)]
fn int8_gemv_kernel<F: Float, W: Size, X: Size>(
    input: &[Vector<F, X>],
    codes: &[Vector<u32, W>],
    scales: &[f32],
    output: &mut [F],
    n: u32,
    steps: u32,
    #[comptime] m: u32,
    #[comptime] rows: u32,
    #[comptime] vector: u32,
    #[comptime] conversion: Conversion,
    #[comptime] plane: u32,
) {
    let lane = UNIT_POS % plane;
    let group = CUBE_POS as u32 * comptime!(UNITS / plane) + UNIT_POS / plane;
    let first = group * rows;
    let mut sums = Array::<f32>::new(comptime!((rows * m) as usize));
    #[unroll]
    for index in 0..comptime!(rows * m) {
        sums[index as usize] = 0.0f32.runtime();
    }
    // Vectors of the input for the codes of a step.
    let vectors = comptime!(CODES as u32 / vector);
    let mut step = lane;
    while step < steps {
        let mut loaded = Array::<Vector<u32, W>>::new(comptime!(rows as usize));
        let mut scale = Array::<f32>::new(comptime!(rows as usize));
        #[unroll]
        for row in 0..rows {
            let at = min(first + row, n - 1) * steps + step;
            loaded[row as usize] = codes[at as usize];
            scale[row as usize] = scales[(at / comptime!((INT8_BLOCK / CODES) as u32)) as usize];
        }
        #[unroll]
        for of_input in 0..m {
            let mut values = Array::<Vector<F, X>>::new(comptime!(vectors as usize));
            #[unroll]
            for part in 0..vectors {
                let at = (of_input * steps + step) * vectors + part;
                values[part as usize] = input[at as usize];
            }
            #[unroll]
            for row in 0..rows {
                let mut product = 0.0f32.runtime();
                #[unroll]
                for code in 0..CODES as u32 {
                    let word = loaded[row as usize].extract(comptime!((code / 4) as usize));
                    // From -128..128 to 0..256, which is not signed.
                    let byte = ((word ^ 0x8080_8080u32) >> comptime!(code % 4 * 8)) & 0xFFu32;
                    let weight = f32::cast_from(byte) - 128.0f32;
                    let value = values[comptime!((code / vector) as usize)];
                    let value = f32::cast_from(value.extract(comptime!((code % vector) as usize)));
                    product = fma(weight, value, product);
                }
                let sum = comptime!((row * m + of_input) as usize);
                sums[sum] = fma(scale[row as usize], product, sums[sum]);
            }
        }
        step += plane;
    }
    #[unroll]
    for row in 0..rows {
        #[unroll]
        for of_input in 0..m {
            let own = sums[comptime!((row * m + of_input) as usize)];
            let sum = if comptime!(plane > 1) { plane_sum(own) } else { own };
            if lane == 0u32 && first + row < n {
                output[(of_input * n + first + row) as usize] = narrow::<F>(sum, conversion);
            }
        }
    }
}
