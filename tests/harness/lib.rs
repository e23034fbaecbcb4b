//! What the tests share: golden files, inputs, the engines under test, and the comparison of bits.

pub mod compare;
pub mod engines;
pub mod experts;
pub mod golden;
pub mod inputs;
pub mod modules;
pub mod tensors;
