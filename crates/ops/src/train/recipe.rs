//! [`TrainRecipe`]: what is quantized in the three products of a linear layer that is trained.

use burn_fp4_search::{Blocks, Draw, Fp4Scheme, Hadamard, Rounding, TensorScaling};
use serde::{Deserialize, Serialize};

use crate::error::OpsError;

/// What is quantized in the three products of a linear layer, and how. The default is NVIDIA's
/// recipe for pretraining in NVFP4 (arXiv 2509.25149; TransformerEngine's `NVFP4BlockScaling`).
///
/// With an input `x [M, K]`, a weight `w [K, N]` and the gradient `g [M, N]` of the output:
///
/// | product                | contracted | quantized along it                          |
/// |------------------------|------------|---------------------------------------------|
/// | output `x w`           | K          | activations, weights                        |
/// | gradient of x, `g w^T` | N          | gradients drawn, weights                    |
/// | gradient of w, `x^T g` | M          | activations and gradients drawn, transformed |
///
/// What is not quantized is multiplied as it is. Operands are `element x block scale`, products are
/// summed up in f32 and multiplied by both tensor scales at the end. Where blocks do not divide a
/// contracted axis, zeros are appended.
///
/// ```
/// use burn_fp4_ops::{Fp4Scheme, OpsError, TensorScaling, TrainRecipe};
///
/// let recipe = TrainRecipe::NVFP4;
/// // Of 12 layers the last is not quantized.
/// assert_eq!(recipe.for_layer(10, 12, 1), recipe);
/// assert_eq!(recipe.for_layer(11, 12, 1), TrainRecipe::HIGH_PRECISION);
/// let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
/// let refused = TrainRecipe { activations: Some(by_row), ..recipe }.validate();
/// assert!(matches!(refused, Err(OpsError::Recipe { part: "activations", .. })));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainRecipe {
    /// Weights: NVFP4 in tiles of 16 x 16, so that they mean the same forward and backward.
    pub weights: Option<Fp4Scheme>,
    /// Activations: NVFP4 in runs of 16.
    pub activations: Option<Fp4Scheme>,
    /// Gradients: NVFP4 in runs of 16.
    pub gradients: Option<Fp4Scheme>,
    /// Whether the codes of gradients are drawn at random, [`Rounding::Stochastic`].
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

    /// The recipe for one of a list of layers: [`HIGH_PRECISION`](Self::HIGH_PRECISION) for the
    /// last `keep_last`, this one for the others.
    #[must_use]
    pub const fn for_layer(self, layer: usize, layers: usize, keep_last: usize) -> Self {
        if layer + keep_last < layers { self } else { Self::HIGH_PRECISION }
    }

    /// Checks that the schemes are consistent.
    ///
    /// # Errors
    /// [`OpsError::Search`]; [`OpsError::Recipe`] naming the part that has more than one tensor
    /// scale, needs activations, or is drawn although the recipe, not the scheme, says what is.
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
            if scheme.method.needs_hessians() {
                return refuse("a search by activations is too slow for every step");
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
}
