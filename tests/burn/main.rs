//! Tests of tensors and modules on every Burn device, in one process: kernels that several of them
//! launch are compiled and tuned once. `cargo test --test burn lora` runs the tests of one file.

mod calibration;
mod decoder;
mod hadamard;
mod lora;
mod modules;
mod ops;
mod recipe;
mod training;
mod trust;
