//! Weights as the target gets them: cast or decoded as asked, and without the scales for which its
//! dialect has no place.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use burn_fp4_formats::{Fp4Format, bf16};

use super::options::WriteOptions;
use super::report::WriteReport;
use crate::cast;
use crate::dialect::{Dialect, Stated, Write};
use crate::dtype::{DataType, Dtype};
use crate::error::CheckpointError;
use crate::fp4::{Fp4Weight, Numbers, TensorScale};
use crate::tensor::Tensor;
use crate::weight::{Value, Weight};

/// What an error of decoding names in place of a dialect.
const DECODING: &str = "decoding";

/// What is written: the dialect, and what is done on the way.
pub(super) struct Target {
    pub(super) dialect: &'static dyn Dialect,
    pub(super) writer: &'static dyn Write,
    pub(super) options: WriteOptions,
    /// Weights for which other options hold than for all, by their names.
    pub(super) others: HashMap<String, WriteOptions>,
}

impl Target {
    /// The options for a weight.
    fn options_of(&self, weight: &Weight<'_>) -> &WriteOptions {
        self.others.get(&weight.name).unwrap_or(&self.options)
    }

    /// Whether what becomes of a weight depends on its values, and not on names, shapes and scales
    /// of whole tensors alone.
    pub(super) fn looks_at_values(&self, weight: &Weight<'_>) -> bool {
        let Value::Fp4(fp4) = &weight.value else { return false };
        let options = self.options_of(weight);
        let cast = cast_of(options, fp4).is_some();
        options.decode_fp4.is_none() && (cast || self.folds(weight))
    }

    /// Whether a weight has a tensor scale that the dialect has no place for.
    pub(super) fn folds(&self, weight: &Weight<'_>) -> bool {
        let Value::Fp4(fp4) = &weight.value else { return false };
        let stated = self.writer.holds_of(weight).tensor_scale;
        fp4.tensor_scale.is_some() && stated == Stated::Folded
    }

    /// The weight as the dialect gets it, but without the values that are decoded: what a plan
    /// needs.
    pub(super) fn outline<'w>(
        &self,
        weight: &'w Weight<'_>,
        report: &mut WriteReport,
    ) -> Result<Cow<'w, Weight<'w>>, CheckpointError> {
        let options = self.options_of(weight);
        let (shape, dtype) = match (&weight.value, options.decode_fp8, options.decode_fp4) {
            (Value::Fp8(fp8), Some(dtype), _) => (fp8.values.shape.to_vec(), dtype),
            (Value::Fp4(fp4), _, Some(dtype)) => (fp4.parameter_shape(), dtype),
            (Value::Plain(_) | Value::Fp8(_) | Value::Fp4(_), _, _) => {
                return self.prepare(weight, report);
            }
        };
        check_float(&weight.name, dtype)?;
        report.decoded += 1;
        let (file, dtype) = (Path::new(""), DataType::Plain(dtype));
        let (name, shape) = (weight.name.clone().into(), shape.into());
        let tensor = Tensor { name, file, dtype, shape, bytes: (&[]).into() };
        Ok(Cow::Owned(decoded(weight, tensor)?))
    }

    /// The weight as the dialect gets it.
    pub(super) fn prepare<'w>(
        &self,
        weight: &'w Weight<'_>,
        report: &mut WriteReport,
    ) -> Result<Cow<'w, Weight<'w>>, CheckpointError> {
        let mut prepared: Cow<'w, Weight<'w>> = Cow::Borrowed(weight);
        let options = self.options_of(weight);
        match (&weight.value, options.decode_fp8, options.decode_fp4) {
            (Value::Fp8(fp8), Some(dtype), _) => {
                check_float(&weight.name, dtype)?;
                report.decoded += 1;
                return Ok(Cow::Owned(decoded(weight, fp8.decode(dtype)?)?));
            }
            (Value::Fp4(fp4), _, Some(dtype)) => {
                check_float(&weight.name, dtype)?;
                report.decoded += 1;
                return Ok(Cow::Owned(decoded(weight, decode_fp4(&weight.name, fp4, dtype)?)?));
            }
            (Value::Plain(_) | Value::Fp8(_) | Value::Fp4(_), _, _) => {}
        }
        if let Value::Fp4(fp4) = &weight.value
            && let Some(format) = cast_of(options, fp4)
        {
            let (cast, counted) = cast::cast(&weight.name, fp4, format)?;
            report.cast.add(counted);
            prepared.to_mut().value = Value::Fp4(cast);
        }
        let holds = self.writer.holds_of(&prepared);
        if prepared.input_scale.is_some() && prepared.is_quantized() && !holds.input_scale {
            report.input_scales_left_out += 1;
            prepared.to_mut().input_scale = None;
        }
        let folded = match &prepared.value {
            Value::Fp4(fp4) => {
                let fold = Fold { stated: holds.tensor_scale, inexact: options.inexact };
                self.tensor_scale(&weight.name, fp4, fold, report)?
            }
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
        fold: Fold,
        report: &mut WriteReport,
    ) -> Result<Option<Fp4Weight<'static>>, CheckpointError> {
        let Some(scale) = &fp4.tensor_scale else { return Ok(None) };
        match (scale, fold.stated) {
            (TensorScale::Multiplier(_), Stated::Multiplier) => Ok(None),
            (TensorScale::Divisor(_), Stated::Divisor) => Ok(None),
            (TensorScale::Multiplier(numbers), Stated::Divisor)
            | (TensorScale::Divisor(numbers), Stated::Multiplier) => {
                count_inverted(numbers, report);
                Ok(None)
            }
            (_, Stated::Folded) => {
                let (folded, counted) = cast::fold(name, fp4)?;
                if counted.changed_values > 0 && !fold.inexact {
                    let (dialect, weight) = (self.dialect.name(), name.to_owned());
                    let what = CheckpointError::NOT_FOLDED_EXACTLY;
                    return Err(CheckpointError::CannotHold { dialect, weight, what });
                }
                report.folded.add(counted);
                Ok(Some(folded))
            }
        }
    }
}

/// How a tensor scale is stated, and whether values may change for that.
struct Fold {
    stated: Stated,
    inexact: bool,
}

/// The format that a weight is cast to. A cast has the blocks of the format's definition.
pub(super) fn cast_of(options: &WriteOptions, fp4: &Fp4Weight<'_>) -> Option<Fp4Format> {
    let other =
        |format: &Fp4Format| fp4.format != *format || fp4.block_size != format.row().block_size;
    options.cast.filter(other)
}

fn count_inverted(numbers: &Numbers<'_>, report: &mut WriteReport) {
    for number in numbers.to_vec() {
        report.inverted += 1;
        let again = 1.0 / (1.0 / number);
        report.inverted_inexactly += u64::from(again.to_bits() != number.to_bits());
    }
}

/// The weight with floats for its value. The layer's input is no longer quantized.
fn decoded<'w>(weight: &Weight<'_>, tensor: Tensor<'w>) -> Result<Weight<'w>, CheckpointError> {
    if weight.pre_quant_scale.is_some() {
        // Without it the layer computes something else: the values were divided by it.
        let what = "a scale before quantization";
        return Err(CheckpointError::cannot_hold(DECODING, &weight.name, what));
    }
    Ok(Weight::new(weight.name.clone(), weight.file, Value::Plain(tensor)))
}

/// Checks that weights are decoded to a dtype.
fn check_float(weight: &str, dtype: Dtype) -> Result<(), CheckpointError> {
    match dtype {
        Dtype::F32 | Dtype::BF16 => Ok(()),
        _ => {
            let what = "dtypes other than F32 and BF16";
            Err(CheckpointError::cannot_hold(DECODING, weight, what))
        }
    }
}

/// The values as the model's parameter has them.
fn decode_fp4(
    name: &str,
    fp4: &Fp4Weight<'_>,
    dtype: Dtype,
) -> Result<Tensor<'static>, CheckpointError> {
    let (shape, values) = fp4.parameter();
    let bytes: Vec<u8> = match dtype {
        Dtype::BF16 => {
            values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect()
        }
        _ => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    };
    Tensor::new(name.to_owned(), dtype, shape, bytes)
}
