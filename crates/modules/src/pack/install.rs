//! Installs packed weights in the place of dense ones.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::rc::Rc;

use burn::module::{Module, Param, Reparameterizer};
use burn::tensor::Tensor;
use burn_fp4_ops::OpsError;

use crate::error::{Fp4Error, caught};
use crate::packed_weight::PackedWeight;
use crate::report::{Fp4Report, Outcome};
use crate::walk::paths::{MapParameters, map_parameters};
use crate::walk::plan::{Decision, Selection, WeightPlan};

use super::family::{families, pack_family};
use super::inputs::Inputs;
use super::measure::Measured;
use super::outcome::PackedWeights;
use super::placeholder::placeholder;
use super::weight::{AnyWeight, HessianFactorCache, MethodUsed, Quantized, WeightTask};

/// Inputs of [`pack`]. Weights are known by the number of the first parameter that is tied to them.
#[derive(Default)]
pub(crate) struct PackSource<'a> {
    pub(crate) measured: Measured,
    pub(crate) inputs: BTreeMap<usize, Inputs<'a>>,
    /// Weights that are packed already.
    pub(crate) packed: BTreeMap<usize, Quantized>,
    /// The dense weights by path, if not those that the module stores.
    pub(crate) dense: Option<BTreeMap<String, DenseValues>>,
}

/// A dense weight of any rank.
pub(crate) struct DenseValues(Box<dyn Any + Send>);

impl DenseValues {
    pub(crate) fn new<const D: usize>(tensor: Tensor<D>) -> Self {
        Self(Box::new(tensor))
    }
}

/// Takes the dense weights out of a module one map at a time, and puts packed ones in their place.
///
/// # Errors
/// [`Fp4Error::Unmapped`] before anything is changed. Of an error after that every weight that is
/// not packed by then is put back as it was; if some are packed it is [`Fp4Error::Partial`].
pub(crate) fn pack<M: Module>(
    module: &mut M,
    selection: &Selection,
    source: PackSource<'_>,
) -> Result<Fp4Report, Fp4Error> {
    let PackSource { measured, inputs, packed, dense } = source;
    let plans: BTreeMap<_, _> = selection
        .plans()
        .map(|(at, parameter, plan)| (parameter.path.as_str(), (at, plan)))
        .collect();
    // With the dense weights in a map of their own, each can be freed as soon as it is packed.
    let mut take = TakeDense {
        wanted: plans.keys().map(|path| (*path).to_owned()).collect(),
        taken: BTreeMap::new(),
    };
    let emptied = map_parameters(module.clone(), &mut take);
    if let Some(path) = take.wanted.into_iter().next() {
        return Err(Fp4Error::Unmapped { path });
    }
    *module = emptied;
    // Given values are of one weight at a time.
    let families = match dense {
        Some(_) => BTreeMap::new(),
        None => families_by_path(selection, &measured, &inputs, &packed),
    };
    let mut attach = InstallQuantized {
        plans,
        taken: take.taken,
        dense,
        families,
        measured,
        inputs: &inputs,
        hessian_factors: HessianFactorCache::default(),
        packed,
        results: PackedWeights::default(),
        choices: BTreeMap::new(),
        error: None,
    };
    *module = module.clone().apply_reparameterization(&mut attach);
    let InstallQuantized { results, choices, error, .. } = attach;
    let packed = results.paths();
    let outcome = match error {
        None => report(selection, results, &choices),
        Some(error) => Err(error),
    };
    outcome.map_err(|problem| partial(packed, problem))
}

/// Returns the error of a failure after some weights were packed.
fn partial(packed: Vec<String>, problem: Fp4Error) -> Fp4Error {
    match packed.is_empty() {
        true => problem,
        false => Fp4Error::Partial { packed, problem: Box::new(problem) },
    }
}

/// By path of a weight that is still to be quantized by inputs, the first of those that are tied to
/// it: the paths of its family.
fn families_by_path<'a>(
    selection: &'a Selection,
    measured: &Measured,
    inputs: &BTreeMap<usize, Inputs<'_>>,
    packed: &BTreeMap<usize, Quantized>,
) -> BTreeMap<&'a str, Rc<[&'a str]>> {
    let (paths, tasks): (Vec<_>, Vec<_>) = selection
        .plans()
        .filter(|(at, ..)| measured.tied_to(*at) == *at && !packed.contains_key(at))
        .filter_map(|(at, parameter, plan)| {
            let inputs = Some(inputs.get(&at)?);
            Some((parameter.path.as_str(), WeightTask { plan, amax: None, inputs }))
        })
        .unzip();
    let families = families(&tasks).into_iter().flat_map(|family| {
        let family: Rc<[&str]> = family.into_iter().map(|at| paths[at]).collect();
        let members = family.to_vec();
        members.into_iter().map(move |path| (path, family.clone()))
    });
    families.collect()
}

/// A dense parameter of any rank that was taken out of a module.
trait DenseParameter: Any + Send {
    /// Its values.
    fn weight(&self) -> Box<dyn AnyWeight>;
}

impl<const D: usize> DenseParameter for Param<Tensor<D>> {
    fn weight(&self) -> Box<dyn AnyWeight> {
        Box::new(self.base().without_autodiff())
    }
}

/// Takes dense parameters out of a module and leaves placeholders.
struct TakeDense {
    wanted: BTreeSet<String>,
    taken: BTreeMap<String, Box<dyn DenseParameter>>,
}

impl MapParameters for TakeDense {
    fn float<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.wanted.remove(path) {
            return param;
        }
        self.taken.insert(path.to_owned(), Box::new(param.clone()));
        let dtype = param.base().dtype();
        placeholder(param, dtype)
    }
}

/// Attaches packed weights where dense parameters were taken.
struct InstallQuantized<'a> {
    plans: BTreeMap<&'a str, (usize, &'a WeightPlan)>,
    taken: BTreeMap<String, Box<dyn DenseParameter>>,
    dense: Option<BTreeMap<String, DenseValues>>,
    /// See [`families_by_path`].
    families: BTreeMap<&'a str, Rc<[&'a str]>>,
    measured: Measured,
    inputs: &'a BTreeMap<usize, Inputs<'a>>,
    hessian_factors: HessianFactorCache<'a>,
    packed: BTreeMap<usize, Quantized>,
    results: PackedWeights,
    /// By path: by what weights were quantized.
    choices: BTreeMap<String, MethodUsed>,
    error: Option<Fp4Error>,
}

impl Reparameterizer for &mut InstallQuantized<'_> {
    type Reparam = PackedWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<PackedWeight>) {
        let Some(taken) = self.taken.remove(path) else { return (param, None) };
        let taken: Box<dyn Any> = taken;
        let original: Param<Tensor<D>> = *taken.downcast().expect("taken at the same path");
        if self.error.is_some() {
            return (original, None);
        }
        match caught(|| self.pack(path, &original)) {
            Ok(packed) => (param, Some(packed)),
            Err(problem) => {
                self.error = Some(Fp4Error::at(path, problem));
                (original, None)
            }
        }
    }
}

impl<'a> InstallQuantized<'a> {
    fn pack<const D: usize>(
        &mut self,
        path: &str,
        original: &Param<Tensor<D>>,
    ) -> Result<PackedWeight, OpsError> {
        let (at, plan) = self.plans[path];
        let stored = || original.base().without_autodiff();
        let dense: Tensor<D> = match self.dense.as_mut().and_then(|dense| dense.remove(path)) {
            Some(DenseValues(dense)) => *dense.downcast().expect("read at the same path"),
            None => stored(),
        };
        let first = self.measured.tied_to(at);
        if !self.packed.contains_key(&first) {
            let inputs = self.inputs.get(&first);
            let task = WeightTask { plan, amax: self.measured.amax(at), inputs };
            self.quantize(path, first, (&dense, task))?;
        }
        let Quantized { packed, choice, output_sums } = self.packed[&first].clone();
        let tensor = packed.tensor::<D>();
        self.results.add(path, &tensor, dense.dtype(), Some((dense, output_sums)))?;
        self.choices.insert(path.to_owned(), choice);
        Ok(packed)
    }

    /// Quantizes the weight with this path and number, and with it the members of its family that
    /// are on the same device and still to come.
    fn quantize(
        &mut self,
        path: &str,
        at: usize,
        weight: (&dyn AnyWeight, WeightTask<'a>),
    ) -> Result<(), OpsError> {
        let device = weight.0.device();
        let family = self.families.get(path).cloned().unwrap_or_default();
        let others: Vec<_> = family
            .iter()
            .filter(|other| !self.packed.contains_key(&self.plans[*other].0))
            .filter_map(|other| {
                // What was taken out of here, as this weight, is attached already.
                let weight = self.taken.get(*other)?.weight();
                let (at, plan) = self.plans[other];
                let (amax, inputs) = (self.measured.amax(at), self.inputs.get(&at));
                (weight.device() == device).then_some((
                    at,
                    weight,
                    WeightTask { plan, amax, inputs },
                ))
            })
            .collect();
        let members = others.iter().map(|(_, weight, task)| (&**weight, *task));
        let members: Vec<_> = iter::once(weight).chain(members).collect();
        let packed = pack_family(&members, &mut self.hessian_factors)?;
        let numbers = iter::once(at).chain(others.iter().map(|(at, ..)| *at));
        self.packed.extend(numbers.zip(packed));
        Ok(())
    }
}

fn report(
    selection: &Selection,
    results: PackedWeights,
    choices: &BTreeMap<String, MethodUsed>,
) -> Result<Fp4Report, Fp4Error> {
    let facts = results.read()?;
    let parameters = selection.decisions.iter().map(|(parameter, decision)| match decision {
        Decision::Keep(reason) => {
            parameter.report(Outcome::Kept { reason: reason.clone() }, parameter.bytes_now())
        }
        Decision::Quantize(plan) => {
            let choice = &choices[&parameter.path];
            let scheme = plan.scheme.with_search(choice.chosen_by.search());
            facts[&parameter.path].quantized(parameter, plan, scheme, choice)
        }
    });
    Ok(Fp4Report { parameters: parameters.collect(), unused: selection.unused.clone() })
}
