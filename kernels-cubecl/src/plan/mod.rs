//! Launch plans: pure functions of the problem and the device.

mod blueprint;
mod capability;
mod launch;
mod problem;
mod refusal;
mod statistics;
mod thread_tile;

pub use capability::{Capability, Conversion, Decoding, Portable, UNITS, WgmmaSupport};
pub use launch::{Launch, plan};
pub use problem::{Dtype, Operation, Problem};
pub use refusal::Refusal;
pub use thread_tile::{ThreadTile, TileSharing};

pub(crate) use blueprint::Blueprint;
pub(crate) use capability::EMULATED_MMA_WORDS;
#[cfg(test)]
pub(crate) use capability::{CPU, GPU};
pub(crate) use launch::{COLUMN_CHUNK, common_power_of_two};
pub(crate) use statistics::{FactorPlan, GramPlan, PANEL, plan_factor, plan_gram};
