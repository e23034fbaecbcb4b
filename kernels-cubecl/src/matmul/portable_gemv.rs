//! GEMV on devices of CubeCL's wgpu runtime: few rows of the input, on planes of any size.
//!
//! Sums go through shared memory: some drivers choose the size of a plane for each kernel. Planes
//! of one size add their units before. Without shared memory a unit is a group of its own.
//!
//! ```text
//! a cube of 256 units is groups of 32 or 64 lanes; a group takes some packed rows and some rows of
//! the input, and its lanes take turns along k:
//!     for k_tile in every k tile of the lane:
//!         load the codes of the next k tile, and the block scales of this one
//!         for eight codes at a time:
//!             load the input's values at these k, for every row of the input
//!             sums[row][input] += (the sum of element x value) x block scale, in f32
//! sums go to shared memory; a unit adds those of an output; epilogue
//! ```

use burn_fp4_search::formats::ScaleGrid;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::operands::{MatmulBlueprint, OperandHandles, Operands, Widths, epilogue, operands};
use super::plan::Matmul;
use super::portable_plan::PortableGemv;
use crate::memory::load_scale;
use crate::numeric::normal::{decode_eight, decoded_unit, scale_factor};
use crate::plan::UNITS;
use crate::tensor::load_store::widen_word;

pub(super) fn launch<F: Float>(
    client: &Client,
    handles: OperandHandles,
    output: Handle,
    matmul: &Matmul,
    blueprint: MatmulBlueprint,
    plan: PortableGemv,
) {
    let Matmul { m, n, block_size, dtype, .. } = *matmul;
    let k_tile = 8 * plan.words as usize;
    let widths = Widths {
        codes: k_tile,
        scales: 4 * block_size,
        input: 4 * plan.word_values(dtype) as usize,
        k_tile,
    };
    // SAFETY: the lengths match the matmul; rows beyond the last repeat it and are not stored.
    unsafe {
        portable_gemv_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(plan.cubes[0], plan.cubes[1], 1),
            CubeDim::new_1d(UNITS),
            plan.words as usize,
            4,
            operands(handles, matmul, blueprint, widths),
            BufferArg::from_raw_parts(output, m * n),
            plan,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_lines, reason = "one loop over registers that all of it uses")]
fn portable_gemv_kernel<F: Float, W: Size, X: Size>(
    operands: &Operands<F, u32, W, X>,
    output: &mut [F],
    #[comptime] plan: PortableGemv,
) {
    let blueprint = comptime!(operands.blueprint);
    let grid = comptime!(blueprint.grid());
    let dims = &operands.dims;
    let PortableGemv { lanes, plane, words, group_n, group_m, decoding, .. } = comptime!(plan);
    let groups = comptime!(UNITS / lanes);
    let tiles = dims.m.div_ceil(group_m);
    let first_input = CUBE_POS as u32 % tiles * group_m;
    let cube_row = CUBE_POS as u32 / tiles * comptime!(groups * group_n);
    let first_row = cube_row + UNIT_POS / lanes * group_n;
    let lane = UNIT_POS % lanes;

    // Values of a vector of the input, and vectors per word of eight codes.
    let width = comptime!(4 * plan.word_values(blueprint.dtype));
    let vectors = comptime!(8 / width);
    let row_vectors = dims.k_tiles * comptime!(words * vectors);
    let block_words = comptime!(blueprint.block_size / 8);
    let k_tile_blocks = comptime!(if words < block_words { 1 } else { words / block_words });
    let row_blocks = dims.k_tiles * comptime!(words) / block_words;
    let unit = comptime!(decoded_unit(decoding));
    // A power of two times the unit may overflow.
    let factor_unit = comptime!(if matches!(grid, ScaleGrid::Float(_)) { unit } else { 1.0 });
    let sum_unit = comptime!(unit / factor_unit);

    let mut sums = Array::<f32>::new(comptime!((group_n * group_m) as usize));
    #[unroll]
    for index in 0..comptime!(group_n * group_m) {
        sums[index as usize] = 0.0f32.runtime();
    }
    let last = dims.k_tiles - 1;
    let mut next = Array::<Vector<u32, W>>::new(comptime!(group_n as usize));
    #[unroll]
    for row in 0..group_n {
        let at = min(first_row + row, dims.n - 1);
        next[row as usize] = operands.weight.codes[(at * dims.k_tiles + min(lane, last)) as usize];
    }
    let mut k_tile = lane;
    while k_tile < dims.k_tiles {
        let mut codes = Array::<Vector<u32, W>>::new(comptime!(group_n as usize));
        let mut factors = Array::<f32>::new(comptime!((group_n * k_tile_blocks) as usize));
        #[unroll]
        for row in 0..group_n {
            let at = min(first_row + row, dims.n - 1);
            codes[row as usize] = next[row as usize];
            let ahead = min(k_tile + lanes, last);
            next[row as usize] = operands.weight.codes[(at * dims.k_tiles + ahead) as usize];
            let block = at * row_blocks + k_tile * words / block_words;
            #[unroll]
            for index in 0..k_tile_blocks {
                let code = load_scale::<u32>(operands.weight.scales, block + index, true);
                factors[comptime!((row * k_tile_blocks + index) as usize)] =
                    scale_factor(code, grid, decoding) * factor_unit;
            }
        }
        #[unroll]
        for word in 0..words {
            let block = comptime!(word / block_words);
            let mut values = Array::<f32>::new(comptime!((8 * group_m) as usize));
            #[unroll]
            for index in 0..group_m {
                let at = min(first_input + index, dims.m - 1);
                #[unroll]
                for vector in 0..vectors {
                    let from = at * row_vectors + (k_tile * words + word) * vectors + vector;
                    let read = operands.input[from as usize];
                    #[unroll]
                    for value in 0..width {
                        let to = comptime!((index * 8 + vector * width + value) as usize);
                        values[to] = widen_word::<X>(read, value, comptime!(blueprint.dtype));
                    }
                }
            }
            #[unroll]
            for row in 0..group_n {
                let factor = factors[comptime!((row * k_tile_blocks + block) as usize)];
                let packed = codes[row as usize].extract(comptime!(word as usize));
                let elements = decode_eight(packed, decoding);
                #[unroll]
                for index in 0..group_m {
                    let mut partial = elements[0] * values[comptime!((index * 8) as usize)];
                    #[unroll]
                    for element in 1..8u32 {
                        let value = values[comptime!((index * 8 + element) as usize)];
                        partial = fma(elements[element as usize], value, partial);
                    }
                    let sum = comptime!((row * group_m + index) as usize);
                    sums[sum] = fma(partial * sum_unit, factor, sums[sum]);
                }
            }
        }
        k_tile += lanes;
    }

    let count = comptime!(group_n * group_m);
    if comptime!(lanes == 1) {
        #[unroll]
        for index in 0..count {
            let row = first_row + comptime!(index / group_m);
            let to = first_input + comptime!(index % group_m);
            if row < dims.n && to < dims.m {
                let value = epilogue::<F, u32, W, X>(operands, sums[index as usize], row);
                output[(to * dims.n + row) as usize] = value;
            }
        }
    } else {
        // Planes may add their units first.
        let parts = comptime!(UNITS / plane);
        let in_plane = UNIT_POS % plane;
        let mut shared = Shared::<[f32]>::new_slice(comptime!((count * parts) as usize));
        #[unroll]
        for index in 0..count {
            let own = sums[index as usize];
            let sum = if comptime!(plane > 1) { plane_sum(own) } else { own };
            if in_plane == 0u32 {
                shared[(index * parts + UNIT_POS / plane) as usize] = sum;
            }
        }
        sync_cube();
        if UNIT_POS < comptime!(count * groups) {
            let (index, group) = (UNIT_POS / groups, UNIT_POS % groups);
            let of_group = comptime!(lanes / plane);
            let start = index * parts + group * of_group;
            let mut sum = 0.0f32.runtime();
            // Units begin at different parts, which are in different banks.
            #[unroll]
            for step in 0..of_group {
                sum += shared[(start + (UNIT_POS + step) % of_group) as usize];
            }
            let row = cube_row + group * group_n + index / group_m;
            let to = first_input + index % group_m;
            if row < dims.n && to < dims.m {
                output[(to * dims.n + row) as usize] = epilogue::<F, u32, W, X>(operands, sum, row);
            }
        }
    }
}
