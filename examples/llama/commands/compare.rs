//! `llama compare`: compares the perplexity of quantization methods on a model.

use std::path::PathBuf;

use anyhow::{Result, bail};
use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::{
    Budget, Calibration, CalibrationOptions, Candidate, Fp4Config, Fp4Format, Fp4Module, Fp4Scheme,
    Gptq, Hadamard, Method, ScaleRule, Sse, Unused,
};
use examples::table::{figure, table};
use llama::{
    Batches, CalibrationWindows, Fidelity, Folder, Llama, Tokens, Windows, at_least, fidelity,
    fp4_config, scheme, sensitivity,
};
use serde::Serialize;

use super::distill::Distillation;
use super::{DeviceOptions, TextOptions, print};

/// Quantize a model with every method and rule that needs no data, and with several calibrated on
/// random windows of a text, and measure perplexity and distance from the dense model on its
/// held-out part.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Hugging Face folder, dense or FP8.
    folder: PathBuf,
    /// Number of seeds; each draws windows to calibrate and to distill on. With 0 only methods
    /// without data are compared.
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// The first of these seeds, to divide them among runs.
    #[arg(long, default_value_t = 1)]
    first_seed: u64,
    /// Windows of 256 tokens to calibrate on.
    #[arg(long, default_value_t = 128, value_parser = at_least(1))]
    calibration_windows: usize,
    /// Windows of 128 tokens to differentiate the loss on, for the budgets. With 0 no budgets are
    /// compared.
    #[arg(long, default_value_t = 256)]
    loss_windows: usize,
    /// Damping of GPTQ: multiple of the mean diagonal of `X^T X` that is added to its diagonal.
    #[arg(long, default_value_t = Gptq::DEFAULT.damping)]
    damping: f64,
    /// Share of the errors of earlier layers that corrected GPTQ makes up for, from 0 to 1.
    #[arg(long, default_value_t = Gptq::DEFAULT.correction)]
    correction: f64,
    /// Sizes of Hadamard transforms to compare, as 16,64; defaults to all that divide the inputs of
    /// the layers.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    hadamard: Option<Vec<usize>>,
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

/// Fidelity of a quantized model to the dense one.
#[derive(Serialize)]
struct Row {
    format: Option<Fp4Format>,
    variant: String,
    /// Perplexity on the held-out part, for each seed.
    perplexities: Vec<f64>,
    mean: f64,
    /// Standard deviation over seeds. None if the method does not depend on the seed.
    spread: Option<f64>,
    /// Share of the loss of `amax`, in nats, that the method avoids.
    recovered_percent: Option<f64>,
    /// Distance from the dense model, for each seed. Empty for the dense model.
    seeds: Vec<Fidelity>,
}

/// Name of a variant, and its model or what was measured of it.
type Named<T> = (String, T);

/// Budgets in bits per weight; each weight gets the format that costs the least loss within them.
const BUDGETS: [(&str, f64); 2] = [("budget 5.0", 5.0), ("budget 6.0", 6.0)];

/// Runs the command.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let device = arguments.device.device()?;
    let folder = Folder::open(&arguments.folder)?;
    let (dense, _) = folder.load::<Linear>(&device)?;
    let tokens = arguments.text.tokens(&folder.tokenizer()?)?;
    let config = &folder.config;
    let attention = config.num_attention_heads * config.head_dim();
    let inputs = [config.hidden_size, config.intermediate_size, attention];
    let divides = |size: &usize| inputs.iter().all(|inputs| inputs.is_multiple_of(*size));
    let dividing = || Hadamard::SIZES.into_iter().filter(divides).collect();
    let sizes: Vec<usize> = arguments.hadamard.clone().unwrap_or_else(dividing);
    let transforms = sizes.into_iter().map(Hadamard::of_size);
    let transforms: Vec<Hadamard> = transforms.collect::<Result<_, _>>()?;
    if let Some(size) = transforms.iter().map(|one| one.size()).find(|size| !divides(size)) {
        bail!("--hadamard {size}: does not divide the inputs of all layers; choose another size");
    }
    let (dense, tokens, transforms) = (&dense, &tokens, &transforms[..]);
    let value_bytes = config.value_bytes();
    let comparison =
        Comparison { arguments, transforms, dense, value_bytes, tokens, device: &device };
    // A list of variants for each seed.
    let (mut calibrated, mut budgets) = (Fp4Format::ALL.map(|_| Vec::new()), Vec::new());
    for seed in (arguments.first_seed..).take(arguments.seeds as usize) {
        let windows = comparison.windows(seed);
        let calibration = windows.run(dense, CalibrationOptions::default(), tokens, &device)?;
        for (format, seeds) in Fp4Format::ALL.into_iter().zip(&mut calibrated) {
            seeds.push(comparison.calibrated(format, seed, &calibration)?);
        }
        if arguments.loss_windows > 0 {
            budgets.push(comparison.budgets(seed, &calibration)?);
        }
    }
    let mut rows = Vec::new();
    for (format, seeds) in Fp4Format::ALL.into_iter().zip(&calibrated) {
        rows.extend(rows_of_seeds(Some(format), &[comparison.without_data(format)?]));
        rows.extend(rows_of_seeds(Some(format), seeds));
    }
    rows.extend(rows_of_seeds(None, &budgets));
    let dense = rows[0].seeds[0].reference.perplexity;
    rows.insert(0, Row::new(None, "dense".to_owned(), vec![dense], Vec::new()));
    set_recovered(&mut rows);
    print(&rows, arguments.json, || lines(&rows))
}

/// Makes a row for each variant, from the variants of each seed.
fn rows_of_seeds(format: Option<Fp4Format>, seeds: &[Vec<Named<Fidelity>>]) -> Vec<Row> {
    let variants = seeds.first().map_or(0, Vec::len);
    let row = |at: usize| {
        let found: Vec<Fidelity> = seeds.iter().map(|variants| variants[at].1.clone()).collect();
        let perplexities = found.iter().map(|one| one.perplexity.perplexity).collect();
        Row::new(format, seeds[0][at].0.clone(), perplexities, found)
    };
    (0..variants).map(row).collect()
}

/// Names a method after a Hadamard transform.
fn named(method: &str, hadamard: Hadamard) -> String {
    format!("{method}, Hadamard {}", hadamard.size())
}

/// The dense model, and the text to compare on.
struct Comparison<'a> {
    arguments: &'a Arguments,
    /// Hadamard transforms to compare.
    transforms: &'a [Hadamard],
    dense: &'a Llama<Linear>,
    /// Bytes of a value that is saved dense.
    value_bytes: usize,
    tokens: &'a Tokens,
    device: &'a Device,
}

impl Comparison<'_> {
    /// Measures models against the dense one, on the same windows.
    fn measured(&self, models: Vec<Named<Llama<Linear>>>) -> Result<Vec<Named<Fidelity>>> {
        let (tokens, windows) = (self.tokens.held_out(), self.arguments.windows);
        let all: Vec<&Llama<Linear>> = models.iter().map(|(_, model)| model).collect();
        let found = fidelity(&all, self.dense, tokens, windows, self.device)?;
        Ok(models.iter().map(|(name, _)| name.clone()).zip(found).collect())
    }

    /// Returns the calibration windows of a seed.
    fn windows(&self, seed: u64) -> CalibrationWindows {
        CalibrationWindows { windows: self.arguments.calibration_windows, context: 256, seed }
    }

    /// Returns the configuration of GPTQ, with the damping of the options and a correction.
    fn gptq(&self, format: Fp4Format, correction: f64) -> Fp4Config {
        let options = Gptq { damping: self.arguments.damping, correction, ..Gptq::DEFAULT };
        fp4_config(self.dense, scheme(format, Method::Gptq(options)))
    }

    /// Quantizes the model with a configuration.
    fn quantized(&self, config: &Fp4Config) -> Result<Llama<Linear>> {
        let mut model = self.dense.clone();
        model.quantize_fp4(config)?;
        Ok(model)
    }

    /// Measures the methods and rules that need no data. `amax` with the default rule is first.
    fn without_data(&self, format: Fp4Format) -> Result<Vec<Named<Fidelity>>> {
        let mut models = Vec::new();
        let methods = Method::NAMED.into_iter().filter(|row| !row.calibrated);
        for row in methods.filter(|row| row.formats.contains(&format)) {
            let mut config = fp4_config(self.dense, scheme(format, row.method));
            if row.method == Method::Sse(Sse::TensorScale) {
                // It chooses a tensor scale for every weight, so layers cannot share one.
                config.share_scale.clear();
            }
            models.push((row.name.to_owned(), self.quantized(&config)?));
        }
        let own = ScaleRule::of_format(format);
        let of_format = |rule: &ScaleRule| rule.row().format == format && *rule != own;
        for rule in ScaleRule::ALL.into_iter().filter(of_format) {
            let config = fp4_config(self.dense, Fp4Scheme::of(rule));
            models.push((format!("amax, {rule}"), self.quantized(&config)?));
        }
        let recommended = Fp4Scheme::recommended(format);
        for &hadamard in self.transforms {
            let config = fp4_config(self.dense, recommended).hadamard(hadamard);
            models.push((named("recommended", hadamard), self.quantized(&config)?));
        }
        self.measured(models)
    }

    /// Measures the variants that depend on the calibration of a seed.
    fn calibrated(
        &self,
        format: Fp4Format,
        seed: u64,
        calibration: &Calibration,
    ) -> Result<Vec<Named<Fidelity>>> {
        let Self { arguments, transforms, dense, tokens, device, .. } = *self;
        let hessian = fp4_config(dense, scheme(format, Method::Hessian));
        let hessian = hessian.with_calibration(calibration);
        let [gptq, corrected] =
            [0.0, arguments.correction].map(|correction| self.gptq(format, correction));
        let in_sequence = |config: &Fp4Config| -> Result<Llama<Linear>> {
            let mut model = dense.clone();
            self.windows(seed).quantize_sequential(&mut model, config, tokens, device)?;
            Ok(model)
        };
        let mut variants = vec![
            ("hessian".to_owned(), self.quantized(&hessian)?),
            ("gptq".to_owned(), self.quantized(&gptq.with_calibration(calibration))?),
            ("gptq, sequential, not corrected".to_owned(), in_sequence(&gptq)?),
            ("gptq, corrected".to_owned(), in_sequence(&corrected)?),
        ];
        for &hadamard in transforms {
            let [name, corrected_name] =
                ["gptq", "gptq, corrected"].map(|name| named(name, hadamard));
            let calibrated = gptq.clone().hadamard(hadamard).with_calibration(calibration);
            variants.push((name, self.quantized(&calibrated)?));
            variants.push((corrected_name, in_sequence(&corrected.clone().hadamard(hadamard))?));
        }
        if arguments.distillation.steps > 0 {
            let batches = Batches { seed, ..Batches::default() };
            let scheme = scheme(format, arguments.distillation.distill_method);
            let (distilled, _, _) =
                arguments.distillation.run(dense, scheme, tokens, batches, device)?;
            variants.push(("distilled".to_owned(), distilled));
        }
        self.measured(variants)
    }

    /// Measures GPTQ with a format for each weight, within each budget.
    fn budgets(&self, seed: u64, calibration: &Calibration) -> Result<Vec<Named<Fidelity>>> {
        let config =
            self.gptq(Fp4Format::NvFp4, 0.0).unused(Unused::Report).with_calibration(calibration);
        let batches = Batches { batch: 1, seed, ..Batches::default() };
        let sensitivity = sensitivity(
            self.dense,
            &config,
            &Candidate::DEFAULT,
            self.value_bytes,
            (self.arguments.loss_windows, batches),
            self.tokens,
            self.device,
        )?;
        let within = |(name, bits): (&'static str, f64)| -> Result<Named<Llama<Linear>>> {
            let choice = sensitivity.choose(Budget::BitsPerWeight(bits))?;
            Ok((name.to_owned(), self.quantized(&choice.config)?))
        };
        self.measured(BUDGETS.into_iter().map(within).collect::<Result<_>>()?)
    }
}

impl Row {
    fn new(
        format: Option<Fp4Format>,
        variant: String,
        perplexities: Vec<f64>,
        seeds: Vec<Fidelity>,
    ) -> Self {
        let mean = perplexities.iter().sum::<f64>() / perplexities.len() as f64;
        let squares: f64 = perplexities.iter().map(|one| (one - mean).powi(2)).sum();
        let others = perplexities.len() - 1;
        let spread = (others > 0).then(|| (squares / others as f64).sqrt());
        Self { format, variant, perplexities, mean, spread, recovered_percent: None, seeds }
    }

    /// Returns the mean over seeds of a figure. None for the dense model.
    fn over_seeds(&self, figure: impl Fn(&Fidelity) -> Option<f64>) -> Option<f64> {
        let figures: Vec<f64> = self.seeds.iter().filter_map(figure).collect();
        (!figures.is_empty()).then(|| figures.iter().sum::<f64>() / figures.len() as f64)
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
    let format = |row: &Row| row.format.map_or_else(|| "-".to_owned(), |one| one.to_string());
    let perplexities = rows.iter().map(|row| {
        [
            format(row),
            row.variant.clone(),
            format!("{:.4}", row.mean),
            figure(row.spread, 4),
            figure(row.recovered_percent, 1),
        ]
    });
    let distances = rows[1..].iter().map(|row| {
        let of = |digits, of: fn(&Fidelity) -> Option<f64>| figure(row.over_seeds(of), digits);
        [
            format(row),
            row.variant.clone(),
            of(4, |one| Some(one.difference.nats)),
            of(4, |one| one.difference.standard_error),
            of(4, |one| Some(one.divergence.mean)),
            of(3, |one| Some(one.divergence.percentile_99)),
            of(2, |one| Some(one.top1_agreement_percent)),
        ]
    });
    let header = ["format", "variant", "perplexity", "spread", "recovered, %"];
    let of_distances = ["format", "variant", "loss", "error", "KL", "KL 99 %", "top-1, %"];
    format!(
        "{}\nspread: standard deviation over seeds\n\
         recovered: share of the loss of amax that the variant avoids\n\
         {}\nloss: nats per token more than dense; error: its standard error, by window\n\
         KL: divergence from dense, mean and 99th percentile, in nats\n\
         top-1: tokens for which both find the same next token most likely",
        table(header, 2, perplexities),
        table(of_distances, 2, distances)
    )
}
