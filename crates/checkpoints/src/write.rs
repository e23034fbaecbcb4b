//! Writes a model in a dialect. Everything is planned and checked before the first byte; then one
//! weight after another is made and written. The target appears atomically.

mod flusher;
mod journal;
mod keep;
mod options;
mod output;
mod partial;
mod plan;
mod planned;
mod report;
mod target;

use std::collections::HashMap;
use std::path::Path;

use crate::dialect;
use crate::error::CheckpointError;
use crate::reader::Reader;
use crate::weight::Model;
pub use keep::Kept;
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
    /// The same model makes the same bytes. `path` appears atomically, when all is written.
    ///
    /// Casting happens twice, once to plan and once to write, so that never more than one weight is
    /// in memory. Once it is at `path`, a file system that does not confirm that its name is on the
    /// disk too is no error.
    ///
    /// ```
    /// use burn_fp4_checkpoints::{Dtype, Model, Tensor, Value, Weight, WriteOptions};
    ///
    /// # let path = std::env::temp_dir().join(format!("burn-fp4-write-{}", std::process::id()));
    /// let tensor = Tensor::new("norm.weight", Dtype::F32, vec![2], vec![0; 8])?;
    /// let weights = vec![Weight::new("norm.weight", 0, Value::Plain(tensor))];
    /// let model = Model { weights, ..Model::default() };
    /// let report = model.write(&path, "plain", &WriteOptions::default())?;
    /// assert_eq!((report.files, report.tensors, report.bytes), (1, 1, 8));
    /// assert!(path.join("model.safetensors").is_file());
    /// assert!(model.write(&path, "plain", &WriteOptions::default()).is_err(), "it exists");
    /// # std::fs::remove_dir_all(&path).expect("removed");
    /// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
    /// ```
    ///
    /// # Errors
    /// An unknown or read-only dialect, weights that it cannot hold, a path that exists or of GGUF
    /// does not end in `.gguf`, and what the file system refuses.
    pub fn write(
        &self,
        path: impl AsRef<Path>,
        dialect: &str,
        options: &WriteOptions,
    ) -> Result<WriteReport, CheckpointError> {
        let path = path.as_ref();
        let planned = self.plan(dialect, options)?;
        let mut output = planned.create(path, "", Start::Over)?;
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
    /// ```
    /// use burn_fp4_checkpoints::{Dtype, Model, Tensor, Value, Weight, WriteOptions};
    ///
    /// let tensor = Tensor::new("norm.weight", Dtype::F32, vec![2], vec![0; 8])?;
    /// let weights = vec![Weight::new("norm.weight", 0, Value::Plain(tensor))];
    /// let model = Model { weights, ..Model::default() };
    /// let planned = model.plan("gguf", &WriteOptions::default())?;
    /// assert_eq!((planned.report().tensors, planned.bytes()), (1, vec![8]));
    /// assert!(planned.length() > 8, "there is a header");
    /// assert!(model.plan("quark", &WriteOptions::default()).is_err(), "it is only read");
    /// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
    /// ```
    ///
    /// # Errors
    /// An unknown or read-only dialect, and weights that it cannot hold.
    pub fn plan(
        &self,
        dialect: &str,
        options: &WriteOptions,
    ) -> Result<Planned<'_>, CheckpointError> {
        self.plan_by(Self::target(dialect, options)?, Vec::new(), None)
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
        self.plan_by(Self::target(dialect, options)?, Vec::new(), Some(reader))
    }

    /// [`plan_reading`](Self::plan_reading), where some weights are neither cast nor decoded: a
    /// pattern of `keep` names them, their columns do not fit, readers of the dialect would turn
    /// them again, or readers run them as one with such a weight. Kept weights that the dialect has
    /// no place for become floats. [`Planned::kept`] lists them all.
    ///
    /// ```
    /// use burn_fp4_checkpoints::{Checkpoint, Dtype, Reader, WriteOptions};
    /// # use burn_fp4_checkpoints::{Fp4Weight, Model, Value, Weight};
    /// # use burn_fp4_formats::Fp4Format;
    /// # let folder = format!("burn-fp4-keeping-{}", std::process::id());
    /// # let folder = std::env::temp_dir().join(folder);
    /// # let weights = ["down_proj.weight", "up_proj.weight"].map(|name| {
    /// #     let mut fp4 = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![1, 16], false, true);
    /// #     (fp4.codes, fp4.scales) = (vec![0x22; 8].into(), vec![0x38].into());
    /// #     Weight::new(name, 0, Value::Fp4(fp4))
    /// # });
    /// # let model = Model { weights: weights.into(), ..Model::default() };
    /// # model.write(&folder, "modelopt", &WriteOptions::default())?;
    ///
    /// let checkpoint = Checkpoint::open(&folder)?; // down_proj.weight and up_proj.weight in NVFP4
    /// let (model, reader) = (checkpoint.model()?, Reader::new(checkpoint.container()));
    /// let options = WriteOptions { decode_fp4: Some(Dtype::BF16), ..WriteOptions::default() };
    /// let planned = model.plan_reading("modelopt", &options, &reader)?;
    /// assert_eq!([0, 1].map(|at| planned.decoded_to(at)), [Some(Dtype::BF16); 2]);
    ///
    /// let keep = ["up_proj".to_owned()];
    /// let planned = model.plan_keeping("modelopt", &options, &reader, &keep)?;
    /// assert_eq!([0, 1].map(|at| planned.decoded_to(at)), [Some(Dtype::BF16), None]);
    /// assert_eq!(planned.kept()[0].weight, 1);
    /// # std::fs::remove_dir_all(&folder).expect("removed");
    /// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
    /// ```
    ///
    /// # Errors
    /// As there, and patterns that are none or match nothing.
    pub fn plan_keeping(
        &self,
        dialect: &str,
        options: &WriteOptions,
        reader: &Reader<'a>,
        keep: &[String],
    ) -> Result<Planned<'_>, CheckpointError> {
        let mut target = Self::target(dialect, options)?;
        let kept = keep::kept(self, &target, keep)?;
        let other = |kept: &Kept| (self.weights[kept.weight].name.clone(), kept.options(options));
        target.others = kept.iter().map(other).collect();
        self.plan_by(target, kept, Some(reader))
    }

    fn target(dialect: &str, options: &WriteOptions) -> Result<Target, CheckpointError> {
        let (dialect, writer) = dialect::writer(dialect)?;
        Ok(Target { dialect, writer, options: *options, others: HashMap::new() })
    }

    fn plan_by(
        &self,
        target: Target,
        kept: Vec<Kept>,
        reader: Option<&Reader<'a>>,
    ) -> Result<Planned<'_>, CheckpointError> {
        let plan = PlannedFiles::new(self, &target, reader)?;
        Ok(Planned { model: self, target, plan, kept })
    }
}
