//! `llama sensitivity`: predicts the loss of each layer in FP4, and chooses formats in a budget.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::{
    Budget, BudgetChoice, Candidate, CandidateSensitivity, Fp4Config, Fp4Format, Fp4Module, Method,
    Outcome, ParameterReport, Sensitivity, Sse,
};
use examples::table::{figure, table};
use llama::{
    Batches, CalibrationWindows, Folder, Llama, Tokens, Windows, at_least, divergence, fp4_config,
    methods, names, perplexity, quantized_alone, rank_correlation, scheme, sensitivity,
};
use serde::Serialize;

use super::{DeviceOptions, TextOptions, print, quoted};

/// Predict the loss of each layer in each format, and choose formats within budgets.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Hugging Face folder, dense or FP8.
    folder: PathBuf,
    /// Method that chooses scales and codes; calibrated on the text if it needs it.
    #[arg(long, value_parser = methods(), default_value_t = Method::GPTQ)]
    method: Method,
    /// Windows of 128 tokens to differentiate the loss on.
    #[arg(long, default_value_t = 256, value_parser = at_least(1))]
    loss_windows: usize,
    /// Also quantize each layer alone, and compare its measured divergence with the prediction.
    #[arg(long)]
    measure: bool,
    /// Budget in bits per weight: choose formats, quantize, and measure the perplexity. Compares
    /// with a model whose first and last layer stay dense, and with a budget of that size.
    #[arg(long, value_name = "BITS")]
    budget: Vec<f64>,
    /// Save the configuration of the first budget, as JSON.
    #[arg(long, value_name = "FILE", requires = "budget")]
    save_config: Option<PathBuf>,
    /// Save the formats of the first budget, for `fp4 quantize --recipe` and `llama quantize
    /// --recipe`.
    #[arg(long, value_name = "FILE.toml", requires = "budget")]
    recipe: Option<PathBuf>,
    /// Save the statistics of layer inputs, for `fp4 quantize --calibration`.
    #[arg(long, value_name = "FILE")]
    save_calibration: Option<PathBuf>,
    /// Write an HTML page with a bar chart, on which the choice of the first budget is marked.
    #[arg(long, value_name = "FILE")]
    page: Option<PathBuf>,
    #[command(flatten)]
    calibration: CalibrationWindows,
    #[command(flatten)]
    windows: Windows,
    #[command(flatten)]
    text: TextOptions,
    #[command(flatten)]
    device: DeviceOptions,
    /// Print a row for each layer, instead of one for layers of the same pattern of names.
    #[arg(long)]
    all: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    sensitivity: Sensitivity,
    measured: Vec<Measured>,
    budgets: Vec<Row>,
}

/// Measured divergence of layers quantized alone, in one candidate format.
#[derive(Serialize)]
struct Measured {
    candidate: String,
    /// Mean `KL(dense | quantized)` of a held-out token, for each group.
    divergences: Vec<f64>,
    /// Rank correlation of the predicted loss with the divergences.
    by_loss: f64,
    /// Rank correlation of the output error with the divergences.
    by_outputs: f64,
}

/// Result of a budget.
#[derive(Serialize)]
struct Row {
    name: String,
    bits_per_weight: f64,
    /// Predicted growth of the loss, and its lower bound over all choices.
    growth: Option<[f64; 2]>,
    perplexity: f64,
}

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.device.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let (dense, _) = folder.load::<Linear>(&device)?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let mut config = fp4_config(&dense, scheme(Fp4Format::NvFp4, arguments.method));
    if arguments.method == Method::Sse(Sse::TensorScale) {
        // The method chooses a tensor scale for each weight: none are shared.
        config.share_scale.clear();
    }
    // The output error needs statistics of inputs, even if the method does not.
    let calibration = arguments.calibration.run(&dense, Default::default(), &tokens, &device)?;
    if let Some(path) = &arguments.save_calibration {
        calibration.save(path, &names())?;
    }
    config.unused = burn_fp4::Unused::Report;
    let config = config.with_calibration(&calibration);
    let batches = Batches { batch: 1, seed: arguments.calibration.seed, ..Batches::default() };
    let stored = folder.config.value_bytes();
    let sensitivity = sensitivity(
        &dense,
        &config,
        &Candidate::DEFAULT,
        stored,
        (arguments.loss_windows, batches),
        &tokens,
        &device,
    )?;
    let context = Model { arguments, dense: &dense, tokens: &tokens, device: &device, stored };
    let measured =
        if arguments.measure { context.measured(&sensitivity, &config)? } else { Vec::new() };
    let budgets = context.budgets(&sensitivity, &config)?;
    if let Some(path) = &arguments.page {
        let budget = arguments.budget.first().map(|bits| Budget::BitsPerWeight(*bits));
        let choice = budget.map(|budget| sensitivity.choose(budget)).transpose()?;
        std::fs::write(path, sensitivity.html(choice.as_ref()))
            .with_context(|| path.display().to_string())?;
    }
    let report = Report { sensitivity, measured, budgets };
    print(&report, arguments.json, || lines(arguments, &report))
}

struct Model<'a> {
    arguments: &'a Arguments,
    dense: &'a Llama<Linear>,
    tokens: &'a Tokens,
    device: &'a Device,
    /// Bytes of a value that is saved dense.
    stored: usize,
}

impl Model<'_> {
    fn measured(&self, sensitivity: &Sensitivity, config: &Fp4Config) -> Result<Vec<Measured>> {
        let mut all = Vec::new();
        for candidate in Candidate::DEFAULT {
            if candidate == Candidate::Dense {
                continue;
            }
            let (mut divergences, mut losses, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
            for group in &sensitivity.groups {
                // None if the method is not defined for the candidate.
                let matches = |one: &&CandidateSensitivity| one.candidate == candidate;
                let Some(one) = group.candidates.iter().find(matches) else { continue };
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

    fn budgets(&self, sensitivity: &Sensitivity, config: &Fp4Config) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (at, bits) in self.arguments.budget.iter().enumerate() {
            let choice = sensitivity.choose(Budget::BitsPerWeight(*bits))?;
            if let (0, Some(path)) = (at, &self.arguments.save_config) {
                let json = serde_json::to_string_pretty(&choice.config)?;
                std::fs::write(path, json).with_context(|| path.display().to_string())?;
            }
            let recipe = self.arguments.recipe.as_deref().filter(|_| at == 0);
            rows.push(self.chosen(format!("budget of {bits} bits"), &choice, recipe)?);
        }
        if rows.is_empty() {
            return Ok(rows);
        }
        let ends = config.clone().keep_first(1).keep_last(1);
        let mut model = self.dense.clone();
        let report = model.quantize_fp4(&ends)?;
        let find = |path: &String| report.parameters.iter().find(|one| one.path == *path);
        let paths = sensitivity.groups.iter().flat_map(|group| &group.paths);
        let bytes_of = |one: &ParameterReport| match one.outcome {
            Outcome::Kept { .. } => one.shape.iter().product::<usize>() * self.stored,
            _ => one.bytes_after,
        };
        let bytes: usize = paths.filter_map(find).map(bytes_of).sum();
        let values: usize = sensitivity.groups.iter().map(|group| group.values).sum();
        rows.push(Row {
            name: "first and last layer dense".to_owned(),
            bits_per_weight: 8.0 * bytes as f64 / values as f64,
            growth: None,
            perplexity: self.perplexity(&model)?,
        });
        let choice = sensitivity.choose(Budget::Bytes(bytes))?;
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

fn lines(arguments: &Arguments, report: &Report) -> String {
    let sensitivity = &report.sensitivity;
    let mut lines = vec![match arguments.all {
        true => format!("{sensitivity:#}"),
        false => sensitivity.to_string(),
    }];
    if !report.measured.is_empty() {
        lines.push("Rank correlation with the measured divergence, each layer alone:".to_owned());
        let cells = report.measured.iter().map(|one| {
            let [loss, outputs] = [one.by_loss, one.by_outputs].map(|rank| format!("{rank:.3}"));
            [one.candidate.clone(), loss, outputs]
        });
        lines.push(table(["format", "predicted loss", "output error"], 1, cells).to_string());
    }
    if !report.budgets.is_empty() {
        let cells = report.budgets.iter().map(|row| {
            let growth = |at: usize| figure(row.growth.map(|growth| growth[at]), 4);
            let [bits, perplexity] = [row.bits_per_weight, row.perplexity];
            let [bits, perplexity] = [figure(Some(bits), 3), figure(Some(perplexity), 4)];
            [row.name.clone(), bits, perplexity, growth(0), growth(1)]
        });
        let header = ["formats", "bits/weight", "perplexity", "growth", "bound"];
        lines.push(table(header, 1, cells).to_string());
        let legend =
            "growth: predicted; its order counts, not its size. No choice is below the bound";
        lines.push(legend.to_owned());
    }
    if let Some(path) = &arguments.recipe {
        let [folder, path] = [&arguments.folder, path].map(|path| quoted(path));
        lines.push(format!("next: llama quantize {folder} OUT --recipe {path}"));
    }
    lines.join("\n")
}
