//! The published rules for turning the amax of a block into its scale, and an element into a code.
//!
//! All arithmetic is f32, every operation rounded on its own, subnormals kept. A NaN passes through
//! every comparison below, which is what the references' `min`, `max` and `clamp` do with it.

use core::fmt;
use core::str::FromStr;

use burn_fp4_formats::{E2M1, E4M3, E8M0, Fp4Format};
use serde::{Deserialize, Serialize};

use crate::{SearchError, TensorFactor};

/// How the amax of a block becomes its scale. A rule belongs to one format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScaleRule {
    /// TransformerEngine 2.14 and later, `NVFP4QuantizerRef`: the scale is `amax * (S / 6)` with the
    /// sixth rounded to f32 first.
    Te,
    /// TransformerEngine up to 2.13: the scale is `(amax / 6) * S`. Differs from [`Te`](Self::Te)
    /// where `448 * amax / tensor amax` is exactly between two scales, as bf16 data can be.
    TeDivision,
    /// The widespread torch recipe `s = e4m3(amax / 6 * S)`, elements times `S / max(s, 1e-12)`.
    /// Keeps the sign of zero.
    Gist,
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

/// The facts of a [`ScaleRule`].
#[derive(Debug, PartialEq, Eq)]
pub struct RuleRow {
    /// Name in reports and on command lines.
    pub name: &'static str,
    /// The format the rule is for.
    pub format: Fp4Format,
    /// Whether a tensor scale takes part.
    pub tensor_scale: bool,
    /// Whether an element that is or becomes -0 keeps its sign (code 8), as the references differ.
    pub keeps_negative_zero: bool,
}

/// One sixth in f32, 0x3E2AAAAB.
pub(crate) const SIXTH: f32 = 1.0 / 6.0;

/// What the torch recipe and qwantize do not let a divisor fall below.
pub(crate) const GIST_SMALLEST_SCALE: f32 = 1e-12;

impl ScaleRule {
    /// Every rule.
    pub const ALL: [Self; 8] = [
        Self::Te,
        Self::TeDivision,
        Self::Gist,
        Self::NoTensorScale,
        Self::Floor,
        Self::Even,
        Self::RoundUp,
        Self::Ceil,
    ];

    /// The facts of the rule.
    pub const fn row(self) -> &'static RuleRow {
        macro_rules! row {
            ($name:literal, $format:ident, $tensor_scale:literal, $keeps_negative_zero:literal) => {
                &RuleRow {
                    name: $name,
                    format: Fp4Format::$format,
                    tensor_scale: $tensor_scale,
                    keeps_negative_zero: $keeps_negative_zero,
                }
            };
        }
        match self {
            Self::Te => row!("te", NvFp4, true, false),
            Self::TeDivision => row!("te-division", NvFp4, true, false),
            Self::Gist => row!("gist", NvFp4, true, true),
            Self::NoTensorScale => row!("no-tensor-scale", NvFp4, false, false),
            Self::Floor => row!("floor", MxFp4, false, true),
            Self::Even => row!("even", MxFp4, false, true),
            Self::RoundUp => row!("round-up", MxFp4, false, true),
            Self::Ceil => row!("ceil", MxFp4, false, true),
        }
    }

    /// The code of the scale for a block with this amax.
    pub fn block_scale(self, amax: f32, factor: TensorFactor) -> u8 {
        match self {
            Self::Te => saturating_e4m3(amax * (factor.encode * SIXTH)),
            Self::TeDivision | Self::Gist => saturating_e4m3((amax / 6.0) * factor.encode),
            Self::NoTensorScale => {
                let scale = amax / 6.0;
                saturating_e4m3(if scale < GIST_SMALLEST_SCALE {
                    GIST_SMALLEST_SCALE
                } else {
                    scale
                })
            }
            Self::Floor | Self::Even | Self::RoundUp | Self::Ceil => self.power_of_two_scale(amax),
        }
    }

    /// MXFP4's rules, on the bits of amax: exact where a logarithm would not be.
    fn power_of_two_scale(self, amax: f32) -> u8 {
        const MANTISSA: u32 = 0x7F_FFFF;
        if !amax.is_finite() {
            return 0xFF;
        }
        let bits = amax.to_bits();
        let exponent = match self {
            Self::Even => (bits + (1 << 21)) >> 23,
            Self::Ceil => (bits >> 23) + (bits & MANTISSA != 0) as u32,
            Self::RoundUp => {
                // A subnormal sixth lies below 2^-126: it rounds to 2^-127 or up to 2^-126.
                let sixth = (amax * SIXTH).to_bits();
                let (exponent, mantissa) = (sixth >> 23, sixth & MANTISSA);
                let up = if exponent == 0 { mantissa > 0x40_0000 } else { mantissa != 0 };
                return (exponent + up as u32).min(E8M0.max_code() as u32) as u8;
            }
            _ => bits >> 23,
        };
        exponent.saturating_sub(2).min(E8M0.max_code() as u32) as u8
    }

    /// What an element is multiplied with before it is rounded to E2M1.
    ///
    /// [`NoTensorScale`](Self::NoTensorScale) divides instead; see [`code`](Self::code).
    pub fn multiplier(self, block_scale: u8, factor: TensorFactor) -> f32 {
        match self {
            Self::Te | Self::TeDivision => {
                // A scale of 0 gives FLT_MAX: codes of +-6 that dequantize to 0.
                let multiplier = 1.0 / (E4M3.decode(block_scale) * factor.decode);
                if multiplier > f32::MAX { f32::MAX } else { multiplier }
            }
            Self::Gist => {
                let scale = E4M3.decode(block_scale);
                let scale = if scale < GIST_SMALLEST_SCALE { GIST_SMALLEST_SCALE } else { scale };
                factor.encode / scale
            }
            Self::NoTensorScale => 1.0,
            // Where the scale is 2^-127, torchao's round-up multiplies by 1, which leaves codes of 0;
            // the other rules divide by no less than the smallest normal f32, 2^-126.
            Self::RoundUp if block_scale == 0 => 1.0,
            Self::Floor | Self::Even | Self::RoundUp | Self::Ceil => {
                1.0 / E8M0.decode(block_scale.max(1))
            }
        }
    }

    /// The code of an element.
    pub fn code(self, element: f32, block_scale: u8, multiplier: f32) -> u8 {
        E2M1.encode(self.normalized(element, block_scale, multiplier))
    }

    /// What an element is rounded from: -0 only if the rule keeps it.
    pub(crate) fn normalized(self, element: f32, block_scale: u8, multiplier: f32) -> f32 {
        let normalized = match self {
            Self::NoTensorScale => element / E4M3.decode(block_scale),
            _ => element * multiplier,
        };
        if self.row().keeps_negative_zero || normalized < 0.0 {
            normalized
        } else {
            normalized.abs()
        }
    }
}

/// The E4M3 code nearest to a non-negative value, 448 at most.
pub(crate) fn saturating_e4m3(scale: f32) -> u8 {
    E4M3.encode(scale)
}

impl fmt::Display for ScaleRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.row().name)
    }
}

impl FromStr for ScaleRule {
    type Err = SearchError;

    fn from_str(name: &str) -> Result<Self, SearchError> {
        Self::ALL
            .into_iter()
            .find(|rule| rule.row().name == name)
            .ok_or_else(|| SearchError::UnknownRule(name.to_owned()))
    }
}
