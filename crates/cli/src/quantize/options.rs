//! What a user chooses, on the command line or in a recipe.

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use burn_fp4_checkpoints::Model;
use burn_fp4_checkpoints::selection::{Choice, Preset};
use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::{Fp4Scheme, Method, ScaleRule, TensorScaling};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::{Deserialize, Serialize};

use crate::checkpoint::{GGUF, is_gguf, writable};
use crate::convert::UNKNOWN_NAMES;
use crate::error::CliError;
use crate::listed::{listed, methods};

// Choices, each of which may be left open. No documentation: clap would take it for that of the
// command.
#[derive(Debug, Clone, Default, clap::Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Options {
    /// The format: nvfp4 (the default) or mxfp4.
    #[arg(long)]
    format: Option<Fp4Format>,
    /// Weights that share a block scale; without, the format's own: 16 for nvfp4, 32 for mxfp4.
    #[arg(long, value_name = "N")]
    block_size: Option<usize>,
    /// The dialect to write, which is how tensors are named and laid out: compressed-tensors (vLLM,
    /// transformers), modelopt (TensorRT-LLM, vLLM, SGLang), gguf (llama.cpp), mlx (MLX), gpt-oss
    /// (its experts in transformers), miles (as its preset). Without, gguf if OUT ends in .gguf or
    /// INPUT is a GGUF file, and compressed-tensors for all others.
    #[arg(long, value_name = "DIALECT", value_parser = writable())]
    dialect: Option<String>,
    // The help lists the methods.
    #[arg(
        long,
        value_parser = one_of::<Method>(Method::ALL.map(|method| method.row().name)),
        hide_possible_values = true,
        help = METHOD,
        long_help = methods(METHOD),
    )]
    method: Option<Method>,
    /// The arithmetic of scales, such as te (TransformerEngine 2.14 and later) or te-division
    /// (before, and of --preset miles).
    #[arg(long, value_parser = one_of::<ScaleRule>(ScaleRule::ALL.map(|rule| rule.row().name)))]
    rule: Option<ScaleRule>,
    // The help lists the presets.
    #[arg(
        long,
        value_parser = one_of::<Preset>(Preset::ALL.map(|preset| preset.row().name)),
        hide_possible_values = true,
        help = PRESET,
        long_help = presets(),
    )]
    preset: Option<Preset>,
    /// Keep weights of this name, or that match this pattern; may be repeated. `*` and `?` are
    /// wild cards of a whole name; `re:` is a regular expression that matches from the start of a
    /// name on, up to its end only with `$`. A name is that of the weight or of its module; a
    /// pattern that matches none is an error.
    #[arg(long, value_name = "GLOB")]
    keep: Vec<String>,
    /// Quantize matrices of this name or pattern, instead of what the preset chooses; may be
    /// repeated.
    #[arg(long, value_name = "GLOB", conflicts_with = "preset")]
    only: Vec<String>,
    /// Keep so many layers at the start.
    #[arg(long, value_name = "N")]
    first_layers_high_precision: Option<usize>,
    /// Keep so many layers at the end.
    #[arg(long, value_name = "N")]
    last_layers_high_precision: Option<usize>,
    /// Statistics of activations, for methods that need them: a safetensors file that holds for
    /// each weight, under its name, the matrix `X^T X` or the mean squares of its inputs, f32
    /// (`Calibration::save` of burn-fp4 writes it); or an imatrix of llama.cpp in GGUF, which is
    /// enough for sse-weighted.
    #[arg(long, value_name = "FILE")]
    pub(super) calibration: Option<PathBuf>,
}

/// What `--method` takes.
const METHOD: &str =
    "How scales and codes are chosen; without, sse. Those with a star need --calibration";
/// What `--preset` takes.
const PRESET: &str = "Which weights, by their names";

fn presets() -> String {
    listed(PRESET, &Preset::ALL.map(|preset| (preset.row().name, preset.row().summary.to_owned())))
}

/// The names that there are of something, which the help lists.
fn one_of<T>(names: impl Into<PossibleValuesParser>) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: Into<Box<dyn Error + Send + Sync>>> + Clone + Send + Sync + 'static,
{
    names.into().try_map(|name| name.parse())
}

impl Options {
    /// The choices of a recipe.
    fn read(path: &Path) -> Result<Self, CliError> {
        let file = |source| CliError::File { path: path.to_owned(), source };
        let text = std::fs::read_to_string(path).map_err(file)?;
        let recipe: Self = toml::from_str(&text).map_err(|error| {
            let before = &text[..error.span().map_or(0, |span| span.start)];
            let line = before.matches('\n').count() + 1;
            let problem = error.message().replace('\n', "; ");
            CliError::Recipe { path: path.to_owned(), line, problem }
        })?;
        if recipe.preset.is_some() && !recipe.only.is_empty() {
            let path = path.display();
            let what = format!("{path}: `only` cannot be used with `preset`: it is instead of one");
            return Err(CliError::Choice(what));
        }
        Ok(recipe)
    }

    /// These choices, and a recipe's where they are open.
    pub(super) fn with_recipe(&self, path: Option<&Path>) -> Result<Self, CliError> {
        let Some(path) = path else { return Ok(self.clone()) };
        let recipe = Self::read(path)?;
        let keep = if self.keep.is_empty() { recipe.keep } else { self.keep.clone() };
        // A preset and a list are two ways to say which weights.
        let (preset, only) = match (self.preset, &self.only[..]) {
            (None, []) => (recipe.preset, recipe.only),
            (preset, only) => (preset, only.to_vec()),
        };
        let first = self.first_layers_high_precision.or(recipe.first_layers_high_precision);
        let last = self.last_layers_high_precision.or(recipe.last_layers_high_precision);
        Ok(Self {
            format: self.format.or(recipe.format),
            block_size: self.block_size.or(recipe.block_size),
            dialect: self.dialect.clone().or(recipe.dialect),
            method: self.method.or(recipe.method),
            rule: self.rule.or(recipe.rule),
            preset,
            keep,
            only,
            first_layers_high_precision: first,
            last_layers_high_precision: last,
            calibration: self.calibration.clone().or(recipe.calibration),
        })
    }

    /// What is done to a model: these choices, and a default for each that is left open.
    pub(super) fn resolve(
        &self,
        model: &Model<'_>,
        out: Option<&Path>,
    ) -> Result<ResolvedOptions, CliError> {
        let preset = self.preset.unwrap_or_default();
        let miles = preset == Preset::Miles;
        let format = self.format.unwrap_or_else(|| Fp4Scheme::default().format());
        let own = format.row().block_size;
        let dialect = self.dialect.clone().unwrap_or_else(|| {
            match miles {
                true => "miles",
                false if model.gguf.is_some() || out.is_some_and(is_gguf) => GGUF,
                false => "compressed-tensors",
            }
            .to_owned()
        });
        let choice = Choice {
            format,
            block_size: self.block_size.unwrap_or(own),
            dialect,
            preset,
            keep: self.keep.clone(),
            only: self.only.clone(),
            first_layers: self.first_layers_high_precision.unwrap_or(0),
            last_layers: self.last_layers_high_precision.unwrap_or(0),
        };
        let method = self.method.unwrap_or(if miles { Method::Amax } else { Method::Sse });
        // The converter of miles ran on TransformerEngine 2.10 when it was merged.
        let default = if miles { ScaleRule::TeDivision } else { ScaleRule::of_format(format) };
        let rule = self.rule.unwrap_or(default);
        let fits = rule.row().format;
        if fits != format {
            let what = match self.rule {
                None if miles => format!("the preset `{preset}`"),
                None | Some(_) => format!("the rule `{rule}`"),
            };
            return Err(CliError::Choice(format!("{what} is for {fits}, not {format}")));
        }
        let row = method.row();
        let (size, sizes) = (choice.block_size, format.row().block_sizes);
        if !sizes.contains(&size) {
            let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
            let what = format!("--block-size {size}: expected {}", sizes.join(" or "));
            return Err(CliError::Choice(what));
        }
        if !row.formats.contains(&format) || !row.block_sizes.contains(&choice.block_size) {
            let what = format!("method `{method}` is not defined for {format} in blocks of {size}");
            return Err(CliError::Choice(what));
        }
        if row.calibrated && self.calibration.is_none() {
            let what = format!("method `{method}` needs statistics: name them by --calibration");
            return Err(CliError::Choice(what));
        }
        let calibration = self.calibration.clone();
        Ok(ResolvedOptions { choice, method, rule, calibration })
    }
}

/// Choices of which none is left open.
pub(super) struct ResolvedOptions {
    pub(super) choice: Choice,
    pub(super) method: Method,
    pub(super) rule: ScaleRule,
    pub(super) calibration: Option<PathBuf>,
}

impl ResolvedOptions {
    /// How tensors are quantized: with a tensor scale, if the dialect has a place for one.
    pub(super) fn scheme(&self, has_tensor_scales: bool) -> Result<Fp4Scheme, CliError> {
        let scheme = Fp4Scheme::of(self.rule).with_block_size(self.choice.block_size);
        let scheme = scheme.with_search(self.method.row().chosen_by.search());
        let scheme = match has_tensor_scales || !self.choice.format.row().tensor_scale {
            true => scheme,
            false => scheme.with_tensor_scale(TensorScaling::Multiplier(1.0)),
        };
        scheme.validate().map_err(|error| CliError::Choice(error.to_string()))?;
        Ok(scheme)
    }

    /// All that decides about bytes.
    pub(super) fn settings(&self) -> Settings {
        let choice = self.choice.clone();
        Settings {
            format: choice.format,
            block_size: choice.block_size,
            dialect: choice.dialect,
            method: self.method,
            rule: self.rule,
            preset: choice.only.is_empty().then_some(choice.preset),
            only: choice.only,
            keep: choice.keep,
            first_layers_high_precision: choice.first_layers,
            last_layers_high_precision: choice.last_layers,
            calibration: self.calibration.clone().filter(|_| self.method.row().calibrated),
        }
    }

    /// What is worth knowing before it is done.
    pub(super) fn notes(&self, model: &Model<'_>) -> Vec<String> {
        let mut notes = Vec::new();
        if let Some(path) = self.calibration.as_ref().filter(|_| !self.method.row().calibrated) {
            let (path, method) = (path.display(), self.method);
            notes.push(format!("method `{method}` needs no statistics: {path} is not used"));
        }
        if self.choice.dialect == GGUF && model.gguf.is_none() {
            notes.push(UNKNOWN_NAMES.to_owned());
        }
        notes
    }
}

/// Choices of which none is left open, as they are printed.
#[derive(Serialize)]
pub(super) struct Settings {
    format: Fp4Format,
    block_size: usize,
    dialect: String,
    method: Method,
    rule: ScaleRule,
    /// None: `only` says which weights.
    preset: Option<Preset>,
    only: Vec<String>,
    keep: Vec<String>,
    first_layers_high_precision: usize,
    last_layers_high_precision: usize,
    /// None: the method needs none.
    calibration: Option<PathBuf>,
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format, block_size, dialect, method, rule, .. } = self;
        write!(f, "{format} in blocks of {block_size}, {dialect}, {method} by rule {rule}, ")?;
        match self.preset {
            Some(preset) => write!(f, "{preset}"),
            None => write!(f, "only {}", self.only.join(", ")),
        }
    }
}
