//! Causal attention to a KV cache: RoPE, the cache written in place, grouped heads.

use core::array::from_fn;

use burn_fp4_formats::check_length;
use pulp::{Simd, WithSimd};

use super::exp::exp;
use super::kv_cache::{Kv, KvMut};
use super::kv_format::KvFormat;
use crate::error::SearchError;
use crate::host::arch::arch;
use crate::host::dots::dots;
use crate::host::hadamard::transform_sixteens;
use crate::host::threads::{Work, for_each_chunk, per_microsecond};

/// Largest `head_dim`: heads of a task are on its stack.
pub const MAX_HEAD_DIM: usize = 256;

/// Number of query heads of a group that read the keys together.
const QUERIES: usize = 4;
/// Number of keys whose scores are kept: with their values they stay in the first-level cache.
const KEYS: usize = 64;

/// Lengths of the axes of [`attention`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Number of sequences.
    pub batch: usize,
    /// Number of new tokens of each sequence.
    pub tokens: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of heads of keys and values; divides the query heads.
    pub kv_heads: usize,
    /// Number of channels of a head: even, at most [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Number of positions of the KV cache.
    pub capacity: usize,
}

/// Cosines and sines of RoPE, `[positions, head_dim / 2]`.
#[derive(Debug, Clone, Copy)]
pub struct Rotary<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
}

impl Rotary<'_> {
    /// Rotates a head: channel `i` of its first half with channel `i` of its second half.
    #[inline(always)]
    fn rotate(&self, position: usize, head: &[f32], rotated: &mut [f32]) {
        let half = head.len() / 2;
        let [cos, sin] = [self.cos, self.sin].map(|table| &table[position * half..][..half]);
        let (first, second) = head.split_at(half);
        let (first_rotated, second_rotated) = rotated.split_at_mut(half);
        for at in 0..half {
            first_rotated[at] = first[at] * cos[at] - second[at] * sin[at];
            second_rotated[at] = second[at] * cos[at] + first[at] * sin[at];
        }
    }
}

/// Attends from new tokens to those in the KV cache, which they join.
///
/// `queries` are `[batch, tokens, heads, head_dim]` and are replaced by the outputs; `keys` and
/// `values` are `[batch, tokens, kv_heads, head_dim]`; `cache` holds rotated keys and values,
/// `[batch, kv_heads, capacity, head_dim]`, and receives the new ones at `positions`, one for each
/// token. A query reads all positions up to its own as the cache holds them, new ones too.
///
/// # Errors
/// A slice of the wrong length, a position beyond the cache or the tables, or keys and values in
/// different formats.
pub fn attention(
    queries: &mut [f32],
    [keys, values]: [&[f32]; 2],
    mut cache: [KvMut<'_>; 2],
    rotary: Rotary<'_>,
    positions: &[usize],
    shape: AttentionShape,
) -> Result<(), SearchError> {
    let AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity } = shape;
    let of_tokens = |heads: usize| batch * tokens * heads * head_dim;
    check_length("head_dim", (head_dim / 2 * 2).min(MAX_HEAD_DIM), head_dim)?;
    check_length("heads", heads / kv_heads.max(1) * kv_heads, heads)?;
    check_length("positions", tokens, positions.len())?;
    check_length("queries", of_tokens(heads), queries.len())?;
    check_length("keys", of_tokens(kv_heads), keys.len())?;
    check_length("values", of_tokens(kv_heads), values.len())?;
    let formats = cache.each_ref().map(KvMut::format);
    if formats[0] != formats[1] {
        let [keys, values] =
            formats.map(|format| format.map_or("dense".into(), |format| format!("{format:?}")));
        return Err(SearchError::KvFormats { keys, values });
    }
    for cache in &cache {
        cache.check(batch * kv_heads * capacity, head_dim)?;
    }
    let last = positions.iter().copied().max().unwrap_or(0);
    let room = capacity.min(2 * rotary.cos.len().min(rotary.sin.len()) / head_dim.max(1));
    check_length("positions of the KV cache and RoPE", room.max(last + 1), room)?;
    if queries.is_empty() {
        return Ok(());
    }

    let transforms = formats[0].is_some_and(KvFormat::transforms_keys);
    let mut rotated = [0f32; MAX_HEAD_DIM];
    let rotated = &mut rotated[..head_dim];
    let new = keys.chunks_exact(head_dim).zip(values.chunks_exact(head_dim)).enumerate();
    for (at, (key, value)) in new {
        let (token, kv_head) = (at / kv_heads, at % kv_heads);
        let position = positions[token % tokens];
        let to = (token / tokens * kv_heads + kv_head) * capacity + position;
        rotary.rotate(position, key, rotated);
        if transforms {
            transform_sixteens(rotated);
        }
        let [keys, values] = &mut cache;
        keys.write(to, rotated);
        values.write(to, value);
    }

    // Several tokens read the same heads: these are dequantized once.
    let cached = cache.each_ref().map(KvMut::read);
    let dense;
    let (cached, capacity) = if cached[0].is_packed() && tokens > 1 {
        dense = cached
            .map(|cache| dequantized(cache, batch * kv_heads, [capacity, last + 1], head_dim));
        (dense.each_ref().map(|values| Kv::Dense(values)), last + 1)
    } else {
        (cached, capacity)
    };
    let group = heads / kv_heads;
    let decodes = cached[0].is_packed();
    let state = || [(); 2].map(|()| vec![0.0; if decodes { KEYS * head_dim } else { 0 }]);
    let task = |decoded: &mut [Vec<f32>; 2], at: usize, queries: &mut [f32]| {
        let (token, kv_head) = (at / kv_heads, at % kv_heads);
        let position = positions[token % tokens];
        let first = (token / tokens * kv_heads + kv_head) * capacity;
        arch().dispatch(QueryGroup {
            queries,
            cached,
            first,
            decoded,
            rotary,
            position,
            head_dim,
            transforms,
        });
    };
    let read: usize = positions.iter().map(|position| position + 1).sum();
    let work = Work::new(2 * batch * heads * head_dim * read, per_microsecond::ATTENTION);
    for_each_chunk(work, queries, group * head_dim, state, task);
    Ok(())
}

/// Dequantizes the first `count` of `capacity` positions of each key head.
fn dequantized(
    cache: Kv<'_>,
    key_heads: usize,
    [capacity, count]: [usize; 2],
    head_dim: usize,
) -> Vec<f32> {
    let mut values = vec![0.0; key_heads * count * head_dim];
    let work = Work::new(values.len(), per_microsecond::VALUES);
    let task = |(): &mut (), head: usize, values: &mut [f32]| {
        cache.heads(head * capacity, count, head_dim, values);
    };
    for_each_chunk(work, &mut values, count * head_dim, || (), task);
    values
}

/// The query heads of a token that share a head of keys and values.
struct QueryGroup<'a> {
    queries: &'a mut [f32],
    /// Keys and values.
    cached: [Kv<'a>; 2],
    /// Place of position 0 among the cached heads.
    first: usize,
    /// Room for [`KEYS`] dequantized keys and values.
    decoded: &'a mut [Vec<f32>; 2],
    rotary: Rotary<'a>,
    position: usize,
    head_dim: usize,
    /// True if the keys are transformed.
    transforms: bool,
}

impl WithSimd for QueryGroup<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let queries = core::mem::take(&mut self.queries);
        for queries in queries.chunks_mut(QUERIES * self.head_dim) {
            match queries.len() / self.head_dim {
                1 => self.attend::<S, 1>(simd, queries),
                2 => self.attend::<S, 2>(simd, queries),
                3 => self.attend::<S, 3>(simd, queries),
                _ => self.attend::<S, QUERIES>(simd, queries),
            }
        }
    }
}

impl QueryGroup<'_> {
    /// Replaces `M` heads of queries by their outputs: softmax over chunks of keys, whose sums are
    /// scaled where a later chunk has a larger score.
    #[inline(always)]
    fn attend<S: Simd, const M: usize>(&mut self, simd: S, queries: &mut [f32]) {
        let dim = self.head_dim;
        let mut rotated = [[0f32; MAX_HEAD_DIM]; M];
        let scale = 1.0 / (dim as f32).sqrt();
        for (rotated, head) in rotated.iter_mut().zip(queries.chunks_exact(dim)) {
            self.rotary.rotate(self.position, head, &mut rotated[..dim]);
            rotated[..dim].iter_mut().for_each(|value| *value *= scale);
            if self.transforms {
                transform_sixteens(&mut rotated[..dim]);
            }
        }
        let rotated: [&[f32]; M] = from_fn(|head| &rotated[head][..dim]);
        let mut outputs = [[0f32; MAX_HEAD_DIM]; M];
        let (mut largest, mut sums) = ([f32::NEG_INFINITY; M], [0f32; M]);
        let [cached_keys, cached_values] = self.cached;
        let [decoded_keys, decoded_values] = &mut *self.decoded;
        for start in (0..=self.position).step_by(KEYS) {
            let (first, count) = (self.first + start, KEYS.min(self.position + 1 - start));
            let keys = cached_keys.heads(first, count, dim, decoded_keys);
            let values = cached_values.heads(first, count, dim, decoded_values);
            // Scores beyond the last key have no weight.
            let mut scores = [[f32::NEG_INFINITY; KEYS]; M];
            for (at, key) in keys.chunks_exact(dim).enumerate() {
                let dots = dots::<S, M, 1>(simd, key, rotated, |_| ());
                for (scores, dot) in scores.iter_mut().zip(dots) {
                    scores[at] = dot;
                }
            }
            for (head, scores) in scores.iter_mut().enumerate() {
                let before = largest[head];
                largest[head] = reduced(scores, f32::max).max(before);
                for score in scores.iter_mut() {
                    *score = exp(*score - largest[head]);
                }
                let fewer = exp(before - largest[head]);
                sums[head] = sums[head] * fewer + reduced(scores, |sum, score| sum + score);
                outputs[head][..dim].iter_mut().for_each(|output| *output *= fewer);
            }
            add_values::<S, M>(simd, &scores, values, dim, &mut outputs);
        }
        for (head, output) in queries.chunks_exact_mut(dim).enumerate() {
            for (output, sum) in output.iter_mut().zip(&outputs[head]) {
                *output = sum / sums[head];
            }
        }
    }
}

/// Reduces scores lane by lane first, which the compiler vectorizes.
#[inline(always)]
fn reduced(scores: &[f32; KEYS], reduce: impl Fn(f32, f32) -> f32) -> f32 {
    const WIDTH: usize = 16;
    let (chunks, _) = scores.as_chunks::<WIDTH>();
    let mut lanes = chunks[0];
    for chunk in &chunks[1..] {
        for (lane, score) in lanes.iter_mut().zip(chunk) {
            *lane = reduce(*lane, *score);
        }
    }
    lanes.into_iter().reduce(reduce).expect("some lanes")
}

/// Adds values, each times its score, to the outputs of each query.
#[inline(always)]
fn add_values<S: Simd, const M: usize>(
    simd: S,
    scores: &[[f32; KEYS]; M],
    values: &[f32],
    dim: usize,
    outputs: &mut [[f32; MAX_HEAD_DIM]; M],
) {
    let vectors = S::as_simd_f32s(&values[..dim]).0.len();
    let tail = dim - S::as_simd_f32s(&values[..dim]).1.len();
    for at in 0..vectors {
        let mut sums: [S::f32s; M] = [simd.splat_f32s(0.0); M];
        for head in 0..M {
            sums[head] = S::as_simd_f32s(&outputs[head]).0[at];
        }
        for (key, value) in values.chunks_exact(dim).enumerate() {
            let value = S::as_simd_f32s(value).0[at];
            for head in 0..M {
                let score = simd.splat_f32s(scores[head][key]);
                sums[head] = simd.mul_add_f32s(score, value, sums[head]);
            }
        }
        for head in 0..M {
            S::as_mut_simd_f32s(&mut outputs[head]).0[at] = sums[head];
        }
    }
    for (key, value) in values.chunks_exact(dim).enumerate() {
        for head in 0..M {
            for at in tail..dim {
                outputs[head][at] += scores[head][key] * value[at];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{KvFormat, dequantize_heads};

    fn values(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|at| ((at + seed) * 37 % 1009) as f32 / 250.0 - 2.0).collect()
    }

    /// Attends in f64, from the definition.
    fn expected(
        queries: &[f32],
        [keys, values]: [&[f32]; 2],
        rotary: Rotary<'_>,
        shape: AttentionShape,
    ) -> Vec<f64> {
        let AttentionShape { batch, tokens, heads, kv_heads, head_dim, .. } = shape;
        let half = head_dim / 2;
        let rotated = |all: &[f32], of: usize, [sequence, token, head]: [usize; 3]| -> Vec<f64> {
            let head = &all[((sequence * tokens + token) * of + head) * head_dim..][..head_dim];
            let channel = |at: usize| {
                let partner = f64::from(head[(at + half) % head_dim]);
                let sign = if at < half { -1.0 } else { 1.0 };
                let table = |table: &[f32]| f64::from(table[token * half + at % half]);
                f64::from(head[at]) * table(rotary.cos) + sign * partner * table(rotary.sin)
            };
            (0..head_dim).map(channel).collect()
        };
        let mut outputs = Vec::new();
        for (sequence, token) in
            (0..batch).flat_map(|sequence| (0..tokens).map(move |token| (sequence, token)))
        {
            for head in 0..heads {
                let (query, kv) =
                    (rotated(queries, heads, [sequence, token, head]), head * kv_heads / heads);
                let weights: Vec<f64> = (0..=token)
                    .map(|at| {
                        let key = rotated(keys, kv_heads, [sequence, at, kv]);
                        let dot: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                        (dot / (head_dim as f64).sqrt()).exp()
                    })
                    .collect();
                let sum: f64 = weights.iter().sum();
                outputs.extend((0..head_dim).map(|channel| {
                    let value = |at: usize| {
                        let head = (sequence * tokens + at) * kv_heads + kv;
                        f64::from(values[head * head_dim + channel])
                    };
                    weights.iter().enumerate().map(|(at, w)| w * value(at)).sum::<f64>() / sum
                }));
            }
        }
        outputs
    }

    /// Includes heads with a tail, groups of one to more heads than read keys together, more keys
    /// than a chunk, and more work than one thread does.
    #[test]
    fn attention_is_the_same_for_a_prompt_at_once_and_token_by_token() {
        for (batch, tokens, heads, kv_heads, head_dim) in [
            (1, 5, 1, 1, 2),
            (2, 70, 3, 1, 6),
            (1, 9, 6, 3, 64),
            (1, 150, 14, 2, 64),
            (2, 9, 8, 2, 20),
        ] {
            let capacity = tokens + 3;
            let shape = AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity };
            let queries = values(batch * tokens * heads * head_dim, 1);
            let keys = values(batch * tokens * kv_heads * head_dim, 5);
            let new_values = values(batch * tokens * kv_heads * head_dim, 11);
            let angles = (0..capacity * head_dim / 2).map(|at| at as f32 * 0.01);
            let (sin, cos): (Vec<_>, Vec<_>) = angles.map(f32::sin_cos).unzip();
            let rotary = Rotary { cos: &cos, sin: &sin };
            let expected = expected(&queries, [&keys, &new_values], rotary, shape);

            let empty = || vec![f32::NAN; batch * kv_heads * capacity * head_dim];
            let (mut key_cache, mut value_cache) = (empty(), empty());
            let positions: Vec<usize> = (0..tokens).collect();
            let mut found = queries.clone();
            let cache = [&mut key_cache, &mut value_cache].map(|cache| KvMut::Dense(cache));
            attention(&mut found, [&keys, &new_values], cache, rotary, &positions, shape).unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                assert!((f64::from(*found) - expected).abs() < 1e-4, "{shape:?}");
            }

            let of_token = |all: &[f32], heads: usize, token: usize| -> Vec<f32> {
                let tokens = all.chunks_exact(heads * head_dim);
                tokens.skip(token).step_by(shape.tokens).flatten().copied().collect()
            };
            let (mut key_cache, mut value_cache) = (empty(), empty());
            for token in 0..tokens {
                let mut queries = of_token(&queries, heads, token);
                let new = [&keys, &new_values].map(|all| of_token(all, kv_heads, token));
                let cache = [&mut key_cache, &mut value_cache].map(|cache| KvMut::Dense(cache));
                let one = AttentionShape { tokens: 1, ..shape };
                attention(&mut queries, [&new[0], &new[1]], cache, rotary, &[token], one).unwrap();
                assert_eq!(queries, of_token(&found, heads, token), "{shape:?}, token {token}");
            }
            let mut queries = queries;
            let cache = [&mut key_cache, &mut value_cache].map(|cache| KvMut::Dense(cache));
            let beyond: Vec<usize> = (4..tokens + 4).collect();
            assert!(
                attention(&mut queries, [&keys, &new_values], cache, rotary, &beyond, shape)
                    .is_err()
            );
        }
    }

    /// Attends to a packed cache as to the dense one of its values, token by token and at once.
    #[test]
    fn packed_caches_are_attended_to_as_their_values() {
        let shape = AttentionShape {
            batch: 2,
            tokens: 1,
            heads: 6,
            kv_heads: 2,
            head_dim: 32,
            capacity: KEYS + 9,
        };
        let AttentionShape { batch, heads, kv_heads, head_dim, capacity, .. } = shape;
        let angles = (0..capacity * head_dim / 2).map(|at| at as f32 * 0.01);
        let (sin, cos): (Vec<_>, Vec<_>) = angles.map(f32::sin_cos).unzip();
        let rotary = Rotary { cos: &cos, sin: &sin };
        let cached = batch * kv_heads * capacity;
        for format in KvFormat::ALL {
            let [code_bytes, scale_bytes] = format.bytes_of_head(head_dim);
            let mut codes = [(); 2].map(|()| vec![0; cached * code_bytes]);
            let mut scales = [(); 2].map(|()| vec![0; cached * scale_bytes]);
            let mut first = 0;
            for tokens in [KEYS, 1, 3, 1] {
                let shape = AttentionShape { tokens, ..shape };
                let new = |heads: usize, seed| values(batch * tokens * heads * head_dim, seed);
                let (mut found, keys) = (new(heads, first + 1), new(kv_heads, first + 5));
                let (mut expected, new_values) = (found.clone(), new(kv_heads, first + 11));
                let positions: Vec<_> = (first..first + tokens).collect();
                let [key_codes, value_codes] = &mut codes;
                let [key_scales, value_scales] = &mut scales;
                let cache = [(key_codes, key_scales), (value_codes, value_scales)]
                    .map(|(codes, scales)| KvMut::Packed { format, codes, scales });
                let new = [&keys[..], &new_values];
                attention(&mut found, new, cache, rotary, &positions, shape).unwrap();

                // The definition: each token attends to the dense values of the positions so far.
                let mut dense = [0, 1].map(|of| {
                    let mut dense = vec![0.0; cached * head_dim];
                    let (codes, scales) = (&codes[of], &scales[of]);
                    dequantize_heads(codes, scales, head_dim, format, &mut dense).unwrap();
                    dense
                });
                for (at, position) in positions.iter().enumerate() {
                    let of_token = |all: &[f32], heads: usize| -> Vec<f32> {
                        let all = all.chunks_exact(heads * head_dim);
                        all.skip(at).step_by(tokens).flatten().copied().collect()
                    };
                    let mut queries = of_token(&expected, heads);
                    rotate_all(&mut queries, rotary, *position, head_dim);
                    if format.transforms_keys() {
                        transform_sixteens(&mut queries);
                    }
                    // Writes the token's own key and value as the cache holds them: turned back.
                    let own = [0, 1].map(|of| {
                        let heads = dense[of].chunks_exact(head_dim);
                        let heads = heads.skip(*position).step_by(capacity);
                        heads.flatten().copied().collect::<Vec<_>>()
                    });
                    let still = [vec![1.0; cos.len()], vec![0.0; sin.len()]];
                    let [cos, sin] = &still;
                    let [keys, values] = &mut dense;
                    let cache = [KvMut::Dense(keys), KvMut::Dense(values)];
                    let (new, one) =
                        ([&own[0][..], &own[1]], AttentionShape { tokens: 1, ..shape });
                    let still = Rotary { cos, sin };
                    attention(&mut queries, new, cache, still, &[*position], one).unwrap();
                    for (row, query) in queries.chunks_exact(heads * head_dim).enumerate() {
                        let to = (row * tokens + at) * heads * head_dim;
                        expected[to..to + heads * head_dim].copy_from_slice(query);
                    }
                }
                // Queries are scaled before or after their transform.
                let near = |(found, expected): (&f32, &f32)| (found - expected).abs() < 1e-5;
                let near = found.iter().zip(&expected).all(near);
                assert!(near, "{format:?}, {tokens} tokens at {first}");
                first += tokens;
            }
        }
    }

    #[test]
    fn keys_and_values_in_different_formats_are_refused() {
        let shape = AttentionShape {
            batch: 1,
            tokens: 1,
            heads: 1,
            kv_heads: 1,
            head_dim: 16,
            capacity: 1,
        };
        let rotary = Rotary { cos: &[1.0; 8], sin: &[0.0; 8] };
        let (mut queries, new, mut dense) = ([0.0; 16], [0.0; 16], [0.0; 16]);
        let (mut codes, mut scales) = ([0; 16], [0; 1]);
        let format = KvFormat::Fp8;
        let packed = KvMut::Packed { format, codes: &mut codes, scales: &mut scales };
        let cache = [packed, KvMut::Dense(&mut dense)];
        let found = attention(&mut queries, [&new, &new], cache, rotary, &[0], shape);
        let [keys, values] = ["Fp8", "dense"].map(str::to_owned);
        let expected = SearchError::KvFormats { keys, values };
        assert_eq!(found, Err(expected));
    }

    /// Rotates all heads by a position.
    fn rotate_all(heads: &mut [f32], rotary: Rotary<'_>, position: usize, head_dim: usize) {
        for head in heads.chunks_exact_mut(head_dim) {
            let before = head.to_vec();
            rotary.rotate(position, &before, head);
        }
    }
}
