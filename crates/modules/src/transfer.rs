//! Work on devices: vectors read back in one transfer for each device, tensors moved between
//! devices, and panics of a device as errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Device, Tensor};
use burn_fp4_ops::{OpsError, panic_message};

use crate::error::Fp4Error;

/// Reads vectors back, in one transfer per device; the values are in the order of the vectors.
///
/// # Errors
/// [`Fp4Error::Device`].
pub(crate) fn read_vectors(vectors: Vec<Tensor<1>>) -> Result<Vec<Vec<f32>>, Fp4Error> {
    let mut read = vec![Vec::new(); vectors.len()];
    let mut by_device: Vec<(Device, Vec<usize>, Vec<Tensor<1>>)> = Vec::new();
    for (at, vector) in vectors.into_iter().enumerate() {
        let device = vector.device();
        match by_device.iter_mut().find(|(known, ..)| *known == device) {
            Some((_, numbers, vectors)) => {
                numbers.push(at);
                vectors.push(vector);
            }
            None => by_device.push((device, vec![at], vec![vector])),
        }
    }
    for (_, numbers, vectors) in by_device {
        let lengths: Vec<_> = vectors.iter().map(|vector| vector.dims()[0]).collect();
        let data = Tensor::cat(vectors, 0).try_into_data();
        let data = data.map_err(|error| Fp4Error::Device { problem: format!("{error:?}") })?;
        let mut values = data.iter::<f32>();
        for (at, length) in numbers.into_iter().zip(lengths) {
            read[at] = values.by_ref().take(length).collect();
        }
    }
    Ok(read)
}

/// Moves tensors between devices, and waits for all of these before and after: Burn's transfers
/// neither wait for what still uses the memory that they write to, nor hold what they read from
/// until it is read. Devices that are all the same are not waited for.
///
/// # Errors
/// [`Fp4Error::Device`].
pub(crate) fn moved<R>(devices: &[Device], transfer: impl FnOnce() -> R) -> Result<R, Fp4Error> {
    if devices.iter().all(|device| *device == devices[0]) {
        return Ok(transfer());
    }
    let mut different: Vec<&Device> = Vec::new();
    for device in devices {
        if !different.contains(&device) {
            different.push(device);
        }
    }
    let wait = || -> Result<(), OpsError> {
        different
            .iter()
            .try_for_each(|device| device.sync())
            .map_err(|error| OpsError::Device(error.to_string()))
    };
    wait()?;
    let result = transfer();
    wait()?;
    Ok(result)
}

/// Runs operations on devices, where one that fails may panic: that must neither cost the weights
/// that were taken out of a module nor the program.
pub(crate) fn caught<R, E: From<OpsError>>(run: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
    let result = catch_unwind(AssertUnwindSafe(run));
    result.unwrap_or_else(|panic| Err(OpsError::Device(panic_message(&*panic)).into()))
}
