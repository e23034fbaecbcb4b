//! [`train_product`]: the product of a layer in training.

use burn::backend::Dispatch;
use burn::tensor::Tensor;
use burn_fp4_search::Draw;

use super::recipe::TrainRecipe;
use crate::devices::extension::Fp4Backend;
use crate::error::OpsError;
use crate::layout::{check_dtype, check_len};
use crate::matmul::product_of_nothing;

/// Multiplies an input `[.., K]` by a weight `[K, N]`, with operands quantized by a
/// [`TrainRecipe`]. On an autodiff device it also quantizes the operands of both gradients.
///
/// The draw seeds the stochastic rounding of gradients. Use another one for each layer and step.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::{Draw, Fp4Scheme, TrainRecipe, train_product};
///
/// let device = Device::flex().autodiff();
/// let input = Tensor::<2>::ones([1, 32], &device).require_grad();
/// let weight = Tensor::<2>::full([32, 1], 1.4, &device); // 1.5, both ways
/// let recipe = TrainRecipe { weights: Some(Fp4Scheme::mxfp4()), ..TrainRecipe::HIGH_PRECISION };
/// let output = train_product(input.clone(), weight, &recipe, Draw::default())?;
/// let gradients = output.backward();
/// assert_eq!(output.into_data(), TensorData::from([[32.0 * 1.5f32]]));
/// assert_eq!(input.grad(&gradients).unwrap().into_data(), TensorData::from([[1.5f32; 32]]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// [`OpsError::Recipe`] or [`OpsError::Search`] for an inconsistent recipe,
/// [`OpsError::Contraction`] if K differs, [`OpsError::DType`] unless f32, f16 or bf16,
/// [`OpsError::Operands`] if their dtypes differ, [`OpsError::TooLarge`] as
/// [`quantize`](crate::quantize).
pub fn train_product<const D: usize>(
    input: Tensor<D>,
    weight: Tensor<2>,
    recipe: &TrainRecipe,
    draw: Draw,
) -> Result<Tensor<D>, OpsError> {
    recipe.validate()?;
    let mut shape = input.dims();
    let [channels, outputs] = weight.dims();
    let found = shape[D - 1];
    if found != channels {
        return Err(OpsError::Contraction { input: found, weight: channels, axis: 0 });
    }
    check_dtype(&input)?;
    if weight.dtype() != input.dtype() {
        let (expected, found) = (input.dtype(), weight.dtype());
        return Err(OpsError::Operands { what: "weight", expected, found });
    }
    let rows = shape[..D - 1].iter().product();
    shape[D - 1] = outputs;
    for shape in [[rows, channels], [channels, outputs], [rows, outputs]] {
        // Operands are padded to whole blocks.
        check_len(&shape.map(|dim: usize| dim.next_multiple_of(32)))?;
    }
    if rows == 0 || channels == 0 {
        return Ok(product_of_nothing(input, outputs));
    }
    let input = input.reshape([rows, channels]).into_dispatch();
    let product = Dispatch::fp4_train_product(input, weight.into_dispatch(), *recipe, draw);
    Ok(Tensor::<2>::from_dispatch(product).reshape(shape))
}
