//! What a caller learns: what was written, and what changed on the way.

use crate::cast::CastReport;

/// What was written, and what changed on the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteReport {
    /// Files with tensors.
    pub files: usize,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// FP4 weights that were cast to another format.
    pub cast: CastReport,
    /// FP4 weights whose tensor scale was folded into the block scales.
    pub folded: CastReport,
    /// Tensor scales of which the reciprocal was written, as the dialect states the other.
    pub inverted: u64,
    /// Those of them that do not come back when they are inverted again.
    pub inverted_inexactly: u64,
    /// Scales of inputs for which the dialect has no place.
    pub input_scales_left_out: u64,
    /// Weights that were decoded to floats.
    pub decoded: u64,
}
