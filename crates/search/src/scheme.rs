//! [`Fp4Scheme`]: the format, rule, search, rounding and tensor scale of a tensor, and the choices
//! that go together.

use std::fmt;

use burn_fp4_formats::{E2M1, FormatError, Fp4Format, ScaleGrid, TensorScale};
use serde::{Deserialize, Serialize};

use crate::error::SearchError;
use crate::gptq::Gptq;
use crate::hadamard::Hadamard;
use crate::method::{E4m3Range, Method, Needs, Sse};
use crate::rounding::Rounding;
use crate::rule::{Normalization, ScaleRule, TensorFactor};

/// Sets the elements that share a block scale.
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

/// Sets the source of the tensor scale, for rules that have one.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TensorScaling {
    /// The amax of the whole tensor.
    #[default]
    Tensor,
    /// The amax of each row, a tensor scale per row ("per-token", TransformerEngine >= 2.16).
    Row,
    /// A given amax, for tensors that share a scale or were calibrated.
    Amax(f32),
    /// A given multiplier, such as one from a checkpoint.
    Multiplier(f32),
}

/// Sets the reaction of the user-facing operations to NaN and infinity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NonFinite {
    /// Return an error. Costs one read-back of the amax from the device.
    #[default]
    Reject,
    /// Quantize as the reference does: a NaN anywhere makes every NVFP4 scale NaN, an infinity maps
    /// to 6 with scale 448.
    FollowReference,
}

/// Sets how a tensor is quantized. The default is NVFP4 with the bits of TransformerEngine.
///
/// ```
/// use burn_fp4_search::{Blocks, Fp4Scheme, ScaleRule, TensorScaling};
///
/// let weights = Fp4Scheme::nvfp4();
/// let mxfp4 = Fp4Scheme::mxfp4().with_rule(ScaleRule::Even).with_block_size(16);
/// let tiles = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
/// assert!(weights.validate().and(mxfp4.validate()).and(tiles.validate()).is_ok());
/// assert!(weights.check_columns(64).is_ok() && weights.check_columns(65).is_err());
///
/// assert_eq!((weights.tile_rows(), tiles.tile_rows()), (1, 16));
/// assert_eq!((weights.largest_code_product(), mxfp4.largest_code_product()), (2688.0, 1.0));
/// assert!(weights.check_tensor_scale().is_ok() && mxfp4.check_tensor_scale().is_err());
/// let tokens = weights.with_tensor_scale(TensorScaling::Row);
/// assert_eq!((weights.tensor_scales(8), tokens.tensor_scales(8)), (1, 8));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[must_use]
pub struct Fp4Scheme {
    /// Rule for turning amax into a scale. Decides the format.
    pub rule: ScaleRule,
    /// Number of elements that share a block scale along the blocked axis, 16 or 32.
    pub block_size: usize,
    /// Shape of blocks: runs or tiles.
    pub blocks: Blocks,
    /// Method that chooses scales and codes.
    pub method: Method,
    /// Rounding of elements to codes.
    pub rounding: Rounding,
    /// Source of the tensor scale.
    pub tensor_scale: TensorScaling,
    /// Reaction to NaN and infinity.
    pub non_finite: NonFinite,
    /// Transform of the values before they are quantized. Activations are transformed alike when
    /// they are multiplied by the codes.
    pub hadamard: Option<Hadamard>,
}

impl Default for Fp4Scheme {
    fn default() -> Self {
        Self::nvfp4()
    }
}

impl Fp4Scheme {
    /// NVFP4 with blocks of 16 and TransformerEngine's current rule.
    pub const fn nvfp4() -> Self {
        Self::of(ScaleRule::Te)
    }

    /// MXFP4 with blocks of 32 and the rule of the OCP specification.
    pub const fn mxfp4() -> Self {
        Self::of(ScaleRule::Floor)
    }

    /// A rule with its format's own block size and no search.
    pub const fn of(rule: ScaleRule) -> Self {
        Self {
            rule,
            block_size: rule.row().format.row().block_size,
            blocks: Blocks::Row,
            method: Method::Amax,
            rounding: Rounding::Nearest,
            tensor_scale: TensorScaling::Tensor,
            non_finite: NonFinite::Reject,
            hadamard: None,
        }
    }

    /// Returns the scheme that `fp4 quantize` uses for a format if nothing is known of the inputs:
    /// in NVFP4 [`Method::SSE`]; in MXFP4 [`Method::Amax`] with the rule
    /// [`Even`](ScaleRule::Even), which loses less than `sse` on both language models of the table
    /// *Methods without data on two language models* in `docs/benchmarks`. In NVFP4 no method is
    /// better than `sse` on both by more than two standard errors.
    ///
    /// ```
    /// use burn_fp4_search::formats::Fp4Format;
    /// use burn_fp4_search::{Fp4Scheme, Method, ScaleRule};
    ///
    /// let scheme = Fp4Scheme::recommended(Fp4Format::MxFp4);
    /// assert_eq!((scheme.method, scheme.rule), (Method::Amax, ScaleRule::Even));
    /// assert_eq!(Fp4Scheme::recommended(Fp4Format::NvFp4).method, Method::SSE);
    /// ```
    pub const fn recommended(format: Fp4Format) -> Self {
        match format {
            Fp4Format::NvFp4 => Self::nvfp4().with_method(Method::SSE),
            Fp4Format::MxFp4 => Self::of(ScaleRule::Even),
        }
    }

    /// Sets the rule. The block size stays the same.
    pub const fn with_rule(mut self, rule: ScaleRule) -> Self {
        self.rule = rule;
        self
    }

    /// Sets the block size, 16 or 32.
    pub const fn with_block_size(mut self, block_size: usize) -> Self {
        self.block_size = block_size;
        self
    }

    /// Sets the shape of blocks.
    pub const fn with_blocks(mut self, blocks: Blocks) -> Self {
        self.blocks = blocks;
        self
    }

    /// Sets the method.
    pub const fn with_method(mut self, method: Method) -> Self {
        self.method = method;
        self
    }

    /// Sets the rounding of elements to codes.
    ///
    /// ```
    /// use burn_fp4_search::{Draw, Fp4Scheme, Rounding};
    ///
    /// let draw = Draw { seed: 1, step: 0 };
    /// let gradients = Fp4Scheme::nvfp4().with_rounding(Rounding::Stochastic(draw));
    /// assert!(gradients.validate().is_ok());
    /// ```
    pub const fn with_rounding(mut self, rounding: Rounding) -> Self {
        self.rounding = rounding;
        self
    }

    /// Sets the source of the tensor scale.
    pub const fn with_tensor_scale(mut self, tensor_scale: TensorScaling) -> Self {
        self.tensor_scale = tensor_scale;
        self
    }

    /// Sets the amax that the tensor scale is made from, which a method has chosen: what is left to
    /// choose are block scales and codes.
    ///
    /// ```
    /// use burn_fp4_search::{Fp4Scheme, Method, Sse, TensorScaling};
    ///
    /// let search = Fp4Scheme::nvfp4().with_method(Method::Sse(Sse::TensorScale));
    /// let chosen = search.with_chosen_amax(5.25);
    /// assert_eq!(chosen.tensor_scale, TensorScaling::Amax(5.25));
    /// assert_eq!(chosen.method, Method::SSE);
    /// ```
    pub const fn with_chosen_amax(self, amax: f32) -> Self {
        let scheme = self.with_tensor_scale(TensorScaling::Amax(amax));
        match self.method {
            Method::Sse(Sse::TensorScale) => scheme.with_method(Method::SSE),
            _ => scheme,
        }
    }

    /// Sets a tensor scale of 1 if the format has one, for files that have no place for another.
    ///
    /// ```
    /// use burn_fp4_search::{Fp4Scheme, quantize};
    ///
    /// let packed = quantize(&[1.5; 16], 1, 16, &Fp4Scheme::nvfp4().without_tensor_scale())?;
    /// assert_eq!(packed.tensor_scale.of_row(0), 1.0);
    /// # Ok::<(), burn_fp4_search::SearchError>(())
    /// ```
    pub const fn without_tensor_scale(self) -> Self {
        match self.rule.row().tensor_scale {
            true => self.with_tensor_scale(TensorScaling::Multiplier(1.0)),
            false => self,
        }
    }

    /// Sets the reaction to NaN and infinity.
    ///
    /// ```
    /// use burn_fp4_search::{Fp4Scheme, NonFinite};
    ///
    /// let scheme = Fp4Scheme::nvfp4().with_non_finite(NonFinite::FollowReference);
    /// assert_eq!(scheme.non_finite, NonFinite::FollowReference); // a NaN is no error
    /// ```
    pub const fn with_non_finite(mut self, non_finite: NonFinite) -> Self {
        self.non_finite = non_finite;
        self
    }

    /// Sets the Hadamard transform of the values before they are quantized.
    ///
    /// Weights are transformed by [`Method::quantize_view`] and by the operations on tensors. The
    /// engines below them quantize the values that they are given, and refuse a scheme with a
    /// transform, so that none is forgotten.
    ///
    /// ```
    /// use burn_fp4_search::formats::Fp4Format;
    /// use burn_fp4_search::host::View;
    /// use burn_fp4_search::{
    ///     Fp4Scheme, Hadamard, Method, Needs, SearchError, Statistics, quantize,
    /// };
    ///
    /// let scheme = Fp4Scheme::mxfp4().with_hadamard(Some(Hadamard::of_size(32)?));
    /// let calibrated = scheme.with_method(Method::Hessian);
    /// assert_eq!((scheme.needs(), calibrated.needs()), (Needs::Nothing, Needs::Gram));
    /// assert_eq!(scheme.columns_multiple(), 32);
    /// assert_eq!(scheme.without_hadamard(), Fp4Scheme::mxfp4());
    /// let (weight, view) = ([1.0; 32], View::rows(1, 32));
    /// let packed = Method::Amax.quantize_view(&weight, view, &scheme, Statistics::None)?;
    /// // All but the first of the transformed values are zero.
    /// assert_eq!((packed.dequantize()[0], packed.dequantize()[1]), (6.0, 0.0));
    /// assert_eq!(quantize(&weight, 1, 32, &scheme), Err(SearchError::Untransformed));
    /// # Ok::<(), SearchError>(())
    /// ```
    pub const fn with_hadamard(mut self, hadamard: Option<Hadamard>) -> Self {
        self.hadamard = hadamard;
        self
    }

    /// Returns the scheme of values that are transformed already.
    pub const fn without_hadamard(self) -> Self {
        self.with_hadamard(None)
    }

    /// Returns the number that has to divide the columns: the larger of the block size and the size
    /// of the transform.
    #[must_use]
    pub fn columns_multiple(&self) -> usize {
        self.hadamard.map_or(self.block_size, |hadamard| self.block_size.max(hadamard.size()))
    }

    /// Returns the statistics that the method needs of the inputs of a layer. A Hadamard transform
    /// of the inputs needs all of `X^T X` if the method needs any.
    #[must_use]
    pub fn needs(&self) -> Needs {
        match self.method.needs() {
            Needs::Nothing => Needs::Nothing,
            _ if self.hadamard.is_some() => Needs::Gram,
            needs => needs,
        }
    }

    /// Returns the format of the rule.
    #[must_use]
    pub const fn format(&self) -> Fp4Format {
        self.rule.row().format
    }

    /// Returns the product of the largest element and the largest block scale, to which the
    /// tensor's amax maps: 2688, or 1536 with [`E4m3Range::E256`]. Powers of two have no tensor
    /// scale, so that their product is 1.
    #[must_use]
    pub fn largest_code_product(&self) -> f32 {
        let range = match self.method {
            Method::FourOverSix { range, .. } => range,
            _ => E4m3Range::E448,
        };
        match self.format().row().scale_grid() {
            ScaleGrid::Float(row) => E2M1.max_value() * range.of(&row),
            ScaleGrid::PowersOfTwo(_) => 1.0,
        }
    }

    /// Number of rows that share a block scale.
    #[must_use]
    pub const fn tile_rows(&self) -> usize {
        match self.blocks {
            Blocks::Row => 1,
            Blocks::Tile16x16 => 16,
        }
    }

    /// Number of tensor scales of a matrix with this many rows: 1, or one per row.
    #[must_use]
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
        if self.rounding != Rounding::Nearest && self.method != Method::Amax {
            return refuse("Rounding::Stochastic", "searches compare what nearest codes leave");
        }
        let weighs_rows = self.method.needs_hessians() || self.method.gptq().is_some();
        if self.blocks == Blocks::Tile16x16 && weighs_rows {
            return refuse("Blocks::Tile16x16", "activations weight the rows of a tile alike");
        }
        if self.blocks == Blocks::Tile16x16 && self.hadamard.is_some() {
            return refuse(
                "Blocks::Tile16x16",
                "a tile spans 16 rows, and a Hadamard transform runs along each",
            );
        }
        if matches!(self.method, Method::FourOverSix { .. })
            && self.rule.row().normalization != Normalization::Reciprocal
        {
            return refuse("method `four-over-six`", "it is defined for TransformerEngine's rules");
        }
        match self.method {
            Method::Gptq(options) => check_gptq(&options),
            Method::Sse(Sse::TensorScale) => self.check_tensor_scale(),
            _ => Ok(()),
        }
    }

    /// Checks that the scheme has one tensor scale, which may be chosen.
    ///
    /// # Errors
    /// [`SearchError::Scheme`] if not.
    pub fn check_tensor_scale(&self) -> Result<(), SearchError> {
        if self.tensor_scale == TensorScaling::Tensor && self.rule.row().tensor_scale {
            return Ok(());
        }
        let choice = "a search for the tensor scale";
        let reason = "the tensor scale is given, one per row, or none";
        Err(SearchError::Scheme { rule: self.rule, choice, reason })
    }

    /// Checks the scheme of values that are quantized as they are, and that its blocks divide an
    /// axis of `cols` elements.
    ///
    /// # Errors
    /// As [`validate`](Self::validate), [`SearchError::Untransformed`], and
    /// [`FormatError::Indivisible`].
    pub fn check_columns(&self, cols: usize) -> Result<(), SearchError> {
        self.validate()?;
        if self.hadamard.is_some() {
            return Err(SearchError::Untransformed);
        }
        if cols.is_multiple_of(self.block_size) {
            Ok(())
        } else {
            Err(FormatError::Indivisible { cols, block_size: self.block_size }.into())
        }
    }
}

/// Names format, blocks, rule and method, and other choices where they are not the default.
///
/// ```
/// use burn_fp4_search::{Blocks, Fp4Scheme};
///
/// let scheme = Fp4Scheme::nvfp4().with_blocks(Blocks::Tile16x16);
/// assert_eq!(scheme.to_string(), "NVFP4, tiles of 16 x 16, rule te, method amax");
/// let scheme = Fp4Scheme::mxfp4();
/// assert_eq!(scheme.to_string(), "MXFP4, blocks of 32, rule floor, method amax");
/// ```
impl fmt::Display for Fp4Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, ", self.format().to_string().to_uppercase())?;
        match self.blocks {
            Blocks::Row => write!(f, "blocks of {}", self.block_size)?,
            Blocks::Tile16x16 => write!(f, "tiles of 16 x 16")?,
        }
        write!(f, ", rule {}, method {}", self.rule, self.method)?;
        match self.tensor_scale {
            TensorScaling::Tensor => {}
            TensorScaling::Row => write!(f, ", a tensor scale for each row")?,
            TensorScaling::Amax(amax) => write!(f, ", tensor scale of amax {amax}")?,
            TensorScaling::Multiplier(multiplier) => write!(f, ", tensor scale {multiplier}")?,
        }
        if self.rounding != Rounding::Nearest {
            write!(f, ", rounded stochastically")?;
        }
        match self.hadamard {
            Some(hadamard) => write!(f, ", Hadamard transform of {}", hadamard.size()),
            None => Ok(()),
        }
    }
}

/// Checks the options of GPTQ.
///
/// # Errors
/// [`SearchError::Damping`] if the damping is negative or not finite, [`SearchError::Correction`]
/// if the correction is not from 0 to 1.
pub(crate) fn check_gptq(options: &Gptq) -> Result<(), SearchError> {
    if !(options.damping.is_finite() && options.damping >= 0.0) {
        return Err(SearchError::Damping { found: options.damping });
    }
    match (0.0..=1.0).contains(&options.correction) {
        true => Ok(()),
        false => Err(SearchError::Correction { found: options.correction }),
    }
}

impl TensorFactor {
    /// Computes the factor for a tensor or row with this amax.
    ///
    /// amax 0 and amaxes so small that the quotient overflows give `encode` = FLT_MAX; an infinite
    /// amax gives 1; NaN gives NaN (TransformerEngine's reference, section "global scales").
    #[must_use]
    pub fn new(scheme: &Fp4Scheme, amax: f32) -> Self {
        if !scheme.rule.row().tensor_scale {
            return Self::ONE;
        }
        let range = scheme.largest_code_product();
        if let TensorScaling::Multiplier(multiplier) = scheme.tensor_scale {
            let encode = saturate(1.0 / multiplier);
            return Self { amax: multiplier * range, encode, decode: multiplier };
        }
        let inverts_amax = scheme.rule.row().inverts_amax;
        let encode = if inverts_amax { range * (1.0 / amax) } else { range / amax };
        let encode = if encode == 0.0 { 1.0 } else { saturate(encode) };
        Self { amax, encode, decode: 1.0 / encode }
    }
}

/// Computes `min(value, FLT_MAX)`, keeping NaN.
fn saturate(value: f32) -> f32 {
    if value > f32::MAX { f32::MAX } else { value }
}

impl TensorScaling {
    /// Returns the tensor scale to store: one, or one per row.
    pub(crate) fn stored(self, factors: &[TensorFactor]) -> TensorScale {
        match self {
            Self::Row => TensorScale::PerRow(factors.iter().map(|f| f.decode).collect()),
            Self::Tensor | Self::Amax(_) | Self::Multiplier(_) => {
                TensorScale::One(factors[0].decode)
            }
        }
    }

    /// Checks a given value.
    ///
    /// # Errors
    /// [`SearchError::TensorScale`] if it is not finite and positive.
    fn validate(self) -> Result<(), SearchError> {
        let (what, found) = match self {
            Self::Tensor | Self::Row => return Ok(()),
            Self::Amax(found) => ("amax", found),
            Self::Multiplier(found) => ("multiplier", found),
        };
        // An all-zero tensor has an amax of 0.
        if found.is_finite() && (found > 0.0 || (found == 0.0 && what == "amax")) {
            Ok(())
        } else {
            Err(SearchError::TensorScale { what, found })
        }
    }
}
