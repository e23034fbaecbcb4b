//! One weight: by what it is quantized.

use std::borrow::Cow;
use std::ptr;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use burn_fp4_ops::search::SearchError;
use burn_fp4_ops::{
    Curvature, Fp4Layout, Fp4Scheme, Fp4Tensor, Gptq, Gram, Importance, NonFinite, OpsError,
    Replay, ScaleSearch, TensorScaling, quantize, quantize_by_curvature, quantize_by_importance,
};
use burn_ir::TensorId;

use crate::PackedWeight;
use crate::report::{ChosenBy, Fallback};
use crate::select::Plan;

/// A dense weight of any rank.
pub(crate) trait AnyWeight: Send {
    fn device(&self) -> Device;

    fn to_device(&self, device: &Device) -> Box<dyn AnyWeight>;

    fn clone_box(&self) -> Box<dyn AnyWeight>;

    fn elements(&self) -> usize;

    /// Gives recorded operations this value of a tensor.
    fn insert(&self, replay: &mut Replay, id: TensorId) -> Result<(), OpsError>;

    fn pack<'a>(
        &self,
        task: &Task<'a>,
        curvatures: &mut Curvatures<'a>,
    ) -> Result<(PackedWeight, Method), OpsError>;

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

    fn clone_box(&self) -> Box<dyn AnyWeight> {
        Box::new(self.clone())
    }

    fn elements(&self) -> usize {
        self.shape().num_elements()
    }

    fn insert(&self, replay: &mut Replay, id: TensorId) -> Result<(), OpsError> {
        replay.insert(id, self.clone())
    }

    fn pack<'a>(
        &self,
        task: &Task<'a>,
        curvatures: &mut Curvatures<'a>,
    ) -> Result<(PackedWeight, Method), OpsError> {
        let method = task.method();
        let packed = quantize_weight(self, task, &method, curvatures)?;
        Ok((PackedWeight::from(packed), method))
    }

    fn rounded(&self, packed: &PackedWeight) -> Box<dyn AnyWeight> {
        Box::new(packed.tensor::<D>().dequantize_to(self.dtype().into()))
    }
}

/// Statistics of the inputs of a weight: one Gram matrix for each slice over its leading axes, such
/// as the experts of `[experts, in, out]`; a matrix is one slice.
#[derive(Default, Clone)]
pub(crate) struct Inputs<'a> {
    slices: Vec<Option<Cow<'a, Gram>>>,
}

impl<'a> Inputs<'a> {
    /// Of nothing yet.
    pub(crate) fn new(slices: usize) -> Self {
        Self { slices: vec![None; slices] }
    }

    /// Adds statistics of a slice to those there are.
    pub(crate) fn add(&mut self, slice: usize, gram: Cow<'a, Gram>) -> Result<(), SearchError> {
        match &mut self.slices[slice] {
            Some(sum) => sum.to_mut().merge(&gram)?,
            none => *none = Some(gram),
        }
        Ok(())
    }

    pub(crate) fn into_owned(self) -> Inputs<'static> {
        let owned = |gram: Option<Cow<'a, Gram>>| gram.map(|gram| Cow::Owned(gram.into_owned()));
        Inputs { slices: self.slices.into_iter().map(owned).collect() }
    }

    /// The Gram matrix of a slice, if inputs other than zeros were seen.
    pub(crate) fn of(&self, slice: usize) -> Option<&Gram> {
        let gram = self.slices.get(slice)?.as_deref()?;
        (gram.tokens() > 0).then_some(gram)
    }

    /// Those there are.
    pub(crate) fn grams(&self) -> impl Iterator<Item = &Gram> {
        self.slices.iter().flatten().map(|gram| &**gram)
    }
}

/// Matrices that a weight is made of along its leading axes, if blocks run along one of the last
/// two.
pub(crate) fn slices_of(layout: &Fp4Layout) -> usize {
    let leading = layout.shape.len().saturating_sub(2);
    if layout.axis < leading { 1 } else { layout.shape[..leading].iter().product() }
}

/// A weight to be quantized.
#[derive(Clone, Copy)]
pub(crate) struct Task<'a> {
    pub(crate) plan: &'a Plan,
    /// That its tensor scale is made from, if it was measured.
    pub(crate) amax: Option<f32>,
    pub(crate) inputs: Option<&'a Inputs<'a>>,
}

/// How a weight is quantized, and why not as asked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Method {
    pub(crate) chosen_by: ChosenBy,
    pub(crate) fallback: Option<Fallback>,
}

impl Task<'_> {
    /// The scheme, with the amax that is known already.
    pub(crate) fn scheme(&self) -> Fp4Scheme {
        // The weight was found finite, or was not to be looked at.
        let scheme = self.plan.scheme.with_non_finite(NonFinite::FollowReference);
        match self.amax {
            Some(amax) if amax.is_finite() => scheme.with_tensor_scale(TensorScaling::Amax(amax)),
            _ => scheme,
        }
    }

    /// As asked, where there are the statistics that it takes.
    pub(crate) fn method(&self) -> Method {
        let asked = self.plan.asked;
        let all = |fallback| Method {
            chosen_by: ChosenBy::Search(ScaleSearch::Sse),
            fallback: Some(fallback),
        };
        if !asked.needs_inputs() {
            return Method { chosen_by: asked, fallback: None };
        }
        let Some(inputs) = self.inputs else { return all(Fallback::NoInputs) };
        let block_size = self.plan.scheme.block_size;
        let fits = |gram: &Gram| match asked {
            ChosenBy::Gptq(_) => gram.is_whole(),
            ChosenBy::Search(_) => gram.has_blocks(block_size),
        };
        let slices = slices_of(&self.plan.layout);
        let without: Vec<_> = (0..slices).filter(|&slice| inputs.of(slice).is_none()).collect();
        if without.len() == slices {
            return all(Fallback::NoInputs);
        }
        if !(0..slices).filter_map(|slice| inputs.of(slice)).all(fits) {
            return all(Fallback::OtherBlocks);
        }
        let fallback =
            (!without.is_empty()).then_some(Fallback::Slices { without_inputs: without });
        Method { chosen_by: asked, fallback }
    }
}

fn quantize_weight<'a, const D: usize>(
    dense: &Tensor<D>,
    task: &Task<'a>,
    method: &Method,
    curvatures: &mut Curvatures<'a>,
) -> Result<Fp4Tensor<D>, OpsError> {
    let (scheme, layout) = (task.scheme(), &task.plan.layout);
    let slices = slices_of(layout);
    let inputs = task.inputs.filter(|_| method.chosen_by.needs_inputs());
    let Some(inputs) = inputs.filter(|_| slices > 1) else {
        let gram = inputs.and_then(|inputs| inputs.of(0));
        return by_method(dense.clone(), layout.axis, &scheme, method, gram, curvatures);
    };
    // Slices share the tensor scale of the whole, which has none to be shared of a value like this.
    if let Some(found) = task.amax.filter(|amax| !amax.is_finite()) {
        return Err(OpsError::NonFinite { found });
    }
    let dims: [usize; D] = dense.dims();
    let [rows, cols] = [dims[D - 2], dims[D - 1]];
    let axis = layout.axis - (D - 2);
    let matrices = dense.clone().reshape([slices, rows, cols]);
    let of_slice = |slice: usize| {
        let matrix = matrices.clone().slice([slice..slice + 1, 0..rows, 0..cols]);
        let matrix: Tensor<2> = matrix.reshape([rows, cols]);
        by_method(matrix, axis, &scheme, method, inputs.of(slice), curvatures)
    };
    let packed = (0..slices).map(of_slice).collect::<Result<Vec<_>, _>>()?;
    stacked(&packed, layout, scheme.tensor_scale == TensorScaling::Row)
}

/// Quantizes a weight as a whole; without statistics of its inputs, where these decide, by squared
/// error.
fn by_method<'a, const D: usize>(
    dense: Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    method: &Method,
    gram: Option<&'a Gram>,
    curvatures: &mut Curvatures<'a>,
) -> Result<Fp4Tensor<D>, OpsError> {
    match (method.chosen_by, gram) {
        (ChosenBy::Gptq(options), Some(gram)) => {
            let device = dense.device();
            let curvature = curvatures.of(gram, &options, scheme.block_size, &device)?;
            quantize_by_curvature(dense, axis, scheme, &curvature)
        }
        (ChosenBy::Search(search), Some(gram)) if search.needs_hessians() => {
            let hessians = gram.blocks(scheme.block_size)?;
            let scheme = scheme.with_search(search);
            quantize_by_importance(dense, axis, &scheme, Importance::Blocks(&hessians))
        }
        (ChosenBy::Search(search), _) if !search.needs_hessians() => {
            quantize(dense, axis, &scheme.with_search(search))
        }
        _ => quantize(dense, axis, &scheme.with_search(ScaleSearch::Sse)),
    }
}

/// Puts the slices of a weight together, with one tensor scale for all of them or one per row.
fn stacked<const D: usize>(
    slices: &[Fp4Tensor<2>],
    layout: &Fp4Layout,
    by_row: bool,
) -> Result<Fp4Tensor<D>, OpsError> {
    let codes = slices.iter().map(Fp4Tensor::codes).collect();
    let scales = slices.iter().map(Fp4Tensor::scales).collect();
    let tensor_scales: Vec<_> = slices.iter().map(Fp4Tensor::tensor_scale_bits).collect();
    let tensor_scale = match by_row {
        true => Tensor::cat(tensor_scales, 0),
        false => tensor_scales[0].clone(),
    };
    let (codes, scales) = (Tensor::cat(codes, 0), Tensor::cat(scales, 0));
    Fp4Tensor::from_parts_unread(codes, scales, tensor_scale, layout.clone())
}

/// What GPTQ makes of the Gram matrix that it was asked for last: weights that are multiplied by
/// the same activations follow each other.
#[derive(Default)]
pub(crate) struct Curvatures<'a> {
    last: Option<(&'a Gram, Arc<Curvature>)>,
}

impl<'a> Curvatures<'a> {
    fn of(
        &mut self,
        gram: &'a Gram,
        options: &Gptq,
        block_size: usize,
        device: &Device,
    ) -> Result<Arc<Curvature>, OpsError> {
        let device = device.clone().inner();
        if let Some((known, curvature)) = &self.last
            && ptr::eq(*known, gram)
            && curvature.options() == options
            && curvature.block_size() == block_size
            && *curvature.device() == device
        {
            return Ok(curvature.clone());
        }
        // Its memory first: it may be large.
        self.last = None;
        let curvature = Arc::new(Curvature::new(gram, options, block_size, &device)?);
        self.last = Some((gram, curvature.clone()));
        Ok(curvature)
    }
}
