//! Measures weights before the first is quantized: their amax, and which are tied.

use std::any::Any;
use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use burn_fp4_ops::search::ChosenBy;
use burn_fp4_ops::{Fp4Scheme, NonFinite, OpsError, TensorScaling, amax};

use crate::error::Fp4Error;
use crate::transfer::read_vectors;
use crate::walk::paths::{ModulePath, VisitParameters, visit_parameters};
use crate::walk::plan::{Selection, WeightPlan};

/// Measurements of the weights of a [`Selection`], by their numbers there.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// The amax that the tensor scale is made from, where it must be known up front.
    amaxes: BTreeMap<usize, f32>,
    /// The first of those with the same id, the same values and the same plan, if it is another.
    tied_to: BTreeMap<usize, usize>,
}

impl Measured {
    pub(crate) fn amax(&self, weight: usize) -> Option<f32> {
        self.amaxes.get(&weight).copied()
    }

    /// Returns the weight that this one has its codes from: itself, unless it is tied to another.
    pub(crate) fn tied_to(&self, weight: usize) -> usize {
        self.tied_to.get(&weight).copied().unwrap_or(weight)
    }

    /// Replaces amaxes.
    pub(crate) fn with_amaxes(mut self, amaxes: BTreeMap<usize, f32>) -> Self {
        self.amaxes.extend(amaxes);
        self.untie();
        self
    }

    /// Weights with another tensor scale than the one they are tied to have codes of their own.
    fn untie(&mut self) {
        let bits = |at: &usize| self.amaxes.get(at).map(|amax| amax.to_bits());
        self.tied_to.retain(|at, first| bits(at) == bits(first));
    }
}

/// Returns true if a tensor scale is made from the amax of the whole weight.
fn from_amax(scheme: &Fp4Scheme) -> bool {
    scheme.rule.row().tensor_scale && scheme.tensor_scale == TensorScaling::Tensor
}

/// Measures the amax of each weight whose tensor scale must be known up front (shared, or of
/// several slices), or that must be finite because its scheme or `reject` says so. Finds tied
/// weights too: weights that share an id have the same values, unless an optimizer or a record has
/// changed some.
///
/// One read-back per device, and more only where weights of one id differ and have the same amax.
pub(crate) fn measure<M: Module>(
    module: &M,
    selection: &Selection,
    reject: bool,
) -> Result<Measured, Fp4Error> {
    let rejects = |plan: &WeightPlan| {
        // No reference says what these make of a value that is not finite.
        let finite = matches!(plan.asked, ChosenBy::Gptq(_) | ChosenBy::SseTensorScale);
        reject || finite || plan.scheme.non_finite == NonFinite::Reject
    };
    let plans: BTreeMap<usize, &WeightPlan> =
        selection.plans().map(|(at, _, plan)| (at, plan)).collect();
    let candidates = same_ids(selection);
    let first_of: BTreeMap<usize, usize> = candidates
        .iter()
        .flat_map(|weights| weights.iter().map(|&weight| (weight, weights[0])))
        .collect();
    let wanted = plans.iter().filter(|(at, plan)| {
        let before = plan.shares.is_some() || plan.slices() > 1;
        (before && from_amax(&plan.scheme)) || rejects(plan) || first_of.contains_key(*at)
    });
    let wanted: BTreeMap<String, usize> =
        wanted.map(|(&at, _)| (selection.decisions[at].0.path.clone(), at)).collect();
    if wanted.is_empty() {
        return Ok(Measured::default());
    }
    let found = measure_amax(module, &wanted, first_of)?;
    let of = |path: &str| (&found[path], plans[&wanted[path]]);
    for path in wanted.keys() {
        let (found, plan) = of(path);
        if !found[0].is_finite() && rejects(plan) {
            return Err(Fp4Error::at(path, OpsError::NonFinite { found: found[0] }));
        }
    }

    let weights = wanted.iter().map(|(path, &at)| (at, plans[&at], found[path][0]));
    let amaxes = scale_amaxes(&weights.collect::<Vec<_>>());

    // By weight: its own amax, and whether it is equal to the first of its id.
    let compared: BTreeMap<usize, &[f32]> =
        wanted.iter().map(|(path, &at)| (at, &found[path][..])).collect();
    let mut tied_to = BTreeMap::new();
    let mut apart = Vec::new();
    for weights in &candidates {
        let is_tied = |at: &usize| compared[at].get(1) == Some(&1.0);
        let others = weights[1..].iter().copied();
        let (tied, rest): (Vec<_>, Vec<_>) = others.partition(is_tied);
        tied_to.extend(tied.into_iter().map(|at| (at, weights[0])));
        apart.extend(by_amax(rest, &compared));
    }
    tied_to.extend(compare(module, selection, apart)?);
    let mut measured = Measured { amaxes, tied_to };
    measured.untie();
    Ok(measured)
}

/// By weight the amax that its tensor scale is made from, if it is: the largest of its group where
/// it shares the scale. Weights are given by number, plan and amax.
fn scale_amaxes(weights: &[(usize, &WeightPlan, f32)]) -> BTreeMap<usize, f32> {
    let scaled = || weights.iter().filter(|(_, plan, _)| from_amax(&plan.scheme));
    let mut groups: BTreeMap<&str, f32> = BTreeMap::new();
    for (_, plan, amax) in scaled() {
        if let Some(group) = &plan.shares {
            let largest = groups.entry(group).or_default();
            // NaN, once there, stays: a maximum of floats would drop it.
            if amax.is_nan() || *amax > *largest {
                *largest = *amax;
            }
        }
    }
    let of = |plan: &WeightPlan, amax| plan.shares.as_deref().map_or(amax, |group| groups[group]);
    scaled().map(|&(at, plan, amax)| (at, of(plan, amax))).collect()
}

/// Measures the amax of weights by path, followed by 1 if the values equal the first weight of
/// `first_of`, by 0 if not.
fn measure_amax<M: Module>(
    module: &M,
    wanted: &BTreeMap<String, usize>,
    first_of: BTreeMap<usize, usize>,
) -> Result<BTreeMap<String, Vec<f32>>, Fp4Error> {
    let mut measure =
        Measure { wanted, first_of, firsts: BTreeMap::new(), found: Vec::new(), error: None };
    visit_parameters(module, &mut measure);
    match measure.error {
        Some(error) => Err(error),
        None => read_vectors(measure.found),
    }
}

/// Weights with the same id that are to be quantized in the same way, two or more at a time.
fn same_ids(selection: &Selection) -> Vec<Vec<usize>> {
    let mut by_id: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (at, parameter, _) in selection.plans() {
        by_id.entry(parameter.id.val()).or_default().push(at);
    }
    let plans: BTreeMap<usize, &WeightPlan> =
        selection.plans().map(|(at, _, plan)| (at, plan)).collect();
    let mut found: Vec<Vec<usize>> = Vec::new();
    for weights in by_id.into_values() {
        let mut alike: Vec<Vec<usize>> = Vec::new();
        for at in weights {
            let same = |known: &&mut Vec<usize>| {
                let (a, b) = (plans[&known[0]], plans[&at]);
                let alone = a.shares.is_none() == b.shares.is_none();
                alone && a.layout == b.layout && a.scheme == b.scheme && a.asked == b.asked
            };
            match alike.iter_mut().find(same) {
                Some(known) => known.push(at),
                None => alike.push(vec![at]),
            }
        }
        found.extend(alike.into_iter().filter(|weights| weights.len() > 1));
    }
    found
}

/// Divides weights by their amax, and leaves those alone that no other can be equal to.
fn by_amax(weights: Vec<usize>, compared: &BTreeMap<usize, &[f32]>) -> Vec<Vec<usize>> {
    let mut alike: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for at in weights {
        alike.entry(compared[&at][0].to_bits()).or_default().push(at);
    }
    alike.into_values().filter(|weights| weights.len() > 1).collect()
}

/// Compares weights with the first of each list, then what differs among itself, until nothing is
/// left.
fn compare<M: Module>(
    module: &M,
    selection: &Selection,
    mut lists: Vec<Vec<usize>>,
) -> Result<BTreeMap<usize, usize>, Fp4Error> {
    let mut tied_to = BTreeMap::new();
    while !lists.is_empty() {
        let weights = || lists.iter().flatten().copied();
        let path = |at: usize| selection.decisions[at].0.path.clone();
        let wanted: BTreeMap<_, _> = weights().map(|at| (path(at), at)).collect();
        let first_of = lists.iter().flat_map(|list| list.iter().map(|&at| (at, list[0])));
        let first_of = first_of.collect();
        let found = measure_amax(module, &wanted, first_of)?;
        lists = lists
            .into_iter()
            .map(|list| {
                let is_tied = |at: &usize| found[&path(*at)].get(1) == Some(&1.0);
                let (tied, rest): (Vec<_>, Vec<_>) = list[1..].iter().copied().partition(is_tied);
                tied_to.extend(tied.into_iter().map(|at| (at, list[0])));
                rest
            })
            .filter(|rest| rest.len() > 1)
            .collect();
    }
    Ok(tied_to)
}

/// Measures the amax of weights and compares them with the first of some.
struct Measure<'a> {
    wanted: &'a BTreeMap<String, usize>,
    first_of: BTreeMap<usize, usize>,
    firsts: BTreeMap<usize, Box<dyn Any>>,
    /// amax, and 1 if the values equal the first.
    found: Vec<(String, Tensor<1>)>,
    error: Option<Fp4Error>,
}

impl VisitParameters for Measure<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        let path = path.join();
        let Some(&at) = self.wanted.get(&path) else { return };
        let values = param.base().without_autodiff();
        let measured = match amax(values.clone()) {
            Ok(amax) => amax,
            Err(problem) => {
                self.error.get_or_insert(Fp4Error::at(path, problem));
                return;
            }
        };
        let mut found = vec![measured];
        if let Some(first) = self.first_of.get(&at) {
            match self.firsts.get(first).map(|first| first.downcast_ref::<Tensor<D>>()) {
                // The first itself.
                None => {
                    self.firsts.insert(at, Box::new(values));
                }
                Some(first) => found.extend(first.and_then(|first| equal(first, &values))),
            }
        }
        self.found.push((path, Tensor::cat(found, 0)));
    }
}

/// 1 if all values are the same, `[1]`; nothing if they cannot be.
fn equal<const D: usize>(left: &Tensor<D>, right: &Tensor<D>) -> Option<Tensor<1>> {
    let alike = left.dims() == right.dims()
        && left.dtype() == right.dtype()
        && left.device() == right.device();
    alike.then(|| left.clone().equal(right.clone()).all().float().cast(DType::F32))
}
