//! Squared errors of the outputs of layers, from the Gram matrices of their inputs.

use burn::tensor::{DType, FloatDType, Tensor};
use burn_fp4_ops::{Gram, OpsError};

use super::gram_cache::GramCache;
use super::weight::{AnyWeight, Quantized, WeightTask};

/// Sums up, for each weight with whole Gram matrices of its inputs, a unit and in squares of it
/// `tr(E^T H E)` and `tr(W^T H W)`: `[3]` in f32 on the device of the weight. W are its values, E
/// is what quantization changed in them, and H is the Gram matrix.
///
/// Two products of H and a matrix for each. The unit is the largest magnitude of W: squares of very
/// small or large values would not be f32 numbers.
///
/// # Errors
/// [`OpsError`] for a dtype that is not quantized.
pub(crate) fn output_sums<'a>(
    weights: &[(&dyn AnyWeight, WeightTask<'a>)],
    quantized: &[Quantized],
    grams: &mut GramCache<'a>,
) -> Result<Vec<Option<Tensor<1>>>, OpsError> {
    let mut all = Vec::with_capacity(weights.len());
    for ((weight, task), quantized) in weights.iter().zip(quantized) {
        let Some((axis, inputs)) = known_inputs(task) else {
            all.push(None);
            continue;
        };
        let unit = weight.amax()?.clamp_min(f32::MIN_POSITIVE);
        let (mut errors, mut energies) = (Vec::new(), Vec::new());
        for (slice, gram) in inputs {
            let hessian = grams.of(gram, &weight.device());
            let values = weight.matrix(slice).cast(DType::F32);
            let rounded = quantized.packed.matrix(slice).dequantize_to(FloatDType::F32);
            let error = rounded - values.clone();
            for (matrix, sums) in [(error, &mut errors), (values, &mut energies)] {
                let matrix = matrix / unit.clone().unsqueeze::<2>();
                let product = match axis {
                    0 => hessian.clone().matmul(matrix.clone()),
                    _ => matrix.clone().matmul(hessian.clone()),
                };
                sums.push((product * matrix).sum());
            }
        }
        let [error, energy] = [errors, energies].map(|sums| Tensor::cat(sums, 0).sum());
        all.push(Some(Tensor::cat(vec![unit, error, energy], 0)));
    }
    Ok(all)
}

/// Returns the two sums of what [`output_sums`] left on a device.
pub(crate) fn read_output_sums(sums: &[f32]) -> Option<[f64; 2]> {
    let [unit, error, energy] = *sums else { return None };
    let square = f64::from(unit).powi(2);
    Some([f64::from(error) * square, f64::from(energy) * square])
}

/// Returns the axis of a weight's matrices that inputs are along, and the Gram matrices by slice;
/// nothing unless all slices have a whole one and inputs other than zeros were seen.
fn known_inputs<'a>(task: &WeightTask<'a>) -> Option<(usize, Vec<(usize, &'a Gram)>)> {
    let (axis, inputs) = (task.plan.axis_of_matrices()?, task.inputs?);
    let whole = inputs.grams().filter(|gram| gram.is_whole()).count();
    let slices = 0..task.plan.slices();
    if whole < slices.len() {
        return None;
    }
    // Slices without inputs have no outputs.
    let seen: Vec<_> = slices.filter_map(|slice| Some((slice, inputs.of(slice)?))).collect();
    (!seen.is_empty()).then_some((axis, seen))
}
