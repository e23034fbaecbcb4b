//! The keys or the values of a KV cache, dense or packed.

use burn_fp4_formats::{FormatError, check_length};

use super::kv_format::{KvFormat, decode_heads, quantize_head};

/// Keys or values of a KV cache, `[batch, kv_heads, capacity]` heads of `head_dim` channels each.
#[derive(Debug)]
pub enum KvMut<'a> {
    /// Channels of heads.
    Dense(&'a mut [f32]),
    /// Bytes of heads as [`quantize_heads`](super::quantize_heads) writes them.
    Packed {
        /// Format of both.
        format: KvFormat,
        /// Codes of heads.
        codes: &'a mut [u8],
        /// Scales of heads.
        scales: &'a mut [u8],
    },
}

impl KvMut<'_> {
    /// Checks that there are `heads` heads.
    pub(super) fn check(&self, heads: usize, head_dim: usize) -> Result<(), FormatError> {
        match self {
            Self::Dense(values) => check_length("KV cache", heads * head_dim, values.len()),
            Self::Packed { format, codes, scales } => {
                format.check(heads * head_dim, head_dim, codes, scales)
            }
        }
    }

    /// Writes a head.
    pub(super) fn write(&mut self, at: usize, head: &[f32]) {
        let head_dim = head.len();
        match self {
            Self::Dense(values) => values[at * head_dim..][..head_dim].copy_from_slice(head),
            Self::Packed { format, codes, scales } => {
                let [code_bytes, scale_bytes] = format.bytes_of_head(head_dim);
                let codes = &mut codes[at * code_bytes..][..code_bytes];
                let scales = &mut scales[at * scale_bytes..][..scale_bytes];
                quantize_head(head, *format, codes, scales);
            }
        }
    }

    /// Returns the format; none if dense.
    pub(super) fn format(&self) -> Option<KvFormat> {
        match self {
            Self::Dense(_) => None,
            Self::Packed { format, .. } => Some(*format),
        }
    }

    /// Borrows the heads for reading.
    pub(super) fn read(&self) -> Kv<'_> {
        match self {
            Self::Dense(values) => Kv::Dense(values),
            Self::Packed { format, codes, scales } => Kv::Packed { format: *format, codes, scales },
        }
    }
}

/// A [`KvMut`] to read from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kv<'a> {
    Dense(&'a [f32]),
    Packed { format: KvFormat, codes: &'a [u8], scales: &'a [u8] },
}

impl<'a> Kv<'a> {
    /// Returns true if heads are quantized.
    pub(super) const fn is_packed(self) -> bool {
        matches!(self, Self::Packed { .. })
    }

    /// Returns `count` heads from one on. Packed ones are dequantized to `decoded`, with the
    /// instructions of the caller.
    #[inline(always)]
    pub(super) fn heads<'b>(
        self,
        first: usize,
        count: usize,
        head_dim: usize,
        decoded: &'b mut [f32],
    ) -> &'b [f32]
    where
        'a: 'b,
    {
        match self {
            Self::Dense(values) => &values[first * head_dim..][..count * head_dim],
            Self::Packed { format, codes, scales } => {
                let [code_bytes, scale_bytes] = format.bytes_of_head(head_dim);
                let codes = &codes[first * code_bytes..][..count * code_bytes];
                let scales = &scales[first * scale_bytes..][..count * scale_bytes];
                let decoded = &mut decoded[..count * head_dim];
                decode_heads(codes, scales, head_dim, format, decoded);
                decoded
            }
        }
    }
}
