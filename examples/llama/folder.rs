//! The folders of Hugging Face, in and out.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use burn::module::Module;
use burn::tensor::Device;
use burn_fp4::checkpoints::{Dtype, Json, Model, Tensor, Value, Weight, WriteOptions};
use burn_fp4::formats::bf16;
use burn_fp4::{
    Checkpoint, CheckpointMap, Fp4Module, LoadCheckpoint, LoadReport, Mismatch, WriteReport,
};
use tokenizers::Tokenizer;

use super::config::LlamaConfig;
use super::model::{Llama, Projection};
use super::tokens::byte_tokenizer;

/// A folder with `config.json`, weights (dense, FP8, or in any dialect of FP4) and
/// `tokenizer.json`.
pub struct Folder {
    /// What the model computes.
    pub config: LlamaConfig,
    checkpoint: Checkpoint,
}

impl Folder {
    /// Opens a folder. No weight is read.
    ///
    /// # Errors
    /// A file that is not there or cannot be read, and a model that is unknown here.
    pub fn open(path: &Path) -> Result<Self> {
        let file = path.join("config.json");
        let named = || file.display().to_string();
        let config = LlamaConfig::parse(&fs::read(&file).with_context(named)?);
        Ok(Self { config: config.with_context(named)?, checkpoint: Checkpoint::open(path)? })
    }

    /// Texts to tokens and back.
    ///
    /// # Errors
    /// A file that is not there or cannot be read.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let path = self.checkpoint.container().root().join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path).map_err(|error| anyhow!(error));
        tokenizer.with_context(|| path.display().to_string())
    }

    /// The model, and where each of its weights came from.
    ///
    /// # Errors
    /// Weights that do not fit the config, or that it does not know.
    pub fn load<L: Projection>(&self, device: &Device) -> Result<(Llama<L>, LoadReport)> {
        let mut model = Llama::new(&self.config, device)?;
        // Opened for this alone: what was read of its files stays mapped for as long as it is open.
        let checkpoint = Checkpoint::open(self.checkpoint.container().root())?;
        let report = checkpoint.load_into(&mut model, &names().allow_unused())?;
        // What follows from the config, or from another tensor.
        let follows = |unused: &&Mismatch| match unused {
            Mismatch::Unused { tensor, .. } => {
                tensor.ends_with("rotary_emb.inv_freq")
                    || (tensor == "lm_head.weight" && self.config.tie_word_embeddings)
            }
            _ => false,
        };
        if let Some(unused) = report.unused.iter().find(|unused| !follows(unused)) {
            bail!("{unused}");
        }
        Ok((model, report))
    }

    /// Saves a model that was loaded from here in a dialect, with everything else in the folder.
    ///
    /// # Errors
    /// A path that exists, and a dialect that cannot hold the model.
    pub fn save<M: Module>(&self, model: &M, out: &Path, dialect: &str) -> Result<WriteReport> {
        let container = self.checkpoint.container();
        let sidecars = container.sidecars().to_vec();
        let dtype = self.config.dtype.as_deref();
        let config = container.config().cloned();
        write(Model { config, sidecars, ..narrowed(model, dtype)? }, out, dialect)
    }
}

/// Makes the folder of a new model whose tokens are bytes, with this `config.json`.
///
/// # Errors
/// A path that exists, and what the file system refuses.
pub fn create<M: Module>(model: &M, config: &str, out: &Path) -> Result<WriteReport> {
    let dtype = LlamaConfig::parse(config.as_bytes())?.dtype;
    let config = Some(Json::parse(config.as_bytes())?);
    let model = Model { config, ..narrowed(model, dtype.as_deref())? };
    let report = write(model, out, "plain")?;
    let tokenizer_config = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
        "model_input_names": ["input_ids", "attention_mask"],
    });
    for (name, json) in [
        ("tokenizer.json", byte_tokenizer()),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", serde_json::json!({ "do_sample": false })),
    ] {
        fs::write(out.join(name), serde_json::to_string_pretty(&json)? + "\n")?;
    }
    Ok(report)
}

/// Tensors are named as `transformers` does, where a module around the decoder has the output
/// layer.
pub fn names() -> CheckpointMap {
    CheckpointMap::new()
        .rename(r"^model\.", "")
        .rename_back(r"^(embed_tokens|layers|norm)\.", "model.$1.")
}

fn write(model: Model<'_>, out: &Path, dialect: &str) -> Result<WriteReport> {
    Ok(model.write(out, dialect, &WriteOptions::default())?)
}

/// The weights of a model, with those that are not quantized in the dtype of its config.
fn narrowed<M: Module>(model: &M, dtype: Option<&str>) -> Result<Model<'static>> {
    let mut saved = model.checkpoint_fp4(&names())?;
    if dtype == Some("bfloat16") {
        saved.weights.iter_mut().try_for_each(narrow)?;
    }
    Ok(saved)
}

fn narrow(weight: &mut Weight<'static>) -> Result<()> {
    let Value::Plain(tensor) = &weight.value else { return Ok(()) };
    if tensor.plain() != Some(Dtype::F32) {
        return Ok(());
    }
    let narrow = |value: f32| bf16::from_f32(value).to_le_bytes();
    let bytes: Vec<u8> = tensor.to_f32()?.into_iter().flat_map(narrow).collect();
    let tensor = Tensor::new(weight.name.clone(), Dtype::BF16, tensor.shape.to_vec(), bytes)?;
    weight.value = Value::Plain(tensor);
    Ok(())
}
