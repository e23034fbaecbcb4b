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
    fn run<W: LaneWork>(self, work: W) -> W::Output;

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
    /// Adds the products of integers of magnitude 127 at most, four to a lane.
    #[inline(always)]
    fn integer_dot(self, left: Self::Bytes, right: Self::Bytes) -> Self::Ints {
        self.dot(self.repeat_int(0), [left], [right])
    }

    #[inline(always)]
    fn ints(self, values: &[i32; LANES]) -> Self::Ints {
        cast(*values)
    }
    fn repeat_int(self, value: i32) -> Self::Ints;
    fn add_ints(self, left: Self::Ints, right: Self::Ints) -> Self::Ints;
    /// Adds neighboring lanes of two vectors: a0 + a1, a2 + a3, b0 + b1, b2 + b3, a4 + a5, ..
    fn pair_sums(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// Adds the products of each block of `R` rows: in each four lanes two blocks of 16 channels
    /// of the first row and then of the second, or a block of 32 channels of each of four rows.
    #[inline(always)]
    fn block_dots<const R: usize>(
        self,
        elements: [[Self::Bytes; 2]; R],
        integers: [Self::Bytes; 2],
    ) -> Self::Ints {
        block_dots(self, elements, integers)
    }

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
    /// Takes bytes of each word in turn, the lowest first: two of 2 words, or one of 4.
    #[inline(always)]
    fn interleave<const R: usize>(self, words: [u64; R]) -> [u8; LANES] {
        let together = 4 / R;
        core::array::from_fn(|at| {
            let byte = at / 4 * together + at % together;
            (words[at % 4 / together] >> (8 * byte)) as u8
        })
    }
    /// Decodes codes of E4M3 below 0x7F.
    fn e4m3(self, codes: [u8; LANES]) -> Self::Floats;
    /// Decodes codes of E8M0 below 0xFF.
    fn e8m0(self, codes: [u8; LANES]) -> Self::Floats;
}

/// Computes [`Lanes::block_dots`] from the sums of each lane.
#[inline(always)]
pub(super) fn block_dots<L: Lanes, const R: usize>(
    lanes: L,
    elements: [[L::Bytes; 2]; R],
    integers: [L::Bytes; 2],
) -> L::Ints {
    let mut dots = [lanes.repeat_int(0); R];
    for row in 0..R {
        dots[row] = lanes.dot(dots[row], elements[row], integers);
    }
    let first = lanes.pair_sums(dots[0], dots[1]);
    match R {
        2 => first,
        _ => lanes.pair_sums(first, lanes.pair_sums(dots[R - 2], dots[R - 1])),
    }
}

/// Work for the instructions of a processor.
pub(super) trait LaneWork {
    type Output;

    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
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

    fn run<W: LaneWork>(self, work: W) -> W::Output {
        work.run(self)
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
            let from = if lane % 4 < 2 { &a } else { &b };
            let first = lane / 4 * 4 + lane % 2 * 2;
            from[first] + from[first + 1]
        })
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
