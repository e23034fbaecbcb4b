//! What is launched, and how: decided from the problem and the device alone.

mod capability;
mod launch;
mod problem;
mod recipe;
mod refusal;
mod share;
mod statistics;

pub use capability::{Capability, UNITS, Warpgroups};
pub use launch::{Launch, plan};
pub use problem::{Dtype, Operation, Problem};
pub use refusal::Refusal;
pub use share::{Conversion, Share, TileSharing};

#[cfg(test)]
pub(crate) use capability::GPU;
pub(crate) use launch::{COLUMN_CHUNK, common_power_of_two};
pub(crate) use recipe::Recipe;
pub(crate) use statistics::{FactorPlan, GramPlan, PANEL, plan_factor, plan_gram};
