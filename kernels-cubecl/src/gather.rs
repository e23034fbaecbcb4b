//! Rows of bytes at indices, for lookups in packed tensors on devices that store no bytes.

use burn_fp4_search::host::View;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::memory::check_memory;
use crate::plan::{Capability, Refusal, UNITS};

/// Gathers the rows of `[rows, row_bytes]` bytes at indices `[count]` in i32, 32 bits at a time, so
/// that it runs in WGSL, which has no bytes in memory. An index out of range means the last row.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, gather_rows};
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let bytes = client.create_from_slice(&[1, 2, 3, 4, 5, 6, 0, 0]);
/// let indices = client.create_from_slice(i32::as_bytes(&[1, 0]));
/// let rows = gather_rows(&client, &device, bytes, [2, 3], indices, 2)?;
/// assert_eq!(client.read_one_unchecked(rows)[..6], [4, 5, 6, 1, 2, 3]);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn gather_rows(
    client: &Client,
    device: &Capability,
    bytes: Handle,
    [rows, row_bytes]: [usize; 2],
    indices: Handle,
    count: usize,
) -> Result<Handle, Refusal> {
    let (found, expected) = (rows.max(count).saturating_mul(row_bytes), View::MAX_LEN);
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    if rows == 0 && count > 0 {
        return Err(Refusal::Mismatch { what: "rows to gather from", expected: 1, found: 0 });
    }
    check_memory("bytes", &bytes, rows * row_bytes)?;
    check_memory("indices", &indices, 4 * count)?;
    let gathered = count * row_bytes;
    let words = gathered.div_ceil(4);
    let output = client.empty(4 * words);
    if words > 0 {
        let units = device.portable.map_or(UNITS, |portable| portable.units.min(UNITS));
        let [x, y] = device.two_dimensions((words as u32).div_ceil(units));
        // SAFETY: the lengths match the shapes, and units beyond `gathered` do nothing. The memory
        // of a buffer ends with a whole word.
        unsafe {
            gather_kernel::launch_unchecked(
                client,
                CubeCount::Static(x, y, 1),
                CubeDim::new_1d(units),
                BufferArg::from_raw_parts(bytes, (rows * row_bytes).div_ceil(4)),
                BufferArg::from_raw_parts(indices, count),
                BufferArg::from_raw_parts(output.clone(), words),
                gathered as u32,
                rows as u32,
                row_bytes as u32,
            );
        }
    }
    Ok(output)
}

/// A unit makes a word of the output, whose bytes may come from several rows.
#[cube(launch_unchecked)]
fn gather_kernel(
    bytes: &[u32],
    indices: &[i32],
    output: &mut [u32],
    gathered: u32,
    rows: u32,
    row_bytes: u32,
) {
    let at = ABSOLUTE_POS as u32;
    if at * 4 >= gathered {
        terminate!();
    }
    let mut word = 0u32.runtime();
    #[unroll]
    for part in 0..4u32 {
        let place = at * 4 + part;
        if place < gathered {
            let index = u32::cast_from(indices[(place / row_bytes) as usize]);
            let source = clamp_max(index, rows - 1) * row_bytes + place % row_bytes;
            let byte = (bytes[(source / 4) as usize] >> (source % 4 * 8)) & 0xFFu32;
            word |= byte << comptime!(part * 8);
        }
    }
    output[at as usize] = word;
}
