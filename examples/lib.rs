//! What the examples quantize and train: data, and ordinary Burn modules that know nothing of FP4
//! but for the linear layers of the character transformer; and how they show what they do.

mod device;
pub mod digits;
pub mod encoder;
pub mod plot;
pub mod progress;
pub mod random;
pub mod text;
pub mod training;

pub use device::OnDevice;
