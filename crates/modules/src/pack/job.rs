//! [`Job`]: a weight to be quantized, and everything known about it. Before the first is quantized,
//! [`Jobs`] measure amax, find tied weights and take statistics of inputs. Errors are measured on
//! the devices of the weights and read back at once.

use std::any::Any;
use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::tensor::{DType, Tensor};
use burn_fp4_ops::formats::check_length;
use burn_fp4_ops::search::{Method, Needs, Sse};
use burn_fp4_ops::{
    Fp4Layout, Fp4Scheme, Fp4Tensor, MatmulPath, NonFinite, OpsError, TensorScaling, amax,
    hadamard, matmul_path, squared_sums,
};

use crate::error::Fp4Error;
use crate::report::{Outcome, ParameterReport, SquaredError};
use crate::statistics::{Calibration, Inputs};
use crate::transfer::read_vectors;
use crate::walk::parameters::{ModulePath, Parameter, VisitParameters, visit_parameters};
use crate::walk::select::{ModulePlan, WeightPlan};

use super::weight::{AnyWeight, MethodUsed, OutputSums, Quantized, WeightTask};

/// A weight to be quantized, from its plan to its report entry.
pub(crate) struct Job<'a> {
    /// Its number among the parameters of the module.
    pub(crate) number: usize,
    pub(crate) parameter: &'a Parameter,
    /// Its plan, amax and statistics.
    pub(crate) task: WeightTask<'a>,
    /// The job whose statistics and codes it has: itself, unless it is tied to an earlier one.
    pub(crate) source: usize,
    /// Dense values to quantize instead of those that the module stores.
    pub(crate) dense: Option<Box<dyn AnyWeight>>,
    /// Set once the weight is quantized, for the job that others are tied to.
    pub(crate) quantized: Option<Quantized>,
    /// Set once the codes are in the module.
    pub(crate) facts: Option<PackedFacts>,
}

impl<'a> Job<'a> {
    /// The job of a parameter, tied to no other.
    pub(crate) fn new(number: usize, parameter: &'a Parameter, plan: &'a WeightPlan) -> Self {
        let measures_outputs = plan.scheme.method.needs() == Needs::Gram;
        let task = WeightTask { plan, amax: None, inputs: None, measures_outputs };
        Self { number, parameter, task, source: 0, dense: None, quantized: None, facts: None }
    }

    pub(crate) fn path(&self) -> &'a str {
        &self.parameter.path
    }
}

/// The weights of a module that are to be quantized, in the order of the module.
pub(crate) struct Jobs<'a> {
    pub(crate) list: Vec<Job<'a>>,
    by_path: BTreeMap<&'a str, usize>,
}

impl<'a> Jobs<'a> {
    pub(crate) fn new(selection: &'a ModulePlan) -> Self {
        let mut jobs = Self { list: Vec::new(), by_path: BTreeMap::new() };
        for (at, (number, parameter, plan)) in selection.plans().enumerate() {
            jobs.by_path.insert(&parameter.path, at);
            jobs.list.push(Job { source: at, ..Job::new(number, parameter, plan) });
        }
        jobs
    }

    /// Returns the job of a path.
    pub(crate) fn at(&self, path: &str) -> Option<usize> {
        self.by_path.get(path).copied()
    }

    /// Returns the job that a parameter has its statistics and codes from, given the number of the
    /// parameter in the module.
    pub(crate) fn source_of(&self, number: usize) -> Option<usize> {
        let at = self.list.binary_search_by_key(&number, |job| job.number);
        at.ok().map(|at| self.list[at].source)
    }

    /// Returns true if no other job has the codes of this one.
    pub(crate) fn is_source(&self, at: usize) -> bool {
        self.list[at].source == at
    }

    /// Measures the errors of outputs of every weight whose inputs are known, whatever its method
    /// needs.
    pub(crate) fn measure_all_outputs(&mut self) {
        self.list.iter_mut().for_each(|job| job.task.measures_outputs = true);
    }

    /// Sets the dense values of some jobs to those that a module stores.
    pub(crate) fn take_dense<M: Module>(&mut self, module: &M, wanted: impl Fn(usize) -> bool) {
        struct TakeDense<'j, 'a, F> {
            jobs: &'j mut Jobs<'a>,
            wanted: F,
        }

        impl<F: Fn(usize) -> bool> VisitParameters for TakeDense<'_, '_, F> {
            fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
                let at = self.jobs.at(&path.join());
                if let Some(at) = at.filter(|&at| (self.wanted)(at)) {
                    let dense = param.base().without_autodiff();
                    self.jobs.list[at].dense = Some(Box::new(dense));
                }
            }
        }

        visit_parameters(module, &mut TakeDense { jobs: self, wanted });
    }

    /// Measures the amax of each weight, transformed as its scheme says, whose tensor scale must be
    /// known up front (shared, or of several slices), or that must be finite because its scheme or
    /// `reject` says so. Finds tied weights too: weights that share an id have the same values,
    /// unless an optimizer or a record has changed some.
    ///
    /// One read-back per device, and more only where weights of one id differ and have the same
    /// amax.
    pub(crate) fn measure<M: Module>(&mut self, module: &M, reject: bool) -> Result<(), Fp4Error> {
        let rejects = |plan: &WeightPlan| {
            // No reference says what these make of a value that is not finite.
            let finite =
                matches!(plan.scheme.method, Method::Gptq(_) | Method::Sse(Sse::TensorScale));
            reject || finite || plan.scheme.non_finite == NonFinite::Reject
        };
        let same_id = same_ids(&self.list);
        let mut compared_to: Vec<Option<usize>> = vec![None; self.list.len()];
        for list in &same_id {
            list.iter().for_each(|&at| compared_to[at] = Some(list[0]));
        }
        let wanted = self.list.iter().zip(&compared_to).map(|(job, first)| {
            let plan = job.task.plan;
            let before = plan.shares.is_some() || plan.slices() > 1;
            (before && from_amax(&plan.scheme)) || rejects(plan) || first.is_some()
        });
        let wanted: Vec<bool> = wanted.collect();
        if !wanted.contains(&true) {
            return Ok(());
        }
        let found = measure_amax(module, self, &wanted, compared_to)?;
        let refused = self.list.iter().zip(&found).find_map(|(job, found)| {
            let amax = found.as_ref()?.amax;
            (!amax.is_finite() && rejects(job.task.plan)).then_some((job.path(), amax))
        });
        if let Some((path, found)) = refused {
            return Err(Fp4Error::at(path, OpsError::NonFinite { found }));
        }
        set_amaxes(&mut self.list, &found);
        let mut apart = Vec::new();
        for list in same_id {
            let rest = tie(self, &list, &found);
            apart.extend(by_amax(rest, &found));
        }
        compare(module, self, apart)?;
        self.untie();
        Ok(())
    }

    /// Sets the amax of jobs to others, such as those that were learned.
    pub(crate) fn replace_amaxes(&mut self, amaxes: impl Iterator<Item = (usize, f32)>) {
        amaxes.for_each(|(at, amax)| self.list[at].task.amax = Some(amax));
        self.untie();
    }

    /// Gives weights with another tensor scale than the one they are tied to codes of their own.
    fn untie(&mut self) {
        let bits = |job: &Job<'_>| job.task.amax.map(f32::to_bits);
        for at in 0..self.list.len() {
            if bits(&self.list[at]) != bits(&self.list[self.list[at].source]) {
                self.list[at].source = at;
            }
        }
    }

    /// Gives jobs the statistics of their inputs along the axis that they are quantized along. A
    /// tied weight is multiplied by the inputs of all its places.
    ///
    /// # Errors
    /// [`Fp4Error::Calibration`] for a path that no parameter has, or an axis or a slice that it
    /// does not have; [`Fp4Error::Parameter`] if the statistics are of another number of inputs
    /// than the weight has.
    pub(crate) fn calibrate(
        &mut self,
        selection: &ModulePlan,
        calibration: &Calibration,
    ) -> Result<(), Fp4Error> {
        for (path, axis, slice, gram) in calibration.shared() {
            let unknown = || Fp4Error::Calibration { path: path.to_owned(), axis, slice };
            let has = |Parameter { shape, .. }: &Parameter| {
                axis < shape.len() && slice < shape.iter().product::<usize>().max(1)
            };
            let Some(at) = self.at(path) else {
                let kept = selection.parameters.iter().map(|(parameter, _)| parameter);
                let kept = kept.filter(|parameter| parameter.path == path).any(has);
                if kept { continue } else { return Err(unknown()) }
            };
            let Job { parameter, task, source, .. } = &self.list[at];
            let (plan, source) = (task.plan, *source);
            if !has(parameter) {
                return Err(unknown());
            }
            if plan.layout.axis != axis {
                continue;
            }
            let slices = plan.slices();
            if slice >= slices {
                return Err(unknown());
            }
            check_length("calibrated inputs", plan.layout.shape[axis], gram.channels())
                .map_err(|error| Fp4Error::at(path, error))?;
            let inputs = &mut self.list[source].task.inputs;
            let added = inputs.get_or_insert_with(|| Inputs::new(slices)).add(slice, gram);
            added.map_err(|error| Fp4Error::at(path, error))?;
        }
        Ok(())
    }
}

/// Returns true if a tensor scale is made from the amax of the whole weight.
fn from_amax(scheme: &Fp4Scheme) -> bool {
    scheme.rule.row().tensor_scale && scheme.tensor_scale == TensorScaling::Tensor
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
        let WeightPlan { layout, scheme, .. } = self.jobs.list[at].task.plan;
        let quantized = match scheme.hadamard {
            Some(transform) => hadamard(values.clone().cast(DType::F32), layout.axis, transform),
            None => Ok(values.clone()),
        };
        let measured = match quantized.and_then(amax) {
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

/// Facts of a report entry for a packed weight.
pub(crate) struct PackedFacts {
    layout: Fp4Layout,
    /// The dtype that `val()` returns.
    dtype: DType,
    /// Bytes of codes and scales.
    bytes: usize,
    /// How Burn's layers multiply by it.
    products: MatmulPath,
    /// Sums of squares as its device gives them: `[6]` over the values, and behind these `[3]` over
    /// the outputs, if they were summed there.
    sums: Option<Tensor<1>>,
    /// Known if the dense values were read, and once the sums are read back.
    weight_error: Option<SquaredError>,
    output_error: Option<SquaredError>,
}

/// The dense values of a packed weight, and the sums over the outputs of its layer, if known.
pub(crate) type Compared<const D: usize> = (Tensor<D>, Option<OutputSums>);

impl PackedFacts {
    /// Makes the facts of a weight whose `val()` returns a dtype. Its errors are measured if there
    /// are dense values.
    ///
    /// # Errors
    /// [`OpsError`] if the dense values do not have its shape and a dtype that is quantized.
    pub(crate) fn new<const D: usize>(
        packed: &Fp4Tensor<D>,
        dtype: DType,
        dense: Option<Compared<D>>,
    ) -> Result<Self, OpsError> {
        let layout = packed.layout().clone();
        let products = matmul_path(&layout, dtype, &packed.device());
        let (mut sums, mut output_error) = (None, None);
        if let Some((dense, output_sums)) = dense {
            let values = packed.squared_error(dense)?;
            sums = Some(match output_sums {
                Some(OutputSums::OnDevice(outputs)) => Tensor::cat(vec![values, *outputs], 0),
                Some(OutputSums::Known(sums)) => {
                    output_error = Some(SquaredError::new(sums));
                    values
                }
                None => values,
            });
        }
        let bytes = packed.bytes();
        Ok(Self { layout, dtype, bytes, products, sums, weight_error: None, output_error })
    }

    /// Reads the sums of all back, in one transfer per device.
    ///
    /// # Errors
    /// [`Fp4Error::Device`].
    pub(crate) fn read<'f>(all: impl Iterator<Item = &'f mut Self>) -> Result<(), Fp4Error> {
        let (facts, sums): (Vec<_>, Vec<_>) = all
            .filter_map(|facts| {
                let sums = facts.sums.take()?;
                Some((facts, sums))
            })
            .unzip();
        for (facts, sums) in facts.into_iter().zip(read_vectors(sums)?) {
            let Some((values, outputs)) = sums.split_at_checked(6) else { continue };
            facts.weight_error = squared_sums(values).map(SquaredError::new);
            if let [unit, error, energy] = *outputs {
                let square = f64::from(unit).powi(2);
                let outputs = [error, energy].map(|sum| f64::from(sum) * square);
                facts.output_error = Some(SquaredError::new(outputs));
            }
        }
        Ok(())
    }

    /// Returns the report entry for a weight that was quantized by a plan.
    pub(crate) fn quantized(
        &self,
        parameter: &Parameter,
        plan: &WeightPlan,
        used: &MethodUsed,
    ) -> ParameterReport {
        let outcome = Outcome::Quantized {
            scheme: plan.scheme.with_method(used.method),
            asked: plan.scheme.method,
            fallback: used.fallback.clone(),
            axis: self.layout.axis,
            shares_scale_with: plan.shares.clone(),
            weight_error: self.weight_error.expect("compared with its dense values"),
            output_error: self.output_error,
            products: parameter.products(&self.products, self.layout.axis),
        };
        self.report(parameter, outcome)
    }

    /// Returns the report entry for a weight with provided codes. A parameter that was not
    /// initialized has the shape and dtype of these.
    pub(crate) fn provided(&self, parameter: &Parameter) -> ParameterReport {
        let Fp4Layout { format, block_size, axis, .. } = self.layout;
        let outcome = Outcome::Provided {
            format,
            block_size,
            axis,
            weight_error: self.weight_error,
            products: parameter.products(&self.products, axis),
        };
        let known = parameter.clone().with_values(&self.layout.shape, self.dtype);
        self.report(&known, outcome)
    }

    /// With the bytes of the placeholder, which stores one value.
    fn report(&self, parameter: &Parameter, outcome: Outcome) -> ParameterReport {
        parameter.report(outcome, self.bytes + self.dtype.size())
    }
}
