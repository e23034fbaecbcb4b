//! Weights quantized family by family, on one device or divided among several.
//!
//! A family is what GPTQ quantizes side by side: weights with the same inputs, such as query, key
//! and value. Any other weight is alone.

use std::cmp::Reverse;
use std::hash::Hash;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};

use burn::module::Module;
use burn::tensor::Device;
use burn_fp4_ops::{Fp4Tensor, Gram, OpsError, quantize_family};
use burn_fp4_policy::families;

use crate::error::{Fp4Error, caught};
use crate::packed_weight::PackedWeight;
use crate::transfer::moved;

use super::job::{Jobs, Quantized};
use super::outcome::{GramCache, output_sums};
use super::weight::{AnyWeight, HessianFactorCache, WeightTask, quantize_without_inputs};

/// Quantizes the weights that have statistics of their inputs on the devices that these were found
/// on, one on each in turn, if these are several.
pub(crate) fn run_on_devices<M: Module>(
    module: &M,
    jobs: &mut Jobs<'_>,
    devices: &[Device],
) -> Result<(), Fp4Error> {
    // Tied weights are quantized once.
    let wanted: Vec<_> = (0..jobs.list.len())
        .filter(|&at| {
            let task = &jobs.list[at].task;
            jobs.is_source(at) && task.plan.scheme.method.needs_inputs() && task.inputs.is_some()
        })
        .collect();
    if devices.len() < 2 || jobs.list.iter().all(|job| job.task.inputs.is_none()) {
        return Ok(());
    }
    jobs.take_dense(module, |at| wanted.binary_search(&at).is_ok());
    // Memory that calibration leaves is of no use to the threads of devices, which have memory of
    // their own.
    devices.iter().for_each(Device::memory_cleanup);
    quantize_each(jobs, &wanted, devices)?;
    jobs.list.iter_mut().for_each(|job| job.dense = None);
    Ok(())
}

/// A weight in the queue of a device.
struct Queued<'a> {
    /// Its number among the weights of all queues.
    at: usize,
    path: &'a str,
    task: &'a WeightTask<'a>,
    dense: Box<dyn AnyWeight>,
}

/// Quantizes jobs that have their dense values, each on one of these devices. The codes go to the
/// device of the values.
pub(crate) fn quantize_each(
    jobs: &mut Jobs<'_>,
    wanted: &[usize],
    devices: &[Device],
) -> Result<(), Fp4Error> {
    let dense = |at: usize| jobs.list[at].dense.as_deref().expect("taken from the module");
    let homes: Vec<_> = wanted.iter().map(|&at| dense(at).device()).collect();
    let all: Vec<_> = devices.iter().chain(&homes).cloned().collect();
    let weights = wanted.iter().map(|&at| {
        let inputs = jobs.list[at].task.inputs.as_ref();
        (inputs.map(|inputs| inputs.grams().collect()).unwrap_or_default(), dense(at).elements())
    });
    let assigned = assign_devices(&weights.collect::<Vec<_>>(), devices.len());
    // All before the first is worked on: a device hands nothing out until it is done.
    let moved_there = moved(&all, || -> Vec<_> {
        let assigned = wanted.iter().zip(&assigned);
        assigned.map(|(&at, &to)| dense(at).to_device(&devices[to])).collect()
    })?;
    let mut queues: Vec<Vec<_>> = devices.iter().map(|_| Vec::new()).collect();
    for ((at, dense), to) in moved_there.into_iter().enumerate().zip(assigned) {
        let job = &jobs.list[wanted[at]];
        queues[to].push(Queued { at, path: job.path(), task: &job.task, dense });
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
    let mut quantized: Vec<_> = results?.into_iter().flatten().collect();
    quantized.sort_by_key(|(at, _)| *at);
    moved(&all, || {
        for (at, one) in quantized {
            jobs.list[wanted[at]].quantized = Some(one.moved_to(&homes[at]));
        }
    })
}

/// Assigns each weight to a device: longest job first, to the device that finishes it soonest.
/// Weights are given by their Gram matrices and the number of their elements, devices by number.
fn assign_devices(weights: &[(Vec<&Arc<Gram>>, usize)], devices: usize) -> Vec<usize> {
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
    let mut factorized: Vec<Vec<&Arc<Gram>>> = vec![Vec::new(); devices];
    let mut assigned = vec![0; weights.len()];
    for at in order {
        let grams = &weights[at].0;
        let work = |device: usize| {
            let known = |gram| factorized[device].iter().any(|other| Arc::ptr_eq(other, gram));
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

/// Divides weights among families, in the order of their first members.
fn families_of(tasks: &[&WeightTask<'_>]) -> Vec<Vec<usize>> {
    families(tasks.iter().enumerate().map(|(at, task)| Some(family_key(task).ok_or(at))))
}

/// Quantizes the weights of a queue, which are on one device; each with its number.
fn quantize_in_turn(queue: Vec<Queued<'_>>) -> Result<Vec<(usize, Quantized)>, Fp4Error> {
    let mut caches = Caches::default();
    let mut quantized = Vec::with_capacity(queue.len());
    let tasks: Vec<_> = queue.iter().map(|one| one.task).collect();
    let mut queue: Vec<_> = queue.into_iter().map(Some).collect();
    for family in families_of(&tasks) {
        let family: Vec<_> = family.into_iter().filter_map(|at| queue[at].take()).collect();
        let first = &family[0];
        let weights = caught(|| {
            let members: Vec<_> = family.iter().map(|one| (&*one.dense, one.task)).collect();
            let weights = pack_family(&members, &mut caches)?;
            // Done before its thread is: later work belongs to another one.
            let done = first.dense.device().sync();
            done.map_err(|error| OpsError::Device(error.to_string()))?;
            Ok(weights)
        });
        let weights = weights.map_err(|problem: OpsError| Fp4Error::at(first.path, problem))?;
        quantized.extend(family.iter().map(|one| one.at).zip(weights));
    }
    Ok(quantized)
}

/// Returns the key of the family of a weight: those with equal keys are quantized side by side by
/// GPTQ, if they are on one device. None: it is quantized alone.
pub(super) fn family_key(task: &WeightTask<'_>) -> Option<impl Eq + Hash + use<>> {
    let (plan, used) = (task.plan, task.method_used());
    used.method.gptq()?;
    let (inputs, slices) = (task.inputs.as_ref()?, plan.slices());
    // Weights with the same inputs share the Gram matrices themselves.
    let grams: Vec<_> = (0..slices).map(|slice| inputs.of(slice).map(Arc::as_ptr)).collect();
    Some((grams, plan.axis_of_matrices()?, plan.scheme.block_size, used))
}

/// Values that the next family may use again.
#[derive(Default)]
pub(super) struct Caches {
    factors: HessianFactorCache,
    grams: GramCache,
}

/// Quantizes the weights of a family, which are on one device. Their values are finite: `measure`
/// has refused others for GPTQ.
///
/// # Errors
/// [`OpsError`], of any of them: callers report it for the first.
pub(super) fn pack_family(
    family: &[(&dyn AnyWeight, &WeightTask<'_>)],
    caches: &mut Caches,
) -> Result<Vec<Quantized>, OpsError> {
    let packed = match family {
        [(alone, task)] => vec![alone.pack(task, &mut caches.factors)?],
        _ => pack_side_by_side(family, &mut caches.factors)?,
    };
    let members = family.iter().zip(packed);
    members
        .map(|((weight, task), packed)| {
            let output_sums = output_sums(*weight, task, &packed, &mut caches.grams)?;
            Ok(Quantized { packed, used: task.method_used(), output_sums })
        })
        .collect()
}

fn pack_side_by_side(
    family: &[(&dyn AnyWeight, &WeightTask<'_>)],
    factors: &mut HessianFactorCache,
) -> Result<Vec<PackedWeight>, OpsError> {
    let slices = family.first().map_or(0, |(_, task)| task.plan.slices());
    let mut packed = vec![Vec::new(); family.len()];
    for slice in 0..slices {
        let of_slice = quantize_slice(family, slice, factors)?;
        packed.iter_mut().zip(of_slice).for_each(|(slices, next)| slices.push(next));
    }
    let weights = family.iter().zip(packed);
    weights.map(|((weight, task), slices)| weight.stacked(&slices, task)).collect()
}

/// Quantizes one matrix of each of several weights.
fn quantize_slice(
    family: &[(&dyn AnyWeight, &WeightTask<'_>)],
    slice: usize,
    factors: &mut HessianFactorCache,
) -> Result<Vec<Fp4Tensor<2>>, OpsError> {
    let (weight, WeightTask { plan, inputs, .. }) = family[0];
    let axis = plan.axis_of_matrices().expect("families are of matrices");
    let matrices = family.iter().map(|(weight, task)| (weight.matrix(slice), task.scheme()));
    match (plan.scheme.method.gptq(), inputs.as_ref().and_then(|inputs| inputs.of(slice))) {
        (Some(options), Some(gram)) => {
            let factor = factors.of(gram, &options, plan.scheme.block_size, &weight.device())?;
            quantize_family(matrices.collect(), axis, &factor)
        }
        _ => matrices
            .map(|(matrix, scheme)| quantize_without_inputs(matrix, axis, &scheme))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use burn_fp4_ops::search::Method;
    use burn_fp4_ops::{Fp4Layout, Fp4Scheme, Gptq};

    use super::*;
    use crate::statistics::Inputs;
    use crate::walk::select::WeightPlan;

    fn plan(outputs: usize, scheme: &Fp4Scheme, method: Method) -> WeightPlan {
        let layout = Fp4Layout::new(&[32, outputs].into(), 0, scheme).unwrap();
        WeightPlan { layout, shares: None, scheme: scheme.with_method(method) }
    }

    #[test]
    fn a_family_has_the_same_inputs_and_method() {
        let [normed, hidden] = [(); 2].map(|()| Arc::new(Gram::of(&[1.0; 64], 32).unwrap()));
        let of = |gram| {
            let mut inputs = Inputs::new(1);
            inputs.add(0, gram).unwrap();
            inputs
        };
        let inputs = [&normed, &hidden].map(of);
        let gptq = Method::Gptq(Gptq::default());
        let original = Method::Gptq(Gptq::ORIGINAL);
        let scheme = Fp4Scheme::nvfp4();
        // query, gate, key, another method, other blocks, value, none: values are equal everywhere.
        let plans = [
            plan(32, &scheme, gptq),
            plan(48, &scheme, gptq),
            plan(8, &scheme, gptq),
            plan(8, &scheme, original),
            plan(8, &scheme.with_block_size(32), gptq),
            plan(8, &scheme, gptq),
            plan(8, &scheme, gptq),
        ];
        let which = [Some(0), Some(1), Some(0), Some(0), Some(0), Some(0), None];
        let tasks = plans.iter().zip(which);
        let tasks: Vec<_> = tasks
            .map(|(plan, at)| WeightTask {
                plan,
                amax: None,
                inputs: at.map(|at: usize| inputs[at].clone()),
                measures_outputs: false,
            })
            .collect();
        let expected: [&[usize]; 5] = [&[0, 2, 5], &[1], &[3], &[4], &[6]];
        assert_eq!(families_of(&tasks.iter().collect::<Vec<_>>()), expected);
    }

    #[test]
    fn the_longest_come_first_and_gram_matrices_stay_where_they_are() {
        let [a, b, c, d] = [64, 64, 64, 64].map(|channels| Arc::new(Gram::new(channels)));
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
