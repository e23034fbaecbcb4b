//! [`TrainRecipe`]: quantization of the three products of a linear layer in training.

use burn_fp4_search::{Blocks, Draw, Fp4Scheme, Hadamard, Rounding, TensorScaling};
use serde::{Deserialize, Serialize};

use crate::error::OpsError;

/// Quantization of the three products of a linear layer in training. The default is NVIDIA's recipe
/// for pretraining in NVFP4 (arXiv 2509.25149; TransformerEngine's `NVFP4BlockScaling`).
///
/// With an input `x [M, K]`, a weight `w [K, N]` and the gradient `g [M, N]` of the output:
///
/// | product                | contracted | quantized along it                           |
/// |------------------------|------------|----------------------------------------------|
/// | output `x w`           | K          | activations, weights                         |
/// | gradient of x, `g w^T` | N          | gradients drawn, weights                     |
/// | gradient of w, `x^T g` | M          | activations and gradients drawn, transformed |
///
/// Quantized operands are `element x block scale`. Products are summed up in f32 and multiplied by
/// both tensor scales at the end. If blocks do not divide a contracted axis, zeros are appended.
///
/// ```
/// use burn_fp4_ops::{Fp4Scheme, OpsError, TensorScaling, TrainRecipe};
///
/// let recipe = TrainRecipe::NVFP4;
/// // The last of 12 layers is not quantized.
/// assert_eq!(recipe.for_layer(10, 12, 1), recipe);
/// assert_eq!(recipe.for_layer(11, 12, 1), TrainRecipe::HIGH_PRECISION);
/// let by_row = Fp4Scheme::nvfp4().with_tensor_scale(TensorScaling::Row);
/// let refused = TrainRecipe { activations: Some(by_row), ..recipe }.validate();
/// assert!(matches!(refused, Err(OpsError::Recipe { part: "activations", .. })));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainRecipe {
    /// Scheme of weights. The default is NVFP4 in tiles of 16 x 16, so that the transpose quantizes
    /// the same.
    pub weights: Option<Fp4Scheme>,
    /// Scheme of activations. The default is NVFP4 in blocks of 16.
    pub activations: Option<Fp4Scheme>,
    /// Scheme of gradients. The default is NVFP4 in blocks of 16.
    pub gradients: Option<Fp4Scheme>,
    /// Rounds gradients stochastically, [`Rounding::Stochastic`].
    pub stochastic_rounding: bool,
    /// Transform of both operands of the weight's gradient before quantization.
    pub hadamard: Option<Hadamard>,
}

impl Default for TrainRecipe {
    fn default() -> Self {
        Self::NVFP4
    }
}

impl TrainRecipe {
    /// NVIDIA's recipe.
    pub const NVFP4: Self = Self {
        weights: Some(Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16)),
        activations: Some(Fp4Scheme::nvfp4()),
        gradients: Some(Fp4Scheme::nvfp4()),
        stochastic_rounding: true,
        hadamard: Some(Hadamard::TRANSFORMER_ENGINE),
    };

    /// Quantizes nothing, as recommended for the last layers of a model.
    pub const HIGH_PRECISION: Self = Self {
        weights: None,
        activations: None,
        gradients: None,
        stochastic_rounding: false,
        hadamard: None,
    };

    /// Returns the recipe for one of a list of layers: [`HIGH_PRECISION`](Self::HIGH_PRECISION) for
    /// the last `keep_last`, this one for the others.
    #[must_use]
    pub const fn for_layer(self, layer: usize, layers: usize, keep_last: usize) -> Self {
        if layer + keep_last < layers { self } else { Self::HIGH_PRECISION }
    }

    /// Checks that the schemes are consistent.
    ///
    /// # Errors
    /// [`OpsError::Search`]; [`OpsError::Recipe`] for a part that has more than one tensor scale, a
    /// search by activations, or stochastic rounding, which the recipe sets.
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
            if scheme.hadamard.is_some() {
                return refuse(
                    "its scheme has a Hadamard transform; set `hadamard` of the recipe instead",
                );
            }
            if scheme.tensor_scale == TensorScaling::Row {
                return refuse("it has a tensor scale for each row; use one for the tensor");
            }
            if !scheme.method.is_blockwise() {
                return refuse(
                    "its method needs activations or the whole tensor, which is too slow in \
                     training; use amax, four-over-six or sse",
                );
            }
            if scheme.rounding != Rounding::Nearest {
                return refuse(
                    "its scheme rounds stochastically; set `stochastic_rounding` instead",
                );
            }
        }
        if let (true, Some(gradients)) = (self.stochastic_rounding, self.gradients) {
            gradients.with_rounding(Rounding::Stochastic(Draw::default())).validate()?;
        }
        Ok(())
    }
}
