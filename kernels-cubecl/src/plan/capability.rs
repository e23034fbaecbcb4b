//! Facts about a device that plans depend on.

use cubecl::client::Client;
use cubecl::features::{Features, MmaConfig, Plane};
use cubecl::ir::{DeviceProperties, ElemType, FloatKind};

/// Units of a cube: threads of a thread block.
pub const UNITS: u32 = 256;

/// Facts about a device that plans depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Capability {
    /// Units of a plane (threads of a warp), which exchange values directly; 1 without planes.
    pub plane: u32,
    /// Cubes of [`UNITS`] units that fill the device.
    pub cubes: u32,
    /// Largest number of cubes along one dimension of a launch.
    pub max_cubes: u32,
    /// True if the device's conversion to bf16 keeps subnormals.
    pub converts_bf16: bool,
    /// True if a plane has the MMA instruction `m16n8k16` for f16 and bf16.
    pub mma: bool,
    /// Matrix instructions of a warpgroup.
    pub wgmma: WgmmaSupport,
    /// True if a detour through shared memory pays for coalesced loads and stores.
    pub fast_shared_memory: bool,
    /// True if the device computes in f64.
    pub doubles: bool,
}

/// Matrix instructions of a warpgroup, which is four planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WgmmaSupport {
    /// None.
    None,
    /// Plain loads and multiplications in their place. They are slow, and [`Capability::of`] never
    /// returns them: tests set them to run `wgmma.rs` on a device without WGMMA.
    Emulated,
    /// WGMMA of compute capability 9.0, as inline PTX.
    Ptx,
}

impl Capability {
    /// Reads the capability of a client's device.
    #[must_use]
    pub fn of(client: &Client) -> Self {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let one_size = hardware.plane_size_min == hardware.plane_size_max;
        let planes = one_size && properties.features.plane.contains(Plane::Ops);
        let cpu = hardware.num_cpu_cores.is_some();
        Self {
            plane: if planes { hardware.plane_size_min } else { 1 },
            // Four cubes per multiprocessor, so that several loads of 16 bytes per unit are in
            // flight.
            cubes: 4 * hardware.num_streaming_multiprocessors.unwrap_or(32),
            max_cubes: hardware.max_cube_count.0,
            converts_bf16: !cpu,
            mma: planes && hardware.plane_size_min == 32 && multiplies_halves(&properties.features),
            wgmma: wgmma_support(properties),
            // The CPU runtime runs the units of a cube one after the other: barriers are slow.
            fast_shared_memory: !cpu,
            doubles: properties.supports_type(ElemType::Float(FloatKind::F64)),
        }
    }
}

/// Returns true if the device has the instruction of `mma.rs` for bf16 and f16.
fn multiplies_halves(features: &Features) -> bool {
    [FloatKind::BF16, FloatKind::F16].into_iter().all(|half| {
        let (half, full) = (ElemType::Float(half), ElemType::Float(FloatKind::F32));
        let config = MmaConfig { a_type: half, b_type: half, cd_type: full, m: 16, n: 8, k: 16 };
        features.matmul.mma.contains(&config)
    })
}

/// Inline PTX needs one compute capability and CubeCL's LLVM compiler. Devices of its other CUDA
/// compiler have tensor maps (TMA).
fn wgmma_support(properties: &DeviceProperties) -> WgmmaSupport {
    let llvm = properties.features.tma.is_empty();
    if cfg!(feature = "cuda") && properties.identity.fingerprint == "ptx_sm90" && llvm {
        WgmmaSupport::Ptx
    } else {
        WgmmaSupport::None
    }
}

/// A device with planes and matrix instructions, for tests.
#[cfg(test)]
pub(crate) const GPU: Capability = Capability {
    plane: 32,
    cubes: 528,
    max_cubes: u32::MAX,
    converts_bf16: true,
    mma: true,
    wgmma: WgmmaSupport::None,
    fast_shared_memory: true,
    doubles: true,
};

/// A device without planes and matrix instructions, for tests.
#[cfg(test)]
pub(crate) const CPU: Capability =
    Capability { plane: 1, cubes: 256, converts_bf16: false, fast_shared_memory: false, ..GPU };
