//! Hugging Face folders: config, tokenizer and weights.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::module::Module;
use burn::tensor::Device;
use burn_fp4::checkpoints::{Dtype, Model, Tensor, Value, Weight, WriteOptions};
use burn_fp4::formats::bf16;
use burn_fp4::{
    Checkpoint, CheckpointMap, Fp4Module, LoadCheckpoint, LoadReport, Mismatch, WriteReport,
};
use tokenizers::Tokenizer;

use super::config::LlamaConfig;
use super::model::{Llama, Projection};
use super::tokens::byte_tokenizer;

/// A folder with `config.json`, `tokenizer.json` and weights: dense, FP8, or FP4 in any dialect.
pub struct Folder {
    /// The parsed `config.json`.
    pub config: LlamaConfig,
    checkpoint: Checkpoint,
}

impl Folder {
    /// Opens a folder without reading weights.
    ///
    /// # Errors
    /// A file is missing or cannot be read, or the architecture is not supported.
    pub fn open(path: &Path) -> Result<Self> {
        let file = path.join("config.json");
        let name = || file.display().to_string();
        let text = fs::read(&file).with_context(name)?;
        let config = LlamaConfig::parse(&text).with_context(name)?;
        Ok(Self { config, checkpoint: Checkpoint::open(path)? })
    }

    /// Opens a model with its own `config.json`, or without one, as for a GGUF file, with that of
    /// another folder.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with_config_of(path: &Path, other: &Self) -> Result<Self> {
        if path.join("config.json").is_file() {
            return Self::open(path);
        }
        Ok(Self { config: other.config.clone(), checkpoint: Checkpoint::open(path)? })
    }

    /// Returns the weights of the model as its files have them.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Reads `tokenizer.json`.
    ///
    /// # Errors
    /// The file is missing or cannot be read.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let path = self.checkpoint.container().root().join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path).map_err(|error| anyhow!(error));
        tokenizer.with_context(|| path.display().to_string())
    }

    /// Loads the model; the report names the source of each weight.
    ///
    /// # Errors
    /// A weight does not fit the config, or the model has no such weight.
    pub fn load<L: Projection>(&self, device: &Device) -> Result<(Llama<L>, LoadReport)> {
        let mut model = Llama::new(&self.config, device)?;
        // Pages that were read stay mapped while a checkpoint is open: this one is closed at once.
        let checkpoint = Checkpoint::open(self.checkpoint.container().root())?;
        let report = checkpoint.load_into(&mut model, &names().allow_unused())?;
        // `inv_freq` follows from the config, and a tied `lm_head` from the embedding.
        let redundant = |unused: &&Mismatch| match unused {
            Mismatch::Unused { tensor, .. } => {
                tensor.ends_with("rotary_emb.inv_freq")
                    || (tensor == "lm_head.weight" && self.config.tie_word_embeddings)
            }
            _ => false,
        };
        if let Some(unused) = report.unused.iter().find(|unused| !redundant(unused)) {
            bail!("{unused}");
        }
        Ok((model, report))
    }

    /// Saves a model that was loaded from this folder in a dialect, and copies the other files.
    ///
    /// # Errors
    /// The path exists, the dialect cannot hold the model, or its `lm_head` was rounded to int8.
    pub fn save<M: Module>(&self, model: &M, out: &Path, dialect: &str) -> Result<WriteReport> {
        let container = self.checkpoint.container();
        let sidecars = container.sidecars().to_vec();
        let dtype = self.config.dtype.as_deref();
        let config = container.config().cloned();
        let model = narrowed(model, dtype)?;
        ensure!(
            self.config.tie_word_embeddings
                || model.weights.iter().any(|weight| weight.name == "lm_head.weight"),
            "lm_head.weight: lost, as it was rounded to int8; save the model before"
        );
        write(Model { config, sidecars, ..model }, out, dialect)
    }
}

/// Creates the folder of a new model whose tokens are bytes.
///
/// # Errors
/// The path exists, or a file cannot be written.
pub fn create<M: Module>(model: &M, config: &str, out: &Path) -> Result<WriteReport> {
    let dtype = LlamaConfig::parse(config.as_bytes())?.dtype;
    let config = Some(serde_json::from_str(config)?);
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

/// Returns the map from tensor names of `transformers` to parameter paths: `transformers` puts the
/// decoder, but not the `lm_head`, into a `model`.
pub fn names() -> CheckpointMap {
    CheckpointMap::new()
        .rename(r"^model\.", "")
        .rename_back(r"^(embed_tokens|layers|norm)\.", "model.$1.")
}

fn write(model: Model<'_>, out: &Path, dialect: &str) -> Result<WriteReport> {
    Ok(model.write(out, dialect, &WriteOptions::default())?)
}

/// Collects the weights of a model, dense ones in the dtype of its config.
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
