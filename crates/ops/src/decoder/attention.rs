//! Causal attention of new tokens, with a KV cache in place.

use burn::backend::Dispatch;
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, IndexingUpdateOp, Tensor, TensorData};
use burn_fp4_search::host::AttentionShape;

use super::rope::Positions;
use crate::devices::decoder::{DecoderBackend, attends_to, has_host_decoder};
use crate::devices::extension::weight_data;

/// Rotated keys, and values, of an attention layer, by position:
/// `[batch, kv_heads, capacity, head_dim]`.
#[derive(Debug, Clone)]
pub struct KvCache {
    /// Keys, after RoPE.
    pub keys: Tensor<4>,
    /// Values.
    pub values: Tensor<4>,
}

impl KvCache {
    /// Allocates a cache of a shape `[batch, kv_heads, capacity, head_dim]`.
    #[must_use]
    pub fn zeros(shape: [usize; 4], dtype: DType, device: &Device) -> Self {
        let zeros = || {
            if !has_host_decoder(device, [dtype]) {
                return Tensor::zeros(shape, (device, dtype));
            }
            let zeros = weight_data(TensorData::zeros::<f32, _>(shape), device);
            Tensor::from_data(zeros, (device, dtype))
        };
        Self { keys: zeros(), values: zeros() }
    }
}

/// Attends from new tokens to all tokens up to their positions, and returns the outputs
/// `[batch, tokens, heads * head_dim]`.
///
/// `queries` are `[batch, tokens, heads, head_dim]`, `keys` and `values`
/// `[batch, tokens, kv_heads, head_dim]`, all before RoPE. Consecutive query heads share a head of
/// keys. The cache receives the new keys and values, in place if nothing else holds it. Without a
/// cache tokens attend to each other, and the keys and values are returned as a cache that has room
/// for no others; positions have to be 0, 1 and so on then.
///
/// ```
/// use burn::tensor::{DType, Device, Int, Tensor, TensorData};
/// use burn_fp4_ops::{KvCache, RotaryEmbedding, attention};
///
/// let device = Device::flex();
/// let rotary = RotaryEmbedding::new(&[1.0], 8, &device);
/// let mut cache = KvCache::zeros([1, 1, 8, 2], DType::F32, &device);
/// for position in 0..3 {
///     let positions = rotary.at(Tensor::from_ints([position], &device), 8, DType::F32);
///     let [q, k, v] = [0.0, 1.0, position as f32].map(|x| Tensor::full([1, 1, 1, 2], x, &device));
///     let (output, next) = attention(q, k, v, Some(cache), &positions);
///     // Every query is 0: the output is the mean of the values so far.
///     let mean = position as f32 / 2.0;
///     assert_eq!(output.into_data(), TensorData::from([[[mean, mean]]]));
///     cache = next;
/// }
/// ```
///
/// # Panics
/// If shapes or dtypes differ; on `flex` also if a position is beyond the cache or the tables of
/// RoPE. Kernels take such a position for the last; no other device checks it.
#[must_use]
pub fn attention(
    queries: Tensor<4>,
    keys: Tensor<4>,
    values: Tensor<4>,
    cache: Option<KvCache>,
    positions: &Positions,
) -> (Tensor<3>, KvCache) {
    let [batch, tokens, heads, head_dim] = queries.dims();
    let [_, _, kv_heads, _] = keys.dims();
    assert_eq!(keys.dims(), [batch, tokens, kv_heads, head_dim], "attention: shape of the keys");
    assert_eq!(keys.dims(), values.dims(), "attention: shape of the values");
    assert!(
        kv_heads > 0 && heads.is_multiple_of(kv_heads),
        "attention: {heads} query heads are not a multiple of {kv_heads} heads of keys"
    );
    assert_eq!(2 * positions.pairs(), head_dim, "attention: head_dim of RoPE");
    if let Some(cache) = &cache {
        let [_, _, capacity, _] = cache.keys.dims();
        let shape = [batch, kv_heads, capacity, head_dim];
        assert_eq!(cache.keys.dims(), shape, "attention: shape of the cached keys");
        assert_eq!(cache.values.dims(), shape, "attention: shape of the cached values");
        let dtypes = [cache.keys.dtype(), cache.values.dtype()];
        assert_eq!(dtypes, [keys.dtype(), values.dtype()], "attention: dtypes of the cache");
    }
    let dtypes = [queries.dtype(), keys.dtype(), values.dtype()];
    let device = queries.device();
    let capacity = cache.as_ref().map_or(tokens, |cache| cache.keys.dims()[2]);
    let shape = AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity };
    if !attends_to(&device, dtypes, &shape, positions.count()) {
        return by_tensor_operations(queries, keys, values, cache, positions);
    }
    let shape = [batch, kv_heads, tokens, head_dim];
    let zeros = || Tensor::zeros(shape, (&device, queries.dtype()));
    let cache = cache.unwrap_or_else(|| KvCache { keys: zeros(), values: zeros() });
    let (output, keys, values) = Dispatch::decoder_attention(
        queries.into_dispatch(),
        keys.into_dispatch(),
        values.into_dispatch(),
        cache.keys.into_dispatch(),
        cache.values.into_dispatch(),
        positions.cos.clone().into_dispatch(),
        positions.sin.clone().into_dispatch(),
        positions.positions.clone().into_dispatch(),
    );
    let [keys, values] = [keys, values].map(Tensor::from_dispatch);
    let output = Tensor::<4>::from_dispatch(output);
    (output.reshape([batch, tokens, heads * head_dim]), KvCache { keys, values })
}

/// Computes [`attention`] on any device.
fn by_tensor_operations(
    queries: Tensor<4>,
    keys: Tensor<4>,
    values: Tensor<4>,
    cache: Option<KvCache>,
    positions: &Positions,
) -> (Tensor<3>, KvCache) {
    let rows = positions.rows();
    let [batch, count, num_heads, head_dim] = queries.dims();
    let [_, _, num_key_value_heads, _] = keys.dims();
    let values = values.swap_dims(1, 2);
    let [queries, keys] = rows.rotate([queries, keys]);
    let [keys, values] = match cache {
        None => [keys, values],
        Some(cache) => {
            let update = |cached: Tensor<4>, new| {
                let positions = positions.positions.clone();
                cached.select_assign(2, positions, new, IndexingUpdateOp::Assign)
            };
            [update(cache.keys, keys), update(cache.values, values)]
        }
    };

    // Queries that share a key head are rows of one product: keys are not repeated.
    let queries_of_head = num_heads / num_key_value_heads * count;
    let queries = queries.reshape([batch, num_key_value_heads, queries_of_head, head_dim]);
    let attn_weights = queries.matmul(keys.clone().swap_dims(2, 3));
    let [_, _, _, key_count] = attn_weights.dims();
    let attn_weights = attn_weights.reshape([batch, num_heads, count, key_count]);
    let dtype = attn_weights.dtype();
    let causal_mask = rows.causal_mask.clone().expand(attn_weights.shape());
    // The scale comes after the views: there it is fused with the softmax.
    let attn_weights = attn_weights.div_scalar((head_dim as f64).sqrt());
    let attn_weights = attn_weights.mask_fill(causal_mask, f32::NEG_INFINITY);
    let attn_weights = softmax(attn_weights.cast(DType::F32), 3).cast(dtype);
    let attn_weights =
        attn_weights.reshape([batch, num_key_value_heads, queries_of_head, key_count]);
    let output = attn_weights.matmul(values.clone());
    let output = output.reshape([batch, num_heads, count, head_dim]);
    let output = output.swap_dims(1, 2).reshape([batch, count, num_heads * head_dim]);
    (output, KvCache { keys, values })
}
