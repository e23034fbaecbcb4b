//! [`Lanes`] of AArch64, whose every processor has NEON; with `sdot` if it has that.
//!
//! Tests pass in an emulator (`qemu-aarch64`); speed was not measured on a processor.

use core::arch::aarch64::*;
use core::arch::asm;
use core::array::from_fn;
use std::arch::is_aarch64_feature_detected;

use pulp::cast;

use super::int8_input::LANES;
use super::int8_lanes::{E8M0_LEAST, ELEMENTS, LaneWork, Lanes, call};

/// NEON, and its products of bytes if `DOT` is true.
#[derive(Clone, Copy)]
pub(super) struct Neon<const DOT: bool>(());

impl<const DOT: bool> Neon<DOT> {
    pub(super) fn detect() -> Option<Self> {
        let found = is_aarch64_feature_detected!("neon")
            && (!DOT || is_aarch64_feature_detected!("dotprod"));
        found.then_some(Self(()))
    }
}

/// Adds the products of 16 bytes to the sums of their lanes. The intrinsic is not stable.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut sums: int32x4_t, elements: int8x16_t, integers: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction reads and writes these registers only.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {elements:v}.16b, {integers:v}.16b",
            sums = inout(vreg) sums,
            elements = in(vreg) elements,
            integers = in(vreg) integers,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

impl<const DOT: bool> Lanes for Neon<DOT> {
    type Bytes = [int8x16_t; 4];
    type Ints = [int32x4_t; 4];
    type Floats = [float32x4_t; 4];

    fn run<W: LaneWork>(self, work: W) -> W::Output {
        #[target_feature(enable = "neon")]
        fn neon<W: LaneWork>(lanes: Neon<false>, work: W) -> W::Output {
            work.run(lanes)
        }
        #[target_feature(enable = "neon,dotprod")]
        fn dot<W: LaneWork>(lanes: Neon<true>, work: W) -> W::Output {
            work.run(lanes)
        }
        match DOT {
            false => call!(neon(Neon(()), work)),
            true => call!(dot(Neon(()), work)),
        }
    }

    #[inline(always)]
    fn repeat(self, bytes: &[i8; 4]) -> Self::Bytes {
        [cast(call!(vdupq_n_s32(cast(*bytes)))); 4]
    }
    #[inline(always)]
    fn elements(self, codes: &[u8; 4 * LANES]) -> [Self::Bytes; 2] {
        let codes: [uint8x16_t; 4] = cast(*codes);
        let table: int8x16_t = cast(ELEMENTS);
        let mut elements = [[table; 4]; 2];
        for part in 0..4 {
            let lower = call!(vandq_u8(codes[part], vdupq_n_u8(15)));
            elements[0][part] = call!(vqtbl1q_s8(table, lower));
            elements[1][part] = call!(vqtbl1q_s8(table, vshrq_n_u8::<4>(codes[part])));
        }
        elements
    }
    #[inline(always)]
    fn dot<const N: usize>(
        self,
        mut sums: Self::Ints,
        elements: [Self::Bytes; N],
        integers: [Self::Bytes; N],
    ) -> Self::Ints {
        for part in 0..4 {
            if DOT {
                for at in 0..N {
                    sums[part] = call!(sdot(sums[part], elements[at][part], integers[at][part]));
                }
            } else {
                // 8 products of 24 x 127 fit into 16 bits.
                let (first, second) = (elements[0][part], integers[0][part]);
                let mut low = call!(vmull_s8(vget_low_s8(first), vget_low_s8(second)));
                let mut high = call!(vmull_high_s8(first, second));
                for at in 1..N {
                    let (first, second) = (elements[at][part], integers[at][part]);
                    low = call!(vmlal_s8(low, vget_low_s8(first), vget_low_s8(second)));
                    high = call!(vmlal_high_s8(high, first, second));
                }
                sums[part] = call!(vpadalq_s16(sums[part], vpaddq_s16(low, high)));
            }
        }
        sums
    }
    #[inline(always)]
    fn repeat_int(self, value: i32) -> Self::Ints {
        [call!(vdupq_n_s32(value)); 4]
    }
    #[inline(always)]
    fn add_ints(self, left: Self::Ints, right: Self::Ints) -> Self::Ints {
        let mut sums = left;
        for part in 0..4 {
            sums[part] = call!(vaddq_s32(left[part], right[part]));
        }
        sums
    }
    #[inline(always)]
    fn pair_sums(self, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        let mut sums = a;
        for part in 0..4 {
            sums[part] = call!(vpaddq_s32(a[part], b[part]));
        }
        sums
    }
    #[inline(always)]
    fn to_floats(self, ints: Self::Ints) -> Self::Floats {
        let mut floats = self.repeat_float(0.0);
        for part in 0..4 {
            floats[part] = call!(vcvtq_f32_s32(ints[part]));
        }
        floats
    }
    #[inline(always)]
    fn repeat_float(self, value: f32) -> Self::Floats {
        [call!(vdupq_n_f32(value)); 4]
    }
    #[inline(always)]
    fn add(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        let mut sums = left;
        for part in 0..4 {
            sums[part] = call!(vaddq_f32(left[part], right[part]));
        }
        sums
    }
    #[inline(always)]
    fn mul(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        let mut products = left;
        for part in 0..4 {
            products[part] = call!(vmulq_f32(left[part], right[part]));
        }
        products
    }
    #[inline(always)]
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        let mut sums = c;
        for part in 0..4 {
            sums[part] = call!(vfmaq_f32(c[part], a[part], b[part]));
        }
        sums
    }
    #[inline(always)]
    fn e4m3(self, codes: [u8; LANES]) -> Self::Floats {
        // The exponent's bias of f32 is 120 more; subnormal numbers are not flushed.
        let bits: [u32; LANES] = from_fn(|lane| u32::from(codes[lane]) << 20);
        self.mul(cast(bits), self.repeat_float(f32::from_bits((127 + 120) << 23)))
    }
    #[inline(always)]
    fn e8m0(self, codes: [u8; LANES]) -> Self::Floats {
        let bits: [u32; LANES] = from_fn(|lane| (u32::from(codes[lane]) << 23).max(E8M0_LEAST));
        cast(bits)
    }
}
