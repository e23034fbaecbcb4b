//! The block scales of a format for searches, derived from the format's row.
//!
//! A search normalizes a block (`BlockNormalization`): it multiplies the elements by a factor that
//! gives the scales the values of the format's table (a float grid) or `2^(code - base)` (powers of
//! two). `host/scale_grid.rs` computes the same faster; the constants are shared by every engine.

use core::ops::RangeInclusive;

use burn_fp4_formats::{E2M1, Minifloat, ScaleGrid};

/// Exponent field of 1.0 in an f32.
pub const F32_BIAS: u32 = 127;

/// Width of the mantissa field of an f32.
pub const F32_MANTISSA_BITS: u32 = f32::MANTISSA_DIGITS - 1;

/// One sixth in f32, 0x3E2AAAAB.
pub const SIXTH: f32 = 1.0 / E2M1.max_value();

/// Binade of the largest element: floor(log2 6).
pub const ELEMENT_BINADE: u32 = (1 << E2M1.exponent_bits) - 1 - E2M1.bias as u32;

/// Number of powers of two above the base from which on every element of a block rounds to 0.
pub const POWERS_ABOVE: u32 = 5;

/// Number of powers of two below the base from which on 6 times a scale vanishes next to the amax,
/// in f32.
pub const POWERS_BELOW: u32 = 30;

/// Largest amax over scale for which half the scale has no larger squared error; see
/// `reference/sse.rs`.
pub const HALF_IS_AS_GOOD: f32 = 3.5;

/// Relative margin by which the limits of the scales to try are moved outward. Rounding moves them
/// by less.
pub const MARGIN: f32 = 1.0 / 1024.0;

/// Rounds the amax of a block to a power of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PowerRounding {
    /// 2^(floor(log2 amax) - 2).
    Floor,
    /// [`Floor`](Self::Floor) of amax rounded to one mantissa bit.
    Even,
    /// 2^ceil(log2(amax / 6)).
    RoundUp,
    /// 2^(ceil(log2 amax) - 2).
    Ceil,
}

/// Returns the code of the power of two for a block with this amax; NaN if the amax is not finite.
/// It works on the bits of amax, exact where a logarithm would not be.
///
/// The bias of `row` is that of f32, so that a code is the exponent field of its value.
#[inline(always)]
pub(crate) fn power_of_two(row: &Minifloat, amax: f32, rounding: PowerRounding) -> u8 {
    const MANTISSA: u32 = (1 << F32_MANTISSA_BITS) - 1;
    debug_assert_eq!(row.bias, F32_BIAS as i32);
    if !amax.is_finite() {
        return row.nan_code();
    }
    let field = |bits: u32| bits >> F32_MANTISSA_BITS;
    let bits = amax.to_bits();
    let exponent = match rounding {
        PowerRounding::Floor => field(bits),
        PowerRounding::Even => field(bits + (1 << (F32_MANTISSA_BITS - 2))),
        PowerRounding::Ceil => field(bits) + u32::from(bits & MANTISSA != 0),
        PowerRounding::RoundUp => {
            // A subnormal sixth lies below 2^-126: it rounds to 2^-127 or up to 2^-126.
            let sixth = (amax * SIXTH).to_bits();
            let (exponent, mantissa) = (field(sixth), sixth & MANTISSA);
            let up =
                if exponent == 0 { mantissa > 1 << (F32_MANTISSA_BITS - 1) } else { mantissa != 0 };
            return (exponent + u32::from(up)).min(row.max_code().into()) as u8;
        }
    };
    exponent.saturating_sub(ELEMENT_BINADE).min(row.max_code().into()) as u8
}

/// Normalizes a block for a search: elements are multiplied by `factor`, so that scales have the
/// values of the format's table, or 2^(code - base).
///
/// Powers of two, and tensor factors, bring every block into a range whose squares f32 holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct BlockNormalization {
    pub(crate) grid: ScaleGrid,
    pub(crate) factor: f32,
    pub(crate) base: u32,
    /// True if a search may improve the block: not for zeros, infinities and NaN, nor at the ends
    /// of f32, where scales overflow or have no half (tensors up to 1e-32; MXFP4 blocks below
    /// 2^-123 and from 2^127 on). Such blocks keep the rule's scale.
    pub(crate) searchable: bool,
}

impl BlockNormalization {
    /// Normalizes a block with this amax, in a tensor whose block scales are multiplied by
    /// `encode`.
    #[inline(always)]
    pub(crate) fn new(grid: ScaleGrid, amax: f32, encode: f32) -> Self {
        let (factor, base, in_range) = match grid {
            ScaleGrid::Float(row) => (encode, 0, encode <= largest_factor(&row)),
            ScaleGrid::PowersOfTwo(row) => {
                let base = u32::from(power_of_two(&row, amax, PowerRounding::Floor));
                let exponent = 2 * F32_BIAS - base.min(2 * F32_BIAS - 1);
                let ends = 2..u32::from(row.max_code()) - 2;
                (f32::from_bits(exponent << F32_MANTISSA_BITS), base, ends.contains(&base))
            }
        };
        let searchable = in_range & (amax > 0.0) & (amax * factor).is_finite();
        Self { grid, factor, base, searchable }
    }

    /// Returns the smallest scale that searches try. Below, all elements saturate, and the error is
    /// the same in f32.
    #[inline(always)]
    pub(crate) fn lowest(&self) -> u8 {
        match self.grid {
            // Code 0 is the value 0.
            ScaleGrid::Float(_) => 1,
            ScaleGrid::PowersOfTwo(_) => self.base.saturating_sub(POWERS_BELOW) as u8,
        }
    }

    /// Returns every scale, ascending: floats without 0, or powers of two from [`lowest`] to the
    /// smallest at which all elements round to 0.
    ///
    /// [`lowest`]: Self::lowest
    pub(crate) fn scales(&self) -> RangeInclusive<u8> {
        match self.grid {
            ScaleGrid::Float(row) => self.lowest()..=row.max_code(),
            ScaleGrid::PowersOfTwo(row) => self.lowest()..=power_of_zeros(&row, self.base) as u8,
        }
    }

    /// Returns the smallest scale at which every element of a block rounds to 0, as it does at any
    /// larger one. `amax` is normalized.
    pub(crate) fn zeros(&self, amax: f32) -> u8 {
        match self.grid {
            ScaleGrid::Float(row) => {
                let beyond = |scale: &u8| row.decode(*scale) > 4.0 * amax;
                self.scales().find(beyond).unwrap_or(row.max_code())
            }
            ScaleGrid::PowersOfTwo(row) => power_of_zeros(&row, self.base) as u8,
        }
    }

    /// Returns the value of a scale, relative to the normalization.
    #[inline(always)]
    pub(crate) fn value(&self, scale: u8) -> f32 {
        match self.grid {
            ScaleGrid::Float(row) => row.decode(scale),
            ScaleGrid::PowersOfTwo(_) => {
                let exponent = u32::from(scale).wrapping_sub(self.base).wrapping_add(F32_BIAS);
                f32::from_bits(exponent << F32_MANTISSA_BITS)
            }
        }
    }

    /// Returns the scale, not 0, whose value is nearest to a positive one.
    pub(crate) fn nearest(&self, value: f32) -> u8 {
        match self.grid {
            ScaleGrid::Float(row) => row.encode(value).max(1),
            ScaleGrid::PowersOfTwo(row) => {
                let below = (value.to_bits() >> F32_MANTISSA_BITS) as i32;
                // The middle between powers of two is 1.5.
                let up = (value.to_bits() >> (F32_MANTISSA_BITS - 1) & 1) as i32;
                let code = self.base as i32 + below + up - F32_BIAS as i32;
                code.clamp(0, row.max_code().into()) as u8
            }
        }
    }
}

/// Returns true if a scale is the value 0, which no search chooses.
#[inline(always)]
pub(crate) fn is_zero(grid: ScaleGrid, scale: u32) -> bool {
    match grid {
        ScaleGrid::Float(_) => scale == 0,
        ScaleGrid::PowersOfTwo(_) => false,
    }
}

/// Returns the smallest power of two at which every element of a block rounds to 0.
#[inline(always)]
pub(crate) fn power_of_zeros(row: &Minifloat, base: u32) -> u32 {
    (base + POWERS_ABOVE).min(row.max_code().into())
}

/// The factor beyond which the smallest scale's multiplier overflows: 2^127 times the smallest
/// scale.
#[inline(always)]
const fn largest_factor(row: &Minifloat) -> f32 {
    let smallest = 1 - row.bias - row.mantissa_bits as i32;
    f32::from_bits(((2 * F32_BIAS as i32 + smallest) as u32) << F32_MANTISSA_BITS)
}

#[cfg(test)]
mod tests {
    use burn_fp4_formats::{E4M3, Fp4Format};

    use super::*;

    #[test]
    fn constants_of_e4m3() {
        assert_eq!(largest_factor(&E4M3), 2f32.powi(118));
        assert_eq!((SIXTH.to_bits(), ELEMENT_BINADE), (0x3E2A_AAAB, 2));
    }

    #[test]
    fn nearest_and_first_of_zeros_are_those_of_all_scales() {
        for format in Fp4Format::ALL {
            let grid = format.row().scale_grid();
            for step in 0..4000 {
                let amax = 2f32.powf(-6.0 + step as f32 / 500.0);
                let normalization = BlockNormalization::new(grid, amax, 1.0);
                let amax = amax * normalization.factor;
                let distance = |scale: u8| (normalization.value(scale) - amax / 6.0).abs();
                let nearest = normalization.nearest(amax / 6.0);
                assert!(normalization.scales().all(|scale| distance(nearest) <= distance(scale)));
                let zeros = normalization.zeros(amax);
                assert!(amax <= 0.25 * normalization.value(zeros));
            }
        }
    }
}
