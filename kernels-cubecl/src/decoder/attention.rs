//! Attention of one new token of each sequence to a KV cache, split along the cache
//! (flash-decoding, as in the paper of Dao and others, 2023).
//!
//! ```text
//! a cube takes a tile of positions of a sequence and a key head, for queries that share the head:
//!     the cube of the token's own position rotates the new key, and writes it and the new value;
//!     for a packed cache it transforms and quantizes them
//!     rotate the queries
//!     load the keys and the values of the tile, a vector of channels per unit and step
//!     scores[query][position] = the products of the vectors of a position, in order of channels
//!     weights = exp(scores - their maximum); keep the maximum and the sum
//!     output[query] = weights x values: units add their positions, then are added in order
//!     with counters: the last cube of its queries adds their tiles, as below
//! without counters, in a second launch, a cube takes a query head:
//!     parts of its units take turns along the tiles, and scale their outputs to one maximum
//!     add the parts in order, scaled to one maximum; divide by the sum
//! ```
//!
//! Tiles beyond the token's position do nothing. All arithmetic is f32, in an order that depends
//! only on shape, dtype and device.

use burn_fp4_search::host::{AttentionShape, KV_BLOCK, KvFormat, MAX_HEAD_DIM, View};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::head::{head_vector, position_of, rotated, to_vector};
use super::kv_cache::{PackedKv, Words, channels, kv_scale, load_own, quantize_own, scale_place};
use crate::instructions::{arrive, publish};
use crate::memory::{Counters, check_memory};
use crate::numeric::element::narrow;
use crate::numeric::hadamard::{SIZE, sum_by_butterflies};
use crate::plan::{Capability, Conversion, Dtype, Refusal};

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
    let AttentionShape { batch, heads, capacity, head_dim, .. } = shape;
    check_attention(&shape, positions)?;
    operands.check(device, &shape, positions, dtype)?;
    let format = operands.packed.as_ref().map(|packed| packed.format);
    let plan = Plan::new(&shape, dtype, format, device);
    let counters = counters.filter(|_| plan.may_join(&shape, device)).map(Counters::handle);
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

/// Returns the most f32 values that products and outputs take in the shared memory of a cube: the
/// rest is for queries, weights and a key.
const fn most_values(shared_memory: usize) -> u32 {
    (shared_memory / 4 * 3 / 4) as u32
}

/// Most tiles that a cube adds which has attended to one of them: of more, the parts of a cube of
/// their own take fewer each.
const MAX_JOINED_TILES: u32 = 16;

/// Sizes of the attention of a cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Plan {
    /// Units of a cube.
    units: u32,
    plane: u32,
    /// Positions of a cube.
    tile: u32,
    /// Query heads of a cube; they share a key head.
    queries: u32,
    /// Cubes per key head.
    groups: u32,
    head_dim: u32,
    /// Channels of a vector.
    vector: u32,
    /// Parts of the tiles that are added apart: a unit per channel for each in the second launch.
    parts: u32,
    /// True if units take the token's own key and value from shared memory and the operands: on
    /// wgpu a barrier does not order the cache's memory.
    keeps_own: bool,
    /// Format of the cache; none of a dense one.
    format: Option<KvFormat>,
    conversion: Conversion,
}

impl Plan {
    /// Plans the attention of a token: the most queries of a cube that shared memory has room for.
    fn new(
        shape: &AttentionShape,
        dtype: Dtype,
        format: Option<KvFormat>,
        device: &Capability,
    ) -> Self {
        let of_key_head = (shape.heads / shape.kv_heads) as u32;
        let mut plans = (1..=8)
            .rev()
            .filter(|&queries| of_key_head.is_multiple_of(queries))
            .map(|queries| Self::of_queries(queries, shape, dtype, format, device));
        let fits = |plan: &Self| plan.bytes() <= device.shared_memory();
        plans.find(fits).unwrap_or_else(|| Self::of_queries(1, shape, dtype, format, device))
    }

    /// Plans cubes of a number of query heads.
    fn of_queries(
        queries: u32,
        shape: &AttentionShape,
        dtype: Dtype,
        format: Option<KvFormat>,
        device: &Capability,
    ) -> Self {
        let &AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let head_dim = head_dim as u32;
        let vector = head_vector(head_dim, dtype);
        let columns = head_dim / vector;
        let values = most_values(device.shared_memory());
        // Barriers are slow where a unit takes a row.
        let together = device.units_of_row(256);
        let most_units = if together > 1 { together } else { 16 };
        // A power of two, so that planes are whole.
        let units = 1 << (values / (vector * queries + 1)).min(most_units).ilog2();
        let units = units.max(columns.next_power_of_two()).max(device.plane);
        // Without planes a unit adds the scores of a tile. Packed positions are short: a tile has
        // more of them for its outputs.
        let most_tile = match (device.plane > 1, format) {
            (false, _) => 8,
            (true, None) => 64,
            (true, Some(_)) => 128,
        };
        let tile = (values / ((columns + 1) * queries)).min(most_tile);
        let most_parts = match together {
            1 => 1,
            _ => device.units_of_row(1024) / head_dim.next_power_of_two(),
        };
        let parts = most_parts.clamp(1, 8);
        let groups = (heads / kv_heads) as u32 / queries;
        let (plane, conversion) = (device.plane, Conversion::to(dtype, device));
        Self {
            units,
            plane,
            tile,
            queries,
            groups,
            head_dim,
            vector,
            parts,
            keeps_own: device.portable.is_some(),
            format,
            conversion,
        }
    }

    /// Returns true if the last cube of a key head's queries may add their tiles.
    fn may_join(&self, shape: &AttentionShape, device: &Capability) -> bool {
        let counted = shape.batch * shape.kv_heads * self.groups as usize;
        let tiles = shape.capacity.div_ceil(self.tile as usize);
        device.wgmma.is_native() && tiles <= MAX_JOINED_TILES as usize && counted <= Counters::LEN
    }

    /// Vectors of a head.
    const fn columns(&self) -> u32 {
        self.head_dim / self.vector
    }

    /// Positions that the units of a cube load at a time.
    const fn step(&self) -> u32 {
        self.units / self.columns()
    }

    /// Values between the products of two positions in shared memory. It is odd, so that a plane
    /// that reads a column of 32 positions uses 32 banks.
    const fn product_stride(&self) -> u32 {
        self.columns() + 1
    }

    /// Values between the outputs of two positions in shared memory. Planes that write two
    /// positions of 16 columns use 32 banks.
    const fn output_stride(&self) -> u32 {
        self.queries * self.head_dim + self.columns()
    }

    /// Values in shared memory: first the products of columns, then the outputs of positions.
    const fn shared(&self) -> u32 {
        let products = self.queries * self.tile * self.product_stride();
        let outputs = self.step() * self.output_stride();
        if products > outputs { products } else { outputs }
    }

    /// Bytes in shared memory.
    const fn bytes(&self) -> usize {
        let queries = self.queries * (self.head_dim + self.tile);
        // With the largest magnitudes of the blocks of a packed key and value.
        let own = match self.format {
            None if self.keeps_own => self.head_dim,
            None => 0,
            Some(_) => 2 * (self.head_dim + self.head_dim / KV_BLOCK as u32),
        };
        4 * (self.shared() + queries + own) as usize
    }
}

/// Launches the kernels, or with counters the first one. The cache has vectors of `C`, and scales
/// in `S`.
fn launch<F: Float, C: Numeric, S: Int>(
    client: &Client,
    operands: AttentionHandles,
    output: Handle,
    counters: Option<Handle>,
    shape: AttentionShape,
    plan: Plan,
    last: u32,
) {
    let AttentionShape { batch, heads, kv_heads, capacity, head_dim, .. } = shape;
    let vector = plan.vector as usize;
    let columns = head_dim / vector;
    let tiles = capacity.div_ceil(plan.tile as usize);
    let outputs = batch * heads * tiles;
    let partial = client.empty(4 * outputs * head_dim);
    let softmax = client.empty(8 * outputs);
    let AttentionHandles {
        queries,
        keys,
        values,
        key_cache,
        value_cache,
        packed,
        cos,
        sin,
        position,
    } = operands;
    let cached = batch * kv_heads * capacity;
    let (key_scales, value_scales, scales) = match packed {
        None => (softmax.clone(), softmax.clone(), 2 * outputs),
        Some(PackedKv { format, key_scales, value_scales }) => {
            let [_, scale_bytes] = format.bytes_of_head(head_dim);
            (key_scales, value_scales, cached * scale_bytes)
        }
    };
    let width = Words::of(plan.format, plan.vector).width(plan.vector);
    // `last` is the last position of both tables.
    let angles = (last as usize + 1) * head_dim / 2;
    let joins = counters.is_some();
    let mut joined = SequenceArg::new();
    if let Some(counters) = counters {
        // SAFETY: as below.
        joined.push(unsafe {
            JoinedLaunch::new(
                BufferArg::from_raw_parts(output.clone(), batch * heads * head_dim),
                BufferArg::from_raw_parts(counters, Counters::LEN),
            )
        });
    }
    // SAFETY: the lengths are the shape's, which memory was checked for, and positions
    // beyond `last` count as `last`. The second kernel reads what the first has written. A dense
    // cache has no scales: other memory stands for them, and is not used.
    unsafe {
        attend_kernel::launch_unchecked::<F, C, S>(
            client,
            CubeCount::Static(tiles as u32, kv_heads as u32 * plan.groups, batch as u32),
            CubeDim::new_1d(plan.units),
            vector,
            width,
            BufferArg::from_raw_parts(queries, batch * heads * columns),
            BufferArg::from_raw_parts(keys, batch * kv_heads * columns),
            BufferArg::from_raw_parts(values, batch * kv_heads * columns),
            BufferArg::from_raw_parts(key_cache, cached * columns),
            BufferArg::from_raw_parts(value_cache, cached * columns),
            BufferArg::from_raw_parts(key_scales, scales),
            BufferArg::from_raw_parts(value_scales, scales),
            BufferArg::from_raw_parts(cos, angles),
            BufferArg::from_raw_parts(sin, angles),
            BufferArg::from_raw_parts(position.clone(), 1),
            BufferArg::from_raw_parts(partial.clone(), outputs * head_dim),
            BufferArg::from_raw_parts(softmax.clone(), 2 * outputs),
            joined,
            capacity as u32,
            last,
            plan,
        );
        if joins {
            return;
        }
        combine_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(heads as u32, batch as u32, 1),
            CubeDim::new_1d(plan.parts * plan.head_dim.next_power_of_two()),
            BufferArg::from_raw_parts(partial, outputs * head_dim),
            BufferArg::from_raw_parts(softmax, 2 * outputs),
            BufferArg::from_raw_parts(position, 1),
            BufferArg::from_raw_parts(output, batch * heads * head_dim),
            tiles as u32,
            last,
            plan,
        );
    }
}

/// Output and counters of the cube that adds the tiles.
#[derive(CubeType, CubeLaunch)]
struct Joined<F: Float> {
    output: &'static mut [F],
    /// One for the cubes of the same queries.
    counters: &'static mut [u32],
}

/// Runs the first loop at the head of this file.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments, clippy::too_many_lines, reason = "shared memory of a cube")]
fn attend_kernel<F: Float, N: Size, C: Numeric, W: Size, S: Int>(
    queries: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    key_cache: &mut [Vector<C, W>],
    value_cache: &mut [Vector<C, W>],
    key_scales: &mut [S],
    value_scales: &mut [S],
    cos: &[f32],
    sin: &[f32],
    position: &[i32],
    partial: &mut [f32],
    softmax: &mut [f32],
    joined: &mut Sequence<Joined<F>>,
    capacity: u32,
    last: u32,
    #[comptime] plan: Plan,
) {
    let Plan { units, plane, tile, queries: rows, groups, head_dim, vector, conversion, .. } =
        comptime!(plan);
    let columns = comptime!(plan.columns());
    let half = comptime!(plan.columns() / 2);
    let step = comptime!(plan.step());
    let steps = comptime!(tile.div_ceil(step));
    let position = position_of(position, 0u32, last);
    let start = CUBE_POS_X * tile;
    if start > position {
        terminate!();
    }
    let (kv_head, group) = (CUBE_POS_Y / groups, CUBE_POS_Y % groups);
    let key_head = CUBE_POS_Z * (CUBE_COUNT_Y / groups) + kv_head;
    let first_head = key_head * capacity;
    let cached = first_head * columns;
    let angles = position * comptime!(head_dim / 2);
    let format = comptime!(plan.format);
    let keeps_own = comptime!(plan.keeps_own);
    let own_len = comptime!(match (format, keeps_own) {
        (Some(_), _) => 2 * head_dim,
        (None, true) => head_dim,
        (None, false) => 1,
    });
    let mut own_key = Shared::<[f32]>::new_slice(comptime!(own_len as usize));

    if position - start < tile {
        match comptime!(format) {
            None => {
                if UNIT_POS < half {
                    let at = key_head * columns + UNIT_POS;
                    let (first, second) = (keys[at as usize], keys[(at + half) as usize]);
                    let (low, high) = rotated::<F, N>(
                        first,
                        second,
                        cos,
                        sin,
                        angles + UNIT_POS * vector,
                        vector,
                    );
                    let to = cached + position * columns + UNIT_POS;
                    let rotated = to_vector::<F, N>(&low, vector, conversion);
                    key_cache[to as usize] = Vector::<C, W>::cast_from(rotated);
                    let rotated = to_vector::<F, N>(&high, vector, conversion);
                    key_cache[(to + half) as usize] = Vector::<C, W>::cast_from(rotated);
                    if comptime!(keeps_own) {
                        #[unroll]
                        for index in 0..vector {
                            let to = UNIT_POS * vector + index;
                            own_key[to as usize] = low[index as usize];
                            own_key[(to + comptime!(head_dim / 2)) as usize] = high[index as usize];
                        }
                    }
                }
                if UNIT_POS < columns {
                    let to = cached + position * columns + UNIT_POS;
                    let value = values[(key_head * columns + UNIT_POS) as usize];
                    value_cache[to as usize] = Vector::<C, W>::cast_from(value);
                }
            }
            Some(format) => {
                let from = key_head * columns;
                load_own::<F, N>(
                    keys,
                    values,
                    cos,
                    sin,
                    from,
                    angles,
                    &mut own_key,
                    head_dim,
                    vector,
                );
                sync_cube();
                quantize_own::<C, W, S>(
                    &own_key,
                    key_cache,
                    value_cache,
                    key_scales,
                    value_scales,
                    first_head + position,
                    head_dim,
                    vector,
                    format,
                );
            }
        }
        sync_cube();
    }

    // Units beyond whole positions repeat the last one's loads, and store nothing.
    let column = UNIT_POS % columns;
    let place = UNIT_POS / columns;
    let mut loaded_keys = Array::<Vector<C, W>>::new(comptime!(steps as usize));
    let mut loaded_values = Array::<Vector<C, W>>::new(comptime!(steps as usize));
    // Scales of packed keys and values.
    let mut scales_of_keys = Array::<f32>::new(comptime!(steps as usize));
    let mut scales_of_values = Array::<f32>::new(comptime!(steps as usize));
    #[unroll]
    for index in 0..steps {
        let at = min(start + place + comptime!(index * step), position);
        let from = (cached + at * columns + column) as usize;
        loaded_keys[index as usize] = key_cache[from];
        loaded_values[index as usize] = value_cache[from];
        if let Some(format) = comptime!(format) {
            let scale = scale_place(first_head + at, column, head_dim, vector, format);
            scales_of_keys[index as usize] = kv_scale::<S>(key_scales[scale], format);
            scales_of_values[index as usize] = kv_scale::<S>(value_scales[scale], format);
        }
    }
    if comptime!(keeps_own) {
        let value = values[(key_head * columns + column) as usize];
        #[unroll]
        for index in 0..steps {
            let beyond = start + place + comptime!(index * step) >= position;
            if beyond && position - start < tile {
                let mut own = Array::<f32>::new(comptime!(vector as usize));
                #[unroll]
                for channel in 0..vector {
                    own[channel as usize] = own_key[(column * vector + channel) as usize];
                }
                let own = to_vector::<F, N>(&own, vector, conversion);
                loaded_keys[index as usize] = Vector::<C, W>::cast_from(own);
                loaded_values[index as usize] = Vector::<C, W>::cast_from(value);
            }
        }
    }

    let first_query =
        (CUBE_POS_Z * (CUBE_COUNT_Y / groups) + kv_head) * comptime!(groups * rows) + group * rows;
    let scale = 1.0f32 / f32::cast_from(head_dim).sqrt();
    let mut rotated_queries = Shared::<[f32]>::new_slice(comptime!((rows * head_dim) as usize));
    let mut at = UNIT_POS;
    while at < comptime!(rows * half) {
        let (row, pair) = (at / half, at % half);
        let from = (first_query + row) * columns + pair;
        let (first, second) = (queries[from as usize], queries[(from + half) as usize]);
        let (low, high) = rotated::<F, N>(first, second, cos, sin, angles + pair * vector, vector);
        // Columns of one channel are side by side, as units read them.
        #[unroll]
        for index in 0..vector {
            let to = (row * vector + index) * columns + pair;
            rotated_queries[to as usize] = low[index as usize] * scale;
            rotated_queries[(to + half) as usize] = high[index as usize] * scale;
        }
        at += units;
    }
    sync_cube();
    if comptime!(format.is_some_and(KvFormat::transforms_keys)) {
        transform_queries(&mut rotated_queries, plan);
        sync_cube();
    }

    // Registers: all positions of a unit need the same column of the queries.
    let mut query = Array::<f32>::new(comptime!((rows * vector) as usize));
    #[unroll]
    for index in 0..comptime!(rows * vector) {
        query[index as usize] = rotated_queries[(comptime!(index * columns) + column) as usize];
    }
    let product_stride = comptime!(plan.product_stride());
    let output_stride = comptime!(plan.output_stride());
    let mut shared = Shared::<[f32]>::new_slice(comptime!(plan.shared() as usize));
    #[unroll]
    for index in 0..steps {
        let in_tile = place + comptime!(index * step);
        let key = channels::<C, W>(loaded_keys[index as usize], vector, format);
        let mut products = Array::<f32>::new(comptime!(rows as usize));
        #[unroll]
        for row in 0..rows {
            products[row as usize] = 0.0f32.runtime();
        }
        #[unroll]
        for channel in 0..vector {
            let key = key[comptime!(channel as usize)];
            #[unroll]
            for row in 0..rows {
                let query = query[comptime!((row * vector + channel) as usize)];
                products[row as usize] = fma(query, key, products[row as usize]);
            }
        }
        if place < step && in_tile < tile {
            #[unroll]
            for row in 0..rows {
                let to = (comptime!(row * tile) + in_tile) * product_stride + column;
                let mut product = products[row as usize];
                if comptime!(format.is_some()) {
                    product *= scales_of_keys[index as usize];
                }
                shared[to as usize] = product;
            }
        }
    }
    sync_cube();

    let count = min(position + 1 - start, tile);
    let tiles = CUBE_COUNT_X;
    let mut weights = Shared::<[f32]>::new_slice(comptime!((rows * tile) as usize));
    let lane = UNIT_POS % plane;
    let mut row = UNIT_POS / plane;
    while row < rows {
        let mut largest = f32::min_value();
        let mut at = lane;
        while at < count {
            let mut score = 0.0f32.runtime();
            let from = (row * tile + at) * product_stride;
            #[unroll]
            for column in 0..columns {
                score += shared[(from + column) as usize];
            }
            weights[(row * tile + at) as usize] = score;
            largest = max(largest, score);
            at += plane;
        }
        if comptime!(plane > 1) {
            largest = plane_max(largest);
        }
        let mut sum = 0.0f32.runtime();
        let mut at = lane;
        while at < tile {
            let mut weight = 0.0f32.runtime();
            if at < count {
                weight = (weights[(row * tile + at) as usize] - largest).exp();
            }
            weights[(row * tile + at) as usize] = weight;
            sum += weight;
            at += plane;
        }
        if comptime!(plane > 1) {
            sum = plane_sum(sum);
        }
        if lane == 0u32 {
            let to = 2 * ((first_query + row) * tiles + CUBE_POS_X);
            softmax[to as usize] = largest;
            softmax[(to + 1) as usize] = sum;
        }
        row += comptime!(units / plane);
    }
    sync_cube();

    #[unroll]
    for row in 0..rows {
        let mut sums = Array::<f32>::new(comptime!(vector as usize));
        #[unroll]
        for channel in 0..vector {
            sums[channel as usize] = 0.0f32.runtime();
        }
        #[unroll]
        for index in 0..steps {
            let in_tile = min(place + comptime!(index * step), comptime!(tile - 1));
            let mut weight = weights[(comptime!(row * tile) + in_tile) as usize];
            if place + comptime!(index * step) >= tile {
                weight = 0.0f32.runtime();
            }
            if comptime!(format.is_some()) {
                weight *= scales_of_values[index as usize];
            }
            let value = channels::<C, W>(loaded_values[index as usize], vector, format);
            #[unroll]
            for channel in 0..comptime!(vector as usize) {
                sums[channel] = fma(weight, value[channel], sums[channel]);
            }
        }
        if place < step {
            #[unroll]
            for channel in 0..vector {
                let to = place * output_stride + comptime!((row * vector + channel) * columns);
                shared[(to + column) as usize] = sums[channel as usize];
            }
        }
    }
    sync_cube();

    let mut at = UNIT_POS;
    while at < comptime!(rows * head_dim) {
        let mut sum = shared[at as usize];
        #[unroll]
        for place in 1..step {
            sum += shared[(comptime!(place * output_stride) + at) as usize];
        }
        // In the order of shared memory: what adds the tiles puts channels in their places.
        let (row, slot) = (at / head_dim, at % head_dim);
        let to = ((first_query + row) * tiles + CUBE_POS_X) * head_dim + slot;
        partial[to as usize] = sum;
        at += units;
    }
    #[unroll]
    for index in 0..joined.len() {
        let joined = joined.index_mut(index);
        let count = position / tile + 1;
        let mut ended = Shared::<[u32]>::new_slice(1usize);
        publish::<f32>(partial);
        publish::<f32>(softmax);
        sync_cube();
        // A single tile is this cube's own.
        let mut ends = true.runtime();
        if count > 1 {
            if UNIT_POS == 0 {
                let group = CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y;
                let before = arrive(joined.counters, group, true);
                if before + 1 == count {
                    joined.counters[group as usize] = 0u32;
                }
                ended[0] = before + 1;
            }
            sync_cube();
            ends = ended[0] == count;
        }
        publish::<f32>(partial);
        publish::<f32>(softmax);
        if ends {
            add_tiles::<F>(&*partial, &*softmax, joined.output, first_query, tiles, count, plan);
        }
    }
}

/// Adds the tiles of a cube's queries as [`combine_kernel`] does, with the same bits.
#[cube]
fn add_tiles<F: Float>(
    partial: &[f32],
    softmax: &[f32],
    output: &mut [F],
    first_query: u32,
    tiles: u32,
    count: u32,
    #[comptime] plan: Plan,
) {
    let Plan { units, queries: rows, head_dim, vector, parts, conversion, .. } = comptime!(plan);
    let columns = comptime!(plan.columns());
    let most = MAX_JOINED_TILES;
    let turns = comptime!(most.div_ceil(parts));
    // The largest score of a tile, and the sum of its weights.
    let mut of_tiles = Shared::<[f32]>::new_slice(comptime!((rows * most * 2) as usize));
    let mut at = UNIT_POS;
    while at < comptime!(rows * most * 2) {
        let (row, in_row) = (at / (2 * most), at % (2 * most));
        if in_row < 2 * count {
            of_tiles[at as usize] = softmax[(2 * (first_query + row) * tiles + in_row) as usize];
        }
        at += units;
    }
    sync_cube();
    let mut at = UNIT_POS;
    while at < comptime!(rows * head_dim) {
        let (row, slot) = (at / head_dim, at % head_dim);
        let head = first_query + row;
        let mut values = Array::<f32>::new(comptime!(most as usize));
        #[unroll]
        for tile in 0..most {
            let from = (head * tiles + min(tile, count - 1)) * head_dim + slot;
            values[comptime!(tile as usize)] = partial[from as usize];
        }
        let mut largests = Array::<f32>::new(comptime!(parts as usize));
        let mut sums = Array::<f32>::new(comptime!(parts as usize));
        let mut totals = Array::<f32>::new(comptime!(parts as usize));
        let mut largest_of_all = f32::min_value();
        #[unroll]
        for part in 0..parts {
            let mut largest = f32::min_value();
            #[unroll]
            for turn in 0..turns {
                let tile = comptime!(part + turn * parts);
                if tile < count {
                    largest = max(largest, of_tiles[((row * most + tile) * 2) as usize]);
                }
            }
            let mut sum = 0.0f32.runtime();
            let mut total = 0.0f32.runtime();
            #[unroll]
            for turn in 0..turns {
                let tile = comptime!(part + turn * parts);
                if tile < count {
                    let of_tile = (row * most + tile) * 2;
                    let factor = (of_tiles[of_tile as usize] - largest).exp();
                    sum = fma(factor, of_tiles[(of_tile + 1) as usize], sum);
                    total = fma(factor, values[comptime!(tile as usize)], total);
                }
            }
            largests[part as usize] = largest;
            sums[part as usize] = sum;
            totals[part as usize] = total;
            largest_of_all = max(largest_of_all, largest);
        }
        let mut sum = sums[0];
        let mut total = totals[0];
        if comptime!(parts > 1) {
            sum = 0.0f32.runtime();
            total = 0.0f32.runtime();
            #[unroll]
            for part in 0..parts {
                let factor = (largests[part as usize] - largest_of_all).exp();
                sum = fma(factor, sums[part as usize], sum);
                total = fma(factor, totals[part as usize], total);
            }
        }
        let channel = slot % columns * vector + slot / columns;
        output[(head * head_dim + channel) as usize] = narrow::<F>(total / sum, conversion);
        at += units;
    }
}

/// Transforms each 16 channels of the queries in shared memory, as the cached keys are.
#[cube]
fn transform_queries(queries: &mut Shared<[f32]>, #[comptime] plan: Plan) {
    let Plan { units, queries: rows, head_dim, vector, .. } = comptime!(plan);
    let columns = comptime!(plan.columns());
    let blocks = comptime!(head_dim / SIZE);
    let mut at = UNIT_POS;
    while at < comptime!(rows * blocks) {
        // Columns of one channel are side by side.
        let first = at / blocks * head_dim + at % blocks * comptime!(SIZE / vector);
        let mut elements = Array::<f32>::new(comptime!(SIZE as usize));
        #[unroll]
        for index in 0..SIZE {
            let from = first + comptime!(index % vector * columns + index / vector);
            elements[comptime!(index as usize)] = queries[from as usize];
        }
        sum_by_butterflies(&mut elements, 0.25f32.runtime(), SIZE);
        #[unroll]
        for index in 0..SIZE {
            let to = first + comptime!(index % vector * columns + index / vector);
            queries[to as usize] = elements[comptime!(index as usize)];
        }
        at += units;
    }
}

/// Runs the second loop at the head of this file.
#[cube(launch_unchecked)]
fn combine_kernel<F: Float>(
    partial: &[f32],
    softmax: &[f32],
    position: &[i32],
    output: &mut [F],
    tiles: u32,
    last: u32,
    #[comptime] plan: Plan,
) {
    let Plan { head_dim, vector, parts, conversion, .. } = comptime!(plan);
    let columns = comptime!(plan.columns());
    let width = comptime!(head_dim.next_power_of_two());
    let head = CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X;
    let count = position_of(position, 0u32, last) / comptime!(plan.tile) + 1;
    let first = head * tiles;
    let (part, slot) = (UNIT_POS / width, UNIT_POS % width);
    // A part without tiles has a sum of 0.
    let mut largest = f32::min_value();
    let mut tile = part;
    while tile < count {
        largest = max(largest, softmax[(2 * (first + tile)) as usize]);
        tile += parts;
    }
    let mut sum = 0.0f32.runtime();
    let mut total = 0.0f32.runtime();
    let mut tile = part;
    while tile < count {
        let at = first + tile;
        let factor = (softmax[(2 * at) as usize] - largest).exp();
        sum = fma(factor, softmax[(2 * at + 1) as usize], sum);
        // Units beyond the head repeat its last value, and store nothing.
        let from = at * head_dim + min(slot, comptime!(head_dim - 1));
        total = fma(factor, partial[from as usize], total);
        tile += parts;
    }
    if comptime!(parts > 1) {
        let mut largests = Shared::<[f32]>::new_slice(comptime!(parts as usize));
        let mut sums = Shared::<[f32]>::new_slice(comptime!(parts as usize));
        let mut totals = Shared::<[f32]>::new_slice(comptime!((parts * width) as usize));
        if slot == 0u32 {
            largests[part as usize] = largest;
            sums[part as usize] = sum;
        }
        totals[UNIT_POS as usize] = total;
        sync_cube();
        #[unroll]
        for part in 0..parts {
            largest = max(largest, largests[part as usize]);
        }
        sum = 0.0f32.runtime();
        total = 0.0f32.runtime();
        #[unroll]
        for part in 0..parts {
            let factor = (largests[part as usize] - largest).exp();
            sum = fma(factor, sums[part as usize], sum);
            total = fma(factor, totals[(comptime!(part * width) + slot) as usize], total);
        }
    }
    if part == 0u32 && slot < head_dim {
        let channel = slot % columns * vector + slot / columns;
        output[(head * head_dim + channel) as usize] = narrow::<F>(total / sum, conversion);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{CPU, GPU, Portable};

    const SHAPE: AttentionShape =
        AttentionShape { batch: 1, tokens: 1, heads: 8, kv_heads: 2, head_dim: 64, capacity: 9 };

    #[test]
    fn every_plan_fits_its_shared_memory_and_has_whole_planes() {
        let portable = |shared_memory, units| Portable {
            f16: true,
            bf16: true,
            cmma_f16: false,
            cmma_bf16: false,
            decoder: true,
            units,
            shared_memory,
        };
        let wgpu = |plane, shared_memory, units| Capability {
            plane,
            portable: Some(portable(shared_memory, units)),
            ..GPU
        };
        let vulkan = wgpu(32, 48 << 10, 1024);
        let devices = [
            GPU,
            CPU,
            vulkan,
            wgpu(1, 16 << 10, 256),
            wgpu(64, 16 << 10, 256),
            wgpu(64, 32 << 10, 256),
            wgpu(128, 32 << 10, 256),
        ];
        for device in devices {
            for (queries, half) in (1..=20).flat_map(|queries| (1..=128).map(move |h| (queries, h)))
            {
                for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                    let shape = AttentionShape { heads: 2 * queries, head_dim: 2 * half, ..SHAPE };
                    assert_eq!(check_attention(&shape, 9), Ok(()));
                    let packs = (2 * half).is_multiple_of(KV_BLOCK) && device.portable.is_none();
                    let formats = KvFormat::ALL.into_iter().filter(|_| packs).map(Some);
                    for format in formats.chain([None]) {
                        let plan = Plan::new(&shape, dtype, format, &device);
                        assert!(plan.bytes() <= device.shared_memory(), "{plan:?}");
                        assert!(plan.step() > 0 && plan.tile > 0 && plan.parts > 0, "{plan:?}");
                        let whole =
                            plan.units >= plan.plane && plan.units.is_multiple_of(plan.plane);
                        assert!(whole, "{plan:?}");
                        assert_eq!(plan.queries * plan.groups, queries as u32, "{plan:?}");
                        let blocks = 2 * plan.head_dim / KV_BLOCK as u32;
                        assert!(format.is_none() || plan.units >= blocks, "{plan:?}");
                    }
                }
            }
        }
    }

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
