//! Hadamard transform of 16 neighbours; see `hadamard.rs` in the search crate.

use burn_fp4_search::Hadamard;
use cubecl::prelude::*;

/// Number of values that are transformed together.
pub(crate) const SIZE: u32 = Hadamard::SIZE as u32;

/// Transforms the 16 values of an array from `start` on, or transforms them back.
#[cube]
pub(crate) fn transform(
    elements: &mut Array<f32>,
    #[comptime] start: u32,
    signs: u32,
    #[comptime] inverse: bool,
) {
    let mut sums = Array::<f32>::new(comptime!(SIZE as usize));
    #[unroll]
    for at in 0..SIZE {
        // 1/4, with the sign that all terms of a sum share in the inverse.
        let quarter = if comptime!(inverse) {
            f32::reinterpret(0x3E80_0000u32 | sign_bit(signs, at))
        } else {
            0.25f32.runtime()
        };
        let mut sum = 0.0f32.runtime();
        #[unroll]
        for term in 0..SIZE {
            let value = elements[comptime!((start + term) as usize)];
            let bits = u32::reinterpret(value);
            let signed = if comptime!(inverse) {
                value
            } else {
                f32::reinterpret(bits ^ sign_bit(signs, term))
            };
            if comptime!((term & at).count_ones().is_multiple_of(2)) {
                sum = fma(signed, quarter, sum);
            } else {
                sum = fma(signed, -quarter, sum);
            }
        }
        sums[comptime!(at as usize)] = sum;
    }
    #[unroll]
    for at in 0..SIZE {
        elements[comptime!((start + at) as usize)] = sums[comptime!(at as usize)];
    }
}

/// Returns one of 16 signs as the sign bit of an f32.
#[cube]
fn sign_bit(signs: u32, #[comptime] index: u32) -> u32 {
    ((signs >> index) & 1u32) << 31u32
}
