//! Index of the largest value of each row. A cube takes a row.

use burn_fp4_search::host::View;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::row::{TOGETHER, load_together, max_of_cube, widest_vector};
use super::sample::key;
use crate::memory::check_memory;
use crate::plan::{Capability, Dtype, Refusal};

/// Units of a cube: rows are long, and few.
const UNITS: u32 = 1024;

/// Returns the index of the first of the largest values of each row of `[rows, cols]`: i32
/// `[rows]`. NaN counts as less than any number.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, argmax};
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let values = client.create_from_slice(f32::as_bytes(&[0.5, 3.0, f32::NAN, 3.0]));
/// let indices = argmax(&client, &device, values, [1, 4], Dtype::F32)?;
/// assert_eq!(i32::from_bytes(&client.read_one_unchecked(indices)), [1]);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn argmax(
    client: &Client,
    device: &Capability,
    values: Handle,
    [rows, cols]: [usize; 2],
    dtype: Dtype,
) -> Result<Handle, Refusal> {
    device.check_decoder(dtype)?;
    if cols == 0 {
        return Err(Refusal::Mismatch { what: "values of a row", expected: 1, found: 0 });
    }
    let (found, expected) = (rows.saturating_mul(cols), View::MAX_LEN);
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    check_memory("values", &values, found * dtype.size())?;
    let indices = client.empty(4 * rows);
    if rows > 0 {
        let launch = match dtype {
            Dtype::F32 => launch::<f32>,
            Dtype::F16 => launch::<f16>,
            Dtype::Bf16 => launch::<bf16>,
        };
        let vector = widest_vector(cols, dtype);
        launch(client, device, [values, indices.clone()], [rows, cols, vector]);
    }
    Ok(indices)
}

fn launch<F: Float>(
    client: &Client,
    device: &Capability,
    [values, indices]: [Handle; 2],
    [rows, cols, vector]: [usize; 3],
) {
    let units = device.units_of_row(UNITS);
    let vectors = cols / vector;
    let [x, y] = device.two_dimensions(rows as u32);
    // SAFETY: the lengths match the shape.
    unsafe {
        argmax_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(units),
            vector,
            BufferArg::from_raw_parts(values, rows * vectors),
            BufferArg::from_raw_parts(indices, rows),
            rows as u32,
            vectors as u32,
            vector as u32,
            device.plane,
            units,
        );
    }
}

#[cube(launch_unchecked)]
fn argmax_kernel<F: Float, N: Size>(
    values: &[Vector<F, N>],
    indices: &mut [i32],
    rows: u32,
    vectors: u32,
    #[comptime] vector: u32,
    #[comptime] plane: u32,
    #[comptime] units: u32,
) {
    let row = CUBE_POS as u32;
    if row >= rows {
        terminate!();
    }
    let first = row * vectors;
    let mut largest = 0u32.runtime();
    let mut own = 0u32.runtime();
    let mut at = UNIT_POS;
    while at < vectors {
        // Vectors beyond the last repeat it, which changes nothing.
        let loaded = load_together::<F, N>(values, first, at, vectors, units);
        #[unroll]
        for turn in 0..TOGETHER {
            let loaded = loaded[turn as usize];
            #[unroll]
            for index in 0..vector {
                let value = f32::cast_from(loaded.extract(comptime!(index as usize)));
                let bits = u32::reinterpret(value);
                let is_nan = bits & 0x7FFF_FFFFu32 > 0x7F80_0000u32;
                // Both zeros are equal.
                let number = select(bits == 0x8000_0000u32, key(0.0f32), key(value));
                let key = select(is_nan, 0u32, number);
                if key > largest {
                    largest = key;
                    own = min(at + comptime!(turn * units), vectors - 1) * vector + index;
                }
            }
        }
        at += comptime!(TOGETHER * units);
    }
    let of_row = max_of_cube::<u32>(largest, plane, units);
    // The first index is the largest of the negated.
    let candidate = select(largest == of_row, !own, 0u32);
    let found = !max_of_cube::<u32>(candidate, plane, units);
    if UNIT_POS == 0u32 {
        indices[row as usize] = i32::cast_from(found);
    }
}
