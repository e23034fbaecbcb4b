//! Kernels of `attention.rs`.
//!
//! ```text
//! a cube takes a tile of positions of a sequence and a key head, for queries that share the head:
//!     load the keys and values of the tile, a vector of channels per unit and step    (load_tile)
//!     the cube of the token's own position rotates the new key, writes it and the new value to the
//!     cache, and has both at hand                                                     (write_own)
//!     rotate the queries
//!     scores[query][position] = the products of the vectors of a position, in order of channels
//!     weights = exp(scores - their maximum); keep the maximum and the sum
//!     output[query] = weights x values: a unit adds its positions; on Hopper the units of a plane
//!     that have one column add theirs; what is left is added in order
//!     with counters: divide the output of a single tile by the sum; of several, the last cube adds
//!     the tiles, as below                                                             (join_tiles)
//! without counters, in a second launch, a cube takes a query head:
//!     parts of its units take turns along the tiles, and scale their outputs to one maximum
//!     add the parts in order, scaled to one maximum; divide by the sum
//! ```
//!
//! Tiles beyond the token's position do nothing. All arithmetic is f32, in an order that depends
//! only on shape, dtype and device. All that a cube needs of device memory is loaded at once: to
//! wait for it takes longer than to compute. A packed key and value are quantized to the cache
//! first, and loaded from it.

use burn_fp4_search::host::KvFormat;
use cubecl::prelude::*;

use super::attention_plan::{AttentionPlan, MAX_JOINED_TILES};
use super::head::{position_of, rotated, to_vector};
use super::kv_cache::{channels, kv_scale, load_own, quantize_own, scale_place};
use crate::instructions::{arrive, publish};
use crate::numeric::element::narrow;
use crate::numeric::hadamard::{SIZE, sum_by_butterflies};

/// Operands of the attention of a token, as a kernel takes them. The cache has vectors of `C`, and
/// scales in `S`.
#[derive(CubeType, CubeLaunch)]
pub(super) struct AttentionArgs<F: Float, N: Size, C: Numeric, W: Size, S: Int> {
    queries: &'static [Vector<F, N>],
    keys: &'static [Vector<F, N>],
    values: &'static [Vector<F, N>],
    key_cache: &'static mut [Vector<C, W>],
    value_cache: &'static mut [Vector<C, W>],
    key_scales: &'static mut [S],
    value_scales: &'static mut [S],
    cos: &'static [f32],
    sin: &'static [f32],
    position: &'static [i32],
    /// Outputs of tiles, before they are divided.
    partial: &'static mut [f32],
    /// The largest score of a tile, and the sum of its weights.
    softmax: &'static mut [f32],
    /// Empty if a second launch adds the tiles.
    joined: Sequence<JoinedArgs<F>>,
    capacity: u32,
    /// Last position that has both a place and a rotation.
    last: u32,
    #[cube(comptime)]
    plan: AttentionPlan,
}

/// Output and counters of the cube that adds the tiles.
#[derive(CubeType, CubeLaunch)]
pub(super) struct JoinedArgs<F: Float> {
    output: &'static mut [F],
    /// One for the cubes of the same queries.
    counters: &'static mut [u32],
}

/// Runs the first loop at the head of this file.
#[cube(launch_unchecked)]
pub(super) fn attend_kernel<F: Float, N: Size, C: Numeric, W: Size, S: Int>(
    attention: &mut AttentionArgs<F, N, C, W, S>,
) {
    let position = position_of(attention.position, 0u32, attention.last);
    if CUBE_POS_X * comptime!(attention.plan.tile) <= position {
        attend_to_tile::<F, N, C, W, S>(attention, position);
    }
}

/// Vectors of keys and values in the registers of a unit, and the scales of packed ones.
#[derive(CubeType)]
struct Loaded<C: Numeric, W: Size> {
    keys: Array<Vector<C, W>>,
    values: Array<Vector<C, W>>,
    key_scales: Array<f32>,
    value_scales: Array<f32>,
}

/// Attends to the tile of the cube.
#[cube]
#[allow(clippy::too_many_lines, reason = "shared memory of a cube")]
fn attend_to_tile<F: Float, N: Size, C: Numeric, W: Size, S: Int>(
    attention: &mut AttentionArgs<F, N, C, W, S>,
    position: u32,
) {
    let plan = comptime!(attention.plan);
    let AttentionPlan { units, plane, tile, queries: rows, groups, head_dim, vector, .. } =
        comptime!(plan);
    let format = comptime!(plan.format);
    let conversion = comptime!(plan.conversion);
    let columns = comptime!(plan.columns());
    let half = comptime!(plan.columns() / 2);
    let step = comptime!(plan.step());
    let steps = comptime!(tile.div_ceil(step));
    let start = CUBE_POS_X * tile;
    let (kv_head, group) = (CUBE_POS_Y / groups, CUBE_POS_Y % groups);
    let key_head = CUBE_POS_Z * (CUBE_COUNT_Y / groups) + kv_head;
    let first_query = key_head * comptime!(groups * rows) + group * rows;
    let first_head = key_head * attention.capacity;
    let angles = position * comptime!(head_dim / 2);
    let has_own = position - start < tile;
    let column = UNIT_POS % columns;
    let place = UNIT_POS / columns;
    let mut loaded = Loaded::<C, W> {
        keys: Array::<Vector<C, W>>::new(comptime!(steps as usize)),
        values: Array::<Vector<C, W>>::new(comptime!(steps as usize)),
        key_scales: Array::<f32>::new(comptime!(steps as usize)),
        value_scales: Array::<f32>::new(comptime!(steps as usize)),
    };
    let own_len = comptime!(if format.is_some() { 2 * head_dim } else { head_dim });
    let mut own = Shared::<[f32]>::new_slice(comptime!(own_len as usize));
    let own_value = attention.values[(key_head * columns + column) as usize];
    if let Some(format) = comptime!(format) {
        if has_own {
            load_own::<F, N>(
                attention.keys,
                attention.values,
                attention.cos,
                attention.sin,
                key_head * columns,
                angles,
                &mut own,
                head_dim,
                vector,
            );
            sync_cube();
            quantize_own::<C, W, S>(
                &own,
                attention.key_cache,
                attention.value_cache,
                attention.key_scales,
                attention.value_scales,
                first_head + position,
                head_dim,
                vector,
                format,
            );
            sync_cube();
        }
        load_tile::<F, N, C, W, S>(&*attention, &mut loaded, first_head, start, position);
    } else {
        // Before all else, as it takes longest.
        load_tile::<F, N, C, W, S>(&*attention, &mut loaded, first_head, start, position);
        if has_own {
            write_own::<F, N, C, W, S>(
                attention, &mut own, own_value, key_head, first_head, position,
            );
        }
    }

    let scale = 1.0f32 / f32::cast_from(head_dim).sqrt();
    let mut rotated_queries = Shared::<[f32]>::new_slice(comptime!((rows * head_dim) as usize));
    let mut at = UNIT_POS;
    while at < comptime!(rows * half) {
        let (row, pair) = (at / half, at % half);
        let from = (first_query + row) * columns + pair;
        let first = attention.queries[from as usize];
        let second = attention.queries[(from + half) as usize];
        let angle = angles + pair * vector;
        let (low, high) =
            rotated::<F, N>(first, second, attention.cos, attention.sin, angle, vector);
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
    if comptime!(format.is_none()) {
        // The cache may not have them yet.
        #[unroll]
        for index in 0..steps {
            if has_own && start + place + comptime!(index * step) >= position {
                let mut key = Array::<f32>::new(comptime!(vector as usize));
                #[unroll]
                for channel in 0..vector {
                    key[channel as usize] = own[(column * vector + channel) as usize];
                }
                let key = to_vector::<F, N>(&key, vector, conversion);
                loaded.keys[index as usize] = Vector::<C, W>::cast_from(key);
                loaded.values[index as usize] = Vector::<C, W>::cast_from(own_value);
            }
        }
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
        let key = channels::<C, W>(loaded.keys[index as usize], vector, format);
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
                    product *= loaded.key_scales[index as usize];
                }
                shared[to as usize] = product;
            }
        }
    }
    sync_cube();

    let count = min(position + 1 - start, tile);
    let mut weights = Shared::<[f32]>::new_slice(comptime!((rows * tile) as usize));
    let mut totals = Shared::<[f32]>::new_slice(comptime!(rows as usize));
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
            let to = 2 * ((first_query + row) * CUBE_COUNT_X + CUBE_POS_X);
            attention.softmax[to as usize] = largest;
            attention.softmax[(to + 1) as usize] = sum;
            totals[row as usize] = sum;
        }
        row += comptime!(units / plane);
    }
    sync_cube();

    let units_of_place = comptime!(plan.added * columns);
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
                weight *= loaded.value_scales[index as usize];
            }
            let value = channels::<C, W>(loaded.values[index as usize], vector, format);
            #[unroll]
            for channel in 0..comptime!(vector as usize) {
                sums[channel] = fma(weight, value[channel], sums[channel]);
            }
        }
        #[unroll]
        for doubling in 0..comptime!(plan.added.ilog2()) {
            #[unroll]
            for channel in 0..comptime!(vector as usize) {
                let other = plane_shuffle_xor(sums[channel], comptime!(columns << doubling));
                sums[channel] += other;
            }
        }
        if place < step && UNIT_POS % units_of_place < columns {
            #[unroll]
            for channel in 0..vector {
                let to = UNIT_POS / units_of_place * output_stride
                    + comptime!((row * vector + channel) * columns);
                shared[(to + column) as usize] = sums[channel as usize];
            }
        }
    }
    sync_cube();

    let mut at = UNIT_POS;
    while at < comptime!(rows * head_dim) {
        let mut sum = shared[at as usize];
        #[unroll]
        for place in 1..comptime!(plan.places()) {
            sum += shared[(comptime!(place * output_stride) + at) as usize];
        }
        let (row, slot) = (at / head_dim, at % head_dim);
        let head = first_query + row;
        // In the order of shared memory: what adds the tiles puts channels in their places.
        let to = (head * CUBE_COUNT_X + CUBE_POS_X) * head_dim + slot;
        attention.partial[to as usize] = sum;
        #[unroll]
        for index in 0..attention.joined.len() {
            if position < tile {
                // Its only tile.
                let to = head * head_dim + channel_of(slot, plan);
                // Never -0, as in the sum of tiles: the compiler would leave out `+ 0.0`.
                let value = fma(1.0f32, sum, 0.0f32) / totals[row as usize];
                attention.joined.index_mut(index).output[to as usize] =
                    narrow::<F>(value, conversion);
            }
        }
        at += units;
    }
    if position >= tile {
        join_tiles::<F, N, C, W, S>(attention, first_query, position);
    }
}

/// Returns the channel of a place among the outputs of a query in shared memory.
#[cube]
fn channel_of(slot: u32, #[comptime] plan: AttentionPlan) -> u32 {
    let columns = comptime!(plan.columns());
    slot % columns * plan.vector + slot / columns
}

/// Loads a tile. Units beyond whole positions repeat loads, and use nothing of them.
#[cube]
fn load_tile<F: Float, N: Size, C: Numeric, W: Size, S: Int>(
    attention: &AttentionArgs<F, N, C, W, S>,
    loaded: &mut Loaded<C, W>,
    first_head: u32,
    start: u32,
    position: u32,
) {
    let plan = comptime!(attention.plan);
    let (columns, step) = comptime!((plan.columns(), plan.step()));
    let (column, place) = (UNIT_POS % columns, UNIT_POS / columns);
    #[unroll]
    for index in 0..comptime!(plan.tile.div_ceil(step)) {
        let in_tile = min(place + comptime!(index * step), comptime!(plan.tile - 1));
        let at = min(start + in_tile, position);
        let from = ((first_head + at) * columns + column) as usize;
        loaded.keys[index as usize] = attention.key_cache[from];
        loaded.values[index as usize] = attention.value_cache[from];
        if let Some(format) = comptime!(plan.format) {
            let scale = scale_place(first_head + at, column, plan.head_dim, plan.vector, format);
            let of_key = attention.key_scales[scale];
            loaded.key_scales[index as usize] = kv_scale::<S>(of_key, format);
            let of_value = attention.value_scales[scale];
            loaded.value_scales[index as usize] = kv_scale::<S>(of_value, format);
        }
    }
}

/// Rotates the token's own key, and writes it and the value to a dense cache; the key also to
/// shared memory. The last units do it, as the first ones rotate queries.
#[cube]
fn write_own<F: Float, N: Size, C: Numeric, W: Size, S: Int>(
    attention: &mut AttentionArgs<F, N, C, W, S>,
    own: &mut Shared<[f32]>,
    own_value: Vector<F, N>,
    key_head: u32,
    first_head: u32,
    position: u32,
) {
    let AttentionPlan { units, head_dim, vector, conversion, .. } = comptime!(attention.plan);
    let columns = comptime!(attention.plan.columns());
    let half = comptime!(columns / 2);
    let first = (first_head + position) * columns;
    let pair = comptime!(units - 1) - UNIT_POS;
    if pair < half {
        let at = key_head * columns + pair;
        let angle = position * comptime!(head_dim / 2) + pair * vector;
        let (low, high) = rotated::<F, N>(
            attention.keys[at as usize],
            attention.keys[(at + half) as usize],
            attention.cos,
            attention.sin,
            angle,
            vector,
        );
        let rounded = to_vector::<F, N>(&low, vector, conversion);
        attention.key_cache[(first + pair) as usize] = Vector::<C, W>::cast_from(rounded);
        let rounded = to_vector::<F, N>(&high, vector, conversion);
        attention.key_cache[(first + pair + half) as usize] = Vector::<C, W>::cast_from(rounded);
        #[unroll]
        for index in 0..vector {
            let to = pair * vector + index;
            own[to as usize] = low[index as usize];
            own[(to + comptime!(head_dim / 2)) as usize] = high[index as usize];
        }
    }
    if UNIT_POS < columns {
        attention.value_cache[(first + UNIT_POS) as usize] = Vector::<C, W>::cast_from(own_value);
    }
}

/// Counts a cube of the same queries, if one of them adds the tiles; the last one does.
#[cube]
fn join_tiles<F: Float, N: Size, C: Numeric, W: Size, S: Int>(
    attention: &mut AttentionArgs<F, N, C, W, S>,
    first_query: u32,
    position: u32,
) {
    let plan = comptime!(attention.plan);
    #[unroll]
    for index in 0..attention.joined.len() {
        let count = position / comptime!(plan.tile) + 1;
        let mut ended = Shared::<[u32]>::new_slice(1usize);
        publish::<f32>(attention.partial);
        publish::<f32>(attention.softmax);
        sync_cube();
        let joined = attention.joined.index_mut(index);
        if UNIT_POS == 0 {
            let group = CUBE_POS_Z * CUBE_COUNT_Y + CUBE_POS_Y;
            let before = arrive(joined.counters, group, true);
            if before + 1 == count {
                joined.counters[group as usize] = 0u32;
            }
            ended[0] = before + 1;
        }
        sync_cube();
        publish::<f32>(attention.partial);
        publish::<f32>(attention.softmax);
        if ended[0] == count {
            add_tiles::<F>(
                &*attention.partial,
                &*attention.softmax,
                joined.output,
                first_query,
                CUBE_COUNT_X,
                count,
                plan,
            );
        }
    }
}

/// Adds the tiles of a cube's queries as `combine_kernel` does, with the same bits.
#[cube]
fn add_tiles<F: Float>(
    partial: &[f32],
    softmax: &[f32],
    output: &mut [F],
    first_query: u32,
    tiles: u32,
    count: u32,
    #[comptime] plan: AttentionPlan,
) {
    let AttentionPlan { units, queries: rows, head_dim, parts, conversion, .. } = comptime!(plan);
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
        output[(head * head_dim + channel_of(slot, plan)) as usize] =
            narrow::<F>(total / sum, conversion);
        at += units;
    }
}

/// Transforms each 16 channels of the queries in shared memory, as the cached keys are.
#[cube]
fn transform_queries(queries: &mut Shared<[f32]>, #[comptime] plan: AttentionPlan) {
    let AttentionPlan { units, queries: rows, head_dim, vector, .. } = comptime!(plan);
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
pub(super) fn combine_kernel<F: Float>(
    partial: &[f32],
    softmax: &[f32],
    position: &[i32],
    output: &mut [F],
    tiles: u32,
    last: u32,
    #[comptime] plan: AttentionPlan,
) {
    let AttentionPlan { head_dim, parts, conversion, .. } = comptime!(plan);
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
        output[(head * head_dim + channel_of(slot, plan)) as usize] =
            narrow::<F>(total / sum, conversion);
    }
}
