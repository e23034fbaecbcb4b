//! The operations that a thread has registered since it last ran all before them.
//!
//! A product is found only if no other operation waits in the stream, so a layer with a packed
//! weight runs what waits, before it dequantizes. But the products of a family wait for each other:
//! nothing is run if all that waits is the begin of a family.

use core::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use burn::backend::fusion::observer::{BlockOperations, FusionObservation, FusionObserver};
use burn::backend::ir::OperationIr;
use burn_backend::StreamId;

use super::pattern::Pattern;

/// Threads that may have a family at a time. Others run what waits.
const MAX_THREADS: usize = 64;

thread_local! {
    /// On the thread that runs the stream of operations: what waits, by the thread that registered
    /// it, where all of it is part of one pattern.
    static PENDING: RefCell<HashMap<StreamId, Pattern>> = RefCell::default();
}

static WATCHED: OnceLock<FusionObservation> = OnceLock::new();

/// Watches the operations of all threads from now on.
pub(super) fn watch() {
    WATCHED.get_or_init(|| FusionObservation::new(Arc::new(Watch)));
}

/// Returns true if all that waits is the begin of a family, which another weight may join.
///
/// As [`begin`], it is called on the thread that runs the stream of operations, for the calling
/// thread's stream.
pub(crate) fn awaits_a_weight() -> bool {
    PENDING.with_borrow(|pending| {
        pending.get(&StreamId::current()).is_some_and(Pattern::awaits_a_member)
    })
}

/// Notes that nothing waits.
pub(crate) fn begin() {
    PENDING.with_borrow_mut(|pending| {
        if pending.len() >= MAX_THREADS {
            pending.clear();
        }
        pending.insert(StreamId::current(), Pattern::default());
    });
}

struct Watch;

impl FusionObserver for Watch {
    fn registered(&self, operation: &OperationIr) {
        PENDING.with_borrow_mut(|pending| {
            let stream = StreamId::current();
            let accepted = pending.get_mut(&stream).map(|pattern| pattern.accept(operation));
            if accepted == Some(false) {
                pending.remove(&stream);
            }
        });
    }

    fn block_starts(&self, _block: BlockOperations<'_>) {}

    fn block_ran(&self) {}
}
