//! [`KvCache`]: keys and values by position, dense or packed.

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};
use burn_fp4_search::host::{KV_BLOCK, KvFormat};

use crate::devices::decoder::has_host_decoder;
use crate::devices::extension::weight_data;
use crate::devices::portable::fp8_heads;
use crate::error::OpsError;
use crate::layout::Fp4Layout;
use crate::quantize::quantize;
use crate::tensor::Fp4Tensor;

/// Rotated keys, and values, of an attention layer, by position:
/// `[batch, kv_heads, capacity, head_dim]`.
///
/// A packed cache takes less memory, and a decode step reads less of it; see [`KvFormat`] for the
/// bits. The values that [`attention`](crate::attention) reads are the rounded ones, also of new
/// tokens too. A decode step reads the codes on `flex` in f32, on CUDA and on CubeCL's CPU runtime.
/// A prompt on these Cube devices, and every call on other devices, dequantizes the whole capacity.
/// On `wgpu` that also uploads values, so that [`CapturedGraph`](crate::CapturedGraph) refuses such
/// a pass; WGSL has no bytes in memory, and no packed cache.
///
/// ```
/// use burn::tensor::{DType, Device};
/// use burn_fp4_ops::{KvCache, KvFormat};
///
/// let (shape, device) = ([1, 3, 4096, 64], Device::flex());
/// let dense = KvCache::zeros(shape, DType::BF16, &device);
/// let fp8 = KvCache::packed_zeros(shape, KvFormat::Fp8, &device)?;
/// let nvfp4 = KvCache::packed_zeros(shape, KvFormat::NvFp4, &device)?;
/// assert_eq!([&dense, &fp8, &nvfp4].map(KvCache::dims), [shape; 3]);
/// let bytes = |cache: &KvCache| cache.bytes() as f64;
/// assert!(bytes(&dense) / bytes(&fp8) > 1.9 && bytes(&dense) / bytes(&nvfp4) > 3.5);
/// assert_eq!((dense.format(), fp8.format()), (None, Some(KvFormat::Fp8)));
/// assert_eq!([nvfp4.keys(), nvfp4.values()].map(|values| values.dims()), [shape; 2]);
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant, reason = "a layer has one, and boxes would be in its API")]
pub enum KvCache {
    /// Keys and values in the dtype of the model.
    Dense {
        /// Keys, after RoPE.
        keys: Tensor<4>,
        /// Values.
        values: Tensor<4>,
    },
    /// Quantized keys and values, on a device without autodiff.
    Packed {
        /// Format of both.
        format: KvFormat,
        /// Keys, after RoPE.
        keys: PackedHeads,
        /// Values.
        values: PackedHeads,
    },
}

/// Quantized keys or values of a [`KvCache`].
#[derive(Debug, Clone)]
pub struct PackedHeads {
    /// Codes, u8 `[batch, kv_heads, capacity, bytes]`, with the first of
    /// [`bytes_of_head`](KvFormat::bytes_of_head).
    pub codes: Tensor<4, Int>,
    /// Scales, u8 `[batch, kv_heads, capacity, bytes]`, with the second.
    pub scales: Tensor<4, Int>,
}

impl KvCache {
    /// Allocates a dense cache of a shape `[batch, kv_heads, capacity, head_dim]`.
    #[must_use]
    pub fn zeros(shape: [usize; 4], dtype: DType, device: &Device) -> Self {
        let zeros = || {
            if !has_host_decoder(device, [dtype]) {
                return Tensor::zeros(shape, (device, dtype));
            }
            let zeros = weight_data(TensorData::zeros::<f32, _>(shape), device);
            Tensor::from_data(zeros, (device, dtype))
        };
        Self::Dense { keys: zeros(), values: zeros() }
    }

    /// Allocates a packed cache of a shape `[batch, kv_heads, capacity, head_dim]`.
    ///
    /// # Errors
    /// [`OpsError::Indivisible`] if `head_dim` is not a multiple of 16, [`OpsError::Device`] if the
    /// device does not compute with bytes.
    pub fn packed_zeros(
        shape: [usize; 4],
        format: KvFormat,
        device: &Device,
    ) -> Result<Self, OpsError> {
        let [batch, kv_heads, capacity, head_dim] = shape;
        if head_dim == 0 || !head_dim.is_multiple_of(KV_BLOCK) {
            return Err(OpsError::Indivisible { axis: 3, length: head_dim, block_size: KV_BLOCK });
        }
        let device = device.clone().without_autodiff();
        if !device.supports_dtype(DType::U8) {
            let problem = "a packed KV cache needs bytes, which it does not have; use a dense one";
            return Err(OpsError::Device(problem.to_owned()));
        }
        let zeros = |bytes| {
            let shape = [batch, kv_heads, capacity, bytes];
            if !has_host_decoder(&device, [DType::F32]) {
                return Tensor::zeros(shape, (&device, DType::U8));
            }
            let zeros = weight_data(TensorData::zeros::<u8, _>(shape), &device);
            Tensor::from_data(zeros, (&device, DType::U8))
        };
        let heads = || {
            let [codes, scales] = format.bytes_of_head(head_dim).map(zeros);
            PackedHeads { codes, scales }
        };
        Ok(Self::Packed { format, keys: heads(), values: heads() })
    }

    /// Returns the format; none of a dense cache.
    #[must_use]
    pub fn format(&self) -> Option<KvFormat> {
        match self {
            Self::Dense { .. } => None,
            Self::Packed { format, .. } => Some(*format),
        }
    }

    /// Returns `[batch, kv_heads, capacity, head_dim]`.
    #[must_use]
    pub fn dims(&self) -> [usize; 4] {
        match self {
            Self::Dense { keys, .. } => keys.dims(),
            Self::Packed { format, keys, .. } => {
                let [batch, kv_heads, capacity, code_bytes] = keys.codes.dims();
                [batch, kv_heads, capacity, format.head_dim(code_bytes)]
            }
        }
    }

    /// Returns the bytes of keys and values.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Dense { keys, values } => {
                let bytes = |heads: &Tensor<4>| heads.shape().num_elements() * heads.dtype().size();
                bytes(keys) + bytes(values)
            }
            Self::Packed { keys, values, .. } => {
                let parts = [&keys.codes, &keys.scales, &values.codes, &values.scales];
                parts.into_iter().map(|part| part.shape().num_elements()).sum()
            }
        }
    }

    /// Returns the keys `[batch, kv_heads, capacity, head_dim]`, dequantized to f32 if packed, and
    /// transformed if the format [transforms keys](KvFormat::transforms_keys).
    #[must_use]
    pub fn keys(&self) -> Tensor<4> {
        match self {
            Self::Dense { keys, .. } => keys.clone(),
            Self::Packed { format, keys, .. } => keys.clone().dequantize(*format),
        }
    }

    /// Returns the values `[batch, kv_heads, capacity, head_dim]`, dequantized to f32 if packed.
    #[must_use]
    pub fn values(&self) -> Tensor<4> {
        match self {
            Self::Dense { values, .. } => values.clone(),
            Self::Packed { format, values, .. } => values.clone().dequantize(*format),
        }
    }

    /// Writes rotated keys and values `[batch, kv_heads, tokens, head_dim]` of new tokens, by
    /// tensor operations, and returns the dense keys and values of all positions in the dtype of
    /// the values.
    pub(super) fn update(
        self,
        [keys, values]: [Tensor<4>; 2],
        positions: &Tensor<1, Int>,
    ) -> (Self, [Tensor<4>; 2]) {
        match self {
            Self::Dense { keys: cached_keys, values: cached_values } => {
                let update = |cached: Tensor<4>, new| {
                    cached.select_assign(2, positions.clone(), new, IndexingUpdateOp::Assign)
                };
                let (keys, values) = (update(cached_keys, keys), update(cached_values, values));
                (Self::Dense { keys: keys.clone(), values: values.clone() }, [keys, values])
            }
            Self::Packed { format, keys: cached_keys, values: cached_values } => {
                let (dtype, autodiff) = (values.dtype(), values.device().is_autodiff());
                let positions = positions.clone().without_autodiff();
                let update = |cached: PackedHeads, new| {
                    cached.update(PackedHeads::quantize(new, format), &positions)
                };
                let (keys, values) = (update(cached_keys, keys), update(cached_values, values));
                let dense = [&keys, &values].map(|heads| {
                    let dense = heads.clone().dequantize(format).cast(dtype);
                    if autodiff { dense.autodiff() } else { dense }
                });
                (Self::Packed { format, keys, values }, dense)
            }
        }
    }
}

impl PackedHeads {
    /// Checks shapes and dtypes of heads `[batch, kv_heads, capacity, head_dim]`.
    pub(super) fn check(&self, format: KvFormat, shape: [usize; 4], what: &str) {
        let [batch, kv_heads, capacity, head_dim] = shape;
        let bytes = format.bytes_of_head(head_dim);
        for (part, bytes) in [&self.codes, &self.scales].into_iter().zip(bytes) {
            let shape = [batch, kv_heads, capacity, bytes];
            assert_eq!(part.dims(), shape, "attention: shape of the cached {what}");
            assert_eq!(part.dtype(), DType::U8, "attention: dtype of the cached {what}");
        }
    }

    /// Quantizes heads `[batch, kv_heads, tokens, head_dim]` by tensor operations.
    fn quantize(heads: Tensor<4>, format: KvFormat) -> Self {
        let [batch, kv_heads, tokens, head_dim] = heads.dims();
        let rows = batch * kv_heads * tokens;
        let heads = heads.without_autodiff().cast(DType::F32).reshape([rows, head_dim]);
        let parts: [Tensor<2, Int>; 2] = match format.scheme() {
            None => {
                fp8_heads::quantize::<Dispatch>(heads.into_dispatch()).map(Tensor::from_dispatch)
            }
            Some(scheme) => {
                let packed = quantize(heads, 1, &scheme).expect("callers check the shape");
                [packed.codes(), packed.scales()]
            }
        };
        let [codes, scales] = parts.map(|part| {
            let [_, bytes] = part.dims();
            part.reshape([batch, kv_heads, tokens, bytes])
        });
        Self { codes, scales }
    }

    /// Dequantizes to f32.
    fn dequantize(self, format: KvFormat) -> Tensor<4> {
        let [batch, kv_heads, tokens, code_bytes] = self.codes.dims();
        let (rows, head_dim) = (batch * kv_heads * tokens, format.head_dim(code_bytes));
        let [codes, scales] = [self.codes, self.scales].map(|part| {
            let [.., bytes] = part.dims();
            part.reshape([rows, bytes])
        });
        let values: Tensor<2> = match format.scheme() {
            None => Tensor::from_dispatch(fp8_heads::dequantize::<Dispatch>(
                codes.into_dispatch(),
                scales.into_dispatch(),
            )),
            Some(scheme) => {
                let one = Tensor::from_data([1f32.to_bits() as i32], (&codes.device(), DType::I32));
                let layout = Fp4Layout::new(&[rows, head_dim].into(), 1, &scheme);
                layout
                    .and_then(|layout| Fp4Tensor::from_parts_unread(codes, scales, one, layout))
                    .expect("codes and scales of heads")
                    .dequantize()
            }
        };
        values.reshape([batch, kv_heads, tokens, head_dim])
    }

    /// Writes the heads of new tokens at their positions.
    fn update(self, new: Self, positions: &Tensor<1, Int>) -> Self {
        let update = |cached: Tensor<4, Int>, new| {
            cached.select_assign(2, positions.clone(), new, IndexingUpdateOp::Assign)
        };
        Self { codes: update(self.codes, new.codes), scales: update(self.scales, new.scales) }
    }
}
