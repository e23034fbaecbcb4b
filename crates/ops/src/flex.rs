//! The host engine on Burn's `flex` device, in place on its memory.

use burn::backend::Flex;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{Bytes, DType, FloatDType, Shape, bf16, f16};
use burn_flex::{FlexTensor, Layout};
use burn_fp4_search::host::{HostElement, PackedView, Restore, View};
use burn_fp4_search::{Fp4Scheme, Hadamard, Importance};

use crate::{Fp4Backend, Fp4Layout, Fp4Primitive, Saturated, host, reuse};

/// Binds `$T` to the element type of a dtype that callers have checked.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F16 => {
                type $T = f16;
                $body
            }
            DType::BF16 => {
                type $T = bf16;
                $body
            }
            _ => {
                type $T = f32;
                $body
            }
        }
    };
}

/// The values in contiguous memory, and how the axis lies in them.
///
/// A transposed matrix is used as it is; anything else that is strided is copied.
fn contiguous(values: FlexTensor, axis: usize) -> (FlexTensor, View) {
    let shape = values.layout().shape().clone();
    if values.is_contiguous() {
        return (values, View::along(&shape, axis));
    }
    let transposed = values.transpose(0, shape.num_dims() - 1);
    if shape.num_dims() == 2 && transposed.is_contiguous() {
        let view = View::along(transposed.layout().shape(), 1 - axis);
        return (transposed, view);
    }
    (values.to_contiguous(), View::along(&shape, axis))
}

fn slice<T: HostElement + burn::tensor::Element + bytemuck::Pod>(tensor: &FlexTensor) -> &[T] {
    tensor.as_slice().expect("made contiguous, of this dtype")
}

fn tensor<T: HostElement + burn::tensor::Element + bytemuck::Pod>(
    values: Vec<T>,
    shape: Shape,
) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(shape), T::dtype())
}

fn with_packed<R>(
    packed: Fp4Primitive<Flex>,
    layout: &Fp4Layout,
    use_packed: impl FnOnce(PackedView<'_>) -> R,
) -> R {
    let [codes, scales, tensor_scale] =
        [packed.codes, packed.scales, packed.tensor_scale].map(|tensor| tensor.to_contiguous());
    host::with_packed(
        codes.as_slice().expect("codes are u8"),
        scales.as_slice().expect("block scales are u8"),
        tensor_scale.as_slice().expect("the tensor scale is kept as i32"),
        layout,
        use_packed,
    )
}

fn quantize(
    values: FlexTensor,
    amax: FlexTensor,
    axis: usize,
    scheme: &Fp4Scheme,
    importance: Importance<'_>,
) -> Fp4Primitive<Flex> {
    let (values, view) = contiguous(values, axis);
    let amax = amax.to_contiguous();
    let packed = with_element!(values.dtype(), T => {
        host::quantize(slice::<T>(&values), view, slice::<f32>(&amax), scheme, importance)
    });
    Fp4Primitive {
        codes: FlexTensor::from_data(packed.codes),
        scales: FlexTensor::from_data(packed.scales),
        tensor_scale: FlexTensor::from_data(packed.tensor_scale),
    }
}

impl Fp4Backend for Flex {
    fn fp4_amax(values: FloatTensor<Self>, axis: usize, by_row: bool) -> FloatTensor<Self> {
        let (values, view) = contiguous(values, axis);
        let amax =
            with_element!(values.dtype(), T => host::amax(slice::<T>(&values), view, by_row));
        FlexTensor::from_data(host::vector(amax))
    }

    fn fp4_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        quantize(values, amax, axis, &scheme, Importance::Uniform)
    }

    fn fp4_quantize_by_importance(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        costs: FloatTensor<Self>,
        _the_host_finds_its_own_bounds: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        let costs = costs.to_contiguous();
        host::with_importance(slice::<f32>(&costs), &scheme, |importance| {
            quantize(values, amax, axis, &scheme, importance)
        })
    }

    fn fp4_dequantize(
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        with_packed(packed, &layout, |packed| {
            with_element!(dtype.into(), T => {
                let values = reuse::filled(layout.view().len(), |values: &mut [T]| {
                    host::dequantize(packed, &layout, values);
                });
                let shape = Shape::from(layout.shape.clone());
                FlexTensor::new(values, Layout::contiguous(shape), dtype.into())
            })
        })
    }

    fn fp4_matmul(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let input = input.to_contiguous();
        let shape = Shape::new([input.layout().shape()[0], layout.shape[1]]);
        with_packed(weight, &layout, |weight| {
            with_element!(input.dtype(), T => {
                let mut output = vec![T::default(); shape.num_elements()];
                host::matmul(slice::<T>(&input), weight, &layout, &mut output);
                tensor(output, shape)
            })
        })
    }

    fn fp4_fake_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
        restore: Restore,
        _for_gradients: Saturated,
    ) -> FloatTensor<Self> {
        let values = values.to_contiguous();
        let shape = values.layout().shape().clone();
        let view = View::along(&shape, axis);
        let amax = amax.to_contiguous();
        with_element!(values.dtype(), T => {
            let mut output = vec![T::default(); view.len()];
            let values = slice::<T>(&values);
            host::fake_quantize(values, view, slice::<f32>(&amax), &scheme, restore, &mut output);
            tensor(output, shape)
        })
    }

    fn fp4_hadamard(
        values: FloatTensor<Self>,
        axis: usize,
        hadamard: Hadamard,
        inverse: bool,
    ) -> FloatTensor<Self> {
        let values = values.to_contiguous();
        let shape = values.layout().shape().clone();
        let view = View::along(&shape, axis);
        with_element!(values.dtype(), T => {
            let mut output = vec![T::default(); view.len()];
            host::hadamard(slice::<T>(&values), view, hadamard, inverse, &mut output);
            tensor(output, shape)
        })
    }

    fn fp4_squared_error(
        values: FloatTensor<Self>,
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let values = values.to_contiguous();
        let sums = with_packed(packed, &layout, |packed| {
            with_element!(values.dtype(), T => {
                host::squared_error(slice::<T>(&values), packed, &layout)
            })
        });
        FlexTensor::from_data(sums)
    }
}
