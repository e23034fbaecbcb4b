//! The host engine on Burn's `ndarray` device, which knows f32 only.
//!
//! Burn 0.22 deprecates this device in favour of `flex`.

#![allow(deprecated)]

use burn::backend::NdArray;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{FloatDType, TensorData};
use burn_fp4_search::host::{PackedView, Restore, View};
use burn_fp4_search::{Fp4Scheme, Hadamard, Importance};
use burn_ndarray::NdArrayTensor;

use crate::{Fp4Backend, Fp4Layout, Fp4Primitive, Saturated, host};

/// Binds the elements of a storage in row-major order; its type is not public, its methods are.
macro_rules! with_slice {
    ($storage:expr, $slice:ident => $body:expr) => {{
        let view = $storage.view();
        let standard = view.as_standard_layout();
        let $slice = standard.as_slice().expect("the standard layout is a slice");
        $body
    }};
}

fn with_values<R>(tensor: &NdArrayTensor, use_slice: impl FnOnce(&[f32], &[usize]) -> R) -> R {
    match tensor {
        NdArrayTensor::F32(storage) => {
            with_slice!(storage, values => use_slice(values, storage.shape()))
        }
        other => unreachable!("callers check the dtype, and this device has no half: {other:?}"),
    }
}

fn with_packed<R>(
    packed: &Fp4Primitive<NdArray>,
    layout: &Fp4Layout,
    use_packed: impl FnOnce(PackedView<'_>) -> R,
) -> R {
    match (&packed.codes, &packed.scales, &packed.tensor_scale) {
        (NdArrayTensor::U8(codes), NdArrayTensor::U8(scales), NdArrayTensor::I32(tensor_scale)) => {
            with_slice!(codes, codes => with_slice!(scales, scales => {
                with_slice!(tensor_scale, tensor_scale => {
                    host::with_packed(codes, scales, tensor_scale, layout, use_packed)
                })
            }))
        }
        other => unreachable!("codes and scales are u8, the tensor scale i32: {other:?}"),
    }
}

fn quantize(
    values: &NdArrayTensor,
    amax: &NdArrayTensor,
    axis: usize,
    scheme: &Fp4Scheme,
    importance: Importance<'_>,
) -> Fp4Primitive<NdArray> {
    let packed = with_values(values, |values, shape| {
        with_values(amax, |amax, _| {
            host::quantize(values, View::along(shape, axis), amax, scheme, importance)
        })
    });
    Fp4Primitive {
        codes: NdArrayTensor::from_data(packed.codes),
        scales: NdArrayTensor::from_data(packed.scales),
        tensor_scale: NdArrayTensor::from_data(packed.tensor_scale),
    }
}

impl Fp4Backend for NdArray {
    fn fp4_amax(values: FloatTensor<Self>, axis: usize, by_row: bool) -> FloatTensor<Self> {
        let amax = with_values(&values, |values, shape| {
            host::amax(values, View::along(shape, axis), by_row)
        });
        NdArrayTensor::from_data(host::vector(amax))
    }

    fn fp4_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        quantize(&values, &amax, axis, &scheme, Importance::Uniform)
    }

    fn fp4_quantize_by_importance(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        costs: FloatTensor<Self>,
        _the_host_finds_its_own_bounds: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        with_values(&costs, |costs, _| {
            host::with_importance(costs, &scheme, |importance| {
                quantize(&values, &amax, axis, &scheme, importance)
            })
        })
    }

    fn fp4_dequantize(
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
        _f32_is_its_only_dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let mut values = vec![0.0f32; layout.view().len()];
        with_packed(&packed, &layout, |packed| host::dequantize(packed, &layout, &mut values));
        NdArrayTensor::from_data(TensorData::new(values, layout.shape))
    }

    fn fp4_matmul(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let output = with_values(&input, |input, shape| {
            let shape = [shape[0], layout.shape[1]];
            let mut output = vec![0.0f32; shape[0] * shape[1]];
            with_packed(&weight, &layout, |weight| {
                host::matmul(input, weight, &layout, &mut output);
            });
            TensorData::new(output, shape)
        });
        NdArrayTensor::from_data(output)
    }

    fn fp4_fake_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
        restore: Restore,
        _for_gradients: Saturated,
    ) -> FloatTensor<Self> {
        let output = with_values(&values, |values, shape| {
            let mut output = vec![0.0f32; values.len()];
            with_values(&amax, |amax, _| {
                let view = View::along(shape, axis);
                host::fake_quantize(values, view, amax, &scheme, restore, &mut output);
            });
            TensorData::new(output, shape)
        });
        NdArrayTensor::from_data(output)
    }

    fn fp4_hadamard(
        values: FloatTensor<Self>,
        axis: usize,
        hadamard: Hadamard,
        inverse: bool,
    ) -> FloatTensor<Self> {
        let output = with_values(&values, |values, shape| {
            let mut output = vec![0.0f32; values.len()];
            host::hadamard(values, View::along(shape, axis), hadamard, inverse, &mut output);
            TensorData::new(output, shape)
        });
        NdArrayTensor::from_data(output)
    }

    fn fp4_squared_error(
        values: FloatTensor<Self>,
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let sums = with_packed(&packed, &layout, |packed| {
            with_values(&values, |values, _| host::squared_error(values, packed, &layout))
        });
        NdArrayTensor::from_data(sums)
    }
}
