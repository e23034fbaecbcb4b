//! [`DecoderBackend`] and [`HostDecoderBackend`]: operations of a decoder, on devices with code of
//! their own for them.

// Without any device the macro's dispatch uses none of the arguments.
#![cfg_attr(not(any(feature = "flex", feature = "cube")), allow(unused_imports, unused_variables))]

#[cfg(feature = "cube")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, DispatchDevice, backend_extension};
#[cfg(feature = "cube")]
use burn::tensor::Shape;
#[cfg(feature = "cube")]
use burn::tensor::Tensor;
use burn::tensor::{DType, Device};
#[cfg(feature = "cube")]
use burn_fp4_cubecl::{
    Capability, MAX_DENSE_GEMV_ROWS, MAX_INT8_GEMV_ROWS, check_attention, check_flash_attention,
    check_prefill,
};
use burn_fp4_search::host::{AttentionShape, KvFormat, MAX_HEAD_DIM};
#[cfg(feature = "cube")]
use burn_fp4_search::host::{SampleOptions, View};

#[cfg(feature = "cube")]
use super::cube::device::{cube_device, decoder_capability, has_kernels, kernel_dtype};

/// Code of a device for these operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DecoderCode {
    /// Functions on host memory: every operation.
    #[cfg(feature = "flex")]
    Host,
    /// Kernels, by [`DecoderBackend`].
    #[cfg(feature = "cube")]
    Kernels,
}

/// Returns a device's code for tensors of these dtypes: f32 on hosts, one float dtype in kernels. A
/// device that differentiates or records has none.
pub(crate) fn decoder_code<const N: usize>(
    device: &Device,
    dtypes: [DType; N],
) -> Option<DecoderCode> {
    match device.as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) if dtypes == [DType::F32; N] => Some(DecoderCode::Host),
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => {
            let kernels = is_one_float(dtypes) && {
                has_kernels(device)
                    || decoder_capability(device, &device.client(), dtypes[0]).is_some()
            };
            kernels.then_some(DecoderCode::Kernels)
        }
        #[allow(unreachable_patterns)]
        _ => {
            let _ = dtypes;
            None
        }
    }
}

/// Returns true if these are one float dtype that engines read.
#[cfg(any(feature = "flex", feature = "cube"))]
fn is_one_float<const N: usize>(dtypes: [DType; N]) -> bool {
    matches!(dtypes[0], DType::F32 | DType::F16 | DType::BF16) && dtypes == [dtypes[0]; N]
}

/// Returns true if the GEMVs of a device with kernels read memory in order: its planes have one
/// size, or it is CubeCL's CPU runtime.
#[cfg(feature = "cube")]
fn has_gemv(device: &Device, dtype: DType) -> bool {
    cube_device(device).is_some_and(|device| {
        if has_kernels(&device) {
            return true;
        }
        let capability = decoder_capability(&device, &device.client(), dtype);
        capability.is_some_and(|found| found.plane > 1)
    })
}

/// Returns true if one operation of a device multiplies rows of a dtype by an `[n, k]` matrix of
/// signed bytes.
#[cfg_attr(not(feature = "cube"), allow(unused_variables))]
pub(crate) fn multiplies_int8(
    device: &Device,
    dtype: DType,
    rows: usize,
    [n, k]: [usize; 2],
) -> bool {
    match decoder_code(device, [dtype]) {
        #[cfg(feature = "cube")]
        Some(DecoderCode::Kernels) => {
            rows <= MAX_INT8_GEMV_ROWS
                && n.max(rows).saturating_mul(k) <= View::MAX_LEN
                && has_gemv(device, dtype)
        }
        code => code.is_some(),
    }
}

/// Returns true if a device has the operations of [`HostDecoderBackend`] for tensors of these
/// dtypes.
pub(crate) fn has_host_decoder<const N: usize>(device: &Device, dtypes: [DType; N]) -> bool {
    #[cfg(feature = "flex")]
    return decoder_code(device, dtypes) == Some(DecoderCode::Host);
    #[cfg(not(feature = "flex"))]
    {
        let _ = (device, dtypes);
        false
    }
}

/// Returns true if a norm or SwiGLU of `len` values of these dtypes is one operation of a device.
#[cfg_attr(not(feature = "cube"), allow(unused_variables))]
pub(crate) fn is_one_operation<const N: usize>(
    device: &Device,
    dtypes: [DType; N],
    len: usize,
) -> bool {
    match decoder_code(device, dtypes) {
        #[cfg(feature = "cube")]
        Some(DecoderCode::Kernels) => len <= View::MAX_LEN,
        code => code.is_some(),
    }
}

/// Returns true if one operation of a device multiplies these many rows by a dense weight, in
/// tensors of these dtypes.
pub(crate) fn multiplies_rows(device: &Device, dtypes: [DType; 2], rows: usize) -> bool {
    #[cfg(feature = "flex")]
    if matches!(device.as_dispatch(), DispatchDevice::Flex(_)) {
        return rows == 1 && is_one_float(dtypes);
    }
    match decoder_code(device, dtypes) {
        #[cfg(feature = "cube")]
        Some(DecoderCode::Kernels) => rows <= MAX_DENSE_GEMV_ROWS && has_gemv(device, dtypes[0]),
        _ => false,
    }
}

/// Returns true if one operation of a device chooses tokens by these logits.
#[cfg(feature = "cube")]
pub(crate) fn samples(logits: &Tensor<2>) -> bool {
    let [rows, vocab_size] = logits.dims();
    decoder_code(&logits.device(), [logits.dtype()]) == Some(DecoderCode::Kernels)
        && rows * vocab_size <= View::MAX_LEN
}

/// Returns true if one operation of a device attends to a KV cache of a shape and a format, with
/// rotations of `positions` positions, in tensors of these dtypes.
#[cfg_attr(not(feature = "cube"), allow(unused_variables))]
pub(crate) fn attends_to<const N: usize>(
    device: &Device,
    dtypes: [DType; N],
    shape: &AttentionShape,
    positions: usize,
    format: Option<KvFormat>,
) -> bool {
    match decoder_code(device, dtypes) {
        #[cfg(feature = "cube")]
        Some(DecoderCode::Kernels) => {
            let capability = || {
                let device = cube_device(device)?;
                decoder_capability(&device, &device.client(), dtypes[0])
            };
            let packs = || capability().is_some_and(|found| found.check_packed_kv().is_ok());
            let flash = |found: Capability| {
                let dtype = kernel_dtype(dtypes[0]);
                check_flash_attention(&found, shape, positions, dtype).is_ok()
            };
            let fits = match shape.tokens {
                1 => check_attention(shape, positions).is_ok(),
                // Flash attention stores no scores, so their number has no limit.
                _ => check_prefill(shape, positions).is_ok() || capability().is_some_and(flash),
            };
            (format.is_none() || packs()) && fits
        }
        code => {
            let has_positions = shape.capacity > 0 && positions > 0;
            code.is_some() && has_positions && shape.head_dim <= MAX_HEAD_DIM
        }
    }
}

/// Operations of a decoder on hosts and in kernels. Callers check shapes, dtypes and the device.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cube"),
    Fusion: cfg(feature = "cube")
)]
pub(crate) trait DecoderBackend: Backend {
    /// Normalizes along the last axis, with a weight of its length.
    #[fusion(dtype = input, shape = input)]
    fn decoder_rms_norm(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;

    /// Adds an update: the sums, and the normalized sums.
    #[fusion(meta = |hidden, _update, _weight, _epsilon| (hidden.clone(), hidden.clone()))]
    fn decoder_add_rms_norm(
        hidden: FloatTensor<Self>,
        update: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Computes `silu(gate) * up`.
    #[fusion(dtype = gate, shape = gate)]
    fn decoder_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Multiplies few rows `[M, K]` by a weight `[K, N]`, row-major or transposed, in one dtype: on
    /// hosts one row, in 16 bits too.
    #[fusion(dtype = input, shape = Shape::new([input[0], weight[1]]))]
    fn decoder_gemv(input: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Multiplies `[M, K]` by the transpose of a matrix of signed bytes, `[N, K]` with a scale for
    /// each 32 of them: `[M, N]`.
    #[fusion(dtype = input, shape = Shape::new([input[0], codes[0]]))]
    fn decoder_int8_weight_matmul(
        input: FloatTensor<Self>,
        codes: IntTensor<Self>,
        scales: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Rotates queries and keys, updates a KV cache at `positions` and attends: the outputs, in the
    /// shape of the queries, and the cache.
    #[allow(clippy::too_many_arguments)]
    #[fusion(meta = attention_metadata)]
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

    /// Computes [`decoder_attention`](Self::decoder_attention) with a packed cache: the outputs,
    /// and the codes and scales of keys and of values.
    #[allow(clippy::too_many_arguments, clippy::type_complexity)]
    #[fusion(meta = packed_attention_metadata)]
    fn decoder_packed_attention(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        key_codes: IntTensor<Self>,
        key_scales: IntTensor<Self>,
        value_codes: IntTensor<Self>,
        value_scales: IntTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        positions: IntTensor<Self>,
        format: KvFormat,
    ) -> (FloatTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>, IntTensor<Self>);
}

/// Chooses tokens in kernels. Callers check shapes, the dtype and the device.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Fusion)]
pub(crate) trait SampleBackend: Backend {
    /// Returns the index of the largest value of each row of `[rows, cols]`: i32 `[rows, 1]`.
    #[fusion(dtype = DType::I32, shape = Shape::new([values[0], 1]))]
    fn decoder_argmax(values: FloatTensor<Self>) -> IntTensor<Self>;

    /// Draws a token `[rows, 1]` in i32 for each row of logits `[rows, vocab_size]`, given uniform
    /// values `[rows]` in f32.
    #[fusion(dtype = DType::I32, shape = Shape::new([logits[0], 1]))]
    fn decoder_sample(
        logits: FloatTensor<Self>,
        uniform: FloatTensor<Self>,
        options: SampleOptions,
    ) -> IntTensor<Self>;
}

/// Operations of a decoder on hosts. Callers check shapes, dtypes (f32) and the device.
#[backend_extension(Flex: cfg(feature = "flex"))]
pub(crate) trait HostDecoderBackend: Backend {
    /// Computes [`DecoderBackend::decoder_int8_weight_matmul`] with an input rounded to 8 bits.
    fn decoder_int8_int8_matmul(
        input: FloatTensor<Self>,
        codes: IntTensor<Self>,
        scales: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// Returns the outputs of [`DecoderBackend::decoder_attention`].
#[cfg(feature = "cube")]
#[allow(clippy::too_many_arguments)]
fn attention_metadata(
    queries: &TensorSpec,
    _keys: &TensorSpec,
    _values: &TensorSpec,
    key_cache: &TensorSpec,
    value_cache: &TensorSpec,
    _cos: &TensorSpec,
    _sin: &TensorSpec,
    _positions: &TensorSpec,
) -> (TensorSpec, TensorSpec, TensorSpec) {
    (queries.clone(), key_cache.clone(), value_cache.clone())
}

/// Returns the outputs of [`DecoderBackend::decoder_packed_attention`].
#[cfg(feature = "cube")]
#[allow(clippy::too_many_arguments)]
fn packed_attention_metadata(
    queries: &TensorSpec,
    _keys: &TensorSpec,
    _values: &TensorSpec,
    key_codes: &TensorSpec,
    key_scales: &TensorSpec,
    value_codes: &TensorSpec,
    value_scales: &TensorSpec,
    _cos: &TensorSpec,
    _sin: &TensorSpec,
    _positions: &TensorSpec,
    _format: &KvFormat,
) -> (TensorSpec, TensorSpec, TensorSpec, TensorSpec, TensorSpec) {
    let [key_codes, key_scales] = [key_codes, key_scales].map(TensorSpec::clone);
    let [value_codes, value_scales] = [value_codes, value_scales].map(TensorSpec::clone);
    (queries.clone(), key_codes, key_scales, value_codes, value_scales)
}
