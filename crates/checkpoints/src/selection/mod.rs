//! Which weights of a model become FP4, and which of them go together: by name and shape alone,
//! before a byte of them is read.
//!
//! [`burn_fp4_policy`] decides. This folder supplies the facts about weights of files: their roles
//! and families in the architecture, their layers, and the constraints of a dialect.

mod layers;
mod warning;

use std::cmp::Reverse;

use burn_fp4_formats::Fp4Format;
use burn_fp4_policy::{
    Constraints, Decision, Family, Fused, Pattern, Patterns, Policy, Preset, Reason, Recipe, Role,
    WeightInfo,
};

use crate::architecture::{Architecture, CONVOLUTION, Roles};
use crate::dialect::{self, Dialect, ScaleConvention, Write};
use crate::error::{CheckpointError, Remedy};
use crate::fp4::Fp4Weight;
use crate::weight::{Model, Quantization, Value, Weight};
use layers::Layers;
pub(crate) use layers::missing as missing_layers;
pub use warning::Warning;

/// The dialect to write where none is chosen.
pub const DEFAULT: &str = "compressed-tensors";

/// Reasons that an error tells.
const SHOWN: usize = 5;

/// The decision about every weight of a model.
///
/// ```
/// use burn_fp4_checkpoints::selection::{Selection, dialect_of};
/// use burn_fp4_checkpoints::{Dtype, Model, Tensor, Value, Weight};
/// use burn_fp4_policy::{Policy, Recipe};
///
/// # let weights = ["embed_tokens.weight", "up_proj.weight"].map(|name| {
/// #     let tensor = Tensor::new(name, Dtype::BF16, vec![1, 16], vec![0; 32]).expect("a shape");
/// #     Weight::new(name, 0, Value::Plain(tensor))
/// # });
/// let model = Model { weights: weights.into(), ..Model::default() };
/// let recipe = Recipe { dialect: Some("modelopt".to_owned()), ..Recipe::default() };
/// let policy = Policy::new(recipe).expect("choices that go together");
/// assert_eq!(dialect_of(&policy), "modelopt");
/// let mut selection = Selection::of(&model, &policy)?;
/// selection.check_not_empty(&model)?;
/// selection.keep_unheld(&model)?; // ModelOpt has a place for all of them
/// assert_eq!((&selection.groups[..], selection.has_tensor_scales()), (&[vec![1]][..], true));
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
    /// Reasons to look at the decisions before the result is used.
    pub warnings: Vec<Warning>,
    /// Quantized weights that only their names and shapes show to be linear layers, as the
    /// architecture is not known and others have other names.
    pub guessed: Vec<usize>,
    policy: Policy,
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
    /// An unknown dialect or one that is only read, a preset that needs a number of layers where
    /// there is none, and [`CheckpointError::Policy`] for patterns that match nothing and choices
    /// that do not go together.
    pub fn of(model: &Model<'_>, policy: &Policy) -> Result<Self, CheckpointError> {
        let (dialect, writer) = writer_of(policy)?;
        let layers = Layers::of(model, policy)?;
        let architecture = Architecture::of(model);
        // Presets alone ask for roles.
        let roles = match policy.recipe().only.is_empty() {
            true => Some(architecture.roles()?),
            false => None,
        };
        let info = |weight| info(architecture, roles.as_ref(), &layers, weight);
        let weights: Vec<WeightInfo<'_>> = model.weights.iter().map(info).collect();
        policy.check_used(&weights)?;
        let scaled = writer.scale_support().tensor_scale != ScaleConvention::Folded;
        let constraints = Constraints {
            dialect: dialect.name(),
            columns: &|format, block_size| writer.columns(format, block_size),
            fused: if writer.fuses() { Fused::Together } else { Fused::Apart },
            turns: writer.turns(),
            tensor_scales: scaled,
        };
        let decided = policy.decide(&weights, &constraints)?;
        let (decisions, groups) = (decided.weights, decided.groups);
        let quantized = || groups.iter().flatten().copied();
        let warnings = [
            Warning::of_architecture(model, architecture, policy),
            Warning::of_stacks(model, architecture, quantized())?,
            Warning::of_numbers(model, architecture, &decisions)?,
            Warning::of_layers(&layers),
        ];
        let mut warnings: Vec<Warning> = warnings.into_iter().flatten().collect();
        let by_names = matches!(warnings.first(), Some(Warning::UnknownArchitecture { .. }));
        let module = |at: &usize| model.weights[*at].module();
        let guessed = quantized().filter(|at| by_names && !architecture.is_linear(module(at)));
        let guessed = guessed.collect();
        if !groups.is_empty() {
            warnings.extend(Warning::of_only(policy, model, &decisions)?);
        }
        for table in decided.idle {
            warnings.push(Warning::of_idle(&policy.recipe().weights, table, model, &decisions)?);
        }
        let policy = policy.clone();
        Ok(Self { decisions, groups, warnings, guessed, policy, layers, scaled })
    }

    /// Keeps every weight that the dialect has no place for, such as stacked matrices, for
    /// [`Reason::CannotHold`].
    ///
    /// # Errors
    /// [`CheckpointError::CannotHold`] with the first of them, in which writing would end. All of
    /// them are kept nonetheless, so that a plan can show them.
    pub fn keep_unheld(&mut self, model: &Model<'_>) -> Result<(), CheckpointError> {
        let by = writer_of(&self.policy)?;
        let outline = self.outline(model);
        let mut first = Ok(());
        for (weight, decision) in outline.weights.iter().zip(&mut self.decisions) {
            let Decision::Quantize { .. } = decision else { continue };
            let Err(error) = dialect::tensors(by, weight) else { continue };
            let CheckpointError::CannotHold { dialect, what, .. } = error else {
                return Err(error);
            };
            *decision = Decision::Keep(Reason::CannotHold { dialect, what });
            first = first.and(Err(error));
        }
        let quantized = |at: &usize| matches!(self.decisions[*at], Decision::Quantize { .. });
        self.groups.iter_mut().for_each(|group| group.retain(quantized));
        self.groups.retain(|group| !group.is_empty());
        for (number, members) in self.groups.iter().enumerate() {
            for &at in members {
                if let Decision::Quantize { group, .. } = &mut self.decisions[at] {
                    *group = number;
                }
            }
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
        let only = Patterns::new(&self.policy.recipe().only)?;
        let wanted = |weight: &Weight<'_>| match only.is_empty() {
            true => weight.shape().len() >= 2,
            false => only.first(weight.names()).is_some(),
        };
        let kept = |(weight, decision): (&Weight<'_>, &Decision)| match decision {
            Decision::Keep(reason) if wanted(weight) => Some((weight.name.clone(), reason.clone())),
            Decision::Keep(_) | Decision::Quantize { .. } => None,
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
    ) -> Result<Remedy, CheckpointError> {
        let asked = !self.policy.recipe().only.is_empty();
        Ok(match reason {
            Reason::Columns { cols, .. } => dividing(&self.policy, *cols).into(),
            Reason::CannotHold { .. } => "choose another dialect".to_owned().into(),
            Reason::Stacked => {
                format!("choose the preset `{}` and the dialect `modelopt`", Preset::ExpertsOnly)
                    .into()
            }
            Reason::Transposed(_) => {
                let turns = |name: &&str| dialect::writer(name).is_ok_and(|(_, by)| by.turns());
                let names: Vec<_> = dialect::written().into_iter().filter(turns).collect();
                let write = format!("write the dialect {}", names.join(" or "));
                Remedy::with_only(format!("{write}, or name weights with "), "")
            }
            Reason::Smoothed => {
                "start from the model before its inputs were scaled".to_owned().into()
            }
            Reason::Asked(pattern) => format!("leave `{pattern}` out of what is kept").into(),
            Reason::Layer(_) => {
                let count = self.layers.count();
                format!("keep fewer layers in high precision: the model has {count}").into()
            }
            Reason::With(_) => self.remedy_together(model, weight),
            Reason::Already(_) => "choose other weights".to_owned().into(),
            Reason::Preset(CONVOLUTION) | Reason::NoMatrix | Reason::Empty | Reason::Dtype(_)
                if !asked =>
            {
                "choose a model with matrices of floats".to_owned().into()
            }
            Reason::Preset(_) if !asked && self.policy.preset() != Preset::default() => {
                let choose = format!("choose the preset `{}`", Preset::default());
                Remedy::with_only(format!("{choose}, or name weights with "), "")
            }
            Reason::Preset(_)
            | Reason::NoMatrix
            | Reason::Empty
            | Reason::Dtype(_)
            | Reason::NotAsked
            | Reason::Unlisted(_) => {
                let others = Recipe { only: Vec::new(), ..self.policy.recipe().clone() };
                let others = Policy::new(others).ok().and_then(|by| Self::of(model, &by).ok());
                let group = others.as_ref().and_then(|others| others.groups.first());
                let module = group.map(|group| model.weights[group[0]].module());
                let example = module.map(|module| format!(", such as `{module}`"));
                Remedy::with_only("name matrices of floats with ", example.unwrap_or_default())
            }
        })
    }

    /// Names the choice that makes a weight quantized whose neighbors are kept.
    fn remedy_together(&self, model: &Model<'_>, weight: &str) -> Remedy {
        let apart = "set `together = false` in a recipe";
        let families = families(model);
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
            [] => apart.to_owned().into(),
            others => Remedy::with_only(
                format!("name {} with ", others.join(" and ")),
                format!(" too, or {apart}"),
            ),
        }
    }

    /// Returns true if the dialect has a place for the tensor scales of formats that have them. In
    /// others they are 1.
    #[must_use]
    pub fn has_tensor_scales(&self) -> bool {
        self.scaled
    }

    /// Returns the model as it will be written, without the bytes of quantized weights.
    #[must_use]
    pub fn outline<'a>(&self, model: &Model<'a>) -> Model<'a> {
        let outline = |(at, weight): (usize, &Weight<'a>)| {
            let Decision::Quantize { scheme, .. } = &self.decisions[at] else {
                return weight.clone();
            };
            let (format, block_size) = (scheme.format(), scheme.block_size);
            let matrices = Matrices::of(model, weight);
            let mut fp4 = Fp4Weight::outline(
                format,
                block_size,
                matrices.shape(weight.shape().len()),
                matrices.transposed,
                self.scaled && format.row().tensor_scale,
            );
            fp4.hadamard = scheme.hadamard;
            Weight::new(weight.name.clone(), weight.file, Value::Fp4(fp4))
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

impl Matrices {
    /// Returns the matrices of a weight with two or more axes.
    #[must_use]
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

/// The weight as decisions are made about it.
fn info<'w>(
    architecture: Architecture<'_>,
    roles: Option<&Roles>,
    layers: &Layers,
    weight: &'w Weight<'_>,
) -> WeightInfo<'w> {
    let unfit = unfit(weight);
    let Matrices { cols, transposed, .. } = Matrices::in_architecture(architecture, weight);
    WeightInfo {
        name: &weight.name,
        module: weight.module(),
        role: roles.filter(|_| unfit.is_none()).map_or(Role::Linear, |roles| role(roles, weight)),
        feed_forward: roles.and_then(|roles| roles.feed_forward(weight.module())),
        unfit,
        fp8: matches!(weight.value, Value::Fp8(_)),
        layer: layers.of_weight(&weight.name),
        family: family(architecture, weight),
        shape: weight.shape(),
        cols,
        transposed,
    }
}

/// The role of a matrix.
fn role(roles: &Roles, weight: &Weight<'_>) -> Role {
    let name = &weight.name;
    let stacked = ["gate_up_proj", "gate_proj", "up_proj", "down_proj"];
    let stacked = stacked.iter().any(|end| name.ends_with(&format!("experts.{end}")));
    if !name.ends_with(".weight") && !stacked {
        return Role::Other("its name does not end in .weight");
    }
    roles.role(weight.module(), weight.shape().len())
}

fn family<'w>(architecture: Architecture<'_>, weight: &'w Weight<'_>) -> Option<Family<'w>> {
    architecture.family(weight.module()).filter(|_| weight.shape().len() >= 2)
}

/// The families of a model: weights by their places.
pub(crate) fn families(model: &Model<'_>) -> Vec<Vec<usize>> {
    let architecture = Architecture::of(model);
    burn_fp4_policy::families(model.weights.iter().map(|weight| family(architecture, weight)))
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

/// Returns the name of the dialect that a policy writes.
#[must_use]
pub fn dialect_of(policy: &Policy) -> &str {
    policy.recipe().dialect.as_deref().unwrap_or(DEFAULT)
}

/// # Errors
/// As [`dialect::writer`].
fn writer_of(
    policy: &Policy,
) -> Result<(&'static dyn Dialect, &'static dyn Write), CheckpointError> {
    dialect::writer(dialect_of(policy))
}

/// Names a format, or else dialects, whose blocks divide a number of columns.
fn dividing(policy: &Policy, cols: usize) -> String {
    let fits = |dialect: &str, format: Fp4Format| {
        dialect::writer(dialect).is_ok_and(|(_, writer)| {
            let columns = writer.columns(format, format.row().block_size);
            !writer.readers(format).is_empty() && cols.is_multiple_of(columns)
        })
    };
    let mut formats = Fp4Format::ALL;
    formats.sort_by_key(|format| *format != policy.base().format());
    if let Some(format) = formats.into_iter().find(|format| fits(dialect_of(policy), *format)) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::tensor::Tensor;

    /// A recipe for a dialect, of which the last lines are in TOML.
    fn of(model: &Model<'_>, dialect: &str, recipe: &str) -> Result<Selection, CheckpointError> {
        let text = format!("dialect = \"{dialect}\"\n{recipe}");
        let recipe = Recipe::parse(&text).expect("a recipe");
        Selection::of(model, &Policy::new(recipe).expect("choices that go together"))
    }

    fn entry(name: &str, choices: &str) -> String {
        format!("[[weights]]\nnames = ['{name}']\n{choices}\n")
    }

    const DENSE: &str = "format = 'dense'";

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
    fn the_last_entry_about_a_weight_counts() {
        let model = layer(&["up_proj", "down_proj", "o_proj", "router"]);
        let entries = [
            entry("*.layers.*", DENSE),
            entry("layers.*", "format = 'mxfp4'"),
            entry("*_proj", "block-size = 32"),
            entry("layers.0.down_proj.weight", "format = 'mxfp4'"),
            entry("re:.*\\.o_proj$", DENSE),
        ];
        let error = of(&model, "modelopt", &entries.concat()).expect_err("a pattern of nothing");
        let error = error.to_string();
        assert!(error.starts_with("`weights` pattern `*.layers.*` matches none"), "{error}");

        let selection = of(&model, "modelopt", &entries[1..].concat()).expect("a selection");
        let kinds: Vec<_> = selection.outline(&model).weights.iter().map(Weight::kind).collect();
        assert_eq!(kinds, ["nvfp4 32", "mxfp4 32", "BF16", "BF16"]);
        let asked = Reason::Asked("re:.*\\.o_proj$".to_owned());
        assert_eq!(selection.decisions[2], Decision::Keep(asked));
        assert_eq!(selection.decisions[3], Decision::Keep(Reason::Preset("a router")));
    }

    #[test]
    fn the_first_name_of_a_weight_counts_and_every_name_is_that_of_one() {
        let model = layer(&["up_proj", "down_proj"]);
        let of = |names: &str| {
            of(&model, "modelopt", &format!("[[weights]]\nnames = [{names}]\n{DENSE}\n"))
        };
        let kept = of("'*.up_proj', 'layers.0.up_proj.weight', 'layers.0.down_proj'");
        let asked = |name: &str| Decision::Keep(Reason::Asked(name.to_owned()));
        let expected = [asked("*.up_proj"), asked("layers.0.down_proj")];
        assert_eq!(kept.expect("a selection").decisions, expected);
        let error = of("'*', 'layers.0.up_proj', 'layers.0.o_proj'").expect_err("no such name");
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
        let selection = of(model, dialect, &format!("only = {only:?}"));
        let error = selection.expect("a selection").check_not_empty(model);
        error.expect_err("nothing is selected").to_string()
    }

    #[test]
    fn the_remedy_for_an_empty_selection_fits_its_reason() {
        let model = layer(&["q_proj", "k_proj", "v_proj", "embed_tokens"]);
        let error = nothing(&model, &["*.q_proj"], "modelopt");
        let says = "name `k_proj` and `v_proj` with `only` too, or set `together = false`";
        assert!(error.contains(says), "{error}");

        let model_of = |weights: &[(&str, &[usize])]| Model {
            weights: weights.iter().map(|(name, shape)| weight(name, shape)).collect(),
            ..Model::default()
        };
        let norms = model_of(&[("a.norm.weight", &[64]), ("a.o_proj.weight", &[1, 64])]);
        let error = nothing(&norms, &["*norm*"], "modelopt");
        assert!(error.ends_with("floats with `only`, such as `a.o_proj`"), "{error}");

        for (cols, dialect, says) in [
            (48, "gguf", "; write nvfp4 in modelopt or "),
            (33, "modelopt", "33 columns are not a multiple of 16; choose other weights: no "),
            (1, "modelopt", ": 1 column is not a multiple of 16; "),
            (0, "modelopt", ": has no values; choose a model with matrices of floats"),
        ] {
            let error = nothing(&model_of(&[("a.o_proj.weight", &[2, cols])]), &[], dialect);
            assert!(error.contains(says), "{error}");
        }
        let wide = "dialect = 'modelopt'\nblock-size = 32";
        let wide = Policy::new(Recipe::parse(wide).expect("a recipe")).expect("choices");
        assert_eq!(dividing(&wide, 48), "choose nvfp4 in blocks of 16");
    }

    #[test]
    fn more_layers_to_keep_than_there_are_are_warned_of_and_one_reason() {
        let names = ["layers.0.o_proj.weight", "layers.1.o_proj.weight", "vision.o_proj.weight"];
        let weights = names.map(|name| weight(name, &[1, 64])).into();
        let model = Model { weights, ..Model::default() };
        let of = |first, last| {
            let recipe = format!(
                "first-layers-high-precision = {first}\nlast-layers-high-precision = {last}"
            );
            of(&model, "modelopt", &recipe).expect("a selection")
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
            of(&model, "modelopt", &format!("only = {only:?}")).expect("a selection")
        };
        let stacks = Warning::StacksByShape { weights: names.map(str::to_owned).into() };
        assert_eq!(&of("unheard_of", &[]).warnings[1..], std::slice::from_ref(&stacks));
        assert_eq!(of("llama", &["*.table"]).warnings, std::slice::from_ref(&stacks));
        assert_eq!(of("llama", &[]).warnings, []);
        let says = "`layers.0.mixer.table.weight` (and 1 more): taken for a stack of matrices";
        assert!(stacks.to_string().starts_with(says), "{stacks}");
    }

    #[test]
    fn layers_of_integers_are_warned_of_and_other_integers_are_not() {
        let integers = |name: &str, shape: &[usize]| {
            let bytes = vec![0; shape.iter().product()];
            let tensor = Tensor::new(name.to_owned(), Dtype::I8, shape.to_vec(), bytes);
            Weight::new(name.to_owned(), 0, Value::Plain(tensor.expect("a shape")))
        };
        let names = ["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.qweight"];
        let others = ["model.embed_tokens.weight", "model.position_ids"];
        let weights = names.iter().chain(&others).map(|name| integers(name, &[2, 64]));
        let weights = weights.chain([weight("model.layers.0.self_attn.o_proj.weight", &[2, 64])]);
        let config = Some(serde_json::json!({"model_type": "llama"}));
        let model = Model { weights: weights.collect(), config, ..Model::default() };
        let selection = of(&model, "modelopt", "").expect("a selection");
        let weights = names.map(str::to_owned).into();
        let expected = Warning::UnreadNumbers { weights, dtype: "I8".to_owned() };
        assert_eq!(selection.warnings, [expected]);
        let says = "`model.layers.0.mlp.up_proj.weight` (and 1 more): stays, as its numbers are I8";
        assert!(selection.warnings[0].to_string().starts_with(says), "{:?}", selection.warnings);
    }

    #[test]
    fn one_of_a_pair_of_miles_is_kept_alone_unless_the_user_wants_them_together() {
        let pair = layer(&["mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"]);
        let config = Some(serde_json::json!({"num_hidden_layers": 1}));
        let model = Model { config, ..pair };
        let of = |together: &str| {
            let recipe = format!("preset = 'miles'\nkeep = ['*.up_proj']\n{together}");
            of(&model, "miles", &recipe).expect("a selection").groups
        };
        assert_eq!(of(""), [[0]]);
        assert_eq!(of("together = false"), [[0]]);
        assert!(of("together = true").is_empty());
        let unstated = Model { config: None, ..model.clone() };
        let recipe = Recipe::parse("dialect = 'miles'\npreset = 'miles'").expect("a recipe");
        let policy = Policy::new(recipe).expect("choices");
        let error = Selection::of(&unstated, &policy).expect_err("no number of layers").to_string();
        let says = "config.json: `num_hidden_layers`: expected the number of layers, which this \
                    preset needs, found nothing; state it there, or choose another preset";
        assert_eq!(error, says);
    }

    #[test]
    fn experts_in_one_tensor_that_the_converter_of_miles_copies_are_named() {
        let stack = weight("layers.0.mlp.experts.gate_up_proj", &[2, 4, 64]);
        let shared = weight("layers.0.mlp.shared_experts.up_proj.weight", &[4, 64]);
        let config = Some(serde_json::json!({"num_hidden_layers": 1}));
        let mut model = Model { weights: vec![stack, shared], config, ..Model::default() };
        let recipe = "preset = 'miles'";
        let some = of(&model, "miles", recipe).expect("a selection");
        assert_eq!(some.groups, [[1]]);
        assert_eq!(some.decisions[0], Decision::Keep(Reason::Stacked));
        assert!(Reason::Stacked.is_unmet(), "a warning names it");
        model.weights.truncate(1);
        let none = of(&model, "miles", recipe).expect("a selection");
        let error = none.check_not_empty(&model).expect_err("nothing is selected").to_string();
        let says = "`layers.0.mlp.experts.gate_up_proj`: stacked experts, which the converter of \
                    miles copies; choose the preset `experts-only` and the dialect `modelopt`";
        assert!(error.ends_with(says), "{error}");
    }

    #[test]
    fn patterns_that_quantize_nothing_are_warned_of_where_others_do() {
        let layer = layer(&["o_proj", "up_proj"]);
        let mut weights = layer.weights;
        weights.push(weight("layers.0.norm.weight", &[64]));
        let model = Model { weights, ..Model::default() };
        let warned = |recipe: &str| {
            let selection = of(&model, "modelopt", recipe).expect("a selection");
            selection.warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let says = "`only` pattern `*norm*`: quantizes no weight: `layers.0.norm.weight` stays \
                    (not a matrix); remove the pattern, or name another matrix with it";
        assert_eq!(warned("only = ['*.o_proj', '*norm*']"), [says]);
        let says = "`only` pattern `*.up_proj`: quantizes no weight: `layers.0.up_proj.weight` \
                    stays (asked to keep `*.up_*`); remove";
        let found = warned("only = ['*.o_proj', '*.up_proj']\nkeep = ['*.up_*']");
        assert!(found.len() == 1 && found[0].starts_with(says), "{found:?}");
        assert!(warned("only = ['*']").is_empty());
    }

    #[test]
    fn layers_that_run_as_one_have_one_format_unless_the_user_knows_better() {
        let model = layer(&["q_proj", "k_proj", "v_proj"]);
        let of = |name, choices, dialect, together: &str| {
            of(&model, dialect, &format!("{together}\n{}", entry(name, choices)))
        };
        let small = "format = 'mxfp4'";
        for (dialect, together) in [("modelopt", ""), ("gguf", "together = true")] {
            let error = of("*.k_proj", small, dialect, together).expect_err("another format");
            let says = format!("`layers.0.k_proj.weight`: the dialect `{dialect}` cannot hold");
            assert!(error.to_string().starts_with(&says), "{error}");
            // With one of them all are kept.
            let kept = of("*.k_proj", DENSE, dialect, together).expect("a selection");
            assert!(kept.groups.is_empty());
            let all = of("*_proj", "block-size = 32", dialect, together);
            assert_eq!(all.expect("a selection").groups, [[0, 1, 2]]);
            let error = of("*.k_proj", "method = 'amax'", dialect, together);
            let error = error.expect_err("another method").to_string();
            assert!(error.contains("share a tensor scale; choose the same method"), "{error}");
        }
        for (dialect, together) in [("gguf", ""), ("modelopt", "together = false")] {
            let mixed = of("*.k_proj", small, dialect, together).expect("a selection");
            assert_eq!(mixed.groups, [[0], [1], [2]]);
            let kept = of("*.k_proj", DENSE, dialect, together).expect("a selection");
            assert_eq!(kept.groups, [[0], [2]]);
        }
    }
}
