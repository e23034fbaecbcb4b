//! Trains with FP4: a classifier of digits whose weights are fake-quantized after dense training,
//! and a character transformer by NVIDIA's recipe for pretraining: `cargo run --release --example
//! train_fp4`.

use std::path::PathBuf;

use anyhow::Result;
use burn::module::Module;
use burn::tensor::Device;
use burn_fp4::{Fp4Config, Fp4Module, TrainRecipe};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use comfy_table::{CellAlignment, Table, presets};
use examples::digits::{Classifier, Digits, recovered_percent};
use examples::plot::Curve;
use examples::text::{CharTransformer, Predicts, Size, Text};
use examples::{OnDevice, plot, progress};
use serde::Serialize;

/// Steps of the transformer whose losses make one point of its curve.
const POINT: usize = 10;

/// Trains with FP4, and compares with dense training.
#[derive(Parser)]
struct Arguments {
    /// What to train.
    #[arg(long, value_enum, default_value_t = Task::All)]
    task: Task,
    /// Burn device to train on.
    #[arg(long, value_enum, default_value_t = OnDevice::Flex)]
    device: OnDevice,
    /// Runs of everything, each from another seed.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Passes over the digits, dense; fake-quantized afterwards half as many.
    #[arg(long, default_value_t = 30)]
    epochs: usize,
    /// Batches of text.
    #[arg(long, default_value_t = 400)]
    steps: usize,
    /// Blocks of the transformer that stay in high precision, at its end.
    #[arg(long, default_value_t = 1)]
    keep_last: usize,
    /// Draw the losses of the transformer into an SVG file, after everything is printed.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Print an array of objects instead of tables.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Task {
    Digits,
    Text,
    All,
}

/// What became of one way to train, over all seeds.
#[derive(Serialize)]
struct Row {
    task: &'static str,
    variant: &'static str,
    /// Accuracy in percent, or validation loss in nats, of each seed.
    results: Vec<f64>,
    /// Training loss, a mean over [`POINT`] steps, of the first seed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    curve: Vec<(usize, f64)>,
}

impl Row {
    fn mean(&self) -> f64 {
        self.results.iter().sum::<f64>() / self.results.len() as f64
    }

    /// Standard deviation over seeds; none of a single one.
    fn spread(&self) -> Option<f64> {
        let mean = self.mean();
        let squares: f64 = self.results.iter().map(|result| (result - mean).powi(2)).sum();
        let others = self.results.len() - 1;
        (others > 0).then(|| (squares / others as f64).sqrt())
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.plot.is_some() && (arguments.task == Task::Digits || arguments.steps < POINT) {
        let needs = format!("--plot needs --task text or all, and --steps of {POINT} or more");
        Arguments::command().error(ErrorKind::ArgumentConflict, needs).exit();
    }
    let device = arguments.device.device();
    let mut rows = Vec::new();
    if arguments.task != Task::Text {
        rows.extend(digits(&arguments, &device)?);
    }
    if arguments.task != Task::Digits {
        rows.extend(text(&arguments, &device)?);
    }
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        print(&rows);
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

/// Dense training, quantization after it, and fake-quantized training after it.
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
    let size = Size { blocks: 4, width: 64, heads: 4 };
    let keep_last = arguments.keep_last.min(size.blocks);
    let recipe = TrainRecipe::NVFP4;
    let variants = [
        ("dense f32", TrainRecipe::HIGH_PRECISION, false),
        ("nvfp4 weights in training", TrainRecipe::HIGH_PRECISION, true),
        ("nvfp4 recipe", recipe, false),
        ("nvfp4 recipe, not drawn", TrainRecipe { stochastic_rounding: false, ..recipe }, false),
        ("nvfp4 recipe, not transformed", TrainRecipe { hadamard: None, ..recipe }, false),
    ];
    let bar = progress::bar(variants.len() * arguments.seeds as usize * arguments.steps);
    let mut rows = Vec::new();
    for (variant, recipe, aware) in variants {
        let mut row = Row { task: "text", variant, results: vec![], curve: vec![] };
        for seed in 0..arguments.seeds {
            device.seed(seed);
            let training = device.clone().autodiff();
            let mut model = CharTransformer::new(&text, size, recipe, keep_last, seed, &training)?;
            // With every block in high precision there is nothing to quantize.
            if aware && keep_last < size.blocks {
                let mut config = Fp4Config::nvfp4();
                let quantized = 0..size.blocks - keep_last;
                config.include.extend(quantized.map(|block| format!("blocks.{block}.**")));
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

fn print(rows: &[Row]) {
    for rows in rows.chunk_by(|a, b| a.task == b.task) {
        let text = rows[0].task == "text";
        let unit = if text { "validation loss, nats" } else { "accuracy, %" };
        let mut table = Table::new();
        table.load_style(presets::UTF8_FULL_CONDENSED).set_header([
            rows[0].task,
            unit,
            "spread",
            "against dense",
            "each seed",
        ]);
        let dense = rows[0].mean();
        for row in rows {
            let against = match text {
                true => format!("{:+.2} %", 100.0 * (row.mean() / dense - 1.0)),
                false => format!("{:+.2}", row.mean() - dense),
            };
            let each: Vec<_> = row.results.iter().map(|result| format!("{result:.3}")).collect();
            table.add_row([
                row.variant.to_owned(),
                format!("{:.3}", row.mean()),
                row.spread().map_or_else(|| "-".to_owned(), |spread| format!("{spread:.3}")),
                against,
                each.join(" "),
            ]);
        }
        for column in 1..4 {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        println!("{table}");
        if let [dense, _, after, aware] = rows
            && !text
        {
            match recovered_percent(dense.mean(), after.mean(), aware.mean()) {
                Some(percent) => println!("{percent:.0} % of what quantization loses is recovered"),
                None => println!("quantization loses nothing that could be recovered"),
            }
        }
        for row in rows.iter().filter(|row| !row.curve.is_empty()) {
            let every = row.curve.len().div_ceil(8);
            let points: Vec<_> = row.curve.iter().rev().step_by(every).collect();
            let points = points.iter().rev().map(|(step, loss)| format!("{}: {loss:.3}", step + 1));
            println!("  {}: {}", row.variant, points.collect::<Vec<_>>().join(", "));
        }
    }
}
