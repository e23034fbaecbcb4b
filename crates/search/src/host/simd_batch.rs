//! [`BlockBatch`]: a batch of blocks that stays in the first-level cache.
//!
//! ```text
//! Order::Along    b0k0 b0k1 .. b0k15 | b1k0 b1k1 ..    order of a contiguous axis
//! Order::Across   b0k0 b1k0 .. b31k0 | b0k1 b1k1 ..    order of a strided axis, and of searches
//! ```
//!
//! The compiler vectorizes the loops over a batch: no branch depends on the data and no order of
//! additions matters. Every function is `inline(always)`, so that it is compiled for the
//! instruction set of its caller. `amax.rs` computes scales, `codes.rs` codes, and each search has
//! a file of its name.

use burn_fp4_formats::BLOCK_SIZES;

use super::element::HostElement;
use super::scale_grid::Scales;
use crate::tensor_scale::TensorFactor;

/// Number of blocks of a batch. With f32 values, codes and scales it stays in the first-level
/// cache.
pub(super) const BATCH: usize = 32;

/// Largest block size.
pub(super) const MAX_BLOCK: usize = BLOCK_SIZES[BLOCK_SIZES.len() - 1];

/// Orders the values of a batch in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Block by block, the order of a contiguous axis.
    Along,
    /// The first value of every block, then the second, the order of a strided axis.
    Across,
}

/// Holds [`BATCH`] blocks of `B` values. The rest of a batch that is not full is arbitrary.
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
    /// Multipliers, or divisors, of the elements of each block.
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

    /// Returns the values in their order.
    #[inline(always)]
    pub(super) fn values(&self) -> &[f32] {
        &self.values[..BATCH * B]
    }

    /// Returns the values in their order.
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

    /// Normalizes the first `n` blocks. The rest is not searchable.
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

/// The [`BlockNormalization`](crate::scale_grid::BlockNormalization) of every block of a batch.
pub(super) struct BlockNormalizations {
    pub(super) factor: [f32; BATCH],
    pub(super) base: [u32; BATCH],
    pub(super) searchable: [bool; BATCH],
}
