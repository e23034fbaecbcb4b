// Burn 0.22 deprecates `NdArray`.
#![allow(deprecated)]
// Without any device the dispatch that the macro writes uses nothing.
#![cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "cube")),
    allow(unused_variables)
)]

use std::sync::Arc;

#[cfg(feature = "cube")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};
use burn::tensor::FloatDType;
#[cfg(feature = "cube")]
use burn::tensor::{DType, Shape};
use burn_fp4_search::host::Restore;
use burn_fp4_search::{Draw, Fp4Scheme, GramTiles, Hadamard};

#[cfg(feature = "cube")]
use crate::layout;
use crate::{Curvature, Fp4Layout, Saturated, TrainRecipe, portable, train};

/// A quantized tensor as a backend sees it.
#[derive(Debug, Clone, ExtensionType)]
#[extension_type(fusion: cfg(feature = "cube"))]
pub struct Fp4Primitive<B: Backend> {
    /// u8, `[rows, axis / 2]`.
    pub codes: IntTensor<B>,
    /// u8, `[rows, axis / block_size]`.
    pub scales: IntTensor<B>,
    /// The bits of the f32 tensor scale in i32, `[1]` or `[rows]`: as integers, so that nothing that
    /// casts or trains the floats of a module can touch them.
    pub tensor_scale: IntTensor<B>,
}

/// What a backend has to do. Without code of its own it does so by tensor operations.
///
/// Callers have checked shapes, scheme and dtype (f32, f16 or bf16).
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "cube"),
    Autodiff: cfg(feature = "autodiff")
)]
pub trait Fp4Backend: Backend {
    /// Largest magnitude in f32: `[1]`, or one per packed row `[rows]`. NaN if a value is.
    #[fusion(dtype = DType::F32, shape = layout::amax_shape(values, *axis, *by_row))]
    fn fp4_amax(values: FloatTensor<Self>, axis: usize, by_row: bool) -> FloatTensor<Self> {
        portable::amax::<Self>(values, axis, by_row)
    }

    /// Codes and scales, given the amax `[1]` or `[rows]` that the tensor scale is made from.
    #[fusion(meta = packed_metadata)]
    fn fp4_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        portable::quantize::<Self>(values, amax, axis, scheme)
    }

    /// Codes and scales for errors that do not all cost the same: `costs` are the weights of channels,
    /// `[axis]`, or the Hessians of blocks, one after the other, and `bounds` those of
    /// [`BlockHessians`](burn_fp4_search::BlockHessians), all f32.
    #[fusion(meta = packed_by_importance_metadata)]
    fn fp4_quantize_by_importance(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        costs: FloatTensor<Self>,
        bounds: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        portable::quantize_by_importance::<Self>(values, amax, costs, bounds, axis, scheme)
    }

    /// Codes and scales by GPTQ, by a scheme of [`Damped::scheme`](burn_fp4_search::Damped::scheme), with a curvature
    /// of the host or of this device. The values are finite.
    #[fusion(meta = packed_by_gptq_metadata)]
    fn fp4_quantize_gptq(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
        curvature: Arc<Curvature>,
    ) -> Fp4Primitive<Self> {
        portable::quantize_gptq::<Self>(values, amax, axis, scheme, curvature)
    }

    /// The values of codes and scales, computed in f32 and rounded once to the dtype.
    #[fusion(dtype = DType::from(*dtype), shape = Shape::from(layout.shape.clone()))]
    fn fp4_dequantize(
        #[extension_type] packed: Fp4Primitive<Self>,
        // What a fuser has to know of it.
        #[fusion(scalar = layout.tag())] layout: Fp4Layout,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        portable::dequantize::<Self>(packed, layout, dtype)
    }

    /// `input x weight`, in the dtype of the input `[M, K]`, for a weight `[K, N]` packed along its first axis.
    #[fusion(default)]
    fn fp4_matmul(
        input: FloatTensor<Self>,
        #[extension_type] weight: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        portable::matmul::<Self>(input, weight, layout)
    }

    /// What dequantization makes of quantization, in the dtype of the input. `saturated` is for gradients.
    #[fusion(dtype = values, shape = values)]
    fn fp4_fake_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
        restore: Restore,
        saturated: Saturated,
    ) -> FloatTensor<Self> {
        let _ = saturated;
        portable::fake_quantize::<Self>(values, amax, axis, scheme, restore)
    }

    /// Every 16 neighbours along an axis transformed, or back, in the dtype of the input.
    #[fusion(dtype = values, shape = values)]
    fn fp4_hadamard(
        values: FloatTensor<Self>,
        axis: usize,
        hadamard: Hadamard,
        inverse: bool,
    ) -> FloatTensor<Self> {
        portable::hadamard::<Self>(values, axis, hadamard, inverse)
    }

    /// `input x weight`, `[M, K]` and `[K, N]`, of the same dtype, both quantized as a recipe says. `draw` is
    /// for gradients.
    #[fusion(default)]
    fn fp4_train_product(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        recipe: TrainRecipe,
        draw: Draw,
    ) -> FloatTensor<Self> {
        let _ = draw;
        train::forward::<Self>(input, weight, &recipe)
    }

    /// Adds `X^T X` of activations `[rows, channels]` to tiles `[tiles, SIDE, SIDE]` of a layout, from the `first` on, in
    /// an order that is the same on every device of a kind.
    #[fusion(dtype = sums, shape = sums)]
    fn fp4_add_gram(
        sums: FloatTensor<Self>,
        activations: FloatTensor<Self>,
        layout: GramTiles,
        first: usize,
    ) -> FloatTensor<Self> {
        portable::add_gram::<Self>(sums, activations, layout, first)
    }

    /// `left x right`, by a kernel that depends on nothing but the problem: devices that look for the fastest one
    /// may find others, which add up in another order.
    #[fusion(dtype = left, shape = layout::product_shape(left, right))]
    fn fp4_untuned_matmul(left: FloatTensor<Self>, right: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(left, right)
    }

    /// The sum along an axis, which stays, or the mean; by such a kernel.
    #[fusion(dtype = values, shape = layout::reduced_shape(values, *axis))]
    fn fp4_untuned_sum(values: FloatTensor<Self>, axis: usize, mean: bool) -> FloatTensor<Self> {
        if mean { Self::float_mean_dim(values, axis) } else { Self::float_sum_dim(values, axis) }
    }

    /// `[2]` in f32: the sum of squared differences between a tensor and its packed form, and the
    /// sum of its squares.
    #[fusion(dtype = DType::F32, shape = Shape::new([2]))]
    fn fp4_squared_error(
        values: FloatTensor<Self>,
        #[extension_type] packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        portable::squared_error::<Self>(values, packed, layout)
    }
}

/// Shapes and dtypes of a quantized tensor, known before it is computed.
#[cfg(feature = "cube")]
fn packed_metadata(
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

#[cfg(feature = "cube")]
fn packed_by_importance_metadata(
    values: &TensorSpec,
    amax: &TensorSpec,
    _costs: &TensorSpec,
    _bounds: &TensorSpec,
    axis: &usize,
    scheme: &Fp4Scheme,
) -> Fp4PrimitiveMetadata {
    packed_metadata(values, amax, axis, scheme)
}

#[cfg(feature = "cube")]
fn packed_by_gptq_metadata(
    values: &TensorSpec,
    amax: &TensorSpec,
    axis: &usize,
    scheme: &Fp4Scheme,
    _curvature: &Arc<Curvature>,
) -> Fp4PrimitiveMetadata {
    packed_metadata(values, amax, axis, scheme)
}
