//! Meaning of a checkpoint's names and numbers: one file a dialect, which answers the same few
//! questions, and one row in [`DIALECTS`].
//!
//! ```
//! use burn_fp4_checkpoints::dialect::{named, writer, written};
//!
//! assert_eq!(named("quark")?.name(), "quark");
//! assert!(writer("quark").is_err() && !written().contains(&"quark"), "it is only read");
//! let (_, writer) = writer("modelopt")?;
//! assert!(writer.fuses(), "query, key and value share a tensor scale");
//! # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
//! ```

mod comfyui;
mod compressed_tensors;
mod deepseek;
mod fp_quant;
mod gguf;
mod gpt_oss;
mod miles;
mod mlx;
mod modelopt;
mod parts;
mod plain;
mod quark;
mod readers;
mod scheme;
mod torchao;
mod traits;

use std::sync::LazyLock;

use crate::container::{CONFIG, Container};
use crate::error::CheckpointError;
use crate::fp4::{Fp4Weight, TensorScale};
use crate::tensor::{NewTensor, Tensor};
use crate::weight::{Quantization, Value, Weight};
pub use readers::{Known, Program, ProgramRow, ReadBy};
pub(crate) use scheme::has_dynamic_inputs;
pub use traits::{Dialect, Envelope, ScaleConvention, ScaleSupport, Write};

/// The dialect of a checkpoint that names no other.
static PLAIN: plain::Plain = plain::Plain { dialects: names, suffixes };

/// The dialects.
pub static DIALECTS: [&dyn Dialect; 12] = [
    &PLAIN,
    &modelopt::ModelOpt,
    &miles::Miles,
    &compressed_tensors::CompressedTensors,
    &gpt_oss::GptOss,
    &gguf::Gguf,
    &mlx::Mlx,
    &deepseek::DeepSeek,
    &quark::Quark,
    &torchao::TorchAo,
    &comfyui::ComfyUi,
    &fp_quant::FpQuant,
];

/// The names of the dialects.
fn names() -> Vec<&'static str> {
    DIALECTS.iter().map(|dialect| dialect.name()).collect()
}

/// The [suffixes](Dialect::suffixes) of the dialects.
fn suffixes() -> Vec<&'static str> {
    DIALECTS.iter().flat_map(|dialect| dialect.suffixes()).copied().collect()
}

/// The [methods](Dialect::quant_methods) that configs may name, as a text.
static QUANT_METHODS: LazyLock<String> = LazyLock::new(|| {
    let methods = DIALECTS.iter().flat_map(|dialect| dialect.quant_methods()).copied();
    match &methods.collect::<Vec<_>>()[..] {
        [others @ .., last] if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        methods => methods.concat(),
    }
});

/// The dialect of a name.
///
/// # Errors
/// [`CheckpointError::UnknownDialect`] with the names there are.
pub fn named(name: &str) -> Result<&'static dyn Dialect, CheckpointError> {
    let found = DIALECTS.into_iter().find(|dialect| dialect.name() == name);
    found
        .ok_or_else(|| CheckpointError::UnknownDialect { name: name.to_owned(), dialects: names() })
}

/// The tensors of a weight in a dialect, in the order of the index, given its
/// [`writer`].
///
/// # Errors
/// [`CheckpointError::CannotHold`] if the dialect has no place for it: as [`Write::tensors`], and
/// for a Hadamard transform that readers do not apply to the inputs of layers.
pub fn tensors<'w>(
    (dialect, writer): (&dyn Dialect, &dyn Write),
    weight: &'w Weight<'_>,
) -> Result<Vec<NewTensor<'w>>, CheckpointError> {
    match &weight.value {
        Value::Fp4(fp4) if fp4.hadamard.is_some() && !writer.transforms() => {
            let what = CheckpointError::TRANSFORMED_TO_DECODE;
            Err(CheckpointError::cannot_hold(dialect.name(), &weight.name, what))
        }
        Value::Plain(_) | Value::Fp8(_) | Value::Fp4(_) => writer.tensors(weight),
    }
}

/// The source of the dialect of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum KnownBy {
    /// Its configs or metadata name it, or name none, as nothing is quantized.
    Metadata,
    /// Only the names and shapes of its tensors do, which no other dialect explains.
    Tensors,
    /// The caller names it.
    Caller,
}

/// The dialect that a checkpoint says it is written in, or that explains its tensors.
///
/// # Errors
/// [`CheckpointError::Ambiguous`] if it says several, [`CheckpointError::NoDialect`] if several
/// read its tensors as different weights, [`CheckpointError::Field`] if it says one that is
/// unknown.
pub(crate) fn detect(
    container: &Container,
) -> Result<(&'static dyn Dialect, KnownBy), CheckpointError> {
    let detections = detections(container);
    match detections[..] {
        [(dialect, _)] => Ok((dialect, KnownBy::Metadata)),
        [] => match container.quantization() {
            None => by_tensors(container),
            Some(quantization) => Err(CheckpointError::Field {
                path: container.config_path(CONFIG),
                field: "quantization_config.quant_method".to_owned(),
                expected: &QUANT_METHODS,
                found: quantization["quant_method"].to_string(),
                remedy: "name the dialect to read it in, or use another model",
            }),
        },
        _ => Err(CheckpointError::Ambiguous {
            path: container.root().to_owned(),
            evidence: detections.iter().map(text_of).collect(),
        }),
    }
}

/// Reads a checkpoint in a dialect.
///
/// # Errors
/// As [`Dialect::read`], and an FP8 matrix without the scales that it has by the configs.
pub(crate) fn read<'a>(
    dialect: &dyn Dialect,
    container: &'a Container,
) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
    let (weights, quantization) = dialect.read(container)?;
    if let Some(file) = dialect.patterns_file(container) {
        parts::check_scaled(container, file, &weights, &quantization)?;
    }
    Ok((weights, quantization))
}

/// The dialect that explains the tensors of a checkpoint that says nothing: no part of a quantized
/// weight is left alone, and no other dialect puts more of them together. Of several that read the
/// same weights it is the first.
fn by_tensors(container: &Container) -> Result<(&'static dyn Dialect, KnownBy), CheckpointError> {
    let finder = PLAIN.part_finder(container);
    let Some(part) = container.tensors().find(|tensor| finder.is_part(tensor)) else {
        return Ok((&PLAIN, KnownBy::Metadata));
    };
    let alone = |weight: &Weight<'_>| match &weight.value {
        Value::Plain(tensor) => finder.is_part(tensor),
        Value::Fp8(_) | Value::Fp4(_) => false,
    };
    let mut best: Vec<(&'static dyn Dialect, Vec<Weight<'_>>)> = Vec::new();
    for dialect in DIALECTS.into_iter().filter(|dialect| !dialect.names_itself()) {
        let Ok((weights, _)) = read(dialect, container) else { continue };
        let fewest = best.first().map_or(usize::MAX, |(_, best)| best.len());
        if weights.iter().any(alone) || weights.len() > fewest {
            continue;
        }
        if weights.len() < fewest {
            best.clear();
        }
        if !best.iter().any(|(_, known)| read_the_same(known, &weights)) {
            best.push((dialect, weights));
        }
    }
    match best[..] {
        // As nothing it is an error that names the part.
        [] => Ok((&PLAIN, KnownBy::Metadata)),
        [(dialect, _)] => Ok((dialect, KnownBy::Tensors)),
        _ => Err(CheckpointError::NoDialect {
            path: container.root().to_owned(),
            tensor: part.name.into_owned(),
            dialects: best.iter().map(|(dialect, _)| dialect.name()).collect(),
        }),
    }
}

/// Returns true if two dialects make the same weights of a checkpoint's tensors, by headers alone.
fn read_the_same(ones: &[Weight<'_>], others: &[Weight<'_>]) -> bool {
    let stated = |scale: &Option<TensorScale<'_>>| {
        scale.as_ref().map(|scale| matches!(scale, TensorScale::Divisor(_)))
    };
    let same = |one: &Weight<'_>, other: &Weight<'_>| {
        let smoothing = |weight: &Weight<'_>| weight.pre_quant_scale.as_ref().map(Tensor::len);
        let values = match (&one.value, &other.value) {
            (Value::Plain(_), Value::Plain(_)) => true,
            (Value::Fp8(one), Value::Fp8(other)) => one.granularity == other.granularity,
            (Value::Fp4(one), Value::Fp4(other)) => {
                let form = |w: &Fp4Weight<'_>| (w.transposed, w.storage, w.order);
                form(one) == form(other) && stated(&one.tensor_scale) == stated(&other.tensor_scale)
            }
            _ => false,
        };
        values
            && (&one.name, one.kind(), one.shape()) == (&other.name, other.kind(), other.shape())
            && stated(&one.input_scale) == stated(&other.input_scale)
            && smoothing(one) == smoothing(other)
    };
    ones.len() == others.len() && ones.iter().zip(others).all(|(one, other)| same(one, other))
}

/// A dialect, and the evidence for it in a checkpoint.
type Detection = (&'static dyn Dialect, &'static str);

fn detections(container: &Container) -> Vec<Detection> {
    let detection = |dialect: &'static dyn Dialect| Some((dialect, dialect.evidence(container)?));
    DIALECTS.into_iter().filter_map(detection).collect()
}

fn text_of((dialect, why): &Detection) -> String {
    format!("{} ({why})", dialect.name())
}

/// Checks that a checkpoint names this dialect, or none, and of one without quantization that no
/// tensor is a part of a quantized weight.
///
/// # Errors
/// [`CheckpointError::OtherDialect`] and [`CheckpointError::NotPlain`].
pub(crate) fn check(
    container: &Container,
    asked: &'static dyn Dialect,
) -> Result<(), CheckpointError> {
    let detections = detections(container);
    match detections.first() {
        Some(first) if detections.iter().all(|(named, _)| named.name() != asked.configs_of()) => {
            let (path, evidence) = (container.root().to_owned(), text_of(first));
            Err(CheckpointError::OtherDialect { path, asked: asked.name(), evidence })
        }
        None if asked.name() == PLAIN.name() => PLAIN.check(container),
        Some(_) | None => Ok(()),
    }
}

/// The dialect of a name, and how it is written.
///
/// # Errors
/// As [`named`], and [`CheckpointError::ReadOnly`].
pub fn writer(name: &str) -> Result<(&'static dyn Dialect, &'static dyn Write), CheckpointError> {
    let dialect = named(name)?;
    let writer = dialect.writer().ok_or_else(|| CheckpointError::ReadOnly {
        dialect: dialect.name(),
        dialects: written(),
    })?;
    Ok((dialect, writer))
}

/// The names of the dialects that are written.
#[must_use]
pub fn written() -> Vec<&'static str> {
    DIALECTS.iter().filter(|d| d.writer().is_some()).map(|d| d.name()).collect()
}

#[cfg(test)]
mod tests {
    use burn_fp4_formats::Fp4Format;

    use super::*;
    use crate::fp4::Order;
    use crate::storage::Storage;

    #[test]
    fn an_error_names_the_quant_methods_of_all_dialects() {
        let expected = "modelopt, compressed-tensors, mxfp4, fp8, quark, torchao or fp_quant";
        assert_eq!(*QUANT_METHODS, expected);
    }

    #[test]
    fn weights_are_the_same_only_if_their_bytes_mean_the_same() {
        let weight = |change: &dyn Fn(&mut Fp4Weight<'static>)| {
            let mut fp4 = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![2, 16], false, true);
            change(&mut fp4);
            vec![Weight::new("a.weight", 0, Value::Fp4(fp4))]
        };
        let one = weight(&|_| {});
        assert!(read_the_same(&one, &one) && !read_the_same(&one, &[]));
        let tiled = weight(&|fp4| fp4.storage = Storage::Tiled { high_first: true });
        let divided = weight(&|fp4| {
            let numbers = fp4.multipliers();
            fp4.tensor_scale = Some(TensorScale::Divisor(crate::Numbers::new(&numbers)));
        });
        let ordered = weight(&|fp4| fp4.order = Order::ScalesFirst);
        for other in [tiled, divided, ordered] {
            assert!(!read_the_same(&one, &other), "{other:?}");
        }
    }
}
