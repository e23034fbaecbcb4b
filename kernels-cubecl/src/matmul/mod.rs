//! Matmuls with a packed weight.

mod fp8_input;
mod fp8_rows;
mod gemv;
mod launch;
mod mma;
mod operands;
mod plan;
mod portable_cmma;
mod portable_gemm;
mod portable_gemv;
mod portable_plan;
mod prefetch;
mod small_m;
mod wgmma;
mod wgmma_fp8;

pub use fp8_rows::fp8_rows;
pub use launch::FamilyPlan;
pub use plan::{Fp8Plan, Matmul, MatmulPlan};
pub use prefetch::Prefetch;
