//! [`BlockBatch`]: a batch of blocks that stays in the first-level cache, with its amax, scales and
//! codes.
//!
//! ```text
//! Along    b0k0 b0k1 .. b0k15 | b1k0 b1k1 ..    order of a contiguous axis
//! Across   b0k0 b1k0 .. b31k0 | b0k1 b1k1 ..    order of a strided axis, and of searches
//! ```
//!
//! The compiler vectorizes the loops over a batch: no branch depends on the data and no order of
//! additions matters. Every function is `inline(always)`, so that it is compiled for the
//! instruction set of its caller. Each search has a file of its name.

use core::hint::black_box;

use burn_fp4_formats::{BLOCK_SIZES, Fp4Format};

use super::dense::HostElement;
use super::scale_grid::{ByFormat, Scales, by_format, scale_values};
use crate::rounding::{
    Draw, Rounding, round_stochastically, round_to_e2m1, signed_twice, twice_element,
};
use crate::rule::{
    Normalization, ScaleForm, ScaleRule, TensorFactor, at_least_smallest, reciprocal,
};
use crate::scale_grid::SIXTH;
use crate::scheme::Fp4Scheme;

/// Number of blocks of a batch. With f32 values, codes and scales it stays in the first-level
/// cache.
pub(super) const BATCH: usize = 32;

/// Largest block size.
pub(super) const MAX_BLOCK: usize = BLOCK_SIZES[BLOCK_SIZES.len() - 1];

/// Orders the values of a batch in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BatchOrder {
    /// Block by block, the order of a contiguous axis.
    Along,
    /// The first value of every block, then the second, the order of a strided axis.
    Across,
}

/// Holds [`BATCH`] blocks of `B` values. The rest of a batch that is not full is arbitrary.
pub(super) struct BlockBatch<const B: usize> {
    pub(super) order: BatchOrder,
    pub(super) values: [f32; BATCH * MAX_BLOCK],
    /// Element codes, one a byte, in the order of the values.
    pub(super) codes: [u8; BATCH * MAX_BLOCK],
    /// Eight codes a word, the first in the lowest nibble: block by block, or across blocks.
    pub(super) words: [u32; BATCH * MAX_BLOCK / 8],
    /// amax of each block, or of the tile it belongs to.
    pub(super) amax: [f32; BATCH],
    /// Tensor factor of each block's row.
    pub(super) tensor_amax: [f32; BATCH],
    pub(super) encode: [f32; BATCH],
    pub(super) decode: [f32; BATCH],
    /// Code of each block's scale.
    pub(super) scales: [u8; BATCH],
    /// Multipliers, or divisors, of the elements of each block.
    pub(super) multipliers: [f32; BATCH],
    /// All bits, or none where a NaN makes every code of the block 0.
    pub(super) numbers: [u32; BATCH],
    /// Random bits for stochastic rounding, in the order of the values.
    pub(super) random: [u16; BATCH * MAX_BLOCK],
}

impl<const B: usize> BlockBatch<B> {
    pub(super) const fn new(order: BatchOrder) -> Self {
        Self {
            order,
            values: [0.0; BATCH * MAX_BLOCK],
            codes: [0; BATCH * MAX_BLOCK],
            words: [0; BATCH * MAX_BLOCK / 8],
            amax: [0.0; BATCH],
            tensor_amax: [1.0; BATCH],
            encode: [1.0; BATCH],
            decode: [1.0; BATCH],
            scales: [0; BATCH],
            multipliers: [1.0; BATCH],
            numbers: [!0; BATCH],
            random: [0; BATCH * MAX_BLOCK],
        }
    }

    /// Returns the values in their order.
    #[inline(always)]
    pub(super) fn values(&self) -> &[f32] {
        &self.values[..BATCH * B]
    }

    /// Returns the values in their order.
    #[inline(always)]
    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values[..BATCH * B]
    }

    #[inline(always)]
    pub(super) fn set_factor(&mut self, block: usize, factor: TensorFactor) {
        self.tensor_amax[block] = factor.amax;
        self.encode[block] = factor.encode;
        self.decode[block] = factor.decode;
    }

    /// Reads `n` columns from `column` on of a `[B, inner]` slab, one block each.
    #[inline(always)]
    pub(super) fn read_columns<T: HostElement>(
        &mut self,
        slab: &[T],
        inner: usize,
        column: usize,
        n: usize,
    ) {
        for (k, line) in self.values_mut().chunks_exact_mut(BATCH).enumerate() {
            let source = &slab[k * inner + column..][..n];
            // A whole line, of known length, is a few instructions instead of a call.
            if n == BATCH {
                T::read(&source[..BATCH], &mut line[..BATCH]);
            } else {
                T::read(source, &mut line[..n]);
            }
        }
    }

    /// Writes the first `n` blocks as columns of a `[B, inner]` slab.
    #[inline(always)]
    pub(super) fn write_columns<T: HostElement>(
        &self,
        slab: &mut [T],
        inner: usize,
        column: usize,
        n: usize,
    ) {
        for (k, line) in self.values().chunks_exact(BATCH).enumerate() {
            let target = &mut slab[k * inner + column..][..n];
            if n == BATCH {
                T::write(&line[..BATCH], &mut target[..BATCH]);
            } else {
                T::write(&line[..n], target);
            }
        }
    }

    /// Normalizes the first `n` blocks. The rest is not searchable.
    #[inline(always)]
    pub(super) fn normalizations<const FORMAT: usize>(&self, n: usize) -> BlockNormalizations {
        let mut normalizations = BlockNormalizations {
            factor: [1.0; BATCH],
            base: [0; BATCH],
            searchable: [false; BATCH],
        };
        for block in 0..BATCH {
            let normalization =
                Scales::<FORMAT>::normalization(self.amax[block], self.encode[block]);
            normalizations.factor[block] = normalization.factor;
            normalizations.base[block] = normalization.base;
            normalizations.searchable[block] = (block < n) & normalization.searchable;
        }
        normalizations
    }
}

/// amax and scales.
impl<const B: usize> BlockBatch<B> {
    /// Fills `amax` from the values.
    ///
    /// Compared as integers, magnitudes order like the floats, and NaN is the largest.
    #[inline(always)]
    pub(super) fn find_amax(&mut self) {
        let magnitude = |value: f32| value.to_bits() & 0x7FFF_FFFF;
        let mut largest = [0; BATCH];
        match self.order {
            // Takes the larger of neighbours repeatedly. The compiler would vectorize a loop over
            // blocks by gathering their values from all over the batch.
            BatchOrder::Along => {
                let mut magnitudes = [0; BATCH * MAX_BLOCK];
                for (magnitude_bits, &value) in magnitudes.iter_mut().zip(self.values()) {
                    *magnitude_bits = magnitude(value);
                }
                let sixteens = match B {
                    16 => *magnitudes.first_chunk().expect("a batch of blocks of 16"),
                    _ => larger_of_pairs::<{ BATCH * 16 }>(&magnitudes),
                };
                let eights = larger_of_pairs::<{ BATCH * 8 }>(&sixteens);
                let fours = larger_of_pairs::<{ BATCH * 4 }>(&eights);
                let twos = larger_of_pairs::<{ BATCH * 2 }>(&fours);
                largest = larger_of_pairs(&twos);
            }
            BatchOrder::Across => {
                for line in self.values().chunks_exact(BATCH) {
                    for (largest, &value) in largest.iter_mut().zip(line) {
                        *largest = magnitude(value).max(*largest);
                    }
                }
            }
        }
        self.amax = largest.map(f32::from_bits);
    }

    /// Gives the blocks of each group of 16 neighbouring rows the largest amax among them.
    #[inline(always)]
    pub(super) fn share_amax(&mut self, n: usize) {
        for tile in self.amax[..n].chunks_mut(16) {
            let largest = tile.iter().fold(0.0, |largest, &amax| larger(largest, amax));
            tile.fill(largest);
        }
    }

    /// Fills `scales` and the multipliers from `amax`, using the rule.
    #[inline(always)]
    pub(super) fn find_scales(&mut self, rule: ScaleRule) {
        by_format(rule.row().format, FindScales { batch: self, rule });
    }

    /// Does the same as [`find_scales`](Self::find_scales) for a rule of this format.
    #[inline(always)]
    pub(super) fn find_scales_of<const FORMAT: usize>(&mut self, rule: ScaleRule) {
        match rule.row().scale {
            ScaleForm::TimesSixth => {
                self.round_scales::<FORMAT>(rule, |amax, encode| amax * (encode * SIXTH));
            }
            ScaleForm::DividedBySix => {
                self.round_scales::<FORMAT>(rule, |amax, encode| (amax / 6.0) * encode);
            }
            ScaleForm::WithoutTensorScale => {
                self.round_scales::<FORMAT>(rule, |amax, _| at_least_smallest(amax / 6.0));
            }
            ScaleForm::PowerOfTwo(rounding) => {
                for block in 0..BATCH {
                    self.scales[block] = Scales::<FORMAT>::power_of_two(self.amax[block], rounding);
                }
                let (_, multipliers) =
                    self.scales_of::<FORMAT>(rule, &self.scales.map(u32::from), &[0; BATCH]);
                self.multipliers = multipliers;
            }
        }
    }

    /// Rounds to the nearest scales, given their exact values, and sets the multipliers.
    #[inline(always)]
    fn round_scales<const FORMAT: usize>(
        &mut self,
        rule: ScaleRule,
        exact: impl Fn(f32, f32) -> f32,
    ) {
        let mut values = [0.0; BATCH];
        for block in 0..BATCH {
            let exact = exact(self.amax[block], self.encode[block]);
            (self.scales[block], values[block]) = Scales::<FORMAT>::round(exact);
        }
        self.multipliers =
            self.multipliers_of::<FORMAT>(rule, &self.scales.map(u32::from), &values);
    }

    /// Returns the multipliers, or divisors, of the elements of each block, given scales and their
    /// values without the tensor scale.
    #[inline(always)]
    pub(super) fn multipliers_of<const FORMAT: usize>(
        &self,
        rule: ScaleRule,
        codes: &[u32; BATCH],
        values: &[f32; BATCH],
    ) -> [f32; BATCH] {
        let mut multipliers = [0.0; BATCH];
        match rule.row().normalization {
            Normalization::Reciprocal => {
                for block in 0..BATCH {
                    multipliers[block] = reciprocal(values[block], self.decode[block]);
                }
            }
            Normalization::EncodeOverScale => {
                for block in 0..BATCH {
                    multipliers[block] = self.encode[block] / at_least_smallest(values[block]);
                }
            }
            Normalization::Division => multipliers = *values,
            Normalization::PowerReciprocal => {
                for block in 0..BATCH {
                    multipliers[block] = Scales::<FORMAT>::reciprocal_power(codes[block]);
                }
            }
            Normalization::PowerReciprocalOrOne => {
                for block in 0..BATCH {
                    let reciprocal = Scales::<FORMAT>::reciprocal_power(codes[block]);
                    multipliers[block] = if codes[block] == 0 { 1.0 } else { reciprocal };
                }
            }
        }
        multipliers
    }

    /// Returns the values of scales, relative to the normalization of the blocks, and the
    /// multipliers.
    #[inline(always)]
    pub(super) fn scales_of<const FORMAT: usize>(
        &self,
        rule: ScaleRule,
        codes: &[u32; BATCH],
        bases: &[u32; BATCH],
    ) -> ([f32; BATCH], [f32; BATCH]) {
        let mut values = [0.0; BATCH];
        for block in 0..BATCH {
            values[block] = Scales::<FORMAT>::value(codes[block], bases[block]);
        }
        (values, self.multipliers_of::<FORMAT>(rule, codes, &values))
    }

    /// Sets the scales and the multipliers.
    #[inline(always)]
    pub(super) fn take_scales<const FORMAT: usize>(
        &mut self,
        rule: ScaleRule,
        codes: &[u32; BATCH],
    ) {
        let kept = self.multipliers;
        let (_, multipliers) = self.scales_of::<FORMAT>(rule, codes, &[0; BATCH]);
        for block in 0..BATCH {
            let code = codes[block] as u8;
            // The rule's own scale keeps the rule's multiplier.
            let changed = code != self.scales[block];
            self.multipliers[block] = if changed { multipliers[block] } else { kept[block] };
            self.scales[block] = code;
        }
    }
}

/// From values and scales to codes, and back.
impl<const B: usize> BlockBatch<B> {
    /// Replaces the codes of chosen blocks by the codes of E2M1 values. Zeros become positive.
    #[inline(always)]
    pub(super) fn take_elements(&mut self, elements: &[[f32; BATCH]; B], chosen: &[bool; BATCH]) {
        let words = self.words[..BATCH * B / 8].chunks_exact_mut(BATCH);
        for (words, lines) in words.zip(elements.chunks_exact(8)) {
            for block in 0..BATCH {
                let mut word = 0;
                for (index, line) in lines.iter().enumerate() {
                    word |= round_to_e2m1(positive_zero(line[block])) << (4 * index);
                }
                words[block] = if chosen[block] { word } else { words[block] };
            }
        }
    }

    /// Draws the random bits of a block whose first element has this number in the packed matrix.
    #[inline(always)]
    pub(super) fn draw(&mut self, block: usize, first: usize, draw: Draw) {
        const GROUP: usize = Draw::GROUP as usize;
        for group in 0..B / GROUP {
            let bits = draw.group((first / GROUP + group) as u32);
            for (element, bits) in bits.into_iter().enumerate() {
                let k = group * GROUP + element;
                let at = match self.order {
                    BatchOrder::Along => block * B + k,
                    BatchOrder::Across => k * BATCH + block,
                };
                self.random[at] = bits;
            }
        }
    }

    /// Computes the codes from the values, scales and multipliers. Stochastic rounding needs
    /// [`draw`](Self::draw) first.
    #[inline(always)]
    pub(super) fn find_codes(&mut self, scheme: &Fp4Scheme) {
        match scheme.rounding {
            Rounding::Nearest => self.find_rounded(scheme, |value, _| round_to_e2m1(value)),
            Rounding::Stochastic(_) => self.find_rounded(scheme, round_stochastically),
        }
    }

    #[inline(always)]
    fn find_rounded(&mut self, scheme: &Fp4Scheme, round: impl Fn(f32, u16) -> u32) {
        if scheme.rule.row().normalization.divides() {
            self.round_elements(|value, scale| zero_if_nan(positive_zero(value / scale)), round);
        } else if scheme.rule.row().keeps_negative_zero {
            // The multiplier of an all-zero tensor may be infinite.
            self.round_elements(|value, multiplier| zero_if_nan(value * multiplier), round);
        } else {
            self.round_elements(|value, multiplier| positive_zero(value * multiplier), round);
        }
    }

    #[inline(always)]
    fn round_elements(
        &mut self,
        normalize: impl Fn(f32, f32) -> f32,
        round: impl Fn(f32, u16) -> u32,
    ) {
        for (number, multiplier) in self.numbers.iter_mut().zip(&self.multipliers) {
            *number = if multiplier.is_nan() { 0 } else { !0 };
        }
        let values = &self.values[..BATCH * B];
        let random = &self.random[..BATCH * B];
        match self.order {
            BatchOrder::Along => {
                let codes = &mut self.codes[..BATCH * B];
                let blocks = codes.chunks_exact_mut(B).zip(values.chunks_exact(B));
                let factors = self.multipliers.iter().zip(&self.numbers);
                let blocks = blocks.zip(random.chunks_exact(B)).zip(factors);
                for (((codes, values), random), (&multiplier, &number)) in blocks {
                    for ((code, &value), &bits) in codes.iter_mut().zip(values).zip(random) {
                        *code = (round(normalize(value, multiplier), bits) & number) as u8;
                    }
                }
                for (word, codes) in self.words.iter_mut().zip(codes.chunks_exact(8)) {
                    let bytes = codes.try_into().expect("a chunk of eight");
                    *word = pack_nibbles(u64::from_le_bytes(bytes));
                }
            }
            BatchOrder::Across => {
                let words = self.words[..BATCH * B / 8].chunks_exact_mut(BATCH);
                let lines = values.chunks_exact(8 * BATCH).zip(random.chunks_exact(8 * BATCH));
                for (words, (lines, random)) in words.zip(lines) {
                    words.fill(0);
                    let lines = lines.chunks_exact(BATCH).zip(random.chunks_exact(BATCH));
                    for (index, (line, random)) in lines.enumerate() {
                        for (block, word) in words.iter_mut().enumerate() {
                            let normalized = normalize(line[block], self.multipliers[block]);
                            *word |= round(normalized, random[block]) << (4 * index);
                        }
                    }
                    for (word, number) in words.iter_mut().zip(&self.numbers) {
                        *word &= number;
                    }
                }
            }
        }
    }

    /// Replaces the values by the values of the codes, `scales` and `decode`.
    #[inline(always)]
    pub(super) fn dequantize(&mut self, format: Fp4Format) {
        let table = scale_values(format);
        // Twice the element is an integer; half the scale is exact, as is their product.
        let mut half_scales = [0.0; BATCH];
        for (half, &scale) in half_scales.iter_mut().zip(&self.scales) {
            *half = table[scale as usize] * 0.5;
        }
        let values = &mut self.values[..BATCH * B];
        match self.order {
            BatchOrder::Along => {
                for (codes, word) in self.codes.chunks_exact_mut(8).zip(&self.words) {
                    for (pair, byte) in codes.chunks_exact_mut(2).zip(word.to_le_bytes()) {
                        pair[0] = signed_twice(byte & 0xF);
                        pair[1] = signed_twice(byte >> 4);
                    }
                }
                for (value, &code) in values.iter_mut().zip(&self.codes) {
                    // The sign in all upper bits, twice the magnitude in the lower.
                    let wide = code as i8 as i32;
                    let magnitude = (wide & 0x7F) as f32;
                    *value = f32::from_bits(magnitude.to_bits() | wide as u32 & 0x8000_0000);
                }
                for block in 0..BATCH {
                    // Opaque to the compiler: it would vectorize this loop over blocks, gathering
                    // and scattering their values, instead of the loop within a block.
                    let block = black_box(block);
                    let (half_scale, decode) = (half_scales[block], self.decode[block]);
                    for value in &mut values[block * B..][..B] {
                        *value = (*value * half_scale) * decode;
                    }
                }
            }
            BatchOrder::Across => {
                let words = self.words[..BATCH * B / 8].chunks_exact(BATCH);
                for (words, lines) in words.zip(values.chunks_exact_mut(8 * BATCH)) {
                    for (index, line) in lines.chunks_exact_mut(BATCH).enumerate() {
                        for (block, value) in line.iter_mut().enumerate() {
                            let code = words[block] >> (4 * index) & 0xF;
                            *value =
                                (twice_element(code) * half_scales[block]) * self.decode[block];
                        }
                    }
                }
            }
        }
    }

    /// Writes the packed codes of a block, `B / 2` bytes.
    #[inline(always)]
    pub(super) fn write_codes(&self, block: usize, bytes: &mut [u8]) {
        for (word, bytes) in bytes.chunks_exact_mut(4).enumerate() {
            bytes.copy_from_slice(&self.words[self.word_at(block, word)].to_le_bytes());
        }
    }

    /// Reads the packed codes of a block, `B / 2` bytes.
    #[inline(always)]
    pub(super) fn read_codes(&mut self, block: usize, bytes: &[u8]) {
        for (word, bytes) in bytes.chunks_exact(4).enumerate() {
            let bytes = bytes.try_into().expect("a chunk of four");
            self.words[self.word_at(block, word)] = u32::from_le_bytes(bytes);
        }
    }

    #[inline(always)]
    fn word_at(&self, block: usize, word: usize) -> usize {
        match self.order {
            BatchOrder::Along => block * B / 8 + word,
            BatchOrder::Across => word * BATCH + block,
        }
    }
}

/// The [`BlockNormalization`](crate::scale_grid::BlockNormalization) of every block of a batch.
pub(super) struct BlockNormalizations {
    pub(super) factor: [f32; BATCH],
    pub(super) base: [u32; BATCH],
    pub(super) searchable: [bool; BATCH],
}

struct FindScales<'a, const B: usize> {
    batch: &'a mut BlockBatch<B>,
    rule: ScaleRule,
}

impl<const B: usize> ByFormat for FindScales<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<const FORMAT: usize>(self) {
        self.batch.find_scales_of::<FORMAT>(self.rule);
    }
}

/// Returns the larger of two magnitudes; NaN if one is.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    f32::from_bits(a.to_bits().max(b.to_bits()))
}

#[inline(always)]
fn larger_of_pairs<const N: usize>(values: &[u32]) -> [u32; N] {
    let mut larger = [0; N];
    for (larger, pair) in larger.iter_mut().zip(values.chunks_exact(2)) {
        *larger = pair[0].max(pair[1]);
    }
    larger
}

/// Turns -0 into +0 and keeps everything else: references that compare with zero lose its sign.
#[inline(always)]
pub(super) fn positive_zero(value: f32) -> f32 {
    if value == 0.0 { 0.0 } else { value }
}

#[inline(always)]
fn zero_if_nan(value: f32) -> f32 {
    if value.is_nan() { 0.0 } else { value }
}

/// Packs the low nibbles of eight bytes, the first lowest.
#[inline(always)]
fn pack_nibbles(bytes: u64) -> u32 {
    let pairs = (bytes | bytes >> 4) & 0x00FF_00FF_00FF_00FF;
    let fours = (pairs | pairs >> 8) & 0x0000_FFFF_0000_FFFF;
    (fours | fours >> 16) as u32
}
