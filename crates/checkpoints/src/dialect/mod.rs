//! What a checkpoint's names and numbers mean: one file a dialect, which answers the same few
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

use crate::container::Container;
use crate::error::CheckpointError;
use crate::json::Json;
pub use readers::{Known, Program, ProgramRow, ReadBy};
pub(crate) use scheme::has_dynamic_inputs;
pub use traits::{Dialect, Frame, Holds, Stated, Write};

/// What a checkpoint is that says nothing else.
static PLAIN: plain::Plain = plain::Plain { dialects: names };

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

/// The dialect of a name.
///
/// # Errors
/// [`CheckpointError::UnknownDialect`] with the names there are.
pub fn named(name: &str) -> Result<&'static dyn Dialect, CheckpointError> {
    let found = DIALECTS.into_iter().find(|dialect| dialect.name() == name);
    found
        .ok_or_else(|| CheckpointError::UnknownDialect { name: name.to_owned(), dialects: names() })
}

/// The dialect that a checkpoint says it is written in.
///
/// # Errors
/// [`CheckpointError::Ambiguous`] if it says several, [`CheckpointError::Field`] if it says one
/// that is unknown.
pub(crate) fn detect(container: &Container) -> Result<&'static dyn Dialect, CheckpointError> {
    let claims = claims(container);
    match claims[..] {
        [(dialect, _)] => Ok(dialect),
        [] => match container.quantization() {
            None => Ok(&PLAIN),
            Some(quantization) => Err(CheckpointError::Field {
                path: container.root().to_owned(),
                field: "quantization_config.quant_method".to_owned(),
                expected: "modelopt, compressed-tensors, mxfp4, fp8, quark or torchao",
                found: quantization.get("quant_method").unwrap_or(&Json::Null).to_string(),
            }),
        },
        _ => Err(CheckpointError::Ambiguous {
            path: container.root().to_owned(),
            claims: claims.iter().map(text_of).collect(),
        }),
    }
}

/// A dialect, and the evidence for it in a checkpoint.
type Claim = (&'static dyn Dialect, &'static str);

fn claims(container: &Container) -> Vec<Claim> {
    let claim = |dialect: &'static dyn Dialect| Some((dialect, dialect.evidence(container)?));
    DIALECTS.into_iter().filter_map(claim).collect()
}

fn text_of((dialect, why): &Claim) -> String {
    format!("{} ({why})", dialect.name())
}

/// Checks that a checkpoint names this dialect, or none.
///
/// # Errors
/// [`CheckpointError::OtherDialect`]
pub(crate) fn check(
    container: &Container,
    asked: &'static dyn Dialect,
) -> Result<(), CheckpointError> {
    let claims = claims(container);
    match claims.first() {
        Some(first) if claims.iter().all(|(claim, _)| claim.name() != asked.configs_of()) => {
            let (path, claim) = (container.root().to_owned(), text_of(first));
            Err(CheckpointError::OtherDialect { path, asked: asked.name(), claim })
        }
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
pub fn written() -> Vec<&'static str> {
    DIALECTS.iter().filter(|d| d.writer().is_some()).map(|d| d.name()).collect()
}
