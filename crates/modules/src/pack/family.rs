//! Weights that GPTQ quantizes side by side: those with the same inputs, such as query, key and
//! value.

use std::collections::BTreeMap;
use std::ptr;

use burn_fp4_ops::{Fp4Tensor, Gram, OpsError, quantize_family};

use super::output_error::output_sums;
use super::weight::{
    AnyWeight, HessianFactorCache, Quantized, WeightTask, quantize_without_inputs,
};

/// Divides weights among families, in the order of their first members: those that GPTQ quantizes
/// by the same inputs. Any other weight is alone.
pub(crate) fn families(tasks: &[WeightTask<'_>]) -> Vec<Vec<usize>> {
    let mut families: Vec<Vec<usize>> = Vec::new();
    // By the first of their Gram matrices.
    let mut known: BTreeMap<*const Gram, Vec<usize>> = BTreeMap::new();
    for (at, task) in tasks.iter().enumerate() {
        let Some(gram) = first_gram(task) else {
            families.push(vec![at]);
            continue;
        };
        let known = known.entry(ptr::from_ref(gram)).or_default();
        match known.iter().find(|&&family| joins(task, &tasks[families[family][0]])) {
            Some(&family) => families[family].push(at),
            None => {
                known.push(families.len());
                families.push(vec![at]);
            }
        }
    }
    families
}

/// Quantizes the weights of one of the [families], which are on one device. Their values are
/// finite: `measure` has refused others for GPTQ.
///
/// # Errors
/// [`OpsError`], of any of them: callers report it for the first.
pub(crate) fn pack_family<'a>(
    family: &[(&dyn AnyWeight, WeightTask<'a>)],
    hessian_factors: &mut HessianFactorCache<'a>,
) -> Result<Vec<Quantized>, OpsError> {
    let mut quantized = match family {
        [(alone, task)] => vec![alone.pack(task, hessian_factors)?],
        _ => quantize_side_by_side(family, hessian_factors)?,
    };
    let sums = output_sums(family, &quantized, &mut hessian_factors.grams)?;
    quantized.iter_mut().zip(sums).for_each(|(one, sums)| one.output_sums = sums);
    Ok(quantized)
}

fn quantize_side_by_side<'a>(
    family: &[(&dyn AnyWeight, WeightTask<'a>)],
    hessian_factors: &mut HessianFactorCache<'a>,
) -> Result<Vec<Quantized>, OpsError> {
    let slices = family.first().map_or(0, |(_, task)| task.plan.slices());
    let mut packed = vec![Vec::new(); family.len()];
    for slice in 0..slices {
        let of_slice = quantize_slice(family, slice, hessian_factors)?;
        packed.iter_mut().zip(of_slice).for_each(|(slices, next)| slices.push(next));
    }
    let weights = family.iter().zip(packed);
    weights
        .map(|((weight, task), slices)| {
            let packed = weight.stacked(&slices, task)?;
            Ok(Quantized { packed, choice: task.choice(), output_sums: None })
        })
        .collect()
}

/// Quantizes one matrix of each of several weights.
fn quantize_slice<'a>(
    family: &[(&dyn AnyWeight, WeightTask<'a>)],
    slice: usize,
    hessian_factors: &mut HessianFactorCache<'a>,
) -> Result<Vec<Fp4Tensor<2>>, OpsError> {
    let (weight, WeightTask { plan, inputs, .. }) = &family[0];
    let axis = plan.axis_of_matrices().expect("families are of matrices");
    let matrices = family.iter().map(|(weight, task)| (weight.matrix(slice), task.scheme()));
    match (plan.scheme.method.gptq(), inputs.and_then(|inputs| inputs.of(slice))) {
        (Some(options), Some(gram)) => {
            let (size, device) = (plan.scheme.block_size, weight.device());
            let hessian_factor = hessian_factors.of(gram, &options, size, &device)?;
            quantize_family(matrices.collect(), axis, &hessian_factor)
        }
        _ => matrices
            .map(|(matrix, scheme)| quantize_without_inputs(matrix, axis, &scheme))
            .collect(),
    }
}

/// The first Gram matrix of a weight that GPTQ quantizes matrix by matrix.
fn first_gram<'a>(task: &WeightTask<'a>) -> Option<&'a Gram> {
    task.plan.axis_of_matrices()?;
    task.choice().method.gptq()?;
    task.inputs?.grams().next()
}

/// Returns true if two such weights are of one family.
fn joins(one: &WeightTask<'_>, other: &WeightTask<'_>) -> bool {
    let of = |task: &WeightTask<'_>, slice| {
        task.inputs.and_then(|inputs| inputs.of(slice)).map(ptr::from_ref)
    };
    let known = |task: &WeightTask<'_>| {
        let plan = task.plan;
        (task.choice(), plan.slices(), plan.axis_of_matrices(), plan.scheme.block_size)
    };
    known(one) == known(other)
        && (0..one.plan.slices()).all(|slice| of(one, slice) == of(other, slice))
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use burn_fp4_ops::search::Method;
    use burn_fp4_ops::{Fp4Layout, Fp4Scheme, Gptq};

    use super::*;
    use crate::pack::inputs::Inputs;
    use crate::walk::plan::WeightPlan;

    fn plan(outputs: usize, scheme: &Fp4Scheme, method: Method) -> WeightPlan {
        let layout = Fp4Layout::new(&[32, outputs].into(), 0, scheme).unwrap();
        WeightPlan { layout, shares: None, scheme: scheme.with_method(method) }
    }

    #[test]
    fn a_family_has_the_same_inputs_and_method() {
        let [normed, hidden] = [(); 2].map(|()| Gram::of(&[1.0; 64], 32).unwrap());
        let of = |gram| {
            let mut inputs = Inputs::new(1);
            inputs.add(0, Cow::Borrowed(gram)).unwrap();
            inputs
        };
        let inputs = [&normed, &hidden].map(of);
        let gptq = Method::Gptq(Gptq::default());
        let textbook = Method::Gptq(Gptq::TEXTBOOK);
        let scheme = Fp4Scheme::nvfp4();
        // query, gate, key, another method, other blocks, value, none: values are equal everywhere.
        let plans = [
            plan(32, &scheme, gptq),
            plan(48, &scheme, gptq),
            plan(8, &scheme, gptq),
            plan(8, &scheme, textbook),
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
                inputs: at.map(|at: usize| &inputs[at]),
            })
            .collect();
        let expected: [&[usize]; 5] = [&[0, 2, 5], &[1], &[3], &[4], &[6]];
        assert_eq!(families(&tasks), expected);
    }
}
