//! Weights divided among several devices, each of which quantizes its own, family by family.

use std::cmp::Reverse;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};

use burn::module::Module;
use burn::tensor::Device;
use burn_fp4_ops::{Gram, OpsError};
use burn_fp4_policy::families;

use crate::error::Fp4Error;
use crate::transfer::{caught, moved};

use super::job::Jobs;
use super::weight::{AnyWeight, Caches, Quantized, WeightTask, family_key, pack_family};

/// Quantizes the weights that have statistics of their inputs on the devices that these were found
/// on, each on one of them.
pub(super) fn run_on_devices<M: Module>(
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
    if jobs.list.iter().all(|job| job.task.inputs.is_none()) {
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
