//! Cube devices: which have kernels, and tensors as these take them.

use burn::tensor::{DType, Device, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fp4_cubecl::Dtype;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_search::host::View;

/// Whether the kernels give the reference's bits on a device.
///
/// Drivers behind wgpu may reassociate sums and flush subnormals; there tensor operations do the
/// work, one rounding each.
pub(crate) fn has_kernels(device: &CubeDevice) -> bool {
    matches!(device, CubeDevice::Cuda(_) | CubeDevice::Cpu(_))
}

/// The Cube device that is behind a device, if that has kernels.
pub(crate) fn with_kernels(device: &Device) -> Option<CubeDevice> {
    match device.clone().inner().as_dispatch() {
        burn::backend::DispatchDevice::Cube(device) if has_kernels(device) => Some(device.clone()),
        _ => None,
    }
}

/// The dtype of values in a kernel; callers have checked that it is one of these.
pub(crate) fn kernel_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::Bf16,
        _ => Dtype::F32,
    }
}

/// The values in contiguous memory, and how the axis lies in them.
///
/// A transposed matrix is used as it is; anything else that is strided is copied.
pub(super) fn contiguous(values: CubeTensor, axis: usize) -> (CubeTensor, View) {
    let shape = values.meta.shape().clone();
    let transposed = shape.num_dims() == 2
        && !values.is_contiguous()
        && !values.meta.is_tiled()
        && values.meta.strides()[..] == [1, shape[0]];
    if transposed {
        return (values, View::along(&[shape[1], shape[0]], 1 - axis));
    }
    (into_contiguous(values), View::along(&shape, axis))
}

/// A result next to the tensor it was made from.
pub(crate) fn beside(like: &CubeTensor, handle: Handle, shape: Shape, dtype: DType) -> CubeTensor {
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape, handle, dtype)
}
