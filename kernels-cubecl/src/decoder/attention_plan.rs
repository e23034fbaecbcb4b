//! Sizes of the attention of one token, by shape and device.

use burn_fp4_search::host::{AttentionShape, KV_BLOCK, KvFormat};

use super::head::head_vector;
use crate::memory::Counters;
use crate::plan::{Capability, Conversion, Dtype};

/// Returns the most f32 values that products and outputs take in the shared memory of a cube: the
/// rest is for queries, weights and a key.
const fn most_values(shared_memory: usize) -> u32 {
    (shared_memory / 4 * 3 / 4) as u32
}

/// Most tiles that a cube adds which has attended to one of them: of more, the parts of a cube of
/// their own take fewer each.
pub(super) const MAX_JOINED_TILES: u32 = 16;

/// Sizes of the attention of a cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct AttentionPlan {
    /// Units of a cube.
    pub(super) units: u32,
    pub(super) plane: u32,
    /// Positions of a cube.
    pub(super) tile: u32,
    /// Query heads of a cube; they share a key head.
    pub(super) queries: u32,
    /// Cubes per key head.
    pub(super) groups: u32,
    pub(super) head_dim: u32,
    /// Channels of a vector.
    pub(super) vector: u32,
    /// Parts of the tiles that are added apart: a unit per channel for each in the second launch.
    pub(super) parts: u32,
    /// Units of a plane that add their outputs before they share them: those of one column.
    pub(super) added: u32,
    /// Format of the cache; none of a dense one.
    pub(super) format: Option<KvFormat>,
    pub(super) conversion: Conversion,
}

impl AttentionPlan {
    /// Plans the attention of a token: the most queries of a cube that shared memory has room for.
    pub(super) fn new(
        shape: &AttentionShape,
        dtype: Dtype,
        format: Option<KvFormat>,
        device: &Capability,
    ) -> Self {
        let of_key_head = (shape.heads / shape.kv_heads) as u32;
        let mut plans = (1..=8)
            .rev()
            .filter(|&queries| of_key_head.is_multiple_of(queries))
            .map(|queries| Self::of_queries(queries, shape, dtype, format, device));
        let fits = |plan: &Self| plan.bytes() <= device.shared_memory();
        plans.find(fits).unwrap_or_else(|| Self::of_queries(1, shape, dtype, format, device))
    }

    /// Plans cubes of a number of query heads.
    fn of_queries(
        queries: u32,
        shape: &AttentionShape,
        dtype: Dtype,
        format: Option<KvFormat>,
        device: &Capability,
    ) -> Self {
        let &AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let head_dim = head_dim as u32;
        let vector = head_vector(head_dim, dtype);
        let columns = head_dim / vector;
        let values = most_values(device.shared_memory());
        // Barriers are slow where a unit takes a row.
        let together = device.units_of_row(256);
        let most_units = if together > 1 { together } else { 16 };
        // A power of two, so that planes are whole.
        let units = 1 << (values / (vector * queries + 1)).min(most_units).ilog2();
        let units = units.max(columns.next_power_of_two()).max(device.plane);
        // Without planes a unit adds the scores of a tile. Packed positions are short: a tile has
        // more of them for its outputs.
        let most_tile = match (device.plane > 1, format) {
            (false, _) => 8,
            (true, None) => 64,
            (true, Some(_)) => 128,
        };
        let tile = (values / ((columns + 1) * queries)).min(most_tile);
        let most_parts = match together {
            1 => 1,
            _ => device.units_of_row(1024) / head_dim.next_power_of_two(),
        };
        let parts = most_parts.clamp(1, 8);
        let groups = (heads / kv_heads) as u32 / queries;
        let (plane, conversion) = (device.plane, Conversion::to(dtype, device));
        let whole = units.is_multiple_of(columns) && plane.is_multiple_of(columns);
        let added = if device.wgmma.is_native() && whole { plane / columns } else { 1 };
        Self {
            units,
            plane,
            tile,
            queries,
            groups,
            head_dim,
            vector,
            parts,
            added,
            format,
            conversion,
        }
    }

    /// Returns true if the last cube of a key head's queries may add their tiles.
    pub(super) fn may_join(&self, shape: &AttentionShape, device: &Capability) -> bool {
        let counted = shape.batch * shape.kv_heads * self.groups as usize;
        let tiles = shape.capacity.div_ceil(self.tile as usize);
        device.wgmma.is_native() && tiles <= MAX_JOINED_TILES as usize && counted <= Counters::LEN
    }

    /// Vectors of a head.
    pub(super) const fn columns(&self) -> u32 {
        self.head_dim / self.vector
    }

    /// Positions that the units of a cube load at a time.
    pub(super) const fn step(&self) -> u32 {
        self.units / self.columns()
    }

    /// Values between the products of two positions in shared memory. It is odd, so that a plane
    /// that reads a column of 32 positions uses 32 banks.
    pub(super) const fn product_stride(&self) -> u32 {
        self.columns() + 1
    }

    /// Outputs of each query in shared memory.
    pub(super) const fn places(&self) -> u32 {
        self.step() / self.added
    }

    /// Values between the outputs of two places in shared memory. Planes that write two places of
    /// 16 columns use 32 banks.
    pub(super) const fn output_stride(&self) -> u32 {
        self.queries * self.head_dim + self.columns()
    }

    /// Values in shared memory: first the products of columns, then the outputs of positions.
    pub(super) const fn shared(&self) -> u32 {
        let products = self.queries * self.tile * self.product_stride();
        let outputs = self.places() * self.output_stride();
        if products > outputs { products } else { outputs }
    }

    /// Bytes in shared memory.
    pub(super) const fn bytes(&self) -> usize {
        // With the sums of their weights.
        let queries = self.queries * (self.head_dim + self.tile + 1);
        // With the largest magnitudes of the blocks of a packed key and value.
        let own = match self.format {
            None => self.head_dim,
            Some(_) => 2 * (self.head_dim + self.head_dim / KV_BLOCK as u32),
        };
        4 * (self.shared() + queries + own) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::check_attention;
    use crate::plan::{CPU, GPU, Portable, WgmmaSupport};

    const SHAPE: AttentionShape =
        AttentionShape { batch: 1, tokens: 1, heads: 8, kv_heads: 2, head_dim: 64, capacity: 9 };

    #[test]
    fn every_plan_fits_its_shared_memory_and_has_whole_planes() {
        let portable = |shared_memory, units| Portable {
            f16: true,
            bf16: true,
            cmma_f16: false,
            cmma_bf16: false,
            decoder: true,
            units,
            shared_memory,
        };
        let wgpu = |plane, shared_memory, units| Capability {
            plane,
            portable: Some(portable(shared_memory, units)),
            ..GPU
        };
        let vulkan = wgpu(32, 48 << 10, 1024);
        let hopper = Capability { wgmma: WgmmaSupport::Ptx, ..GPU };
        let devices = [
            GPU,
            hopper,
            CPU,
            vulkan,
            wgpu(1, 16 << 10, 256),
            wgpu(64, 16 << 10, 256),
            wgpu(64, 32 << 10, 256),
            wgpu(128, 32 << 10, 256),
        ];
        for device in devices {
            for (queries, half) in (1..=20).flat_map(|queries| (1..=128).map(move |h| (queries, h)))
            {
                for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                    let shape = AttentionShape { heads: 2 * queries, head_dim: 2 * half, ..SHAPE };
                    assert_eq!(check_attention(&shape, 9), Ok(()));
                    let packs = (2 * half).is_multiple_of(KV_BLOCK) && device.portable.is_none();
                    let formats = KvFormat::ALL.into_iter().filter(|_| packs).map(Some);
                    for format in formats.chain([None]) {
                        let plan = AttentionPlan::new(&shape, dtype, format, &device);
                        assert!(plan.bytes() <= device.shared_memory(), "{plan:?}");
                        assert!(plan.step() > 0 && plan.tile > 0 && plan.parts > 0, "{plan:?}");
                        assert_eq!(plan.places() * plan.added, plan.step(), "{plan:?}");
                        let whole =
                            plan.units >= plan.plane && plan.units.is_multiple_of(plan.plane);
                        assert!(whole, "{plan:?}");
                        assert_eq!(plan.queries * plan.groups, queries as u32, "{plan:?}");
                        let blocks = 2 * plan.head_dim / KV_BLOCK as u32;
                        assert!(format.is_none() || plan.units >= blocks, "{plan:?}");
                    }
                }
            }
        }
    }
}
