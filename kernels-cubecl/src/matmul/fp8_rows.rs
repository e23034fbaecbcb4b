//! [`fp8_rows`]: facts about a weight for products in FP8, found once.

use burn_fp4_search::formats::Fp4Format;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::plan::Matmul;
use crate::memory::{PackedHandles, PackedIn, check_memory};
use crate::numeric::scale_grid::e4m3_holds;
use crate::plan::{Refusal, UNITS};

/// Finds the facts about the packed rows of a weight `[n, k]` for products in FP8, f32 `[2, n]`:
/// the largest code of the block scales of a row, blocks of zeros left out, and the number of its
/// blocks whose products `element x block scale` E4M3 does not hold. Products of a weight without
/// such blocks are exact. Only `n`, `k`, the format and the block size of the matmul matter. The
/// values are those of [`burn_fp4_search::fp8_rows`].
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Dtype, Matmul, PackedHandles, fp8_rows};
/// use burn_fp4_search::formats::Fp4Format;
///
/// let client = Device::default().client();
/// let upload = |bytes: &[u8]| client.create_from_slice(bytes);
/// let read = |handle| f32::from_bytes(&client.read_one_unchecked(handle)).to_vec();
/// // Block scales of 1 and 1.125: E4M3 does not hold 1.5 times the second.
/// let weight = PackedHandles {
///     codes: upload(&[0x77; 16]),
///     scales: upload(&[0x38, 0x39]),
///     tensor_scale: upload(f32::as_bytes(&[1.0])),
///     tensor_scales: 1,
/// };
/// let (format, block_size, dtype) = (Fp4Format::NvFp4, 16, Dtype::Bf16);
/// let rows = fp8_rows(&client, weight, &Matmul { m: 1, n: 1, k: 32, format, block_size, dtype })?;
/// assert_eq!(read(rows), [0x39 as f32, 1.0]);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`] if blocks do not divide k, a tensor has too many values, or memory is too short.
pub fn fp8_rows(
    client: &Client,
    weight: PackedHandles,
    matmul: &Matmul,
) -> Result<Handle, Refusal> {
    matmul.check()?;
    let Matmul { n, k, block_size, .. } = *matmul;
    check_memory("codes", &weight.codes, n * k / 2)?;
    check_memory("scales", &weight.scales, n * k / block_size)?;
    weight.check_tensor_scales(n)?;
    let rows = client.empty(2 * 4 * n);
    if n > 0 {
        // SAFETY: the lengths are checked, and units beyond the rows do nothing.
        unsafe {
            rows_kernel::launch_unchecked(
                client,
                CubeCount::Static((n as u32).div_ceil(UNITS), 1, 1),
                CubeDim::new_1d(UNITS),
                1,
                weight.read(n * k, 8, block_size),
                BufferArg::from_raw_parts(rows.clone(), 2 * n),
                n as u32,
                (k / block_size) as u32,
                block_size as u32 / 8,
                matmul.format,
            );
        }
    }
    Ok(rows)
}

/// Takes a packed row per unit: it runs once for a weight.
#[cube(launch_unchecked)]
fn rows_kernel<W: Size>(
    weight: &PackedIn<u8, W>,
    rows: &mut [f32],
    n: u32,
    blocks: u32,
    #[comptime] words: u32,
    #[comptime] format: Fp4Format,
) {
    let grid = comptime!(format.row().scale_grid());
    let row = ABSOLUTE_POS as u32;
    if row < n {
        let first = row * blocks;
        let mut most = 0u32;
        for block in first..first + blocks {
            if has_elements::<W>(weight, block, words) {
                most = max(most, u32::cast_from(weight.scales[block as usize]));
            }
        }
        let mut count = 0u32;
        for block in first..first + blocks {
            let code = u32::cast_from(weight.scales[block as usize]);
            if !e4m3_holds(code, most, grid) && has_elements::<W>(weight, block, words) {
                count += 1u32;
            }
        }
        rows[row as usize] = f32::cast_from(most);
        rows[(n + row) as usize] = f32::cast_from(count);
    }
}

/// Returns true if a block has an element other than zero.
#[cube]
fn has_elements<W: Size>(weight: &PackedIn<u8, W>, block: u32, #[comptime] words: u32) -> bool {
    let mut bits = 0u32;
    #[unroll]
    for word in 0..words {
        bits |= weight.codes[(block * words + word) as usize].extract(0usize);
    }
    bits & 0x7777_7777u32 != 0u32
}
