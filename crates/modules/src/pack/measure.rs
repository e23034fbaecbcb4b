//! Measures weights before the first is quantized: their amax, and which are tied.

use std::any::Any;
use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use burn_fp4_ops::search::{Method, Sse};
use burn_fp4_ops::{Fp4Scheme, NonFinite, OpsError, TensorScaling, amax};

use crate::error::Fp4Error;
use crate::transfer::read_vectors;
use crate::walk::parameters::{ModulePath, VisitParameters, visit_parameters};
use crate::walk::select::WeightPlan;

use super::job::{Job, Jobs};

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
    jobs: &mut Jobs<'_>,
    reject: bool,
) -> Result<(), Fp4Error> {
    let rejects = |plan: &WeightPlan| {
        // No reference says what these make of a value that is not finite.
        let finite = matches!(plan.scheme.method, Method::Gptq(_) | Method::Sse(Sse::TensorScale));
        reject || finite || plan.scheme.non_finite == NonFinite::Reject
    };
    let same_id = same_ids(&jobs.list);
    let mut compared_to: Vec<Option<usize>> = vec![None; jobs.list.len()];
    for list in &same_id {
        list.iter().for_each(|&at| compared_to[at] = Some(list[0]));
    }
    let wanted = jobs.list.iter().zip(&compared_to).map(|(job, first)| {
        let plan = job.task.plan;
        let before = plan.shares.is_some() || plan.slices() > 1;
        (before && from_amax(&plan.scheme)) || rejects(plan) || first.is_some()
    });
    let wanted: Vec<bool> = wanted.collect();
    if !wanted.contains(&true) {
        return Ok(());
    }
    let found = measure_amax(module, jobs, &wanted, compared_to)?;
    let refused = jobs.list.iter().zip(&found).find_map(|(job, found)| {
        let amax = found.as_ref()?.amax;
        (!amax.is_finite() && rejects(job.task.plan)).then_some((job.path(), amax))
    });
    if let Some((path, found)) = refused {
        return Err(Fp4Error::at(path, OpsError::NonFinite { found }));
    }
    set_amaxes(&mut jobs.list, &found);
    let mut apart = Vec::new();
    for list in same_id {
        let rest = tie(jobs, &list, &found);
        apart.extend(by_amax(rest, &found));
    }
    compare(module, jobs, apart)?;
    untie(jobs);
    Ok(())
}

/// Sets the amax of jobs to others, such as those that were learned.
pub(crate) fn replace_amaxes(jobs: &mut Jobs<'_>, amaxes: impl Iterator<Item = (usize, f32)>) {
    amaxes.for_each(|(at, amax)| jobs.list[at].task.amax = Some(amax));
    untie(jobs);
}

/// Gives weights with another tensor scale than the one they are tied to codes of their own.
fn untie(jobs: &mut Jobs<'_>) {
    let bits = |job: &Job<'_>| job.task.amax.map(f32::to_bits);
    for at in 0..jobs.list.len() {
        if bits(&jobs.list[at]) != bits(&jobs.list[jobs.list[at].source]) {
            jobs.list[at].source = at;
        }
    }
}

/// A measured weight.
struct Found {
    amax: f32,
    /// True if it equals the weight that it was compared to.
    same: bool,
}

/// Sets the amax that tensor scales are made from, where they are: the largest of its group for a
/// weight that shares the scale.
fn set_amaxes(jobs: &mut [Job<'_>], found: &[Option<Found>]) {
    let scaled = |job: &Job<'_>, found: &Option<Found>| {
        found.as_ref().filter(|_| from_amax(&job.task.plan.scheme)).map(|found| found.amax)
    };
    let mut groups: BTreeMap<&str, f32> = BTreeMap::new();
    for (job, found) in jobs.iter().zip(found) {
        if let (Some(group), Some(amax)) = (&job.task.plan.shares, scaled(job, found)) {
            let largest = groups.entry(group).or_default();
            // NaN, once there, stays: a maximum of floats would drop it.
            if amax.is_nan() || amax > *largest {
                *largest = amax;
            }
        }
    }
    for (job, found) in jobs.iter_mut().zip(found) {
        if let Some(amax) = scaled(job, found) {
            let shares = job.task.plan.shares.as_deref();
            job.task.amax = Some(shares.map_or(amax, |group| groups[group]));
        }
    }
}

/// Ties the weights of a list to its first, where they are equal to it. Returns the others.
fn tie(jobs: &mut Jobs<'_>, list: &[usize], found: &[Option<Found>]) -> Vec<usize> {
    let is_tied = |at: &usize| found[*at].as_ref().is_some_and(|found| found.same);
    let (tied, rest): (Vec<_>, Vec<_>) = list[1..].iter().copied().partition(is_tied);
    tied.into_iter().for_each(|at| jobs.list[at].source = list[0]);
    rest
}

/// Measures wanted weights, and compares them to the first that `compared_to` has for them.
fn measure_amax<M: Module>(
    module: &M,
    jobs: &Jobs<'_>,
    wanted: &[bool],
    compared_to: Vec<Option<usize>>,
) -> Result<Vec<Option<Found>>, Fp4Error> {
    let firsts = BTreeMap::new();
    let mut measure = Measure { jobs, wanted, compared_to, firsts, found: Vec::new(), error: None };
    visit_parameters(module, &mut measure);
    if let Some(error) = measure.error {
        return Err(error);
    }
    let (numbers, vectors): (Vec<_>, Vec<_>) = measure.found.into_iter().unzip();
    let mut found: Vec<Option<Found>> = jobs.list.iter().map(|_| None).collect();
    for (at, values) in numbers.into_iter().zip(read_vectors(vectors)?) {
        found[at] = Some(Found { amax: values[0], same: values.get(1) == Some(&1.0) });
    }
    Ok(found)
}

/// Lists weights with the same id that are to be quantized in the same way, two or more at a time.
fn same_ids(jobs: &[Job<'_>]) -> Vec<Vec<usize>> {
    let mut by_id: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for (at, job) in jobs.iter().enumerate() {
        by_id.entry(job.parameter.id.val()).or_default().push(at);
    }
    let mut found: Vec<Vec<usize>> = Vec::new();
    for weights in by_id.into_values() {
        let mut alike: Vec<Vec<usize>> = Vec::new();
        for at in weights {
            let same = |known: &&mut Vec<usize>| {
                let (a, b) = (jobs[known[0]].task.plan, jobs[at].task.plan);
                let alone = a.shares.is_none() == b.shares.is_none();
                alone && a.layout == b.layout && a.scheme == b.scheme
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
fn by_amax(weights: Vec<usize>, found: &[Option<Found>]) -> Vec<Vec<usize>> {
    let mut alike: BTreeMap<Option<u32>, Vec<usize>> = BTreeMap::new();
    for at in weights {
        let bits = found[at].as_ref().map(|found| found.amax.to_bits());
        alike.entry(bits).or_default().push(at);
    }
    alike.into_values().filter(|weights| weights.len() > 1).collect()
}

/// Compares weights with the first of each list, then what differs among itself, until nothing is
/// left.
fn compare<M: Module>(
    module: &M,
    jobs: &mut Jobs<'_>,
    mut lists: Vec<Vec<usize>>,
) -> Result<(), Fp4Error> {
    while !lists.is_empty() {
        let mut compared_to = vec![None; jobs.list.len()];
        for list in &lists {
            list.iter().for_each(|&at| compared_to[at] = Some(list[0]));
        }
        let wanted: Vec<bool> = compared_to.iter().map(Option::is_some).collect();
        let found = measure_amax(module, jobs, &wanted, compared_to)?;
        let rest = lists.iter().map(|list| tie(jobs, list, &found));
        lists = rest.filter(|rest| rest.len() > 1).collect();
    }
    Ok(())
}

/// Measures the amax of weights and compares them with the first of some.
struct Measure<'a> {
    jobs: &'a Jobs<'a>,
    wanted: &'a [bool],
    compared_to: Vec<Option<usize>>,
    firsts: BTreeMap<usize, Box<dyn Any>>,
    /// The amax of each job, and 1 if the values equal the first, 0 if not.
    found: Vec<(usize, Tensor<1>)>,
    error: Option<Fp4Error>,
}

impl VisitParameters for Measure<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        let path = path.join();
        let Some(at) = self.jobs.at(&path).filter(|&at| self.wanted[at]) else { return };
        let values = param.base().without_autodiff();
        let measured = match amax(values.clone()) {
            Ok(amax) => amax,
            Err(problem) => {
                self.error.get_or_insert(Fp4Error::at(path, problem));
                return;
            }
        };
        let mut found = vec![measured];
        if let Some(first) = self.compared_to[at] {
            match self.firsts.get(&first).map(|first| first.downcast_ref::<Tensor<D>>()) {
                // The first itself.
                None => {
                    self.firsts.insert(at, Box::new(values));
                }
                Some(first) => found.extend(first.and_then(|first| equal(first, &values))),
            }
        }
        self.found.push((at, Tensor::cat(found, 0)));
    }
}

/// Returns 1 if all values are the same, `[1]`; nothing if they cannot be.
fn equal<const D: usize>(left: &Tensor<D>, right: &Tensor<D>) -> Option<Tensor<1>> {
    let alike = left.dims() == right.dims()
        && left.dtype() == right.dtype()
        && left.device() == right.device();
    alike.then(|| left.clone().equal(right.clone()).all().float().cast(DType::F32))
}
