//! Recorded tensors and scalars, as they are when a segment runs.

use burn::backend::fusion::stream::{Context, ScalarId};
use burn::backend::ir::{CustomOpIr, ScalarIr, TensorIr, TensorStatus};
use burn_cubecl::CubeBackend;
use burn_cubecl::fusion::CubeFusionHandle;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use crate::layout::Fp4Layout;
use crate::primitive::Fp4Primitive;

pub(super) type Streams = Context<CubeFusionHandle>;

/// Whether an operation is the last to read a tensor.
pub(super) fn is_last_use(tensor: &TensorIr) -> bool {
    tensor.status == TensorStatus::ReadWrite
}

/// A tensor as it is now, with the status that it has in a segment.
pub(super) fn now(context: &Streams, tensor: &TensorIr) -> TensorIr {
    TensorIr { status: tensor.status, ..context.tensors[&tensor.id].clone() }
}

/// A float tensor as it is now, in contiguous memory.
pub(super) fn float(context: &mut Streams, tensor: &TensorIr) -> CubeTensor {
    let tensor = now(context, tensor);
    into_contiguous(context.handles.get_float_tensor::<CubeBackend>(&tensor))
}

/// An int tensor as it is now.
pub(super) fn int(context: &mut Streams, tensor: &TensorIr) -> CubeTensor {
    let tensor = now(context, tensor);
    context.handles.get_int_tensor::<CubeBackend>(&tensor)
}

/// Codes and scales that would be dequantized.
pub(super) fn packed(context: &mut Streams, dequantize: &CustomOpIr) -> Fp4Primitive<CubeBackend> {
    let [codes, scales, tensor_scale] = [0, 1, 2].map(|at| int(context, &dequantize.inputs[at]));
    Fp4Primitive { codes, scales, tensor_scale }
}

/// A scalar as it is now: a segment has its number.
pub(super) fn scalar(context: &Streams, scalar: ScalarIr) -> Option<ScalarIr> {
    let ScalarIr::UInt(value) = scalar else { return None };
    context.scalars.get(&ScalarId { value }).copied()
}

/// The layout of the weight that would be dequantized.
pub(super) fn layout(context: &Streams, dequantize: &CustomOpIr) -> Option<Fp4Layout> {
    let ScalarIr::UInt(tag) = scalar(context, *dequantize.scalars.first()?)? else { return None };
    let weight = context.tensors.get(&dequantize.outputs.first()?.id)?;
    Fp4Layout::from_tag(tag, weight.shape.to_vec())
}
