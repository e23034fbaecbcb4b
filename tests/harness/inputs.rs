//! Inputs: matrices in three dtypes, and generators of awkward values.

use burn_fp4_formats::{bf16, f16};
use burn_fp4_search::Hadamard;
use burn_fp4_search::host::{self, HostElement, View};

/// Values of a matrix in their own dtype.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// 32 bits.
    F32(Vec<f32>),
    /// IEEE half.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

/// A dtype the quantizer takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];
}

/// A row-major matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Dense {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// `rows * cols` values.
    pub values: Values,
}

impl Dense {
    /// Creates a matrix from f32 values, rounded to a dtype.
    pub fn new(rows: usize, cols: usize, values: &[f32], dtype: Dtype) -> Self {
        assert_eq!(values.len(), rows * cols);
        let values = match dtype {
            Dtype::F32 => Values::F32(values.to_vec()),
            Dtype::F16 => Values::F16(values.iter().map(|&x| f16::from_f32(x)).collect()),
            Dtype::Bf16 => Values::Bf16(values.iter().map(|&x| bf16::from_f32(x)).collect()),
        };
        Self { rows, cols, values }
    }

    /// Converts the values to f32, exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        match &self.values {
            Values::F32(values) => values.clone(),
            Values::F16(values) => values.iter().map(|x| x.to_f32()).collect(),
            Values::Bf16(values) => values.iter().map(|x| x.to_f32()).collect(),
        }
    }

    /// Returns the dtype.
    pub fn dtype(&self) -> Dtype {
        match self.values {
            Values::F32(_) => Dtype::F32,
            Values::F16(_) => Dtype::F16,
            Values::Bf16(_) => Dtype::Bf16,
        }
    }

    /// Applies the host engine's Hadamard transform to every 16 neighbours along an axis.
    pub fn hadamard(&self, view: View, transform: Hadamard, inverse: bool) -> Self {
        fn of<T: HostElement>(
            values: &[T],
            view: View,
            transform: Hadamard,
            inverse: bool,
        ) -> Vec<T> {
            let mut output = vec![T::default(); values.len()];
            host::hadamard(values, view, transform, inverse, &mut output).expect("whole groups");
            output
        }
        let values = match &self.values {
            Values::F32(values) => Values::F32(of(values, view, transform, inverse)),
            Values::F16(values) => Values::F16(of(values, view, transform, inverse)),
            Values::Bf16(values) => Values::Bf16(of(values, view, transform, inverse)),
        };
        Self { values, ..*self }
    }

    /// Transposes the matrix.
    pub fn transposed(&self) -> Self {
        let values = self.to_f32();
        let transposed: Vec<_> = (0..self.rows * self.cols)
            .map(|at| values[at % self.rows * self.cols + at / self.rows])
            .collect();
        Self::new(self.cols, self.rows, &transposed, self.dtype())
    }
}

/// A small counter-based generator: tests are deterministic.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Seeds the generator.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    /// Returns 64 random bits (splitmix64).
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ bits >> 31
    }

    /// Returns a uniform value in [0, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 24) as f32
    }

    /// Returns a number below a bound.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// Returns a roughly normal value with deviation 1 (sum of four uniforms).
    pub fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.uniform()).sum();
        (sum - 2.0) * 1.732
    }
}

/// Draws roughly normal values with deviation 1.
pub fn normals(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.normal()).collect()
}

/// Kinds of matrices that have broken quantizers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Normal, standard deviation 0.02.
    Weights,
    /// Normal with one in a hundred 50 times larger.
    Outliers,
    /// Magnitudes spread over 2^-120 .. 2^120.
    WideRange,
    /// Multiples of 1/8 up to 8: most values are exactly between two elements.
    Ties,
    /// Blocks of zeros, of both signs, among others.
    ZeroBlocks,
    /// Down to f32 subnormals.
    Subnormal,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Weights,
        Self::Outliers,
        Self::WideRange,
        Self::Ties,
        Self::ZeroBlocks,
        Self::Subnormal,
    ];

    /// Draws `count` values of this kind.
    pub fn values(self, count: usize, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed);
        (0..count)
            .map(|index| match self {
                Self::Weights => random.normal() * 0.02,
                Self::Outliers if random.below(100) == 0 => random.normal() * 50.0,
                Self::Outliers => random.normal(),
                Self::WideRange => random.normal() * 2f32.powi(random.below(240) as i32 - 120),
                Self::Ties => (random.below(129) as f32 - 64.0) / 8.0,
                Self::ZeroBlocks if index / 16 % 3 == 0 => {
                    if random.bits() & 1 == 0 {
                        0.0
                    } else {
                        -0.0
                    }
                }
                Self::ZeroBlocks => random.normal(),
                Self::Subnormal => random.normal() * 1e-39,
            })
            .collect()
    }
}
