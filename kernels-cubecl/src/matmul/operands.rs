//! Operands of the matmul kernels, the decoding of the weight's fragments for `mma.rs` and
//! `small_m.rs`, and the epilogue: from an f32 sum to a value of the output.

use burn_fp4_search::formats::{Fp4Format, ScaleGrid};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::plan::Matmul;
use super::prefetch::{Prefetch, PrefetchArgs};
use crate::instructions::MmaInstructions;
use crate::memory::{PackedHandles, PackedIn};
use crate::numeric::element::{decode_word, narrow};
use crate::numeric::scale_grid::{element_shift, product_scale, product_scale_pair};
use crate::plan::{Capability, Conversion, Dtype};

/// The compile-time key of the matmul kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MatmulBlueprint {
    pub(crate) block_size: u32,
    pub(crate) format: Fp4Format,
    pub(crate) dtype: Dtype,
    /// True if every packed row has a tensor scale.
    pub(crate) by_row: bool,
    pub(crate) bias: bool,
    pub(crate) conversion: Conversion,
}

impl MatmulBlueprint {
    pub(crate) fn new(matmul: &Matmul, device: &Capability, handles: &OperandHandles) -> Self {
        Self {
            block_size: matmul.block_size as u32,
            format: matmul.format,
            dtype: matmul.dtype,
            by_row: handles.weight.tensor_scales > 1,
            bias: handles.bias.is_some(),
            conversion: Conversion::to(matmul.dtype, device),
        }
    }

    /// Returns the grid of the block scales.
    pub(crate) fn grid(&self) -> ScaleGrid {
        self.format.row().scale_grid()
    }
}

/// Lengths of a matmul.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct MatmulDims {
    pub(crate) m: u32,
    pub(crate) n: u32,
    /// Tiles of k. A unit, or the lanes of a row together, load one at a time.
    pub(crate) k_tiles: u32,
}

/// Operands of a kernel.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Operands<F: Float, S: Int, W: Size, X: Size> {
    pub(crate) weight: PackedIn<S, W>,
    pub(crate) input: &'static [Vector<u32, X>],
    /// A dummy binding when there is no bias; never read.
    pub(crate) bias: &'static [F],
    /// The next matmul's weight, if the kernel prefetches it.
    pub(crate) prefetch: ComptimeOption<PrefetchArgs>,
    pub(crate) dims: MatmulDims,
    #[cube(comptime)]
    pub(crate) blueprint: MatmulBlueprint,
}

/// A weight of a family after the first: it multiplies the same input in the same launch.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Member<F: Float, S: Int, W: Size> {
    pub(crate) weight: PackedIn<S, W>,
    /// A dummy binding when there is no bias; never read.
    pub(crate) bias: &'static [F],
    pub(crate) output: &'static mut [F],
    /// Packed rows.
    pub(crate) n: u32,
    /// The first of the cubes that multiply by it.
    pub(crate) first_cube: u32,
    /// Number of these cubes.
    pub(crate) cubes: u32,
}

/// Widths of a kernel's loads.
pub(crate) struct Widths {
    /// Codes of a vector.
    pub(crate) codes: usize,
    /// Codes of a word of block scales.
    pub(crate) scales: usize,
    /// Values of a vector of the input.
    pub(crate) input: usize,
    /// Codes of a packed row in a k tile.
    pub(crate) k_tile: usize,
}

/// A weight of a family after the first, in device memory.
#[derive(Clone)]
pub(super) struct MemberHandles {
    pub(super) weight: PackedHandles,
    pub(super) bias: Option<Handle>,
    pub(super) output: Handle,
    pub(super) n: usize,
}

/// Operands of a matmul in device memory.
#[derive(Clone)]
pub(super) struct OperandHandles {
    pub(super) weight: PackedHandles,
    pub(super) input: Handle,
    pub(super) bias: Option<Handle>,
    /// The next matmul's weight, if the kernel prefetches it.
    pub(super) prefetch: Option<Prefetch>,
    /// Packed rows of the launch.
    pub(super) rows: usize,
}

/// Returns the operands of a launch.
pub(super) fn operands<F: Float, S: Int, W: Size, X: Size>(
    handles: OperandHandles,
    matmul: &Matmul,
    blueprint: MatmulBlueprint,
    widths: Widths,
) -> OperandsLaunch<F, S, W, X> {
    let OperandHandles { weight, input, bias, prefetch, rows } = handles;
    let Matmul { m, n, k, .. } = *matmul;
    // SAFETY: the lengths match the matmul.
    unsafe {
        OperandsLaunch::new(
            weight.read(n * k, widths.codes, widths.scales),
            BufferArg::from_raw_parts(input.clone(), m * k / widths.input),
            match bias {
                Some(bias) => BufferArg::from_raw_parts(bias, n),
                None => BufferArg::from_raw_parts(input, m * k),
            },
            prefetch.and_then(|next| next.read(&Matmul { n: rows, ..*matmul })).into(),
            MatmulDimsLaunch::new(m as u32, n as u32, (k / widths.k_tile) as u32),
            blueprint,
        )
    }
}

/// Decodes the scales of a row's two blocks to factors of decoded elements.
#[cube]
pub(super) fn decode_scales<F: Float, NA: Size>(
    factors: &mut Array<Vector<F, NA>>,
    #[comptime] row: u32,
    scales: u32,
    #[comptime] blueprint: MatmulBlueprint,
) {
    let grid = comptime!(blueprint.grid());
    if comptime!(blueprint.block_size == 16) {
        let codes = (scales & 0xFFu32) | ((scales & 0xFF00u32) << 8u32);
        let pair = product_scale_pair::<F, NA>(codes, grid, comptime!(blueprint.dtype));
        factors[comptime!((row * 2) as usize)] = Vector::new(pair.extract(0usize));
        factors[comptime!((row * 2 + 1) as usize)] = Vector::new(pair.extract(1usize));
    } else {
        #[unroll]
        for block in 0..2u32 {
            let shift = comptime!(block * 16 / blueprint.block_size * 8);
            let code = (scales >> shift) & 0xFFu32;
            let factor = product_scale::<F>(code, grid, comptime!(blueprint.dtype));
            factors[comptime!((row * 2 + block) as usize)] = Vector::new(factor);
        }
    }
}

/// Decodes elements as [`decode_word`] does, and restores their magnitude if block scales need it.
#[cube]
pub(super) fn decode_elements<I: MmaInstructions, F: Float, N: Size>(
    word: u32,
    #[comptime] blueprint: MatmulBlueprint,
) -> Array<Vector<F, N>> {
    let mut pairs = decode_word::<I, F, N>(word, comptime!(blueprint.dtype));
    if let Some(shift) = comptime!(element_shift(blueprint.grid(), blueprint.dtype)) {
        #[unroll]
        for pair in 0..4usize {
            pairs[pair] *= Vector::new(F::cast_from(shift));
        }
    }
    pairs
}

/// Returns the output of a packed row: the sum times the tensor scale, plus the bias, rounded once.
#[cube]
pub(crate) fn epilogue<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    sum: f32,
    row: u32,
) -> F {
    let blueprint = comptime!(operands.blueprint);
    let factor = tensor_scale::<S, W>(&operands.weight, row, blueprint);
    epilogue_with::<F>(factor, operands.bias, sum, row, blueprint)
}

/// Returns the tensor scale of a packed row of a weight.
#[cube]
pub(super) fn tensor_scale<S: Int, W: Size>(
    weight: &PackedIn<S, W>,
    row: u32,
    #[comptime] blueprint: MatmulBlueprint,
) -> f32 {
    let at = if comptime!(blueprint.by_row) { row } else { 0u32.runtime() };
    f32::reinterpret(weight.tensor_scale[at as usize])
}

/// Returns the output of a packed row, given its tensor scale; see [`epilogue`].
#[cube]
pub(super) fn epilogue_with<F: Float>(
    tensor_scale: f32,
    bias: &[F],
    sum: f32,
    row: u32,
    #[comptime] blueprint: MatmulBlueprint,
) -> F {
    let mut value = sum * tensor_scale;
    if comptime!(blueprint.bias) {
        value += f32::cast_from(bias[row as usize]);
    }
    narrow::<F>(value, comptime!(blueprint.conversion))
}
