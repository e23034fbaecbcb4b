//! Trains a transformer of Burn's own modules on a text, quantizes it by methods that use the
//! inputs of its layers, and shows what each costs in accuracy, time and memory:
//! `cargo run --release --example calibrate_transformer`.

use std::cell::Cell;
use std::time::Instant;

use anyhow::Result;
use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_fp4::{Calibration, CalibrationOptions, Fp4Config, Fp4Module, Fp4Scheme, Gptq, Method};
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use comfy_table::{CellAlignment, Table, presets};
use examples::OnDevice;
use examples::encoder::Reader;
use examples::progress;
use examples::random::Random;
use examples::text::{Predicts, Size, Text};
use peak_alloc::PeakAlloc;
use serde::Serialize;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Trains a transformer on a text and quantizes it by methods that use the inputs of its layers.
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

/// What a variant of the model costs.
#[derive(Serialize)]
struct Row {
    variant: &'static str,
    /// Share of characters of the validation part that are predicted.
    accuracy_percent: f64,
    /// Mean loss of a character there, in nats.
    loss: f64,
    /// Of the scores there, next to those of the dense model.
    output_error_percent: f64,
    /// To calibrate and quantize.
    seconds: f64,
    /// Of the host, beyond what the dense model took before.
    peak_memory_mb: f64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let device = arguments.device.device();
    device.seed(1);
    let text = Text::genesis()?;
    let bar = progress::bar(arguments.steps);
    let size = Size { blocks: 4, width: 64, heads: 4 };
    let model = Reader::new(&text, size, &device.clone().autodiff());
    let model = model.train_on(&text, arguments.steps, 1, &device, |_, loss| {
        bar.set_message(format!("training, loss {loss:.3}"));
        bar.inc(1);
    });
    let dense = model.valid();

    let scheme = if arguments.mxfp4 { Fp4Scheme::mxfp4() } else { Fp4Scheme::nvfp4() };
    let by = |search| Fp4Config::new(scheme.with_method(search));
    // 32 768 inputs determine the statistics of at most 256 channels well enough.
    let gptq = || Fp4Config::new(scheme).gptq(Gptq { damping: 0.05, ..Gptq::default() });
    let mut rows = vec![row("dense", &dense, &dense, &text, &device, 0.0, 0.0)];
    for (variant, config, calibration) in [
        ("rule of the format", by(Method::Amax), Calibrated::Not),
        ("sse", by(Method::SSE), Calibrated::Not),
        ("hessian", by(Method::Hessian), Calibrated::AtOnce),
        ("coordinate descent", by(Method::CoordinateDescent), Calibrated::AtOnce),
        ("gptq", gptq(), Calibrated::AtOnce),
        ("gptq, sequential", gptq(), Calibrated::Sequentially),
    ] {
        bar.set_message(variant);
        let mut random = Random::new(3);
        let batches: Vec<_> = (0..arguments.batches)
            .map(|_| text.batch(16, &mut random, &device)[0].clone())
            .collect();
        let told = Cell::new(0);
        let options = CalibrationOptions::default().on_progress(|progress| {
            if told.replace(progress.done) == 0 {
                bar.reset();
                bar.set_length(progress.total as u64);
                bar.set_message(format!("{variant}, inputs of layers"));
            }
            bar.set_position(progress.done as u64);
        });
        let forward = |model: &Reader, windows: Tensor<2, Int>| model.scores(windows);
        let before = MEMORY.current_usage_as_mb();
        MEMORY.reset_peak_usage();
        let start = Instant::now();
        let mut model = dense.clone();
        match calibration {
            Calibrated::Not => model.quantize_fp4(&config)?,
            Calibrated::AtOnce => {
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
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        print(&rows);
    }
    Ok(())
}

/// When a variant is calibrated.
enum Calibrated {
    Not,
    AtOnce,
    Sequentially,
}

fn row(
    variant: &'static str,
    model: &Reader,
    dense: &Reader,
    text: &Text,
    device: &Device,
    seconds: f64,
    peak_memory_mb: f64,
) -> Row {
    let (mut right, mut count, mut error, mut energy) = (0.0, 0, 0.0, 0.0);
    let sum = |values: Tensor<3>| values.powf_scalar(2.0).sum().into_scalar::<f64>();
    for [windows, next] in text.validation(device) {
        let [n, context] = windows.dims();
        let (found, expected) = (model.scores(windows.clone()), dense.scores(windows));
        let predicted = found.clone().argmax(2).reshape([n, context]);
        right += predicted.equal(next).int().sum().cast(DType::I64).into_scalar::<i64>() as f64;
        count += n * context;
        error += sum(found - expected.clone());
        energy += sum(expected);
    }
    Row {
        variant,
        accuracy_percent: 100.0 * right / count as f64,
        loss: model.validate(text, device),
        output_error_percent: 100.0 * (error / energy).sqrt(),
        seconds,
        peak_memory_mb,
    }
}

fn print(rows: &[Row]) {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header([
        "variant",
        "accuracy, %",
        "loss, nats",
        "output error, %",
        "seconds",
        "peak memory, MB",
    ]);
    for row in rows {
        table.add_row([
            row.variant.to_owned(),
            format!("{:.2}", row.accuracy_percent),
            format!("{:.4}", row.loss),
            format!("{:.2}", row.output_error_percent),
            format!("{:.2}", row.seconds),
            format!("{:.0}", row.peak_memory_mb),
        ]);
    }
    for column in 1..6 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    println!("{table}");
}
