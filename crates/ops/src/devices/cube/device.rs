//! Cube devices with kernels, and tensors in the form that kernels take.
//!
//! CUDA and CubeCL's CPU runtime run all kernels, with the reference's bits. Devices of wgpu
//! dequantize, multiply and run the other operations of a decoder by kernels, if their driver
//! passes a self-test: these do not depend on the order of a sum, nor on subnormals.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::tensor::{DType, Device, Shape};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::features::TypeUsage;
use burn_fp4_cubecl::cubecl::ir::{ElemType, UIntKind};
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::cubecl::std::tensor::copy_into;
use burn_fp4_cubecl::{Capability, Dtype, Refusal};
use burn_fp4_search::host::View;

/// Returns true if the device quantizes by kernels, with the reference's bits.
///
/// Drivers behind wgpu may reassociate sums and flush subnormals. There tensor operations do the
/// work, which round once each, or the CPU.
pub(crate) fn has_kernels(device: &CubeDevice) -> bool {
    matches!(device, CubeDevice::Cuda(_) | CubeDevice::Cpu(_))
}

/// Returns true if tensor operations of a device take bytes. WGSL has none in memory: there tensors
/// of bytes can be uploaded, read back and given to kernels, and nothing else.
pub(super) fn computes_with_bytes(client: &Client) -> bool {
    client.properties().type_usage(ElemType::UInt(UIntKind::U8)).contains(TypeUsage::Buffer)
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

/// Returns true if the device may dequantize and multiply by kernels; [`capability`] decides.
pub(crate) fn may_multiply(device: &CubeDevice) -> bool {
    has_kernels(device) || matches!(device, CubeDevice::Wgpu(_))
}

/// Returns true if products of a device may compute the norm of their input: those by matrix
/// instructions of a plane.
pub(crate) fn takes_norms(device: &CubeDevice) -> bool {
    match device {
        #[cfg(feature = "cuda")]
        CubeDevice::Cuda(_) => true,
        _ => false,
    }
}

/// Returns the Cube device behind a device, if it may multiply by kernels.
pub(crate) fn with_products(device: &Device) -> Option<CubeDevice> {
    cube_device(device).filter(may_multiply)
}

/// Results of the self-tests of drivers, by device.
struct Tested(Vec<(CubeDevice, Result<Capability, Refusal>)>);

impl Tested {
    fn get(&self, device: &CubeDevice) -> Option<Result<Capability, Refusal>> {
        self.0.iter().find(|(known, _)| known == device).map(|(_, found)| found.clone())
    }
}

fn tested() -> MutexGuard<'static, Tested> {
    static TESTED: Mutex<Tested> = Mutex::new(Tested(Vec::new()));
    TESTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the capability of a device whose kernels dequantize and multiply. The first call for a
/// device of wgpu tests its driver, and waits for the results, which a browser cannot: there
/// [`test_driver`] comes first.
///
/// # Errors
/// The reason why the driver is not trusted.
pub(crate) fn capability(device: &CubeDevice, client: &Client) -> Result<Capability, Refusal> {
    if !may_multiply(device) {
        return Err(Refusal::Device { lacks: "has no kernels" });
    }
    if has_kernels(device) {
        return Ok(Capability::of(client));
    }
    let mut tested = tested();
    if let Some(found) = tested.get(device) {
        return found;
    }
    if cfg!(target_family = "wasm") {
        return Err(Refusal::Device { lacks: "was not tested; await burn_fp4::init_async first" });
    }
    let found = Capability::tested(client);
    tested.0.push((device.clone(), found.clone()));
    found
}

/// Returns true if the driver was tested; always outside a browser.
pub(crate) fn is_tested(device: &CubeDevice) -> bool {
    cfg!(not(target_family = "wasm")) || tested().get(device).is_some()
}

/// Tests the driver of a device of wgpu, if it was not; [`capability`] has the result.
///
/// # Errors
/// The reason why the driver is not trusted.
pub(crate) async fn test_driver(device: &Device) -> Result<(), Refusal> {
    let on_wgpu = |device: &CubeDevice| may_multiply(device) && !has_kernels(device);
    let Some(device) = cube_device(device).filter(on_wgpu) else { return Ok(()) };
    let known = tested().get(&device);
    let found = match known {
        Some(found) => found,
        None => {
            let found = Capability::tested_async(&device.client()).await;
            tested().0.push((device, found.clone()));
            found
        }
    };
    found.map(|_| ())
}

/// Returns the capability of a device that runs the operations of a decoder by kernels in a dtype.
pub(crate) fn decoder_capability(
    device: &CubeDevice,
    client: &Client,
    dtype: DType,
) -> Option<Capability> {
    let capability = capability(device, client).ok()?;
    capability.check_decoder(kernel_dtype(dtype)).is_ok().then_some(capability)
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

/// Returns the tensor in contiguous memory that nothing else reads.
///
/// Copies it if another owner holds it. While CubeCL's thread allocates memory it counts as one
/// more owner, so a tensor made just before may be copied too.
pub(super) fn writable(tensor: CubeTensor) -> CubeTensor {
    match tensor.can_mut() || !tensor.is_contiguous() {
        true => into_contiguous(tensor),
        false => copy(&tensor),
    }
}

/// Copies values into contiguous memory of their own. Burn's own copy may have gaps between rows.
pub(super) fn copy(tensor: &CubeTensor) -> CubeTensor {
    let shape = tensor.meta.shape().clone();
    let bytes = shape.num_elements() * dtype_to_storage_type(tensor.dtype).size();
    let made = output_tensor(tensor, tensor.client.empty(bytes), shape, tensor.dtype);
    write(tensor.clone(), &made);
    made
}

/// Returns the memory of contiguous bytes, or signed bytes, as words of a dtype of 32 bits.
pub(super) fn words(bytes: &CubeTensor, dtype: DType) -> CubeTensor {
    let words = Shape::new([bytes.meta.num_elements().div_ceil(4)]);
    output_tensor(bytes, bytes.handle.clone(), words, dtype)
}

/// Copies values into contiguous memory.
pub(super) fn write(values: CubeTensor, memory: &CubeTensor) {
    if memory.meta.num_elements() == 0 {
        return;
    }
    let mut ends = [into_contiguous(values), memory.clone()];
    let has_bytes = matches!(memory.dtype, DType::U8 | DType::I8);
    if has_bytes && !computes_with_bytes(&memory.client) {
        ends = ends.map(|bytes| words(&bytes, DType::U32));
    }
    let [values, memory] = ends;
    let (client, storage) = (memory.client.clone(), dtype_to_storage_type(memory.dtype));
    copy_into(&client, values.binding(), memory.binding(), storage);
}
