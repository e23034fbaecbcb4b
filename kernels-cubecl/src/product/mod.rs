//! Products with a packed weight.

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

pub use plan::{PlannedProduct, Product};
