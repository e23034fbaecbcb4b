//! [`Minifloat`]: a number format of at most eight bits as a row of facts.

/// Tells which codes of a [`Minifloat`] are NaN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nan {
    /// Every code is a finite number (E2M1).
    None,
    /// The codes whose exponent and mantissa bits are all set are NaN; there is no infinity
    /// (E4M3 "fn", E8M0).
    AllOnes,
}

/// The facts of a small floating-point format.
///
/// A code holds, from the top: a sign bit if `signed`, `exponent_bits`, `mantissa_bits`.
///
/// ```
/// use burn_fp4_formats::{E2M1, E4M3, E8M0, power_of_two};
///
/// assert_eq!(E2M1.decode(0b1101), -3.0);
/// assert_eq!(E2M1.encode(2.5), E2M1.encode(2.0), "a tie goes to the even code");
/// assert_eq!(E4M3.max_value(), 448.0);
/// assert_eq!((E4M3.max_code(), E4M3.nan_code(), E4M3.sign_bit()), (0x7E, 0x7F, 0x80));
/// assert!(E4M3.is_nan(0xFF) && !E2M1.is_nan(0xF));
/// assert_eq!(E8M0.decode(128), power_of_two(1));
/// assert_eq!((E2M1.bits(), E8M0.bits()), (4, 8));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Minifloat {
    /// Common name of the format.
    pub name: &'static str,
    /// True if the top bit is a sign.
    pub signed: bool,
    /// Width of the exponent field.
    pub exponent_bits: u32,
    /// Width of the mantissa field.
    pub mantissa_bits: u32,
    /// Exponent field of the value 1.
    pub bias: i32,
    /// True if exponent field 0 holds zero and the subnormals. Otherwise it is one more binade.
    pub subnormals: bool,
    /// Codes that are NaN.
    pub nan: Nan,
}

/// The element of every FP4 format, by definition: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
/// (OCP MX 1.0, section 5.3.3).
pub const E2M1: Minifloat = Minifloat {
    name: "E2M1",
    signed: true,
    exponent_bits: 2,
    mantissa_bits: 1,
    bias: 1,
    subnormals: true,
    nan: Nan::None,
};

/// The block scale of NVFP4: largest value 448, smallest 2^-9, NaN at 0x7F and 0xFF, no infinity
/// (OCP OFP8 "E4M3", torch `float8_e4m3fn`).
pub const E4M3: Minifloat = Minifloat {
    name: "E4M3",
    signed: true,
    exponent_bits: 4,
    mantissa_bits: 3,
    bias: 7,
    subnormals: true,
    nan: Nan::AllOnes,
};

/// The block scale of MXFP4: a power of two from 2^-127 to 2^127, NaN at 0xFF, no zero and no sign
/// (OCP MX 1.0, section 5.4.1).
pub const E8M0: Minifloat = Minifloat {
    name: "E8M0",
    signed: false,
    exponent_bits: 8,
    mantissa_bits: 0,
    bias: 127,
    subnormals: false,
    nan: Nan::AllOnes,
};

/// Values of the E2M1 codes.
pub static E2M1_VALUES: [f32; 16] = values(&E2M1);
/// Values of the E4M3 codes.
pub static E4M3_VALUES: [f32; 256] = values(&E4M3);
/// Values of the E8M0 codes.
pub static E8M0_VALUES: [f32; 256] = values(&E8M0);

const fn values<const N: usize>(row: &Minifloat) -> [f32; N] {
    let mut table = [0.0; N];
    let mut code = 0;
    while code < N {
        table[code] = row.decode(code as u8);
        code += 1;
    }
    table
}

impl Minifloat {
    /// Number of bits of a code.
    #[must_use]
    pub const fn bits(&self) -> u32 {
        self.signed as u32 + self.exponent_bits + self.mantissa_bits
    }

    /// Returns the sign bit of a code, 0 if the format has none.
    #[must_use]
    pub const fn sign_bit(&self) -> u8 {
        ((self.signed as u32) << (self.exponent_bits + self.mantissa_bits)) as u8
    }

    /// Returns the bits of a code other than the sign.
    const fn magnitude_mask(&self) -> u8 {
        (((1u32 << (self.exponent_bits + self.mantissa_bits)) - 1) & 0xFF) as u8
    }

    /// Returns the code of the largest finite value.
    #[must_use]
    pub const fn max_code(&self) -> u8 {
        match self.nan {
            Nan::None => self.magnitude_mask(),
            Nan::AllOnes => self.magnitude_mask() - 1,
        }
    }

    /// Returns the largest finite value.
    #[must_use]
    pub const fn max_value(&self) -> f32 {
        self.decode(self.max_code())
    }

    /// Returns the code of NaN: the positive NaN, or 0 if every code is a number.
    #[must_use]
    pub const fn nan_code(&self) -> u8 {
        match self.nan {
            Nan::None => 0,
            Nan::AllOnes => self.magnitude_mask(),
        }
    }

    /// Returns true if a code is NaN.
    #[must_use]
    pub const fn is_nan(&self, code: u8) -> bool {
        matches!(self.nan, Nan::AllOnes) && code & self.magnitude_mask() == self.magnitude_mask()
    }

    /// Decodes a code. The result is exact, because f32 holds every value of these formats.
    ///
    /// Bits above [`bits`](Self::bits) are ignored.
    #[must_use]
    pub const fn decode(&self, code: u8) -> f32 {
        if self.is_nan(code) {
            return f32::NAN;
        }
        let magnitude = (code & self.magnitude_mask()) as i32;
        let field = magnitude >> self.mantissa_bits;
        let mantissa = magnitude & ((1 << self.mantissa_bits) - 1);
        let (significand, exponent) = if self.subnormals && field == 0 {
            (mantissa, 1 - self.bias)
        } else {
            (mantissa + (1 << self.mantissa_bits), field - self.bias)
        };
        let value = significand as f32 * power_of_two(exponent - self.mantissa_bits as i32);
        if code & self.sign_bit() != 0 { -value } else { value }
    }

    /// Encodes `value` as the nearest code, ties to the even code, saturating at the largest value.
    ///
    /// The sign bit of `value` is kept, so a negative value that rounds to zero gives the code of
    /// -0. NaN gives the positive NaN code, or 0 if the format has none. An unsigned format takes
    /// every value at or below its smallest to code 0.
    #[must_use]
    pub fn encode(&self, value: f32) -> u8 {
        if value.is_nan() {
            return self.nan_code();
        }
        if value.is_sign_negative() && !self.signed {
            return 0;
        }
        let sign = if value.is_sign_negative() { self.sign_bit() } else { 0 };
        let magnitude = value.abs();
        // The codes ascend with their values, so bisection finds the largest code at or below.
        let (mut low, mut high) = (0, self.max_code() + 1);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.decode(middle) <= magnitude {
                low = middle;
            } else {
                high = middle;
            }
        }
        if low == self.max_code() {
            return sign | low;
        }
        // In f64 the distances are exact.
        let below = magnitude as f64 - self.decode(low) as f64;
        let above = self.decode(low + 1) as f64 - magnitude as f64;
        let up = above < below || (above == below && low & 1 == 1);
        sign | (low + up as u8)
    }
}

/// Computes 2^exponent, exactly, for exponents from -149 to 127. `powi` does not promise precision,
/// and is 0 below -127.
#[must_use]
pub const fn power_of_two(exponent: i32) -> f32 {
    if exponent >= -126 {
        f32::from_bits(((exponent + 127) as u32) << 23)
    } else {
        f32::from_bits(1 << (exponent + 149))
    }
}
