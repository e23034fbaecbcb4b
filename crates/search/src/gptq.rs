//! The options of GPTQ, which propagates rounding errors from block to block.
//!
//! `hessian_factor.rs` has what it needs of the activations, `host/gptq.rs` the algorithm.

use serde::{Deserialize, Serialize};

/// In which order blocks of input channels are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockOrder {
    /// As they lie.
    Natural,
    /// Those with the largest sums of squares of activations first, while there are many channels
    /// left that their errors can be propagated to. Members of a block stay together.
    #[default]
    Activity,
}

/// The options of GPTQ. The default is what was best on held-out data; its damping the least that
/// is within a quarter of a percent of the best, over six layers of a language model and two texts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gptq {
    /// What is added to the diagonal of H, as a multiple of its mean: trust in the calibration.
    pub damping: f64,
    /// Which block comes first.
    pub order: BlockOrder,
    /// Sweeps that improve codes with the scales held.
    pub sweeps: usize,
    /// Sweeps that let every block choose its scale and codes anew.
    pub refits: usize,
}

impl Default for Gptq {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl Gptq {
    /// What was best on held-out data.
    pub const DEFAULT: Self =
        Self { damping: 0.3, order: BlockOrder::Activity, sweeps: 3, refits: 3 };

    /// Channels that are brought up to date together, so that the rest is by large products.
    pub const GROUP: usize = 128;

    /// As published: blocks as they lie, no sweeps.
    pub const TEXTBOOK: Self =
        Self { damping: 0.05, order: BlockOrder::Natural, sweeps: 0, refits: 0 };
}
