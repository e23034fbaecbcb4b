//! Asks the operating system to read the weights of coming jobs into its page cache
//! (`posix_fadvise`). The page cache does not count toward `--memory`.

use std::sync::{Condvar, Mutex, PoisonError};

use burn_fp4_checkpoints::{Model, Reader};

use super::jobs::Job;

/// Bytes between what is read and what the system is told about.
const WINDOW: u64 = 1 << 30;
/// Bytes it is told about at a time.
const PIECE: usize = 8 << 20;

/// The position of the readers, which bounds how far ahead of them the system is advised.
#[derive(Default)]
pub(super) struct Readahead {
    progress: Mutex<ReadProgress>,
    changed: Condvar,
}

#[derive(Default)]
struct ReadProgress {
    /// Bytes of jobs that are being read, or were.
    read: u64,
    stopped: bool,
}

/// Stops the advice when it is dropped, however the work ends.
pub(super) struct StopOnDrop<'a>(pub(super) &'a Readahead);

impl Readahead {
    /// Says that a job of this number of bytes is being read.
    pub(super) fn advance(&self, bytes: u64) {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).read += bytes;
        self.changed.notify_all();
    }

    /// Advises the system about the jobs, in their order.
    pub(super) fn advise<'j>(
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
                let progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
                let far = |now: &mut ReadProgress| !now.stopped && told > now.read + WINDOW;
                let waited = self.changed.wait_while(progress, far);
                let progress = waited.unwrap_or_else(PoisonError::into_inner);
                let (stopped, late) = (progress.stopped, told <= progress.read);
                drop(progress);
                if stopped {
                    return;
                }
                if !late {
                    reader.will_read(piece);
                }
            }
        }
    }
}

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.progress.lock().unwrap_or_else(PoisonError::into_inner).stopped = true;
        self.0.changed.notify_all();
    }
}
