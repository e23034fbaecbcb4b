//! Trains a transformer on the first half of a book, quantizes it to NVFP4, and fine-tunes it on
//! the second half with LoRA, over dense and over quantized weights:
//! `cargo run --release --example lora_transformer`.

use std::process::ExitCode;

use anyhow::Result;
use burn::module::{Lora, Module, ModuleVisitor, Param, ParamGroup};
use burn::tensor::{Int, Tensor};
use burn_fp4::{Fp4Config, Fp4Module};
use clap::Parser;
use examples::encoder::CharEncoder;
use examples::table::table;
use examples::text::{CharModel, Size, Text};
use examples::{OnDevice, print_text, progress};
use serde::Serialize;

/// Fine-tunes a transformer with LoRA, over dense and over NVFP4 weights.
#[derive(Parser)]
struct Arguments {
    /// Burn device to train on.
    #[arg(long, value_enum, default_value_t = OnDevice::Flex)]
    device: OnDevice,
    /// Batches of text to train on, and as many to fine-tune on.
    #[arg(long, default_value_t = 400)]
    steps: usize,
    /// Print an array of objects instead of a table.
    #[arg(long)]
    json: bool,
}

/// Result of fine-tuning over one kind of base weights.
#[derive(Serialize)]
struct Row {
    base: &'static str,
    /// Mean loss of a validation character of the second half before fine-tuning, in nats.
    loss_before: f64,
    /// Mean loss after fine-tuning, in nats.
    loss: f64,
    /// Loss after fine-tuning, relative to the dense weights.
    ratio: f64,
    /// Bytes of the adapted base weights before fine-tuning.
    bytes_before: usize,
    /// Bytes of the adapted base weights after fine-tuning.
    bytes_after: usize,
    /// True if fine-tuning changed no bit of codes and scales.
    #[serde(skip_serializing_if = "Option::is_none")]
    codes_unchanged: Option<bool>,
}

fn main() -> ExitCode {
    examples::exit_code(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.device.device()?;
    device.seed(1);
    let text = Text::genesis()?;
    let [first, second] = text.halves();
    let size = Size { layers: 4, hidden_size: 64, heads: 4 };
    let bar = progress::bar(3 * arguments.steps);
    let train = |model: CharEncoder, text: &Text, stage: &str| {
        model.train_on(text, arguments.steps, 1, &device, |_, loss| {
            bar.set_message(format!("{stage}, loss {loss:.3}"));
            bar.inc(1);
        })
    };
    let loss = |model: &CharEncoder| model.valid().validate(&second, &device);
    let model = CharEncoder::new(&first, size, &device.clone().autodiff());
    let model = train(model, &first, "training");

    let linear_layers = ParamGroup::from_any_predicates(vec!["encoder", "lm_head"]);
    let lora = Lora::new(8, 16.0).set_param_group(linear_layers);

    let mut packed = model.clone();
    let report = packed.quantize_fp4(&Fp4Config::nvfp4())?;
    let dense_bytes: usize = report.quantized().map(|weight| weight.bytes_before).sum();

    device.seed(2);
    let loss_before = loss(&model);
    let tuned = train(model.apply_lora(lora.clone()), &second, "LoRA over dense weights");
    let dense = Row {
        base: "dense f32",
        loss_before,
        loss: loss(&tuned),
        ratio: 1.0,
        bytes_before: dense_bytes,
        bytes_after: dense_bytes,
        codes_unchanged: None,
    };

    device.seed(2);
    let (loss_before, before) = (loss(&packed), Codes::of(&packed));
    packed.lora_fp4(&lora)?;
    let tuned = train(packed, &second, "LoRA over NVFP4");
    let (tuned_loss, after) = (loss(&tuned), Codes::of(&tuned));
    let quantized = Row {
        base: "nvfp4",
        loss_before,
        loss: tuned_loss,
        ratio: tuned_loss / dense.loss,
        bytes_before: before.bytes,
        bytes_after: after.bytes,
        codes_unchanged: Some(before == after),
    };
    bar.finish_and_clear();
    let rows = [dense, quantized];
    if arguments.json {
        print_text(serde_json::to_string_pretty(&rows)?)?;
    } else {
        print(&rows)?;
    }
    Ok(())
}

/// Codes and scales of all packed weights.
#[derive(Default, PartialEq)]
struct Codes {
    values: Vec<Vec<i64>>,
    bytes: usize,
}

impl Codes {
    fn of(model: &CharEncoder) -> Self {
        let mut codes = Self::default();
        model.visit(&mut codes);
        codes
    }
}

impl ModuleVisitor for Codes {
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let values = param.val();
        self.bytes += values.shape().num_elements() * values.dtype().size();
        self.values.push(values.into_data().iter::<i64>().collect());
    }
}

fn print(rows: &[Row]) -> Result<()> {
    let header = ["base weights", "loss before", "loss after", "kB before", "kB after", "codes"];
    let kilobytes = |bytes: usize| format!("{:.1}", bytes as f64 / 1e3);
    let cells = rows.iter().map(|row| {
        [
            row.base.to_owned(),
            format!("{:.4}", row.loss_before),
            format!("{:.4}", row.loss),
            kilobytes(row.bytes_before),
            kilobytes(row.bytes_after),
            match row.codes_unchanged {
                Some(true) => "unchanged".to_owned(),
                Some(false) => "changed".to_owned(),
                None => "-".to_owned(),
            },
        ]
    });
    print_text(table(header, 1, cells))?;
    for row in &rows[1..] {
        print_text(format!("{}: {:.4} times the loss of dense base weights", row.base, row.ratio))?;
    }
    Ok(())
}
