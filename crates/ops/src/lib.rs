//! FP4 quantization of Burn tensors: one function for every Burn device.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_fp4_ops::{Fp4Scheme, quantize};
//!
//! let device = Device::flex();
//! let weight = Tensor::<2>::random([64, 128], Distribution::Normal(0.0, 0.02), &device);
//! let packed = quantize(weight, 0, &Fp4Scheme::nvfp4())?; // blocks of 16 along axis 0
//! assert_eq!(packed.codes().dims(), [128, 32]);
//! assert_eq!(packed.dequantize().dims(), [64, 128]);
//! # Ok::<(), burn_fp4_ops::OpsError>(())
//! ```
//!
//! | file            | what it holds                                                            |
//! |-----------------|--------------------------------------------------------------------------|
//! | `lib.rs`        | the names a user has; [`init`]                                           |
//! | `quantize.rs`   | [`quantize()`] and [`amax`]                                              |
//! | `matmul.rs`     | [`matmul()`] and [`embedding`]: products and lookups from the codes      |
//! | `hadamard.rs`   | [`hadamard()`]: the transform and its inverse                            |
//! | `tensor.rs`     | [`Fp4Tensor`]: codes and scales of a tensor                              |
//! | `layout.rs`     | [`Fp4Layout`]: logical shape, blocked axis and format                    |
//! | `primitive.rs`  | [`Fp4Primitive`]: codes and scales as a backend sees them                |
//! | `importance.rs` | quantization by the activations that a weight is multiplied by           |
//! | `gram.rs`       | [`GramSum`]: statistics of these activations                             |
//! | `gptq.rs`       | quantization that compensates rounding errors                            |
//! | `hessian_factor.rs` | [`HessianFactor`]: a Gram matrix factorized for GPTQ, on its device   |
//! | `squares.rs`    | [`squared_sums`]: sums of squares of values of any magnitude             |
//! | `saturated.rs`  | [`Saturated`]: the gradient of elements beyond the largest code          |
//! | `matmul_path.rs`| [`MatmulPath`]: whether a weight is multiplied straight from its codes   |
//! | `pass.rs`       | [`Pass`]: a forward pass as devices record it                            |
//! | `counts.rs`     | `FusedProducts`: how often products ran straight from the codes          |
//! | `launches.rs`   | [`Launches`]: a pass that a device has recorded, run again as one        |
//! | `rerun.rs`      | [`Rerun`]: recorded operations, one at a time                            |
//! | `untuned.rs`    | recorded products and sums by fixed, not autotuned, kernels              |
//! | `modelopt.rs`   | ModelOpt's functions on tensors                                          |
//! | `error.rs`      | [`OpsError`]: why an operation cannot be done                            |
//! | `devices/`      | [`Fp4Backend`]: what a backend has to do, and how each device does it    |
//! | `fused/`        | unmodified layers straight from the codes, on Cube devices               |
//! | `train/`        | fake quantization, and products of quantized values with their gradients |

#![warn(missing_debug_implementations)]

#[cfg(feature = "cube")]
mod counts;
mod devices;
mod error;
#[cfg(feature = "cube")]
mod fused;
mod gptq;
mod gram;
mod hadamard;
mod hessian_factor;
mod importance;
mod launches;
mod layout;
mod matmul;
mod matmul_path;
pub mod modelopt;
mod pass;
mod primitive;
mod quantize;
mod rerun;
mod saturated;
mod squares;
mod tensor;
mod train;
mod untuned;

use burn::tensor::Device;

pub use burn_fp4_search as search;
pub use burn_fp4_search::formats;
pub use burn_fp4_search::formats::Fp4Format;
pub use burn_fp4_search::{
    BlockHessians, BlockOrder, Blocks, Draw, E4m3Range, ErrorMetric, Fp4Scheme, Gptq, Gram,
    GramLayout, Hadamard, Importance, NonFinite, Rounding, ScaleRule, ScaleSearch, TensorScaling,
};
#[cfg(feature = "cube")]
pub use counts::{FusedProducts, fused_products};
pub use devices::extension::Fp4Backend;
pub use hessian_factor::HessianFactor;
// Public for the project's tests, which run it on devices that have code of their own.
#[doc(hidden)]
pub use devices::portable;
pub use devices::{is_host, repeats_values};
pub use error::OpsError;
#[doc(hidden)]
pub use error::panic_message;
pub use gptq::{quantize_family, quantize_gptq, quantize_with_hessian_factor};
pub use gram::{FetchedGram, GramSum, block_hessians, check_addable, gram};
pub use hadamard::{hadamard, inverse_hadamard};
pub use importance::{quantize_by_importance, quantize_with_best_tensor_scale};
pub use launches::{LaunchState, Launches, records_launches};
pub use layout::Fp4Layout;
pub use matmul::{embedding, linear, matmul};
pub use matmul_path::{MatmulPath, Why, matmul_path};
pub use pass::Pass;
pub use primitive::Fp4Primitive;
pub use quantize::{amax, quantize};
pub use rerun::Rerun;
pub use saturated::Saturated;
pub use squares::squared_sums;
pub use tensor::Fp4Tensor;
pub use train::fake_quantize::{
    fake_quantize, fake_quantize_for_training, fake_quantize_with_amax,
};
pub use train::recipe::TrainRecipe;
pub use train::train_product::train_product;

/// Has layers with packed weights multiply, and look rows up, straight from the codes on Cube
/// devices (CUDA, CubeCL's CPU runtime), from now on. To be called at the start of a program; to
/// call it again changes nothing, and without such devices it does nothing. [`matmul_path`] says what
/// becomes of a weight.
///
/// ```
/// use burn::tensor::Device;
/// use burn_fp4_ops::{init, multiplies_codes};
///
/// init()?;
/// init()?;
/// assert!(!multiplies_codes(&Device::flex())); // no Cube device
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// [`OpsError::Registration`] after the first operation on a Cube device: its operations are being
/// fused then, without these products.
pub fn init() -> Result<(), OpsError> {
    #[cfg(feature = "cube")]
    fused::init()?;
    Ok(())
}

/// Whether layers with packed weights on this device can multiply straight from the codes; see
/// [`init`], and [`matmul_path`] for a weight.
#[must_use]
pub fn multiplies_codes(device: &Device) -> bool {
    #[cfg(feature = "cube")]
    return fused::is_active(device);
    #[cfg(not(feature = "cube"))]
    {
        let _ = device;
        false
    }
}
