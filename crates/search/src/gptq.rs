//! The options of GPTQ, which propagates rounding errors from block to block.
//!
//! `hessian_factor.rs` derives what it needs of the activations; `host/gptq.rs` is the algorithm.

use core::hash::{Hash, Hasher};

use serde::{Deserialize, Serialize};

/// Orders the blocks of input channels for rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockOrder {
    /// In the order of the weight.
    Natural,
    /// Largest sum of squares of activations first, while many channels are left to propagate their
    /// errors to. Members of a block stay together.
    #[default]
    Activity,
}

/// The options of GPTQ. The default was the best on held-out data, with the least damping within a
/// quarter of a percent of the best, over six layers of a language model and two texts.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Gptq {
    /// Amount added to the diagonal of H, as a multiple of its mean. The less data the calibration
    /// has, the more damping it needs.
    pub damping: f64,
    /// Order of the blocks.
    pub order: BlockOrder,
    /// Number of sweeps that improve codes with the scales held.
    pub sweeps: usize,
    /// Number of sweeps in which every block chooses its scale and codes again.
    pub refits: usize,
    /// Share of the error of earlier quantized layers that a weight is changed to undo before it
    /// is rounded, from 0 to 1 (all, GPTAQ, arXiv 2504.02692). Only layers quantized one after the
    /// other know this error, the [drift](crate::Gram::drift) of their inputs; elsewhere it has no
    /// effect. The tensor operations of `burn-fp4-ops` correct weights, `quantize` of this crate
    /// does not. A tensor scale that was measured before stays. A larger share fits the
    /// calibration more closely: 0.5 lost least of 0, 0.5 and 1 in a language model.
    pub correction: f64,
}

impl PartialEq for Gptq {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Gptq {}

impl Hash for Gptq {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl Default for Gptq {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl Gptq {
    /// The best options on held-out data.
    pub const DEFAULT: Self =
        Self { damping: 0.3, order: BlockOrder::Activity, sweeps: 3, refits: 3, correction: 0.5 };

    /// Number of channels updated together, so that all channels beyond them are updated by one
    /// large product.
    pub const GROUP: usize = 128;

    /// GPTQ as published: blocks in the order of the weight, no sweeps.
    pub const ORIGINAL: Self =
        Self { damping: 0.05, order: BlockOrder::Natural, sweeps: 0, refits: 0, correction: 0.0 };

    /// The options by bits, which are equal where they are the same options.
    fn key(&self) -> (u64, BlockOrder, usize, usize, u64) {
        let [damping, correction] = [self.damping, self.correction].map(f64::to_bits);
        (damping, self.order, self.sweeps, self.refits, correction)
    }
}
