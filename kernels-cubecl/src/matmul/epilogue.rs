//! The epilogue of every matmul kernel, from an f32 sum to a value of the output.

use cubecl::prelude::*;

use super::operands::Operands;
use crate::tensor::load_store::narrow;

/// Returns the output of a packed row: the sum times the tensor scale, plus the bias, rounded once.
#[cube]
pub(crate) fn epilogue<F: Float, S: Int, W: Size, X: Size>(
    operands: &Operands<F, S, W, X>,
    sum: f32,
    row: u32,
) -> F {
    let blueprint = comptime!(operands.blueprint);
    let factor = if comptime!(blueprint.by_row) { row } else { 0u32.runtime() };
    let mut value = sum * f32::reinterpret(operands.weight.tensor_scale[factor as usize]);
    if comptime!(blueprint.bias) {
        value += f32::cast_from(operands.bias[row as usize]);
    }
    narrow::<F>(value, comptime!(blueprint.conversion))
}
