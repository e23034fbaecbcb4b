//! Attention of one new token of each sequence to a KV cache, split along the cache
//! (flash-decoding, as in the paper of Dao and others, 2023).

use burn_fp4_search::host::{AttentionShape, MAX_HEAD_DIM, View};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::attention_kernel::{
    AttentionArgsLaunch, JoinedArgsLaunch, attend_kernel, combine_kernel,
};
use super::attention_plan::AttentionPlan;
use super::kv_cache::{PackedKv, Words};
use crate::memory::{Counters, check_memory};
use crate::plan::{Capability, Dtype, Refusal};

/// Operands of [`attend`], contiguous.
#[derive(Debug, Clone)]
pub struct AttentionHandles {
    /// `[batch, 1, heads, head_dim]`, before RoPE.
    pub queries: Handle,
    /// `[batch, 1, kv_heads, head_dim]`, before RoPE.
    pub keys: Handle,
    /// In the shape of the keys.
    pub values: Handle,
    /// `[batch, kv_heads, capacity, head_dim]`, after RoPE, or their codes; written at the
    /// position.
    pub key_cache: Handle,
    /// In the shape of the cached keys; written at the position.
    pub value_cache: Handle,
    /// Format and scales of the cache; none of a dense one.
    pub packed: Option<PackedKv>,
    /// Cosines of RoPE, f32 `[positions, head_dim / 2]`.
    pub cos: Handle,
    /// Sines of RoPE, in the shape of the cosines.
    pub sin: Handle,
    /// Position of the token, i32 `[1]`. One beyond the cache or RoPE counts as the last.
    pub position: Handle,
}

impl AttentionHandles {
    /// Checks that memory holds the operands, with RoPE for `positions` positions, and that the
    /// device has kernels for the cache.
    pub(super) fn check(
        &self,
        device: &Capability,
        shape: &AttentionShape,
        positions: usize,
        dtype: Dtype,
    ) -> Result<(), Refusal> {
        let &AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity } = shape;
        let head = batch * head_dim * dtype.size();
        check_memory("queries", &self.queries, tokens * heads * head)?;
        check_memory("keys", &self.keys, tokens * kv_heads * head)?;
        check_memory("values", &self.values, tokens * kv_heads * head)?;
        let cached = match &self.packed {
            None => capacity * kv_heads * head,
            Some(packed) => {
                packed.check(device, shape)?;
                let [code_bytes, _] = packed.format.bytes_of_head(head_dim);
                batch * kv_heads * capacity * code_bytes
            }
        };
        check_memory("cached keys", &self.key_cache, cached)?;
        check_memory("cached values", &self.value_cache, cached)?;
        check_memory("cosines", &self.cos, 4 * positions * head_dim / 2)?;
        check_memory("sines", &self.sin, 4 * positions * head_dim / 2)?;
        check_memory("position", &self.position, 4 * tokens)
    }
}

/// Writes the keys and values of one token of each sequence into a KV cache, and attends to all
/// positions up to it. Returns the outputs in the shape of the queries. All operands but RoPE and
/// the position have one dtype. `positions` is the number of rows of RoPE.
///
/// With `counters` NVIDIA's Hopper needs one launch instead of two for a short cache; the bits are
/// the same.
///
/// ```no_run
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{AttentionHandles, Capability, Dtype, attend};
/// use burn_fp4_search::host::AttentionShape;
///
/// let client = Device::cuda(0).expect("a GPU").client();
/// let device = Capability::of(&client);
/// let floats = |count: usize| client.create_from_slice(f32::as_bytes(&vec![1.0; count]));
/// let shape =
///     AttentionShape { batch: 1, tokens: 1, heads: 8, kv_heads: 2, head_dim: 64, capacity: 512 };
/// let operands = AttentionHandles {
///     queries: floats(8 * 64),
///     keys: floats(2 * 64),
///     values: floats(2 * 64),
///     key_cache: floats(2 * 512 * 64),
///     value_cache: floats(2 * 512 * 64),
///     packed: None,
///     cos: floats(512 * 32),
///     sin: floats(512 * 32),
///     position: client.create_from_slice(i32::as_bytes(&[0])),
/// };
/// let output = attend(&client, &device, operands, shape, 512, Dtype::F32, None)?;
/// // The first token attends to itself alone.
/// assert_eq!(f32::from_bytes(&client.read_one_unchecked(output)), [1.0; 8 * 64]);
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn attend(
    client: &Client,
    device: &Capability,
    operands: AttentionHandles,
    shape: AttentionShape,
    positions: usize,
    dtype: Dtype,
    counters: Option<&Counters>,
) -> Result<Handle, Refusal> {
    device.check_decoder(dtype)?;
    check_attention(&shape, positions)?;
    operands.check(device, &shape, positions, dtype)?;
    let AttentionShape { batch, heads, head_dim, capacity, .. } = shape;
    let format = operands.packed.as_ref().map(|packed| packed.format);
    let plan = AttentionPlan::new(&shape, dtype, format, device);
    let counters = counters.filter(|_| plan.may_join(&shape, device));
    let query_bytes = batch * heads * head_dim * dtype.size();
    let output = client.empty(query_bytes);
    if query_bytes > 0 {
        let launch = match (dtype, Words::of(format, plan.vector)) {
            (Dtype::F32, Words::Dense) => launch::<f32, f32, u32>,
            (Dtype::F16, Words::Dense) => launch::<f16, f16, u32>,
            (Dtype::Bf16, Words::Dense) => launch::<bf16, bf16, u32>,
            (Dtype::F32, Words::U16) => launch::<f32, u16, u8>,
            (Dtype::F32, _) => launch::<f32, u32, u8>,
            (Dtype::F16, _) => launch::<f16, u32, u8>,
            (Dtype::Bf16, _) => launch::<bf16, u32, u8>,
        };
        let last = capacity.min(positions) as u32 - 1;
        launch(client, operands, output.clone(), counters, shape, plan, last);
    }
    Ok(output)
}

/// Checks that [`attend`] runs a shape with RoPE for `positions` positions, on any device.
///
/// ```
/// use burn_fp4_cubecl::check_attention;
/// use burn_fp4_search::host::AttentionShape;
///
/// let shape =
///     AttentionShape { batch: 1, tokens: 1, heads: 8, kv_heads: 2, head_dim: 64, capacity: 512 };
/// check_attention(&shape, 512)?;
/// let prompt = AttentionShape { tokens: 7, ..shape };
/// let refusal = check_attention(&prompt, 512).unwrap_err();
/// assert_eq!(refusal.to_string(), "tokens of attention: 7, not 1");
/// let ragged = AttentionShape { heads: 9, ..shape };
/// assert!(check_attention(&ragged, 512).is_err(), "2 key heads do not divide 9");
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]: there is more than one token, heads do not divide, a head has an odd number of
/// channels or too many, no position has both a place and a rotation, or the cache is too large.
pub fn check_attention(shape: &AttentionShape, positions: usize) -> Result<(), Refusal> {
    if shape.tokens != 1 {
        return Err(Refusal::Mismatch {
            what: "tokens of attention",
            expected: 1,
            found: shape.tokens,
        });
    }
    check_heads(shape, positions)
}

/// Checks all of a shape but its number of tokens.
pub(super) fn check_heads(shape: &AttentionShape, positions: usize) -> Result<(), Refusal> {
    let &AttentionShape { batch, heads, kv_heads, head_dim, capacity, .. } = shape;
    let mismatch = |what, expected, found| Err(Refusal::Mismatch { what, expected, found });
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return mismatch("query heads", kv_heads, heads);
    }
    if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > MAX_HEAD_DIM {
        return mismatch("channels of a head", MAX_HEAD_DIM, head_dim);
    }
    if capacity.min(positions) == 0 {
        return mismatch("positions of the KV cache and RoPE", 1, 0);
    }
    // Cubes of a launch along its second and third dimension.
    let most = usize::from(u16::MAX);
    if batch.max(heads) > most {
        return mismatch("sequences and heads", most, batch.max(heads));
    }
    let values = [batch, heads, capacity, head_dim].into_iter().fold(1, usize::saturating_mul);
    let rotations = positions.saturating_mul(head_dim);
    let (found, expected) = (values.max(rotations), View::MAX_LEN);
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    Ok(())
}

/// Launches the kernels, or with counters the first one. The cache has vectors of `C`, and scales
/// in `S`.
fn launch<F: Float, C: Numeric, S: Int>(
    client: &Client,
    operands: AttentionHandles,
    output: Handle,
    counters: Option<&Counters>,
    shape: AttentionShape,
    plan: AttentionPlan,
    last: u32,
) {
    let AttentionShape { batch, heads, kv_heads, capacity, head_dim, .. } = shape;
    let columns = plan.columns() as usize;
    let tiles = capacity.div_ceil(plan.tile as usize);
    let outputs = batch * heads * tiles;
    let partial = client.empty(4 * outputs * head_dim);
    let softmax = client.empty(8 * outputs);
    let cached = batch * kv_heads * capacity;
    let (key_scales, value_scales, scales) = match operands.packed {
        None => (softmax.clone(), softmax.clone(), 2 * outputs),
        Some(PackedKv { format, key_scales, value_scales }) => {
            let [_, scale_bytes] = format.bytes_of_head(head_dim);
            (key_scales, value_scales, cached * scale_bytes)
        }
    };
    // `last` is the last position of both tables.
    let angles = (last as usize + 1) * head_dim / 2;
    let mut joined = SequenceArg::new();
    if let Some(counters) = counters {
        // SAFETY: as below.
        joined.push(unsafe {
            JoinedArgsLaunch::new(
                BufferArg::from_raw_parts(output.clone(), batch * heads * head_dim),
                BufferArg::from_raw_parts(counters.handle(), Counters::LEN),
            )
        });
    }
    // SAFETY: the lengths are the shape's, which memory was checked for, and positions
    // beyond `last` count as `last`. The second kernel reads what the first has written. A dense
    // cache has no scales: other memory stands for them, and is not used.
    unsafe {
        let attention = AttentionArgsLaunch::new(
            BufferArg::from_raw_parts(operands.queries, batch * heads * columns),
            BufferArg::from_raw_parts(operands.keys, batch * kv_heads * columns),
            BufferArg::from_raw_parts(operands.values, batch * kv_heads * columns),
            BufferArg::from_raw_parts(operands.key_cache, cached * columns),
            BufferArg::from_raw_parts(operands.value_cache, cached * columns),
            BufferArg::from_raw_parts(key_scales, scales),
            BufferArg::from_raw_parts(value_scales, scales),
            BufferArg::from_raw_parts(operands.cos, angles),
            BufferArg::from_raw_parts(operands.sin, angles),
            BufferArg::from_raw_parts(operands.position.clone(), 1),
            BufferArg::from_raw_parts(partial.clone(), outputs * head_dim),
            BufferArg::from_raw_parts(softmax.clone(), 2 * outputs),
            joined,
            capacity as u32,
            last,
            plan,
        );
        attend_kernel::launch_unchecked::<F, C, S>(
            client,
            CubeCount::Static(tiles as u32, kv_heads as u32 * plan.groups, batch as u32),
            CubeDim::new_1d(plan.units),
            plan.vector as usize,
            Words::of(plan.format, plan.vector).width(plan.vector),
            attention,
        );
        if counters.is_some() {
            return;
        }
        combine_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(heads as u32, batch as u32, 1),
            CubeDim::new_1d(plan.parts * plan.head_dim.next_power_of_two()),
            BufferArg::from_raw_parts(partial, outputs * head_dim),
            BufferArg::from_raw_parts(softmax, 2 * outputs),
            BufferArg::from_raw_parts(operands.position, 1),
            BufferArg::from_raw_parts(output, batch * heads * head_dim),
            tiles as u32,
            last,
            plan,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape =
        AttentionShape { batch: 1, tokens: 1, heads: 8, kv_heads: 2, head_dim: 64, capacity: 9 };

    #[test]
    fn shapes_that_no_kernel_runs_are_refused() {
        let mismatch = |shape, positions, name| {
            let refused = check_attention(&shape, positions);
            assert!(
                matches!(refused, Err(Refusal::Mismatch { what, .. }) if what == name),
                "{refused:?}"
            );
        };
        mismatch(AttentionShape { tokens: 2, ..SHAPE }, 9, "tokens of attention");
        mismatch(AttentionShape { heads: 7, ..SHAPE }, 9, "query heads");
        mismatch(AttentionShape { head_dim: 7, ..SHAPE }, 9, "channels of a head");
        mismatch(AttentionShape { capacity: 0, ..SHAPE }, 9, "positions of the KV cache and RoPE");
        mismatch(SHAPE, 0, "positions of the KV cache and RoPE");
        mismatch(AttentionShape { batch: 1 << 16, ..SHAPE }, 9, "sequences and heads");
        let large = AttentionShape { capacity: 1 << 30, ..SHAPE };
        assert!(matches!(check_attention(&large, 9), Err(Refusal::TooLarge { .. })));
    }
}
