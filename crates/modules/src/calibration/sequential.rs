//! Weights quantized layer by layer, each by the inputs that the quantized layers before it leave.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_fp4_ops::Gram;
use burn_ir::TensorId;

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::pack::devices::quantize_each;
use crate::pack::job::Jobs;
use crate::pack::quantize::attach;
use crate::pack::weight::{HessianFactorCache, Quantized};
use crate::report::Fp4Report;
use crate::statistics::Inputs;
use crate::transfer::caught;
use crate::walk::select::{ModulePlan, select};

use super::batches::{RecordedBatches, Replacement};
use super::layer_inputs::{LayerInput, WeightUse};
use super::options::CalibrationOptions;
use super::pipeline::{DensePasses, Pace, Way, run};

/// See [`Fp4Module::quantize_fp4_sequential`](crate::Fp4Module::quantize_fp4_sequential).
pub(crate) fn sequential<M: Module, I: Module, O>(
    module: &mut M,
    config: &Fp4Config,
    options: CalibrationOptions<'_>,
    batches: impl IntoIterator<Item = I>,
    mut forward: impl FnMut(&M, I) -> O,
) -> Result<Fp4Report, Fp4Error> {
    let mut selection = select(module, config)?;
    selection.check_calibration_used(config)?;
    if !selection.needs_inputs() {
        let mut jobs = Jobs::new(&selection);
        jobs.measure(module, true)?;
        return attach(module, &selection, jobs);
    }
    let mut forward = |module: &M, batch| (forward(module, batch), Vec::new());
    let dense = match selection.corrects() {
        true => DensePasses::OfAll,
        false => DensePasses::None,
    };
    Ok(layer_by_layer(module, &selection, config, (options, dense), batches, &mut forward)?.0)
}

/// Quantizes selected weights layer by layer. Returns the outputs of each batch that are kept, too,
/// as matrices: those of the quantized module.
///
/// # Errors
/// As [`Fp4Module::quantize_fp4_sequential`](crate::Fp4Module::quantize_fp4_sequential).
pub(crate) fn layer_by_layer<M: Module, I: Module, O>(
    module: &mut M,
    selection: &ModulePlan,
    config: &Fp4Config,
    (options, dense): (CalibrationOptions<'_>, DensePasses),
    batches: impl IntoIterator<Item = I>,
    forward: &mut impl FnMut(&M, I) -> (O, Vec<TensorId>),
) -> Result<(Fp4Report, Vec<Vec<Tensor<2>>>), Fp4Error> {
    let mut jobs = Jobs::new(selection);
    jobs.measure(module, true)?;
    let options = options.for_config(config);
    let wanted = Some(selection.axes_of_inputs());
    let batches = RecordedBatches::new(module, batches, &options.devices, wanted, forward)?;
    jobs.take_dense(module, |_| true);
    let mut layers = LayerByLayer::new(jobs, batches.inputs());
    selection.check_calibrated(|number, _| {
        layers.jobs.source_of(number).is_some_and(|at| layers.to_come[at] > 0)
    })?;
    let first = layers.quantize_without_inputs()?;
    // What layers are multiplied by depends on what was made of those before them.
    let name = serde_json::to_string(config).expect("plain data");
    let pace = Pace::InTurn;
    let way = Way { in_flight: usize::MAX, pace, name: &name, first: &first, dense };
    let devices = batches.devices();
    let seen = |input: &LayerInput, grams| layers.take(input, grams, &devices);
    let outputs = run(&batches, options, &way, seen)?;
    let jobs = layers.into_jobs();
    drop((batches, first));
    Ok((attach(module, selection, jobs)?, outputs))
}

/// Weights that are quantized one after the other, as soon as all their inputs are known.
struct LayerByLayer<'a> {
    jobs: Jobs<'a>,
    /// For each job, the jobs that have its codes.
    tied: Vec<Vec<usize>>,
    /// For each job, the number of inputs that decide about its codes and are still to come.
    to_come: Vec<usize>,
}

impl<'a> LayerByLayer<'a> {
    fn new(jobs: Jobs<'a>, inputs: &[LayerInput]) -> Self {
        let mut tied = vec![Vec::new(); jobs.list.len()];
        for (at, job) in jobs.list.iter().enumerate() {
            tied[job.source].push(at);
        }
        let mut layers = Self { to_come: vec![0; jobs.list.len()], jobs, tied };
        for weight in inputs.iter().flat_map(|input| &input.weights) {
            if let Some(at) = layers.job_of(weight) {
                layers.to_come[at] += 1;
            }
        }
        layers
    }

    /// Returns the job of a weight that takes part in a product, if the input of the product
    /// decides about its codes.
    fn job_of(&self, weight: &WeightUse) -> Option<usize> {
        let job = &self.jobs.list[self.jobs.at(&weight.path)?];
        let plan = job.task.plan;
        let asks = plan.scheme.method.needs_inputs() && plan.layout.axis == weight.axis;
        asks.then_some(job.source)
    }

    /// Quantizes the weights that need no statistics, before the first layer runs. Returns their
    /// new values.
    fn quantize_without_inputs(&mut self) -> Result<Vec<Replacement>, Fp4Error> {
        let mut replaced = Vec::new();
        for at in 0..self.jobs.list.len() {
            if !self.jobs.is_source(at) || self.to_come[at] > 0 {
                continue;
            }
            let job = &mut self.jobs.list[at];
            let (dense, task) = (job.dense.as_deref().expect(DENSE), &job.task);
            let packed = caught(|| dense.pack(task, &mut HessianFactorCache::default()));
            let packed = packed.map_err(|problem| Fp4Error::at(job.path(), problem))?;
            let used = task.method_used();
            job.quantized = Some(Quantized { packed, used, output_sums: None });
            replaced.extend(self.rounded(at));
        }
        Ok(replaced)
    }

    /// Takes the statistics of an input, one Gram matrix for each of its parts, and quantizes the
    /// weights that this was the last input of. Returns their new values.
    fn take(
        &mut self,
        input: &LayerInput,
        grams: Vec<Gram>,
        devices: &[Device],
    ) -> Result<Vec<Replacement>, Fp4Error> {
        let complete = self.add(input, grams)?;
        quantize_each(&mut self.jobs, &complete, devices)?;
        // They are large, and of no more use.
        complete.iter().for_each(|&at| self.jobs.list[at].task.inputs = None);
        Ok(complete.into_iter().flat_map(|at| self.rounded(at)).collect())
    }

    /// Adds the statistics of an input to the weights that are multiplied by it. Returns the jobs
    /// whose inputs are then complete.
    fn add(&mut self, input: &LayerInput, grams: Vec<Gram>) -> Result<Vec<usize>, Fp4Error> {
        let grams: Vec<_> = grams.into_iter().map(Arc::new).collect();
        let mut complete = Vec::new();
        for weight in &input.weights {
            let Some(at) = self.job_of(weight) else { continue };
            let task = &mut self.jobs.list[at].task;
            let slices = task.plan.slices();
            let sum = task.inputs.get_or_insert_with(|| Inputs::new(slices));
            for (nth, slice) in weight.slices.clone().enumerate() {
                // One for all slices, or one for each.
                let gram = &grams[if grams.len() == 1 { 0 } else { nth }];
                let added = sum.add(slice, gram);
                added.map_err(|error| Fp4Error::at(&weight.path, error))?;
            }
            self.to_come[at] -= 1;
            if self.to_come[at] == 0 {
                complete.push(at);
            }
        }
        Ok(complete)
    }

    /// Returns the values of the codes of a job for all the parameters that have these.
    fn rounded(&self, at: usize) -> Vec<Replacement> {
        let quantized = self.jobs.list[at].quantized.as_ref().expect("quantized before");
        let rounded = |&tied: &usize| {
            let job = &self.jobs.list[tied];
            let dense = job.dense.as_deref().expect(DENSE);
            (job.path().to_owned(), dense.rounded(&quantized.packed))
        };
        self.tied[at].iter().map(rounded).collect()
    }

    /// Returns the jobs with the quantized weights, and frees dense values.
    fn into_jobs(mut self) -> Jobs<'a> {
        self.jobs.list.iter_mut().for_each(|job| job.dense = None);
        self.jobs
    }
}

const DENSE: &str = "taken from the module in the beginning";
