//! Devices: the operations of a backend, and a file for each device with code of its own.
//!
//! | file                     | what it holds                                                     |
//! |--------------------------|-------------------------------------------------------------------|
//! | `extension.rs`           | [`Fp4Backend`](crate::Fp4Backend), and the devices, a row each    |
//! | `host.rs`                | the host engine on devices in host memory: `flex`, `ndarray`      |
//! | `decoder.rs`             | operations of a decoder, on devices with code of their own        |
//! | `flex_decoder.rs`        | these on `flex`                                                   |
//! | `huge_pages.rs`          | memory of weights, which share huge pages                         |
//! | `scratch.rs`             | memory of a dequantized weight, kept for the next one             |
//! | `cube/`                  | kernels on CUDA, wgpu and CubeCL's CPU runtime; captured passes   |
//! | `no_graph.rs`            | captured passes in a build without Cube devices                   |
//! | `portable/`              | the same bits from tensor operations, for any other device        |
//! | `autodiff.rs`            | gradients                                                         |
//! | `backend_interpreter.rs` | recorded operations, on any of them                               |
//!
//! A device in host memory is an implementation of `HostDevice` in `host.rs`, and in `extension.rs`
//! a line in the attribute of [`Fp4Backend`](crate::Fp4Backend) and an arm of `row`.

// Burn 0.22 deprecates `NdArray`.
#![allow(deprecated)]
// Without any device there is no interpreter.
#![cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "cube")),
    allow(dead_code, unreachable_code, unused_imports)
)]

#[cfg(feature = "autodiff")]
mod autodiff;
mod backend_interpreter;
#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod decoder;
pub(crate) mod extension;
#[cfg(feature = "flex")]
mod flex_decoder;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod host;
#[cfg(feature = "flex")]
mod huge_pages;
#[cfg(not(feature = "cube"))]
pub(crate) mod no_graph;
pub mod portable;
#[cfg(feature = "flex")]
mod scratch;

#[cfg(feature = "cube")]
pub(crate) use cube::graph::readable;
#[cfg(not(feature = "cube"))]
pub(crate) use no_graph::readable;
