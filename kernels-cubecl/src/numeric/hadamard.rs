//! Hadamard transform of neighbours; see `hadamard.rs` in the search crate.

use cubecl::prelude::*;

/// Number of values that [`transform`] takes.
pub(crate) const SIZE: u32 = 16;

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

/// Transforms all values of an array by butterflies.
#[cube]
pub(crate) fn sum_by_butterflies(elements: &mut Array<f32>, scale: f32, #[comptime] size: u32) {
    #[unroll]
    for level in 0..comptime!(size.ilog2()) {
        let half = comptime!(1u32 << level);
        #[unroll]
        for pair in 0..comptime!(size / 2) {
            let left = comptime!((pair / half * 2 * half + pair % half) as usize);
            let right = comptime!(left + half as usize);
            let (first, second) = (elements[left], elements[right]);
            elements[left] = first + second;
            elements[right] = first - second;
        }
    }
    #[unroll]
    for at in 0..size {
        elements[comptime!(at as usize)] *= scale;
    }
}

/// Returns one of 16 signs as the sign bit of an f32.
#[cube]
fn sign_bit(signs: u32, #[comptime] index: u32) -> u32 {
    ((signs >> index) & 1u32) << 31u32
}
