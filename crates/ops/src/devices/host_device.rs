//! Devices in host memory: each says how to reach the memory of its tensors, and the host engine
//! does everything else.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, TensorData};
use burn_fp4_search::host::{DequantTarget, PackedView, View};
use burn_fp4_search::{Fp4Scheme, Hadamard, Importance};

use super::extension::Fp4Backend;
use super::host::{self, Values};
use crate::layout::Fp4Layout;
use crate::primitive::Fp4Primitive;
use crate::saturated::Saturated;

/// A device whose tensors are in host memory.
pub(crate) trait HostDevice: Backend {
    /// Calls `use_values` with the values in row-major order, and their shape.
    fn with_values<R>(
        tensor: FloatTensor<Self>,
        use_values: impl FnOnce(Values<'_>, &[usize]) -> R,
    ) -> R;

    /// Calls `use_values` with the values in contiguous memory, in any order, and how an axis lies
    /// in it.
    fn with_view<R>(
        tensor: FloatTensor<Self>,
        axis: usize,
        use_values: impl FnOnce(Values<'_>, View) -> R,
    ) -> R {
        Self::with_values(tensor, |values, shape| use_values(values, View::along(shape, axis)))
    }

    /// Calls `use_parts` with codes, block scales and the bits of the tensor scale.
    fn with_parts<R>(
        packed: Fp4Primitive<Self>,
        use_parts: impl FnOnce(&[u8], &[u8], &[i32]) -> R,
    ) -> R;

    /// The values of codes and scales in a dtype of the device.
    fn dense(packed: PackedView<'_>, layout: &Fp4Layout, dtype: FloatDType) -> TensorData;
}

fn with_packed<B: HostDevice, R>(
    packed: Fp4Primitive<B>,
    layout: &Fp4Layout,
    use_packed: impl FnOnce(PackedView<'_>) -> R,
) -> R {
    B::with_parts(packed, |codes, scales, tensor_scale| {
        host::with_packed(codes, scales, tensor_scale, layout, use_packed)
    })
}

/// Calls `use_values` with the values of an amax or an importance.
fn with_f32<B: HostDevice, R>(tensor: FloatTensor<B>, use_values: impl FnOnce(&[f32]) -> R) -> R {
    B::with_values(tensor, |values, _| match values {
        Values::F32(values) => use_values(values),
        Values::F16(_) | Values::Bf16(_) => unreachable!("made in f32"),
    })
}

fn quantize<B: HostDevice>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: &Fp4Scheme,
    importance: Importance<'_>,
) -> Fp4Primitive<B> {
    let device = values.device();
    let packed = B::with_view(values, axis, |values, view| {
        with_f32::<B, _>(amax, |amax| host::quantize(values, view, amax, scheme, importance))
    });
    Fp4Primitive::from_packed(packed, |data, _its_own_dtype| B::int_from_data(data, &device))
}

impl<B: HostDevice> Fp4Backend for B {
    fn fp4_amax(values: FloatTensor<Self>, axis: usize, by_row: bool) -> FloatTensor<Self> {
        let device = values.device();
        let amax = B::with_view(values, axis, |values, view| host::amax(values, view, by_row));
        B::float_from_data(amax, &device)
    }

    fn fp4_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        quantize::<B>(values, amax, axis, &scheme, Importance::Uniform)
    }

    fn fp4_quantize_by_importance(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        importance: FloatTensor<Self>,
        _the_host_finds_its_own_bounds: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        with_f32::<B, _>(importance, |importance| {
            host::with_importance(importance, &scheme, |importance| {
                quantize::<B>(values, amax, axis, &scheme, importance)
            })
        })
    }

    fn fp4_dequantize(
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let device = packed.codes.device();
        let dense = |packed: PackedView<'_>| B::dense(packed, &layout, dtype);
        B::float_from_data(with_packed::<B, _>(packed, &layout, dense), &device)
    }

    fn fp4_matmul(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let device = input.device();
        let output = B::with_values(input, |input, shape| {
            with_packed::<B, _>(weight, &layout, |weight| {
                host::matmul(input, shape[0], weight, &layout)
            })
        });
        B::float_from_data(output, &device)
    }

    fn fp4_fake_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
        target: DequantTarget,
        _for_gradients: Saturated,
    ) -> FloatTensor<Self> {
        let device = values.device();
        let output = B::with_values(values, |values, shape| {
            with_f32::<B, _>(amax, |amax| {
                host::fake_quantize(values, shape, axis, amax, &scheme, target)
            })
        });
        B::float_from_data(output, &device)
    }

    fn fp4_hadamard(
        values: FloatTensor<Self>,
        axis: usize,
        hadamard: Hadamard,
        inverse: bool,
    ) -> FloatTensor<Self> {
        let device = values.device();
        let output = B::with_values(values, |values, shape| {
            host::hadamard(values, shape, axis, hadamard, inverse)
        });
        B::float_from_data(output, &device)
    }

    fn fp4_squared_error(
        values: FloatTensor<Self>,
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let device = values.device();
        let sums = with_packed::<B, _>(packed, &layout, |packed| {
            B::with_values(values, |values, _| host::squared_error(values, packed, &layout))
        });
        B::float_from_data(sums, &device)
    }
}
