//! Products with a packed weight.

mod ahead;
mod few;
mod finish;
mod gemv;
mod instructions;
mod launch;
mod mma;
mod plain;
mod plan;
#[cfg(feature = "cuda")]
mod ptx;
mod wgmma;

pub use ahead::NextWeight;
pub use plan::{PlannedProduct, Product};
