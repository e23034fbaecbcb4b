//! Reasons for which a weight is kept.

/// A reason for which a weight is kept.
///
/// ```
/// use burn_fp4_policy::Reason;
///
/// let columns = Reason::Columns { cols: 24, of: 16 };
/// assert_eq!(columns.to_string(), "24 columns are not a multiple of 16");
/// assert!(columns.is_unmet() && !Reason::NoMatrix.is_unmet());
/// assert!(columns.place() < Reason::NoMatrix.place(), "it is closer to being quantized");
/// assert!(Reason::Layer(0).is_like(&Reason::Layer(1)) && !columns.is_like(&Reason::NoMatrix));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// Not a matrix or a stack of matrices.
    #[error("not a matrix")]
    NoMatrix,
    /// An axis has length 0.
    #[error("has no values")]
    Empty,
    /// Its numbers are not floats that are read.
    #[error("{}", numbers(.0))]
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
    /// None of the linear layers of this architecture, a `model_type` of `config.json`.
    #[error("not a known linear layer of {0}")]
    Unlisted(&'static str),
    /// The parameter is `[inputs, outputs]`, as `Conv1D` of transformers has it.
    #[error("stored as [inputs, outputs], and readers of `{0}` expect [outputs, inputs]")]
    Transposed(&'static str),
    /// Experts in one tensor, with a preset for experts that have a tensor each.
    #[error("stacked experts, which the converter of miles copies")]
    Stacked,
    /// The dialect has no place for the quantized weight.
    #[error("`{dialect}` cannot hold {what}")]
    CannotHold {
        /// The dialect to be written.
        dialect: &'static str,
        /// The property that it has no place for.
        what: &'static str,
    },
    /// Blocks, or the records of the dialect, do not divide its columns.
    #[error("{} not a multiple of {of}", columns(*.cols))]
    Columns {
        /// Number of columns.
        cols: usize,
        /// A number that would divide them.
        of: usize,
    },
    /// It is run as one with another that is kept.
    #[error("runs as one with `{0}`, which stays")]
    With(String),
}

fn columns(cols: usize) -> String {
    if cols == 1 { "1 column is".to_owned() } else { format!("{cols} columns are") }
}

/// The numbers of a dtype that is not quantized.
fn numbers(dtype: &str) -> String {
    match dtype.as_bytes() {
        [b'I' | b'U', b'0'..=b'9', ..] => format!("integers ({dtype})"),
        _ => format!("numbers of dtype {dtype}"),
    }
}

impl Reason {
    /// Returns true if the weight was chosen to be quantized and cannot be.
    #[must_use]
    pub fn is_unmet(&self) -> bool {
        match self {
            Self::Smoothed | Self::Transposed(_) | Self::CannotHold { .. } => true,
            Self::Columns { .. } | Self::With(_) | Self::Stacked => true,
            Self::NoMatrix | Self::Empty | Self::Dtype(_) | Self::Already(_) => false,
            Self::Asked(_) | Self::NotAsked | Self::Layer(_) => false,
            Self::Preset(_) | Self::Unlisted(_) => false,
        }
    }

    /// Returns true if a list of reasons names one of the two: only their layers, or the weights
    /// that they run with, differ.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Layer(_), Self::Layer(_)) | (Self::With(_), Self::With(_)) => true,
            _ => self == other,
        }
    }

    /// Returns how far the weight is from being quantized: 0 for a weight that is asked for and
    /// does not fit, the largest number for one that nobody would quantize.
    #[must_use]
    pub fn place(&self) -> usize {
        match self {
            Self::Columns { .. } | Self::Smoothed => 0,
            Self::Transposed(_) | Self::CannotHold { .. } | Self::Stacked => 0,
            Self::Asked(_) | Self::Layer(_) => 1,
            Self::With(_) => 2,
            Self::Already(_) => 3,
            Self::Dtype(_) => 4,
            Self::NotAsked | Self::Preset(_) | Self::Unlisted(_) => 5,
            Self::NoMatrix | Self::Empty => 6,
        }
    }
}
