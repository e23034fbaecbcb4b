//! Choosing block scales and codes.
//!
//! An [`Fp4Scheme`] says how: which rule turns a block's amax into its scale ([`ScaleRule`]), how scale and
//! codes of a block are searched for ([`ScaleSearch`]), what shares a block scale ([`Blocks`]) and where the
//! tensor scale comes from ([`TensorScaling`]). Searches may know the activations that a weight meets
//! ([`Importance`]); [`Gptq`] looks beyond blocks.
//!
//! | file                    | what it holds                                                        |
//! |-------------------------|----------------------------------------------------------------------|
//! | `scheme.rs`             | [`Fp4Scheme`], and which choices go together                         |
//! | `rule.rs`               | the published rules: amax -> block scale, element -> code            |
//! | `rounding.rs`           | [`Rounding`]: to the nearest code, or at random                      |
//! | `philox.rs`             | random numbers by counting                                           |
//! | `hadamard.rs`           | [`Hadamard`]: the transform before a product is quantized            |
//! | `tensor_scale.rs`       | amax -> the pair of factors that stand for the tensor scale          |
//! | `quantize.rs`           | **the reference quantizer**: slow, plain, the oracle for every engine |
//! | `block.rs`, `point.rs`  | a block as the searches see it: elements, scales, units              |
//! | `importance.rs`         | [`Importance`]: what an error costs                                  |
//! | `gram.rs`               | [`Gram`]: what activations say about the inputs of a layer           |
//! | `tiles.rs`              | [`GramTiles`]: how that is laid out                                  |
//! | `four_over_six.rs`      | two candidate scales per block, the better one kept                  |
//! | `sse.rs`                | the best scale by squared error                                      |
//! | `hessian.rs`            | the best scale by `r^T H r`                                          |
//! | `coordinate_descent.rs` | scale and codes, improved one at a time                              |
//! | `admm.rs`               | ADMM, as published and from the best known point                     |
//! | `joint.rs`              | the best scale and codes of a block there are                        |
//! | `curvature.rs`          | [`Curvature`]: what GPTQ makes of a Gram matrix                      |
//! | `gptq.rs`               | [`Gptq`]: errors made up for across blocks                           |
//! | `best_tensor_scale.rs`  | the tensor scale as a candidate too                                  |
//! | `method.rs`             | [`Method`]: all of these by name                                     |
//! | `metrics.rs`            | [`Metrics`]: how far a quantized weight is from the original         |
//! | `modelopt.rs`           | ModelOpt's own functions, with its arithmetic                        |
//! | `host/`                 | the same bits fast: SIMD and threads, any axis, f32 / f16 / bf16     |

// The indices of loops over lanes and matrices are those of the formulas.
#![allow(clippy::needless_range_loop)]

mod admm;
mod best_tensor_scale;
mod block;
mod coordinate_descent;
mod curvature;
mod error;
mod four_over_six;
mod gptq;
mod gram;
mod hadamard;
mod hessian;
pub mod host;
mod importance;
mod joint;
mod method;
mod metrics;
pub mod modelopt;
pub mod philox;
mod point;
mod quantize;
mod rounding;
mod rule;
mod scheme;
mod sse;
mod tensor_scale;
mod tiles;

pub use best_tensor_scale::{
    check_tensor_scale, quantize_with_best_tensor_scale, tensor_scale_candidates,
};
pub use burn_fp4_formats as formats;
pub use curvature::{Curvature, Damped};
pub use error::SearchError;
pub use gptq::{BlockOrder, Gptq};
pub use gram::Gram;
pub use hadamard::Hadamard;
pub use importance::{BlockHessians, Importance};
pub use method::{Method, MethodRow};
pub use metrics::Metrics;
pub use quantize::{amax, quantize, quantize_by_importance, quantize_with_amax};
pub use rounding::{Draw, Rounding, stochastic_code};
pub use rule::{RuleRow, ScaleRule};
pub use scheme::{Blocks, E4m3Range, ErrorMetric, Fp4Scheme, NonFinite, ScaleSearch};
pub use tensor_scale::{TensorFactor, TensorScaling};
pub use tiles::GramTiles;
