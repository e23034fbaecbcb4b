//! Quantization of a model with a format and a method, calibrated on a text.

use anyhow::{Result, bail};
use burn::tensor::{Device, Int, Tensor};
use burn_fp4::ops::{Hadamard, is_host};
use burn_fp4::{
    Calibration, CalibrationOptions, Fp4Config, Fp4Format, Fp4Module, Fp4Report, Fp4Scheme, Gptq,
    Indivisible, Method,
};
use clap::builder::{PossibleValue, PossibleValuesParser, RangedU64ValueParser, TypedValueParser};

use super::model::{Llama, Projection};
use super::tokens::Tokens;
use examples::progress;
use examples::random::Random;

/// Options of quantization.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct QuantizeOptions {
    /// Format: nvfp4 or mxfp4.
    #[arg(long, default_value_t = Fp4Format::NvFp4)]
    pub format: Fp4Format,
    /// Method that chooses scales and codes. Defaults to sse, for mxfp4 to amax by the rule even.
    #[arg(long, value_parser = methods())]
    pub method: Option<Method>,
    /// Calibrate each layer on the outputs of the quantized layers before it, and correct it for
    /// half of their errors (--correction) by gptq: about twice the time.
    #[arg(long)]
    pub sequential: bool,
    /// Damping of GPTQ: multiple of the mean diagonal of `X^T X` that is added to its diagonal.
    #[arg(long)]
    pub damping: Option<f64>,
    /// Share of the errors of earlier layers that GPTQ makes up for with --sequential, from 0 to 1;
    /// defaults to 0.5, and to 0 for gptq-original.
    #[arg(long, value_name = "SHARE", requires = "sequential")]
    pub correction: Option<f64>,
    /// Apply a Hadamard transform to groups of 16, 32, 64 or 128 inputs before weights are
    /// quantized, for --method gptq. The dialect is fp-quant; with --sequential a run cannot be
    /// resumed.
    #[arg(long, value_name = "N")]
    pub hadamard: Option<usize>,
    /// Windows to calibrate on.
    #[command(flatten)]
    pub calibration: CalibrationWindows,
}

/// Random windows of a text to calibrate on.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct CalibrationWindows {
    /// Windows to calibrate on.
    #[arg(long = "calibration-windows", default_value_t = 128, value_parser = at_least(1))]
    pub windows: usize,
    /// Tokens of a calibration window.
    #[arg(long, default_value_t = 256, value_parser = at_least(1))]
    pub context: usize,
    /// Seed of the calibration windows.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Parses a number from `least` on.
pub fn at_least(least: u64) -> impl TypedValueParser<Value = usize> {
    RangedU64ValueParser::<usize>::new().range(least..)
}

/// Parses a finite number above 0.
///
/// # Errors
/// Any other text.
pub fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if value > 0.0 && f64::is_finite(value) => Ok(value),
        _ => Err(String::from("pass a finite number above 0")),
    }
}

/// Parses the name of a method; the help lists all of them.
pub fn methods() -> impl TypedValueParser<Value = Method> {
    methods_where(|_| true)
}

/// Parses the name of a method that meets a condition; the help lists these.
pub fn methods_where(meets: fn(Method) -> bool) -> impl TypedValueParser<Value = Method> {
    let rows = Method::NAMED.into_iter().filter(move |row| row.name.parse().is_ok_and(meets));
    let names = rows.map(|row| PossibleValue::new(row.name).help(row.summary));
    PossibleValuesParser::new(names).try_map(|name| name.parse::<Method>())
}

/// Returns the scheme of a format with a method.
pub fn scheme(format: Fp4Format, method: Method) -> Fp4Scheme {
    method.scheme(format, format.row().block_size)
}

/// Returns the configuration that quantizes all linear layers but the `lm_head`. Layers that
/// inference engines fuse (q, k and v; gate and up) share a tensor scale.
pub fn fp4_config<L: Projection>(model: &Llama<L>, scheme: Fp4Scheme) -> Fp4Config {
    let config = Fp4Config::new(scheme)
        .without_container("Fp4Embedding")
        .indivisible(Indivisible::Skip)
        .share_scale(["q_proj", "k_proj", "v_proj"])
        .share_scale(["gate_proj", "up_proj"]);
    if model.has_lm_head() { config.exclude("lm_head.*") } else { config }
}

impl QuantizeOptions {
    /// Returns the configuration for a model.
    ///
    /// # Errors
    /// A damping or a correction for a method other than GPTQ, and an unknown size of a Hadamard
    /// transform.
    pub fn config<L: Projection>(&self, model: &Llama<L>) -> Result<Fp4Config> {
        let scheme = match (self.method, self.damping.or(self.correction)) {
            (Some(Method::Gptq(options)), _) => {
                let damping = self.damping.unwrap_or(options.damping);
                let correction = self.correction.unwrap_or(options.correction);
                scheme(self.format, Method::Gptq(Gptq { damping, correction, ..options }))
            }
            (_, Some(_)) => bail!(
                "--damping and --correction are for --method gptq and gptq-original; remove them"
            ),
            (None, None) => Fp4Scheme::recommended(self.format),
            (Some(method), None) => scheme(self.format, method),
        };
        let hadamard = self.hadamard.map(Hadamard::of_size).transpose()?;
        Ok(fp4_config(model, scheme.with_hadamard(hadamard)))
    }
}

/// Bytes of the activations of all batches in flight on a host, whose memory the model and its
/// statistics take, too.
const HOST_MEMORY: usize = 512 << 20;

/// Returns the options of a calibration on a device.
pub(super) fn options<'a>(device: &Device) -> CalibrationOptions<'a> {
    let options = CalibrationOptions::default();
    if is_host(device) { options.memory(HOST_MEMORY) } else { options }
}

impl CalibrationWindows {
    /// Records statistics of the inputs of each layer over the windows.
    ///
    /// # Errors
    /// The text is shorter than a window, or calibration fails.
    pub fn run<L: Projection>(
        self,
        model: &Llama<L>,
        options: CalibrationOptions<'_>,
        tokens: &Tokens,
        device: &Device,
    ) -> Result<Calibration> {
        let batches = self.batches(tokens, device)?;
        Ok(Calibration::of(model).options(options).run(batches, Llama::forward)?)
    }

    /// Quantizes a model layer by layer. Each layer is calibrated on the outputs of the quantized
    /// layers before it.
    ///
    /// # Errors
    /// The text is shorter than a window, or `quantize_fp4_sequential` fails.
    pub fn quantize_sequential<L: Projection>(
        self,
        model: &mut Llama<L>,
        config: &Fp4Config,
        tokens: &Tokens,
        device: &Device,
    ) -> Result<Fp4Report> {
        let (bar, batches) = (progress::bar(0), self.batches(tokens, device)?);
        bar.set_message("quantizes layer by layer");
        let options = options(device).on_progress(|progress| {
            bar.set_length(progress.total as u64);
            bar.set_position(progress.done as u64);
        });
        let report = model.quantize_fp4_sequential(config, options, batches, Llama::forward)?;
        bar.finish_and_clear();
        Ok(report)
    }

    /// Draws the windows, in batches.
    pub(super) fn batches(self, tokens: &Tokens, device: &Device) -> Result<Vec<Tensor<2, Int>>> {
        const BATCH: usize = 8;
        let mut random = Random::new(self.seed);
        let starts = (0..self.windows).step_by(BATCH);
        let counts = starts.map(|start| BATCH.min(self.windows - start));
        counts.map(|count| tokens.windows(count, self.context, &mut random, device)).collect()
    }
}
