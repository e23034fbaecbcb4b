//! Facts about a device that plans depend on.

use cubecl::client::Client;
use cubecl::features::{Features, MmaConfig, Plane, TypeUsage};
use cubecl::ir::{DeviceProperties, ElemType, FloatKind};

use super::problem::Dtype;
use super::refusal::Refusal;

/// Units of a cube: threads of a thread block.
pub const UNITS: u32 = 256;

/// Values of shared memory with which a unit shows its fragments of an emulated matrix instruction
/// of a plane to others.
pub(crate) const EMULATED_MMA_WORDS: u32 = 6;

/// Bytes of shared memory that kernels for the wgpu runtime use: the least that WebGPU allows.
const SHARED_MEMORY: usize = 16 << 10;

/// Facts about a device that plans depend on.
///
/// ```
/// use burn_fp4_cubecl::{Capability, Decoding, Dtype, Operation, Problem, WgmmaSupport, plan};
/// use burn_fp4_search::Fp4Scheme;
/// use burn_fp4_search::host::View;
///
/// // A GPU of 132 multiprocessors, to plan for it without one.
/// let gpu = Capability {
///     plane: 32,
///     cubes: 4 * 132,
///     max_cubes: u32::MAX,
///     converts_bf16: true,
///     mma: true,
///     wgmma: WgmmaSupport::None,
///     fast_shared_memory: true,
///     doubles: true,
///     decoding: Decoding::Subnormals,
///     portable: None,
/// };
/// let (view, scheme) = (View::rows(3, 1024), Fp4Scheme::nvfp4());
/// let problem = Problem { view, dtype: Dtype::Bf16, scheme };
/// assert_eq!(plan(Operation::RowAmax, &problem, &gpu)?.items, 3 * 32); // a plane for each row
/// let host = Capability { plane: 1, ..gpu };
/// assert_eq!(plan(Operation::RowAmax, &problem, &host)?.items, 3);
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
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
    /// True if a plane has the MMA instruction `m16n8k16` for f16 and bf16. Tests set it for a
    /// device without planes, which then emulates the instruction in matmuls.
    pub mma: bool,
    /// Matrix instructions of a warpgroup.
    pub wgmma: WgmmaSupport,
    /// True if a detour through shared memory pays for coalesced loads and stores.
    pub fast_shared_memory: bool,
    /// True if the device computes in f64.
    pub doubles: bool,
    /// Conversion of codes and block scales to floats.
    pub decoding: Decoding,
    /// Limits of a device whose matmuls run as `portable_gemv.rs` and `portable_gemm.rs`: one of
    /// CubeCL's wgpu runtime. None on CUDA and on the CPU runtime.
    pub portable: Option<Portable>,
}

/// Conversion of codes and block scales to floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Decoding {
    /// Codes become subnormals, which a multiplication restores: the fewest instructions, if the
    /// device keeps subnormals of f16 and f32.
    Subnormals,
    /// Codes of matmuls become subnormals of f16, everything else is decoded as with
    /// [`Integers`](Self::Integers). The driver's conversion from f16 keeps them.
    HalfSubnormals,
    /// Integer arithmetic makes normal floats, for drivers that flush subnormals to zero.
    Integers,
}

/// Limits of a device of CubeCL's wgpu runtime.
///
/// ```
/// use burn_fp4_cubecl::{Capability, Decoding, Dtype, Matmul, Portable};
/// use burn_fp4_search::formats::Fp4Format;
/// # let gpu = Capability {
/// #     plane: 32, cubes: 528, max_cubes: u32::MAX, converts_bf16: true, mma: true,
/// #     wgmma: burn_fp4_cubecl::WgmmaSupport::None, fast_shared_memory: true, doubles: true,
/// #     decoding: burn_fp4_cubecl::Decoding::Subnormals, portable: None,
/// # };
///
/// let portable = Portable {
///     f16: true,
///     bf16: false,
///     cmma_f16: true,
///     cmma_bf16: false,
///     decoder: true,
///     units: 256,
///     shared_memory: 48 << 10,
/// };
/// // `gpu` is the one in the example of `Capability`.
/// let device = Capability { portable: Some(portable), decoding: Decoding::Integers, ..gpu };
/// let (format, block_size) = (Fp4Format::NvFp4, 16);
/// let matmul = |m, dtype| Matmul { m, n: 8192, k: 8192, format, block_size, dtype };
/// let few = matmul(8, Dtype::F16);
/// assert_eq!(few.plan(&device)?, Some(few.portable_gemv(&device)?));
/// let many = matmul(9, Dtype::F16);
/// assert_eq!(many.plan(&device)?, Some(many.portable_cmma(&device)?));
/// let wide = matmul(64, Dtype::F32);
/// assert_eq!(wide.plan(&device)?, Some(wide.portable_gemm(&device)?));
/// assert!(matmul(8, Dtype::Bf16).plan(&device).is_err(), "no buffer holds bf16");
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Portable {
    /// True if kernels take buffers of f16; false in WGSL.
    pub f16: bool,
    /// True if they take buffers of bf16; false in WGSL.
    pub bf16: bool,
    /// True if a plane of 32 units multiplies 16 x 16 matrices of f16, with sums in f32.
    pub cmma_f16: bool,
    /// True if it multiplies such matrices of bf16.
    pub cmma_bf16: bool,
    /// False if the kernels of a decoder failed the self-test.
    pub decoder: bool,
    /// Largest number of units of a cube.
    pub units: u32,
    /// Bytes of shared memory of a cube; 0 for SPIR-V on software rasterizers such as Mesa's
    /// lavapipe. CubeCL 0.11 compiles shared memory to invalid SPIR-V for drivers without
    /// `VK_KHR_workgroup_memory_explicit_layout`, which crash on it. Drivers of graphics cards have
    /// the extension, and WGSL needs none.
    pub shared_memory: usize,
}

impl Portable {
    /// Reads the limits of a device with planes of this size, by the name of its runtime.
    fn of(properties: &DeviceProperties, plane: u32, runtime: &str) -> Self {
        let (spirv, wgsl) = (runtime.contains("spirv"), runtime.contains("wgsl"));
        // CubeCL 0.11 writes two halves of a word as `bitcast<vec2<f16>>`, which wgpu's compiler of
        // WGSL (naga 30) does not take.
        let holds = |kind| {
            let usage = properties.type_usage(ElemType::Float(kind));
            usage.contains(TypeUsage::Buffer) && !wgsl
        };
        let multiplies = |half| {
            let (half, full) = (ElemType::Float(half), ElemType::Float(FloatKind::F32));
            let config =
                MmaConfig { a_type: half, b_type: half, cd_type: full, m: 16, n: 16, k: 16 };
            plane == 32 && properties.features.matmul.cmma.contains(&config)
        };
        Self {
            f16: holds(FloatKind::F16),
            bf16: holds(FloatKind::BF16),
            cmma_f16: multiplies(FloatKind::F16),
            cmma_bf16: multiplies(FloatKind::BF16),
            decoder: true,
            units: properties.hardware.max_units_per_cube,
            shared_memory: match properties.identity.physical {
                None if spirv => 0,
                _ => properties.hardware.max_shared_memory_size,
            },
        }
    }

    /// Returns true if cubes have enough shared memory for kernels that use it.
    pub(crate) const fn shares(&self) -> bool {
        self.shared_memory >= SHARED_MEMORY
    }

    /// Returns true if kernels take buffers of a dtype. Where they do not, a caller can multiply in
    /// f32 and round the outputs.
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use burn_fp4_cubecl::cubecl::Device;
    /// use burn_fp4_cubecl::{Capability, Dtype};
    ///
    /// let device = Capability::of(&Device::default().client());
    /// let holds = |dtype| device.portable.is_none_or(|portable| portable.holds(dtype));
    /// assert!(holds(Dtype::F32) && holds(Dtype::F16)); // the CPU runtime has no limits
    /// # }
    /// ```
    #[must_use]
    pub fn holds(&self, dtype: Dtype) -> bool {
        match dtype {
            Dtype::F32 => true,
            Dtype::F16 => self.f16,
            Dtype::Bf16 => self.bf16,
        }
    }
}

/// Matrix instructions of a warpgroup, which is four planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WgmmaSupport {
    /// None.
    None,
    /// Plain loads and multiplications in their place. They are slow, and [`Capability::of`] never
    /// returns them: tests set them to run `matmul/wgmma.rs` and `decoder/flash.rs` on a device
    /// without WGMMA.
    Emulated,
    /// WGMMA of compute capability 9.0, as inline PTX.
    Ptx,
}

impl WgmmaSupport {
    /// Returns true if kernels are launched with the instructions themselves. In a build without
    /// CUDA they are emulated, whatever the device is said to have.
    pub(crate) fn is_native(self) -> bool {
        cfg!(feature = "cuda") && self == Self::Ptx
    }
}

impl Capability {
    /// Returns the values of shared memory with which some units emulate the matrix instruction of
    /// a plane; none where planes have it.
    pub(crate) fn mma_scratch(&self, units: u32) -> u32 {
        if self.plane < 32 { EMULATED_MMA_WORDS * units } else { 0 }
    }

    /// Reads the capability of a client's device. [`tested`](Self::tested) may find a faster
    /// [`Decoding`] on the wgpu runtime.
    #[must_use]
    pub fn of(client: &Client) -> Self {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let one_size = hardware.plane_size_min == hardware.plane_size_max;
        let planes = one_size && properties.features.plane.contains(Plane::Ops);
        let cpu = hardware.num_cpu_cores.is_some();
        // The names are `wgpu<spirv>`, `wgpu<msl>` and `wgpu<wgsl>`.
        let wgpu = client.name().starts_with("wgpu");
        let plane = if planes { hardware.plane_size_min } else { 1 };
        let portable = wgpu.then(|| Portable::of(properties, plane, client.name()));
        Self {
            plane,
            // Four cubes per multiprocessor, so that several loads of 16 bytes per unit are in
            // flight.
            cubes: 4 * hardware.num_streaming_multiprocessors.unwrap_or(32),
            max_cubes: hardware.max_cube_count.0,
            converts_bf16: !cpu,
            mma: planes && hardware.plane_size_min == 32 && multiplies_halves(&properties.features),
            wgmma: wgmma_support(properties),
            // The CPU runtime runs the units of a cube one after the other: barriers are slow.
            fast_shared_memory: !cpu && portable.is_none_or(|portable| portable.shares()),
            doubles: properties.supports_type(ElemType::Float(FloatKind::F64)),
            decoding: if wgpu { Decoding::Integers } else { Decoding::Subnormals },
            portable,
        }
    }
}

impl Capability {
    /// Divides cubes over two dimensions, if the device allows fewer in one.
    pub(crate) fn two_dimensions(&self, cubes: u32) -> [u32; 2] {
        let lines = cubes.div_ceil(self.max_cubes).max(1);
        [cubes.div_ceil(lines), lines]
    }

    /// Returns the units of a cube that take a row together, at most `most`, which is a power of
    /// two. A unit takes a row where barriers are slow, a plane where cubes have no shared memory.
    pub(crate) fn units_of_row(&self, most: u32) -> u32 {
        match self.portable {
            Some(portable) if portable.shares() => most.min(1 << portable.units.max(1).ilog2()),
            None if self.plane > 1 => most,
            _ => self.plane,
        }
    }

    /// Returns the bytes of shared memory that kernels of a decoder may use: on GPUs with planes
    /// the least that all of these have.
    pub(crate) fn shared_memory(&self) -> usize {
        self.portable.map_or(48 << 10, |portable| portable.shared_memory.min(48 << 10))
    }

    /// Checks that the kernels of a decoder run on the device in a dtype.
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use burn_fp4_cubecl::cubecl::Device;
    /// use burn_fp4_cubecl::{Capability, Dtype};
    ///
    /// let device = Capability::of(&Device::default().client());
    /// assert!(device.check_decoder(Dtype::F32).is_ok()); // only devices of wgpu have limits
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Refusal::Device`]: a device of the wgpu runtime has no buffers of the dtype, too small
    /// cubes, too little shared memory, or a driver whose values were wrong.
    pub fn check_decoder(&self, dtype: Dtype) -> Result<(), Refusal> {
        self.check_portable(dtype)?;
        match self.portable {
            Some(portable) if !portable.shares() => {
                Err(Refusal::Device { lacks: "has too little shared memory" })
            }
            Some(Portable { decoder: false, .. }) => Err(Refusal::Device {
                lacks: "has a driver that failed the self-test of a decoder",
            }),
            _ => Ok(()),
        }
    }

    /// Checks that the kernels of a decoder take packed KV caches.
    ///
    /// ```
    /// # #[cfg(feature = "cpu")] {
    /// use burn_fp4_cubecl::Capability;
    /// use burn_fp4_cubecl::cubecl::Device;
    ///
    /// let device = Capability::of(&Device::default().client());
    /// assert!(device.check_packed_kv().is_ok());
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Refusal::Device`]: a device of the wgpu runtime, where kernels store no bytes.
    pub fn check_packed_kv(&self) -> Result<(), Refusal> {
        match self.portable {
            Some(_) => Err(Refusal::Device { lacks: "stores no bytes in kernels" }),
            None => Ok(()),
        }
    }

    /// Checks that the kernels for the wgpu runtime can run on the device, if it is one of its.
    pub(crate) fn check_portable(&self, dtype: Dtype) -> Result<(), Refusal> {
        let lacks = match &self.portable {
            Some(portable) if portable.units < UNITS => "has cubes of fewer than 256 units",
            Some(portable) if !portable.holds(dtype) => "has no buffers of the dtype",
            _ => return Ok(()),
        };
        Err(Refusal::Device { lacks })
    }
}

/// Conversion from f32 to a dtype, to nearest even.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Conversion {
    /// The instruction of the device.
    Device,
    /// Integer arithmetic on the bits of a bf16: the instruction of x86 flushes subnormals to zero.
    Bf16Bits,
    /// Integer arithmetic on the bits of an f16: drivers of Vulkan may round toward zero.
    F16Bits,
}

impl Conversion {
    /// Returns the conversion to a dtype on a device.
    pub(crate) fn to(dtype: Dtype, device: &Capability) -> Self {
        match dtype {
            Dtype::Bf16 if device.portable.is_some() || !device.converts_bf16 => Self::Bf16Bits,
            Dtype::F16 if device.portable.is_some() => Self::F16Bits,
            _ => Self::Device,
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
    decoding: Decoding::Subnormals,
    portable: None,
};

/// A device without planes and matrix instructions, for tests.
#[cfg(test)]
pub(crate) const CPU: Capability =
    Capability { plane: 1, cubes: 256, converts_bf16: false, fast_shared_memory: false, ..GPU };
