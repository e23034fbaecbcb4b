//! Quantized weights that stay what they are, or become floats, while others are cast, folded or
//! decoded: those that a user names, those whose columns or axes do not fit, and what runs as one
//! with any of these.

use burn_fp4_policy::{Patterns, Reason, keep_together};

use super::options::WriteOptions;
use super::target::{Target, cast_of};
use crate::dtype::Dtype;
use crate::error::CheckpointError;
use crate::selection::families;
use crate::weight::{Model, Value, Weight};

/// A quantized weight that is not changed as all others are.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Kept {
    /// The weight, by its place in the model.
    pub weight: usize,
    /// Why.
    pub reason: Reason,
    /// The dtype it is decoded to, if the dialect has no place for its own format. None: it stays.
    pub floats: Option<Dtype>,
}

/// Decides which weights are kept.
pub(super) fn kept(
    model: &Model<'_>,
    target: &Target,
    keep: &[String],
) -> Result<Vec<Kept>, CheckpointError> {
    let asked = Patterns::new(keep)?;
    asked.check_used("`keep`", model.weights.iter().map(Weight::names))?;
    let reason = |weight: &Weight<'_>| {
        if !weight.is_quantized() {
            return None;
        }
        match asked.first(weight.names()) {
            Some(pattern) => Some(Reason::Asked(pattern.to_owned())),
            None => unfit(model, weight, target),
        }
    };
    let mut reasons: Vec<Option<Reason>> = model.weights.iter().map(reason).collect();
    if target.writer.fuses() {
        let name = |at: usize| model.weights[at].name.as_str();
        keep_together(name, &families(model), &mut reasons);
    }
    let quantized = |(weight, reason): (usize, Option<Reason>)| {
        let value = &model.weights[weight];
        let reason = reason.filter(|_| value.is_quantized())?;
        let turned = matches!(reason, Reason::Transposed(_));
        let holds = !turned
            && !target.folds(value)
            && target.check_scales(value).is_ok()
            && target.tensors(value).is_ok();
        let floats = (!holds).then(|| floats(value, target));
        Some(Kept { weight, reason, floats })
    };
    Ok(reasons.into_iter().enumerate().filter_map(quantized).collect())
}

/// Finds a reason why a weight does not fit: readers of the dialect would turn it again, or its
/// blocks or the records of the dialect do not divide its columns. A dialect that the source is in
/// already keeps what a user has forced into it.
fn unfit(model: &Model<'_>, weight: &Weight<'_>, target: &Target) -> Option<Reason> {
    let Value::Fp4(fp4) = &weight.value else { return None };
    if target.options.decode_fp4.is_some() {
        return None;
    }
    let dialect = target.dialect.name();
    let turned = fp4.transposed && fp4.shape.len() == 2 && !target.writer.turns();
    if turned && model.quantization.dialect != dialect {
        return Some(Reason::Transposed(dialect));
    }
    let own = (fp4.format, fp4.block_size);
    let becomes = cast_of(&target.options, fp4);
    let (format, block_size) = becomes.map_or(own, |format| (format, format.row().block_size));
    let of = target.writer.columns(format, block_size);
    let cols = fp4.cols();
    (!cols.is_multiple_of(of)).then_some(Reason::Columns { cols, of })
}

/// The dtype that a weight is decoded to if the dialect has no place for its format.
fn floats(weight: &Weight<'_>, target: &Target) -> Dtype {
    let asked = match weight.value {
        Value::Fp8(_) => target.options.decode_fp8,
        Value::Plain(_) | Value::Fp4(_) => target.options.decode_fp4,
    };
    asked.unwrap_or(Dtype::BF16)
}

impl Kept {
    /// The options for it, where others are those for all.
    pub(super) fn options(&self, all: &WriteOptions) -> WriteOptions {
        let (decode_fp8, decode_fp4) = (self.floats, self.floats);
        WriteOptions { cast: None, decode_fp8, decode_fp4, inexact: false, ..*all }
    }
}
