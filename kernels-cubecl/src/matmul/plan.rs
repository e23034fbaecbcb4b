//! Plans of matmuls with a packed weight: the kernel and its launch.

use burn_fp4_search::SearchError;
use burn_fp4_search::formats::{FormatError, Fp4Format};
use burn_fp4_search::host::View;

use super::portable_plan::{
    MAX_GEMM_M as MAX_PORTABLE_GEMM_M, MAX_GEMV_M as MAX_PORTABLE_GEMV_M, PortableCmma,
    PortableGemm, PortableGemv,
};
use crate::numeric::scale_grid::f16_holds_products;
use crate::plan::{Capability, Dtype, Refusal, ThreadTile, UNITS, WgmmaSupport};

/// The matmul `input x weight^T` of an input `[m, k]` and a packed weight of n rows of k elements.
///
/// ```
/// use burn_fp4_cubecl::{Capability, Dtype, Matmul, WgmmaSupport};
/// use burn_fp4_search::formats::Fp4Format;
/// # let gpu = Capability {
/// #     plane: 32, cubes: 528, max_cubes: u32::MAX, converts_bf16: true, mma: true,
/// #     wgmma: burn_fp4_cubecl::WgmmaSupport::None, fast_shared_memory: true, doubles: true,
/// #     decoding: burn_fp4_cubecl::Decoding::Subnormals, portable: None,
/// # };
///
/// // `gpu` is the one in the example of `Capability`.
/// let (format, block_size, dtype) = (Fp4Format::NvFp4, 16, Dtype::Bf16);
/// let token = Matmul { m: 1, n: 4096, k: 4096, format, block_size, dtype };
/// let planned = token.plan(&gpu)?.expect("few rows");
/// assert_eq!(planned, token.small_m(&gpu)?);
/// assert_eq!((planned.matmul(), planned.device()), (&token, &gpu));
///
/// let prompt = Matmul { m: 64, ..token };
/// assert_eq!(prompt.plan(&gpu)?, Some(prompt.mma(&gpu)?));
/// let hopper = Capability { wgmma: WgmmaSupport::Ptx, ..gpu };
/// assert_eq!(prompt.plan(&hopper)?, Some(prompt.wgmma(&hopper)?));
/// assert_eq!(prompt.fp8(&hopper)?.matmul(), &prompt); // only if asked for
/// assert!(prompt.fp8(&gpu).is_err());
///
/// // Without matrix instructions, many rows are multiplied faster once the weight is dequantized.
/// let plain = Capability { mma: false, ..gpu };
/// assert_eq!(token.plan(&plain)?, Some(token.gemv(&plain)?));
/// assert_eq!(prompt.plan(&plain)?, None);
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Matmul {
    /// Rows of the input.
    pub m: usize,
    /// Packed rows of the weight.
    pub n: usize,
    /// Elements of each: the contracted axis.
    pub k: usize,
    /// Format of the weight.
    pub format: Fp4Format,
    /// Elements that share a block scale.
    pub block_size: usize,
    /// dtype of input, bias and output.
    pub dtype: Dtype,
}

/// A fused matmul and its launch on one device; see [`Matmul::plan`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatmulPlan {
    pub(super) matmul: Matmul,
    pub(super) device: Capability,
    pub(super) kernel: Kernel,
}

/// A matmul with an input rounded to E4M3, and its launch on one device; see [`Matmul::fp8`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fp8Plan {
    pub(super) matmul: Matmul,
    pub(super) device: Capability,
    pub(super) launch: Wgmma,
}

/// Kernel of a matmul, with its launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Kernel {
    /// Multiplications and additions in f32.
    Gemv(Gemv),
    /// Matrix instructions of a plane.
    Mma(Mma),
    /// Matrix instructions of a plane, for few rows of the input.
    SmallM(SmallM),
    /// Matrix instructions of a warpgroup.
    Wgmma(Wgmma),
    /// Multiplications and additions in f32 on the wgpu runtime, for few rows of the input.
    PortableGemv(PortableGemv),
    /// Multiplications and additions in f32 on the wgpu runtime.
    PortableGemm(PortableGemm),
    /// Matrix instructions of a plane on the wgpu runtime.
    PortableCmma(PortableCmma),
}

/// Launch of `wgmma.rs` or `wgmma_fp8.rs`. A cube takes [`WGMMA_TILE_N`] packed rows, some rows of
/// the input and, with split-K, a part of k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Wgmma {
    /// Cubes.
    pub cubes: u32,
    /// Rows of the input of a cube.
    pub tile_m: u32,
    /// Pipeline stages: k tiles in shared memory.
    pub stages: u32,
    /// Cubes that divide k.
    pub split_k: u32,
    /// Vectors of shared memory with which emulated instructions show A to other units.
    pub scratch: u32,
}

impl Wgmma {
    /// Returns m rounded up to whole cubes.
    pub(super) fn padded(&self, m: usize) -> usize {
        m.next_multiple_of(self.tile_m as usize)
    }
}

/// Packed rows of a cube of `wgmma.rs`.
pub(super) const WGMMA_TILE_N: usize = 128;

/// Configuration of `wgmma.rs` or `wgmma_fp8.rs`, for 228 KiB of shared memory per multiprocessor.
struct WgmmaConfig {
    tile_m: u32,
    stages: u32,
    /// Cubes that run on a multiprocessor at once.
    ctas_per_sm: usize,
    /// Nanoseconds that they take for a k tile, measured on an H200; of FP8 on an H100.
    k_tile_ns: usize,
}

const WGMMA_CONFIGS: [WgmmaConfig; 5] = [
    WgmmaConfig { tile_m: 32, stages: 6, ctas_per_sm: 1, k_tile_ns: 790 },
    WgmmaConfig { tile_m: 64, stages: 4, ctas_per_sm: 1, k_tile_ns: 880 },
    WgmmaConfig { tile_m: 64, stages: 3, ctas_per_sm: 2, k_tile_ns: 1600 },
    WgmmaConfig { tile_m: 128, stages: 5, ctas_per_sm: 1, k_tile_ns: 1100 },
    WgmmaConfig { tile_m: 256, stages: 3, ctas_per_sm: 1, k_tile_ns: 1750 },
];

/// Largest k of FP8: a unit of `fp8_input.rs` holds a 256th of a row of the input.
const MAX_FP8_K: usize = 1 << 16;

const FP8_CONFIGS: [WgmmaConfig; 3] = [
    WgmmaConfig { tile_m: 64, stages: 8, ctas_per_sm: 1, k_tile_ns: 400 },
    WgmmaConfig { tile_m: 128, stages: 8, ctas_per_sm: 1, k_tile_ns: 660 },
    WgmmaConfig { tile_m: 256, stages: 6, ctas_per_sm: 1, k_tile_ns: 830 },
];

/// Nanoseconds that it takes to launch `reduce_split_k` of `wgmma.rs`.
const SPLIT_K_REDUCE_LAUNCH_NS: usize = 3000;
/// Sums that this kernel reads in a nanosecond.
const SPLIT_K_REDUCE_SUMS_PER_NS: usize = 1000;

/// Largest number of cubes that divide k.
const MAX_SPLIT_K: usize = 8;

/// Cubes with one row of the input that run at once on a multiprocessor of compute capability 9.0.
pub(super) const ROW_CUBES: u32 = 3;

/// Launch of `small_m.rs`. A cube takes some n tiles, one after the other, and all rows of the
/// input. Its planes divide the packed rows of an n tile and k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct SmallM {
    /// Largest number of cubes: as many as run at once, or no limit for one row without a norm.
    /// Fewer are launched if there are fewer n tiles.
    pub cubes: u32,
    /// Planes with 16 packed rows of their own.
    pub n_planes: u32,
    /// Planes that divide k: split-K within the cube.
    pub k_planes: u32,
    /// Pipeline stages: k tiles in the registers of a plane, or in shared memory for one row of the
    /// input. One is multiplied while the others are loaded.
    pub stages: u32,
    /// Rows of the input, rounded up to a power of two.
    pub tile_m: u32,
    /// K tiles of a packed row, for one row of the input: its kernel is compiled for their number.
    pub k_tiles: u32,
    /// For one row of the input: true if 16 divides the packed rows of each weight.
    pub whole: bool,
    /// True for SwiGLU of the outputs of two weights: a plane has eight packed rows of each.
    pub gated: bool,
    /// The norm before the matmul.
    pub norm: Option<NormPlan>,
    /// Values of shared memory for emulated instructions.
    pub scratch: u32,
}

impl SmallM {
    /// Returns the units of a cube.
    pub(super) const fn units(&self) -> u32 {
        32 * self.n_planes * self.k_planes
    }

    /// Returns true if the input is one row: `small_m_row.rs`.
    pub(super) const fn is_row(&self) -> bool {
        self.tile_m == 1
    }

    /// Returns the packed rows of a weight that a plane has.
    pub(super) const fn plane_n(&self) -> u32 {
        if self.gated { 8 } else { 16 }
    }

    /// Returns the packed rows of an n tile of a weight.
    pub(super) const fn tile_n(&self) -> u32 {
        self.plane_n() * self.n_planes
    }

    /// Returns the tiles of 8 rows of the input.
    pub(super) const fn m_tiles(&self) -> u32 {
        self.tile_m.div_ceil(8)
    }

    /// Returns the values between the sums of two rows of the input in shared memory.
    pub(super) const fn staged_stride(&self) -> u32 {
        16 * self.n_planes + 4
    }

    /// Returns the number of sums of a plane in shared memory, f32.
    pub(super) const fn plane_sums(&self) -> u32 {
        if self.is_row() { 16 } else { 8 * self.m_tiles() * self.staged_stride() }
    }

    /// Returns the number of sums of an n tile in shared memory.
    pub(super) const fn tile_sums(&self) -> u32 {
        self.k_planes * self.plane_sums()
    }

    /// Returns the number of n tiles that have sums in shared memory at once. Planes that share the
    /// input of each step wait for each other then, and so between two n tiles.
    pub(super) const fn staged_tiles(&self) -> u32 {
        if self.shares_steps() { 1 } else { 2 }
    }

    /// Returns true if several planes read the input of a step, which they wait for.
    pub(super) const fn shares_steps(&self) -> bool {
        self.n_planes > 1
    }

    /// Returns the number of all sums in shared memory.
    pub(super) const fn staged_sums(&self) -> u32 {
        self.staged_tiles() * self.tile_sums()
    }

    /// Returns the sums in shared memory, with the values for emulated instructions.
    pub(super) fn staged_values(&self) -> u32 {
        self.staged_sums() + self.scratch
    }

    /// Returns the n tiles of a weight of n packed rows.
    pub(super) const fn tiles(&self, n: usize) -> usize {
        n.div_ceil(self.tile_n() as usize)
    }

    /// Divides the cubes among weights of some n tiles each, at least one: by their n tiles, or one
    /// for each n tile if there are enough.
    pub(super) fn cubes_of(&self, tiles: &[usize]) -> Vec<u32> {
        let (all, most) = (tiles.iter().sum::<usize>(), self.cubes as usize);
        if all <= most {
            return tiles.iter().map(|&tiles| tiles as u32).collect();
        }
        let mut cubes: Vec<usize> = tiles.iter().map(|tiles| (tiles * most / all).max(1)).collect();
        while cubes.iter().sum::<usize>() < most {
            // A cube's turns: the n tiles that it multiplies.
            let turns = |&at: &usize| tiles[at].div_ceil(cubes[at]);
            let slowest = (0..tiles.len()).rev().max_by_key(turns).expect("a weight");
            cubes[slowest] += 1;
        }
        cubes.into_iter().map(|cubes| cubes as u32).collect()
    }

    /// Returns the rows of the input that a plane copies to shared memory for a step.
    pub(super) const fn copies(&self) -> u32 {
        self.tile_m.div_ceil(self.n_planes)
    }
}

/// The norm before a matmul of `small_m.rs` with one row of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct NormPlan {
    /// Vectors of [`SMALL_M_VECTOR`] values of the row.
    pub vectors: u32,
    /// True if an update is added to the row first.
    pub adds: bool,
}

impl NormPlan {
    /// Most vectors of the row that a unit holds in registers.
    const MAX_VECTORS: u32 = 4;

    /// Plans the norm of a row of k values in cubes of some units; none if the row is too long.
    pub(super) fn of(k: usize, units: u32, adds: bool) -> Option<Self> {
        let vectors = u32::try_from(k / SMALL_M_VECTOR as usize).ok()?;
        let fits = vectors <= Self::MAX_VECTORS * units;
        // `decoder/norm.rs`, whose cubes have `UNITS`, has the same bits.
        let divides = units <= UNITS && UNITS.is_multiple_of(units);
        (fits && divides).then_some(Self { vectors, adds })
    }
}

/// Values of a vector of the input of `small_m.rs`.
pub(super) const SMALL_M_VECTOR: u32 = 8;

/// Elements of k that a plane of `small_m.rs` takes at a time.
pub(super) const SMALL_M_K_TILE: usize = 256;

/// Units on a multiprocessor that run `small_m.rs` at once. 768 and 1024 were no
/// faster.
const SMALL_M_UNITS: u32 = 512;

/// Largest m of `small_m.rs`.
pub(super) const MAX_SMALL_M: usize = 16;

/// Launch of `mma.rs`. A cube takes some packed rows and some rows of the input. Its planes divide
/// both, and the remaining planes divide k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Mma {
    /// Cubes.
    pub cubes: u32,
    /// Tiles of 16 packed rows of a plane.
    pub n_tiles: u32,
    /// Tiles of 8 rows of the input of a plane.
    pub m_tiles: u32,
    /// Planes that divide the packed rows.
    pub n_planes: u32,
    /// Planes that divide the rows of the input.
    pub m_planes: u32,
    /// Values of shared memory for emulated instructions.
    pub scratch: u32,
}

impl Mma {
    /// Returns the packed rows of a cube.
    pub(super) const fn tile_n(&self) -> u32 {
        16 * self.n_tiles * self.n_planes
    }

    /// Returns the rows of the input of a cube.
    pub(super) const fn tile_m(&self) -> u32 {
        8 * self.m_tiles * self.m_planes
    }

    /// Returns the planes that divide k: split-K within the cube.
    pub(super) const fn k_planes(&self) -> u32 {
        PLANES / (self.n_planes * self.m_planes)
    }

    /// Returns true if a plane keeps its single tile of the input in registers, loaded with the
    /// codes.
    pub(super) const fn takes_input(&self) -> bool {
        !self.shares_input() && self.m_tiles == 1
    }

    /// Returns true if planes have the same rows of the input, which then go through shared memory.
    pub(super) const fn shares_input(&self) -> bool {
        self.n_planes > 1
    }
}

/// Planes of a cube.
pub(super) const PLANES: u32 = UNITS / 32;

/// Elements of k that a plane of `mma.rs` and a cube of `wgmma.rs` take at a time.
pub(super) const K_TILE: usize = 128;

/// Configurations of [`Mma`] for ever fewer rows of the input, chosen by measurements on an H200.
const CONFIGS: [Mma; 6] = [
    config(2, 8, 8, 1),
    config(1, 8, 4, 1),
    config(1, 4, 4, 1),
    config(2, 2, 1, 1),
    config(2, 1, 1, 1),
    config(1, 1, 1, 1),
];

const fn config(n_tiles: u32, m_tiles: u32, n_planes: u32, m_planes: u32) -> Mma {
    Mma { cubes: 0, n_tiles, m_tiles, n_planes, m_planes, scratch: 0 }
}

/// Launch of `gemv.rs`. A plane multiplies some packed rows with some rows of the input, over all
/// of k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Gemv {
    /// Cubes in two dimensions.
    pub cubes: [u32; 2],
    /// Units of a plane.
    pub plane: u32,
    /// Words of eight codes that a unit loads at a time.
    pub words: u32,
    /// Packed rows of a plane.
    pub plane_n: u32,
    /// Rows of the input of a plane.
    pub plane_m: u32,
    /// Tile of the input that a unit loads.
    pub thread_tile: ThreadTile,
}

/// Largest m of `gemv.rs`. It decodes the weight again for every eight rows of the input; with more
/// rows, dequantizing once and a dense matmul are faster. Measured on an H200.
const MAX_GEMV_M: usize = 24;

impl Matmul {
    /// Plans the fastest kernel on a device, or returns `None` if dequantizing the weight and a
    /// dense matmul are faster.
    ///
    /// # Errors
    /// [`Refusal`] if blocks do not divide k, or a tensor has too many values.
    pub fn plan(&self, device: &Capability) -> Result<Option<MatmulPlan>, Refusal> {
        if device.portable.is_some() {
            return self.portable(device);
        }
        let wgmma = || match device.wgmma {
            WgmmaSupport::Ptx => self.wgmma(device),
            WgmmaSupport::Emulated | WgmmaSupport::None => self.mma(device),
        };
        match self.small_m(device).or_else(|_| wgmma()).or_else(|_| self.mma(device)) {
            Err(Refusal::Instructions { .. }) if self.m > MAX_GEMV_M => Ok(None),
            Err(Refusal::Instructions { .. }) => self.gemv(device).map(Some),
            planned => planned.map(Some),
        }
    }

    /// Plans matrix instructions of a plane, which decode the weight in registers: exact products
    /// of `element x block scale`, sums in f32, for f16 and bf16.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), and [`Refusal::Instructions`] if they do not fit.
    pub fn mma(&self, device: &Capability) -> Result<MatmulPlan, Refusal> {
        let kernel = Kernel::Mma(self.mma_launch(device)?);
        Ok(MatmulPlan { matmul: *self, device: *device, kernel })
    }

    /// Plans matrix instructions of a plane for at most 16 rows of the input; see
    /// [`mma`](Self::mma).
    ///
    /// # Errors
    /// As [`mma`](Self::mma).
    pub fn small_m(&self, device: &Capability) -> Result<MatmulPlan, Refusal> {
        let kernel = Kernel::SmallM(self.small_m_launch(device)?);
        Ok(MatmulPlan { matmul: *self, device: *device, kernel })
    }

    /// Plans matrix instructions of a warpgroup; see [`mma`](Self::mma).
    ///
    /// # Errors
    /// As [`mma`](Self::mma).
    pub fn wgmma(&self, device: &Capability) -> Result<MatmulPlan, Refusal> {
        let kernel = Kernel::Wgmma(self.wgmma_launch(device)?);
        Ok(MatmulPlan { matmul: *self, device: *device, kernel })
    }

    /// Plans matrix instructions of a warpgroup for E4M3. The input is rounded, and so are products
    /// `element x block scale` that E4M3 does not hold; see [`fp8_rows`](super::fp8_rows).
    ///
    /// # Errors
    /// [`Refusal`] if the device has no such instructions, the dtype is f32, 128 does not divide k,
    /// k is more than 65536, or 8 does not divide n.
    pub fn fp8(&self, device: &Capability) -> Result<Fp8Plan, Refusal> {
        Ok(Fp8Plan { matmul: *self, device: *device, launch: self.fp8_launch(device)? })
    }

    /// Plans multiplications and additions in f32.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn gemv(&self, device: &Capability) -> Result<MatmulPlan, Refusal> {
        let kernel = Kernel::Gemv(self.gemv_launch(device)?);
        Ok(MatmulPlan { matmul: *self, device: *device, kernel })
    }

    /// Plans the fastest kernel on a device of the wgpu runtime; see [`plan`](Self::plan).
    fn portable(&self, device: &Capability) -> Result<Option<MatmulPlan>, Refusal> {
        // The other kernels need shared memory.
        let shares = device.portable.is_some_and(|portable| portable.shares());
        if self.m <= MAX_PORTABLE_GEMV_M || !shares {
            return self.portable_gemv(device).map(Some);
        }
        match self.portable_cmma(device) {
            Err(Refusal::Instructions { .. }) => {}
            planned => return planned.map(Some),
        }
        let dense = device.portable.is_some_and(|portable| portable.cmma_f16);
        if self.dtype == Dtype::F32 && dense && self.m > MAX_PORTABLE_GEMM_M {
            return Ok(None);
        }
        self.portable_gemm(device).map(Some)
    }

    /// Plans multiplications and additions in f32 on a device of the wgpu runtime, for few rows of
    /// the input.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), and [`Refusal::Device`] for another device or one that lacks what
    /// the kernel needs.
    pub fn portable_gemv(&self, device: &Capability) -> Result<MatmulPlan, Refusal> {
        self.check_portable(device)?;
        let shape = [self.m, self.n, self.k];
        let kernel = Kernel::PortableGemv(PortableGemv::plan(shape, self.dtype, device));
        Ok(MatmulPlan { matmul: *self, device: *device, kernel })
    }

    /// Plans multiplications and additions in f32 on a device of the wgpu runtime.
    ///
    /// # Errors
    /// As [`portable_gemv`](Self::portable_gemv).
    pub fn portable_gemm(&self, device: &Capability) -> Result<MatmulPlan, Refusal> {
        self.check_portable(device)?;
        if !device.portable.is_some_and(|portable| portable.shares()) {
            return Err(Refusal::Device { lacks: "has less than 16 KiB of shared memory" });
        }
        let kernel = Kernel::PortableGemm(PortableGemm::plan([self.m, self.n], device));
        Ok(MatmulPlan { matmul: *self, device: *device, kernel })
    }

    /// Plans matrix instructions on a device of the wgpu runtime: exact products of
    /// `element x block scale`, sums in f32, for f16 and bf16.
    ///
    /// # Errors
    /// As [`portable_gemv`](Self::portable_gemv), and [`Refusal::Instructions`] if they do not fit.
    pub fn portable_cmma(&self, device: &Capability) -> Result<MatmulPlan, Refusal> {
        self.check_portable(device)?;
        let multiplies = device.portable.is_some_and(|portable| match self.dtype {
            Dtype::F16 => portable.cmma_f16,
            Dtype::Bf16 => portable.cmma_bf16,
            Dtype::F32 => false,
        });
        self.check_instructions(multiplies, 32)?;
        match PortableCmma::plan([self.m, self.n, self.k], device) {
            Some(cmma) => {
                let kernel = Kernel::PortableCmma(cmma);
                Ok(MatmulPlan { matmul: *self, device: *device, kernel })
            }
            None => Err(Refusal::Instructions { reason: "they need more shared memory" }),
        }
    }

    fn check_portable(&self, device: &Capability) -> Result<(), Refusal> {
        self.check()?;
        if device.portable.is_none() {
            return Err(Refusal::Device { lacks: "is not one of the wgpu runtime" });
        }
        device.check_portable(self.dtype)
    }

    /// Checks that matrix instructions compute the matmul exactly enough, and that k consists of
    /// whole k tiles.
    fn check_instructions(&self, has_any: bool, k_tile: usize) -> Result<(), Refusal> {
        self.check()?;
        let refuse = |reason| Err(Refusal::Instructions { reason });
        if !has_any {
            return refuse("the device has none");
        }
        match self.dtype {
            Dtype::F32 => return refuse("they would round f32"),
            Dtype::F16 if !f16_holds_products(self.format.row().scale_grid()) => {
                return refuse("f16 has no room for the block scales");
            }
            Dtype::F16 | Dtype::Bf16 => {}
        }
        if !self.k.is_multiple_of(k_tile) {
            return refuse("their steps do not divide the channels");
        }
        Ok(())
    }

    pub(super) fn small_m_launch(&self, device: &Capability) -> Result<SmallM, Refusal> {
        self.check_instructions(device.mma, SMALL_M_K_TILE)?;
        let refuse = |reason| Err(Refusal::Instructions { reason });
        let sms = device.cubes / 4;
        let cubes = |n_planes| self.n.div_ceil(16 * n_planes as usize);
        let busy = |n_planes, least| cubes(n_planes) >= least as usize;
        // From measurements on an H200. With more packed rows per cube the input is read less
        // often.
        let (n_planes, k_planes) = match self.m {
            0..=1 => (1, 8),
            // With three or four n tiles per multiprocessor, smaller cubes: all run at once.
            2..=4 if busy(1, 2 * sms + 1) && !busy(1, 4 * sms + 1) => (1, 4),
            2..=4 => (1, 8),
            5..=8 if busy(2, sms) => (2, 4),
            5..=8 => (1, 8),
            // More cubes than run at once: planes that add no sums keep them short.
            9..=MAX_SMALL_M if busy(4, 3 * sms) => (4, 1),
            // One cube per multiprocessor, in a single wave.
            9..=MAX_SMALL_M if busy(4, sms * 2 / 3) && !busy(4, sms + 1) => (4, 4),
            9..=MAX_SMALL_M if busy(2, sms * 3 / 4) => (2, 4),
            9..=MAX_SMALL_M => return refuse("there are too few packed rows for them"),
            _ => return refuse("there are too many rows of the input for them"),
        };
        let tile_m = self.m.next_power_of_two();
        let at_once = match self.m {
            // A cube for each n tile: some load while others end.
            0..=1 => u32::MAX,
            _ => sms.max(1) * (SMALL_M_UNITS / (32 * n_planes * k_planes)).max(1),
        };
        let turns = cubes(n_planes).div_ceil(at_once as usize);
        let steps = turns * self.k.div_ceil(SMALL_M_K_TILE * k_planes as usize);
        // More than two pay off where a plane takes many steps, or steps of many rows that other
        // planes wait for.
        let stages = match self.m {
            2..=4 if steps >= 7 => 3,
            9..=MAX_SMALL_M if (n_planes, k_planes) == (2, 4) => 3,
            _ => 2,
        };
        Ok(SmallM {
            cubes: at_once,
            n_planes,
            k_planes,
            stages,
            tile_m: tile_m as u32,
            k_tiles: if self.m <= 1 { (self.k / SMALL_M_K_TILE) as u32 } else { 0 },
            whole: self.n.is_multiple_of(16),
            gated: false,
            norm: None,
            scratch: device.mma_scratch(32 * n_planes * k_planes),
        })
    }

    fn mma_launch(&self, device: &Capability) -> Result<Mma, Refusal> {
        self.check_instructions(device.mma, K_TILE)?;
        let refuse = |reason| Err(Refusal::Instructions { reason });
        let cubes = |config: &Mma| {
            self.n.div_ceil(config.tile_n() as usize) * self.m.div_ceil(config.tile_m() as usize)
        };
        // Three quarters of the multiprocessors have a cube, or two with a single tile of the
        // input.
        let enough = |config: &Mma| {
            device.cubes as usize / 4 * 3 / 4 * if config.takes_input() { 2 } else { 1 }
        };
        let most = self.m.next_power_of_two().max(8) as u32;
        let mut fits = CONFIGS.iter().filter(|config| config.tile_m() <= most);
        let last = &CONFIGS[CONFIGS.len() - 1];
        let config = fits.find(|config| cubes(config) >= enough(config)).unwrap_or(last);
        match u32::try_from(cubes(config)) {
            Ok(cubes) if cubes <= device.max_cubes => {
                Ok(Mma { cubes, scratch: device.mma_scratch(UNITS), ..*config })
            }
            _ => refuse("there are too many cubes"),
        }
    }

    fn wgmma_launch(&self, device: &Capability) -> Result<Wgmma, Refusal> {
        self.check_instructions(device.wgmma != WgmmaSupport::None, K_TILE)?;
        self.fastest_wgmma(&WGMMA_CONFIGS, device)
    }

    fn fp8_launch(&self, device: &Capability) -> Result<Wgmma, Refusal> {
        self.check()?;
        let refuse = |reason| Err(Refusal::Instructions { reason });
        if device.wgmma == WgmmaSupport::None {
            return refuse("the device has none for FP8");
        }
        if self.dtype == Dtype::F32 {
            return refuse("outputs of FP8 are f16 or bf16");
        }
        if !self.k.is_multiple_of(K_TILE) {
            return refuse("their steps do not divide the channels");
        }
        if self.k > MAX_FP8_K {
            return refuse("a row of the input is too long for its registers");
        }
        self.fastest_wgmma(&FP8_CONFIGS, device)
    }

    fn fastest_wgmma(
        &self,
        configs: &[WgmmaConfig],
        device: &Capability,
    ) -> Result<Wgmma, Refusal> {
        let refuse = |reason| Err(Refusal::Instructions { reason });
        if self.k == 0 {
            return refuse("there are no channels");
        }
        if !self.n.is_multiple_of(8) {
            return refuse("they store eight outputs at a time");
        }
        let k_tiles = self.k / K_TILE;
        let cubes = |config: &WgmmaConfig, split_k| {
            let groups = self.m.div_ceil(config.tile_m as usize);
            self.n.div_ceil(WGMMA_TILE_N) * groups * split_k
        };
        // Waves of cubes, of `ctas_per_sm` each.
        let time = |&(config, split_k): &(&WgmmaConfig, usize)| {
            let at_once = (device.cubes / 4) as usize * config.ctas_per_sm;
            let waves = cubes(config, split_k).div_ceil(at_once);
            let sums = split_k * self.m * self.n;
            let reduce = SPLIT_K_REDUCE_LAUNCH_NS + sums / SPLIT_K_REDUCE_SUMS_PER_NS;
            let computed = waves * k_tiles.div_ceil(split_k) * config.k_tile_ns;
            computed + if split_k > 1 { reduce } else { 0 }
        };
        // Only splits that leave no cube without work.
        let splits = || {
            (1..=MAX_SPLIT_K)
                .filter(|&split_k| k_tiles.div_ceil(k_tiles.div_ceil(split_k)) == split_k)
        };
        let configs =
            configs.iter().flat_map(|config| splits().map(move |split_k| (config, split_k)));
        let (config, split_k) = configs.min_by_key(time).expect("one cube may take all of k");
        let &WgmmaConfig { tile_m, stages, .. } = config;
        let scratch = if device.wgmma.is_native() { 0 } else { UNITS };
        match u32::try_from(cubes(config, split_k)) {
            Ok(cubes) if cubes <= device.max_cubes => {
                Ok(Wgmma { cubes, tile_m, stages, split_k: split_k as u32, scratch })
            }
            _ => refuse("there are too many cubes"),
        }
    }

    fn gemv_launch(&self, device: &Capability) -> Result<Gemv, Refusal> {
        self.check()?;
        let widest = 16 / self.dtype.size() as u32;
        let plane_m = self.m.next_power_of_two().min(8) as u32;
        let planes = UNITS / device.plane;
        // Fewer packed rows per plane if the device would not be busy otherwise.
        let plane_n = [4, 2].into_iter().find(|plane_n| {
            self.n.div_ceil((plane_n * planes) as usize) >= (device.cubes / 4) as usize
        });
        let plane_n = plane_n.unwrap_or(1);
        let groups = self.n.div_ceil((plane_n * planes) as usize);
        let cubes = (groups * self.m.div_ceil(plane_m as usize)) as u32;
        Ok(Gemv {
            cubes: device.two_dimensions(cubes),
            plane: device.plane,
            words: if self.k.is_multiple_of(32) { 4 } else { 2 },
            plane_n,
            plane_m,
            thread_tile: ThreadTile {
                vector: widest,
                ..ThreadTile::one_row(true, self.dtype, device)
            },
        })
    }

    pub(super) fn check(&self) -> Result<(), Refusal> {
        let Self { m, n, k: cols, block_size, .. } = *self;
        self.format.check_block_size(block_size).map_err(SearchError::from)?;
        if !cols.is_multiple_of(block_size) {
            return Err(SearchError::from(FormatError::Indivisible { cols, block_size }).into());
        }
        let expected = View::MAX_LEN;
        for (rows, cols) in [(m, cols), (n, cols), (m, n)] {
            let found = rows.saturating_mul(cols);
            if found > expected {
                return Err(Refusal::TooLarge { found, expected });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{GPU, Portable};

    fn matmul(m: usize, n: usize, k: usize) -> Matmul {
        let (format, block_size, dtype) = (Fp4Format::NvFp4, 16, Dtype::Bf16);
        Matmul { m, n, k, format, block_size, dtype }
    }

    fn gemv(m: usize, n: usize, k: usize) -> (Gemv, [u32; 4]) {
        let gemv = matmul(m, n, k).gemv_launch(&GPU).unwrap();
        (gemv, [gemv.cubes[0], gemv.words, gemv.plane_n, gemv.plane_m])
    }

    #[test]
    fn few_inputs_are_multiplied_straight_from_codes() {
        assert_eq!(gemv(1, 8192, 8192).1, [256, 4, 4, 1]);
        let (odd, numbers) = gemv(9, 10, 48);
        assert_eq!(numbers, [4, 2, 1, 8]);
        let planned = matmul(9, 10, 48).plan(&GPU).unwrap().expect("few rows");
        assert_eq!(planned.kernel, Kernel::Gemv(odd));
        assert_eq!(matmul(65, 8192, 48).plan(&GPU), Ok(None));
    }

    #[test]
    fn few_inputs_are_multiplied_by_matrix_instructions() {
        let of = |m, n| match matmul(m, n, 8192).plan(&GPU).unwrap().expect("few rows").kernel {
            Kernel::SmallM(SmallM { n_planes, k_planes, tile_m, .. }) => {
                Some((n_planes, k_planes, tile_m))
            }
            _ => None,
        };
        assert_eq!(of(1, 8192), Some((1, 8, 1)));
        assert_eq!(of(1, 11008), Some((1, 8, 1)));
        assert_eq!(of(1, 4096), Some((1, 8, 1)));
        assert_eq!(of(1, 20), Some((1, 8, 1)));
        assert_eq!(of(2, 8192), Some((1, 4, 2)));
        assert_eq!(of(3, 8192), Some((1, 4, 4)));
        assert_eq!(of(3, 4096), Some((1, 8, 4)));
        assert_eq!(of(5, 8192), Some((2, 4, 8)));
        assert_eq!(of(16, 6144), Some((4, 4, 16)));
        assert_eq!(of(16, 8192), Some((4, 4, 16)));
        assert_eq!(of(9, 11008), Some((2, 4, 16)));
        assert_eq!(of(16, 28672), Some((4, 1, 16)));
        assert_eq!(of(9, 4096), Some((2, 4, 16)));
        assert_eq!(of(9, 1024), None);
        assert_eq!(of(17, 8192), None);
        // As many cubes as run at once, or one for each n tile.
        assert_eq!(matmul(2, 8192, 4096).small_m_launch(&GPU).unwrap().cubes, GPU.cubes);
        assert_eq!(matmul(2, 28672, 4096).small_m_launch(&GPU).unwrap().cubes, GPU.cubes / 2);
        assert_eq!(matmul(2, 4096, 4096).small_m_launch(&GPU).unwrap().cubes, GPU.cubes / 2);
        assert_eq!(matmul(16, 8192, 4096).small_m_launch(&GPU).unwrap().cubes, GPU.cubes / 4);
        let row = matmul(1, 28672, 4096).small_m_launch(&GPU).unwrap();
        assert_eq!(row.cubes_of(&[row.tiles(28672)]), [1792]);
        let stages = |m, n, k| matmul(m, n, k).small_m_launch(&GPU).unwrap().stages;
        assert_eq!([stages(1, 4096, 4096), stages(1, 6144, 4096)], [2, 2]);
        assert_eq!([stages(1, 4096, 14336), stages(4, 4096, 14336)], [2, 3]);
        assert_eq!([stages(8, 4096, 14336), stages(16, 28672, 4096)], [2, 2]);
        assert_eq!([stages(16, 4096, 4096), stages(16, 6144, 4096)], [3, 2]);
        let odd = matmul(1, 8192, 384).small_m(&GPU);
        assert!(matches!(odd, Err(Refusal::Instructions { .. })), "{odd:?}");
    }

    #[test]
    fn cubes_are_divided_among_weights_by_their_tiles() {
        let of = |cubes, tiles: &[usize]| {
            let plan = matmul(1, 8192, 4096).small_m_launch(&GPU).unwrap();
            SmallM { cubes, ..plan }.cubes_of(tiles)
        };
        assert_eq!(of(528, &[100]), [100]);
        assert_eq!(of(528, &[1792]), [528]);
        assert_eq!(of(528, &[256, 64, 64]), [256, 64, 64]);
        assert_eq!(of(264, &[896, 896]), [132, 132]);
        // Remaining cubes go to the weight whose cubes have the most n tiles. Each has a cube.
        assert_eq!(of(8, &[10, 10, 1]), [4, 3, 1]);
        assert_eq!(of(5, &[1000, 1, 1, 1]), [4, 1, 1, 1]);
    }

    #[test]
    fn matrix_instructions_keep_the_processors_busy() {
        let of = |m, n| match matmul(m, n, 8192).mma(&GPU).unwrap().kernel {
            Kernel::Mma(mma) => (mma.cubes, mma.tile_n(), mma.tile_m(), mma.k_planes()),
            other => panic!("{other:?}"),
        };
        assert_eq!(of(1, 8192), (256, 32, 8, 8));
        assert_eq!(of(1, 4096), (256, 16, 8, 8));
        assert_eq!(of(16, 8192), (256, 32, 16, 8));
        assert_eq!(of(17, 8192), (128, 64, 32, 2));
        assert_eq!(of(64, 8192), (128, 64, 64, 2));
        assert_eq!(of(128, 8192), (256, 64, 64, 2));
        assert_eq!(of(256, 8192), (128, 256, 64, 1));
        assert_eq!(of(2048, 8192), (1024, 256, 64, 1));
        assert_eq!(of(2048, 8), (128, 32, 16, 8));
    }

    #[test]
    fn warpgroups_take_what_is_fastest() {
        let device = Capability { wgmma: WgmmaSupport::Ptx, ..GPU };
        let of = |m, n, k| match matmul(m, n, k).plan(&device).unwrap().expect("a plan").kernel {
            Kernel::Wgmma(wgmma) => Some((wgmma.cubes, wgmma.tile_m, wgmma.split_k)),
            _ => None,
        };
        assert_eq!(of(16, 8192, 8192), None);
        assert_eq!(of(64, 8192, 8192), Some((256, 64, 4)));
        assert_eq!(of(256, 8192, 8192), Some((128, 256, 2)));
        assert_eq!(of(2048, 8192, 8192), Some((512, 256, 1)));
        assert_eq!(of(64, 4096, 4096), Some((128, 64, 4)));
        assert_eq!(of(100, 8192, 128), Some((128, 64, 1)));
        // n is not a multiple of eight.
        assert_eq!(of(100, 8100, 8192), None);
        let fits = matmul(64, 8, 128);
        for matmul in [Matmul { n: 12, ..fits }, Matmul { k: 192, ..fits }] {
            let found = matmul.wgmma(&device);
            assert!(matches!(found, Err(Refusal::Instructions { .. })), "{found:?}");
        }
        assert!(matches!(fits.wgmma(&GPU), Err(Refusal::Instructions { .. })));
        assert!(fits.wgmma(&Capability { mma: false, ..device }).is_ok());
    }

    #[test]
    fn matrix_instructions_are_refused_for_a_reason() {
        let fits = matmul(1, 8, 128);
        let refused = [
            Matmul { dtype: Dtype::F32, ..fits },
            Matmul { dtype: Dtype::F16, format: Fp4Format::MxFp4, block_size: 32, ..fits },
            Matmul { k: 64, ..fits },
        ];
        for matmul in refused {
            let found = matmul.mma(&GPU);
            assert!(matches!(found, Err(Refusal::Instructions { .. })), "{found:?}");
        }
        let none = Capability { mma: false, ..GPU };
        assert!(matches!(fits.mma(&none), Err(Refusal::Instructions { .. })));
        assert!(fits.mma(&GPU).is_ok());
    }

    #[test]
    fn the_wgpu_runtime_multiplies_by_what_the_device_has() {
        let portable = Portable {
            f16: true,
            bf16: false,
            cmma_f16: true,
            cmma_bf16: false,
            decoder: true,
            units: 256,
            shared_memory: 48 << 10,
        };
        let of = |m, dtype, portable| {
            let device = Capability { portable: Some(portable), ..GPU };
            let planned = Matmul { dtype, ..matmul(m, 8192, 8192) }.plan(&device).unwrap();
            planned.map(|planned| match planned.kernel {
                Kernel::PortableGemv(_) => "gemv",
                Kernel::PortableGemm(_) => "gemm",
                Kernel::PortableCmma(_) => "cmma",
                other => panic!("{other:?}"),
            })
        };
        assert_eq!(of(8, Dtype::F16, portable), Some("gemv"));
        assert_eq!(of(9, Dtype::F16, portable), Some("cmma"));
        assert_eq!(of(64, Dtype::F32, portable), Some("gemm"));
        // Burn's dense matmul has matrix instructions.
        assert_eq!(of(65, Dtype::F32, portable), None);
        let small = Portable { shared_memory: 8 << 10, ..portable };
        assert_eq!(of(512, Dtype::F16, small), Some("gemv"));
        let plain = Portable { cmma_f16: false, ..portable };
        assert_eq!(of(512, Dtype::F16, plain), Some("gemm"));
        assert_eq!(of(512, Dtype::F32, plain), Some("gemm"));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(matches!(matmul(1, 8, 24).plan(&GPU), Err(Refusal::Scheme(_))));
        let large = matmul(1, 1 << 16, 1 << 16).plan(&GPU);
        assert!(matches!(large, Err(Refusal::TooLarge { .. })));
    }
}
