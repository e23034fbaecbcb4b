//! Hugging Face folders: config, tokenizer and weights.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::checkpoints::{
    DataType, Dtype, Model, Shards, Start, Tensor, Value, Weight, WriteOptions,
};
use burn_fp4::formats::bf16;
use burn_fp4::{
    Checkpoint, CheckpointMap, Fp4Module, LoadCheckpoint, LoadReport, Loaded, LoadedParameter,
    Mismatch, WriteReport,
};
use examples::progress;
use tokenizers::Tokenizer;

use super::config::LlamaConfig;
use super::model::{Llama, Projection};
use super::part::{Part, Stage};
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
        ensure!(
            file.is_file(),
            "{}: has no config.json; pass a Hugging Face folder",
            path.display()
        );
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

    /// Checks that the model predicts as many tokens as a reference.
    ///
    /// # Errors
    /// The two have vocabularies of different sizes.
    pub fn check_vocabulary(&self, reference: &Self) -> Result<()> {
        let [found, expected] = [self, reference].map(|folder| folder.config.vocab_size);
        ensure!(
            found == expected,
            "{}: a vocabulary of {found} tokens, but the reference has {expected}; pass the \
             model that it was made from as --reference",
            self.checkpoint.container().root().display()
        );
        Ok(())
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
        let report = self.reopen()?.load_into(&mut model, &names().allow_unused())?;
        self.refuse_unused(&report)?;
        Ok((model, report))
    }

    /// Loads the weights of a part of the model.
    ///
    /// # Errors
    /// A weight does not fit the config.
    pub fn load_part(&self, part: &mut Part) -> Result<()> {
        self.reopen()?.load_into(part, &names().allow_unused())?;
        Ok(())
    }

    /// Opens the files again. Pages that are read through a checkpoint stay mapped while it is
    /// open: dropping this one frees them.
    pub(super) fn reopen(&self) -> Result<Checkpoint> {
        Ok(Checkpoint::open(self.checkpoint.container().root())?)
    }

    /// Checks that the folder has the weights of a model, none of them in FP4, and no others. Reads
    /// no values.
    ///
    /// # Errors
    /// A weight does not fit the config or is FP4, or the model has no such weight.
    pub fn check_dense<L: Projection>(&self, model: &Llama<L>) -> Result<()> {
        let report = self.checkpoint.check_load(model, &names().allow_unused())?;
        self.refuse_unused(&report)?;
        let packed = |one: &&LoadedParameter| matches!(one.loaded, Loaded::Packed { .. });
        if let Some(LoadedParameter { path, .. }) = report.parameters.iter().find(packed) {
            bail!(
                "`{path}` is FP4 already; quantize the dense model, or decode this one by `fp4 \
                 convert --decode-fp4 bf16`"
            );
        }
        Ok(())
    }

    fn refuse_unused(&self, report: &LoadReport) -> Result<()> {
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
        Ok(())
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
    add_tokenizer(out)?;
    Ok(report)
}

/// Creates the folder of a new model with random weights, whose tokens are bytes. One stage is in
/// memory at a time, and a file has about 4 GB.
///
/// # Errors
/// As [`create`].
pub fn create_random(config: &str, out: &Path, device: &Device) -> Result<(usize, WriteReport)> {
    let parsed = LlamaConfig::parse(config.as_bytes())?;
    // The tables of positions are not saved.
    let mut shapes = parsed.clone();
    shapes.max_position_embeddings = 1;
    // Copies of a parameter share the values that the first of them is initialized with: a model
    // for each stage, of which nothing else is ever initialized.
    let whole = || Llama::<Linear>::new(&shapes, device);
    let mut outline = whole()?.outline_fp4(&names())?;
    narrow_outline(&mut outline, parsed.dtype.as_deref());
    outline.config = Some(serde_json::from_str(config)?);
    let options = WriteOptions { shards: Shards::Size(4_000_000_000), ..WriteOptions::default() };
    let planned = outline.plan("plain", &options)?;
    let mut output = planned.create(out, "random weights", Start::Over)?;
    let bar = progress::bar(outline.weights.len());
    bar.set_message("writes random weights");
    let mut at = 0;
    for stage in Stage::all(&parsed) {
        for weight in narrowed(&whole()?.part(stage, false), parsed.dtype.as_deref())?.weights {
            output.write(at, &weight)?;
            at += 1;
            bar.inc(1);
        }
    }
    output.finish()?;
    bar.finish_and_clear();
    add_tokenizer(out)?;
    let parameters = outline.weights.iter().map(Weight::len).sum();
    Ok((parameters, planned.report()))
}

/// Adds the tokenizer of bytes to a folder.
fn add_tokenizer(out: &Path) -> Result<()> {
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
    Ok(())
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

/// Gives dense weights of an outline the dtype that [`narrowed`] gives them.
pub(super) fn narrow_outline(model: &mut Model<'_>, dtype: Option<&str>) {
    for weight in &mut model.weights {
        if let Value::Plain(tensor) = &mut weight.value
            && tensor.plain() == Some(Dtype::F32)
            && dtype == Some("bfloat16")
        {
            tensor.dtype = DataType::Plain(Dtype::BF16);
        }
    }
}

/// Collects the weights of a model or a part of one, dense ones in the dtype of its config.
pub(super) fn narrowed<M: Module>(model: &M, dtype: Option<&str>) -> Result<Model<'static>> {
    let mut saved = model.checkpoint_fp4(&names().allow_unused())?;
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
