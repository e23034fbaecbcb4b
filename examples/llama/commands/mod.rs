//! The commands, a file for each.

pub(crate) mod compare;
pub(crate) mod distill;
pub(crate) mod generate;
pub(crate) mod perplexity;
pub(crate) mod quantize;
pub(crate) mod sensitivity;
pub(crate) mod train;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use burn::tensor::{Device, FloatDType};
use burn_fp4::Fp4Format;
use clap::ValueEnum;
use examples::OnDevice;
use llama::{Folder, Llama, Projection, Tokens};
use serde::Serialize;
use tokenizers::Tokenizer;

/// A text, and the part of it that nothing is learned from.
#[derive(clap::Args)]
pub(crate) struct Text {
    /// A file; without, the book of Genesis.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// The share of the text, at its end, that is measured on; calibration and training have the
    /// rest.
    #[arg(long, default_value_t = 0.1)]
    held_out: f64,
}

impl Text {
    fn tokens(&self, tokenizer: &Tokenizer) -> Result<Tokens> {
        let book = include_str!("../../data/genesis.txt");
        let text = match &self.text {
            None => book.to_owned(),
            Some(path) => {
                std::fs::read_to_string(path).with_context(|| path.display().to_string())?
            }
        };
        Tokens::new(tokenizer, &text, self.held_out)
    }
}

/// Where a model runs, and in what numbers.
#[derive(clap::Args)]
pub(crate) struct Where {
    /// Burn device.
    #[arg(long, value_enum, default_value_t = OnDevice::Flex)]
    device: OnDevice,
    /// The numbers of activations and of weights that are not quantized.
    #[arg(long, value_enum, default_value_t = Numbers::F32)]
    dtype: Numbers,
}

/// Numbers that a model computes with.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Numbers {
    F32,
    Bf16,
    F16,
}

impl Where {
    /// The device, whose tensors have these numbers from now on.
    fn device(&self) -> Result<Device> {
        let mut device = self.device.device();
        device.configure(match self.dtype {
            Numbers::F32 => FloatDType::F32,
            Numbers::Bf16 => FloatDType::BF16,
            Numbers::F16 => FloatDType::F16,
        })?;
        Ok(device)
    }
}

/// The embedding of a model whose output layer is tied to it.
#[derive(clap::Args)]
pub(crate) struct Tied {
    /// How an embedding that is also the output layer is kept in memory: as the folder has it, or
    /// packed while it is loaded, for both of its uses.
    #[arg(long, value_enum, default_value_t = TiedEmbedding::AsLoaded)]
    tied_embedding: TiedEmbedding,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum TiedEmbedding {
    AsLoaded,
    Nvfp4,
    Mxfp4,
}

impl Tied {
    /// The model of a folder.
    fn load<L: Projection>(&self, folder: &Folder, device: &Device) -> Result<Llama<L>> {
        let (mut model, _) = folder.load::<L>(device)?;
        let format = match self.tied_embedding {
            TiedEmbedding::AsLoaded => return Ok(model),
            TiedEmbedding::Nvfp4 => Fp4Format::NvFp4,
            TiedEmbedding::Mxfp4 => Fp4Format::MxFp4,
        };
        ensure!(
            model.quantize_tied_embedding(format)?,
            "the model has an output layer of its own; leave out --tied-embedding"
        );
        Ok(model)
    }
}

/// Prints what a command found, as an object or as lines.
fn print(found: &impl Serialize, json: bool, lines: impl FnOnce() -> String) -> Result<()> {
    match json {
        true => println!("{}", serde_json::to_string_pretty(found)?),
        false => println!("{}", lines()),
    }
    Ok(())
}
