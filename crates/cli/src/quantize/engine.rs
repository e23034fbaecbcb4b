//! Engines that quantize matrices, with the same bits: the host, or the kernels of a device.

use super::device::Device;
#[cfg(any(feature = "cpu", feature = "cuda"))]
use super::kernels::Kernels;
use crate::error::CliError;

/// An engine that quantizes matrices.
pub(super) enum Engine {
    /// The host engine, on all cores.
    Host,
    /// CubeCL kernels.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    Kernels(Kernels),
}

/// Threads of a line of work.
#[derive(Debug, Clone, Copy)]
pub(super) struct Threads {
    /// Which read.
    pub(super) readers: usize,
    /// Which quantize.
    pub(super) quantizers: usize,
}

impl Engine {
    /// Makes a device ready.
    ///
    /// # Errors
    /// [`CliError::Device`] if this program is built without it, or the machine has none.
    pub(super) fn open(device: Device) -> Result<Self, CliError> {
        match device {
            Device::Flex => Ok(Self::Host),
            Device::Wgpu => Err(device.inexact()),
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Device::Cuda | Device::CpuRuntime => Ok(Self::Kernels(Kernels::open(device)?)),
            #[cfg(not(any(feature = "cpu", feature = "cuda")))]
            Device::Cuda | Device::CpuRuntime => Err(device.not_built()),
        }
    }

    /// Threads that keep it busy.
    pub(super) const fn threads(&self) -> Threads {
        match self {
            // It takes all cores for one group of weights.
            Self::Host => Threads { readers: 1, quantizers: 1 },
            // While one waits for its kernels, others send their values and fetch their codes.
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Self::Kernels(_) => Threads { readers: 4, quantizers: 3 },
        }
    }
}
