//! Weights trained as if they were quantized, and packed after that.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Module, Param, Reparameterization, Reparameterizer};
use burn::tensor::{DType, Tensor};
use burn_fp4_ops::search::ChosenBy;
use burn_fp4_ops::{Fp4Layout, Fp4Scheme, OpsError, Rounding, TensorScaling};

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::fake_quant_weight::{AMAX, FakeQuantSettings, FakeQuantWeight};
use crate::pack::install::{DenseValues, PackSource, pack};
use crate::pack::measure::measure;
use crate::report::{Fp4Report, Outcome, Reason};
use crate::transfer::read_vectors;
use crate::walk::parameters::Walk;
use crate::walk::paths::{ModulePath, VisitParameters, visit_parameters};
use crate::walk::plan::{Decision, Selection, WeightPlan};
use crate::walk::select::select;

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
    let measured = measure(module, &selection, config.learn_tensor_scale)?;
    let plans = selection.plans().map(|(at, parameter, plan)| {
        let tied_to = measured.tied_to(at);
        (parameter.path.as_str(), (plan, tied_to, measured.amax(at)))
    });
    let learned = BTreeMap::new();
    let mut attach = AttachFakeQuant { config, plans: plans.collect(), learned };
    *module = module.clone().apply_reparameterization(&mut attach);
    let parameters = selection.decisions.iter().map(|(parameter, decision)| match decision {
        Decision::Keep(reason) => {
            parameter.report(Outcome::Kept { reason: reason.clone() }, parameter.bytes())
        }
        Decision::Quantize(plan) => {
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
    if config.chosen_by(&config.scheme).gptq().is_some() {
        return refuse("GPTQ", "it needs activations, which change as the model trains");
    }
    if config.calibration.iter().next().is_some() {
        return refuse("calibration", "the inputs of layers change as the model trains");
    }
    if !config.share_scale.is_empty() {
        return refuse("a shared tensor scale", "each weight follows its own amax");
    }
    Ok(())
}

/// # Errors
/// As [`check`], for the scheme and method of a weight.
fn check_plan(plan: &WeightPlan, config: &Fp4Config) -> Result<(), Fp4Error> {
    let refuse = |what, reason| Err(Fp4Error::FakeQuantization { what, reason });
    let scheme: &Fp4Scheme = &plan.scheme;
    if plan.asked == ChosenBy::SseTensorScale {
        return refuse("a search for the tensor scale", "every step would search again");
    }
    if plan.asked.needs_inputs() {
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
    /// By path: the plan, the weight that it is tied to, and its amax.
    plans: BTreeMap<&'a str, (&'a WeightPlan, usize, Option<f32>)>,
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
        let Some(&(plan, tied_to, amax)) = self.plans.get(path) else { return (param, None) };
        let settings = FakeQuantSettings {
            scheme: plan.scheme,
            axis: plan.layout.axis,
            saturated: self.config.saturated,
        };
        let amax = self.config.learn_tensor_scale.then(|| {
            let learned = self.learned.entry(tied_to).or_insert_with(|| {
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
    let mut decisions = Vec::new();
    let mut learned = BTreeSet::new();
    for parameter in walk.parameters {
        let decision = match (&parameter.fake_quantized, &parameter.reparameterization) {
            (Some(FakeQuantSettings { scheme, axis, .. }), _) => {
                let layout = Fp4Layout::new(&parameter.shape.clone().into(), *axis, scheme);
                let layout = layout.map_err(|problem| Fp4Error::at(&parameter.path, problem))?;
                let asked = ChosenBy::Search(scheme.search);
                Decision::Quantize(WeightPlan { layout, shares: None, scheme: *scheme, asked })
            }
            (None, Some(name)) => {
                return Err(Fp4Error::Attached { path: parameter.path, name: name.clone() });
            }
            (None, None) if parameter.inside_reparameterization => {
                learned.insert(parameter.path);
                continue;
            }
            (None, None) => Decision::Keep(Reason::NotFakeQuantized),
        };
        decisions.push((parameter, decision));
    }
    let selection = Selection { decisions, unused: Vec::new() };
    if selection.plans().next().is_none() {
        return Err(Fp4Error::NothingFakeQuantized);
    }
    let numbers: BTreeMap<String, usize> =
        selection.plans().map(|(at, parameter, _)| (parameter.path.clone(), at)).collect();
    let mut collect =
        Collect { wanted: &numbers, learned, dense: BTreeMap::new(), amaxes: Vec::new() };
    visit_parameters(module, &mut collect);
    let mut amaxes = BTreeMap::new();
    for (path, amax) in read_vectors(collect.amaxes)? {
        if !amax[0].is_finite() {
            return Err(Fp4Error::at(path, OpsError::NonFinite { found: amax[0] }));
        }
        amaxes.insert(numbers[&path], amax[0]);
    }
    // An optimizer may have moved weights that were tied by their id apart.
    let measured = measure(module, &selection, false)?.with_amaxes(amaxes);
    // Burn takes attachments off a module as a whole.
    let mut packed = module.clone().materialize();
    let source = PackSource { measured, dense: Some(collect.dense), ..PackSource::default() };
    let report = pack(&mut packed, &selection, source).map_err(|error| match error {
        // Of a copy, which is dropped.
        Fp4Error::Partial { problem, .. } => *problem,
        error => error,
    })?;
    *module = packed;
    Ok(report)
}

/// Collects the stored values of weights, and learned amaxes by the paths of their weights.
struct Collect<'a> {
    wanted: &'a BTreeMap<String, usize>,
    learned: BTreeSet<String>,
    dense: BTreeMap<String, DenseValues>,
    amaxes: Vec<(String, Tensor<1>)>,
}

impl VisitParameters for Collect<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        let path = path.join();
        if self.wanted.contains_key(&path) {
            self.dense.insert(path, DenseValues::new(param.base().without_autodiff()));
        } else if self.learned.contains(&path) {
            let amax = param.base().without_autodiff().cast(DType::F32).abs().reshape([1]);
            let attached = format!(".{}.{AMAX}", FakeQuantWeight::NAME);
            let weight = path.strip_suffix(&attached).unwrap_or(&path);
            self.amaxes.push((weight.to_owned(), amax));
        }
    }
}
