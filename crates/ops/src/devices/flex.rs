//! Burn's `flex` device: its memory, in place.

use burn::backend::Flex;
use burn::tensor::{DType, FloatDType, TensorData, bf16, f16};
use burn_flex::FlexTensor;
use burn_fp4_search::host::{HostElement, PackedView, View};
use bytemuck::Pod;

use super::host::{self, Values};
use super::host_device::HostDevice;
use super::reuse;
use crate::layout::Fp4Layout;
use crate::primitive::Fp4Primitive;

impl HostDevice for Flex {
    fn with_values<R>(tensor: FlexTensor, use_values: impl FnOnce(Values<'_>, &[usize]) -> R) -> R {
        let tensor = tensor.to_contiguous();
        use_values(values(&tensor), tensor.layout().shape())
    }

    /// A transposed matrix is used as it is; anything else that is strided is copied.
    fn with_view<R>(
        tensor: FlexTensor,
        axis: usize,
        use_values: impl FnOnce(Values<'_>, View) -> R,
    ) -> R {
        if tensor.is_contiguous() {
            return use_values(values(&tensor), View::along(tensor.layout().shape(), axis));
        }
        if tensor.layout().shape().num_dims() == 2 {
            let transposed = tensor.transpose(0, 1);
            if transposed.is_contiguous() {
                let view = View::along(transposed.layout().shape(), 1 - axis);
                return use_values(values(&transposed), view);
            }
        }
        Self::with_values(tensor, |values, shape| use_values(values, View::along(shape, axis)))
    }

    fn with_parts<R>(
        packed: Fp4Primitive<Self>,
        use_parts: impl FnOnce(&[u8], &[u8], &[i32]) -> R,
    ) -> R {
        let [codes, scales, tensor_scale] =
            [packed.codes, packed.scales, packed.tensor_scale].map(|part| part.to_contiguous());
        use_parts(
            codes.as_slice().expect("codes are u8"),
            scales.as_slice().expect("block scales are u8"),
            tensor_scale.as_slice().expect("the tensor scale is kept as i32"),
        )
    }

    /// In memory that an earlier one has left.
    fn dense(packed: PackedView<'_>, layout: &Fp4Layout, dtype: FloatDType) -> TensorData {
        fn written<T: HostElement + Pod>(
            packed: PackedView<'_>,
            layout: &Fp4Layout,
            dtype: FloatDType,
        ) -> TensorData {
            let values = reuse::filled(layout.view().len(), |values: &mut [T]| {
                host::dequantize(packed, layout, values);
            });
            TensorData::from_bytes(values, layout.shape.clone(), dtype.into())
        }
        match dtype {
            FloatDType::F16 => written::<f16>(packed, layout, dtype),
            FloatDType::BF16 => written::<bf16>(packed, layout, dtype),
            _ => written::<f32>(packed, layout, FloatDType::F32),
        }
    }
}

/// The values of a contiguous tensor.
fn values(tensor: &FlexTensor) -> Values<'_> {
    const CHECKED: &str = "made contiguous, of a dtype that callers check";
    match tensor.dtype() {
        DType::F16 => Values::F16(tensor.as_slice().expect(CHECKED)),
        DType::BF16 => Values::Bf16(tensor.as_slice().expect(CHECKED)),
        _ => Values::F32(tensor.as_slice().expect(CHECKED)),
    }
}
