//! [`GraphState`]: tensors that are carried from replay to replay.

use std::collections::HashMap;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::backend::fusion::custom::StreamId;
use burn::backend::fusion::get_client;
use burn::tensor::Device;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fp4_cubecl::cubecl::server::Handle;

use super::super::device::copy;
use super::super::queues;
use super::constants::Constants;
use super::memory::{
    MemoryRange, copy_of_memory, fused_on, launch_on, memory_range, not_captured, register,
    resolve, resolve_all, to_this_stream,
};
use crate::error::OpsError;

/// Tensors that replays of a [`CapturedGraph`](crate::CapturedGraph) carry from one to the next.
/// They stay in their memory.
#[derive(Debug)]
pub struct GraphState {
    pub(super) device: CubeDevice,
    /// Contiguous, with no other owner.
    pub(super) tensors: Vec<CubeTensor>,
    /// Captures and replays, so that replays happen one after the other.
    pub(super) stream: StreamId,
    mixed: bool,
    /// Copies in memory of the stream, by the memory they were copied from.
    gathered: HashMap<MemoryRange, Handle>,
    /// Copies of tensors that passes read, for as long as there may be graphs of them.
    pub(super) constants: Constants,
    /// The stream whose queue has the latest replay.
    pub(super) latest: StreamId,
    /// Identifies the memory of the tensors: a graph captured on other memory is void.
    pub(super) memory: Arc<()>,
}

impl GraphState {
    /// Copies tensors to a device that [`captures_graphs`](crate::captures_graphs), for passes that
    /// read these weights.
    ///
    /// CubeCL gives each thread its own stream and memory pool. The stream that owns most of the
    /// weights' bytes captures, whichever thread calls. A capture reads memory of that stream
    /// alone: other weights have to be [gathered](Self::gather).
    ///
    /// # Errors
    /// [`OpsError::Capture`] if a tensor is on another device, or the device captures no passes.
    pub fn new(
        device: &Device,
        weights: Vec<DispatchTensor>,
        tensors: Vec<DispatchTensor>,
    ) -> Result<Self, OpsError> {
        let burn::backend::DispatchDevice::Cube(cube) = device.as_dispatch() else {
            let reason = format!("{device:?} captures no passes; use a CUDA or wgpu device");
            return Err(not_captured(reason));
        };
        queues::relax_this_thread(device);
        let device = cube;
        let latest = StreamId::current();
        let (stream, mixed) = stream_of(device, weights).unwrap_or((latest, false));
        let sources = resolve_all(device, tensors)?;
        let tensors = match sources.is_empty() {
            true => Vec::new(),
            false => launch_on(device, stream, || sources.iter().map(copy).collect())?,
        };
        let (gathered, constants) = (HashMap::new(), Constants::default());
        let (device, memory) = (device.clone(), Arc::new(()));
        Ok(Self { device, tensors, stream, mixed, gathered, constants, latest, memory })
    }

    /// Returns true if some weights are in memory of another stream than the one that captures.
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        self.mixed
    }

    /// Copies a tensor, with its layout, to memory of the stream that captures. Returns `None` if
    /// it is there already, or cannot be captured: on another device, differentiated, or quantized
    /// by Burn. Tensors that share memory share the copy, which lives as long as the state.
    ///
    /// # Errors
    /// [`OpsError::Device`] if the tensor could not be computed; [`OpsError::Capture`] if the
    /// device captures no passes.
    pub fn gather(&mut self, tensor: DispatchTensor) -> Result<Option<DispatchTensor>, OpsError> {
        let autodiff = tensor.autodiff;
        let Ok(tensor) = fused_on(&self.device, tensor) else { return Ok(None) };
        let source = resolve(tensor)?;
        if source.handle.stream == self.stream {
            return Ok(None);
        }
        let range = memory_range(&source);
        let handle = match self.gathered.get(&range).cloned() {
            Some(handle) => handle,
            None => {
                let launch = || copy_of_memory(&source);
                let handle = launch_on(&self.device, self.stream, launch)?;
                self.gathered.insert(range, handle.clone());
                handle
            }
        };
        let copied = vec![CubeTensor { handle, ..source }];
        let registered = self.stream.executes(|| register(&self.device, copied)).pop();
        Ok(registered.map(|tensor| DispatchTensor { autodiff, ..tensor }))
    }

    /// Returns true if there are no tensors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Copies the tensors as they are after all replays so far.
    pub fn read(&mut self) -> Vec<DispatchTensor> {
        if self.is_empty() {
            return Vec::new();
        }
        self.wait_for_other_queues();
        let copies = launch_on(&self.device, StreamId::current(), || {
            let copies = self.stream.executes(|| self.tensors.iter().map(copy).collect());
            to_this_stream(copies, self.stream)
        });
        register(&self.device, copies.expect("copied as when it was made"))
    }

    /// Waits for the replays in the queue of another thread, so that they come before the next
    /// operation of this thread.
    pub(super) fn wait_for_other_queues(&mut self) {
        let current = StreamId::current();
        for queue in [core::mem::replace(&mut self.latest, current), current] {
            queue.executes(|| get_client::<CubeBackend>(&self.device).sync(|| ()));
        }
    }
}

/// Returns the stream that owns most bytes of these tensors, and true if another one owns some.
fn stream_of(device: &CubeDevice, tensors: Vec<DispatchTensor>) -> Option<(StreamId, bool)> {
    let mut bytes = HashMap::<StreamId, u64>::new();
    for tensor in tensors {
        if let Ok(found) = resolve_all(device, vec![tensor]) {
            let handles = found.iter().map(|tensor| &tensor.handle);
            handles.for_each(|handle| *bytes.entry(handle.stream).or_default() += handle.size());
        }
    }
    let mixed = bytes.len() > 1;
    bytes.into_iter().max_by_key(|&(_, bytes)| bytes).map(|(stream, _)| (stream, mixed))
}
