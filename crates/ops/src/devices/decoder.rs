//! [`DecoderBackend`]: operations of a decoder, on devices with code of their own for them.

// Without any device the macro's dispatch uses none of the arguments.
#![cfg_attr(not(feature = "flex"), allow(unused_variables))]

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
use burn::tensor::{DType, Device};

/// Returns true if a device has these operations for tensors of these dtypes. A device that
/// differentiates or records has none.
pub(crate) fn has_decoder<const N: usize>(device: &Device, dtypes: [DType; N]) -> bool {
    #[cfg(feature = "flex")]
    return matches!(device.as_dispatch(), burn::backend::DispatchDevice::Flex(_))
        && dtypes == [DType::F32; N];
    #[cfg(not(feature = "flex"))]
    {
        let _ = (device, dtypes);
        false
    }
}

/// Operations of a decoder. Callers check shapes, dtypes (f32) and the device.
#[backend_extension(Flex: cfg(feature = "flex"))]
pub(crate) trait DecoderBackend: Backend {
    /// Normalizes along the last axis, with a weight of its length.
    fn decoder_rms_norm(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;

    /// Adds an update: the sums, and the normalized sums.
    fn decoder_add_rms_norm(
        hidden: FloatTensor<Self>,
        update: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Computes `silu(gate) * up`.
    fn decoder_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Rotates queries and keys, updates a KV cache at `positions` and attends: the outputs, in the
    /// shape of the queries, and the cache.
    #[allow(clippy::too_many_arguments)]
    fn decoder_attention(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        key_cache: FloatTensor<Self>,
        value_cache: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        positions: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Multiplies one row `[1, K]` by a weight `[K, N]`, row-major or transposed.
    fn decoder_gemv(input: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Multiplies `[M, K]` by the transpose of a matrix of signed bytes, `[N, K]` with a scale for
    /// each 32 of them: `[M, N]`.
    fn decoder_int8_weight_matmul(
        input: FloatTensor<Self>,
        codes: IntTensor<Self>,
        scales: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}
