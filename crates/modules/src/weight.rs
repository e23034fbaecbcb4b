//! One weight: by what it is quantized.

use std::ptr;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};
use burn_fp4_ops::{
    Curvature, Fp4Scheme, Fp4Tensor, Gptq, Gram, Importance, NonFinite, OpsError, ScaleSearch,
    TensorScaling, quantize, quantize_by_curvature, quantize_by_importance,
};

use crate::report::ChosenBy;
use crate::select::Plan;

/// The scheme of a weight whose amax may be known.
pub(crate) fn scheme_of(plan: &Plan, amax: Option<&f32>) -> Fp4Scheme {
    // The weight was found finite, or was not to be looked at.
    let scheme = plan.scheme.with_non_finite(NonFinite::FollowReference);
    match amax {
        Some(&amax) if amax.is_finite() => scheme.with_tensor_scale(TensorScaling::Amax(amax)),
        _ => scheme,
    }
}

/// How a weight is quantized: as asked, if what that takes is known of its inputs.
pub(crate) fn chosen_by(gptq: Option<Gptq>, scheme: &Fp4Scheme, inputs: Option<&Gram>) -> ChosenBy {
    let search = scheme.search;
    match gptq {
        Some(options) if inputs.is_some_and(Gram::is_whole) => ChosenBy::Gptq(options),
        None if !search.needs_hessians() => ChosenBy::Search(search),
        None if inputs.is_some_and(|gram| gram.has_blocks(scheme.block_size)) => {
            ChosenBy::Search(search)
        }
        _ => ChosenBy::Search(ScaleSearch::Sse),
    }
}

pub(crate) fn quantize_weight<'a, const D: usize>(
    dense: &Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    chosen_by: ChosenBy,
    inputs: Option<&'a Gram>,
    curvatures: &mut Curvatures<'a>,
) -> Result<Fp4Tensor<D>, OpsError> {
    let dense = dense.clone();
    match (chosen_by, inputs) {
        (ChosenBy::Gptq(options), Some(gram)) => {
            let curvature = curvatures.of(gram, &options, scheme.block_size, &dense.device())?;
            quantize_by_curvature(dense, axis, scheme, &curvature)
        }
        (ChosenBy::Search(search), Some(gram)) if search.needs_hessians() => {
            let hessians = gram.blocks(scheme.block_size)?;
            let scheme = scheme.with_search(search);
            quantize_by_importance(dense, axis, &scheme, Importance::Blocks(&hessians))
        }
        (ChosenBy::Search(search), _) => quantize(dense, axis, &scheme.with_search(search)),
        (ChosenBy::Gptq(_), None) => unreachable!("`chosen_by` asks for activations"),
    }
}

/// What GPTQ makes of the Gram matrix that it was asked for last: weights that meet the same activations follow each
/// other.
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
