//! The `--device` option.

use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
use clap::ValueEnum;

/// Burn devices that the examples run on.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum OnDevice {
    /// Burn's CPU backend.
    Flex,
    /// Burn's older CPU backend.
    #[cfg(feature = "ndarray")]
    Ndarray,
    /// The first NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda,
    /// CubeCL's CPU runtime.
    #[cfg(feature = "cpu")]
    Cpu,
    /// A GPU through wgpu.
    #[cfg(feature = "wgpu")]
    Wgpu,
}

impl OnDevice {
    /// Returns the device.
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
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Device::wgpu(DeviceKind::DefaultDevice),
        }
    }
}
