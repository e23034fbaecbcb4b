//! [`Job`]: a weight to be quantized, and everything known about it.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_fp4_ops::formats::check_length;
use burn_fp4_ops::search::Needs;

use crate::error::Fp4Error;
use crate::packed_weight::PackedWeight;
use crate::statistics::{Calibration, Inputs};
use crate::walk::parameters::{ModulePath, Parameter, VisitParameters, visit_parameters};
use crate::walk::select::{ModulePlan, WeightPlan};

use super::outcome::{OutputSums, PackedFacts};
use super::weight::{AnyWeight, MethodUsed, WeightTask};

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

/// A quantized weight.
#[derive(Clone)]
pub(crate) struct Quantized {
    pub(crate) packed: PackedWeight,
    pub(crate) used: MethodUsed,
    pub(crate) output_sums: Option<OutputSums>,
}

impl Quantized {
    pub(crate) fn moved_to(self, device: &Device) -> Self {
        Self {
            packed: self.packed.to_device(device),
            output_sums: self.output_sums.map(|sums| sums.to_device(device)),
            ..self
        }
    }
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
