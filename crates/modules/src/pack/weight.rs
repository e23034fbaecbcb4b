//! A weight, or a family of them: dense values, method, codes, and the errors of outputs.
//!
//! A family is what GPTQ quantizes side by side: weights with the same inputs, such as query, key
//! and value. Any other weight is alone.

use std::any::Any;
use std::hash::Hash;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_fp4_ops::search::{Method, Needs, Sse};
use burn_fp4_ops::{
    Fp4Scheme, Fp4Tensor, Gptq, Gram, Hadamard, HessianFactor, Importance, Interpreter, NonFinite,
    OpsError, TensorScaling, amax, is_host, quantize, quantize_by_importance, quantize_family,
    quantize_with_best_tensor_scale, quantize_with_hessian_factor,
};
use burn_ir::TensorId;
use rayon::prelude::*;

use crate::packed_weight::PackedWeight;
use crate::report::Fallback;
use crate::statistics::Inputs;
use crate::walk::select::WeightPlan;

/// A dense weight of any rank.
pub(crate) trait AnyWeight: Any + Send {
    fn device(&self) -> Device;

    fn to_device(&self, device: &Device) -> Box<dyn AnyWeight>;

    fn elements(&self) -> usize;

    /// Returns the largest magnitude, `[1]` in f32 on its device.
    fn amax(&self) -> Result<Tensor<1>, OpsError>;

    /// Gives recorded operations this value of a tensor.
    fn insert(&self, rerun: &mut Interpreter, id: TensorId) -> Result<(), OpsError>;

    fn pack(
        &self,
        task: &WeightTask<'_>,
        factors: &mut HessianFactorCache,
    ) -> Result<PackedWeight, OpsError>;

    /// A matrix of the last two axes, numbered over the leading ones.
    fn matrix(&self, slice: usize) -> Tensor<2>;

    /// Puts its matrices together, with one tensor scale for all of them or one per row.
    fn stacked(
        &self,
        slices: &[Fp4Tensor<2>],
        task: &WeightTask<'_>,
    ) -> Result<PackedWeight, OpsError>;

    /// The values of codes and scales, in the dtype of this weight.
    fn rounded(&self, packed: &PackedWeight) -> Box<dyn AnyWeight>;
}

impl<const D: usize> AnyWeight for Tensor<D> {
    fn device(&self) -> Device {
        self.device()
    }

    fn to_device(&self, device: &Device) -> Box<dyn AnyWeight> {
        Box::new(self.clone().to_device(device))
    }

    fn elements(&self) -> usize {
        self.shape().num_elements()
    }

    fn amax(&self) -> Result<Tensor<1>, OpsError> {
        amax(self.clone())
    }

    fn insert(&self, rerun: &mut Interpreter, id: TensorId) -> Result<(), OpsError> {
        rerun.insert(id, self.clone())
    }

    fn pack(
        &self,
        task: &WeightTask<'_>,
        factors: &mut HessianFactorCache,
    ) -> Result<PackedWeight, OpsError> {
        let method = task.method_used().method;
        let (scheme, axis) = (task.scheme().with_method(method), task.plan.layout.axis);
        let Some(inputs) = task.inputs.as_ref().filter(|_| method.needs_inputs()) else {
            return Ok(quantize_without_inputs(self.clone(), axis, &scheme)?.into());
        };
        let slices = task.plan.slices();
        if slices < 2 {
            return Ok(quantize_whole(self.clone(), axis, &scheme, inputs.of(0), factors)?.into());
        }
        // Slices share the tensor scale of the whole, which has none to be shared of a value like
        // this.
        if let Some(found) = task.amax.filter(|amax| !amax.is_finite()) {
            return Err(OpsError::NonFinite { found });
        }
        let axis = axis - (D - 2);
        let of_slice = |slice: usize| {
            quantize_whole(self.matrix(slice), axis, &scheme, inputs.of(slice), factors)
        };
        self.stacked(&(0..slices).map(of_slice).collect::<Result<Vec<_>, _>>()?, task)
    }

    fn matrix(&self, slice: usize) -> Tensor<2> {
        let dims: [usize; D] = self.dims();
        let [rows, cols] = [dims[D - 2], dims[D - 1]];
        let mut ranges = dims.map(|length| 0..length);
        let mut left = slice;
        for axis in (0..D - 2).rev() {
            let at = left % dims[axis];
            ranges[axis] = at..at + 1;
            left /= dims[axis];
        }
        self.clone().slice(ranges).reshape([rows, cols])
    }

    fn stacked(
        &self,
        slices: &[Fp4Tensor<2>],
        task: &WeightTask<'_>,
    ) -> Result<PackedWeight, OpsError> {
        let codes = slices.iter().map(Fp4Tensor::codes).collect();
        let scales = slices.iter().map(Fp4Tensor::scales).collect();
        let tensor_scales: Vec<_> = slices.iter().map(Fp4Tensor::tensor_scale_bits).collect();
        let tensor_scale = match task.scheme().tensor_scale {
            TensorScaling::Row => Tensor::cat(tensor_scales, 0),
            _ => tensor_scales[0].clone(),
        };
        // A copy even of one: the members of a family are parts of one memory, which each would
        // keep.
        let (codes, scales) = (Tensor::cat(codes, 0), Tensor::cat(scales, 0));
        let layout = task.plan.layout.clone();
        Ok(Fp4Tensor::<D>::from_parts_unread(codes, scales, tensor_scale, layout)?.into())
    }

    fn rounded(&self, packed: &PackedWeight) -> Box<dyn AnyWeight> {
        Box::new(packed.tensor::<D>().dequantize_to(self.dtype().into()))
    }
}

/// The facts that the codes of a weight follow from, except for its values.
#[derive(Clone)]
pub(crate) struct WeightTask<'a> {
    pub(crate) plan: &'a WeightPlan,
    /// The amax that its tensor scale is made from, if it was measured.
    pub(crate) amax: Option<f32>,
    pub(crate) inputs: Option<Inputs>,
    /// True if the report needs the errors of its outputs: as much work as a search of blocks.
    pub(crate) measures_outputs: bool,
}

/// The method that a weight is quantized with, and why it is not the one asked for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct MethodUsed {
    pub(crate) method: Method,
    pub(crate) fallback: Option<Fallback>,
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

impl WeightTask<'_> {
    /// Returns the scheme, with the amax that is known already unless the method looks for a better
    /// one.
    pub(super) fn scheme(&self) -> Fp4Scheme {
        // The weight was found finite, or was not to be looked at.
        let scheme = self.plan.scheme.with_non_finite(NonFinite::FollowReference);
        match self.amax {
            _ if self.plan.scheme.method == Method::Sse(Sse::TensorScale) => scheme,
            Some(amax) if amax.is_finite() => scheme.with_tensor_scale(TensorScaling::Amax(amax)),
            _ => scheme,
        }
    }

    /// Returns the method asked for if there are the statistics that it takes, otherwise
    /// [`Method::FALLBACK`].
    pub(crate) fn method_used(&self) -> MethodUsed {
        let asked = self.plan.scheme.method;
        let all = |fallback| MethodUsed { method: Method::FALLBACK, fallback: Some(fallback) };
        if !asked.needs_inputs() {
            return MethodUsed { method: asked, fallback: None };
        }
        let Some(inputs) = &self.inputs else { return all(Fallback::NoInputs) };
        let block_size = self.plan.scheme.block_size;
        let fits = |gram: &Gram| match self.plan.scheme.needs() {
            Needs::Gram => gram.is_whole(),
            Needs::BlockHessians => gram.has_blocks(block_size),
            // The diagonal is always known.
            Needs::SecondMoments | Needs::Nothing => true,
        };
        let slices = self.plan.slices();
        let without: Vec<_> = (0..slices).filter(|&slice| inputs.of(slice).is_none()).collect();
        if without.len() == slices {
            return all(Fallback::NoInputs);
        }
        if !(0..slices).filter_map(|slice| inputs.of(slice)).all(|gram| fits(gram)) {
            return all(Fallback::OtherBlocks);
        }
        let fallback =
            (!without.is_empty()).then_some(Fallback::Slices { without_inputs: without });
        MethodUsed { method: asked, fallback }
    }
}

/// Quantizes a weight as a whole: with the method of the scheme, or with the squared error if that
/// takes statistics of inputs and there are none.
fn quantize_whole<const D: usize>(
    dense: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    gram: Option<&Arc<Gram>>,
    factors: &mut HessianFactorCache,
) -> Result<Fp4Tensor<D>, OpsError> {
    let own;
    let gram = match (scheme.method, scheme.hadamard, gram) {
        // Factors are kept for weights with the same inputs.
        (Method::Gptq(options), _, Some(gram)) => {
            let factor = factors.of(gram, &options, scheme, &dense.device())?;
            return quantize_with_hessian_factor(dense, axis, scheme, &factor);
        }
        (_, Some(hadamard), Some(gram)) => {
            own = Gram::clone(gram).transformed(hadamard)?;
            Some(&own)
        }
        (_, None, gram) => gram.map(|gram| &**gram),
        (_, _, None) => None,
    };
    match (scheme.method, gram) {
        (Method::Sse(Sse::Weighted), Some(gram)) => {
            let weights: Vec<f32> = gram.diagonal().map(|value| value as f32).collect();
            quantize_by_importance(dense, axis, scheme, Importance::Channels(&weights))
        }
        (method, Some(gram)) if method.needs_hessians() => {
            let hessians = gram.blocks(scheme.block_size)?;
            quantize_by_importance(dense, axis, scheme, Importance::Blocks(&hessians))
        }
        _ => quantize_without_inputs(dense, axis, scheme),
    }
}

/// Quantizes a weight as a whole, without statistics of its inputs: methods that take some fall
/// back to the squared error.
///
/// # Errors
/// [`OpsError`].
pub(crate) fn quantize_without_inputs<const D: usize>(
    dense: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
) -> Result<Fp4Tensor<D>, OpsError> {
    match scheme.method {
        Method::Sse(Sse::TensorScale) => quantize_with_best_tensor_scale(dense, axis, scheme),
        method if method.needs_inputs() => {
            quantize(dense, axis, &scheme.with_method(Method::FALLBACK))
        }
        _ => quantize(dense, axis, scheme),
    }
}

/// The Hessian factor that GPTQ computed last, with the Gram matrix and the transform of the inputs
/// that it is made of. Slices of a weight may share a Gram matrix, and so may weights that are not
/// a family because their blocks run along other axes.
#[derive(Default)]
pub(crate) struct HessianFactorCache {
    last: Option<(Arc<Gram>, Option<Hadamard>, Arc<HessianFactor>)>,
}

impl HessianFactorCache {
    fn of(
        &mut self,
        gram: &Arc<Gram>,
        options: &Gptq,
        scheme: &Fp4Scheme,
        device: &Device,
    ) -> Result<Arc<HessianFactor>, OpsError> {
        let (device, block_size) = (device.clone().inner(), scheme.block_size);
        if let Some((known, hadamard, factor)) = &self.last
            && Arc::ptr_eq(known, gram)
            && *hadamard == scheme.hadamard
            && factor.options() == options
            && factor.block_size() == block_size
            && *factor.device() == device
        {
            return Ok(factor.clone());
        }
        // Freed before the next one is made: they may be large.
        self.last = None;
        let hadamard = scheme.hadamard;
        let transformed =
            hadamard.map(|hadamard| Gram::clone(gram).transformed(hadamard)).transpose()?;
        let of = transformed.as_ref().unwrap_or(gram);
        let factor = Arc::new(HessianFactor::new(of, options, block_size, &device)?);
        self.last = Some((gram.clone(), hadamard, factor.clone()));
        Ok(factor)
    }
}

/// Returns the key of the family of a weight: those with equal keys are quantized side by side by
/// GPTQ, if they are on one device. None: it is quantized alone.
pub(super) fn family_key(task: &WeightTask<'_>) -> Option<impl Eq + Hash + use<>> {
    let (plan, used) = (task.plan, task.method_used());
    used.method.gptq()?;
    let (inputs, slices) = (task.inputs.as_ref()?, plan.slices());
    // Weights with the same inputs share the Gram matrices themselves.
    let grams: Vec<_> = (0..slices).map(|slice| inputs.of(slice).map(Arc::as_ptr)).collect();
    let Fp4Scheme { block_size, hadamard, .. } = plan.scheme;
    Some((grams, plan.axis_of_matrices()?, block_size, hadamard, used))
}

/// Values that the next family may use again.
#[derive(Default)]
pub(super) struct Caches {
    factors: HessianFactorCache,
    grams: GramCache,
}

/// Quantizes the weights of a family, which are on one device. Their values are finite: the
/// measurement of amax has refused others for GPTQ.
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
            let factor = factors.of(gram, &options, &plan.scheme, &weight.device())?;
            quantize_family(matrices.collect(), axis, &factor)
        }
        _ => matrices
            .map(|(matrix, scheme)| quantize_without_inputs(matrix, axis, &scheme))
            .collect(),
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
/// are known: products in f64 on a host, in f32 on other devices, whose f64 is slow.
///
/// # Errors
/// [`OpsError`] for a dtype that is not quantized.
fn output_sums(
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
struct GramCache {
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
    fn outputs_of_a_matrix_summed_in_f64_are_exact_where_their_terms_cancel() {
        let device = Device::flex();
        let inputs: Vec<f32> = (0..64 * 32).map(|at| 1.0 + 1e-4 * (at % 7) as f32).collect();
        // Summed in f64 throughout.
        let mut products = vec![0.0; 32 * 32];
        for row in inputs.chunks_exact(32) {
            for (at, product) in products.iter_mut().enumerate() {
                *product += f64::from(row[at / 32]) * f64::from(row[at % 32]);
            }
        }
        let gram = Gram::from_values(&products, 32, 32, 64, 1.0).unwrap();
        let sign = |at: usize| if at.is_multiple_of(2) { 1.0 } else { -1.0 };
        let errors: Vec<f32> = (0..32).map(sign).collect();
        let outputs = inputs.chunks_exact(32).map(|row| -> f64 {
            row.iter().zip(&errors).map(|(x, error)| f64::from(*x) * f64::from(*error)).sum()
        });
        let expected: f64 = outputs.map(|output| output * output).sum();
        let rows = Tensor::<2>::from_data(TensorData::new(errors, [1, 32]), &device);
        for (matrix, axis) in [(rows.clone(), 1), (rows.clone().transpose(), 0)] {
            let found = squared_outputs(&gram, matrix, axis).unwrap();
            assert!((found - expected).abs() <= 1e-4 * expected, "{found} {expected}");
        }
        // Summed in f32 at first, a matrix leaves its rounding.
        let rounded = Gram::of(&inputs, 32).unwrap();
        let found = squared_outputs(&rounded, rows, 1).unwrap();
        let all: f64 = rounded.diagonal().sum();
        assert!((found - expected).abs() <= 1e-6 * all, "{found} {expected} of {all}");
        let infinite = Tensor::<2>::ones([1, 32], &device) / 0.0;
        assert_eq!(squared_outputs(&gram, infinite, 1).unwrap(), f64::INFINITY);
    }
}
