//! The products of `small_m.rs` with one row of the input.
//!
//! The instruction multiplies by eight columns, of which a row fills one. Here the columns stand
//! for blocks instead: a column has the input of one block, and zeros for the others. So the sums
//! of blocks stay apart, codes need no scales, and a sum is scaled when its block is done:
//!
//! ```text
//! a vector of 32 codes of each part of a row: eight blocks of 16
//! column 2 part:     the input of the part's first 16 codes
//! column 2 part + 1: the input of its other 16
//! the lane that has the codes of a part also has the sums of its blocks
//! ```
//!
//! Lanes whose quad is none of the part's two columns read zeros from shared memory.
//!
//! Codes decoded to bf16 are 2^126 times too small. So that f32 holds their products, the input is
//! 2^62 times too large, but in k tiles with values of 2^65 or more.

use cubecl::prelude::*;

use super::operands::MatmulBlueprint;
use super::plan::SmallM;
use super::small_m_input::{FACTOR_AT, QUARTER_STRIDE_PADDED, ZERO_VECTORS};
use super::small_m_load::{Lane, ROWS_PER_LANE, StepRegisters};
use crate::instructions::{MmaInstructions, Pair};
use crate::numeric::element::decode_word;
use crate::numeric::scale_grid::decoded_shift;
use crate::plan::Dtype;

/// Adds the products of a k tile to the sums, of the first and of the other 16 codes of vectors.
/// `from` is the start of its input in shared memory.
#[cube]
pub(super) fn multiply_row<I: MmaInstructions, F: Float, W: Size, X: Size>(
    loaded: &StepRegisters<W, X>,
    from: u32,
    shared: &[Vector<u32, X>],
    sums: &mut Array<Vector<f32, Pair>>,
    staged: &mut [f32],
    lane: &Lane,
    #[comptime] blueprint: MatmulBlueprint,
    #[comptime] plan: SmallM,
) {
    let dtype = comptime!(blueprint.dtype);
    let restored = if comptime!(dtype == Dtype::Bf16) {
        f32::reinterpret(shared[(from + FACTOR_AT) as usize].extract(0usize))
    } else {
        comptime!(decoded_shift(dtype)).runtime()
    };
    let zeros = shared.len() as u32 - ZERO_VECTORS;
    let part = from + lane.part * QUARTER_STRIDE_PADDED;
    let first = select(lane.quad == 2 * lane.part, part, zeros);
    let other = select(lane.quad == 2 * lane.part + 1, part, zeros);
    #[unroll]
    for vector in 0..2u32 {
        let mut products = Array::<Vector<f32, Pair>>::new(2usize);
        products[0] = Vector::new(0.0f32);
        products[1] = Vector::new(0.0f32);
        #[unroll]
        for word in 0..4u32 {
            let column = if comptime!(word < 2) { first } else { other };
            let values = shared[(column + comptime!(4 * vector + word)) as usize];
            let mut decoded = Sequence::<Array<Vector<F, Pair>>>::new();
            #[unroll]
            for row in 0..ROWS_PER_LANE {
                let packed = loaded.codes[comptime!((2 * row + vector) as usize)];
                let packed = packed.extract(comptime!(word as usize));
                decoded.push(decode_word::<I, F, Pair>(packed, dtype));
            }
            #[unroll]
            for half in 0..2u32 {
                let mut weights = Array::<Vector<F, Pair>>::new(4usize);
                #[unroll]
                for register in 0..4u32 {
                    // The instruction's order: a pair of both rows, then the next pair.
                    let pairs = decoded.index(comptime!(register as usize % 2));
                    let pair = comptime!((2 * half + register / 2) as usize);
                    weights[comptime!(register as usize)] = pairs[pair];
                }
                let mut registers = Array::<Vector<F, Pair>>::new(2usize);
                #[unroll]
                for register in 0..2u32 {
                    let value = values.extract(comptime!((2 * half + register) as usize));
                    registers[register as usize] = Vector::<F, Pair>::reinterpret(value);
                }
                let scratch_from = comptime!(plan.staged_sums());
                I::multiply::<F>(&weights, &registers, &mut products, staged, scratch_from);
            }
        }
        #[unroll]
        for row in 0..ROWS_PER_LANE {
            let scales = scales_of::<I>(loaded.scales[row as usize], vector, blueprint);
            let products = products[row as usize] * Vector::new(restored);
            sums[row as usize] = fma(products, scales, sums[row as usize]);
        }
    }
}

/// Returns the block scales of both halves of a vector of codes, of a word with those of two
/// vectors.
#[cube]
fn scales_of<I: MmaInstructions>(
    scales: u32,
    #[comptime] vector: u32,
    #[comptime] blueprint: MatmulBlueprint,
) -> Vector<f32, Pair> {
    let grid = comptime!(blueprint.grid());
    if comptime!(blueprint.block_size == 16) {
        I::scale_pair(scales, vector, grid)
    } else {
        Vector::new(I::scale_pair(scales, 0u32, grid).extract(comptime!(vector as usize)))
    }
}
