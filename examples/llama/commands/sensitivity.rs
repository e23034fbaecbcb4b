//! `llama sensitivity`: which layers can take FP4, and the best formats under a budget.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::{
    Budget, BudgetChoice, Candidate, CandidateSensitivity, Fp4Config, Fp4Format, Fp4Module, Method,
    Sensitivity,
};
use llama::{
    Batches, CalibrationWindows, Folder, Llama, Tokens, Windows, divergence, fp4_config, methods,
    names, perplexity, quantized_alone, rank_correlation, sensitivity,
};
use serde::Serialize;

use super::{Text, Where, print};

/// Tell what each format costs each layer, and choose formats under budgets.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A folder of Hugging Face, dense or FP8.
    folder: PathBuf,
    /// How scales and codes are chosen; one that needs a calibration is calibrated on the text.
    #[arg(long, value_parser = methods(), default_value_t = Method::Gptq)]
    method: Method,
    /// Windows of 128 tokens whose loss is differentiated, one at a time.
    #[arg(long, default_value_t = 256)]
    loss_windows: usize,
    /// Quantize each layer alone, too, and measure how far its outputs go.
    #[arg(long)]
    measure: bool,
    /// Bits per weight: choose formats for them, quantize, and measure the perplexity; with it,
    /// that of a model whose first and last layer stay dense, and of a budget of its size.
    #[arg(long, value_name = "BITS")]
    budget: Vec<f64>,
    /// Where to save the configuration of the first budget, as JSON.
    #[arg(long, value_name = "FILE", requires = "budget")]
    save_config: Option<PathBuf>,
    /// Where to save what the first budget chose for each layer, for `fp4 quantize --recipe` and
    /// `llama quantize --recipe`.
    #[arg(long, value_name = "FILE.toml", requires = "budget")]
    recipe: Option<PathBuf>,
    /// Where to save the statistics of the inputs of layers, for `fp4 quantize --calibration`.
    #[arg(long, value_name = "FILE")]
    save_calibration: Option<PathBuf>,
    /// Where to write a page with bars, on which the choice of the first budget is marked.
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,
    #[command(flatten)]
    calibration: CalibrationWindows,
    #[command(flatten)]
    windows: Windows,
    #[command(flatten)]
    text: Text,
    #[command(flatten)]
    place: Where,
    /// Print an object instead of tables.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    sensitivity: Sensitivity,
    measured: Vec<Measured>,
    budgets: Vec<Row>,
}

/// What layers cost that were quantized alone.
#[derive(Serialize)]
struct Measured {
    candidate: String,
    /// By group the mean `KL(dense | quantized)` of a token that is held out.
    divergences: Vec<f64>,
    /// Rank correlation of the predicted loss with them.
    by_loss: f64,
    /// Rank correlation of the error of the outputs with them.
    by_outputs: f64,
}

/// A model quantized within a budget.
#[derive(Serialize)]
struct Row {
    name: String,
    bits_per_weight: f64,
    /// Predicted, and the bound that no choice is below.
    growth: Option<[f64; 2]>,
    perplexity: f64,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.place.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let (dense, _) = folder.load::<Linear>(&device)?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let mut config = fp4_config(&dense, Fp4Format::NvFp4, arguments.method);
    if arguments.method == Method::SseTensorScale {
        // It chooses one for every weight.
        config.share_scale.clear();
    }
    // Without statistics of inputs there is no error of outputs, whatever the method needs.
    let known = arguments.calibration.run(&dense, Default::default(), &tokens, &device)?;
    if let Some(path) = &arguments.save_calibration {
        known.save(path, &names())?;
    }
    config.unused = burn_fp4::Unused::Report;
    let config = config.with_calibration(&known);
    let batches = Batches { batch: 1, seed: arguments.calibration.seed, ..Batches::default() };
    let found = sensitivity(
        &dense,
        &config,
        &Candidate::DEFAULT,
        (arguments.loss_windows, batches),
        &tokens,
        &device,
    )?;
    let context = Model { arguments, dense: &dense, tokens: &tokens, device: &device };
    let measured = if arguments.measure { context.measured(&found, &config)? } else { Vec::new() };
    let budgets = context.budgets(&found, &config)?;
    if let Some(path) = &arguments.page {
        let budget = arguments.budget.first().map(|bits| Budget::BitsPerWeight(*bits));
        let choice = budget.map(|budget| found.choose(budget)).transpose()?;
        std::fs::write(path, found.html(choice.as_ref()))
            .with_context(|| path.display().to_string())?;
    }
    let report = Report { sensitivity: found, measured, budgets };
    print(&report, arguments.json, || lines(&report))
}

struct Model<'a> {
    arguments: &'a Arguments,
    dense: &'a Llama<Linear>,
    tokens: &'a Tokens,
    device: &'a Device,
}

impl Model<'_> {
    fn measured(&self, found: &Sensitivity, config: &Fp4Config) -> Result<Vec<Measured>> {
        let mut all = Vec::new();
        for candidate in Candidate::DEFAULT {
            if candidate == Candidate::Dense {
                continue;
            }
            let (mut divergences, mut losses, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
            for group in &found.groups {
                // The method may not be defined for it.
                let of = |one: &&CandidateSensitivity| one.candidate == candidate;
                let Some(one) = group.candidates.iter().find(of) else { continue };
                let model = quantized_alone(self.dense, config, group, one)?;
                let window = self.arguments.windows.window;
                let held_out = self.tokens.held_out();
                divergences.push(divergence(&model, self.dense, held_out, window, self.device));
                losses.push(one.loss.unwrap_or_default());
                outputs.push(one.output_error.unwrap_or_default());
            }
            if divergences.is_empty() {
                continue;
            }
            all.push(Measured {
                candidate: candidate.to_string(),
                by_loss: rank_correlation(&losses, &divergences),
                by_outputs: rank_correlation(&outputs, &divergences),
                divergences,
            });
        }
        Ok(all)
    }

    fn budgets(&self, found: &Sensitivity, config: &Fp4Config) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (at, bits) in self.arguments.budget.iter().enumerate() {
            let choice = found.choose(Budget::BitsPerWeight(*bits))?;
            if let (0, Some(path)) = (at, &self.arguments.save_config) {
                let json = serde_json::to_string_pretty(&choice.config)?;
                std::fs::write(path, json).with_context(|| path.display().to_string())?;
            }
            let recipe = self.arguments.recipe.as_deref().filter(|_| at == 0);
            rows.push(self.chosen(format!("budget of {bits}"), &choice, recipe)?);
        }
        if rows.is_empty() {
            return Ok(rows);
        }
        let ends = config.clone().keep_first(1).keep_last(1);
        let mut model = self.dense.clone();
        let report = model.quantize_fp4(&ends)?;
        let of = |path: &String| report.parameters.iter().find(|one| one.path == *path);
        let paths = found.groups.iter().flat_map(|group| &group.paths);
        let bytes: usize = paths.filter_map(of).map(|one| one.bytes_after).sum();
        let values: usize = found.groups.iter().map(|group| group.values).sum();
        rows.push(Row {
            name: "first and last layer dense".to_owned(),
            bits_per_weight: 8.0 * bytes as f64 / values as f64,
            growth: None,
            perplexity: self.perplexity(&model)?,
        });
        let choice = found.choose(Budget::Bytes(bytes))?;
        rows.push(self.chosen("budget of that size".to_owned(), &choice, None)?);
        Ok(rows)
    }

    fn chosen(&self, name: String, choice: &BudgetChoice, recipe: Option<&Path>) -> Result<Row> {
        let mut model = self.dense.clone();
        let report = model.quantize_fp4(&choice.config)?;
        if let Some(path) = recipe {
            report.save_recipe(path, &names())?;
        }
        Ok(Row {
            name,
            bits_per_weight: choice.bits_per_weight,
            growth: Some([choice.error, choice.bound]),
            perplexity: self.perplexity(&model)?,
        })
    }

    fn perplexity(&self, model: &Llama<Linear>) -> Result<f64> {
        let (tokens, windows) = (self.tokens.held_out(), self.arguments.windows);
        Ok(perplexity(model, tokens, windows, self.device)?.perplexity)
    }
}

fn lines(report: &Report) -> String {
    let mut lines = vec![report.sensitivity.to_string()];
    for one in &report.measured {
        lines.push(format!(
            "{}, each layer alone: rank correlation with the measured divergence {:.3} by the \
             loss, {:.3} by the outputs",
            one.candidate, one.by_loss, one.by_outputs
        ));
    }
    for row in &report.budgets {
        let growth = row.growth.map_or(String::new(), |[growth, bound]| {
            format!(", predicted growth of the loss {growth:.4} (no choice below {bound:.4})")
        });
        lines.push(format!(
            "{}: {:.3} bits per weight, perplexity {:.4}{growth}",
            row.name, row.bits_per_weight, row.perplexity
        ));
    }
    lines.join("\n")
}
