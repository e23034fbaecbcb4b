//! Matrix instructions, and others of NVIDIA's Hopper that CubeCL lacks.
//!
//! | file          | what it has                                                            |
//! |---------------|------------------------------------------------------------------------|
//! | `mma.rs`      | the trait [`MmaInstructions`]: matrices of a plane                     |
//! | `wgmma.rs`    | the trait [`WgmmaInstructions`]: copies and matrices of a warpgroup    |
//! | `ptx.rs`      | both, as inline PTX                                                    |
//! | `emulated.rs` | plain code in their place, for tests on other devices                  |
//! | `no_ptx.rs`   | what `ptx.rs` has besides, for builds without CUDA                     |

mod emulated;
mod mma;
#[cfg(not(feature = "cuda"))]
mod no_ptx;
#[cfg(feature = "cuda")]
mod ptx;
mod wgmma;

pub(crate) use emulated::{EmulatedMma, EmulatedWgmma};
pub(crate) use mma::{MmaInstructions, Pair, PlaneMma};
#[cfg(not(feature = "cuda"))]
pub(crate) use no_ptx::{arrive, await_count, load_vector_in_place, prefetch_l2, publish};
#[cfg(feature = "cuda")]
pub(crate) use ptx::{
    PtxMma, PtxWgmma, arrive, await_count, load_vector_in_place, prefetch_l2, publish,
};
pub(crate) use wgmma::{Operand, WgmmaInstructions};
