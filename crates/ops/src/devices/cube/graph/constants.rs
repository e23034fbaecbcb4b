//! Tensors that a pass reads and that are neither parameters nor arguments: [`readable`].

use core::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::fusion::custom::{StreamId, TensorId};
use burn::backend::{DispatchDevice, DispatchTensor, TensorMetadata};
use burn_cubecl::CubeDevice;

use super::super::device::copy;
use super::capture::in_first_run;
use super::memory::{Fused, fused_on, register, resolve};

/// Copies in memory of a stream, by the tensors that they were made of.
#[derive(Debug, Clone, Default)]
pub(super) struct Constants {
    copies: Arc<Mutex<HashMap<TensorId, DispatchTensor>>>,
}

thread_local! {
    /// The copies that the pass reads which this thread captures.
    static CURRENT: RefCell<Option<Constants>> = const { RefCell::new(None) };
}

impl Constants {
    /// Runs a task, all of whose passes read these copies.
    pub(super) fn during<R>(&self, task: impl FnOnce() -> R) -> R {
        struct Restore(Option<Constants>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _restore = Restore(CURRENT.replace(Some(self.clone())));
        task()
    }

    /// Returns the copy of a tensor. Only the first run of a pass makes one: the device may not
    /// wait later.
    fn copy_of(&self, tensor: DispatchTensor) -> DispatchTensor {
        let DispatchDevice::Cube(device) = tensor.device() else { return tensor };
        let Ok(fused) = fused_on(&device, tensor.clone()) else { return tensor };
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        match copies.entry(fused.id) {
            Entry::Occupied(copy) => copy.get().clone(),
            Entry::Vacant(place) => {
                match in_first_run().then(|| in_this_stream(&device, fused)).flatten() {
                    Some(copy) => place.insert(copy).clone(),
                    None => tensor,
                }
            }
        }
    }
}

/// Copies a tensor to memory of the stream of this thread. Returns `None` if it is there already,
/// or cannot be computed.
fn in_this_stream(device: &CubeDevice, tensor: Fused) -> Option<DispatchTensor> {
    let source = resolve(tensor).ok()?;
    let is_own = source.handle.stream == StreamId::current();
    if is_own { None } else { register(device, vec![copy(&source)]).pop() }
}

/// Returns plain tensors of a module in memory that a capture may read: copies, in a pass that is
/// captured on another stream than the one that made them. Whoever captures a pass can copy its
/// parameters, but does not see other tensors.
pub(crate) fn readable<const N: usize>(tensors: [DispatchTensor; N]) -> [DispatchTensor; N] {
    match CURRENT.with_borrow(Clone::clone) {
        Some(constants) => tensors.map(|tensor| constants.copy_of(tensor)),
        None => tensors,
    }
}
