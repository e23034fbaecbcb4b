//! The choices of a user, on the command line or in a recipe.

use std::collections::BTreeSet;
use std::fmt;
use std::iter;
use std::path::{Path, PathBuf};

use burn_fp4_checkpoints::selection::{DEFAULT, Matrices, Selection, dialect_of};
use burn_fp4_checkpoints::{CheckpointError, Dtype, Model, dialect};
use burn_fp4_policy::{Decision, Policy, PolicyError, Preset, Recipe, RecipeFile, RecipeWeights};
use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::{Fp4Scheme, Hadamard, Method, ScaleRule};
use clap::builder::{PossibleValue, PossibleValuesParser};
use serde::Serialize;
use serde_json::Value;

use crate::checkpoint::{GGUF, is_gguf, packable};
use crate::counted::counted;
use crate::error::CliError;
use crate::listed::{listed, methods, one_of};
use crate::readers;
use crate::remarks::Remarks;

use super::statistics::StatisticsFile;

// Choices, each of which may be left open. No documentation: clap would take it for that of the
// command.
#[derive(clap::Args)]
pub(super) struct Options {
    /// The format: nvfp4 (the default) or mxfp4.
    #[arg(long)]
    format: Option<Fp4Format>,
    /// The number of weights that share a block scale. The default is the format's: 16 for nvfp4,
    /// 32 for mxfp4.
    #[arg(long, value_name = "N")]
    block_size: Option<usize>,
    /// The dialect to write: names and layout of the tensors. The table below lists its readers.
    /// The default is fp-quant with --hadamard, gguf if OUT ends in .gguf or INPUT is a GGUF file,
    /// and compressed-tensors otherwise.
    #[arg(long, value_name = "DIALECT", value_parser = PossibleValuesParser::new(packable()))]
    dialect: Option<String>,
    // The help lists the methods.
    #[arg(
        long,
        value_parser = one_of::<Method>(Method::NAMED.map(|row| row.name)),
        hide_possible_values = true,
        help = METHOD,
        long_help = methods(METHOD),
    )]
    method: Option<Method>,
    /// The arithmetic of scales, such as te (TransformerEngine 2.14 and later) or te-division
    /// (earlier versions): how the largest magnitude of a block becomes its scale. A method that
    /// searches for block scales, such as sse, tries others than that of the rule, which then only
    /// makes the tensor scale and divides the values. The default is te for nvfp4, and floor for
    /// mxfp4, but even without --method.
    #[arg(long, value_parser = one_of::<ScaleRule>(ScaleRule::ALL.map(rule_name)))]
    rule: Option<ScaleRule>,
    /// Applies a Hadamard transform to groups of N inputs before weights are quantized: 16, 32, 64,
    /// 128, or 0 for none, as by default. It lowers the loss with --method gptq, above all in
    /// mxfp4; other methods gain nothing. Readers have to transform the inputs of layers: the
    /// dialect is fp-quant.
    #[arg(long, value_name = "N")]
    hadamard: Option<usize>,
    // The help lists the presets.
    #[arg(
        long,
        value_parser = one_of::<Preset>(Preset::ALL.map(|preset| preset.row().name)),
        hide_possible_values = true,
        help = PRESET,
        long_help = presets(),
    )]
    preset: Option<Preset>,
    /// Do not quantize the weights that this name or pattern matches; may be repeated. A pattern
    /// matches the whole name of a weight or of its module, in the same case: `*.o_proj`. `*` is
    /// any text, `?` one character and `[kv]` one of several. `**.` is any number of components,
    /// also none, and a dot at the end stands for all within a module: `**.layers.0.`. `re:` starts
    /// a regular expression, which matches from the start of the name, and to its end only with
    /// `$`. Braces and commas do not list names: repeat the option. A pattern that matches no
    /// weight is an error. Weights that a recipe keeps stay dense too.
    #[arg(long, value_name = "PATTERN")]
    keep: Vec<String>,
    /// Quantize the matrices of this name or pattern, instead of the preset's choice; may be
    /// repeated. Patterns have the syntax of --keep.
    #[arg(long, value_name = "PATTERN", conflicts_with = "preset")]
    only: Vec<String>,
    /// Do not quantize this number of layers at the start.
    #[arg(long, value_name = "N")]
    first_layers_high_precision: Option<usize>,
    /// Do not quantize this number of layers at the end.
    #[arg(long, value_name = "N")]
    last_layers_high_precision: Option<usize>,
    /// Input statistics, for methods that need them: a safetensors file with the matrix `X^T X` or
    /// the mean squares of the inputs of each weight, in f32 and under its name
    /// (`Calibration::save` of burn-fp4 writes it); or an imatrix of llama.cpp in GGUF. Mean
    /// squares, as an imatrix has them, are enough for sse-weighted. With `X^T X` the errors of
    /// outputs are measured too, whatever the method is.
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
}

/// The help of `--method`.
const METHOD: &str = "How scales and codes are chosen. The default is sse for nvfp4, and amax \
                      with --rule even for mxfp4; methods with a star need --calibration";
/// The help of `--preset`.
const PRESET: &str = "Which weights to quantize, chosen by their names";

fn presets() -> String {
    listed(PRESET, &Preset::ALL.map(|preset| (preset.row().name, preset.row().summary.to_owned())))
}

/// The name of a rule, and as an alias its former name.
fn rule_name(rule: ScaleRule) -> PossibleValue {
    let row = rule.row();
    PossibleValue::new(row.name).aliases(row.former_name)
}

/// Returns the scheme of each group of a selection.
pub(super) fn schemes(selection: &Selection) -> Vec<Fp4Scheme> {
    let of = |members: &Vec<usize>| match selection.decisions[members[0]] {
        Decision::Quantize { scheme, .. } => scheme,
        Decision::Keep(_) => unreachable!("a group has quantized weights"),
    };
    selection.groups.iter().map(of).collect()
}

impl Options {
    /// Names the source of the error of a selection: an option, or the file of the recipe with the
    /// line of the choice.
    pub(super) fn blame(&self, error: CheckpointError, file: Option<&RecipeFile>) -> CliError {
        let of_pattern = |pattern: &String| {
            let own = self.keep.contains(pattern) || self.only.contains(pattern);
            (own, file.and_then(|file| file.line_of_pattern(pattern)))
        };
        let (own, line) = match &error {
            CheckpointError::Policy(
                PolicyError::NoMatch { pattern, .. }
                | PolicyError::Malformed { pattern, .. }
                | PolicyError::Pattern { pattern, .. },
            ) => of_pattern(pattern),
            CheckpointError::UnknownDialect { .. } | CheckpointError::ReadOnly { .. } => {
                let line = file.and_then(|file| file.line_of_key("dialect"));
                (self.dialect.is_some(), line)
            }
            // Only tables of a recipe make the schemes of weights differ.
            CheckpointError::Policy(
                PolicyError::OtherFormat { .. } | PolicyError::OtherScheme { .. },
            ) => (false, None),
            _ => (true, None),
        };
        match file {
            Some(file) if !own => CliError::in_recipe(file, line, error.into()),
            Some(_) | None => CliError::from(error).of_option(),
        }
    }

    /// These choices, and a recipe's where they are open. `--keep` adds to those that a recipe
    /// keeps; a note names the choices of the recipe that are replaced.
    pub(super) fn with_recipe(
        &self,
        file: Option<&RecipeFile>,
        remarks: &mut Remarks,
    ) -> Result<Recipe, CliError> {
        let mut recipe = file.map(RecipeFile::recipe).transpose()?.unwrap_or_default();
        // As other paths in files, it starts at the folder of the file.
        let folder = file.and_then(|file| file.path().parent()).unwrap_or(Path::new(""));
        recipe.calibration = recipe.calibration.map(|file| folder.join(file));
        if let Some(file) = file {
            self.note_replaced(&recipe, file.path(), remarks);
        }
        let keep = recipe.keep.into_iter().chain(self.keep.iter().cloned()).collect();
        // A preset and a list are two ways to say which weights.
        let (preset, only) = match (self.preset, &self.only[..]) {
            (None, []) => (recipe.preset, recipe.only),
            (preset, only) => (preset, only.to_vec()),
        };
        let first = self.first_layers_high_precision.or(recipe.first_layers_high_precision);
        let last = self.last_layers_high_precision.or(recipe.last_layers_high_precision);
        Ok(Recipe {
            format: self.format.or(recipe.format),
            block_size: self.block_size.or(recipe.block_size),
            dialect: self.dialect.clone().or(recipe.dialect),
            method: self.method.or(recipe.method),
            rule: self.rule.or(recipe.rule),
            hadamard: self.hadamard.or(recipe.hadamard),
            preset,
            keep,
            only,
            first_layers_high_precision: first,
            last_layers_high_precision: last,
            together: recipe.together,
            calibration: self.calibration.clone().or(recipe.calibration),
            weights: recipe.weights,
        })
    }

    /// Notes the choices of a recipe that these replace.
    fn note_replaced(&self, recipe: &Recipe, path: &Path, remarks: &mut Remarks) {
        fn differs<T: PartialEq>(own: &Option<T>, recipe: &Option<T>) -> bool {
            own.is_some() && recipe.is_some() && own != recipe
        }
        let chosen = self.preset.is_some() || !self.only.is_empty();
        let (first, last) = (self.first_layers_high_precision, self.last_layers_high_precision);
        let replaced = [
            ("format", differs(&self.format, &recipe.format)),
            ("block-size", differs(&self.block_size, &recipe.block_size)),
            ("dialect", differs(&self.dialect, &recipe.dialect)),
            ("method", differs(&self.method, &recipe.method)),
            ("rule", differs(&self.rule, &recipe.rule)),
            ("hadamard", differs(&self.hadamard, &recipe.hadamard)),
            ("preset", chosen && recipe.preset.is_some() && recipe.preset != self.preset),
            ("only", chosen && !recipe.only.is_empty() && recipe.only != self.only),
            ("first-layers-high-precision", differs(&first, &recipe.first_layers_high_precision)),
            ("last-layers-high-precision", differs(&last, &recipe.last_layers_high_precision)),
            ("calibration", differs(&self.calibration, &recipe.calibration)),
        ];
        let names = replaced.into_iter().filter(|(_, is)| *is).map(|(name, _)| format!("`{name}`"));
        let names = names.collect::<Vec<_>>().join(", ");
        if !names.is_empty() {
            let path = path.display();
            remarks.note(format!("{path}: the command line replaces its {names}"));
        }
    }
}

/// Choices that are made.
pub(super) struct ResolvedOptions {
    /// The policy, with the dialect in its recipe.
    pub(super) policy: Policy,
    /// The dtype of wide matrices that stay.
    pub(super) cast_kept: Option<Dtype>,
}

impl ResolvedOptions {
    /// Decides everything that a recipe leaves open. `file` is where some of its choices are.
    pub(super) fn of(
        mut recipe: Recipe,
        file: Option<&RecipeFile>,
        model: &Model<'_>,
        out: Option<&Path>,
    ) -> Result<Self, CliError> {
        // It is printed, and stands in the task of a run that may be resumed.
        if let Some(path) = recipe.calibration.as_deref().filter(|path| path.to_str().is_none()) {
            let what = format!("{}: expected a path in UTF-8; rename the file", path.display());
            return Err(CliError::Conflict(what));
        }
        let miles = recipe.preset == Some(Preset::Miles);
        if miles {
            // The converter of miles ran on TransformerEngine 2.10 when it was merged.
            let rule = ScaleRule::TeDivision;
            let fits = rule.row().format;
            if let (None, Some(format)) = (recipe.rule, recipe.format)
                && format != fits
            {
                let what = format!(
                    "the preset `{}` is for {fits}, not {format}; leave out the format",
                    Preset::Miles
                );
                return Err(CliError::Conflict(what));
            }
            recipe.rule = recipe.rule.or(Some(rule));
            recipe.method = recipe.method.or(Some(Method::Amax));
        }
        let entries = recipe.weights.iter().map(|entry| entry.hadamard);
        let mut sizes = iter::once(recipe.hadamard).chain(entries).flatten();
        let transforms = sizes.any(|size| size > 0);
        let dialect = recipe.dialect.clone().unwrap_or_else(|| {
            match miles {
                true => "miles",
                false if transforms => "fp-quant",
                false if model.gguf.is_some() || out.is_some_and(is_gguf) => GGUF,
                false => DEFAULT,
            }
            .to_owned()
        });
        recipe.dialect = Some(dialect.clone());
        // A recipe may name it.
        let (written, packable) = (dialect::written(), packable());
        if written.contains(&&*dialect) && !packable.contains(&&*dialect) {
            let names = packable.join(", ");
            let what = format!("the dialect `{dialect}` has no FP4; choose one of {names}");
            let error = CliError::Conflict(what);
            return Err(match file {
                Some(file) => CliError::in_recipe(file, file.line_of_key("dialect"), error),
                None => error,
            });
        }
        let policy = Policy::new(recipe.clone()).map_err(|problem| match file {
            Some(file) => file.blame(problem, &recipe),
            None => problem,
        });
        Ok(Self { policy: policy?, cast_kept: None })
    }

    /// The dialect to write.
    pub(super) fn dialect(&self) -> &str {
        dialect_of(&self.policy)
    }

    /// Returns true if a method that is asked for needs statistics.
    pub(super) fn is_calibrated(&self) -> bool {
        self.policy.schemes().any(|how| how.method.row().calibrated)
    }

    /// All that decides about bytes, and the file that errors of outputs are measured with.
    pub(super) fn settings(&self) -> Settings {
        let (recipe, base) = (self.policy.recipe().clone(), self.policy.base());
        Settings {
            format: base.format(),
            block_size: base.block_size,
            dialect: self.dialect().to_owned(),
            method: base.method,
            rule: base.rule,
            hadamard: base.hadamard.map(Hadamard::size),
            preset: recipe.only.is_empty().then_some(self.policy.preset()),
            only: recipe.only,
            keep: recipe.keep,
            first_layers_high_precision: recipe.first_layers_high_precision.unwrap_or(0),
            last_layers_high_precision: recipe.last_layers_high_precision.unwrap_or(0),
            together: recipe.together,
            calibration: recipe.calibration,
            weights: recipe.weights,
            cast_kept: self.cast_kept.map(|dtype| dtype.to_string().to_lowercase()),
        }
    }

    /// Adds notes and warnings about readers of the result, and about choices without an effect.
    ///
    /// # Errors
    /// If the dialect is not written.
    pub(super) fn remark(
        &self,
        model: &Model<'_>,
        selection: &Selection,
        schemes: &[Fp4Scheme],
        statistics: Option<&StatisticsFile>,
        remarks: &mut Remarks,
    ) -> Result<(), CliError> {
        let scaled = |how: &Fp4Scheme| how.format().row().tensor_scale;
        if !selection.has_tensor_scales() && schemes.iter().any(scaled) {
            let dialect = self.dialect();
            remarks.note(format!(
                "the dialect `{dialect}` has no tensor scales: block scales alone hold the range, \
                 which raises the error of small weights; other dialects have tensor scales"
            ));
        }
        let alone = |how: &Fp4Scheme| how.hadamard.is_some() && how.method.gptq().is_none();
        if schemes.iter().any(alone) {
            remarks.note(
                "a Hadamard transform without GPTQ made no language model better (page `hadamard` \
                 of the guide): calibrate and pass --method gptq"
                    .to_owned(),
            );
        }
        if let (Some(file), false) = (statistics, self.is_calibrated()) {
            let method = self.policy.base().method;
            let needed = match self.policy.schemes().all(|how| how.method == method) {
                true => format!("method `{method}` needs no input statistics"),
                false => "none of the methods needs input statistics".to_owned(),
            };
            let measures = selection.groups.iter().flatten().any(|&at| {
                let weight = &model.weights[at];
                file.has_gram(&weight.name, &Matrices::of(model, weight))
            });
            let use_of = if measures { "only measures errors of outputs" } else { "is not used" };
            remarks.note(format!("{needed}: {} {use_of}", file.path().display()));
        }
        if self.dialect() == GGUF {
            remarks.note_each(readers::gguf_note(model));
        }
        remarks.note_each(readers::cache_note(self.dialect(), model));
        let formats = schemes.iter().map(|how| (how.format(), how.block_size));
        remarks.note_each(readers::notes(self.dialect(), formats)?);
        let quantized = selection.groups.iter().flatten().map(|&at| &model.weights[at]);
        let lossy: Vec<_> = quantized.clone().filter(|weight| weight.is_lossy()).collect();
        if !lossy.is_empty() {
            let kinds: BTreeSet<String> = lossy.iter().map(|weight| weight.kind()).collect();
            let kinds = kinds.into_iter().collect::<Vec<_>>().join(", ");
            remarks.note(format!(
                "{} quantized from {kinds}: the error of that format stays, and errors are \
                 measured against its values; prefer the model in bf16 or f16, if there is one",
                counted(lossy.len(), "weight"),
            ));
        }
        // Dialects with stacked matrices have an order of axes for them.
        let single = quantized.filter(|weight| weight.shape().len() == 2);
        let turned = single.filter(|weight| Matrices::of(model, weight).transposed);
        let turned: Vec<String> = turned.map(|weight| weight.name.clone()).collect();
        if !turned.is_empty() && model.gguf.is_none() {
            remarks.warn(readers::turned_warning(self.dialect(), turned)?);
        } else if model.gguf.is_some() && self.dialect() != GGUF {
            remarks.note(readers::from_gguf_note(model));
        } else {
            let packed = selection.groups.iter().flatten().copied().collect::<Vec<_>>();
            readers::remark_transformers(self.dialect(), model, &packed, remarks);
        }
        Ok(())
    }
}

/// Choices that are made, as they are printed; schemes only as JSON, as few weights may have them.
#[derive(Serialize)]
pub(super) struct Settings {
    format: Fp4Format,
    block_size: usize,
    dialect: String,
    method: Method,
    rule: ScaleRule,
    hadamard: Option<usize>,
    /// None: `only` says which weights.
    preset: Option<Preset>,
    only: Vec<String>,
    keep: Vec<String>,
    first_layers_high_precision: usize,
    last_layers_high_precision: usize,
    /// None: as readers of the dialect need it.
    together: Option<bool>,
    pub(super) calibration: Option<PathBuf>,
    /// Other choices for some weights, as the recipe has them.
    weights: Vec<RecipeWeights>,
    /// None: matrices that stay keep their dtype.
    cast_kept: Option<String>,
}

impl Settings {
    /// Writes each of them as an option of the command line, or as it stands in a recipe, if there
    /// is no option for it.
    pub(super) fn as_options(&self) -> Vec<String> {
        let fields = serde_json::to_value(self).expect("texts and numbers");
        let option = |(name, value): (&String, &Value)| {
            let name = match name.as_str() {
                "together" | "weights" => format!("`{name}` in the recipe"),
                name => format!("--{}", name.replace('_', "-")),
            };
            match value {
                Value::Bool(value) => format!("{name}, which is {value}"),
                Value::Null => format!("no {name}"),
                Value::Array(all) if all.is_empty() => format!("no {name}"),
                Value::Array(all) if all.iter().all(Value::is_string) => {
                    let texts = all.iter().filter_map(Value::as_str);
                    texts.map(|text| format!("{name} '{text}'")).collect::<Vec<_>>().join(" ")
                }
                Value::String(text) => format!("{name} {text}"),
                value => format!("{name} {value}"),
            }
        };
        fields.as_object().expect("fields").iter().map(option).collect()
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, ", self.dialect)?;
        match self.preset {
            Some(preset) => write!(f, "{preset}")?,
            None => write!(f, "only {}", self.only.join(", "))?,
        }
        match self.weights.len() {
            0 => Ok(()),
            tables => write!(f, ", {}", counted(tables, "`[[weights]]` table")),
        }
    }
}
