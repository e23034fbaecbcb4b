//! `llama compare`: what each way to quantize a model costs.

use std::path::PathBuf;

use anyhow::Result;
use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::{
    Budget, Calibration, CalibrationOptions, Candidate, Fp4Config, Fp4Format, Fp4Module, Gptq,
    Method, Unused,
};
use comfy_table::{CellAlignment, Table, presets};
use llama::{
    Batches, CalibrationWindows, Folder, Llama, Tokens, Windows, fp4_config, perplexity,
    sensitivity,
};
use serde::Serialize;

use super::distill::Distillation;
use super::{Text, Where, print};

/// Quantize a model in every way, calibrated on several drawings of windows of a text, and measure
/// each on the part of the text that is held out.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A folder of Hugging Face, dense or FP8.
    folder: PathBuf,
    /// Drawings of windows to calibrate on, and to distill on.
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Windows of 256 tokens to calibrate on.
    #[arg(long, default_value_t = 128)]
    calibration_windows: usize,
    /// Windows of 128 tokens whose loss is differentiated for the budgets, one at a time.
    #[arg(long, default_value_t = 256)]
    loss_windows: usize,
    /// Trust in the calibration, for GPTQ: what is added to the diagonal of `X^T X`, as a multiple
    /// of its mean.
    #[arg(long, default_value_t = Gptq::DEFAULT.damping)]
    damping: f64,
    #[command(flatten)]
    distillation: Distillation,
    #[command(flatten)]
    windows: Windows,
    #[command(flatten)]
    text: Text,
    #[command(flatten)]
    place: Where,
    /// Print an array of objects instead of a table.
    #[arg(long)]
    json: bool,
}

/// What a way to quantize costs.
#[derive(Serialize)]
struct Row {
    format: Option<Fp4Format>,
    variant: &'static str,
    /// Perplexity of the part that is held out, for each seed.
    perplexities: Vec<f64>,
    mean: f64,
    /// Standard deviation over seeds; none where the seed decides nothing.
    spread: Option<f64>,
    /// Of what the rule's scales add to the mean of `-ln p`, the share that this avoids.
    recovered_percent: Option<f64>,
}

/// A way to quantize that the seed decides something about, and a perplexity.
type Found = (&'static str, f64);

/// Bits per weight within which each weight has the format that the loss suffers least from.
const BUDGETS: [(&str, f64); 2] = [("budget 5.0", 5.0), ("budget 6.0", 6.0)];

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.place.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let (dense, _) = folder.load::<Linear>(&device)?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let measure = Measure { arguments, dense: &dense, tokens: &tokens, device: &device };
    let mut rows = vec![Row::new(None, "dense", vec![measure.perplexity(&dense)?])];
    // What each seed finds.
    let (mut calibrated, mut budgets) = (Fp4Format::ALL.map(|_| Vec::new()), Vec::new());
    for seed in 1..=arguments.seeds {
        let windows = measure.windows(seed);
        let known = windows.run(&dense, CalibrationOptions::default(), &tokens, &device)?;
        for (format, found) in Fp4Format::ALL.into_iter().zip(&mut calibrated) {
            found.push(measure.calibrated(format, seed, &known)?);
        }
        budgets.push(measure.budgets(seed, &known)?);
    }
    for (format, seeds) in Fp4Format::ALL.into_iter().zip(&calibrated) {
        for (variant, method) in [("amax", Method::Amax), ("sse", Method::SSE)] {
            let mut model = dense.clone();
            model.quantize_fp4(&fp4_config(&dense, format, method))?;
            rows.push(Row::new(Some(format), variant, vec![measure.perplexity(&model)?]));
        }
        rows.extend(of_seeds(Some(format), seeds));
    }
    rows.extend(of_seeds(None, &budgets));
    recovered(&mut rows);
    print(&rows, arguments.json, || table(&rows))
}

/// A row for each way that seeds have found.
fn of_seeds(format: Option<Fp4Format>, seeds: &[Vec<Found>]) -> Vec<Row> {
    let variants = seeds.first().map_or(0, Vec::len);
    let row = |at: usize| {
        let each = seeds.iter().map(|found| found[at].1);
        Row::new(format, seeds[0][at].0, each.collect())
    };
    (0..variants).map(row).collect()
}

/// What all rows are measured by.
struct Measure<'a> {
    arguments: &'a Arguments,
    dense: &'a Llama<Linear>,
    tokens: &'a Tokens,
    device: &'a Device,
}

impl Measure<'_> {
    fn perplexity(&self, model: &Llama<Linear>) -> Result<f64> {
        let (tokens, windows) = (self.tokens.held_out(), self.arguments.windows);
        Ok(perplexity(model, tokens, windows, self.device)?.perplexity)
    }

    /// What a seed calibrates on.
    fn windows(&self, seed: u64) -> CalibrationWindows {
        CalibrationWindows { windows: self.arguments.calibration_windows, context: 256, seed }
    }

    /// By GPTQ, with the damping asked for.
    fn gptq(&self, format: Fp4Format) -> Fp4Config {
        let config = fp4_config(self.dense, format, Method::GPTQ);
        config.gptq(Gptq { damping: self.arguments.damping, ..Gptq::DEFAULT })
    }

    /// The perplexity of the model quantized by a configuration.
    fn quantized(&self, config: &Fp4Config) -> Result<f64> {
        let mut model = self.dense.clone();
        model.quantize_fp4(config)?;
        self.perplexity(&model)
    }

    /// The ways that a seed decides something about, calibrated on its windows.
    fn calibrated(&self, format: Fp4Format, seed: u64, known: &Calibration) -> Result<Vec<Found>> {
        let Self { arguments, dense, tokens, device } = *self;
        let hessian = fp4_config(dense, format, Method::Hessian).with_calibration(known);
        let gptq = self.gptq(format);
        let mut sequential = dense.clone();
        self.windows(seed).quantize_sequential(&mut sequential, &gptq, tokens, device)?;
        let mut found = vec![
            ("hessian", self.quantized(&hessian)?),
            ("gptq", self.quantized(&gptq.with_calibration(known))?),
            ("gptq, sequential", self.perplexity(&sequential)?),
        ];
        if arguments.distillation.steps > 0 {
            let batches = Batches { seed, ..Batches::default() };
            let (distilled, _, _) =
                arguments.distillation.run(dense, format, tokens, batches, device)?;
            found.push(("distilled", self.perplexity(&distilled)?));
        }
        Ok(found)
    }

    /// Each weight in a format of its own, by GPTQ, within some bits.
    fn budgets(&self, seed: u64, known: &Calibration) -> Result<Vec<Found>> {
        let config = self.gptq(Fp4Format::NvFp4).unused(Unused::Report).with_calibration(known);
        let batches = Batches { batch: 1, seed, ..Batches::default() };
        let found = sensitivity(
            self.dense,
            &config,
            &Candidate::DEFAULT,
            (self.arguments.loss_windows, batches),
            self.tokens,
            self.device,
        )?;
        let within = |(name, bits): (&'static str, f64)| -> Result<Found> {
            let choice = found.choose(Budget::BitsPerWeight(bits))?;
            Ok((name, self.quantized(&choice.config)?))
        };
        BUDGETS.into_iter().map(within).collect()
    }
}

impl Row {
    fn new(format: Option<Fp4Format>, variant: &'static str, perplexities: Vec<f64>) -> Self {
        let mean = perplexities.iter().sum::<f64>() / perplexities.len() as f64;
        let squares: f64 = perplexities.iter().map(|one| (one - mean).powi(2)).sum();
        let others = perplexities.len() - 1;
        let spread = (others > 0).then(|| (squares / others as f64).sqrt());
        Self { format, variant, perplexities, mean, spread, recovered_percent: None }
    }

    /// Mean of `-ln p` of a token.
    fn nats(&self) -> f64 {
        let nats = self.perplexities.iter().map(|one| one.ln());
        nats.sum::<f64>() / self.perplexities.len() as f64
    }
}

/// Compares each row with the rule's scales of its format, and with the dense model.
fn recovered(rows: &mut [Row]) {
    let dense = rows[0].nats();
    let mut lost = 0.0;
    // The rule's scales are the first row of each format; a budget has weights of several.
    for row in &mut rows[1..] {
        if row.variant == "amax" {
            lost = row.nats() - dense;
        } else if row.format.is_some() {
            row.recovered_percent = Some(100.0 * (1.0 - (row.nats() - dense) / lost));
        }
    }
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED).set_header([
        "format",
        "variant",
        "perplexity",
        "spread",
        "of amax's loss recovered, %",
        "each seed",
    ]);
    let number = |value: Option<f64>, digits| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
    };
    for row in rows {
        let each: Vec<_> = row.perplexities.iter().map(|one| format!("{one:.4}")).collect();
        table.add_row([
            row.format.map_or_else(|| "-".to_owned(), |format| format.to_string()),
            row.variant.to_owned(),
            format!("{:.4}", row.mean),
            number(row.spread, 4),
            number(row.recovered_percent, 1),
            each.join(" "),
        ]);
    }
    for column in 2..5 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.to_string()
}
