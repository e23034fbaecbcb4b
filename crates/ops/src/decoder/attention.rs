//! Causal attention of new tokens, with a KV cache in place.

use burn::backend::Dispatch;
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Tensor};
use burn_fp4_search::Hadamard;
use burn_fp4_search::host::{AttentionShape, KvFormat};

use super::kv_cache::{KvCache, PackedHeads};
use super::rope::Positions;
use crate::devices::decoder::{DecoderBackend, attends_to};
use crate::hadamard::hadamard;

/// Attends from new tokens to all tokens up to their positions, and returns the outputs
/// `[batch, tokens, heads * head_dim]`.
///
/// `queries` are `[batch, tokens, heads, head_dim]`, `keys` and `values`
/// `[batch, tokens, kv_heads, head_dim]`, all before RoPE. Consecutive query heads share a head of
/// keys. The cache receives the new keys and values, in place if nothing else holds it. Without a
/// cache tokens attend to each other, and the keys and values are returned as a dense cache that
/// has room for no others; positions have to be 0, 1 and so on then.
///
/// A packed cache is read as it is stored: a query sees the rounded keys and values of all tokens,
/// also of the same call. So a prompt at once and token by token agree, up to the rounding of sums
/// and of transformed queries. The gradient reaches the queries alone.
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
/// If shapes or dtypes differ, or a packed cache is not of u8; on `flex` also if
/// a position is beyond the cache or the tables of RoPE. Kernels take such a position for the last;
/// no other device checks it.
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
    let dtypes = [queries.dtype(), keys.dtype(), values.dtype()];
    if let Some(cache) = &cache {
        let [_, _, capacity, _] = cache.dims();
        let shape = [batch, kv_heads, capacity, head_dim];
        assert_eq!(cache.dims(), shape, "attention: shape of the cached keys");
        match cache {
            KvCache::Dense { keys: cached_keys, values: cached_values } => {
                assert_eq!(cached_values.dims(), shape, "attention: shape of the cached values");
                let cached = [cached_keys.dtype(), cached_values.dtype()];
                let expected = [keys.dtype(), values.dtype()];
                assert_eq!(cached, expected, "attention: dtypes of the cache");
            }
            KvCache::Packed { format, keys, values } => {
                keys.check(*format, shape, "keys");
                values.check(*format, shape, "values");
            }
        }
    }
    let device = queries.device();
    let capacity = cache.as_ref().map_or(tokens, |cache| cache.dims()[2]);
    let shape = AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity };
    let format = cache.as_ref().and_then(KvCache::format);
    if !attends_to(&device, dtypes, &shape, positions.count(), format) {
        return by_tensor_operations(queries, keys, values, cache, positions);
    }
    let cache = cache.unwrap_or_else(|| {
        let zeros = || Tensor::zeros([batch, kv_heads, tokens, head_dim], (&device, dtypes[0]));
        KvCache::Dense { keys: zeros(), values: zeros() }
    });
    let [queries, keys, values] = [queries, keys, values].map(Tensor::into_dispatch);
    let [cos, sin] = [&positions.cos, &positions.sin].map(|table| table.clone().into_dispatch());
    let positions = positions.positions.clone().into_dispatch();
    let (output, cache) = match cache {
        KvCache::Dense { keys: cached_keys, values: cached_values } => {
            let [cached_keys, cached_values] =
                [cached_keys, cached_values].map(Tensor::into_dispatch);
            let (output, keys, values) = Dispatch::decoder_attention(
                queries,
                keys,
                values,
                cached_keys,
                cached_values,
                cos,
                sin,
                positions,
            );
            let [keys, values] = [keys, values].map(Tensor::from_dispatch);
            (output, KvCache::Dense { keys, values })
        }
        KvCache::Packed { format, keys: cached_keys, values: cached_values } => {
            let (output, key_codes, key_scales, value_codes, value_scales) =
                Dispatch::decoder_packed_attention(
                    queries,
                    keys,
                    values,
                    cached_keys.codes.into_dispatch(),
                    cached_keys.scales.into_dispatch(),
                    cached_values.codes.into_dispatch(),
                    cached_values.scales.into_dispatch(),
                    cos,
                    sin,
                    positions,
                    format,
                );
            let [keys, values] =
                [(key_codes, key_scales), (value_codes, value_scales)].map(|(codes, scales)| {
                    PackedHeads {
                        codes: Tensor::from_dispatch(codes),
                        scales: Tensor::from_dispatch(scales),
                    }
                });
            (output, KvCache::Packed { format, keys, values })
        }
    };
    let output = Tensor::<4>::from_dispatch(output);
    (output.reshape([batch, tokens, heads * head_dim]), cache)
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
    let format = cache.as_ref().and_then(KvCache::format);
    let [batch, count, num_heads, head_dim] = queries.dims();
    let [_, _, num_key_value_heads, _] = keys.dims();
    let values = values.swap_dims(1, 2);
    let [mut queries, mut keys] = rows.rotate([queries, keys]);
    if format.is_some_and(KvFormat::transforms_keys) {
        let transformed = |heads: Tensor<4>| {
            hadamard(heads, 3, Hadamard::with_signs(0)).expect("blocks of 16 divide the heads")
        };
        // Rounded once, to codes.
        (queries, keys) = (transformed(queries), transformed(keys.cast(DType::F32)));
    }
    let (cache, [keys, values]) = match cache {
        None => (KvCache::Dense { keys: keys.clone(), values: values.clone() }, [keys, values]),
        Some(cache) => cache.update([keys, values], &positions.positions),
    };

    // Queries that share a key head are rows of one product: keys are not repeated.
    let queries_of_head = num_heads / num_key_value_heads * count;
    let queries = queries.reshape([batch, num_key_value_heads, queries_of_head, head_dim]);
    let attn_weights = queries.matmul(keys.swap_dims(2, 3));
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
    let output = attn_weights.matmul(values);
    let output = output.reshape([batch, num_heads, count, head_dim]);
    let output = output.swap_dims(1, 2).reshape([batch, count, num_heads * head_dim]);
    (output, cache)
}
