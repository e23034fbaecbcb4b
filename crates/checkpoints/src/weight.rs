//! Entries of a file put together: a weight with its scales, and what a model is made of.

use std::path::PathBuf;

use burn_fp4_policy::Pattern;

use crate::container::gguf;
use crate::dtype::{DataType, Dtype};
use crate::error::CheckpointError;
use crate::fp4::{Fp4Weight, TensorScale};
use crate::fp8::Fp8Weight;
use crate::tensor::Tensor;

/// A parameter or buffer of a model, with all that belongs to it.
///
/// ```
/// use burn_fp4_checkpoints::{Dtype, Tensor, Value, Weight};
///
/// let tensor = Tensor::new("up.weight", Dtype::F32, vec![1, 2], vec![0; 8])?;
/// let weight = Weight::new("up.weight", 0, Value::Plain(tensor));
/// assert_eq!((weight.module(), weight.kind()), ("up", "F32".to_owned()));
/// assert_eq!((weight.len(), weight.bytes()), (2, 8));
/// assert!(!weight.is_quantized() && !weight.is_lossy());
/// assert_eq!(weight.values()?, (vec![1, 2], vec![0.0, 0.0]));
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
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
    /// Factors of the layer's input before it is quantized (AWQ), one number a column.
    pub pre_quant_scale: Option<Tensor<'a>>,
}

/// The numbers of a weight.
#[derive(Debug, Clone)]
pub enum Value<'a> {
    /// Stored as they are: floats, integers, or records of ggml other than FP4.
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
    pub config: Option<serde_json::Value>,
    /// Facts of the source's quantization.
    pub quantization: Quantization,
    /// The key-value pairs of a GGUF source.
    pub gguf: Option<gguf::Metadata>,
    /// Files that are copied.
    pub sidecars: Vec<PathBuf>,
}

/// Facts of a source's quantization other than the weights.
#[derive(Debug, Clone, Default)]
pub struct Quantization {
    /// The dialect it was read from; empty if it was made in memory.
    pub dialect: &'static str,
    /// The modules that are not quantized.
    pub ignore: Vec<Pattern>,
    /// The quantization of the cache of keys and values, in the source's words.
    pub kv_cache: Option<serde_json::Value>,
    /// The producer.
    pub producer: Option<serde_json::Value>,
    /// `hf_quant_config.json`, as the source has it.
    pub quant_config: Option<serde_json::Value>,
}

impl Weight<'_> {
    /// A weight without scales of its input.
    #[must_use]
    pub fn new(name: impl Into<String>, file: usize, value: Value<'_>) -> Weight<'_> {
        Weight { name: name.into(), file, value, input_scale: None, pre_quant_scale: None }
    }

    /// The module of the parameter: its name without `.weight`.
    #[must_use]
    pub fn module(&self) -> &str {
        self.name.strip_suffix(".weight").unwrap_or(&self.name)
    }

    /// The names that patterns may have: its own, and that of its module.
    pub(crate) fn names(&self) -> [&str; 2] {
        [&self.name, self.module()]
    }

    /// Its shape: of FP4, `[.., rows, cols]`.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        match &self.value {
            Value::Plain(tensor) => &tensor.shape,
            Value::Fp8(fp8) => &fp8.values.shape,
            Value::Fp4(fp4) => &fp4.shape,
        }
    }

    /// Number of its values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Returns true if it has no number.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Names the format of its numbers in a word or two.
    #[must_use]
    pub fn kind(&self) -> String {
        match &self.value {
            Value::Plain(tensor) => tensor.dtype.to_string(),
            Value::Fp8(fp8) => format!("FP8 {}", fp8.values.dtype),
            Value::Fp4(fp4) => match fp4.hadamard {
                Some(h) => format!("{} {} hadamard {}", fp4.format, fp4.block_size, h.size()),
                None => format!("{} {}", fp4.format, fp4.block_size),
            },
        }
    }

    /// Bytes of its numbers and scales.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let stated = |scale: &Option<TensorScale<'_>>| {
            scale.as_ref().map_or(0, |scale| scale.stated().bytes().len())
        };
        let value = match &self.value {
            Value::Plain(tensor) => tensor.bytes.len(),
            Value::Fp8(fp8) => fp8.values.bytes.len() + fp8.scales.bytes.len(),
            Value::Fp4(fp4) => fp4.codes.len() + fp4.scales.len() + stated(&fp4.tensor_scale),
        };
        let smoothing = self.pre_quant_scale.as_ref().map_or(0, |tensor| tensor.bytes.len());
        value + stated(&self.input_scale) + smoothing
    }

    /// Its values in f32, in the axes of the model's parameter, if they are
    /// [floats](crate::DataType::is_float), FP8 or FP4.
    ///
    /// # Errors
    /// [`TensorProblem::Dtype`](crate::TensorProblem::Dtype) if they are others.
    pub fn values(&self) -> Result<(Vec<usize>, Vec<f32>), CheckpointError> {
        match &self.value {
            Value::Plain(tensor) => Ok((tensor.shape.to_vec(), tensor.to_f32()?)),
            Value::Fp8(fp8) => Ok((fp8.values.shape.to_vec(), fp8.to_f32()?)),
            Value::Fp4(fp4) => Ok(fp4.parameter()),
        }
    }

    /// Returns true for a scale or an offset of a quantized KV cache, such as
    /// `self_attn.k_proj.k_scale`. It is not part of a layer's weight.
    ///
    /// ```
    /// use burn_fp4_checkpoints::{Dtype, Tensor, Value, Weight};
    ///
    /// let name = "layers.0.self_attn.k_proj.k_scale";
    /// let scale = Tensor::new(name, Dtype::F32, vec![1], vec![0; 4])?;
    /// assert!(Weight::new(name, 0, Value::Plain(scale)).is_cache_scale());
    /// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
    /// ```
    #[must_use]
    pub fn is_cache_scale(&self) -> bool {
        let Value::Plain(tensor) = &self.value else { return false };
        let mut names = self.name.rsplit('.');
        let (scale, layer) = (names.next().unwrap_or_default(), names.next().unwrap_or_default());
        let projection = ["q_proj", "k_proj", "v_proj"].contains(&layer);
        let known = match scale {
            "q_scale" | "k_scale" | "v_scale" => projection || layer.contains("attn"),
            // ModelOpt's offsets, and Quark's scale.
            "k_bias" | "v_bias" | "output_scale" => projection,
            _ => false,
        };
        known && tensor.is(&[Dtype::F32, Dtype::F16, Dtype::BF16])
    }

    /// Returns true if it is quantized to FP4 or FP8.
    #[must_use]
    pub fn is_quantized(&self) -> bool {
        match self.value {
            Value::Plain(_) => false,
            Value::Fp8(_) | Value::Fp4(_) => true,
        }
    }

    /// Returns true if it is quantized to FP4 or FP8, or in records of ggml such as Q4_0.
    #[must_use]
    pub fn is_lossy(&self) -> bool {
        match &self.value {
            Value::Plain(tensor) => {
                tensor.dtype.is_fp8() || matches!(tensor.dtype, DataType::Ggml(_))
            }
            Value::Fp8(_) | Value::Fp4(_) => true,
        }
    }
}
