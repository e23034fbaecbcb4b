//! [`Lanes`]: sixteen sums of products of bytes, with the instructions of the processor.

use burn_fp4_formats::Fp4Format;
use pulp::bytemuck::Pod;
use pulp::cast;

use super::int8_input::LANES;
use super::scale_grid::scale_values;

/// Bits of 2^-127, the number of code 0 of E8M0, which is subnormal in f32.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) const E8M0_LEAST: u32 = 0x40_0000;

/// Calls an intrinsic of the instructions of a token.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! call {
    ($call:expr) => {
        // SAFETY: these functions read no memory, and the token `self` exists only if the
        // processor has the instructions: `detect` alone makes one.
        unsafe { $call }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use call;

/// The instructions of a processor for 16 lanes, of 4 bytes, an i32 or an f32 each.
///
/// Sums of products of bytes are exact and every f32 operation is rounded on its own, so that all
/// implementations give the same bits.
pub(super) trait Lanes: Copy {
    type Bytes: Pod;
    type Ints: Pod;
    type Floats: Pod;

    /// Runs work with these instructions.
    fn run<W: LaneWork>(self, work: W);

    #[inline(always)]
    fn bytes(self, bytes: &[i8; 4 * LANES]) -> Self::Bytes {
        cast(*bytes)
    }
    /// Repeats 4 bytes in every lane.
    fn repeat(self, bytes: &[i8; 4]) -> Self::Bytes;
    /// Decodes the lower and the upper codes of bytes to doubled elements plus `OFFSET`.
    fn elements(self, codes: &[u8; 4 * LANES]) -> [Self::Bytes; 2];
    #[inline(always)]
    fn store_bytes(self, bytes: Self::Bytes) -> [i8; 4 * LANES] {
        cast(bytes)
    }
    /// Adds products of elements and integers to the sum of their lane, for up to 4 vectors.
    fn dot<const N: usize>(
        self,
        sums: Self::Ints,
        elements: [Self::Bytes; N],
        integers: [Self::Bytes; N],
    ) -> Self::Ints;

    #[inline(always)]
    fn ints(self, values: &[i32; LANES]) -> Self::Ints {
        cast(*values)
    }
    fn repeat_int(self, value: i32) -> Self::Ints;
    fn add_ints(self, left: Self::Ints, right: Self::Ints) -> Self::Ints;
    /// Adds neighboring lanes of two vectors: a0 + a1, b0 + b1, a2 + a3, ..
    fn pair_sums(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// Adds every four lanes of four vectors: a0 + a1 + a2 + a3, b0 + .., c0 + .., d0 + .., a4 + ..
    fn quad_sums(self, vectors: [Self::Ints; 4]) -> Self::Ints;

    fn to_floats(self, ints: Self::Ints) -> Self::Floats;
    #[inline(always)]
    fn floats(self, values: &[f32; LANES]) -> Self::Floats {
        cast(*values)
    }
    fn repeat_float(self, value: f32) -> Self::Floats;
    #[inline(always)]
    fn store(self, floats: Self::Floats) -> [f32; LANES] {
        cast(floats)
    }
    fn add(self, left: Self::Floats, right: Self::Floats) -> Self::Floats;
    fn mul(self, left: Self::Floats, right: Self::Floats) -> Self::Floats;
    /// Computes `a * b + c`, rounded once.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Takes a byte of each word, the lowest first, then the next of each, up to 16 bytes.
    #[inline(always)]
    fn interleave<const R: usize>(self, words: [u64; R]) -> [u8; LANES] {
        core::array::from_fn(|at| (words[at % R] >> (8 * (at / R))) as u8)
    }
    /// Decodes codes of E4M3 below 0x7F.
    fn e4m3(self, codes: [u8; LANES]) -> Self::Floats;
    /// Decodes codes of E8M0 below 0xFF.
    fn e8m0(self, codes: [u8; LANES]) -> Self::Floats;
}

/// Work for the instructions of a processor.
pub(super) trait LaneWork {
    fn run<L: Lanes>(self, lanes: L);
}

/// Doubled elements plus `OFFSET`, by code.
pub(super) const ELEMENTS: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// Instructions that every processor has.
#[derive(Clone, Copy)]
pub(super) struct Generic;

impl Lanes for Generic {
    type Bytes = [i8; 4 * LANES];
    type Ints = [i32; LANES];
    type Floats = [f32; LANES];

    fn run<W: LaneWork>(self, work: W) {
        work.run(self);
    }

    #[inline(always)]
    fn repeat(self, bytes: &[i8; 4]) -> Self::Bytes {
        core::array::from_fn(|at| bytes[at % 4])
    }
    #[inline(always)]
    fn elements(self, codes: &[u8; 4 * LANES]) -> [Self::Bytes; 2] {
        let element = |code: u8| ELEMENTS[usize::from(code)] as i8;
        [codes.map(|code| element(code & 15)), codes.map(|code| element(code >> 4))]
    }
    #[inline(always)]
    fn dot<const N: usize>(
        self,
        mut sums: Self::Ints,
        elements: [Self::Bytes; N],
        integers: [Self::Bytes; N],
    ) -> Self::Ints {
        for (elements, integers) in elements.iter().zip(&integers) {
            for lane in 0..LANES {
                for at in 4 * lane..4 * lane + 4 {
                    sums[lane] += i32::from(elements[at]) * i32::from(integers[at]);
                }
            }
        }
        sums
    }
    #[inline(always)]
    fn repeat_int(self, value: i32) -> Self::Ints {
        [value; LANES]
    }
    #[inline(always)]
    fn add_ints(self, left: Self::Ints, right: Self::Ints) -> Self::Ints {
        core::array::from_fn(|lane| left[lane] + right[lane])
    }
    #[inline(always)]
    fn pair_sums(self, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        core::array::from_fn(|lane| {
            let from = if lane % 2 == 0 { &a } else { &b };
            from[lane & !1] + from[lane | 1]
        })
    }
    #[inline(always)]
    fn quad_sums(self, vectors: [Self::Ints; 4]) -> Self::Ints {
        core::array::from_fn(|lane| vectors[lane % 4][lane & !3..][..4].iter().sum())
    }
    #[inline(always)]
    fn to_floats(self, ints: Self::Ints) -> Self::Floats {
        ints.map(|int| int as f32)
    }
    #[inline(always)]
    fn repeat_float(self, value: f32) -> Self::Floats {
        [value; LANES]
    }
    #[inline(always)]
    fn add(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        core::array::from_fn(|lane| left[lane] + right[lane])
    }
    #[inline(always)]
    fn mul(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        core::array::from_fn(|lane| left[lane] * right[lane])
    }
    #[inline(always)]
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        core::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }
    #[inline(always)]
    fn e4m3(self, codes: [u8; LANES]) -> Self::Floats {
        let values = scale_values(Fp4Format::NvFp4);
        codes.map(|code| values[usize::from(code)])
    }
    #[inline(always)]
    fn e8m0(self, codes: [u8; LANES]) -> Self::Floats {
        let values = scale_values(Fp4Format::MxFp4);
        codes.map(|code| values[usize::from(code)])
    }
}
