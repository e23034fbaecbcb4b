//! Stochastic rounding: counter-based random bits, and codes drawn from them.

use burn_fp4_search::philox::{MULTIPLIERS, ROUNDS, WEYL};
use burn_fp4_search::{Fp4Scheme, Rounding};
use cubecl::prelude::*;

/// Key and counter of the random bits; see [`Draw`](burn_fp4_search::Draw).
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Draw {
    pub(crate) key_low: u32,
    pub(crate) key_high: u32,
    pub(crate) step_low: u32,
    pub(crate) step_high: u32,
}

/// Returns the key and counter of a scheme; dummies, never read, if it rounds to nearest.
pub(crate) fn draw(scheme: &Fp4Scheme) -> DrawLaunch {
    let draw = match scheme.rounding {
        Rounding::Nearest => burn_fp4_search::Draw::default(),
        Rounding::Stochastic(draw) => draw,
    };
    let ([key_low, key_high], [step_low, step_high]) = (draw.key(), draw.counter());
    DrawLaunch::new(key_low, key_high, step_low, step_high)
}

/// Returns four random words, with 16 bits for each of eight elements; see
/// [`philox`](burn_fp4_search::philox::philox).
#[cube]
pub(crate) fn random_words(group: u32, draw: &Draw) -> Array<u32> {
    let mut counter = Array::<u32>::new(4usize);
    counter[0] = group;
    counter[1] = 0u32.runtime();
    counter[2] = draw.step_low;
    counter[3] = draw.step_high;
    let (first, third) = comptime!((MULTIPLIERS[0], MULTIPLIERS[1]));
    let mut key_low = draw.key_low;
    let mut key_high = draw.key_high;
    for _ in 0..comptime!(ROUNDS) {
        let first_low = counter[0] * first;
        let first_high = u32::mul_hi(counter[0], first);
        let third_low = counter[2] * third;
        let third_high = u32::mul_hi(counter[2], third);
        counter[0] = third_high ^ counter[1] ^ key_low;
        counter[1] = third_low;
        counter[2] = first_high ^ counter[3] ^ key_high;
        counter[3] = first_low;
        key_low += comptime!(WEYL[0]);
        key_high += comptime!(WEYL[1]);
    }
    counter
}

/// Returns the random bits of one of eight elements.
#[cube]
pub(crate) fn random_bits(words: &Array<u32>, #[comptime] element: u32) -> u32 {
    let word = words[comptime!((element / 2) as usize)];
    (word >> comptime!(16 * (element % 2))) & 0xFFFFu32
}

/// Draws the E2M1 code of an f32; see [`stochastic_code`](burn_fp4_search::stochastic_code). It is
/// in the highest four bits of the result, the others are 0. A NaN gives any code.
#[cube]
pub(crate) fn round_stochastically(value: f32, bits: u32) -> u32 {
    let magnitude = min(value.abs(), 6.0f32);
    let binade = u32::reinterpret(max(magnitude, 1.0f32)) & 0x7F80_0000u32;
    // Elements of a binade are half of it apart. All operations are exact, fused or not.
    let steps = magnitude * f32::reinterpret(0x7F80_0000u32 - binade);
    let below = u32::cast_from(steps);
    let way = steps - f32::cast_from(below);
    let up = select(f32::cast_from(bits) + 0.5f32 < way * 65536.0f32, 1u32, 0u32);
    let code = below + up + ((binade - 0x3F80_0000u32) >> 22u32);
    (code << 28u32) | (u32::reinterpret(value) & 0x8000_0000u32)
}
