//! A semaphore over bytes of memory: [`Budget::take`] blocks until enough bytes are released.

use std::sync::{Condvar, Mutex, PoisonError};

/// Bytes that may be taken.
pub(super) struct Budget {
    free: Mutex<u64>,
    given_back: Condvar,
}

/// Bytes that are taken, until this is dropped.
pub(super) struct Taken<'b> {
    budget: &'b Budget,
    bytes: u64,
}

impl Budget {
    pub(super) fn new(bytes: u64) -> Self {
        Self { free: Mutex::new(bytes), given_back: Condvar::new() }
    }

    /// Waits until the bytes are free, and takes them. More than the whole budget would wait
    /// forever.
    pub(super) fn take(&self, bytes: u64) -> Taken<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free < bytes {
            free = self.given_back.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= bytes;
        Taken { budget: self, bytes }
    }
}

impl Taken<'_> {
    /// Gives back all but this number of bytes.
    pub(super) fn keep(&mut self, bytes: u64) {
        let less = self.bytes.saturating_sub(bytes);
        self.bytes -= less;
        *self.budget.free.lock().unwrap_or_else(PoisonError::into_inner) += less;
        self.budget.given_back.notify_all();
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.keep(0);
    }
}
