//! From values and scales to codes and back, for a batch of blocks.

use core::hint::black_box;

use burn_fp4_formats::Fp4Format;

use super::scale_grid::scale_values;
use super::simd_batch::{BATCH, BlockBatch, Order};
use crate::e2m1::{round_stochastically, round_to_e2m1, signed_twice, twice_element};
use crate::rounding::{Draw, Rounding};
use crate::scheme::Fp4Scheme;

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
                    Order::Along => block * B + k,
                    Order::Across => k * BATCH + block,
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
            Order::Along => {
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
            Order::Across => {
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
            Order::Along => {
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
            Order::Across => {
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
            Order::Along => block * B / 8 + word,
            Order::Across => word * BATCH + block,
        }
    }
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
