//! Choosing block scales and codes.
//!
//! An [`Fp4Scheme`] says how: which rule turns a block's amax into its scale ([`ScaleRule`]), how
//! scale and codes of a block are searched for ([`ScaleSearch`]), what shares a block scale
//! ([`Blocks`]) and where the tensor scale comes from ([`TensorScaling`]). Searches may use
//! statistics of the activations that a weight is multiplied by ([`Importance`]); [`Gptq`]
//! optimizes across blocks.
//!
//! | file                    | what it holds                                                      |
//! |-------------------------|--------------------------------------------------------------------|
//! | `scheme.rs`             | [`Fp4Scheme`], which choices go together, its tensor factors       |
//! | `rule.rs`               | the published rules: amax -> block scale, element -> code          |
//! | `method.rs`             | [`Method`], [`ChosenBy`], [`ScaleSearch`]: a row for every method  |
//! | `names.rs`              | all of these by name                                               |
//! | `scale_grid.rs`         | the block scales that a format has                                 |
//! | `e2m1.rs`               | rounding to elements, in a few operations on bits                  |
//! | `rounding.rs`           | [`Rounding`]: to the nearest code, or at random                    |
//! | `philox.rs`             | counter-based random numbers                                       |
//! | `hadamard.rs`           | [`Hadamard`]: the transform before a product is quantized          |
//! | `tensor_scale.rs`       | [`TensorScaling`], and the pair of factors of a tensor scale       |
//! | `tile_reduce.rs`        | in which order the rows of a tile are added up                     |
//! | `reference/`            | **the reference quantizer**: slow and plain, the oracle            |
//! | `host/`                 | the same bits fast: SIMD and threads, any axis, f32 / f16 / bf16   |
//! | `importance.rs`         | [`Importance`]: what an error costs                                |
//! | `gram.rs`               | [`Gram`]: `X^T X` of the inputs of a layer                         |
//! | `gram_layout.rs`        | [`GramLayout`]: how that is laid out                                |
//! | `gptq.rs`               | [`Gptq`]: the options of GPTQ                                      |
//! | `matrix.rs`             | products and triangular factors of dense matrices                  |
//! | `hessian_factor.rs`          | [`HessianFactor`]: what GPTQ needs of a Gram matrix                    |
//! | `best_tensor_scale.rs`  | the tensor scale as a candidate too                                |
//! | `quantize_weight.rs`    | a weight quantized by a [`Method`], with [`Statistics`]            |
//! | `metrics.rs`            | [`Metrics`]: how far a quantized weight is from the original       |
//! | `modelopt.rs`           | ModelOpt's own functions, with its arithmetic                      |
//! | `recipe.rs`             | [`Recipe`]: what is chosen for the weights of a model, as TOML     |
//! | `error.rs`              | [`SearchError`], [`RecipeError`]                                   |

// The indices of loops over lanes and matrices are those of the formulas.
#![allow(clippy::needless_range_loop)]

#[macro_use]
mod rows;

mod best_tensor_scale;
mod e2m1;
mod error;
mod gptq;
mod gram;
mod gram_layout;
mod hadamard;
mod hessian_factor;
pub mod host;
mod importance;
mod matrix;
mod method;
mod metrics;
pub mod modelopt;
mod names;
pub mod philox;
mod quantize_weight;
mod recipe;
mod reference;
mod rounding;
mod rule;
pub mod scale_grid;
mod scheme;
mod tensor_scale;
mod tile_reduce;

pub use best_tensor_scale::{
    check_tensor_scale, quantize_with_best_tensor_scale, tensor_scale_candidates,
};
pub use burn_fp4_formats as formats;
pub use error::{RecipeError, SearchError};
pub use gptq::{BlockOrder, Gptq};
pub use gram::Gram;
pub use gram_layout::GramLayout;
pub use hadamard::Hadamard;
pub use hessian_factor::{DampedHessian, HessianFactor};
pub use importance::{BlockHessians, Importance};
pub use method::{ChosenBy, E4m3Range, ErrorMetric, Method, MethodRow, Needs, ScaleSearch};
pub use metrics::{Metrics, squared_output_error};
pub use quantize_weight::Statistics;
pub use recipe::{Recipe, RecipeFormat, RecipeScheme, RecipeWeights};
pub use reference::{amax, quantize, quantize_by_importance, quantize_with_amax};
pub use rounding::{Draw, Rounding, stochastic_code};
pub use rule::{Normalization, RuleRow, ScaleForm, ScaleRule};
pub use scale_grid::PowerRounding;
pub use scheme::{Blocks, Fp4Scheme, NonFinite};
pub use tensor_scale::{TensorFactor, TensorScaling};
