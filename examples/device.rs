//! The choice of a device on the command line.

use burn::tensor::Device;
use clap::ValueEnum;

/// The Burn devices that the examples run on.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum OnDevice {
    /// Burn's own, on the host.
    Flex,
    /// Burn's older one, on the host.
    #[cfg(feature = "ndarray")]
    Ndarray,
    /// The first NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda,
    /// CubeCL's runtime for hosts.
    #[cfg(feature = "cpu")]
    Cpu,
}

impl OnDevice {
    /// The device.
    pub fn device(self) -> Device {
        match self {
            Self::Flex => Device::flex(),
            // Burn 0.22 deprecates it; the two devices give the same bits.
            #[cfg(feature = "ndarray")]
            #[allow(deprecated)]
            Self::Ndarray => Device::ndarray(),
            #[cfg(feature = "cuda")]
            Self::Cuda => Device::cuda(0),
            #[cfg(feature = "cpu")]
            Self::Cpu => Device::cpu(),
        }
    }
}
