//! What tensor operations cannot do: values are read back, and the host engine quantizes them.

use std::sync::Arc;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, read_sync};
use burn_fp4_search::formats::Packed;
use burn_fp4_search::host::View;
use burn_fp4_search::{Fp4Scheme, Importance, Rounding, ScaleSearch};

use super::floats::{Floats, rows};
use crate::devices::host;
use crate::hessian_factor::HessianFactor;
use crate::primitive::Fp4Primitive;

/// Whether a scheme needs what tensor operations lack: a fused multiply-add, or random numbers from
/// a counter.
pub(super) fn needs_host(scheme: &Fp4Scheme) -> bool {
    !matches!(scheme.search, ScaleSearch::Amax | ScaleSearch::FourOverSix { .. })
        || scheme.rounding != Rounding::Nearest
}

/// Reads the values back and leaves the search to the host engine.
pub(super) fn quantize_on_host<B: Backend>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
) -> Fp4Primitive<B> {
    let device = values.device();
    let view = View::along(&values.shape(), axis);
    let (values, amax) = (read::<B>(values), read::<B>(amax));
    let packed = host::quantize_slice(&values, view, &amax, &scheme, Importance::Uniform);
    upload::<B>(packed, &device)
}

/// See [`fp4_quantize_by_importance`](crate::Fp4Backend::fp4_quantize_by_importance): on the host.
pub fn quantize_by_importance<B: Backend>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    importance: FloatTensor<B>,
    _the_host_finds_its_own_bounds: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
) -> Fp4Primitive<B> {
    let device = values.device();
    let view = View::along(&values.shape(), axis);
    let [values, amax, importance] = [values, amax, importance].map(read::<B>);
    let packed = host::with_importance(&importance, &scheme, |importance| {
        host::quantize_slice(&values, view, &amax, &scheme, importance)
    });
    upload::<B>(packed, &device)
}

/// See [`fp4_quantize_gptq`](crate::Fp4Backend::fp4_quantize_gptq): on the host.
pub fn quantize_gptq<B: Backend>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
    hessian_factor: Arc<HessianFactor>,
) -> Fp4Primitive<B> {
    let device = values.device();
    let Floats(matrix) = rows::<B>(values, axis);
    let count = matrix.shape()[0];
    let [matrix, amax] = [matrix, amax].map(read::<B>);
    let hessian_factor = hessian_factor.on_host().expect("callers look where it was made");
    upload::<B>(host::quantize_gptq(&matrix, count, &amax, &scheme, hessian_factor), &device)
}

fn read<B: Backend>(tensor: FloatTensor<B>) -> Vec<f32> {
    let data = read_sync(B::float_into_data(B::float_cast(tensor, FloatDType::F32)));
    let data = data.expect("the device hands back its data");
    data.try_into_vec::<f32>().expect("just cast to f32")
}

fn upload<B: Backend>(packed: Packed, device: &B::Device) -> Fp4Primitive<B> {
    Fp4Primitive::from_packed(packed, |data, dtype| {
        B::int_cast(B::int_from_data(data, device), dtype)
    })
}
