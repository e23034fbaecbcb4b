//! The files of a plan, all or nothing: written beside the target under another name, flushed to
//! the disk, and renamed.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use super::plan::{Plan, PlannedFile};
use super::report::WriteReport;
use super::target::Target;
use crate::error::{CheckpointError, TensorProblem};
use crate::tensor::{Data, NewTensor};
use crate::weight::Model;

/// A file or folder that is removed unless it becomes the target.
struct Partial {
    path: PathBuf,
    done: bool,
}

impl Partial {
    /// A name beside the target that no one else has.
    fn beside(target: &Path) -> Result<Self, CheckpointError> {
        let Some(name) = target.file_name() else {
            let expected = "a path that ends in a name";
            return Err(CheckpointError::NotACheckpoint { path: target.to_owned(), expected });
        };
        let name = format!(".{}.partial-{}", name.to_string_lossy(), std::process::id());
        Ok(Self { path: target.with_file_name(name), done: false })
    }

    fn rename(mut self, target: &Path) -> Result<(), CheckpointError> {
        fs::rename(&self.path, target).map_err(CheckpointError::io(target))?;
        self.done = true;
        match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => sync_folder(parent),
            _ => sync_folder(Path::new(".")),
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.done {
            // What cannot be removed stays under a name that says what it is.
            let _ = if self.path.is_dir() {
                fs::remove_dir_all(&self.path)
            } else {
                fs::remove_file(&self.path)
            };
        }
    }
}

pub(super) fn publish(
    model: &Model<'_>,
    target: &Target<'_>,
    plan: &Plan,
    path: &Path,
) -> Result<(), CheckpointError> {
    let partial = Partial::beside(path)?;
    match &plan.texts {
        None => {
            for file in &plan.files {
                write_file(model, target, file, &partial.path)?;
            }
        }
        Some(texts) => {
            fs::create_dir(&partial.path).map_err(CheckpointError::io(&partial.path))?;
            for file in &plan.files {
                write_file(model, target, file, &partial.path.join(&file.name))?;
            }
            for (name, text) in texts {
                let at = partial.path.join(name);
                write_synced(&at, text.as_bytes())?;
            }
            for sidecar in &model.sidecars {
                let Some(name) = sidecar.file_name() else { continue };
                let at = partial.path.join(name);
                fs::copy(sidecar, &at).map_err(CheckpointError::io(sidecar))?;
                let copy = File::open(&at).map_err(CheckpointError::io(&at))?;
                copy.sync_all().map_err(CheckpointError::io(&at))?;
            }
            sync_folder(&partial.path)?;
        }
    }
    partial.rename(path)
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let io = || CheckpointError::io(path);
    let mut file = File::create_new(path).map_err(io())?;
    file.write_all(bytes).map_err(io())?;
    file.sync_all().map_err(io())
}

/// So that the names in a folder are on the disk too; Windows has no such thing.
fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    if cfg!(unix) {
        let folder = File::open(path).map_err(CheckpointError::io(path))?;
        folder.sync_all().map_err(CheckpointError::io(path))?;
    }
    Ok(())
}

/// One weight after another is made and written to its place.
fn write_file(
    model: &Model<'_>,
    target: &Target<'_>,
    plan: &PlannedFile,
    path: &Path,
) -> Result<(), CheckpointError> {
    let io = || CheckpointError::io(path);
    let mut file = File::create_new(path).map_err(io())?;
    file.write_all(&plan.header).map_err(io())?;
    let mut places = plan.places.iter();
    for &at in &plan.weights {
        // What it counts was counted when the plan was made.
        let prepared = target.prepare(&model.weights[at], &mut WriteReport::default())?;
        for tensor in target.writer.tensors(&prepared)? {
            let Some(&(offset, expected)) = places.next() else { continue };
            file.seek(SeekFrom::Start(offset)).map_err(io())?;
            write_tensor(&mut file, path, &tensor, expected)?;
        }
    }
    // The padding at the end, and holes of alignment, are zeros.
    file.set_len(plan.length).map_err(io())?;
    file.sync_all().map_err(io())
}

fn write_tensor(
    file: &mut File,
    path: &Path,
    tensor: &NewTensor<'_>,
    expected: u64,
) -> Result<(), CheckpointError> {
    let made;
    let bytes = match &tensor.data {
        Data::Bytes(bytes) => bytes,
        Data::Made(make) => {
            made = make()?;
            &made
        }
    };
    let found = bytes.len() as u64;
    if found != expected {
        let problem = TensorProblem::Bytes { expected, found };
        return Err(CheckpointError::tensor(path, &tensor.name, problem));
    }
    file.write_all(bytes).map_err(CheckpointError::io(path))
}
