//! The bits of the reference quantizer from tensor operations, for devices without code of their
//! own. Tests compare it with the others.
//!
//! It uses only comparisons, selections and single-rounded f32 arithmetic, so every backend with
//! IEEE f32 arithmetic gets every bit right. It needs several times the memory of the input.
//! Searches with fused multiply-adds, from [`Method::Sse`](crate::Method::Sse) on, and
//! stochastic rounding read the values back and run on the host.

pub(crate) mod bias;
mod bits;
mod block_scale;
mod composed;
pub(crate) mod dequantize;
mod element;
mod floats;
mod four_over_six;
pub(crate) mod fp8_heads;
pub(crate) mod gram;
pub(crate) mod hadamard;
pub(crate) mod on_host;
pub(crate) mod quantize;
mod scale_grid;
mod tensor_scale;
mod tiles;

pub use composed::{add_gram, dequantize_transformed, matmul, squared_error, transformed_input};
pub use dequantize::{dequantize, select_rows};
pub use hadamard::hadamard;
pub use on_host::{quantize_by_importance, quantize_gptq, quantize_on_host};
pub use quantize::{amax, fake_quantize, quantize};
