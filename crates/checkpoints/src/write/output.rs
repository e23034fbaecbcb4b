//! The files of a plan, all or nothing: written weight by weight in a folder beside the target,
//! flushed to the disk, and renamed.
//!
//! ```text
//! .NAME.partial/journal     what is done
//! .NAME.partial/files/      what becomes NAME, or the file in it that does
//! ```

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::journal::Journal;
use super::planned::Planned;
use super::report::WriteReport;
use crate::error::{CheckpointError, TensorProblem};
use crate::reader::Reader;
use crate::tensor::{Data, NewTensor};
use crate::weight::Weight;

/// What to do with the rest of an earlier write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Remove it.
    Anew,
    /// Go on with it.
    Resume,
}

/// The bytes after which, or the time, what is written is flushed and noted as done.
const FLUSH_BYTES: u64 = 256 << 20;
const FLUSH_TIME: Duration = Duration::from_secs(1);
/// Bytes of a copy that are in memory at a time.
const PIECE: usize = 4 << 20;

/// A write that has begun. Unless it is finished, or asked to stay, it is removed.
///
/// ```
/// use burn_fp4_checkpoints::{Dtype, Model, Start, Tensor, Value, Weight, WriteOptions};
/// # let path = std::env::temp_dir().join(format!("burn-fp4-output-{}.gguf", std::process::id()));
/// # let tensor = Tensor::new("norm.weight", Dtype::F32, vec![2], vec![0; 8])?;
/// # let weights = vec![Weight::new("norm.weight", 0, Value::Plain(tensor))];
/// # let model = Model { weights, ..Model::default() };
/// let planned = model.plan("gguf", &WriteOptions::default())?;
/// let mut output = planned.create(&path, "an example", Start::Anew)?;
/// output.write(0, &model.weights[0])?;
/// assert!(output.is_done(0) && !path.exists());
/// output.finish()?;
/// assert!(path.is_file());
/// # std::fs::remove_file(&path).expect("removed");
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
pub struct Output<'p> {
    planned: &'p Planned<'p>,
    target: PathBuf,
    partial: PathBuf,
    journal: Journal,
    files: Vec<(PathBuf, File)>,
    /// For every weight its file, and its place among the file's weights.
    homes: Vec<(usize, usize)>,
    done: HashSet<usize>,
    /// Weights that are written but not noted, and their bytes.
    unnoted: (String, u64),
    flushed: Instant,
    stays: bool,
}

impl fmt::Debug for Output<'_> {
    /// Where it writes, and how far it is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Output")
            .field("target", &self.target)
            .field("done", &self.done.len())
            .field("planned", self.planned)
            .finish_non_exhaustive()
    }
}

impl Planned<'_> {
    /// Begins to write, beside `path`, as in the example of [`Output`]. `task` says in a line what
    /// makes the bytes: only a write of the same task is gone on with.
    ///
    /// # Errors
    /// Something is at `path`; another process writes there; what is gone on with was another
    /// task; and what the file system refuses.
    pub fn create(
        &self,
        path: &Path,
        task: &str,
        start: Start,
    ) -> Result<Output<'_>, CheckpointError> {
        refuse_existing(path)?;
        let (Some(name), Some(parent)) = (path.file_name(), path.parent()) else {
            let expected = "a path that ends in a name";
            return Err(CheckpointError::NotACheckpoint { path: path.to_owned(), expected });
        };
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        fs::metadata(parent).map_err(CheckpointError::io(parent))?;
        let partial = path.with_file_name(format!(".{}.partial", name.to_string_lossy()));
        match fs::create_dir(&partial) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            created => created.map_err(CheckpointError::io(&partial))?,
        }
        let mut journal = Journal::open(&partial)?;
        let task = self.task(task);
        let old = journal.read()?.filter(|_| start == Start::Resume);
        let files = partial.join("files");
        let (files, done) = match old {
            Some((found, _)) if found != task => {
                return Err(CheckpointError::OtherTask { path: partial });
            }
            Some((_, done)) => (self.open(&files)?, done),
            None => {
                drop(journal);
                fs::remove_dir_all(&partial).map_err(CheckpointError::io(&partial))?;
                fs::create_dir(&partial).map_err(CheckpointError::io(&partial))?;
                journal = Journal::open(&partial)?;
                let created = self.lay_out(&files).and_then(|files| {
                    journal.add(&format!("{task}\n"))?;
                    Ok(files)
                });
                let remove = |error| {
                    let _ = fs::remove_dir_all(&partial);
                    error
                };
                (created.map_err(remove)?, HashSet::new())
            }
        };
        let mut homes = vec![(0, 0); self.model.weights.len()];
        for (file, planned) in self.plan.files.iter().enumerate() {
            for (place, &at) in planned.weights.iter().enumerate() {
                homes[at] = (file, place);
            }
        }
        Ok(Output {
            planned: self,
            target: path.to_owned(),
            partial,
            journal,
            files,
            homes,
            done,
            unnoted: (String::new(), 0),
            flushed: Instant::now(),
            stays: false,
        })
    }

    /// The task in a line, with the number of weights, which the journal counts.
    fn task(&self, task: &str) -> String {
        let (weights, length) = (self.model.weights.len(), self.length());
        format!("{weights} weights, {length} bytes, {}: {task}", self.target.dialect.name())
            .replace('\n', " ")
    }

    /// The path of a file among those of a folder; a file that stands alone has no name.
    fn path(folder: &Path, name: &str) -> PathBuf {
        folder.join(if name.is_empty() { "file" } else { name })
    }

    /// Makes the files, as long as they will be, with their headers.
    fn lay_out(&self, folder: &Path) -> Result<Vec<(PathBuf, File)>, CheckpointError> {
        fs::create_dir(folder).map_err(CheckpointError::io(folder))?;
        let mut files = Vec::new();
        for planned in &self.plan.files {
            let path = Self::path(folder, &planned.name);
            let io = || CheckpointError::io(&path);
            let mut file = File::create_new(&path).map_err(io())?;
            file.write_all(&planned.header).map_err(io())?;
            // The padding at the end, and holes of alignment, are zeros.
            file.set_len(planned.length).map_err(io())?;
            file.sync_all().map_err(io())?;
            files.push((path, file));
        }
        sync_folder(folder)?;
        Ok(files)
    }

    /// Opens the files of an earlier run, which are those of this plan.
    fn open(&self, folder: &Path) -> Result<Vec<(PathBuf, File)>, CheckpointError> {
        let mut files = Vec::new();
        for planned in &self.plan.files {
            let path = Self::path(folder, &planned.name);
            let io = || CheckpointError::io(&path);
            let mut file = OpenOptions::new().read(true).write(true).open(&path).map_err(io())?;
            let mut header = vec![0; planned.header.len()];
            let same = file.metadata().map_err(io())?.len() == planned.length
                && file.read_exact(&mut header).is_ok()
                && header == planned.header;
            if !same {
                return Err(CheckpointError::OtherTask { path });
            }
            files.push((path, file));
        }
        Ok(files)
    }
}

fn refuse_existing(path: &Path) -> Result<(), CheckpointError> {
    match fs::symlink_metadata(path) {
        Ok(_) => Err(CheckpointError::Exists { path: path.to_owned() }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(source) => Err(CheckpointError::Io { path: path.to_owned(), source }),
    }
}

impl Output<'_> {
    /// Whether a weight is written, by this run or an earlier one.
    pub fn is_done(&self, at: usize) -> bool {
        self.done.contains(&at)
    }

    /// Keeps what is written if it is not finished, so that another run can go on with it, and
    /// says where it is.
    pub fn keep(&mut self) -> &Path {
        self.stays = true;
        &self.partial
    }

    /// Writes a weight to its place: the one of the model, or what it was an outline of.
    ///
    /// # Errors
    /// What cannot be made of the weight, tensors that are more or fewer than were planned or have
    /// other lengths, and what the file system refuses.
    ///
    /// # Panics
    /// If the model has not so many weights.
    pub fn write(&mut self, at: usize, weight: &Weight<'_>) -> Result<(), CheckpointError> {
        let planned = self.planned;
        // What it counts was counted when the plan was made.
        let prepared = planned.target.prepare(weight, &mut WriteReport::default())?;
        let tensors = planned.target.writer.tensors(&prepared)?;
        self.put(at, &tensors, |tensor, file, (offset, expected)| {
            let made: Cow<'_, [u8]> = match &tensor.data {
                Data::Bytes(bytes) => Cow::Borrowed(bytes),
                Data::Made(make) => make()?,
            };
            check_length(tensor, &file.0, expected, made.len())?;
            put_bytes(tensor, file, offset, &made)
        })
    }

    /// Writes a weight of the model as it is, by small pieces that are read from its files.
    ///
    /// # Errors
    /// As [`write`](Self::write), and [`Reader::read`].
    ///
    /// # Panics
    /// If the model has not so many weights.
    pub fn copy(&mut self, at: usize, reader: &mut Reader<'_>) -> Result<(), CheckpointError> {
        let planned = self.planned;
        let weight = &planned.model.weights[at];
        let prepared = planned.target.prepare(weight, &mut WriteReport::default())?;
        let tensors = planned.target.writer.tensors(&prepared)?;
        self.put(at, &tensors, |tensor, file, (mut offset, expected)| {
            let Data::Bytes(bytes) = &tensor.data else {
                let (dialect, weight) = (planned.target.dialect.name(), tensor.name.clone());
                let what = "a copy of what has to be made";
                return Err(CheckpointError::CannotHold { dialect, weight, what });
            };
            check_length(tensor, &file.0, expected, bytes.len())?;
            let mut piece = vec![0; PIECE.min(bytes.len())];
            for mapped in bytes.chunks(PIECE) {
                let piece = &mut piece[..mapped.len()];
                reader.read(&tensor.name, mapped, piece)?;
                put_bytes(tensor, file, offset, piece)?;
                offset += mapped.len() as u64;
            }
            Ok(())
        })
    }

    fn put(
        &mut self,
        at: usize,
        tensors: &[NewTensor<'_>],
        mut put: impl FnMut(
            &NewTensor<'_>,
            &mut (PathBuf, File),
            (u64, u64),
        ) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let (file, place) = self.homes[at];
        let places = &self.planned.plan.files[file].places[place];
        if tensors.len() != places.len() {
            let (dialect, weight) = (self.planned.target.dialect.name(), self.name(at));
            let what = "more or fewer tensors than were planned";
            return Err(CheckpointError::CannotHold { dialect, weight, what });
        }
        for (tensor, &place) in tensors.iter().zip(places) {
            put(tensor, &mut self.files[file], place)?;
            self.unnoted.1 += place.1;
        }
        self.done.insert(at);
        self.unnoted.0.push_str(&format!("{at}\n"));
        if self.unnoted.1 > FLUSH_BYTES || self.flushed.elapsed() > FLUSH_TIME {
            self.flush()?;
        }
        Ok(())
    }

    /// The name of a weight.
    fn name(&self, at: usize) -> String {
        self.planned.model.weights[at].name.clone()
    }

    /// Waits until what is written is on the disk, then notes it as done.
    fn flush(&mut self) -> Result<(), CheckpointError> {
        for (path, file) in &self.files {
            file.sync_data().map_err(CheckpointError::io(path))?;
        }
        self.journal.add(&self.unnoted.0)?;
        self.unnoted = (String::new(), 0);
        self.flushed = Instant::now();
        Ok(())
    }

    /// Writes what surrounds the tensors, and gives all of it the name it was made for.
    ///
    /// # Errors
    /// [`CheckpointError::Unwritten`] if there is a weight that was not written, and what the file
    /// system refuses.
    pub fn finish(mut self) -> Result<(), CheckpointError> {
        let mut weights = 0..self.planned.model.weights.len();
        if let Some(at) = weights.find(|at| !self.done.contains(at)) {
            return Err(CheckpointError::Unwritten { weight: self.name(at) });
        }
        for (path, file) in &self.files {
            file.sync_all().map_err(CheckpointError::io(path))?;
        }
        let files = self.partial.join("files");
        let made = match &self.planned.plan.texts {
            None => Planned::path(&files, ""),
            Some(texts) => {
                for (name, text) in texts {
                    write_synced(&files.join(name), text.as_bytes())?;
                }
                for sidecar in &self.planned.model.sidecars {
                    let Some(name) = sidecar.file_name() else { continue };
                    copy_synced(sidecar, &files.join(name))?;
                }
                sync_folder(&files)?;
                files
            }
        };
        refuse_existing(&self.target)?;
        fs::rename(&made, &self.target).map_err(CheckpointError::io(&self.target))?;
        self.stays = false;
        match self.target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => sync_folder(parent),
            _ => sync_folder(Path::new(".")),
        }
    }
}

impl Drop for Output<'_> {
    fn drop(&mut self) {
        if !self.stays {
            // What cannot be removed stays under a name that says what it is.
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

/// The plan has a place for so many bytes.
fn check_length(
    tensor: &NewTensor<'_>,
    path: &Path,
    expected: u64,
    found: usize,
) -> Result<(), CheckpointError> {
    let found = found as u64;
    if found == expected {
        return Ok(());
    }
    Err(CheckpointError::tensor(path, &tensor.name, TensorProblem::Bytes { expected, found }))
}

fn put_bytes(
    tensor: &NewTensor<'_>,
    (path, file): &mut (PathBuf, File),
    offset: u64,
    bytes: &[u8],
) -> Result<(), CheckpointError> {
    let mut put = || {
        file.seek(SeekFrom::Start(offset))?;
        file.write_all(bytes)
    };
    let (at, name) = (&*path, &tensor.name);
    put().map_err(|source| CheckpointError::TensorIo {
        file: at.clone(),
        tensor: name.clone(),
        source,
    })
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let io = || CheckpointError::io(path);
    // An earlier run may have come as far as here.
    let mut file = File::create(path).map_err(io())?;
    file.write_all(bytes).map_err(io())?;
    file.sync_all().map_err(io())
}

fn copy_synced(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    // Contents only: a copy of a file that may not be written could not be removed or replaced.
    let mut source = File::open(from).map_err(CheckpointError::io(from))?;
    let mut copy = File::create(to).map_err(CheckpointError::io(to))?;
    std::io::copy(&mut source, &mut copy).map_err(CheckpointError::io(from))?;
    copy.sync_all().map_err(CheckpointError::io(to))
}

/// So that the names in a folder are on the disk too; Windows has no such thing.
fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    if cfg!(unix) {
        let folder = File::open(path).map_err(CheckpointError::io(path))?;
        folder.sync_all().map_err(CheckpointError::io(path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::fp4::{Fp4Weight, Numbers, TensorScale};
    use crate::weight::{Model, Value};
    use crate::write::WriteOptions;

    /// A weight with a scale of its input.
    fn weight(name: &str) -> Weight<'static> {
        let format = burn_fp4_formats::Fp4Format::NvFp4;
        let mut fp4 = Fp4Weight::outline(format, 16, vec![1, 16], false, true);
        (fp4.codes, fp4.scales) = (vec![0x22; 8].into(), vec![0x38].into());
        let mut weight = Weight::new(name, 0, Value::Fp4(fp4));
        weight.input_scale = Some(TensorScale::Multiplier(Numbers::new(&[0.5])));
        weight
    }

    #[test]
    fn what_was_not_planned_or_not_written_is_not_published() {
        let path = format!("burn-fp4-output-planned-{}", std::process::id());
        let path = std::env::temp_dir().join(path);
        let weights = vec![weight("a.weight"), weight("b.weight")];
        let model = Model { weights, ..Model::default() };
        let planned = model.plan("modelopt", &WriteOptions::default()).expect("a plan");
        let create = || planned.create(&path, "a test", Start::Anew).expect("a folder");

        let mut output = create();
        let without = Weight { input_scale: None, ..model.weights[0].clone() };
        let smoothing = crate::tensor::Tensor::new("s", Dtype::BF16, vec![16], vec![0; 32]).ok();
        let with = Weight { pre_quant_scale: smoothing, ..model.weights[0].clone() };
        for other in [without, with] {
            let Err(CheckpointError::CannotHold { weight, what, .. }) = output.write(0, &other)
            else {
                panic!("it has other tensors than were planned");
            };
            assert_eq!((&*weight, what), ("a.weight", "more or fewer tensors than were planned"));
        }
        output.write(0, &model.weights[0]).expect("as planned");
        assert!(output.is_done(0) && !output.is_done(1));
        let Err(CheckpointError::Unwritten { weight }) = output.finish() else {
            panic!("a weight is missing");
        };
        assert_eq!(weight, "b.weight");
        assert!(!path.exists());

        let mut output = create();
        for (at, weight) in model.weights.iter().enumerate() {
            output.write(at, weight).expect("as planned");
        }
        output.finish().expect("whole");
        assert!(path.join("model.safetensors").is_file());
        fs::remove_dir_all(&path).expect("removed");
    }
}
