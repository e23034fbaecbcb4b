//! One walk over a module that decides about every float parameter.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::Module;
use burn_fp4_ops::{Fp4Scheme, OpsError};

use crate::config::{Fp4Config, Unused};
use crate::error::Fp4Error;
use crate::report::Reason;
use crate::walk::parameters::{Parameter, Walk};
use crate::walk::patterns::{Patterns, unused_containers};
use crate::walk::plan::{Decision, Selection, plan_selected};
use crate::walk::scale_groups::shared_scales;

/// Decides about every float parameter of a module, which initializes them.
///
/// # Errors
/// [`Fp4Error::Pattern`], [`Fp4Error::Scheme`], [`Fp4Error::SharedScale`], [`Fp4Error::Axis`] and
/// [`Fp4Error::Parameter`] for a configuration that does not fit the module;
/// [`Fp4Error::NothingSelected`] with the reasons; [`Fp4Error::Unused`]; [`Fp4Error::Sensitivity`]
/// for a budget, which is not a decision about each parameter yet.
pub(crate) fn select<M: Module>(module: &M, config: &Fp4Config) -> Result<Selection, Fp4Error> {
    let patterns = Patterns::new(config)?;
    let parameters = Walk::over_values(module).parameters;
    let mut reasons: Vec<Option<Reason>> =
        parameters.iter().map(|parameter| refusal(parameter, config, &patterns)).collect();
    keep_layers(&parameters, &mut reasons, config);
    let schemes: Vec<_> =
        parameters.iter().map(|parameter| patterns.scheme(&parameter.path, config)).collect();
    for (scheme, _) in schemes.iter().zip(&reasons).filter(|(_, reason)| reason.is_none()) {
        check_method(scheme, config)?;
    }
    let groups = shared_scales(&parameters, &reasons, &schemes, config)?;
    let mut unused = patterns.unused(&parameters, &reasons, config);
    unused.extend(unused_containers(&parameters, config));

    let mut decisions = Vec::with_capacity(parameters.len());
    for (index, (parameter, reason)) in parameters.into_iter().zip(reasons).enumerate() {
        let decision = match reason {
            Some(reason) => Decision::Keep(reason),
            None => match plan_selected(&parameter, &schemes[index], config)? {
                Ok(mut plan) => {
                    plan.shares = groups.of.get(&index).cloned();
                    Decision::Quantize(plan)
                }
                Err(reason) => Decision::Keep(reason),
            },
        };
        decisions.push((parameter, decision));
    }
    let mut selection = Selection { decisions, unused };
    if selection.plans().next().is_none() {
        return Err(nothing_selected(&selection, config, &patterns));
    }
    selection.unused.extend(groups.unused(config));
    if config.unused == Unused::Error && !selection.unused.is_empty() {
        return Err(Fp4Error::Unused(selection.unused));
    }
    selection.unused.extend(groups.lone);
    Ok(selection)
}

/// # Errors
/// [`Fp4Error::Scheme`] if a scheme is inconsistent, or does not go with the method.
pub(crate) fn check_method(scheme: &Fp4Scheme, config: &Fp4Config) -> Result<(), Fp4Error> {
    let validated = scheme.validate().and_then(|()| config.chosen_by(scheme).validate(scheme));
    Ok(validated.map_err(OpsError::from)?)
}

/// Paths of the parameters that a configuration selects and whose codes depend on their inputs,
/// with the axis that is contracted.
///
/// # Errors
/// As [`select`]. Whether there are statistics ([`Fp4Error::Uncalibrated`]) is not checked here.
pub(crate) fn planned_axes<M: Module>(
    module: &M,
    config: &Fp4Config,
) -> Result<BTreeSet<(String, usize)>, Fp4Error> {
    let selection = select(module, config)?;
    let plans = selection.plans().filter(|(_, _, plan)| plan.asked.needs_inputs());
    Ok(plans.map(|(_, parameter, plan)| (parameter.path.clone(), plan.layout.axis)).collect())
}

fn nothing_selected(selection: &Selection, config: &Fp4Config, patterns: &Patterns) -> Fp4Error {
    let is_quantized = |(parameter, decision): &&(Parameter, Decision)| {
        matches!(decision, Decision::Keep(Reason::AlreadyQuantized))
            && unselected(parameter, config, patterns).is_none()
    };
    let quantized = selection.decisions.iter().filter(is_quantized);
    let quantized: Vec<_> = quantized.map(|(parameter, _)| parameter.path.clone()).collect();
    if !quantized.is_empty() {
        return Fp4Error::AlreadyQuantized(quantized);
    }
    let reasons = selection.decisions.iter().filter_map(|(parameter, decision)| match decision {
        Decision::Keep(reason) => Some(format!("\n  {}: {reason}", parameter.path)),
        Decision::Quantize(_) => None,
    });
    let unused = selection.unused.iter().map(|line| format!("\n  {line}"));
    Fp4Error::NothingSelected(reasons.chain(unused).collect())
}

/// Why a parameter is not selected, before layers at the ends are kept.
fn refusal(parameter: &Parameter, config: &Fp4Config, patterns: &Patterns) -> Option<Reason> {
    parameter.attached().or_else(|| unselected(parameter, config, patterns))
}

/// Why a configuration does not select a parameter, whatever is attached to it.
fn unselected(parameter: &Parameter, config: &Fp4Config, patterns: &Patterns) -> Option<Reason> {
    if parameter.shape.len() < 2 {
        return Some(Reason::Rank);
    }
    if !config.containers.iter().any(|container| container.name == parameter.container) {
        return Some(Reason::Container);
    }
    if parameter.shape.contains(&0) {
        return Some(Reason::Empty);
    }
    if !patterns.includes(&parameter.path) {
        return Some(Reason::NotIncluded);
    }
    if let Some(pattern) = patterns.excluded_by(&parameter.path) {
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
