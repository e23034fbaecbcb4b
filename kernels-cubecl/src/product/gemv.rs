//! A product with few rows of the input, straight from the codes.
//!
//! ```text
//! a plane takes some packed rows and some rows of the input, its units chunks of the channels:
//!     for chunk in every plane-th chunk of the channels:
//!         load a chunk of codes and the block scales of every packed row
//!         for eight codes at a time:
//!             load the input's values at these channels, for every row of the input
//!             sums[row][input] += (element x block scale) x value, in f32
//!     add the sums of the units of the plane; multiply with the tensor scale, add the bias
//! ```

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::f16;

use super::finish::{OperandHandles, Operands, ProductRecipe, Widths, finish, operands};
use super::plan::{Gemv, Product};
use crate::arith::element::decode_pair;
use crate::arith::scale_grid::{scale_value, scaled_element};
use crate::layout::share::widen;
use crate::plan::{Dtype, UNITS};

pub(super) fn launch<F: Float>(
    client: &Client,
    handles: OperandHandles,
    output: Handle,
    product: &Product,
    recipe: ProductRecipe,
    plan: Gemv,
) {
    let Product { inputs, outputs, block_size, .. } = *product;
    let chunk = 8 * plan.words as usize;
    let vector = plan.share.vector as usize;
    let widths = Widths { codes: chunk, scales: block_size, input: vector, chunk };
    // SAFETY: the lengths are those of the product; rows beyond the last repeat it and are not
    // stored.
    unsafe {
        gemv_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(plan.cubes[0], plan.cubes[1], 1),
            CubeDim::new_1d(UNITS),
            plan.words as usize,
            plan.share.words() as usize,
            operands(handles, product, recipe, widths),
            BufferArg::from_raw_parts(output, inputs * outputs),
            plan,
        );
    }
}

#[cube(launch_unchecked)]
fn gemv_kernel<F: Float, W: Size, X: Size>(
    operands: &Operands<F, u8, W, X>,
    output: &mut [F],
    #[comptime] plan: Gemv,
) {
    let recipe = comptime!(operands.recipe);
    let grid = comptime!(recipe.grid());
    let extent = &operands.extent;
    let Gemv { plane, words, rows, inputs, share, .. } = comptime!(plan);
    let planes = comptime!(UNITS / plane);
    let tiles = extent.inputs.div_ceil(inputs);
    let first_input = CUBE_POS as u32 % tiles * inputs;
    let group = CUBE_POS as u32 / tiles * planes + UNIT_POS / plane;
    let first_row = group * rows;
    let lane = UNIT_POS % plane;

    // Vectors of the input that are multiplied with a word of eight codes.
    let vectors = comptime!(8 / share.vector);
    let row_vectors = extent.chunks * comptime!(words * vectors);
    let block_words = comptime!(recipe.block_size / 8);
    let chunk_blocks = comptime!(if words < block_words { 1 } else { words / block_words });
    let row_blocks = extent.chunks * comptime!(words) / block_words;

    let mut sums = Array::<f32>::new(comptime!((rows * inputs) as usize));
    #[unroll]
    for index in 0..comptime!(rows * inputs) {
        sums[index as usize] = 0.0f32.runtime();
    }
    let mut chunk = lane;
    while chunk < extent.chunks {
        let mut loaded = Array::<Vector<u32, W>>::new(comptime!(rows as usize));
        let mut factors = Array::<f32>::new(comptime!((rows * chunk_blocks) as usize));
        #[unroll]
        for row in 0..rows {
            let at = min(first_row + row, extent.outputs - 1);
            loaded[row as usize] = operands.weight.codes[(at * extent.chunks + chunk) as usize];
            let block = at * row_blocks + chunk * words / block_words;
            #[unroll]
            for index in 0..chunk_blocks {
                let code = u32::cast_from(operands.weight.scales[(block + index) as usize]);
                factors[comptime!((row * chunk_blocks + index) as usize)] = scale_value(code, grid);
            }
        }
        #[unroll]
        for word in 0..words {
            let block = comptime!(word / block_words);
            let mut values = Array::<f32>::new(comptime!((8 * inputs) as usize));
            #[unroll]
            for index in 0..inputs {
                let at = min(first_input + index, extent.inputs - 1);
                #[unroll]
                for vector in 0..vectors {
                    let place = at * row_vectors + (chunk * words + word) * vectors + vector;
                    let read = operands.input[place as usize];
                    #[unroll]
                    for value in 0..share.vector {
                        let to = comptime!((index * 8 + vector * share.vector + value) as usize);
                        values[to] = widen::<u32, X>(read, value, share);
                    }
                }
            }
            #[unroll]
            for row in 0..rows {
                let factor = factors[comptime!((row * chunk_blocks + block) as usize)];
                let packed = loaded[row as usize].extract(comptime!(word as usize));
                #[unroll]
                for pair in 0..4u32 {
                    let halves = decode_pair::<f16, Const<2>>(
                        packed << comptime!(12 - 4 * pair),
                        Dtype::F16,
                    );
                    #[unroll]
                    for half in 0..2u32 {
                        let element = f32::cast_from(halves.extract(comptime!(half as usize)));
                        let weight = scaled_element(element, factor, grid);
                        let k = comptime!(pair + 4 * half);
                        #[unroll]
                        for index in 0..inputs {
                            let value = values[comptime!((index * 8 + k) as usize)];
                            let sum = comptime!((row * inputs + index) as usize);
                            sums[sum] = fma(weight, value, sums[sum]);
                        }
                    }
                }
            }
        }
        chunk += plane;
    }

    #[unroll]
    for row in 0..rows {
        let at = first_row + row;
        #[unroll]
        for index in 0..inputs {
            let own = sums[comptime!((row * inputs + index) as usize)];
            let sum = if comptime!(plane > 1) { plane_sum(own) } else { own };
            let to = first_input + index;
            if lane == comptime!((row * inputs + index) % plane)
                && at < extent.outputs
                && to < extent.inputs
            {
                output[(to * extent.outputs + at) as usize] =
                    finish::<F, u8, W, X>(operands, sum, at);
            }
        }
    }
}
