//! Where the targets put their files.

use std::fs;
use std::path::{Path, PathBuf};

/// An empty folder of this process, in memory where there is such a thing.
pub(crate) fn place() -> PathBuf {
    let memory = Path::new("/dev/shm");
    let root = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let path = root.join(format!("burn-fp4-fuzz-{}", std::process::id()));
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(path.join("in")).expect("a folder");
    fs::create_dir_all(path.join("out")).expect("a folder");
    path
}
