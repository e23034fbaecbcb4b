//! The files of a plan, all or nothing: written weight by weight in a folder next to the target,
//! flushed to the disk, and renamed.
//!
//! ```text
//! .NAME.partial/journal     what is done
//! .NAME.partial/files/      what becomes NAME, or the file in it that does
//! ```

use std::borrow::Cow;
use std::collections::btree_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::flusher::{Batch, Flusher};
use super::journal::{MARK, Notes};
use super::partial::{self, FILES};
use super::plan::PlannedFile;
use super::planned::{Piece, Planned};
use super::report::WriteReport;
use crate::error::CheckpointError;
use crate::reader::Reader;
use crate::system;
use crate::tensor::Data;
use crate::weight::Weight;

/// The treatment of the rest of an earlier write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Refuse to begin if there are weights in it, so that no work is lost unasked.
    First,
    /// Remove it, but refuse to begin if there are weights of another task in it.
    Over,
    /// Go on with it.
    Resume,
}

/// The bytes after which, or the time, what is written is flushed and noted as done.
const FLUSH_BYTES: u64 = 256 << 20;
const FLUSH_TIME: Duration = Duration::from_secs(1);
/// Bytes that are not flushed at which writing waits for the flush before.
const MOST_BYTES: u64 = 4 * FLUSH_BYTES;
/// Files that are open between two flushes: there may be more files than a process may open.
const MOST_FILES: usize = 8;
/// Bytes of a sidecar file that are copied at a time.
const COPIED: usize = 1 << 20;

/// A write that has begun. Unless it is finished, or asked to stay, it is removed; what an earlier
/// run has left, and a panic leaves, stays.
///
/// ```
/// use burn_fp4_checkpoints::{Dtype, Model, Start, Tensor, Value, Weight, WriteOptions};
/// # let path = std::env::temp_dir().join(format!("burn-fp4-output-{}.gguf", std::process::id()));
/// # let tensor = Tensor::new("norm.weight", Dtype::F32, vec![2], vec![0; 8])?;
/// # let weights = vec![Weight::new("norm.weight", 0, Value::Plain(tensor))];
/// # let model = Model { weights, ..Model::default() };
/// let planned = model.plan("gguf", &WriteOptions::default())?;
/// let mut output = planned.create(&path, "an example", Start::Over)?;
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
    /// The folder of the target, opened while nothing depends on it.
    parent: (PathBuf, Option<File>),
    partial: PathBuf,
    flusher: Flusher,
    done: HashSet<usize>,
    earlier: Notes,
    /// True if an earlier run had begun, and left no weight.
    restarts: bool,
    /// Bytes that are left of weights of which pieces are written.
    left: HashMap<usize, u64>,
    /// Bytes and weights that are written and not flushed.
    batch: Batch,
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
    /// Begins to write, next to `path`, as in the example of [`Output`]. `task` says in a line what
    /// makes the bytes, in parts with `; ` between them: only a write of the same task, by the same
    /// version of this library, is gone on with. An error names the first part that differs, behind
    /// the word "with".
    ///
    /// # Errors
    /// Something is at `path`, or of GGUF it does not end in `.gguf`; another process writes there,
    /// or what is there was left by none; an earlier write has left weights that `start` does not
    /// give up; what is gone on with was another task; there is too little space; and what the file
    /// system refuses.
    pub fn create(
        &self,
        path: &Path,
        task: &str,
        start: Start,
    ) -> Result<Output<'_>, CheckpointError> {
        refuse_existing(path)?;
        // A plan without texts is a GGUF file, which is opened by the end of its name.
        let ends = |end: &OsStr| end.eq_ignore_ascii_case("gguf");
        if self.plan.texts.is_none() && !path.extension().is_some_and(ends) {
            let expected = "a path that ends in .gguf, as the dialect `gguf` is a file; rename it";
            return Err(CheckpointError::NotACheckpoint { path: path.to_owned(), expected });
        }
        let (Some(name), Some(parent)) = (path.file_name(), path.parent()) else {
            let expected = "a path that ends in a name; add one";
            return Err(CheckpointError::NotACheckpoint { path: path.to_owned(), expected });
        };
        let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
        let parent = (parent.to_owned(), open_folder(parent)?);
        let partial = path.with_file_name(format!(".{}.partial", name.to_string_lossy()));
        let mut journal = partial::claim(&partial)?;
        let (own, task) = (one_line(&format!(": {task}")), self.task(task));
        let old = journal.read()?;
        let new = old.is_none();
        if let Some((found, done)) = old.as_ref().filter(|(_, done)| !done.is_empty())
            && (start == Start::First || start == Start::Over && !found.ends_with(&own))
        {
            return Err(CheckpointError::Unfinished { path: partial, done: done.len() });
        }
        let files = partial.join(FILES);
        let (earlier, stays) = match old.filter(|_| start == Start::Resume) {
            Some((found, _)) if found != task => {
                let [before, now] = difference(&found, &task);
                return Err(CheckpointError::ResumeMismatch { path: partial, before, now });
            }
            Some((_, done)) => {
                self.check(&files)?;
                self.check_space(&partial)?;
                (done, true)
            }
            None => {
                // The journal stays, and its lock: no other process comes between.
                let begun = refuse_existing(path).and_then(|()| {
                    journal.clear()?;
                    self.lay_out(&partial)?;
                    journal.add(&format!("{task}\n"))
                });
                if let Err(error) = begun {
                    // What an earlier run has left is still there if it was not touched.
                    if new || !matches!(error, CheckpointError::TargetExists { .. }) {
                        partial::remove(&partial);
                    }
                    return Err(error);
                }
                (Notes::new(), false)
            }
        };
        Ok(Output {
            planned: self,
            target: path.to_owned(),
            parent,
            partial,
            flusher: Flusher::new(journal),
            done: earlier.keys().copied().collect(),
            restarts: !new && earlier.is_empty(),
            earlier,
            left: HashMap::new(),
            batch: Batch::default(),
            flushed: Instant::now(),
            stays,
        })
    }

    /// The task in a line, with the number of weights, which the journal counts.
    fn task(&self, task: &str) -> String {
        let (weights, length) = (self.model.weights.len(), self.length());
        let (version, dialect) = (env!("CARGO_PKG_VERSION"), self.target.dialect.name());
        one_line(&format!("{MARK}{version}, {weights} weights, {length} bytes, {dialect}: {task}"))
    }

    /// The path of a file in a folder; a file that stands alone has no name.
    fn path(folder: &Path, name: &str) -> PathBuf {
        folder.join(if name.is_empty() { "file" } else { name })
    }

    /// Makes the files, as long as they will be, with their headers, and the configs.
    fn lay_out(&self, partial: &Path) -> Result<(), CheckpointError> {
        let folder = &partial.join(FILES);
        match fs::remove_dir_all(folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            removed => removed.map_err(CheckpointError::io(folder))?,
        }
        self.check_space(partial)?;
        fs::create_dir(folder).map_err(CheckpointError::io(folder))?;
        for planned in &self.plan.files {
            let path = Self::path(folder, &planned.name);
            let io = || CheckpointError::io(&path);
            let mut file = File::create_new(&path).map_err(io())?;
            file.write_all(&planned.header).map_err(io())?;
            // The padding at the end, and holes of alignment, are zeros.
            file.set_len(planned.length).map_err(io())?;
            file.sync_all().map_err(io())?;
        }
        for (name, text) in self.plan.texts.iter().flatten() {
            write_synced(&folder.join(name), text.as_bytes())?;
        }
        sync_folder(folder)
    }

    /// Checks that the files of an earlier run have the lengths and headers of this plan.
    fn check(&self, folder: &Path) -> Result<(), CheckpointError> {
        for planned in &self.plan.files {
            let path = Self::path(folder, &planned.name);
            let io = || CheckpointError::io(&path);
            let mut file = File::open(&path).map_err(io())?;
            let length = file.metadata().map_err(io())?.len();
            let mut header = vec![0; planned.header.len()];
            let same = length == planned.length
                && file.read_exact(&mut header).is_ok()
                && header == planned.header;
            if !same {
                return Err(CheckpointError::Damaged { path });
            }
        }
        Ok(())
    }

    /// Checks that what is not on the disk yet has room there.
    fn check_space(&self, partial: &Path) -> Result<(), CheckpointError> {
        let there = |planned: &PlannedFile| {
            let path = Self::path(&partial.join(FILES), &planned.name);
            fs::metadata(path).map_or(0, |file| system::bytes_on_disk(&file))
        };
        let missing = self.plan.files.iter().map(|file| file.length.saturating_sub(there(file)));
        let needed = missing.sum();
        let folder = open_folder(partial)?;
        match folder.and_then(|folder| system::free_bytes(&folder)) {
            Some(free) if free < needed => {
                Err(CheckpointError::NoSpace { path: partial.to_owned(), needed, free })
            }
            Some(_) | None => Ok(()),
        }
    }
}

fn one_line(text: &str) -> String {
    text.replace('\n', " ")
}

/// Returns the first part that differs between two tasks, of the old one and of the new one. The
/// version comes first, as another one may have other parts; the number of weights and bytes comes
/// last, as options change it.
fn difference(old: &str, new: &str) -> [String; 2] {
    let [old, new] = [old, new].map(|task| {
        let (own, parts) = task.split_once(": ").unwrap_or((task, ""));
        let (version, counts) = own.split_once(", ").unwrap_or((own, ""));
        [version].into_iter().chain(parts.split("; ")).chain([counts]).collect::<Vec<_>>()
    });
    let pair = old.iter().zip(&new).find(|(old, new)| old != new);
    let (before, now) = pair.unwrap_or((&"other parts", &"fewer or more"));
    [(*before).to_owned(), (*now).to_owned()]
}

fn refuse_existing(path: &Path) -> Result<(), CheckpointError> {
    match fs::symlink_metadata(path) {
        Ok(_) => Err(CheckpointError::TargetExists { path: path.to_owned() }),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(source) => Err(CheckpointError::Io { path: path.to_owned(), source }),
    }
}

impl Output<'_> {
    /// Returns true if a weight is written, by this run or an earlier one.
    #[must_use]
    pub fn is_done(&self, at: usize) -> bool {
        self.done.contains(&at)
    }

    /// Weights that an earlier run has written, by their places in the model, each with the note
    /// that it was [written](Self::write_noting) with.
    pub fn earlier(&self) -> impl Iterator<Item = (usize, &str)> {
        self.earlier.iter().map(|(&at, note)| (at, note.as_str()))
    }

    /// Returns true if an earlier run was stopped before its first weight was on the disk.
    #[must_use]
    pub fn restarts(&self) -> bool {
        self.restarts
    }

    /// Returns the folder in which the files grow, with the configs. The weights that are done can
    /// be read from it; the bytes of others are zeros. None: a GGUF file is not readable before it
    /// is finished.
    #[must_use]
    pub fn files(&self) -> Option<PathBuf> {
        self.planned.plan.texts.as_ref().map(|_| self.partial.join(FILES))
    }

    /// Waits until what is written is on the disk, and notes the weights that are done: a run that
    /// resumes this one does not make them again. Without this it happens from time to time.
    ///
    /// # Errors
    /// Refusals of the file system.
    pub fn flush(&mut self) -> Result<(), CheckpointError> {
        if let Some(batch) = self.flusher.take(std::mem::take(&mut self.batch), true)? {
            self.batch = batch;
        }
        self.flushed = Instant::now();
        self.flusher.end()
    }

    /// Keeps what is written if it is not finished, so that another run can go on with it, and
    /// says where it is.
    pub fn keep(&mut self) -> &Path {
        self.stays = true;
        &self.partial
    }

    /// Where what is written stays if it is not finished. None: it is removed.
    #[must_use]
    pub fn stays(&self) -> Option<&Path> {
        self.stays.then_some(&self.partial)
    }

    /// Writes a weight to its place: the one of the model, or what it was an outline of.
    ///
    /// # Errors
    /// A weight that cannot be prepared, tensors that are more or fewer than were planned or have
    /// other lengths, and what the file system refuses.
    ///
    /// # Panics
    /// If `at` is not below the number of weights.
    pub fn write(&mut self, at: usize, weight: &Weight<'_>) -> Result<(), CheckpointError> {
        self.write_noting(at, weight, "")
    }

    /// Writes a weight with a note. A run that resumes this one finds the notes of the weights that
    /// reached the disk with [`earlier`](Self::earlier), and writes the others again.
    ///
    /// ```
    /// use burn_fp4_checkpoints::{Dtype, Model, Start, Tensor, Value, Weight, WriteOptions};
    /// # let path = std::env::temp_dir().join(format!("burn-fp4-noting-{}", std::process::id()));
    /// # let tensor = Tensor::new("norm.weight", Dtype::F32, vec![2], vec![0; 8])?;
    /// # let weights = vec![Weight::new("norm.weight", 0, Value::Plain(tensor))];
    /// # let model = Model { weights, ..Model::default() };
    /// let planned = model.plan("plain", &WriteOptions::default())?;
    /// let mut output = planned.create(&path, "an example", Start::First)?;
    /// output.write_noting(0, &model.weights[0], "0.5 %")?;
    /// output.flush()?;
    /// assert!(output.files().is_some_and(|folder| folder.is_dir()));
    /// output.keep();
    /// assert!(output.stays().is_some());
    /// drop(output);
    /// let mut output = planned.create(&path, "an example", Start::Resume)?;
    /// let noted = output.earlier().next() == Some((0, "0.5 %"));
    /// assert_eq!(output.restarts(), !noted);
    /// if !noted {
    ///     output.write_noting(0, &model.weights[0], "0.5 %")?;
    /// }
    /// output.finish()?;
    /// # std::fs::remove_dir_all(&path).expect("removed");
    /// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
    /// ```
    ///
    /// # Errors
    /// As [`write`](Self::write).
    ///
    /// # Panics
    /// If `at` is not below the number of weights.
    pub fn write_noting(
        &mut self,
        at: usize,
        weight: &Weight<'_>,
        note: &str,
    ) -> Result<(), CheckpointError> {
        let planned = self.planned;
        // What it counts was counted when the plan was made.
        let prepared = planned.target.prepare(weight, &mut WriteReport::default())?;
        let (file, places) = planned.plan.places(at);
        let tensors = planned.target.tensors(&prepared)?;
        if tensors.len() != places.len() {
            let (dialect, weight) = (planned.target.dialect.name(), &weight.name);
            let what = "more or fewer tensors than were planned";
            return Err(CheckpointError::cannot_hold(dialect, weight, what));
        }
        for (tensor, &(offset, expected)) in tensors.iter().zip(places) {
            let made: Cow<'_, [u8]> = match &tensor.data {
                Data::Bytes(bytes) => Cow::Borrowed(bytes),
                Data::Made(make) => make()?,
            };
            planned.plan.check_length(file, &tensor.name, expected, made.len())?;
            self.put_bytes(file, &tensor.name, offset, &made)?;
        }
        self.note(at, note);
        self.flush_if_due()
    }

    /// Copies a weight of the model, by small pieces that are read from its files.
    ///
    /// A caller that reads the pieces itself passes them to [`put`](Self::put):
    ///
    /// ```
    /// use burn_fp4_checkpoints::{Checkpoint, Reader, Start, WriteOptions};
    /// # use burn_fp4_checkpoints::{Dtype, Model, Tensor, Value, Weight};
    /// # let folder = std::env::temp_dir().join(format!("burn-fp4-copy-{}", std::process::id()));
    /// # let weights = ["a.weight", "b.weight", "c.weight"].map(|name| {
    /// #     let tensor = Tensor::new(name, Dtype::F32, vec![2], vec![0; 8]).expect("8 bytes");
    /// #     Weight::new(name, 0, Value::Plain(tensor))
    /// # });
    /// # let model = Model { weights: weights.into(), ..Model::default() };
    /// # model.write(&folder, "plain", &WriteOptions::default())?;
    ///
    /// let checkpoint = Checkpoint::open(&folder)?; // three weights of floats
    /// let (model, reader) = (checkpoint.model()?, Reader::new(checkpoint.container()));
    /// let planned = model.plan("gguf", &WriteOptions::default())?;
    /// let path = folder.join("copy.gguf");
    /// let mut output = planned.create(&path, "an example", Start::Over)?;
    /// output.copy(0, &reader)?;
    /// for piece in planned.pieces(1)? {
    ///     output.put(&piece, &piece.read(&reader)?)?;
    /// }
    /// for piece in planned.pieces(2)? {
    ///     output.put_noting(&piece, &piece.read(&reader)?, "a note")?;
    /// }
    /// output.finish()?;
    /// assert_eq!(Checkpoint::open(&path)?.weights()?.len(), 3);
    /// # std::fs::remove_dir_all(&folder).expect("removed");
    /// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
    /// ```
    ///
    /// # Errors
    /// As [`Planned::pieces`], [`Piece::read`] and [`put`](Self::put).
    ///
    /// # Panics
    /// If `at` is not below the number of weights.
    pub fn copy(&mut self, at: usize, reader: &Reader<'_>) -> Result<(), CheckpointError> {
        let planned = self.planned;
        planned.pieces(at)?.iter().try_for_each(|piece| self.put(piece, &piece.read(reader)?))
    }

    /// Writes a piece, whose bytes were read. A weight is done when all of its pieces are written,
    /// in whatever order.
    ///
    /// # Errors
    /// Refusals of the file system.
    pub fn put(&mut self, piece: &Piece<'_>, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.put_noting(piece, bytes, "")
    }

    /// Writes a piece as [`put`](Self::put) does, with a note on the weight as of
    /// [`write_noting`](Self::write_noting). The note given with the last piece is kept.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn put_noting(
        &mut self,
        piece: &Piece<'_>,
        bytes: &[u8],
        note: &str,
    ) -> Result<(), CheckpointError> {
        let plan = &self.planned.plan;
        plan.check_length(piece.file, &piece.tensor, piece.len() as u64, bytes.len())?;
        self.put_bytes(piece.file, &piece.tensor, piece.offset, bytes)?;
        let left = self.left.entry(piece.weight).or_insert_with(|| plan.bytes(piece.weight));
        *left -= bytes.len() as u64;
        if *left == 0 {
            self.left.remove(&piece.weight);
            self.note(piece.weight, note);
        }
        self.flush_if_due()
    }

    fn put_bytes(
        &mut self,
        at: usize,
        tensor: &str,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), CheckpointError> {
        let (path, file) = match self.batch.files.entry(at) {
            Entry::Occupied(open) => open.into_mut(),
            Entry::Vacant(none) => {
                let folder = self.partial.join(FILES);
                let path = Planned::path(&folder, &self.planned.plan.files[at].name);
                let file = OpenOptions::new().write(true).open(&path);
                let file = file.map_err(CheckpointError::io(&path))?;
                none.insert((path, file))
            }
        };
        let written = system::write_all_at(file, bytes, offset);
        written.map_err(|source| CheckpointError::TensorIo {
            file: path.clone(),
            tensor: tensor.to_owned(),
            source,
        })?;
        system::begin_to_sync(file, offset, bytes.len());
        self.batch.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Notes a weight as done once what is written so far is on the disk.
    fn note(&mut self, at: usize, note: &str) {
        self.done.insert(at);
        self.batch.lines.push_str(one_line(&format!("{at} {note}")).trim_end());
        self.batch.lines.push('\n');
    }

    /// Hands what is written on to be flushed from time to time. Writing only waits where too much
    /// of it would be open.
    fn flush_if_due(&mut self) -> Result<(), CheckpointError> {
        let (bytes, files) = (self.batch.bytes, self.batch.files.len());
        let waits = bytes > MOST_BYTES || files >= MOST_FILES;
        if waits || bytes > FLUSH_BYTES || self.flushed.elapsed() > FLUSH_TIME {
            match self.flusher.take(std::mem::take(&mut self.batch), waits)? {
                Some(batch) => self.batch = batch,
                None => self.flushed = Instant::now(),
            }
        }
        Ok(())
    }

    /// Writes what surrounds the tensors, and gives all of it the name it was made for. Returns
    /// what the file system refused when all of it had that name: it is whole, but after a power
    /// cut the name might not be there.
    ///
    /// # Errors
    /// [`CheckpointError::Unwritten`] if there is a weight that was not written, and what the file
    /// system refuses before.
    pub fn finish(mut self) -> Result<Option<CheckpointError>, CheckpointError> {
        let weights = &self.planned.model.weights;
        let unwritten = |&at: &usize| !self.done.contains(&at) && self.planned.plan.bytes(at) > 0;
        if let Some(at) = (0..weights.len()).find(unwritten) {
            return Err(CheckpointError::Unwritten { weight: weights[at].name.clone() });
        }
        self.flusher.end()?;
        let files = self.partial.join(FILES);
        // By the handles that were written by, and of all files that earlier runs have written.
        for (path, file) in self.batch.files.values() {
            file.sync_all().map_err(CheckpointError::io(path))?;
        }
        for planned in &self.planned.plan.files {
            let path = Planned::path(&files, &planned.name);
            let file = OpenOptions::new().write(true).open(&path);
            let synced = file.and_then(|file| file.sync_all());
            synced.map_err(CheckpointError::io(&path))?;
        }
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
        let (path, folder) = &self.parent;
        let synced = folder.as_ref().map_or(Ok(()), File::sync_all);
        Ok(synced.err().map(CheckpointError::io(path)))
    }
}

impl Drop for Output<'_> {
    fn drop(&mut self) {
        // What it could not flush is not noted, and done again by who goes on.
        let _ = self.flusher.end();
        if !self.stays && !std::thread::panicking() {
            partial::remove(&self.partial);
        }
    }
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
    let mut piece = vec![0; COPIED];
    loop {
        let length = match source.read(&mut piece) {
            Ok(0) => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read.map_err(CheckpointError::io(from))?,
        };
        copy.write_all(&piece[..length]).map_err(CheckpointError::io(to))?;
    }
    copy.sync_all().map_err(CheckpointError::io(to))
}

/// A folder, so that names in it can be brought to the disk; Windows has no such thing.
fn open_folder(path: &Path) -> Result<Option<File>, CheckpointError> {
    match cfg!(unix) {
        true => File::open(path).map(Some).map_err(CheckpointError::io(path)),
        false => fs::metadata(path).map(|_| None).map_err(CheckpointError::io(path)),
    }
}

/// So that the names in a folder are on the disk too.
fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    let folder = open_folder(path)?;
    folder.map_or(Ok(()), |folder| folder.sync_all().map_err(CheckpointError::io(path)))
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
        let create = || planned.create(&path, "a test", Start::Over).expect("a folder");

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
