//! GEMV: a matmul with few rows of the input, without matrix instructions.
//!
//! ```text
//! a plane takes some packed rows and some rows of the input; its units take turns along k:
//!     for k_tile in every plane-th k tile:
//!         load the codes and the block scales of every packed row
//!         for eight codes at a time:
//!             load the input's values at these k, for every row of the input
//!             sums[row][input] += (element x block scale) x value, in f32
//!     add the sums of the units of the plane; epilogue
//! ```

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::f16;

use super::operands::{MatmulBlueprint, OperandHandles, Operands, Widths, epilogue, operands};
use super::plan::{Gemv, Matmul};
use crate::instructions::PlaneMma;
use crate::numeric::element::decode_word;
use crate::numeric::scale_grid::{scale_value, scaled_element};
use crate::plan::{Dtype, UNITS};
use crate::tensor::load_store::widen;

pub(super) fn launch<F: Float>(
    client: &Client,
    handles: OperandHandles,
    output: Handle,
    matmul: &Matmul,
    blueprint: MatmulBlueprint,
    plan: Gemv,
) {
    let Matmul { m, n, block_size, .. } = *matmul;
    let k_tile = 8 * plan.words as usize;
    let vector = plan.thread_tile.vector as usize;
    let widths = Widths { codes: k_tile, scales: block_size, input: vector, k_tile };
    // SAFETY: the lengths match the matmul; rows beyond the last repeat it and are not
    // stored.
    unsafe {
        gemv_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(plan.cubes[0], plan.cubes[1], 1),
            CubeDim::new_1d(UNITS),
            plan.words as usize,
            plan.thread_tile.words() as usize,
            operands(handles, matmul, blueprint, widths),
            BufferArg::from_raw_parts(output, m * n),
            plan,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_lines, reason = "one loop over registers that all of it uses")]
fn gemv_kernel<F: Float, W: Size, X: Size>(
    operands: &Operands<F, u8, W, X>,
    output: &mut [F],
    #[comptime] plan: Gemv,
) {
    let blueprint = comptime!(operands.blueprint);
    let grid = comptime!(blueprint.grid());
    let dims = &operands.dims;
    let Gemv { plane, words, plane_n, plane_m, thread_tile, .. } = comptime!(plan);
    let planes = comptime!(UNITS / plane);
    let tiles = dims.m.div_ceil(plane_m);
    let first_input = CUBE_POS as u32 % tiles * plane_m;
    let group = CUBE_POS as u32 / tiles * planes + UNIT_POS / plane;
    let first_row = group * plane_n;
    let lane = UNIT_POS % plane;

    // Vectors of the input per word of eight codes.
    let vectors = comptime!(8 / thread_tile.vector);
    let row_vectors = dims.k_tiles * comptime!(words * vectors);
    let block_words = comptime!(blueprint.block_size / 8);
    let k_tile_blocks = comptime!(if words < block_words { 1 } else { words / block_words });
    let row_blocks = dims.k_tiles * comptime!(words) / block_words;

    let mut sums = Array::<f32>::new(comptime!((plane_n * plane_m) as usize));
    #[unroll]
    for index in 0..comptime!(plane_n * plane_m) {
        sums[index as usize] = 0.0f32.runtime();
    }
    let mut k_tile = lane;
    while k_tile < dims.k_tiles {
        let mut loaded = Array::<Vector<u32, W>>::new(comptime!(plane_n as usize));
        let mut factors = Array::<f32>::new(comptime!((plane_n * k_tile_blocks) as usize));
        #[unroll]
        for row in 0..plane_n {
            let at = min(first_row + row, dims.n - 1);
            loaded[row as usize] = operands.weight.codes[(at * dims.k_tiles + k_tile) as usize];
            let block = at * row_blocks + k_tile * words / block_words;
            #[unroll]
            for index in 0..k_tile_blocks {
                let code = u32::cast_from(operands.weight.scales[(block + index) as usize]);
                factors[comptime!((row * k_tile_blocks + index) as usize)] =
                    scale_value(code, grid);
            }
        }
        #[unroll]
        for word in 0..words {
            let block = comptime!(word / block_words);
            let mut values = Array::<f32>::new(comptime!((8 * plane_m) as usize));
            #[unroll]
            for index in 0..plane_m {
                let at = min(first_input + index, dims.m - 1);
                #[unroll]
                for vector in 0..vectors {
                    let from = at * row_vectors + (k_tile * words + word) * vectors + vector;
                    let read = operands.input[from as usize];
                    #[unroll]
                    for value in 0..thread_tile.vector {
                        let to =
                            comptime!((index * 8 + vector * thread_tile.vector + value) as usize);
                        values[to] = widen::<u32, X>(read, value, thread_tile);
                    }
                }
            }
            #[unroll]
            for row in 0..plane_n {
                let factor = factors[comptime!((row * k_tile_blocks + block) as usize)];
                let packed = loaded[row as usize].extract(comptime!(word as usize));
                let pairs = decode_word::<PlaneMma, f16, Const<2>>(packed, Dtype::F16);
                #[unroll]
                for pair in 0..4u32 {
                    let halves = pairs[pair as usize];
                    #[unroll]
                    for half in 0..2u32 {
                        let decoded = f32::cast_from(halves.extract(comptime!(half as usize)));
                        let weight = scaled_element(decoded, factor, grid);
                        let element = comptime!(pair + 4 * half);
                        #[unroll]
                        for index in 0..plane_m {
                            let value = values[comptime!((index * 8 + element) as usize)];
                            let sum = comptime!((row * plane_m + index) as usize);
                            sums[sum] = fma(weight, value, sums[sum]);
                        }
                    }
                }
            }
        }
        k_tile += plane;
    }

    #[unroll]
    for row in 0..plane_n {
        let at = first_row + row;
        #[unroll]
        for index in 0..plane_m {
            let own = sums[comptime!((row * plane_m + index) as usize)];
            let sum = if comptime!(plane > 1) { plane_sum(own) } else { own };
            let to = first_input + index;
            if lane == comptime!((row * plane_m + index) % plane) && at < dims.n && to < dims.m {
                output[(to * dims.n + at) as usize] = epilogue::<F, u8, W, X>(operands, sum, at);
            }
        }
    }
}
