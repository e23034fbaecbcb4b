//! One walk over a module that decides about every float parameter.

use std::collections::BTreeSet;

use burn::module::Module;
use burn_fp4_ops::OpsError;
use burn_fp4_policy::{Decision as Decided, Reason as Why};

use crate::config::{Fp4Config, Indivisible, Unused};
use crate::error::Fp4Error;
use crate::report::Reason;
use crate::walk::parameters::{Parameter, Walk};
use crate::walk::plan::{Decision, Selection, plan_selected};
use crate::walk::policy::{check_no_budget, decide, is_chosen, unused_containers, unused_patterns};
use crate::walk::scale_groups::shared_scales;

/// Decides about every float parameter of a module, which initializes them.
///
/// # Errors
/// [`Fp4Error::Policy`], [`Fp4Error::Scheme`], [`Fp4Error::SharedScale`], [`Fp4Error::Axis`] and
/// [`Fp4Error::Parameter`] for a configuration that does not fit the module;
/// [`Fp4Error::NothingSelected`] with the reasons; [`Fp4Error::Unused`]; [`Fp4Error::Sensitivity`]
/// for a budget, which is not a decision about each parameter yet.
pub(crate) fn select<M: Module>(module: &M, config: &Fp4Config) -> Result<Selection, Fp4Error> {
    check_no_budget(config)?;
    let parameters = Walk::over_values(module).parameters;
    let unfit: Vec<Option<Reason>> = parameters
        .iter()
        .map(|parameter| parameter.attached().or_else(|| unfit(parameter, config)))
        .collect();
    let fits: Vec<bool> = unfit.iter().map(Option::is_none).collect();
    let decided = decide(&parameters, &fits, config)?;
    let schemes: Vec<_> = decided
        .iter()
        .map(|decision| match decision {
            Decided::Quantize { scheme, .. } => Some(*scheme),
            Decided::Keep(_) => None,
        })
        .collect();
    let groups = shared_scales(&parameters, &schemes, config)?;
    let mut unused = unused_patterns(&parameters, &decided, config)?;
    unused.extend(unused_containers(&parameters, config));

    let mut decisions = Vec::with_capacity(parameters.len());
    for (at, (parameter, decided)) in parameters.into_iter().zip(decided).enumerate() {
        let decision = match (&unfit[at], decided) {
            (Some(reason), _) => Decision::Keep(reason.clone()),
            (None, Decided::Keep(reason)) => Decision::Keep(kept(&parameter, reason, config)?),
            (None, Decided::Quantize { scheme, .. }) => {
                let mut plan = plan_selected(&parameter, &scheme, config)?;
                plan.shares = groups.of.get(&at).cloned();
                Decision::Quantize(plan)
            }
        };
        decisions.push((parameter, decision));
    }
    let mut selection = Selection { decisions, unused };
    if selection.plans().next().is_none() {
        return Err(nothing_selected(&selection, config));
    }
    selection.unused.extend(groups.unused);
    if config.unused == Unused::Error && !selection.unused.is_empty() {
        return Err(Fp4Error::Unused(selection.unused));
    }
    selection.unused.extend(groups.lone);
    Ok(selection)
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
    let plans = selection.plans().filter(|(_, _, plan)| plan.scheme.method.needs_inputs());
    Ok(plans.map(|(_, parameter, plan)| (parameter.path.clone(), plan.layout.axis)).collect())
}

fn nothing_selected(selection: &Selection, config: &Fp4Config) -> Fp4Error {
    let quantized = quantized_already(selection, config);
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

/// The paths of weights that would be selected if they were not quantized already.
fn quantized_already(selection: &Selection, config: &Fp4Config) -> Vec<String> {
    let quantized = selection.decisions.iter().filter_map(|(parameter, decision)| match decision {
        Decision::Keep(Reason::AlreadyQuantized) => Some(parameter.clone()),
        Decision::Keep(_) | Decision::Quantize(_) => None,
    });
    let quantized: Vec<Parameter> = quantized.collect();
    let fits: Vec<bool> = quantized.iter().map(|one| unfit(one, config).is_none()).collect();
    let all = Fp4Config { keep_first: 0, keep_last: 0, ..config.clone() };
    let chosen = decide(&quantized, &fits, &all).unwrap_or_default();
    let chosen = quantized.into_iter().zip(chosen).filter(|(_, decision)| is_chosen(decision));
    chosen.map(|(parameter, _)| parameter.path).collect()
}

/// Finds the reason for which no configuration of these containers could select a parameter,
/// whatever is attached to it.
fn unfit(parameter: &Parameter, config: &Fp4Config) -> Option<Reason> {
    if parameter.shape.len() < 2 {
        return Some(Reason::Rank);
    }
    if !config.containers.iter().any(|container| container.name == parameter.container) {
        return Some(Reason::Container);
    }
    parameter.shape.contains(&0).then_some(Reason::Empty)
}

/// Returns the reason for which a parameter that fits is kept.
///
/// # Errors
/// [`Fp4Error::Parameter`] if blocks do not divide it, unless the configuration says to skip it.
fn kept(parameter: &Parameter, reason: Why, config: &Fp4Config) -> Result<Reason, Fp4Error> {
    Ok(match reason {
        Why::Asked(pattern) => Reason::Excluded { pattern },
        Why::Layer(layer) if layer < config.keep_first => Reason::FirstLayers { layer },
        Why::Layer(layer) => Reason::LastLayers { layer },
        Why::Columns { cols: length, of: block_size } => {
            let container = config.containers.iter().find(|one| one.name == parameter.container);
            let axis = container.expect("it is in a container").axis;
            if config.indivisible == Indivisible::Error {
                let problem = OpsError::Indivisible { axis, length, block_size };
                return Err(Fp4Error::at(&parameter.path, problem));
            }
            Reason::Indivisible { axis, length, block_size }
        }
        // The only other choice of a configuration.
        _ => Reason::NotIncluded,
    })
}
