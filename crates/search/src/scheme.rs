use core::fmt;

use burn_fp4_formats::{E2M1, E4M3, FormatError, Fp4Format};
use serde::{Deserialize, Serialize};

use crate::{Rounding, ScaleRule, SearchError, TensorScaling};

/// What shares a block scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Blocks {
    /// A run of `block_size` elements along the blocked axis.
    #[default]
    Row,
    /// A tile of 16 x 16: the transpose of the quantized matrix is the quantized transpose, so a
    /// weight means the same in the forward and the backward pass. Each of the 16 rows stores the
    /// scale of its tile. Tiles at the end may have fewer than 16 rows.
    Tile16x16,
}

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
    /// The scale with the smallest `r^T H r` of all there are, where `r` are the errors of the nearest
    /// codes. Needs [`Importance::Blocks`](crate::Importance), as all below do.
    Hessian,
    /// Scale and codes together: for every scale, codes improved one at a time while `r^T H r` falls.
    CoordinateDescent,
    /// The scale and codes with the smallest `r^T H r` of all there are, by a search over a tree of codes.
    /// For blocks of 16; hundreds of times slower.
    Joint,
    /// The alternating direction method of multipliers from the best known point, [`Hessian`](Self::Hessian)'s,
    /// with the best iterate kept.
    Admm,
    /// The same as qwantize publishes it: from the rule's scale, with the last iterate kept, which may be
    /// worse than where it began.
    AdmmPublished,
}

impl ScaleSearch {
    /// Whether it needs the activations that meet each block.
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
}

impl fmt::Display for ScaleSearch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Amax => "amax",
            Self::FourOverSix { .. } => "four-over-six",
            Self::Sse => "sse",
            Self::Hessian => "hessian",
            Self::CoordinateDescent => "coordinate-descent",
            Self::Joint => "joint",
            Self::Admm => "admm",
            Self::AdmmPublished => "admm-published",
        })
    }
}

/// The block scale that the amax of the tensor maps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum E4m3Range {
    /// 448, the largest E4M3 value. A block holding the amax cannot choose element 4.
    #[default]
    #[serde(rename = "448")]
    E448,
    /// 256, which leaves room for a scale 1.5 times as large.
    #[serde(rename = "256")]
    E256,
}

impl E4m3Range {
    /// The value.
    pub const fn value(self) -> f32 {
        match self {
            Self::E448 => E4M3.max_value(),
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

/// What the user-facing operations do with NaN and infinity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NonFinite {
    /// Return an error that says so. Costs one read-back of the amax from the device.
    #[default]
    Reject,
    /// Quantize as the reference does: a NaN anywhere makes every NVFP4 scale NaN, an infinity maps
    /// to 6 with scale 448.
    FollowReference,
}

/// How a tensor is quantized. The default is NVFP4 as TransformerEngine does it.
///
/// ```
/// use burn_fp4_search::{Blocks, Fp4Scheme, ScaleRule};
///
/// let weights = Fp4Scheme::nvfp4();
/// let mxfp4 = Fp4Scheme::mxfp4().with_rule(ScaleRule::Even).with_block_size(16);
/// let tiles = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
/// assert!(weights.validate().and(mxfp4.validate()).and(tiles.validate()).is_ok());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fp4Scheme {
    /// How amax becomes a scale. Decides the format.
    pub rule: ScaleRule,
    /// Elements that share a block scale along the blocked axis, 16 or 32.
    pub block_size: usize,
    /// Runs or tiles.
    pub blocks: Blocks,
    /// Which candidate scales are tried.
    pub search: ScaleSearch,
    /// How elements become codes.
    pub rounding: Rounding,
    /// Where the tensor scale comes from.
    pub tensor_scale: TensorScaling,
    /// What to do with NaN and infinity.
    pub non_finite: NonFinite,
}

impl Default for Fp4Scheme {
    fn default() -> Self {
        Self::nvfp4()
    }
}

impl Fp4Scheme {
    /// NVFP4 with blocks of 16 by TransformerEngine's current rule.
    pub const fn nvfp4() -> Self {
        Self::of(ScaleRule::Te)
    }

    /// MXFP4 with blocks of 32 by the rule of the OCP specification.
    pub const fn mxfp4() -> Self {
        Self::of(ScaleRule::Floor)
    }

    /// The rule with its format's own block size and no search.
    pub const fn of(rule: ScaleRule) -> Self {
        Self {
            rule,
            block_size: rule.row().format.row().block_size,
            blocks: Blocks::Row,
            search: ScaleSearch::Amax,
            rounding: Rounding::Nearest,
            tensor_scale: TensorScaling::Tensor,
            non_finite: NonFinite::Reject,
        }
    }

    /// Sets the rule. The block size stays.
    pub const fn with_rule(mut self, rule: ScaleRule) -> Self {
        self.rule = rule;
        self
    }

    /// Sets the block size, 16 or 32.
    pub const fn with_block_size(mut self, block_size: usize) -> Self {
        self.block_size = block_size;
        self
    }

    /// Sets what shares a block scale.
    pub const fn with_blocks(mut self, blocks: Blocks) -> Self {
        self.blocks = blocks;
        self
    }

    /// Sets the scale search.
    pub const fn with_search(mut self, search: ScaleSearch) -> Self {
        self.search = search;
        self
    }

    /// Sets how elements become codes.
    pub const fn with_rounding(mut self, rounding: Rounding) -> Self {
        self.rounding = rounding;
        self
    }

    /// Sets where the tensor scale comes from.
    pub const fn with_tensor_scale(mut self, tensor_scale: TensorScaling) -> Self {
        self.tensor_scale = tensor_scale;
        self
    }

    /// Sets what happens to NaN and infinity.
    pub const fn with_non_finite(mut self, non_finite: NonFinite) -> Self {
        self.non_finite = non_finite;
        self
    }

    /// The format of the rule.
    pub const fn format(&self) -> Fp4Format {
        self.rule.row().format
    }

    /// Largest element times largest block scale that the tensor's amax maps to: 2688, or 1536.
    pub fn largest_code_product(&self) -> f32 {
        let range = match self.search {
            ScaleSearch::FourOverSix { range, .. } => range,
            _ => E4m3Range::E448,
        };
        E2M1.max_value() * range.value()
    }

    /// Rows that share a block scale.
    pub const fn tile_rows(&self) -> usize {
        match self.blocks {
            Blocks::Row => 1,
            Blocks::Tile16x16 => 16,
        }
    }

    /// How many tensor scales a matrix of this many rows has: 1, or one per row.
    pub const fn tensor_scales(&self, rows: usize) -> usize {
        match self.tensor_scale {
            TensorScaling::Row if self.rule.row().tensor_scale => rows,
            _ => 1,
        }
    }

    /// Checks that the choices go together.
    ///
    /// # Errors
    /// [`SearchError`] naming the choice that does not fit.
    pub fn validate(&self) -> Result<(), SearchError> {
        self.format().check_block_size(self.block_size)?;
        self.tensor_scale.validate()?;
        let refuse = |choice, reason| Err(SearchError::Scheme { rule: self.rule, choice, reason });
        if self.tensor_scale != TensorScaling::Tensor && !self.rule.row().tensor_scale {
            return refuse("a tensor scale", "the rule has none");
        }
        if self.blocks == Blocks::Tile16x16 {
            if self.block_size != 16 {
                return refuse("Blocks::Tile16x16", "a tile is 16 elements wide");
            }
            if self.tensor_scale == TensorScaling::Row {
                return refuse("Blocks::Tile16x16", "the rows of a tile share its scale");
            }
        }
        if self.rounding != Rounding::Nearest && self.search != ScaleSearch::Amax {
            return refuse("Rounding::Stochastic", "searches compare what nearest codes leave");
        }
        if self.blocks == Blocks::Tile16x16 && self.search.needs_hessians() {
            return refuse("Blocks::Tile16x16", "activations weigh the rows of a tile alike");
        }
        if self.search == ScaleSearch::Joint && self.block_size != 16 {
            return refuse("ScaleSearch::Joint", "it is for blocks of 16");
        }
        if matches!(self.search, ScaleSearch::FourOverSix { .. })
            && !matches!(self.rule, ScaleRule::Te | ScaleRule::TeDivision)
        {
            return refuse(
                "ScaleSearch::FourOverSix",
                "it is defined for TransformerEngine's rules",
            );
        }
        Ok(())
    }

    /// Checks the scheme and that its blocks divide an axis of `cols` elements.
    ///
    /// # Errors
    /// As [`validate`](Self::validate), and [`FormatError::Indivisible`].
    pub fn check_columns(&self, cols: usize) -> Result<(), SearchError> {
        self.validate()?;
        if cols.is_multiple_of(self.block_size) {
            Ok(())
        } else {
            Err(FormatError::Indivisible { cols, block_size: self.block_size }.into())
        }
    }
}
