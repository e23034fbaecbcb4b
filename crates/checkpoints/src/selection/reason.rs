//! Why a weight stays as it is.

/// Why a weight stays as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// It is no matrix, and no stack of them.
    #[error("no matrix")]
    NoMatrix,
    /// Its numbers are no floats that are read.
    #[error("numbers of dtype {0}")]
    Dtype(String),
    /// It is FP4.
    #[error("already {0}")]
    Already(String),
    /// Its input is multiplied before it is quantized, which would be lost.
    #[error("its input is scaled (pre_quant_scale)")]
    Smoothed,
    /// The user asked for it.
    #[error("asked to keep `{0}`")]
    Asked(String),
    /// The user asked for others.
    #[error("not asked for")]
    NotAsked,
    /// It belongs to a layer that is kept.
    #[error("layer {0} stays in high precision")]
    Layer(usize),
    /// The preset leaves such names alone.
    #[error("{0}")]
    Preset(&'static str),
    /// Blocks, or the records of the dialect, do not divide its columns.
    #[error("{cols} columns are no multiple of {of}")]
    Columns {
        /// How many there are.
        cols: usize,
        /// What would divide them.
        of: usize,
    },
    /// It is run as one with another that is kept.
    #[error("runs as one with `{0}`, which stays")]
    With(String),
}

impl Reason {
    /// How close the weight came to being quantized, as the place in a line: first is what is
    /// asked for and does not fit, last is what no one would quantize.
    pub(super) fn place(&self) -> usize {
        match self {
            Self::Columns { .. } | Self::Smoothed => 0,
            Self::Asked(_) | Self::Layer(_) => 1,
            Self::With(_) => 2,
            Self::Already(_) => 3,
            Self::Dtype(_) => 4,
            Self::NotAsked | Self::Preset(_) => 5,
            Self::NoMatrix => 6,
        }
    }
}
