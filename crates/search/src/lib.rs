//! Choosing block scales and codes.
//!
//! An [`Fp4Scheme`] holds the choices: the rule that turns a block's amax into its scale
//! ([`ScaleRule`]), the search for scale and codes of a block ([`Method`]), the elements that
//! share a block scale ([`Blocks`]) and the source of the tensor scale ([`TensorScaling`]).
//! Searches may use statistics of the activations that a weight is multiplied by ([`Importance`]).
//! [`Gptq`] optimizes across blocks.
//!
//! | file                   | what it holds                                                    |
//! |------------------------|------------------------------------------------------------------|
//! | `scheme.rs`            | [`Fp4Scheme`]: the choices for a tensor; [`TensorScaling`]       |
//! | `rule.rs`              | [`ScaleRule`]: the published rules; [`TensorFactor`]             |
//! | `method.rs`            | [`Method`], and the table of methods with names                  |
//! | `activations.rs`       | [`Activations`]: the input of a product with a packed weight     |
//! | `fp8.rs`               | products in FP8: weights, [`fp8_rows`], and inputs               |
//! | `names.rs`             | parsing and printing of the names in these rows                  |
//! | `scale_grid.rs`        | the block scales of a format                                     |
//! | `rounding.rs`          | [`Rounding`]: to the nearest code, or at random                  |
//! | `philox.rs`            | counter-based random numbers                                     |
//! | `hadamard.rs`          | [`Hadamard`]: the transform before a product is quantized        |
//! | `tile_reduce.rs`       | the sum over the rows of a tile                                  |
//! | `reference/`           | **the reference quantizer**: slow and plain, the oracle          |
//! | `host/`                | the same bits fast: SIMD and threads, any axis, f32 / f16 / bf16 |
//! | `importance.rs`        | [`Importance`]: the cost of an error                             |
//! | `gram.rs`              | [`Gram`]: `X^T X` of the inputs of a layer                       |
//! | `gram_layout.rs`       | [`GramLayout`]: its tiles in memory                              |
//! | `gptq.rs`              | [`Gptq`]: the options of GPTQ                                    |
//! | `matrix.rs`            | products and triangular factors of dense matrices                |
//! | `hessian_factor.rs`    | [`HessianFactor`]: a Gram matrix factorized for GPTQ             |
//! | `best_tensor_scale.rs` | the search for a tensor scale                                    |
//! | `quantize_weight.rs`   | quantization of a weight with a [`Method`] and [`Statistics`]    |
//! | `metrics.rs`           | [`Metrics`]: the error of a quantized weight                     |
//! | `squares.rs`           | sums of squares of values of any magnitude                       |
//! | `modelopt.rs`          | ModelOpt's own functions, with its arithmetic                    |
//! | `error.rs`             | [`SearchError`]                                                  |

#![warn(missing_debug_implementations)]
// Loops over lanes and matrices use the indices of the formulas.
#![allow(clippy::needless_range_loop)]

mod activations;
mod best_tensor_scale;
mod error;
mod fp8;
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
mod reference;
mod rounding;
mod rule;
pub mod scale_grid;
mod scheme;
pub mod squares;
mod tile_reduce;

pub use activations::Activations;
pub use best_tensor_scale::{quantize_with_best_tensor_scale, tensor_scale_candidates};
pub use burn_fp4_formats as formats;
pub use error::SearchError;
pub use fp8::{fp8_rounding_error, fp8_rows, fp8_values, round_to_fp8};
pub use gptq::{BlockOrder, Gptq};
pub use gram::Gram;
pub use gram_layout::GramLayout;
pub use hadamard::Hadamard;
pub use hessian_factor::{DampedHessian, HessianFactor};
pub use importance::{BlockHessians, Importance};
pub use method::{Admm, E4m3Range, ErrorMetric, Method, MethodRow, Needs, Sse};
pub use metrics::{Metrics, squared_output_error};
pub use quantize_weight::Statistics;
pub use reference::{amax, quantize, quantize_by_importance, quantize_with_amax};
pub use rounding::{Draw, Rounding, stochastic_code};
pub use rule::{Normalization, RuleRow, ScaleForm, ScaleRule, TensorFactor};
pub use scale_grid::PowerRounding;
pub use scheme::{Blocks, Fp4Scheme, NonFinite, TensorScaling};
