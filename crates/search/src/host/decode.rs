//! Decoding of packed rows, a group of codes at a time, with the instructions of the processor.

#[cfg(target_arch = "x86_64")]
use core::any::Any;

#[cfg(target_arch = "x86_64")]
use burn_fp4_formats::E2M1_VALUES;
use pulp::Simd;
#[cfg(target_arch = "x86_64")]
use pulp::{
    cast,
    x86::{V3, V4},
};

use super::dequantize::PackedView;
use super::scale_grid::scale_values;
use crate::rounding::twice_element;

/// Number of channels decoded together: two codes of each of 16 bytes.
pub(super) const GROUP: usize = 32;

/// Number of bytes that are prefetched before they are read.
pub(super) const AHEAD: usize = 2048;

/// Prefetches the cache line some bytes after the first value: the processor's own prefetching
/// starts anew with every page of memory.
#[inline(always)]
pub(super) fn prefetch<T>(values: &[T], distance: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint, which may name any address.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(values.as_ptr().wrapping_byte_add(distance).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, distance);
}

/// Returns the distance to prefetch, if some bytes are read together: a multiple of them.
#[inline(always)]
pub(super) fn prefetch_distance(together: usize) -> usize {
    AHEAD.next_multiple_of(together)
}

/// A packed row with `BLOCKS` blocks in a group.
pub(super) struct PackedRow<'a, const BLOCKS: usize> {
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [u8],
    /// Values of the scales, by code.
    values: &'a [f32; 256],
    pub(super) tensor_scale: f32,
}

impl<'a, const BLOCKS: usize> PackedRow<'a, BLOCKS> {
    #[inline(always)]
    pub(super) fn new(packed: PackedView<'a>, row: usize, channels: usize) -> Self {
        let blocks = channels * BLOCKS / GROUP;
        let by_row = packed.tensor_scale.len() > 1;
        Self {
            codes: &packed.codes[row * channels / 2..][..channels / 2],
            scales: &packed.scales[row * blocks..][..blocks],
            values: scale_values(packed.format),
            tensor_scale: packed.tensor_scale[if by_row { row } else { 0 }],
        }
    }

    /// Decodes `element x block scale` of a group: the lower codes of all bytes first, then the
    /// upper ones.
    #[inline(always)]
    pub(super) fn decode<S: Simd>(
        &self,
        simd: S,
        codes: &[u8; GROUP / 2],
        scales: &[u8; BLOCKS],
    ) -> [f32; GROUP] {
        let factors = [scales[0], scales[BLOCKS - 1]].map(|scale| self.values[scale as usize]);
        let mut decoded = [0.0; GROUP];
        decode_group::<S, BLOCKS>(simd, codes, factors, &mut decoded);
        decoded
    }

    /// Decodes a group by its number, as [`decode`](Self::decode) does; zeros beyond the last
    /// channel.
    #[inline(always)]
    pub(super) fn group<S: Simd>(&self, simd: S, group: usize) -> [f32; GROUP] {
        let codes = &self.codes[group * GROUP / 2..];
        let scales = &self.scales[group * BLOCKS..];
        if let (Some(codes), Some(scales)) = (codes.first_chunk(), scales.first_chunk()) {
            return self.decode(simd, codes, scales);
        }
        let (mut all_codes, mut all_scales) = ([0; GROUP / 2], [scales[0]; BLOCKS]);
        all_codes[..codes.len()].copy_from_slice(codes);
        all_scales[..scales.len()].copy_from_slice(scales);
        self.decode(simd, &all_codes, &all_scales)
    }
}

/// Multiplies the elements of 16 bytes, the lower codes first, by a factor for each half of the
/// bytes. Looks elements up in a register if the instruction set can.
#[inline(always)]
fn decode_group<S: Simd, const BLOCKS: usize>(
    simd: S,
    codes: &[u8; GROUP / 2],
    factors: [f32; 2],
    decoded: &mut [f32],
) {
    let (even, odd) = decoded.split_at_mut(GROUP / 2);
    let (even, odd) = (&mut even[..GROUP / 2], &mut odd[..GROUP / 2]);
    #[cfg(target_arch = "x86_64")]
    if let Some(v4) = (&simd as &dyn Any).downcast_ref::<V4>() {
        // All values in one register.
        let (table, avx512f) = (cast(E2M1_VALUES), v4.avx512f);
        let [first, second] = factors;
        // A broadcast of memory, and one into half of the lanes.
        let factors = avx512f._mm512_set1_ps(first);
        let low = avx512f._mm512_cvtepu8_epi32(cast(*codes));
        let high = avx512f._mm512_srli_epi32::<4>(low);
        if BLOCKS == 1 {
            // The products of all elements, instead of the group's.
            let table = avx512f._mm512_mul_ps(table, factors);
            for (codes, decoded) in [(low, even), (high, odd)] {
                let values: [f32; 16] = cast(avx512f._mm512_permutexvar_ps(codes, table));
                decoded.copy_from_slice(&values);
            }
            return;
        }
        let factors = avx512f._mm512_mask_blend_ps(0xFF00, factors, avx512f._mm512_set1_ps(second));
        for (codes, decoded) in [(low, even), (high, odd)] {
            let elements = avx512f._mm512_permutexvar_ps(codes, table);
            let values: [f32; 16] = cast(avx512f._mm512_mul_ps(elements, factors));
            decoded.copy_from_slice(&values);
        }
        return;
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(v3) = (&simd as &dyn Any).downcast_ref::<V3>() {
        let V3 { avx, avx2, .. } = *v3;
        // All magnitudes in one register.
        let [table, _]: [[f32; 8]; 2] = cast(E2M1_VALUES);
        let (table, sign) = (cast(table), cast([1u32 << 31; 8]));
        let halves: [u64; 2] = cast(*codes);
        let parts = even.chunks_exact_mut(8).zip(odd.chunks_exact_mut(8));
        for ((half, factor), (even, odd)) in halves.into_iter().zip(factors).zip(parts) {
            let low = avx2._mm256_cvtepu8_epi32(cast([half, 0]));
            let high = avx2._mm256_srli_epi32::<4>(low);
            for (codes, decoded) in [(low, even), (high, odd)] {
                let sign = avx2._mm256_and_si256(avx2._mm256_slli_epi32::<28>(codes), sign);
                let elements = avx2._mm256_permutevar8x32_ps(table, codes);
                let elements = avx._mm256_or_ps(elements, cast(sign));
                let values: [f32; 8] = cast(avx._mm256_mul_ps(elements, cast([factor; 8])));
                decoded.copy_from_slice(&values);
            }
        }
        return;
    }
    // Other processors have no instructions of their own here.
    let _ = simd;
    for (half, factor) in factors.into_iter().enumerate() {
        for index in half * GROUP / 4..(half + 1) * GROUP / 4 {
            let code = u32::from(codes[index]);
            // Half a scale is exact, and computed once.
            even[index] = twice_element(code) * (0.5 * factor);
            odd[index] = twice_element(code >> 4) * (0.5 * factor);
        }
    }
}

#[cfg(test)]
mod tests {
    use burn_fp4_formats::{E2M1_VALUES, Fp4Format};
    use pulp::{Scalar, WithSimd};

    use super::*;

    /// Every byte, with every scale in both halves of a group.
    struct EveryByte;

    impl WithSimd for EveryByte {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            let codes: Vec<u8> = (0..=255).collect();
            let tensor_scale = [1.0];
            for format in Fp4Format::ALL {
                let values = scale_values(format);
                for scale in 0..=255u8 {
                    let scales = [scale, scale.wrapping_add(1)];
                    let all = scales.repeat(256 / 16);
                    let packed = PackedView {
                        format,
                        block_size: 16,
                        codes: &codes,
                        scales: &all,
                        tensor_scale: &tensor_scale,
                    };
                    let row = PackedRow::<2>::new(packed, 0, 512);
                    let whole = PackedView { block_size: 32, scales: &[scale; 16], ..packed };
                    let whole = PackedRow::<1>::new(whole, 0, 512);
                    for (group, bytes) in codes.chunks(16).enumerate() {
                        let (found, in_one_block) =
                            (row.group(simd, group), whole.group(simd, group));
                        // The first block of the row has the scale of the whole group.
                        for at in [0..8, 16..24].into_iter().flatten() {
                            let [one, other] = [found[at], in_one_block[at]].map(f32::to_bits);
                            assert!(one == other || found[at].is_nan(), "{scale}");
                        }
                        for (at, found) in found.into_iter().enumerate() {
                            let byte = bytes[at % 16];
                            let code = if at < 16 { byte & 15 } else { byte >> 4 };
                            let scale = values[usize::from(scales[at % 16 / 8])];
                            let expected = E2M1_VALUES[usize::from(code)] * scale;
                            let same = found.to_bits() == expected.to_bits();
                            assert!(same || found.is_nan() && expected.is_nan(), "{byte} {scale}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_decodes_every_byte() {
        Scalar.vectorize(EveryByte);
        #[cfg(target_arch = "x86_64")]
        {
            V3::try_new().into_iter().for_each(|v3| Simd::vectorize(v3, EveryByte));
            V4::try_new().into_iter().for_each(|v4| Simd::vectorize(v4, EveryByte));
        }
    }
}
