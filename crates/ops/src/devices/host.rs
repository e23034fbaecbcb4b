//! [`HostDevice`]: the host engine on the tensors of devices in host memory, Burn's `flex` and
//! `ndarray`.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, Element, FloatDType, TensorData, bf16, f16};
use burn_fp4_search::host::{self, DequantTarget, HostElement, PackedView, View};
use burn_fp4_search::squares::ranges_of;
use burn_fp4_search::{
    Activations, Fp4Scheme, GramLayout, Hadamard, Importance, fp8_values, round_to_fp8,
};

use super::extension::Fp4Backend;
use super::portable::on_host::{OwnedImportance, packed_on_host, read};
use super::portable::{dequantize_transformed, gram, transformed_input};
use crate::layout::{Fp4Layout, Fp4Primitive};
use crate::saturated::Saturated;

/// A device whose tensors are in host memory.
pub(crate) trait HostDevice: Backend {
    /// Puts values into row-major order.
    fn contiguous(values: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Puts bytes or 32-bit integers into row-major order.
    fn contiguous_ints(ints: IntTensor<Self>) -> IntTensor<Self>;

    /// Puts values into contiguous memory, in any order, and returns the view along an axis.
    fn contiguous_along(values: FloatTensor<Self>, axis: usize) -> (FloatTensor<Self>, View) {
        let values = Self::contiguous(values);
        let view = View::along(&values.shape(), axis);
        (values, view)
    }

    /// Borrows the values of a contiguous tensor.
    fn values(contiguous: &FloatTensor<Self>) -> Values<'_>;

    /// Borrows the bytes of a contiguous tensor.
    fn bytes(contiguous: &IntTensor<Self>) -> &[u8];

    /// Borrows the 32-bit integers of a contiguous tensor.
    fn ints(contiguous: &IntTensor<Self>) -> &[i32];

    /// Dequantizes to a dtype, or to f32 if the device has no other.
    fn dense_data(packed: PackedView<'_>, layout: &Fp4Layout, _dtype: FloatDType) -> TensorData {
        filled(&layout.shape, |values: &mut [f32]| dequantize(packed, layout, values))
    }
}

/// Values of a float tensor in host memory.
#[derive(Clone, Copy)]
// Only `flex` has all of them.
#[cfg_attr(not(feature = "flex"), allow(dead_code))]
pub(crate) enum Values<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

/// Runs the same for the values of each dtype.
macro_rules! each_dtype {
    ($values:expr, $slice:ident => $body:expr) => {
        match $values {
            Values::F32($slice) => $body,
            Values::F16($slice) => $body,
            Values::Bf16($slice) => $body,
        }
    };
}

const CHECKED: &str = "callers check scheme, shape and dtype";

/// A packed tensor in contiguous host memory.
struct HostPacked<B: HostDevice> {
    codes: IntTensor<B>,
    scales: IntTensor<B>,
    /// Bits of f32.
    tensor_scale: IntTensor<B>,
}

impl<B: HostDevice> HostPacked<B> {
    fn new(packed: Fp4Primitive<B>) -> Self {
        Self {
            codes: B::contiguous_ints(packed.codes),
            scales: B::contiguous_ints(packed.scales),
            tensor_scale: B::contiguous_ints(packed.tensor_scale),
        }
    }

    fn view(&self, layout: &Fp4Layout) -> PackedView<'_> {
        PackedView {
            format: layout.format,
            block_size: layout.block_size,
            codes: B::bytes(&self.codes),
            scales: B::bytes(&self.scales),
            tensor_scale: bytemuck::cast_slice(B::ints(&self.tensor_scale)),
        }
    }
}

/// Puts values into row-major order, in f32.
fn in_f32<B: HostDevice>(values: FloatTensor<B>) -> FloatTensor<B> {
    B::contiguous(B::float_cast(values, FloatDType::F32))
}

/// Borrows the values of a tensor that [`in_f32`] made.
fn f32s<B: HostDevice>(values: &FloatTensor<B>) -> &[f32] {
    match B::values(values) {
        Values::F32(values) => values,
        Values::F16(_) | Values::Bf16(_) => unreachable!("cast to f32"),
    }
}

fn quantize<B: HostDevice>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: &Fp4Scheme,
    importance: Importance<'_>,
) -> Fp4Primitive<B> {
    let (device, amax) = (values.device(), in_f32::<B>(amax));
    let (values, view) = B::contiguous_along(values, axis);
    let packed = each_dtype!(B::values(&values), values => {
        host::quantize_packed(values, view, scheme, f32s::<B>(&amax), importance).expect(CHECKED)
    });
    Fp4Primitive::from_packed(packed, |data, _its_own_dtype| B::int_from_data(data, &device))
}

fn matmul<B: HostDevice>(
    input: FloatTensor<B>,
    weight: Fp4Primitive<B>,
    layout: &Fp4Layout,
    activations: Activations,
) -> FloatTensor<B> {
    let (device, m) = (input.device(), input.shape()[0]);
    let [k, n] = layout.shape[..] else { unreachable!("callers check the rank") };
    let input = transformed_input::<B>(input, layout);
    let (input, weight) = (B::contiguous(input), HostPacked::<B>::new(weight));
    let output = each_dtype!(B::values(&input), input => filled(&[m, n], |output| {
        host::matmul(input, weight.view(layout), [n, k], activations, output).expect(CHECKED);
    }));
    B::float_from_data(output, &device)
}

impl<B: HostDevice> Fp4Backend for B {
    fn fp4_amax(values: FloatTensor<Self>, axis: usize, by_row: bool) -> FloatTensor<Self> {
        let device = values.device();
        let (values, view) = B::contiguous_along(values, axis);
        let amax = each_dtype!(B::values(&values), values => match by_row {
            true => host::row_amax(values, view),
            false => vec![host::tensor_amax(values)],
        });
        B::float_from_data(vector(amax), &device)
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
        let importance = OwnedImportance::new(read::<B>(importance), &scheme);
        quantize::<B>(values, amax, axis, &scheme, importance.borrow())
    }

    fn fp4_dequantize(
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        if let Some(hadamard) = layout.hadamard {
            return dequantize_transformed::<Self>(packed, layout, hadamard, dtype);
        }
        let device = packed.codes.device();
        let packed = HostPacked::new(packed);
        B::float_from_data(B::dense_data(packed.view(&layout), &layout, dtype), &device)
    }

    fn fp4_matmul(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        matmul::<B>(input, weight, &layout, Activations::F32)
    }

    fn fp4_int8_matmul(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        matmul::<B>(input, weight, &layout, Activations::Int8)
    }

    fn fp4_fp8_matmul(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        _for_gpus: FloatTensor<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let (device, dtype) = (input.device(), input.dtype());
        let packed = packed_on_host::<B>(weight, &layout);
        let weight = TensorData::new(fp8_values(&packed), [packed.rows, packed.cols]);
        let weight = B::float_swap_dims(B::float_from_data(weight, &device), 0, 1);
        let input = in_f32::<B>(transformed_input::<B>(input, &layout));
        let rounded: Vec<f32> =
            f32s::<B>(&input).chunks(packed.cols).flat_map(round_to_fp8).collect();
        let rounded = B::float_from_data(TensorData::new(rounded, input.shape()), &device);
        B::float_cast(B::float_matmul(rounded, weight), FloatDType::from(dtype))
    }

    fn fp4_fake_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
        target: DequantTarget,
        _for_gradients: Saturated,
    ) -> FloatTensor<Self> {
        let (device, shape, amax) = (values.device(), values.shape(), in_f32::<B>(amax));
        let (values, view) = (B::contiguous(values), View::along(&shape, axis));
        let output = each_dtype!(B::values(&values), values => filled(&shape, |output| {
            let amax = f32s::<B>(&amax);
            host::fake_quantize(values, view, &scheme, amax, target, output).expect(CHECKED);
        }));
        B::float_from_data(output, &device)
    }

    fn fp4_hadamard(
        values: FloatTensor<Self>,
        axis: usize,
        hadamard: Hadamard,
        inverse: bool,
    ) -> FloatTensor<Self> {
        let (device, shape) = (values.device(), values.shape());
        let (values, view) = (B::contiguous(values), View::along(&shape, axis));
        fn transform<T: HostElement>(
            values: &[T],
            view: View,
            (hadamard, inverse): (Hadamard, bool),
            output: &mut [T],
        ) {
            host::hadamard(values, view, hadamard, inverse, output).expect(CHECKED);
        }
        let output = each_dtype!(B::values(&values), values => {
            filled(&shape, |output| transform(values, view, (hadamard, inverse), output))
        });
        B::float_from_data(output, &device)
    }

    fn fp4_add_gram(
        sums: FloatTensor<Self>,
        activations: FloatTensor<Self>,
        layout: GramLayout,
        first: usize,
    ) -> FloatTensor<Self> {
        if sums.dtype() != DType::F64 {
            let matmul = Self::fp4_deterministic_matmul;
            return gram::add_gram::<Self>(sums, activations, layout, first, matmul);
        }
        let (device, shape) = (sums.device(), sums.shape());
        let sums = burn::tensor::read_sync(B::float_into_data(sums));
        let sums = sums.expect("memory of the host can be read").try_into_vec::<f64>();
        let mut sums = sums.expect("the dtype is f64");
        let activations = in_f32::<B>(activations);
        host::add_gram(&mut sums, f32s::<B>(&activations), layout, first);
        B::float_from_data(TensorData::new(sums, shape), &device)
    }

    fn fp4_squared_error(
        values: FloatTensor<Self>,
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let device = values.device();
        let (values, packed) = (B::contiguous(values), HostPacked::<B>::new(packed));
        let sums = each_dtype!(B::values(&values), values => {
            host::squared_error(values, packed.view(&layout), layout.view()).expect(CHECKED)
        });
        B::float_from_data(vector(sums.map(ranges_of).concat()), &device)
    }
}

/// Dequantizes in row-major order.
fn dequantize<T: HostElement>(packed: PackedView<'_>, layout: &Fp4Layout, output: &mut [T]) {
    host::dequantize(packed, layout.view(), output).expect(CHECKED);
}

/// Makes values of a shape.
fn filled<T: HostElement + Element>(shape: &[usize], fill: impl FnOnce(&mut [T])) -> TensorData {
    let mut values = vec![T::default(); shape.iter().product()];
    fill(&mut values);
    TensorData::new(values, shape.to_vec())
}

/// Makes a vector `[len]`.
fn vector(values: Vec<f32>) -> TensorData {
    let len = values.len();
    TensorData::new(values, [len])
}

/// Burn's `flex` device.
#[cfg(feature = "flex")]
mod flex {
    use burn::backend::Flex;
    use burn::tensor::{DType, FloatDType, TensorData, bf16, f16};
    use burn_flex::FlexTensor;
    use burn_fp4_search::host::{HostElement, PackedView, View};
    use bytemuck::Pod;

    use super::{CHECKED, HostDevice, Values, dequantize};
    use crate::devices::scratch;
    use crate::layout::Fp4Layout;

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
}

/// Burn's `ndarray` device, which has f32 only. Burn 0.22 deprecates it in favour of `flex`.
#[cfg(feature = "ndarray")]
mod ndarray {
    use burn::backend::NdArray;
    use burn_ndarray::NdArrayTensor;

    use super::{HostDevice, Values};

    /// Copies a tensor into row-major order, unless it is in it.
    macro_rules! contiguous {
        ($tensor:expr, $variant:ident) => {
            match $tensor {
                NdArrayTensor::$variant(storage) if !storage.view().is_standard_layout() => {
                    storage.view().as_standard_layout().into_owned().into_shared().into()
                }
                contiguous => contiguous,
            }
        };
    }

    /// Borrows the elements of a contiguous tensor.
    macro_rules! elements {
        ($tensor:expr, $variant:ident) => {
            match $tensor {
                NdArrayTensor::$variant(storage) => storage.view().to_slice().expect("contiguous"),
                other => unreachable!("callers check the dtype: {other:?}"),
            }
        };
    }

    impl HostDevice for NdArray {
        fn contiguous(values: NdArrayTensor) -> NdArrayTensor {
            contiguous!(values, F32)
        }

        fn contiguous_ints(ints: NdArrayTensor) -> NdArrayTensor {
            match ints {
                ints @ NdArrayTensor::I32(_) => contiguous!(ints, I32),
                bytes => contiguous!(bytes, U8),
            }
        }

        fn values(contiguous: &NdArrayTensor) -> Values<'_> {
            Values::F32(elements!(contiguous, F32))
        }

        fn bytes(contiguous: &NdArrayTensor) -> &[u8] {
            elements!(contiguous, U8)
        }

        fn ints(contiguous: &NdArrayTensor) -> &[i32] {
            elements!(contiguous, I32)
        }
    }
}
