//! `llama compare`: what each way to quantize a model costs.

use std::path::PathBuf;

use anyhow::Result;
use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::{CalibrationOptions, Fp4Config, Fp4Format, Fp4Module, Gptq, Method};
use comfy_table::{CellAlignment, Table, presets};
use llama::{Batches, CalibrationWindows, Folder, Llama, Tokens, Windows, fp4_config, perplexity};
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

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.place.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let (dense, _) = folder.load::<Linear>(&device)?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let measure = Measure { arguments, dense: &dense, tokens: &tokens, device: &device };
    let mut rows = vec![Row::new(None, "dense", vec![measure.perplexity(&dense)?])];
    for format in Fp4Format::ALL {
        for (variant, method) in [("amax", Method::Amax), ("sse", Method::Sse)] {
            let mut model = dense.clone();
            model.quantize_fp4(&fp4_config(&dense, format, method))?;
            rows.push(Row::new(Some(format), variant, vec![measure.perplexity(&model)?]));
        }
        let seeds = (1..=arguments.seeds).map(|seed| measure.calibrated(format, seed));
        let seeds: Vec<Vec<Found>> = seeds.collect::<Result<_>>()?;
        let variants = seeds.first().map_or(0, Vec::len);
        rows.extend((0..variants).map(|at| {
            let each = seeds.iter().map(|found| found[at].1);
            Row::new(Some(format), seeds[0][at].0, each.collect())
        }));
    }
    recovered(&mut rows);
    print(&rows, arguments.json, || table(&rows))
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

    /// The ways that a seed decides something about.
    fn calibrated(&self, format: Fp4Format, seed: u64) -> Result<Vec<Found>> {
        let Self { arguments, dense, tokens, device } = *self;
        let windows = arguments.calibration_windows;
        let calibration = CalibrationWindows { windows, context: 256, seed };
        let options = CalibrationOptions::default();
        let known = calibration.run(dense, options, tokens, device)?;
        let quantized = |config: &Fp4Config| {
            let mut model = dense.clone();
            model.quantize_fp4(&config.with_calibration(&known))?;
            self.perplexity(&model)
        };
        let hessian = fp4_config(dense, format, Method::Hessian);
        let gptq = fp4_config(dense, format, Method::Gptq);
        let gptq = gptq.gptq(Gptq { damping: arguments.damping, ..Gptq::DEFAULT });
        let mut sequential = dense.clone();
        calibration.quantize_sequential(&mut sequential, &gptq, tokens, device)?;
        let mut found = vec![
            ("hessian", quantized(&hessian)?),
            ("gptq", quantized(&gptq)?),
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
    // The rule's scales are the first row of each format.
    for row in &mut rows[1..] {
        if row.variant == "amax" {
            lost = row.nats() - dense;
        } else {
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
