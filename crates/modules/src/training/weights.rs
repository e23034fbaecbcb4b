//! Weights trained as if they were quantized, and packed after that.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Module, Param, Reparameterization, Reparameterizer};
use burn::tensor::{DType, Tensor};
use burn_fp4_ops::search::{Method, Sse};
use burn_fp4_ops::{Fp4Layout, Fp4Scheme, OpsError, Rounding, TensorScaling};

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::fake_quant_weight::{AMAX, FakeQuantSettings, FakeQuantWeight};
use crate::pack::job::{Job, Jobs};
use crate::pack::quantize::attach;
use crate::pack::weight::WeightTask;
use crate::report::{Fp4Report, KeepReason, Outcome};
use crate::transfer::read_vectors;
use crate::walk::parameters::{ModulePath, VisitParameters, Walk, visit_parameters};
use crate::walk::select::{ModulePlan, ParameterPlan, WeightPlan, select};

/// See [`Fp4Module::fake_quantize_fp4`](crate::Fp4Module::fake_quantize_fp4).
pub(crate) fn fake_quantize<M: Module>(
    module: &mut M,
    config: &Fp4Config,
) -> Result<Fp4Report, Fp4Error> {
    check(config)?;
    let selection = select(module, config)?;
    for (_, _, plan) in selection.plans() {
        check_plan(plan, config)?;
    }
    let mut jobs = Jobs::new(&selection);
    jobs.measure(module, config.learn_tensor_scale)?;
    let mut attach = AttachFakeQuant { config, jobs, learned: BTreeMap::new() };
    *module = module.clone().apply_reparameterization(&mut attach);
    let parameters = selection.parameters.iter().map(|(parameter, plan)| match plan {
        ParameterPlan::Keep(reason) => {
            parameter.report(Outcome::Kept { reason: reason.clone() }, parameter.bytes())
        }
        ParameterPlan::Quantize(plan) => {
            let learned = config.learn_tensor_scale;
            let outcome =
                Outcome::FakeQuantized { scheme: plan.scheme, axis: plan.layout.axis, learned };
            let amax = if learned { DType::F32.size() } else { 0 };
            parameter.report(outcome, parameter.bytes() + amax)
        }
    });
    let parameters = parameters.collect();
    Ok(Fp4Report { parameters, unused: selection.unused })
}

/// # Errors
/// [`Fp4Error::FakeQuantization`] naming what only makes sense once.
fn check(config: &Fp4Config) -> Result<(), Fp4Error> {
    let refuse = |what, reason| Err(Fp4Error::FakeQuantization { what, reason });
    if config.scheme.method.gptq().is_some() {
        return refuse("GPTQ", "it needs activations, which change as the model trains");
    }
    if config.calibration.iter().next().is_some() {
        return refuse("calibration", "the inputs of layers change as the model trains");
    }
    Ok(())
}

/// # Errors
/// As [`check`], for the scheme and method of a weight.
fn check_plan(plan: &WeightPlan, config: &Fp4Config) -> Result<(), Fp4Error> {
    let refuse = |what, reason| Err(Fp4Error::FakeQuantization { what, reason });
    let scheme: &Fp4Scheme = &plan.scheme;
    if plan.shares.is_some() {
        return refuse("a shared tensor scale", "each weight follows its own amax");
    }
    if plan.scheme.hadamard.is_some() {
        return refuse("a Hadamard transform", "layers that train do not transform their inputs");
    }
    if plan.scheme.method == Method::Sse(Sse::TensorScale) {
        return refuse("a search for the tensor scale", "every step would search again");
    }
    if plan.scheme.method.needs_inputs() {
        return refuse(
            "the scale search",
            "it needs activations, which change as the model trains",
        );
    }
    if scheme.rounding != Rounding::Nearest {
        return refuse("stochastic rounding", "every step would draw the same numbers");
    }
    if config.learn_tensor_scale {
        if !scheme.rule.row().tensor_scale {
            return refuse("a learned tensor scale", "the rule of the scheme has none");
        }
        if scheme.tensor_scale != TensorScaling::Tensor {
            return refuse("a learned tensor scale", "it begins as that of the tensor's amax");
        }
    }
    Ok(())
}

struct AttachFakeQuant<'a> {
    config: &'a Fp4Config,
    jobs: Jobs<'a>,
    /// Tied weights learn one scale.
    learned: BTreeMap<usize, Param<Tensor<1>>>,
}

impl Reparameterizer for &mut AttachFakeQuant<'_> {
    type Reparam = FakeQuantWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<FakeQuantWeight>) {
        let Some(at) = self.jobs.at(path) else { return (param, None) };
        let Job { task: WeightTask { plan, amax, .. }, source, .. } = &self.jobs.list[at];
        let settings = FakeQuantSettings {
            scheme: plan.scheme,
            axis: plan.layout.axis,
            saturated: self.config.saturated,
        };
        let amax = self.config.learn_tensor_scale.then(|| {
            let learned = self.learned.entry(*source).or_insert_with(|| {
                let device = param.lazy_device();
                let amax = amax.expect("measured, since its scale is learned");
                Param::from_tensor(Tensor::from_data([amax], (&device, DType::F32)))
            });
            learned.clone()
        });
        (param, Some(FakeQuantWeight { settings, amax }))
    }
}

/// See [`Fp4Module::convert_fp4`](crate::Fp4Module::convert_fp4).
pub(crate) fn convert<M: Module>(module: &mut M) -> Result<Fp4Report, Fp4Error> {
    let walk = Walk::over_values(module);
    let mut parameters = Vec::new();
    let mut learned = BTreeSet::new();
    for parameter in walk.parameters {
        let plan = match (&parameter.fake_quantized, &parameter.reparameterization) {
            (Some(FakeQuantSettings { scheme, axis, .. }), _) => {
                let layout = Fp4Layout::new(&parameter.shape.clone().into(), *axis, scheme);
                let layout = layout.map_err(|problem| Fp4Error::at(&parameter.path, problem))?;
                ParameterPlan::Quantize(WeightPlan { layout, shares: None, scheme: *scheme })
            }
            (None, Some(name)) => {
                return Err(Fp4Error::Attached { path: parameter.path, name: name.clone() });
            }
            (None, None) if parameter.inside_reparameterization => {
                learned.insert(parameter.path);
                continue;
            }
            (None, None) => ParameterPlan::Keep(KeepReason::NotFakeQuantized),
        };
        parameters.push((parameter, plan));
    }
    let selection = ModulePlan { parameters, unused: Vec::new() };
    if selection.plans().next().is_none() {
        return Err(Fp4Error::NothingFakeQuantized);
    }
    let mut jobs = Jobs::new(&selection);
    let mut collect =
        CollectAmaxes { learned, jobs: &jobs, numbers: Vec::new(), amaxes: Vec::new() };
    visit_parameters(module, &mut collect);
    let CollectAmaxes { numbers, amaxes, .. } = collect;
    let amaxes: Vec<_> =
        numbers.into_iter().zip(read_vectors(amaxes)?.into_iter().map(|amax| amax[0])).collect();
    if let Some(&(at, found)) = amaxes.iter().find(|(_, amax)| !amax.is_finite()) {
        return Err(Fp4Error::at(jobs.list[at].path(), OpsError::NonFinite { found }));
    }
    jobs.take_dense(module, |_| true);
    // An optimizer may have moved weights that were tied by their id apart.
    jobs.measure(module, false)?;
    jobs.replace_amaxes(amaxes.into_iter());
    // Burn takes attachments off a module as a whole.
    let mut packed = module.clone().materialize();
    let report = attach(&mut packed, &selection, jobs).map_err(|error| match error {
        // Of a copy, which is dropped.
        Fp4Error::Partial { problem, .. } => *problem,
        error => error,
    })?;
    *module = packed;
    Ok(report)
}

/// Collects learned amaxes, by the jobs of their weights.
struct CollectAmaxes<'a> {
    learned: BTreeSet<String>,
    jobs: &'a Jobs<'a>,
    numbers: Vec<usize>,
    amaxes: Vec<Tensor<1>>,
}

impl VisitParameters for CollectAmaxes<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        let path = path.join();
        if !self.learned.contains(&path) {
            return;
        }
        let attached = format!(".{}.{AMAX}", FakeQuantWeight::NAME);
        let weight = path.strip_suffix(&attached).unwrap_or(&path);
        if let Some(at) = self.jobs.at(weight) {
            self.numbers.push(at);
            self.amaxes.push(param.base().without_autodiff().cast(DType::F32).abs().reshape([1]));
        }
    }
}
