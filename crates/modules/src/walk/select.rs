//! The plan for every parameter of a module: a configuration and the parameters as the policy has
//! them, and its decisions as layouts and schemes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use burn::module::Module;
use burn::tensor::DType;
use burn_fp4_ops::search::Method;
use burn_fp4_ops::{Fp4Layout, Fp4Scheme, OpsError};
use burn_fp4_policy::{
    Constraints, Decision, Decisions, Family, Fused, Patterns, Reason, WeightInfo, families,
    nearest_pattern,
};

use crate::checkpoint::decide::decide as decide_as_in_files;
use crate::checkpoint::outline::ParameterOutline;
use crate::config::{Change, Fp4Config, Indivisible, Override, Unused};
use crate::error::Fp4Error;
use crate::report::KeepReason;
use crate::walk::parameters::{Parameter, Walk};

/// A parameter quantized or kept.
#[derive(Debug, Clone)]
pub(crate) enum ParameterPlan {
    Quantize(WeightPlan),
    Keep(KeepReason),
}

/// How a parameter is to be quantized.
#[derive(Debug, Clone)]
pub(crate) struct WeightPlan {
    pub(crate) layout: Fp4Layout,
    /// The group of parameters whose tensor scale it shares.
    pub(crate) shares: Option<String>,
    pub(crate) scheme: Fp4Scheme,
}

impl WeightPlan {
    /// Matrices that the weight is made of along its leading axes, if blocks run along one of the
    /// last two; otherwise 1.
    pub(crate) fn slices(&self) -> usize {
        let Fp4Layout { shape, axis, .. } = &self.layout;
        let leading = shape.len().saturating_sub(2);
        if *axis < leading { 1 } else { shape[..leading].iter().product() }
    }

    /// Returns the axis that blocks run along in the matrices of the last two axes, if they do.
    pub(crate) fn axis_of_matrices(&self) -> Option<usize> {
        self.layout.axis.checked_sub(self.layout.shape.len().checked_sub(2)?)
    }
}

/// The plan for every float parameter of a module.
#[derive(Debug, Clone, Default)]
pub(crate) struct ModulePlan {
    /// In the order of the module.
    pub(crate) parameters: Vec<(Parameter, ParameterPlan)>,
    /// Parts of the configuration that nothing uses, as lines.
    pub(crate) unused: Vec<String>,
}

impl ModulePlan {
    /// The parameters that are to be quantized, with their numbers in the order of the module.
    pub(crate) fn plans(&self) -> impl Iterator<Item = (usize, &Parameter, &WeightPlan)> {
        self.parameters.iter().enumerate().filter_map(|(at, (parameter, plan))| match plan {
            ParameterPlan::Quantize(plan) => Some((at, parameter, plan)),
            ParameterPlan::Keep(_) => None,
        })
    }

    /// Returns true if statistics of inputs decide about the codes of a weight.
    pub(crate) fn needs_inputs(&self) -> bool {
        self.plans().any(|(_, _, plan)| plan.scheme.method.needs_inputs())
    }

    /// Returns true if a weight is [corrected](burn_fp4_ops::Gptq::correction) for what earlier
    /// layers change in its inputs.
    pub(crate) fn corrects(&self) -> bool {
        let corrects = |plan: &WeightPlan| {
            plan.scheme.method.gptq().is_some_and(|options| options.correction > 0.0)
        };
        self.plans().any(|(_, _, plan)| corrects(plan))
    }

    /// Returns the paths of the weights whose codes depend on their inputs, with the axis that is
    /// contracted.
    pub(crate) fn axes_of_inputs(&self) -> BTreeSet<(String, usize)> {
        let asking = self.plans().filter(|(_, _, plan)| plan.scheme.method.needs_inputs());
        let axis = |(_, parameter, plan): (usize, &Parameter, &WeightPlan)| {
            (parameter.path.clone(), plan.layout.axis)
        };
        asking.map(axis).collect()
    }

    /// Checks that a method uses the calibration of the configuration, if it has one.
    ///
    /// # Errors
    /// [`Fp4Error::Unused`], unless the configuration makes it a line of the report.
    pub(crate) fn check_calibration_used(&mut self, config: &Fp4Config) -> Result<(), Fp4Error> {
        if config.calibration.iter().next().is_none() || self.needs_inputs() {
            return Ok(());
        }
        let users = Method::NAMED.into_iter().filter(|row| row.calibrated);
        let users: Vec<_> = users.map(|row| format!("`{}`", row.name)).collect();
        let users = users.join(", ");
        let line = format!("calibration: no method asked for uses it, as {users} do");
        match config.unused {
            Unused::Error => return Err(Fp4Error::Unused(vec![line])),
            Unused::Report => self.unused.push(line),
        }
        Ok(())
    }

    /// # Errors
    /// [`Fp4Error::Uncalibrated`] if weights need statistics of inputs and none `has` any that it
    /// can use.
    pub(crate) fn check_calibrated<'a>(
        &'a self,
        has: impl Fn(usize, &'a WeightPlan) -> bool,
    ) -> Result<(), Fp4Error> {
        let asking = || self.plans().filter(|(_, _, plan)| plan.scheme.method.needs_inputs());
        match asking().next() {
            Some((_, _, plan)) if !asking().any(|(at, _, plan)| has(at, plan)) => {
                let method = plan.scheme.method.to_string();
                let paths = asking().map(|(_, parameter, _)| parameter.path.clone()).collect();
                Err(Fp4Error::Uncalibrated { method, paths })
            }
            _ => Ok(()),
        }
    }
}

/// Decides about every float parameter of a module, which initializes them.
///
/// # Errors
/// [`Fp4Error::Policy`], [`Fp4Error::Scheme`], [`Fp4Error::SharedScale`], [`Fp4Error::Axis`] and
/// [`Fp4Error::Parameter`] for a configuration that does not fit the module, and the errors of
/// [`Fp4Config::of_recipe`]; [`Fp4Error::NothingSelected`] with the reasons; [`Fp4Error::Unused`];
/// [`Fp4Error::Sensitivity`] for a budget, which is not a decision about each parameter yet.
pub(crate) fn select<M: Module>(module: &M, config: &Fp4Config) -> Result<ModulePlan, Fp4Error> {
    select_among(Walk::over_values(module).parameters, config)
}

/// Decides about parameters.
///
/// # Errors
/// As [`select`].
pub(crate) fn select_among(
    parameters: Vec<Parameter>,
    config: &Fp4Config,
) -> Result<ModulePlan, Fp4Error> {
    check_no_budget(config)?;
    let unfit: Vec<Option<KeepReason>> = parameters
        .iter()
        .map(|parameter| parameter.attached().or_else(|| unfit(parameter, config)))
        .collect();
    let fits: Vec<bool> = unfit.iter().map(Option::is_none).collect();
    // Weights of files have families by their names there.
    let listed = !(config.share_scale.is_empty() && config.share_scale_of.is_empty());
    let lists = (config.files.is_none() && listed).then(|| Lists::new(config)).transpose()?;
    let decided = decide(&parameters, &fits, config, lists.as_ref())?;
    let unused = match config.files {
        // A selection of files refuses patterns that match nothing.
        Some(_) => unused_for_files(config),
        None => unused_patterns(&parameters, &decided.weights, config)?,
    };
    let plan = |(at, unfit): (usize, Option<KeepReason>)| {
        let parameter = &parameters[at];
        Ok(match (unfit, &decided.weights[at]) {
            (Some(reason), _) => ParameterPlan::Keep(reason),
            (None, Decision::Keep(reason)) => {
                ParameterPlan::Keep(kept(parameter, reason.clone(), config)?)
            }
            (None, Decision::Quantize { scheme, group }) => {
                let mut plan = plan_selected(parameter, scheme, config)?;
                let members = &decided.groups[*group];
                if members.len() > 1 {
                    plan.shares = match &lists {
                        Some(lists) => lists.family(&parameter.path).map(|one| lists.name(&one)),
                        None => Some(group_of(members.iter().map(|&at| &*parameters[at].path))),
                    };
                }
                ParameterPlan::Quantize(plan)
            }
        })
    };
    let plans: Result<Vec<_>, Fp4Error> = unfit.into_iter().enumerate().map(plan).collect();
    let plans = parameters.into_iter().zip(plans?).collect();
    let mut selection = ModulePlan { parameters: plans, unused };
    if selection.plans().next().is_none() {
        return Err(nothing_selected(&selection, config));
    }
    let paths: Vec<_> = selection.plans().map(|(_, parameter, _)| &*parameter.path).collect();
    let (unused, lone) = match &lists {
        Some(lists) => (lists.unused(&paths), lists.lone(&paths)),
        None => Default::default(),
    };
    selection.unused.extend(unused);
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
/// As [`select`]. Missing statistics ([`Fp4Error::Uncalibrated`]) are no error here.
pub(crate) fn planned_axes<M: Module>(
    module: &M,
    config: &Fp4Config,
) -> Result<BTreeSet<(String, usize)>, Fp4Error> {
    Ok(select(module, config)?.axes_of_inputs())
}

fn nothing_selected(selection: &ModulePlan, config: &Fp4Config) -> Fp4Error {
    let quantized = quantized_already(selection, config);
    if !quantized.is_empty() {
        return Fp4Error::AlreadyQuantized(quantized);
    }
    let reasons = selection.parameters.iter().filter_map(|(parameter, plan)| match plan {
        ParameterPlan::Keep(reason) => Some(format!("\n  {}: {reason}", parameter.path)),
        ParameterPlan::Quantize(_) => None,
    });
    let unused = selection.unused.iter().map(|line| format!("\n  {line}"));
    Fp4Error::NothingSelected(reasons.chain(unused).collect())
}

/// The paths of weights that would be selected if they were not quantized already.
fn quantized_already(selection: &ModulePlan, config: &Fp4Config) -> Vec<String> {
    // Patterns and ties are about all parameters, also dense ones.
    let known: Vec<Parameter> = selection.parameters.iter().map(|(one, _)| one.clone()).collect();
    let fits: Vec<bool> = known.iter().map(|one| unfit(one, config).is_none()).collect();
    let all = Fp4Config { keep_first: 0, keep_last: 0, ..config.clone() };
    let chosen = decide(&known, &fits, &all, None).map(|decided| decided.weights);
    let chosen = selection.parameters.iter().zip(chosen.unwrap_or_default());
    let chosen = chosen.filter(|((_, plan), decision)| {
        matches!(plan, ParameterPlan::Keep(KeepReason::AlreadyQuantized)) && is_chosen(decision)
    });
    chosen.map(|((parameter, _), _)| parameter.path.clone()).collect()
}

/// Finds the reason for which no configuration of these containers could select a parameter,
/// whatever is attached to it. Files have no containers.
fn unfit(parameter: &Parameter, config: &Fp4Config) -> Option<KeepReason> {
    if config.files.is_some() {
        return None;
    }
    if parameter.shape.len() < 2 {
        return Some(KeepReason::Rank);
    }
    if !config.containers.iter().any(|container| container.name == parameter.container) {
        return Some(KeepReason::Container);
    }
    parameter.shape.contains(&0).then_some(KeepReason::Empty)
}

/// Returns the reason for which a parameter that fits is kept.
///
/// # Errors
/// [`Fp4Error::Parameter`] if blocks do not divide it, unless the configuration says to skip it.
fn kept(parameter: &Parameter, reason: Reason, config: &Fp4Config) -> Result<KeepReason, Fp4Error> {
    Ok(match reason {
        Reason::Asked(pattern) => KeepReason::Excluded { pattern },
        Reason::NotAsked => KeepReason::NotIncluded,
        Reason::Layer(layer) if layer < config.keep_first => KeepReason::FirstLayers { layer },
        Reason::Layer(layer) => KeepReason::LastLayers { layer },
        Reason::Columns { cols: length, of: block_size } => {
            let axis = axis_of(parameter, config);
            if config.indivisible == Indivisible::Error {
                let problem = OpsError::Indivisible { axis, length, block_size };
                return Err(Fp4Error::at(&parameter.path, problem));
            }
            KeepReason::Indivisible { axis, length, block_size }
        }
        Reason::NoMatrix => KeepReason::Rank,
        Reason::Empty => KeepReason::Empty,
        Reason::Dtype(_)
        | Reason::Already(_)
        | Reason::Smoothed
        | Reason::Preset(_)
        | Reason::Unlisted(_)
        | Reason::Transposed(_)
        | Reason::Stacked
        | Reason::CannotHold { .. }
        | Reason::With(_) => KeepReason::AsInFiles { reason: reason.to_string() },
    })
}

/// Returns the axis that the blocks of a parameter that fits run along.
fn axis_of(parameter: &Parameter, config: &Fp4Config) -> usize {
    let Parameter { container, shape, .. } = parameter;
    match &config.files {
        Some(files) => files.map.placement(container, shape.len()).axis,
        None => {
            let known = config.containers.iter().find(|known| known.name == *container);
            known.expect("only parameters of known containers fit").axis
        }
    }
}

/// Decides about parameters. `fits` says which of them could be quantized at all; with names in
/// files that is for the policy to say.
///
/// # Errors
/// [`Fp4Error::Policy`], [`Fp4Error::Scheme`] and [`Fp4Error::SharedScale`], or the errors of
/// [`decide_as_in_files`].
fn decide(
    parameters: &[Parameter],
    fits: &[bool],
    config: &Fp4Config,
    lists: Option<&Lists<'_>>,
) -> Result<Decisions, Fp4Error> {
    let policy = config.policy();
    if let Some(files) = &config.files {
        let known = parameters.iter().map(|one| ParameterOutline {
            path: &one.path,
            container: &one.container,
            shape: &one.shape,
            attached: one.inside_reparameterization,
        });
        return decide_as_in_files(&known.collect::<Vec<_>>(), &policy, &files.map);
    }
    let by = |fused| Constraints {
        dialect: "",
        columns: &|_, block_size| block_size,
        fused,
        turns: true,
        tensor_scales: true,
    };
    let info = |at: usize| info(&parameters[at], config, fits[at]);
    let mut weights: Vec<_> = (0..parameters.len()).map(info).collect();
    if config.keep_first > 0 || config.keep_last > 0 {
        // A layer may be each of the chosen weights.
        let chosen = policy.decide(&weights, &by(Fused::Apart))?.weights;
        for (at, layer, count) in layers(parameters, &chosen) {
            weights[at].layer = Some((layer, count));
        }
    }
    if let Some(lists) = lists {
        weights.iter_mut().for_each(|weight| weight.family = lists.family(weight.name));
    }
    Ok(policy.decide(&weights, &by(Fused::Listed))?)
}

/// A parameter as decisions are made about it.
fn info<'p>(parameter: &'p Parameter, config: &Fp4Config, fits: bool) -> WeightInfo<'p> {
    let container = config.containers.iter().find(|known| known.name == parameter.container);
    let length = container.and_then(|container| parameter.shape.get(container.axis));
    let [name, module] = parameter.names();
    WeightInfo {
        name,
        module,
        unfit: (!fits).then_some(Reason::NoMatrix),
        shape: &parameter.shape,
        cols: length.copied().unwrap_or(0),
        ..WeightInfo::default()
    }
}

/// Returns true if a weight is chosen, though its blocks may not divide it.
fn is_chosen(decision: &Decision) -> bool {
    matches!(decision, Decision::Quantize { .. } | Decision::Keep(Reason::Columns { .. }))
}

/// The chosen parameters in layers, each with the number of its layer and the count of layers; see
/// [`Fp4Config::keep_first`].
fn layers(parameters: &[Parameter], decisions: &[Decision]) -> Vec<(usize, usize, usize)> {
    let chosen: Vec<_> = (0..parameters.len()).filter(|&at| is_chosen(&decisions[at])).collect();
    let mut lengths: BTreeMap<&str, usize> = BTreeMap::new();
    for (list, index) in parameters.iter().filter_map(|parameter| parameter.list.as_ref()) {
        let length = lengths.entry(list).or_default();
        *length = (*length).max(index + 1);
    }
    let lists_matter = chosen.iter().any(|&at| parameters[at].list.is_some());
    let layer = |(order, &at): (usize, &usize)| match &parameters[at].list {
        Some((list, index)) => Some((at, *index, lengths[list.as_str()])),
        None if lists_matter => None,
        None => Some((at, order, chosen.len())),
    };
    chosen.iter().enumerate().filter_map(layer).collect()
}

/// Lines about the patterns that fit no parameter, the overrides that fit no chosen one, and the
/// containers that were added and that no parameter lies in.
fn unused_patterns(
    parameters: &[Parameter],
    decisions: &[Decision],
    config: &Fp4Config,
) -> Result<Vec<String>, Fp4Error> {
    let mut lines = Vec::new();
    for (what, patterns) in [("include", &config.include), ("exclude", &config.exclude)] {
        let all = parameters.iter().map(Parameter::names);
        let unused = Patterns::new(patterns)?.unused(all);
        let line = |at: usize| {
            let pattern = &patterns[at];
            format!("{what} `{pattern}` fits no parameter{}", meant(pattern, parameters))
        };
        lines.extend(unused.into_iter().map(line));
    }
    let chosen = parameters.iter().zip(decisions).filter(|(_, decision)| is_chosen(decision));
    lines.extend(unused_overrides(chosen.map(|(parameter, _)| parameter), parameters, config)?);
    let known: BTreeSet<_> = parameters.iter().map(|one| one.container.as_str()).collect();
    let added = config.containers.iter().map(|container| container.name.as_str());
    let default = |name: &str| Fp4Config::CONTAINERS.iter().any(|(known, _)| *known == name);
    let added = added.filter(|name| !default(name) && !known.contains(name));
    lines.extend(added.map(|name| format!("container `{name}` holds no parameter")));
    Ok(lines)
}

/// Lines about the overrides that fit none of these parameters, or of all if they keep them.
fn unused_overrides<'p>(
    chosen: impl Iterator<Item = &'p Parameter> + Clone,
    all: &'p [Parameter],
    config: &Fp4Config,
) -> Result<Vec<String>, Fp4Error> {
    let overrides = Patterns::new(config.overrides.iter().map(|one| &one.pattern))?;
    let nowhere = overrides.unused(all.iter().map(Parameter::names));
    let unused = overrides.unused(chosen.map(Parameter::names)).into_iter();
    let unused = unused.map(|at| (at, &config.overrides[at]));
    let unused = unused.filter(|(at, one)| one.change != Change::Dense || nowhere.contains(at));
    let line = |(at, one): (usize, &Override)| {
        let pattern = &one.pattern;
        let meant = if nowhere.contains(&at) { meant(pattern, all) } else { String::new() };
        format!("with `{pattern}` fits no selected weight{meant}")
    };
    Ok(unused.map(line).collect())
}

/// Suggests a pattern in place of one that fits no parameter.
fn meant(pattern: &str, parameters: &[Parameter]) -> String {
    let nearest = nearest_pattern(pattern, parameters.iter().map(Parameter::names));
    nearest.map_or_else(String::new, |nearest| format!("; did you mean `{nearest}`?"))
}

/// Lines about choices that have no effect on weights with names in files.
fn unused_for_files(config: &Fp4Config) -> Vec<String> {
    let default = Fp4Config::CONTAINERS.iter().copied();
    let containers = config.containers.iter().map(|one| (one.name.as_str(), one.axis));
    let lists = config.share_scale.iter().chain(&config.share_scale_of);
    let containers = (!containers.eq(default)).then(|| {
        "container: the map of a recipe has the axes of containers; call its `container`".to_owned()
    });
    let lists = lists.map(|names| {
        let names = names.join(",");
        format!("share_scale {{{names}}}: a recipe decides with `together` who shares one")
    });
    containers.into_iter().chain(lists).collect()
}

/// Checks that nothing else than `quantize_fp4` is to keep a budget.
///
/// # Errors
/// [`Fp4Error::Sensitivity`]: a budget is not a decision about each parameter yet.
fn check_no_budget(config: &Fp4Config) -> Result<(), Fp4Error> {
    match config.budget {
        None => Ok(()),
        Some(_) => Err(Fp4Error::Sensitivity(
            "only `quantize_fp4` keeps a budget: choose formats by `fp4_sensitivity` before",
        )),
    }
}

/// How a selected parameter is to be quantized.
fn plan_selected(
    parameter: &Parameter,
    scheme: &Fp4Scheme,
    config: &Fp4Config,
) -> Result<WeightPlan, Fp4Error> {
    let Parameter { path, container, shape, .. } = parameter;
    let (axis, rank) = (axis_of(parameter, config), shape.len());
    if axis >= rank {
        let (path, container) = (path.clone(), container.clone());
        return Err(Fp4Error::Axis { path, container, axis, rank });
    }
    plan_along(parameter, axis, scheme).map_err(|problem| Fp4Error::at(path, problem))
}

/// How a configuration quantizes the parameters with an axis along it, whether it selects them or
/// not.
///
/// # Errors
/// [`Fp4Error::Unused`] for an override that fits none of them, [`Fp4Error::Parameter`], and
/// [`Fp4Error::RecipeParameter`] for one that the configuration keeps dense by name.
pub(crate) fn plans_as<'p>(
    parameters: &'p [Parameter],
    axis: impl Fn(&Parameter) -> Option<usize>,
    config: &Fp4Config,
) -> Result<Vec<(&'p Parameter, WeightPlan)>, Fp4Error> {
    check_no_budget(config)?;
    // They were selected when they were packed; each keeps its own tensor scale and axis.
    let all = Fp4Config {
        include: vec!["*".to_owned()],
        exclude: Vec::new(),
        containers: Vec::new(),
        keep_first: 0,
        keep_last: 0,
        ..config.clone()
    };
    let decided = decide(parameters, &vec![true; parameters.len()], &all, None)?.weights;
    let mut plans = Vec::new();
    for (parameter, decision) in parameters.iter().zip(decided) {
        let (Some(axis), path) = (axis(parameter), &parameter.path) else { continue };
        let scheme = match decision {
            Decision::Quantize { scheme, .. } => scheme,
            Decision::Keep(Reason::Columns { cols: length, of: block_size }) => {
                return Err(Fp4Error::at(path, OpsError::Indivisible { axis, length, block_size }));
            }
            Decision::Keep(reason) => {
                let problem = format!("kept ({reason}), but its adapter is merged; do not keep it");
                return Err(Fp4Error::RecipeParameter { path: path.clone(), problem });
            }
        };
        let plan = plan_along(parameter, axis, &scheme);
        plans.push((parameter, plan.map_err(|problem| Fp4Error::at(path, problem))?));
    }
    let chosen = plans.iter().map(|(parameter, _)| *parameter);
    let unused = match config.files {
        Some(_) => Vec::new(),
        None => unused_overrides(chosen, parameters, config)?,
    };
    match unused.is_empty() || config.unused == Unused::Report {
        true => Ok(plans),
        false => Err(Fp4Error::Unused(unused)),
    }
}

/// The plan along an axis.
///
/// # Errors
/// [`OpsError`] for a dtype that is not quantized, or an axis that blocks do not divide.
fn plan_along(
    parameter: &Parameter,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<WeightPlan, OpsError> {
    if let Some(found) = parameter.dtype
        && !matches!(found, DType::F32 | DType::F16 | DType::BF16)
    {
        return Err(OpsError::DType { found });
    }
    let layout = Fp4Layout::new(&parameter.shape.clone().into(), axis, scheme)?;
    Ok(WeightPlan { layout, shares: None, scheme: *scheme })
}

/// The name of a group of whole paths in reports.
fn group_of<'p>(paths: impl Iterator<Item = &'p str>) -> String {
    format!("{{{}}}", paths.collect::<Vec<_>>().join(","))
}

/// The lists of a configuration of weights that share a tensor scale, each a family by its number:
/// ends of the names of siblings, and behind these whole paths.
struct Lists<'c> {
    siblings: &'c [Vec<String>],
    paths: &'c [Vec<String>],
    list_of: HashMap<&'c str, usize>,
}

impl<'c> Lists<'c> {
    /// # Errors
    /// [`Fp4Error::SharedScale`] for a path that is in the lists twice.
    fn new(config: &'c Fp4Config) -> Result<Self, Fp4Error> {
        let (siblings, paths) = (&config.share_scale, &config.share_scale_of);
        let mut list_of = HashMap::new();
        for (of, list) in paths.iter().zip(siblings.len()..) {
            for path in of {
                if list_of.insert(path.as_str(), list).is_some() {
                    let reason = "`share_scale_of` has it twice; name it once";
                    return Err(Fp4Error::SharedScale { path: path.clone(), reason });
                }
            }
        }
        Ok(Self { siblings, paths, list_of })
    }

    /// Returns the family of a parameter.
    fn family<'p>(&self, path: &'p str) -> Option<Family<'p>> {
        if let Some(&list) = self.list_of.get(path) {
            return Some(Family { parent: "", list, parameter: "" });
        }
        let (module, parameter) = path.rsplit_once('.')?;
        Some(Family { parameter, ..Family::of(module, self.siblings)? })
    }

    /// Returns the name of a family in reports.
    fn name(&self, family: &Family<'_>) -> String {
        let Family { parent, list, parameter } = family;
        match self.siblings.get(*list) {
            Some(siblings) => format!("{parent}{{{}}}.{parameter}", siblings.join(",")),
            None => group_of(self.paths[list - self.siblings.len()].iter().map(String::as_str)),
        }
    }

    /// Returns the families of selected parameters.
    fn families<'p>(&self, selected: &[&'p str]) -> Vec<(Family<'p>, Vec<usize>)> {
        let members = families(selected.iter().map(|path| self.family(path)));
        let keyed = |members: Vec<usize>| Some((self.family(selected[members[0]])?, members));
        members.into_iter().filter_map(keyed).collect()
    }

    /// Returns lines about the weights whose siblings are not selected.
    fn lone(&self, selected: &[&str]) -> Vec<String> {
        let alone = self.families(selected).into_iter().filter(|(_, members)| members.len() == 1);
        let line = |(family, members): (Family<'_>, Vec<usize>)| {
            let (path, group) = (selected[members[0]], self.name(&family));
            format!("`{path}` has a tensor scale of its own: nothing else of {group} is selected")
        };
        alone.map(line).collect()
    }

    /// Returns lines about the lists that form no group, and about the paths in them that are no
    /// selected weights.
    fn unused(&self, selected: &[&str]) -> Vec<String> {
        let groups = self.families(selected).into_iter().filter(|(_, members)| members.len() > 1);
        let used: HashSet<usize> = groups.map(|(family, _)| family.list).collect();
        let selected: HashSet<&str> = selected.iter().copied().collect();
        let siblings = self.siblings.iter().map(|names| ("share_scale", names, "siblings"));
        let paths = self.paths.iter().map(|paths| ("share_scale_of", paths, "weights"));
        let line = |(list, (what, names, of)): (usize, (&str, &Vec<String>, &str))| {
            let subject = format!("{what} {{{}}}", names.join(","));
            let absent = names.iter().filter(|name| !selected.contains(name.as_str()));
            let absent: Vec<_> = absent.map(|name| format!("`{name}`")).collect();
            if list >= self.siblings.len() && !absent.is_empty() {
                return Some(format!("{subject}: no selected weight is {}", absent.join(" or ")));
            }
            (!used.contains(&list)).then(|| format!("{subject}: no two selected {of}"))
        };
        siblings.chain(paths).enumerate().filter_map(line).collect()
    }
}
