//! Weights as the target gets them: cast or decoded as asked, and without the scales for which its
//! dialect has no place.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use burn_fp4_formats::Fp4Format;

use super::options::WriteOptions;
use super::report::WriteReport;
use crate::cast;
use crate::dialect::{self, Dialect, ScaleConvention, Write};
use crate::dtype::{DataType, Dtype};
use crate::error::{CheckpointError, TensorProblem};
use crate::fp4::{Fp4Weight, Numbers, TensorScale, reciprocal};
use crate::tensor::{NewTensor, Tensor, append, check_range};
use crate::weight::{Value, Weight};

/// The word for decoding in errors, in place of a dialect.
const DECODING: &str = "decoding";
/// Dtypes that values are not decoded to.
const OTHER_DTYPES: &str = "dtypes other than F32, BF16 and F16";

/// The dialect that is written, and the changes on the way.
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

    /// Returns true if the result depends on the values of a weight, and not on names, shapes and
    /// scales of whole tensors alone.
    pub(super) fn looks_at_values(&self, weight: &Weight<'_>) -> bool {
        let Value::Fp4(fp4) = &weight.value else { return false };
        let options = self.options_of(weight);
        let cast = cast_of(options, fp4).is_some();
        options.decode_fp4.is_none() && (cast || self.folds(weight))
    }

    /// The tensors of a weight, in the order of the index.
    ///
    /// # Errors
    /// As [`dialect::tensors`].
    pub(super) fn tensors<'w>(
        &self,
        weight: &'w Weight<'_>,
    ) -> Result<Vec<NewTensor<'w>>, CheckpointError> {
        dialect::tensors((self.dialect, self.writer), weight)
    }

    /// Returns true if a weight has a tensor scale that the dialect has no place for.
    pub(super) fn folds(&self, weight: &Weight<'_>) -> bool {
        let Value::Fp4(fp4) = &weight.value else { return false };
        let convention = self.writer.scale_support_of(weight).tensor_scale;
        fp4.tensor_scale.is_some() && convention == ScaleConvention::Folded
    }

    /// Checks the scales that the dialect states the other way round.
    pub(super) fn check_scales(&self, weight: &Weight<'_>) -> Result<(), CheckpointError> {
        let Value::Fp4(fp4) = &weight.value else { return Ok(()) };
        let convention = self.writer.scale_support_of(weight).tensor_scale;
        let scales = [("tensor scale", &fp4.tensor_scale), ("input scale", &weight.input_scale)];
        let mut there =
            scales.into_iter().filter_map(|(what, scale)| Some((what, scale.as_ref()?)));
        there.try_for_each(|(what, scale)| check_reciprocals(&weight.name, what, scale, convention))
    }

    /// The dtype that a weight is decoded to, if it is.
    pub(super) fn decoded_to(&self, weight: &Weight<'_>) -> Option<Dtype> {
        let options = self.options_of(weight);
        match &weight.value {
            Value::Plain(tensor) if tensor.plain().is_none() => options.decode_ggml,
            Value::Plain(tensor) if tensor.dtype.is_fp8() => options.decode_fp8,
            Value::Plain(tensor) => options.cast_floats.filter(|_| tensor.is_wide_matrix()),
            Value::Fp8(_) => options.decode_fp8,
            Value::Fp4(_) => options.decode_fp4,
        }
    }

    /// Returns true if the bytes of a weight are copied.
    pub(super) fn copies(&self, weight: &Weight<'_>) -> bool {
        !weight.is_quantized() && self.decoded_to(weight).is_none()
    }

    /// The weight as the dialect gets it, but without the values that are decoded: what a plan
    /// needs.
    pub(super) fn outline<'w>(
        &self,
        weight: &'w Weight<'_>,
        report: &mut WriteReport,
    ) -> Result<Cow<'w, Weight<'w>>, CheckpointError> {
        let Some(dtype) = self.decoded_to(weight) else { return self.prepare(weight, report) };
        let shape = match &weight.value {
            Value::Plain(tensor) if !tensor.dtype.is_float() => return Err(tensor.not_floats()),
            Value::Plain(tensor) => tensor.shape.to_vec(),
            Value::Fp8(fp8) => fp8.values.shape.to_vec(),
            Value::Fp4(fp4) => fp4.parameter_shape(),
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
        let options = self.options_of(weight);
        let mut prepared: Cow<'w, Weight<'w>> = Cow::Borrowed(weight);
        if let Some(dtype) = self.decoded_to(weight) {
            check_float(&weight.name, dtype)?;
            report.decoded += 1;
            let tensor = match &weight.value {
                Value::Plain(tensor) => tensor.decode(dtype)?,
                Value::Fp8(fp8) => fp8.decode(dtype)?,
                Value::Fp4(fp4) => decode_fp4(&weight.name, fp4, dtype)?,
            };
            return Ok(Cow::Owned(decoded(weight, tensor)?));
        }
        if let Value::Fp4(fp4) = &weight.value
            && let Some(format) = cast_of(options, fp4)
        {
            let (cast, counted) = cast::cast(&weight.name, fp4, format)?;
            report.cast.add(counted);
            prepared.to_mut().value = Value::Fp4(cast);
        }
        let support = self.writer.scale_support_of(&prepared);
        if prepared.input_scale.is_some() && prepared.is_quantized() && !support.input_scale {
            report.input_scales_left_out += 1;
            prepared.to_mut().input_scale = None;
        }
        self.check_scales(&prepared)?;
        let folded = match &prepared.value {
            Value::Fp4(fp4) => {
                let fold = Fold { convention: support.tensor_scale, inexact: options.inexact };
                let folded = self.tensor_scale(&weight.name, fp4, fold, report);
                // To fold it inexactly would not help where only stacked experts have a place.
                let refused = || self.writer.tensors(&prepared).err().filter(is_not_experts);
                folded.map_err(|error| refused().unwrap_or(error))?
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
        match (scale, fold.convention) {
            (TensorScale::Multiplier(_), ScaleConvention::Multiplier) => Ok(None),
            (TensorScale::Divisor(_), ScaleConvention::Divisor) => Ok(None),
            (TensorScale::Multiplier(numbers), ScaleConvention::Divisor)
            | (TensorScale::Divisor(numbers), ScaleConvention::Multiplier) => {
                count_inverted(numbers, report);
                Ok(None)
            }
            (_, ScaleConvention::Folded) => {
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

/// Returns true if a dialect holds stacked experts alone.
fn is_not_experts(error: &CheckpointError) -> bool {
    matches!(error, CheckpointError::CannotHold { what: CheckpointError::NOT_EXPERTS, .. })
}

/// The form of a tensor scale, and whether values may change for that.
struct Fold {
    convention: ScaleConvention,
    inexact: bool,
}

/// The format that a weight is cast to. A cast has the blocks of the format's definition.
pub(super) fn cast_of(options: &WriteOptions, fp4: &Fp4Weight<'_>) -> Option<Fp4Format> {
    let other =
        |format: &Fp4Format| fp4.format != *format || fp4.block_size != format.row().block_size;
    options.cast.filter(other)
}

/// Checks the reciprocals of scales that the dialect states the other way round: they are finite,
/// and not 0.
fn check_reciprocals(
    weight: &str,
    what: &'static str,
    scale: &TensorScale<'_>,
    convention: ScaleConvention,
) -> Result<(), CheckpointError> {
    let (numbers, inverted) = match scale {
        TensorScale::Multiplier(numbers) => (numbers, convention == ScaleConvention::Divisor),
        TensorScale::Divisor(numbers) => (numbers, convention != ScaleConvention::Divisor),
    };
    if !inverted {
        return Ok(());
    }
    let usable = |number: f32| number != 0.0 && number.is_finite();
    let mut numbers = numbers.to_vec().into_iter();
    match numbers.find(|number| !usable(*number) || !usable(reciprocal(*number))) {
        Some(found) => {
            let problem = TensorProblem::NoReciprocal { what, found };
            Err(CheckpointError::tensor(Path::new(""), weight, problem))
        }
        None => Ok(()),
    }
}

fn count_inverted(numbers: &Numbers<'_>, report: &mut WriteReport) {
    for number in numbers.to_vec() {
        report.inverted += 1;
        let inverse = reciprocal(number);
        let again = reciprocal(inverse);
        report.inverted_inexactly += u64::from(again.to_bits() != number.to_bits());
        // The product of two f32 is exact in f64.
        let error = (f64::from(inverse) * f64::from(number) - 1.0).abs();
        report.inverted_rounded += u64::from(error > 0.0);
        report.inverted_error = report.inverted_error.max(error);
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
        Dtype::F32 | Dtype::BF16 | Dtype::F16 => Ok(()),
        _ => Err(CheckpointError::cannot_hold(DECODING, weight, OTHER_DTYPES)),
    }
}

/// The values as the model's parameter has them.
fn decode_fp4(
    name: &str,
    fp4: &Fp4Weight<'_>,
    dtype: Dtype,
) -> Result<Tensor<'static>, CheckpointError> {
    let (shape, values) = fp4.parameter();
    let mut bytes = Vec::new();
    let known = append(&values, dtype, &mut bytes);
    known.ok_or_else(|| CheckpointError::cannot_hold(DECODING, name, OTHER_DTYPES))?;
    let beyond = |problem| CheckpointError::tensor(Path::new(""), name, problem);
    check_range(&values, dtype).map_err(beyond)?;
    Tensor::new(name.to_owned(), dtype, shape, bytes)
}
