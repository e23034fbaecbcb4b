//! Rounding of an input to E4M3 by rows, for `wgmma_fp8.rs`.
//!
//! The values are those of [`burn_fp4_search::round_to_fp8`]. A cube holds a row in registers,
//! finds its largest magnitude, and rounds it to multiples of a 448th of it. The output is in the
//! order in which the product copies and multiplies it:
//!
//! ```text
//! k tile 0  | row 0: 128 bytes | row 1 | .. | padding |
//! k tile 1  | row 0            | ..
//!
//! a row: vectors of 16 bytes, vector v of row r at place v ^ (r % 8)
//! vector 2 s + h: bytes 4 p + i      k = 32 p + 8 s + 4 h + i of the k tile
//! ```
//!
//! So the 16 bytes of codes that part p of a quad has of a k tile are its weights of all k steps s.

use burn_fp4_search::formats::E4M3;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::plan::{K_TILE, Matmul};
use crate::decoder::row::max_of_cube;
use crate::instructions::WgmmaInstructions;
use crate::numeric::scale_grid::{INFINITY, NAN};
use crate::plan::{Capability, UNITS};

/// An input in E4M3.
pub(super) struct Fp8Input {
    /// `[k / 128, padded rows, 128]` bytes.
    pub(super) values: Handle,
    /// f32 factor of each row, NaN if a value of it is not finite.
    pub(super) scales: Handle,
}

/// Bits of 2^-118. Rows with smaller magnitudes are zeros: 448 divided by them is not finite.
const SMALLEST: u32 = (127 - 118) << 23;

/// Rounds an input `[m, k]` to E4M3, padded to some rows.
pub(super) fn quantize<I: WgmmaInstructions, F: Float>(
    client: &Client,
    device: &Capability,
    input: Handle,
    matmul: &Matmul,
    padded: usize,
) -> Fp8Input {
    let Matmul { m, k, .. } = *matmul;
    let output = Fp8Input { values: client.empty(padded * k), scales: client.empty(4 * m) };
    let [x, y] = device.two_dimensions(m as u32);
    let units = device.units_of_row(UNITS);
    // SAFETY: the lengths match the matmul, and cubes beyond the rows do nothing.
    unsafe {
        quantize_kernel::launch_unchecked::<I, F>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(units),
            4,
            4,
            BufferArg::from_raw_parts(input, m * k / 4),
            BufferArg::from_raw_parts(output.values.clone(), padded * k / 16),
            BufferArg::from_raw_parts(output.scales.clone(), m),
            (k / K_TILE) as u32,
            padded as u32,
            (k as u32 / 16).div_ceil(units),
            device.plane,
            units,
        );
    }
    output
}

/// Rounds `vectors` vectors of 16 bytes of the output per unit, whose values stay in registers.
#[cube(launch_unchecked)]
fn quantize_kernel<I: WgmmaInstructions, F: Float, N: Size, X: Size>(
    input: &[Vector<F, N>],
    output: &mut [Vector<u32, X>],
    scales: &mut [f32],
    k_tiles: u32,
    padded: u32,
    #[comptime] vectors: u32,
    #[comptime] plane: u32,
    #[comptime] units: u32,
) {
    let row = CUBE_POS as u32;
    if row < scales.len() as u32 {
        let first = row * k_tiles * comptime!(K_TILE as u32 / 4);
        let mut values = Array::<Vector<F, N>>::new(comptime!(4 * vectors as usize));
        let mut largest = 0u32;
        #[unroll]
        for own in 0..vectors {
            // Units beyond the row read its last vector.
            let vector = min(UNIT_POS + own * units, k_tiles * 8u32 - 1u32);
            let from = first + vector / 8u32 * 32u32 + vector % 8u32;
            #[unroll]
            for part in 0..4u32 {
                values[comptime!((4 * own + part) as usize)] = input[(from + 8 * part) as usize];
            }
        }
        #[unroll]
        for run in 0..comptime!(4 * vectors as usize) {
            #[unroll]
            for index in 0..4usize {
                let bits = u32::reinterpret(f32::cast_from(values[run].extract(index)));
                largest = max(largest, bits & 0x7FFF_FFFFu32);
            }
        }
        let largest = max_of_cube::<u32>(largest, plane, units);
        let amax = f32::reinterpret(largest);
        let most = comptime!(E4M3.max_value());
        let factor = select(largest < SMALLEST, 0.0f32, most / amax);
        if UNIT_POS == 0u32 {
            let scale = select(largest < SMALLEST, 0.0f32, amax / most);
            let is_finite = largest < INFINITY;
            scales[row as usize] = select(is_finite, scale, f32::reinterpret(NAN));
        }
        #[unroll]
        for own in 0..vectors {
            let vector = UNIT_POS + own * units;
            if vector < k_tiles * 8u32 {
                let mut words = Vector::<u32, X>::empty();
                #[unroll]
                for part in 0..4u32 {
                    let run = values[comptime!((4 * own + part) as usize)];
                    let mut scaled = Array::<f32>::new(4usize);
                    #[unroll]
                    for index in 0..4usize {
                        scaled[index] = f32::cast_from(run.extract(index)) * factor;
                    }
                    words.insert(comptime!(part as usize), I::round_to_e4m3(&scaled));
                }
                let (k_tile, place) = (vector / 8u32, vector % 8u32);
                let to = (k_tile * padded + row) * 8u32 + (place ^ (row % 8u32));
                output[to as usize] = words;
            }
        }
    }
}
