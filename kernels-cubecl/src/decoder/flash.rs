//! Attention of the tokens of a prompt without their scores in memory (flash attention), using the
//! matrix instructions of a warpgroup.
//!
//! A cube has 128 queries of a head, 64 for each of two warpgroups. It reads the cached keys and
//! values in tiles of positions, up to the last that one of its queries attends to. Queries,
//! scores, weights and outputs are in registers, as fragments that `instructions/wgmma.rs` draws:
//! the sums of the scores are where the next multiplication expects its A.
//!
//! ```text
//! keys:   ring of 2 tiles    a tile: | channels 0..64 of its positions, 128 bytes each |
//! values: ring of 3 tiles            | channels 64..128, if a head has them            |
//!
//! scores = queries x keys of tile 0
//! for tile in the tiles:
//!     wait for the keys of `tile + 1` and the values of `tile`; start to copy the next of each
//!     start    next = queries x keys of `tile + 1`
//!     weights = exp2(scores - largest), while `next` and the outputs before are computed
//!     wait for next and the outputs
//!     outputs *= exp2(largest before - largest)
//!     start    outputs += weights x values of `tile`
//!     scores = next
//! outputs / sum of the weights
//! ```

use burn_fp4_search::host::AttentionShape;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::head::position_of;
use super::prefill::check_prompt;
use super::row::max_of_cube;
#[cfg(feature = "cuda")]
use crate::instructions::PtxWgmma;
use crate::instructions::{EmulatedWgmma, Operand, WgmmaInstructions};
use crate::memory::check_memory;
use crate::numeric::element::narrow;
use crate::plan::{Capability, Conversion, Dtype, Refusal, UNITS, WgmmaSupport};

/// Channels of a panel of keys or values, and their vectors of 16 bytes.
const CHANNELS: u32 = 64;
const VECTORS: u32 = CHANNELS / 8;
/// Products along 16 channels of a panel.
const K_STEPS: u32 = CHANNELS / 16;

/// Checks that [`flash_attention`] runs a shape with RoPE for `positions` positions.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::{Capability, Dtype, Refusal, check_flash_attention};
/// use burn_fp4_search::host::AttentionShape;
///
/// let cpu = Capability::of(&Device::default().client());
/// let (tokens, capacity) = (2000, 4096);
/// let shape =
///     AttentionShape { batch: 1, tokens, heads: 32, kv_heads: 8, head_dim: 128, capacity };
/// let refused = check_flash_attention(&cpu, &shape, 8192, Dtype::Bf16);
/// assert!(matches!(refused, Err(Refusal::Instructions { .. }))); // not an H100
/// # }
/// ```
///
/// # Errors
/// [`Refusal`]: a device without WGMMA, f32, heads of other than 64 or 128 channels, or a shape
/// that [`check_attention`](super::check_attention) refuses for any number of tokens.
pub fn check_flash_attention(
    device: &Capability,
    shape: &AttentionShape,
    positions: usize,
    dtype: Dtype,
) -> Result<(), Refusal> {
    device.check_decoder(dtype)?;
    check_prompt(shape, positions)?;
    let refuse = |reason| Err(Refusal::Instructions { reason });
    match (device.wgmma, dtype, shape.head_dim) {
        (WgmmaSupport::None, ..) => refuse("the device has no WGMMA"),
        (_, Dtype::F32, _) => refuse("queries are f32; WGMMA takes f16 and bf16"),
        (.., 64 | 128) => Ok(()),
        _ => refuse("a head has neither 64 nor 128 channels"),
    }
}

/// Sizes of the attention of a cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Flash {
    /// Units of a cube; half as many queries.
    units: u32,
    /// Panels of a head.
    panels: u32,
    /// Positions of a tile.
    positions: u32,
    /// Vectors that the emulation of the instructions needs.
    scratch: u32,
    dtype: Dtype,
    conversion: Conversion,
    /// Units of a plane.
    plane: u32,
}

impl Flash {
    /// Returns the vectors of 16 bytes of a tile.
    const fn tile(&self) -> u32 {
        self.panels * self.panel()
    }

    const fn queries(&self) -> u32 {
        self.units / 2
    }

    /// Returns the words of a head.
    const fn words(&self) -> u32 {
        self.panels * CHANNELS / 2
    }

    const fn panel(&self) -> u32 {
        self.positions * VECTORS
    }
}

/// Attends from the tokens of a prompt, whose keys and values are in the KV cache, to all positions
/// up to theirs. Returns the outputs `[batch, tokens, heads, head_dim]`.
///
/// `queries` are rotated, `[batch, heads, tokens, head_dim]`, and `cache` has the keys and values,
/// `[batch, kv_heads, capacity, head_dim]`: what [`rotate_into_cache`](super::rotate_into_cache)
/// leaves behind. Token `t` attends to positions up to `position[t]`, i32 `[tokens]`; one beyond
/// the cache or RoPE, which has `positions` rows, counts as the last. Sums are f32, weights have
/// the dtype.
///
/// ```no_run
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, flash_attention};
/// use burn_fp4_search::host::AttentionShape;
///
/// let client = Device::default().client();
/// let device = Capability::of(&client); // an H100
/// let (tokens, capacity) = (100, 128);
/// let shape = AttentionShape { batch: 1, tokens, heads: 4, kv_heads: 2, head_dim: 64, capacity };
/// let zeros = |heads: usize, tokens: usize| {
///     client.create_from_slice(&vec![0; heads * tokens * 64 * 2])
/// };
/// let (queries, cache) = (zeros(4, tokens), [(); 2].map(|()| zeros(2, capacity)));
/// let position: Vec<i32> = (0..100).collect();
/// let position = client.create_from_slice(i32::as_bytes(&position));
/// let outputs =
///     flash_attention(&client, &device, queries, cache, position, shape, 128, Dtype::Bf16)?;
/// # let _ = outputs;
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
#[allow(clippy::too_many_arguments)]
pub fn flash_attention(
    client: &Client,
    device: &Capability,
    queries: Handle,
    cache: [Handle; 2],
    position: Handle,
    shape: AttentionShape,
    positions: usize,
    dtype: Dtype,
) -> Result<Handle, Refusal> {
    check_flash_attention(device, &shape, positions, dtype)?;
    let AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity } = shape;
    let bytes = batch * tokens * heads * head_dim * dtype.size();
    check_memory("queries", &queries, bytes)?;
    let cached = batch * kv_heads * capacity * head_dim * dtype.size();
    check_memory("cached keys", &cache[0], cached)?;
    check_memory("cached values", &cache[1], cached)?;
    check_memory("position", &position, 4 * tokens)?;
    let output = client.empty(bytes);
    if bytes > 0 {
        let launch = match (device.wgmma, dtype == Dtype::Bf16) {
            #[cfg(feature = "cuda")]
            (WgmmaSupport::Ptx, true) => launch::<PtxWgmma, bf16>,
            #[cfg(feature = "cuda")]
            (WgmmaSupport::Ptx, false) => launch::<PtxWgmma, f16>,
            (_, true) => launch::<EmulatedWgmma, bf16>,
            (_, false) => launch::<EmulatedWgmma, f16>,
        };
        // Emulated on the CPU runtime, which has slow barriers, and only the L1 cache as shared
        // memory: half a cube and half a tile.
        let (units, of_tile, scratch) = match device.wgmma.is_native() {
            true => (UNITS, 64, 1),
            false => (UNITS / 2, 32, UNITS / 2),
        };
        let plan = Flash {
            units,
            panels: head_dim as u32 / CHANNELS,
            positions: of_tile,
            scratch,
            dtype,
            conversion: Conversion::to(dtype, device),
            plane: device.plane,
        };
        let last = capacity.min(positions) as u32 - 1;
        launch(client, [queries, position, output.clone()], cache, shape, last, plan);
    }
    Ok(output)
}

fn launch<I: WgmmaInstructions, F: Float>(
    client: &Client,
    [queries, position, output]: [Handle; 3],
    [keys, values]: [Handle; 2],
    shape: AttentionShape,
    last: u32,
    plan: Flash,
) {
    let AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity } = shape;
    let words = batch * tokens * heads * head_dim / 2;
    let cached = batch * kv_heads * capacity * head_dim / 8;
    let all_heads = (batch * heads) as u32;
    let cubes = (tokens as u32).div_ceil(plan.queries()) * all_heads;
    // SAFETY: the lengths are the shape's, which memory was checked for; queries beyond the tokens
    // repeat the last and are not stored, and positions beyond `last` are read as `last`.
    unsafe {
        flash_kernel::launch_unchecked::<I, F>(
            client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(plan.units),
            4,
            BufferArg::from_raw_parts(queries, words),
            BufferArg::from_raw_parts(keys, cached),
            BufferArg::from_raw_parts(values, cached),
            BufferArg::from_raw_parts(position, tokens),
            BufferArg::from_raw_parts(output, words),
            tokens as u32,
            heads as u32,
            (heads / kv_heads) as u32,
            all_heads,
            capacity as u32,
            last,
            core::f32::consts::LOG2_E / (head_dim as f32).sqrt(),
            plan,
        );
    }
}

/// Place of a head's keys and values in the KV cache.
#[derive(CubeType, Clone, Copy)]
struct CachedHead {
    /// Its first row.
    first: u32,
    /// Its last position that may be read.
    last: u32,
    /// Tiles that the cube needs.
    tiles: u32,
}

/// Starts to copy a tile of keys or values to a slot of its ring, if the cube needs it.
#[cube]
fn copy_tile<I: WgmmaInstructions, X: Size>(
    from: &[Vector<u32, X>],
    ring: &mut [Vector<u32, X>],
    address: u32,
    slot: u32,
    tile: u32,
    head: &CachedHead,
    #[comptime] plan: Flash,
) {
    let wanted = tile < head.tiles;
    #[unroll]
    for copy in 0..comptime!(plan.tile() / plan.units) {
        let at = UNIT_POS + comptime!(copy * plan.units);
        let (vector, row) = (at % VECTORS, at / VECTORS);
        let (key, panel) = (row % plan.positions, row / plan.positions);
        let position = min(tile * plan.positions + key, head.last);
        let at = (head.first + position) * comptime!(plan.panels * VECTORS) + panel * VECTORS;
        let to = slot * comptime!(plan.tile()) + row * VECTORS + (vector ^ (key % 8));
        I::copy(wanted, ring, address, to, from, at + vector, 0u32, 1u32, 16u32);
    }
}

/// Starts to multiply the queries by a tile of keys.
#[cube]
fn score_tile<I: WgmmaInstructions, F: Float, X: Size>(
    queries: &Sequence<Array<u32>>,
    keys: &[Vector<u32, X>],
    address: u32,
    scratch: &mut [Vector<u32, X>],
    scores: &mut Array<f32>,
    slot: u32,
    #[comptime] plan: Flash,
) {
    #[unroll]
    for index in 0..comptime!(plan.positions as usize / 2) {
        scores[index] = 0.0f32;
    }
    #[unroll]
    for panel in 0..plan.panels {
        #[unroll]
        for k_step in 0..K_STEPS {
            let at = slot * comptime!(plan.tile()) + comptime!(panel * plan.panel() + 2 * k_step);
            I::multiply::<F, X, X>(
                queries.index(comptime!((panel * K_STEPS + k_step) as usize)),
                keys,
                address,
                at,
                scores,
                scratch,
                plan.positions,
                comptime!(Operand::from(plan.dtype)),
                false,
            );
        }
    }
}

/// The running softmax of the two rows of a unit.
#[derive(CubeType)]
struct Softmax {
    /// Positions that a row attends to.
    counts: Array<u32>,
    /// The largest score so far.
    largest: Array<f32>,
    /// The unit's part of the sum of the weights.
    sums: Array<f32>,
}

/// Begins the softmax of a unit's rows.
#[cube]
fn softmax(positions: &[i32], first: u32, tokens: u32, last: u32) -> Softmax {
    let mut counts = Array::<u32>::new(2usize);
    let mut largest = Array::<f32>::new(2usize);
    let mut sums = Array::<f32>::new(2usize);
    #[unroll]
    for row in 0..2u32 {
        let at = comptime!(row as usize);
        let token = min(first + 8 * row, tokens - 1);
        counts[at] = position_of(positions, token, last) + 1;
        largest[at] = f32::min_value();
        sums[at] = 0.0f32;
    }
    Softmax { counts, largest, sums }
}

/// Turns the scores of a tile into weights. Returns the factors of the sums of earlier tiles.
#[cube]
fn weigh<I: WgmmaInstructions>(
    scores: &mut Array<f32>,
    softmax: &mut Softmax,
    shared: &mut [f32],
    tile: u32,
    scale: f32,
    #[comptime] masked: bool,
    #[comptime] plan: Flash,
) -> Array<f32> {
    let mut factors = Array::<f32>::new(2usize);
    let part = UNIT_POS % 4;
    #[unroll]
    for row in 0..2usize {
        let mut largest = softmax.largest[row];
        let count = softmax.counts[row];
        #[unroll]
        for index in 0..comptime!(plan.positions / 4) {
            let column = comptime!(index / 2 * 8 + index % 2);
            let at = comptime!((index / 2 * 4 + index % 2) as usize + 2 * row);
            if comptime!(masked) {
                let position = tile * plan.positions + 2 * part + column;
                // -inf, not the least float: a row whose scores are all -inf stays NaN and never
                // sees later tokens.
                let hidden = f32::reinterpret(0xFF80_0000u32);
                scores[at] = select(position < count, scores[at], hidden);
            }
            largest = max(largest, scores[at]);
        }
        let largest = of_quad(largest, shared, true, plan.plane);
        let factor = I::exp2((softmax.largest[row] - largest) * scale);
        softmax.largest[row] = largest;
        let shift = largest * scale;
        let mut sum = softmax.sums[row] * factor;
        #[unroll]
        for index in 0..comptime!(plan.positions / 4) {
            let at = comptime!((index / 2 * 4 + index % 2) as usize + 2 * row);
            let weight = I::exp2(fma(scores[at], scale, -shift));
            scores[at] = weight;
            sum += weight;
        }
        softmax.sums[row] = sum;
        factors[row] = factor;
    }
    factors
}

/// Returns the largest value of the four units of a row, or their sum.
#[cube]
fn of_quad(
    value: f32,
    shared: &mut [f32],
    #[comptime] largest: bool,
    #[comptime] plane: u32,
) -> f32 {
    let mut found = value;
    if comptime!(plane >= 4) {
        #[unroll]
        for distance in 0..2u32 {
            let other = plane_shuffle_xor(found, comptime!(1 << distance));
            found = if comptime!(largest) { max(found, other) } else { found + other };
        }
    } else {
        sync_cube();
        shared[UNIT_POS as usize] = value;
        sync_cube();
        #[unroll]
        for distance in 1..4u32 {
            let other = shared[(UNIT_POS ^ distance) as usize];
            found = if comptime!(largest) { max(found, other) } else { found + other };
        }
    }
    found
}

/// Rounds two values to a word.
#[cube]
fn to_word<F: Float>(first: f32, second: f32, #[comptime] conversion: Conversion) -> u32 {
    let mut pair = Vector::<F, Const<2>>::empty();
    pair.insert(0usize, narrow::<F>(first, conversion));
    pair.insert(1usize, narrow::<F>(second, conversion));
    u32::reinterpret(pair)
}

/// Loads the queries `first` and `first + 8` of a head, which begins with row `row`: words of A of
/// every k step.
#[cube]
fn load_queries(
    from: &[u32],
    row: u32,
    first: u32,
    tokens: u32,
    #[comptime] plan: Flash,
) -> Sequence<Array<u32>> {
    let mut words = Sequence::<Array<u32>>::new();
    #[unroll]
    for k_step in 0..comptime!(plan.panels * K_STEPS) {
        let mut a = Array::<u32>::new(4usize);
        #[unroll]
        for word in 0..4u32 {
            let token = min(first + comptime!(word % 2 * 8), tokens - 1);
            let at = (row + token) * comptime!(plan.words()) + UNIT_POS % 4;
            a[comptime!(word as usize)] =
                from[(at + comptime!(k_step * 8 + word / 2 * 4)) as usize];
        }
        words.push(a);
    }
    words
}

/// Returns outputs of 0 of every panel.
#[cube]
fn no_outputs(#[comptime] plan: Flash) -> Sequence<Array<f32>> {
    let mut outputs = Sequence::<Array<f32>>::new();
    #[unroll]
    for _ in 0..plan.panels {
        let mut sums = Array::<f32>::new(comptime!(CHANNELS as usize / 2));
        #[unroll]
        for index in 0..comptime!(CHANNELS as usize / 2) {
            sums[index] = 0.0f32;
        }
        outputs.push(sums);
    }
    outputs
}

/// Starts to add the weights of a tile times its values to the outputs.
#[cube]
fn add_tile<I: WgmmaInstructions, F: Float, X: Size>(
    weights: &Array<f32>,
    values: &[Vector<u32, X>],
    address: u32,
    outputs: &mut Sequence<Array<f32>>,
    scratch: &mut [Vector<u32, X>],
    slot: u32,
    #[comptime] plan: Flash,
) {
    #[unroll]
    for k_step in 0..comptime!(plan.positions / 16) {
        let mut a = Array::<u32>::new(4usize);
        #[unroll]
        for word in 0..4u32 {
            let from = comptime!((8 * k_step + 2 * word) as usize);
            let pair = to_word::<F>(weights[from], weights[from + 1], plan.conversion);
            a[comptime!(word as usize)] = pair;
        }
        #[unroll]
        for panel in 0..plan.panels {
            let of_panel = comptime!(panel * plan.panel() + k_step * 16 * VECTORS);
            I::multiply::<F, X, X>(
                &a,
                values,
                address,
                slot * comptime!(plan.tile()) + of_panel,
                outputs.index_mut(comptime!(panel as usize)),
                scratch,
                CHANNELS,
                comptime!(Operand::from(plan.dtype)),
                true,
            );
        }
    }
}

/// Waits for the outputs, and multiplies their two rows by factors.
#[cube]
fn scale_outputs<I: WgmmaInstructions>(
    outputs: &mut Sequence<Array<f32>>,
    factors: &Array<f32>,
    #[comptime] plan: Flash,
) {
    #[unroll]
    for panel in 0..plan.panels {
        let sums = outputs.index_mut(comptime!(panel as usize));
        I::wait_for_sums(sums, comptime!(CHANNELS / 2));
        #[unroll]
        for index in 0..comptime!(CHANNELS as usize / 2) {
            sums[index] *= factors[comptime!(index / 2 % 2)];
        }
    }
}

/// Divides the outputs by the sums of their weights.
#[cube]
fn divide_outputs<I: WgmmaInstructions>(
    outputs: &mut Sequence<Array<f32>>,
    softmax: &Softmax,
    shared: &mut [f32],
    #[comptime] plan: Flash,
) {
    let mut factors = Array::<f32>::new(2usize);
    #[unroll]
    for row in 0..2usize {
        factors[row] = 1.0f32 / of_quad(softmax.sums[row], shared, false, plan.plane);
    }
    scale_outputs::<I>(outputs, &factors, plan);
}

/// Runs the loop at the head of this file.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn flash_kernel<I: WgmmaInstructions, F: Float, X: Size>(
    queries: &[u32],
    keys: &[Vector<u32, X>],
    values: &[Vector<u32, X>],
    positions: &[i32],
    output: &mut [u32],
    tokens: u32,
    heads: u32,
    queries_per_kv_head: u32,
    all_heads: u32,
    capacity: u32,
    last: u32,
    scale: f32,
    #[comptime] plan: Flash,
) {
    // The last queries attend to the most positions. Their cubes begin first, so that none of them
    // finishes alone.
    let (at, behind) = (CUBE_POS as u32 % all_heads, CUBE_POS as u32 / all_heads);
    let cube = tokens.div_ceil(comptime!(plan.queries())) - 1 - behind;
    let first = cube * comptime!(plan.queries()) + UNIT_POS / 32 * 16 + UNIT_POS % 32 / 4;
    let loaded = load_queries(queries, at * tokens, first, tokens, plan);
    let mut softmax = softmax(positions, first, tokens, last);
    let most = max(softmax.counts[0usize], softmax.counts[1usize]);
    let fewest = min(softmax.counts[0usize], softmax.counts[1usize]);
    let most = max_of_cube::<u32>(most, plan.plane, plan.units);
    sync_cube();
    let fewest = last + 1 - max_of_cube::<u32>(last + 1 - fewest, plan.plane, plan.units);
    let (sequence, head) = (at / heads, at % heads);
    let kv_head = sequence * (heads / queries_per_kv_head) + head / queries_per_kv_head;
    let cached =
        CachedHead { first: kv_head * capacity, last, tiles: most.div_ceil(plan.positions) };

    let vectors = comptime!(plan.tile() as usize);
    let mut keys_ring =
        Shared::<[Vector<u32, X>]>::new_aligned_slice(comptime!(2 * vectors), 1024usize);
    let mut values_ring =
        Shared::<[Vector<u32, X>]>::new_aligned_slice(comptime!(3 * vectors), 1024usize);
    let mut scratch = Shared::<[Vector<u32, X>]>::new_slice(comptime!(plan.scratch as usize));
    let of_units = comptime!(if plan.plane >= 4 { 1 } else { plan.units as usize });
    let mut shared = Shared::<[f32]>::new_slice(of_units);
    let keys_address = I::address::<Vector<u32, X>>(&keys_ring);
    let values_address = I::address::<Vector<u32, X>>(&values_ring);

    let mut outputs = no_outputs(plan);
    let zero = 0u32.runtime();
    copy_tile::<I, X>(keys, &mut keys_ring, keys_address, zero, zero, &cached, plan);
    I::commit_copies();
    copy_tile::<I, X>(keys, &mut keys_ring, keys_address, zero + 1, zero + 1, &cached, plan);
    copy_tile::<I, X>(values, &mut values_ring, values_address, zero, zero, &cached, plan);
    I::commit_copies();
    I::wait_for_copies(1u32);
    sync_cube();
    let mut scores = Array::<f32>::new(comptime!(plan.positions as usize / 2));
    score_tile::<I, F, X>(&loaded, &keys_ring, keys_address, &mut scratch, &mut scores, zero, plan);
    I::wait_for_sums(&mut scores, comptime!(plan.positions / 2));

    // Tiles before this one need no mask: every query attends to all of their positions.
    let whole = fewest / plan.positions;
    // Slots of the ring of values: of this tile and the next.
    let (mut value_slot, mut next_value_slot) = (zero, zero + 1);
    let mut tile = zero;
    while tile < cached.tiles {
        I::wait_for_copies(0u32);
        sync_cube();
        let key_slot = tile % 2;
        copy_tile::<I, X>(keys, &mut keys_ring, keys_address, key_slot, tile + 2, &cached, plan);
        copy_tile::<I, X>(
            values,
            &mut values_ring,
            values_address,
            next_value_slot,
            tile + 1,
            &cached,
            plan,
        );
        I::commit_copies();
        // After the last tile the slot is stale or unwritten. Nothing reads these scores: a branch
        // would serialize the multiplications.
        let mut next = Array::<f32>::new(comptime!(plan.positions as usize / 2));
        let next_key_slot = 1 - key_slot;
        score_tile::<I, F, X>(
            &loaded,
            &keys_ring,
            keys_address,
            &mut scratch,
            &mut next,
            next_key_slot,
            plan,
        );
        let factors = if tile < whole {
            weigh::<I>(&mut scores, &mut softmax, &mut shared, tile, scale, false, plan)
        } else {
            weigh::<I>(&mut scores, &mut softmax, &mut shared, tile, scale, true, plan)
        };
        I::wait_for_sums(&mut next, comptime!(plan.positions / 2));
        scale_outputs::<I>(&mut outputs, &factors, plan);
        add_tile::<I, F, X>(
            &scores,
            &values_ring,
            values_address,
            &mut outputs,
            &mut scratch,
            value_slot,
            plan,
        );
        #[unroll]
        for index in 0..comptime!(plan.positions as usize / 2) {
            scores[index] = next[index];
        }
        value_slot = next_value_slot;
        next_value_slot = select(value_slot == 2u32, 0u32, value_slot + 1);
        tile += 1u32;
    }
    divide_outputs::<I>(&mut outputs, &softmax, &mut shared, plan);
    #[unroll]
    for row in 0..2u32 {
        let token = first + 8 * row;
        if token < tokens {
            let to = (sequence * tokens + token) * heads + head;
            store_row::<F>(&outputs, output, to, row, plan);
        }
    }
}

/// Stores a row of the outputs of a unit.
#[cube]
fn store_row<F: Float>(
    outputs: &Sequence<Array<f32>>,
    output: &mut [u32],
    to: u32,
    #[comptime] row: u32,
    #[comptime] plan: Flash,
) {
    let to = to * comptime!(plan.words()) + UNIT_POS % 4;
    #[unroll]
    for panel in 0..plan.panels {
        let values = outputs.index(comptime!(panel as usize));
        #[unroll]
        for column in 0..VECTORS {
            let from = comptime!((4 * column + 2 * row) as usize);
            let word = to_word::<F>(values[from], values[from + 1], plan.conversion);
            output[(to + comptime!(panel * CHANNELS / 2 + 4 * column)) as usize] = word;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::prefill::check_prefill;
    use super::*;
    use crate::plan::GPU;

    #[test]
    fn prompts_without_scores_have_no_limit_on_them() {
        let hopper = Capability { wgmma: WgmmaSupport::Ptx, ..GPU };
        let (tokens, capacity) = (1 << 15, 1 << 15);
        let shape =
            AttentionShape { batch: 1, tokens, heads: 32, kv_heads: 8, head_dim: 128, capacity };
        let check = |device: &Capability, shape: &AttentionShape, dtype| {
            check_flash_attention(device, shape, capacity, dtype)
        };
        assert!(matches!(check_prefill(&shape, capacity), Err(Refusal::TooLarge { .. })));
        assert_eq!(check(&hopper, &shape, Dtype::Bf16), Ok(()));
        let wide = AttentionShape { head_dim: 96, ..shape };
        for refused in [
            check(&GPU, &shape, Dtype::Bf16),
            check(&hopper, &shape, Dtype::F32),
            check(&hopper, &wide, Dtype::F16),
        ] {
            assert!(matches!(refused, Err(Refusal::Instructions { .. })), "{refused:?}");
        }
        let long = AttentionShape { tokens: 1 << 21, ..shape }; // 2^33 values of queries
        let refused = check(&hopper, &long, Dtype::F16);
        assert!(matches!(refused, Err(Refusal::TooLarge { .. })), "{refused:?}");
    }
}
