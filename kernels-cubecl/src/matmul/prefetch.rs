//! Reading ahead: a product of few rows brings the weight of the next one into the device's cache.
//!
//! Such a product takes as long as its weight takes to be read. Memory is idle while it ends and
//! the next one begins, and during small kernels between them. A weight depends on nothing that is
//! computed, so the planes of a product divide the packed rows of the next weight among them, and
//! ask for them once the loads of their own weight are under way. Nothing waits for what they ask
//! for, and no result depends on it.
//!
//! ```text
//! of the next weight, codes and block scales alike:
//!              part          the rest of a row
//! row 0      | asked for   |                 |    by the first lane of plane 0
//! row 1      | asked for   |                 |    of plane 1
//! ..
//! row `rows` |                               |    read by cubes that begin when others have ended
//! ```
//!
//! Cubes read their rows side by side from the first channel on. So where not all of a weight is
//! read ahead, it is the first part of the rows that are read first.
//!
//! A product asks as soon as it has started its first loads. One with a weight that is itself more
//! than is read ahead would push out of the cache what it asked for; it asks with its last loads.

use cubecl::prelude::*;

use super::plan::{Kernel, Matmul, MatmulPlan};
#[cfg(feature = "cuda")]
use super::ptx::prefetch_l2;
use crate::memory::check_memory;
use crate::packed::PackedHandles;
use crate::plan::{Refusal, WgmmaSupport};

/// The most bytes that are read ahead: a third of the cache of H100 and H200, which is 50 MB. On an
/// H200 a token of a decoder of 8B shapes takes 3.37 ms without, 2.99 with 16 MB, 3.10 with 24 and
/// 3.22 with 36. With 0 nothing is read ahead.
const MAX_PREFETCH_BYTES: usize = 16 << 20;

/// About how many packed rows the cubes have that an H200 runs at once.
const ROWS_IN_FLIGHT: usize = 8192;

/// A weight that a product can [read ahead](MatmulPlan::run_and_read_ahead), and the product
/// that it is of.
#[derive(Debug, Clone)]
pub struct Prefetch {
    /// The product with it.
    pub matmul: Matmul,
    /// The weight.
    pub weight: PackedHandles,
}

/// What of a weight is read ahead, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PrefetchedPart {
    /// The packed rows of which a part is.
    rows: usize,
    /// The codes of a row, and the part of them.
    codes: (usize, usize),
    /// The block scales of a row, and the part of them.
    scales: (usize, usize),
}

impl PrefetchedPart {
    /// None of a weight whose rows are too short, or empty.
    fn of(matmul: &Matmul) -> Option<Self> {
        let codes = matmul.k / 2;
        let scales = matmul.k / matmul.block_size;
        let row = (codes + scales).max(1);
        let rows = matmul.n.min(ROWS_IN_FLIGHT.max(MAX_PREFETCH_BYTES / row));
        let most = row.min(MAX_PREFETCH_BYTES / rows.max(1));
        // In steps of 16 bytes, as instructions take them.
        let part = |all: usize| (all, all * most / row / 16 * 16);
        let part = Self { rows, codes: part(codes), scales: part(scales) };
        (rows > 0 && part.scales.1 > 0).then_some(part)
    }
}

/// The part of a weight that a kernel reads ahead, in bytes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PrefetchArgs {
    codes: &'static [u32],
    scales: &'static [u32],
    rows: u32,
    code_row: u32,
    code_part: u32,
    scale_row: u32,
    scale_part: u32,
    /// Whether it is asked for with the last loads of the kernel, or after the first ones.
    #[cube(comptime)]
    late: bool,
}

impl Prefetch {
    /// # Errors
    /// [`Refusal::Memory`] if it is shorter than its product reads.
    pub(super) fn check(&self) -> Result<(), Refusal> {
        let Matmul { n, k, block_size, .. } = self.matmul;
        check_memory("next codes", &self.weight.codes, n * k / 2)?;
        check_memory("next scales", &self.weight.scales, n * k / block_size)
    }

    /// What the kernel of a product reads of it, if anything.
    pub(super) fn read(self, by: &Matmul) -> Option<PrefetchArgsLaunch> {
        let PrefetchedPart { rows, codes, scales } = PrefetchedPart::of(&self.matmul)?;
        let n = self.matmul.n;
        let own = by.n * (by.k / 2 + by.k / by.block_size);
        // SAFETY: the lengths are those of its product, which `check` compared with the memory.
        let buffers = unsafe {
            (
                BufferArg::from_raw_parts(self.weight.codes, n * codes.0 / 4),
                BufferArg::from_raw_parts(self.weight.scales, n * scales.0 / 4),
            )
        };
        Some(PrefetchArgsLaunch::new(
            buffers.0,
            buffers.1,
            rows as u32,
            codes.0 as u32,
            codes.1 as u32,
            scales.0 as u32,
            scales.1 as u32,
            own > MAX_PREFETCH_BYTES,
        ))
    }
}

impl MatmulPlan {
    /// Whether its kernel reads ahead on the device that it was planned for.
    pub(super) fn prefetches(&self) -> bool {
        // The instruction is one of Hopper, as those of warpgroups are.
        matches!(self.kernel, Kernel::SmallM(_)) && self.device.wgmma == WgmmaSupport::Ptx
    }
}

/// Asks for the part of the next weight that is this plane's, if there is one and this is when.
#[cube]
pub(super) fn prefetch_next(next: &ComptimeOption<PrefetchArgs>, #[comptime] late: bool) {
    #[comptime]
    match next {
        ComptimeOption::None => {}
        ComptimeOption::Some(next) => {
            if comptime!(next.late == late) {
                let planes = CUBE_COUNT as u32 * CUBE_DIM / 32;
                let lane = UNIT_POS % 32;
                if lane == 0 {
                    let mut row = ABSOLUTE_POS as u32 / 32;
                    while row < next.rows {
                        prefetch_l2::<u32>(next.codes, row * next.code_row, next.code_part);
                        prefetch_l2::<u32>(next.scales, row * next.scale_row, next.scale_part);
                        row += planes;
                    }
                }
            }
        }
    }
}

/// Without the feature no product reads ahead.
#[cfg(not(feature = "cuda"))]
#[cube]
#[allow(unused_variables)]
fn prefetch_l2<T: CubePrimitive>(from: &[T], at: u32, bytes: u32) {}

#[cfg(test)]
mod tests {
    use burn_fp4_search::formats::Fp4Format;

    use super::*;
    use crate::plan::{Capability, Dtype, GPU};

    fn matmul(n: usize, k: usize) -> Matmul {
        let (format, block_size, dtype) = (Fp4Format::NvFp4, 16, Dtype::Bf16);
        Matmul { m: 1, n, k, format, block_size, dtype }
    }

    #[test]
    fn a_part_is_what_is_read_first() {
        let of = |n, k| PrefetchedPart::of(&matmul(n, k)).expect("a part");
        let whole = |rows, k: usize| {
            let (codes, scales) = (k / 2, k / 16);
            PrefetchedPart { rows, codes: (codes, codes), scales: (scales, scales) }
        };
        // All of it.
        assert_eq!(of(4096, 4096), whole(4096, 4096));
        assert_eq!(of(20, 256), whole(20, 256));
        // The first part of the first rows.
        let part = PrefetchedPart { rows: 8192, codes: (2048, 1808), scales: (256, 224) };
        assert_eq!(of(28672, 4096), part);
        // All of the first rows.
        assert_eq!(of(28672, 2048), whole(14563, 2048));
        // The first part of all rows.
        let part = PrefetchedPart { rows: 4096, codes: (7168, 3632), scales: (896, 448) };
        assert_eq!(of(4096, 14336), part);
    }

    #[test]
    fn a_part_is_never_more_than_is_read_ahead() {
        for n in [1, 8191, 8192, 8193, 200_000] {
            for k in [256, 4096, 16384, 1 << 20] {
                let PrefetchedPart { rows, codes, scales } =
                    PrefetchedPart::of(&matmul(n, k)).unwrap();
                assert!(rows <= n && codes.1 <= codes.0 && scales.1 <= scales.0);
                assert!(rows * (codes.1 + scales.1) <= MAX_PREFETCH_BYTES, "{n} x {k}");
                assert!(codes.1.is_multiple_of(16) && scales.1.is_multiple_of(16));
            }
        }
    }

    #[test]
    fn nothing_is_read_ahead_of_rows_that_are_too_short() {
        for (n, k) in [(0, 4096), (4096, 0), (4096, 128)] {
            assert_eq!(PrefetchedPart::of(&matmul(n, k)), None);
        }
    }

    #[test]
    fn products_of_few_rows_read_ahead_on_hopper() {
        let hopper = Capability { wgmma: WgmmaSupport::Ptx, ..GPU };
        let planned = |m, device| {
            let planned = Matmul { m, ..matmul(4096, 4096) }.plan(device).unwrap();
            planned.expect("a plan").prefetches()
        };
        assert!(planned(1, &hopper));
        assert!(!planned(64, &hopper));
        assert!(!planned(1, &GPU));
    }
}
