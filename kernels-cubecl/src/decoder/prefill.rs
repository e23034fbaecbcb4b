//! Attention of the tokens of a prompt (prefill), besides its two dense matmuls.
//!
//! ```text
//! rotate_into_cache   RoPE of queries and keys; rotated keys and values go into the KV cache
//! (dequantize_heads)  of a packed cache, all of its keys and values in the dtype
//! (matmul)            scores = rotated queries x cached keys^T
//! attention_weights   causal softmax of the scores, a cube for each row
//! (matmul)            outputs = weights x cached values
//! ```
//!
//! On devices with WGMMA, `flash.rs` replaces the matmuls and the softmax.
//!
//! The tokens of a prompt therefore see the rounded keys and values, as later tokens do.

use burn_fp4_search::Hadamard;
use burn_fp4_search::host::{AttentionShape, KvFormat, View};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::attention::{AttentionHandles, check_heads};
use super::head::{head_vector, position_of, rotated, to_vector};
use super::kv_cache::{PackedKv, Words, load_own, quantize_own};
use super::row::{max_of_cube, sum_of_cube, widest_vector};
use crate::hadamard::hadamard;
use crate::memory::check_memory;
use crate::numeric::element::narrow;
use crate::plan::{Capability, Conversion, Dtype, Refusal, UNITS};

/// Checks that [`rotate_into_cache`] and [`attention_weights`] run a shape with RoPE for
/// `positions` positions, on any device.
///
/// ```
/// use burn_fp4_cubecl::{Refusal, check_prefill};
/// use burn_fp4_search::host::AttentionShape;
///
/// let (batch, tokens, heads, kv_heads) = (1, 1 << 12, 32, 8);
/// let shape = AttentionShape { batch, tokens, heads, kv_heads, head_dim: 128, capacity: 1 << 13 };
/// check_prefill(&shape, 1 << 13)?;
/// let long = AttentionShape { tokens: 1 << 15, capacity: 1 << 15, ..shape };
/// let refused = check_prefill(&long, 1 << 15); // 2^35 scores
/// assert!(matches!(refused, Err(Refusal::TooLarge { .. })));
/// # Ok::<(), Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]: as [`check_attention`](super::check_attention), for any number of tokens, or too
/// many scores.
pub fn check_prefill(shape: &AttentionShape, positions: usize) -> Result<(), Refusal> {
    check_prompt(shape, positions)?;
    let &AttentionShape { batch, tokens, heads, capacity, .. } = shape;
    check_length([batch, heads, tokens, capacity])
}

/// Checks that [`rotate_into_cache`] runs a shape with RoPE for `positions` positions.
///
/// # Errors
/// [`Refusal`]: as [`check_attention`](super::check_attention), or too many queries.
pub(super) fn check_prompt(shape: &AttentionShape, positions: usize) -> Result<(), Refusal> {
    check_heads(shape, positions)?;
    let &AttentionShape { batch, tokens, heads, head_dim, .. } = shape;
    check_length([batch, tokens, heads, head_dim])
}

fn check_length(lengths: [usize; 4]) -> Result<(), Refusal> {
    let (found, expected) = (lengths.into_iter().fold(1, usize::saturating_mul), View::MAX_LEN);
    if found > expected { Err(Refusal::TooLarge { found, expected }) } else { Ok(()) }
}

/// Rotates the queries and keys of tokens by their positions, and writes the rotated keys and the
/// values into a KV cache. Returns the rotated queries `[batch, heads, tokens, head_dim]`,
/// transformed as the cached keys are.
///
/// Operands are as for [`attend`](super::attend), with `[batch, tokens, ..]` queries, keys and
/// values, and positions i32 `[tokens]` that differ. `positions` is the number of rows of RoPE.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{AttentionHandles, Capability, Dtype, rotate_into_cache};
/// use burn_fp4_search::host::AttentionShape;
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let upload = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
/// let shape =
///     AttentionShape { batch: 1, tokens: 1, heads: 1, kv_heads: 1, head_dim: 2, capacity: 2 };
/// let key_cache = upload(&[0.0; 4]);
/// let operands = AttentionHandles {
///     queries: upload(&[1.0, 2.0]),
///     keys: upload(&[3.0, 4.0]),
///     values: upload(&[5.0, 6.0]),
///     key_cache: key_cache.clone(),
///     value_cache: upload(&[0.0; 4]),
///     packed: None,
///     cos: upload(&[1.0, 0.0]), // a quarter turn at position 1
///     sin: upload(&[0.0, 1.0]),
///     position: client.create_from_slice(i32::as_bytes(&[1])),
/// };
/// let rotated = rotate_into_cache(&client, &device, operands, shape, 2, Dtype::F32)?;
/// assert_eq!(f32::from_bytes(&client.read_one_unchecked(rotated)), [-2.0, 1.0]);
/// let keys = client.read_one_unchecked(key_cache);
/// assert_eq!(f32::from_bytes(&keys), [0.0, 0.0, -4.0, 3.0]);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn rotate_into_cache(
    client: &Client,
    device: &Capability,
    operands: AttentionHandles,
    shape: AttentionShape,
    positions: usize,
    dtype: Dtype,
) -> Result<Handle, Refusal> {
    device.check_decoder(dtype)?;
    check_prompt(&shape, positions)?;
    operands.check(device, &shape, positions, dtype)?;
    let rotated =
        client.empty(shape.batch * shape.tokens * shape.heads * shape.head_dim * dtype.size());
    if shape.batch * shape.tokens == 0 {
        return Ok(rotated);
    }
    let launch = match dtype {
        Dtype::F32 => launch_rotate::<f32>,
        Dtype::F16 => launch_rotate::<f16>,
        Dtype::Bf16 => launch_rotate::<bf16>,
    };
    let vector = head_vector(shape.head_dim as u32, dtype);
    let form = (vector, Conversion::to(dtype, device));
    let Some(packed) = operands.packed.clone() else {
        launch(client, device, operands, rotated.clone(), shape, positions, form);
        return Ok(rotated);
    };
    let format = packed.format;
    let write = match (dtype, Words::of(Some(format), vector)) {
        (Dtype::F32, Words::U16) => launch_write::<f32, u16>,
        (Dtype::F32, _) => launch_write::<f32, u32>,
        (Dtype::F16, _) => launch_write::<f16, u32>,
        (Dtype::Bf16, _) => launch_write::<bf16, u32>,
    };
    let last = shape.capacity.min(positions) as u32 - 1;
    write(client, device, operands.clone(), packed, shape, last, vector);
    // No key heads: the queries alone.
    let queries = AttentionShape { kv_heads: 0, ..shape };
    launch(client, device, operands, rotated.clone(), queries, positions, form);
    if !format.transforms_keys() {
        return Ok(rotated);
    }
    let view = View::rows(shape.batch * shape.tokens * shape.heads, shape.head_dim);
    hadamard(client, device, rotated, view, dtype, Hadamard::with_signs(0), false)
}

fn launch_rotate<F: Float>(
    client: &Client,
    device: &Capability,
    operands: AttentionHandles,
    output: Handle,
    shape: AttentionShape,
    positions: usize,
    (vector, conversion): (u32, Conversion),
) {
    let AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity } = shape;
    let AttentionHandles {
        queries, keys, values, key_cache, value_cache, cos, sin, position, ..
    } = operands;
    let columns = head_dim / vector as usize;
    let vectors = |heads: usize| batch * heads * columns;
    let pairs = (batch * tokens * (heads + kv_heads) * columns / 2) as u32;
    let last = capacity.min(positions) as u32 - 1;
    let angles = (last as usize + 1) * head_dim / 2;
    let [x, y] = device.two_dimensions(pairs.div_ceil(UNITS));
    // SAFETY: the lengths are the shape's, which memory was checked for, and positions
    // beyond `last` count as `last`.
    unsafe {
        rotate_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(UNITS),
            vector as usize,
            BufferArg::from_raw_parts(queries, tokens * vectors(heads)),
            BufferArg::from_raw_parts(keys, tokens * vectors(kv_heads)),
            BufferArg::from_raw_parts(values, tokens * vectors(kv_heads)),
            BufferArg::from_raw_parts(key_cache, capacity * vectors(kv_heads)),
            BufferArg::from_raw_parts(value_cache, capacity * vectors(kv_heads)),
            BufferArg::from_raw_parts(cos, angles),
            BufferArg::from_raw_parts(sin, angles),
            BufferArg::from_raw_parts(position, tokens),
            BufferArg::from_raw_parts(output, tokens * vectors(heads)),
            pairs,
            tokens as u32,
            heads as u32,
            kv_heads as u32,
            capacity as u32,
            last,
            head_dim as u32,
            vector,
            conversion,
        );
    }
}

/// A unit takes two vectors of a head, whose channels rotate together.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn rotate_kernel<F: Float, N: Size>(
    queries: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    key_cache: &mut [Vector<F, N>],
    value_cache: &mut [Vector<F, N>],
    cos: &[f32],
    sin: &[f32],
    positions: &[i32],
    output: &mut [Vector<F, N>],
    pairs: u32,
    tokens: u32,
    heads: u32,
    kv_heads: u32,
    capacity: u32,
    last: u32,
    #[comptime] head_dim: u32,
    #[comptime] vector: u32,
    #[comptime] conversion: Conversion,
) {
    let columns = comptime!(head_dim / vector);
    let half = comptime!(columns / 2);
    let at = CUBE_POS as u32 * UNITS + UNIT_POS;
    if at >= pairs {
        terminate!();
    }
    let (pair, at) = (at % half, at / half);
    let all_heads = heads + kv_heads;
    let (head, at) = (at % all_heads, at / all_heads);
    let (token, sequence) = (at % tokens, at / tokens);
    let position = position_of(positions, token, last);
    let angle = position * comptime!(head_dim / 2) + pair * vector;
    if head < heads {
        let from = ((sequence * tokens + token) * heads + head) * columns + pair;
        let (first, second) = (queries[from as usize], queries[(from + half) as usize]);
        let (low, high) = rotated::<F, N>(first, second, cos, sin, angle, vector);
        let to = ((sequence * heads + head) * tokens + token) * columns + pair;
        output[to as usize] = to_vector::<F, N>(&low, vector, conversion);
        output[(to + half) as usize] = to_vector::<F, N>(&high, vector, conversion);
    } else {
        let head = head - heads;
        let from = ((sequence * tokens + token) * kv_heads + head) * columns + pair;
        let (first, second) = (keys[from as usize], keys[(from + half) as usize]);
        let (low, high) = rotated::<F, N>(first, second, cos, sin, angle, vector);
        let to = ((sequence * kv_heads + head) * capacity + position) * columns + pair;
        key_cache[to as usize] = to_vector::<F, N>(&low, vector, conversion);
        key_cache[(to + half) as usize] = to_vector::<F, N>(&high, vector, conversion);
        value_cache[to as usize] = values[from as usize];
        value_cache[(to + half) as usize] = values[(from + half) as usize];
    }
}

/// Rotates and quantizes the keys of tokens, and their values, into a packed cache.
fn launch_write<F: Float, C: Numeric>(
    client: &Client,
    device: &Capability,
    operands: AttentionHandles,
    packed: PackedKv,
    shape: AttentionShape,
    last: u32,
    vector: u32,
) {
    let AttentionShape { batch, tokens, kv_heads, head_dim, capacity, .. } = shape;
    let AttentionHandles { keys, values, key_cache, value_cache, cos, sin, position, .. } =
        operands;
    let PackedKv { format, key_scales, value_scales } = packed;
    let (heads, columns) = (batch * tokens * kv_heads, head_dim / vector as usize);
    let cached = batch * kv_heads * capacity;
    let [_, scale_bytes] = format.bytes_of_head(head_dim);
    let width = Words::of(Some(format), vector).width(vector);
    let angles = (last as usize + 1) * head_dim / 2;
    let units = (columns as u32).next_power_of_two().max(device.plane);
    let [x, y] = device.two_dimensions(heads as u32);
    // SAFETY: the lengths are the shape's, which memory was checked for, cubes beyond the heads end
    // at once, and positions beyond `last` count as `last`.
    unsafe {
        write_kernel::launch_unchecked::<F, C>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(units),
            vector as usize,
            width,
            BufferArg::from_raw_parts(keys, heads * columns),
            BufferArg::from_raw_parts(values, heads * columns),
            BufferArg::from_raw_parts(key_cache, cached * columns),
            BufferArg::from_raw_parts(value_cache, cached * columns),
            BufferArg::from_raw_parts(key_scales, cached * scale_bytes),
            BufferArg::from_raw_parts(value_scales, cached * scale_bytes),
            BufferArg::from_raw_parts(cos, angles),
            BufferArg::from_raw_parts(sin, angles),
            BufferArg::from_raw_parts(position, tokens),
            heads as u32,
            tokens as u32,
            kv_heads as u32,
            capacity as u32,
            last,
            head_dim as u32,
            vector,
            format,
        );
    }
}

/// A cube takes the key and the value of a head of a token.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn write_kernel<F: Float, N: Size, C: Numeric, W: Size>(
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    key_cache: &mut [Vector<C, W>],
    value_cache: &mut [Vector<C, W>],
    key_scales: &mut [u8],
    value_scales: &mut [u8],
    cos: &[f32],
    sin: &[f32],
    positions: &[i32],
    heads: u32,
    tokens: u32,
    kv_heads: u32,
    capacity: u32,
    last: u32,
    #[comptime] head_dim: u32,
    #[comptime] vector: u32,
    #[comptime] format: KvFormat,
) {
    let at = CUBE_POS as u32;
    if at >= heads {
        terminate!();
    }
    let (kv_head, token) = (at % kv_heads, at / kv_heads);
    let (token, sequence) = (token % tokens, token / tokens);
    let position = position_of(positions, token, last);
    let (from, angles) = (at * comptime!(head_dim / vector), position * comptime!(head_dim / 2));
    let mut own = Shared::<[f32]>::new_slice(comptime!((2 * head_dim) as usize));
    load_own::<F, N>(keys, values, cos, sin, from, angles, &mut own, head_dim, vector);
    sync_cube();
    quantize_own::<C, W, u8>(
        &own,
        key_cache,
        value_cache,
        key_scales,
        value_scales,
        (sequence * kv_heads + kv_head) * capacity + position,
        head_dim,
        vector,
        format,
    );
}

/// Computes the causal softmax of scores `[batch, heads, tokens, capacity]`, divided by the root of
/// `head_dim`, in the shape and dtype of the scores. Token `t` attends to positions up to
/// `position[t]`, i32 `[tokens]`; the weights of later ones are 0. A position beyond the cache or
/// RoPE, which has `positions` rows, counts as the last. The arithmetic is f32.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, attention_weights};
/// use burn_fp4_search::host::AttentionShape;
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let shape =
///     AttentionShape { batch: 1, tokens: 2, heads: 1, kv_heads: 1, head_dim: 2, capacity: 2 };
/// let scores = client.create_from_slice(f32::as_bytes(&[3.0; 4]));
/// let position = client.create_from_slice(i32::as_bytes(&[0, 1]));
/// let weights = attention_weights(&client, &device, scores, position, shape, 2, Dtype::F32)?;
/// let weights = client.read_one_unchecked(weights);
/// assert_eq!(f32::from_bytes(&weights), [1.0, 0.0, 0.5, 0.5]); // the first does not look ahead
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn attention_weights(
    client: &Client,
    device: &Capability,
    scores: Handle,
    position: Handle,
    shape: AttentionShape,
    positions: usize,
    dtype: Dtype,
) -> Result<Handle, Refusal> {
    device.check_decoder(dtype)?;
    let AttentionShape { batch, tokens, heads, capacity, .. } = shape;
    check_prefill(&shape, positions)?;
    let rows = batch * heads * tokens;
    let bytes = rows * capacity * dtype.size();
    check_memory("scores", &scores, bytes)?;
    check_memory("position", &position, 4 * tokens)?;
    let weights = client.empty(bytes);
    if bytes > 0 {
        let launch = match dtype {
            Dtype::F32 => launch_softmax::<f32>,
            Dtype::F16 => launch_softmax::<f16>,
            Dtype::Bf16 => launch_softmax::<bf16>,
        };
        let vector = widest_vector(capacity, dtype);
        let form = (vector, Conversion::to(dtype, device));
        let last = capacity.min(positions) as u32 - 1;
        launch(client, device, [scores, position, weights.clone()], shape, last, form);
    }
    Ok(weights)
}

fn launch_softmax<F: Float>(
    client: &Client,
    device: &Capability,
    [scores, position, weights]: [Handle; 3],
    shape: AttentionShape,
    last: u32,
    (vector, conversion): (usize, Conversion),
) {
    let AttentionShape { batch, tokens, heads, capacity, head_dim, .. } = shape;
    let rows = batch * heads * tokens;
    let vectors = capacity / vector;
    let units = device.units_of_row(UNITS);
    let [x, y] = device.two_dimensions(rows as u32);
    // SAFETY: the lengths match the shape; cubes beyond the last row end at once.
    unsafe {
        softmax_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(units),
            vector,
            BufferArg::from_raw_parts(scores, rows * vectors),
            BufferArg::from_raw_parts(position, tokens),
            BufferArg::from_raw_parts(weights, rows * vectors),
            rows as u32,
            tokens as u32,
            vectors as u32,
            last,
            1.0 / (head_dim as f32).sqrt(),
            vector as u32,
            conversion,
            device.plane,
            units,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn softmax_kernel<F: Float, N: Size>(
    scores: &[Vector<F, N>],
    positions: &[i32],
    weights: &mut [Vector<F, N>],
    rows: u32,
    tokens: u32,
    vectors: u32,
    last: u32,
    scale: f32,
    #[comptime] vector: u32,
    #[comptime] conversion: Conversion,
    #[comptime] plane: u32,
    #[comptime] units: u32,
) {
    let row = CUBE_POS as u32;
    if row >= rows {
        terminate!();
    }
    let first = row * vectors;
    let count = position_of(positions, row % tokens, last) + 1;
    let counted = count.div_ceil(vector);
    let mut largest = f32::min_value();
    let mut at = UNIT_POS;
    while at < counted {
        let loaded = scores[(first + at) as usize];
        #[unroll]
        for index in 0..vector {
            let score = f32::cast_from(loaded.extract(comptime!(index as usize)));
            if at * vector + index < count {
                largest = max(largest, score);
            }
        }
        at += units;
    }
    let largest = max_of_cube::<f32>(largest, plane, units);
    let mut sum = 0.0f32.runtime();
    let mut at = UNIT_POS;
    while at < counted {
        let loaded = scores[(first + at) as usize];
        #[unroll]
        for index in 0..vector {
            let score = f32::cast_from(loaded.extract(comptime!(index as usize)));
            if at * vector + index < count {
                sum += ((score - largest) * scale).exp();
            }
        }
        at += units;
    }
    let factor = 1.0f32 / sum_of_cube(sum, plane, units);
    let mut at = UNIT_POS;
    while at < vectors {
        let loaded = scores[(first + at) as usize];
        let mut found = Vector::<F, N>::empty();
        #[unroll]
        for index in 0..vector {
            let score = f32::cast_from(loaded.extract(comptime!(index as usize)));
            let weight = ((score - largest) * scale).exp() * factor;
            let kept = select(at * vector + index < count, weight, 0.0f32.runtime());
            found.insert(comptime!(index as usize), narrow::<F>(kept, conversion));
        }
        weights[(first + at) as usize] = found;
        at += units;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_whose_scores_are_too_many_are_refused() {
        let shape = AttentionShape {
            batch: 1,
            tokens: 1 << 12,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            capacity: 1 << 13,
        };
        assert_eq!(check_prefill(&shape, 1 << 13), Ok(()));
        let long = AttentionShape { tokens: 1 << 15, capacity: 1 << 15, ..shape };
        assert!(matches!(check_prefill(&long, 1 << 15), Err(Refusal::TooLarge { .. })));
    }
}
