//! What a checkpoint's names and numbers mean: one file a dialect, which answers the same few
//! questions, and one row in [`DIALECTS`].

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
mod scheme;
mod torchao;

use crate::container::{Container, gguf::Metadata};
use crate::error::CheckpointError;
use crate::json::Json;
use crate::tensor::NewTensor;
use crate::weight::{Model, Quantization, Weight};

/// How a producer lays out FP4 checkpoints.
pub trait Dialect: Sync {
    /// Its name in errors and on command lines.
    fn name(&self) -> &'static str;

    /// What in the configs or the metadata says that a checkpoint is of this dialect.
    fn evidence(&self, container: &Container) -> Option<&'static str>;

    /// Puts the tensors together into weights. No tensor is left out.
    ///
    /// # Errors
    /// Tensors that are missing or do not fit each other, and what is refused by name.
    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError>;

    /// The other direction, if there is one.
    fn writer(&self) -> Option<&'static dyn Write>;
}

/// How a dialect is written.
pub trait Write: Sync {
    /// The tensors of a weight, in the order of the index.
    ///
    /// # Errors
    /// [`CheckpointError::CannotHold`] if the dialect has no place for it.
    fn tensors<'w>(&self, weight: &'w Weight<'_>) -> Result<Vec<NewTensor<'w>>, CheckpointError>;

    /// Which scales it has a place for.
    fn holds(&self) -> Holds {
        Holds { tensor_scale: Stated::Multiplier, input_scale: true }
    }

    /// The files and metadata around the tensors.
    ///
    /// # Errors
    /// [`CheckpointError::CannotHold`] if the dialect has no words for it, or a pattern that
    /// cannot be matched.
    fn frame(&self, model: &Model<'_>) -> Result<Frame, CheckpointError>;

    /// The text of the index, of the shard of every tensor and the bytes of all of them.
    fn index(&self, mut shards: Vec<(String, String)>, total: u64) -> Json {
        // As `save_pretrained` of transformers: sorted.
        shards.sort();
        Json::object([("metadata", total_size(total)), ("weight_map", weight_map(shards))])
    }
}

/// Which scales a dialect has a place for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holds {
    /// How it states the tensor scale.
    pub tensor_scale: Stated,
    /// Whether it has the scale of a layer's input. Where not, it is left out, and counted.
    pub input_scale: bool,
}

/// How a dialect states a tensor scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stated {
    /// As what multiplies.
    Multiplier,
    /// As what divides.
    Divisor,
    /// Not at all: it is folded into the block scales.
    Folded,
}

/// What surrounds the tensors.
#[derive(Debug)]
pub enum Frame {
    /// A folder of safetensors files.
    Folder {
        /// `__metadata__` of every file.
        metadata: Vec<(String, String)>,
        /// Names and contents of the configs.
        configs: Vec<(&'static str, Json)>,
    },
    /// One GGUF file.
    Gguf(Metadata),
}

fn total_size(total: u64) -> Json {
    Json::object([("total_size", total.into())])
}

fn weight_map(shards: Vec<(String, String)>) -> Json {
    Json::Object(shards.into_iter().map(|(name, shard)| (name, Json::String(shard))).collect())
}

/// The dialects.
pub static DIALECTS: [&dyn Dialect; 12] = [
    &plain::Plain,
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

/// The dialect of a name.
///
/// # Errors
/// [`CheckpointError::UnknownDialect`] with the names there are.
pub fn named(name: &str) -> Result<&'static dyn Dialect, CheckpointError> {
    let found = DIALECTS.into_iter().find(|dialect| dialect.name() == name);
    found.ok_or_else(|| CheckpointError::UnknownDialect {
        name: name.to_owned(),
        dialects: DIALECTS.iter().map(|dialect| dialect.name()).collect(),
    })
}

/// The dialect that a checkpoint says it is written in.
///
/// # Errors
/// [`CheckpointError::Ambiguous`] if it says several, [`CheckpointError::Field`] if it says one
/// that is unknown.
pub(crate) fn detect(container: &Container) -> Result<&'static dyn Dialect, CheckpointError> {
    let claims: Vec<(&'static dyn Dialect, &str)> = DIALECTS
        .into_iter()
        .filter_map(|dialect| Some((dialect, dialect.evidence(container)?)))
        .collect();
    match claims[..] {
        [(dialect, _)] => Ok(dialect),
        [] => match container.quantization() {
            None => Ok(&plain::Plain),
            Some(quantization) => Err(CheckpointError::Field {
                path: container.root().to_owned(),
                field: "quantization_config.quant_method".to_owned(),
                expected: "modelopt, compressed-tensors, mxfp4, fp8, quark or torchao",
                found: quantization.get("quant_method").unwrap_or(&Json::Null).to_string(),
            }),
        },
        _ => Err(CheckpointError::Ambiguous {
            path: container.root().to_owned(),
            claims: claims.iter().map(|(d, why)| format!("{} ({why})", d.name())).collect(),
        }),
    }
}

/// Whether `quantization_config.quant_method` is this one.
fn quant_method(container: &Container, method: &str) -> bool {
    let found = container.quantization().and_then(|config| config.get("quant_method"));
    found.and_then(Json::as_str) == Some(method)
}

/// The names of the dialects that are written.
pub(crate) fn written() -> Vec<&'static str> {
    DIALECTS.iter().filter(|d| d.writer().is_some()).map(|d| d.name()).collect()
}
