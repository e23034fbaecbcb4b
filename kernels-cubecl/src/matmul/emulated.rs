//! [`WgmmaInstructions`] emulated with plain loads, stores and multiplications. With it a device
//! without WGMMA tests the code around the instructions.

use cubecl::prelude::*;

use super::instructions::WgmmaInstructions;

/// The emulated instructions.
pub(super) struct EmulatedWgmma;

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
        #[comptime] each: u32,
        #[comptime] bytes: u32,
    ) {
        if wanted {
            #[unroll]
            for index in 0..each {
                shared[(to * each + index) as usize] = from[(at * each + index) as usize];
            }
        }
    }

    fn commit_copies() {}

    #[allow(unused_variables)]
    fn wait_for_copies(#[comptime] groups: u32) {}

    fn byte(word: u32, part: u32) -> u32 {
        (word >> (8u32 * part)) & 0xFFu32
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
        #[comptime] bf16: bool,
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
        let vector = at % 8;
        for pair in 0..4u32 {
            let shown = scratch[(first + UNIT_POS - part + pair) as usize];
            #[unroll]
            for half in 0..2u32 {
                #[unroll]
                for below in 0..2u32 {
                    let word = shown.extract(comptime!((2 * half + below) as usize));
                    let weights = Vector::<F, Const<2>>::reinterpret(word);
                    for column in 0..comptime!(columns / 4) {
                        let row = column / 2 * 8 + column % 2 + 2 * part;
                        let slot = at - vector + row * 8 + ((vector + half) ^ (row % 8));
                        let value = values[(slot * 4 + pair) as usize].extract(0usize);
                        let value = Vector::<F, Const<2>>::reinterpret(value);
                        let sum = (column / 2 * 4 + column % 2 + 2 * below) as usize;
                        let mut added = sums[sum];
                        #[unroll]
                        for index in 0..2usize {
                            let weight = f32::cast_from(weights.extract(index));
                            added += weight * f32::cast_from(value.extract(index));
                        }
                        sums[sum] = added;
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
