//! The system reads into its cache what will be needed soon, while other things are done: pages
//! there are no memory of this program.

use std::sync::{Condvar, Mutex, PoisonError};

use burn_fp4_checkpoints::{Model, Reader};

use super::jobs::Job;

/// Bytes between what is read and what the system is told about.
const WINDOW: u64 = 1 << 30;
/// Bytes it is told about at a time.
const PIECE: usize = 8 << 20;

/// The bytes by which the system is ahead of the readers.
#[derive(Default)]
pub(super) struct Ahead {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bytes of jobs that are being read, or were.
    read: u64,
    ended: bool,
}

/// Ends the looking ahead when it is dropped, however the work ends.
pub(super) struct Ends<'a>(pub(super) &'a Ahead);

impl Ahead {
    /// Says that a job of this number of bytes is being read.
    pub(super) fn passed(&self, bytes: u64) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).read += bytes;
        self.changed.notify_all();
    }

    /// Tells the system about the jobs, in their order.
    pub(super) fn look<'j>(
        &self,
        model: &Model<'_>,
        jobs: impl Iterator<Item = &'j Job>,
        reader: &Reader<'_>,
    ) {
        let weights = jobs.flat_map(|job| job.weights.iter().map(|&at| &model.weights[at]));
        let mut told = 0;
        for weight in weights {
            for piece in Reader::regions(weight).into_iter().flat_map(|part| part.chunks(PIECE)) {
                told += piece.len() as u64;
                let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                let far = |state: &mut State| !state.ended && told > state.read + WINDOW;
                let waited = self.changed.wait_while(state, far);
                let state = waited.unwrap_or_else(PoisonError::into_inner);
                let (ended, late) = (state.ended, told <= state.read);
                drop(state);
                if ended {
                    return;
                }
                if !late {
                    reader.will_read(piece);
                }
            }
        }
    }
}

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).ended = true;
        self.0.changed.notify_all();
    }
}
