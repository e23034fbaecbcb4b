//! Matmuls with a packed weight.

mod chain;
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
mod small_m_input;
mod small_m_link;
mod small_m_load;
mod small_m_row;
mod small_m_slots;
mod small_m_store;
mod wgmma;
mod wgmma_fp8;

pub use chain::Chain;
pub use fp8_rows::fp8_rows;
pub use launch::{FamilyLaunch, FamilyOutputs, FamilyPlan};
pub use plan::{Fp8Plan, Matmul, MatmulPlan};
pub use prefetch::Prefetch;
pub use small_m_input::NormOperands;
