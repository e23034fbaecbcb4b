//! A strip of blocks that stays in the first-level cache, and how it is read and written.
//!
//! ```text
//! Order::Along    b0k0 b0k1 .. b0k15 | b1k0 b1k1 ..    a contiguous axis, as it is read
//! Order::Across   b0k0 b1k0 .. b31k0 | b0k1 b1k1 ..    a strided axis, and every search
//! ```
//!
//! What is computed on it is in loops that the compiler turns into SIMD: no branch depends on the
//! data and no order of additions matters. Every function is `inline(always)`, so that it is
//! compiled for the instruction set of its caller. `amax.rs` finds scales, `codes.rs` codes, and
//! each search has a file of its name.

use burn_fp4_formats::BLOCK_SIZES;

use super::HostElement;
use super::scale_grid::Scales;
use crate::TensorFactor;

/// Blocks of a strip. With f32 values, codes and scales it stays within the first-level cache.
pub(super) const STRIP: usize = 32;

/// Largest block size.
pub(super) const MAX_BLOCK: usize = BLOCK_SIZES[BLOCK_SIZES.len() - 1];

/// How the values of a strip lie in its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Block by block, as a contiguous axis is read.
    Along,
    /// The first value of every block, then the second, as a strided axis is read.
    Across,
}

/// A strip of [`STRIP`] blocks of `B` values. One that is not full holds something in the rest.
pub(super) struct Strip<const B: usize> {
    pub(super) order: Order,
    pub(super) values: [f32; STRIP * MAX_BLOCK],
    /// Element codes, one a byte, in the order of the values.
    pub(super) codes: [u8; STRIP * MAX_BLOCK],
    /// Eight codes a word, the first in the lowest nibble: block by block, or across blocks.
    pub(super) words: [u32; STRIP * MAX_BLOCK / 8],
    /// amax of each block, or of the tile it belongs to.
    pub(super) amax: [f32; STRIP],
    /// Tensor factor of each block's row.
    pub(super) tensor_amax: [f32; STRIP],
    pub(super) encode: [f32; STRIP],
    pub(super) decode: [f32; STRIP],
    /// Code of each block's scale.
    pub(super) scales: [u8; STRIP],
    /// What the elements of each block are multiplied by, or divided by.
    pub(super) multipliers: [f32; STRIP],
    /// All bits, or none where a NaN makes every code of the block 0.
    pub(super) numbers: [u32; STRIP],
    /// Random bits for stochastic rounding, in the order of the values.
    pub(super) random: [u16; STRIP * MAX_BLOCK],
}

impl<const B: usize> Strip<B> {
    pub(super) const fn new(order: Order) -> Self {
        Self {
            order,
            values: [0.0; STRIP * MAX_BLOCK],
            codes: [0; STRIP * MAX_BLOCK],
            words: [0; STRIP * MAX_BLOCK / 8],
            amax: [0.0; STRIP],
            tensor_amax: [1.0; STRIP],
            encode: [1.0; STRIP],
            decode: [1.0; STRIP],
            scales: [0; STRIP],
            multipliers: [1.0; STRIP],
            numbers: [!0; STRIP],
            random: [0; STRIP * MAX_BLOCK],
        }
    }

    /// The values in their order.
    #[inline(always)]
    pub(super) fn values(&self) -> &[f32] {
        &self.values[..STRIP * B]
    }

    /// The values in their order.
    #[inline(always)]
    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values[..STRIP * B]
    }

    #[inline(always)]
    pub(super) fn set_factor(&mut self, block: usize, factor: TensorFactor) {
        self.tensor_amax[block] = factor.amax;
        self.encode[block] = factor.encode;
        self.decode[block] = factor.decode;
    }

    /// Reads `n` columns from `column` on of a `[B, inner]` slab, one block each.
    #[inline(always)]
    pub(super) fn read_columns<T: HostElement>(
        &mut self,
        slab: &[T],
        inner: usize,
        column: usize,
        n: usize,
    ) {
        for (k, line) in self.values_mut().chunks_exact_mut(STRIP).enumerate() {
            let source = &slab[k * inner + column..][..n];
            // A whole line, of known length, is a few instructions instead of a call.
            if n == STRIP {
                T::read(&source[..STRIP], &mut line[..STRIP]);
            } else {
                T::read(source, &mut line[..n]);
            }
        }
    }

    /// Writes the first `n` blocks as columns of a `[B, inner]` slab.
    #[inline(always)]
    pub(super) fn write_columns<T: HostElement>(
        &self,
        slab: &mut [T],
        inner: usize,
        column: usize,
        n: usize,
    ) {
        for (k, line) in self.values().chunks_exact(STRIP).enumerate() {
            let target = &mut slab[k * inner + column..][..n];
            if n == STRIP {
                T::write(&line[..STRIP], &mut target[..STRIP]);
            } else {
                T::write(&line[..n], target);
            }
        }
    }

    /// The units of the first `n` blocks, and which of them a search may improve.
    #[inline(always)]
    pub(super) fn units<const FORMAT: usize>(&self, n: usize) -> Units {
        let mut units =
            Units { factor: [1.0; STRIP], base: [0; STRIP], searchable: [false; STRIP] };
        for block in 0..STRIP {
            let unit = Scales::<FORMAT>::unit(self.amax[block], self.encode[block]);
            units.factor[block] = unit.factor;
            units.base[block] = unit.base;
            units.searchable[block] = (block < n) & unit.searchable;
        }
        units
    }
}

/// In which units the blocks of a strip are searched; see [`Unit`](crate::scale_grid::Unit).
pub(super) struct Units {
    pub(super) factor: [f32; STRIP],
    pub(super) base: [u32; STRIP],
    pub(super) searchable: [bool; STRIP],
}
