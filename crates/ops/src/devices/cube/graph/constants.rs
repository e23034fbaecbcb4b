//! Tensors that a pass reads and that are neither parameters nor arguments: [`readable`].

use core::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::fusion::custom::StreamId;
use burn::backend::{DispatchDevice, DispatchTensor, TensorMetadata};
use burn::module::ParamId;

use super::super::device::copy;
use super::memory::{fused_on, register, resolve};

/// Tensors in memory of a stream, by the modules that have them.
#[derive(Debug, Clone, Default)]
pub(super) struct Constants {
    copies: Arc<Mutex<HashMap<ParamId, Vec<DispatchTensor>>>>,
}

/// A run of a pass that is being captured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Run {
    /// Compiles and tunes.
    First,
    /// Takes memory as the capture does, or is captured.
    Later,
}

thread_local! {
    /// The run of this thread, and the copies that it reads.
    static CURRENT: RefCell<Option<(Run, Constants)>> = const { RefCell::new(None) };
}

/// Returns true within a pass that is being captured.
pub(super) fn in_pass() -> bool {
    CURRENT.with_borrow(Option::is_some)
}

impl Constants {
    /// Runs a pass that reads these copies. The runs of a capture are on several threads.
    pub(super) fn during<R>(&self, run: Run, pass: impl FnOnce() -> R) -> R {
        struct Restore(Option<(Run, Constants)>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _restore = Restore(CURRENT.replace(Some((run, self.clone()))));
        pass()
    }

    /// Returns the copies of the tensors of a module. Only the first run of a pass makes them: the
    /// device may not wait later.
    fn of<const N: usize>(
        &self,
        run: Run,
        id: ParamId,
        tensors: [DispatchTensor; N],
    ) -> [DispatchTensor; N] {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        match copies.entry(id) {
            Entry::Occupied(known) => core::array::from_fn(|at| known.get()[at].clone()),
            Entry::Vacant(place) if run == Run::First => {
                let copied = tensors.each_ref().map(|tensor| in_this_stream(tensor.clone()));
                let any = copied.iter().any(Option::is_some);
                let mut copied = copied.into_iter();
                let found = tensors.map(|tensor| copied.next().flatten().unwrap_or(tensor));
                if any {
                    place.insert(found.to_vec());
                }
                found
            }
            Entry::Vacant(_) => tensors,
        }
    }
}

/// Copies a tensor to memory of the stream of this thread. Returns none if it is there already, or
/// cannot be captured.
fn in_this_stream(tensor: DispatchTensor) -> Option<DispatchTensor> {
    let DispatchDevice::Cube(device) = tensor.device() else { return None };
    let source = fused_on(&device, tensor).and_then(resolve).ok()?;
    let is_own = source.handle.stream == StreamId::current();
    if is_own { None } else { register(&device, vec![copy(&source)]).pop() }
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
        Some((run, constants)) => constants.of(run, id, tensors),
        None => tensors,
    }
}
