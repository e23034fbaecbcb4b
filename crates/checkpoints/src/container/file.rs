//! Files: mapped into memory, or read with a bound.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use memmap2::Mmap;

use crate::error::CheckpointError;

/// A limit on the length of a text, and its words in an error.
pub(super) struct Limit(pub(super) u64, &'static str);

/// Most bytes of a header or index: the limit of the `safetensors` library.
pub(super) const HEADER: Limit = Limit(100_000_000, "a text of at most 100,000,000 bytes");
/// Most bytes of a config, whose values take up to 150 bytes for each byte of text.
pub(super) const CONFIG: Limit = Limit(16_000_000, "a text of at most 16,000,000 bytes");

/// The first bytes of a file that a clone without Git LFS has in place of weights.
const LFS_POINTER: &[u8] = b"version https://git-lfs";

/// A file in memory. The pages are read when they are touched.
#[derive(Debug)]
pub(crate) struct Mapped(Mmap);

impl Mapped {
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        // Asked before it is opened: opening a pipe would wait for who writes to it.
        if !std::fs::metadata(path).map_err(CheckpointError::io(path))?.is_file() {
            let (path, expected) =
                (path.to_owned(), "a file, found a folder or a device; give the path of a file");
            return Err(CheckpointError::NotACheckpoint { path, expected });
        }
        let file = File::open(path).map_err(CheckpointError::io(path))?;
        // SAFETY: the map is only read. That the file keeps its length and bytes while it is
        // mapped is asked of the caller, in the documentation of `Container::open`.
        let map = unsafe { Mmap::map(&file) }.map_err(CheckpointError::io(path))?;
        if map.starts_with(LFS_POINTER) {
            let expected = "weights, found a pointer of Git LFS; run `git lfs pull` in its folder";
            return Err(CheckpointError::NotACheckpoint { path: path.to_owned(), expected });
        }
        Ok(Self(map))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Reads a text within a limit.
pub(super) fn read_text(path: &Path, limit: &Limit) -> Result<Vec<u8>, CheckpointError> {
    let file = File::open(path).map_err(CheckpointError::io(path))?;
    let found = file.metadata().map_err(CheckpointError::io(path))?.len();
    if found > limit.0 {
        let (path, expected) = (path.to_owned(), limit.1);
        return Err(CheckpointError::Header { path, expected, found });
    }
    let mut text = Vec::with_capacity(found as usize);
    file.take(limit.0).read_to_end(&mut text).map_err(CheckpointError::io(path))?;
    Ok(text)
}
