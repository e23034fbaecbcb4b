//! The arithmetic of the reference quantizer on a strip of blocks at once, in loops that the
//! compiler turns into SIMD: no branch depends on the data and no order of additions matters.
//!
//! Every function is `inline(always)`, so that it is compiled for the instruction set of its caller.

use core::hint::black_box;

use burn_fp4_formats::{E4M3_VALUES, E8M0_VALUES, Fp4Format};

use super::sse::sum_tiles;
use crate::block::Unit;
use crate::rule::{GIST_SMALLEST_SCALE, SIXTH};
use crate::{Draw, ErrorMetric, Fp4Scheme, Rounding, ScaleRule, TensorFactor};

/// Blocks of a strip. With f32 values, codes and scales it stays within the first-level cache.
pub(super) const STRIP: usize = 32;

/// Largest block size.
pub(super) const MAX_BLOCK: usize = 32;

/// How the values of a strip lie in its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Block by block, as a contiguous axis is read.
    Along,
    /// The first value of every block, then the second, as a strided axis is read.
    Across,
}

/// A strip of [`STRIP`] blocks of `B` values. One that is not full holds something in the rest.
pub(super) struct Strip<const B: usize> {
    order: Order,
    values: [f32; STRIP * MAX_BLOCK],
    /// Element codes, one a byte, in the order of the values.
    codes: [u8; STRIP * MAX_BLOCK],
    /// Eight codes a word, the first in the lowest nibble: block by block, or across blocks.
    words: [u32; STRIP * MAX_BLOCK / 8],
    /// amax of each block, or of the tile it belongs to.
    pub(super) amax: [f32; STRIP],
    /// Tensor factor of each block's row.
    tensor_amax: [f32; STRIP],
    pub(super) encode: [f32; STRIP],
    pub(super) decode: [f32; STRIP],
    /// Code of each block's scale.
    pub(super) scales: [u8; STRIP],
    /// What the elements of each block are multiplied with, or divided by.
    pub(super) multipliers: [f32; STRIP],
    /// All bits, or none where a NaN makes every code of the block 0.
    numbers: [u32; STRIP],
    /// Random bits for stochastic rounding, in the order of the values.
    random: [u16; STRIP * MAX_BLOCK],
}

impl<const B: usize> Strip<B> {
    pub(super) const fn new(order: Order) -> Self {
        Self {
            order,
            values: [0.0; STRIP * MAX_BLOCK],
            codes: [0; STRIP * MAX_BLOCK],
            words: [0; STRIP * MAX_BLOCK / 8],
            amax: [0.0; STRIP],
            tensor_amax: [1.0; STRIP],
            encode: [1.0; STRIP],
            decode: [1.0; STRIP],
            scales: [0; STRIP],
            multipliers: [1.0; STRIP],
            numbers: [!0; STRIP],
            random: [0; STRIP * MAX_BLOCK],
        }
    }

    /// The values in their order.
    #[inline(always)]
    pub(super) fn values(&self) -> &[f32] {
        &self.values[..STRIP * B]
    }

    /// The values in their order.
    #[inline(always)]
    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values[..STRIP * B]
    }

    #[inline(always)]
    pub(super) fn set_factor(&mut self, block: usize, factor: TensorFactor) {
        self.tensor_amax[block] = factor.amax;
        self.encode[block] = factor.encode;
        self.decode[block] = factor.decode;
    }

    /// Fills `amax` from the values.
    ///
    /// As integers magnitudes order like the floats, and NaN comes out on top.
    #[inline(always)]
    pub(super) fn find_amax(&mut self) {
        let magnitude = |value: f32| value.to_bits() & 0x7FFF_FFFF;
        let mut largest = [0; STRIP];
        match self.order {
            // The larger of neighbours, again and again: a loop over blocks would be vectorized by
            // gathering their values from all over the strip.
            Order::Along => {
                let mut magnitudes = [0; STRIP * MAX_BLOCK];
                for (magnitude_bits, &value) in magnitudes.iter_mut().zip(self.values()) {
                    *magnitude_bits = magnitude(value);
                }
                let sixteens = match B {
                    16 => *magnitudes.first_chunk().expect("a strip of blocks of 16"),
                    _ => larger_of_pairs::<{ STRIP * 16 }>(&magnitudes),
                };
                let eights = larger_of_pairs::<{ STRIP * 8 }>(&sixteens);
                let fours = larger_of_pairs::<{ STRIP * 4 }>(&eights);
                let twos = larger_of_pairs::<{ STRIP * 2 }>(&fours);
                largest = larger_of_pairs(&twos);
            }
            Order::Across => {
                for line in self.values().chunks_exact(STRIP) {
                    for (largest, &value) in largest.iter_mut().zip(line) {
                        *largest = magnitude(value).max(*largest);
                    }
                }
            }
        }
        self.amax = largest.map(f32::from_bits);
    }

    /// Fills `scales` and the multipliers from `amax`, as the rule has it.
    #[inline(always)]
    pub(super) fn find_scales(&mut self, scheme: &Fp4Scheme) {
        match scheme.rule {
            ScaleRule::Te => self.find_e4m3_scales(
                |amax, encode| amax * (encode * SIXTH),
                |scale, _, decode| te_multiplier(scale, decode),
            ),
            ScaleRule::TeDivision => self.find_e4m3_scales(
                |amax, encode| (amax / 6.0) * encode,
                |scale, _, decode| te_multiplier(scale, decode),
            ),
            ScaleRule::Gist => self.find_e4m3_scales(
                |amax, encode| (amax / 6.0) * encode,
                |scale, encode, _| encode / at_least_smallest(scale),
            ),
            ScaleRule::NoTensorScale => {
                self.find_e4m3_scales(|amax, _| at_least_smallest(amax / 6.0), |scale, _, _| scale)
            }
            // Powers of two are a matter of a few integer operations a block.
            rule => {
                for block in 0..STRIP {
                    let scale = rule.block_scale(self.amax[block], TensorFactor::ONE);
                    self.scales[block] = scale;
                    self.multipliers[block] = rule.multiplier(scale, TensorFactor::ONE);
                }
            }
        }
    }

    /// E4M3 scales, given what is rounded to them, and the multipliers that follow.
    #[inline(always)]
    fn find_e4m3_scales(
        &mut self,
        exact: impl Fn(f32, f32) -> f32,
        multiplier: impl Fn(f32, f32, f32) -> f32,
    ) {
        for block in 0..STRIP {
            let encode = self.encode[block];
            let (code, scale) = round_to_e4m3(exact(self.amax[block], encode));
            self.scales[block] = code;
            self.multipliers[block] = multiplier(scale, encode, self.decode[block]);
        }
    }

    /// The units of the first `n` blocks, see [`Unit`], and which of them a search may improve.
    #[inline(always)]
    pub(super) fn units(&self, scheme: &Fp4Scheme, n: usize) -> Units {
        let mut units =
            Units { factor: [1.0; STRIP], base: [0; STRIP], searchable: [false; STRIP] };
        for block in 0..STRIP {
            let (amax, encode) = (self.amax[block], self.encode[block]);
            let tensor =
                TensorFactor { amax: self.tensor_amax[block], encode, decode: self.decode[block] };
            let unit = Unit::new(scheme.format(), amax, tensor);
            units.factor[block] = unit.factor;
            units.base[block] = unit.base;
            units.searchable[block] = (block < n) & unit.searchable;
        }
        units
    }

    /// The better of two scales for the first `n` blocks or their tiles: amax on element 6, or on 4. Each
    /// error is summed in element order.
    #[inline(always)]
    pub(super) fn search_four_over_six(
        &mut self,
        scheme: &Fp4Scheme,
        metric: ErrorMetric,
        n: usize,
    ) {
        let mut codes = [[0; STRIP]; 2];
        let mut scales = [[0.0; STRIP]; 2];
        let mut multipliers = [[0.0; STRIP]; 2];
        for block in 0..STRIP {
            let on_six = (self.amax[block] / 6.0) * self.encode[block];
            for (candidate, exact) in [on_six, on_six * 1.5].into_iter().enumerate() {
                let (code, scale) = round_to_e4m3(exact);
                codes[candidate][block] = code;
                scales[candidate][block] = scale;
                multipliers[candidate][block] = te_multiplier(scale, self.decode[block]);
            }
        }
        let range = scheme.largest_code_product();
        let mut errors = [[0.0; STRIP]; 2];
        for values in self.values().chunks_exact(STRIP) {
            for candidate in 0..2 {
                for block in 0..STRIP {
                    let value = values[block];
                    let normalized = positive_zero(value * multipliers[candidate][block]);
                    let twice = twice_element(round_to_e2m1(normalized));
                    let scaled = twice * (scales[candidate][block] * 0.5);
                    let difference = (scaled * self.tensor_amax[block]) / range - value;
                    errors[candidate][block] += match metric {
                        ErrorMetric::Mae => difference.abs(),
                        ErrorMetric::Mse => difference * difference,
                    };
                }
            }
        }
        if scheme.tile_rows() > 1 {
            errors.iter_mut().for_each(|errors| sum_tiles(errors, n));
        }
        for block in 0..STRIP {
            let four = errors[1][block] < errors[0][block];
            self.scales[block] = codes[four as usize][block];
            self.multipliers[block] = multipliers[four as usize][block];
        }
    }

    /// Replaces the codes of chosen blocks by those of E2M1 values, of zeros the positive one.
    #[inline(always)]
    pub(super) fn take_elements(&mut self, elements: &[[f32; STRIP]; B], chosen: &[bool; STRIP]) {
        let words = self.words[..STRIP * B / 8].chunks_exact_mut(STRIP);
        for (words, lines) in words.zip(elements.chunks_exact(8)) {
            for block in 0..STRIP {
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
                    Order::Across => k * STRIP + block,
                };
                self.random[at] = bits;
            }
        }
    }

    /// Finds the codes from the values, scales and multipliers; if rounding is stochastic, after
    /// [`draw`](Self::draw).
    #[inline(always)]
    pub(super) fn find_codes(&mut self, scheme: &Fp4Scheme) {
        match scheme.rounding {
            Rounding::Nearest => self.find_rounded(scheme, |value, _| round_to_e2m1(value)),
            Rounding::Stochastic(_) => self.find_rounded(scheme, round_stochastically),
        }
    }

    #[inline(always)]
    fn find_rounded(&mut self, scheme: &Fp4Scheme, round: impl Fn(f32, u16) -> u32) {
        if scheme.rule == ScaleRule::NoTensorScale {
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
        let values = &self.values[..STRIP * B];
        let random = &self.random[..STRIP * B];
        match self.order {
            Order::Along => {
                let codes = &mut self.codes[..STRIP * B];
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
                let words = self.words[..STRIP * B / 8].chunks_exact_mut(STRIP);
                let lines = values.chunks_exact(8 * STRIP).zip(random.chunks_exact(8 * STRIP));
                for (words, (lines, random)) in words.zip(lines) {
                    words.fill(0);
                    let lines = lines.chunks_exact(STRIP).zip(random.chunks_exact(STRIP));
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

    /// Replaces the values by those that codes, `scales` and `decode` stand for.
    #[inline(always)]
    pub(super) fn dequantize(&mut self, format: Fp4Format) {
        let table = scale_values(format);
        // Twice the element is an integer; half the scale is exact, as is their product.
        let mut half_scales = [0.0; STRIP];
        for (half, &scale) in half_scales.iter_mut().zip(&self.scales) {
            *half = table[scale as usize] * 0.5;
        }
        let values = &mut self.values[..STRIP * B];
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
                for block in 0..STRIP {
                    // Opaque to the compiler, which would otherwise vectorize this loop over blocks
                    // by gathering and scattering their values, not the one within a block.
                    let block = black_box(block);
                    let (half_scale, decode) = (half_scales[block], self.decode[block]);
                    for value in &mut values[block * B..][..B] {
                        *value = (*value * half_scale) * decode;
                    }
                }
            }
            Order::Across => {
                let words = self.words[..STRIP * B / 8].chunks_exact(STRIP);
                for (words, lines) in words.zip(values.chunks_exact_mut(8 * STRIP)) {
                    for (index, line) in lines.chunks_exact_mut(STRIP).enumerate() {
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
            Order::Across => word * STRIP + block,
        }
    }
}

/// In which units the blocks of a strip are searched; see [`Unit`].
pub(super) struct Units {
    pub(super) factor: [f32; STRIP],
    pub(super) base: [u32; STRIP],
    pub(super) searchable: [bool; STRIP],
}

/// What the elements of a block are multiplied with, or divided by, given its scale in its units.
#[inline(always)]
pub(super) fn multiplier(rule: ScaleRule, code: u32, scale: f32, encode: f32, decode: f32) -> f32 {
    match rule {
        ScaleRule::Te | ScaleRule::TeDivision => te_multiplier(scale, decode),
        ScaleRule::Gist => encode / at_least_smallest(scale),
        ScaleRule::NoTensorScale => scale,
        ScaleRule::RoundUp if code == 0 => 1.0,
        // The reciprocal of a power of two; that of the smallest, 2^-127, is 2^126 for these rules.
        _ => f32::from_bits((254 - code.clamp(1, 253)) << 23),
    }
}

/// The value of an E4M3 code that is not NaN.
#[inline(always)]
pub(super) fn e4m3_value(code: u32) -> f32 {
    let normal = f32::from_bits((code << 20).wrapping_add(120 << 23));
    if code < 8 { code as i32 as f32 * (1.0 / 512.0) } else { normal }
}

/// 2^(code - base) where f32 has it as a normal number.
#[inline(always)]
pub(super) fn power_of_two(code: u32, base: u32) -> f32 {
    f32::from_bits(code.wrapping_sub(base).wrapping_add(127) << 23)
}

/// What TransformerEngine multiplies elements with; FLT_MAX for a scale of 0.
#[inline(always)]
fn te_multiplier(scale: f32, decode: f32) -> f32 {
    let multiplier = 1.0 / (scale * decode);
    if multiplier > f32::MAX { f32::MAX } else { multiplier }
}

#[inline(always)]
fn at_least_smallest(scale: f32) -> f32 {
    if scale < GIST_SMALLEST_SCALE { GIST_SMALLEST_SCALE } else { scale }
}

#[inline(always)]
fn larger_of_pairs<const N: usize>(values: &[u32]) -> [u32; N] {
    let mut larger = [0; N];
    for (larger, pair) in larger.iter_mut().zip(values.chunks_exact(2)) {
        *larger = pair[0].max(pair[1]);
    }
    larger
}

/// -0 to +0, everything else to itself: the references that compare with zero lose its sign.
#[inline(always)]
fn positive_zero(value: f32) -> f32 {
    if value == 0.0 { 0.0 } else { value }
}

#[inline(always)]
fn zero_if_nan(value: f32) -> f32 {
    if value.is_nan() { 0.0 } else { value }
}

/// The E4M3 code and value nearest to a non-negative f32, ties to even, 448 at most, NaN kept.
#[inline(always)]
fn round_to_e4m3(exact: f32) -> (u8, f32) {
    // Adding 2^14 leaves an ulp of 2^-9, the step of the subnormal codes.
    const SUBNORMAL: f32 = 16384.0;
    let is_nan = exact.is_nan();
    let clamped = if exact > 448.0 { 448.0 } else { exact };
    let bits = clamped.to_bits();
    let rounded = bits.wrapping_add(0x7_FFFF + (bits >> 20 & 1)) & !0xF_FFFF;
    let shifted = clamped + SUBNORMAL;
    let small = clamped < 1.0 / 64.0;
    let code = if small {
        shifted.to_bits().wrapping_sub(SUBNORMAL.to_bits())
    } else {
        (rounded >> 20).wrapping_sub(120 << 3)
    };
    let value = if small { shifted - SUBNORMAL } else { f32::from_bits(rounded) };
    (if is_nan { 0x7F } else { code } as u8, if is_nan { exact } else { value })
}

/// The E2M1 code nearest to an f32 that is not NaN, ties to even.
#[inline(always)]
fn round_to_e2m1(value: f32) -> u32 {
    const ONE: u32 = 1.0f32.to_bits();
    let magnitude = value.abs();
    let magnitude = if magnitude > 6.0 { 6.0 } else { magnitude };
    // The power of two below, at least 1; elements there are half of it apart. Adding 2^22 times as
    // much leaves no room for less, so the sum is rounded as the element is to be.
    let binade = (magnitude.to_bits() & 0x7F80_0000).max(ONE);
    let shift = binade + (22 << 23);
    let steps = (magnitude + f32::from_bits(shift)).to_bits().wrapping_sub(shift);
    // Two codes a binade.
    steps.wrapping_add((binade - ONE) >> 22) | value.to_bits() >> 28 & 8
}

/// The E2M1 code of an f32 that is not NaN, see [`stochastic_code`](crate::stochastic_code).
#[inline(always)]
fn round_stochastically(value: f32, bits: u16) -> u32 {
    const ONE: u32 = 1.0f32.to_bits();
    let magnitude = value.abs();
    let magnitude = if magnitude > 6.0 { 6.0 } else { magnitude };
    // As in `round_to_e2m1`; what follows is exact.
    let binade = (magnitude.to_bits() & 0x7F80_0000).max(ONE);
    let steps = magnitude * f32::from_bits((255 << 23) - binade);
    let below = steps as i32;
    let way = steps - below as f32;
    let up = i32::from(bits) as f32 + 0.5 < way * 65536.0;
    (below as u32 + ((binade - ONE) >> 22) + up as u32) | value.to_bits() >> 28 & 8
}

/// The E2M1 value nearest to an f32 that is not NaN, ties to even; of zeros with the sign of the f32.
#[inline(always)]
pub(crate) fn nearest_element(value: f32) -> f32 {
    let nearest = nearest_magnitude(value.abs());
    f32::from_bits(nearest.to_bits() | value.to_bits() & 0x8000_0000)
}

/// The E2M1 value nearest to a magnitude that is not NaN, ties to even.
#[inline(always)]
pub(super) fn nearest_magnitude(magnitude: f32) -> f32 {
    const ONE: u32 = 1.0f32.to_bits();
    let magnitude = if magnitude > 6.0 { 6.0 } else { magnitude };
    // As in `round_to_e2m1`.
    let shift = f32::from_bits((magnitude.to_bits() & 0x7F80_0000).max(ONE) + (22 << 23));
    (magnitude + shift) - shift
}

/// Moves the low nibbles of eight bytes together, the first lowest.
#[inline(always)]
fn pack_nibbles(bytes: u64) -> u32 {
    let pairs = (bytes | bytes >> 4) & 0x00FF_00FF_00FF_00FF;
    let fours = (pairs | pairs >> 8) & 0x0000_FFFF_0000_FFFF;
    (fours | fours >> 16) as u32
}

/// The values of block scales.
#[inline(always)]
pub(super) fn scale_values(format: Fp4Format) -> &'static [f32; 256] {
    match format {
        Fp4Format::NvFp4 => &E4M3_VALUES,
        Fp4Format::MxFp4 => &E8M0_VALUES,
    }
}

/// Twice the value of an E2M1 code, whose higher bits do not matter.
#[inline(always)]
pub(super) const fn twice_element(code: u32) -> f32 {
    // Twice the eight magnitudes, a nibble each.
    const TWICE: u32 = 0xC864_3210;
    let magnitude = (TWICE >> ((code & 7) << 2) & 0xF) as i32 as f32;
    f32::from_bits(magnitude.to_bits() | (code & 8) << 28)
}

/// Twice the magnitude of an E2M1 code in the lower bits, its sign in the top bit.
#[inline(always)]
fn signed_twice(code: u8) -> u8 {
    let magnitude = code & 7;
    let beyond = (magnitude >= 5) as u8 + (magnitude >= 6) as u8 + 3 * (magnitude >= 7) as u8;
    (magnitude + beyond) | ((code & 8) << 4)
}

#[cfg(test)]
mod tests {
    use burn_fp4_formats::{E2M1, E4M3};

    use super::*;

    /// Every f32 at which a rounding could change its mind, and both neighbours.
    fn around(values: impl Iterator<Item = f32>) -> impl Iterator<Item = f32> {
        values.flat_map(|value| [value.next_down(), value, value.next_up()])
    }

    #[test]
    fn e4m3_rounds_as_the_format_says() {
        let codes = (0..E4M3.max_code())
            .map(|code| (E4M3.decode(code) as f64 + E4M3.decode(code + 1) as f64) as f32 / 2.0);
        let specials = [0.0, f32::MIN_POSITIVE, 1e-45, 448.0, 464.0, f32::MAX, f32::INFINITY];
        for exact in around(codes.chain(E4M3_VALUES[..127].iter().copied()).chain(specials)) {
            if exact >= 0.0 {
                let expected = E4M3.encode(exact);
                assert_eq!(round_to_e4m3(exact), (expected, E4M3.decode(expected)), "{exact:e}");
            }
        }
        let (code, value) = round_to_e4m3(f32::NAN);
        assert!(code == 0x7F && value.is_nan());
    }

    #[test]
    fn e2m1_rounds_as_the_format_says() {
        let midpoints = (0..7).map(|code| (E2M1.decode(code) + E2M1.decode(code + 1)) / 2.0);
        let specials = [0.0, 1e-45, 6.0, 8.0, f32::MAX, f32::INFINITY];
        for magnitude in around(midpoints.chain(specials)) {
            for value in [magnitude, -magnitude] {
                let code = E2M1.encode(value);
                assert_eq!(round_to_e2m1(value), code as u32, "{value:e}");
                let nearest = nearest_element(value);
                assert_eq!(nearest.to_bits(), E2M1.decode(code).to_bits(), "{value:e}");
            }
        }
    }

    #[test]
    fn e2m1_is_drawn_as_the_reference_draws() {
        let eighths = (0..=56).map(|eighth| eighth as f32 / 8.0);
        for magnitude in around(eighths.chain([1e-45, f32::MAX, f32::INFINITY])) {
            for value in [magnitude, -magnitude] {
                for bits in (0..=u16::MAX).step_by(97).chain([0, 1 << 13, u16::MAX]) {
                    let expected = crate::stochastic_code(value, bits).into();
                    assert_eq!(round_stochastically(value, bits), expected, "{value:e} {bits}");
                }
            }
        }
    }

    #[test]
    fn elements_decode_as_the_format_says() {
        for code in 0..16 {
            let expected = E2M1.decode(code as u8);
            assert_eq!((twice_element(code) * 0.5).to_bits(), expected.to_bits());
            let signed = signed_twice(code as u8);
            assert_eq!((signed & 0x7F) as f32 * 0.5, expected.abs());
            assert_eq!(signed & 0x80 != 0, expected.is_sign_negative());
        }
    }
}
