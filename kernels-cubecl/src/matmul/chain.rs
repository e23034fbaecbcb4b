//! [`Chain`]: families of one row that are launched together.

use cubecl::client::Client;

use super::launch::FamilyLaunch;
use super::small_m_link::MAX_LINKS;
use crate::memory::Counters;

/// Families of one row that wait to be launched together, though each may read what those before
/// make. Their outputs have no values before [`launch`](Self::launch); a chain that is dropped
/// before launches nothing.
///
/// As links of one kernel they load codes while those before end, instead of one after the other.
/// Bits are those of [`FamilyLaunch::run`]. A family [may be linked](FamilyLaunch::may_be_linked)
/// on NVIDIA's Hopper; any other is launched when it is added, after those that wait.
///
/// ```no_run
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::{Capability, Chain, Dtype, Matmul, PackedHandles};
/// use burn_fp4_search::formats::Fp4Format;
///
/// let client = Device::cuda(0).expect("a GPU").client();
/// let device = Capability::of(&client);
/// let (format, block_size, dtype) = (Fp4Format::NvFp4, 16, Dtype::Bf16);
/// let square = Matmul { m: 1, n: 4096, k: 4096, format, block_size, dtype };
/// let family = Matmul::family(&[square], &device).expect("matrix instructions");
/// let weight = || PackedHandles {
///     codes: client.empty(4096 * 4096 / 2),
///     scales: client.empty(4096 * 4096 / 16),
///     tensor_scale: client.empty(4),
///     tensor_scales: 1,
/// };
/// let mut chain = Chain::new(&client);
/// let mut values = client.empty(4096 * dtype.size());
/// for _ in 0..3 {
///     let link = family.prepare(&client, vec![(weight(), None)], values, None, None)?;
///     assert!(link.may_be_linked()); // on Hopper
///     values = link.outputs().outputs[0].clone();
///     chain.add(link);
/// }
/// chain.launch(); // once for all
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
pub struct Chain {
    client: Client,
    /// One for each link.
    counters: Counters,
    waiting: Vec<FamilyLaunch>,
}

impl Chain {
    /// Returns a chain without families, which has counters of its own. It is for one thread.
    #[must_use]
    pub fn new(client: &Client) -> Self {
        Self { client: client.clone(), counters: Counters::new(client), waiting: Vec::new() }
    }

    /// Adds a family. It may read outputs of families that wait.
    pub fn add(&mut self, family: FamilyLaunch) {
        let follows =
            |waits: &FamilyLaunch| waits.is_like(&family) && !waits.makes_constants(&family);
        if self.waiting.len() == MAX_LINKS || !self.waiting.iter().all(follows) {
            self.launch();
        }
        if family.may_be_linked() {
            self.waiting.push(family);
        } else {
            self.launch();
            family.run(&self.client);
        }
    }

    /// Launches the families that wait.
    pub fn launch(&mut self) {
        let waiting = core::mem::take(&mut self.waiting);
        FamilyLaunch::run_linked(&self.client, waiting, self.counters.handle());
    }
}
