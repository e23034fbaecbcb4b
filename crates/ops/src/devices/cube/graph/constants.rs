//! [`Constants`]: tensors that a pass reads and that are neither parameters nor arguments.

use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::fusion::custom::StreamId;
use burn::backend::{DispatchDevice, DispatchTensor, TensorMetadata};
use burn_cubecl::CubeDevice;

use super::super::device::copy;
use super::capture::in_pass;
use super::memory::{fused_on, register, resolve};
use crate::error::OpsError;

/// Copies of the plain tensors of a module, for each stream that captures a pass with them. Who
/// captures a pass can copy parameters, but does not see other tensors.
#[derive(Debug, Clone, Default)]
pub(crate) struct Constants {
    copies: Arc<Mutex<Vec<Copies>>>,
}

#[derive(Debug)]
struct Copies {
    device: CubeDevice,
    stream: StreamId,
    tensors: Vec<DispatchTensor>,
}

impl Constants {
    /// Returns the tensors in memory that a capture may read. In a pass that is captured they are
    /// copied to its stream by the first run, which is not recorded. Elsewhere they stay where they
    /// are, and so do tensors that cannot be captured.
    pub(crate) fn of<const N: usize>(&self, tensors: [DispatchTensor; N]) -> [DispatchTensor; N] {
        let device = match tensors.first().map(TensorMetadata::device) {
            Some(DispatchDevice::Cube(device)) if in_pass() => device,
            _ => return tensors,
        };
        let stream = StreamId::current();
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let known = copies.iter().find(|known| known.stream == stream && known.device == device);
        if let Some(Copies { tensors, .. }) = known {
            return core::array::from_fn(|at| tensors[at].clone());
        }
        let own = tensors.clone().map(|tensor| in_this_stream(&device, tensor));
        let Some(found) = own.into_iter().collect::<Result<Vec<_>, _>>().ok() else {
            return tensors;
        };
        let own = core::array::from_fn(|at| found[at].clone());
        copies.push(Copies { device, stream, tensors: found });
        own
    }
}

/// Returns a tensor in memory of the stream of this thread.
fn in_this_stream(device: &CubeDevice, tensor: DispatchTensor) -> Result<DispatchTensor, OpsError> {
    let source = resolve(fused_on(device, tensor)?)?;
    let own = if source.handle.stream == StreamId::current() { source } else { copy(&source) };
    Ok(register(device, vec![own]).remove(0))
}
