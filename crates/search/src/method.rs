//! Every way to choose scales and codes is one row.

use core::fmt;
use core::str::FromStr;

use burn_fp4_formats::{Fp4Format, Packed};
use serde::{Deserialize, Serialize};

use crate::host::{self, View};
use crate::{
    E4m3Range, ErrorMetric, Fp4Scheme, Gptq, Gram, Importance, ScaleRule, ScaleSearch, SearchError,
    quantize_with_best_tensor_scale,
};

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
    /// The same with the tensor scale that leaves the smallest total error.
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
#[derive(Debug, PartialEq, Eq)]
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
        macro_rules! row {
            ($name:literal, $calibrated:literal, $summary:literal) => {
                row!($name, $calibrated, $summary, &Fp4Format::ALL, &[16, 32])
            };
            ($name:literal, $calibrated:literal, $summary:literal, $formats:expr, $sizes:expr) => {
                &MethodRow {
                    name: $name,
                    summary: $summary,
                    calibrated: $calibrated,
                    formats: $formats,
                    block_sizes: $sizes,
                }
            };
        }
        match self {
            Self::Amax => row!("amax", false, "the scale that the block's amax asks for"),
            Self::FourOverSix => row!(
                "four-over-six",
                false,
                "amax on element 6 or on element 4, whichever errs less",
                &[Fp4Format::NvFp4],
                &[16, 32]
            ),
            Self::Sse => row!("sse", false, "the scale with the smallest squared error of all"),
            Self::SseTensorScale => row!(
                "sse-tensor-scale",
                false,
                "the same with the best of 16 tensor scales",
                &[Fp4Format::NvFp4],
                &[16, 32]
            ),
            Self::SseWeighted => {
                row!("sse-weighted", true, "sse, errors weighted by their channel's activity")
            }
            Self::Hessian => {
                row!("hessian", true, "the scale with the smallest r^T H r of nearest codes")
            }
            Self::CoordinateDescent => {
                row!("coordinate-descent", true, "scale and codes, improved one at a time")
            }
            Self::AdmmPublished => row!("admm-published", true, "ADMM as qwantize has it"),
            Self::Admm => row!("admm", true, "ADMM from the best known point, best iterate kept"),
            Self::Joint => row!(
                "joint",
                true,
                "the best scale and codes of a block there are; slow",
                &Fp4Format::ALL,
                &[16]
            ),
            Self::GptqTextbook => row!("gptq-textbook", true, "GPTQ as published"),
            Self::Gptq => {
                row!("gptq", true, "GPTQ by activity, then sweeps over codes and scales")
            }
        }
    }

    /// The options of GPTQ, for those methods that are.
    pub fn gptq(self) -> Option<Gptq> {
        match self {
            Self::GptqTextbook => Some(Gptq::TEXTBOOK),
            Self::Gptq => Some(Gptq::default()),
            _ => None,
        }
    }

    /// The scheme of the method for a format and block size.
    pub fn scheme(self, format: Fp4Format, block_size: usize) -> Fp4Scheme {
        let rule = match format {
            Fp4Format::NvFp4 => ScaleRule::Te,
            Fp4Format::MxFp4 => ScaleRule::Floor,
        };
        let search = match self {
            Self::Amax | Self::GptqTextbook | Self::Gptq => ScaleSearch::Amax,
            Self::FourOverSix => {
                ScaleSearch::FourOverSix { range: E4m3Range::E256, error: ErrorMetric::Mse }
            }
            Self::Sse | Self::SseTensorScale | Self::SseWeighted => ScaleSearch::Sse,
            Self::Hessian => ScaleSearch::Hessian,
            Self::CoordinateDescent => ScaleSearch::CoordinateDescent,
            Self::AdmmPublished => ScaleSearch::AdmmPublished,
            Self::Admm => ScaleSearch::Admm,
            Self::Joint => ScaleSearch::Joint,
        };
        Fp4Scheme::of(rule).with_block_size(block_size).with_search(search)
    }

    /// Quantizes a weight `[rows, cols]` whose rows meet activations with this Gram matrix.
    ///
    /// # Errors
    /// A weight that is not finite; a block size or format that the method is not defined for, or that does not
    /// divide the columns; a Gram matrix of another number of channels; one that is missing ([`SearchError::Uncalibrated`]).
    pub fn quantize(
        self,
        weight: &[f32],
        rows: usize,
        cols: usize,
        format: Fp4Format,
        block_size: usize,
        gram: Option<&Gram>,
    ) -> Result<Packed, SearchError> {
        let scheme = self.scheme(format, block_size);
        scheme.check_columns(cols)?;
        if let Some(&found) = weight.iter().find(|value| !value.is_finite()) {
            return Err(SearchError::NonFinite { found });
        }
        let view = View::rows(rows, cols);
        if self == Self::SseTensorScale {
            return quantize_with_best_tensor_scale(weight, view, &scheme, Importance::Uniform);
        }
        let amax = host::amax(weight, view, &scheme);
        if self.row().calibrated && gram.is_none() {
            return Err(SearchError::Uncalibrated { method: self });
        }
        if let (Some(options), Some(gram)) = (self.gptq(), gram) {
            return options.quantize(weight, rows, cols, &scheme, &amax, gram);
        }
        let weights: Vec<f32>;
        let hessians;
        let importance = match (self, gram) {
            (Self::SseWeighted, Some(gram)) => {
                weights = gram.diagonal().map(|value| value as f32).collect();
                Importance::Channels(&weights)
            }
            (_, Some(gram)) if scheme.search.needs_hessians() => {
                hessians = gram.blocks(block_size)?;
                Importance::Blocks(&hessians)
            }
            _ => Importance::Uniform,
        };
        host::quantize_packed(weight, view, &scheme, &amax, importance)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.row().name)
    }
}

impl FromStr for Method {
    type Err = SearchError;

    fn from_str(name: &str) -> Result<Self, SearchError> {
        Self::ALL
            .into_iter()
            .find(|method| method.row().name == name)
            .ok_or_else(|| SearchError::UnknownMethod(name.to_owned()))
    }
}
