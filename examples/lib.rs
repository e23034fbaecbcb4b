//! Shared parts of the examples: data, models, and output. The models are ordinary Burn modules;
//! only the linear layers of the character transformer know of FP4.

#![allow(clippy::must_use_candidate, reason = "no user calls it")]

mod device;
pub mod digits;
pub mod encoder;
mod exit;
pub mod plot;
pub mod progress;
pub mod random;
pub mod table;
pub mod text;
pub mod training;

pub use device::OnDevice;
pub use exit::{exit_code, in_one_line, print_text};
