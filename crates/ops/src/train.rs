//! Products for training: forward, and the gradients of both operands, each of quantized values.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape};
use burn_fp4_search::host::Restore;
use burn_fp4_search::{Blocks, Draw, Fp4Scheme, Hadamard, Rounding, TensorScaling};
use serde::{Deserialize, Serialize};

use crate::{Fp4Backend, OpsError, Saturated};

/// What is quantized in the three products of a linear layer, and how. The default is NVIDIA's recipe for
/// pretraining in NVFP4 (arXiv 2509.25149; TransformerEngine's `NVFP4BlockScaling`).
///
/// With an input `x [M, K]`, a weight `w [K, N]` and the gradient `g [M, N]` of the output:
///
/// | product                | contracted | quantized along it                          |
/// |------------------------|------------|---------------------------------------------|
/// | output `x w`           | K          | activations, weights                        |
/// | gradient of x, `g w^T` | N          | gradients drawn, weights                    |
/// | gradient of w, `x^T g` | M          | activations and gradients drawn, transformed |
///
/// What is not quantized is multiplied as it is. Factors are `element x block scale`, products are summed up in
/// f32 and multiplied with both tensor scales at the end. Where blocks do not divide a contracted axis, zeros
/// are appended.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainRecipe {
    /// Weights: NVFP4 in tiles of 16 x 16, so that they mean the same forward and backward.
    pub weights: Option<Fp4Scheme>,
    /// Activations: NVFP4 in runs of 16.
    pub activations: Option<Fp4Scheme>,
    /// Gradients: NVFP4 in runs of 16.
    pub gradients: Option<Fp4Scheme>,
    /// Whether the codes of gradients are drawn, [`Rounding::Stochastic`].
    pub stochastic_rounding: bool,
    /// How both operands of the weight's gradient are transformed before they are quantized.
    pub hadamard: Option<Hadamard>,
}

impl Default for TrainRecipe {
    fn default() -> Self {
        Self::NVFP4
    }
}

impl TrainRecipe {
    /// NVIDIA's.
    pub const NVFP4: Self = Self {
        weights: Some(Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16)),
        activations: Some(Fp4Scheme::nvfp4()),
        gradients: Some(Fp4Scheme::nvfp4()),
        stochastic_rounding: true,
        hadamard: Some(Hadamard::TRANSFORMER_ENGINE),
    };

    /// Nothing quantized, as the last layers of a model should be.
    pub const HIGH_PRECISION: Self = Self {
        weights: None,
        activations: None,
        gradients: None,
        stochastic_rounding: false,
        hadamard: None,
    };

    /// The recipe for one of a list of layers: [`HIGH_PRECISION`](Self::HIGH_PRECISION) for the last
    /// `keep_last`, this one for the others.
    pub const fn for_layer(self, layer: usize, layers: usize, keep_last: usize) -> Self {
        if layer + keep_last < layers { self } else { Self::HIGH_PRECISION }
    }

    /// Checks that the schemes are consistent.
    ///
    /// # Errors
    /// [`OpsError::Search`]; [`OpsError::Recipe`] naming the part that has more than one tensor scale, needs
    /// activations, or is drawn although the recipe, not the scheme, says what is.
    pub fn validate(&self) -> Result<(), OpsError> {
        let parts = [
            ("weights", self.weights),
            ("activations", self.activations),
            ("gradients", self.gradients),
        ];
        for (part, scheme) in parts {
            let Some(scheme) = scheme else { continue };
            scheme.validate()?;
            let refuse = |reason| Err(OpsError::Recipe { part, reason });
            if scheme.tensor_scale == TensorScaling::Row {
                return refuse("a product has one tensor scale for each operand");
            }
            if scheme.search.needs_hessians() {
                return refuse("there is no time to look at activations");
            }
            if scheme.rounding != Rounding::Nearest {
                return refuse("`stochastic_rounding` says what is drawn");
            }
        }
        if let (true, Some(gradients)) = (self.stochastic_rounding, self.gradients) {
            gradients.with_rounding(Rounding::Stochastic(Draw::default())).validate()?;
        }
        Ok(())
    }

    fn gradients(&self, draw: Draw) -> Option<Fp4Scheme> {
        let rounding = match self.stochastic_rounding {
            true => Rounding::Stochastic(draw),
            false => Rounding::Nearest,
        };
        self.gradients.map(|scheme| scheme.with_rounding(rounding))
    }
}

/// Which numbers are drawn for a gradient on its way to the input, and to the weight.
const TO_INPUT: u64 = 0;
const TO_WEIGHT: u64 = 1;

/// `x w`.
pub(crate) fn forward<B: Fp4Backend>(
    input: FloatTensor<B>,
    weight: FloatTensor<B>,
    recipe: &TrainRecipe,
) -> FloatTensor<B> {
    let dtype = input.dtype();
    let input = Factor::<B>::new(input, 1, recipe.activations);
    product(input, Factor::<B>::new(weight, 0, recipe.weights), dtype)
}

/// `g w^T`.
pub(crate) fn input_gradient<B: Fp4Backend>(
    grad: FloatTensor<B>,
    weight: FloatTensor<B>,
    recipe: &TrainRecipe,
    draw: Draw,
) -> FloatTensor<B> {
    let dtype = grad.dtype();
    let grad = Factor::<B>::new(grad, 1, recipe.gradients(draw.stream(TO_INPUT)));
    product(grad, Factor::<B>::new(weight, 1, recipe.weights).transposed(), dtype)
}

/// `x^T g`.
pub(crate) fn weight_gradient<B: Fp4Backend>(
    grad: FloatTensor<B>,
    input: FloatTensor<B>,
    recipe: &TrainRecipe,
    draw: Draw,
) -> FloatTensor<B> {
    let dtype = grad.dtype();
    let gradients = recipe.gradients(draw.stream(TO_WEIGHT));
    // Of matrices that are multiplied as they are, the product would be the same but for rounding.
    let quantizes = recipe.activations.is_some() || gradients.is_some();
    let transform = |values: FloatTensor<B>| match recipe.hadamard {
        Some(hadamard) if quantizes => {
            B::fp4_hadamard(pad::<B>(values, 0, Hadamard::SIZE), 0, hadamard, false)
        }
        _ => values,
    };
    let input = Factor::<B>::new(transform(input), 0, recipe.activations);
    product(input.transposed(), Factor::<B>::new(transform(grad), 0, gradients), dtype)
}

/// An operand of a product.
struct Factor<B: Fp4Backend> {
    /// In f32; if quantized, `element x block scale`.
    values: FloatTensor<B>,
    /// Numerator, f32 `[1]`, and denominator of what the product is to be multiplied with.
    tensor_scale: Option<(FloatTensor<B>, f32)>,
    /// Along the contracted axis there are a multiple of it.
    block_size: usize,
}

impl<B: Fp4Backend> Factor<B> {
    fn new(values: FloatTensor<B>, axis: usize, scheme: Option<Fp4Scheme>) -> Self {
        let f32 = |values| B::float_cast(values, FloatDType::F32);
        let Some(scheme) = scheme else {
            return Self { values: f32(values), tensor_scale: None, block_size: 1 };
        };
        // f16 has no room for the scales of MXFP4.
        let values = if values.dtype() == DType::F16 { f32(values) } else { values };
        let device = values.device();
        let one =
            |value: f32| B::float_full(Shape::new([1]), value.into(), &device, FloatDType::F32);
        let (amax, tensor_scale) = match scheme.tensor_scale {
            _ if !scheme.rule.row().tensor_scale => (one(1.0), None),
            TensorScaling::Multiplier(scale) => (one(1.0), Some((one(scale), 1.0))),
            given => {
                let amax = match given {
                    TensorScaling::Amax(amax) => one(amax),
                    _ => B::fp4_amax(values.clone(), axis, false),
                };
                (amax.clone(), Some((amax, scheme.largest_code_product())))
            }
        };
        let values = pad::<B>(values, axis, scheme.block_size);
        let (restore, saturated) = (Restore::BlockScaled, Saturated::PassThrough);
        let values = B::fp4_fake_quantize(values, amax, axis, scheme, restore, saturated);
        Self { values: f32(values), tensor_scale, block_size: scheme.block_size }
    }

    fn transposed(self) -> Self {
        Self { values: B::float_swap_dims(self.values, 0, 1), ..self }
    }
}

/// `[M, K]` times `[K, N]`, rounded once to a dtype.
fn product<B: Fp4Backend>(left: Factor<B>, right: Factor<B>, dtype: DType) -> FloatTensor<B> {
    let block_size = left.block_size.max(right.block_size);
    let (left_values, right_values) =
        (pad::<B>(left.values, 1, block_size), pad::<B>(right.values, 0, block_size));
    let mut output = B::float_matmul(left_values, right_values);
    let scale = match (left.tensor_scale, right.tensor_scale) {
        (Some((a, m)), Some((b, n))) => Some((B::float_mul(a, b), m * n)),
        (one, other) => one.or(other),
    };
    if let Some((numerator, denominator)) = scale {
        let scale = B::float_div_scalar(numerator, denominator.into());
        output = B::float_mul(output, B::float_reshape(scale, Shape::new([1, 1])));
    }
    B::float_cast(output, dtype.into())
}

/// Appends zeros to an axis of a matrix until its length is a multiple.
fn pad<B: Backend>(values: FloatTensor<B>, axis: usize, multiple: usize) -> FloatTensor<B> {
    let mut shape = values.shape();
    let missing = shape[axis].next_multiple_of(multiple) - shape[axis];
    if missing == 0 {
        return values;
    }
    shape[axis] = missing;
    let zeros = B::float_zeros(shape, &values.device(), values.dtype().into());
    B::float_cat(vec![values, zeros], axis)
}
