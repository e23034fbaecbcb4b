//! Gradients of a product of quantized operands, which are products of quantized operands too.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn_fp4_search::{Draw, Fp4Scheme, Rounding};

use super::product::{Factor, Quantizer, pad, product};
use super::recipe::TrainRecipe;
use crate::devices::extension::Fp4Backend;

/// Streams of random numbers for the gradient on its way to the input, and to the weight.
const TO_INPUT: u64 = 0;
const TO_WEIGHT: u64 = 1;

/// Returns the scheme of gradients, with stochastic rounding if the recipe says so.
fn gradients(recipe: &TrainRecipe, draw: Draw) -> Option<Fp4Scheme> {
    let rounding = match recipe.stochastic_rounding {
        true => Rounding::Stochastic(draw),
        false => Rounding::Nearest,
    };
    recipe.gradients.map(|scheme| scheme.with_rounding(rounding))
}

fn operand<B: Fp4Backend>(
    values: FloatTensor<B>,
    axis: usize,
    scheme: Option<Fp4Scheme>,
) -> Factor<B> {
    let quantizer = Quantizer { amax: B::fp4_amax, fake_quantize: B::fp4_fake_quantize };
    Factor::new(values, axis, scheme, &quantizer)
}

fn transposed<B: Fp4Backend>(factor: Factor<B>) -> Factor<B> {
    Factor { values: B::float_swap_dims(factor.values, 0, 1), ..factor }
}

/// Computes `g w^T`.
pub(crate) fn input_gradient<B: Fp4Backend>(
    grad: FloatTensor<B>,
    weight: FloatTensor<B>,
    recipe: &TrainRecipe,
    draw: Draw,
) -> FloatTensor<B> {
    let dtype = grad.dtype();
    let grad = operand::<B>(grad, 1, gradients(recipe, draw.stream(TO_INPUT)));
    product(grad, transposed(operand::<B>(weight, 1, recipe.weights)), dtype)
}

/// Computes `x^T g`.
pub(crate) fn weight_gradient<B: Fp4Backend>(
    grad: FloatTensor<B>,
    input: FloatTensor<B>,
    recipe: &TrainRecipe,
    draw: Draw,
) -> FloatTensor<B> {
    let dtype = grad.dtype();
    let gradients = gradients(recipe, draw.stream(TO_WEIGHT));
    // If neither operand is quantized, the transform would only add rounding errors.
    let quantizes = recipe.activations.is_some() || gradients.is_some();
    let transform = |values: FloatTensor<B>| match recipe.hadamard {
        Some(hadamard) if quantizes => {
            B::fp4_hadamard(pad::<B>(values, 0, hadamard.size()), 0, hadamard, false)
        }
        _ => values,
    };
    let input = operand::<B>(transform(input), 0, recipe.activations);
    product(transposed(input), operand::<B>(transform(grad), 0, gradients), dtype)
}
