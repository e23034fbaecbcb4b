//! Cube devices with kernels, and tensors in the form that kernels take.

use burn::tensor::{DType, Device, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fp4_cubecl::Dtype;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_search::host::View;

/// Returns true if the device runs kernels with the reference's bits.
///
/// Drivers behind wgpu may reassociate sums and flush subnormals. There tensor operations do the
/// work, which round once each.
pub(crate) fn has_kernels(device: &CubeDevice) -> bool {
    matches!(device, CubeDevice::Cuda(_) | CubeDevice::Cpu(_))
}

/// Returns the Cube device behind a device.
pub(crate) fn cube_device(device: &Device) -> Option<CubeDevice> {
    match device.clone().inner().as_dispatch() {
        burn::backend::DispatchDevice::Cube(device) => Some(device.clone()),
        _ => None,
    }
}

/// Returns the Cube device behind a device, if it has kernels.
pub(crate) fn with_kernels(device: &Device) -> Option<CubeDevice> {
    cube_device(device).filter(has_kernels)
}

/// Returns the dtype that kernels use for values of a dtype; callers have checked it.
pub(crate) fn kernel_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::Bf16,
        _ => Dtype::F32,
    }
}

/// Returns the values in contiguous memory, with the view along an axis.
///
/// A transposed matrix is not copied; any other strided tensor is.
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

/// Makes a tensor of a kernel's output, on the client and device of an input.
pub(crate) fn output_tensor(
    like: &CubeTensor,
    handle: Handle,
    shape: Shape,
    dtype: DType,
) -> CubeTensor {
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape, handle, dtype)
}
