//! Burn's `flex` device.

use burn::backend::Flex;
use burn::tensor::{DType, FloatDType, TensorData, bf16, f16};
use burn_flex::FlexTensor;
use burn_fp4_search::host::{HostElement, PackedView, View};
use bytemuck::Pod;

use super::host::{HostDevice, Values, dequantize};
use super::scratch;
use crate::layout::Fp4Layout;

const CHECKED: &str = "contiguous, with the dtype that callers check";

impl HostDevice for Flex {
    fn contiguous(values: FlexTensor) -> FlexTensor {
        values.to_contiguous()
    }

    fn contiguous_ints(ints: FlexTensor) -> FlexTensor {
        ints.to_contiguous()
    }

    /// Does not copy a transposed matrix, unlike any other strided tensor.
    fn contiguous_along(values: FlexTensor, axis: usize) -> (FlexTensor, View) {
        let view = View::along(values.layout().shape(), axis);
        if values.is_contiguous() {
            return (values, view);
        }
        if values.layout().shape().num_dims() == 2 {
            let transposed = values.transpose(0, 1);
            if transposed.is_contiguous() {
                let view = View::along(transposed.layout().shape(), 1 - axis);
                return (transposed, view);
            }
        }
        (values.to_contiguous(), view)
    }

    fn values(contiguous: &FlexTensor) -> Values<'_> {
        match contiguous.dtype() {
            DType::F16 => Values::F16(contiguous.as_slice().expect(CHECKED)),
            DType::BF16 => Values::Bf16(contiguous.as_slice().expect(CHECKED)),
            _ => Values::F32(contiguous.as_slice().expect(CHECKED)),
        }
    }

    fn bytes(contiguous: &FlexTensor) -> &[u8] {
        contiguous.as_slice().expect(CHECKED)
    }

    fn ints(contiguous: &FlexTensor) -> &[i32] {
        contiguous.as_slice().expect(CHECKED)
    }

    /// Writes to the memory of an earlier dense weight.
    fn dense_data(packed: PackedView<'_>, layout: &Fp4Layout, dtype: FloatDType) -> TensorData {
        fn to<T: HostElement + Pod>(
            packed: PackedView<'_>,
            layout: &Fp4Layout,
            dtype: FloatDType,
        ) -> TensorData {
            let values = scratch::filled(layout.view().len(), |values: &mut [T]| {
                dequantize(packed, layout, values);
            });
            TensorData::from_bytes(values, layout.shape.clone(), dtype.into())
        }
        match dtype {
            FloatDType::F16 => to::<f16>(packed, layout, dtype),
            FloatDType::BF16 => to::<bf16>(packed, layout, dtype),
            _ => to::<f32>(packed, layout, FloatDType::F32),
        }
    }
}
