//! Which weights of a model become FP4, and which of them go together: by name and shape alone,
//! before a byte of them is read.
//!
//! A weight is kept for the first [`Reason`] that there is. Where readers run layers as one (query,
//! key and value; gate and up) all of them are kept if one is, and those that are not share a
//! tensor scale.

mod fused;
mod layers;
mod nearest;
mod preset;
mod reason;
mod warning;

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use burn_fp4_formats::Fp4Format;

use crate::architecture::{Architecture, CONVOLUTION};
use crate::dialect::{self, Dialect, Stated, Write};
use crate::error::CheckpointError;
use crate::fp4::Fp4Weight;
use crate::patterns::{Matcher, Pattern, Syntax};
use crate::weight::{Model, Quantization, Value, Weight};
pub(crate) use fused::families;
use layers::Layers;
use preset::Names;
pub use preset::{Preset, PresetRow};
pub use reason::Reason;
pub use warning::Warning;

/// The dialect to write where none is chosen.
pub const DEFAULT: &str = "compressed-tensors";

/// Reasons that an error tells.
const SHOWN: usize = 5;

/// The choices of a user.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The format of what is quantized, where no exception says another.
    pub format: Fp4Format,
    /// Numbers that share a block scale, with the same exceptions.
    pub block_size: usize,
    /// The dialect that is written.
    pub dialect: String,
    /// Which weights, by their names.
    pub preset: Preset,
    /// Names of weights or modules that are kept, whatever else is said: [`Pattern`]s.
    pub keep: Vec<String>,
    /// If there are any: what is quantized instead of what the preset chooses.
    pub only: Vec<String>,
    /// Layers at the start that are kept.
    pub first_layers: usize,
    /// Layers at the end that are kept.
    pub last_layers: usize,
    /// Weights, of those that are chosen, that become something else. Of several exceptions that
    /// are about a weight the last one counts.
    pub exceptions: Vec<Exception>,
    /// Keeps or quantizes layers that may be run as one together, in one format and with one tensor
    /// scale. None: if readers of the dialect run them as one.
    pub together: Option<bool>,
}

/// The choices of a user for some of the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exception {
    /// Names of these weights or modules: [`Pattern`]s.
    pub names: Vec<String>,
    /// Their format, and the numbers that share a block scale. None: they are kept.
    pub becomes: Option<(Fp4Format, usize)>,
}

/// The fate of a weight.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// It is quantized, with the group of this number.
    Quantize(usize),
    /// It is kept.
    Keep(Reason),
}

/// The decision about every weight of a model.
///
/// ```
/// use burn_fp4_checkpoints::selection::{Choice, Preset, Selection};
/// use burn_fp4_checkpoints::{Dtype, Model, Tensor, Value, Weight};
///
/// # let weights = ["embed_tokens.weight", "up_proj.weight"].map(|name| {
/// #     let tensor = Tensor::new(name, Dtype::BF16, vec![1, 16], vec![0; 32]).expect("a shape");
/// #     Weight::new(name, 0, Value::Plain(tensor))
/// # });
/// # let format = burn_fp4_formats::Fp4Format::NvFp4;
/// let model = Model { weights: weights.into(), ..Model::default() };
/// let (preset, dialect) = (Preset::AllLinear, "modelopt".to_owned());
/// let choice = Choice { preset, dialect, ..Choice::all(format, 16) };
/// let selection = Selection::of(&model, &choice)?;
/// assert_eq!(selection.groups, [[1]]);
/// assert_eq!(selection.outline(&model).weights[1].kind(), "nvfp4 16");
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
#[derive(Debug)]
pub struct Selection {
    /// One for each weight.
    pub decisions: Vec<Decision>,
    /// The weights that are quantized with one tensor scale, in the order of the model. Most are
    /// alone.
    pub groups: Vec<Vec<usize>>,
    /// For each weight the exception that is about it, by its place in the choice.
    pub exceptions: Vec<Option<usize>>,
    /// Reasons to look at the decisions before the result is used.
    pub warnings: Vec<Warning>,
    choice: Choice,
    layers: Layers,
    scaled: bool,
}

/// The axes of a weight, as `[stacked, rows, cols]`.
///
/// ```
/// use burn_fp4_checkpoints::selection::Matrices;
/// use burn_fp4_checkpoints::{Dtype, Model, Tensor, Value, Weight};
///
/// let config = Some(serde_json::json!({"model_type": "gpt_oss"}));
/// let model = Model { config, ..Model::default() };
/// let tensor = Tensor::new("experts.down_proj", Dtype::BF16, vec![2, 8, 4], vec![0; 128])?;
/// let weight = Weight::new("experts.down_proj", 0, Value::Plain(tensor));
/// let Matrices { stacked, rows, cols, transposed } = Matrices::of(&model, &weight);
/// assert_eq!(([stacked, rows, cols], transposed), ([2, 4, 8], true));
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrices {
    /// Matrices, each with a tensor scale of its own.
    pub stacked: usize,
    /// Rows of each: the outputs of the layer.
    pub rows: usize,
    /// Columns of each, along which blocks run: the inputs of the layer.
    pub cols: usize,
    /// True if the parameter is `[stacked, cols, rows]`.
    pub transposed: bool,
}

impl Selection {
    /// Decides about every weight.
    ///
    /// # Errors
    /// An unknown dialect or one that is only read, a block size that the format does not have, a
    /// pattern that is none or matches nothing, a preset that needs a number of layers where there
    /// is none, and [`CheckpointError::CannotHold`] for layers that are run as one and would have
    /// different formats.
    pub fn of(model: &Model<'_>, choice: &Choice) -> Result<Self, CheckpointError> {
        let (dialect, writer) = dialect::writer(&choice.dialect)?;
        choice.format.check_block_size(choice.block_size)?;
        let (keep, only) = (matchers(&choice.keep)?, matchers(&choice.only)?);
        for (list, texts, matchers) in
            [("keep", &choice.keep, &keep), ("only", &choice.only, &only)]
        {
            check_matches(model, list, texts, matchers)?;
        }
        let found = exceptions_of(model, &choice.exceptions)?;
        let layers = Layers::of(model, choice.preset, choice.first_layers, choice.last_layers)?;
        let architecture = Architecture::of(model);
        let names = Names::of(choice.preset, architecture);
        let judge =
            Judge { architecture, choice, dialect, writer, names, keep, only, layers: &layers };
        let mut reasons: Vec<Option<Reason>> =
            model.weights.iter().zip(&found).map(|(w, other)| judge.keeps(w, *other)).collect();
        let exceptions: Vec<Option<usize>> =
            found.into_iter().map(|found| found.map(|(at, _)| at)).collect();
        let becomes = |at: usize| choice.becomes(exceptions[at]);
        let families = fused::families(model);
        let fuses = choice.together.unwrap_or_else(|| writer.fuses());
        // The converter of miles decides about each of a pair alone; a user may say otherwise.
        let fuses_all = choice.together.unwrap_or(fuses && choice.preset != Preset::Miles);
        if fuses_all {
            keep_together(model, &families, &mut reasons);
            if let Some(other) = of_another_format(&families, &reasons, becomes) {
                let (dialect, weight) = (dialect.name(), &model.weights[other].name);
                let what = "another format than that of layers that run as one with it; say \
                            `together = false` to let them differ";
                return Err(CheckpointError::cannot_hold(dialect, weight, what));
            }
        }
        let shares = |first: usize, at: usize| {
            let scaled = becomes(first).is_some_and(|(format, _)| format.row().tensor_scale);
            fuses && scaled && becomes(first) == becomes(at)
        };
        let groups = groups(choice.preset, shares, &families, &reasons, model);
        let mut decisions: Vec<Decision> = Vec::with_capacity(reasons.len());
        let of_weight: HashMap<usize, usize> = groups
            .iter()
            .enumerate()
            .flat_map(|(group, members)| members.iter().map(move |&at| (at, group)))
            .collect();
        for (at, reason) in reasons.into_iter().enumerate() {
            decisions.push(match reason {
                Some(reason) => Decision::Keep(reason),
                None => Decision::Quantize(of_weight[&at]),
            });
        }
        let scaled = writer.holds().tensor_scale != Stated::Folded;
        let warnings = [
            Warning::of_architecture(model, architecture, choice.preset, &choice.only),
            Warning::of_stacks(model, architecture, groups.iter().flatten().copied()),
            Warning::of_layers(&layers),
        ];
        let warnings = warnings.into_iter().flatten().collect();
        let choice = choice.clone();
        Ok(Self { decisions, groups, exceptions, warnings, choice, layers, scaled })
    }

    /// Keeps every weight that the dialect has no place for, such as stacked matrices, for
    /// [`Reason::CannotHold`].
    ///
    /// # Errors
    /// [`CheckpointError::CannotHold`] with the first of them, in which writing would end. All of
    /// them are kept nonetheless, so that a plan can show them.
    pub fn keep_unheld(&mut self, model: &Model<'_>) -> Result<(), CheckpointError> {
        let (_, writer) = dialect::writer(&self.choice.dialect)?;
        let outline = self.outline(model);
        let mut first = Ok(());
        for (weight, decision) in outline.weights.iter().zip(&mut self.decisions) {
            let Decision::Quantize(_) = decision else { continue };
            let Err(error) = writer.tensors(weight) else { continue };
            let CheckpointError::CannotHold { dialect, what, .. } = error else {
                return Err(error);
            };
            *decision = Decision::Keep(Reason::CannotHold { dialect, what });
            first = first.and(Err(error));
        }
        let quantized = |at: &usize| matches!(self.decisions[*at], Decision::Quantize(_));
        self.groups.iter_mut().for_each(|group| group.retain(quantized));
        self.groups.retain(|group| !group.is_empty());
        for (number, group) in self.groups.iter().enumerate() {
            group.iter().for_each(|&at| self.decisions[at] = Decision::Quantize(number));
        }
        first
    }

    /// Checks that something is quantized: otherwise it is a mistake, not a result.
    ///
    /// # Errors
    /// [`CheckpointError::AlreadyQuantized`] and [`CheckpointError::NothingSelected`], by the
    /// matrices that came closest, of those that were asked for.
    pub fn check_not_empty(&self, model: &Model<'_>) -> Result<(), CheckpointError> {
        if !self.groups.is_empty() {
            return Ok(());
        }
        let only = matchers(&self.choice.only)?;
        let wanted = |weight: &Weight<'_>| match &only[..] {
            [] => weight.shape().len() >= 2,
            only => only.iter().any(|matcher| hits(matcher, weight)),
        };
        let kept = |(weight, decision): (&Weight<'_>, &Decision)| match decision {
            Decision::Keep(reason) if wanted(weight) => Some((weight.name.clone(), reason.clone())),
            Decision::Keep(_) | Decision::Quantize(_) => None,
        };
        let kept: Vec<_> = model.weights.iter().zip(&self.decisions).filter_map(kept).collect();
        // Each reason once, the closest first.
        let mut reasons: Vec<(&Reason, &str, usize)> = Vec::new();
        for (weight, reason) in &kept {
            match reasons.iter_mut().find(|(known, ..)| known.is_like(reason)) {
                Some((.., count)) => *count += 1,
                None => reasons.push((reason, weight, 1)),
            }
        }
        reasons.sort_by_key(|(reason, _, count)| (reason.place(), Reverse(*count)));
        if let Some((Reason::Already(format), weight, _)) = reasons.first() {
            let (weight, format) = ((*weight).to_owned(), format.clone());
            return Err(CheckpointError::AlreadyQuantized { weight, format });
        }
        let text = |(reason, weight, count): &(&Reason, &str, usize)| match count - 1 {
            0 => format!("`{weight}`: {reason}"),
            others => format!("`{weight}`: {reason} (and {others} more)"),
        };
        let mut texts: Vec<String> = reasons.iter().take(SHOWN).map(text).collect();
        if reasons.len() > SHOWN {
            let more = reasons.len() - SHOWN;
            texts.push(format!("and {more} more reason{}", if more == 1 { "" } else { "s" }));
        }
        if texts.is_empty() {
            texts.push("there is no matrix".to_owned());
        }
        let (reason, weight) =
            reasons.first().map_or((&Reason::NoMatrix, ""), |one| (one.0, one.1));
        let remedy = self.remedy(model, weight, reason)?;
        let (tensors, reasons) = (model.weights.len(), texts.join("; "));
        Err(CheckpointError::NothingSelected { tensors, reasons, remedy })
    }

    /// Names the choice that makes a weight quantized that is kept for a reason.
    fn remedy(
        &self,
        model: &Model<'_>,
        weight: &str,
        reason: &Reason,
    ) -> Result<String, CheckpointError> {
        let asked = !self.choice.only.is_empty();
        Ok(match reason {
            Reason::Columns { cols, .. } => self.choice.dividing(*cols),
            Reason::CannotHold { .. } => "choose another dialect".to_owned(),
            Reason::Transposed(_) => {
                let turns = |name: &&str| dialect::writer(name).is_ok_and(|(_, by)| by.turns());
                let names: Vec<_> = dialect::written().into_iter().filter(turns).collect();
                format!("write the dialect {}, or name weights with `only`", names.join(" or "))
            }
            Reason::Smoothed => "start from the model before its inputs were scaled".to_owned(),
            Reason::Asked(pattern) => format!("leave `{pattern}` out of what is kept"),
            Reason::Layer(_) => {
                let count = self.layers.count();
                format!("keep fewer layers in high precision: the model has {count}")
            }
            Reason::With(_) => self.remedy_together(model, weight),
            Reason::Already(_) => "choose other weights".to_owned(),
            Reason::Preset(CONVOLUTION) | Reason::NoMatrix | Reason::Empty | Reason::Dtype(_)
                if !asked =>
            {
                "choose a model with matrices of floats".to_owned()
            }
            Reason::Preset(_) if !asked && self.choice.preset != Preset::default() => {
                format!("choose the preset `{}`, or name weights with `only`", Preset::default())
            }
            Reason::Preset(_)
            | Reason::NoMatrix
            | Reason::Empty
            | Reason::Dtype(_)
            | Reason::NotAsked
            | Reason::Unlisted(_) => {
                let others = Choice { only: Vec::new(), ..self.choice.clone() };
                let others = Self::of(model, &others)?;
                let module = |group: &Vec<usize>| model.weights[group[0]].module().to_owned();
                match others.groups.first().map(module) {
                    Some(module) => {
                        format!("name matrices of floats with `only`, such as `{module}`")
                    }
                    None => "name matrices of floats with `only`".to_owned(),
                }
            }
        })
    }

    /// Names the choice that makes a weight quantized whose neighbors are kept.
    fn remedy_together(&self, model: &Model<'_>, weight: &str) -> String {
        let apart = "set `together = false` in a recipe";
        let families = fused::families(model);
        let family = families
            .iter()
            .find(|family| family.iter().any(|&at| model.weights[at].name == weight));
        let not_asked = |at: &&usize| self.decisions[**at] == Decision::Keep(Reason::NotAsked);
        let last = |at: &usize| {
            let module = model.weights[*at].module();
            format!("`{}`", module.rsplit('.').next().unwrap_or(module))
        };
        let others: Vec<String> =
            family.into_iter().flatten().filter(not_asked).map(last).collect();
        match &others[..] {
            [] => apart.to_owned(),
            others => format!("name {} with `only` too, or {apart}", others.join(" and ")),
        }
    }

    /// Returns true if the dialect has a place for the tensor scales of formats that have them. In
    /// others they are 1.
    pub fn has_tensor_scales(&self) -> bool {
        self.scaled
    }

    /// The model as it will be written, without the bytes of what is quantized.
    #[must_use]
    pub fn outline<'a>(&self, model: &Model<'a>) -> Model<'a> {
        let outline = |(at, weight): (usize, &Weight<'a>)| {
            let chosen = matches!(self.decisions[at], Decision::Quantize(_));
            let becomes = self.choice.becomes(self.exceptions[at]).filter(|_| chosen);
            let Some((format, block_size)) = becomes else { return weight.clone() };
            let matrices = Matrices::of(model, weight);
            let value = Value::Fp4(Fp4Weight::outline(
                format,
                block_size,
                matrices.shape(weight.shape().len()),
                matrices.transposed,
                self.scaled && format.row().tensor_scale,
            ));
            Weight::new(weight.name.clone(), weight.file, value)
        };
        let mut ignore = model.quantization.ignore.clone();
        ignore.extend(self.layers.kept().map(Pattern::Within));
        Model {
            weights: model.weights.iter().enumerate().map(outline).collect(),
            files: model.files.clone(),
            config: model.config.clone(),
            // What the source says of its quantization is no longer all of it.
            quantization: Quantization { dialect: "", ignore, ..model.quantization.clone() },
            gguf: model.gguf.clone(),
            sidecars: model.sidecars.clone(),
        }
    }
}

impl Choice {
    /// A format for all weights that the default preset chooses, in the default dialect, without
    /// exceptions.
    #[must_use]
    pub fn all(format: Fp4Format, block_size: usize) -> Self {
        Self {
            format,
            block_size,
            dialect: DEFAULT.to_owned(),
            preset: Preset::default(),
            keep: Vec::new(),
            only: Vec::new(),
            first_layers: 0,
            last_layers: 0,
            exceptions: Vec::new(),
            together: None,
        }
    }

    /// Names a format, or else dialects, whose blocks divide a number of columns.
    fn dividing(&self, cols: usize) -> String {
        let fits = |dialect: &str, format: Fp4Format| {
            dialect::writer(dialect).is_ok_and(|(_, writer)| {
                let columns = writer.columns(format, format.row().block_size);
                !writer.readers(format).is_empty() && cols.is_multiple_of(columns)
            })
        };
        let mut formats = Fp4Format::ALL;
        formats.sort_by_key(|format| *format != self.format);
        if let Some(format) = formats.into_iter().find(|format| fits(&self.dialect, *format)) {
            return format!("choose {format} in blocks of {}", format.row().block_size);
        }
        let dialects = |format: Fp4Format| {
            let names = dialect::written().into_iter().filter(|name| fits(name, format));
            let names: Vec<_> = names.collect();
            (!names.is_empty()).then(|| format!("write {format} in {}", names.join(" or ")))
        };
        let other = formats.into_iter().find_map(dialects);
        other.unwrap_or_else(|| "choose other weights: no format has blocks so short".to_owned())
    }

    /// The format of a weight that an exception is about, or none. None: it is kept.
    fn becomes(&self, exception: Option<usize>) -> Option<(Fp4Format, usize)> {
        exception.map_or(Some((self.format, self.block_size)), |at| self.exceptions[at].becomes)
    }
}

impl Matrices {
    /// The matrices of a weight with two or more axes.
    pub fn of(model: &Model<'_>, weight: &Weight<'_>) -> Self {
        Self::in_architecture(Architecture::of(model), weight)
    }

    fn in_architecture(architecture: Architecture<'_>, weight: &Weight<'_>) -> Self {
        let shape = weight.shape();
        let packed = matches!(weight.value, Value::Fp4(_));
        let transposed = !packed && architecture.is_transposed(weight.module(), shape);
        let [stack @ .., rows, cols] = shape else {
            return Self { stacked: 1, rows: 1, cols: weight.len(), transposed: false };
        };
        let (rows, cols) = if transposed { (*cols, *rows) } else { (*rows, *cols) };
        Self { stacked: stack.iter().product(), rows, cols, transposed }
    }

    /// `[rows, cols]`, or `[stacked, rows, cols]` of a weight with more axes.
    fn shape(self, axes: usize) -> Vec<usize> {
        match axes {
            2 => vec![self.rows, self.cols],
            _ => vec![self.stacked, self.rows, self.cols],
        }
    }
}

/// The facts by which a weight is judged by itself.
struct Judge<'j> {
    architecture: Architecture<'j>,
    choice: &'j Choice,
    dialect: &'static dyn Dialect,
    writer: &'static dyn Write,
    names: Names,
    keep: Vec<Matcher>,
    only: Vec<Matcher>,
    layers: &'j Layers,
}

impl Judge<'_> {
    /// Finds a reason to keep a weight. `exception` is the one that is about it, with the
    /// place of the name that is.
    fn keeps(&self, weight: &Weight<'_>, exception: Option<(usize, usize)>) -> Option<Reason> {
        if let Some(reason) = unfit(weight) {
            return Some(reason);
        }
        let hit = |matchers: &[Matcher]| matchers.iter().position(|matcher| hits(matcher, weight));
        if let Some(at) = hit(&self.keep) {
            return Some(Reason::Asked(self.choice.keep[at].clone()));
        }
        if let Some(layer) = self.layers.keeps(&weight.name) {
            return Some(Reason::Layer(layer));
        }
        if self.only.is_empty() {
            if let Some(reason) = self.names.keeps(weight) {
                return Some(reason);
            }
            // Dialects with stacked matrices store them in either order of axes.
            let matrices = Matrices::in_architecture(self.architecture, weight);
            let turned = matrices.transposed && weight.shape().len() == 2;
            if turned && !self.writer.turns() {
                return Some(Reason::Transposed(self.dialect.name()));
            }
        } else if hit(&self.only).is_none() {
            return Some(Reason::NotAsked);
        }
        let Some((format, block_size)) = self.choice.becomes(exception.map(|(at, _)| at)) else {
            let name = exception.map(|(at, name)| self.choice.exceptions[at].names[name].clone());
            return Some(Reason::Asked(name.unwrap_or_default()));
        };
        let cols = Matrices::in_architecture(self.architecture, weight).cols;
        let of = self.writer.columns(format, block_size);
        (!cols.is_multiple_of(of)).then_some(Reason::Columns { cols, of })
    }
}

pub(crate) fn matchers(texts: &[String]) -> Result<Vec<Matcher>, CheckpointError> {
    texts.iter().map(|text| Pattern::parse(text, Syntax::Both).matcher()).collect()
}

/// Returns true if a pattern is about a weight, or the module that it is the weight of.
pub(crate) fn hits(matcher: &Matcher, weight: &Weight<'_>) -> bool {
    matcher.matches(&weight.name) || matcher.matches(weight.module())
}

/// A pattern that matches nothing is a mistake.
pub(crate) fn check_matches(
    model: &Model<'_>,
    list: &'static str,
    texts: &[String],
    matchers: &[Matcher],
) -> Result<(), CheckpointError> {
    let misses = |matcher: &Matcher| !model.weights.iter().any(|weight| hits(matcher, weight));
    match matchers.iter().position(misses) {
        None => Ok(()),
        Some(at) => Err(no_match(model, list, &texts[at])),
    }
}

fn no_match(model: &Model<'_>, list: &'static str, pattern: &str) -> CheckpointError {
    let names: Vec<&str> = model.weights.iter().map(|weight| weight.name.as_str()).collect();
    let matches = |found: &str| {
        let matcher = Pattern::parse(found, Syntax::Both).matcher();
        matcher.is_ok_and(|matcher| model.weights.iter().any(|weight| hits(&matcher, weight)))
    };
    let nearest = nearest::nearest(&names, pattern, matches);
    let first = names.first().copied().unwrap_or("none").to_owned();
    let (pattern, tensors) = (pattern.to_owned(), names.len());
    CheckpointError::NoMatch { list, pattern, tensors, first, nearest }
}

/// For each weight the last exception that is about it, with the place of the first of its names
/// that is.
///
/// Exact names are looked up: a recipe of what was done to a model has one for every weight.
fn exceptions_of(
    model: &Model<'_>,
    exceptions: &[Exception],
) -> Result<Vec<Option<(usize, usize)>>, CheckpointError> {
    let mut exact: HashMap<String, Vec<(usize, usize)>> = HashMap::new();
    let mut others: Vec<((usize, usize), Matcher)> = Vec::new();
    // Names that no weight has.
    let mut idle = BTreeSet::new();
    for (at, Exception { names, becomes }) in exceptions.iter().enumerate() {
        if let Some((format, block_size)) = becomes {
            format.check_block_size(*block_size)?;
        }
        for (name, text) in names.iter().enumerate() {
            idle.insert((at, name));
            match Pattern::parse(text, Syntax::Both) {
                Pattern::Exact(text) => exact.entry(text).or_default().push((at, name)),
                pattern => others.push(((at, name), pattern.matcher()?)),
            }
        }
    }
    let mut found: Vec<Option<(usize, usize)>> = Vec::with_capacity(model.weights.len());
    for weight in &model.weights {
        let mut last: Option<(usize, usize)> = None;
        let same = [weight.name.as_str(), weight.module()];
        let same = same.into_iter().filter_map(|name| exact.get(name)).flatten();
        let alike = others.iter().filter(|(_, matcher)| hits(matcher, weight));
        for &place in same.chain(alike.map(|(place, _)| place)) {
            idle.remove(&place);
            last = last.into_iter().chain([place]).max_by_key(|&(at, name)| (at, Reverse(name)));
        }
        found.push(last);
    }
    match idle.first() {
        None => Ok(found),
        Some(&(at, name)) => Err(no_match(model, "weights", &exceptions[at].names[name])),
    }
}

/// Finds a reason that no choice of a user overrides.
fn unfit(weight: &Weight<'_>) -> Option<Reason> {
    match &weight.value {
        Value::Fp4(fp4) => return Some(Reason::Already(fp4.format.to_string())),
        Value::Plain(tensor) if !tensor.dtype.is_float() => {
            return Some(Reason::Dtype(tensor.dtype.to_string()));
        }
        Value::Plain(_) | Value::Fp8(_) => {}
    }
    if weight.pre_quant_scale.is_some() {
        return Some(Reason::Smoothed);
    }
    let shape = weight.shape();
    if shape.len() > 3 && weight.name.ends_with(".weight") {
        return Some(Reason::Preset(CONVOLUTION));
    }
    match shape.len() {
        2 | 3 => shape.contains(&0).then_some(Reason::Empty),
        _ => Some(Reason::NoMatrix),
    }
}

/// If one of a family is kept, all are.
pub(crate) fn keep_together(
    model: &Model<'_>,
    families: &[Vec<usize>],
    reasons: &mut [Option<Reason>],
) {
    for members in families {
        let Some(&kept) = members.iter().find(|&&at| reasons[at].is_some()) else { continue };
        for &at in members {
            reasons[at].get_or_insert_with(|| Reason::With(model.weights[kept].name.clone()));
        }
    }
}

/// A weight that becomes something else than another one of its family, of those that are
/// quantized.
fn of_another_format(
    families: &[Vec<usize>],
    reasons: &[Option<Reason>],
    becomes: impl Fn(usize) -> Option<(Fp4Format, usize)>,
) -> Option<usize> {
    families.iter().find_map(|members| {
        let mut chosen = members.iter().copied().filter(|&at| reasons[at].is_none());
        let first = becomes(chosen.next()?);
        chosen.find(|&at| becomes(at) != first)
    })
}

/// The weights that are quantized, those of a family together if they share a tensor scale, which
/// is asked of the first and another one.
fn groups(
    preset: Preset,
    shares: impl Fn(usize, usize) -> bool,
    families: &[Vec<usize>],
    reasons: &[Option<Reason>],
    model: &Model<'_>,
) -> Vec<Vec<usize>> {
    let architecture = Architecture::of(model);
    let mut family: HashMap<usize, usize> = HashMap::new();
    for (number, members) in families.iter().enumerate() {
        let of = |at: usize| Matrices::in_architecture(architecture, &model.weights[at]);
        let first = members.iter().copied().find(|&at| reasons[at].is_none());
        for &at in members {
            // What differs in columns has no common input; the order of their rows is the file's.
            // Stacked matrices have a scale each, and stay alone.
            let like = first.is_some_and(|first| {
                let (a, b) = (of(first), of(at));
                let single = |matrices: Matrices| matrices.stacked == 1 && !matrices.transposed;
                a.cols == b.cols && single(a) && single(b) && shares(first, at)
            });
            if like && preset.shares(&model.weights[at].name) {
                family.insert(at, number);
            }
        }
    }
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut known: HashMap<usize, usize> = HashMap::new();
    for at in (0..reasons.len()).filter(|&at| reasons[at].is_none()) {
        match family.get(&at) {
            Some(&number) => {
                let group = *known.entry(number).or_insert_with(|| {
                    groups.push(Vec::new());
                    groups.len() - 1
                });
                groups[group].push(at);
            }
            None => groups.push(vec![at]),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::tensor::Tensor;

    fn choice(dialect: &str) -> Choice {
        Choice { dialect: dialect.to_owned(), ..Choice::all(Fp4Format::NvFp4, 16) }
    }

    fn exception(name: &str, becomes: Option<(Fp4Format, usize)>) -> Exception {
        Exception { names: vec![name.to_owned()], becomes }
    }

    /// A layer of these matrices `[1, 64]`.
    fn layer(names: &[&str]) -> Model<'static> {
        let weight = |name: &&str| {
            let name = format!("layers.0.{name}.weight");
            let tensor = Tensor::new(name.clone(), Dtype::BF16, vec![1, 64], vec![0; 128]);
            Weight::new(name, 0, Value::Plain(tensor.expect("a shape")))
        };
        Model { weights: names.iter().map(weight).collect(), ..Model::default() }
    }

    #[test]
    fn a_block_size_that_the_format_does_not_have_is_an_error() {
        let of = |block_size| {
            let all = Choice { block_size, ..choice("modelopt") };
            let exceptions = vec![exception("*", Some((Fp4Format::MxFp4, block_size)))];
            let some = Choice { exceptions, ..choice("modelopt") };
            let model = layer(&["up_proj"]);
            [all, some].map(|choice| Selection::of(&model, &choice))
        };
        assert!(of(16).iter().all(Result::is_ok));
        for block_size in [0, 7, 64] {
            for selection in of(block_size) {
                let error = selection.expect_err("no such block size").to_string();
                let says = format!("block size {block_size} is not one of");
                assert!(error.contains(&says), "{error}");
            }
        }
    }

    #[test]
    fn the_last_exception_about_a_weight_counts() {
        let model = layer(&["up_proj", "down_proj", "o_proj", "router"]);
        let small = Some((Fp4Format::MxFp4, 32));
        let exceptions = vec![
            exception("*.layers.*", None),
            exception("layers.*", small),
            exception("*_proj", Some((Fp4Format::NvFp4, 32))),
            exception("layers.0.down_proj.weight", small),
            exception("re:.*\\.o_proj$", None),
        ];
        let all = Choice { exceptions, ..choice("modelopt") };
        let error = Selection::of(&model, &all).expect_err("a pattern of nothing").to_string();
        assert!(error.starts_with("`weights` pattern `*.layers.*` matches none"), "{error}");

        let some = Choice { exceptions: all.exceptions[1..].to_vec(), ..all };
        let selection = Selection::of(&model, &some).expect("a selection");
        let kinds: Vec<_> = selection.outline(&model).weights.iter().map(Weight::kind).collect();
        assert_eq!(kinds, ["nvfp4 32", "mxfp4 32", "BF16", "BF16"]);
        assert_eq!(selection.exceptions, [Some(1), Some(2), Some(3), Some(0)]);
        let asked = Reason::Asked("re:.*\\.o_proj$".to_owned());
        assert_eq!(selection.decisions[2], Decision::Keep(asked));
        assert_eq!(selection.decisions[3], Decision::Keep(Reason::Preset("a router")));
    }

    #[test]
    fn the_first_name_of_a_weight_counts_and_every_name_is_that_of_one() {
        let model = layer(&["up_proj", "down_proj"]);
        let of = |names: [&str; 3]| {
            let names = names.map(str::to_owned).into();
            let exceptions = vec![Exception { names, becomes: None }];
            Selection::of(&model, &Choice { exceptions, ..choice("modelopt") })
        };
        let kept = of(["*.up_proj", "layers.0.up_proj.weight", "layers.0.down_proj"]);
        let asked = |name: &str| Decision::Keep(Reason::Asked(name.to_owned()));
        let expected = [asked("*.up_proj"), asked("layers.0.down_proj")];
        assert_eq!(kept.expect("a selection").decisions, expected);
        let error = of(["*", "layers.0.up_proj", "layers.0.o_proj"]).expect_err("no such name");
        let says = "`weights` pattern `layers.0.o_proj` matches none of 2";
        assert!(error.to_string().starts_with(says), "{error}");
    }

    /// A weight of zeros.
    fn weight(name: &str, shape: &[usize]) -> Weight<'static> {
        let bytes = vec![0; 2 * shape.iter().product::<usize>()];
        let tensor = Tensor::new(name.to_owned(), Dtype::BF16, shape.to_vec(), bytes);
        Weight::new(name.to_owned(), 0, Value::Plain(tensor.expect("a shape")))
    }

    /// The error for a choice that quantizes nothing.
    fn nothing(model: &Model<'_>, only: &[&str], dialect: &str) -> String {
        let only = only.iter().map(|name| (*name).to_owned()).collect();
        let selection = Selection::of(model, &Choice { only, ..choice(dialect) });
        let error = selection.expect("a selection").check_not_empty(model);
        error.expect_err("nothing is selected").to_string()
    }

    #[test]
    fn the_remedy_for_an_empty_selection_fits_its_reason() {
        let model = layer(&["q_proj", "k_proj", "v_proj", "embed_tokens"]);
        let error = nothing(&model, &["*.q_proj"], "modelopt");
        let says = "name `k_proj` and `v_proj` with `only` too, or set `together = false`";
        assert!(error.contains(says), "{error}");

        let of = |weights: &[(&str, &[usize])]| Model {
            weights: weights.iter().map(|(name, shape)| weight(name, shape)).collect(),
            ..Model::default()
        };
        let norms = of(&[("a.norm.weight", &[64]), ("a.o_proj.weight", &[1, 64])]);
        let error = nothing(&norms, &["*norm*"], "modelopt");
        assert!(error.ends_with("floats with `only`, such as `a.o_proj`"), "{error}");

        for (cols, dialect, says) in [
            (48, "gguf", "; write nvfp4 in modelopt or "),
            (33, "modelopt", "33 columns are not a multiple of 16; choose other weights: no "),
            (1, "modelopt", ": 1 column is not a multiple of 16; "),
            (0, "modelopt", ": has no values; choose a model with matrices of floats"),
        ] {
            let error = nothing(&of(&[("a.o_proj.weight", &[2, cols])]), &[], dialect);
            assert!(error.contains(says), "{error}");
        }
        let wide = Choice { block_size: 32, ..choice("modelopt") };
        assert_eq!(wide.dividing(48), "choose nvfp4 in blocks of 16");
    }

    #[test]
    fn more_layers_to_keep_than_there_are_are_warned_of_and_one_reason() {
        let names = ["layers.0.o_proj.weight", "layers.1.o_proj.weight", "vision.o_proj.weight"];
        let weights = names.map(|name| weight(name, &[1, 64])).into();
        let model = Model { weights, ..Model::default() };
        let of = |first_layers, last_layers| {
            let choice = Choice { first_layers, last_layers, ..choice("modelopt") };
            Selection::of(&model, &choice).expect("a selection")
        };
        let layers = |selection: &Selection| {
            let mut all = selection.warnings.iter().map(ToString::to_string);
            all.find(|warning| warning.starts_with("high precision"))
        };
        assert_eq!(layers(&of(1, 1)), None);
        let says = "high precision for 99 of the layers: the model has 2; ask for fewer";
        assert_eq!(layers(&of(99, 0)).as_deref(), Some(says));
        let error = of(9, 0).check_not_empty(&model).expect_err("nothing").to_string();
        let says = "`layers.0.o_proj.weight`: layer 0 stays in high precision (and 1 more); ";
        assert!(error.contains(says), "{error}");
        let says = "; keep fewer layers in high precision: the model has 2";
        assert!(error.ends_with(says), "{error}");
    }

    #[test]
    fn weights_that_three_axes_alone_make_stacks_are_warned_of() {
        let names = ["layers.0.mixer.table.weight", "layers.1.mixer.table.weight"];
        let of = |kind: &str, only: &[&str]| {
            let config = Some(serde_json::json!({"model_type": kind}));
            let weights = names.map(|name| weight(name, &[2, 1, 64])).into();
            let model = Model { weights, config, ..Model::default() };
            let only = only.iter().map(|name| (*name).to_owned()).collect();
            Selection::of(&model, &Choice { only, ..choice("modelopt") }).expect("a selection")
        };
        let first = names[0].to_owned();
        let stacks = Warning::StacksByShape { weights: 2, first };
        assert_eq!(&of("unheard_of", &[]).warnings[1..], std::slice::from_ref(&stacks));
        assert_eq!(of("llama", &["*.table"]).warnings, std::slice::from_ref(&stacks));
        assert_eq!(of("llama", &[]).warnings, []);
        let says = "`layers.0.mixer.table.weight` (and 1 more): taken for a stack of matrices";
        assert!(stacks.to_string().starts_with(says), "{stacks}");
    }

    #[test]
    fn one_of_a_pair_of_miles_is_kept_alone_unless_the_user_wants_them_together() {
        let pair = layer(&["mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"]);
        let config = Some(serde_json::json!({"num_hidden_layers": 1}));
        let model = Model { config, ..pair };
        let of = |together| {
            let (preset, keep) = (Preset::Miles, vec!["*.up_proj".to_owned()]);
            let selection = Choice { preset, keep, together, ..choice("miles") };
            Selection::of(&model, &selection).expect("a selection").groups
        };
        assert_eq!(of(None), [[0]]);
        assert_eq!(of(Some(false)), [[0]]);
        assert!(of(Some(true)).is_empty());
    }

    #[test]
    fn layers_that_run_as_one_have_one_format_unless_the_user_knows_better() {
        let model = layer(&["q_proj", "k_proj", "v_proj"]);
        let of = |name, becomes, dialect, together| {
            let exceptions = vec![exception(name, becomes)];
            Selection::of(&model, &Choice { exceptions, together, ..choice(dialect) })
        };
        let small = Some((Fp4Format::MxFp4, 32));
        for (dialect, together) in [("modelopt", None), ("gguf", Some(true))] {
            let error = of("*.k_proj", small, dialect, together).expect_err("another format");
            let CheckpointError::CannotHold { dialect: by, weight, .. } = &error else {
                panic!("{error}");
            };
            assert_eq!((*by, weight.as_str()), (dialect, "layers.0.k_proj.weight"));
            // With one of them all are kept.
            let kept = of("*.k_proj", None, dialect, together).expect("a selection");
            assert!(kept.groups.is_empty());
            let all = of("*_proj", Some((Fp4Format::NvFp4, 32)), dialect, together);
            assert_eq!(all.expect("a selection").groups, [[0, 1, 2]]);
        }
        for (dialect, together) in [("gguf", None), ("modelopt", Some(false))] {
            let mixed = of("*.k_proj", small, dialect, together).expect("a selection");
            assert_eq!(mixed.groups, [[0], [1], [2]]);
            let kept = of("*.k_proj", None, dialect, together).expect("a selection");
            assert_eq!(kept.groups, [[0], [2]]);
        }
    }
}
