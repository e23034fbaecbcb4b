//! Launches of matmuls on devices of CubeCL's wgpu runtime.

use crate::plan::{Capability, Decoding, Dtype, UNITS};

/// Launch of `portable_gemv.rs`. A group of lanes multiplies some packed rows with some rows of the
/// input, over all of k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PortableGemv {
    /// Cubes in two dimensions.
    pub cubes: [u32; 2],
    /// Units of a group, which divide k: 32 or 64, whose sums go through shared memory, or 1
    /// without it.
    pub lanes: u32,
    /// Units of a plane, which add their sums directly; 1 if all go through shared memory.
    pub plane: u32,
    /// Words of eight codes that a unit loads at a time.
    pub words: u32,
    /// Packed rows of a group.
    pub group_n: u32,
    /// Rows of the input of a group.
    pub group_m: u32,
    /// Conversion of codes.
    pub decoding: Decoding,
}

impl PortableGemv {
    /// Returns the values of the input in a word.
    pub(super) const fn word_values(&self, dtype: Dtype) -> u32 {
        4 / dtype.size() as u32
    }
}

/// Largest m of `portable_gemv.rs`.
pub(super) const MAX_GEMV_M: usize = 8;
/// Sums of a unit of `portable_gemv.rs`: the sums of a cube fit 16 KiB.
const MAX_SUMS: u32 = 16;
/// Cubes of `portable_gemv.rs` that fill a large GPU; wgpu does not tell the size.
const BUSY_GEMV: usize = 256;

/// Launch of `portable_gemm.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PortableGemm {
    /// Cubes in two dimensions.
    pub cubes: [u32; 2],
    /// Conversion of codes.
    pub decoding: Decoding,
}

/// Rows of either operand of a cube of `portable_gemm.rs`.
pub(super) const GEMM_TILE: u32 = 64;
/// Largest m of `portable_gemm.rs` where Burn's dense matmul has matrix instructions for f32.
pub(super) const MAX_GEMM_M: usize = 64;

/// Launch of `portable_cmma.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PortableCmma {
    /// Cubes in two dimensions.
    pub cubes: [u32; 2],
    /// Planes that divide the packed rows.
    pub n_planes: u32,
    /// Planes that divide the rows of the input.
    pub m_planes: u32,
    /// Tiles of 16 packed rows of a plane.
    pub n_tiles: u32,
    /// Tiles of 16 rows of the input of a plane.
    pub m_tiles: u32,
    /// Values of k in shared memory.
    pub k_tile: u32,
    /// Conversion of codes.
    pub decoding: Decoding,
}

impl PortableCmma {
    /// Returns the packed rows of a cube.
    pub(super) const fn tile_n(&self) -> u32 {
        16 * self.n_planes * self.n_tiles
    }

    /// Returns the rows of the input of a cube.
    pub(super) const fn tile_m(&self) -> u32 {
        16 * self.m_planes * self.m_tiles
    }

    /// Returns the planes of a cube.
    pub(super) const fn planes(&self) -> u32 {
        self.n_planes * self.m_planes
    }

    /// Returns the bytes of shared memory of a cube.
    const fn shared_memory(&self) -> usize {
        let operands = (self.tile_n() + self.tile_m()) * (self.k_tile + CMMA_PADDING) * 2;
        (operands + self.planes() * 16 * 16 * 4) as usize
    }
}

/// Values between rows of `portable_cmma.rs` in shared memory: rows start in different banks.
pub(super) const CMMA_PADDING: u32 = 8;
/// Cubes of `portable_cmma.rs` that keep a large GPU busy.
const BUSY_CMMA: usize = 128;

/// Configurations of `portable_cmma.rs` for ever fewer rows of the input: `n_planes`, `m_planes`,
/// `n_tiles`, `m_tiles` and `k_tile`.
const CMMA_CONFIGS: [[u32; 5]; 4] =
    [[4, 2, 2, 4, 32], [4, 2, 1, 2, 64], [4, 2, 1, 1, 64], [4, 1, 1, 1, 64]];

impl PortableGemv {
    /// Plans the launch of a matmul `m x n x k` in a dtype.
    pub(super) fn plan([m, n, k]: [usize; 3], dtype: Dtype, device: &Capability) -> Self {
        let group_m = m.next_power_of_two().min(MAX_GEMV_M) as u32;
        let tiles = m.div_ceil(group_m as usize);
        let shares = device.portable.is_some_and(|portable| portable.shares());
        let words: u32 = if k.is_multiple_of(32) { 4 } else { 2 };
        let k_tiles = k / (8 * words as usize);
        // Packed rows of a group share a load of the input, which takes longer in f32.
        let (lanes, most) = match (shares, dtype) {
            (false, _) => (1, 4),
            (true, Dtype::F32) if group_m <= 2 && k_tiles >= 64 => (64, 4),
            (true, Dtype::F32) if group_m <= 2 => (32, 4),
            (true, _) => (32, 2),
        };
        let cubes = |group_n: u32| n.div_ceil((group_n * UNITS / lanes) as usize) * tiles;
        // Fewer packed rows per group if the device would not be busy otherwise.
        let busy = if dtype == Dtype::F32 && group_m > 2 { 2 * BUSY_GEMV } else { BUSY_GEMV };
        let group_n = [4, 2]
            .into_iter()
            .filter(|&group_n| group_n <= most && group_n * group_m <= MAX_SUMS)
            .find(|&group_n| cubes(group_n) >= busy)
            .unwrap_or(1);
        // Sums of more outputs by planes take registers, and fewer units run at a time.
        let by_planes = device.plane <= lanes && group_n * group_m <= 4;
        let plane = if by_planes { device.plane } else { 1 };
        Self {
            cubes: device.two_dimensions(cubes(group_n) as u32),
            lanes,
            plane,
            words,
            group_n,
            group_m,
            decoding: device.decoding,
        }
    }
}

impl PortableGemm {
    /// Plans the launch of a matmul of `m` and `n` rows.
    pub(super) fn plan([m, n]: [usize; 2], device: &Capability) -> Self {
        let tiles = |rows: usize| rows.div_ceil(GEMM_TILE as usize);
        let cubes = device.two_dimensions((tiles(m) * tiles(n)) as u32);
        Self { cubes, decoding: device.decoding }
    }
}

impl PortableCmma {
    /// Plans the launch of a matmul `m x n x k`; none if the device has too little shared memory.
    pub(super) fn plan([m, n, k]: [usize; 3], device: &Capability) -> Option<Self> {
        let shared_memory = device.portable?.shared_memory;
        let most = m.next_power_of_two().max(16) as u32;
        let configs =
            CMMA_CONFIGS.into_iter().map(|[n_planes, m_planes, n_tiles, m_tiles, wide]| {
                let k_tile = if k.is_multiple_of(wide as usize) { wide } else { 32 };
                let (cubes, decoding) = ([0; 2], device.decoding);
                Self { cubes, n_planes, m_planes, n_tiles, m_tiles, k_tile, decoding }
            });
        let fits: Vec<_> = configs
            .filter(|config| config.tile_m() <= most && config.shared_memory() <= shared_memory)
            .collect();
        let cubes = |config: &Self| {
            n.div_ceil(config.tile_n() as usize) * m.div_ceil(config.tile_m() as usize)
        };
        let busy = fits.iter().find(|config| cubes(config) >= BUSY_CMMA);
        let config = busy.or(fits.last())?;
        Some(Self { cubes: device.two_dimensions(cubes(config) as u32), ..*config })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{GPU, Portable};

    const PORTABLE: Portable = Portable {
        f16: true,
        bf16: false,
        cmma_f16: true,
        cmma_bf16: false,
        decoder: true,
        units: 256,
        shared_memory: 48 << 10,
    };

    #[test]
    fn few_rows_are_multiplied_by_groups_of_lanes() {
        let of = |m, n, k, dtype| {
            let device = Capability { portable: Some(PORTABLE), ..GPU };
            let gemv = PortableGemv::plan([m, n, k], dtype, &device);
            assert_eq!((gemv.words, gemv.plane == 32), (4, gemv.group_n * gemv.group_m <= 4));
            (gemv.cubes[0], gemv.lanes, gemv.group_n, gemv.group_m)
        };
        assert_eq!(of(1, 8192, 8192, Dtype::F16), (512, 32, 2, 1));
        assert_eq!(of(1, 4096, 8192, Dtype::F16), (256, 32, 2, 1));
        assert_eq!(of(1, 896, 8192, Dtype::F16), (112, 32, 1, 1));
        assert_eq!(of(8, 28672, 8192, Dtype::F16), (1792, 32, 2, 8));
        assert_eq!(of(1, 4096, 4096, Dtype::F32), (256, 64, 4, 1));
        assert_eq!(of(1, 8192, 1024, Dtype::F32), (256, 32, 4, 1));
        assert_eq!(of(3, 8192, 8192, Dtype::F32), (512, 32, 2, 4));
        assert_eq!(of(2, 8192, 8192, Dtype::F32), (512, 64, 4, 2));
        let planes = |shared_memory, plane| {
            let portable = Some(Portable { shared_memory, ..PORTABLE });
            let device = Capability { portable, plane, ..GPU };
            let gemv = PortableGemv::plan([1, 10, 48], Dtype::F16, &device);
            (gemv.lanes, gemv.words, gemv.plane)
        };
        assert_eq!(planes(8 << 10, 32), (1, 2, 1));
        assert_eq!(planes(48 << 10, 64), (32, 2, 1));
        assert_eq!(planes(48 << 10, 8), (32, 2, 8));
    }

    #[test]
    fn matrix_instructions_take_large_tiles_where_the_device_stays_busy() {
        let of = |m, n, k, shared_memory| {
            let portable = Some(Portable { shared_memory, ..PORTABLE });
            let cmma = PortableCmma::plan([m, n, k], &Capability { portable, ..GPU })?;
            Some((cmma.cubes[0], cmma.tile_n(), cmma.tile_m(), cmma.k_tile))
        };
        assert_eq!(of(16, 8192, 8192, 48 << 10), Some((128, 64, 16, 64)));
        assert_eq!(of(32, 8192, 8192, 48 << 10), Some((128, 64, 32, 64)));
        assert_eq!(of(64, 8192, 8192, 48 << 10), Some((128, 64, 64, 64)));
        assert_eq!(of(512, 8192, 8192, 48 << 10), Some((256, 128, 128, 32)));
        assert_eq!(of(64, 8192, 8160, 48 << 10), Some((128, 64, 64, 32)));
        assert_eq!(of(64, 8192, 8192, 16 << 10), Some((512, 64, 16, 64)));
        assert_eq!(of(64, 8192, 8192, 8 << 10), None);
    }
}
