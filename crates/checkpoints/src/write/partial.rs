//! The folder next to the target in which a write grows: whose it is, and who has it.

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::Path;

use super::journal::{JOURNAL, Journal, MARK};
use crate::error::CheckpointError;

/// The folder that becomes the target, or has the file that does.
pub(super) const FILES: &str = "files";

/// Number of times that a folder is found to have been removed by another process, between two
/// looks at it, before that counts as a process that is writing.
const TRIES: usize = 100;

/// Makes the folder, or takes the one that an earlier run has left, and locks its journal.
///
/// Until the journal is dropped no other process has the folder.
///
/// # Errors
/// [`CheckpointError::ForeignFiles`], [`CheckpointError::Busy`], and what the file system refuses.
pub(super) fn claim(path: &Path) -> Result<Journal, CheckpointError> {
    for _ in 0..TRIES {
        match fs::create_dir(path) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(source) => return Err(CheckpointError::Io { path: path.to_owned(), source }),
        }
        // Whoever had the folder may remove it at any time before it is locked.
        let journal = check_ours(path).and_then(|()| Journal::open(path));
        match journal {
            Ok(journal) if journal.is_in_place() => return Ok(journal),
            Ok(_) => {}
            Err(CheckpointError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Err(CheckpointError::Busy { path: path.to_owned() })
}

/// Checks that a folder that may be removed is our own: it is empty, or has a journal, and files at
/// most.
fn check_ours(path: &Path) -> Result<(), CheckpointError> {
    let io = CheckpointError::io;
    let foreign = || CheckpointError::ForeignFiles { path: path.to_owned() };
    if !fs::symlink_metadata(path).map_err(io(path))?.is_dir() {
        return Err(foreign());
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(io(path))? {
        names.push(entry.map_err(io(path))?.file_name());
    }
    if names.is_empty() {
        return Ok(());
    }
    let has = |name: &str| names.iter().any(|found| *found == *name);
    if !has(JOURNAL) || names.len() > 1 + usize::from(has(FILES)) {
        return Err(foreign());
    }
    let journal = path.join(JOURNAL);
    if !fs::symlink_metadata(&journal).map_err(io(&journal))?.is_file() {
        return Err(foreign());
    }
    // A kill may have cut off even its first words.
    let mut begin = Vec::new();
    let file = fs::File::open(&journal).map_err(io(&journal))?;
    file.take(MARK.len() as u64).read_to_end(&mut begin).map_err(io(&journal))?;
    if MARK.as_bytes().starts_with(&begin) { Ok(()) } else { Err(foreign()) }
}

/// Removes the folder, whose journal is still locked. What cannot be removed stays, under a name
/// that says what it is.
pub(super) fn remove(path: &Path) {
    let _ = fs::remove_dir_all(path.join(FILES));
    let _ = fs::remove_file(path.join(JOURNAL));
    let _ = fs::remove_dir(path);
}
