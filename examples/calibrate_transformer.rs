//! Trains a transformer of Burn's own modules on a text, quantizes it with calibrated methods, and
//! compares their accuracy, time and memory:
//! `cargo run --release --example calibrate_transformer`.

use std::cell::Cell;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_fp4::{Calibration, CalibrationOptions, Fp4Config, Fp4Module, Fp4Scheme, Gptq, Method};
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use examples::encoder::CharEncoder;
use examples::random::Random;
use examples::table::table;
use examples::text::{CharModel, Size, Text};
use examples::{OnDevice, print_text, progress};
use peak_alloc::PeakAlloc;
use serde::Serialize;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Trains a transformer on a text and quantizes it with calibrated methods.
#[derive(Parser)]
struct Arguments {
    /// Burn device to train and quantize on.
    #[arg(long, value_enum, default_value_t = OnDevice::Flex)]
    device: OnDevice,
    /// Batches of text to train on.
    #[arg(long, default_value_t = 400)]
    steps: usize,
    /// Batches of 16 windows of 64 characters to calibrate on.
    #[arg(
        long,
        default_value_t = 32,
        value_parser = RangedU64ValueParser::<usize>::new().range(1..),
    )]
    batches: usize,
    /// Quantize to MXFP4 instead of NVFP4.
    #[arg(long)]
    mxfp4: bool,
    /// Print an array of objects instead of a table.
    #[arg(long)]
    json: bool,
}

/// Accuracy and cost of a variant of the model.
#[derive(Serialize)]
struct Row {
    variant: &'static str,
    /// Share of validation characters predicted correctly.
    accuracy_percent: f64,
    /// Mean loss of a validation character, in nats.
    loss: f64,
    /// Relative error of the validation logits, against the dense model.
    output_error_percent: f64,
    /// Time to calibrate and quantize.
    seconds: f64,
    /// Peak memory of the host to calibrate and quantize, beyond the memory in use before.
    peak_memory_mb: f64,
}

fn main() -> ExitCode {
    examples::exit_code(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.device.device()?;
    device.seed(1);
    let text = Text::genesis()?;
    let bar = progress::bar(arguments.steps);
    let size = Size { layers: 4, hidden_size: 64, heads: 4 };
    let model = CharEncoder::new(&text, size, &device.clone().autodiff());
    let model = model.train_on(&text, arguments.steps, 1, &device, |_, loss| {
        bar.set_message(format!("training, loss {loss:.3}"));
        bar.inc(1);
    });
    let dense = model.valid();

    let scheme = if arguments.mxfp4 { Fp4Scheme::mxfp4() } else { Fp4Scheme::nvfp4() };
    let method = |search| Fp4Config::new(scheme.with_method(search));
    // 32 768 inputs for at most 256 channels: little damping is needed.
    let gptq = |correction| {
        let options = Gptq { damping: 0.05, correction, ..Gptq::DEFAULT };
        Fp4Config::new(scheme).method(Method::Gptq(options))
    };
    let mut rows = vec![row("dense", &dense, &dense, &text, &device, 0.0, 0.0)];
    for (variant, config, calibration) in [
        ("rule of the format", method(Method::Amax), Calibrated::Not),
        ("sse", method(Method::SSE), Calibrated::Not),
        ("hessian", method(Method::Hessian), Calibrated::Once),
        ("coordinate descent", method(Method::CoordinateDescent), Calibrated::Once),
        ("gptq", gptq(0.0), Calibrated::Once),
        ("gptq, sequential", gptq(0.0), Calibrated::Sequentially),
        ("gptq, corrected", gptq(0.5), Calibrated::Sequentially),
    ] {
        bar.set_message(variant);
        let mut random = Random::new(3);
        let batches: Vec<_> = (0..arguments.batches)
            .map(|_| text.batch(16, &mut random, &device)[0].clone())
            .collect();
        let last = Cell::new(0);
        let options = CalibrationOptions::default().on_progress(|progress| {
            if last.replace(progress.done) == 0 {
                bar.reset();
                bar.set_length(progress.total as u64);
                bar.set_message(format!("{variant}, inputs of layers"));
            }
            bar.set_position(progress.done as u64);
        });
        let forward = |model: &CharEncoder, windows: Tensor<2, Int>| model.logits(windows);
        let before = MEMORY.current_usage_as_mb();
        MEMORY.reset_peak_usage();
        let start = Instant::now();
        let mut model = dense.clone();
        match calibration {
            Calibrated::Not => model.quantize_fp4(&config)?,
            Calibrated::Once => {
                let known = Calibration::of(&model).options(options).run(batches, forward)?;
                model.quantize_fp4(&config.with_calibration(&known))?
            }
            Calibrated::Sequentially => {
                model.quantize_fp4_sequential(&config, options, batches, forward)?
            }
        };
        let seconds = start.elapsed().as_secs_f64();
        let memory = f64::from(MEMORY.peak_usage_as_mb() - before);
        rows.push(row(variant, &model, &dense, &text, &device, seconds, memory));
    }
    bar.finish_and_clear();
    if arguments.json {
        print_text(serde_json::to_string_pretty(&rows)?)?;
    } else {
        print(&rows)?;
    }
    Ok(())
}

/// Calibration of a variant.
enum Calibrated {
    Not,
    Once,
    Sequentially,
}

fn row(
    variant: &'static str,
    model: &CharEncoder,
    dense: &CharEncoder,
    text: &Text,
    device: &Device,
    seconds: f64,
    peak_memory_mb: f64,
) -> Row {
    let (mut correct, mut count, mut error, mut energy) = (0.0, 0, 0.0, 0.0);
    let sum = |values: Tensor<3>| values.powf_scalar(2.0).sum().into_scalar::<f64>();
    for [windows, next] in text.validation(device) {
        let [n, context] = windows.dims();
        let (logits, dense_logits) = (model.logits(windows.clone()), dense.logits(windows));
        let predicted = logits.clone().argmax(2).reshape([n, context]);
        correct += predicted.equal(next).int().sum().cast(DType::I64).into_scalar::<i64>() as f64;
        count += n * context;
        error += sum(logits - dense_logits.clone());
        energy += sum(dense_logits);
    }
    Row {
        variant,
        accuracy_percent: 100.0 * correct / count as f64,
        loss: model.validate(text, device),
        output_error_percent: 100.0 * (error / energy).sqrt(),
        seconds,
        peak_memory_mb,
    }
}

fn print(rows: &[Row]) -> Result<()> {
    let header = ["variant", "accuracy, %", "loss, nats", "error, %", "seconds", "peak, MB"];
    let cells = rows.iter().map(|row| {
        [
            row.variant.to_owned(),
            format!("{:.2}", row.accuracy_percent),
            format!("{:.4}", row.loss),
            format!("{:.2}", row.output_error_percent),
            format!("{:.2}", row.seconds),
            format!("{:.0}", row.peak_memory_mb),
        ]
    });
    print_text(table(header, 1, cells))
}
