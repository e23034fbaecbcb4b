//! Adapters over packed weights: [`Fp4Module::lora_fp4`](crate::Fp4Module::lora_fp4).

use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Lora, LoraAdapter, Module, Param, Reparameterization, Reparameterizer};
use burn::tensor::{FloatDType, Tensor};

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::pack::edit::{edit_packed, packed_weights};
use crate::pack::outcome::PackedWeights;
use crate::pack::weight::{Choice, quantize_without_inputs};
use crate::packed_weight::{Edit, PackedWeight, edit_next, with_edits};
use crate::report::{Fp4Report, Outcome, Reason};
use crate::walk::parameters::Walk;
use crate::walk::plan::{WeightPlan, plans_as};

/// See [`Fp4Module::lora_fp4`](crate::Fp4Module::lora_fp4).
pub(crate) fn attach<M: Module>(module: &mut M, lora: &Lora) -> Result<Vec<String>, Fp4Error> {
    let packed = packed_weights(module);
    for parameter in Walk::over(module).parameters {
        let other = parameter.reparameterization.filter(|name| name != PackedWeight::NAME);
        let adapted = packed.get(&parameter.path).is_some_and(|packed| packed.adapter().is_some());
        let name = other.or_else(|| adapted.then(|| LoraAdapter::NAME.to_owned()));
        if let Some(name) = name {
            return Err(Fp4Error::Attached { path: parameter.path, name });
        }
    }
    if lora.rank == 0 || !lora.alpha.is_finite() {
        return Err(Fp4Error::NothingAdapted("the rank is 0, or alpha is not finite"));
    }
    let packed = packed.into_keys().collect();
    let mut attach = AttachAdapters { lora: lora.clone(), packed, adapted: Vec::new() };
    let adapted = with_edits(|| module.clone().apply_reparameterization(&mut attach));
    if attach.adapted.is_empty() {
        return Err(Fp4Error::NothingAdapted("its parameter group has no weight of rank 2"));
    }
    *module = adapted;
    Ok(attach.adapted)
}

/// Attaches adapters to dense weights as Burn does, and hands them to packed ones.
struct AttachAdapters {
    lora: Lora,
    packed: BTreeSet<String>,
    adapted: Vec<String>,
}

impl Reparameterizer for &mut AttachAdapters {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        let (base, adapter) = self.lora.reparameterize(path, param);
        if adapter.is_some() {
            self.adapted.push(path.to_owned());
        }
        // What is attached already is mapped next.
        if self.packed.contains(path) {
            edit_next(Box::new(|packed| packed.with_adapter(adapter)));
            return (base, None);
        }
        (base, adapter)
    }
}

/// See [`Fp4Module::merge_lora_fp4`](crate::Fp4Module::merge_lora_fp4).
pub(crate) fn merge<M: Module>(module: &mut M, config: &Fp4Config) -> Result<Fp4Report, Fp4Error> {
    let adapted: BTreeMap<String, PackedWeight> = packed_weights(module)
        .into_iter()
        .filter(|(_, packed)| packed.adapter().is_some())
        .collect();
    if adapted.is_empty() {
        return Err(Fp4Error::NothingAdapted("no packed weight has an adapter"));
    }
    let walk = Walk::over_values(module);
    let parameters: Vec<_> =
        walk.parameters.iter().filter(|one| adapted.contains_key(&one.path)).collect();
    let axes = parameters.iter().map(|one| (*one, adapted[&one.path].layout().axis));
    let plans = plans_as(axes, config)?;
    let mut edits: BTreeMap<String, Edit> = BTreeMap::new();
    let mut merged = PackedWeights::default();
    let mut plan_of = BTreeMap::new();
    for (parameter, plan) in parameters.into_iter().zip(plans) {
        let path = &parameter.path;
        if plan.asked.needs_inputs() {
            return Err(uncalibrated(&plan, adapted));
        }
        let named = |problem| Fp4Error::at(path, problem);
        let dtype = parameter.stored_dtype();
        let dense = merged_values(&adapted[path], dtype.into());
        let WeightPlan { layout, scheme, asked, .. } = &plan;
        let tensor = quantize_without_inputs(dense.clone(), layout.axis, scheme, *asked);
        let tensor = tensor.map_err(named)?;
        merged.add(path, &tensor, dtype, Some(dense)).map_err(named)?;
        let quantized = PackedWeight::from(tensor);
        edits.insert(path.clone(), Box::new(move |_| quantized));
        plan_of.insert(path.clone(), plan);
    }
    let merged = merged.read()?;
    *module = edit_packed(module.clone(), edits);
    // The factors of merged adapters are no longer parameters.
    let inside = format!(".{}.", PackedWeight::NAME);
    let gone = |path: &str| {
        path.rsplit_once(&inside).is_some_and(|(weight, _)| merged.contains_key(weight))
    };
    let parameters = walk.parameters.iter().filter(|parameter| !gone(&parameter.path));
    let parameters = parameters.map(|parameter| match merged.get(&parameter.path) {
        None => {
            let reason = parameter.attached().unwrap_or(Reason::NotAdapted);
            parameter.report(Outcome::Kept { reason }, parameter.bytes_now())
        }
        Some(facts) => {
            let plan = &plan_of[&parameter.path];
            let choice = Choice { chosen_by: plan.asked, fallback: None };
            facts.quantized(parameter, plan, plan.scheme, &choice)
        }
    });
    Ok(Fp4Report { parameters: parameters.collect(), unused: Vec::new() })
}

fn uncalibrated(plan: &WeightPlan, adapted: BTreeMap<String, PackedWeight>) -> Fp4Error {
    let (method, paths) = (plan.asked.to_string(), adapted.into_keys().collect());
    Fp4Error::Uncalibrated { method, paths }
}

/// The dense values of a packed weight plus the product of its adapter, in some dtype.
fn merged_values(packed: &PackedWeight, dtype: FloatDType) -> Tensor<2> {
    let device = packed.device();
    let base: Tensor<2> = Tensor::zeros([1, 1], (&device, dtype.into()));
    packed.valid().apply(base)
}
