//! Burn's `ndarray` device, which has f32 only.
//!
//! Burn 0.22 deprecates this device in favour of `flex`.

#![allow(deprecated)]

use burn::backend::NdArray;
use burn::tensor::{FloatDType, TensorData};
use burn_fp4_search::host::PackedView;
use burn_ndarray::NdArrayTensor;

use super::host::{self, Values};
use super::host_device::HostDevice;
use crate::layout::Fp4Layout;
use crate::primitive::Fp4Primitive;

/// Binds the elements of a storage in row-major order; its type is not public, its methods are.
macro_rules! with_slice {
    ($storage:expr, $slice:ident => $body:expr) => {{
        let view = $storage.view();
        let standard = view.as_standard_layout();
        let $slice = standard.as_slice().expect("the standard layout is a slice");
        $body
    }};
}

impl HostDevice for NdArray {
    fn with_values<R>(
        tensor: NdArrayTensor,
        use_values: impl FnOnce(Values<'_>, &[usize]) -> R,
    ) -> R {
        match &tensor {
            NdArrayTensor::F32(storage) => with_slice!(storage, values => {
                use_values(Values::F32(values), storage.shape())
            }),
            other => unreachable!("callers check the dtype, here f32: {other:?}"),
        }
    }

    fn with_parts<R>(
        packed: Fp4Primitive<Self>,
        use_parts: impl FnOnce(&[u8], &[u8], &[i32]) -> R,
    ) -> R {
        match (&packed.codes, &packed.scales, &packed.tensor_scale) {
            (NdArrayTensor::U8(codes), NdArrayTensor::U8(scales), NdArrayTensor::I32(scale)) => {
                with_slice!(codes, codes => with_slice!(scales, scales => {
                    with_slice!(scale, scale => use_parts(codes, scales, scale))
                }))
            }
            other => unreachable!("codes and scales are u8, the tensor scale i32: {other:?}"),
        }
    }

    fn dense(
        packed: PackedView<'_>,
        layout: &Fp4Layout,
        _f32_is_its_only_dtype: FloatDType,
    ) -> TensorData {
        let mut values = vec![0.0f32; layout.view().len()];
        host::dequantize(packed, layout, &mut values);
        TensorData::new(values, layout.shape.clone())
    }
}
