//! One walk over a module that decides about every float parameter.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::{Bool, DType, Device, Int, Shape, Tensor};
use burn_fp4_ops::{Fp4Layout, Fp4Scheme, OpsError, Products, TensorScaling, Why};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use crate::fake_quant::FakeQuantSettings;
use crate::report::{ChosenBy, Outcome, ParameterReport, Reason};
use crate::{FakeQuantWeight, Fp4Config, Fp4Error, Indivisible, PackedWeight, Unused};

/// A float parameter as the walk found it.
#[derive(Debug, Clone)]
pub(crate) struct Parameter {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    /// Name of the struct that holds it, such as `Linear`.
    pub(crate) container: String,
    pub(crate) shape: Vec<usize>,
    /// Known after [`Walk::over_values`].
    pub(crate) dtype: Option<DType>,
    /// Path of the outermost list it lies in, and where in the list.
    list: Option<(String, usize)>,
    /// Name of what is attached to it.
    pub(crate) reparameterization: Option<String>,
    /// Whether it belongs to something attached to another parameter.
    pub(crate) inside_reparameterization: bool,
    /// How it is fake-quantized.
    pub(crate) fake_quantized: Option<FakeQuantSettings>,
    /// Bytes of codes and scales, if it is packed.
    packed_bytes: usize,
}

impl Parameter {
    /// With the shape and dtype that its values are found to have.
    pub(crate) fn with_values(self, shape: &[usize], dtype: DType) -> Self {
        Self { shape: shape.to_vec(), dtype: Some(dtype), ..self }
    }

    /// The dtype of a parameter whose value was looked at.
    pub(crate) fn stored_dtype(&self) -> DType {
        self.dtype.unwrap_or(DType::F32)
    }

    /// Bytes that it takes as it is.
    pub(crate) fn bytes_now(&self) -> usize {
        match self.packed_bytes {
            0 => self.bytes(),
            // One stored value stands for the shape.
            packed => packed + self.stored_dtype().size(),
        }
    }

    /// Bytes of its dense values.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.stored_dtype().size()
    }

    /// Why nothing can be attached to it, if something is.
    pub(crate) fn attached(&self) -> Option<Reason> {
        if self.inside_reparameterization {
            return Some(Reason::PartOfReparameterization);
        }
        self.reparameterization.as_ref().map(|name| match name == PackedWeight::NAME {
            true => Reason::AlreadyQuantized,
            false => Reason::Reparameterized { name: name.clone() },
        })
    }

    /// What becomes of products and lookups once it is packed along an axis: layers of this crate
    /// do what those of Burn cannot, and embeddings look up rows.
    pub(crate) fn products(&self, by_burn: &Products, axis: usize) -> Products {
        use Products::Dequantized;

        match (self.container.as_str(), axis, by_burn) {
            ("Fp4Linear", 0, Dequantized(Why::Host)) => Products::FromCodes,
            ("Fp4Embedding", 1, Dequantized(Why::Host | Why::NotInitialized)) => Products::Lookups,
            ("Embedding" | "Fp4Embedding", 0, _) => Dequantized(Why::Axis { axis }),
            _ => by_burn.clone(),
        }
    }

    /// What is reported of it.
    pub(crate) fn report(&self, outcome: Outcome, bytes_after: usize) -> ParameterReport {
        ParameterReport {
            path: self.path.clone(),
            container: self.container.clone(),
            shape: self.shape.clone(),
            dtype: format!("{:?}", self.stored_dtype()).to_lowercase(),
            outcome,
            bytes_before: self.bytes(),
            bytes_after,
        }
    }
}

/// What a parameter holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Float,
    Int,
    Bool,
}

/// A parameter of any kind, as a record has to fit it.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub(crate) path: String,
    pub(crate) kind: Kind,
    /// That of the stored value, or of the one that it is to be initialized with.
    pub(crate) shape: Vec<usize>,
    pub(crate) device: Device,
}

/// Every parameter of a module, in its order.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    stack: Vec<(String, String)>,
    values: bool,
    pub(crate) parameters: Vec<Parameter>,
    /// Parameters of every kind.
    pub(crate) stored: Vec<Stored>,
}

impl Walk {
    /// Looks at names only: a parameter that is not initialized yet stays so.
    pub(crate) fn over<M: Module>(module: &M) -> Self {
        let mut walk = Self::default();
        module.visit(&mut walk);
        walk
    }

    /// Looks at shapes and dtypes, which initializes every parameter.
    pub(crate) fn over_values<M: Module>(module: &M) -> Self {
        let mut walk = Self { values: true, ..Self::default() };
        module.visit(&mut walk);
        walk
    }

    fn store(&mut self, kind: Kind, shape: Shape, device: Device) {
        self.stored.push(Stored { path: self.path(), kind, shape: shape.to_vec(), device });
    }

    fn path(&self) -> String {
        let names: Vec<_> = self.stack.iter().map(|(name, _)| name.as_str()).collect();
        names.join(".")
    }
}

impl ModuleVisitor for Walk {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        let inside = self.stack.iter().any(|(_, container)| container == REPARAMETERIZATION);
        if container_type == REPARAMETERIZATION && !inside {
            // What is attached to a parameter is visited right after it.
            let parameter = self.parameters.last_mut().expect("it is attached to a parameter");
            parameter.reparameterization = Some(name.to_owned());
        }
        if let Some(settings) = FakeQuantWeight::settings_of(container_type) {
            let parameter = self.parameters.last_mut().expect("it is attached to a parameter");
            parameter.fake_quantized = Some(settings);
        }
        self.stack.push((name.to_owned(), container_type.to_owned()));
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.stack.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let list = self
            .stack
            .iter()
            .position(|(_, container)| matches!(container.as_str(), "Vec" | "Array"));
        let list = list.and_then(|at| {
            let names: Vec<_> = self.stack[..at].iter().map(|(name, _)| name.as_str()).collect();
            Some((names.join("."), self.stack[at].0.parse().ok()?))
        });
        self.store(Kind::Float, param.lazy_shape(), param.lazy_device());
        let container = self.stack.last().map_or("", |(_, container)| container.as_str());
        let container = container.split_once(':').map_or(container, |(_, name)| name);
        self.parameters.push(Parameter {
            path: self.path(),
            id: param.id,
            container: container.to_owned(),
            shape: if self.values { param.shape() } else { param.lazy_shape() }.to_vec(),
            dtype: self.values.then(|| param.dtype()),
            list,
            reparameterization: None,
            inside_reparameterization: self
                .stack
                .iter()
                .any(|(_, container)| container == REPARAMETERIZATION),
            fake_quantized: None,
            packed_bytes: 0,
        });
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.store(Kind::Int, param.lazy_shape(), param.lazy_device());
        // Codes and scales come right after the parameter that they are attached to.
        if let Some(parameter) = self.parameters.last_mut()
            && parameter.reparameterization.as_deref() == Some(PackedWeight::NAME)
            && self.stack.iter().any(|(_, container)| container == REPARAMETERIZATION)
        {
            parameter.packed_bytes += param.shape().num_elements() * param.dtype().size();
        }
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.store(Kind::Bool, param.lazy_shape(), param.lazy_device());
    }
}

const REPARAMETERIZATION: &str = "Reparameterization";

/// What is to happen to a parameter.
#[derive(Debug, Clone)]
pub(crate) enum Decision {
    Quantize(Plan),
    Keep(Reason),
}

/// How a parameter is to be quantized.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) layout: Fp4Layout,
    /// The group of parameters whose tensor scale it shares.
    pub(crate) shares: Option<String>,
    pub(crate) scheme: Fp4Scheme,
    /// How its scales and codes are to be chosen.
    pub(crate) asked: ChosenBy,
}

/// What is to happen to every float parameter of a module.
#[derive(Debug, Clone, Default)]
pub(crate) struct Selection {
    /// In the order of the module.
    pub(crate) decisions: Vec<(Parameter, Decision)>,
    /// What of the configuration nothing uses, as lines.
    pub(crate) unused: Vec<String>,
}

impl Selection {
    /// The parameters that are to be quantized, with their numbers in the order of the module.
    pub(crate) fn plans(&self) -> impl Iterator<Item = (usize, &Parameter, &Plan)> {
        self.decisions.iter().enumerate().filter_map(|(at, (parameter, decision))| match decision {
            Decision::Quantize(plan) => Some((at, parameter, plan)),
            Decision::Keep(_) => None,
        })
    }

    /// Whether statistics of inputs decide about the codes of a weight.
    pub(crate) fn needs_inputs(&self) -> bool {
        self.plans().any(|(_, _, plan)| plan.asked.needs_inputs())
    }

    /// # Errors
    /// [`Fp4Error::Uncalibrated`] if weights need statistics of inputs and none `has` any that it
    /// can use.
    pub(crate) fn check_calibrated<'a>(
        &'a self,
        has: impl Fn(usize, &'a Plan) -> bool,
    ) -> Result<(), Fp4Error> {
        let asking = || self.plans().filter(|(_, _, plan)| plan.asked.needs_inputs());
        match asking().next() {
            Some((_, _, plan)) if !asking().any(|(at, _, plan)| has(at, plan)) => {
                let method = plan.asked.to_string();
                let paths = asking().map(|(_, parameter, _)| parameter.path.clone()).collect();
                Err(Fp4Error::Uncalibrated { method, paths })
            }
            _ => Ok(()),
        }
    }
}

/// Decides about every float parameter of a module.
///
/// # Errors
/// [`Fp4Error::NothingSelected`] with the reasons, [`Fp4Error::Unused`], and what is wrong with the
/// configuration for a parameter.
pub(crate) fn select<M: Module>(module: &M, config: &Fp4Config) -> Result<Selection, Fp4Error> {
    let patterns = Patterns::new(config)?;
    let parameters = Walk::over_values(module).parameters;
    let mut reasons: Vec<Option<Reason>> =
        parameters.iter().map(|parameter| refusal(parameter, config, &patterns)).collect();
    keep_layers(&parameters, &mut reasons, config);
    let schemes: Vec<_> =
        parameters.iter().map(|parameter| patterns.scheme(&parameter.path, config)).collect();
    for (scheme, _) in schemes.iter().zip(&reasons).filter(|(_, reason)| reason.is_none()) {
        scheme.validate().map_err(OpsError::from)?;
        if let Some(options) = &config.gptq {
            options.validate(scheme).map_err(OpsError::from)?;
        }
    }
    let (groups, lone) = shared_scales(&parameters, &reasons, &schemes, config)?;
    let mut unused = patterns.unused(&parameters, &reasons, config);
    unused.extend(unused_containers(&parameters, config));

    let mut decisions = Vec::with_capacity(parameters.len());
    for (index, (parameter, reason)) in parameters.into_iter().zip(reasons).enumerate() {
        let decision = match reason {
            Some(reason) => Decision::Keep(reason),
            None => match plan(&parameter, &schemes[index], config)? {
                Ok(plan) => {
                    Decision::Quantize(Plan { shares: groups.get(&index).cloned(), ..plan })
                }
                Err(reason) => Decision::Keep(reason),
            },
        };
        decisions.push((parameter, decision));
    }
    let mut selection = Selection { decisions, unused };
    if selection.plans().next().is_none() {
        return Err(nothing_selected(&selection));
    }
    for group in &config.share_scale {
        let siblings = group.join(",");
        if !groups.values().any(|name| name.contains(&format!("{{{siblings}}}"))) {
            let line = format!("share_scale {{{siblings}}}: no two selected siblings");
            selection.unused.push(line);
        }
    }
    if config.calibration.iter().next().is_some() && !selection.needs_inputs() {
        let line = "calibration: no method asked for uses it (`gptq` and searches by Hessian do)";
        selection.unused.push(line.to_owned());
    }
    if config.unused == Unused::Error && !selection.unused.is_empty() {
        return Err(Fp4Error::Unused(selection.unused));
    }
    selection.unused.extend(lone);
    Ok(selection)
}

/// Paths of the parameters that a configuration selects and whose codes depend on their inputs,
/// with the axis that is contracted.
///
/// # Errors
/// As [`select`]; [`Fp4Error::Uncalibrated`] cannot be told yet.
pub(crate) fn planned_axes<M: Module>(
    module: &M,
    config: &Fp4Config,
) -> Result<BTreeSet<(String, usize)>, Fp4Error> {
    let selection = select(module, config)?;
    let plans = selection.plans().filter(|(_, _, plan)| plan.asked.needs_inputs());
    Ok(plans.map(|(_, parameter, plan)| (parameter.path.clone(), plan.layout.axis)).collect())
}

fn nothing_selected(selection: &Selection) -> Fp4Error {
    let reasons = selection.decisions.iter().filter_map(|(parameter, decision)| match decision {
        Decision::Keep(reason) => Some(format!("\n  {}: {reason}", parameter.path)),
        Decision::Quantize(_) => None,
    });
    let unused = selection.unused.iter().map(|line| format!("\n  {line}"));
    Fp4Error::NothingSelected(reasons.chain(unused).collect())
}

/// The patterns of a configuration.
struct Patterns {
    include: GlobSet,
    exclude: GlobSet,
    overrides: GlobSet,
}

impl Patterns {
    fn new(config: &Fp4Config) -> Result<Self, Fp4Error> {
        let overrides: Vec<_> = config.overrides.iter().map(|one| one.pattern.clone()).collect();
        Ok(Self {
            include: globs(&config.include)?,
            exclude: globs(&config.exclude)?,
            overrides: globs(&overrides)?,
        })
    }

    /// By what a parameter is quantized if it is selected.
    fn scheme(&self, path: &str, config: &Fp4Config) -> Fp4Scheme {
        let last = self.overrides.matches(components(path)).into_iter().max();
        last.map_or(config.scheme, |at| config.overrides[at].scheme)
    }

    /// Lines about the patterns that fit no parameter, and the overrides that fit no selected one.
    fn unused(
        &self,
        parameters: &[Parameter],
        reasons: &[Option<Reason>],
        config: &Fp4Config,
    ) -> Vec<String> {
        let all: Vec<_> = parameters.iter().map(|parameter| components(&parameter.path)).collect();
        let selected: Vec<_> = all
            .iter()
            .zip(reasons)
            .filter(|(_, reason)| reason.is_none())
            .map(|(path, _)| path.clone())
            .collect();
        let overrides: Vec<_> = config.overrides.iter().map(|one| &one.pattern).collect();
        let include: Vec<_> = config.include.iter().collect();
        let exclude: Vec<_> = config.exclude.iter().collect();
        let mut lines = Vec::new();
        for (what, fits, set, patterns, paths) in [
            ("include", "no parameter", &self.include, include, &all),
            ("exclude", "no parameter", &self.exclude, exclude, &all),
            ("with", "no selected weight", &self.overrides, overrides, &selected),
        ] {
            let used: BTreeSet<usize> = paths.iter().flat_map(|path| set.matches(path)).collect();
            for (at, pattern) in patterns.into_iter().enumerate() {
                if !used.contains(&at) {
                    lines.push(format!("{what} `{pattern}` fits {fits}"));
                }
            }
        }
        lines
    }
}

/// Paths match component by component, so dots are to a pattern what slashes are to a glob.
fn components(path: &str) -> String {
    path.replace('.', "/")
}

fn globs(patterns: &[String]) -> Result<GlobSet, Fp4Error> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        let glob = GlobBuilder::new(&components(pattern)).literal_separator(true).build();
        let error = |problem| Fp4Error::Pattern { pattern: pattern.clone(), problem };
        set.add(glob.map_err(error)?);
    }
    set.build().map_err(|problem| Fp4Error::Pattern { pattern: patterns.join(", "), problem })
}

/// Lines about the containers that were added and that no parameter lies in.
fn unused_containers(parameters: &[Parameter], config: &Fp4Config) -> Vec<String> {
    let known: BTreeSet<_> = parameters.iter().map(|one| one.container.as_str()).collect();
    let added = config.containers.iter().map(|container| container.name.as_str());
    let default = |name: &str| Fp4Config::CONTAINERS.iter().any(|(known, _)| *known == name);
    let added = added.filter(|name| !default(name) && !known.contains(name));
    added.map(|name| format!("container `{name}` holds no parameter")).collect()
}

fn refusal(parameter: &Parameter, config: &Fp4Config, patterns: &Patterns) -> Option<Reason> {
    if let Some(reason) = parameter.attached() {
        return Some(reason);
    }
    if !config.containers.iter().any(|container| container.name == parameter.container) {
        return Some(Reason::Container);
    }
    if parameter.shape.len() < 2 {
        return Some(Reason::Rank);
    }
    let path = components(&parameter.path);
    if !config.include.is_empty() && !patterns.include.is_match(&path) {
        return Some(Reason::NotIncluded);
    }
    if let Some(&pattern) = patterns.exclude.matches(&path).first() {
        return Some(Reason::Excluded { pattern: config.exclude[pattern].clone() });
    }
    None
}

/// Keeps the first and last layers dense; see [`Fp4Config::keep_first`].
fn keep_layers(parameters: &[Parameter], reasons: &mut [Option<Reason>], config: &Fp4Config) {
    let selected: Vec<_> = (0..parameters.len()).filter(|&at| reasons[at].is_none()).collect();
    let mut lengths: BTreeMap<&str, usize> = BTreeMap::new();
    for (list, index) in parameters.iter().filter_map(|parameter| parameter.list.as_ref()) {
        let length = lengths.entry(list).or_default();
        *length = (*length).max(index + 1);
    }
    let lists_matter = selected.iter().any(|&at| parameters[at].list.is_some());
    for (order, &at) in selected.iter().enumerate() {
        let (layer, layers) = match &parameters[at].list {
            Some((list, index)) => (*index, lengths[list.as_str()]),
            None if lists_matter => continue,
            None => (order, selected.len()),
        };
        if layer < config.keep_first {
            reasons[at] = Some(Reason::FirstLayers { layer });
        } else if layer + config.keep_last >= layers {
            reasons[at] = Some(Reason::LastLayers { layer });
        }
    }
}

/// By parameter the name of the group that it shares its tensor scale with, and lines about those
/// whose siblings are not selected.
type Groups = (BTreeMap<usize, String>, Vec<String>);

fn shared_scales(
    parameters: &[Parameter],
    reasons: &[Option<Reason>],
    schemes: &[Fp4Scheme],
    config: &Fp4Config,
) -> Result<Groups, Fp4Error> {
    let mut members: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (at, parameter) in parameters.iter().enumerate() {
        if reasons[at].is_some() {
            continue;
        }
        let components: Vec<_> = parameter.path.split('.').collect();
        let [parents @ .., sibling, name] = components.as_slice() else { continue };
        let group = config.share_scale.iter().find(|group| group.iter().any(|one| one == sibling));
        if let Some(group) = group {
            let parent = parents.join(".");
            let group = format!("{parent}.{{{}}}.{name}", group.join(","));
            members.entry(group.trim_start_matches('.').to_owned()).or_default().push(at);
        }
    }
    let mut lone = Vec::new();
    members.retain(|group, members| {
        if let [at] = members[..] {
            let path = &parameters[at].path;
            lone.push(format!(
                "`{path}` has a tensor scale of its own: nothing else of {group} is selected"
            ));
        }
        members.len() > 1
    });
    for members in members.values() {
        for &at in members {
            let refuse =
                |reason| Err(Fp4Error::SharedScale { path: parameters[at].path.clone(), reason });
            if schemes[at].tensor_scale != TensorScaling::Tensor {
                return refuse("its scheme has one per row or a given one");
            }
            if schemes[at] != schemes[members[0]] {
                return refuse("its scheme is not that of its siblings");
            }
        }
    }
    let groups = members
        .into_iter()
        .flat_map(|(group, at)| at.into_iter().map(move |at| (at, group.clone())))
        .collect();
    Ok((groups, lone))
}

/// How a selected parameter is to be quantized, or why the configuration lets it be skipped.
pub(crate) fn plan(
    parameter: &Parameter,
    scheme: &Fp4Scheme,
    config: &Fp4Config,
) -> Result<Result<Plan, Reason>, Fp4Error> {
    let Parameter { path, container, shape, .. } = parameter;
    let container = config.containers.iter().find(|known| known.name == *container);
    let container = container.expect("only parameters of known containers are selected");
    if container.axis >= shape.len() {
        return Err(Fp4Error::Axis {
            path: path.clone(),
            container: container.name.clone(),
            axis: container.axis,
            rank: shape.len(),
        });
    }
    match lay_out(parameter, container.axis, scheme, config) {
        Ok(plan) => Ok(Ok(plan)),
        Err(OpsError::Indivisible { axis, length, block_size })
            if config.indivisible == Indivisible::Skip =>
        {
            Ok(Err(Reason::Indivisible { axis, length, block_size }))
        }
        Err(problem) => Err(Fp4Error::at(path, problem)),
    }
}

/// How a configuration quantizes parameters along these axes, whether it selects them or not.
///
/// # Errors
/// [`Fp4Error::Unused`] for an override that fits none of them, [`Fp4Error::Parameter`].
pub(crate) fn plans_as<'a>(
    parameters: impl Iterator<Item = (&'a Parameter, usize)>,
    config: &Fp4Config,
) -> Result<Vec<Plan>, Fp4Error> {
    let patterns = Patterns::new(config)?;
    let mut plans = Vec::new();
    let mut used = BTreeSet::new();
    for (parameter, axis) in parameters {
        used.extend(patterns.overrides.matches(components(&parameter.path)));
        let scheme = patterns.scheme(&parameter.path, config);
        scheme.validate().map_err(OpsError::from)?;
        let plan = lay_out(parameter, axis, &scheme, config);
        plans.push(plan.map_err(|problem| Fp4Error::at(&parameter.path, problem))?);
    }
    let unused = config.overrides.iter().enumerate().filter(|(at, _)| !used.contains(at));
    let unused: Vec<_> =
        unused.map(|(_, one)| format!("with `{}` fits no weight", one.pattern)).collect();
    match unused.is_empty() || config.unused == Unused::Report {
        true => Ok(plans),
        false => Err(Fp4Error::Unused(unused)),
    }
}

fn lay_out(
    parameter: &Parameter,
    axis: usize,
    scheme: &Fp4Scheme,
    config: &Fp4Config,
) -> Result<Plan, OpsError> {
    if let Some(found) = parameter.dtype
        && !matches!(found, DType::F32 | DType::F16 | DType::BF16)
    {
        return Err(OpsError::DType { found });
    }
    let layout = Fp4Layout::new(&parameter.shape.clone().into(), axis, scheme)?;
    let asked = config.gptq.map_or(ChosenBy::Search(scheme.search), ChosenBy::Gptq);
    Ok(Plan { layout, shares: None, scheme: *scheme, asked })
}
