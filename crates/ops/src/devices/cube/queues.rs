//! Handles to a device's two worker threads: Burn's, which runs the stream of operations, and
//! CubeCL's, which launches kernels.
//!
//! Both take tasks from a queue, and begin when it is full or when a caller waits for a result. The
//! functions here make them begin earlier, or give one caller the worker to itself.
//!
//! The handles are services without state. They have to be added before the first operation on the
//! device: adding one to a busy worker holds a lock of CubeCL's that its tasks may need. So only
//! the first device of a kind has them, after [`init`](crate::init).

#[cfg(feature = "cuda")]
use core::cell::Cell;
use std::sync::{Arc, OnceLock};

use burn::backend::fusion::get_client;
use burn::tensor::Device;
use burn_backend::cubecl::RuntimeId;
use burn_backend::{
    DeviceHandle, DeviceId, DeviceService, DeviceServiceStage, ServerUtilitiesHandle,
};
use burn_cubecl::{CubeBackend, CubeDevice};
#[cfg(any(feature = "vulkan", feature = "metal", feature = "webgpu"))]
use burn_fp4_cubecl::cubecl::device::{WgpuBackend, WgpuDevice};

use super::device::cube_device;

/// Service on the thread that runs the stream of operations.
struct Operations;

/// Service on the thread that launches kernels.
struct Launches;

/// Handles to the worker threads of one device.
struct DeviceQueues {
    device: DeviceId,
    operations: DeviceHandle<Operations>,
    launches: DeviceHandle<Launches>,
}

static QUEUES: OnceLock<Vec<DeviceQueues>> = OnceLock::new();

impl DeviceService for Operations {
    fn init(_device: DeviceId) -> Self {
        Self
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        Arc::new(())
    }

    fn stage() -> DeviceServiceStage {
        DeviceServiceStage::Upstream
    }
}

impl DeviceService for Launches {
    fn init(_device: DeviceId) -> Self {
        Self
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        Arc::new(())
    }
}

/// Adds the services; has to come before any operation on a Cube device.
pub(crate) fn register() {
    QUEUES.get_or_init(|| {
        let devices = [
            #[cfg(feature = "cuda")]
            CubeDevice::Cuda(Default::default()),
            #[cfg(feature = "cpu")]
            CubeDevice::Cpu(Default::default()),
            #[cfg(feature = "wgpu")]
            CubeDevice::Wgpu(Default::default()),
            #[cfg(feature = "vulkan")]
            CubeDevice::Wgpu(WgpuDevice::default().on(WgpuBackend::Vulkan)),
            #[cfg(feature = "metal")]
            CubeDevice::Wgpu(WgpuDevice::default().on(WgpuBackend::Metal)),
            #[cfg(feature = "webgpu")]
            CubeDevice::Wgpu(WgpuDevice::default().on(WgpuBackend::WebGpu)),
        ];
        let handles = |device: CubeDevice| {
            let device = device.to_id();
            let operations = DeviceHandle::new(device);
            // Runtimes know their devices without the runtime's name.
            let launches = DeviceHandle::new(RuntimeId::strip(device));
            DeviceQueues { device, operations, launches }
        };
        devices.into_iter().map(handles).collect()
    });
}

/// Returns true if the queues of the device are registered.
pub(super) fn is_registered(device: &CubeDevice) -> bool {
    queues(device).is_some()
}

fn queues(device: &CubeDevice) -> Option<&'static DeviceQueues> {
    let device = device.to_id();
    QUEUES.get()?.iter().find(|queues| queues.device == device)
}

/// Flushes this thread's pending operations, so that none is fused with an operation that follows.
/// Does not wait for them if the device's queues are registered.
pub(crate) fn flush(device: &Device) {
    submit_with_sync(device, |sync| sync());
}

/// Submits a task to the thread that runs the stream of operations, if the device's queues are
/// registered. `sync` flushes this thread's pending operations; without queues they are flushed at
/// once, and the task is dropped.
pub(crate) fn submit_with_sync(device: &Device, task: impl FnOnce(&dyn Fn()) + Send + 'static) {
    let Some(device) = cube_device(device) else { return };
    let stream = get_client::<CubeBackend>(&device);
    // An error here comes again where the results are read, which can report it.
    let sync = move || drop(stream.try_sync(|| ()));
    match queues(&device) {
        Some(queues) => {
            queues.operations.submit(move |_| task(&sync));
            queues.operations.flush_queue();
        }
        None => sync(),
    }
}

/// Hands the queued operations to their worker thread now.
pub(crate) fn submit_operations(device: &Device) {
    if let Some(queues) = cube_device(device).as_ref().and_then(queues) {
        queues.operations.flush_queue();
    }
}

/// Hands the queued launches to their worker thread now.
pub(crate) fn submit_launches(device: &CubeDevice) {
    if let Some(queues) = queues(device) {
        queues.launches.flush_queue();
    }
}

/// Lets the thread that launches allocate, free, load kernels and wait while it captures one of its
/// streams.
///
/// # Errors
/// The driver's error.
#[cfg(feature = "cuda")]
pub(super) fn relax_launches(device: &CubeDevice) -> Result<(), String> {
    let queues = queues(device).ok_or(NOT_REGISTERED)?;
    match queues.launches.submit_blocking(|_| relax_captures()) {
        Ok(relaxed) => relaxed.map_err(|error| error.to_string()),
        Err(error) => Err(format!("{error:?}")),
    }
}

/// Lets this thread wait for results of a CUDA device while another thread captures a graph. The
/// mode stays, since the thread waits in calls of Burn that nothing of ours surrounds. The
/// documentation of `Replay` says so for users who capture graphs themselves.
pub(crate) fn relax_this_thread(device: &Device) {
    #[cfg(feature = "cuda")]
    {
        thread_local! {
            static RELAXED: Cell<bool> = const { Cell::new(false) };
        }
        if !RELAXED.get() && matches!(cube_device(device), Some(CubeDevice::Cuda(_))) {
            // Fails before the driver is loaded, when there is nothing to wait for: tried again at
            // the next call.
            RELAXED.set(relax_captures().is_ok());
        }
    }
    #[cfg(not(feature = "cuda"))]
    let _ = device;
}

/// Exempts this thread from the restrictions of a capture.
///
/// CubeCL begins a capture in the driver's global mode: calls of any thread that may wait for a
/// device, allocate or load then fail, and void the capture. A thread whose own mode is relaxed may
/// make them (`cuThreadExchangeStreamCaptureMode` in the CUDA driver API).
#[cfg(feature = "cuda")]
fn relax_captures() -> Result<(), cudarc::driver::DriverError> {
    use cudarc::driver::sys::{CUstreamCaptureMode, cuThreadExchangeStreamCaptureMode};

    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the driver writes the thread's former mode to `mode`, which outlives the call.
    unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) }.result()
}

const NOT_REGISTERED: &str =
    "the device has no queues; call burn_fp4::init() at the start of the program";

/// Runs a task on the thread that runs the stream of operations, with no operation of another
/// thread in between.
///
/// # Errors
/// The reason why the task did not end: the queues are not registered, or it panicked.
pub(super) fn run_exclusive<R: Send>(
    device: &CubeDevice,
    task: impl FnOnce() -> R + Send,
) -> Result<R, String> {
    let queues = queues(device).ok_or(NOT_REGISTERED)?;
    queues
        .operations
        .exclusive(task)
        .map_err(|error| error.message().map_or_else(|| format!("{error:?}"), str::to_string))
}
