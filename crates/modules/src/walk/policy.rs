//! A configuration and the parameters of a module, as the policy has them.

use std::collections::{BTreeMap, BTreeSet};

use burn_fp4_policy::{Constraints, Decision, Fused, Patterns, Policy, Reason, Recipe, WeightInfo};

use crate::config::{Fp4Config, Override};
use crate::error::Fp4Error;
use crate::walk::parameters::Parameter;

/// The choices of a configuration for the weights of its containers.
fn policy_of(config: &Fp4Config) -> Policy {
    let recipe = Recipe {
        keep: config.exclude.clone(),
        only: config.include.clone(),
        first_layers_high_precision: Some(config.keep_first),
        last_layers_high_precision: Some(config.keep_last),
        ..Recipe::default()
    };
    let scheme = |one: &Override| (one.pattern.clone(), one.change.of(&config.scheme));
    let overrides = config.overrides.iter().map(scheme);
    Policy::with_schemes(recipe, config.scheme, overrides)
}

/// Checks that nothing else than `quantize_fp4` is to keep a budget.
///
/// # Errors
/// [`Fp4Error::Sensitivity`]: a budget is not a decision about each parameter yet.
pub(crate) fn check_no_budget(config: &Fp4Config) -> Result<(), Fp4Error> {
    match config.budget {
        None => Ok(()),
        Some(_) => Err(Fp4Error::Sensitivity(
            "only `quantize_fp4` keeps a budget: choose formats by `fp4_sensitivity` before",
        )),
    }
}

/// The names that patterns may have: the path of a parameter, and that of its module.
pub(crate) fn names(parameter: &Parameter) -> [&str; 2] {
    let path = parameter.path.as_str();
    [path, path.strip_suffix(".weight").unwrap_or(path)]
}

/// Decides about parameters. `fits` says which of them could be quantized at all.
///
/// # Errors
/// [`Fp4Error::Policy`] and [`Fp4Error::Scheme`].
pub(crate) fn decide(
    parameters: &[Parameter],
    fits: &[bool],
    config: &Fp4Config,
) -> Result<Vec<Decision>, Fp4Error> {
    let policy = policy_of(config);
    let constraints = Constraints {
        dialect: "",
        columns: &|_, block_size| block_size,
        // Groups are formed from the siblings of the configuration, whatever their schemes are.
        fused: Fused::Apart,
        turns: true,
        tensor_scales: true,
    };
    let info = |at: usize| info(&parameters[at], config, fits[at]);
    let weights: Vec<_> = (0..parameters.len()).map(info).collect();
    let mut decisions = policy.decide(&weights, &constraints)?.weights;
    // A layer may be each of the chosen weights.
    for (at, layer, count) in layers(parameters, &decisions) {
        if policy.recipe().dense_layers(count).iter().any(|layers| layers.contains(&layer)) {
            decisions[at] = Decision::Keep(Reason::Layer(layer));
        }
    }
    Ok(decisions)
}

/// A parameter as decisions are made about it.
fn info<'p>(parameter: &'p Parameter, config: &Fp4Config, fits: bool) -> WeightInfo<'p> {
    let container = config.containers.iter().find(|known| known.name == parameter.container);
    let length = container.and_then(|container| parameter.shape.get(container.axis));
    let [name, module] = names(parameter);
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
pub(crate) fn is_chosen(decision: &Decision) -> bool {
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

/// Lines about the patterns that fit no parameter, and the overrides that fit no chosen one.
pub(crate) fn unused_patterns(
    parameters: &[Parameter],
    decisions: &[Decision],
    config: &Fp4Config,
) -> Result<Vec<String>, Fp4Error> {
    let mut lines = Vec::new();
    for (what, patterns) in [("include", &config.include), ("exclude", &config.exclude)] {
        let all = parameters.iter().map(names);
        let unused = Patterns::new(patterns)?.unused(all);
        let line = |at: usize| format!("{what} `{}` fits no parameter", patterns[at]);
        lines.extend(unused.into_iter().map(line));
    }
    let overrides = Patterns::new(config.overrides.iter().map(|one| &one.pattern))?;
    let chosen = parameters.iter().zip(decisions).filter(|(_, decision)| is_chosen(decision));
    for at in overrides.unused(chosen.map(|(parameter, _)| names(parameter))) {
        lines.push(format!("with `{}` fits no selected weight", config.overrides[at].pattern));
    }
    Ok(lines)
}

/// Lines about the containers that were added and that no parameter lies in.
pub(crate) fn unused_containers(parameters: &[Parameter], config: &Fp4Config) -> Vec<String> {
    let known: BTreeSet<_> = parameters.iter().map(|one| one.container.as_str()).collect();
    let added = config.containers.iter().map(|container| container.name.as_str());
    let default = |name: &str| Fp4Config::CONTAINERS.iter().any(|(known, _)| *known == name);
    let added = added.filter(|name| !default(name) && !known.contains(name));
    added.map(|name| format!("container `{name}` holds no parameter")).collect()
}
