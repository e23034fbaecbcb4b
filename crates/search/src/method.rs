//! The methods that choose scales and codes: one table with a row for each, [`Method::row`].
//!
//! Users ask for a [`Method`] by name; [`ChosenBy`] is a method with its options. The
//! [`ScaleSearch`] of a method is the part that engines run on a block, and the part that a scheme
//! holds: each search has a file of its name in `reference/` and in `host/`.

use burn_fp4_formats::{Fp4Format, Minifloat};
use serde::{Deserialize, Serialize};

use self::ChosenBy::{Gptq as ByGptq, Search, SseTensorScale, SseWeighted};
use crate::gptq::Gptq;

/// Chooses the scale of a block and, given activations, its codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleSearch {
    /// Takes the scale that the rule computes from the amax of the block.
    #[default]
    Amax,
    /// Tries two scales, with amax on element 6 or on element 4, and takes the one with the smaller
    /// error (Four Over Six, arXiv 2512.02010; TransformerEngine >= 2.17).
    FourOverSix {
        /// Largest block scale of the first candidate.
        range: E4m3Range,
        /// The error that decides.
        error: ErrorMetric,
    },
    /// Takes the scale with the smallest squared error of all scales; with
    /// [`Importance::Channels`](crate::Importance), weighted by channel.
    Sse,
    /// Takes the scale with the smallest `r^T H r` of all scales, where `r` are the errors of the
    /// nearest codes. Needs [`Importance::Blocks`](crate::Importance), as all below do.
    Hessian,
    /// Chooses scale and codes together: for every scale, improves codes one at a time while
    /// `r^T H r` falls.
    CoordinateDescent,
    /// Runs the alternating direction method of multipliers from the best known solution, which
    /// [`CoordinateDescent`](Self::CoordinateDescent) finds, and keeps the best iterate.
    Admm,
    /// Runs ADMM as qwantize publishes it: from the rule's scale, keeping the last iterate, which
    /// may be worse than the first.
    AdmmPublished,
}

impl ScaleSearch {
    /// Maximum number of passes of [`CoordinateDescent`](Self::CoordinateDescent) over the elements
    /// of a block. Most blocks need two.
    pub const SWEEPS: usize = 8;

    /// Returns true if the search needs the Hessian of each block.
    pub const fn needs_hessians(self) -> bool {
        matches!(self.method().row().needs, Needs::BlockHessians)
    }

    /// Returns the method that consists of this search alone.
    pub const fn method(self) -> Method {
        match self {
            Self::Amax => Method::Amax,
            Self::FourOverSix { .. } => Method::FourOverSix,
            Self::Sse => Method::Sse,
            Self::Hessian => Method::Hessian,
            Self::CoordinateDescent => Method::CoordinateDescent,
            Self::Admm => Method::Admm,
            Self::AdmmPublished => Method::AdmmPublished,
        }
    }
}

/// Sets the largest block scale, to which the amax of the tensor maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum E4m3Range {
    /// The largest block scale: 448 for E4M3. A block holding the amax cannot choose element 4.
    #[default]
    #[serde(rename = "448")]
    E448,
    /// 256: a scale 1.5 times as large, as four-over-six tries it, is then at most 384 and finite.
    #[serde(rename = "256")]
    E256,
}

impl E4m3Range {
    /// Returns the value for the block scales of NVFP4.
    pub const fn value(self) -> f32 {
        self.of(&Fp4Format::NvFp4.row().block_scale)
    }

    /// Returns the value for block scales of a number format.
    pub(crate) const fn of(self, block_scale: &Minifloat) -> f32 {
        match self {
            Self::E448 => block_scale.max_value(),
            Self::E256 => 256.0,
        }
    }
}

/// Sums the errors of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ErrorMetric {
    /// Sum of magnitudes.
    #[default]
    Mae,
    /// Sum of squares.
    Mse,
}

/// Chooses scales and codes. The default is that of the command `fp4`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// The rule's scale.
    Amax,
    /// The better of two scales.
    FourOverSix,
    /// The best scale by squared error.
    #[default]
    Sse,
    /// The best scale by squared error, with the tensor scale that has the smallest total error.
    SseTensorScale,
    /// The best scale, errors weighted by the sum of squares of their channel.
    SseWeighted,
    /// The best scale by `r^T H r` of nearest codes.
    Hessian,
    /// Scale and codes by coordinate descent on `r^T H r`.
    CoordinateDescent,
    /// ADMM as published.
    AdmmPublished,
    /// ADMM from the best known solution, best iterate kept.
    Admm,
    /// GPTQ as published.
    GptqTextbook,
    /// GPTQ with blocks in order of activity, then sweeps over codes and scales.
    Gptq,
}

rows! {
    /// Every method, from the fastest to the most accurate.
    Method: MethodRow {
        Amax => MethodRow::new("amax", Search(ScaleSearch::Amax), Needs::Nothing,
            "the scale that the rule makes of the block's amax"),
        FourOverSix => MethodRow::new("four-over-six", Search(FOUR_OVER_SIX), Needs::Nothing,
            "amax on element 6 or on element 4, whichever has the smaller error").only_nvfp4(),
        Sse => MethodRow::new("sse", Search(ScaleSearch::Sse), Needs::Nothing,
            "the scale with the smallest squared error of all"),
        SseTensorScale => MethodRow::new("sse-tensor-scale", SseTensorScale, Needs::Nothing,
            "sse with the best of 16 tensor scales").only_nvfp4(),
        SseWeighted => MethodRow::new("sse-weighted", SseWeighted, Needs::SecondMoments,
            "sse, errors weighted by their channel's activity"),
        Hessian => MethodRow::new("hessian", Search(ScaleSearch::Hessian), Needs::BlockHessians,
            "the scale with the smallest r^T H r of nearest codes"),
        CoordinateDescent => MethodRow::new("coordinate-descent",
            Search(ScaleSearch::CoordinateDescent), Needs::BlockHessians,
            "scale and codes, improved one at a time"),
        AdmmPublished => MethodRow::new("admm-published",
            Search(ScaleSearch::AdmmPublished), Needs::BlockHessians,
            "ADMM as qwantize has it"),
        Admm => MethodRow::new("admm", Search(ScaleSearch::Admm), Needs::BlockHessians,
            "ADMM from the best known point, best iterate kept"),
        GptqTextbook => MethodRow::new("gptq-textbook", ByGptq(Gptq::TEXTBOOK), Needs::Gram,
            "GPTQ as published"),
        Gptq => MethodRow::new("gptq", ByGptq(Gptq::DEFAULT), Needs::Gram,
            "GPTQ by activity, then sweeps over codes and scales"),
    }
}

/// Four Over Six with the options of TransformerEngine.
const FOUR_OVER_SIX: ScaleSearch =
    ScaleSearch::FourOverSix { range: E4m3Range::E256, error: ErrorMetric::Mse };

/// A [`Method`] with its options.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChosenBy {
    /// Block by block.
    Search(ScaleSearch),
    /// By GPTQ.
    Gptq(Gptq),
    /// By squared error, with the tensor scale that leaves the smallest.
    SseTensorScale,
    /// By squared error, multiplied by the activity of channels.
    SseWeighted,
}

impl ChosenBy {
    /// Returns the method without its options.
    pub fn method(&self) -> Method {
        match self {
            Self::Search(search) => search.method(),
            Self::Gptq(options) if *options == Gptq::TEXTBOOK => Method::GptqTextbook,
            Self::Gptq(_) => Method::Gptq,
            Self::SseTensorScale => Method::SseTensorScale,
            Self::SseWeighted => Method::SseWeighted,
        }
    }

    /// Returns the search that runs on each block before anything goes beyond blocks. GPTQ begins
    /// with the scales of the rule.
    pub const fn search(&self) -> ScaleSearch {
        match self {
            Self::Search(search) => *search,
            Self::Gptq(_) => ScaleSearch::Amax,
            Self::SseTensorScale | Self::SseWeighted => ScaleSearch::Sse,
        }
    }

    /// Returns the options of GPTQ; `None` for other methods.
    pub const fn gptq(&self) -> Option<Gptq> {
        match self {
            Self::Gptq(options) => Some(*options),
            Self::Search(_) | Self::SseTensorScale | Self::SseWeighted => None,
        }
    }

    /// Returns true if the method sums over a whole matrix. Each engine does that in its own order,
    /// so bits may differ from the host's. All other methods have the same bits on every engine.
    pub const fn sums_matrices(&self) -> bool {
        match self {
            Self::Search(_) | Self::SseWeighted => false,
            Self::SseTensorScale | Self::Gptq(_) => true,
        }
    }

    /// Returns the statistics that the method needs of the inputs of a layer.
    pub fn needs(&self) -> Needs {
        self.method().row().needs
    }

    /// Returns true if the method needs any statistics of inputs.
    pub fn needs_inputs(&self) -> bool {
        self.needs() != Needs::Nothing
    }
}

impl From<Method> for ChosenBy {
    /// Takes the options of the method's row.
    fn from(method: Method) -> Self {
        method.row().chosen_by
    }
}

impl From<Gptq> for ChosenBy {
    fn from(options: Gptq) -> Self {
        Self::Gptq(options)
    }
}

/// Statistics of the inputs of a layer, from the least to the most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Needs {
    /// None.
    Nothing,
    /// The mean square of every channel: the diagonal of `X^T X`.
    SecondMoments,
    /// The part of `X^T X` for the channels of each block.
    BlockHessians,
    /// All of `X^T X`.
    Gram,
}

/// The facts of a [`Method`].
#[derive(Debug, PartialEq)]
pub struct MethodRow {
    /// Name in tables, in files and on command lines.
    pub name: &'static str,
    /// Summary in one line.
    pub summary: &'static str,
    /// The method with its default options.
    pub chosen_by: ChosenBy,
    /// Statistics of activations that it needs.
    pub needs: Needs,
    /// True if it needs any statistics.
    pub calibrated: bool,
    /// Formats that it is defined for.
    pub formats: &'static [Fp4Format],
}

impl MethodRow {
    /// The row of a method for every format.
    const fn new(
        name: &'static str,
        chosen_by: ChosenBy,
        needs: Needs,
        summary: &'static str,
    ) -> Self {
        let calibrated = !matches!(needs, Needs::Nothing);
        Self { name, summary, chosen_by, needs, calibrated, formats: &Fp4Format::ALL }
    }

    /// The same for NVFP4 alone.
    const fn only_nvfp4(self) -> Self {
        Self { formats: &[Fp4Format::NvFp4], ..self }
    }
}

impl Method {
    /// Returns the options of GPTQ; `None` for other methods.
    pub fn gptq(self) -> Option<Gptq> {
        self.row().chosen_by.gptq()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_and_what_its_row_chooses_by_are_the_same() {
        for method in Method::ALL {
            let by = ChosenBy::from(method);
            assert_eq!(by.method(), method);
            assert_eq!(ChosenBy::from(by.search().method()), ChosenBy::Search(by.search()));
        }
    }
}
