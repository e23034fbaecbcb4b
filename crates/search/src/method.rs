//! Every way to choose scales and codes is one row of one table: [`Method::row`].
//!
//! A [`Method`] is what users ask for by name. Its [`ScaleSearch`] is what an engine does with a
//! block: each has a file of its name in `reference/` and in `host/`.

use core::mem::discriminant;

use burn_fp4_formats::{Fp4Format, Minifloat};
use serde::{Deserialize, Serialize};

use crate::gptq::Gptq;

/// How the scale of a block, and with activations its codes, are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleSearch {
    /// One: what the rule makes of the block's amax.
    #[default]
    Amax,
    /// Two: amax on element 6 or on element 4, the one with the smaller error
    /// (Four Over Six, arXiv 2512.02010; TransformerEngine >= 2.17).
    FourOverSix {
        /// Largest block scale of the first candidate.
        range: E4m3Range,
        /// Which error decides.
        error: ErrorMetric,
    },
    /// The scale with the smallest squared error of all there are; with
    /// [`Importance::Channels`](crate::Importance), weighted.
    Sse,
    /// The scale with the smallest `r^T H r` of all there are, where `r` are the errors of the
    /// nearest codes. Needs [`Importance::Blocks`](crate::Importance), as all below do.
    Hessian,
    /// Scale and codes together: for every scale, codes improved one at a time while `r^T H r`
    /// falls.
    CoordinateDescent,
    /// The scale and codes with the smallest `r^T H r` of all there are, by a search over a tree of
    /// codes. For blocks of 16; hundreds of times slower.
    Joint,
    /// The alternating direction method of multipliers from the best known point, that of
    /// [`CoordinateDescent`](Self::CoordinateDescent), with the best iterate kept.
    Admm,
    /// The same as qwantize publishes it: from the rule's scale, with the last iterate kept, which
    /// may be worse than where it began.
    AdmmPublished,
}

impl ScaleSearch {
    /// Whether it needs the Hessian of each block.
    pub const fn needs_hessians(self) -> bool {
        match self {
            Self::Amax | Self::FourOverSix { .. } | Self::Sse => false,
            Self::Hessian
            | Self::CoordinateDescent
            | Self::Joint
            | Self::Admm
            | Self::AdmmPublished => true,
        }
    }

    /// The method that is this search and nothing more.
    pub fn method(self) -> Method {
        let is_search = |method: &Method| discriminant(&method.row().search) == discriminant(&self);
        Method::ALL.into_iter().find(is_search).expect("every search is a method")
    }
}

/// The block scale that the amax of the tensor maps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum E4m3Range {
    /// The largest block scale: 448 for E4M3. A block holding the amax cannot choose element 4.
    #[default]
    #[serde(rename = "448")]
    E448,
    /// 256, which leaves room for a scale 1.5 times as large.
    #[serde(rename = "256")]
    E256,
}

impl E4m3Range {
    /// The value for the block scales of NVFP4.
    pub const fn value(self) -> f32 {
        self.of(&Fp4Format::NvFp4.row().block_scale)
    }

    /// The value for block scales of a number format.
    pub(crate) const fn of(self, block_scale: &Minifloat) -> f32 {
        match self {
            Self::E448 => block_scale.max_value(),
            Self::E256 => 256.0,
        }
    }
}

/// How the error of a block is summed up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ErrorMetric {
    /// Sum of magnitudes.
    #[default]
    Mae,
    /// Sum of squares.
    Mse,
}

/// A way to choose scales and codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// The rule's scale.
    Amax,
    /// The better of two scales.
    FourOverSix,
    /// The best scale by squared error.
    Sse,
    /// The same with the tensor scale that has the smallest total error.
    SseTensorScale,
    /// The best scale, errors weighted by the sum of squares of their channel.
    SseWeighted,
    /// The best scale by `r^T H r` of nearest codes.
    Hessian,
    /// Scale and codes by coordinate descent on `r^T H r`.
    CoordinateDescent,
    /// ADMM as published.
    AdmmPublished,
    /// ADMM from the best known point, best iterate kept.
    Admm,
    /// The best scale and codes by `r^T H r`.
    Joint,
    /// GPTQ as published.
    GptqTextbook,
    /// GPTQ with blocks in order of activity, then sweeps over codes and scales.
    Gptq,
}

/// The facts of a [`Method`].
#[derive(Debug, PartialEq)]
pub struct MethodRow {
    /// Name in tables and on command lines.
    pub name: &'static str,
    /// What it does, in a line.
    pub summary: &'static str,
    /// Whether it needs activations.
    pub calibrated: bool,
    /// Formats it is defined for.
    pub formats: &'static [Fp4Format],
    /// Block sizes it is defined for.
    pub block_sizes: &'static [usize],
    /// How an engine chooses the scale and codes of a block.
    pub search: ScaleSearch,
    /// The options of GPTQ, which goes beyond blocks, for those methods that are.
    pub gptq: Option<Gptq>,
}

impl MethodRow {
    /// A method that is a search alone, for every format and block size; calibrated if the search
    /// needs Hessians.
    const fn new(search: ScaleSearch, name: &'static str, summary: &'static str) -> Self {
        Self {
            name,
            summary,
            calibrated: search.needs_hessians(),
            formats: &Fp4Format::ALL,
            block_sizes: &[16, 32],
            search,
            gptq: None,
        }
    }
}

impl Method {
    /// Every method, from the fastest to the most accurate.
    pub const ALL: [Self; 12] = [
        Self::Amax,
        Self::FourOverSix,
        Self::Sse,
        Self::SseTensorScale,
        Self::SseWeighted,
        Self::Hessian,
        Self::CoordinateDescent,
        Self::AdmmPublished,
        Self::Admm,
        Self::Joint,
        Self::GptqTextbook,
        Self::Gptq,
    ];

    /// The facts of the method.
    pub const fn row(self) -> &'static MethodRow {
        const FOUR_OVER_SIX: ScaleSearch =
            ScaleSearch::FourOverSix { range: E4m3Range::E256, error: ErrorMetric::Mse };
        const NVFP4: &[Fp4Format] = &[Fp4Format::NvFp4];
        macro_rules! row {
            ($search:expr, $name:literal, $summary:literal $(, $field:ident: $value:expr)*) => {
                const {
                    &MethodRow {
                        $($field: $value,)*
                        ..MethodRow::new($search, $name, $summary)
                    }
                }
            };
        }
        match self {
            Self::Amax => {
                row!(ScaleSearch::Amax, "amax", "the scale that the rule makes of the block's amax")
            }
            Self::FourOverSix => row!(
                FOUR_OVER_SIX,
                "four-over-six",
                "amax on element 6 or on element 4, whichever has the smaller error",
                formats: NVFP4
            ),
            Self::Sse => {
                row!(ScaleSearch::Sse, "sse", "the scale with the smallest squared error of all")
            }
            Self::SseTensorScale => row!(
                ScaleSearch::Sse,
                "sse-tensor-scale",
                "the same with the best of 16 tensor scales",
                formats: NVFP4
            ),
            Self::SseWeighted => row!(
                ScaleSearch::Sse,
                "sse-weighted",
                "sse, errors weighted by their channel's activity",
                calibrated: true
            ),
            Self::Hessian => row!(
                ScaleSearch::Hessian,
                "hessian",
                "the scale with the smallest r^T H r of nearest codes"
            ),
            Self::CoordinateDescent => row!(
                ScaleSearch::CoordinateDescent,
                "coordinate-descent",
                "scale and codes, improved one at a time"
            ),
            Self::AdmmPublished => {
                row!(ScaleSearch::AdmmPublished, "admm-published", "ADMM as qwantize has it")
            }
            Self::Admm => {
                row!(ScaleSearch::Admm, "admm", "ADMM from the best known point, best iterate kept")
            }
            Self::Joint => row!(
                ScaleSearch::Joint,
                "joint",
                "the best scale and codes of a block there are; slow",
                block_sizes: &[16]
            ),
            Self::GptqTextbook => row!(
                ScaleSearch::Amax,
                "gptq-textbook",
                "GPTQ as published",
                calibrated: true,
                gptq: Some(Gptq::TEXTBOOK)
            ),
            Self::Gptq => row!(
                ScaleSearch::Amax,
                "gptq",
                "GPTQ by activity, then sweeps over codes and scales",
                calibrated: true,
                gptq: Some(Gptq::DEFAULT)
            ),
        }
    }

    /// The options of GPTQ, for those methods that are.
    pub fn gptq(self) -> Option<Gptq> {
        self.row().gptq
    }
}
