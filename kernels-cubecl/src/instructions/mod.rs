//! Instructions of NVIDIA's Hopper that CubeCL lacks.
//!
//! | file          | what it has                                                            |
//! |---------------|------------------------------------------------------------------------|
//! | `wgmma.rs`    | the trait [`WgmmaInstructions`]: copies and matrices of a warpgroup    |
//! | `ptx.rs`      | the instructions, as inline PTX                                        |
//! | `emulated.rs` | plain code in their place, for tests on other devices                  |

mod emulated;
#[cfg(feature = "cuda")]
mod ptx;
mod wgmma;

pub(crate) use emulated::EmulatedWgmma;
#[cfg(feature = "cuda")]
pub(crate) use ptx::{PtxWgmma, prefetch_l2};
pub(crate) use wgmma::{Operand, WgmmaInstructions};
