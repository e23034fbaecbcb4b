//! Tensors in and out of Burn's stream of operations, the memory they are in, and copies of them.

use core::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use burn::backend::fusion::FusionTensor;
use burn::backend::fusion::custom::{
    CustomOpIr, HandleContainer, Operation, OperationIr, StreamId, TensorId, TensorIr,
};
use burn::backend::fusion::get_client;
use burn::backend::{
    BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind, ExecutionError,
    TensorMetadata,
};
use burn::tensor::{DType, Shape};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::fusion::{CubeFusionHandle, FusionCubeRuntime};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fp4_cubecl::cubecl::server::Handle;

use super::super::device::{copy, output_tensor, write};
use super::super::queues;
use crate::error::{OpsError, panic_message};

/// A tensor of the stream of operations.
pub(super) type Fused = FusionTensor<FusionCubeRuntime>;

/// The memory of a tensor: an allocation, and the bounds within it.
pub(super) type MemoryRange = (usize, Option<u64>, Option<u64>);

pub(super) fn memory_range(tensor: &CubeTensor) -> MemoryRange {
    let handle = &tensor.handle;
    (handle.memory.descriptor().id.value, handle.offset_start, handle.offset_end)
}

/// Returns true if a tensor fills this memory, in row-major order.
pub(super) fn fills(tensor: &CubeTensor, range: &MemoryRange) -> bool {
    memory_range(tensor) == *range && tensor.is_contiguous() && !tensor.meta.is_tiled()
}

/// An operation that makes tensors of the stream from memory.
struct Register {
    tensors: Mutex<Vec<(TensorId, CubeTensor)>>,
}

impl fmt::Debug for Register {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Register").finish_non_exhaustive()
    }
}

impl Operation<FusionCubeRuntime> for Register {
    fn execute(
        &self,
        handles: &mut HandleContainer<CubeFusionHandle>,
    ) -> Result<(), ExecutionError> {
        let mut tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        for (id, tensor) in tensors.drain(..) {
            handles.register_float_tensor::<CubeBackend>(&id, tensor);
        }
        Ok(())
    }
}

/// Makes tensors of the stream that own this memory.
pub(super) fn register(device: &CubeDevice, tensors: Vec<CubeTensor>) -> Vec<DispatchTensor> {
    if tensors.is_empty() {
        return Vec::new();
    }
    let client = get_client::<CubeBackend>(device);
    let tensors: Vec<_> =
        tensors.into_iter().map(|tensor| (client.create_empty_handle(), tensor)).collect();
    let outputs: Vec<_> = (tensors.iter())
        .map(|(id, tensor)| TensorIr::uninit(*id, tensor.shape(), tensor.dtype))
        .collect();
    let repr = OperationIr::Custom(CustomOpIr::new("fp4_register", &[], &outputs));
    let operation = Register { tensors: Mutex::new(tensors) };
    let tensors = client.register(StreamId::current(), repr, operation);
    tensors.into_iter().map(dispatch_tensor).collect()
}

/// Returns the memory of tensors, once all earlier operations are launched.
pub(super) fn resolve_all(
    device: &CubeDevice,
    tensors: Vec<DispatchTensor>,
) -> Result<Vec<CubeTensor>, OpsError> {
    tensors.into_iter().map(|tensor| fused_on(device, tensor).and_then(resolve)).collect()
}

/// Returns the memory of a tensor, once all earlier operations are launched.
pub(super) fn resolve(tensor: Fused) -> Result<CubeTensor, OpsError> {
    let client = tensor.client.clone();
    // An operation that failed panics where its result is asked for.
    catch_unwind(AssertUnwindSafe(|| client.resolve_tensor_float::<CubeBackend>(tensor)))
        .map_err(|panic| OpsError::Device(panic_message(&*panic)))
}

/// Runs a task that launches on a stream, while no thread captures: it might capture that stream.
pub(super) fn launch_on<R: Send>(
    device: &CubeDevice,
    stream: StreamId,
    launch: impl FnOnce() -> R + Send,
) -> Result<R, OpsError> {
    queues::run_exclusive(device, || stream.executes(launch)).map_err(not_captured)
}

/// Returns a tensor of the stream of this device. It is an error for tensors of other devices,
/// differentiated ones, and ones quantized by Burn.
pub(super) fn fused_on(device: &CubeDevice, tensor: DispatchTensor) -> Result<Fused, OpsError> {
    let found = tensor.device();
    let fused = match tensor.kind {
        DispatchTensorKind::Cube(
            BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor),
        ) => Some(tensor),
        _ => None,
    };
    fused
        .filter(|tensor| tensor.client.device() == device)
        .ok_or_else(|| not_captured(format!("a tensor on {found:?} in a pass on {device:?}")))
}

pub(super) fn dispatch_tensor(tensor: Fused) -> DispatchTensor {
    let tensor = match tensor.dtype {
        dtype if dtype.is_float() => BackendTensor::Float(tensor),
        dtype if dtype.is_bool() => BackendTensor::Bool(tensor),
        _ => BackendTensor::Int(tensor),
    };
    let kind = DispatchTensorKind::Cube(tensor);
    DispatchTensor { kind, autodiff: DispatchAutodiffContext::Disabled }
}

/// Moves tensors made on a stream to the stream of this thread. Without the copy a reader has
/// CubeCL mark a point in that stream, which must not happen while it is captured.
pub(super) fn to_this_stream(tensors: Vec<CubeTensor>, stream: StreamId) -> Vec<CubeTensor> {
    if StreamId::current() == stream { tensors } else { tensors.iter().map(copy).collect() }
}

/// Copies all the memory behind a tensor, which keeps its layout: products may sum in another order
/// for another one.
pub(super) fn copy_of_memory(tensor: &CubeTensor) -> Handle {
    let (handle, dtype) = (&tensor.handle, tensor.dtype);
    let bytes = handle.size_in_used() as usize;
    let flat = |handle| {
        let shape = Shape::new([bytes / dtype_to_storage_type(dtype).size()]);
        output_tensor(tensor, handle, shape, dtype)
    };
    let made = tensor.client.empty(bytes);
    write(flat(handle.clone()), &flat(made.clone()));
    made
}

/// Shape and dtype of a tensor.
type Spec = (Shape, DType);

pub(super) fn specs(tensors: &[CubeTensor]) -> Vec<Spec> {
    tensors.iter().map(|tensor| (tensor.meta.shape().clone(), tensor.dtype)).collect()
}

/// # Errors
/// [`OpsError::Capture`] if shapes or dtypes differ between runs.
pub(super) fn check_same(what: &str, expected: &[Spec], found: &[Spec]) -> Result<(), OpsError> {
    if expected == found {
        return Ok(());
    }
    Err(not_captured(format!("{what}: {expected:?} in the first run, {found:?} in a later one")))
}

pub(super) fn not_captured(reason: impl ToString) -> OpsError {
    OpsError::Capture(reason.to_string())
}
