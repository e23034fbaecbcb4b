//! Quantization that tensor operations cannot do: reads values back for the host engine.

use std::sync::Arc;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, TensorData, read_sync};
use burn_fp4_search::formats::{Packed, TensorScale};
use burn_fp4_search::host::{View, quantize_packed};
use burn_fp4_search::{BlockHessians, Fp4Scheme, Importance, Method, Rounding};

use super::floats::{Floats, rows};
use crate::factorization::Factorization;
use crate::layout::{Fp4Layout, Fp4Primitive, from_bits};

const CHECKED: &str = "callers check scheme, shape and importance";

/// Returns true if a scheme needs a fused multiply-add or random numbers from a counter, which
/// tensor operations lack.
pub(super) fn needs_host(scheme: &Fp4Scheme) -> bool {
    !matches!(scheme.method, Method::Amax | Method::FourOverSix { .. })
        || scheme.rounding != Rounding::Nearest
}

/// Quantizes with the host engine.
pub fn quantize_on_host<B: Backend>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
) -> Fp4Primitive<B> {
    let device = values.device();
    let view = View::along(&values.shape(), axis);
    let (values, amax) = (read::<B>(values), read::<B>(amax));
    let packed = quantize_packed(&values, view, &scheme, &amax, Importance::Uniform);
    upload::<B>(packed.expect(CHECKED), &device)
}

/// [`fp4_quantize_by_importance`](crate::Fp4Backend::fp4_quantize_by_importance), on the host.
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
    let importance = OwnedImportance::new(importance, &scheme);
    let packed = quantize_packed(&values, view, &scheme, &amax, importance.borrow());
    upload::<B>(packed.expect(CHECKED), &device)
}

/// [`fp4_dequantize`](crate::Fp4Backend::fp4_dequantize), on the host.
#[cfg(feature = "cube")]
pub(crate) fn dequantize<B: Backend>(
    packed: Fp4Primitive<B>,
    layout: Fp4Layout,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let device = packed.codes.device();
    let packed = packed_on_host::<B>(packed, &layout);
    let mut values = vec![0.0; layout.shape.iter().product()];
    burn_fp4_search::host::dequantize((&packed).into(), layout.view(), &mut values).expect(CHECKED);
    let values = TensorData::new(values, layout.shape.clone());
    B::float_cast(B::float_from_data(values, &device), dtype)
}

/// [`fp4_quantize_gptq`](crate::Fp4Backend::fp4_quantize_gptq), on the host.
pub fn quantize_gptq<B: Backend>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
    factorization: Arc<Factorization>,
) -> Fp4Primitive<B> {
    let device = values.device();
    let Floats(matrix) = rows::<B>(values, axis);
    let count = matrix.shape()[0];
    let [matrix, amax] = [matrix, amax].map(read::<B>);
    let hessian_factor = factorization.on_host().expect("callers look where it was made");
    let packed = hessian_factor.quantize(&matrix, count, &scheme, &amax);
    upload::<B>(packed.expect(CHECKED), &device)
}

/// Returns U of a Hessian factor that the host made, for
/// [`fp4_solve`](crate::Fp4Backend::fp4_solve).
pub(crate) fn factor<B: Backend>(
    factorization: &Factorization,
    device: &B::Device,
) -> FloatTensor<B> {
    let host = factorization.on_host().expect("callers look where it was made");
    let factor = TensorData::new(host.factor().to_vec(), [factorization.channels(); 2]);
    B::float_from_data(factor, device)
}

/// [`fp4_fp8_rows`](crate::Fp4Backend::fp4_fp8_rows), on the host.
pub(crate) fn fp8_rows<B: Backend>(weight: Fp4Primitive<B>, layout: &Fp4Layout) -> FloatTensor<B> {
    let device = weight.codes.device();
    let packed = packed_on_host::<B>(weight, layout);
    let rows = burn_fp4_search::fp8_rows(&packed);
    B::float_from_data(TensorData::new(rows, [2, packed.rows]), &device)
}

/// Reads a packed tensor back.
pub(crate) fn packed_on_host<B: Backend>(weight: Fp4Primitive<B>, layout: &Fp4Layout) -> Packed {
    let data =
        |tensor| read_sync(B::int_into_data(tensor)).expect("the device hands back its data");
    let bytes = |tensor| data(tensor).try_into_vec::<u8>().expect("codes and scales are bytes");
    let [rows, blocks] = layout.scales_shape();
    Packed {
        format: layout.format,
        block_size: layout.block_size,
        rows,
        cols: blocks * layout.block_size,
        codes: bytes(weight.codes),
        scales: bytes(weight.scales),
        tensor_scale: match from_bits(&data(weight.tensor_scale))[..] {
            [scale] => TensorScale::One(scale),
            ref scales => TensorScale::PerRow(scales.to_vec()),
        },
    }
}

/// The importance that an operation was given as a tensor.
pub(crate) enum OwnedImportance {
    Channels(Vec<f32>),
    Blocks(BlockHessians),
}

impl OwnedImportance {
    pub(crate) fn new(values: Vec<f32>, scheme: &Fp4Scheme) -> Self {
        if scheme.method.needs_hessians() {
            Self::Blocks(BlockHessians::new(values, scheme.block_size).expect(CHECKED))
        } else {
            Self::Channels(values)
        }
    }

    pub(crate) fn borrow(&self) -> Importance<'_> {
        match self {
            Self::Channels(weights) => Importance::Channels(weights),
            Self::Blocks(hessians) => Importance::Blocks(hessians),
        }
    }
}

/// Reads values back, in f32.
pub(crate) fn read<B: Backend>(tensor: FloatTensor<B>) -> Vec<f32> {
    let data = read_sync(B::float_into_data(B::float_cast(tensor, FloatDType::F32)));
    let data = data.expect("the device hands back its data");
    data.try_into_vec::<f32>().expect("just cast to f32")
}

fn upload<B: Backend>(packed: Packed, device: &B::Device) -> Fp4Primitive<B> {
    Fp4Primitive::from_packed(packed, |data, dtype| {
        B::int_cast(B::int_from_data(data, device), dtype)
    })
}
