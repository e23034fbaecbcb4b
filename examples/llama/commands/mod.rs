//! The commands, a file for each.

pub(crate) mod compare;
pub(crate) mod distill;
pub(crate) mod generate;
pub(crate) mod perplexity;
pub(crate) mod quantize;
pub(crate) mod sensitivity;
pub(crate) mod train;

use std::path::PathBuf;

use anyhow::{Context, Result};
use burn::tensor::{Device, FloatDType};
use clap::ValueEnum;
use examples::OnDevice;
use llama::Tokens;
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

/// Prints what a command found, as an object or as lines.
fn print(found: &impl Serialize, json: bool, lines: impl FnOnce() -> String) -> Result<()> {
    match json {
        true => println!("{}", serde_json::to_string_pretty(found)?),
        false => println!("{}", lines()),
    }
    Ok(())
}
