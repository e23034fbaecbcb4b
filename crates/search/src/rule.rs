//! The published rules for turning the amax of a block into its scale, and an element into a code.
//!
//! A rule is a row: a format, how the scale is computed ([`ScaleForm`]) and how an element is
//! normalized before it is rounded ([`Normalization`]). Engines match on these, not on the names of
//! rules.
//!
//! All arithmetic is f32, every operation rounded on its own, subnormals kept. A NaN passes through
//! every comparison below, as it does through `min`, `max` and `clamp` of the references.

use burn_fp4_formats::{E2M1, Fp4Format};
use serde::{Deserialize, Serialize};

use crate::scale_grid::{PowerRounding, SIXTH, power_of_two};

/// Turns the amax of a block into its scale. A rule belongs to one format.
///
/// ```
/// use burn_fp4_search::formats::{E2M1, Fp4Format};
/// use burn_fp4_search::{ScaleRule, TensorFactor};
///
/// let rule = ScaleRule::of_format(Fp4Format::MxFp4);
/// assert_eq!(rule.row().name, "floor");
/// // An amax of 12 has the scale 2^(3 - 2), which is code 128.
/// let scale = rule.block_scale(12.0, TensorFactor::ONE);
/// let multiplier = rule.multiplier(scale, TensorFactor::ONE);
/// assert_eq!((scale, multiplier), (128, 0.5));
/// assert_eq!(E2M1.decode(rule.code(12.0, scale, multiplier)), 6.0);
/// assert!(ScaleRule::NoTensorScale.row().normalization.divides());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleRule {
    /// TransformerEngine 2.14 and later, `NVFP4QuantizerRef`: the scale is `amax * (S / 6)` with
    /// the sixth rounded to f32 first.
    Te,
    /// TransformerEngine up to 2.13: the scale is `(amax / 6) * S`. Differs from [`Te`](Self::Te)
    /// where `448 * amax / tensor amax` is exactly between two scales, as bf16 data can be.
    TeDivision,
    /// The widespread torch recipe `s = e4m3(amax / 6 * S)`, elements times `S / max(s, 1e-12)`.
    /// Keeps the sign of zero. Formerly named `gist`.
    #[serde(alias = "gist")]
    TorchRecipe,
    /// No tensor scale: `s = e4m3(max(amax / 6, 1e-12))`, elements divided by it (qwantize's
    /// `nvfp4_naive`, but for ties, which here go to the even code).
    NoTensorScale,
    /// OCP MX 1.0: 2^(floor(log2 amax) - 2). The largest elements may saturate.
    Floor,
    /// amax rounded to one mantissa bit before [`Floor`](Self::Floor), so 1.75 and above go up
    /// (torchao `EVEN`, compressed-tensors, Quark).
    Even,
    /// 2^ceil(log2(amax / 6)), the smallest power of two that saturates nothing (torchao `RCEIL`,
    /// cuBLAS, ModelOpt).
    RoundUp,
    /// 2^(ceil(log2 amax) - 2) (torchao `CEIL`).
    Ceil,
}

/// Defines `ALL` and `row` of an enum from a table, a line for each variant. The compiler refuses a
/// variant without a row.
macro_rules! rows {
    ($(#[$all:meta])* $name:ident: $row:ident { $($variant:ident => $value:expr,)* }) => {
        impl $name {
            $(#[$all])*
            pub const ALL: [Self; [$(stringify!($variant)),*].len()] = [$(Self::$variant),*];

            /// Returns the facts of the variant.
            pub const fn row(self) -> &'static $row {
                match self {
                    $(Self::$variant => const { &$value },)*
                }
            }
        }
    };
}

rows! {
    /// Every rule.
    ScaleRule: RuleRow {
        Te => TE,
        TeDivision => RuleRow { name: "te-division", scale: ScaleForm::DividedBySix, ..TE },
        TorchRecipe => RuleRow {
            name: "torch-recipe",
            former_name: Some("gist"),
            inverts_amax: true,
            scale: ScaleForm::DividedBySix,
            normalization: Normalization::EncodeOverScale,
            keeps_negative_zero: true,
            ..TE
        },
        NoTensorScale => RuleRow {
            name: "no-tensor-scale",
            tensor_scale: false,
            scale: ScaleForm::WithoutTensorScale,
            normalization: Normalization::Division,
            ..TE
        },
        Floor => power("floor", PowerRounding::Floor, Normalization::PowerReciprocal),
        Even => power("even", PowerRounding::Even, Normalization::PowerReciprocal),
        RoundUp => power("round-up", PowerRounding::RoundUp, Normalization::PowerReciprocalOrOne),
        Ceil => power("ceil", PowerRounding::Ceil, Normalization::PowerReciprocal),
    }
}

/// The row of [`ScaleRule::Te`], from which the other rules of NVFP4 differ.
const TE: RuleRow = RuleRow {
    name: "te",
    former_name: None,
    format: Fp4Format::NvFp4,
    tensor_scale: true,
    inverts_amax: false,
    scale: ScaleForm::TimesSixth,
    normalization: Normalization::Reciprocal,
    keeps_negative_zero: false,
};

/// Returns the row of a rule of MXFP4.
const fn power(
    name: &'static str,
    rounding: PowerRounding,
    normalization: Normalization,
) -> RuleRow {
    RuleRow {
        name,
        former_name: None,
        format: Fp4Format::MxFp4,
        tensor_scale: false,
        inverts_amax: false,
        scale: ScaleForm::PowerOfTwo(rounding),
        normalization,
        keeps_negative_zero: true,
    }
}

/// Holds the tensor scale as the two factors that the rules use, with the amax it came from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TensorFactor {
    /// Largest magnitude that the factor was made for.
    pub amax: f32,
    /// Multiplier of block scales before they are rounded ("S_enc").
    pub encode: f32,
    /// Multiplier of dequantization: the stored tensor scale ("S_dec").
    pub decode: f32,
}

impl TensorFactor {
    /// The factor of a tensor without a tensor scale.
    pub const ONE: Self = Self { amax: 1.0, encode: 1.0, decode: 1.0 };
}

/// The facts of a [`ScaleRule`].
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RuleRow {
    /// Name in reports, in files and on command lines.
    pub name: &'static str,
    /// Former name, still read from files and command lines.
    pub former_name: Option<&'static str>,
    /// The format that the rule is for.
    pub format: Fp4Format,
    /// True if the rule has a tensor scale.
    pub tensor_scale: bool,
    /// True if `S` is `range * (1 / amax)`, rounded twice, instead of `range / amax`.
    pub inverts_amax: bool,
    /// Turns the amax of a block into its scale.
    pub scale: ScaleForm,
    /// Normalizes an element before it is rounded.
    pub normalization: Normalization,
    /// True if an element that is or becomes -0 keeps its sign (code 8); the references differ.
    pub keeps_negative_zero: bool,
}

/// The expression that is rounded to the nearest block scale, or the rounding of amax to a power of
/// two. `S` is [`TensorFactor::encode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleForm {
    /// `amax * (S * (1 / 6))`.
    TimesSixth,
    /// `(amax / 6) * S`.
    DividedBySix,
    /// `max(amax / 6, 1e-12)`, without a tensor scale.
    WithoutTensorScale,
    /// A power of two, without a tensor scale.
    PowerOfTwo(PowerRounding),
}

/// Normalizes an element before it is rounded to E2M1, given the value `s` of its block scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Normalization {
    /// `element * min(1 / (s * tensor scale), FLT_MAX)`: with a scale of 0, codes of +-6 that
    /// dequantize to 0.
    Reciprocal,
    /// `element * (S / max(s, 1e-12))`.
    EncodeOverScale,
    /// `element / s`.
    Division,
    /// `element * (1 / s)` for a power of two, `s` no less than the smallest normal f32, 2^-126.
    PowerReciprocal,
    /// [`PowerReciprocal`](Self::PowerReciprocal), but times 1 where the scale is 2^-127, which
    /// leaves codes of 0 (torchao's round-up).
    PowerReciprocalOrOne,
}

impl Normalization {
    /// Returns true if elements are divided by the scale instead of multiplied.
    #[must_use]
    pub const fn divides(self) -> bool {
        matches!(self, Self::Division)
    }
}

impl ScaleRule {
    /// The lower bound of divisors in the torch recipe and in qwantize.
    pub const SMALLEST_DIVISOR: f32 = 1e-12;

    /// Returns the default rule of a format, the first of its rules.
    #[must_use]
    pub fn of_format(format: Fp4Format) -> Self {
        let of_format = |rule: &Self| rule.row().format == format;
        Self::ALL.into_iter().find(of_format).expect("every format has a rule")
    }

    /// Returns the code of the scale for a block with this amax: the nearest scale, or a power of
    /// two, clamped to the largest.
    #[must_use]
    pub fn block_scale(self, amax: f32, factor: TensorFactor) -> u8 {
        let row = &self.row().format.row().block_scale;
        match self.row().scale {
            ScaleForm::TimesSixth => row.encode(amax * (factor.encode * SIXTH)),
            ScaleForm::DividedBySix => row.encode((amax / 6.0) * factor.encode),
            ScaleForm::WithoutTensorScale => row.encode(at_least_smallest(amax / 6.0)),
            ScaleForm::PowerOfTwo(rounding) => power_of_two(row, amax, rounding),
        }
    }

    /// Returns the multiplier of elements before they are rounded to E2M1; 1 where they are divided
    /// instead ([`Normalization::Division`]).
    #[must_use]
    pub fn multiplier(self, block_scale: u8, factor: TensorFactor) -> f32 {
        let decode = |code| self.row().format.row().block_scale.decode(code);
        match self.row().normalization {
            Normalization::Reciprocal => reciprocal(decode(block_scale), factor.decode),
            Normalization::EncodeOverScale => {
                factor.encode / at_least_smallest(decode(block_scale))
            }
            Normalization::Division => 1.0,
            Normalization::PowerReciprocalOrOne if block_scale == 0 => 1.0,
            Normalization::PowerReciprocal | Normalization::PowerReciprocalOrOne => {
                1.0 / decode(block_scale.max(1))
            }
        }
    }

    /// Returns the code of an element.
    #[must_use]
    pub fn code(self, element: f32, block_scale: u8, multiplier: f32) -> u8 {
        E2M1.encode(self.normalized(element, block_scale, multiplier))
    }

    /// Normalizes an element for rounding: -0 only if the rule keeps it.
    pub(crate) fn normalized(self, element: f32, block_scale: u8, multiplier: f32) -> f32 {
        let normalized = if self.row().normalization.divides() {
            element / self.row().format.row().block_scale.decode(block_scale)
        } else {
            element * multiplier
        };
        if self.row().keeps_negative_zero || normalized < 0.0 {
            normalized
        } else {
            normalized.abs()
        }
    }
}

/// Computes `min(1 / (scale * tensor_scale), FLT_MAX)`, keeping NaN.
#[inline(always)]
pub(crate) fn reciprocal(scale: f32, tensor_scale: f32) -> f32 {
    let multiplier = 1.0 / (scale * tensor_scale);
    if multiplier > f32::MAX { f32::MAX } else { multiplier }
}

/// Computes `max(scale, 1e-12)`, keeping NaN.
#[inline(always)]
pub(crate) fn at_least_smallest(scale: f32) -> f32 {
    let smallest = ScaleRule::SMALLEST_DIVISOR;
    if scale < smallest { smallest } else { scale }
}
