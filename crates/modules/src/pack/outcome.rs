//! Report entries for packed weights: errors are measured on their devices and read back at once.

use std::sync::Arc;

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_fp4_ops::{
    Fp4Layout, Fp4Tensor, Gram, MatmulPath, OpsError, is_host, matmul_path, squared_sums,
};
use rayon::prelude::*;

use crate::error::Fp4Error;
use crate::packed_weight::PackedWeight;
use crate::report::{Outcome, ParameterReport, SquaredError};
use crate::statistics::Inputs;
use crate::transfer::read_vectors;
use crate::walk::parameters::Parameter;
use crate::walk::select::WeightPlan;

use super::weight::{AnyWeight, MethodUsed, WeightTask};

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

/// Sums of squares over the outputs of a layer: `tr(E^T H E)` and `tr(W^T H W)`. W are the values
/// of its weight, E is what quantization changed in them, and H is the Gram matrix of its inputs.
#[derive(Clone)]
pub(crate) enum OutputSums {
    /// Both, summed on the host.
    Known([f64; 2]),
    /// A unit, and both in squares of it: `[3]` in f32. The unit is the largest magnitude of W:
    /// squares of very small or large values would not be f32 numbers.
    OnDevice(Box<Tensor<1>>),
}

impl OutputSums {
    pub(crate) fn to_device(&self, device: &Device) -> Self {
        match self {
            Self::Known(sums) => Self::Known(*sums),
            Self::OnDevice(sums) => Self::OnDevice(Box::new(sums.clone().to_device(device))),
        }
    }
}

/// Sums up the outputs of a weight, if its task asks for it and whole Gram matrices of its inputs
/// are known: in f64 on a host, in f32 on other devices, whose f64 is slow.
///
/// # Errors
/// [`OpsError`] for a dtype that is not quantized.
pub(super) fn output_sums(
    weight: &dyn AnyWeight,
    task: &WeightTask<'_>,
    packed: &PackedWeight,
    grams: &mut GramCache,
) -> Result<Option<OutputSums>, OpsError> {
    let Some((axis, inputs)) = known_inputs(task) else { return Ok(None) };
    // Slices without inputs have no outputs.
    let slices = 0..task.plan.slices();
    let seen = slices.filter_map(|slice| Some((slice, inputs.of(slice)?)));
    let matrices = |slice| {
        let values = weight.matrix(slice).cast(DType::F32);
        let rounded = packed.matrix(slice).dequantize_to(FloatDType::F32);
        [rounded - values.clone(), values]
    };
    if is_host(&weight.device()) {
        let mut sums = [0.0; 2];
        for (slice, gram) in seen {
            for (sum, matrix) in sums.iter_mut().zip(matrices(slice)) {
                *sum += squared_outputs(gram, matrix, axis)?;
            }
        }
        return Ok(Some(OutputSums::Known(sums)));
    }
    let unit = weight.amax()?.clamp_min(f32::MIN_POSITIVE);
    let mut sums = [Vec::new(), Vec::new()];
    for (slice, gram) in seen {
        let gram = grams.of(gram, &weight.device());
        for (sums, matrix) in sums.iter_mut().zip(matrices(slice)) {
            let matrix = matrix / unit.clone().unsqueeze::<2>();
            let product = match axis {
                0 => gram.clone().matmul(matrix.clone()),
                _ => matrix.clone().matmul(gram.clone()),
            };
            sums.push((product * matrix).sum());
        }
    }
    let [error, energy] = sums.map(|sums| Tensor::cat(sums, 0).sum());
    Ok(Some(OutputSums::OnDevice(Box::new(Tensor::cat(vec![unit, error, energy], 0)))))
}

/// Sums the squares of the outputs of a matrix whose inputs are along an axis, in f64. The sum is
/// infinite if a value is not finite.
fn squared_outputs(gram: &Gram, matrix: Tensor<2>, axis: usize) -> Result<f64, OpsError> {
    let rows = if axis == 0 { matrix.transpose() } else { matrix };
    let rows = rows.into_data();
    let rows = rows.as_slice::<f32>().expect("f32");
    match rows.par_iter().all(|value| value.is_finite()) {
        true => Ok(gram.squared_outputs(rows)?),
        false => Ok(f64::INFINITY),
    }
}

/// Returns the axis of a weight's matrices that inputs are along, and the inputs; nothing unless
/// the task measures outputs, all slices have a whole Gram matrix, and inputs other than zeros were
/// seen.
fn known_inputs<'a>(task: &'a WeightTask<'_>) -> Option<(usize, &'a Inputs)> {
    let inputs = task.inputs.as_ref().filter(|_| task.measures_outputs)?;
    let axis = task.plan.axis_of_matrices()?;
    let whole = inputs.grams().filter(|gram| gram.is_whole()).count();
    let slices = task.plan.slices();
    let seen = (0..slices).any(|slice| inputs.of(slice).is_some());
    (whole >= slices && seen).then_some((axis, inputs))
}

/// The Gram matrix that was uploaded last: weights that are multiplied by the same activations
/// follow each other.
#[derive(Default)]
pub(super) struct GramCache {
    last: Option<(Arc<Gram>, Tensor<2>)>,
}

impl GramCache {
    /// Returns the whole matrix in f32.
    fn of(&mut self, gram: &Arc<Gram>, device: &Device) -> Tensor<2> {
        if let Some((known, values)) = &self.last
            && Arc::ptr_eq(known, gram)
            && values.device() == *device
        {
            return values.clone();
        }
        // Freed before the next one is uploaded: it may be large.
        self.last = None;
        let channels = gram.channels();
        let mut rows = vec![0.0; channels * channels];
        rows.par_chunks_exact_mut(channels).enumerate().for_each(|(row, values)| {
            for (col, value) in values.iter_mut().enumerate() {
                *value = gram.get(row, col).unwrap_or_default() as f32;
            }
        });
        let data = TensorData::new(rows, [channels, channels]);
        let values = Tensor::from_data(data, (device, DType::F32));
        self.last = Some((gram.clone(), values.clone()));
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs are nearly the same in all channels, and errors cancel for these. In f32 the rounding
    /// of the terms would be a thousand times the sum.
    #[test]
    fn errors_of_outputs_on_hosts_are_exact_where_their_terms_cancel() {
        let device = Device::flex();
        let inputs: Vec<f32> = (0..64 * 32).map(|at| 1.0 + 1e-4 * (at % 7) as f32).collect();
        let gram = Gram::of(&inputs, 32).unwrap();
        let sign = |at: usize| if at.is_multiple_of(2) { 1.0 } else { -1.0 };
        let errors: Vec<f32> = (0..32).map(sign).collect();
        let outputs = inputs.chunks_exact(32).map(|row| -> f64 {
            row.iter().zip(&errors).map(|(x, error)| f64::from(*x) * f64::from(*error)).sum()
        });
        let expected: f64 = outputs.map(|output| output * output).sum();
        let rows = Tensor::<2>::from_data(TensorData::new(errors, [1, 32]), &device);
        for (matrix, axis) in [(rows.clone(), 1), (rows.transpose(), 0)] {
            let found = squared_outputs(&gram, matrix, axis).unwrap();
            assert!((found - expected).abs() <= 1e-4 * expected, "{found} {expected}");
        }
        let infinite = Tensor::<2>::ones([1, 32], &device) / 0.0;
        assert_eq!(squared_outputs(&gram, infinite, 1).unwrap(), f64::INFINITY);
    }
}
