//! Devices: the operations of a backend, and a file for each device with code of its own.
//!
//! | file                     | what it holds                                                     |
//! |--------------------------|-------------------------------------------------------------------|
//! | `extension.rs`           | [`Fp4Backend`](crate::Fp4Backend), and the list of devices        |
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
//! A device in host memory is an implementation of `HostDevice` in `host.rs`, a line in the
//! attribute of [`Fp4Backend`](crate::Fp4Backend), and an arm of `row` in this file.

// Burn 0.22 deprecates `NdArray`.
#![allow(deprecated)]
// Without any device there is no interpreter.
#![cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "cube")),
    allow(dead_code, unreachable_code, unused_imports)
)]

#[cfg(feature = "autodiff")]
mod autodiff;
pub(crate) mod backend_interpreter;
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

use burn::backend::DispatchDevice;
use burn::tensor::{Device, TensorData};
use burn_router::TensorInterpreter;

use self::backend_interpreter::BackendInterpreter;
use crate::error::OpsError;

/// Facts of a device.
struct DeviceRow {
    /// True if its tensors are in host memory.
    is_host: bool,
    /// True if a tensor can repeat one value in any shape without copies.
    repeats_values: bool,
    /// Makes the interpreter of recorded operations.
    interpreter: Box<dyn FnOnce() -> Box<dyn BackendInterpreter>>,
}

/// Returns the facts of a device, if this build has code for it.
fn row(device: &Device) -> Option<DeviceRow> {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "flex")]
        &DispatchDevice::Flex(device) => Some(DeviceRow {
            is_host: true,
            repeats_values: true,
            interpreter: Box::new(move || {
                Box::new(TensorInterpreter::<burn::backend::Flex>::new(device))
            }),
        }),
        #[cfg(feature = "ndarray")]
        &DispatchDevice::NdArray(device) => Some(DeviceRow {
            is_host: true,
            repeats_values: false,
            interpreter: Box::new(move || {
                Box::new(TensorInterpreter::<burn::backend::NdArray>::new(device))
            }),
        }),
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(device) => {
            let device = device.clone();
            Some(DeviceRow {
                is_host: false,
                repeats_values: true,
                interpreter: Box::new(move || {
                    Box::new(TensorInterpreter::<burn::backend::Cube>::new(device))
                }),
            })
        }
        #[allow(unreachable_patterns)]
        _ => None,
    }
}

/// Returns true if tensors of a device are in host memory.
#[must_use]
pub fn is_host(device: &Device) -> bool {
    row(device).is_some_and(|row| row.is_host)
}

/// Moves the values of a weight to memory that a device reads fast: on `flex` to huge pages, which
/// weights share. A tensor made of the data keeps that memory. Other devices copy the data anyway.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::weight_data;
///
/// let (device, data) = (Device::flex(), TensorData::from([[0.5f32; 64]; 64]));
/// let weight = Tensor::<2>::from_data(weight_data(data.clone(), &device), &device);
/// assert_eq!(weight.into_data(), data);
/// ```
#[must_use]
pub fn weight_data(data: TensorData, device: &Device) -> TensorData {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => huge_pages::moved(data),
        #[allow(unreachable_patterns)]
        _ => data,
    }
}

/// Returns true if tensors of a device can repeat one value in any shape without copies.
#[must_use]
pub fn repeats_values(device: &Device) -> bool {
    row(device).is_none_or(|row| row.repeats_values)
}

/// Makes an interpreter of recorded operations on a device.
///
/// # Errors
/// [`OpsError::Device`] if the device cannot run recorded operations.
pub(crate) fn interpreter(device: &Device) -> Result<Box<dyn BackendInterpreter>, OpsError> {
    match row(device) {
        Some(row) => Ok((row.interpreter)()),
        None => Err(OpsError::Device(format!("{device:?} cannot run recorded operations"))),
    }
}
