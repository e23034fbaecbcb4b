//! `llama compare`: compares the perplexity of quantization methods on a model.

use std::path::PathBuf;

use anyhow::Result;
use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::{
    Budget, Calibration, CalibrationOptions, Candidate, Fp4Config, Fp4Format, Fp4Module, Gptq,
    Method, Unused,
};
use examples::table::{figure, table};
use llama::{
    Batches, CalibrationWindows, Folder, Llama, Tokens, Windows, fp4_config, perplexity,
    sensitivity,
};
use serde::Serialize;

use super::distill::Distillation;
use super::{DeviceOptions, TextOptions, print};

/// Quantize a model with several methods, calibrated on random windows of a text, and measure the
/// perplexity on its held-out part.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Hugging Face folder, dense or FP8.
    folder: PathBuf,
    /// Number of seeds; each draws windows to calibrate and to distill on.
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Windows of 256 tokens to calibrate on.
    #[arg(long, default_value_t = 128)]
    calibration_windows: usize,
    /// Windows of 128 tokens to differentiate the loss on, for the budgets.
    #[arg(long, default_value_t = 256)]
    loss_windows: usize,
    /// Damping of GPTQ: multiple of the mean diagonal of `X^T X` that is added to its diagonal.
    #[arg(long, default_value_t = Gptq::DEFAULT.damping)]
    damping: f64,
    #[command(flatten)]
    distillation: Distillation,
    #[command(flatten)]
    windows: Windows,
    #[command(flatten)]
    text: TextOptions,
    #[command(flatten)]
    device: DeviceOptions,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Perplexity of a quantized model.
#[derive(Serialize)]
struct Row {
    format: Option<Fp4Format>,
    variant: &'static str,
    /// Perplexity on the held-out part, for each seed.
    perplexities: Vec<f64>,
    mean: f64,
    /// Standard deviation over seeds. None if the method does not depend on the seed.
    spread: Option<f64>,
    /// Share of the loss of `amax`, in nats, that the method avoids.
    recovered_percent: Option<f64>,
}

/// Name of a variant, and its perplexity.
type Measured = (&'static str, f64);

/// Budgets in bits per weight; each weight gets the format that costs the least loss within them.
const BUDGETS: [(&str, f64); 2] = [("budget 5.0", 5.0), ("budget 6.0", 6.0)];

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.device.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let (dense, _) = folder.load::<Linear>(&device)?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let comparison = Comparison { arguments, dense: &dense, tokens: &tokens, device: &device };
    let mut rows = vec![Row::new(None, "dense", vec![comparison.perplexity(&dense)?])];
    // A list of variants for each seed.
    let (mut calibrated, mut budgets) = (Fp4Format::ALL.map(|_| Vec::new()), Vec::new());
    for seed in 1..=arguments.seeds {
        let windows = comparison.windows(seed);
        let calibration = windows.run(&dense, CalibrationOptions::default(), &tokens, &device)?;
        for (format, seeds) in Fp4Format::ALL.into_iter().zip(&mut calibrated) {
            seeds.push(comparison.calibrated(format, seed, &calibration)?);
        }
        budgets.push(comparison.budgets(seed, &calibration)?);
    }
    for (format, seeds) in Fp4Format::ALL.into_iter().zip(&calibrated) {
        for (variant, method) in [("amax", Method::Amax), ("sse", Method::Sse)] {
            let mut model = dense.clone();
            model.quantize_fp4(&fp4_config(&dense, format, method))?;
            rows.push(Row::new(Some(format), variant, vec![comparison.perplexity(&model)?]));
        }
        rows.extend(rows_of_seeds(Some(format), seeds));
    }
    rows.extend(rows_of_seeds(None, &budgets));
    set_recovered(&mut rows);
    print(&rows, arguments.json, || lines(&rows))
}

/// Makes a row for each variant, from the variants of each seed.
fn rows_of_seeds(format: Option<Fp4Format>, seeds: &[Vec<Measured>]) -> Vec<Row> {
    let variants = seeds.first().map_or(0, Vec::len);
    let row = |at: usize| {
        let perplexities = seeds.iter().map(|variants| variants[at].1);
        Row::new(format, seeds[0][at].0, perplexities.collect())
    };
    (0..variants).map(row).collect()
}

/// The dense model, and the text to compare on.
struct Comparison<'a> {
    arguments: &'a Arguments,
    dense: &'a Llama<Linear>,
    tokens: &'a Tokens,
    device: &'a Device,
}

impl Comparison<'_> {
    fn perplexity(&self, model: &Llama<Linear>) -> Result<f64> {
        let (tokens, windows) = (self.tokens.held_out(), self.arguments.windows);
        Ok(perplexity(model, tokens, windows, self.device)?.perplexity)
    }

    /// Returns the calibration windows of a seed.
    fn windows(&self, seed: u64) -> CalibrationWindows {
        CalibrationWindows { windows: self.arguments.calibration_windows, context: 256, seed }
    }

    /// Returns the configuration of GPTQ, with the damping of the options.
    fn gptq(&self, format: Fp4Format) -> Fp4Config {
        let config = fp4_config(self.dense, format, Method::Gptq);
        config.gptq(Gptq { damping: self.arguments.damping, ..Gptq::DEFAULT })
    }

    /// Measures the model quantized with a configuration.
    fn quantized(&self, config: &Fp4Config) -> Result<f64> {
        let mut model = self.dense.clone();
        model.quantize_fp4(config)?;
        self.perplexity(&model)
    }

    /// Measures the variants that depend on the calibration of a seed.
    fn calibrated(
        &self,
        format: Fp4Format,
        seed: u64,
        calibration: &Calibration,
    ) -> Result<Vec<Measured>> {
        let Self { arguments, dense, tokens, device } = *self;
        let hessian = fp4_config(dense, format, Method::Hessian).with_calibration(calibration);
        let gptq = self.gptq(format);
        let mut sequential = dense.clone();
        self.windows(seed).quantize_sequential(&mut sequential, &gptq, tokens, device)?;
        let mut variants = vec![
            ("hessian", self.quantized(&hessian)?),
            ("gptq", self.quantized(&gptq.with_calibration(calibration))?),
            ("gptq, sequential", self.perplexity(&sequential)?),
        ];
        if arguments.distillation.steps > 0 {
            let batches = Batches { seed, ..Batches::default() };
            let (distilled, _, _) =
                arguments.distillation.run(dense, format, tokens, batches, device)?;
            variants.push(("distilled", self.perplexity(&distilled)?));
        }
        Ok(variants)
    }

    /// Measures GPTQ with a format for each weight, within each budget.
    fn budgets(&self, seed: u64, calibration: &Calibration) -> Result<Vec<Measured>> {
        let config =
            self.gptq(Fp4Format::NvFp4).unused(Unused::Report).with_calibration(calibration);
        let batches = Batches { batch: 1, seed, ..Batches::default() };
        let sensitivity = sensitivity(
            self.dense,
            &config,
            &Candidate::DEFAULT,
            (self.arguments.loss_windows, batches),
            self.tokens,
            self.device,
        )?;
        let within = |(name, bits): (&'static str, f64)| -> Result<Measured> {
            let choice = sensitivity.choose(Budget::BitsPerWeight(bits))?;
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

    /// Computes the mean loss of a token, in nats.
    fn nats(&self) -> f64 {
        let nats = self.perplexities.iter().map(|one| one.ln());
        nats.sum::<f64>() / self.perplexities.len() as f64
    }
}

/// Computes the recovered share of each row from the loss of `amax` in its format.
fn set_recovered(rows: &mut [Row]) {
    let dense = rows[0].nats();
    let mut lost = 0.0;
    // `amax` is the first row of each format. Budgets mix formats: they have no share.
    for row in &mut rows[1..] {
        if row.variant == "amax" {
            lost = row.nats() - dense;
        } else if row.format.is_some() {
            row.recovered_percent = Some(100.0 * (1.0 - (row.nats() - dense) / lost));
        }
    }
}

fn lines(rows: &[Row]) -> String {
    let cells = rows.iter().map(|row| {
        [
            row.format.map_or_else(|| "-".to_owned(), |format| format.to_string()),
            row.variant.to_owned(),
            format!("{:.4}", row.mean),
            figure(row.spread, 4),
            figure(row.recovered_percent, 1),
        ]
    });
    let header = ["format", "variant", "perplexity", "spread", "recovered, %"];
    format!(
        "{}\nspread: standard deviation over seeds\n\
         recovered: share of the loss of amax that the variant avoids",
        table(header, 2, cells)
    )
}
