//! Weights quantized by what is known of their inputs: layer by layer, or divided among devices.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::{ptr, thread};

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_fp4_ops::formats::check_length;
use burn_fp4_ops::{Fp4Tensor, Gram, OpsError};

use crate::calibrate::{CalibrationOptions, Pace, Prepared, moved};
use crate::capture::WeightUse;
use crate::packed::PackedWeight;
use crate::paths::{TakeFloats, each_float};
use crate::quantize::{Source, check_selected, measure, pack};
use crate::report::{ChosenBy, Fp4Report};
use crate::select::{Decision, Parameter, Plan, select};
use crate::weight::{Curvatures, chosen_by, quantize_weight, scheme_of};
use crate::{Calibration, Fp4Config, Fp4Error};

/// See [`Fp4Module::quantize_fp4_sequential`](crate::Fp4Module::quantize_fp4_sequential).
pub(crate) fn sequential<M: Module, I: Module, O>(
    module: &mut M,
    config: &Fp4Config,
    options: CalibrationOptions<'_>,
    batches: impl IntoIterator<Item = I>,
    mut forward: impl FnMut(&M, I) -> O,
) -> Result<Fp4Report, Fp4Error> {
    let decisions = select(module, config)?;
    check_selected(&decisions)?;
    if let Some(options) = &config.gptq {
        options.validate(&config.scheme).map_err(OpsError::from)?;
    }
    let amaxes = measure(module, &decisions, true)?;
    let prepared = Prepared::new(module, batches, &options.devices, &mut forward)?;
    // What layers meet depends on what was made of those before them.
    let how = serde_json::to_string(config).expect("plain data");

    let plans = selected(&decisions, |_| true);
    let mut dense = Matrices { wanted: &plans, found: BTreeMap::new() };
    each_float(module, &mut dense);
    let dense = dense.found;
    // Inputs that are still to come, by parameter id.
    let mut to_come: BTreeMap<u64, usize> = BTreeMap::new();
    let planned = |weight: &WeightUse| {
        let (id, plan) = *plans.get(weight.path.as_str())?;
        (plan.layout.axis == weight.axis).then_some(id)
    };
    for id in prepared.inputs().iter().flat_map(|input| &input.weights).filter_map(planned) {
        *to_come.entry(id).or_default() += 1;
    }
    let mut inputs: BTreeMap<u64, Gram> = BTreeMap::new();
    let mut packed = BTreeMap::new();
    let devices = prepared.devices();
    prepared.run(options.for_config(config), usize::MAX, Pace::InTurn, &how, |input, gram| {
        // Each with all its inputs.
        let mut complete = Vec::new();
        for weight in &input.weights {
            let Some(id) = planned(weight) else { continue };
            let gram = match inputs.remove(&id) {
                Some(mut sum) => {
                    sum.merge(&gram).map_err(|error| named(&weight.path, error))?;
                    Cow::Owned(sum)
                }
                None => Cow::Borrowed(&gram),
            };
            let left = to_come.get_mut(&id).expect("counted above");
            *left -= 1;
            if *left > 0 {
                inputs.insert(id, gram.into_owned());
            } else {
                complete.push((weight.path.as_str(), gram));
            }
        }
        let jobs = complete.iter().map(|(path, gram)| Job {
            path,
            plan: plans[path].1,
            dense: dense[*path].clone(),
            gram,
        });
        let results = quantize_each(jobs.collect(), &devices, config, &amaxes)?;
        let mut replaced = Vec::new();
        for ((path, _), (tensor, chosen_by)) in complete.iter().zip(results) {
            let id = plans[path].0;
            let rounded = tensor.dequantize_to(dense[*path].dtype().into());
            let tied = plans.iter().filter(|(_, (other, _))| *other == id);
            replaced.extend(tied.map(|(path, _)| ((*path).to_owned(), rounded.clone())));
            packed.insert(id, (PackedWeight::new(&tensor), chosen_by));
        }
        Ok(replaced)
    })?;
    drop((prepared, dense));
    pack(module, &decisions, Source { amaxes, packed, gptq: config.gptq, ..Source::default() })
}

/// Quantizes the matrices whose inputs are known on the devices that these were found on, one on each in turn, if
/// these are several; by parameter id.
pub(crate) fn divided<M: Module>(
    module: &M,
    decisions: &[(Parameter, Decision)],
    config: &Fp4Config,
    inputs: &BTreeMap<u64, Cow<'_, Gram>>,
    amaxes: &BTreeMap<String, f32>,
) -> Result<BTreeMap<u64, (PackedWeight, ChosenBy)>, Fp4Error> {
    let devices = config.calibration.devices();
    let by_inputs = config.gptq.is_some() || config.scheme.search.needs_hessians();
    if devices.len() < 2 || !by_inputs {
        return Ok(BTreeMap::new());
    }
    let wanted = selected(decisions, |parameter| inputs.contains_key(&parameter.id.val()));
    let mut dense = Matrices { wanted: &wanted, found: BTreeMap::new() };
    each_float(module, &mut dense);
    // Of tied weights the first.
    let mut ids = BTreeSet::new();
    let jobs: Vec<_> = decisions
        .iter()
        .filter_map(|(parameter, _)| {
            let path = parameter.path.as_str();
            let dense = dense.found.remove(path)?;
            let (id, plan) = wanted[path];
            ids.insert(id).then(|| (id, Job { path, plan, dense, gram: &inputs[&id] }))
        })
        .collect();
    let (ids, jobs): (Vec<_>, Vec<_>) = jobs.into_iter().unzip();
    // What calibration leaves is of no use to the threads of devices, which have memory of their own.
    devices.iter().for_each(Device::memory_cleanup);
    let results = quantize_each(jobs, devices, config, amaxes)?;
    let packed = results.iter().map(|(tensor, chosen_by)| (PackedWeight::new(tensor), *chosen_by));
    Ok(ids.into_iter().zip(packed).collect())
}

/// A weight to be quantized by what is known of its inputs.
struct Job<'a> {
    path: &'a str,
    plan: &'a Plan,
    dense: Tensor<2>,
    gram: &'a Gram,
}

/// A weight, and by what it was quantized.
type Quantized = (Fp4Tensor<2>, ChosenBy);

/// Quantizes weights on these devices, each where least was given until then; the results are where the weights were.
fn quantize_each(
    jobs: Vec<Job<'_>>,
    devices: &[Device],
    config: &Fp4Config,
    amaxes: &BTreeMap<String, f32>,
) -> Result<Vec<Quantized>, Fp4Error> {
    let homes: Vec<_> = jobs.iter().map(|job| job.dense.device()).collect();
    let all: Vec<_> = devices.iter().chain(&homes).cloned().collect();
    let weights = jobs.iter().map(|job| (job.gram, job.dense.shape().num_elements()));
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
    let run = |queue| quantize_in_turn(queue, config, amaxes);
    let results: Vec<_> = match devices {
        [_] => queues.into_iter().map(run).collect(),
        // The host works for all of them at once.
        _ => thread::scope(|scope| {
            let run = &run;
            let threads = queues.into_iter().map(|queue| scope.spawn(move || run(queue)));
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
            |((tensor, chosen_by), home): (Quantized, &Device)| (tensor.to_device(home), chosen_by);
        quantized.into_values().zip(&homes).map(home).collect()
    })
}

/// By weight, of which its Gram matrix and its elements are given, the number of its device: the longest first, each
/// where it is done first.
fn turns(weights: &[(&Gram, usize)], devices: usize) -> Vec<usize> {
    let rounding = |at: usize| rounding_work(weights[at].0.channels(), weights[at].1);
    let mut order: Vec<_> = (0..weights.len()).collect();
    order.sort_by_key(|&at| Reverse(rounding(at)));
    let mut given = vec![0; devices];
    // What is factorized there.
    let mut there: Vec<Vec<&Gram>> = vec![Vec::new(); devices];
    let mut turns = vec![0; weights.len()];
    for at in order {
        let gram = weights[at].0;
        let work = |device: usize| {
            let known = there[device].iter().any(|other| ptr::eq(*other, gram));
            rounding(at) + if known { 0 } else { factor_work(gram.channels()) }
        };
        let first = (0..devices).min_by_key(|&device| given[device] + work(device));
        let first = first.expect("a calibration has a device");
        given[first] += work(first);
        there[first].push(gram);
        turns[at] = first;
    }
    turns
}

/// What GPTQ takes to round a weight, in products: those that carry errors on, and what waiting for one channel after
/// the other comes to on an H200.
fn rounding_work(channels: usize, elements: usize) -> usize {
    channels * (elements + 20_000_000)
}

/// What it takes to bring a Gram matrix to a device and factorize it there, in the same unit.
fn factor_work(channels: usize) -> usize {
    channels * channels * 2000
}

/// Quantizes numbered weights, which are on one device.
fn quantize_in_turn(
    jobs: Vec<(usize, Job<'_>)>,
    config: &Fp4Config,
    amaxes: &BTreeMap<String, f32>,
) -> Result<BTreeMap<usize, Quantized>, Fp4Error> {
    let mut curvatures = Curvatures::default();
    let mut quantized = BTreeMap::new();
    for (number, Job { path, plan, dense, gram }) in jobs {
        let chosen_by = chosen_by(config.gptq, &plan.scheme, Some(gram));
        let scheme = scheme_of(plan, amaxes.get(path));
        let axis = plan.layout.axis;
        let tensor = quantize_weight(&dense, axis, &scheme, chosen_by, Some(gram), &mut curvatures)
            .map_err(|source| named(path, source))?;
        // Done before its thread is: what follows is of another one.
        let done = dense.device().sync().map_err(|error| OpsError::Device(error.to_string()));
        done.map_err(|source| named(path, source))?;
        quantized.insert(number, (tensor, chosen_by));
    }
    Ok(quantized)
}

fn named(path: &str, source: impl Into<OpsError>) -> Fp4Error {
    Fp4Error::Parameter { path: path.to_owned(), source: source.into() }
}

/// Ids and plans of parameters that are to be quantized, by path.
fn selected(
    decisions: &[(Parameter, Decision)],
    wanted: impl Fn(&Parameter) -> bool,
) -> BTreeMap<&str, (u64, &Plan)> {
    let plans = decisions.iter().filter_map(|(parameter, decision)| match decision {
        Decision::Quantize(plan) if wanted(parameter) => {
            Some((parameter.path.as_str(), (parameter.id.val(), plan)))
        }
        _ => None,
    });
    plans.collect()
}

/// The dense values of matrices that are to be quantized.
struct Matrices<'a> {
    wanted: &'a BTreeMap<&'a str, (u64, &'a Plan)>,
    found: BTreeMap<String, Tensor<2>>,
}

impl TakeFloats for Matrices<'_> {
    fn take<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        if D == 2 && self.wanted.contains_key(path.as_str()) {
            let shape: [usize; 2] = param.shape().dims();
            self.found.insert(path, param.base().without_autodiff().reshape(shape));
        }
    }
}

/// What is known of the inputs of weights along the axis that they are quantized along, by parameter id: a tied weight
/// meets those of all its places.
///
/// # Errors
/// [`Fp4Error::Calibration`] for a path that no parameter has or an axis that it does not have,
/// [`Fp4Error::Parameter`] if what is known is of another number of inputs than the weight has.
pub(crate) fn inputs_by_id<'a>(
    decisions: &[(Parameter, Decision)],
    calibration: &'a Calibration,
) -> Result<BTreeMap<u64, Cow<'a, Gram>>, Fp4Error> {
    let mut inputs: BTreeMap<u64, Cow<'a, Gram>> = BTreeMap::new();
    for (path, axis, gram) in calibration.iter() {
        let of_path = |(parameter, _): &&(Parameter, _)| {
            parameter.path == path && axis < parameter.shape.len()
        };
        let Some((parameter, decision)) = decisions.iter().find(of_path) else {
            return Err(Fp4Error::Calibration { path: path.to_owned(), axis });
        };
        let Decision::Quantize(plan) = decision else { continue };
        if plan.layout.axis != axis {
            continue;
        }
        let expected = plan.layout.shape[axis];
        check_length("calibrated inputs", expected, gram.channels())
            .map_err(|error| named(path, error))?;
        match inputs.get_mut(&parameter.id.val()) {
            Some(sum) => sum.to_mut().merge(gram).map_err(|error| named(path, error))?,
            None => {
                inputs.insert(parameter.id.val(), Cow::Borrowed(gram));
            }
        }
    }
    Ok(inputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_come_first_and_gram_matrices_stay_where_they_are() {
        let [a, b, c, d] = [64, 64, 64, 64].map(Gram::new);
        // As long as all others together.
        assert_eq!(turns(&[(&b, 0), (&a, 60_000_000), (&c, 0), (&d, 0)], 2), [1, 0, 1, 1]);
        // Where nothing else decides, one more factorization is saved.
        assert_eq!(turns(&[(&a, 0), (&b, 0), (&b, 0), (&a, 0)], 2), [0, 1, 1, 0]);
        assert_eq!(turns(&[(&a, 0), (&b, 0)], 1), [0, 0]);
    }
}
