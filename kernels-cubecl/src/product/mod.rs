//! Products with a packed weight.

mod few;
mod finish;
mod gemv;
mod launch;
mod mma;
mod plan;

pub use plan::{PlannedProduct, Product};
