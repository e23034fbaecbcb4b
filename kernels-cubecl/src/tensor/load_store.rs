//! Loads and stores of the values of a thread tile, a block of each of some neighbouring packed
//! rows.
//!
//! A unit holds them as `elements[row x block_size + k]`, in f32. Memory has one of two layouts:
//!
//! ```text
//! contiguous axis (rows: 1, or 4 of a 16 x 16 tile)
//!     row r    | v v v v | v v v v |  ..      a vector: neighbours k of one row
//!
//! strided axis (rows: 1, 2 or 4)
//!     k = 0    | r0 r1 r2 r3 |                a vector: the same k of neighbouring rows
//!     k = 1    | r0 r1 r2 r3 |    `inner` values further
//!     ..
//! ```
//!
//! 16-bit values are loaded in words of 32 bits, two at a time.

use cubecl::prelude::*;
use half::f16;

use super::indexing::{Dims, TileOrigin};
use crate::numeric::element::narrow;
use crate::plan::{Dtype, ThreadTile};

/// Loads the block of every row of a tile as f32: value k of row r is at `r * block_size + k`.
/// Missing rows repeat the first one.
#[cube]
pub(crate) fn load_blocks<E: Int, N: Size>(
    values: &[Vector<E, N>],
    origin: &TileOrigin,
    dims: &Dims,
    #[comptime] block_size: u32,
    #[comptime] thread_tile: ThreadTile,
) -> Array<f32> {
    let mut elements = Array::<f32>::new(comptime!((thread_tile.rows * block_size) as usize));
    // A tile without any row loads the start of the tensor.
    let first = select(origin.rows_left > 0u32, origin.first, 0u32) / thread_tile.vector;
    if comptime!(thread_tile.contiguous_axis) {
        let lines = comptime!(block_size / thread_tile.vector);
        #[unroll]
        for row in 0..thread_tile.rows {
            let offset = row * dims.blocks * lines;
            let start = first + select(row < origin.rows_left, offset, 0u32);
            #[unroll]
            for line in 0..lines {
                let loaded = values[(start + line) as usize];
                #[unroll]
                for index in 0..thread_tile.vector {
                    let at = comptime!(row * block_size + line * thread_tile.vector + index);
                    elements[at as usize] = widen::<E, N>(loaded, index, thread_tile);
                }
            }
        }
    } else {
        let step = dims.inner / thread_tile.vector;
        #[unroll]
        for k in 0..block_size {
            let loaded = values[(first + k * step) as usize];
            #[unroll]
            for row in 0..thread_tile.rows {
                let at = comptime!(row * block_size + k);
                elements[at as usize] = widen::<E, N>(loaded, row, thread_tile);
            }
        }
    }
    elements
}

/// Stores the values that [`load_blocks`] loads, rounded once to the dtype of the tensor.
#[cube]
pub(crate) fn store_blocks<F: Float, N: Size>(
    elements: &Array<f32>,
    values: &mut [Vector<F, N>],
    origin: &TileOrigin,
    dims: &Dims,
    #[comptime] block_size: u32,
    #[comptime] thread_tile: ThreadTile,
) {
    let first = origin.first / thread_tile.vector;
    if comptime!(thread_tile.contiguous_axis) {
        let lines = comptime!(block_size / thread_tile.vector);
        #[unroll]
        for row in 0..thread_tile.rows {
            if row < origin.rows_left {
                let start = first + row * dims.blocks * lines;
                store_vectors(
                    elements,
                    comptime!(row * block_size),
                    values,
                    start,
                    lines,
                    thread_tile,
                );
            }
        }
    } else if origin.rows_left > 0u32 {
        let step = dims.inner / thread_tile.vector;
        #[unroll]
        for k in 0..block_size {
            let mut rounded = Vector::<F, N>::empty();
            #[unroll]
            for row in 0..thread_tile.rows {
                let value = elements[comptime!((row * block_size + k) as usize)];
                let value = narrow::<F>(value, comptime!(thread_tile.conversion));
                rounded.insert(comptime!(row as usize), value);
            }
            values[(first + k * step) as usize] = rounded;
        }
    }
}

/// Stores the elements from `at` on as `lines` vectors.
#[cube]
pub(crate) fn store_vectors<F: Float, N: Size>(
    elements: &Array<f32>,
    #[comptime] at: u32,
    values: &mut [Vector<F, N>],
    start: u32,
    #[comptime] lines: u32,
    #[comptime] thread_tile: ThreadTile,
) {
    #[unroll]
    for line in 0..lines {
        let mut rounded = Vector::<F, N>::empty();
        #[unroll]
        for index in 0..thread_tile.vector {
            let value = elements[comptime!((at + line * thread_tile.vector + index) as usize)];
            let value = narrow::<F>(value, comptime!(thread_tile.conversion));
            rounded.insert(comptime!(index as usize), value);
        }
        values[(start + line) as usize] = rounded;
    }
}

/// Returns a value of a vector of words as f32.
#[cube]
pub(crate) fn widen<E: Int, N: Size>(
    loaded: Vector<E, N>,
    #[comptime] index: u32,
    #[comptime] thread_tile: ThreadTile,
) -> f32 {
    let each = comptime!(thread_tile.word_values());
    let word = u32::cast_from(loaded.extract(comptime!((index / each) as usize)));
    if comptime!(thread_tile.dtype == Dtype::F32) {
        f32::reinterpret(word)
    } else if comptime!(thread_tile.dtype == Dtype::Bf16) {
        // The bits of a bf16 are the upper half of its f32.
        if comptime!(index.is_multiple_of(each)) {
            f32::reinterpret(word << 16u32)
        } else {
            f32::reinterpret(word & 0xFFFF_0000u32)
        }
    } else {
        let half = comptime!(16 * (index % each));
        f32::cast_from(f16::reinterpret(u16::cast_from((word >> half) & 0xFFFFu32)))
    }
}

/// Returns a value of a vector of words as f32, without 16-bit integers, which WGSL lacks.
#[cube]
pub(crate) fn widen_word<X: Size>(
    loaded: Vector<u32, X>,
    #[comptime] index: u32,
    #[comptime] dtype: Dtype,
) -> f32 {
    if comptime!(dtype == Dtype::F32) {
        f32::reinterpret(loaded.extract(comptime!(index as usize)))
    } else {
        let word = loaded.extract(comptime!((index / 2) as usize));
        if comptime!(dtype == Dtype::F16) {
            let pair = Vector::<f16, Const<2>>::reinterpret(word);
            f32::cast_from(pair.extract(comptime!((index % 2) as usize)))
        } else if comptime!(index.is_multiple_of(2)) {
            f32::reinterpret(word << 16u32)
        } else {
            f32::reinterpret(word & 0xFFFF_0000u32)
        }
    }
}
