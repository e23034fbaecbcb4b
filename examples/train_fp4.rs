//! Trains with FP4: a classifier of digits, fake-quantized after dense training, and a character
//! transformer with NVIDIA's pretraining recipe: `cargo run --release --example
//! train_fp4`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use burn::module::Module;
use burn::tensor::Device;
use burn_fp4::{Fp4Config, Fp4Module, TrainRecipe};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use examples::digits::{Classifier, Digits, recovered_percent};
use examples::plot::Curve;
use examples::table::{figure, table};
use examples::text::{CharModel, CharTransformer, Size, Text};
use examples::{OnDevice, plot, print_text, progress};
use serde::Serialize;

/// Steps that are averaged into one point of the training curve.
const POINT: usize = 10;

/// Trains with FP4 and compares with dense training.
#[derive(Parser)]
struct Arguments {
    /// Task to train.
    #[arg(long, value_enum, default_value_t = Dataset::All)]
    task: Dataset,
    /// Burn device to train on.
    #[arg(long, value_enum, default_value_t = OnDevice::Flex)]
    device: OnDevice,
    /// Number of runs, each with a seed of its own.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Epochs of dense training on digits; fake-quantized training takes half as many.
    #[arg(long, default_value_t = 30)]
    epochs: usize,
    /// Batches of text to train on.
    #[arg(long, default_value_t = 400)]
    steps: usize,
    /// Last layers of the transformer that stay in high precision.
    #[arg(long, default_value_t = 1)]
    keep_last: usize,
    /// Draw the training losses of the transformer into an SVG file.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print an array of objects instead of tables.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Dataset {
    Digits,
    Text,
    All,
}

/// Results of one way to train, over all seeds.
#[derive(Serialize)]
struct Row {
    task: &'static str,
    variant: &'static str,
    /// Accuracy in percent, or validation loss in nats, for each seed.
    results: Vec<f64>,
    /// Training loss of the first seed: means over [`POINT`] steps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    curve: Vec<(usize, f64)>,
}

impl Row {
    fn mean(&self) -> f64 {
        self.results.iter().sum::<f64>() / self.results.len() as f64
    }

    /// Computes the standard deviation over seeds. None for a single seed.
    fn spread(&self) -> Option<f64> {
        let mean = self.mean();
        let squares: f64 = self.results.iter().map(|result| (result - mean).powi(2)).sum();
        let others = self.results.len() - 1;
        (others > 0).then(|| (squares / others as f64).sqrt())
    }
}

fn main() -> ExitCode {
    examples::exit_code(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<()> {
    if arguments.plot.is_some() && (arguments.task == Dataset::Digits || arguments.steps < POINT) {
        let needs = format!("--plot: pass --task text or all, and --steps of {POINT} or more");
        Arguments::command().error(ErrorKind::ArgumentConflict, needs).exit();
    }
    let device = arguments.device.device()?;
    let mut rows = Vec::new();
    if arguments.task != Dataset::Text {
        rows.extend(digits(arguments, &device)?);
    }
    if arguments.task != Dataset::Digits {
        rows.extend(text(arguments, &device)?);
    }
    if arguments.json {
        print_text(serde_json::to_string_pretty(&rows)?)?;
    } else {
        print(&rows)?;
    }
    if let Some(path) = &arguments.plot {
        let curves: Vec<_> = rows
            .iter()
            .filter(|row| !row.curve.is_empty())
            .map(|row| Curve { name: row.variant, points: &row.curve })
            .collect();
        let title = "Genesis, character by character: training loss of the first seed";
        plot::draw(path, title, "nats a character", &curves)?;
    }
    Ok(())
}

/// Compares dense training, quantization after it, and fake-quantized training after it.
fn digits(arguments: &Arguments, device: &Device) -> Result<Vec<Row>> {
    let (train, test) = Digits::train_and_test()?;
    let row = |variant| Row { task: "digits", variant, results: vec![], curve: vec![] };
    let [mut dense, mut longer, mut after, mut aware] =
        ["dense f32", "dense f32, longer", "mxfp4 after training", "mxfp4 in training"].map(row);
    let tune = arguments.epochs.div_ceil(2);
    let bar = progress::bar(arguments.seeds as usize * (arguments.epochs + 2 * tune));
    for seed in 0..arguments.seeds {
        device.seed(seed);
        let train_on = |model: Classifier, epochs, rate| {
            model.train_on(&train, epochs, rate, seed, device, |loss| {
                bar.set_message(format!("digits, seed {seed}, loss {loss:.4}"));
                bar.inc(1);
            })
        };
        let accuracy = |model: &Classifier| 100.0 * model.accuracy(&test, device);
        let model = Classifier::new(&device.clone().autodiff(), [32, 32]);
        let model = train_on(model, arguments.epochs, 3e-3);
        dense.results.push(accuracy(&model.valid()));
        longer.results.push(accuracy(&train_on(model.clone(), tune, 1e-3).valid()));

        let config = Fp4Config::mxfp4();
        let mut quantized = model.valid();
        quantized.quantize_fp4(&config)?;
        after.results.push(accuracy(&quantized));

        let mut model = model;
        model.fake_quantize_fp4(&config)?;
        let mut model = train_on(model, tune, 1e-3).valid();
        model.convert_fp4()?;
        aware.results.push(accuracy(&model));
    }
    bar.finish_and_clear();
    Ok(vec![dense, longer, after, aware])
}

fn text(arguments: &Arguments, device: &Device) -> Result<Vec<Row>> {
    let text = Text::genesis()?;
    let size = Size { layers: 4, hidden_size: 64, heads: 4 };
    let keep_last = arguments.keep_last.min(size.layers);
    let recipe = TrainRecipe::NVFP4;
    let variants = [
        ("dense f32", TrainRecipe::HIGH_PRECISION, false),
        ("nvfp4 weights in training", TrainRecipe::HIGH_PRECISION, true),
        ("nvfp4 recipe", recipe, false),
        ("nvfp4 recipe, nearest", TrainRecipe { stochastic_rounding: false, ..recipe }, false),
        ("nvfp4 recipe, no hadamard", TrainRecipe { hadamard: None, ..recipe }, false),
    ];
    let bar = progress::bar(variants.len() * arguments.seeds as usize * arguments.steps);
    let mut rows = Vec::new();
    for (variant, recipe, aware) in variants {
        let mut row = Row { task: "text", variant, results: vec![], curve: vec![] };
        for seed in 0..arguments.seeds {
            device.seed(seed);
            let training = device.clone().autodiff();
            let mut model = CharTransformer::new(&text, size, recipe, keep_last, seed, &training)?;
            // With every layer in high precision there is nothing to quantize.
            if aware && keep_last < size.layers {
                let mut config = Fp4Config::nvfp4();
                let quantized = 0..size.layers - keep_last;
                config.include.extend(quantized.map(|layer| format!("layers.{layer}.**")));
                model.fake_quantize_fp4(&config)?;
            }
            let mut recent = Vec::new();
            let model = model.train_on(&text, arguments.steps, seed, device, |step, loss| {
                bar.set_message(format!("{variant}, seed {seed}, loss {loss:.3}"));
                bar.inc(1);
                recent.push(loss);
                if seed == 0 && recent.len() == POINT {
                    row.curve.push((step, recent.iter().sum::<f64>() / POINT as f64));
                    recent.clear();
                }
            });
            row.results.push(model.valid().validate(&text, device));
        }
        rows.push(row);
    }
    bar.finish_and_clear();
    Ok(rows)
}

fn print(rows: &[Row]) -> Result<()> {
    for rows in rows.chunk_by(|a, b| a.task == b.task) {
        let text = rows[0].task == "text";
        let unit = if text { "loss, nats" } else { "accuracy, %" };
        let dense = rows[0].mean();
        let cells = rows.iter().map(|row| {
            let against_dense = match text {
                true => format!("{:+.2} %", 100.0 * (row.mean() / dense - 1.0)),
                false => format!("{:+.2}", row.mean() - dense),
            };
            let mean = format!("{:.3}", row.mean());
            [row.variant.to_owned(), mean, figure(row.spread(), 3), against_dense]
        });
        print_text(table([rows[0].task, unit, "spread", "against dense"], 1, cells))?;
        if let [dense, _, after, aware] = rows
            && !text
        {
            match recovered_percent(dense.mean(), after.mean(), aware.mean()) {
                Some(percent) => {
                    print_text(format!("training recovers {percent:.0} % of the lost accuracy"))?
                }
                None => print_text("quantization loses no accuracy")?,
            }
        }
        for row in rows.iter().filter(|row| !row.curve.is_empty()) {
            let every = row.curve.len().div_ceil(5);
            let points: Vec<_> = row.curve.iter().rev().step_by(every).collect();
            let points = points.iter().rev().map(|(step, loss)| format!("{}: {loss:.3}", step + 1));
            print_text(format!("training loss of {}, by step", row.variant))?;
            print_text(format!("  {}", points.collect::<Vec<_>>().join(", ")))?;
        }
    }
    Ok(())
}
