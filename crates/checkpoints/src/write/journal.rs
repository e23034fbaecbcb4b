//! The progress of a write, on the disk: a line for the task, then one for every weight whose bytes
//! are there, with the caller's note on it. A run that was killed is gone on with from it.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write as _};
use std::path::{Path, PathBuf};

use crate::error::CheckpointError;
use crate::system;

/// Its name in the folder.
pub(super) const JOURNAL: &str = "journal";
/// The beginning of every journal.
pub(super) const MARK: &str = "burn-fp4 ";

/// Weights that are done, by their places, with the notes on them.
pub(super) type Notes = BTreeMap<usize, String>;

/// The open journal. Only one process has it.
pub(super) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens the journal of a folder, or makes one; refuses if another process has it.
    pub(super) fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(JOURNAL);
        let io = CheckpointError::io;
        let options = OpenOptions::new().read(true).append(true).create(true).open(&path);
        let file = options.map_err(io(&path))?;
        match file.try_lock() {
            Ok(()) => Ok(Self { path, file }),
            Err(TryLockError::WouldBlock) => Err(CheckpointError::Busy { path: folder.to_owned() }),
            Err(TryLockError::Error(source)) => Err(CheckpointError::Io { path, source }),
        }
    }

    /// Returns true if the journal is still the file that was opened: another process may have
    /// removed the folder before it was locked.
    pub(super) fn is_in_place(&self) -> bool {
        let there = std::fs::symlink_metadata(&self.path).ok();
        let own = self.file.metadata().ok();
        there.zip(own).is_some_and(|(there, own)| system::is_same(&there, &own))
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Forgets all of it.
    pub(super) fn clear(&mut self) -> Result<(), CheckpointError> {
        self.file.set_len(0).map_err(CheckpointError::io(&self.path))
    }

    /// Reads the task, and the weights that are done with the notes on them. A line that a kill cut
    /// off counts as not there.
    pub(super) fn read(&mut self) -> Result<Option<(String, Notes)>, CheckpointError> {
        // Bytes: a task has paths, which a kill may have cut off within a character.
        let mut bytes = Vec::new();
        self.file.read_to_end(&mut bytes).map_err(CheckpointError::io(&self.path))?;
        let kept = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        if kept < bytes.len() {
            // So that the next line does not go on with the torn one.
            self.file.set_len(kept as u64).map_err(CheckpointError::io(&self.path))?;
        }
        let whole = String::from_utf8_lossy(&bytes[..kept]);
        let mut lines = whole.lines();
        let task = lines.next().filter(|task| !task.is_empty()).map(str::to_owned);
        let done = |line: &str| {
            let (at, note) = line.split_once(' ').unwrap_or((line, ""));
            Some((at.parse().ok()?, note.to_owned()))
        };
        Ok(task.map(|task| (task, lines.filter_map(done).collect())))
    }

    /// Adds lines, and waits until they are on the disk.
    pub(super) fn add(&mut self, lines: &str) -> Result<(), CheckpointError> {
        self.file.write_all(lines.as_bytes()).map_err(CheckpointError::io(&self.path))?;
        self.file.sync_data().map_err(CheckpointError::io(&self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_cut_off_within_a_character_is_not_there() {
        let folder = std::env::temp_dir().join(format!("burn-fp4-journal-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("journal");
        let done = Notes::from([(0, "1.5 2".to_owned()), (3, String::new())]);
        for (bytes, expected) in [
            (&b"task: modelle/\xC3"[..], None),
            (&b"task\n0 1.5 2\n3\n1\xC3"[..], Some(("task".to_owned(), done.clone()))),
        ] {
            std::fs::write(&path, bytes).expect("written");
            let found = Journal::open(&folder).and_then(|mut journal| journal.read());
            assert_eq!(found.expect("a journal"), expected);
            let kept = std::fs::read(&path).expect("a file");
            assert_eq!(kept, if expected.is_some() { &b"task\n0 1.5 2\n3\n"[..] } else { b"" });
        }
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
