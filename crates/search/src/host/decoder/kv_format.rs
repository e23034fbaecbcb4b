//! [`KvFormat`]: codes and scales of the heads of a KV cache.

use burn_fp4_formats::{
    E2M1_VALUES, E4M3, E4M3_VALUES, E8M0, E8M0_VALUES, FormatError, check_length,
};

use crate::error::SearchError;
use crate::method::{E4m3Range, ErrorMetric, Method};
use crate::rule::TensorFactor;
use crate::scale_grid::{ELEMENT_BINADE, PowerRounding, power_of_two};
use crate::scheme::{Fp4Scheme, NonFinite, TensorScaling};

/// Number of channels of a head that share a block scale of NVFP4, and that a Hadamard transform
/// mixes.
pub const KV_BLOCK: usize = 16;

/// Packed storage of the keys and values of a KV cache.
///
/// | format | codes | scales of a head of a token | bits at `head_dim` 64 |
/// |---|---|---|---|
/// | `Fp8` | E4M3 | one E8M0 | 8.125 |
/// | `NvFp4` | E2M1, the even channel in the low nibble | an E4M3 per 16 channels | 4.5 |
///
/// `NvFp4Hadamard` stores as `NvFp4` does, after a [`Hadamard`](crate::Hadamard) transform of each
/// 16 channels of a key. Queries are transformed alike, which leaves scores unchanged.
///
/// The scale of FP8 is `2^(ceil(log2 amax) - 8)`, so that the largest code is at most 256. NVFP4
/// has a tensor scale of 1 and maps the amax of a block to element 6 or 4, whichever has the
/// smaller sum of errors ([`scheme`](Self::scheme)). Ties go to the even code, and -0 becomes 0. A
/// bf16 holds every dequantized value exactly.
///
/// Without a tensor scale NVFP4 has a narrower range than FP8: a block whose amax is below about
/// 0.004 becomes 0, block scales lose bits below an amax of about 0.06, and values beyond 2688
/// become 2688.
///
/// ```
/// use burn_fp4_search::host::{KvFormat, dequantize_heads, quantize_heads};
///
/// let head = [1.0, -0.4, 0.0, 3.1, 6.0, 0.2, 0.3, -6.0].repeat(2);
/// let expected = [1.0, -0.5, 0.0, 3.0, 6.0, 0.0, 0.5, -6.0].repeat(2);
/// let [code_bytes, scale_bytes] = KvFormat::NvFp4.bytes_of_head(16);
/// assert_eq!((code_bytes, scale_bytes), (8, 1));
/// let (mut codes, mut scales, mut values) = ([0; 8], [0; 1], [0.0; 16]);
/// quantize_heads(&head, 16, KvFormat::NvFp4, &mut codes, &mut scales)?;
/// dequantize_heads(&codes, &scales, 16, KvFormat::NvFp4, &mut values)?;
/// assert_eq!(values.as_slice(), expected);
///
/// assert_eq!(KvFormat::NvFp4.head_dim(code_bytes), 16);
/// assert!(KvFormat::NvFp4.scheme().is_some() && KvFormat::Fp8.scheme().is_none());
/// assert!(KvFormat::NvFp4Hadamard.transforms_keys() && !KvFormat::NvFp4.transforms_keys());
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// 8-bit floats with a scale for each head of a token.
    Fp8,
    /// NVFP4 with a tensor scale of 1, in blocks of 16 channels.
    NvFp4,
    /// [`NvFp4`](Self::NvFp4) of transformed keys, which spreads their outliers.
    NvFp4Hadamard,
}

impl KvFormat {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::Fp8, Self::NvFp4, Self::NvFp4Hadamard];

    /// Returns true if keys and queries are transformed.
    #[must_use]
    pub const fn transforms_keys(self) -> bool {
        matches!(self, Self::NvFp4Hadamard)
    }

    /// Returns the scheme that gives the codes and block scales of NVFP4; none of FP8.
    #[must_use]
    pub const fn scheme(self) -> Option<Fp4Scheme> {
        match self {
            Self::Fp8 => None,
            Self::NvFp4 | Self::NvFp4Hadamard => Some(SCHEME),
        }
    }

    /// Returns the bytes of the codes and of the scales of a head of a token.
    #[must_use]
    pub const fn bytes_of_head(self, head_dim: usize) -> [usize; 2] {
        match self {
            Self::Fp8 => [head_dim, 1],
            Self::NvFp4 | Self::NvFp4Hadamard => [head_dim / 2, head_dim / KV_BLOCK],
        }
    }

    /// Returns the channels of a head with codes of this many bytes.
    #[must_use]
    pub const fn head_dim(self, code_bytes: usize) -> usize {
        match self {
            Self::Fp8 => code_bytes,
            Self::NvFp4 | Self::NvFp4Hadamard => 2 * code_bytes,
        }
    }

    /// Checks that the lengths of codes and scales are those of `values` channels.
    pub(super) fn check(
        self,
        values: usize,
        head_dim: usize,
        codes: &[u8],
        scales: &[u8],
    ) -> Result<(), FormatError> {
        check_length("head_dim", head_dim.next_multiple_of(KV_BLOCK).max(KV_BLOCK), head_dim)?;
        let heads = values / head_dim;
        let [code_bytes, scale_bytes] = self.bytes_of_head(head_dim);
        check_length("values of heads", heads * head_dim, values)?;
        check_length("codes of heads", heads * code_bytes, codes.len())?;
        check_length("scales of heads", heads * scale_bytes, scales.len())
    }
}

/// Scheme of NVFP4 in a cache.
const SCHEME: Fp4Scheme = Fp4Scheme {
    method: Method::FourOverSix { range: E4m3Range::E448, error: ErrorMetric::Mae },
    tensor_scale: TensorScaling::Multiplier(1.0),
    non_finite: NonFinite::FollowReference,
    ..Fp4Scheme::nvfp4()
};

/// Binades from the largest element of FP4 to the largest code that FP8 uses, 256. The code of a
/// scale is smaller by this number than the one that [`PowerRounding::Ceil`] gives.
pub const FP8_BINADES: u8 = 8 - ELEMENT_BINADE as u8;

/// Quantizes heads `[heads, head_dim]` to codes and scales, `[heads, bytes]` each, without a
/// transform. The scale of a
/// block with NaN is NaN, that of FP8 also with infinity.
///
/// # Errors
/// `head_dim` is not a multiple of [`KV_BLOCK`], or a slice has the wrong length.
pub fn quantize_heads(
    values: &[f32],
    head_dim: usize,
    format: KvFormat,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<(), SearchError> {
    format.check(values.len(), head_dim, codes, scales)?;
    let [code_bytes, scale_bytes] = format.bytes_of_head(head_dim);
    let packed = codes.chunks_exact_mut(code_bytes).zip(scales.chunks_exact_mut(scale_bytes));
    for (head, (codes, scales)) in values.chunks_exact(head_dim).zip(packed) {
        quantize_head(head, format, codes, scales);
    }
    Ok(())
}

/// Quantizes a head.
pub(super) fn quantize_head(head: &[f32], format: KvFormat, codes: &mut [u8], scales: &mut [u8]) {
    match format {
        KvFormat::Fp8 => {
            let scale = fp8_scale(amax(head));
            // A power of two: products are exact.
            let factor = 1.0 / E8M0_VALUES[usize::from(scale)];
            for (code, value) in codes.iter_mut().zip(head) {
                // The sum has no negative zero.
                *code = E4M3.encode(value * factor + 0.0);
            }
            scales[0] = scale;
        }
        KvFormat::NvFp4 | KvFormat::NvFp4Hadamard => {
            let (blocks, _) = head.as_chunks::<KV_BLOCK>();
            let (code_blocks, _) = codes.as_chunks_mut::<{ KV_BLOCK / 2 }>();
            for ((values, codes), scale) in blocks.iter().zip(code_blocks).zip(scales) {
                *scale = nvfp4_scale(values);
                let multiplier = SCHEME.rule.multiplier(*scale, TensorFactor::ONE);
                let code = |value| SCHEME.rule.code(value, *scale, multiplier);
                for (byte, pair) in codes.iter_mut().zip(values.as_chunks::<2>().0) {
                    *byte = code(pair[0]) | code(pair[1]) << 4;
                }
            }
        }
    }
}

/// Dequantizes heads that [`quantize_heads`] has quantized, to `[heads, head_dim]`.
///
/// # Errors
/// As [`quantize_heads`].
pub fn dequantize_heads(
    codes: &[u8],
    scales: &[u8],
    head_dim: usize,
    format: KvFormat,
    values: &mut [f32],
) -> Result<(), SearchError> {
    format.check(values.len(), head_dim, codes, scales)?;
    decode_heads(codes, scales, head_dim, format, values);
    Ok(())
}

/// Dequantizes heads, with the instructions of the caller.
#[inline(always)]
pub(super) fn decode_heads(
    codes: &[u8],
    scales: &[u8],
    head_dim: usize,
    format: KvFormat,
    values: &mut [f32],
) {
    match format {
        KvFormat::Fp8 => {
            let heads = values.chunks_exact_mut(head_dim).zip(codes.chunks_exact(head_dim));
            for ((values, codes), scale) in heads.zip(scales) {
                let scale = E8M0_VALUES[usize::from(*scale)];
                for (value, code) in values.iter_mut().zip(codes) {
                    *value = fp8_value(*code) * scale;
                }
            }
        }
        KvFormat::NvFp4 | KvFormat::NvFp4Hadamard => {
            let (blocks, _) = values.as_chunks_mut::<KV_BLOCK>();
            let (code_blocks, _) = codes.as_chunks::<{ KV_BLOCK / 2 }>();
            for ((values, codes), scale) in blocks.iter_mut().zip(code_blocks).zip(scales) {
                let half = 0.5 * E4M3_VALUES[usize::from(*scale)];
                let word = u64::from_le_bytes(*codes);
                for (at, value) in values.iter_mut().enumerate() {
                    *value = twice_element((word >> (4 * at)) as u32) * half;
                }
            }
        }
    }
}

/// Returns the largest magnitude, NaN if a value is.
fn amax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest: f32, value| {
        if value.abs() > largest || value.is_nan() { value.abs() } else { largest }
    })
}

/// Returns the code of the scale of a head in FP8.
fn fp8_scale(amax: f32) -> u8 {
    match power_of_two(&E8M0, amax, PowerRounding::Ceil) {
        code if E8M0.is_nan(code) => code,
        code => code.saturating_sub(FP8_BINADES),
    }
}

/// Returns the code of the scale of a block in NVFP4: the better of two.
fn nvfp4_scale(values: &[f32; KV_BLOCK]) -> u8 {
    let on_six = amax(values) / 6.0;
    let candidates = [on_six, on_six * 1.5].map(|exact| {
        let scale = E4M3.encode(exact);
        let multiplier = SCHEME.rule.multiplier(scale, TensorFactor::ONE);
        let error = |value: &f32| {
            let code = SCHEME.rule.code(*value, scale, multiplier);
            (E2M1_VALUES[usize::from(code)] * E4M3_VALUES[usize::from(scale)] - value).abs()
        };
        // In the order of channels.
        (scale, values.iter().map(error).fold(0.0, |sum: f32, error| sum + error))
    });
    let [(six, error_of_six), (four, error_of_four)] = candidates;
    if error_of_four < error_of_six { four } else { six }
}

/// Decodes an E4M3 code that is not NaN, in a way that the compiler vectorizes.
#[inline(always)]
fn fp8_value(code: u8) -> f32 {
    // Exponent and mantissa bits make an f32 that is too small by a power of two.
    const SCALE: f32 = burn_fp4_formats::power_of_two(127 - E4M3.bias);
    let code = u32::from(code);
    f32::from_bits((code & 0x80) << 24 | (code & 0x7F) << 20) * SCALE
}

/// Returns twice the element of the code in the lowest four bits.
#[inline(always)]
fn twice_element(code: u32) -> f32 {
    // A nibble for each magnitude: 0, 1, 2, 3, 4, 6, 8, 12.
    const MAGNITUDES: u32 = 0xC864_3210;
    let magnitude = (MAGNITUDES >> (4 * (code & 7)) & 15) as f32;
    f32::from_bits(magnitude.to_bits() | (code & 8) << 28)
}

#[cfg(test)]
mod tests {
    use burn_fp4_formats::Fp4Format;

    use super::*;

    #[test]
    fn every_code_has_the_value_of_its_format() {
        for code in 0..=u8::MAX {
            if !E4M3.is_nan(code) {
                let value = E4M3_VALUES[usize::from(code)];
                assert_eq!(fp8_value(code).to_bits(), value.to_bits(), "{code}");
            }
        }
        for code in 0..16 {
            let value = 0.5 * twice_element(code);
            assert_eq!(value.to_bits(), E2M1_VALUES[code as usize].to_bits(), "{code}");
        }
    }

    /// Magnitudes from 2^-20 to 2^8, and zeros.
    fn heads(heads: usize, head_dim: usize) -> Vec<f32> {
        let value = |at: usize| {
            let random = (at as u32).wrapping_mul(2_654_435_761) >> 8;
            let size = (at / head_dim % 29) as i32 - 20;
            (random as f32 / (1 << 23) as f32 - 1.0) * 2f32.powi(size)
        };
        let mut values: Vec<_> = (0..heads * head_dim).map(value).collect();
        values[head_dim..2 * head_dim].fill(0.0);
        values
    }

    #[test]
    fn nvfp4_has_the_bits_of_the_reference_quantizer() {
        let (count, head_dim) = (60, 48);
        let values = heads(count, head_dim);
        let packed = crate::quantize(&values, count, head_dim, &SCHEME).unwrap();
        assert_eq!((packed.format, packed.block_size), (Fp4Format::NvFp4, KV_BLOCK));
        let (mut codes, mut scales) = (vec![0; count * 24], vec![0; count * 3]);
        quantize_heads(&values, head_dim, KvFormat::NvFp4, &mut codes, &mut scales).unwrap();
        assert_eq!((codes.as_slice(), scales.as_slice()), (&packed.codes[..], &packed.scales[..]));
        let mut found = vec![0.0; values.len()];
        dequantize_heads(&codes, &scales, head_dim, KvFormat::NvFp4, &mut found).unwrap();
        assert_eq!(found, packed.dequantize());
    }

    #[test]
    fn fp8_rounds_to_the_nearest_code_of_a_power_of_two() {
        let (count, head_dim) = (60, 32);
        let values = heads(count, head_dim);
        let (mut codes, mut scales) = (vec![0; count * head_dim], vec![0; count]);
        quantize_heads(&values, head_dim, KvFormat::Fp8, &mut codes, &mut scales).unwrap();
        let mut found = vec![0.0; values.len()];
        dequantize_heads(&codes, &scales, head_dim, KvFormat::Fp8, &mut found).unwrap();
        for (head, (values, found)) in
            values.chunks(head_dim).zip(found.chunks(head_dim)).enumerate()
        {
            let (largest, scale) = (amax(values), E8M0.decode(scales[head]));
            if largest > 0.0 {
                assert!((128.0..=256.0).contains(&(largest / scale)), "{largest} {scale}");
            }
            for (value, found) in values.iter().zip(found) {
                let code = E4M3.encode(value / scale);
                assert_eq!(*found, E4M3.decode(code) * scale, "{value}");
                // Three bits behind the first one.
                let bound = (value.abs() / 16.0).max(scale * E4M3.decode(1) / 2.0);
                assert!((value - found).abs() <= bound, "{value} {found}");
            }
        }
    }

    #[test]
    fn values_that_are_not_finite_make_a_scale_nan() {
        let mut head = [1.0; 16];
        for (value, scales) in [
            (f32::NAN, [0xFF, 0x7F, 0x7F]),
            (f32::INFINITY, [0xFF, E4M3.max_code(), E4M3.max_code()]),
        ] {
            head[3] = value;
            for (format, expected) in KvFormat::ALL.into_iter().zip(scales) {
                let [code_bytes, _] = format.bytes_of_head(16);
                let (mut codes, mut scale) = (vec![0; code_bytes], [0]);
                quantize_heads(&head, 16, format, &mut codes, &mut scale).unwrap();
                assert_eq!(scale, [expected], "{format:?} {value}");
            }
        }
        let refused = quantize_heads(&head[..8], 8, KvFormat::Fp8, &mut [0; 8], &mut [0]);
        assert!(refused.is_err(), "half a block");
    }
}
