//! Products with a packed weight and lookups of its rows, straight from the codes.

use burn::backend::Dispatch;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_fp4_search::Activations;

use crate::devices::extension::{Fp4Backend, is_host};
use crate::error::OpsError;
use crate::fp8::{Fp8Weight, plan_fp8};
use crate::layout::check_dtype;
use crate::tensor::Fp4Tensor;

/// Multiplies an input `[.., K]` by a weight `[K, N]` quantized along its first axis.
///
/// For a weight `[N, K]` quantized along its last axis, pass its
/// [`transpose`](Fp4Tensor::transpose), which copies nothing. `flex`, `ndarray` and Cube devices
/// with kernels multiply straight from the codes. On an autodiff device the input has a gradient.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::{Fp4Scheme, matmul, quantize};
///
/// let device = Device::flex();
/// let weight = quantize(Tensor::<2>::full([32, 2], 1.4, &device), 0, &Fp4Scheme::mxfp4())?;
/// let product = matmul(Tensor::<2>::ones([1, 32], &device), &weight)?;
/// // 1.4 is 5.6 times the block scale 1/4; the nearest element is 6, and the value 1.5.
/// assert_eq!(product.into_data(), TensorData::from([[32.0 * 1.5f32; 2]]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// [`OpsError::DType`] if the input is not f32, f16 or bf16, [`OpsError::Contraction`] if the
/// weight is quantized along the other axis or K differs.
pub fn matmul<const D: usize>(
    input: Tensor<D>,
    weight: &Fp4Tensor<2>,
) -> Result<Tensor<D>, OpsError> {
    linear(input, weight, None)
}

/// [`matmul`] plus a bias `[N]`, as one operation. A bias of another dtype is cast to that of the
/// input.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::{Fp4Scheme, linear, quantize};
///
/// let device = Device::flex();
/// let weight = quantize(Tensor::<2>::full([32, 2], 1.5, &device), 0, &Fp4Scheme::mxfp4())?;
/// let bias = Tensor::<1>::from_floats([2.0, -8.0], &device);
/// let output = linear(Tensor::<2>::ones([1, 32], &device), &weight, Some(bias))?;
/// assert_eq!(output.into_data(), TensorData::from([[50f32, 40.0]]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`matmul`]; [`OpsError::Shape`] for a bias of another length.
pub fn linear<const D: usize>(
    input: Tensor<D>,
    weight: &Fp4Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Result<Tensor<D>, OpsError> {
    linear_with(input, weight, bias, Activations::F32)
}

/// [`linear`] with an input read as [`Activations`] says: in int8 on devices in host memory
/// ([`is_host`]), in FP8 on GPUs of compute capability 9.0 and, emulated, on hosts. Other devices
/// multiply as [`linear`] does.
///
/// FP8 needs facts about the weight, which each call finds anew and reads back. Use
/// [`linear_in_fp8`] to find them once.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::{Activations, Fp4Scheme, linear, linear_with, quantize};
///
/// let device = Device::flex();
/// let weight = quantize(Tensor::<2>::full([32, 2], 1.5, &device), 0, &Fp4Scheme::mxfp4())?;
/// let input = Tensor::<2>::ones([1, 32], &device);
/// let in_f32 = linear(input.clone(), &weight, None)?;
/// let in_int8 = linear_with(input, &weight, None, Activations::Int8)?;
/// let error = (in_f32 - in_int8).abs().max().into_scalar::<f32>();
/// assert!(error < 1e-4);
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`linear`]; for FP8 also [`OpsError::Device`] if the device fails.
pub fn linear_with<const D: usize>(
    input: Tensor<D>,
    weight: &Fp4Tensor<2>,
    bias: Option<Tensor<1>>,
    activations: Activations,
) -> Result<Tensor<D>, OpsError> {
    match activations {
        Activations::F32 => multiply(input, weight, bias, Product::Plain),
        Activations::Int8 => multiply(input, weight, bias, Product::Int8),
        Activations::Fp8 | Activations::Fp8Rounded => {
            let rounds = activations == Activations::Fp8Rounded;
            let facts = || Ok(Fp8Weight::of(weight)?.with_rounding(rounds));
            linear_in_fp8(input, weight, bias, facts)
        }
    }
}

/// [`linear_with`] for [`Activations::Fp8`] or [`Activations::Fp8Rounded`], with facts about the
/// weight that are known already. They are asked for if the device multiplies inputs of this shape
/// and dtype in FP8; [`Fp8Weight::path`] tells.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_ops::{Fp4Scheme, Fp8Weight, linear, linear_in_fp8, quantize};
///
/// let device = Device::flex(); // emulates products in FP8
/// let weight = quantize(Tensor::<2>::full([32, 2], 1.5, &device), 0, &Fp4Scheme::mxfp4())?;
/// let facts = Fp8Weight::of(&weight)?;
/// let input = Tensor::<2>::ones([200, 32], &device);
/// let output = linear_in_fp8(input.clone(), &weight, None, || Ok(facts))?;
/// assert_eq!(output.into_data(), linear(input, &weight, None)?.into_data());
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`linear`], those of `facts`, and [`OpsError::Shape`] if they are of a weight with another
/// number of outputs. Facts of another weight of the same shape give wrong products.
pub fn linear_in_fp8<const D: usize>(
    input: Tensor<D>,
    weight: &Fp4Tensor<2>,
    bias: Option<Tensor<1>>,
    facts: impl FnOnce() -> Result<Fp8Weight, OpsError>,
) -> Result<Tensor<D>, OpsError> {
    let rows = input.dims()[..D - 1].iter().product();
    if plan_fp8(weight, rows, input.dtype()).is_err() {
        return multiply(input, weight, bias, Product::Plain);
    }
    let facts = facts()?;
    let (expected, found) = (vec![2, weight.dims()[1]], facts.dims().to_vec());
    if found != expected {
        return Err(OpsError::Shape { what: "facts for FP8", expected, found });
    }
    let product = if facts.is_multiplied() { Product::Fp8(&facts) } else { Product::Plain };
    multiply(input, weight, bias, product)
}

/// How a product reads its input.
enum Product<'a> {
    Plain,
    /// On hosts; elsewhere `Plain`.
    Int8,
    Fp8(&'a Fp8Weight),
}

fn multiply<const D: usize>(
    input: Tensor<D>,
    weight: &Fp4Tensor<2>,
    bias: Option<Tensor<1>>,
    product: Product<'_>,
) -> Result<Tensor<D>, OpsError> {
    check_dtype(&input)?;
    let [expected, outputs] = weight.dims();
    let mut shape = input.dims();
    let found = core::mem::replace(&mut shape[D - 1], outputs);
    if weight.axis() != 0 || found != expected {
        return Err(OpsError::Contraction { input: found, weight: expected, axis: weight.axis() });
    }
    if let Some(bias) = bias.as_ref().filter(|bias| bias.dims() != [outputs]) {
        let (expected, found) = (vec![outputs], bias.dims().to_vec());
        return Err(OpsError::Shape { what: "bias", expected, found });
    }
    let dtype = input.dtype();
    let bias = bias.map(|bias| if bias.dtype() == dtype { bias } else { bias.cast(dtype) });
    let rows: usize = shape[..D - 1].iter().product();
    if rows == 0 || found == 0 {
        let product = product_of_nothing(input, outputs);
        return Ok(match bias {
            Some(bias) => product + bias.unsqueeze(),
            None => product,
        });
    }
    let input = input.reshape([rows, found]);
    let device = weight.device();
    let input = input.into_dispatch();
    let (weight, layout) = weight.clone().into_primitive();
    let output = match (product, bias) {
        (Product::Int8, bias) if is_host(&device) => {
            let product = Dispatch::fp4_int8_matmul(input, weight, layout);
            let product = Tensor::<2>::from_dispatch(product);
            let product = match bias {
                Some(bias) => product + bias.unsqueeze(),
                None => product,
            };
            return Ok(product.reshape(shape));
        }
        (Product::Fp8(facts), Some(bias)) => {
            let (rows, bias) = (facts.rows(), bias.into_dispatch());
            Dispatch::fp4_fp8_linear(input, weight, rows, bias, layout)
        }
        (Product::Fp8(facts), None) => {
            Dispatch::fp4_fp8_matmul(input, weight, facts.rows(), layout)
        }
        (_, Some(bias)) => Dispatch::fp4_linear(input, weight, bias.into_dispatch(), layout),
        (_, None) => Dispatch::fp4_matmul(input, weight, layout),
    };
    #[cfg(feature = "cube")]
    crate::devices::cube::queues::submit_operations(&device);
    Ok(Tensor::<2>::from_dispatch(output).reshape(shape))
}

/// Multiplies an input without values; the result is zeros. Burn's `reshape` cannot make a matrix
/// of such an input, as a 0 there keeps the length of an axis.
pub(crate) fn product_of_nothing<const D: usize>(input: Tensor<D>, outputs: usize) -> Tensor<D> {
    let mut shape = input.dims();
    let channels = core::mem::replace(&mut shape[D - 1], outputs);
    match channels {
        0 => Tensor::zeros(shape, (&input.device(), input.dtype())),
        // Made from the input, so that a loss has a backward pass.
        _ => input.sum_dim(D - 1).repeat_dim(D - 1, outputs),
    }
}

/// Looks up rows of a weight `[rows, cols]` at indices `[batch, length]`: `[batch, length, cols]`,
/// bit for bit Burn's [`embedding`](burn::tensor::module::embedding) of the dequantized weight.
/// Decodes only these rows. The values are not part of an autodiff graph.
///
/// ```
/// use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
/// use burn_fp4_ops::{Fp4Scheme, embedding, quantize};
///
/// let device = Device::flex();
/// let table = Tensor::<2>::from_floats([[1.4], [3.0]], &device).repeat_dim(1, 32);
/// let table = quantize(table, 1, &Fp4Scheme::mxfp4())?;
/// let indices = Tensor::<2, Int>::from_ints([[1, 0]], &device);
/// let rows = embedding(&table, indices, FloatDType::F32)?;
/// assert_eq!(rows.into_data(), TensorData::from([[[3f32; 32], [1.5; 32]]]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`Fp4Tensor::select_rows`].
pub fn embedding(
    weight: &Fp4Tensor<2>,
    indices: Tensor<2, Int>,
    dtype: FloatDType,
) -> Result<Tensor<3>, OpsError> {
    let ([batch, length], [_, cols]) = (indices.dims(), weight.dims());
    if batch * length == 0 {
        // As in `product_of_nothing`.
        weight.layout_of_rows(&indices)?;
        return Ok(Tensor::zeros([batch, length, cols], (&weight.device(), dtype.into())));
    }
    let rows = weight.select_rows(indices.reshape([batch * length]))?;
    Ok(rows.into_dense(dtype).reshape([batch, length, cols]))
}
