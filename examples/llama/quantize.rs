//! A model quantized by a format and a method, calibrated on a text.

use anyhow::Result;
use burn::tensor::{Device, Int, Tensor};
use burn_fp4::{
    Calibration, CalibrationOptions, Fp4Config, Fp4Format, Fp4Module, Fp4Report, Fp4Scheme, Gptq,
    Method, ScaleRule,
};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

use super::model::{Llama, Projection};
use super::tokens::Tokens;
use examples::random::Random;

/// How a model is quantized.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Recipe {
    /// nvfp4 or mxfp4.
    #[arg(long, default_value_t = Fp4Format::NvFp4)]
    pub format: Fp4Format,
    /// How scales and codes are chosen.
    #[arg(long, value_parser = methods(), default_value_t = Method::SSE)]
    pub method: Method,
    /// Calibrate each layer behind the quantized ones before it.
    #[arg(long)]
    pub sequential: bool,
    /// Trust in the calibration, for GPTQ: what is added to the diagonal of `X^T X`, as a multiple
    /// of its mean.
    #[arg(long)]
    pub damping: Option<f64>,
    /// What it is calibrated on.
    #[command(flatten)]
    pub calibration: CalibrationWindows,
}

/// The windows of a text that a model is calibrated on.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct CalibrationWindows {
    /// Windows to calibrate on.
    #[arg(long = "calibration-windows", default_value_t = 128)]
    pub windows: usize,
    /// Tokens of such a window.
    #[arg(long, default_value_t = 256)]
    pub context: usize,
    /// Seed of the windows.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// The names of all methods, which the help lists.
pub fn methods() -> impl TypedValueParser<Value = Method> {
    let rows = Method::ALL.map(Method::row);
    let names = rows.map(|row| PossibleValue::new(row.name).help(row.summary));
    PossibleValuesParser::new(names).try_map(|name| name.parse::<Method>())
}

/// What of a model is quantized, and how: all linear layers but the output layer. Those that
/// inference engines multiply by as one have one tensor scale.
pub fn fp4_config<L: Projection>(model: &Llama<L>, format: Fp4Format, method: Method) -> Fp4Config {
    let config = Fp4Config::new(Fp4Scheme::of(ScaleRule::of_format(format)))
        .method(method)
        .without_container("Fp4Embedding")
        .share_scale(["q_proj", "k_proj", "v_proj"])
        .share_scale(["gate_proj", "up_proj"]);
    if model.has_head() { config.exclude("lm_head.*") } else { config }
}

impl Recipe {
    /// What of a model is quantized, and how.
    pub fn config<L: Projection>(&self, model: &Llama<L>) -> Fp4Config {
        let config = fp4_config(model, self.format, self.method);
        match (self.method.gptq(), self.damping) {
            (Some(options), Some(damping)) => config.gptq(Gptq { damping, ..options }),
            _ => config,
        }
    }

    /// Quantizes a model by a configuration: that of [`config`](Self::config), or of a file. It is
    /// calibrated if any method of the configuration needs that.
    ///
    /// # Errors
    /// A text shorter than a window, and what `quantize_fp4` and calibration refuse.
    pub fn apply<L: Projection>(
        &self,
        model: &mut Llama<L>,
        config: &Fp4Config,
        tokens: &Tokens,
        device: &Device,
    ) -> Result<Fp4Report> {
        let mut schemes = config.overrides.iter().map(|one| &one.scheme).chain([&config.scheme]);
        if !schemes.any(|scheme| config.chosen_by(scheme).needs_inputs()) {
            return Ok(model.quantize_fp4(config)?);
        }
        if self.sequential {
            return self.calibration.quantize_sequential(model, config, tokens, device);
        }
        let options = CalibrationOptions::default().for_config(config);
        let calibration = self.calibration.run(model, options, tokens, device)?;
        Ok(model.quantize_fp4(&config.with_calibration(&calibration))?)
    }
}

impl CalibrationWindows {
    /// What a model's layers are given by the windows.
    ///
    /// # Errors
    /// A text shorter than a window, and what calibration refuses.
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

    /// Quantizes a model layer by layer, each calibrated behind those that are quantized already.
    ///
    /// # Errors
    /// A text shorter than a window, and what `quantize_fp4_sequential` refuses.
    pub fn quantize_sequential<L: Projection>(
        self,
        model: &mut Llama<L>,
        config: &Fp4Config,
        tokens: &Tokens,
        device: &Device,
    ) -> Result<Fp4Report> {
        let (options, batches) = (CalibrationOptions::default(), self.batches(tokens, device)?);
        Ok(model.quantize_fp4_sequential(config, options, batches, Llama::forward)?)
    }

    /// The windows, some at a time.
    fn batches(self, tokens: &Tokens, device: &Device) -> Result<Vec<Tensor<2, Int>>> {
        const BATCH: usize = 8;
        let mut random = Random::new(self.seed);
        let starts = (0..self.windows).step_by(BATCH);
        let counts = starts.map(|start| BATCH.min(self.windows - start));
        counts.map(|count| tokens.windows(count, self.context, &mut random, device)).collect()
    }
}
