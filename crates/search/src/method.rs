//! Every way to choose scales and codes is one row of one table: [`Method::row`].
//!
//! A [`Method`] is what users ask for by name, and [`ChosenBy`] the same with its options. Its
//! [`ScaleSearch`] is what an engine does with a block, and what a scheme says: each has a file of
//! its name in `reference/` and in `host/`.

use burn_fp4_formats::{BLOCK_SIZES, Fp4Format, Minifloat};
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
    /// Passes of [`CoordinateDescent`](Self::CoordinateDescent) over the elements of a block at
    /// most; most need two.
    pub const SWEEPS: usize = 8;

    /// Whether it needs the Hessian of each block.
    pub const fn needs_hessians(self) -> bool {
        matches!(self.method().row().needs, Needs::BlockHessians)
    }

    /// The method that is this search and nothing more.
    pub const fn method(self) -> Method {
        match self {
            Self::Amax => Method::Amax,
            Self::FourOverSix { .. } => Method::FourOverSix,
            Self::Sse => Method::Sse,
            Self::Hessian => Method::Hessian,
            Self::CoordinateDescent => Method::CoordinateDescent,
            Self::Joint => Method::Joint,
            Self::Admm => Method::Admm,
            Self::AdmmPublished => Method::AdmmPublished,
        }
    }
}

/// The block scale that the amax of the tensor maps to.
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

/// A way to choose scales and codes. The default is what the command `fp4` quantizes by.
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

/// A [`Method`] with its options: how the scales and codes of a tensor are chosen.
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
    /// The method, of which these are the options.
    pub fn method(&self) -> Method {
        match self {
            Self::Search(search) => search.method(),
            Self::Gptq(options) if *options == Gptq::TEXTBOOK => Method::GptqTextbook,
            Self::Gptq(_) => Method::Gptq,
            Self::SseTensorScale => Method::SseTensorScale,
            Self::SseWeighted => Method::SseWeighted,
        }
    }

    /// What is done with each block before anything goes beyond blocks: GPTQ begins with the scales
    /// of the rule.
    pub const fn search(&self) -> ScaleSearch {
        match self {
            Self::Search(search) => *search,
            Self::Gptq(_) => ScaleSearch::Amax,
            Self::SseTensorScale | Self::SseWeighted => ScaleSearch::Sse,
        }
    }

    /// The options of GPTQ, if that is what it is.
    pub const fn gptq(&self) -> Option<Gptq> {
        match self {
            Self::Gptq(options) => Some(*options),
            Self::Search(_) | Self::SseTensorScale | Self::SseWeighted => None,
        }
    }

    /// Whether it sums over a whole matrix, for which engines have orders of their own: the bits
    /// may then be others than the host's. Those of all other methods are the same on every engine.
    pub const fn sums_matrices(&self) -> bool {
        match self {
            Self::Search(_) | Self::SseWeighted => false,
            Self::SseTensorScale | Self::Gptq(_) => true,
        }
    }

    /// Statistics that it needs of the inputs that a weight is multiplied by.
    pub fn needs(&self) -> Needs {
        self.method().row().needs
    }

    /// Whether it needs any.
    pub fn needs_inputs(&self) -> bool {
        self.needs() != Needs::Nothing
    }
}

impl From<Method> for ChosenBy {
    /// With the options of its row.
    fn from(method: Method) -> Self {
        method.row().chosen_by
    }
}

impl From<Gptq> for ChosenBy {
    fn from(options: Gptq) -> Self {
        Self::Gptq(options)
    }
}

/// Statistics of the inputs that a weight is multiplied by, from the least to the most.
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
    /// Name in tables and on command lines.
    pub name: &'static str,
    /// What it does, in a line.
    pub summary: &'static str,
    /// How the scales and codes are chosen, with the options that are the default.
    pub chosen_by: ChosenBy,
    /// Statistics of activations that it needs.
    pub needs: Needs,
    /// Whether it needs any.
    pub calibrated: bool,
    /// Formats it is defined for.
    pub formats: &'static [Fp4Format],
    /// Block sizes it is defined for.
    pub block_sizes: &'static [usize],
    /// Whether it takes hundreds of times longer than the others.
    pub slow: bool,
}

impl MethodRow {
    /// A method for every format and block size.
    const fn new(
        chosen_by: ChosenBy,
        needs: Needs,
        name: &'static str,
        summary: &'static str,
    ) -> Self {
        Self {
            name,
            summary,
            chosen_by,
            needs,
            calibrated: !matches!(needs, Needs::Nothing),
            formats: &Fp4Format::ALL,
            block_sizes: &BLOCK_SIZES,
            slow: false,
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
        use ChosenBy::{Gptq as ByGptq, Search, SseTensorScale, SseWeighted};
        const FOUR_OVER_SIX: ScaleSearch =
            ScaleSearch::FourOverSix { range: E4m3Range::E256, error: ErrorMetric::Mse };
        const NVFP4: &[Fp4Format] = &[Fp4Format::NvFp4];
        macro_rules! row {
            (
                $name:literal => $chosen_by:expr, needs $needs:ident, $summary:literal
                $(, $field:ident: $value:expr)*
            ) => {
                const {
                    &MethodRow {
                        $($field: $value,)*
                        ..MethodRow::new($chosen_by, Needs::$needs, $name, $summary)
                    }
                }
            };
        }
        match self {
            Self::Amax => row!("amax" => Search(ScaleSearch::Amax), needs Nothing,
                "the scale that the rule makes of the block's amax"),
            Self::FourOverSix => row!("four-over-six" => Search(FOUR_OVER_SIX), needs Nothing,
                "amax on element 6 or on element 4, whichever has the smaller error",
                formats: NVFP4),
            Self::Sse => row!("sse" => Search(ScaleSearch::Sse), needs Nothing,
                "the scale with the smallest squared error of all"),
            Self::SseTensorScale => row!("sse-tensor-scale" => SseTensorScale, needs Nothing,
                "the same with the best of 16 tensor scales", formats: NVFP4),
            Self::SseWeighted => row!("sse-weighted" => SseWeighted, needs SecondMoments,
                "sse, errors weighted by their channel's activity"),
            Self::Hessian => row!("hessian" => Search(ScaleSearch::Hessian), needs BlockHessians,
                "the scale with the smallest r^T H r of nearest codes"),
            Self::CoordinateDescent => row!(
                "coordinate-descent" => Search(ScaleSearch::CoordinateDescent), needs BlockHessians,
                "scale and codes, improved one at a time"),
            Self::AdmmPublished => row!(
                "admm-published" => Search(ScaleSearch::AdmmPublished), needs BlockHessians,
                "ADMM as qwantize has it"),
            Self::Admm => row!("admm" => Search(ScaleSearch::Admm), needs BlockHessians,
                "ADMM from the best known point, best iterate kept"),
            Self::Joint => row!("joint" => Search(ScaleSearch::Joint), needs BlockHessians,
                "the best scale and codes of a block there are; slow",
                block_sizes: &[16], slow: true),
            Self::GptqTextbook => row!("gptq-textbook" => ByGptq(Gptq::TEXTBOOK), needs Gram,
                "GPTQ as published"),
            Self::Gptq => row!("gptq" => ByGptq(Gptq::DEFAULT), needs Gram,
                "GPTQ by activity, then sweeps over codes and scales"),
        }
    }

    /// The options of GPTQ, for those methods that are.
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
