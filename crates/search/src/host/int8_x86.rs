//! [`Lanes`] of x86-64: AVX2, AVX-VNNI and AVX-512 with VNNI.

use core::arch::x86_64::*;

use pulp::cast;

use super::int8_input::LANES;
use super::int8_lanes::{E8M0_LEAST, ELEMENTS, LaneWork, Lanes, block_dots, call};

/// AVX2, FMA and F16C, and the products of AVX-VNNI if `VNNI` is true.
#[derive(Clone, Copy)]
pub(super) struct Avx2<const VNNI: bool>(());

/// AVX-512 with VNNI.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl<const VNNI: bool> Avx2<VNNI> {
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && (!VNNI || is_x86_feature_detected!("avxvnni"));
        found.then_some(Self(()))
    }
}

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        Avx2::<false>::detect().filter(|_| found).map(|_| Self(()))
    }
}

/// Interleaves pairs of bytes of 2 words of 8 bytes, or the bytes of 4 words of 4 bytes.
#[inline(always)]
fn interleave<const R: usize>(words: [u64; R]) -> [u8; LANES] {
    let vector = |word: u64| cast([word, 0]);
    // SAFETY: x86-64 has SSE2.
    unsafe {
        if R == 2 {
            return cast(_mm_unpacklo_epi16(vector(words[0]), vector(words[1])));
        }
        let first = _mm_unpacklo_epi8(vector(words[0]), vector(words[1]));
        let second = _mm_unpacklo_epi8(vector(words[R - 2]), vector(words[R - 1]));
        cast(_mm_unpacklo_epi16(first, second))
    }
}

impl<const VNNI: bool> Avx2<VNNI> {
    /// Returns lanes 0 and 2 of each four lanes of `a` and then of `b`, and lanes 1 and 3.
    #[inline(always)]
    fn even_odd(self, a: __m256i, b: __m256i) -> [__m256i; 2] {
        let (a, b) = (cast(a), cast(b));
        [
            cast(call!(_mm256_shuffle_ps::<0b10_00_10_00>(a, b))),
            cast(call!(_mm256_shuffle_ps::<0b11_01_11_01>(a, b))),
        ]
    }

    /// Adds neighboring lanes, as [`Lanes::pair_sums`] does.
    #[inline(always)]
    fn half_pair_sums(self, a: __m256i, b: __m256i) -> __m256i {
        let [even, odd] = self.even_odd(a, b);
        call!(_mm256_add_epi32(even, odd))
    }

    /// Adds both 16-bit sums of neighboring lanes.
    #[inline(always)]
    fn half_pair_dots(self, a: __m256i, b: __m256i) -> __m256i {
        let [even, odd] = self.even_odd(a, b);
        // 8 products of 24 x 127 fit into 16 bits.
        call!(_mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1)))
    }
}

impl<const VNNI: bool> Lanes for Avx2<VNNI> {
    type Bytes = [__m256i; 2];
    type Ints = [__m256i; 2];
    type Floats = [__m256; 2];

    fn run<W: LaneWork>(self, work: W) -> W::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<W: LaneWork>(lanes: Avx2<false>, work: W) -> W::Output {
            work.run(lanes)
        }
        #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
        fn avx_vnni<W: LaneWork>(lanes: Avx2<true>, work: W) -> W::Output {
            work.run(lanes)
        }
        match VNNI {
            false => call!(avx2(Avx2(()), work)),
            true => call!(avx_vnni(Avx2(()), work)),
        }
    }

    #[inline(always)]
    fn repeat(self, bytes: &[i8; 4]) -> Self::Bytes {
        [call!(_mm256_set1_epi32(cast(*bytes))); 2]
    }
    #[inline(always)]
    fn elements(self, codes: &[u8; 4 * LANES]) -> [Self::Bytes; 2] {
        let codes: [__m256i; 2] = cast(*codes);
        let table: __m256i = cast([ELEMENTS; 2]);
        let mut elements = [codes; 2];
        for half in 0..2 {
            let low = call!(_mm256_set1_epi8(15));
            let lower = call!(_mm256_and_si256(codes[half], low));
            let upper = call!(_mm256_and_si256(_mm256_srli_epi16::<4>(codes[half]), low));
            elements[0][half] = call!(_mm256_shuffle_epi8(table, lower));
            elements[1][half] = call!(_mm256_shuffle_epi8(table, upper));
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
        for half in 0..2 {
            if VNNI {
                for at in 0..N {
                    let (elements, integers) = (elements[at][half], integers[at][half]);
                    sums[half] = call!(_mm256_dpbusd_avx_epi32(sums[half], elements, integers));
                }
            } else {
                // 4 times 2 products of 24 x 127 fit into 16 bits.
                let mut pairs = call!(_mm256_maddubs_epi16(elements[0][half], integers[0][half]));
                for at in 1..N {
                    let (elements, integers) = (elements[at][half], integers[at][half]);
                    let products = call!(_mm256_maddubs_epi16(elements, integers));
                    pairs = call!(_mm256_add_epi16(pairs, products));
                }
                let quads = call!(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                sums[half] = call!(_mm256_add_epi32(sums[half], quads));
            }
        }
        sums
    }
    #[inline(always)]
    fn integer_dot(self, left: Self::Bytes, right: Self::Bytes) -> Self::Ints {
        let mut sums = self.repeat_int(0);
        for half in 0..2 {
            // The instructions multiply an unsigned byte by a signed one.
            let magnitudes = call!(_mm256_abs_epi8(left[half]));
            let signed = call!(_mm256_sign_epi8(right[half], left[half]));
            sums[half] = if VNNI {
                call!(_mm256_dpbusd_avx_epi32(sums[half], magnitudes, signed))
            } else {
                // 2 products of 127 x 127 fit into 16 bits.
                let pairs = call!(_mm256_maddubs_epi16(magnitudes, signed));
                call!(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
            };
        }
        sums
    }
    #[inline(always)]
    fn repeat_int(self, value: i32) -> Self::Ints {
        [call!(_mm256_set1_epi32(value)); 2]
    }
    #[inline(always)]
    fn add_ints(self, left: Self::Ints, right: Self::Ints) -> Self::Ints {
        [call!(_mm256_add_epi32(left[0], right[0])), call!(_mm256_add_epi32(left[1], right[1]))]
    }
    #[inline(always)]
    fn pair_sums(self, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        let mut sums = a;
        for half in 0..2 {
            sums[half] = self.half_pair_sums(a[half], b[half]);
        }
        sums
    }
    #[inline(always)]
    fn block_dots<const R: usize>(
        self,
        elements: [[Self::Bytes; 2]; R],
        integers: [Self::Bytes; 2],
    ) -> Self::Ints {
        if VNNI {
            return block_dots(self, elements, integers);
        }
        let mut sums = self.repeat_int(0);
        for half in 0..2 {
            let mut dots = [sums[half]; R];
            for row in 0..R {
                let [even, odd] = elements[row];
                let even = call!(_mm256_maddubs_epi16(even[half], integers[0][half]));
                let odd = call!(_mm256_maddubs_epi16(odd[half], integers[1][half]));
                dots[row] = call!(_mm256_add_epi16(even, odd));
            }
            let first = self.half_pair_dots(dots[0], dots[1]);
            sums[half] = match R {
                2 => first,
                _ => self.half_pair_sums(first, self.half_pair_dots(dots[R - 2], dots[R - 1])),
            };
        }
        sums
    }
    #[inline(always)]
    fn to_floats(self, ints: Self::Ints) -> Self::Floats {
        [call!(_mm256_cvtepi32_ps(ints[0])), call!(_mm256_cvtepi32_ps(ints[1]))]
    }
    #[inline(always)]
    fn repeat_float(self, value: f32) -> Self::Floats {
        [call!(_mm256_set1_ps(value)); 2]
    }
    #[inline(always)]
    fn add(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        [call!(_mm256_add_ps(left[0], right[0])), call!(_mm256_add_ps(left[1], right[1]))]
    }
    #[inline(always)]
    fn mul(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        [call!(_mm256_mul_ps(left[0], right[0])), call!(_mm256_mul_ps(left[1], right[1]))]
    }
    #[inline(always)]
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        [call!(_mm256_fmadd_ps(a[0], b[0], c[0])), call!(_mm256_fmadd_ps(a[1], b[1], c[1]))]
    }
    #[inline(always)]
    fn interleave<const R: usize>(self, words: [u64; R]) -> [u8; LANES] {
        interleave(words)
    }
    #[inline(always)]
    fn e4m3(self, codes: [u8; LANES]) -> Self::Floats {
        // As f16 they are 2^-8 of their value; f16 has all of them, subnormal ones too.
        let words = call!(_mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(cast(codes))));
        let [low, high]: [__m128i; 2] = cast(words);
        let values = [call!(_mm256_cvtph_ps(low)), call!(_mm256_cvtph_ps(high))];
        self.mul(values, self.repeat_float(256.0))
    }
    #[inline(always)]
    fn e8m0(self, codes: [u8; LANES]) -> Self::Floats {
        let least = call!(_mm256_set1_epi32(E8M0_LEAST as i32));
        let [low, high]: [[u8; 8]; 2] = cast(codes);
        let mut values = [self.repeat_float(0.0)[0]; 2];
        for (value, codes) in values.iter_mut().zip([low, high]) {
            let codes = call!(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(cast(codes))));
            let bits = call!(_mm256_max_epi32(_mm256_slli_epi32::<23>(codes), least));
            *value = cast(bits);
        }
        values
    }
}

impl Lanes for Avx512 {
    type Bytes = __m512i;
    type Ints = __m512i;
    type Floats = __m512;

    fn run<W: LaneWork>(self, work: W) -> W::Output {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
        fn avx512<W: LaneWork>(lanes: Avx512, work: W) -> W::Output {
            work.run(lanes)
        }
        call!(avx512(self, work))
    }

    #[inline(always)]
    fn repeat(self, bytes: &[i8; 4]) -> Self::Bytes {
        call!(_mm512_set1_epi32(cast(*bytes)))
    }
    #[inline(always)]
    fn elements(self, codes: &[u8; 4 * LANES]) -> [Self::Bytes; 2] {
        let codes: __m512i = cast(*codes);
        let (table, low) = (cast([ELEMENTS; 4]), call!(_mm512_set1_epi8(15)));
        let lower = call!(_mm512_and_si512(codes, low));
        let upper = call!(_mm512_and_si512(_mm512_srli_epi16::<4>(codes), low));
        [call!(_mm512_shuffle_epi8(table, lower)), call!(_mm512_shuffle_epi8(table, upper))]
    }
    #[inline(always)]
    fn dot<const N: usize>(
        self,
        mut sums: Self::Ints,
        elements: [Self::Bytes; N],
        integers: [Self::Bytes; N],
    ) -> Self::Ints {
        for at in 0..N {
            sums = call!(_mm512_dpbusd_epi32(sums, elements[at], integers[at]));
        }
        sums
    }
    #[inline(always)]
    fn integer_dot(self, left: Self::Bytes, right: Self::Bytes) -> Self::Ints {
        // The instruction multiplies an unsigned byte by a signed one: 128 makes it unsigned.
        let (zero, offset) = (self.repeat_int(0), call!(_mm512_set1_epi8(i8::MIN)));
        let unsigned = call!(_mm512_xor_si512(right, offset));
        let sums = call!(_mm512_dpbusd_epi32(zero, unsigned, left));
        call!(_mm512_sub_epi32(sums, _mm512_dpbusd_epi32(zero, offset, left)))
    }
    #[inline(always)]
    fn repeat_int(self, value: i32) -> Self::Ints {
        call!(_mm512_set1_epi32(value))
    }
    #[inline(always)]
    fn add_ints(self, left: Self::Ints, right: Self::Ints) -> Self::Ints {
        call!(_mm512_add_epi32(left, right))
    }
    #[inline(always)]
    fn pair_sums(self, a: Self::Ints, b: Self::Ints) -> Self::Ints {
        let (a, b): (__m512, __m512) = (cast(a), cast(b));
        let even: __m512i = cast(call!(_mm512_shuffle_ps::<0b10_00_10_00>(a, b)));
        let odd: __m512i = cast(call!(_mm512_shuffle_ps::<0b11_01_11_01>(a, b)));
        call!(_mm512_add_epi32(even, odd))
    }
    #[inline(always)]
    fn to_floats(self, ints: Self::Ints) -> Self::Floats {
        call!(_mm512_cvtepi32_ps(ints))
    }
    #[inline(always)]
    fn repeat_float(self, value: f32) -> Self::Floats {
        call!(_mm512_set1_ps(value))
    }
    #[inline(always)]
    fn add(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        call!(_mm512_add_ps(left, right))
    }
    #[inline(always)]
    fn mul(self, left: Self::Floats, right: Self::Floats) -> Self::Floats {
        call!(_mm512_mul_ps(left, right))
    }
    #[inline(always)]
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        call!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn interleave<const R: usize>(self, words: [u64; R]) -> [u8; LANES] {
        interleave(words)
    }
    #[inline(always)]
    fn e4m3(self, codes: [u8; LANES]) -> Self::Floats {
        // As in `Avx2`.
        let words = call!(_mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(cast(codes))));
        self.mul(call!(_mm512_cvtph_ps(words)), self.repeat_float(256.0))
    }
    #[inline(always)]
    fn e8m0(self, codes: [u8; LANES]) -> Self::Floats {
        let codes = call!(_mm512_cvtepu8_epi32(cast(codes)));
        let least = call!(_mm512_set1_epi32(E8M0_LEAST as i32));
        cast(call!(_mm512_max_epi32(_mm512_slli_epi32::<23>(codes), least)))
    }
}
