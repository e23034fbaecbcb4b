//! Matrix products straight from the codes of a weight, counters of them, and packed tensors as
//! kernels take them.
//!
//! # Prefetch
//!
//! A product of a captured graph prefetches the weight of the product after it.
//!
//! A pass runs a few times before it is captured, always in the same order. So each run is noted,
//! and a product finds in the notes of the run before which product comes next. The last one finds
//! the first, since the same pass usually runs again. From the first product that differs from the
//! notes on, the rest of a run prefetches nothing.
//!
//! A wrong guess costs only time, since a prefetch changes no result. But the memory has to be
//! there in every replay. CubeCL keeps all memory that the launches of a graph were given for as
//! long as the graph lives, and a prefetched weight is given to a launch; until then the notes keep
//! it. They hold only weights with another owner, such as a model. Otherwise a run would find
//! memory taken that the run before had freed, and would take other memory, which a capture cannot.
//!
//! # Chains
//!
//! Products of one row, with the norms and SwiGLUs that join them, wait while a graph is captured.
//! Consecutive ones become links of one launch: see [`Chain`]. Code that may launch another kernel
//! calls [`launch_chain`] before.
//!
//! Everything here happens on the thread that runs the stream of operations, which the runs and the
//! capture have to themselves, so the notes are local to the thread. There are none while nothing
//! is being captured.

use core::cell::{OnceCell, RefCell};
use core::sync::atomic::{AtomicU64, Ordering};
use std::rc::Rc;

use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, FloatDType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::{
    Capability, Chain, Counters, Dtype, FamilyLaunch, FamilyPlan, Fp8Plan, Matmul, MatmulPlan,
    NormOperands, PackedHandles, Prefetch, Refusal,
};
use burn_fp4_search::{Fp4Scheme, ScaleRule};

use super::device::{capability, kernel_dtype, output_tensor};
use super::queues;
use crate::layout::{Fp4Layout, Fp4Primitive};

/// Plans products on a device. It keeps the last plan with the capability of the device, because
/// layers are called with the same number of rows again and again.
pub(crate) struct Planner {
    capability: Capability,
    last: Option<(Matmul, Option<MatmulPlan>)>,
}

impl Planner {
    /// Makes the planner of a device.
    ///
    /// # Errors
    /// The reason why the device multiplies without kernels.
    pub(crate) fn new(device: &CubeDevice, client: &Client) -> Result<Self, Refusal> {
        Ok(Self { capability: capability(device, client)?, last: None })
    }

    /// Plans the product of an input `[m, k]` with a weight `[k, n]`; none if its blocks run along
    /// `n`, a plan refuses it, or a dense product is faster.
    pub(crate) fn plan(
        &mut self,
        m: usize,
        layout: &Fp4Layout,
        dtype: DType,
    ) -> Option<MatmulPlan> {
        let [k, n] = layout.shape[..] else { return None };
        if layout.axis != 0 {
            return None;
        }
        let Fp4Layout { format, block_size, .. } = *layout;
        let matmul = Matmul { m, n, k, format, block_size, dtype: self.product_dtype(dtype) };
        match self.last {
            Some((known, plan)) if known == matmul => plan,
            _ => {
                let plan = matmul.plan(&self.capability).ok().flatten();
                self.last = Some((matmul, plan));
                plan
            }
        }
    }
}

/// Smallest number of rows of the input for products in FP8. With fewer some are slower on an H100
/// than in bf16.
const MIN_FP8_ROWS: usize = 129;

impl Planner {
    /// Returns the dtype that kernels multiply values of a dtype in: f32 if they take no buffers of
    /// its own, as in WGSL. The driver then converts inputs and outputs, and may round either way.
    fn product_dtype(&self, dtype: DType) -> Dtype {
        let dtype = kernel_dtype(dtype);
        let taken = self.capability.portable.is_none_or(|portable| portable.holds(dtype));
        if taken { dtype } else { Dtype::F32 }
    }

    /// Plans the product of an input `[m, k]` with a weight `[k, n]` in FP8.
    ///
    /// # Errors
    /// The reason why it runs as [`plan`](Self::plan) says.
    pub(crate) fn plan_fp8(
        &self,
        m: usize,
        layout: &Fp4Layout,
        dtype: DType,
    ) -> Result<Fp8Plan, Refusal> {
        let refuse = |reason| Err(Refusal::Instructions { reason });
        let [k, n] = layout.shape[..] else { return refuse("the weight is not a matrix") };
        if layout.axis != 0 {
            return refuse("blocks run along the outputs");
        }
        if m < MIN_FP8_ROWS {
            return refuse("with at most 128 rows they are hardly faster");
        }
        let Fp4Layout { format, block_size, .. } = *layout;
        let matmul = Matmul { m, n, k, format, block_size, dtype: kernel_dtype(dtype) };
        matmul.fp8(&self.capability)
    }
}

/// Runs a product planned in FP8, as a tensor of a shape.
pub(crate) fn run_in_fp8(
    plan: &Fp8Plan,
    input: CubeTensor,
    weight: Fp4Primitive<CubeBackend>,
    rows: CubeTensor,
    bias: Option<CubeTensor>,
    shape: Shape,
) -> CubeTensor {
    let rows = into_contiguous(rows).handle;
    let launch = |client: &Client, input, mut weights: Vec<WeightHandles>, _| {
        launch_chain();
        let (weight, bias) = weights.pop().expect("one weight");
        plan.run(client, weight, rows, input, bias).map(|output| vec![output])
    };
    let mut outputs = run_with(plan.matmul(), input, vec![(weight, bias)], vec![shape], launch);
    outputs.pop().expect("an output for each weight")
}

/// Runs a planned product, as a tensor of a shape. While a graph is captured it also prefetches the
/// weight of the next product, and one of one row may wait for other links of a chain.
pub(crate) fn run(
    plan: &MatmulPlan,
    input: CubeTensor,
    weight: Fp4Primitive<CubeBackend>,
    bias: Option<CubeTensor>,
    shape: Shape,
) -> CubeTensor {
    let chained = is_capturing().then(|| Matmul::family(&[*plan.matmul()], plan.device()));
    if let Some(family) = chained.flatten().filter(|family| family.first().m == 1) {
        let mut outputs = run_family(&family, input, None, vec![(weight, bias)], vec![shape]);
        return outputs.pop().expect("an output for each weight");
    }
    let launch = |client: &Client, input, mut weights: Vec<WeightHandles>, next| {
        launch_chain();
        let (weight, bias) = weights.pop().expect("one weight");
        plan.run(client, weight, input, bias, next).map(|output| vec![output])
    };
    let mut outputs = run_with(plan.matmul(), input, vec![(weight, bias)], vec![shape], launch);
    outputs.pop().expect("an output for each weight")
}

/// A norm before products, besides its input, in contiguous memory.
pub(crate) struct NormTensors {
    /// Added to the input first.
    pub(crate) update: Option<CubeTensor>,
    pub(crate) weight: CubeTensor,
    pub(crate) epsilon: f32,
}

/// Runs planned products of one input with some weights, each with a bias or none with one, as
/// tensors of some shapes; see [`run`]. The sums of a norm with an update come last.
pub(crate) fn run_family(
    family: &FamilyPlan,
    input: CubeTensor,
    norm: Option<NormTensors>,
    weights: Vec<(Fp4Primitive<CubeBackend>, Option<CubeTensor>)>,
    shapes: Vec<Shape>,
) -> Vec<CubeTensor> {
    let norm = norm.map(|NormTensors { update, weight, epsilon }| NormOperands {
        update: update.map(|update| update.handle),
        weight: weight.handle,
        epsilon,
    });
    let launch = |client: &Client, input, weights, next| {
        let launch = family.prepare(client, weights, input, norm, next)?;
        let found = launch.outputs().clone();
        launch_or_link(client, launch);
        Ok(found.outputs.into_iter().chain(found.sums).collect())
    };
    run_with(family.first(), input, weights, shapes, launch)
}

/// Codes and scales of a weight, and a bias, in contiguous memory.
type WeightHandles = (PackedHandles, Option<Handle>);

/// Launches products of one input, given what launches them. `first` is the product with the first
/// weight, which stands for all of them in the notes for prefetches.
fn run_with(
    first: &Matmul,
    input: CubeTensor,
    weights: Vec<(Fp4Primitive<CubeBackend>, Option<CubeTensor>)>,
    shapes: Vec<Shape>,
    launch: impl FnOnce(
        &Client,
        Handle,
        Vec<WeightHandles>,
        Option<Prefetch>,
    ) -> Result<Vec<Handle>, Refusal>,
) -> Vec<CubeTensor> {
    let dtype = FloatDType::from(input.dtype);
    let in_f32 = first.dtype != kernel_dtype(input.dtype);
    let cast = |tensor, dtype| if in_f32 { CubeBackend::float_cast(tensor, dtype) } else { tensor };
    let read = |tensor| contiguous_in_order(cast(tensor, FloatDType::F32));
    let input = read(input);
    let weights: Vec<WeightHandles> = weights
        .into_iter()
        .map(|(weight, bias)| (handles(weight), bias.map(|bias| read(bias).handle)))
        .collect();
    let next = next_weight(first, &weights[0].0);
    let outputs = launch(&input.client, input.handle.clone(), weights, next)
        .expect("tensors have the lengths of their shapes");
    let tensor = |(output, shape)| output_tensor(&input, output, shape, input.dtype);
    let outputs = outputs.into_iter().zip(shapes);
    let outputs = outputs.map(|output| cast(tensor(output), dtype)).collect();
    queues::submit_launches(&input.device);
    outputs
}

/// Returns a tensor in contiguous memory, which may be an output of products that wait.
pub(crate) fn contiguous_in_order(tensor: CubeTensor) -> CubeTensor {
    if !tensor.is_contiguous() {
        launch_chain();
    }
    into_contiguous(tensor)
}

/// Returns the parts of a packed tensor in contiguous memory.
pub(super) fn handles(packed: Fp4Primitive<CubeBackend>) -> PackedHandles {
    let tensor_scales = packed.tensor_scale.meta.shape().num_elements();
    let [codes, scales, tensor_scale] = [packed.codes, packed.scales, packed.tensor_scale]
        .map(|tensor| contiguous_in_order(tensor).handle);
    PackedHandles { codes, scales, tensor_scale, tensor_scales }
}

/// Makes a scheme with the format of a packed tensor. Its values do not depend on how the scales
/// and codes were chosen.
pub(super) fn scheme_of(layout: &Fp4Layout) -> Fp4Scheme {
    Fp4Scheme::of(ScaleRule::of_format(layout.format)).with_block_size(layout.block_size)
}

thread_local! {
    static NOTES: RefCell<Option<RunOrder<NotedWeight>>> = const { RefCell::new(None) };
    /// Set while a graph is captured.
    static CAPTURE: RefCell<Option<OnceCell<Capture>>> = const { RefCell::new(None) };
}

/// Products that wait, and counters for launches, in memory that is written in the first run: a
/// capture may not.
struct Capture {
    chain: Chain,
    counters: Rc<Counters>,
}

impl Capture {
    fn new(client: &Client) -> Self {
        Self { chain: Chain::new(client), counters: Rc::new(Counters::new(client)) }
    }
}

/// Returns true while a graph is captured on this thread.
fn is_capturing() -> bool {
    CAPTURE.with_borrow(Option::is_some)
}

/// Returns the counters for launches of the graph that is captured on this thread.
pub(super) fn counters(client: &Client) -> Option<Rc<Counters>> {
    CAPTURE.with_borrow(|capture| {
        let capture = capture.as_ref()?;
        Some(capture.get_or_init(|| Capture::new(client)).counters.clone())
    })
}

/// Launches a family, or lets it wait for others if a graph is being captured.
fn launch_or_link(client: &Client, family: FamilyLaunch) {
    if !(is_capturing() && family.may_be_linked()) {
        launch_chain();
        return family.run(client);
    }
    CAPTURE.with_borrow_mut(|capture| {
        let Some(capture) = capture else { return };
        capture.get_or_init(|| Capture::new(client));
        capture.get_mut().expect("just made").chain.add(family);
    });
}

/// Launches the products that wait. Code that launches other kernels calls it first.
pub(crate) fn launch_chain() {
    CAPTURE.with_borrow_mut(|capture| {
        let capture = capture.as_mut().and_then(OnceCell::get_mut);
        capture.into_iter().for_each(|capture| capture.chain.launch());
    });
}

/// Notes the products of this thread for as long as it lives, and lets them wait for each other.
pub(super) struct Notes(());

impl Notes {
    pub(super) fn begin() -> Self {
        NOTES.set(Some(RunOrder::default()));
        CAPTURE.set(Some(OnceCell::new()));
        Self(())
    }

    /// Begins the next run of the pass.
    pub(super) fn next_run(&self) {
        NOTES.with_borrow_mut(|notes| notes.iter_mut().for_each(RunOrder::next_run));
    }
}

impl Drop for Notes {
    fn drop(&mut self) {
        NOTES.set(None);
        CAPTURE.set(None);
    }
}

/// Notes a product whose weight has another owner, and returns the weight of the product after it.
fn next_weight(matmul: &Matmul, weight: &PackedHandles) -> Option<Prefetch> {
    NOTES.with_borrow_mut(|notes| {
        let notes = notes.as_mut().filter(|_| !weight.codes.can_mut())?;
        let own = Prefetch { matmul: *matmul, weight: weight.clone() };
        notes.after(NotedWeight(own)).map(|next| next.0)
    })
}

#[derive(Clone)]
struct NotedWeight(Prefetch);

impl PartialEq for NotedWeight {
    /// Returns true for the same product with a weight in the same memory.
    fn eq(&self, other: &Self) -> bool {
        let place = |weight: &Self| {
            let codes = &weight.0.weight.codes;
            (codes.memory.descriptor().id.value, codes.offset_start)
        };
        place(self) == place(other) && self.0.matmul == other.0.matmul
    }
}

/// Order of the items of a run, compared with the run before.
struct RunOrder<T> {
    before: Vec<T>,
    now: Vec<T>,
    /// Set while the two runs agree.
    same: bool,
}

impl<T> Default for RunOrder<T> {
    fn default() -> Self {
        Self { before: Vec::new(), now: Vec::new(), same: true }
    }
}

impl<T: Clone + PartialEq> RunOrder<T> {
    fn next_run(&mut self) {
        self.before = core::mem::take(&mut self.now);
        self.same = true;
    }

    /// Notes an item, and returns the one that came after it in the run before.
    fn after(&mut self, item: T) -> Option<T> {
        let at = self.now.len();
        self.same &= self.before.get(at) == Some(&item);
        self.now.push(item);
        self.same.then(|| self.before[(at + 1) % self.before.len()].clone())
    }
}

/// Counts of products with packed weights and of lookups of their rows, since the program started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FusedProducts {
    /// Products straight from the codes.
    pub fused: u64,
    /// Groups of these that were found together in a stream of operations: products of one input,
    /// or one product. Kernels may run a group in one launch.
    pub groups: u64,
    /// Norms and SwiGLUs that ran in the launch of a group.
    pub joined: u64,
    /// Lookups of rows straight from the codes.
    pub lookups: u64,
    /// Products and lookups of a dequantized weight, because a dense product is faster, a plan
    /// refused, or the device has no kernels.
    pub dense: u64,
}

pub(crate) static FUSED: AtomicU64 = AtomicU64::new(0);
pub(crate) static GROUPS: AtomicU64 = AtomicU64::new(0);
pub(crate) static JOINED: AtomicU64 = AtomicU64::new(0);
pub(crate) static LOOKUPS: AtomicU64 = AtomicU64::new(0);
pub(crate) static DENSE: AtomicU64 = AtomicU64::new(0);

/// Returns the counts of products with packed weights and of lookups since the program started.
///
/// ```
/// use burn_fp4_ops::{FusedProducts, fused_products};
///
/// assert_eq!(fused_products(), FusedProducts::default()); // nothing ran yet
/// ```
#[must_use]
pub fn fused_products() -> FusedProducts {
    FusedProducts {
        fused: FUSED.load(Ordering::Relaxed),
        groups: GROUPS.load(Ordering::Relaxed),
        joined: JOINED.load(Ordering::Relaxed),
        lookups: LOOKUPS.load(Ordering::Relaxed),
        dense: DENSE.load(Ordering::Relaxed),
    }
}

#[cfg(test)]
mod tests {
    use burn_fp4_cubecl::{Decoding, WgmmaSupport};

    use super::*;

    const GPU: Capability = Capability {
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

    #[test]
    fn a_plan_is_made_once_for_a_product_and_anew_for_another_one() {
        let mut planner = Planner { capability: GPU, last: None };
        let layout = Fp4Layout::new(&[512, 256].into(), 0, &Fp4Scheme::nvfp4()).unwrap();
        let first = planner.plan(1, &layout, DType::F32).expect("a plan");
        // A plan that is made anew is for this device.
        planner.capability.cubes = 264;
        assert_eq!(planner.plan(1, &layout, DType::F32), Some(first));
        for (m, dtype) in [(2, DType::F32), (1, DType::F32), (1, DType::BF16), (1, DType::F32)] {
            let fresh = Planner { capability: planner.capability, last: None }
                .plan(m, &layout, dtype)
                .expect("a plan");
            assert_eq!(planner.plan(m, &layout, dtype), Some(fresh));
            assert_ne!(fresh, first);
        }
        let other = Fp4Layout::new(&[256, 512].into(), 0, &Fp4Scheme::nvfp4()).unwrap();
        let plan = planner.plan(1, &other, DType::F32).expect("a plan");
        assert_eq!((plan.matmul().n, plan.matmul().k), (512, 256));
        assert_eq!(planner.plan(1, &layout.transposed(), DType::F32), None);
    }

    #[test]
    fn halves_are_multiplied_in_f32_where_kernels_take_no_buffers_of_them() {
        use burn_fp4_cubecl::Portable;

        let portable = Portable {
            f16: false,
            bf16: false,
            cmma_f16: false,
            cmma_bf16: false,
            decoder: true,
            units: 256,
            shared_memory: 16 << 10,
        };
        let layout = Fp4Layout::new(&[512, 256].into(), 0, &Fp4Scheme::nvfp4()).unwrap();
        for (f16, expected) in [(false, Dtype::F32), (true, Dtype::F16)] {
            let portable = Some(Portable { f16, ..portable });
            let mut planner = Planner { capability: Capability { portable, ..GPU }, last: None };
            let plan = planner.plan(3, &layout, DType::F16).expect("a plan");
            assert_eq!(plan.matmul().dtype, expected);
        }
    }

    fn run(order: &mut RunOrder<char>, items: &str) -> Vec<Option<char>> {
        order.next_run();
        items.chars().map(|item| order.after(item)).collect()
    }

    #[test]
    fn a_run_finds_what_came_next_in_the_one_before() {
        let mut order = RunOrder::default();
        assert_eq!(run(&mut order, "abca"), [None; 4]);
        for _ in 0..3 {
            let found = [Some('b'), Some('c'), Some('a'), Some('a')];
            assert_eq!(run(&mut order, "abca"), found);
        }
        assert_eq!(run(&mut order, "a"), [Some('b')]);
        // Alone it comes after itself; what follows is new.
        assert_eq!(run(&mut order, "ab"), [Some('a'), None]);
        assert!(run(&mut order, "").is_empty());
        assert_eq!(run(&mut order, "a"), [None]);
    }

    #[cfg(feature = "cpu")]
    #[test]
    fn weights_that_others_own_are_noted() {
        use burn_fp4_cubecl::Dtype;
        use burn_fp4_cubecl::cubecl::Device;
        use burn_fp4_search::formats::Fp4Format;

        let client = Device::default().client();
        let weight = || {
            let [codes, scales, tensor_scale] = [(); 3].map(|()| client.empty(64));
            PackedHandles { codes, scales, tensor_scale, tensor_scales: 1 }
        };
        let (format, dtype) = (Fp4Format::NvFp4, Dtype::Bf16);
        let matmul = Matmul { m: 1, n: 1, k: 128, format, block_size: 16, dtype };
        let next = |weight: &PackedHandles| Some(Prefetch { matmul, weight: weight.clone() });
        let (first, second) = (weight(), weight());
        let run = || {
            let found = [next_weight(&matmul, &first.clone()), next_weight(&matmul, &weight())];
            let last = next_weight(&matmul, &second.clone());
            found.into_iter().chain([last]).map(|next| next.map(NotedWeight)).collect::<Vec<_>>()
        };
        assert!(run().iter().all(Option::is_none), "nothing is captured");
        let notes = Notes::begin();
        notes.next_run();
        assert!(run().iter().all(Option::is_none), "the first run");
        notes.next_run();
        assert!(run() == [next(&second).map(NotedWeight), None, next(&first).map(NotedWeight)]);
        drop(notes);
        assert!(run().iter().all(Option::is_none), "the capture is over");
    }

    #[test]
    fn a_run_in_another_order_finds_nothing_from_there_on() {
        let mut order = RunOrder::default();
        run(&mut order, "abcd");
        assert_eq!(run(&mut order, "abxd"), [Some('b'), Some('c'), None, None]);
        assert_eq!(run(&mut order, "abxd"), [Some('b'), Some('x'), Some('d'), Some('a')]);
    }
}
