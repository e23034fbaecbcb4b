//! Codes of a block improved one at a time; see `coordinate_descent.rs` in the search crate.

use burn_fp4_search::ScaleSearch;
use cubecl::prelude::*;

use super::block_hessian::{BlockHessian, again, row_vector};
use crate::arith::element::{element_value, round_to_e2m1};

/// Passes over the elements of a block at most.
const SWEEPS: u32 = ScaleSearch::SWEEPS as u32;

/// What a gradient is multiplied by for the step that takes it to 0, of every element.
#[cube]
pub(crate) fn steps<H: Size>(hessian: &BlockHessian<'_, H>, #[comptime] size: u32) -> Array<f32> {
    let mut steps = Array::<f32>::new(comptime!(size as usize));
    #[unroll]
    for i in 0..size {
        let diagonal = row_vector::<H>(hessian, comptime!(i * size / 4 + i / 4));
        let curvature = diagonal.extract(comptime!((i % 4) as usize));
        steps[i as usize] = select(curvature > 0.0f32, 1.0f32 / curvature, 0.0f32);
    }
    steps
}

/// Moves elements one at a time to where they are best while all others stay, until none does.
#[cube]
pub(crate) fn sweep<H: Size>(
    found: &mut Array<u32>,
    errors: &Array<f32>,
    steps: &Array<f32>,
    value: f32,
    hessian: &BlockHessian<'_, H>,
    #[comptime] size: u32,
) {
    let reciprocal = 1.0f32 / value;
    let mut gradient = Array::<f32>::new(comptime!(size as usize));
    #[unroll]
    for i in 0..size {
        let mut sum = 0.0f32.runtime();
        #[unroll]
        for vector in 0..comptime!(size / 4) {
            let row = row_vector::<H>(hessian, comptime!(i * size / 4 + vector));
            #[unroll]
            for index in 0..4u32 {
                let error = errors[comptime!((vector * 4 + index) as usize)];
                sum = fma(row.extract(comptime!(index as usize)), error, sum);
            }
        }
        gradient[i as usize] = sum;
    }
    let mut sweeps = 0u32;
    while sweeps < SWEEPS {
        let mut changed = false;
        let hessian = again::<H>(hessian, sweeps);
        #[unroll]
        for i in 0..size {
            let word = comptime!((i / 8) as usize);
            let now = value_at(found[word], comptime!(i % 8));
            let target = fma(gradient[i as usize], steps[i as usize], now * value);
            let code = round_to_e2m1(target * reciprocal) & 0xF000_0000u32;
            let change = (element_value(code) - now) * value;
            if change != 0.0f32 {
                changed = true;
                let others = found[word] & comptime!(!(0xFu32 << (4 * (i % 8))));
                found[word] = others | (code >> comptime!(28 - 4 * (i % 8)));
                #[unroll]
                for vector in 0..comptime!(size / 4) {
                    let row = row_vector::<H>(&hessian, comptime!(i * size / 4 + vector));
                    #[unroll]
                    for index in 0..4u32 {
                        let k = comptime!((vector * 4 + index) as usize);
                        let curvature = row.extract(comptime!(index as usize));
                        gradient[k] = fma(-curvature, change, gradient[k]);
                    }
                }
            }
        }
        sweeps = select(changed, sweeps + 1u32, SWEEPS);
    }
}

/// Eight codes, of zeros the positive one.
#[cube]
pub(crate) fn without_negative_zeros(codes: u32) -> u32 {
    let magnitudes = codes | (codes >> 1u32) | (codes >> 2u32);
    codes & (0x7777_7777u32 | ((magnitudes & 0x1111_1111u32) << 3u32))
}

/// The value of a code among eight.
#[cube]
pub(crate) fn value_at(codes: u32, #[comptime] index: u32) -> f32 {
    element_value(codes << comptime!(28 - 4 * index))
}
