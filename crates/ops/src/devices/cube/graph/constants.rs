//! Tensors that a pass reads and that are neither parameters nor arguments: [`readable`].

use core::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::fusion::custom::StreamId;
use burn::backend::{DispatchDevice, DispatchTensor, TensorMetadata};
use burn::module::ParamId;

use super::super::device::copy;
use super::capture::in_first_run;
use super::memory::{fused_on, register, resolve};

/// Tensors in memory of a stream, by the modules that have them.
#[derive(Debug, Clone, Default)]
pub(super) struct Constants {
    copies: Arc<Mutex<HashMap<ParamId, Vec<DispatchTensor>>>>,
}

thread_local! {
    /// The copies that the pass reads which this thread runs.
    static CURRENT: RefCell<Option<Constants>> = const { RefCell::new(None) };
}

impl Constants {
    /// Runs a pass that reads these copies. The runs of a capture are on several threads.
    pub(super) fn during<R>(&self, pass: impl FnOnce() -> R) -> R {
        struct Restore(Option<Constants>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _restore = Restore(CURRENT.replace(Some(self.clone())));
        pass()
    }

    /// Returns the copies of the tensors of a module. Only the first run of a pass makes them: the
    /// device may not wait later.
    fn of<const N: usize>(&self, id: ParamId, tensors: [DispatchTensor; N]) -> [DispatchTensor; N] {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        match copies.entry(id) {
            Entry::Occupied(known) => core::array::from_fn(|at| known.get()[at].clone()),
            Entry::Vacant(place) if in_first_run() => {
                let found = tensors.map(in_this_stream);
                place.insert(found.to_vec());
                found
            }
            Entry::Vacant(_) => tensors,
        }
    }
}

/// Returns a tensor in memory of the stream of this thread: itself if it is there already, or
/// cannot be computed.
fn in_this_stream(tensor: DispatchTensor) -> DispatchTensor {
    let DispatchDevice::Cube(device) = tensor.device() else { return tensor };
    match fused_on(&device, tensor.clone()).and_then(resolve) {
        Ok(source) if source.handle.stream != StreamId::current() => {
            register(&device, vec![copy(&source)]).pop().unwrap_or(tensor)
        }
        _ => tensor,
    }
}

/// Returns plain tensors of a module in memory that a capture may read: copies, in a pass that is
/// captured on another stream than the one that made them. Whoever captures a pass can copy its
/// parameters, but does not see other tensors. `id` tells the values of the module from others: a
/// tensor has another id for each thread that clones it.
pub(crate) fn readable<const N: usize>(
    id: ParamId,
    tensors: [DispatchTensor; N],
) -> [DispatchTensor; N] {
    match CURRENT.with_borrow(Clone::clone) {
        Some(constants) => constants.of(id, tensors),
        None => tensors,
    }
}
