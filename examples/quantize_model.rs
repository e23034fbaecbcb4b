//! Trains a small network on handwritten digits, quantizes it in place with each scale rule, and
//! compares their accuracy and size: `cargo run --release --example quantize_model`.

use std::process::ExitCode;

use anyhow::Result;
use burn::module::Module;
use burn_fp4::{
    Blocks, E4m3Range, ErrorMetric, Fp4Config, Fp4Module, Fp4Scheme, Method, ScaleRule,
};
use clap::Parser;
use examples::digits::{Classifier, Digits};
use examples::table::table;
use examples::{OnDevice, print_text, progress};
use serde::Serialize;

/// Trains a small network on handwritten digits and quantizes it to FP4 with each scale rule.
#[derive(Parser)]
struct Arguments {
    /// Burn device to train and quantize on.
    #[arg(long, value_enum, default_value_t = OnDevice::Flex)]
    device: OnDevice,
    /// Passes over the training images.
    #[arg(long, default_value_t = 30)]
    epochs: usize,
    /// Print the report of every parameter for the default rule.
    #[arg(long, conflicts_with = "json")]
    report: bool,
    /// Print an array of objects instead of a table.
    #[arg(long)]
    json: bool,
}

/// Accuracy and size of a variant of the model.
#[derive(Serialize)]
struct Row {
    variant: String,
    /// Share of test images classified correctly.
    accuracy: f64,
    /// Relative error of the quantized weights.
    weight_error_percent: f64,
    /// Stored bits per quantized weight.
    bits_per_weight: f64,
    /// Stored bytes of all parameters.
    bytes: usize,
}

fn main() -> ExitCode {
    examples::exit_code(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.device.device()?;
    device.seed(7);
    let (train, test) = Digits::train_and_test()?;

    let bar = progress::bar(arguments.epochs);
    let model = Classifier::new(&device.clone().autodiff(), [256, 128]);
    let model = model.train_on(&train, arguments.epochs, 1e-3, 0, &device, |loss| {
        bar.set_message(format!("training, loss {loss:.4}"));
        bar.inc(1);
    });
    let dense = model.valid();

    let dense_bytes = 4 * dense.num_params();
    let mut rows = vec![Row {
        variant: "dense f32".to_owned(),
        accuracy: dense.accuracy(&test, &device),
        weight_error_percent: 0.0,
        bits_per_weight: 32.0,
        bytes: dense_bytes,
    }];
    for (variant, scheme) in variants() {
        bar.set_message(variant);
        let mut model = dense.clone();
        let report = model.quantize_fp4(&Fp4Config::new(scheme))?;
        rows.push(Row {
            variant: variant.to_owned(),
            accuracy: model.accuracy(&test, &device),
            weight_error_percent: 100.0 * report.relative_error(),
            bits_per_weight: report.bits_per_weight(),
            bytes: report.bytes_after(),
        });
        if arguments.report && scheme == Fp4Scheme::nvfp4() {
            bar.suspend(|| print_text(format!("{report}\n")))?;
        }
    }
    bar.finish_and_clear();
    if arguments.json {
        print_text(serde_json::to_string_pretty(&rows)?)?;
    } else {
        print(&rows)?;
        print_text(format!(
            "trained on {} images, measured on {} others",
            train.len(),
            test.len()
        ))?;
    }
    Ok(())
}

fn variants() -> Vec<(&'static str, Fp4Scheme)> {
    let nvfp4 = Fp4Scheme::nvfp4();
    let search = Method::FourOverSix { range: E4m3Range::E256, error: ErrorMetric::Mse };
    let tiles = nvfp4.with_blocks(Blocks::Tile16x16);
    vec![
        ("nvfp4 te", nvfp4),
        ("nvfp4 te, 4 over 6", nvfp4.with_method(search)),
        ("nvfp4 te, 16x16 tiles", tiles),
        ("nvfp4 te, blocks of 32", nvfp4.with_block_size(32)),
        ("nvfp4 te-division", nvfp4.with_rule(ScaleRule::TeDivision)),
        ("nvfp4 torch-recipe", nvfp4.with_rule(ScaleRule::TorchRecipe)),
        ("nvfp4 no-tensor-scale", nvfp4.with_rule(ScaleRule::NoTensorScale)),
        ("mxfp4 floor", Fp4Scheme::mxfp4()),
        ("mxfp4 even", Fp4Scheme::of(ScaleRule::Even)),
        ("mxfp4 round-up", Fp4Scheme::of(ScaleRule::RoundUp)),
        ("mxfp4 ceil", Fp4Scheme::of(ScaleRule::Ceil)),
        ("mxfp4 even, blocks of 16", Fp4Scheme::of(ScaleRule::Even).with_block_size(16)),
    ]
}

fn print(rows: &[Row]) -> Result<()> {
    let header = ["variant", "accuracy, %", "error, %", "bits/weight", "bytes"];
    let cells = rows.iter().map(|row| {
        [
            row.variant.clone(),
            format!("{:.2}", 100.0 * row.accuracy),
            format!("{:.3}", row.weight_error_percent),
            format!("{:.3}", row.bits_per_weight),
            row.bytes.to_string(),
        ]
    });
    print_text(table(header, 1, cells))
}
