//! Trains a transformer on the first half of a book, quantizes it to NVFP4, and fine-tunes it on
//! the other half by LoRA, over the dense weights and over the codes:
//! `cargo run --release --example lora_transformer`.

use anyhow::Result;
use burn::module::{Lora, Module, ModuleVisitor, Param, ParamGroup};
use burn::tensor::{Int, Tensor};
use burn_fp4::{Fp4Config, Fp4Module};
use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use examples::encoder::Reader;
use examples::text::{Predicts, Size, Text};
use examples::{OnDevice, progress};
use serde::Serialize;

/// Fine-tunes a transformer by LoRA, over dense weights and over NVFP4 codes.
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

/// What became of one kind of base weights.
#[derive(Serialize)]
struct Row {
    base: &'static str,
    /// Mean loss of a character of the validation part of the second half, in nats, before.
    loss_before: f64,
    /// The same after fine-tuning.
    loss: f64,
    /// Loss after fine-tuning, over that of the dense model.
    ratio: f64,
    /// Of the base weights that are adapted, before fine-tuning.
    bytes_before: usize,
    /// The same after it.
    bytes_after: usize,
    /// Whether fine-tuning left every bit of codes and scales as it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    codes_unchanged: Option<bool>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let device = arguments.device.device();
    device.seed(1);
    let text = Text::genesis()?;
    let [first, second] = text.halves();
    let size = Size { blocks: 4, width: 64, heads: 4 };
    let bar = progress::bar(3 * arguments.steps);
    let train = |model: Reader, text: &Text, what: &str| {
        model.train_on(text, arguments.steps, 1, &device, |_, loss| {
            bar.set_message(format!("{what}, loss {loss:.3}"));
            bar.inc(1);
        })
    };
    let loss = |model: &Reader| model.valid().validate(&second, &device);
    let model = Reader::new(&first, size, &device.clone().autodiff());
    let model = train(model, &first, "training");

    let linear_layers = ParamGroup::from_any_predicates(vec!["encoder", "head"]);
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
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        print(&rows);
    }
    Ok(())
}

/// The codes and scales of all packed weights.
#[derive(Default, PartialEq)]
struct Codes {
    values: Vec<Vec<i64>>,
    bytes: usize,
}

impl Codes {
    fn of(model: &Reader) -> Self {
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

fn print(rows: &[Row]) {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header([
        "base weights",
        "loss before, nats",
        "loss, nats",
        "over dense",
        "bytes before",
        "bytes after",
        "codes unchanged",
    ]);
    for row in rows {
        table.add_row([
            row.base.to_owned(),
            format!("{:.4}", row.loss_before),
            format!("{:.4}", row.loss),
            format!("{:.4}", row.ratio),
            row.bytes_before.to_string(),
            row.bytes_after.to_string(),
            match row.codes_unchanged {
                Some(true) => "bit for bit".to_owned(),
                Some(false) => "no".to_owned(),
                None => "-".to_owned(),
            },
        ]);
    }
    for column in 1..6 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    println!("{table}");
}
