//! What the kernels of products share: their operands, and what becomes of a sum.

use burn_fp4_search::formats::{Fp4Format, ScaleGrid};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::plan::Matmul;
use super::prefetch::{Prefetch, PrefetchArgs};
use crate::packed::{PackedHandles, PackedIn};
use crate::plan::{Capability, Conversion, Dtype};

/// What the kernels of products are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MatmulBlueprint {
    pub(crate) block_size: u32,
    pub(crate) format: Fp4Format,
    pub(crate) dtype: Dtype,
    /// Whether every packed row has a tensor scale.
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

    /// The grid of the block scales.
    pub(crate) fn grid(&self) -> ScaleGrid {
        self.format.row().scale_grid()
    }
}

/// Lengths of a product.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct MatmulDims {
    pub(crate) m: u32,
    pub(crate) n: u32,
    /// Chunks of a packed row, of as many codes as a unit or the lanes of a row load at a time.
    pub(crate) k_tiles: u32,
}

/// What a product is computed from.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Operands<F: Float, S: Int, W: Size, X: Size> {
    pub(crate) weight: PackedIn<S, W>,
    pub(crate) input: &'static [Vector<u32, X>],
    /// Something that is not read where there is none.
    pub(crate) bias: &'static [F],
    /// Of the next product's weight, where that is read ahead.
    pub(crate) prefetch: ComptimeOption<PrefetchArgs>,
    pub(crate) dims: MatmulDims,
    #[cube(comptime)]
    pub(crate) blueprint: MatmulBlueprint,
}

/// How many values a kernel of a product loads at a time.
pub(crate) struct Widths {
    /// Codes of a vector.
    pub(crate) codes: usize,
    /// Codes of a word of block scales.
    pub(crate) scales: usize,
    /// Values of a vector of the input.
    pub(crate) input: usize,
    /// Codes of a chunk of a packed row.
    pub(crate) k_tile: usize,
}

/// The operands of a product in device memory.
#[derive(Clone)]
pub(super) struct OperandHandles {
    pub(super) weight: PackedHandles,
    pub(super) input: Handle,
    pub(super) bias: Option<Handle>,
    /// The weight of the next product, if the kernel reads it ahead.
    pub(super) prefetch: Option<Prefetch>,
}

/// The operands of a launch.
pub(super) fn operands<F: Float, S: Int, W: Size, X: Size>(
    handles: OperandHandles,
    matmul: &Matmul,
    blueprint: MatmulBlueprint,
    widths: Widths,
) -> OperandsLaunch<F, S, W, X> {
    let OperandHandles { weight, input, bias, prefetch } = handles;
    let Matmul { m, n, k, .. } = *matmul;
    // SAFETY: the lengths are those of the product.
    unsafe {
        OperandsLaunch::new(
            weight.read(n * k, widths.codes, widths.scales),
            BufferArg::from_raw_parts(input.clone(), m * k / widths.input),
            match bias {
                Some(bias) => BufferArg::from_raw_parts(bias, n),
                None => BufferArg::from_raw_parts(input, m * k),
            },
            prefetch.and_then(|next| next.read(matmul)).into(),
            MatmulDimsLaunch::new(m as u32, n as u32, (k / widths.k_tile) as u32),
            blueprint,
        )
    }
}
