//! What a plan needs to know about a device.

use cubecl::client::Client;
use cubecl::features::{Features, MmaConfig, Plane};
use cubecl::ir::{DeviceProperties, ElemType, FloatKind};

/// Units of a cube.
pub const UNITS: u32 = 256;

/// What a plan needs to know about a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Capability {
    /// Units that exchange values directly; 1 if none do.
    pub plane: u32,
    /// Cubes that fill the device, with [`UNITS`] units each.
    pub cubes: u32,
    /// Largest number of cubes along one dimension of a launch.
    pub max_cubes: u32,
    /// Whether its conversion to bf16 keeps subnormals.
    pub converts_bf16: bool,
    /// Whether planes multiply matrices of 16 x 16 and 16 x 8 halves.
    pub mma: bool,
    /// By what four planes multiply matrices together.
    pub wgmma: WgmmaSupport,
    /// Whether units gain by exchanging what they load or store through shared memory.
    pub fast_shared_memory: bool,
    /// Whether it computes in f64.
    pub doubles: bool,
}

/// By what four planes, a warpgroup, multiply matrices together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WgmmaSupport {
    /// By nothing.
    None,
    /// By plain loads and multiplications. It is slow, and no device says so of itself: with it a
    /// device without the instructions tests what is around them.
    Emulated,
    /// By WGMMA, the matrix instructions of compute capability 9.0, as inline PTX.
    Ptx,
}

impl Capability {
    /// What the device of a client can do.
    pub fn of(client: &Client) -> Self {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let one_size = hardware.plane_size_min == hardware.plane_size_max;
        let planes = one_size && properties.features.plane.contains(Plane::Ops);
        let cpu = hardware.num_cpu_cores.is_some();
        Self {
            plane: if planes { hardware.plane_size_min } else { 1 },
            // Each with several loads of 16 bytes a unit under way.
            cubes: 4 * hardware.num_streaming_multiprocessors.unwrap_or(32),
            max_cubes: hardware.max_cube_count.0,
            converts_bf16: !cpu,
            mma: planes && hardware.plane_size_min == 32 && multiplies_halves(&properties.features),
            wgmma: wgmma_support(properties),
            // There the units of a cube run one after the other, and a barrier is slow.
            fast_shared_memory: !cpu,
            doubles: properties.supports_type(ElemType::Float(FloatKind::F64)),
        }
    }
}

/// Whether bf16 and f16 have the instruction that `mma.rs` uses.
fn multiplies_halves(features: &Features) -> bool {
    [FloatKind::BF16, FloatKind::F16].into_iter().all(|half| {
        let (half, full) = (ElemType::Float(half), ElemType::Float(FloatKind::F32));
        let config = MmaConfig { a_type: half, b_type: half, cd_type: full, m: 16, n: 8, k: 16 };
        features.matmul.mma.contains(&config)
    })
}

/// Inline PTX is for one compute capability, and for CubeCL's LLVM compiler: its other one for CUDA
/// would have tensor maps.
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

/// A device without, for tests.
#[cfg(test)]
pub(crate) const CPU: Capability =
    Capability { plane: 1, cubes: 256, converts_bf16: false, fast_shared_memory: false, ..GPU };
