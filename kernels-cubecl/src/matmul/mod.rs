//! Matmuls with a packed weight.

mod emulated;
mod gemv;
mod instructions;
mod launch;
mod mma;
mod operands;
mod plan;
mod portable_cmma;
mod portable_gemm;
mod portable_gemv;
mod portable_plan;
mod prefetch;
#[cfg(feature = "cuda")]
mod ptx;
mod small_m;
mod wgmma;

pub use launch::FamilyPlan;
pub use plan::{Matmul, MatmulPlan};
pub use prefetch::Prefetch;
