//! The files of a checkpoint, opened by memory map: names, shapes and bytes, without a meaning.
//!
//! Nothing here reads a tensor's bytes: opening takes as long as reading the headers does. The
//! length of a header or index is checked first (at most 100 MB, as in the `safetensors` library),
//! and of a config (16 MB). A byte of a config takes up to 150 bytes of memory.

mod entry;
mod file;
pub(crate) mod gguf;
mod handles;
pub(crate) mod safetensors;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use indexmap::IndexMap;

use self::entry::{Entries, Entry};
use self::file::{Mapped, read_text};
use self::handles::Handles;
use self::safetensors::{INDEX, SINGLE};
use crate::error::{CheckpointError, TensorProblem};
use crate::tensor::Tensor;

/// Name of the config in the folder of a model.
pub const CONFIG: &str = "config.json";
pub(crate) const QUANT_CONFIG: &str = "hf_quant_config.json";

/// Ends of the names of PyTorch's pickles. To load one can run code: none is read.
const PICKLES: [&str; 4] = ["bin", "pt", "pth", "ckpt"];
/// End of the names of indexes, such as `pytorch_model.bin.index.json`.
const INDEX_END: &str = ".index.json";
/// Pickles in a model's folder without weights: files that a trainer leaves.
const TRAINER: [&str; 5] = ["training_args", "optimizer", "scheduler", "scaler", "rng_state"];

/// A file's description of itself.
#[derive(Debug)]
pub enum Metadata {
    /// `__metadata__` of a safetensors file.
    Safetensors(safetensors::Metadata),
    /// The key-value pairs of a GGUF file.
    Gguf(gguf::Metadata),
}

/// A file of a checkpoint.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) path: PathBuf,
    pub(crate) map: Mapped,
    pub(crate) metadata: Metadata,
}

/// The files of a checkpoint.
///
/// ```
/// use burn_fp4_checkpoints::Container;
///
/// # let path = format!("burn-fp4-container-{}.safetensors", std::process::id());
/// # let path = std::env::temp_dir().join(path);
/// let header = br#"{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
/// let file = [&(header.len() as u64).to_le_bytes()[..], &header[..], &[1, 2]].concat();
/// std::fs::write(&path, file)?;
/// let container = Container::open(&path)?;
/// assert_eq!(container.get("x").expect("a tensor").bytes[..], [1, 2]);
/// assert_eq!(container.tensors().count(), 1);
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Opening a folder also finds its configs and other files:
///
/// ```
/// use burn_fp4_checkpoints::{CONFIG, Container};
///
/// # let folder = format!("burn-fp4-container-folder-{}", std::process::id());
/// # let folder = std::env::temp_dir().join(folder);
/// # std::fs::create_dir_all(&folder)?;
/// let header = br#"{"__metadata__":{"format":"pt"}}"#;
/// let file = [&(header.len() as u64).to_le_bytes()[..], &header[..]].concat();
/// std::fs::write(folder.join("model.safetensors"), &file)?;
/// std::fs::write(folder.join(CONFIG), r#"{"model_type": "llama"}"#)?;
/// std::fs::write(folder.join("tokenizer.json"), "{}")?;
/// std::fs::write(folder.join("model.gguf"), "")?;
/// let container = Container::open(&folder)?;
/// assert_eq!(container.root(), folder);
/// assert_eq!(container.file_names(), ["model.safetensors"]);
/// assert!(container.files().all(|(_, bytes)| bytes == file.len() as u64));
/// assert_eq!(container.metadata_text("format"), Some("pt"));
/// assert_eq!(container.config().expect("a config")["model_type"], "llama");
/// assert_eq!(container.configs().collect::<Vec<_>>(), [folder.join(CONFIG)]);
/// assert_eq!(container.sidecars(), [folder.join("tokenizer.json")]);
/// assert!(container.quantization().is_none());
/// assert_eq!(container.left_out(), [folder.join("model.gguf")]);
/// assert!(container.quant_config().is_none(), "ModelOpt did not write it");
/// assert!(container.shard().is_none(), "it is a whole model");
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Container {
    root: PathBuf,
    files: Vec<File>,
    entries: IndexMap<String, Entry>,
    config: Option<serde_json::Value>,
    quant_config: Option<serde_json::Value>,
    sidecars: Vec<PathBuf>,
    left_out: Vec<PathBuf>,
    handles: Handles,
}

impl Container {
    /// Opens a safetensors or GGUF file, or a folder with `model.safetensors`, with
    /// `model.safetensors.index.json`, or with any safetensors files, all of which belong to it.
    ///
    /// Configs next to a safetensors file are read, as in a folder: they name the
    /// architecture and the dialect. Its other files are only found if the folder is opened.
    ///
    /// The files must not change while they are open: they are mapped, not copied.
    ///
    /// # Errors
    /// Files that cannot be read, a folder without index that lacks some of the shards that its
    /// files count, and the first mistake in a header: lengths, dtypes, offsets that
    /// overlap or leave the file, an index that does not fit the shards. PyTorch's pickles are
    /// [`CheckpointError::Pickle`], with the command that converts them.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        let metadata = std::fs::metadata(path).map_err(CheckpointError::io(path))?;
        if metadata.is_dir() { Self::open_folder(path) } else { Self::open_file(path) }
    }

    fn open_file(path: &Path) -> Result<Self, CheckpointError> {
        let mut container = Self::empty(path);
        match extension(path).as_deref() {
            Some("safetensors") => {
                container.add_safetensors(path.to_owned())?;
                container.read_configs()?;
            }
            Some("gguf") => {
                let map = Mapped::open(path)?;
                let (entries, metadata) = gguf::read(path, &map, 0)?;
                let metadata = Metadata::Gguf(metadata);
                container.add(File { path: path.to_owned(), map, metadata }, entries)?;
            }
            Some(end) if PICKLES.contains(&end) => {
                let (path, all) = (path.to_owned(), path.to_owned());
                return Err(CheckpointError::Pickle { path, all });
            }
            _ => {
                let expected = "a folder, or a file that ends in .safetensors or .gguf; give one";
                return Err(CheckpointError::NotACheckpoint { path: path.to_owned(), expected });
            }
        }
        Ok(container)
    }

    fn open_folder(root: &Path) -> Result<Self, CheckpointError> {
        let mut container = Self::empty(root);
        let index = root.join(INDEX);
        if index.is_file() {
            container.add_shards(&index)?;
        } else {
            let shards = shards_without_index(root)?;
            check_shards(root, &shards)?;
            for path in shards {
                container.add_safetensors(path)?;
            }
        }
        container.read_configs()?;
        container.find_sidecars()?;
        Ok(container)
    }

    /// The path of a config.
    pub(crate) fn config_path(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }

    /// The folder of the files.
    fn folder(&self) -> &Path {
        match self.root.is_dir() {
            true => &self.root,
            false => self.root.parent().unwrap_or(&self.root),
        }
    }

    fn read_configs(&mut self) -> Result<(), CheckpointError> {
        self.config = optional_json(&self.config_path(CONFIG))?;
        self.quant_config = optional_json(&self.config_path(QUANT_CONFIG))?;
        Ok(())
    }

    fn empty(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            files: Vec::new(),
            entries: IndexMap::new(),
            config: None,
            quant_config: None,
            sidecars: Vec::new(),
            left_out: Vec::new(),
            handles: Handles::default(),
        }
    }

    /// Opens the shards that an index names. The tensors come in the order of the index, which has
    /// to name each, in its shard.
    fn add_shards(&mut self, path: &Path) -> Result<(), CheckpointError> {
        let index = safetensors::read_index(path)?;
        let mut shards: HashMap<&str, usize> = HashMap::new();
        for (tensor, shard) in &index {
            if !shards.contains_key(shard.as_str()) {
                self.add_safetensors(self.root.join(shard)).map_err(|e| blame(e, tensor))?;
                shards.insert(shard, shards.len());
            }
        }
        let not_there = |path: &Path, tensor: &str, expected: &str| {
            let problem = TensorProblem::NotThere { expected: expected.to_owned() };
            Err(CheckpointError::tensor(path, tensor, problem))
        };
        for (tensor, shard) in &index {
            let found = self.entries.get(tensor).map(|entry| entry.file);
            if found != shards.get(shard.as_str()).copied() {
                return not_there(path, tensor, shard);
            }
        }
        let unnamed = self.entries.iter().find(|(name, _)| !index.contains_key(*name));
        if let Some((name, entry)) = unnamed {
            return not_there(&self.files[entry.file].path, name, INDEX);
        }
        self.entries.sort_by_cached_key(|name, _| index.get_index_of(name));
        Ok(())
    }

    fn add_safetensors(&mut self, path: PathBuf) -> Result<(), CheckpointError> {
        let map = Mapped::open(&path)?;
        let (entries, metadata) = safetensors::read(&path, &map, self.files.len())?;
        self.add(File { path, map, metadata: Metadata::Safetensors(metadata) }, entries)
    }

    /// Adds a file and its tensors. No two tensors may have the same name.
    fn add(&mut self, file: File, entries: Entries) -> Result<(), CheckpointError> {
        for (name, entry) in entries {
            if self.entries.contains_key(&name) {
                return Err(CheckpointError::tensor(&file.path, &name, TensorProblem::Duplicate));
            }
            self.entries.insert(name, entry);
        }
        self.files.push(file);
        Ok(())
    }

    /// The files of the folder that are copied as they are: tokenizer, chat template, and so on.
    fn find_sidecars(&mut self) -> Result<(), CheckpointError> {
        let io = CheckpointError::io;
        for entry in std::fs::read_dir(&self.root).map_err(io(&self.root))? {
            let path = entry.map_err(io(&self.root))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let ours = [INDEX, CONFIG, QUANT_CONFIG].contains(&name)
                || self.files.iter().any(|file| file.path == path);
            let end = extension(&path).unwrap_or_default();
            // An index names shards that are not copied either.
            let weights = PICKLES.contains(&&*end)
                || ["safetensors", "gguf"].contains(&&*end)
                || name.ends_with(INDEX_END);
            if ours {
                continue;
            }
            match path.is_file() && !weights {
                true => self.sidecars.push(path),
                false => self.left_out.push(path),
            }
        }
        self.sidecars.sort();
        self.left_out.sort();
        Ok(())
    }

    /// The path it was opened at.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The tensors, in the order of the index or of the header.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        (0..self.len()).map(|at| self.tensor(at))
    }

    /// Returns the names of the tensors, in the same order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The tensor of a name.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        self.position(name).map(|at| self.tensor(at))
    }

    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.entries.get_index_of(name)
    }

    /// The file of a tensor, by its place among [`file_names`](Self::file_names).
    pub(crate) fn file_of(&self, at: usize) -> usize {
        self.entries[at].file
    }

    pub(crate) fn tensor(&self, at: usize) -> Tensor<'_> {
        let (name, entry) = self.entries.get_index(at).expect("a tensor of this container");
        let file = &self.files[entry.file];
        let bytes = &file.map.bytes()[entry.data.clone()];
        let (name, shape, bytes) = (name.into(), (&entry.shape).into(), bytes.into());
        Tensor { name, file: &file.path, dtype: entry.dtype, shape, bytes }
    }

    /// Where bytes that a tensor of this container borrows lie: the file, by its place among
    /// [`file_names`](Self::file_names), and the offset in it.
    pub(crate) fn place_of(&self, bytes: &[u8]) -> Option<(usize, u64)> {
        let begin = bytes.as_ptr() as usize;
        self.files.iter().enumerate().find_map(|(at, file)| {
            let map = file.map.bytes();
            let offset = begin.checked_sub(map.as_ptr() as usize)?;
            (offset + bytes.len() <= map.len()).then_some((at, offset as u64))
        })
    }

    /// The path of a file and the bytes it had when it was opened.
    pub(crate) fn file(&self, at: usize) -> (&Path, u64) {
        let file = &self.files[at];
        (&file.path, file.map.bytes().len() as u64)
    }

    /// A handle to read a file by, which all readers share.
    pub(crate) fn handle<E>(
        &self,
        at: usize,
        open: impl FnOnce() -> Result<std::fs::File, E>,
    ) -> Result<Arc<std::fs::File>, E> {
        self.handles.get(at, open)
    }

    /// The paths of the files with tensors, and the bytes they had when they were opened.
    pub fn files(&self) -> impl Iterator<Item = (&Path, u64)> {
        (0..self.files.len()).map(|at| self.file(at))
    }

    /// The paths of the index and the configs, of those that were read.
    pub fn configs(&self) -> impl Iterator<Item = PathBuf> {
        let index = self.root.join(INDEX);
        let of = |name: &str, read: bool| read.then(|| self.config_path(name));
        let configs = [
            index.is_file().then_some(index),
            of(CONFIG, self.config.is_some()),
            of(QUANT_CONFIG, self.quant_config.is_some()),
        ];
        configs.into_iter().flatten()
    }

    /// Returns the number of a shard and the count of shards, if a file was opened alone and its
    /// name says that it is one of several: `model-00002-of-00003.safetensors`.
    pub fn shard(&self) -> Option<[usize; 2]> {
        let (_, shard) = shard_of(&self.root).filter(|_| self.root.is_file())?;
        Some(shard).filter(|[_, count]| *count > 1)
    }

    /// The names of the files with tensors.
    pub fn file_names(&self) -> Vec<String> {
        let name =
            |file: &File| file.path.file_name().map(|name| name.to_string_lossy().into_owned());
        self.files.iter().filter_map(name).collect()
    }

    /// The first file's description of itself, if there is one.
    pub fn metadata(&self) -> Option<&Metadata> {
        self.files.first().map(|file| &file.metadata)
    }

    /// A field of the first safetensors file's `__metadata__`.
    pub fn metadata_text(&self, key: &str) -> Option<&str> {
        match self.metadata()? {
            Metadata::Safetensors(texts) => texts.get(key),
            Metadata::Gguf(_) => None,
        }
    }

    /// `config.json` of the folder, or next to a file.
    pub fn config(&self) -> Option<&serde_json::Value> {
        self.config.as_ref()
    }

    /// `hf_quant_config.json` of the folder, or next to a file.
    pub fn quant_config(&self) -> Option<&serde_json::Value> {
        self.quant_config.as_ref()
    }

    /// `quantization_config` of `config.json`, or of its `text_config`, where multimodal models
    /// have it.
    pub fn quantization(&self) -> Option<&serde_json::Value> {
        let config = self.config()?;
        let key = "quantization_config";
        config.get(key).or_else(|| config["text_config"].get(key)).filter(|q| !q.is_null())
    }

    /// Folders, and files with other weights, that were found with the tensors: no copy of the
    /// checkpoint has them.
    pub fn left_out(&self) -> &[PathBuf] {
        &self.left_out
    }

    /// The other files of the folder, which a copy of the checkpoint needs.
    pub fn sidecars(&self) -> &[PathBuf] {
        &self.sidecars
    }
}

/// `model.safetensors`, or all safetensors files by their names.
fn shards_without_index(root: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let model = root.join(SINGLE);
    if model.is_file() {
        return Ok(vec![model]);
    }
    let (mut found, mut pickles) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(root).map_err(CheckpointError::io(root))? {
        let path = entry.map_err(CheckpointError::io(root))?.path();
        match extension(&path).as_deref() {
            Some("safetensors") => found.push(path),
            Some(end) if PICKLES.contains(&end) => pickles.push(path),
            Some(_) | None => {}
        }
    }
    if found.is_empty() {
        if let Some(error) = pickled(pickles) {
            return Err(error);
        }
        let expected =
            "model.safetensors.index.json, or safetensors files; give the folder of a model";
        return Err(CheckpointError::NotACheckpoint { path: root.to_owned(), expected });
    }
    found.sort();
    Ok(found)
}

/// The beginning of the name of a shard, its number, and how many there are.
fn shard_of(path: &Path) -> Option<(&str, [usize; 2])> {
    let (front, count) = path.file_stem()?.to_str()?.rsplit_once("-of-")?;
    let (front, number) = front.rsplit_once('-')?;
    Some((front, [number.parse().ok()?, count.parse().ok()?]))
}

/// Checks that of shards whose names say how many there are none is missing.
fn check_shards(root: &Path, paths: &[PathBuf]) -> Result<(), CheckpointError> {
    let shards: Vec<_> = paths.iter().filter_map(|path| shard_of(path)).collect();
    for (front, [_, count]) in &shards {
        let same = |(other, [_, of]): &&(&str, [usize; 2])| (other, of) == (front, count);
        let found = shards.iter().filter(same).count();
        if found < *count {
            let (path, expected) = (root.to_owned(), *count);
            return Err(CheckpointError::Shards { path, found, expected });
        }
    }
    Ok(())
}

/// The extension of a file in small letters.
fn extension(path: &Path) -> Option<String> {
    path.extension()?.to_str().map(str::to_ascii_lowercase)
}

/// The error about the pickles of a folder, if they hold weights.
fn pickled(mut pickles: Vec<PathBuf>) -> Option<CheckpointError> {
    let stem = |path: &Path| Some(path.file_stem()?.to_str()?.to_owned());
    let holds_weights = |path: &PathBuf| {
        stem(path).is_some_and(|stem| !TRAINER.iter().any(|other| stem.starts_with(other)))
    };
    pickles.retain(holds_weights);
    pickles.sort();
    let path = pickles.first()?.clone();
    let (first, end) = (stem(&path)?, path.extension()?.to_str()?.to_owned());
    // Files with the same begin and end are the shards of one model.
    let shards = pickles.iter().filter(|other| other.extension() == path.extension());
    let stems: Vec<String> = shards.filter_map(|other| stem(other)).collect();
    let common = |length: &usize| stems.iter().all(|stem| stem.starts_with(&first[..*length]));
    let lengths = first.char_indices().map(|(at, _)| at);
    let length = lengths.filter(common).max().unwrap_or(0);
    let all = match &stems[..] {
        [_] => path.clone(),
        _ => path.with_file_name(format!("{}*.{end}", &first[..length])),
    };
    Some(CheckpointError::Pickle { path, all })
}

/// An error of the file system about a shard, as one of the first tensor that it should have.
fn blame(error: CheckpointError, tensor: &str) -> CheckpointError {
    match error {
        CheckpointError::Io { path: file, source } => {
            CheckpointError::TensorIo { file, tensor: tensor.to_owned(), source }
        }
        error => error,
    }
}

/// Reads a config, if there is one.
fn optional_json(path: &Path) -> Result<Option<serde_json::Value>, CheckpointError> {
    if !path.is_file() {
        return Ok(None);
    }
    let json = |source| CheckpointError::Json { path: path.to_owned(), what: "config", source };
    serde_json::from_slice(&read_text(path, &file::CONFIG)?).map(Some).map_err(json)
}
