//! Weights quantized by statistics of their inputs, divided among devices.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::ptr;
use std::thread::{self, ScopedJoinHandle};

use burn::module::Module;
use burn::tensor::Device;
use burn_fp4_ops::{Gram, OpsError};

use crate::error::{Fp4Error, caught};
use crate::transfer::moved;
use crate::walk::plan::{Selection, WeightPlan};

use super::family::{families, pack_family};
use super::inputs::Inputs;
use super::measure::Measured;
use super::weight::{AnyWeight, CurvatureCache, Quantized, WeightTask, dense_weights};

/// Quantizes the weights that have statistics of their inputs on the devices that these were found
/// on, one on each in turn, if these are several; by weight.
pub(crate) fn run_on_devices<M: Module>(
    module: &M,
    selection: &Selection,
    devices: &[Device],
    inputs: &BTreeMap<usize, Inputs<'_>>,
    measured: &Measured,
) -> Result<BTreeMap<usize, Quantized>, Fp4Error> {
    if devices.len() < 2 || inputs.is_empty() {
        return Ok(BTreeMap::new());
    }
    // Tied weights are quantized once.
    let wanted: BTreeMap<&str, (usize, &WeightPlan)> = selection
        .plans()
        .filter(|(at, _, plan)| measured.tied_to(*at) == *at && plan.asked.needs_inputs())
        .filter(|(at, ..)| inputs.contains_key(at))
        .map(|(at, parameter, plan)| (parameter.path.as_str(), (at, plan)))
        .collect();
    let dense = dense_weights(module, |path| wanted.contains_key(path));
    let mut jobs: Vec<_> = dense
        .iter()
        .map(|(path, dense)| {
            let (at, plan) = wanted[path.as_str()];
            let task = WeightTask { plan, amax: measured.amax(at), inputs: inputs.get(&at) };
            (at, Job { path, task, dense: dense.clone_box() })
        })
        .collect();
    // In the order of the module.
    jobs.sort_by_key(|(at, _)| *at);
    let (numbers, jobs): (Vec<_>, Vec<_>) = jobs.into_iter().unzip();
    // What calibration leaves is of no use to the threads of devices, which have memory of their
    // own.
    devices.iter().for_each(Device::memory_cleanup);
    let results = quantize_each(jobs, devices)?;
    Ok(numbers.into_iter().zip(results).collect())
}

/// A weight to be quantized by statistics of its inputs.
pub(crate) struct Job<'a> {
    pub(crate) path: &'a str,
    pub(crate) task: WeightTask<'a>,
    pub(crate) dense: Box<dyn AnyWeight>,
}

/// Quantizes weights, each on one of these devices; the results are where the weights were, in
/// their order.
pub(crate) fn quantize_each(
    jobs: Vec<Job<'_>>,
    devices: &[Device],
) -> Result<Vec<Quantized>, Fp4Error> {
    let homes: Vec<_> = jobs.iter().map(|job| job.dense.device()).collect();
    let all: Vec<_> = devices.iter().chain(&homes).cloned().collect();
    let weights = jobs.iter().map(|job| {
        let grams = job.task.inputs.map(|inputs| inputs.grams().collect()).unwrap_or_default();
        (grams, job.dense.elements())
    });
    let assigned = assign_devices(&weights.collect::<Vec<_>>(), devices.len());
    // All before the first is worked on: a device hands nothing out until it is done.
    let jobs = moved(&all, || -> Vec<_> {
        let jobs = jobs.into_iter().zip(&assigned);
        jobs.map(|(job, &at)| Job { dense: job.dense.to_device(&devices[at]), ..job }).collect()
    })?;
    let mut queues: Vec<Vec<_>> = devices.iter().map(|_| Vec::new()).collect();
    for ((number, job), at) in jobs.into_iter().enumerate().zip(assigned) {
        queues[at].push((number, job));
    }
    let results: Vec<_> = match devices {
        [_] => queues.into_iter().map(quantize_in_turn).collect(),
        // The host works for all of them at once.
        _ => thread::scope(|scope| {
            let threads = queues.into_iter().map(|queue| scope.spawn(|| quantize_in_turn(queue)));
            let join = |thread: ScopedJoinHandle<'_, _>| match thread.join() {
                Ok(result) => result,
                Err(panic) => resume_unwind(panic),
            };
            threads.collect::<Vec<_>>().into_iter().map(join).collect()
        }),
    };
    let results: Result<Vec<_>, _> = results.into_iter().collect();
    let quantized: BTreeMap<_, _> = results?.into_iter().flatten().collect();
    moved(&all, || {
        quantized.into_values().zip(&homes).map(|(one, home)| one.moved_to(home)).collect()
    })
}

/// Assigns each weight to a device: longest job first, to the device that finishes it soonest.
/// Weights are given by their Gram matrices and the number of their elements, devices by number.
fn assign_devices(weights: &[(Vec<&Gram>, usize)], devices: usize) -> Vec<usize> {
    let rounding = |at: usize| {
        let (grams, elements) = &weights[at];
        let each = elements / grams.len().max(1);
        grams.iter().map(|gram| gram.channels() * each).sum::<usize>()
    };
    let mut order: Vec<_> = (0..weights.len()).collect();
    let alone = |at: usize| {
        let grams = weights[at].0.iter();
        rounding(at) + grams.map(|gram| family_work(gram.channels())).sum::<usize>()
    };
    order.sort_by_key(|&at| Reverse(alone(at)));
    // By device the work that it has.
    let mut loads = vec![0; devices];
    // By device the Gram matrices that are factorized there.
    let mut factorized: Vec<Vec<&Gram>> = vec![Vec::new(); devices];
    let mut assigned = vec![0; weights.len()];
    for at in order {
        let grams = &weights[at].0;
        let work = |device: usize| {
            let known = |gram: &Gram| factorized[device].iter().any(|other| ptr::eq(*other, gram));
            let new = grams.iter().filter(|gram| !known(gram));
            rounding(at) + new.map(|gram| family_work(gram.channels())).sum::<usize>()
        };
        let soonest = (0..devices).min_by_key(|&device| loads[device] + work(device));
        let first = soonest.expect("a calibration has a device");
        loads[first] += work(first);
        factorized[first].extend(grams);
        assigned[at] = first;
    }
    assigned
}

/// The work of a family by GPTQ that does not depend on its weights, in the products that propagate
/// errors: to bring a Gram matrix to a device and factorize it there, and what waiting for one
/// channel after the other costs on an H200.
fn family_work(channels: usize) -> usize {
    channels * (channels * 2000 + 20_000_000)
}

/// Quantizes numbered weights, which are on one device.
fn quantize_in_turn(jobs: Vec<(usize, Job<'_>)>) -> Result<BTreeMap<usize, Quantized>, Fp4Error> {
    let mut curvatures = CurvatureCache::default();
    let mut quantized = BTreeMap::new();
    let tasks: Vec<_> = jobs.iter().map(|(_, job)| job.task).collect();
    let mut jobs: Vec<_> = jobs.into_iter().map(Some).collect();
    for family in families(&tasks) {
        let family: Vec<_> = family.into_iter().filter_map(|at| jobs[at].take()).collect();
        let first = &family[0].1;
        let weights = caught(|| {
            let members: Vec<_> = family.iter().map(|(_, job)| (&*job.dense, job.task)).collect();
            let weights = pack_family(&members, &mut curvatures)?;
            // Done before its thread is: what follows is of another one.
            let done = first.dense.device().sync();
            done.map_err(|error| OpsError::Device(error.to_string()))?;
            Ok(weights)
        });
        let weights = weights.map_err(|problem: OpsError| Fp4Error::at(first.path, problem))?;
        quantized.extend(family.iter().map(|(number, _)| *number).zip(weights));
    }
    Ok(quantized)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_come_first_and_gram_matrices_stay_where_they_are() {
        let [a, b, c, d] = [64, 64, 64, 64].map(Gram::new);
        let one = |gram, elements| (vec![gram], elements);
        // As long as all others together.
        assert_eq!(
            assign_devices(&[one(&b, 0), one(&a, 60_000_000), one(&c, 0), one(&d, 0)], 2),
            [1, 0, 1, 1]
        );
        // Where nothing else decides, one more factorization is saved.
        assert_eq!(
            assign_devices(&[one(&a, 0), one(&b, 0), one(&b, 0), one(&a, 0)], 2),
            [0, 1, 1, 0]
        );
        assert_eq!(assign_devices(&[one(&a, 0), one(&b, 0)], 1), [0, 0]);
    }
}
