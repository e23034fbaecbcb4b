//! Writing a model in a dialect: everything is planned and checked before the first byte, then
//! one weight after another is made and written; what is there at the end is whole or not there.

mod options;
mod plan;
mod publish;
mod report;
mod target;

use std::path::Path;

use crate::dialect;
use crate::error::CheckpointError;
use crate::weight::Model;
pub use options::{Shards, WriteOptions};
use plan::Plan;
pub use report::WriteReport;
use target::Target;

impl Model<'_> {
    /// Writes the model: a folder of safetensors files with configs and sidecar files, or a GGUF
    /// file.
    ///
    /// The same model makes the same bytes. Nothing is at `path` until all of it is.
    ///
    /// Casting and decoding happen twice, once to plan and once to write, so that never more than
    /// one weight is in memory.
    ///
    /// # Errors
    /// An unknown or read-only dialect, weights that it cannot hold, a path that exists, and what
    /// the file system refuses.
    pub fn write(
        &self,
        path: impl AsRef<Path>,
        dialect: &str,
        options: &WriteOptions,
    ) -> Result<WriteReport, CheckpointError> {
        let path = path.as_ref();
        let dialect = dialect::named(dialect)?;
        let writer = dialect.writer().ok_or_else(|| CheckpointError::ReadOnly {
            dialect: dialect.name(),
            dialects: dialect::written(),
        })?;
        if std::fs::symlink_metadata(path).is_ok() {
            return Err(CheckpointError::Exists { path: path.to_owned() });
        }
        let target = Target { dialect, writer, options };
        let plan = Plan::new(self, &target)?;
        publish::publish(self, &target, &plan, path)?;
        Ok(plan.report)
    }
}
