//! A thread that flushes written bytes to the disk, and then notes them as done, while more are
//! written.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::{Builder, JoinHandle};

use super::journal::Journal;
use crate::error::CheckpointError;

/// Files, bytes and weights that were written since the last batch.
#[derive(Default)]
pub(super) struct Batch {
    /// The files that were written to, by their places in the plan: the handles that were written
    /// by, as errors of writing come to them.
    pub(super) files: BTreeMap<usize, (PathBuf, File)>,
    /// Lines for the weights that are whole.
    pub(super) lines: String,
    pub(super) bytes: u64,
}

/// A thread, once there is something to do, and the journal.
pub(super) struct Flusher {
    running: Option<(SyncSender<Batch>, Thread)>,
    journal: Option<Journal>,
}

type Thread = JoinHandle<(Journal, Result<(), CheckpointError>)>;

impl Flusher {
    pub(super) fn new(journal: Journal) -> Self {
        Self { running: None, journal: Some(journal) }
    }

    /// Takes a batch, unless it is at work with another and the caller does not want to wait;
    /// returns what it did not take.
    ///
    /// # Errors
    /// Refusals of the file system, of a batch before.
    pub(super) fn take(
        &mut self,
        batch: Batch,
        wait: bool,
    ) -> Result<Option<Batch>, CheckpointError> {
        let starts = self.running.is_none();
        if let Some(journal) = self.journal.take() {
            // No batch lies between: the thread takes one when it has done with the one before.
            let (sender, batches) = sync_channel::<Batch>(0);
            let path = journal.path().to_owned();
            let flush = move || {
                let mut journal = journal;
                let done = batches.iter().try_for_each(|batch| flush(&batch, &mut journal));
                (journal, done)
            };
            let thread = Builder::new().spawn(flush).map_err(CheckpointError::io(&path))?;
            self.running = Some((sender, thread));
        }
        let Some((sender, _)) = &self.running else { return Ok(Some(batch)) };
        // A thread that was just started takes it as soon as it runs.
        let refused = match wait || starts {
            true => sender.send(batch).err().map(|refused| refused.0),
            false => match sender.try_send(batch) {
                Ok(()) => None,
                Err(TrySendError::Full(batch)) => return Ok(Some(batch)),
                Err(TrySendError::Disconnected(batch)) => Some(batch),
            },
        };
        // A thread that takes nothing more has failed.
        refused.map_or(Ok(None), |batch| self.end().map(|()| Some(batch)))
    }

    /// Waits until it has done with what it took. The journal stays open, and locked.
    ///
    /// # Errors
    /// Refusals of the file system.
    pub(super) fn end(&mut self) -> Result<(), CheckpointError> {
        let Some((sender, thread)) = self.running.take() else { return Ok(()) };
        drop(sender);
        let ended = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        self.journal = Some(ended.0);
        ended.1
    }
}

/// Waits until all of a batch is on the disk, then notes it.
fn flush(batch: &Batch, journal: &mut Journal) -> Result<(), CheckpointError> {
    for (path, file) in batch.files.values() {
        file.sync_data().map_err(CheckpointError::io(path))?;
    }
    match batch.lines.is_empty() {
        true => Ok(()),
        false => journal.add(&batch.lines),
    }
}
