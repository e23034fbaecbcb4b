//! The arithmetic of block scales for a batch of blocks, in loops that the compiler vectorizes.
//!
//! A format is a const generic parameter of every function that searches, so that all constants
//! derived from its row are constants of the compiled loops. `crate::scale_grid` is the definition;
//! the tests compare with it.

use burn_fp4_formats::{Fp4Format, Minifloat, ScaleGrid};

use crate::scale_grid::{
    BlockNormalization, F32_BIAS, F32_MANTISSA_BITS, HALF_IS_AS_GOOD, MARGIN, PowerRounding,
    is_zero, power_of_two, power_of_zeros,
};

/// A function that is compiled for each format.
pub(super) trait ByFormat {
    /// Type of the result.
    type Output;

    /// Runs for the format with this index among [`Fp4Format::ALL`].
    fn run<const FORMAT: usize>(self) -> Self::Output;
}

/// Runs a function for a format.
#[inline(always)]
pub(super) fn by_format<W: ByFormat>(format: Fp4Format, work: W) -> W::Output {
    match format {
        Fp4Format::NvFp4 => work.run::<{ Fp4Format::NvFp4 as usize }>(),
        Fp4Format::MxFp4 => work.run::<{ Fp4Format::MxFp4 as usize }>(),
    }
}

/// Returns the values of all scales of a format, by code.
#[inline(always)]
pub(super) fn scale_values(format: Fp4Format) -> &'static [f32; 256] {
    static VALUES: [[f32; 256]; Fp4Format::ALL.len()] = {
        let mut values = [[0.0; 256]; Fp4Format::ALL.len()];
        let mut format = 0;
        while format < values.len() {
            assert!(Fp4Format::ALL[format] as usize == format, "formats lie in order");
            let mut code = 0;
            while code < 256 {
                values[format][code] = Fp4Format::ALL[format].row().block_scale.decode(code as u8);
                code += 1;
            }
            format += 1;
        }
        values
    };
    &VALUES[format as usize]
}

/// The scales of the format with this index among [`Fp4Format::ALL`].
pub(super) struct Scales<const FORMAT: usize>;

impl<const FORMAT: usize> Scales<FORMAT> {
    const ROW: Minifloat = Fp4Format::ALL[FORMAT].row().block_scale;
    /// Places the scales on the number line.
    pub(super) const GRID: ScaleGrid = {
        let grid = Fp4Format::ALL[FORMAT].row().scale_grid();
        if let ScaleGrid::PowersOfTwo(row) = grid {
            assert!(row.bias == F32_BIAS as i32, "codes are the exponent fields of f32");
        }
        grid
    };

    /// Number of mantissa bits that an f32 has more than a scale.
    const DROPPED: u32 = F32_MANTISSA_BITS - Self::ROW.mantissa_bits;
    /// Number of exponent codes of f32 below the first of a scale.
    const OFFSET: u32 = (F32_BIAS as i32 - Self::ROW.bias) as u32;
    /// The first normal code.
    const FIRST_NORMAL: u32 = 1 << Self::ROW.mantissa_bits;
    /// The value of the first normal code.
    const SMALLEST_NORMAL: f32 = Self::ROW.decode(Self::FIRST_NORMAL as u8);
    /// The value of code 1, and the distance of subnormal scales.
    const STEP: f32 = Self::ROW.decode(1);
    /// The power of two at which neighbouring f32 are one step apart.
    const SUBNORMAL: f32 = Self::STEP * (1 << F32_MANTISSA_BITS) as f32;
    const MAX_CODE: u32 = Self::ROW.max_code() as u32;
    const NAN_CODE: u32 = Self::ROW.nan_code() as u32;
    const MAX_VALUE: f32 = Self::ROW.max_value();
    /// Codes up to this one are the odd and even multiples of the step.
    const LAST_MULTIPLE: u32 = 2 * Self::FIRST_NORMAL - 1;
    /// The smallest code whose double does not exist.
    const NO_DOUBLE: u32 = Self::MAX_CODE + 1 - Self::FIRST_NORMAL;

    /// Normalizes a block; see [`BlockNormalization`].
    #[inline(always)]
    pub(super) fn normalization(amax: f32, encode: f32) -> BlockNormalization {
        BlockNormalization::new(Self::GRID, amax, encode)
    }

    /// Returns true if a scale is the value 0.
    #[inline(always)]
    pub(super) fn is_zero(code: u32) -> bool {
        is_zero(Self::GRID, code)
    }

    /// Rounds a non-negative f32 to the nearest code and its value, ties to even. Saturates at the
    /// largest scale and keeps NaN.
    #[inline(always)]
    pub(super) fn round(exact: f32) -> (u8, f32) {
        let row = match Self::GRID {
            ScaleGrid::Float(row) => row,
            ScaleGrid::PowersOfTwo(row) => {
                let code = row.encode(exact);
                return (code, row.decode(code));
            }
        };
        let is_nan = exact.is_nan();
        let clamped = if exact > Self::MAX_VALUE { Self::MAX_VALUE } else { exact };
        let bits = clamped.to_bits();
        // Just below half of the last place that is kept, plus the bit of that place.
        let half = (1 << (Self::DROPPED - 1)) - 1 + (bits >> Self::DROPPED & 1);
        let rounded = bits.wrapping_add(half) & !((1 << Self::DROPPED) - 1);
        // The last place of the sum is one step.
        let shifted = clamped + Self::SUBNORMAL;
        let small = clamped < Self::SMALLEST_NORMAL;
        let code = if small {
            shifted.to_bits().wrapping_sub(Self::SUBNORMAL.to_bits())
        } else {
            (rounded >> Self::DROPPED).wrapping_sub(Self::OFFSET << row.mantissa_bits)
        };
        let value = if small { shifted - Self::SUBNORMAL } else { f32::from_bits(rounded) };
        (if is_nan { row.nan_code() } else { code as u8 }, if is_nan { exact } else { value })
    }

    /// Returns the code of the power of two for a block with this amax.
    #[inline(always)]
    pub(super) fn power_of_two(amax: f32, rounding: PowerRounding) -> u8 {
        power_of_two(&Self::ROW, amax, rounding)
    }

    /// Returns the value of a code, not NaN, relative to the normalization of a block.
    #[inline(always)]
    pub(super) fn value(code: u32, base: u32) -> f32 {
        match Self::GRID {
            ScaleGrid::Float(_) => {
                let normal = f32::from_bits(
                    (code << Self::DROPPED).wrapping_add(Self::OFFSET << F32_MANTISSA_BITS),
                );
                let is_subnormal = code < Self::FIRST_NORMAL;
                if is_subnormal { code as i32 as f32 * Self::STEP } else { normal }
            }
            ScaleGrid::PowersOfTwo(_) => {
                let exponent = code.wrapping_sub(base).wrapping_add(F32_BIAS);
                f32::from_bits(exponent << F32_MANTISSA_BITS)
            }
        }
    }

    /// Returns the reciprocal of a power of two; for the smallest, 2^-127, the rules take 2^126.
    #[inline(always)]
    pub(super) fn reciprocal_power(code: u32) -> f32 {
        let exponent = 2 * F32_BIAS - code.clamp(1, 2 * F32_BIAS - 1);
        let reciprocal = f32::from_bits(exponent << F32_MANTISSA_BITS);
        if code == Self::NAN_CODE { f32::NAN } else { reciprocal }
    }

    /// Returns the largest code whose value is at most a non-negative f32; -1 if no power of two
    /// is.
    #[inline(always)]
    fn at_most(value: f32, base: u32) -> i32 {
        match Self::GRID {
            ScaleGrid::Float(row) => {
                let normal = (value.to_bits() >> Self::DROPPED)
                    .wrapping_sub(Self::OFFSET << row.mantissa_bits);
                let is_subnormal = value < Self::SMALLEST_NORMAL;
                let code = if is_subnormal { (value * (1.0 / Self::STEP)) as u32 } else { normal };
                code.min(Self::MAX_CODE) as i32
            }
            ScaleGrid::PowersOfTwo(_) => {
                let exponent = (value.to_bits() >> F32_MANTISSA_BITS) as i32;
                (base as i32 + exponent - F32_BIAS as i32).clamp(-1, Self::MAX_CODE as i32)
            }
        }
    }

    /// See [`BlockNormalization::lowest`].
    #[inline(always)]
    pub(super) fn lowest(base: u32) -> u32 {
        BlockNormalization { grid: Self::GRID, factor: 1.0, base, searchable: true }.lowest().into()
    }

    /// See [`BlockNormalization::zeros`].
    #[inline(always)]
    pub(super) fn zeros(base: u32, amax: f32) -> u32 {
        match Self::GRID {
            ScaleGrid::Float(_) => (Self::at_most(amax * 4.0, base) as u32 + 1).min(Self::MAX_CODE),
            ScaleGrid::PowersOfTwo(row) => power_of_zeros(&row, base),
        }
    }

    /// Returns the scales that an exact search by squared error has to try, for a block with the
    /// normalized amax `amax`. Beyond `amax / scale = crest` twice the scale is better.
    #[inline(always)]
    pub(super) fn window(base: u32, amax: f32, crest: f32) -> Window {
        let above = Self::at_most(amax / crest * (1.0 - MARGIN), base);
        let upto = Self::at_most(amax / HALF_IS_AS_GOOD * (1.0 + MARGIN), base);
        match Self::GRID {
            ScaleGrid::Float(_) => {
                let steps = (amax * (4.0 / Self::STEP)).min(Self::LAST_MULTIPLE as f32) as u32;
                Window {
                    high: upto as u32,
                    low: (above as u32 + 1).min(Self::NO_DOUBLE),
                    odd: (steps.max(1) - 1) | 1,
                }
            }
            ScaleGrid::PowersOfTwo(_) => {
                let low = ((above + 1) as u32).max(Self::lowest(base));
                Window { high: upto.max(0) as u32, low, odd: 0 }
            }
        }
    }
}

/// The scales that an exact search has to try, from the largest down; see `reference/sse.rs`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Window {
    /// The first to try, unless `odd` is larger.
    pub(super) high: u32,
    /// The last to try.
    pub(super) low: u32,
    /// Before the others, the odd codes from this one down to `high`.
    pub(super) odd: u32,
}

impl Window {
    /// Returns the first scale to try.
    #[inline(always)]
    pub(super) fn first(&self) -> u32 {
        self.high.max(self.odd)
    }

    /// Returns the scale to try after another, in a window up to `high`; less than `low` at the
    /// end. Wraps below 0.
    #[inline(always)]
    pub(super) fn next(scale: u32, high: u32) -> u32 {
        let step = if scale > high + 1 { 2 } else { 1 };
        scale.wrapping_sub(step)
    }
}

#[cfg(test)]
mod tests {
    use super::super::search::sse::crest;
    use super::*;

    type Nv = Scales<{ Fp4Format::NvFp4 as usize }>;
    type Mx = Scales<{ Fp4Format::MxFp4 as usize }>;

    #[test]
    fn constants_of_e4m3() {
        assert_eq!((Nv::DROPPED, Nv::OFFSET, Nv::SUBNORMAL), (20, 120, 16384.0));
        assert_eq!((Nv::STEP, Nv::SMALLEST_NORMAL), (1.0 / 512.0, 1.0 / 64.0));
        assert_eq!((Nv::LAST_MULTIPLE, Nv::NO_DOUBLE), (15, 0x77));
    }

    #[test]
    fn rounds_as_the_format_says() {
        let row = Nv::ROW;
        let midpoints = (0..row.max_code())
            .map(|code| (row.decode(code) as f64 + row.decode(code + 1) as f64) as f32 / 2.0);
        let exact = (0..=row.max_code()).map(|code| row.decode(code));
        let specials = [0.0, f32::MIN_POSITIVE, 1e-45, 448.0, 464.0, f32::MAX, f32::INFINITY];
        for value in midpoints.chain(exact).chain(specials) {
            for exact in [value.next_down(), value, value.next_up()] {
                if exact >= 0.0 {
                    let code = row.encode(exact);
                    assert_eq!(Nv::round(exact), (code, row.decode(code)), "{exact:e}");
                    let code = Mx::ROW.encode(exact);
                    assert_eq!(Mx::round(exact), (code, Mx::ROW.decode(code)), "{exact:e}");
                }
            }
        }
        let (code, value) = Nv::round(f32::NAN);
        assert!(code == 0x7F && value.is_nan());
    }

    #[test]
    fn values_and_limits_are_those_of_the_reference() {
        fn check<const FORMAT: usize>() {
            for step in 0..4000 {
                let amax = 2f32.powf(-12.0 + step as f32 / 150.0);
                let normalization = Scales::<FORMAT>::normalization(amax, 1.0);
                let amax = amax * normalization.factor;
                let zeros = Scales::<FORMAT>::zeros(normalization.base, amax);
                assert_eq!(zeros, u32::from(normalization.zeros(amax)), "{amax}");
                for scale in normalization.scales() {
                    let value = Scales::<FORMAT>::value(scale.into(), normalization.base);
                    assert_eq!(value, normalization.value(scale));
                }
            }
        }
        check::<{ Fp4Format::NvFp4 as usize }>();
        check::<{ Fp4Format::MxFp4 as usize }>();
    }

    #[test]
    fn codes_at_most() {
        for code in 0..126u8 {
            let [low, high] = [code, code + 1].map(|code| Nv::ROW.decode(code));
            assert_eq!(Nv::at_most(low, 0), code.into());
            assert_eq!(Nv::at_most(high.next_down(), 0), code.into());
        }
        assert_eq!(Nv::at_most(f32::MAX, 0), 126);
    }

    fn tried(window: Window) -> Vec<u32> {
        let mut tried = Vec::new();
        let mut scale = window.first();
        while scale >= window.low && scale <= 254 {
            tried.push(scale);
            scale = Window::next(scale, window.high);
        }
        tried
    }

    #[test]
    fn windows_are_small_and_hold_the_scales_that_may_be_best() {
        for (block_size, most) in [(16u8, 10), (32, 12)] {
            let crest = crest(1.0, block_size.into());
            for step in 0..40_000 {
                let amax = 2f32.powf(-13.0 + step as f32 / 1600.0);
                let tried = tried(Nv::window(0, amax, crest));
                assert!(tried.len() <= most, "{amax}: {tried:?}");
                for code in 1..=126u8 {
                    let scale = Nv::ROW.decode(code);
                    let odd_multiple = code <= 15 && code % 2 == 1 && scale <= 4.0 * amax;
                    let normal = scale * crest > amax || scale > 224.0;
                    if normal && (scale * 3.5 <= amax || odd_multiple) {
                        assert!(tried.contains(&code.into()), "{amax}: {code} of {tried:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn windows_of_powers_of_two() {
        let tried = |amax, n: u8| tried(Mx::window(100, amax, crest(1.0, n.into())));
        assert_eq!(tried(4.0, 16), [100]);
        assert_eq!(tried(7.5, 16), [101, 100]);
        assert_eq!(tried(4.0, 32), [100, 99]);
        assert_eq!(tried(5.0, 32), [100]);
    }
}
