//! [`MmaInstructions`] and [`WgmmaInstructions`] emulated with plain loads, stores and
//! multiplications. With them a device without the instructions tests the code around them.

use burn_fp4_search::formats::{E4M3, ScaleGrid};
use cubecl::prelude::*;

use super::mma::{MmaInstructions, Pair, PlaneMma};
use super::wgmma::{Operand, WgmmaInstructions};
use crate::numeric::scale_grid::{float_value, round_to_float};
use crate::plan::EMULATED_MMA_WORDS;

/// The emulated instruction of a plane. Every unit of the cube must take part at once: in a test,
/// k tiles divide evenly among the planes.
pub(crate) struct EmulatedMma;

#[cube]
impl MmaInstructions for EmulatedMma {
    fn multiply<F: Float>(
        a: &Array<Vector<F, Pair>>,
        b: &Array<Vector<F, Pair>>,
        sums: &mut Array<Vector<f32, Pair>>,
        scratch: &mut [f32],
        #[comptime] from: u32,
    ) {
        let (plane, quad, part) = (UNIT_POS - UNIT_POS % 32, UNIT_POS % 32 / 4, UNIT_POS % 4);
        let own = from + UNIT_POS * EMULATED_MMA_WORDS;
        sync_cube();
        #[unroll]
        for vector in 0..4u32 {
            scratch[(own + vector) as usize] = f32::reinterpret(a[vector as usize]);
        }
        #[unroll]
        for vector in 0..2u32 {
            scratch[(own + 4 + vector) as usize] = f32::reinterpret(b[vector as usize]);
        }
        sync_cube();
        #[unroll]
        for below in 0..2u32 {
            let mut row = sums[below as usize];
            #[unroll]
            for column in 0..2u32 {
                let mut sum = row.extract(column as usize);
                for pair in 0..4u32 {
                    let of_a = from + (plane + quad * 4 + pair) * EMULATED_MMA_WORDS;
                    let of_b = from + (plane + (2 * part + column) * 4 + pair) * EMULATED_MMA_WORDS;
                    #[unroll]
                    for half in 0..2u32 {
                        let left = scratch[(of_a + comptime!(2 * half + below)) as usize];
                        let right = scratch[(of_b + comptime!(4 + half)) as usize];
                        sum +=
                            product_of_halves::<F>(u32::reinterpret(left), u32::reinterpret(right));
                    }
                }
                row.insert(column as usize, sum);
            }
            sums[below as usize] = row;
        }
    }

    fn merge_bits(ones: u32, zeros: u32, #[comptime] mask: u32) -> u32 {
        PlaneMma::merge_bits(ones, zeros, mask)
    }

    fn scale_pair(
        word: u32,
        #[comptime] pair: u32,
        #[comptime] grid: ScaleGrid,
    ) -> Vector<f32, Pair> {
        PlaneMma::scale_pair(word, pair, grid)
    }

    fn sync_plane() {
        sync_cube();
    }

    #[allow(unused_variables)]
    fn limit_registers(#[comptime] cubes: u32) {}

    fn any_of_plane(holds: bool, scratch: &mut [f32], #[comptime] from: u32) -> bool {
        let first = show(select(holds, 1.0f32, 0.0f32), scratch, from, 32u32);
        let mut any = 0.0f32.runtime();
        for unit in 0..32u32 {
            any += scratch[(first + unit * EMULATED_MMA_WORDS) as usize];
        }
        any > 0.0f32
    }

    fn sum_of_quad(value: f32, scratch: &mut [f32], #[comptime] from: u32) -> f32 {
        let first = show(value, scratch, from, 4u32) as usize;
        let of = comptime!(EMULATED_MMA_WORDS as usize);
        (scratch[first] + scratch[first + of]) + (scratch[first + 2 * of] + scratch[first + 3 * of])
    }
}

/// Shows a unit's value to the others. Returns where that of the first of `count` units is.
#[cube]
fn show(value: f32, scratch: &mut [f32], #[comptime] from: u32, #[comptime] count: u32) -> u32 {
    sync_cube();
    scratch[(from + UNIT_POS * EMULATED_MMA_WORDS) as usize] = value;
    sync_cube();
    from + (UNIT_POS - UNIT_POS % count) * EMULATED_MMA_WORDS
}

/// The emulated instructions.
pub(crate) struct EmulatedWgmma;

#[cube]
impl WgmmaInstructions for EmulatedWgmma {
    #[allow(unused_variables)]
    fn address<T: CubePrimitive>(shared: &[T]) -> u32 {
        0u32.runtime()
    }

    #[allow(unused_variables)]
    fn copy<T: CubePrimitive>(
        wanted: bool,
        shared: &mut [T],
        address: u32,
        to: u32,
        from: &[T],
        at: u32,
        #[comptime] offset: u32,
        #[comptime] each: u32,
        #[comptime] bytes: u32,
    ) {
        if wanted {
            #[unroll]
            for index in 0..each {
                shared[(to * each + index) as usize] =
                    from[((at + offset) * each + index) as usize];
            }
        }
    }

    fn commit_copies() {}

    #[allow(unused_variables)]
    fn wait_for_copies(#[comptime] groups: u32) {}

    #[allow(unused_variables)]
    fn wait_for_own_copies(#[comptime] groups: u32) {}

    #[allow(unused_variables)]
    fn load_shared<X: Size>(
        shared: &[Vector<u32, X>],
        address: u32,
        at: u32,
        #[comptime] offset: u32,
    ) -> Vector<u32, X> {
        shared[(at + offset) as usize]
    }

    #[allow(unused_variables)]
    fn start_barriers(address: u32, #[comptime] count: u32) {}

    #[allow(unused_variables)]
    fn copy_rows<X: Size>(
        wanted: bool,
        shared: &mut [Vector<u32, X>],
        address: u32,
        to: u32,
        from: &[Vector<u32, X>],
        at: u32,
        barrier: u32,
        #[comptime] each: u32,
    ) {
        if wanted {
            for index in 0..each {
                shared[(to + index) as usize] = from[(at + index) as usize];
            }
        }
    }

    #[allow(unused_variables)]
    fn wait_for_rows(barrier: u32, parity: u32) {}

    fn load_word(from: &[u32], at: u32) -> u32 {
        from[at as usize]
    }

    fn load_vector<W: Size>(from: &[Vector<u32, W>], at: u32) -> Array<u32> {
        let mut words = Array::<u32>::new(4usize);
        #[unroll]
        for index in 0..4usize {
            words[index] = from[at as usize].extract(index);
        }
        words
    }

    fn round_to_e4m3(values: &Array<f32>) -> u32 {
        let mut word = 0u32;
        #[unroll]
        for index in 0..4usize {
            let bits = u32::reinterpret(values[index]);
            let magnitude = f32::reinterpret(bits & 0x7FFF_FFFFu32);
            let code = round_to_float(magnitude, comptime!(E4M3)) | ((bits >> 31u32) << 7u32);
            word |= code << comptime!(8 * index as u32);
        }
        word
    }

    fn exp2(value: f32) -> f32 {
        (value * core::f32::consts::LN_2).exp()
    }

    fn byte(word: u32, part: u32) -> u32 {
        (word >> (8u32 * part)) & 0xFFu32
    }

    fn select_bytes(low: u32, high: u32, selectors: u32) -> u32 {
        let mut bytes = 0u32;
        #[unroll]
        for index in 0..4u32 {
            let selector = (selectors >> (4 * index)) & 7u32;
            let word = select(selector < 4u32, low, high);
            bytes |= ((word >> (8u32 * (selector % 4u32))) & 0xFFu32) << (8 * index);
        }
        bytes
    }

    #[allow(unused_variables)]
    fn multiply<F: Float, X: Size, W: Size>(
        a: &Array<u32>,
        b: &[Vector<u32, X>],
        address: u32,
        at: u32,
        sums: &mut Array<f32>,
        scratch: &mut [Vector<u32, W>],
        #[comptime] columns: u32,
        #[comptime] operand: Operand,
        #[comptime] transposed: bool,
    ) {
        let first = scratch.len() as u32 - CUBE_DIM;
        let part = UNIT_POS % 4;
        let mut own = Vector::<u32, W>::empty();
        #[unroll]
        for word in 0..4usize {
            own.insert(word, a[word]);
        }
        sync_cube();
        scratch[(first + UNIT_POS) as usize] = own;
        sync_cube();
        let values = b.with_vector_size::<Const<1>>();
        for pair in 0..4u32 {
            let shown = scratch[(first + UNIT_POS - part + pair) as usize];
            #[unroll]
            for half in 0..2u32 {
                #[unroll]
                for below in 0..2u32 {
                    let word = shown.extract(comptime!((2 * half + below) as usize));
                    for column in 0..comptime!(columns / 4) {
                        let row = column / 2 * 8 + column % 2 + 2 * part;
                        let value = if comptime!(transposed) {
                            transposed_pair(values, at, 2 * pair + 8 * half, row)
                        } else {
                            let vector = at % 8;
                            let slot = at - vector + row * 8 + ((vector + half) ^ (row % 8));
                            values[(slot * 4 + pair) as usize].extract(0usize)
                        };
                        let sum = (column / 2 * 4 + column % 2 + 2 * below) as usize;
                        let product = match comptime!(operand) {
                            Operand::E4m3 => product_of_e4m3(word, value),
                            Operand::F16 | Operand::Bf16 => product_of_halves::<F>(word, value),
                        };
                        sums[sum] += product;
                    }
                }
            }
        }
    }

    #[allow(unused_variables)]
    fn wait_for_products(#[comptime] groups: u32) {}

    #[allow(unused_variables)]
    fn wait_for_sums(sums: &mut Array<f32>, #[comptime] count: u32) {}
}

/// Returns two values of a column of a transposed B, of rows `k` and `k + 1` behind vector `at`.
#[cube]
fn transposed_pair(values: &[Vector<u32, Const<1>>], at: u32, k: u32, column: u32) -> u32 {
    let mut pair = 0u32;
    #[unroll]
    for index in 0..2u32 {
        let row = k + index;
        let slot = at + row * 8 + ((column / 8) ^ (row % 8));
        let word = values[(slot * 4 + column % 8 / 2) as usize].extract(0usize);
        pair |= ((word >> (16u32 * (column % 2))) & 0xFFFFu32) << (16 * index);
    }
    pair
}

/// Returns the product of the two values of a word with those of another.
#[cube]
fn product_of_halves<F: Float>(left: u32, right: u32) -> f32 {
    let left = Vector::<F, Const<2>>::reinterpret(left);
    let right = Vector::<F, Const<2>>::reinterpret(right);
    let mut sum = 0.0f32;
    #[unroll]
    for index in 0..2usize {
        sum += f32::cast_from(left.extract(index)) * f32::cast_from(right.extract(index));
    }
    sum
}

/// Returns the product of the four values of a word with those of another.
#[cube]
fn product_of_e4m3(left: u32, right: u32) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for index in 0..4u32 {
        let (left, right) = (left >> (8 * index), right >> (8 * index));
        let product = float_value(left, comptime!(E4M3)) * float_value(right, comptime!(E4M3));
        sum += select((left ^ right) & 0x80u32 == 0u32, product, -product);
    }
    sum
}
