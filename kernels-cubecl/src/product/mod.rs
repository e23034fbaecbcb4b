//! Products with a packed weight.

mod finish;
mod gemv;
mod mma;
mod plan;

pub use gemv::gemv;
pub use mma::mma;
pub use plan::{Gemv, Mma, Product, ProductPlan};
