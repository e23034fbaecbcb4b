//! Matrix products straight from the codes of a weight, and packed tensors as kernels take them.

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fp4_cubecl::{Capability, Matmul, MatmulPlan, PackedHandles};
use burn_fp4_search::{Fp4Scheme, ScaleRule};

use super::device::{kernel_dtype, output_tensor};
use super::{prefetch, queues};
use crate::layout::Fp4Layout;
use crate::primitive::Fp4Primitive;

/// Plans the product of an input `[m, k]` with a weight `[k, n]`; none if its blocks run along `n`,
/// a plan refuses it, or a dense product is faster.
pub(crate) fn plan(
    m: usize,
    layout: &Fp4Layout,
    dtype: DType,
    device: &Capability,
) -> Option<MatmulPlan> {
    let [k, n] = layout.shape[..] else { return None };
    if layout.axis != 0 {
        return None;
    }
    let Fp4Layout { format, block_size, .. } = *layout;
    let dtype = kernel_dtype(dtype);
    Matmul { m, n, k, format, block_size, dtype }.plan(device).ok().flatten()
}

/// Runs a planned product, as a tensor of a shape. While a graph is captured it also prefetches the
/// weight of the next product.
pub(crate) fn run(
    plan: &MatmulPlan,
    input: CubeTensor,
    weight: Fp4Primitive<CubeBackend>,
    bias: Option<CubeTensor>,
    shape: Shape,
) -> CubeTensor {
    let input = into_contiguous(input);
    let bias = bias.map(|bias| into_contiguous(bias).handle);
    let weight = handles(weight);
    let next = prefetch::next_weight(plan.matmul(), &weight);
    let output = plan
        .run(&input.client, weight, input.handle.clone(), bias, next)
        .expect("tensors have the lengths of their shapes");
    queues::submit_launches(&input.device);
    output_tensor(&input, output, shape, input.dtype)
}

/// Returns the parts of a packed tensor in contiguous memory.
pub(super) fn handles(packed: Fp4Primitive<CubeBackend>) -> PackedHandles {
    let tensor_scales = packed.tensor_scale.meta.shape().num_elements();
    let [codes, scales, tensor_scale] = [packed.codes, packed.scales, packed.tensor_scale]
        .map(|tensor| into_contiguous(tensor).handle);
    PackedHandles { codes, scales, tensor_scale, tensor_scales }
}

/// Makes a scheme with the format of a packed tensor. Its values do not depend on how the scales
/// and codes were chosen.
pub(super) fn scheme_of(layout: &Fp4Layout) -> Fp4Scheme {
    Fp4Scheme::of(ScaleRule::of_format(layout.format)).with_block_size(layout.block_size)
}
