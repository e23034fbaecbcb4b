//! The commands, one file each, and the options that they share.

pub(crate) mod compare;
pub(crate) mod distill;
pub(crate) mod generate;
pub(crate) mod perplexity;
pub(crate) mod quantize;
pub(crate) mod report;
pub(crate) mod sensitivity;
pub(crate) mod train;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use burn::tensor::{Device, FloatDType};
use burn_fp4::ops::{Fp8Path, Int8Matrix, KvFormat, is_host};
use burn_fp4::{Activations, Fp4Format, Fp4Module};
use clap::ValueEnum;
use clap::builder::PossibleValue;
use examples::{OnDevice, print_text};
use llama::{Folder, Llama, Projection, Tokens};
use serde::Serialize;
use tokenizers::Tokenizer;

/// The book of Genesis, which is measured on if no text is named.
const BOOK: &str = include_str!("../../data/genesis.txt");
/// Share of a text that is held out.
const HELD_OUT: f64 = 0.1;

/// Options of the text.
#[derive(clap::Args)]
pub(crate) struct TextOptions {
    /// Text file; defaults to the book of Genesis.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Share of the text, at its end, to measure on; the rest is for calibration and training.
    #[arg(long, default_value_t = HELD_OUT)]
    held_out: f64,
}

impl TextOptions {
    /// Returns the command that reports on a model made from another with this text: on the part
    /// that is held out.
    fn report_command(&self, out: &Path, reference: &Path, device: &DeviceOptions) -> String {
        let [out, reference] = [out, reference].map(quoted);
        if self.held_out == 0.0 {
            return format!("fp4 report {out} --reference {reference}");
        }
        let mut command = format!("llama report {out} --reference {reference}");
        if let Some(text) = &self.text {
            command += &format!(" --text {}", quoted(text));
        }
        if self.text.is_some() || self.held_out != HELD_OUT {
            command += &format!(" --held-out {}", self.held_out);
        }
        command + &device.said()
    }

    /// Reads and tokenizes the text.
    fn tokens(&self, tokenizer: &Tokenizer) -> Result<Tokens> {
        let text = match &self.text {
            None => BOOK.to_owned(),
            Some(path) => {
                std::fs::read_to_string(path).with_context(|| path.display().to_string())?
            }
        };
        Tokens::new(tokenizer, &text, self.held_out)
    }
}

/// Options of the device.
#[derive(clap::Args)]
pub(crate) struct DeviceOptions {
    /// Burn device.
    #[arg(long, value_enum, default_value_t = OnDevice::Flex)]
    device: OnDevice,
    /// Dtype of activations and dense weights.
    #[arg(long, value_enum, default_value_t = ComputeDType::F32)]
    dtype: ComputeDType,
}

/// Dtypes that a model computes in.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ComputeDType {
    F32,
    Bf16,
    F16,
}

impl DeviceOptions {
    /// Returns the options that are not the defaults, as on a command line.
    fn said(&self) -> String {
        let option = |name: &str, value: String, default: String| match value == default {
            true => String::new(),
            false => format!(" {name} {value}"),
        };
        option("--device", name(&self.device), name(&OnDevice::Flex))
            + &option("--dtype", name(&self.dtype), name(&ComputeDType::F32))
    }

    /// Returns the device, with the dtype as its default.
    fn device(&self) -> Result<Device> {
        let mut device = self.device.device()?;
        device.configure(match self.dtype {
            ComputeDType::F32 => FloatDType::F32,
            ComputeDType::Bf16 => FloatDType::BF16,
            ComputeDType::F16 => FloatDType::F16,
        })?;
        Ok(device)
    }
}

/// Returns the name of a choice on the command line.
fn name(choice: &impl ValueEnum) -> String {
    let value = choice.to_possible_value().as_ref().map(PossibleValue::get_name).map(str::to_owned);
    value.expect("no choice is hidden")
}

/// Rows of the input of a product for which FP8 is planned, as of a prompt.
const MANY_ROWS: usize = 512;

/// Largest number of sequences for which an int8 `lm_head` is faster than a bf16 one on an H100.
const MAX_INT8_SEQUENCES: usize = 8;

/// Options of products: formats of the embedding and the `lm_head`, and of activations.
#[derive(clap::Args)]
pub(crate) struct ProductOptions {
    /// Format of a tied embedding, also in its use as `lm_head`: as loaded, or quantized.
    #[arg(long, value_enum, default_value_t = TiedEmbedding::AsLoaded)]
    tied_embedding: TiedEmbedding,
    /// Format of the `lm_head` in products; a dense one takes most of the time of a small model.
    /// Defaults to int8 for a dense `lm_head` that generates on a CPU, or at most 8 sequences on a
    /// device with kernels, else to as-loaded. A tied embedding is kept in memory for lookups, too.
    #[arg(long, value_enum)]
    lm_head: Option<LmHead>,
    /// Format of the input of products with FP4 weights; int8 also of an int8 `lm_head`. Defaults
    /// to int8 to generate on a CPU, else to f32, which stands for the dtype of the model.
    #[arg(long, value_enum)]
    activations: Option<ActivationFormat>,
}

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum ActivationFormat {
    F32,
    /// On a CPU.
    Int8,
    /// On an H100 or H200, of more than 128 tokens at once, and emulated on a CPU; for weights
    /// that FP8 holds, as those of MXFP4.
    Fp8,
    /// As fp8, after other weights are rounded, as those of NVFP4.
    Fp8Rounded,
}

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum LmHead {
    AsLoaded,
    Int8,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum TiedEmbedding {
    AsLoaded,
    Nvfp4,
    Mxfp4,
}

/// The formats that products have.
#[derive(Debug, Serialize)]
struct ProductFormats {
    /// None: no product has a choice.
    activations: Option<ActivationFormat>,
    lm_head: LmHead,
}

impl ProductFormats {
    /// Formats them as a line of a report.
    fn line(&self) -> String {
        let activations = self.activations.as_ref().map(name);
        let activations = activations.map_or(String::new(), |of| format!("activations {of}, "));
        format!("products: {activations}lm_head {}", name(&self.lm_head))
    }
}

impl ProductOptions {
    /// Returns true if activations are asked for in FP8.
    fn in_fp8(&self) -> bool {
        matches!(self.activations, Some(ActivationFormat::Fp8 | ActivationFormat::Fp8Rounded))
    }

    /// Loads the model of a folder. By default a dense `lm_head`, where that is faster, and
    /// activations become int8 to generate a number of sequences.
    fn load<L: Projection>(
        &self,
        folder: &Folder,
        device: &Device,
        sequences: Option<usize>,
    ) -> Result<(Llama<L>, ProductFormats)> {
        let (mut model, _) = folder.load::<L>(device)?;
        let format = match self.tied_embedding {
            TiedEmbedding::AsLoaded => None,
            TiedEmbedding::Nvfp4 => Some(Fp4Format::NvFp4),
            TiedEmbedding::Mxfp4 => Some(Fp4Format::MxFp4),
        };
        if let Some(format) = format {
            ensure!(
                model.quantize_tied_embedding(format)?,
                "--tied-embedding: the model has an lm_head of its own; leave the option out"
            );
        }
        let mut rounded = false;
        match self.lm_head {
            Some(LmHead::Int8) => {
                rounded = model.round_head_to_int8()?;
                ensure!(
                    rounded,
                    "--lm-head int8: the lm_head is quantized already; leave the option out"
                );
            }
            None if sequences.is_some_and(|rows| {
                let head = [folder.config.vocab_size, folder.config.hidden_size];
                (rows <= MAX_INT8_SEQUENCES || is_host(device))
                    && Int8Matrix::multiplies_codes(device, model.dtype(), rows, head)
                    && head[1].is_multiple_of(32)
            }) =>
            {
                rounded = model.round_head_to_int8()?;
            }
            Some(LmHead::AsLoaded) | None => (),
        }
        let default = match sequences {
            Some(_) => ActivationFormat::Int8,
            None => ActivationFormat::F32,
        };
        let activations = self.activations.unwrap_or(default);
        let any = model.set_activations(match activations {
            ActivationFormat::Int8 => Activations::Int8,
            ActivationFormat::F32 => Activations::F32,
            ActivationFormat::Fp8 => Activations::Fp8,
            ActivationFormat::Fp8Rounded => Activations::Fp8Rounded,
        });
        let matters = any && (is_host(device) || self.in_fp8());
        ensure!(
            matters || self.activations != Some(ActivationFormat::Int8),
            "--activations int8: no product on flex or ndarray has an FP4 weight or an int8 \
             `lm_head`; leave the option out"
        );
        if self.in_fp8() {
            check_fp8(&model)?;
        }
        let activations = matters.then_some(activations);
        let lm_head = if rounded { LmHead::Int8 } else { LmHead::AsLoaded };
        Ok((model, ProductFormats { activations, lm_head }))
    }
}

/// Checks that layers of a model multiply in FP8, and warns of those that do not.
fn check_fp8<L: Projection>(model: &Llama<L>) -> Result<()> {
    let paths = model.fp8_paths(MANY_ROWS, model.dtype())?;
    let is_fp8 =
        |path: &Fp8Path| matches!(path, Fp8Path::Fp8 | Fp8Path::Rounded { .. } | Fp8Path::Emulated);
    let others: Vec<_> = paths.iter().filter(|(_, path)| !is_fp8(path)).collect();
    let first = others
        .first()
        .map_or("none has an FP4 weight".to_owned(), |(weight, path)| format!("{weight}: {path}"));
    let (other, all) = (others.len(), paths.len());
    ensure!(
        other < all,
        "--activations: no layer multiplies in FP8 ({first}); pass fp8-rounded if the weights are \
         in NVFP4, or leave the option out"
    );
    if other > 0 {
        eprintln!("warning: {other} of {all} layers do not multiply in FP8; the first: {first}");
    }
    Ok(())
}

/// Options of the KV cache.
#[derive(clap::Args)]
pub(crate) struct CacheOptions {
    /// Format of the KV cache: the dtype of activations, E4M3, NVFP4, or NVFP4 with keys and
    /// queries after a Hadamard transform.
    #[arg(long = "kv-cache", value_enum, default_value_t = CacheFormat::Dense)]
    format: CacheFormat,
}

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum CacheFormat {
    Dense,
    Fp8,
    Nvfp4,
    Nvfp4Hadamard,
}

/// The KV cache of a model.
#[derive(Debug, Serialize)]
struct CacheReport {
    kv_cache: CacheFormat,
    /// Bytes of a token of a sequence, in all layers.
    kv_bytes_per_token: usize,
}

impl CacheOptions {
    /// Refuses a packed cache on a device that cannot capture its steps.
    fn check(&self, device: OnDevice) -> Result<()> {
        #[cfg(feature = "wgpu")]
        ensure!(
            self.format == CacheFormat::Dense || !matches!(device, OnDevice::Wgpu),
            "--kv-cache: wgpu has no kernels for packed KV caches; pass dense, or another device"
        );
        let _ = device;
        Ok(())
    }

    /// Sets the format of a model's KV cache.
    fn set<L: Projection>(&self, model: &mut Llama<L>) -> Result<CacheReport> {
        model.set_kv_format(match self.format {
            CacheFormat::Dense => None,
            CacheFormat::Fp8 => Some(KvFormat::Fp8),
            CacheFormat::Nvfp4 => Some(KvFormat::NvFp4),
            CacheFormat::Nvfp4Hadamard => Some(KvFormat::NvFp4Hadamard),
        })?;
        Ok(CacheReport { kv_cache: self.format, kv_bytes_per_token: model.bytes_of_position() })
    }
}

/// Prints the result of a command, as JSON or as lines.
fn print(result: &impl Serialize, json: bool, lines: impl FnOnce() -> String) -> Result<()> {
    print_text(if json { serde_json::to_string_pretty(result)? } else { lines() })
}

/// Formats a path for a shell, in quotes if it needs them.
fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    match path.chars().all(|c| c.is_alphanumeric() || "/._-+=:@%,".contains(c)) {
        true => path,
        false => format!("'{}'", path.replace('\'', "'\\''")),
    }
}

/// Returns true if a path is that of a GGUF file.
fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"))
}

/// Formats a written folder, and a command that measures it.
fn saved_lines(out: &Path, files: usize, bytes: u64, next: &str) -> String {
    let plural = if files == 1 { "" } else { "s" };
    let megabytes = bytes as f64 / 1e6;
    let path = quoted(out);
    let note = match out.is_file() {
        true => "note: tensors have their names in the folder, so llama.cpp cannot run the file\n",
        false => "",
    };
    format!("saved {megabytes:.1} MB in {files} file{plural} to {path}\n{note}next: {next}")
}
