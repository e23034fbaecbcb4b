//! The threads that a device's work goes through: tasks for them, and when they begin.
//!
//! Burn's operations wait in a queue of tasks for the thread that runs the stream of operations of
//! their device, its launches in another one for the thread that talks to the device. Either thread
//! begins with what waits when its queue is full or somebody waits for an answer, whichever is
//! first.
//!
//! A service without state is what reaches such a thread. It has to be there before the device is
//! used: to add one to a busy thread holds a lock of CubeCL's that its tasks may need. So only the
//! first device of a kind has it, after [`init`](crate::init).

#[cfg(feature = "cuda")]
use core::cell::Cell;
use std::sync::{Arc, OnceLock};

use burn::backend::fusion::get_client;
use burn_backend::cubecl::RuntimeId;
use burn_backend::{
    DeviceHandle, DeviceId, DeviceService, DeviceServiceStage, ServerUtilitiesHandle,
};
use burn_cubecl::{CubeBackend, CubeDevice};

/// On the thread that runs the stream of operations.
struct Operations;

/// On the thread that launches.
struct Launching;

/// What reaches the threads of a device.
struct Lane {
    device: DeviceId,
    operations: DeviceHandle<Operations>,
    launching: DeviceHandle<Launching>,
}

static LANES: OnceLock<Vec<Lane>> = OnceLock::new();

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

impl DeviceService for Launching {
    fn init(_device: DeviceId) -> Self {
        Self
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        Arc::new(())
    }
}

/// Before any operation on a Cube device.
pub(crate) fn open() {
    LANES.get_or_init(|| {
        let devices = [
            #[cfg(feature = "cuda")]
            CubeDevice::Cuda(Default::default()),
            #[cfg(feature = "cpu")]
            CubeDevice::Cpu(Default::default()),
        ];
        let open = |device: CubeDevice| {
            let device = device.to_id();
            let operations = DeviceHandle::new(device);
            // Runtimes know their devices without their own name.
            Lane { device, operations, launching: DeviceHandle::new(RuntimeId::strip(device)) }
        };
        devices.into_iter().map(open).collect()
    });
}

/// Whether there is one.
pub(super) fn is_open(device: &CubeDevice) -> bool {
    lane(device).is_some()
}

fn lane(device: &CubeDevice) -> Option<&'static Lane> {
    let device = device.to_id();
    LANES.get()?.iter().find(|lane| lane.device == device)
}

/// Has the operations that wait in the stream of this thread run before those that follow. Where
/// there is a lane it does not wait for that.
pub(crate) fn drain(device: &CubeDevice) {
    let stream = get_client::<CubeBackend>(device);
    // What fails here fails again where its results are read, which can say so.
    match lane(device) {
        Some(lane) => {
            lane.operations.submit(move |_| drop(stream.try_sync(|| ())));
            lane.operations.flush_queue();
        }
        None => drop(stream.try_sync(|| ())),
    }
}

/// Has the thread that runs the stream of operations begin with what waits for it.
pub(crate) fn run_now(device: &CubeDevice) {
    if let Some(lane) = lane(device) {
        lane.operations.flush_queue();
    }
}

/// Has the thread that launches begin with what waits for it.
pub(crate) fn launch_now(device: &CubeDevice) {
    if let Some(lane) = lane(device) {
        lane.launching.flush_queue();
    }
}

/// Lets the thread that launches allocate, free, load kernels and wait while it records one of its
/// streams.
///
/// # Errors
/// The driver's error.
#[cfg(feature = "cuda")]
pub(super) fn relax_launching(device: &CubeDevice) -> Result<(), String> {
    let lane = lane(device).ok_or("there is no lane")?;
    match lane.launching.submit_blocking(|_| relax_captures()) {
        Ok(relaxed) => relaxed.map_err(|error| error.to_string()),
        Err(error) => Err(format!("{error:?}")),
    }
}

/// Lets this thread wait for results while another one records, from now on: it waits in calls of
/// Burn that nothing here stands around, so the mode cannot be given back. The documentation of
/// `Replay` tells users who capture graphs themselves.
#[cfg(feature = "cuda")]
pub(crate) fn relax_this_thread(device: &CubeDevice) {
    thread_local! {
        static RELAXED: Cell<bool> = const { Cell::new(false) };
    }
    if matches!(device, CubeDevice::Cuda(_)) && !RELAXED.get() {
        // Before the driver has begun there is nothing to wait for: it is tried again.
        RELAXED.set(relax_captures().is_ok());
    }
}

/// Exempts this thread from what a capture forbids.
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

/// Runs a task on the thread that runs the stream of operations, so that those of no other thread
/// come in between.
///
/// # Errors
/// Why the task did not end: there is no lane, or it panicked.
pub(super) fn alone<R: Send>(
    device: &CubeDevice,
    task: impl FnOnce() -> R + Send,
) -> Result<R, String> {
    let lane = lane(device).ok_or("there is no lane")?;
    lane.operations
        .exclusive(task)
        .map_err(|error| error.message().map_or_else(|| format!("{error:?}"), str::to_string))
}
