//! What the reference searches know of a block.

use burn_fp4_formats::{E2M1, E4M3, E8M0, Fp4Format};

use crate::sse::e4m3_at_most;
use crate::{Fp4Scheme, ScaleRule, TensorFactor};

/// In which units a block is searched: elements times `factor`, so that the values of its scales are
/// those of the format's table, or 2^(code - base).
///
/// Powers of two, and tensor factors, bring every block into a range whose squares f32 holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Unit {
    pub(crate) factor: f32,
    pub(crate) base: u32,
    /// Whether there is anything to search for: not among zeros, infinities and NaN, nor at
    /// the ends of f32, where scales overflow or have no half (tensors up to 1e-32; MXFP4 blocks below
    /// 2^-123 and from 2^127 on). Those keep the rule's scale.
    pub(crate) searchable: bool,
}

/// 2^118: beyond it, what elements are multiplied with overflows for the smallest scales.
const LARGEST_FACTOR: f32 = f32::from_bits((127 + 118) << 23);

impl Unit {
    /// The units of a block with this amax.
    #[inline(always)]
    pub(crate) fn new(format: Fp4Format, amax: f32, tensor: TensorFactor) -> Self {
        let (factor, base, in_range) = match format {
            Fp4Format::NvFp4 => (tensor.encode, 0, tensor.encode <= LARGEST_FACTOR),
            Fp4Format::MxFp4 => {
                let base = u32::from(ScaleRule::Floor.block_scale(amax, tensor));
                (f32::from_bits((254 - base.min(253)) << 23), base, (2..252).contains(&base))
            }
        };
        let searchable = in_range & (amax > 0.0) & (amax * factor).is_finite();
        Self { factor, base, searchable }
    }
}

/// Powers of two above the base from which on every element of a block rounds to 0.
const ZEROS: u32 = 5;

/// The smallest scale that searches try.
#[inline(always)]
pub(crate) fn lowest(format: Fp4Format, base: u32) -> u32 {
    match format {
        // Code 0 is the value 0.
        Fp4Format::NvFp4 => 1,
        // 6 times this one is nothing beside the amax, in f32.
        Fp4Format::MxFp4 => base.saturating_sub(30),
    }
}

/// The smallest scale at which every element of a block rounds to 0: any larger one does the same.
#[inline(always)]
pub(crate) fn top(format: Fp4Format, base: u32, amax: f32) -> u32 {
    match format {
        Fp4Format::NvFp4 => (e4m3_at_most(amax * 4.0) + 1).min(126),
        Fp4Format::MxFp4 => (base + ZEROS).min(E8M0.max_code().into()),
    }
}

/// A cost that can be compared: NaN and infinity lose against everything.
pub(crate) fn finite(cost: f32) -> f32 {
    if cost < f32::INFINITY { cost } else { f32::INFINITY }
}

/// A block, or the rows of a tile, of one tensor factor.
pub(crate) struct Block<'a> {
    pub(crate) scheme: &'a Fp4Scheme,
    pub(crate) rows: &'a [&'a [f32]],
    pub(crate) tensor: TensorFactor,
    pub(crate) amax: f32,
    pub(crate) unit: Unit,
}

impl<'a> Block<'a> {
    pub(crate) fn new(
        scheme: &'a Fp4Scheme,
        rows: &'a [&'a [f32]],
        tensor: TensorFactor,
        amax: f32,
    ) -> Self {
        Self { scheme, rows, tensor, amax, unit: Unit::new(scheme.format(), amax, tensor) }
    }

    /// Every scale, ascending: of E4M3 all but 0; of E8M0 those that leave neither all of a block nor, in
    /// f32, what any larger one leaves.
    pub(crate) fn scales(&self) -> impl Iterator<Item = u8> {
        match self.scheme.format() {
            Fp4Format::NvFp4 => 1..=E4M3.max_code(),
            Fp4Format::MxFp4 => {
                let lowest = lowest(Fp4Format::MxFp4, self.unit.base) as u8;
                lowest..=(self.unit.base + ZEROS).min(E8M0.max_code().into()) as u8
            }
        }
    }

    /// The scale that a search starts from, the rule's, with its cost: infinite if it is none.
    pub(crate) fn start(&self, cost: impl FnOnce(u8) -> f32) -> (f32, u8) {
        let scale = self.scheme.rule.block_scale(self.amax, self.tensor);
        let usable =
            self.unit.searchable && (scale > 0 || self.scheme.format() != Fp4Format::NvFp4);
        (if usable { finite(cost(scale)) } else { f32::INFINITY }, scale)
    }

    /// The value of a scale in the units of the block.
    pub(crate) fn value(&self, scale: u8) -> f32 {
        match self.scheme.format() {
            Fp4Format::NvFp4 => E4M3.decode(scale),
            Fp4Format::MxFp4 => 2f32.powi(i32::from(scale) - self.unit.base as i32),
        }
    }

    /// The elements of a row in the units of the block.
    pub(crate) fn scaled(&self, row: usize) -> Vec<f32> {
        self.rows[row].iter().map(|element| element * self.unit.factor).collect()
    }

    /// The E2M1 values nearest to the elements of a row, as the rule rounds them.
    pub(crate) fn nearest(&self, row: usize, scale: u8) -> Vec<f32> {
        let rule = self.scheme.rule;
        let multiplier = rule.multiplier(scale, self.tensor);
        let code = |&element: &f32| rule.code(element, scale, multiplier);
        self.rows[row].iter().map(|element| E2M1.decode(code(element))).collect()
    }

    /// What is left of a row, in the units of the block, each rounded once.
    pub(crate) fn errors(&self, row: usize, scale: u8, values: &[f32]) -> Vec<f32> {
        let scale = self.value(scale);
        let scaled = self.scaled(row);
        scaled.iter().zip(values).map(|(x, value)| (-value).mul_add(scale, *x)).collect()
    }
}
