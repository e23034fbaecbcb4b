//! Packed weights in the place of dense ones.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Module, Param, Reparameterizer};
use burn::tensor::Tensor;
use burn_fp4_ops::OpsError;

use crate::error::{Fp4Error, caught};
use crate::packed_weight::PackedWeight;
use crate::report::{Fp4Report, Outcome};
use crate::walk::paths::{MapParameters, map_parameters};
use crate::walk::plan::{Decision, Selection, WeightPlan};

use super::inputs::Inputs;
use super::measure::Measured;
use super::outcome::PackedWeights;
use super::placeholder::placeholder;
use super::weight::{AnyWeight, Choice, CurvatureCache, Quantized, Task};

/// What packed weights are made from; weights are known by the number of the first parameter that
/// is tied to them.
#[derive(Default)]
pub(crate) struct Source<'a> {
    pub(crate) measured: Measured,
    pub(crate) inputs: BTreeMap<usize, Inputs<'a>>,
    /// What is packed already.
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
    source: Source<'_>,
) -> Result<Fp4Report, Fp4Error> {
    let Source { measured, inputs, packed, dense } = source;
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
    let mut attach = AttachQuantized {
        plans,
        taken: take.taken,
        dense,
        measured,
        inputs: &inputs,
        curvatures: CurvatureCache::default(),
        packed,
        results: PackedWeights::default(),
        choices: BTreeMap::new(),
        error: None,
    };
    *module = module.clone().apply_reparameterization(&mut attach);
    let AttachQuantized { results, choices, error, .. } = attach;
    let packed = results.paths();
    let outcome = match error {
        None => report(selection, results, &choices),
        Some(error) => Err(error),
    };
    outcome.map_err(|problem| partial(packed, problem))
}

/// What went wrong after some weights were packed.
fn partial(packed: Vec<String>, problem: Fp4Error) -> Fp4Error {
    match packed.is_empty() {
        true => problem,
        false => Fp4Error::Partial { packed, problem: Box::new(problem) },
    }
}

/// Takes dense parameters out of a module and leaves placeholders.
struct TakeDense {
    wanted: BTreeSet<String>,
    taken: BTreeMap<String, Box<dyn Any + Send>>,
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
struct AttachQuantized<'a> {
    plans: BTreeMap<&'a str, (usize, &'a WeightPlan)>,
    taken: BTreeMap<String, Box<dyn Any + Send>>,
    dense: Option<BTreeMap<String, DenseValues>>,
    measured: Measured,
    inputs: &'a BTreeMap<usize, Inputs<'a>>,
    curvatures: CurvatureCache<'a>,
    packed: BTreeMap<usize, Quantized>,
    results: PackedWeights,
    /// By path: by what weights were quantized.
    choices: BTreeMap<String, Choice>,
    error: Option<Fp4Error>,
}

impl Reparameterizer for &mut AttachQuantized<'_> {
    type Reparam = PackedWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<PackedWeight>) {
        let Some(taken) = self.taken.remove(path) else { return (param, None) };
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

impl AttachQuantized<'_> {
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
        let (packed, choice) = match self.packed.get(&first) {
            Some(tied) => tied.clone(),
            None => {
                let amax = self.measured.amax(at);
                let task = Task { plan, amax, inputs: self.inputs.get(&first) };
                let packed = dense.pack(&task, &mut self.curvatures)?;
                self.packed.entry(first).insert_entry(packed).get().clone()
            }
        };
        let tensor = packed.tensor::<D>();
        self.results.add(path, &tensor, dense.dtype(), Some(dense))?;
        self.choices.insert(path.to_owned(), choice);
        Ok(packed)
    }
}

fn report(
    selection: &Selection,
    results: PackedWeights,
    choices: &BTreeMap<String, Choice>,
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
