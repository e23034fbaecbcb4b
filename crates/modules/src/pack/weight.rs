//! One weight: its dense values, the method that it is quantized with, and its codes.

use std::any::Any;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use burn_fp4_ops::search::{Method, Needs, Sse};
use burn_fp4_ops::{
    Fp4Scheme, Fp4Tensor, Gptq, Gram, HessianFactor, Importance, Interpreter, NonFinite, OpsError,
    TensorScaling, amax, quantize, quantize_by_importance, quantize_with_best_tensor_scale,
    quantize_with_hessian_factor,
};
use burn_ir::TensorId;

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
        Ok(quantize_weight(self, task, factors)?.into())
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
        Ok(PackedWeight::from(stacked::<D>(slices, task)?))
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
        let fits = |gram: &Gram| match asked.needs() {
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

fn quantize_weight<const D: usize>(
    dense: &Tensor<D>,
    task: &WeightTask<'_>,
    factors: &mut HessianFactorCache,
) -> Result<Fp4Tensor<D>, OpsError> {
    let method = task.method_used().method;
    let (scheme, layout) = (task.scheme().with_method(method), &task.plan.layout);
    let slices = task.plan.slices();
    let inputs = task.inputs.as_ref().filter(|_| method.needs_inputs());
    let Some(inputs) = inputs.filter(|_| slices > 1) else {
        let gram = inputs.and_then(|inputs| inputs.of(0));
        return quantize_whole(dense.clone(), layout.axis, &scheme, gram, factors);
    };
    // Slices share the tensor scale of the whole, which has none to be shared of a value like this.
    if let Some(found) = task.amax.filter(|amax| !amax.is_finite()) {
        return Err(OpsError::NonFinite { found });
    }
    let axis = layout.axis - (D - 2);
    let of_slice = |slice: usize| {
        quantize_whole(dense.matrix(slice), axis, &scheme, inputs.of(slice), factors)
    };
    stacked(&(0..slices).map(of_slice).collect::<Result<Vec<_>, _>>()?, task)
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
    match (scheme.method, gram) {
        (Method::Gptq(options), Some(gram)) => {
            let factor = factors.of(gram, &options, scheme.block_size, &dense.device())?;
            quantize_with_hessian_factor(dense, axis, scheme, &factor)
        }
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

/// Puts the slices of a weight together, with one tensor scale for all of them or one per row.
fn stacked<const D: usize>(
    slices: &[Fp4Tensor<2>],
    task: &WeightTask<'_>,
) -> Result<Fp4Tensor<D>, OpsError> {
    let codes = slices.iter().map(Fp4Tensor::codes).collect();
    let scales = slices.iter().map(Fp4Tensor::scales).collect();
    let tensor_scales: Vec<_> = slices.iter().map(Fp4Tensor::tensor_scale_bits).collect();
    let tensor_scale = match task.scheme().tensor_scale {
        TensorScaling::Row => Tensor::cat(tensor_scales, 0),
        _ => tensor_scales[0].clone(),
    };
    // A copy even of one: the members of a family are parts of one memory, which each would keep.
    let (codes, scales) = (Tensor::cat(codes, 0), Tensor::cat(scales, 0));
    Fp4Tensor::from_parts_unread(codes, scales, tensor_scale, task.plan.layout.clone())
}

/// The Hessian factor that GPTQ computed last, with the Gram matrix that it is made of. Slices of a
/// weight may share a Gram matrix, and so may weights that are not a family because their blocks
/// run along other axes.
#[derive(Default)]
pub(crate) struct HessianFactorCache {
    last: Option<(Arc<Gram>, Arc<HessianFactor>)>,
}

impl HessianFactorCache {
    pub(super) fn of(
        &mut self,
        gram: &Arc<Gram>,
        options: &Gptq,
        block_size: usize,
        device: &Device,
    ) -> Result<Arc<HessianFactor>, OpsError> {
        let device = device.clone().inner();
        if let Some((known, factor)) = &self.last
            && Arc::ptr_eq(known, gram)
            && factor.options() == options
            && factor.block_size() == block_size
            && *factor.device() == device
        {
            return Ok(factor.clone());
        }
        // Freed before the next one is made: they may be large.
        self.last = None;
        let factor = Arc::new(HessianFactor::new(gram, options, block_size, &device)?);
        self.last = Some((gram.clone(), factor.clone()));
        Ok(factor)
    }
}
