//! Where matrices are quantized, as a user chooses it.

use clap::ValueEnum;
use serde::Serialize;

use crate::error::CliError;

/// Where matrices are quantized.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Device {
    /// The CPU, under the name of Burn's backend.
    #[default]
    Flex,
    /// The first NVIDIA GPU, if fp4 is built with the feature `cuda`.
    Cuda,
    /// The kernels for GPUs on the CPU, if fp4 is built with the feature `cpu`: slow, for tests.
    CpuRuntime,
    /// Refused, with the reason.
    #[value(hide = true)]
    Wgpu,
}

impl Device {
    /// Its name on the command line.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Cuda => "cuda",
            Self::CpuRuntime => "cpu-runtime",
            Self::Wgpu => "wgpu",
        }
    }

    /// The feature of this package that builds what it needs.
    const fn feature(self) -> &'static str {
        match self {
            Self::Flex | Self::Wgpu => "default",
            Self::Cuda => "cuda",
            Self::CpuRuntime => "cpu",
        }
    }

    /// The error of a device that is not in this program.
    pub(super) fn not_built(self) -> CliError {
        let problem = format!(
            "this fp4 is built without it; run `cargo install --path crates/cli --features {}`",
            self.feature()
        );
        CliError::Device { device: self.name(), problem }
    }

    /// The error of a device whose kernels do not quantize.
    pub(super) fn inexact(self) -> CliError {
        let problem = "its drivers may round quotients otherwise than the reference; leave \
                       --device out, and the CPU quantizes";
        CliError::Device { device: self.name(), problem: problem.to_owned() }
    }
}
