//! Packed tensors as kernels take them.

use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_fp4_cubecl::PackedHandles;
use burn_fp4_search::{Fp4Scheme, ScaleRule};

use crate::layout::Fp4Layout;
use crate::primitive::Fp4Primitive;

/// The parts of a packed tensor in contiguous memory.
pub(crate) fn handles(packed: Fp4Primitive<CubeBackend>) -> PackedHandles {
    let tensor_scales = packed.tensor_scale.meta.shape().num_elements();
    let [codes, scales, tensor_scale] = [packed.codes, packed.scales, packed.tensor_scale]
        .map(|tensor| into_contiguous(tensor).handle);
    PackedHandles { codes, scales, tensor_scale, tensor_scales }
}

/// A scheme of the format of a packed tensor: what its values are does not depend on how they were
/// chosen.
pub(super) fn scheme_of(layout: &Fp4Layout) -> Fp4Scheme {
    Fp4Scheme::of(ScaleRule::of_format(layout.format)).with_block_size(layout.block_size)
}
