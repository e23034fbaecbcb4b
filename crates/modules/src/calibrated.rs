//! Weights quantized by statistics of their inputs: layer by layer, or divided among devices.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::{ptr, thread};

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_fp4_ops::{Gram, OpsError};

use crate::calibrate::{CalibrationOptions, Pace, Prepared, moved};
use crate::layer_inputs::WeightUse;
use crate::measure::{Measured, measure};
use crate::pack::{Source, caught, pack};
use crate::packed::PackedWeight;
use crate::paths::{TakeFloats, each_float};
use crate::report::Fp4Report;
use crate::select::{Plan, Selection, select};
use crate::weight::{AnyWeight, Curvatures, Inputs, Method, Task, slices_of};
use crate::{Fp4Config, Fp4Error};

/// See [`Fp4Module::quantize_fp4_sequential`](crate::Fp4Module::quantize_fp4_sequential).
pub(crate) fn sequential<M: Module, I: Module, O>(
    module: &mut M,
    config: &Fp4Config,
    options: CalibrationOptions<'_>,
    batches: impl IntoIterator<Item = I>,
    mut forward: impl FnMut(&M, I) -> O,
) -> Result<Fp4Report, Fp4Error> {
    let selection = select(module, config)?;
    let measured = measure(module, &selection, true)?;
    if !selection.needs_inputs() {
        return pack(module, &selection, Source { measured, ..Source::default() });
    }
    // What layers are multiplied by depends on what was made of those before them.
    let how = serde_json::to_string(config).expect("plain data");
    let plans: BTreeMap<&str, (usize, &Plan)> = selection
        .plans()
        .map(|(at, parameter, plan)| (parameter.path.as_str(), (at, plan)))
        .collect();
    let asking = plans.iter().filter(|(_, (_, plan))| plan.asked.needs_inputs());
    let wanted = asking.map(|(path, (_, plan))| ((*path).to_owned(), plan.layout.axis));
    let options = options.for_config(config);
    let prepared = Prepared::new(module, batches, &options, Some(wanted.collect()), &mut forward)?;

    let dense = dense_weights(module, |path| plans.contains_key(path));
    let planned = |weight: &WeightUse| {
        let &(at, plan) = plans.get(weight.path.as_str())?;
        let asks = plan.asked.needs_inputs() && plan.layout.axis == weight.axis;
        asks.then(|| (measured.tied_to(at), plan))
    };
    // Inputs that are still to come, by weight.
    let mut to_come: BTreeMap<usize, usize> = BTreeMap::new();
    for (at, _) in prepared.inputs().iter().flat_map(|input| &input.weights).filter_map(planned) {
        *to_come.entry(at).or_default() += 1;
    }
    selection.check_calibrated(|at, _| to_come.contains_key(&measured.tied_to(at)))?;
    // Paths of weights that are packed together.
    let mut tied: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    for (path, (at, _)) in &plans {
        tied.entry(measured.tied_to(*at)).or_default().push(path);
    }
    let rounded = |at: usize, weight: &PackedWeight| -> Vec<_> {
        let paths = tied[&at].iter();
        paths.map(|path| ((*path).to_owned(), dense[*path].rounded(weight))).collect()
    };
    let mut packed = BTreeMap::new();
    // Weights whose inputs decide nothing are quantized before the first layer runs.
    let mut first = Vec::new();
    for (&at, paths) in tied.iter().filter(|(at, _)| !to_come.contains_key(at)) {
        let task = Task { plan: plans[paths[0]].1, amax: measured.amax(at), inputs: None };
        let weight = caught(|| dense[paths[0]].pack(&task, &mut Curvatures::default()));
        let (weight, method) = weight.map_err(|problem| Fp4Error::at(paths[0], problem))?;
        first.extend(rounded(at, &weight));
        packed.insert(at, (weight, method));
    }
    let mut inputs: BTreeMap<usize, Inputs<'static>> = BTreeMap::new();
    let devices = prepared.devices();
    prepared.run(options, usize::MAX, Pace::InTurn, &how, &first, |input, grams| {
        // Each with all its inputs.
        let mut complete = Vec::new();
        for weight in &input.weights {
            let Some((at, plan)) = planned(weight) else { continue };
            let mut sum: Inputs<'_> =
                inputs.remove(&at).unwrap_or_else(|| Inputs::new(slices_of(&plan.layout)));
            for (nth, slice) in weight.slices.clone().enumerate() {
                // One for all slices, or one for each.
                let gram = &grams[if grams.len() == 1 { 0 } else { nth }];
                let added = sum.add(slice, Cow::Borrowed(gram));
                added.map_err(|error| Fp4Error::at(&weight.path, error))?;
            }
            let left = to_come.get_mut(&at).expect("counted above");
            *left -= 1;
            if *left > 0 {
                inputs.insert(at, sum.into_owned());
            } else {
                complete.push((at, weight.path.as_str(), sum));
            }
        }
        let jobs = complete.iter().map(|(at, path, inputs)| Job {
            path,
            task: Task { plan: plans[path].1, amax: measured.amax(*at), inputs: Some(inputs) },
            dense: dense[*path].clone_box(),
        });
        let results = quantize_each(jobs.collect(), &devices)?;
        let mut replaced = Vec::new();
        for ((at, ..), (weight, method)) in complete.iter().zip(results) {
            let tied = plans.iter().filter(|(_, (other, _))| measured.tied_to(*other) == *at);
            replaced
                .extend(tied.map(|(path, _)| ((*path).to_owned(), dense[*path].rounded(&weight))));
            packed.insert(*at, (weight, method));
        }
        Ok(replaced)
    })?;
    drop((prepared, first, dense));
    pack(module, &selection, Source { measured, packed, ..Source::default() })
}

/// Quantizes the weights that have statistics of their inputs on the devices that these were found
/// on, one on each in turn, if these are several; by weight.
pub(crate) fn divided<M: Module>(
    module: &M,
    selection: &Selection,
    devices: &[Device],
    inputs: &BTreeMap<usize, Inputs<'_>>,
    measured: &Measured,
) -> Result<BTreeMap<usize, (PackedWeight, Method)>, Fp4Error> {
    if devices.len() < 2 || inputs.is_empty() {
        return Ok(BTreeMap::new());
    }
    // Of tied weights the first.
    let wanted: BTreeMap<&str, (usize, &Plan)> = selection
        .plans()
        .filter(|(at, ..)| measured.tied_to(*at) == *at && inputs.contains_key(at))
        .map(|(at, parameter, plan)| (parameter.path.as_str(), (at, plan)))
        .collect();
    let dense = dense_weights(module, |path| wanted.contains_key(path));
    let mut jobs: Vec<_> = dense
        .iter()
        .map(|(path, dense)| {
            let (at, plan) = wanted[path.as_str()];
            let task = Task { plan, amax: measured.amax(at), inputs: inputs.get(&at) };
            (at, Job { path, task, dense: dense.clone_box() })
        })
        .collect();
    // In the order of the module, in which weights with the same inputs follow each other.
    jobs.sort_by_key(|(at, _)| *at);
    let (numbers, jobs): (Vec<_>, Vec<_>) = jobs.into_iter().unzip();
    // What calibration leaves is of no use to the threads of devices, which have memory of their
    // own.
    devices.iter().for_each(Device::memory_cleanup);
    let results = quantize_each(jobs, devices)?;
    Ok(numbers.into_iter().zip(results).collect())
}

/// A weight to be quantized by statistics of its inputs.
struct Job<'a> {
    path: &'a str,
    task: Task<'a>,
    dense: Box<dyn AnyWeight>,
}

/// A weight, and by what it was quantized.
type Quantized = (PackedWeight, Method);

/// Quantizes weights on these devices, each where least was given until then; the results are where
/// the weights were.
fn quantize_each(jobs: Vec<Job<'_>>, devices: &[Device]) -> Result<Vec<Quantized>, Fp4Error> {
    let homes: Vec<_> = jobs.iter().map(|job| job.dense.device()).collect();
    let all: Vec<_> = devices.iter().chain(&homes).cloned().collect();
    let weights = jobs.iter().map(|job| {
        let grams = job.task.inputs.map(|inputs| inputs.grams().collect()).unwrap_or_default();
        (grams, job.dense.elements())
    });
    let turns = turns(&weights.collect::<Vec<_>>(), devices.len());
    // All before the first is worked on: a device hands nothing out until it is done.
    let jobs = moved(&all, || -> Vec<_> {
        let turns = jobs.into_iter().zip(&turns);
        turns.map(|(job, &at)| Job { dense: job.dense.to_device(&devices[at]), ..job }).collect()
    })?;
    let mut queues: Vec<Vec<_>> = devices.iter().map(|_| Vec::new()).collect();
    for ((number, job), at) in jobs.into_iter().enumerate().zip(turns) {
        queues[at].push((number, job));
    }
    let results: Vec<_> = match devices {
        [_] => queues.into_iter().map(quantize_in_turn).collect(),
        // The host works for all of them at once.
        _ => thread::scope(|scope| {
            let threads = queues.into_iter().map(|queue| scope.spawn(|| quantize_in_turn(queue)));
            let join = |thread: thread::ScopedJoinHandle<'_, _>| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            threads.collect::<Vec<_>>().into_iter().map(join).collect()
        }),
    };
    let results: Result<Vec<_>, _> = results.into_iter().collect();
    let quantized: BTreeMap<_, _> = results?.into_iter().flatten().collect();
    moved(&all, || {
        let home =
            |((weight, method), home): (Quantized, &Device)| (weight.to_device(home), method);
        quantized.into_values().zip(&homes).map(home).collect()
    })
}

/// By weight, of which its Gram matrices and its elements are given, the number of its device: the
/// longest first, each where it is done first.
fn turns(weights: &[(Vec<&Gram>, usize)], devices: usize) -> Vec<usize> {
    let rounding = |at: usize| {
        let (grams, elements) = &weights[at];
        let each = elements / grams.len().max(1);
        grams.iter().map(|gram| rounding_work(gram.channels(), each)).sum::<usize>()
    };
    let mut order: Vec<_> = (0..weights.len()).collect();
    order.sort_by_key(|&at| Reverse(rounding(at)));
    let mut given = vec![0; devices];
    // What is factorized there.
    let mut there: Vec<Vec<&Gram>> = vec![Vec::new(); devices];
    let mut turns = vec![0; weights.len()];
    for at in order {
        let grams = &weights[at].0;
        let work = |device: usize| {
            let known = |gram: &Gram| there[device].iter().any(|other| ptr::eq(*other, gram));
            let new = grams.iter().filter(|gram| !known(gram));
            rounding(at) + new.map(|gram| factor_work(gram.channels())).sum::<usize>()
        };
        let first = (0..devices).min_by_key(|&device| given[device] + work(device));
        let first = first.expect("a calibration has a device");
        given[first] += work(first);
        there[first].extend(grams);
        turns[at] = first;
    }
    turns
}

/// What GPTQ takes to round a weight, in products: those that carry errors on, and what waiting for
/// one channel after the other comes to on an H200.
fn rounding_work(channels: usize, elements: usize) -> usize {
    channels * (elements + 20_000_000)
}

/// What it takes to bring a Gram matrix to a device and factorize it there, in the same unit.
fn factor_work(channels: usize) -> usize {
    channels * channels * 2000
}

/// Quantizes numbered weights, which are on one device.
fn quantize_in_turn(jobs: Vec<(usize, Job<'_>)>) -> Result<BTreeMap<usize, Quantized>, Fp4Error> {
    let mut curvatures = Curvatures::default();
    let mut quantized = BTreeMap::new();
    for (number, Job { path, task, dense }) in jobs {
        let weight = caught(|| {
            let weight = dense.pack(&task, &mut curvatures)?;
            // Done before its thread is: what follows is of another one.
            let done = dense.device().sync();
            done.map_err(|error| OpsError::Device(error.to_string()))?;
            Ok(weight)
        });
        quantized.insert(number, weight.map_err(|problem| Fp4Error::at(path, problem))?);
    }
    Ok(quantized)
}

/// The dense values of weights, by path.
fn dense_weights<M: Module>(
    module: &M,
    wanted: impl Fn(&str) -> bool,
) -> BTreeMap<String, Box<dyn AnyWeight>> {
    struct Weights<F> {
        wanted: F,
        found: BTreeMap<String, Box<dyn AnyWeight>>,
    }

    impl<F: Fn(&str) -> bool> TakeFloats for Weights<F> {
        fn take<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
            if (self.wanted)(&path) {
                self.found.insert(path, Box::new(param.base().without_autodiff()));
            }
        }
    }

    let mut weights = Weights { wanted, found: BTreeMap::new() };
    each_float(module, &mut weights);
    weights.found
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
            turns(&[one(&b, 0), one(&a, 60_000_000), one(&c, 0), one(&d, 0)], 2),
            [1, 0, 1, 1]
        );
        // Where nothing else decides, one more factorization is saved.
        assert_eq!(turns(&[one(&a, 0), one(&b, 0), one(&b, 0), one(&a, 0)], 2), [0, 1, 1, 0]);
        assert_eq!(turns(&[one(&a, 0), one(&b, 0)], 1), [0, 0]);
    }
}
