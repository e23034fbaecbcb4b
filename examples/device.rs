//! The `--device` option.

use anyhow::Result;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use anyhow::ensure;
use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::DeviceKind;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use burn::tensor::DeviceType;
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
    ///
    /// # Errors
    /// The machine has none of this kind, or no driver for it.
    pub fn device(self) -> Result<Device> {
        #[cfg(any(feature = "cuda", feature = "wgpu"))]
        if let Some(kind) = self.gpu() {
            let name = self.to_possible_value().map(|value| value.get_name().to_owned());
            ensure!(
                !Device::enumerate(kind).is_empty(),
                "--device {}: this machine has none, or no driver for it; leave --device out",
                name.unwrap_or_default()
            );
        }
        Ok(match self {
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
        })
    }

    /// Returns the kind of a GPU.
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    fn gpu(self) -> Option<DeviceType> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda => Some(DeviceType::Cuda),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Some(DeviceType::Wgpu),
            _ => None,
        }
    }
}
