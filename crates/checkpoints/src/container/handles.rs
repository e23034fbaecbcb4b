//! Handles of the files that tensors are read from: one set for all readers of a container, of
//! which a fixed number are open at most, however many files there are.

use std::collections::VecDeque;
use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError};

/// Most files that are open at a time, not counting files that are just being read.
const MOST: usize = 16;

/// Open files by their places, the last used first.
#[derive(Debug, Default)]
pub(super) struct Handles(Mutex<VecDeque<(usize, Arc<File>)>>);

impl Handles {
    /// The handle of a file, which is opened if it is not.
    pub(super) fn get<E>(
        &self,
        file: usize,
        open: impl FnOnce() -> Result<File, E>,
    ) -> Result<Arc<File>, E> {
        let mut handles = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = handles.iter().position(|(at, _)| *at == file);
        let known = known.and_then(|place| handles.remove(place));
        let (_, handle) = match known {
            Some(known) => known,
            None => (file, Arc::new(open()?)),
        };
        handles.truncate(MOST - 1);
        handles.push_front((file, Arc::clone(&handle)));
        Ok(handle)
    }
}
