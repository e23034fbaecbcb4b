//! [`Rounding`]: from elements to codes, given their scale.

use burn_fp4_formats::{E2M1, E2M1_VALUES};
use serde::{Deserialize, Serialize};

use crate::philox::philox;

/// Rounds an element to a code, given the scale of its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rounding {
    /// To the nearest code, ties to the even one.
    #[default]
    Nearest,
    /// To one of the two codes around the element, at random. The nearer one is likelier, so that
    /// the mean over many draws is the element itself. Scales are still rounded to nearest.
    Stochastic(Draw),
}

/// Selects the random numbers of a tensor: the same on every engine, device and launch.
///
/// An element's 16 bits come from [`philox`] keyed by `seed`, with the counter `(index / 8, 0,
/// step)`, where `index` counts the elements of the packed matrix.
///
/// ```
/// use burn_fp4_search::Draw;
/// use burn_fp4_search::philox::philox;
///
/// let draw = Draw { seed: 7, step: 3 };
/// assert_eq!((draw.key(), draw.counter()), ([7, 0], [3, 0]));
/// let words = philox([1, 0, 3, 0], draw.key()); // of elements 8 to 15
/// assert_eq!(draw.group(1)[..2], [words[0] as u16, (words[0] >> 16) as u16]);
/// let gradients = draw.stream(1); // for another tensor of the same step
/// assert!(gradients.seed != draw.seed && gradients.step == draw.step);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Draw {
    /// Seed of the sequence.
    pub seed: u64,
    /// Position in the sequence, such as a training step.
    pub step: u64,
}

impl Draw {
    /// Number of elements that share four words of 32 bits.
    pub const GROUP: u32 = 8;

    /// Returns the key.
    #[must_use]
    pub const fn key(self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }

    /// Returns the last two words of the counter.
    #[must_use]
    pub const fn counter(self) -> [u32; 2] {
        [self.step as u32, (self.step >> 32) as u32]
    }

    /// Returns the random bits of the eight neighbouring elements of a group.
    #[inline(always)]
    #[must_use]
    pub fn group(self, group: u32) -> [u16; Self::GROUP as usize] {
        let [low, high] = self.counter();
        let words = philox([group, 0, low, high], self.key());
        core::array::from_fn(|element| (words[element / 2] >> (16 * (element % 2))) as u16)
    }

    /// Derives another sequence of the same seed, for example for another tensor of the same step.
    #[must_use]
    pub fn stream(self, stream: u64) -> Self {
        let [a, b, c, d] = [stream as u32, (stream >> 32) as u32, u32::MAX, u32::MAX];
        let [low, high, ..] = philox([a, b, c, d], self.key());
        Self { seed: u64::from(high) << 32 | u64::from(low), ..self }
    }
}

/// Rounds an element to an E2M1 code: up in magnitude if `(bits + 1/2) / 2^16` is less than its
/// distance from the code below, as a fraction of the step to the code above. A NaN gives 0.
///
/// ```
/// use burn_fp4_search::formats::E2M1;
/// use burn_fp4_search::stochastic_code;
///
/// // 2.5 lies halfway from 2 to 3, so half of all bits round it up.
/// assert_eq!(E2M1.decode(stochastic_code(2.5, 0x7FFF)), 3.0);
/// assert_eq!(E2M1.decode(stochastic_code(2.5, 0x8000)), 2.0);
/// ```
#[must_use]
pub fn stochastic_code(element: f32, bits: u16) -> u8 {
    if element.is_nan() {
        return 0;
    }
    let magnitude = element.abs().min(E2M1.max_value());
    let below = E2M1_VALUES[..8].iter().rposition(|&value| value <= magnitude).expect("0 is one");
    let way = match E2M1_VALUES[..8].get(below + 1) {
        Some(above) => (magnitude - E2M1_VALUES[below]) / (above - E2M1_VALUES[below]),
        None => 0.0,
    };
    let up = f32::from(bits) + 0.5 < way * 65536.0;
    let sign = if element.is_sign_negative() { 8 } else { 0 };
    sign | (below as u8 + u8::from(up))
}
