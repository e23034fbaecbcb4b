//! A batch of blocks that stays in the first-level cache, and how it is read and written.
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

use super::element::HostElement;
use super::scale_grid::Scales;
use crate::tensor_scale::TensorFactor;

/// Blocks of a batch. With f32 values, codes and scales it stays within the first-level cache.
pub(super) const BATCH: usize = 32;

/// Largest block size.
pub(super) const MAX_BLOCK: usize = BLOCK_SIZES[BLOCK_SIZES.len() - 1];

/// How the values of a batch lie in its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Block by block, as a contiguous axis is read.
    Along,
    /// The first value of every block, then the second, as a strided axis is read.
    Across,
}

/// A batch of [`BATCH`] blocks of `B` values. One that is not full holds something in the rest.
pub(super) struct BlockBatch<const B: usize> {
    pub(super) order: Order,
    pub(super) values: [f32; BATCH * MAX_BLOCK],
    /// Element codes, one a byte, in the order of the values.
    pub(super) codes: [u8; BATCH * MAX_BLOCK],
    /// Eight codes a word, the first in the lowest nibble: block by block, or across blocks.
    pub(super) words: [u32; BATCH * MAX_BLOCK / 8],
    /// amax of each block, or of the tile it belongs to.
    pub(super) amax: [f32; BATCH],
    /// Tensor factor of each block's row.
    pub(super) tensor_amax: [f32; BATCH],
    pub(super) encode: [f32; BATCH],
    pub(super) decode: [f32; BATCH],
    /// Code of each block's scale.
    pub(super) scales: [u8; BATCH],
    /// What the elements of each block are multiplied by, or divided by.
    pub(super) multipliers: [f32; BATCH],
    /// All bits, or none where a NaN makes every code of the block 0.
    pub(super) numbers: [u32; BATCH],
    /// Random bits for stochastic rounding, in the order of the values.
    pub(super) random: [u16; BATCH * MAX_BLOCK],
}

impl<const B: usize> BlockBatch<B> {
    pub(super) const fn new(order: Order) -> Self {
        Self {
            order,
            values: [0.0; BATCH * MAX_BLOCK],
            codes: [0; BATCH * MAX_BLOCK],
            words: [0; BATCH * MAX_BLOCK / 8],
            amax: [0.0; BATCH],
            tensor_amax: [1.0; BATCH],
            encode: [1.0; BATCH],
            decode: [1.0; BATCH],
            scales: [0; BATCH],
            multipliers: [1.0; BATCH],
            numbers: [!0; BATCH],
            random: [0; BATCH * MAX_BLOCK],
        }
    }

    /// The values in their order.
    #[inline(always)]
    pub(super) fn values(&self) -> &[f32] {
        &self.values[..BATCH * B]
    }

    /// The values in their order.
    #[inline(always)]
    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values[..BATCH * B]
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
        for (k, line) in self.values_mut().chunks_exact_mut(BATCH).enumerate() {
            let source = &slab[k * inner + column..][..n];
            // A whole line, of known length, is a few instructions instead of a call.
            if n == BATCH {
                T::read(&source[..BATCH], &mut line[..BATCH]);
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
        for (k, line) in self.values().chunks_exact(BATCH).enumerate() {
            let target = &mut slab[k * inner + column..][..n];
            if n == BATCH {
                T::write(&line[..BATCH], &mut target[..BATCH]);
            } else {
                T::write(&line[..n], target);
            }
        }
    }

    /// The units of the first `n` blocks, and which of them a search may improve.
    #[inline(always)]
    pub(super) fn normalizations<const FORMAT: usize>(&self, n: usize) -> BlockNormalizations {
        let mut normalizations = BlockNormalizations {
            factor: [1.0; BATCH],
            base: [0; BATCH],
            searchable: [false; BATCH],
        };
        for block in 0..BATCH {
            let normalization =
                Scales::<FORMAT>::normalization(self.amax[block], self.encode[block]);
            normalizations.factor[block] = normalization.factor;
            normalizations.base[block] = normalization.base;
            normalizations.searchable[block] = (block < n) & normalization.searchable;
        }
        normalizations
    }
}

/// In which units the blocks of a batch are searched; see [`BlockNormalization`](crate::scale_grid::BlockNormalization).
pub(super) struct BlockNormalizations {
    pub(super) factor: [f32; BATCH],
    pub(super) base: [u32; BATCH],
    pub(super) searchable: [bool; BATCH],
}
