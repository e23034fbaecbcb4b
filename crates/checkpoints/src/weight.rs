//! Entries of a file put together: a weight with its scales, and what a model is made of.

use std::path::PathBuf;

use crate::container::gguf;
use crate::fp4::{Fp4Weight, TensorScale};
use crate::fp8::Fp8Weight;
use crate::json::Json;
use crate::patterns::Pattern;
use crate::tensor::Tensor;

/// A parameter or buffer of a model, with all that belongs to it.
#[derive(Debug, Clone)]
pub struct Weight<'a> {
    /// Name of the parameter in the model, `model.layers.0.mlp.up_proj.weight`, whatever the
    /// names of its parts in the file.
    pub name: String,
    /// The file it lies in, by its place among [`Model::files`].
    pub file: usize,
    /// Its numbers.
    pub value: Value<'a>,
    /// The scale of the layer's quantized input: amax / 2688 for NVFP4 and amax / 448 for FP8 as
    /// a multiplier.
    pub input_scale: Option<TensorScale<'a>>,
    /// What multiplies the layer's input before it is quantized (AWQ), one number a column.
    pub pre_quant_scale: Option<Tensor<'a>>,
}

/// The numbers of a weight.
#[derive(Debug, Clone)]
pub enum Value<'a> {
    /// Stored as they are: floats, integers, or records of ggml that are no FP4.
    Plain(Tensor<'a>),
    /// FP8 with its scales.
    Fp8(Fp8Weight<'a>),
    /// FP4 with its scales.
    Fp4(Fp4Weight<'a>),
}

/// A checkpoint in no dialect: what is read from one, and what another writes.
#[derive(Debug, Clone, Default)]
pub struct Model<'a> {
    /// The weights, in the order of the file or its index.
    pub weights: Vec<Weight<'a>>,
    /// Names of the files that [`Weight::file`] counts.
    pub files: Vec<String>,
    /// `config.json`, as the source has it.
    pub config: Option<Json>,
    /// What the source says of its quantization.
    pub quantization: Quantization,
    /// The key-value pairs of a GGUF source.
    pub gguf: Option<gguf::Metadata>,
    /// Files that are copied.
    pub sidecars: Vec<PathBuf>,
}

/// What a source says of its quantization besides the weights.
#[derive(Debug, Clone, Default)]
pub struct Quantization {
    /// The dialect it was read from; empty if it was made in memory.
    pub dialect: &'static str,
    /// The modules that are not quantized.
    pub ignore: Vec<Pattern>,
    /// How the cache of keys and values is quantized, in the source's words.
    pub kv_cache: Option<Json>,
    /// The producer.
    pub producer: Option<Json>,
    /// `hf_quant_config.json`, as the source has it.
    pub quant_config: Option<Json>,
}

impl Weight<'_> {
    /// A weight without scales of its input.
    pub fn new(name: impl Into<String>, file: usize, value: Value<'_>) -> Weight<'_> {
        Weight { name: name.into(), file, value, input_scale: None, pre_quant_scale: None }
    }

    /// The module of the parameter: its name without `.weight`.
    pub fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(&self.name)
    }

    /// Whether it is quantized to FP4 or FP8.
    pub fn is_quantized(&self) -> bool {
        match self.value {
            Value::Plain(_) => false,
            Value::Fp8(_) | Value::Fp4(_) => true,
        }
    }
}
