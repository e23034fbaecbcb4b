//! Writing a model in a dialect: everything is planned and checked before the first byte, then
//! one weight after another is made and written; what is there at the end is whole or not there.

mod flusher;
mod journal;
mod options;
mod output;
mod partial;
mod plan;
mod planned;
mod report;
mod target;

use std::path::Path;

use crate::dialect;
use crate::error::CheckpointError;
use crate::reader::Reader;
use crate::weight::Model;
pub use options::{Shards, WriteOptions};
pub use output::{Output, Start};
use plan::PlannedFiles;
pub use planned::{Piece, Planned};
pub use report::WriteReport;
use target::Target;

impl<'a> Model<'a> {
    /// Writes the model: a folder of safetensors files with configs and sidecar files, or a GGUF
    /// file.
    ///
    /// The same model makes the same bytes. Nothing is at `path` until all of it is.
    ///
    /// Casting happens twice, once to plan and once to write, so that never more than one weight is
    /// in memory. Once it is at `path`, a file system that does not confirm that its name is on the
    /// disk too is no error.
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
        let planned = self.plan(dialect, options)?;
        let mut output = planned.create(path, "", Start::Anew)?;
        for (at, weight) in self.weights.iter().enumerate() {
            output.write(at, weight)?;
        }
        output.finish()?;
        Ok(planned.report())
    }

    /// Plans to write the model, weight by weight, by [`Planned::create`].
    ///
    /// Only names, shapes and scales of whole tensors matter for that, unless something is cast or
    /// a tensor scale is folded: a weight that is made later may stand here as its
    /// [outline](crate::Fp4Weight::outline).
    ///
    /// # Errors
    /// An unknown or read-only dialect, and weights that it cannot hold.
    pub fn plan(
        &self,
        dialect: &str,
        options: &WriteOptions,
    ) -> Result<Planned<'_>, CheckpointError> {
        self.plan_by(dialect, options, None)
    }

    /// [`plan`](Self::plan), where values that matter are read by a reader of the model's
    /// container instead of its map.
    ///
    /// # Errors
    /// As there, and [`Reader::read`].
    pub fn plan_reading(
        &self,
        dialect: &str,
        options: &WriteOptions,
        reader: &Reader<'a>,
    ) -> Result<Planned<'_>, CheckpointError> {
        self.plan_by(dialect, options, Some(reader))
    }

    fn plan_by(
        &self,
        dialect: &str,
        options: &WriteOptions,
        reader: Option<&Reader<'a>>,
    ) -> Result<Planned<'_>, CheckpointError> {
        let (dialect, writer) = dialect::writer(dialect)?;
        let target = Target { dialect, writer, options: *options };
        let plan = PlannedFiles::new(self, &target, reader)?;
        Ok(Planned { model: self, target, plan })
    }
}
