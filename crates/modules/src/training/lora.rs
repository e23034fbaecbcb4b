//! Adapters over packed and dense weights: [`Fp4Module::lora_fp4`](crate::Fp4Module::lora_fp4).

use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Lora, LoraAdapter, Module, Param, Reparameterization, Reparameterizer};
use burn::tensor::{DType, FloatDType, Tensor};
use burn_fp4_ops::amax;

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::pack::job::PackedFacts;
use crate::pack::packed_parameter::{
    check_nothing_trained, packed_weights, with_packed, with_values,
};
use crate::pack::weight::{MethodUsed, quantize_without_inputs};
use crate::packed_weight::{PackedWeight, edit_next, with_edits};
use crate::report::{Fp4Report, KeepReason, Outcome};
use crate::transfer::read_vectors;
use crate::walk::parameters::{
    MapParameters, ModulePath, Parameter, VisitParameters, Walk, map_parameters, visit_parameters,
};
use crate::walk::select::{WeightPlan, plans_as};

/// See [`Fp4Module::lora_fp4`](crate::Fp4Module::lora_fp4).
pub(crate) fn attach<M: Module>(module: &mut M, lora: &Lora) -> Result<Fp4Report, Fp4Error> {
    let packed = packed_weights(module);
    let parameters = Walk::over_values(module).parameters;
    check_nothing_trained(&parameters, &packed)?;
    if lora.rank == 0 || !lora.alpha.is_finite() {
        return Err(Fp4Error::NothingAdapted("the rank is 0, or alpha is not finite"));
    }
    let packed = packed.into_keys().collect();
    let mut attach = AttachAdapters { lora: lora.clone(), packed, adapted: BTreeMap::new() };
    let module_adapted = with_edits(|| module.clone().apply_reparameterization(&mut attach));
    let adapted = attach.adapted;
    if adapted.is_empty() {
        return Err(Fp4Error::NothingAdapted("its parameter group has no weight of rank 2"));
    }
    *module = module_adapted;
    let report = |parameter: &Parameter| {
        let reason = match adapted.get(&parameter.path) {
            Some((outcome, bytes)) => {
                return parameter.report(outcome.clone(), parameter.bytes_now() + bytes);
            }
            None if parameter.shape.len() != 2 => KeepReason::Rank,
            None if parameter.shape.contains(&0) => KeepReason::Empty,
            None => KeepReason::NotInGroup,
        };
        parameter.report(Outcome::Kept { reason }, parameter.bytes_now())
    };
    Ok(Fp4Report { parameters: parameters.iter().map(report).collect(), unused: Vec::new() })
}

/// Attaches adapters to dense weights as Burn does, and hands them to packed ones.
struct AttachAdapters {
    lora: Lora,
    packed: BTreeSet<String>,
    /// By path what is reported, and the bytes of the factors.
    adapted: BTreeMap<String, (Outcome, usize)>,
}

impl Reparameterizer for &mut AttachAdapters {
    type Reparam = LoraAdapter;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LoraAdapter>) {
        if param.lazy_shape().contains(&0) {
            return (param.set_require_grad(false), None);
        }
        let (base, adapter) = self.lora.reparameterize(path, param);
        if let Some(LoraAdapter { a, b, scale }) = &adapter {
            let values = a.shape().num_elements() + b.shape().num_elements();
            let outcome = Outcome::Adapted { rank: self.lora.rank, scale: *scale };
            self.adapted.insert(path.to_owned(), (outcome, values * a.dtype().size()));
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
    let mut packed = packed_weights(module);
    let parameters: Vec<Parameter> = Walk::over_values(module).parameters;
    let dense = dense_adapted(&parameters)?;
    let mut merged = merge_packed(&mut packed, &parameters, config)?;
    if dense.is_empty() && merged.is_empty() {
        return Err(Fp4Error::NothingAdapted("no weight has an adapter"));
    }
    let mut cast = Cast { dtypes: &dense };
    let folded = map_parameters(with_packed(module.clone(), packed), &mut cast);
    check_finite(&folded, &dense)?;
    PackedFacts::read(merged.values_mut().map(|(_, facts)| facts))?;
    *module = folded;
    // The factors of merged adapters are no longer parameters.
    let left = parameters.iter().filter(|parameter| !parameter.inside_reparameterization);
    let report = left.map(|parameter| match merged.get(parameter.path.as_str()) {
        None if dense.contains_key(&parameter.path) => {
            parameter.report(Outcome::Merged, parameter.bytes())
        }
        None => {
            let reason = parameter.attached().unwrap_or(KeepReason::NotAdapted);
            parameter.report(Outcome::Kept { reason }, parameter.bytes_now())
        }
        Some((plan, facts)) => {
            let used = MethodUsed { method: plan.scheme.method, fallback: None };
            facts.quantized(parameter, plan, &used)
        }
    });
    Ok(Fp4Report { parameters: report.collect(), unused: Vec::new() })
}

/// The dense weights with an adapter, by path, and the dtypes that they keep.
///
/// # Errors
/// [`Fp4Error::Attached`] for what is neither an adapter nor a packed weight, and would stay.
fn dense_adapted(parameters: &[Parameter]) -> Result<BTreeMap<String, DType>, Fp4Error> {
    let mut dense = BTreeMap::new();
    for parameter in parameters {
        let path = parameter.path.clone();
        match parameter.reparameterization.as_deref() {
            Some(LoraAdapter::NAME) => {
                dense.insert(path, parameter.stored_dtype());
            }
            None | Some(PackedWeight::NAME) => {}
            Some(name) => return Err(Fp4Error::Attached { path, name: name.to_owned() }),
        }
    }
    Ok(dense)
}

/// The weights that adapters were merged into, by path.
type Merged<'a> = BTreeMap<&'a str, (WeightPlan, PackedFacts)>;

/// Replaces the packed weights that have an adapter by the quantized sums.
fn merge_packed<'a>(
    packed: &mut BTreeMap<String, PackedWeight>,
    parameters: &'a [Parameter],
    config: &Fp4Config,
) -> Result<Merged<'a>, Fp4Error> {
    let axis = |one: &Parameter| {
        packed.get(&one.path).filter(|one| one.is_adapted()).map(|one| one.layout().axis)
    };
    let plans = plans_as(parameters, axis, config)?;
    let paths: Vec<String> = plans.iter().map(|(one, _)| one.path.clone()).collect();
    let mut merged = Merged::new();
    for (parameter, plan) in plans {
        let path = &parameter.path;
        if plan.scheme.method.needs_inputs() {
            return Err(Fp4Error::Uncalibrated { method: plan.scheme.method.to_string(), paths });
        }
        let named = |problem| Fp4Error::at(path, problem);
        let dtype = parameter.stored_dtype();
        let dense = merged_values(&packed[path], dtype.into());
        let WeightPlan { layout, scheme, .. } = &plan;
        let tensor = quantize_without_inputs(dense.clone(), layout.axis, scheme);
        let tensor = tensor.map_err(named)?;
        let facts = PackedFacts::new(&tensor, dtype, Some((dense, None))).map_err(named)?;
        let activations = packed[path].activations();
        packed.insert(path.clone(), PackedWeight::from(tensor).with_activations(activations));
        merged.insert(path, (plan, facts));
    }
    Ok(merged)
}

/// The dense values of a packed weight plus the product of its adapter, in some dtype.
fn merged_values(packed: &PackedWeight, dtype: FloatDType) -> Tensor<2> {
    let device = packed.device();
    let base: Tensor<2> = Tensor::zeros([1, 1], (&device, dtype.into()));
    packed.valid().apply(base)
}

/// Casts weights back to the dtypes that they had before factors of another one were added.
struct Cast<'a> {
    dtypes: &'a BTreeMap<String, DType>,
}

impl MapParameters for Cast<'_> {
    fn float<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.dtypes.get(path) {
            Some(&dtype) if dtype != param.dtype() => {
                let values = param.base().detach().cast(dtype);
                with_values(param, values)
            }
            _ => param,
        }
    }
}

/// # Errors
/// [`Fp4Error::NotFinite`] naming a merged dense weight that is not.
fn check_finite<M: Module>(module: &M, merged: &BTreeMap<String, DType>) -> Result<(), Fp4Error> {
    struct Amaxes<'a> {
        merged: &'a BTreeMap<String, DType>,
        paths: Vec<String>,
        found: Vec<Tensor<1>>,
        error: Option<Fp4Error>,
    }

    impl VisitParameters for Amaxes<'_> {
        fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
            let path = path.join();
            if !self.merged.contains_key(&path) {
                return;
            }
            let values = param.base().without_autodiff();
            // Engines read no f64.
            let wide = values.dtype() == DType::F64;
            match amax(if wide { values.cast(DType::F32) } else { values }) {
                Ok(amax) => {
                    self.paths.push(path);
                    self.found.push(amax);
                }
                Err(problem) => {
                    self.error.get_or_insert(Fp4Error::at(path, problem));
                }
            }
        }
    }

    let mut amaxes = Amaxes { merged, paths: Vec::new(), found: Vec::new(), error: None };
    visit_parameters(module, &mut amaxes);
    if let Some(error) = amaxes.error {
        return Err(error);
    }
    let mut found = amaxes.paths.into_iter().zip(read_vectors(amaxes.found)?);
    match found.find(|(_, amax)| !amax[0].is_finite()) {
        Some((path, _)) => Err(Fp4Error::NotFinite { path }),
        None => Ok(()),
    }
}
