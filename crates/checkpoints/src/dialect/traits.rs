//! The questions that every dialect answers: how it is recognized, read and written.

use burn_fp4_formats::Fp4Format;
use serde_json::json;

use super::readers::ReadBy;
use crate::container::{CONFIG, Container, gguf::Metadata};
use crate::error::CheckpointError;
use crate::tensor::NewTensor;
use crate::weight::{Model, Quantization, Weight};

/// A layout of FP4 checkpoints, as a producer has it.
///
/// ```
/// use burn_fp4_checkpoints::dialect::named;
/// use burn_fp4_checkpoints::{CONFIG, Container};
///
/// # let path = format!("burn-fp4-dialect-{}.safetensors", std::process::id());
/// # let path = std::env::temp_dir().join(path);
/// let header = br#"{"__metadata__":{"tensor_names":"[]"}}"#;
/// let file = [&(header.len() as u64).to_le_bytes()[..], &header[..]].concat();
/// std::fs::write(&path, file)?;
/// let (container, torchao) = (Container::open(&path)?, named("torchao")?);
/// assert_eq!(torchao.evidence(&container), Some("tensor_names of the metadata"));
/// assert_eq!(torchao.patterns_file(&container), Some(CONFIG));
/// assert!(torchao.names_itself() && !named("modelopt")?.names_itself());
/// assert_eq!(torchao.suffixes(), ["._weight_qdata"]);
/// assert_eq!(torchao.quant_methods(), ["torchao"]);
/// assert_eq!(named("miles")?.configs_of(), "modelopt");
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Dialect: Sync {
    /// Its name in errors and on command lines.
    fn name(&self) -> &'static str;

    /// Names the field of the configs or the metadata by which a checkpoint is of this dialect.
    fn evidence(&self, container: &Container) -> Option<&'static str>;

    /// Ends of names of tensors that are parts of its quantized weights. A file that names no
    /// dialect is not read as dense if it has such a tensor. Several dialects may have the same.
    fn suffixes(&self) -> &'static [&'static str] {
        &[]
    }

    /// Values of `quant_method` in `config.json` that it is read by. The error about any other
    /// value lists them.
    fn quant_methods(&self) -> &'static [&'static str] {
        &[]
    }

    /// The dialect whose configs it has, if it has none of its own.
    fn configs_of(&self) -> &'static str {
        self.name()
    }

    /// Returns true if every file of the dialect says itself that it is one, by its metadata or
    /// format: a file that does not is of another dialect, whatever the names of its tensors are.
    fn names_itself(&self) -> bool {
        false
    }

    /// Puts the tensors together into weights. No tensor is left out.
    ///
    /// # Errors
    /// Tensors that are missing or do not fit each other, and what is refused by name.
    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError>;

    /// The file with the patterns of modules that are not quantized: every other FP8 matrix has
    /// scales. None: the dialect has FP8 without scales too.
    fn patterns_file(&self, _container: &Container) -> Option<&'static str> {
        Some(CONFIG)
    }

    /// The other direction, if there is one.
    fn writer(&self) -> Option<&'static dyn Write>;
}

/// The writer of a dialect.
///
/// ```
/// use burn_fp4_checkpoints::dialect::{ScaleConvention, writer};
/// use burn_fp4_checkpoints::{Fp4Weight, Value, Weight};
/// use burn_fp4_formats::Fp4Format;
///
/// let [(_, modelopt), (_, gguf)] = [writer("modelopt")?, writer("gguf")?];
/// let mut readers = gguf.readers(Fp4Format::NvFp4).iter();
/// assert!(readers.any(|reader| reader.program.row().name == "llama.cpp"));
/// let columns = [modelopt, gguf].map(|writer| writer.columns(Fp4Format::NvFp4, 16));
/// assert_eq!(columns, [16, 64], "a record of ggml has four blocks");
/// assert_eq!(modelopt.scale_support().tensor_scale, ScaleConvention::Multiplier);
/// let fp4 = Fp4Weight::outline(Fp4Format::MxFp4, 32, vec![1, 32], false, false);
/// let mxfp4 = Weight::new("up.weight", 0, Value::Fp4(fp4));
/// let scales = modelopt.scale_support_of(&mxfp4);
/// assert_eq!(scales.tensor_scale, ScaleConvention::Folded, "MXFP4 has none");
/// assert!(modelopt.quantizes_input(&mxfp4), "its readers round inputs to FP8");
/// assert!(!modelopt.turns() && writer("compressed-tensors")?.1.turns());
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
pub trait Write: Sync {
    /// The tensors of a weight, in the order of the index; see [`tensors`](super::tensors).
    ///
    /// # Errors
    /// [`CheckpointError::CannotHold`] if the dialect has no place for it.
    fn tensors<'w>(&self, weight: &'w Weight<'_>) -> Result<Vec<NewTensor<'w>>, CheckpointError>;

    /// Returns true if readers transform the input of a layer as its weights were.
    fn transforms(&self) -> bool {
        false
    }

    /// The programs that read a format in this dialect, in blocks of the format's own size.
    fn readers(&self, format: Fp4Format) -> &'static [ReadBy];

    /// The scales that it has a place for.
    fn scale_support(&self) -> ScaleSupport {
        ScaleSupport { tensor_scale: ScaleConvention::Multiplier, input_scale: true }
    }

    /// The scales that it has a place for with this weight.
    fn scale_support_of(&self, _weight: &Weight<'_>) -> ScaleSupport {
        self.scale_support()
    }

    /// Returns true if readers quantize the layer's input as the layer runs where the file has no
    /// scale of it.
    fn quantizes_input(&self, _weight: &Weight<'_>) -> bool {
        true
    }

    /// A number that divides the columns of every weight in blocks of this size.
    fn columns(&self, _format: Fp4Format, block_size: usize) -> usize {
        block_size
    }

    /// Returns true if readers run some layers as one (query, key and value; gate and up). These
    /// need one scheme and, if there is one, one tensor scale.
    fn fuses(&self) -> bool {
        false
    }

    /// Returns true if readers load a packed matrix `[outputs, inputs]` where the model's parameter
    /// is `[inputs, outputs]`.
    fn turns(&self) -> bool {
        false
    }

    /// The files and metadata around the tensors.
    ///
    /// ```
    /// use burn_fp4_checkpoints::dialect::{Envelope, writer};
    /// use burn_fp4_checkpoints::{Fp4Weight, Model, Value, Weight};
    /// use burn_fp4_formats::Fp4Format;
    ///
    /// let fp4 = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![1, 16], false, true);
    /// let weights = vec![Weight::new("up.weight", 0, Value::Fp4(fp4))];
    /// let model = Model { weights, ..Model::default() };
    /// let (_, modelopt) = writer("modelopt")?;
    /// let envelope = modelopt.envelope(&model)?;
    /// let Envelope::Folder { configs, .. } = envelope else { panic!("a folder") };
    /// assert_eq!([configs[0].0, configs[1].0], ["config.json", "hf_quant_config.json"]);
    /// let shards = vec![("up.weight".to_owned(), "model-00001-of-00002.safetensors".to_owned())];
    /// let index = modelopt.index(shards, 8);
    /// assert_eq!(index["weight_map"]["up.weight"], "model-00001-of-00002.safetensors");
    /// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
    /// ```
    ///
    /// # Errors
    /// [`CheckpointError::CannotHold`] if the dialect has no words for it, or a pattern that
    /// cannot be matched.
    fn envelope(&self, model: &Model<'_>) -> Result<Envelope, CheckpointError>;

    /// The text of the index, of the shard of every tensor and the bytes of all of them.
    fn index(&self, mut shards: Vec<(String, String)>, total: u64) -> serde_json::Value {
        // As `save_pretrained` of transformers: sorted.
        shards.sort();
        json!({"metadata": total_size(total), "weight_map": weight_map(shards)})
    }
}

/// The scales that a dialect has a place for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScaleSupport {
    /// The form of the tensor scale.
    pub tensor_scale: ScaleConvention,
    /// True if it has the scale of a layer's input. Where not, it is left out, and counted.
    pub input_scale: bool,
}

/// The form in which a dialect states a tensor scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleConvention {
    /// Values are multiplied by it.
    Multiplier,
    /// Values are divided by it.
    Divisor,
    /// Not at all: it is folded into the block scales.
    Folded,
}

/// Configs and metadata around the tensors.
#[derive(Debug)]
pub enum Envelope {
    /// A folder of safetensors files.
    Folder {
        /// `__metadata__` of every file.
        metadata: Vec<(String, String)>,
        /// Names and contents of the configs.
        configs: Vec<(&'static str, serde_json::Value)>,
    },
    /// One GGUF file.
    Gguf(Metadata),
}

pub(super) fn total_size(total: u64) -> serde_json::Value {
    json!({"total_size": total})
}

pub(super) fn weight_map(shards: Vec<(String, String)>) -> serde_json::Value {
    shards.into_iter().collect()
}

/// Returns the evidence that `quantization_config.quant_method` is one of these.
pub(super) fn quant_method(container: &Container, methods: &[&str]) -> Option<&'static str> {
    let config = container.quantization()?;
    let is_one = methods.iter().any(|method| config["quant_method"] == *method);
    is_one.then_some("quant_method of config.json")
}
