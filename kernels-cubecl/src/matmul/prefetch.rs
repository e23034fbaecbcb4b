//! Prefetch of the next matmul's weight into the L2 cache, by a matmul with few rows of the input.
//!
//! Such a matmul is bound by reading its weight. Memory idles while it ends and the next one
//! begins, and during small kernels in between. A weight does not depend on any result, so the
//! planes of a matmul divide the packed rows of the next weight, and prefetch them once the loads
//! of their own weight are in flight. Nothing waits for a prefetch.
//!
//! ```text
//! of the next weight, codes and block scales alike:
//!              part          the rest of a row
//! row 0      | prefetched  |                 |    by the first lane of plane 0
//! row 1      | prefetched  |                 |    of plane 1
//! ..
//! row `rows` |                               |    read later, as next n tiles
//! ```
//!
//! Resident cubes read their rows side by side from k = 0 on. So if a weight is larger than the
//! prefetch, the first part of the rows that are read first is prefetched.
//!
//! A matmul prefetches after its first loads; with one row of the input also after its norm. If its
//! own weight is larger than the prefetch, it would evict the prefetched part again, so that it
//! prefetches with its last loads.

use cubecl::prelude::*;

use super::plan::{Kernel, Matmul, MatmulPlan};
use crate::instructions::prefetch_l2;
use crate::memory::{PackedHandles, check_memory};
use crate::plan::{Capability, Refusal, WgmmaSupport};

/// Largest number of prefetched bytes: a third of the 50 MB of L2 of H100 and H200. On an H200 a
/// token of a decoder of 8B shapes takes 3.37 ms without, 2.99 with 16 MB, 3.10 with 24 and 3.22
/// with 36. With 0 nothing is prefetched.
const MAX_PREFETCH_BYTES: usize = 16 << 20;

/// Packed rows of the cubes that an H200 runs at once, about.
const ROWS_IN_FLIGHT: usize = 8192;

/// A weight for [`MatmulPlan::run`](super::MatmulPlan::run) to prefetch, and its matmul.
#[derive(Debug, Clone)]
pub struct Prefetch {
    /// The matmul with this weight.
    pub matmul: Matmul,
    /// The weight.
    pub weight: PackedHandles,
}

/// The part of a weight that is prefetched, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PrefetchedPart {
    /// Packed rows of which a part is prefetched.
    rows: usize,
    /// Codes of a row, and the prefetched part of them.
    codes: (usize, usize),
    /// Block scales of a row, and the prefetched part of them.
    scales: (usize, usize),
}

impl PrefetchedPart {
    /// Returns the part, or `None` if the weight is empty or its rows are too short.
    fn of(matmul: &Matmul) -> Option<Self> {
        let codes = matmul.k / 2;
        let scales = matmul.k / matmul.block_size;
        let row = (codes + scales).max(1);
        let rows = matmul.n.min(ROWS_IN_FLIGHT.max(MAX_PREFETCH_BYTES / row));
        let most = row.min(MAX_PREFETCH_BYTES / rows.max(1));
        // The instruction takes multiples of 16 bytes.
        let part = |all: usize| (all, all * most / row / 16 * 16);
        let part = Self { rows, codes: part(codes), scales: part(scales) };
        (rows > 0 && part.scales.1 > 0).then_some(part)
    }
}

/// The part of a weight that a kernel prefetches, in bytes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PrefetchArgs {
    codes: &'static [u32],
    scales: &'static [u32],
    rows: u32,
    code_row: u32,
    code_part: u32,
    scale_row: u32,
    scale_part: u32,
    /// True if the kernel prefetches with its last loads instead of after the first.
    #[cube(comptime)]
    late: bool,
}

/// Returns true if a device prefetches. Bulk prefetch is an instruction of Hopper, like WGMMA.
fn prefetches(device: &Capability) -> bool {
    device.wgmma == WgmmaSupport::Ptx
}

impl MatmulPlan {
    /// Returns true if the kernel prefetches on the device of the plan.
    pub(super) fn prefetches(&self) -> bool {
        matches!(self.kernel, Kernel::SmallM(_)) && prefetches(&self.device)
    }
}

impl Prefetch {
    /// Returns the weight if a device prefetches one, once its memory is checked.
    ///
    /// # Errors
    /// [`Refusal::Memory`].
    pub(super) fn checked(
        next: Option<Self>,
        device: &Capability,
    ) -> Result<Option<Self>, Refusal> {
        let Some(next) = next.filter(|_| prefetches(device)) else { return Ok(None) };
        let Matmul { n, k, block_size, .. } = next.matmul;
        check_memory("next codes", &next.weight.codes, n * k / 2)?;
        check_memory("next scales", &next.weight.scales, n * k / block_size)?;
        Ok(Some(next))
    }

    /// Returns the argument for a kernel of the matmul `by`, with the packed rows of all weights of
    /// a family, or `None` if there is nothing to prefetch.
    pub(super) fn read(self, by: &Matmul) -> Option<PrefetchArgsLaunch> {
        let PrefetchedPart { rows, codes, scales } = PrefetchedPart::of(&self.matmul)?;
        let n = self.matmul.n;
        let own = by.n * (by.k / 2 + by.k / by.block_size);
        // SAFETY: the lengths match its matmul, which `checked` has compared with the memory.
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

/// Prefetches this plane's rows of the next weight, if there is one and it is due now. `cube` is
/// the number of its cube among `cubes`.
#[cube]
pub(super) fn prefetch_next(
    next: &ComptimeOption<PrefetchArgs>,
    cube: u32,
    cubes: u32,
    #[comptime] late: bool,
) {
    #[comptime]
    match next {
        ComptimeOption::None => {}
        ComptimeOption::Some(next) => {
            if comptime!(next.late == late) {
                let planes = cubes * CUBE_DIM / 32;
                let lane = UNIT_POS % 32;
                if lane == 0 {
                    let mut row = (cube * CUBE_DIM + UNIT_POS) / 32;
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
        // For families, which have no plan of one matmul.
        assert!(prefetches(&hopper) && !prefetches(&GPU));
    }
}
