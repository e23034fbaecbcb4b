//! Packed weights in the place of dense ones.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Module, Param, Reparameterizer};
use burn::tensor::Tensor;
use burn_fp4_ops::{OpsError, Products, ScaleSearch, products};

use crate::Fp4Error;
use crate::measure::{Measured, read_vectors};
use crate::packed::{PackedWeight, placeholder};
use crate::paths::{MapFloats, map_floats};
use crate::report::{ChosenBy, Fp4Report, Outcome};
use crate::select::{Decision, Plan, Selection};
use crate::weight::{AnyWeight, Curvatures, Inputs, Method, Task};

/// What packed weights are made from; weights are known by the number of the first parameter that
/// is tied to them.
#[derive(Default)]
pub(crate) struct Source<'a> {
    pub(crate) measured: Measured,
    pub(crate) inputs: BTreeMap<usize, Inputs<'a>>,
    /// What is packed already.
    pub(crate) packed: BTreeMap<usize, (PackedWeight, Method)>,
    /// The dense weights by path, if not those that the module stores.
    pub(crate) dense: Option<BTreeMap<String, Dense>>,
}

/// A dense weight of any rank.
pub(crate) struct Dense(Box<dyn Any + Send>);

impl Dense {
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
    let mut take = Take {
        wanted: plans.keys().map(|path| (*path).to_owned()).collect(),
        taken: BTreeMap::new(),
    };
    let emptied = map_floats(module.clone(), &mut take);
    if let Some(path) = take.wanted.into_iter().next() {
        return Err(Fp4Error::Unmapped { path });
    }
    *module = emptied;
    let mut pack = Pack {
        plans,
        taken: take.taken,
        dense,
        measured,
        inputs: &inputs,
        curvatures: Curvatures::default(),
        packed,
        results: BTreeMap::new(),
        error: None,
    };
    *module = module.clone().apply_reparameterization(&mut pack);
    let results = pack.results;
    let outcome = match pack.error {
        None => report(selection, &results),
        Some(error) => Err(error),
    };
    outcome.map_err(|problem| partial(results.into_keys(), problem))
}

/// What went wrong after some weights were packed.
fn partial(packed: impl Iterator<Item = String>, problem: Fp4Error) -> Fp4Error {
    let packed: Vec<_> = packed.collect();
    match packed.is_empty() {
        true => problem,
        false => Fp4Error::Partial { packed, problem: Box::new(problem) },
    }
}

/// Takes dense parameters out of a module and leaves placeholders.
struct Take {
    wanted: BTreeSet<String>,
    taken: BTreeMap<String, Box<dyn Any + Send>>,
}

impl MapFloats for Take {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.wanted.remove(path) {
            return param;
        }
        self.taken.insert(path.to_owned(), Box::new(param.clone()));
        let dtype = param.base().dtype();
        placeholder(param, dtype)
    }
}

/// Attaches packed weights where dense parameters were taken.
struct Pack<'a> {
    plans: BTreeMap<&'a str, (usize, &'a Plan)>,
    taken: BTreeMap<String, Box<dyn Any + Send>>,
    dense: Option<BTreeMap<String, Dense>>,
    measured: Measured,
    inputs: &'a BTreeMap<usize, Inputs<'a>>,
    curvatures: Curvatures<'a>,
    packed: BTreeMap<usize, (PackedWeight, Method)>,
    results: BTreeMap<String, Packed>,
    error: Option<Fp4Error>,
}

/// What the report says of a packed weight.
struct Packed {
    bytes: usize,
    method: Method,
    products: Products,
    /// `[2]`: squared error and energy, still on the device.
    squared_error: Tensor<1>,
}

impl Reparameterizer for &mut Pack<'_> {
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

/// What an operation on devices comes to: one that fails may panic, which must not cost the weights
/// that were taken.
pub(crate) fn caught<R>(run: impl FnOnce() -> Result<R, OpsError>) -> Result<R, OpsError> {
    let result = catch_unwind(AssertUnwindSafe(run));
    result.unwrap_or_else(|panic| Err(OpsError::Device(message(&*panic))))
}

/// What a panic said.
pub(crate) fn message(panic: &(dyn Any + Send)) -> String {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
    message.unwrap_or("it panicked").to_owned()
}

impl Pack<'_> {
    fn pack<const D: usize>(
        &mut self,
        path: &str,
        original: &Param<Tensor<D>>,
    ) -> Result<PackedWeight, OpsError> {
        let (at, plan) = self.plans[path];
        let stored = || original.base().without_autodiff();
        let dense: Tensor<D> = match self.dense.as_mut().and_then(|dense| dense.remove(path)) {
            Some(Dense(dense)) => *dense.downcast().expect("read at the same path"),
            None => stored(),
        };
        let first = self.measured.tied_to(at);
        let (packed, method) = match self.packed.get(&first) {
            Some(tied) => tied.clone(),
            None => {
                let amax = self.measured.amax(at);
                let task = Task { plan, amax, inputs: self.inputs.get(&first) };
                let packed = dense.pack(&task, &mut self.curvatures)?;
                self.packed.entry(first).insert_entry(packed).get().clone()
            }
        };
        let tensor = packed.tensor::<D>();
        let squared_error = tensor.squared_error(dense.clone())?;
        let products = products(tensor.layout(), dense.dtype(), &tensor.device());
        let result = Packed { bytes: tensor.bytes(), method, products, squared_error };
        self.results.insert(path.to_owned(), result);
        Ok(packed)
    }
}

fn report(
    selection: &Selection,
    results: &BTreeMap<String, Packed>,
) -> Result<Fp4Report, Fp4Error> {
    let errors =
        results.iter().map(|(path, packed)| (path.clone(), packed.squared_error.clone())).collect();
    let errors = read_vectors(errors)?;
    let parameters = selection.decisions.iter().map(|(parameter, decision)| match decision {
        Decision::Keep(reason) => {
            parameter.report(Outcome::Kept { reason: reason.clone() }, parameter.bytes_now())
        }
        Decision::Quantize(plan) => {
            let [squared_error, energy] = errors[&parameter.path][..] else {
                unreachable!("two sums for every weight")
            };
            let Packed { bytes, method, products, .. } = &results[&parameter.path];
            let scheme = match method.chosen_by {
                ChosenBy::Search(search) => plan.scheme.with_search(search),
                ChosenBy::Gptq(_) => plan.scheme.with_search(ScaleSearch::Amax),
            };
            let outcome = Outcome::Quantized {
                scheme,
                asked: plan.asked,
                chosen_by: method.chosen_by,
                fallback: method.fallback.clone(),
                axis: plan.layout.axis,
                shares_scale_with: plan.shares.clone(),
                squared_error: squared_error.into(),
                energy: energy.into(),
                products: parameter.products(products, plan.layout.axis),
            };
            // One stored value stands for the shape.
            parameter.report(outcome, bytes + parameter.stored_dtype().size())
        }
    });
    Ok(Fp4Report { parameters: parameters.collect(), unused: selection.unused.clone() })
}
