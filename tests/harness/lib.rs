//! Shared parts of the tests: golden files, inputs, the engines under test, the comparison of bits,
//! and a parser of the project's own source.

#![allow(clippy::must_use_candidate, reason = "no user calls it")]

pub mod compare;
pub mod engines;
pub mod experts;
pub mod golden;
pub mod house;
pub mod inputs;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod kernels;
pub mod modules;
#[cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]
pub mod on_device;
pub mod tensors;

/// The README, whose code is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
pub struct Readme;
