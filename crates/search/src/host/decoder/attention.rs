//! Causal attention to a KV cache: RoPE, the cache written in place, grouped heads, keys divided
//! among threads (flash-decoding).

use core::array::from_fn;

use burn_fp4_formats::check_length;
use pulp::{Simd, WithSimd};

use super::exp::exp;
use super::kv_cache::{Kv, KvMut};
use super::kv_format::KvFormat;
use crate::error::SearchError;
use crate::host::arch::arch;
use crate::host::decode::prefetch;
use crate::host::dots::dots;
use crate::host::hadamard::transform_sixteens;
use crate::host::threads::{Work, for_each_chunk, per_microsecond};

/// Largest `head_dim`: heads of a task are on its stack.
pub const MAX_HEAD_DIM: usize = 256;

/// Number of query heads of a group that read the keys together.
const QUERIES: usize = 4;
/// Number of keys whose scores are kept: with their values they stay in the first-level cache.
const KEYS: usize = 64;
/// Number of keys of a segment. Each is summed up on its own, so that any thread can take it; the
/// bits of outputs depend on it.
const SEGMENT: usize = 2 * KEYS;
/// Number of key heads for each thread, over all tokens, from which threads take heads, not
/// segments.
const HEADS_PER_THREAD: usize = 4;
/// Number of values of a partial result before its outputs: the largest score and the sum of the
/// softmax.
const PARTIAL: usize = 2;
/// Number of f32 of a cache line.
const LINE: usize = 16;

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

    attend_to_cache(queries, cache.each_ref().map(KvMut::read), rotary, positions, shape);
    Ok(())
}

/// Replaces queries with their outputs, once the cache has the new keys and values.
fn attend_to_cache(
    queries: &mut [f32],
    cached: [Kv<'_>; 2],
    rotary: Rotary<'_>,
    positions: &[usize],
    shape: AttentionShape,
) {
    let AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity } = shape;
    let last = positions.iter().copied().max().unwrap_or(0);
    let transforms = matches!(cached[0], Kv::Packed { format, .. } if format.transforms_keys());
    // Several tokens read the same heads: these are dequantized once.
    let dense;
    let (cached, capacity) = if cached[0].is_packed() && tokens > 1 {
        dense = cached
            .map(|cache| dequantized(cache, batch * kv_heads, [capacity, last + 1], head_dim));
        (dense.each_ref().map(|values| Kv::Dense(values)), last + 1)
    } else {
        (cached, capacity)
    };
    let group = heads / kv_heads;
    let (group_len, partial_len) = (group * head_dim, group * (PARTIAL + head_dim));
    let shared_head = |at: usize| {
        let (token, kv_head) = (at / kv_heads, at % kv_heads);
        let first = (token / tokens * kv_heads + kv_head) * capacity;
        let position = positions[token % tokens];
        SharedHead { cached, first, rotary, position, head_dim, transforms }
    };
    let decodes = cached[0].is_packed();
    let scratch = || Scratch {
        rotated: vec![0.0; group_len],
        decoded: [(); 2].map(|()| vec![0.0; if decodes { KEYS * head_dim } else { 0 }]),
        partials: [(); 2].map(|()| vec![0.0; partial_len]),
    };
    let read: usize = positions.iter().map(|position| position + 1).sum();
    let work = Work::new(2 * batch * heads * head_dim * read, per_microsecond::ATTENTION);
    let key_heads = batch * tokens * kv_heads;
    let segments = last / SEGMENT + 1;
    if segments == 1
        || key_heads >= HEADS_PER_THREAD * rayon::current_num_threads()
        || !work.is_worth_threads()
    {
        let task = |scratch: &mut Scratch, at: usize, queries: &mut [f32]| {
            let head = shared_head(at);
            let Scratch { rotated, decoded, partials: [partial, next] } = scratch;
            head.rotate(queries, rotated);
            for segment in 0..head.segments() {
                head.attend(segment, rotated, decoded, next);
                head.combine(segment, next, partial);
            }
            head.normalize(partial, queries);
        };
        return for_each_chunk(work, queries, group_len, scratch, task);
    }
    let mut partials = vec![0.0; key_heads * segments * partial_len];
    let all: &[f32] = queries;
    let task = |scratch: &mut Scratch, at: usize, partial: &mut [f32]| {
        let (at, segment) = (at / segments, at % segments);
        let head = shared_head(at);
        if segment < head.segments() {
            head.rotate(&all[at * group_len..][..group_len], &mut scratch.rotated);
            head.attend(segment, &scratch.rotated, &mut scratch.decoded, partial);
        }
    };
    for_each_chunk(work, &mut partials, partial_len, scratch, task);
    let work = Work::new(partials.len(), per_microsecond::VALUES);
    let task = |partial: &mut Vec<f32>, at: usize, queries: &mut [f32]| {
        let head = shared_head(at);
        let of_head = partials[at * segments * partial_len..].chunks_exact(partial_len);
        for (segment, next) in of_head.take(head.segments()).enumerate() {
            head.combine(segment, next, partial);
        }
        head.normalize(partial, queries);
    };
    for_each_chunk(work, queries, group_len, || vec![0.0; partial_len], task);
}

/// Memory of a thread.
struct Scratch {
    /// Rotated queries of a group.
    rotated: Vec<f32>,
    decoded: Decoded,
    /// Partial results: of the segments so far, and of one segment.
    partials: [Vec<f32>; 2],
}

/// Room for [`KEYS`] dequantized keys, and values.
type Decoded = [Vec<f32>; 2];

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

/// A head of keys and values, and a token whose query heads share it.
///
/// A segment of the keys yields a partial result for each query head: the largest score, the sum of
/// the softmax and the weighted sum of values. Both sums are relative to the largest score.
struct SharedHead<'a> {
    /// Keys and values.
    cached: [Kv<'a>; 2],
    /// Place of position 0 among the cached heads.
    first: usize,
    rotary: Rotary<'a>,
    position: usize,
    head_dim: usize,
    /// True if the keys are transformed.
    transforms: bool,
}

impl SharedHead<'_> {
    /// Returns the number of segments up to the position of the token.
    fn segments(&self) -> usize {
        self.position / SEGMENT + 1
    }

    /// Rotates, scales and transforms queries.
    fn rotate(&self, queries: &[f32], rotated: &mut [f32]) {
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        let rotated = rotated.chunks_exact_mut(self.head_dim);
        for (rotated, head) in rotated.zip(queries.chunks_exact(self.head_dim)) {
            self.rotary.rotate(self.position, head, rotated);
            rotated.iter_mut().for_each(|value| *value *= scale);
            if self.transforms {
                transform_sixteens(rotated);
            }
        }
    }

    /// Computes the partial result of a segment, which must not begin after the position of the
    /// token.
    fn attend(&self, segment: usize, rotated: &[f32], decoded: &mut Decoded, partial: &mut [f32]) {
        arch().dispatch(Segment { head: self, segment, rotated, decoded, partial });
    }

    /// Adds the partial result of a segment to that of the segments before it.
    fn combine(&self, segment: usize, next: &[f32], partial: &mut [f32]) {
        if segment == 0 {
            return partial.copy_from_slice(next);
        }
        let len = PARTIAL + self.head_dim;
        for (partial, next) in partial.chunks_exact_mut(len).zip(next.chunks_exact(len)) {
            let largest = partial[0].max(next[0]);
            let [factor, next_factor] = [partial[0], next[0]].map(|score| exp(score - largest));
            partial[0] = largest;
            for (sum, next_sum) in partial[1..].iter_mut().zip(&next[1..]) {
                *sum = *sum * factor + next_sum * next_factor;
            }
        }
    }

    /// Replaces queries with their outputs, given the partial result of all keys.
    fn normalize(&self, partial: &[f32], queries: &mut [f32]) {
        let partial = partial.chunks_exact(PARTIAL + self.head_dim);
        for (output, partial) in queries.chunks_exact_mut(self.head_dim).zip(partial) {
            for (output, sum) in output.iter_mut().zip(&partial[PARTIAL..]) {
                *output = sum / partial[1];
            }
        }
    }
}

/// A segment of the keys of a head, and the query heads that attend to it.
struct Segment<'a, 'k> {
    head: &'a SharedHead<'k>,
    segment: usize,
    rotated: &'a [f32],
    decoded: &'a mut Decoded,
    partial: &'a mut [f32],
}

impl WithSimd for Segment<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, segment, rotated, decoded, partial } = self;
        let dim = head.head_dim;
        let partial = partial.chunks_mut(QUERIES * (PARTIAL + dim));
        for (rotated, partial) in rotated.chunks(QUERIES * dim).zip(partial) {
            match rotated.len() / dim {
                1 => head.attend_together::<S, 1>(simd, segment, rotated, decoded, partial),
                2 => head.attend_together::<S, 2>(simd, segment, rotated, decoded, partial),
                3 => head.attend_together::<S, 3>(simd, segment, rotated, decoded, partial),
                _ => head.attend_together::<S, QUERIES>(simd, segment, rotated, decoded, partial),
            }
        }
    }
}

impl SharedHead<'_> {
    /// Attends from `M` query heads: softmax over chunks of keys, whose sums are scaled where a
    /// later chunk has a larger score.
    #[inline(always)]
    fn attend_together<S: Simd, const M: usize>(
        &self,
        simd: S,
        segment: usize,
        rotated: &[f32],
        decoded: &mut Decoded,
        partial: &mut [f32],
    ) {
        let dim = self.head_dim;
        let rotated: [&[f32]; M] = from_fn(|head| &rotated[head * dim..][..dim]);
        let mut outputs = [[0f32; MAX_HEAD_DIM]; M];
        // Not an infinity: the difference to a score of -infinity has to be a number.
        let (mut largest, mut sums) = ([f32::MIN; M], [0f32; M]);
        let [cached_keys, cached_values] = self.cached;
        let [decoded_keys, decoded_values] = decoded;
        let prefetches = !cached_values.is_packed();
        let end = (self.position + 1).min((segment + 1) * SEGMENT);
        for start in (segment * SEGMENT..end).step_by(KEYS) {
            let (first, count) = (self.first + start, KEYS.min(end - start));
            let keys = cached_keys.heads(first, count, dim, decoded_keys);
            let values = cached_values.heads(first, count, dim, decoded_values);
            // Scores beyond the last key have no weight.
            let mut scores = [[f32::NEG_INFINITY; KEYS]; M];
            for (at, (key, value)) in
                keys.chunks_exact(dim).zip(values.chunks_exact(dim)).enumerate()
            {
                // `add_values` reads columns of vectors, which the processor does not prefetch.
                if prefetches {
                    value.chunks(LINE).for_each(|line| prefetch(line, 0));
                }
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
        for (head, partial) in partial.chunks_exact_mut(PARTIAL + dim).enumerate() {
            partial[0] = largest[head];
            partial[1] = sums[head];
            partial[PARTIAL..].copy_from_slice(&outputs[head][..dim]);
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
    for at in (0..vectors / 2 * 2).step_by(2) {
        add_vectors::<S, M, 2>(simd, scores, values, [dim, at], outputs);
    }
    if vectors % 2 == 1 {
        add_vectors::<S, M, 1>(simd, scores, values, [dim, vectors - 1], outputs);
    }
    for (key, value) in values.chunks_exact(dim).enumerate() {
        for head in 0..M {
            for at in tail..dim {
                outputs[head][at] += scores[head][key] * value[at];
            }
        }
    }
}

/// Adds the `V` vectors of each value from vector `at` on.
#[inline(always)]
fn add_vectors<S: Simd, const M: usize, const V: usize>(
    simd: S,
    scores: &[[f32; KEYS]; M],
    values: &[f32],
    [dim, at]: [usize; 2],
    outputs: &mut [[f32; MAX_HEAD_DIM]; M],
) {
    let mut sums: [[S::f32s; V]; M] =
        from_fn(|head| from_fn(|vector| S::as_simd_f32s(&outputs[head]).0[at + vector]));
    for (key, value) in values.chunks_exact(dim).enumerate() {
        let value = &S::as_simd_f32s(value).0[at..at + V];
        for head in 0..M {
            let score = simd.splat_f32s(scores[head][key]);
            for vector in 0..V {
                let sum = &mut sums[head][vector];
                *sum = simd.mul_add_f32s(score, value[vector], *sum);
            }
        }
    }
    for head in 0..M {
        S::as_mut_simd_f32s(&mut outputs[head]).0[at..at + V].copy_from_slice(&sums[head]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::{KvFormat, dequantize_heads, on_awake_threads};

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
    /// than a segment, and more work than one thread does.
    #[test]
    fn attention_is_the_same_for_a_prompt_at_once_and_token_by_token() {
        for (batch, tokens, heads, kv_heads, head_dim) in [
            (1, 5, 1, 1, 2),
            (2, 70, 3, 1, 6),
            (1, 9, 6, 3, 64),
            (1, 150, 14, 2, 64),
            (1, 2 * SEGMENT + 3, 2, 1, 6),
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
            capacity: SEGMENT + 9,
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
            for tokens in [SEGMENT - 1, 3, 1, 1] {
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

    /// One thread takes heads; several that share a pass take segments.
    #[test]
    fn segments_of_few_heads_have_the_bits_of_whole_heads() {
        let (tokens, capacity) = (2, 5 * SEGMENT);
        let shape =
            AttentionShape { batch: 1, tokens, heads: 6, kv_heads: 2, head_dim: 64, capacity };
        let rotary = Rotary { cos: &vec![1.0; capacity * 32], sin: &vec![0.0; capacity * 32] };
        for spoiled in [false, true] {
            let mut new = [5, 11].map(|seed| values(tokens * 2 * 64, seed));
            if spoiled {
                // The only key of the last segment of a head has scores of -infinity.
                new[0][2 * 64..][..64].fill(-1e38);
            }
            let run = || {
                let mut cached = [3, 7].map(|seed| values(2 * capacity * 64, seed));
                let cache = cached.each_mut().map(|values| KvMut::Dense(values));
                let mut queries = values(tokens * 6 * 64, 1);
                queries.iter_mut().for_each(|query| *query = query.abs() + 1.0);
                let positions = [4 * SEGMENT - 1, 4 * SEGMENT];
                attention(&mut queries, [&new[0], &new[1]], cache, rotary, &positions, shape)
                    .unwrap();
                queries
            };
            let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            let (whole, divided) = (one_thread.install(run), on_awake_threads(run));
            assert!(whole.iter().all(|output| output.is_finite()));
            assert_eq!(divided, whole);
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
