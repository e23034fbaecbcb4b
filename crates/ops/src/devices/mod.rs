//! The devices: what a backend has to do, and a file for each that does it in its own way.
//!
//! | file             | what it holds                                                            |
//! |------------------|--------------------------------------------------------------------------|
//! | `extension.rs`   | what a backend has to do, and the list of those that do                  |
//! | `host.rs`        | the host engine on the values of tensors                                 |
//! | `host_device.rs` | the same for every device in host memory: `flex.rs`, `ndarray.rs`        |
//! | `reuse.rs`       | memory of a dequantized weight, kept for the next one                    |
//! | `cube/`          | the kernels on CUDA and CubeCL's CPU runtime                             |
//! | `portable/`      | the same bits from tensor operations, for any other device               |
//! | `autodiff.rs`    | gradients                                                                |
//! | `interpreter.rs` | recorded operations, on any of them                                      |
//!
//! A device in host memory is a file that implements `HostDevice`, a line in the attribute of
//! [`Fp4Backend`](crate::Fp4Backend), and an arm of `row` in this file.

// Burn 0.22 deprecates `NdArray`.
#![allow(deprecated)]
// Without any device there is nothing to interpret on.
#![cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "cube")),
    allow(dead_code, unreachable_code, unused_imports)
)]

#[cfg(feature = "autodiff")]
mod autodiff;
#[cfg(feature = "cube")]
pub(crate) mod cube;
pub(crate) mod extension;
#[cfg(feature = "flex")]
mod flex;
// Without `flex`, which has every dtype, not all of it is used.
#[cfg_attr(not(feature = "flex"), allow(dead_code))]
pub(crate) mod host;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod host_device;
pub(crate) mod interpreter;
#[cfg(feature = "ndarray")]
mod ndarray;
pub mod portable;
#[cfg(feature = "flex")]
mod reuse;

use burn::backend::DispatchDevice;
use burn::tensor::Device;
use burn_router::TensorInterpreter;

use self::interpreter::Interpret;
use crate::error::OpsError;

/// The facts of a device.
struct DeviceRow {
    /// Whether its tensors are in host memory.
    is_host: bool,
    /// Whether a tensor can show one value in any shape, without a copy for every element.
    repeats_values: bool,
    /// Makes what runs recorded operations.
    interpreter: Box<dyn FnOnce() -> Box<dyn Interpret>>,
}

/// The facts of a device that this build has code for: an arm for each.
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

/// Whether tensors of a device can show one value in any shape, without a copy for every element.
#[must_use]
pub fn repeats_values(device: &Device) -> bool {
    row(device).is_none_or(|row| row.repeats_values)
}

/// Runs recorded operations on a device.
///
/// # Errors
/// [`OpsError::Device`] if the device cannot run recorded operations.
pub(crate) fn interpreter(device: &Device) -> Result<Box<dyn Interpret>, OpsError> {
    match row(device) {
        Some(row) => Ok((row.interpreter)()),
        None => Err(OpsError::Device(format!("{device:?} does not replay operations"))),
    }
}
