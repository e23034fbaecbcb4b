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
//! | file                | what it holds                                                       |
//! |---------------------|---------------------------------------------------------------------|
//! | `lib.rs`            | the public names; [`init`]                                          |
//! | `quantize.rs`       | [`quantize()`] and [`amax`]                                         |
//! | `matmul.rs`         | [`matmul()`], [`linear`] and [`embedding`], straight from the codes |
//! | `hadamard.rs`       | [`hadamard()`] and its inverse                                      |
//! | `decoder/`          | a decoder besides quantized products: norms, SwiGLU, attention      |
//! | `int8.rs`           | [`Int8Matrix`]: an output layer of signed bytes                     |
//! | `tensor.rs`         | [`Fp4Tensor`]: codes and scales on a device                         |
//! | `burn_data.rs`      | [`Fp4Tensor`] as data of Burn's own quantized tensors               |
//! | `fp8.rs`            | [`Fp8Weight`]: a packed weight whose products run in FP8            |
//! | `layout.rs`         | [`Fp4Layout`]: format, shape, axis; [`Fp4Primitive`]: the tensors   |
//! | `importance.rs`     | quantization for given activations                                  |
//! | `gram.rs`           | [`GramSum`]: statistics of activations                              |
//! | `gptq.rs`           | GPTQ, which compensates rounding errors                             |
//! | `hessian_factor.rs` | [`HessianFactor`]: GPTQ's factorization, and its correction         |
//! | `factorization.rs`  | [`Factorization`]: GPTQ's factorization of a Gram matrix            |
//! | `saturated.rs`      | [`Saturated`]: the gradient of elements beyond the largest code     |
//! | `matmul_path.rs`    | [`MatmulPath`]: how layers multiply by a packed weight              |
//! | `interpret.rs`      | [`Interpreter`]: recorded operations, run one at a time             |
//! | `deterministic.rs`  | recorded products and sums with fixed, not autotuned, kernels       |
//! | `modelopt.rs`       | ModelOpt's functions on tensors                                     |
//! | `error.rs`          | [`OpsError`]: errors of operations on tensors                       |
//! | `devices/`          | [`Fp4Backend`]: the operations of a backend, for each device        |
//! | `fusion/`           | fusion of unmodified layers on Cube devices                         |
//! | `train/`            | fake quantization, and products of quantized values with gradients  |

#![warn(missing_debug_implementations)]

mod burn_data;
mod decoder;
mod deterministic;
mod devices;
mod error;
mod factorization;
mod fp8;
#[cfg(feature = "cube")]
mod fusion;
mod gptq;
mod gram;
mod hadamard;
mod hessian_factor;
mod importance;
mod int8;
mod interpret;
mod layout;
mod matmul;
mod matmul_path;
pub mod modelopt;
mod quantize;
mod saturated;
mod tensor;
mod train;

use burn::tensor::Device;

pub use burn_fp4_search as search;
pub use burn_fp4_search::formats;
pub use burn_fp4_search::formats::Fp4Format;
pub use burn_fp4_search::host::{KvFormat, SampleOptions, on_awake_threads};
pub use burn_fp4_search::squares::squared_sums;
pub use burn_fp4_search::{
    Activations, Admm, BlockHessians, BlockOrder, Blocks, Draw, E4m3Range, ErrorMetric, Fp4Scheme,
    Gptq, Gram, GramLayout, Hadamard, Importance, Method, NonFinite, Rounding, ScaleRule, Sse,
    TensorScaling,
};
pub use decoder::{
    KvCache, PackedHeads, Positions, RotaryEmbedding, add_rms_norm, argmax, attention,
    dense_matmul, rms_norm, sample, swiglu,
};
#[cfg(feature = "cube")]
pub use devices::cube::graph::{CapturedGraph, GraphState, captures_graphs};
#[cfg(feature = "cube")]
pub use devices::cube::matmul::{FusedProducts, fused_products};
pub use devices::extension::{Fp4Backend, is_host, repeats_values, weight_data};
#[cfg(not(feature = "cube"))]
pub use devices::no_graph::{CapturedGraph, GraphState, captures_graphs};
// Public for the project's tests, which run it on devices with their own code.
#[doc(hidden)]
pub use devices::portable;
pub use error::OpsError;
#[doc(hidden)]
pub use error::panic_message;
pub use factorization::Factorization;
pub use fp8::{Fp8Path, Fp8Weight};
pub use gptq::{quantize_family, quantize_gptq, quantize_with_hessian_factor};
pub use gram::{FetchedGram, GramSum, block_hessians, check_addable, gram};
pub use hadamard::{hadamard, inverse_hadamard};
pub use hessian_factor::HessianFactor;
pub use importance::{quantize_by_importance, quantize_with_best_tensor_scale};
pub use int8::Int8Matrix;
pub use interpret::Interpreter;
pub use layout::{Fp4Layout, Fp4Primitive};
pub use matmul::{embedding, linear, linear_in_fp8, linear_with, matmul};
pub use matmul_path::{DequantizeReason, MatmulPath, matmul_path};
pub use quantize::{amax, quantize};
pub use saturated::Saturated;
pub use tensor::{Fp4Tensor, without_padding};
pub use train::fake_quantize::{
    fake_quantize, fake_quantize_for_training, fake_quantize_with_amax,
};
pub use train::recipe::TrainRecipe;
pub use train::train_product::train_product;

/// Enables fused FP4 products and lookups on CUDA, CubeCL's CPU runtime and GPUs of wgpu.
///
/// Call it once at startup, before the first operation on such a device. Further calls do nothing,
/// and it has no effect on other devices. Use [`matmul_path`] to see which path a weight takes.
///
/// With the feature `cuda` it also lets CubeCL keep compiled kernels on disk: where `cubecl.toml`
/// says (`environment.path`), by default in `target/environment` of a cargo project, otherwise in
/// the user's cache folder. To keep none, call `CubeClRuntimeConfig::set` of CubeCL before.
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
/// [`OpsError::Registration`] after the first operation on a Cube device, which is too late to add
/// a fuser.
pub fn init() -> Result<(), OpsError> {
    #[cfg(feature = "cube")]
    fusion::init()?;
    Ok(())
}

/// Enables fused products as [`init`] does, and tests the driver of a device of wgpu without
/// blocking.
///
/// Elsewhere the first product tests the driver. A browser cannot wait for the results, so a
/// program in WebAssembly awaits this first, after Burn's `Device::wgpu_options().init_async()`.
///
/// ```
/// use burn::tensor::Device;
/// use burn_fp4_ops::init_async;
///
/// # fn wait<F: Future<Output = Result<(), burn_fp4_ops::OpsError>>>(future: F) -> F::Output {
/// #     burn::tensor::read_sync(future)
/// # }
/// let device = Device::flex(); // in a browser `Device::wgpu_options().init_async().await?`
/// let program = async { init_async(&device).await };
/// # wait(program)?;
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
///
/// # Errors
/// As [`init`]. [`OpsError::Device`] if the driver's results differ from the host's: tensor
/// operations and the CPU then do the work, which in a browser panics.
pub async fn init_async(device: &Device) -> Result<(), OpsError> {
    init()?;
    #[cfg(feature = "cube")]
    devices::cube::device::test_driver(device)
        .await
        .map_err(|refusal| OpsError::Device(refusal.to_string()))?;
    #[cfg(not(feature = "cube"))]
    let _ = device;
    Ok(())
}

/// Returns true if layers with packed weights on this device can multiply straight from the codes.
/// See [`init`], and [`matmul_path`] for a single weight.
#[must_use]
pub fn multiplies_codes(device: &Device) -> bool {
    #[cfg(feature = "cube")]
    return fusion::is_active(device);
    #[cfg(not(feature = "cube"))]
    {
        let _ = device;
        false
    }
}
