//! How a checkpoint is named on the command line.

use std::path::{Path, PathBuf};

use burn_fp4_checkpoints::Checkpoint;

use crate::error::CliError;

// A checkpoint to read. No documentation: clap would take it for that of the command.
#[derive(clap::Args)]
pub(crate) struct Input {
    /// A safetensors or GGUF file, or a folder of a Hugging Face model.
    #[arg(value_name = "INPUT")]
    pub(crate) path: PathBuf,
    /// The dialect to read it in, where its config does not say.
    #[arg(long, value_name = "DIALECT")]
    pub(crate) from: Option<String>,
}

impl Input {
    /// Opens it: headers are read and checked, tensors are not.
    pub(crate) fn open(&self) -> Result<Checkpoint, CliError> {
        open(&self.path, self.from.as_deref())
    }
}

/// Opens a checkpoint in a dialect, or in the one that it names itself.
pub(crate) fn open(path: &Path, dialect: Option<&str>) -> Result<Checkpoint, CliError> {
    Ok(match dialect {
        Some(dialect) => Checkpoint::open_as(path, dialect)?,
        None => Checkpoint::open(path)?,
    })
}
