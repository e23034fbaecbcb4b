//! The block scale with the smallest sum of squared errors.
//!
//! [`choose`] tries every scale. The engines try the few of a [`Window`] outside of which none can be
//! better, for any weights `w >= 0` of the errors. With `c = amax / s`:
//!
//! - Where `c <= 3.5`, all elements are at most 3, and half the scale has every value of the grid that s
//!   has up to 3: `E(s / 2) <= E(s)`. Half the scale exists but for odd multiples of the smallest one.
//! - Twice the scale gains `w (4c - 28) s^2` on the largest element, which saturates at s, and loses at
//!   most `w s^2 / 4` on every other: `E(2s) < E(s)` where `c > 7 + sum of the other w / (16 w)`. Twice the
//!   scale exists up to 224.
//! - No scale leaves less than `w (amax - 6s)^2`, so once that is more than the best, smaller scales need
//!   no look.
//!
//! What decides near a tie is rounding; the engines sum the same products in the same order.

use burn_fp4_formats::Fp4Format;

use crate::block::{Block, lowest};
use crate::four_over_six::sum_rows;
use crate::importance::BlockImportance;

/// The reference: the rule's own scale unless another is better, of several such the smallest.
pub(crate) fn choose(block: &Block<'_>, importance: BlockImportance<'_>) -> u8 {
    let cost = |scale| {
        let mut costs = [0.0; 16];
        for (row, cost) in costs.iter_mut().enumerate().take(block.rows.len()) {
            *cost = error(block, row, scale, importance);
        }
        sum_rows(costs)
    };
    let mut best = block.start(cost);
    if block.unit.searchable {
        for scale in block.scales() {
            let cost = cost(scale);
            if cost < best.0 {
                best = (cost, scale);
            }
        }
    }
    best.1
}

/// The weighted error of a row, summed in element order.
fn error(block: &Block<'_>, row: usize, scale: u8, importance: BlockImportance<'_>) -> f32 {
    let errors = block.errors(row, scale, &block.nearest(row, scale));
    errors.iter().enumerate().fold(0.0, |sum, (index, error)| match importance {
        BlockImportance::Channels(weights) => (weights[index] * error).mul_add(*error, sum),
        _ => error.mul_add(*error, sum),
    })
}

/// The scales that an exact search has to try, from the largest down.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Window {
    /// The first to try, unless `odd` is larger.
    pub(crate) high: u32,
    /// The last to try.
    pub(crate) low: u32,
    /// Before the others, the odd codes from this one down to `high`.
    pub(crate) odd: u32,
}

/// Rounding may move a limit by less than this; the limits are moved outward by as much.
const MARGIN: f32 = 1.0 / 1024.0;
/// Codes of E4M3 up to this one are the odd and even multiples of its smallest value.
const LAST_MULTIPLE: f32 = 15.0;
/// The smallest code of E4M3 whose double does not exist: 240.
const NO_DOUBLE: u32 = 0x77;

/// `c` beyond which twice the scale is better: 7 + sum of the other weights / (16 weight of the largest).
#[inline(always)]
pub(crate) fn crest(largest: f32, total: f32) -> f32 {
    if largest > 0.0 { 7.0 + (total - largest) / (16.0 * largest) } else { f32::INFINITY }
}

impl Window {
    /// The window of a block whose amax in its units is `amax`.
    #[inline(always)]
    pub(crate) fn new(format: Fp4Format, base: u32, amax: f32, crest: f32) -> Self {
        let above = amax / crest * (1.0 - MARGIN);
        let upto = amax / 3.5 * (1.0 + MARGIN);
        match format {
            Fp4Format::NvFp4 => {
                let multiples = (amax * (4.0 * 512.0)).min(LAST_MULTIPLE) as u32;
                Self {
                    high: e4m3_at_most(upto),
                    low: (e4m3_at_most(above) + 1).min(NO_DOUBLE),
                    odd: (multiples.max(1) - 1) | 1,
                }
            }
            Fp4Format::MxFp4 => {
                // Powers of two at most, and above, as the exponent field tells.
                let code = |value: f32| {
                    (base as i32 + (value.to_bits() >> 23) as i32 - 127).clamp(-1, 254)
                };
                let low = ((code(above) + 1) as u32).max(lowest(format, base));
                Self { high: code(upto).max(0) as u32, low, odd: 0 }
            }
        }
    }

    /// The first scale to try.
    #[inline(always)]
    pub(crate) fn first(&self) -> u32 {
        self.high.max(self.odd)
    }

    /// The scale to try after another; less than `low` where there is none. Wraps below 0.
    #[inline(always)]
    pub(crate) fn next(&self, scale: u32) -> u32 {
        let step = if scale > self.high + 1 { 2 } else { 1 };
        scale.wrapping_sub(step)
    }
}

/// The largest E4M3 code whose value is at most that of a non-negative f32.
#[inline(always)]
pub(crate) fn e4m3_at_most(value: f32) -> u32 {
    let normal = (value.to_bits() >> 20).wrapping_sub(120 << 3);
    let code = if value < 1.0 / 64.0 { (value * 512.0) as u32 } else { normal };
    code.min(126)
}

#[cfg(test)]
mod tests {
    use burn_fp4_formats::E4M3;

    use super::*;

    fn tried(window: Window) -> Vec<u32> {
        let mut tried = Vec::new();
        let mut scale = window.first();
        while scale >= window.low && scale <= 254 {
            tried.push(scale);
            scale = window.next(scale);
        }
        tried
    }

    #[test]
    fn codes_at_most() {
        for code in 0..126 {
            let [low, high] = [code, code + 1].map(|code| E4M3.decode(code));
            assert_eq!(e4m3_at_most(low), code.into());
            assert_eq!(e4m3_at_most(high.next_down()), code.into());
        }
        assert_eq!(e4m3_at_most(f32::MAX), 126);
    }

    #[test]
    fn windows_are_small_and_hold_the_scales_that_may_be_best() {
        for (block_size, most) in [(16u8, 10), (32, 12)] {
            for step in 0..40_000 {
                let amax = 2f32.powf(-13.0 + step as f32 / 1600.0);
                let tried =
                    tried(Window::new(Fp4Format::NvFp4, 0, amax, crest(1.0, block_size.into())));
                assert!(tried.len() <= most, "{amax}: {tried:?}");
                for code in 1..=126u8 {
                    let scale = E4M3.decode(code);
                    let odd_multiple = code <= 15 && code % 2 == 1 && scale <= 4.0 * amax;
                    let normal = scale * crest(1.0, block_size.into()) > amax || scale > 224.0;
                    if normal && (scale * 3.5 <= amax || odd_multiple) {
                        assert!(tried.contains(&code.into()), "{amax}: {code} of {tried:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn windows_of_powers_of_two() {
        let tried =
            |amax, n: u8| tried(Window::new(Fp4Format::MxFp4, 100, amax, crest(1.0, n.into())));
        assert_eq!(tried(4.0, 16), [100]);
        assert_eq!(tried(7.5, 16), [101, 100]);
        assert_eq!(tried(4.0, 32), [100, 99]);
        assert_eq!(tried(5.0, 32), [100]);
    }
}
