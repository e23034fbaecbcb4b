//! Options of a write: how tensors are spread over files, and what is cast or decoded.

use burn_fp4_formats::Fp4Format;

use crate::dtype::Dtype;

/// The distribution of tensors over files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shards {
    /// As in the source: each weight in the file of the tensor that stands for it, with all its
    /// scales. Files of a source that has some of these in another one are not written byte for
    /// byte. What came from no safetensors file goes into one.
    AsRead,
    /// New files of at most this number of bytes of data, unless a single weight has more.
    Size(u64),
}

/// Changes of the weights on the way.
#[derive(Debug, Clone, Copy)]
pub struct WriteOptions {
    /// The distribution of tensors over files; GGUF is always one.
    pub shards: Shards,
    /// FP4 of another format is cast to this one, and FP4 in blocks of another size than this one's
    /// definition has.
    pub cast: Option<Fp4Format>,
    /// FP8 is decoded to this dtype (F32, BF16 or F16), also FP8 without scales.
    pub decode_fp8: Option<Dtype>,
    /// FP4 is decoded to this dtype (F32, BF16 or F16).
    pub decode_fp4: Option<Dtype>,
    /// Records of ggml other than FP4, such as Q4_K, are decoded to this dtype (F32, BF16 or F16).
    pub decode_ggml: Option<Dtype>,
    /// Matrices in F32 and F64 are cast to this dtype (BF16 or F16).
    pub cast_floats: Option<Dtype>,
    /// Allows a tensor scale to be folded into the block scales where that changes values.
    pub inexact: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self {
            shards: Shards::AsRead,
            cast: None,
            decode_fp8: None,
            decode_fp4: None,
            decode_ggml: None,
            cast_floats: None,
            inexact: false,
        }
    }
}
