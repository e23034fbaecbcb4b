//! Training: products of quantized operands, their gradients, and fake quantization.

pub(crate) mod fake_quantize;
#[cfg(feature = "autodiff")]
pub(crate) mod gradient;
pub(crate) mod product;
pub(crate) mod recipe;
#[cfg(feature = "autodiff")]
pub(crate) mod saturation;
pub(crate) mod train_product;
