//! A checkpoint: the files, and the dialect they are written in.

use std::fmt;
use std::path::Path;

use crate::architecture::Architecture;
use crate::container::{Container, Metadata};
use crate::dialect::{self, Dialect, KnownBy};
use crate::error::CheckpointError;
use crate::weight::{Model, Quantization, Value, Weight};

/// An open checkpoint.
///
/// ```
/// use burn_fp4_checkpoints::{Checkpoint, KnownBy};
/// # use burn_fp4_checkpoints::{Dtype, Model, Tensor, Value, Weight, WriteOptions};
/// # let folder = std::env::temp_dir().join(format!("burn-fp4-open-{}", std::process::id()));
/// # let tensor = Tensor::new("norm.weight", Dtype::F32, vec![2], vec![0; 8])?;
/// # let weights = vec![Weight::new("norm.weight", 0, Value::Plain(tensor))];
/// # Model { weights, ..Model::default() }.write(&folder, "plain", &WriteOptions::default())?;
/// let checkpoint = Checkpoint::open(&folder)?;
/// assert_eq!((checkpoint.dialect(), checkpoint.known_by()), ("plain", KnownBy::Metadata));
/// assert_eq!(checkpoint.weights()?[0].name, "norm.weight");
/// assert_eq!(checkpoint.model()?.files, ["model.safetensors"]);
/// assert!(Checkpoint::open_as(&folder, "unheard-of").is_err());
/// # std::fs::remove_dir_all(&folder).expect("removed");
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
pub struct Checkpoint {
    container: Container,
    dialect: &'static dyn Dialect,
    known_by: KnownBy,
}

impl fmt::Debug for Checkpoint {
    /// Where it is, and in which dialect.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("path", &self.container.root())
            .field("dialect", &self.dialect())
            .finish_non_exhaustive()
    }
}

impl Checkpoint {
    /// Opens a checkpoint in the dialect that its configs and metadata name, or, if they name
    /// none, in the one that explains its tensors.
    ///
    /// # Errors
    /// As [`Container::open`]; a dialect that is unknown, or several that are named or read
    /// different weights.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let container = Container::open(path)?;
        let (dialect, known_by) = dialect::detect(&container)?;
        Ok(Self { container, dialect, known_by })
    }

    /// Opens a checkpoint in the dialect of this name: one of those that it names itself, or any
    /// if it names none.
    ///
    /// # Errors
    /// As [`Container::open`]; an unknown name; [`CheckpointError::OtherDialect`] and
    /// [`CheckpointError::NotPlain`].
    pub fn open_as(path: impl AsRef<Path>, dialect: &str) -> Result<Self, CheckpointError> {
        let dialect = dialect::named(dialect)?;
        let container = Container::open(path)?;
        dialect::check(&container, dialect)?;
        Ok(Self { container, dialect, known_by: KnownBy::Caller })
    }

    /// The dialect it is read in.
    pub fn dialect(&self) -> &'static str {
        self.dialect.name()
    }

    /// The source of the dialect.
    pub fn known_by(&self) -> KnownBy {
        self.known_by
    }

    /// The files.
    pub fn container(&self) -> &Container {
        &self.container
    }

    /// The weights, and nothing around them.
    ///
    /// # Errors
    /// As [`Dialect::read`].
    pub fn weights(&self) -> Result<Vec<Weight<'_>>, CheckpointError> {
        self.read().map(|(weights, _)| weights)
    }

    /// The weights as the dialect has them, and in the axes of the architecture's parameters: only
    /// `config.json` says that a packed matrix is one of `[inputs, outputs]`.
    fn read(&self) -> Result<(Vec<Weight<'_>>, Quantization), CheckpointError> {
        let (mut weights, quantization) = dialect::read(self.dialect, &self.container)?;
        let architecture = Architecture::of_config(self.container.config());
        for weight in &mut weights {
            let transposed = architecture.is_transposed(weight.module(), weight.shape());
            if let Value::Fp4(fp4) = &mut weight.value {
                fp4.transposed |= transposed && fp4.shape.len() == 2;
            }
        }
        Ok((weights, quantization))
    }

    /// All that another dialect needs to write the checkpoint. No data is copied.
    ///
    /// # Errors
    /// As [`Dialect::read`].
    pub fn model(&self) -> Result<Model<'_>, CheckpointError> {
        let (weights, quantization) = self.read()?;
        let gguf = match self.container.metadata() {
            Some(Metadata::Gguf(metadata)) => Some(metadata.clone()),
            Some(Metadata::Safetensors(_)) | None => None,
        };
        Ok(Model {
            weights,
            files: self.container.file_names(),
            config: self.container.config().cloned(),
            quantization,
            gguf,
            sidecars: self.container.sidecars().to_vec(),
        })
    }
}
