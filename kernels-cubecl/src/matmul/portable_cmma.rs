//! A matmul on devices of CubeCL's wgpu runtime with cooperative matrices (CMMA): matrix
//! instructions of a plane whose register layout only the driver knows.
//!
//! ```text
//! a cube takes some packed rows and some rows of the input; its 8 planes divide both:
//! for a k tile at a time:
//!     decode the weight to shared memory, exactly, in the dtype of the input
//!     copy the input to shared memory
//!     load codes, scales and input of the next k tile to registers
//!     a plane multiplies its tiles of 16 x 16, sums in f32
//! tiles go through shared memory, where a unit has values of a known row; epilogue
//! ```

use cubecl::client::Client;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::operands::{MatmulBlueprint, OperandHandles, Operands, Widths, epilogue, operands};
use super::plan::Matmul;
use super::portable_plan::{CMMA_PADDING as PADDING, PortableCmma};
use crate::memory::load_scale;
use crate::numeric::normal::{decode_eight, decoded_unit, scale_factor};

/// Units of a plane.
const PLANE: u32 = 32;

/// Launches the kernel, for f16 and bf16.
pub(super) fn launch<F: Float>(
    client: &Client,
    handles: OperandHandles,
    output: Handle,
    matmul: &Matmul,
    blueprint: MatmulBlueprint,
    plan: PortableCmma,
) {
    let Matmul { m, n, block_size, .. } = *matmul;
    let k_tile = plan.k_tile as usize;
    let widths = Widths { codes: 8, scales: 4 * block_size, input: 8, k_tile };
    // SAFETY: the lengths match the matmul; rows beyond the last repeat it and are not stored.
    unsafe {
        portable_cmma_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(plan.cubes[0], plan.cubes[1], 1),
            CubeDim::new_2d(PLANE, plan.planes()),
            1,
            4,
            operands(handles, matmul, blueprint, widths),
            BufferArg::from_raw_parts(output, m * n),
            plan,
        );
    }
}

/// Registers that a unit loads for a k tile.
#[derive(CubeType)]
struct KTileRegisters<X: Size> {
    /// Words of eight codes.
    codes: Array<u32>,
    /// The code of the block scale of each.
    scales: Array<u32>,
    /// Vectors of eight values of the input.
    input: Array<Vector<u32, X>>,
}

/// Returns the number of items that a unit takes, given the items of a cube.
const fn share(items: u32, plan: PortableCmma) -> u32 {
    items.div_ceil(PLANE * plan.planes())
}

/// Loads a k tile to registers. K tiles and rows beyond the last repeat it.
#[cube]
fn load<F: Float, W: Size, X: Size>(
    operands: &Operands<F, u32, W, X>,
    loaded: &mut KTileRegisters<X>,
    first_row: u32,
    first_input: u32,
    k_tile: u32,
    #[comptime] plan: PortableCmma,
) {
    let dims = &operands.dims;
    let words = comptime!(plan.k_tile / 8);
    let k_tile = min(k_tile, dims.k_tiles - 1);
    #[unroll]
    for index in 0..comptime!(share(plan.tile_n() * words, plan)) {
        let at = UNIT_POS + comptime!(index * PLANE * plan.planes());
        let row = min(first_row + at / words, dims.n - 1);
        let word = (row * dims.k_tiles + k_tile) * words + at % words;
        let block = word / comptime!(operands.blueprint.block_size / 8);
        loaded.codes[index as usize] = operands.weight.codes[word as usize].extract(0usize);
        loaded.scales[index as usize] = load_scale::<u32>(operands.weight.scales, block, true);
    }
    #[unroll]
    for index in 0..comptime!(share(plan.tile_m() * words, plan)) {
        let at = UNIT_POS + comptime!(index * PLANE * plan.planes());
        let row = min(first_input + at / words, dims.m - 1);
        let from = (row * dims.k_tiles + k_tile) * words + at % words;
        loaded.input[index as usize] = operands.input[from as usize];
    }
}

/// Decodes the weight, and copies it and the input from registers to shared memory.
#[cube]
fn store<F: Float, W: Size, X: Size>(
    operands: &Operands<F, u32, W, X>,
    loaded: &KTileRegisters<X>,
    weights: &mut [Vector<F, Const<2>>],
    inputs: &mut [Vector<F, Const<2>>],
    #[comptime] plan: PortableCmma,
) {
    let words = comptime!(plan.k_tile / 8);
    let stride = comptime!((plan.k_tile + PADDING) / 2);
    let grid = comptime!(operands.blueprint.grid());
    #[unroll]
    for index in 0..comptime!(share(plan.tile_n() * words, plan)) {
        let at = UNIT_POS + comptime!(index * PLANE * plan.planes());
        if at < comptime!(plan.tile_n() * words) {
            let decoding = comptime!(plan.decoding);
            let factor = scale_factor(loaded.scales[index as usize], grid, decoding);
            let elements = decode_eight(loaded.codes[index as usize], decoding);
            let to = at / words * stride + at % words * 4;
            #[unroll]
            for pair in 0..4u32 {
                let mut values = Vector::<F, Const<2>>::empty();
                #[unroll]
                for half in 0..2u32 {
                    let element = elements[comptime!((2 * pair + half) as usize)];
                    let value = element * comptime!(decoded_unit(decoding)) * factor;
                    values.insert(comptime!(half as usize), F::cast_from(value));
                }
                weights[(to + pair) as usize] = values;
            }
        }
    }
    #[unroll]
    for index in 0..comptime!(share(plan.tile_m() * words, plan)) {
        let at = UNIT_POS + comptime!(index * PLANE * plan.planes());
        if at < comptime!(plan.tile_m() * words) {
            let to = at / words * stride + at % words * 4;
            let read = loaded.input[index as usize];
            #[unroll]
            for pair in 0..4u32 {
                let word = read.extract(comptime!(pair as usize));
                inputs[(to + pair) as usize] = Vector::<F, Const<2>>::reinterpret(word);
            }
        }
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_lines, reason = "one loop over matrices that all of it uses")]
fn portable_cmma_kernel<F: Float, W: Size, X: Size>(
    operands: &Operands<F, u32, W, X>,
    output: &mut [F],
    #[comptime] plan: PortableCmma,
) {
    let dims = &operands.dims;
    let PortableCmma { n_planes, n_tiles, m_tiles, k_tile: k_values, .. } = comptime!(plan);
    let groups = dims.m.div_ceil(comptime!(plan.tile_m()));
    let first_input = CUBE_POS as u32 % groups * comptime!(plan.tile_m());
    let first_row = CUBE_POS as u32 / groups * comptime!(plan.tile_n());
    let plane = UNIT_POS / PLANE;
    let plane_row = plane % n_planes * comptime!(16 * n_tiles);
    let plane_input = plane / n_planes * comptime!(16 * m_tiles);

    let words = comptime!(k_values / 8);
    let stride = comptime!(k_values + PADDING);
    let line = comptime!(stride / 2);
    let mut weights =
        Shared::<[Vector<F, Const<2>>]>::new_slice(comptime!((plan.tile_n() * line) as usize));
    let mut inputs =
        Shared::<[Vector<F, Const<2>>]>::new_slice(comptime!((plan.tile_m() * line) as usize));
    let mut staged = Shared::<[f32]>::new_slice(comptime!((plan.planes() * 256) as usize));
    let mut loaded = KTileRegisters::<X> {
        codes: Array::<u32>::new(comptime!(share(plan.tile_n() * words, plan) as usize)),
        scales: Array::<u32>::new(comptime!(share(plan.tile_n() * words, plan) as usize)),
        input: Array::<Vector<u32, X>>::new(comptime!(share(plan.tile_m() * words, plan) as usize)),
    };
    let mut sums = Sequence::<Matrix<f32>>::new();
    #[unroll]
    for _ in 0..comptime!(n_tiles * m_tiles) {
        sums.push(Matrix::<f32>::from_value(
            MatrixIdent::Accumulator,
            16usize,
            16usize,
            16usize,
            MatrixLayout::Undefined,
            0.0f32,
        ));
    }
    load::<F, W, X>(operands, &mut loaded, first_row, first_input, 0u32.runtime(), plan);
    let mut k_tile = 0u32.runtime();
    while k_tile < dims.k_tiles {
        store::<F, W, X>(operands, &loaded, &mut weights, &mut inputs, plan);
        sync_cube();
        load::<F, W, X>(operands, &mut loaded, first_row, first_input, k_tile + 1, plan);
        #[unroll]
        for step in 0..comptime!(k_values / 16) {
            let mut rights = Sequence::<Matrix<F>>::new();
            #[unroll]
            for tile in 0..n_tiles {
                // SAFETY: loaded at once.
                let mut right = unsafe {
                    Matrix::<F>::uninitialized(
                        MatrixIdent::B,
                        16usize,
                        16usize,
                        16usize,
                        MatrixLayout::ColMajor,
                    )
                };
                let start = (plane_row + tile * 16) * line + step * 8;
                cmma::load(&mut right, &weights[start as usize..], stride);
                rights.push(right);
            }
            #[unroll]
            for tile in 0..m_tiles {
                // SAFETY: loaded at once.
                let mut left = unsafe {
                    Matrix::<F>::uninitialized(
                        MatrixIdent::A,
                        16usize,
                        16usize,
                        16usize,
                        MatrixLayout::RowMajor,
                    )
                };
                let start = (plane_input + tile * 16) * line + step * 8;
                cmma::load(&mut left, &inputs[start as usize..], stride);
                #[unroll]
                for right in 0..n_tiles {
                    let sum = sums.index(comptime!((tile * n_tiles + right) as usize));
                    cmma::execute(&left, rights.index(comptime!(right as usize)), sum, sum);
                }
            }
        }
        sync_cube();
        k_tile += 1u32;
    }

    let lane = UNIT_POS % PLANE;
    let start = plane * 256;
    #[unroll]
    for tile in 0..comptime!(n_tiles * m_tiles) {
        cmma::store(
            &mut staged[start as usize..(start + 256) as usize],
            sums.index(comptime!(tile as usize)),
            16u32,
            MatrixLayout::RowMajor,
        );
        sync_cube();
        let row = first_row + plane_row + comptime!(tile % n_tiles * 16) + lane % 16;
        #[unroll]
        for index in 0..8u32 {
            let line = lane / 16 + comptime!(2 * index);
            let to = first_input + plane_input + comptime!(tile / n_tiles * 16) + line;
            let sum = staged[(start + line * 16 + lane % 16) as usize];
            if to < dims.m && row < dims.n {
                let value = epilogue::<F, u32, W, X>(operands, sum, row);
                output[(to * dims.n + row) as usize] = value;
            }
        }
        sync_cube();
    }
}
