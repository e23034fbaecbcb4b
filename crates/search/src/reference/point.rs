//! A scale and codes of one block, as the methods that improve them one block at a time see them.

use burn_fp4_formats::{E2M1, E4M3, E8M0, Fp4Format};

use crate::importance::BlockHessian;

/// What a block is to be approximated by, in its units (see [`Unit`](crate::block::Unit)), and what errors
/// cost.
pub(crate) struct Target<'a, const B: usize> {
    pub(crate) format: Fp4Format,
    pub(crate) base: u32,
    pub(crate) scaled: [f32; B],
    pub(crate) hessian: BlockHessian<'a>,
}

/// A scale and the E2M1 values of the codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Point<const B: usize> {
    pub(crate) scale: u32,
    pub(crate) elements: [f32; B],
    /// `r^T H r`.
    pub(crate) cost: f32,
}

impl<const B: usize> Target<'_, B> {
    /// The value of a scale in the units of the block.
    #[inline(always)]
    pub(crate) fn value(&self, scale: u32) -> f32 {
        match self.format {
            Fp4Format::NvFp4 => E4M3.decode(scale as u8),
            Fp4Format::MxFp4 => {
                f32::from_bits(scale.wrapping_sub(self.base).wrapping_add(127) << 23)
            }
        }
    }

    /// The scale, not 0, nearest to a positive value in the units of the block.
    pub(crate) fn nearest_scale(&self, value: f32) -> u32 {
        match self.format {
            Fp4Format::NvFp4 => u32::from(E4M3.encode(value)).max(1),
            Fp4Format::MxFp4 => {
                let below = (value.to_bits() >> 23) as i32;
                // In the middle between powers of two is 1.5.
                let up = (value.to_bits() >> 22 & 1) as i32;
                (self.base as i32 + below + up - 127).clamp(0, E8M0.max_code().into()) as u32
            }
        }
    }

    /// `r^T H r` of a scale and elements.
    #[inline(always)]
    pub(crate) fn cost(&self, scale: u32, elements: &[f32; B]) -> f32 {
        let value = self.value(scale);
        let mut errors = [0.0; B];
        for i in 0..B {
            errors[i] = (-elements[i]).mul_add(value, self.scaled[i]);
        }
        self.hessian.cost(&errors)
    }

    /// `H v`.
    #[inline(always)]
    pub(crate) fn product(&self, vector: &[f32; B]) -> [f32; B] {
        product(self.hessian.values, vector)
    }
}

/// A symmetric matrix times a vector: by its rows, so that the compiler adds them up side by side, in four
/// sums that need not wait for each other.
#[inline(always)]
pub(crate) fn product<const B: usize>(matrix: &[f32], vector: &[f32; B]) -> [f32; B] {
    let mut sums = [[0.0; B]; 4];
    for (rows, factors) in matrix.chunks_exact(4 * B).zip(vector.chunks_exact(4)) {
        for (sums, (row, &factor)) in sums.iter_mut().zip(rows.chunks_exact(B).zip(factors)) {
            for i in 0..B {
                sums[i] = row[i].mul_add(factor, sums[i]);
            }
        }
    }
    let mut product = [0.0; B];
    for i in 0..B {
        product[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    }
    product
}

/// The E2M1 values nearest to others.
#[inline(always)]
pub(crate) fn nearest<const B: usize>(values: &[f32; B]) -> [f32; B] {
    values.map(crate::host::nearest_element)
}

/// The magnitudes and signs an element may have, ascending.
pub(crate) fn element_values() -> [f32; 15] {
    core::array::from_fn(|index| {
        let magnitude = E2M1.decode(index.abs_diff(7) as u8);
        if index < 7 { -magnitude } else { magnitude }
    })
}
