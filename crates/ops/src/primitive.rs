//! [`Fp4Primitive`]: codes, block scales and tensor scale as tensors of a backend.

// With fusion, `ExtensionType` generates types without `Debug`.
#![cfg_attr(feature = "cube", allow(missing_debug_implementations))]

#[cfg(feature = "cube")]
use std::sync::Arc;

#[cfg(feature = "cube")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, ExtensionType};
#[cfg(feature = "cube")]
use burn::tensor::DType;
use burn::tensor::{IntDType, TensorData};
#[cfg(feature = "cube")]
use burn_fp4_search::Fp4Scheme;
use burn_fp4_search::formats::Packed;

#[cfg(feature = "cube")]
use crate::hessian_factor::HessianFactor;
#[cfg(feature = "cube")]
use crate::layout::Fp4Layout;

/// A quantized tensor as tensors of a backend.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub struct Fp4Primitive<B: Backend> {
    /// u8, `[rows, axis / 2]`.
    pub codes: IntTensor<B>,
    /// u8, `[rows, axis / block_size]`.
    pub scales: IntTensor<B>,
    /// The bits of the f32 tensor scale in i32, `[1]` or `[rows]`. As integers they are safe from
    /// code that casts or trains the floats of a module.
    pub tensor_scale: IntTensor<B>,
}

impl<B: Backend> Fp4Primitive<B> {
    /// Uploads a matrix in host memory. `upload` gets the data of a tensor, and its dtype.
    pub(crate) fn from_packed(
        packed: Packed,
        upload: impl Fn(TensorData, IntDType) -> IntTensor<B>,
    ) -> Self {
        let (rows, blocks) = (packed.rows, packed.blocks());
        let tensor_scale = packed.tensor_scale.as_slice();
        let bits: Vec<_> = tensor_scale.iter().map(|scale| scale.to_bits() as i32).collect();
        let count = bits.len();
        Self {
            codes: upload(TensorData::new(packed.codes, [rows, packed.cols / 2]), IntDType::U8),
            scales: upload(TensorData::new(packed.scales, [rows, blocks]), IntDType::U8),
            tensor_scale: upload(TensorData::new(bits, [count]), IntDType::I32),
        }
    }
}

/// Returns shapes and dtypes of a quantized tensor before it is computed.
#[cfg(feature = "cube")]
pub(crate) fn packed_metadata(
    values: &TensorSpec,
    amax: &TensorSpec,
    axis: &usize,
    scheme: &Fp4Scheme,
) -> Fp4PrimitiveMetadata {
    let layout = Fp4Layout::new(&values.shape, *axis, scheme).expect("callers check the scheme");
    Fp4PrimitiveMetadata {
        codes: TensorSpec::new(layout.codes_shape().into(), DType::U8),
        scales: TensorSpec::new(layout.scales_shape().into(), DType::U8),
        tensor_scale: TensorSpec::new(amax.shape.clone(), DType::I32),
    }
}

/// [`packed_metadata`] for
/// [`fp4_quantize_by_importance`](crate::Fp4Backend::fp4_quantize_by_importance).
#[cfg(feature = "cube")]
pub(crate) fn packed_by_importance_metadata(
    values: &TensorSpec,
    amax: &TensorSpec,
    _costs: &TensorSpec,
    _bounds: &TensorSpec,
    axis: &usize,
    scheme: &Fp4Scheme,
) -> Fp4PrimitiveMetadata {
    packed_metadata(values, amax, axis, scheme)
}

/// [`packed_metadata`] for [`fp4_quantize_gptq`](crate::Fp4Backend::fp4_quantize_gptq).
#[cfg(feature = "cube")]
pub(crate) fn packed_by_gptq_metadata(
    values: &TensorSpec,
    amax: &TensorSpec,
    axis: &usize,
    scheme: &Fp4Scheme,
    _hessian_factor: &Arc<HessianFactor>,
) -> Fp4PrimitiveMetadata {
    packed_metadata(values, amax, axis, scheme)
}
