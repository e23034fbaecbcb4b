//! The memory bandwidth of decoding, compared with that of a copy.

use std::time::Instant;

use anyhow::Result;
use burn::tensor::{DType, Device, Tensor};
use serde::Serialize;

use super::generate::Generated;
use super::model::{Llama, Projection};

/// Values of the larger of the tensors that are copied: 0.5 GB, which devices bind, and half of it
/// is more than any cache.
const VALUES: usize = 1 << 27;
const COPIES: usize = 30;

/// Memory that a decode step reads, and how fast.
#[derive(Debug, Clone, Serialize)]
pub struct Bandwidth {
    /// Bytes of matrices and of the KV cache that a decode step reads, in GB.
    pub gb_per_step: f64,
    /// They are read at this rate, on average.
    pub gb_per_second: f64,
    /// Bytes that copies of large tensors read and write in a second, in GB.
    pub copy_gb_per_second: f64,
    /// Part of the copy's rate.
    pub share_of_copy: f64,
}

impl Bandwidth {
    /// Measures a copy, and compares the decode steps of a generation with it. Returns `None` if no
    /// steps were timed, or the copy could not be.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn of<L: Projection>(
        model: &Llama<L>,
        generated: &Generated,
        device: &Device,
    ) -> Result<Option<Self>> {
        let Some(seconds) = generated.seconds_per_token else { return Ok(None) };
        // The mean of the steps.
        let sequences = generated.sequences.len();
        let tokens = generated.sequences.iter().map(Vec::len).max().unwrap_or(0);
        let context = generated.prompt_tokens + tokens / 2;
        let bytes = model.bytes_of_weights() + sequences * context * model.bytes_of_position();
        let Some(copy) = copy(device)? else { return Ok(None) };
        let (gb_per_step, copy_gb_per_second) = (bytes as f64 / 1e9, copy / 1e9);
        let gb_per_second = gb_per_step / seconds;
        let share_of_copy = gb_per_second / copy_gb_per_second;
        Ok(Some(Self { gb_per_step, gb_per_second, copy_gb_per_second, share_of_copy }))
    }
}

/// Measures how many bytes a second a device reads and writes, by copies of two sizes: the host
/// waits equally long for both. Returns `None` if it waits so unevenly that the larger is faster.
fn copy(device: &Device) -> Result<Option<f64>> {
    let small = seconds_of_copy(VALUES / 2, device)?;
    let large = seconds_of_copy(VALUES, device)?;
    let bytes = 2 * (VALUES / 2) * size_of::<f32>();
    Ok((large > small).then(|| bytes as f64 / (large - small)))
}

/// Returns the time of the fastest of some copies.
fn seconds_of_copy(values: usize, device: &Device) -> Result<f64> {
    let mut values = Tensor::<1>::zeros([values], (device, DType::F32));
    let mut fastest = f64::MAX;
    for _ in 0..COPIES {
        device.sync()?;
        let start = Instant::now();
        // Burn has no copy of its own that is sure to run.
        values = values + 1.0;
        device.sync()?;
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    Ok(fastest)
}
