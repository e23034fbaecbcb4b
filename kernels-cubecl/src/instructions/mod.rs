//! Matrix instructions, and others of NVIDIA's Hopper that CubeCL lacks.
//!
//! | file          | what it has                                                            |
//! |---------------|------------------------------------------------------------------------|
//! | `mma.rs`      | the trait [`MmaInstructions`]: matrices of a plane                     |
//! | `wgmma.rs`    | the trait [`WgmmaInstructions`]: copies and matrices of a warpgroup    |
//! | `ptx.rs`      | both, as inline PTX                                                    |
//! | `emulated.rs` | plain code in their place, for tests on other devices                  |

mod emulated;
mod mma;
#[cfg(feature = "cuda")]
mod ptx;
mod wgmma;

pub(crate) use emulated::{EmulatedMma, EmulatedWgmma};
pub(crate) use mma::{MmaInstructions, Pair, PlaneMma};
#[cfg(feature = "cuda")]
pub(crate) use ptx::{PtxMma, PtxWgmma, prefetch_l2};
pub(crate) use wgmma::{Operand, WgmmaInstructions};
