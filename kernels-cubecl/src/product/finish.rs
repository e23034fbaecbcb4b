//! What the kernels of products share: their operands, and what becomes of a sum.

use burn_fp4_search::formats::{Fp4Format, ScaleGrid};
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::ahead::{AheadIn, NextWeight};
use super::plan::Product;
use crate::layout::share::narrow;
use crate::packed::{PackedHandles, PackedIn};
use crate::plan::{Capability, Conversion, Dtype};

/// What the kernels of products are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ProductRecipe {
    pub(crate) block_size: u32,
    pub(crate) format: Fp4Format,
    pub(crate) dtype: Dtype,
    /// Whether every packed row has a tensor scale.
    pub(crate) by_row: bool,
    pub(crate) bias: bool,
    pub(crate) conversion: Conversion,
}

impl ProductRecipe {
    pub(crate) fn new(product: &Product, device: &Capability, handles: &OperandHandles) -> Self {
        Self {
            block_size: product.block_size as u32,
            format: product.format,
            dtype: product.dtype,
            by_row: handles.weight.tensor_scales > 1,
            bias: handles.bias.is_some(),
            conversion: Conversion::to(product.dtype, device),
        }
    }

    /// The grid of the block scales.
    pub(crate) fn grid(&self) -> ScaleGrid {
        self.format.row().scale_grid()
    }
}

/// Lengths of a product.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct ProductExtent {
    pub(crate) inputs: u32,
    pub(crate) outputs: u32,
    /// Chunks of a packed row, of as many codes as a unit or the lanes of a row load at a time.
    pub(crate) chunks: u32,
}

/// What a product is computed from.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Operands<F: Float, S: Int, W: Size, X: Size> {
    pub(crate) weight: PackedIn<S, W>,
    pub(crate) input: &'static [Vector<u32, X>],
    /// Something that is not read where there is none.
    pub(crate) bias: &'static [F],
    /// Of the next product's weight, where that is read ahead.
    pub(crate) ahead: ComptimeOption<AheadIn>,
    pub(crate) extent: ProductExtent,
    #[cube(comptime)]
    pub(crate) recipe: ProductRecipe,
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
    pub(crate) chunk: usize,
}

/// The operands of a product in device memory.
#[derive(Clone)]
pub(super) struct OperandHandles {
    pub(super) weight: PackedHandles,
    pub(super) input: Handle,
    pub(super) bias: Option<Handle>,
    /// The weight of the next product, if the kernel reads it ahead.
    pub(super) ahead: Option<NextWeight>,
}

/// The operands of a launch.
pub(super) fn operands<F: Float, S: Int, W: Size, X: Size>(
    handles: OperandHandles,
    product: &Product,
    recipe: ProductRecipe,
    widths: Widths,
) -> OperandsLaunch<F, S, W, X> {
    let OperandHandles { weight, input, bias, ahead } = handles;
    let Product { inputs, outputs, channels, .. } = *product;
    // SAFETY: the lengths are those of the product.
    unsafe {
        OperandsLaunch::new(
            weight.read(outputs * channels, widths.codes, widths.scales),
            BufferArg::from_raw_parts(input.clone(), inputs * channels / widths.input),
            match bias {
                Some(bias) => BufferArg::from_raw_parts(bias, outputs),
                None => BufferArg::from_raw_parts(input, inputs * channels),
            },
            ahead.and_then(|next| next.read(product)).into(),
            ProductExtentLaunch::new(
                inputs as u32,
                outputs as u32,
                (channels / widths.chunk) as u32,
            ),
            recipe,
        )
    }
}

/// The output of a packed row: the sum times the tensor scale, plus the bias, rounded once.
#[cube]
pub(crate) fn finish<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    sum: f32,
    row: u32,
) -> F {
    let recipe = comptime!(operands.recipe);
    let factor = if comptime!(recipe.by_row) { row } else { 0u32.runtime() };
    let mut value = sum * f32::reinterpret(operands.weight.tensor_scale[factor as usize]);
    if comptime!(recipe.bias) {
        value += f32::cast_from(operands.bias[row as usize]);
    }
    narrow::<F>(value, comptime!(recipe.conversion))
}
