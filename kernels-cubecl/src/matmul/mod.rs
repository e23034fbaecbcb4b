//! Matmuls with a packed weight.

mod emulated;
mod fp8_input;
mod fp8_rows;
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
mod wgmma_fp8;

pub use fp8_rows::fp8_rows;
pub use launch::FamilyPlan;
pub use plan::{Fp8Plan, Matmul, MatmulPlan};
pub use prefetch::Prefetch;
