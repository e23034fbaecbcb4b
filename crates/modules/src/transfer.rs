//! Transfers: vectors read back in one for each device, and tensors moved between devices.

use std::collections::BTreeMap;

use burn::tensor::{Device, Tensor};
use burn_fp4_ops::OpsError;

use crate::error::Fp4Error;

/// Reads named vectors back, in one transfer per device.
///
/// # Errors
/// [`Fp4Error::Device`].
pub(crate) fn read_vectors(
    vectors: Vec<(String, Tensor<1>)>,
) -> Result<BTreeMap<String, Vec<f32>>, Fp4Error> {
    let mut by_device: Vec<(Device, Vec<(String, Tensor<1>)>)> = Vec::new();
    for (path, vector) in vectors {
        let device = vector.device();
        match by_device.iter_mut().find(|(known, _)| *known == device) {
            Some((_, vectors)) => vectors.push((path, vector)),
            None => by_device.push((device, vec![(path, vector)])),
        }
    }
    let mut read = BTreeMap::new();
    for (_, vectors) in by_device {
        let (paths, tensors): (Vec<_>, Vec<_>) = vectors.into_iter().unzip();
        let lengths: Vec<_> = tensors.iter().map(|tensor| tensor.dims()[0]).collect();
        let data = Tensor::cat(tensors, 0).try_into_data();
        let data = data.map_err(|error| Fp4Error::Device { problem: format!("{error:?}") })?;
        let mut values = data.iter::<f32>();
        for (path, length) in paths.into_iter().zip(lengths) {
            read.insert(path, values.by_ref().take(length).collect());
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
