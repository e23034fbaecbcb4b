//! Writing a model in a dialect: everything is planned and checked before the first byte, then
//! one weight after another is made and written; what is there at the end is whole or not there.

mod plan;
mod publish;

use std::borrow::Cow;
use std::path::Path;

use burn_fp4_formats::{Fp4Format, bf16};

use crate::cast::{self, CastReport};
use crate::dialect::{self, Dialect, Stated, Write};
use crate::dtype::Dtype;
use crate::error::CheckpointError;
use crate::fp4::{Fp4Weight, Numbers, TensorScale};
use crate::storage::transpose;
use crate::tensor::Tensor;
use crate::weight::{Model, Value, Weight};
use plan::Plan;

/// How tensors are spread over files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shards {
    /// As in the source: each weight in the file of its name. What came from no safetensors file
    /// goes into one.
    AsRead,
    /// New files of at most so many bytes of data, unless a single weight has more.
    Size(u64),
}

/// What is done to the weights on the way.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions {
    /// How tensors are spread over files.
    pub shards: Shards,
    /// FP4 of another format is cast to this one.
    pub cast: Option<Fp4Format>,
    /// FP8 is decoded to this dtype (F32 or BF16).
    pub decode_fp8: Option<Dtype>,
    /// FP4 is decoded to this dtype (F32 or BF16).
    pub decode_fp4: Option<Dtype>,
    /// Whether a tensor scale may be folded into the block scales where that changes values.
    pub inexact: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        let (cast, decode_fp8, decode_fp4, inexact) = (None, None, None, false);
        Self { shards: Shards::AsRead, cast, decode_fp8, decode_fp4, inexact }
    }
}

/// What was written, and what changed on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteReport {
    /// Files with tensors.
    pub files: usize,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// FP4 weights that were cast to another format.
    pub cast: CastReport,
    /// FP4 weights whose tensor scale was folded into the block scales.
    pub folded: CastReport,
    /// Tensor scales of which the reciprocal was written, as the dialect states the other.
    pub inverted: u64,
    /// Those of them that do not come back when they are inverted again.
    pub inverted_inexactly: u64,
    /// Scales of inputs for which the dialect has no place.
    pub input_scales_left_out: u64,
    /// Weights that were decoded to floats.
    pub decoded: u64,
}

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

/// What is written: the dialect, and what is done on the way.
struct Target<'t> {
    dialect: &'static dyn Dialect,
    writer: &'static dyn Write,
    options: &'t WriteOptions,
}

impl Target<'_> {
    /// The weight as the dialect gets it.
    fn prepare<'w>(
        &self,
        weight: &'w Weight<'_>,
        report: &mut WriteReport,
    ) -> Result<Cow<'w, Weight<'w>>, CheckpointError> {
        let mut prepared: Cow<'w, Weight<'w>> = Cow::Borrowed(weight);
        match (&weight.value, self.options.decode_fp8, self.options.decode_fp4) {
            (Value::Fp8(fp8), Some(dtype), _) => {
                report.decoded += 1;
                return Ok(Cow::Owned(decoded(weight, fp8.decode(dtype)?)));
            }
            (Value::Fp4(fp4), _, Some(dtype)) => {
                report.decoded += 1;
                return Ok(Cow::Owned(decoded(weight, decode_fp4(&weight.name, fp4, dtype)?)));
            }
            (Value::Plain(_) | Value::Fp8(_) | Value::Fp4(_), _, _) => {}
        }
        if let (Value::Fp4(fp4), Some(format)) = (&weight.value, self.options.cast)
            && fp4.format != format
        {
            let (cast, counted) = cast::cast(&weight.name, fp4, format)?;
            report.cast.add(counted);
            prepared.to_mut().value = Value::Fp4(cast);
        }
        let holds = self.writer.holds();
        if prepared.input_scale.is_some() && prepared.is_quantized() && !holds.input_scale {
            report.input_scales_left_out += 1;
            prepared.to_mut().input_scale = None;
        }
        let folded = match &prepared.value {
            Value::Fp4(fp4) => self.tensor_scale(&weight.name, fp4, holds.tensor_scale, report)?,
            Value::Plain(_) | Value::Fp8(_) => None,
        };
        if let Some(folded) = folded {
            prepared.to_mut().value = Value::Fp4(folded);
        }
        Ok(prepared)
    }

    /// Folds a tensor scale where the dialect has no place for it; counts what is inverted.
    fn tensor_scale(
        &self,
        name: &str,
        fp4: &Fp4Weight<'_>,
        stated: Stated,
        report: &mut WriteReport,
    ) -> Result<Option<Fp4Weight<'static>>, CheckpointError> {
        let Some(scale) = &fp4.tensor_scale else { return Ok(None) };
        match (scale, stated) {
            (TensorScale::Multiplier(_), Stated::Multiplier) => Ok(None),
            (TensorScale::Divisor(_), Stated::Divisor) => Ok(None),
            (TensorScale::Multiplier(numbers), Stated::Divisor)
            | (TensorScale::Divisor(numbers), Stated::Multiplier) => {
                count_inverted(numbers, report);
                Ok(None)
            }
            (_, Stated::Folded) => {
                let (folded, counted) = cast::fold(name, fp4)?;
                if counted.changed_values > 0 && !self.options.inexact {
                    let (dialect, weight) = (self.dialect.name(), name.to_owned());
                    let what = "a tensor scale that is not folded exactly; allow it to be inexact";
                    return Err(CheckpointError::CannotHold { dialect, weight, what });
                }
                report.folded.add(counted);
                Ok(Some(folded))
            }
        }
    }
}

fn count_inverted(numbers: &Numbers<'_>, report: &mut WriteReport) {
    for number in numbers.to_vec() {
        report.inverted += 1;
        let again = 1.0 / (1.0 / number);
        report.inverted_inexactly += u64::from(again.to_bits() != number.to_bits());
    }
}

/// The weight with floats for its value. The layer's input is no longer quantized.
fn decoded<'w>(weight: &Weight<'_>, tensor: Tensor<'w>) -> Weight<'w> {
    Weight::new(weight.name.clone(), weight.file, Value::Plain(tensor))
}

/// The values as the model's parameter has them.
fn decode_fp4(
    name: &str,
    fp4: &Fp4Weight<'_>,
    dtype: Dtype,
) -> Result<Tensor<'static>, CheckpointError> {
    let values = fp4.dequantize();
    let mut shape = fp4.shape.clone();
    let values = if fp4.transposed {
        let axes = shape.len();
        shape.swap(axes - 2, axes - 1);
        transpose(&values, fp4.stacked(), fp4.rows(), fp4.cols())
    } else {
        values
    };
    let bytes: Vec<u8> = match dtype {
        Dtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        Dtype::BF16 => {
            values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect()
        }
        _ => {
            return Err(CheckpointError::CannotHold {
                dialect: "decoding",
                weight: name.to_owned(),
                what: "dtypes other than F32 and BF16",
            });
        }
    };
    Tensor::new(name.to_owned(), dtype, shape, bytes)
}
