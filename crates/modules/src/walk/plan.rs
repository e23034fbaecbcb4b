//! How a parameter is quantized: its layout, scheme and method.

use std::collections::BTreeSet;

use burn::tensor::DType;
use burn_fp4_ops::search::Method;
use burn_fp4_ops::{Fp4Layout, Fp4Scheme, OpsError};
use burn_fp4_policy::Patterns;

use crate::config::{Fp4Config, Unused};
use crate::error::Fp4Error;
use crate::report::KeepReason;
use crate::walk::parameters::Parameter;

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

/// How a selected parameter is to be quantized.
pub(crate) fn plan_selected(
    parameter: &Parameter,
    scheme: &Fp4Scheme,
    config: &Fp4Config,
) -> Result<WeightPlan, Fp4Error> {
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
    let plan = plan_along(parameter, container.axis, scheme);
    plan.map_err(|problem| Fp4Error::at(path, problem))
}

/// How a configuration quantizes parameters along these axes, whether it selects them or not.
///
/// # Errors
/// [`Fp4Error::Unused`] for an override that fits none of them, [`Fp4Error::Parameter`].
pub(crate) fn plans_as<'a>(
    parameters: impl Iterator<Item = (&'a Parameter, usize)>,
    config: &Fp4Config,
) -> Result<Vec<WeightPlan>, Fp4Error> {
    check_no_budget(config)?;
    let patterns = Patterns::new(config.overrides.iter().map(|one| &one.pattern))?;
    let mut plans = Vec::new();
    let mut used = BTreeSet::new();
    for (parameter, axis) in parameters {
        let matches: Vec<usize> = patterns.matches(parameter.names()).collect();
        let last = matches.iter().max().map(|&at| config.overrides[at].change);
        let scheme = last.map_or(config.scheme, |change| change.of(&config.scheme));
        used.extend(matches);
        scheme.validate().map_err(OpsError::from)?;
        let plan = plan_along(parameter, axis, &scheme);
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
