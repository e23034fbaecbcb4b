//! Files: mapped into memory, or read with a bound.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use memmap2::Mmap;

use crate::error::CheckpointError;

/// Most bytes that a JSON text (header, index, config) may have; the limit of safetensors.
pub(super) const MAX_TEXT: u64 = 100_000_000;
/// The expectation that a longer text breaks.
pub(super) const TOO_LONG: &str = "a text of at most 100,000,000 bytes";

/// A file in memory. The pages are read when they are touched.
#[derive(Debug)]
pub(crate) struct Mapped(Mmap);

impl Mapped {
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        // Asked before it is opened: opening a pipe would wait for who writes to it.
        if !std::fs::metadata(path).map_err(CheckpointError::io(path))?.is_file() {
            let (path, expected) = (path.to_owned(), "a file, found a folder or a device");
            return Err(CheckpointError::NotACheckpoint { path, expected });
        }
        let file = File::open(path).map_err(CheckpointError::io(path))?;
        // SAFETY: the map is only read. That the file keeps its length and bytes while it is
        // mapped is asked of the caller, in the documentation of `Container::open`.
        let map = unsafe { Mmap::map(&file) }.map_err(CheckpointError::io(path))?;
        Ok(Self(map))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Reads a text of at most [`MAX_TEXT`] bytes.
pub(super) fn read_text(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    let file = File::open(path).map_err(CheckpointError::io(path))?;
    let found = file.metadata().map_err(CheckpointError::io(path))?.len();
    if found > MAX_TEXT {
        let (path, expected) = (path.to_owned(), TOO_LONG);
        return Err(CheckpointError::Header { path, expected, found });
    }
    let mut text = Vec::with_capacity(found as usize);
    file.take(MAX_TEXT).read_to_end(&mut text).map_err(CheckpointError::io(path))?;
    Ok(text)
}
