//! Products with a packed weight.

mod finish;
mod gemv;
mod launch;
mod mma;
mod plan;

pub use plan::{PlannedProduct, Product};
