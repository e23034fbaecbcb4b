//! [`Fp4Backend`]: the FP4 operations of a backend, with defaults made of tensor operations. The
//! facts of each device.

// Burn 0.22 deprecates `NdArray`.
#![allow(deprecated)]
// Without any device the macro's dispatch uses none of the arguments.
#![cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "cube")),
    allow(unused_variables)
)]

use core::fmt::Debug;
use std::sync::Arc;

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, DispatchDevice, DispatchTensor, TensorMetadata, backend_extension};
#[cfg(feature = "cube")]
use burn::tensor::{DType, Shape};
use burn::tensor::{Device, FloatDType, IntDType, TensorData};
use burn_fp4_search::host::DequantTarget;
use burn_fp4_search::{Draw, Fp4Scheme, GramLayout, Hadamard};
use burn_ir::{OperationIr, TensorId, TensorIr};
use burn_router::TensorInterpreter;

use super::portable::bias::add_bias;
use super::portable::{dequantize, gram, hadamard, on_host, quantize};
use crate::error::OpsError;
use crate::factorization::Factorization;
use crate::layout::{Fp4Layout, Fp4Primitive};
#[cfg(feature = "cube")]
use crate::layout::{
    amax_shape, packed_by_gptq_metadata, packed_by_importance_metadata, packed_metadata,
    product_shape, reduced_shape, selected_metadata,
};
use crate::saturated::Saturated;
use crate::train::product::{Quantizer, forward};
use crate::train::recipe::TrainRecipe;

/// FP4 operations of a backend. The defaults use tensor operations.
///
/// The attribute lists the devices. For another backend, implement the trait, with an empty body or
/// with code for some functions, and call its functions directly: those on tensors reach only
/// backends that have a [`Device`](burn::tensor::Device).
///
/// Callers check shapes, scheme and dtype (f32, f16 or bf16).
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff")
)]
pub trait Fp4Backend: Backend {
    /// Computes the largest magnitude in f32, `[1]`, or one per packed row, `[rows]`. NaN if a
    /// value is NaN.
    #[fusion(dtype = DType::F32, shape = amax_shape(values, *axis, *by_row))]
    fn fp4_amax(values: FloatTensor<Self>, axis: usize, by_row: bool) -> FloatTensor<Self> {
        quantize::amax::<Self>(values, axis, by_row)
    }

    /// Quantizes, given the amax `[1]` or `[rows]` of the tensor scale.
    #[fusion(meta = packed_metadata)]
    fn fp4_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        quantize::quantize::<Self>(values, amax, axis, scheme)
    }

    /// Quantizes with costs of errors. `importance` holds weights of channels, `[axis]`, or
    /// Hessians of blocks, one after the other, as the scheme's search needs; `bounds` are the
    /// bounds of [`BlockHessians`](burn_fp4_search::BlockHessians). All are f32.
    #[fusion(meta = packed_by_importance_metadata)]
    fn fp4_quantize_by_importance(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        importance: FloatTensor<Self>,
        bounds: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        on_host::quantize_by_importance::<Self>(values, amax, importance, bounds, axis, scheme)
    }

    /// Quantizes with GPTQ. The scheme comes from
    /// [`DampedHessian::scheme`](burn_fp4_search::DampedHessian::scheme), the Hessian factor from
    /// the host or from this device, and the values are finite.
    #[fusion(meta = packed_by_gptq_metadata)]
    fn fp4_quantize_gptq(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
        factorization: Arc<Factorization>,
    ) -> Fp4Primitive<Self> {
        on_host::quantize_gptq::<Self>(values, amax, axis, scheme, factorization)
    }

    /// Solves `H X = B` for the damped H of a Hessian factor from the host or from this device, and
    /// B `[channels, columns]` in f32. Channels are in the order of the factor.
    #[fusion(dtype = columns, shape = columns)]
    fn fp4_solve(
        columns: FloatTensor<Self>,
        factorization: Arc<Factorization>,
    ) -> FloatTensor<Self> {
        let factor = on_host::factor::<Self>(&factorization, &columns.device());
        gram::solve::<Self>(factor, columns, Self::fp4_deterministic_matmul)
    }

    /// Dequantizes: computed in f32 and rounded once to the dtype.
    #[fusion(dtype = DType::from(*dtype), shape = Shape::from(layout.shape.clone()))]
    fn fp4_dequantize(
        #[extension_type] packed: Fp4Primitive<Self>,
        // The fuser reads it.
        #[fusion(scalar = layout.tag())] layout: Fp4Layout,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let Some(hadamard) = layout.hadamard else {
            return dequantize::dequantize::<Self>(packed, layout, dtype);
        };
        let axis = layout.axis;
        let values = Self::fp4_dequantize(packed, layout.of_codes(), FloatDType::F32);
        Self::float_cast(Self::fp4_hadamard(values, axis, hadamard, true), dtype)
    }

    /// Computes the largest magnitude that each element can have: 6 times the scale of its block,
    /// in f32.
    #[fusion(dtype = DType::F32, shape = Shape::from(layout.shape.clone()))]
    fn fp4_largest(
        #[extension_type] packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let (shape, device) = (packed.codes.shape(), packed.codes.device());
        let sixes = i64::from(dequantize::SIXES).into();
        let codes = Self::int_full(shape, sixes, &device, IntDType::U8);
        Self::fp4_dequantize(Fp4Primitive { codes, ..packed }, layout, FloatDType::F32)
    }

    /// Multiplies signed bytes `[N, K]` by scales `[N, K / 32]` in f32, one for 32 neighbours:
    /// `[N, K]`.
    #[fusion(dtype = DType::F32, shape = codes)]
    fn fp4_dequantize_int8(codes: IntTensor<Self>, scales: FloatTensor<Self>) -> FloatTensor<Self> {
        dequantize::dequantize_int8::<Self>(codes, scales)
    }

    /// Selects the rows at indices `[n]` of a tensor packed along its last axis.
    #[fusion(meta = selected_metadata)]
    fn fp4_select_rows(
        #[extension_type] packed: Fp4Primitive<Self>,
        rows: IntTensor<Self>,
    ) -> Fp4Primitive<Self> {
        dequantize::select_rows::<Self>(packed, rows)
    }

    /// Multiplies an input `[M, K]` by a weight `[K, N]` packed along its first axis, in the dtype
    /// of the input.
    #[fusion(dtype = input, shape = Shape::new([input[0], layout.shape[1]]))]
    fn fp4_matmul(
        input: FloatTensor<Self>,
        #[extension_type] weight: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let dtype = FloatDType::from(input.dtype());
        Self::float_matmul(input, Self::fp4_dequantize(weight, layout, dtype))
    }

    /// [`fp4_matmul`](Self::fp4_matmul) with [`Activations::Int8`](burn_fp4_search::Activations),
    /// on devices in host memory. Others multiply as `fp4_matmul` does.
    #[fusion(default)]
    fn fp4_int8_matmul(
        input: FloatTensor<Self>,
        #[extension_type] weight: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        Self::fp4_matmul(input, weight, layout)
    }

    /// [`fp4_matmul`](Self::fp4_matmul) plus a bias `[N]` of the same dtype.
    #[fusion(dtype = input, shape = Shape::new([input[0], layout.shape[1]]))]
    fn fp4_linear(
        input: FloatTensor<Self>,
        #[extension_type] weight: Fp4Primitive<Self>,
        bias: FloatTensor<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        add_bias::<Self>(Self::fp4_matmul(input, weight, layout), bias)
    }

    /// Finds the facts about a weight `[K, N]` packed along its first axis for products in FP8, f32
    /// `[2, N]`; see [`fp8_rows`](burn_fp4_search::fp8_rows).
    #[fusion(dtype = DType::F32, shape = Shape::new([2, layout.shape[1]]))]
    fn fp4_fp8_rows(
        #[extension_type] weight: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        on_host::fp8_rows::<Self>(weight, &layout)
    }

    /// [`fp4_matmul`](Self::fp4_matmul) with `Fp8` or `Fp8Rounded` of
    /// [`Activations`](burn_fp4_search::Activations), for a weight with the facts `rows`, on
    /// devices that multiply so. Others multiply as `fp4_matmul` does.
    #[fusion(dtype = input, shape = Shape::new([input[0], layout.shape[1]]))]
    fn fp4_fp8_matmul(
        input: FloatTensor<Self>,
        #[extension_type] weight: Fp4Primitive<Self>,
        rows: FloatTensor<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let _ = rows;
        Self::fp4_matmul(input, weight, layout)
    }

    /// [`fp4_fp8_matmul`](Self::fp4_fp8_matmul) plus a bias `[N]` of the dtype of the input.
    #[fusion(dtype = input, shape = Shape::new([input[0], layout.shape[1]]))]
    fn fp4_fp8_linear(
        input: FloatTensor<Self>,
        #[extension_type] weight: Fp4Primitive<Self>,
        rows: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        add_bias::<Self>(Self::fp4_fp8_matmul(input, weight, rows, layout), bias)
    }

    /// Quantizes and dequantizes, in the dtype of the input. `saturated` is for gradients.
    #[fusion(dtype = values, shape = values)]
    fn fp4_fake_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
        target: DequantTarget,
        saturated: Saturated,
    ) -> FloatTensor<Self> {
        let _ = saturated;
        quantize::fake_quantize::<Self>(values, amax, axis, scheme, target, Self::fp4_dequantize)
    }

    /// Applies the Hadamard transform along an axis, or its inverse, in the dtype of the input.
    #[fusion(dtype = values, shape = values)]
    fn fp4_hadamard(
        values: FloatTensor<Self>,
        axis: usize,
        hadamard: Hadamard,
        inverse: bool,
    ) -> FloatTensor<Self> {
        hadamard::hadamard::<Self>(values, axis, hadamard, inverse)
    }

    /// Multiplies `[M, K]` by `[K, N]`, of the same dtype, both quantized by a recipe. `draw` is
    /// for gradients.
    #[fusion(default)]
    fn fp4_train_product(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        recipe: TrainRecipe,
        draw: Draw,
    ) -> FloatTensor<Self> {
        let _ = draw;
        let quantizer = Quantizer { amax: Self::fp4_amax, fake_quantize: Self::fp4_fake_quantize };
        forward::<Self>(input, weight, &recipe, &quantizer)
    }

    /// Adds `X^T X` of activations `[rows, channels]` to tiles `[tiles, SIDE, SIDE]` of a layout,
    /// from tile `first` on. The order of the sums is the same on every device of a kind.
    #[fusion(dtype = sums, shape = sums)]
    fn fp4_add_gram(
        sums: FloatTensor<Self>,
        activations: FloatTensor<Self>,
        layout: GramLayout,
        first: usize,
    ) -> FloatTensor<Self> {
        gram::add_gram::<Self>(sums, activations, layout, first, Self::fp4_deterministic_matmul)
    }

    /// Multiplies with a fixed kernel that depends only on the problem. Autotuning may choose
    /// another one, which sums in another order.
    #[fusion(dtype = left, shape = product_shape(left, right))]
    fn fp4_deterministic_matmul(
        left: FloatTensor<Self>,
        right: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::float_matmul(left, right)
    }

    /// Sums along an axis, or takes the mean, with a fixed kernel. The axis keeps length 1.
    #[fusion(dtype = values, shape = reduced_shape(values, *axis))]
    fn fp4_deterministic_sum(
        values: FloatTensor<Self>,
        axis: usize,
        mean: bool,
    ) -> FloatTensor<Self> {
        if mean { Self::float_mean_dim(values, axis) } else { Self::float_sum_dim(values, axis) }
    }

    /// Sums the squared differences between a tensor and its packed form, in the dtype of the
    /// tensor, and the squares of the tensor: `[6]` in f32, for
    /// [`squared_sums`](crate::squared_sums).
    #[fusion(dtype = DType::F32, shape = Shape::new([6]))]
    fn fp4_squared_error(
        values: FloatTensor<Self>,
        #[extension_type] packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let dense = Self::fp4_dequantize(packed, layout, FloatDType::F32);
        dequantize::squared_error::<Self>(values, dense, Self::fp4_deterministic_sum)
    }
}

/// Facts of a device.
struct DeviceRow {
    /// True if its tensors are in host memory.
    is_host: bool,
    /// True if a tensor can repeat one value in any shape without copies.
    repeats_values: bool,
    /// Makes the interpreter of recorded operations.
    interpreter: Box<dyn FnOnce() -> Box<dyn BackendInterpreter>>,
}

/// Runs recorded operations on a backend. The trait hides which.
pub(crate) trait BackendInterpreter: Debug + Send {
    /// Sets the values of a tensor.
    fn insert_data(&mut self, id: TensorId, data: TensorData);
    /// Sets a tensor. The error is the reason why it cannot.
    fn insert(&mut self, id: TensorId, tensor: DispatchTensor) -> Result<(), String>;
    /// Runs an operation, with a fixed kernel if it sums.
    fn run(&mut self, operation: &OperationIr);
    /// Returns a computed tensor.
    fn tensor(&mut self, tensor: &TensorIr) -> DispatchTensor;
    /// Returns a computed float tensor `[.., channels]` as a matrix `[rows, channels]`.
    fn matrix(&mut self, tensor: &TensorIr) -> DispatchTensor;
}

/// Returns the facts of a device, if this build has code for it.
fn row(device: &Device) -> Option<DeviceRow> {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "flex")]
        &DispatchDevice::Flex(device) => Some(DeviceRow {
            is_host: true,
            repeats_values: true,
            interpreter: Box::new(move || {
                Box::new(TensorInterpreter::<burn::backend::Flex>::new(device))
            }),
        }),
        #[cfg(feature = "ndarray")]
        &DispatchDevice::NdArray(device) => Some(DeviceRow {
            is_host: true,
            repeats_values: false,
            interpreter: Box::new(move || {
                Box::new(TensorInterpreter::<burn::backend::NdArray>::new(device))
            }),
        }),
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => {
            let device = device.clone();
            Some(DeviceRow {
                is_host: false,
                repeats_values: true,
                interpreter: Box::new(move || {
                    Box::new(TensorInterpreter::<burn::backend::Cube>::new(device))
                }),
            })
        }
        #[allow(unreachable_patterns)]
        _ => None,
    }
}

/// Returns true if tensors of a device are in host memory.
#[must_use]
pub fn is_host(device: &Device) -> bool {
    row(device).is_some_and(|row| row.is_host)
}

/// Moves the values of a weight to memory that a device reads fast: on `flex` to huge pages, which
/// weights share. A tensor made of the data keeps that memory. Other devices copy the data anyway.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::weight_data;
///
/// let (device, data) = (Device::flex(), TensorData::from([[0.5f32; 64]; 64]));
/// let weight = Tensor::<2>::from_data(weight_data(data.clone(), &device), &device);
/// assert_eq!(weight.into_data(), data);
/// ```
#[must_use]
pub fn weight_data(data: TensorData, device: &Device) -> TensorData {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => super::huge_pages::moved(data),
        #[allow(unreachable_patterns)]
        _ => data,
    }
}

/// Returns true if tensors of a device can repeat one value in any shape without copies.
#[must_use]
pub fn repeats_values(device: &Device) -> bool {
    row(device).is_none_or(|row| row.repeats_values)
}

/// Makes an interpreter of recorded operations on a device.
///
/// # Errors
/// [`OpsError::Device`] if the device cannot run recorded operations.
pub(crate) fn interpreter(device: &Device) -> Result<Box<dyn BackendInterpreter>, OpsError> {
    match row(device) {
        Some(row) => Ok((row.interpreter)()),
        None => Err(OpsError::Device(format!("{device:?} cannot run recorded operations"))),
    }
}
