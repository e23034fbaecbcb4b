//! Fusion of unmodified layers on Cube devices: products and lookups straight from the codes.
//!
//! On a Cube device operations wait in a stream before they run. A layer with a packed weight puts
//! two there that belong together, [`fp4_dequantize`](crate::Fp4Backend::fp4_dequantize) and the
//! reader of its output. The fuser finds them.
//!
//! - A product becomes one kernel, together with the reshapes in between, a transpose of the
//!   weight, and a bias that is added.
//! - An adapter that is added to the weight, `scale a b`, becomes two thin products, which are
//!   added to the output.
//! - Products with one input, such as queries, keys and values, become one launch if they have few
//!   rows. A norm of one row that directly follows other products joins those after it, and so does
//!   the SwiGLU of two: a layer of a decoder then takes six launches. In a captured graph the
//!   groups from one attention to the next are links of one launch, on NVIDIA's Hopper: two.
//! - A lookup of an embedding gathers the codes and scales of its rows, and dequantizes only these.
//!
//! A product is found only if no other operation waits in the stream, so a layer with a packed
//! weight runs what waits, before it dequantizes. But the products of a family wait for each other:
//! nothing is run if all that waits is a norm or the begin of a family.
//!
//! If a plan refuses the product, or a dense product is faster, the operations run one by one.
//!
//! | file         | what it holds                                                                |
//! |--------------|------------------------------------------------------------------------------|
//! | `mod.rs`     | the fuser, its registration, what waits for it, and the fused product        |
//! | `pattern.rs` | the operations that are fused                                                |

mod pattern;

use core::cell::RefCell;
use core::sync::atomic::Ordering;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use burn::backend::fusion::observer::{BlockOperations, FusionObservation, FusionObserver};
use burn::backend::fusion::stream::{Context, ScalarId};
use burn::backend::fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn::backend::ir::{
    BinaryOpIr, CustomOpIr, MatmulOpIr, OperationIr, ScalarIr, SelectOpIr, TensorIr,
};
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{Device, FloatDType, Shape};
use burn_backend::StreamId;
use burn_cubecl::fusion::{
    CubeFuser, CubeFusionHandle, CubeOptimization, FallbackOperation, FusedOperation,
    OptimizationProvider, RegistryError, register,
};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fp4_cubecl::{FamilyPlan, Matmul, MatmulPlan};
use burn_fp4_search::Hadamard;

use self::pattern::{Adapter, Member, Norm, Pattern, Product, Reader, Reshape, SwiGlu};
use crate::devices::cube::device::{cube_device, may_multiply, takes_norms, with_products};
use crate::devices::cube::matmul::{
    DENSE, FUSED, GROUPS, JOINED, LOOKUPS, NormTensors, Planner, contiguous_in_order, launch_chain,
};
use crate::devices::cube::{matmul, queues};
use crate::devices::extension::Fp4Backend;
use crate::error::OpsError;
use crate::layout::{Fp4Layout, Fp4Primitive};

/// Threads that may have a family at a time. Others run what waits.
const MAX_THREADS: usize = 64;

thread_local! {
    /// On the thread that runs the stream of operations: the operations that a thread has
    /// registered since it last ran all before them, if all are part of one pattern.
    static PENDING: RefCell<HashMap<StreamId, Pattern>> = RefCell::default();
}

static WATCHED: OnceLock<FusionObservation> = OnceLock::new();
static REGISTERED: OnceLock<Result<(), RegistryError>> = OnceLock::new();

/// Registers the fuser; see [`init`](crate::init).
pub(crate) fn init() -> Result<(), OpsError> {
    #[cfg(feature = "cuda")]
    keep_kernels();
    REGISTERED
        .get_or_init(|| {
            register(Provider).inspect(|()| {
                queues::register();
                WATCHED.get_or_init(|| FusionObservation::new(Arc::new(Watch)));
            })
        })
        .clone()
        .map_err(|error| OpsError::Registration(error.to_string()))
}

/// Lets CubeCL keep compiled kernels on disk, unless its configuration is set or read already.
#[cfg(feature = "cuda")]
fn keep_kernels() {
    use burn_fp4_cubecl::cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.compilation.cache = true;
    CubeClRuntimeConfig::try_set(config);
}

/// Returns true if products with packed weights on this device run straight from the codes.
pub(crate) fn is_active(device: &Device) -> bool {
    with_products(device).is_some() && matches!(REGISTERED.get(), Some(Ok(())))
}

/// Flushes this thread's pending operations if products on the device are fused, unless all that is
/// pending is a norm or the begin of a family of products, which the next product may join.
pub(crate) fn flush_for_product(device: &Device) {
    if !is_active(device) {
        return;
    }
    let takes_norms = cube_device(device).is_some_and(|device| takes_norms(&device));
    queues::submit_with_sync(device, move |sync| {
        let stream = StreamId::current();
        let awaits = PENDING
            .with_borrow(|pending| pending.get(&stream).is_some_and(Pattern::awaits_a_member));
        if awaits {
            return;
        }
        sync();
        PENDING.with_borrow_mut(|pending| {
            if pending.len() >= MAX_THREADS {
                pending.clear();
            }
            pending.insert(stream, Pattern::new(takes_norms));
        });
    });
}

/// Follows what waits, on the thread that runs the stream of operations.
struct Watch;

impl FusionObserver for Watch {
    fn registered(&self, operation: &OperationIr) {
        // A drop waits with the operations around it.
        if matches!(operation, OperationIr::Drop(_)) {
            return;
        }
        PENDING.with_borrow_mut(|pending| {
            let stream = StreamId::current();
            let Some(pattern) = pending.get_mut(&stream) else { return };
            let ready = pattern.is_ready();
            if pattern.accept(operation) {
                return;
            }
            // The ready operations run now, so that a norm after them is the first that waits.
            *pattern = pattern.anew();
            if !(ready && pattern.accept(operation)) {
                pending.remove(&stream);
            }
        });
    }

    fn block_starts(&self, block: BlockOperations<'_>) {
        let first = block.iter().find(|operation| !matches!(operation, OperationIr::Drop(_)));
        // These launch what waits themselves, if they are not links of it.
        if first.is_some_and(|first| !pattern::may_begin(first)) {
            launch_chain();
        }
    }

    fn block_ran(&self) {}
}

/// Makes a fuser for each device.
struct Provider;

impl OptimizationProvider for Provider {
    type Operation = FusedProduct;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        // Without kernels it stays closed.
        let off = !may_multiply(device);
        let device = device.clone();
        let pattern = Pattern::new(takes_norms(&device));
        let ready = pattern.anew();
        CubeFuser::new(Fuser { device, off, closed: off, pattern, ready })
    }
}

/// Matches the pattern with a device's operations, one at a time.
#[derive(Clone)]
struct Fuser {
    device: CubeDevice,
    off: bool,
    closed: bool,
    pattern: Pattern,
    /// The pattern when it was last complete. Operations after it may be a part of what follows.
    ready: Pattern,
}

impl OperationFuser<CubeOptimization> for Fuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if !self.closed {
            let accepted = self.pattern.accept(operation);
            if accepted && self.pattern.is_ready() {
                self.ready = self.pattern.clone();
            }
            self.closed = !accepted || self.pattern.is_complete();
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        CubeOptimization::new(FusedProduct::new(self.device.clone(), self.ready.clone()))
    }

    fn reset(&mut self) {
        self.closed = self.off;
        self.pattern = self.pattern.anew();
        self.ready = self.pattern.anew();
    }

    fn status(&self) -> FuserStatus {
        if self.closed { FuserStatus::Closed } else { FuserStatus::Open }
    }

    fn properties(&self) -> FuserProperties {
        let ready = self.ready.len > 0;
        // Higher than any score of Burn's own fusers for the reader and its followers.
        FuserProperties { score: if ready { 1 << 20 } else { 0 }, ready }
    }

    fn len(&self) -> usize {
        self.ready.len
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

type Streams = Context<CubeFusionHandle>;

/// Makes the operation at a position of the pattern, to be run unfused.
type Fallback<'a> = &'a dyn Fn(usize) -> Box<dyn FallbackOperation>;

/// A matched pattern on a device.
struct FusedProduct {
    device: CubeDevice,
    /// One per member, set by the first run, if the device multiplies by kernels.
    planners: Vec<Planner>,
    /// The matmuls of the last run with their plan as a family.
    family: Option<(Vec<Matmul>, Option<FamilyPlan>)>,
    pattern: Pattern,
}

/// A product of the pattern in this run.
struct Planned<'a> {
    member: &'a Member,
    product: &'a Product,
    plan: MatmulPlan,
    /// Transform of the input.
    hadamard: Option<Hadamard>,
    adds_bias: bool,
}

/// The launch of a family in this run, and what joins it; without a family each product is alone.
struct Launch<'a> {
    family: Option<FamilyPlan>,
    /// With its epsilon.
    norm: Option<(&'a Norm, f32)>,
    swiglu: Option<&'a SwiGlu>,
}

impl Launch<'_> {
    /// Returns true for the norm that joins, and for reshapes and drops of its normalized values.
    fn skips(&self, pattern: &Pattern, at: usize) -> bool {
        if self.norm.is_none() {
            return false;
        }
        let reshape = pattern.reshapes.iter().find(|reshape| reshape.at == at);
        let dropped = pattern.drops.iter().find(|dropped| dropped.at == at);
        let tensor =
            reshape.map(|reshape| reshape.output).or(dropped.map(|dropped| dropped.tensor));
        at == 0 || tensor.is_some_and(|tensor| pattern.is_of_norm(tensor))
    }
}

/// Operands of a product in this run.
struct Operands {
    input: CubeTensor,
    weight: Fp4Primitive<CubeBackend>,
    bias: Option<CubeTensor>,
}

impl Planned<'_> {
    /// Returns true if the operation at a position is between the product's first and last.
    fn has(&self, at: usize) -> bool {
        (self.member.at..=self.product.end()).contains(&at)
    }
}

impl FusedOperation for FusedProduct {
    const NAME: &'static str = "burn-fp4 product";

    type State = Pattern;

    fn num_ops_fused(&self) -> usize {
        self.pattern.len
    }

    fn run(&mut self, context: &mut Streams, fallback: Fallback<'_>) {
        let mut planners = core::mem::take(&mut self.planners);
        let mut last_family = self.family.take();
        if planners.is_empty() {
            let client = self.device.client();
            let planner = |_| Planner::new(&self.device, &client).ok();
            planners = self.pattern.members.iter().map_while(planner).collect();
        }
        let lookup = self.pattern.members.iter().find_map(|member| match &member.reader {
            Some(Reader::Lookup(select)) => Some((&member.dequantize, select)),
            _ => None,
        });
        let (counter, count) = match lookup {
            Some((dequantize, select)) => {
                (self.look_up(dequantize, select, context, fallback).map(|()| &LOOKUPS), 1)
            }
            None => {
                let planned = self.plan(&mut planners, context);
                let family = family(&planned, context, &mut last_family);
                let launch = self.launch(&planned, family, context);
                self.multiply(&planned, &launch, context, fallback);
                let fused = planned.iter().flatten().count();
                let joined = [launch.norm.is_some(), launch.swiglu.is_some()];
                JOINED.fetch_add(joined.map(u64::from).iter().sum(), Ordering::Relaxed);
                GROUPS.fetch_add(u64::from(fused > 0), Ordering::Relaxed);
                DENSE.fetch_add((planned.len() - fused) as u64, Ordering::Relaxed);
                (Some(&FUSED), fused)
            }
        };
        let counter = counter.unwrap_or_else(|| {
            (0..self.pattern.len).for_each(|at| run_apart(at, context, fallback));
            &DENSE
        });
        counter.fetch_add(count as u64, Ordering::Relaxed);
        self.planners = planners;
        self.family = last_family;
    }

    fn to_state(&self) -> Pattern {
        self.pattern.clone()
    }

    fn from_state(device: &CubeDevice, pattern: Pattern) -> Self {
        Self::new(device.clone(), pattern)
    }
}

impl FusedProduct {
    fn new(device: CubeDevice, pattern: Pattern) -> Self {
        Self { device, planners: Vec::new(), family: None, pattern }
    }

    /// Plans the product of each member, if it has a plan and the device has kernels.
    fn plan(&self, planners: &mut [Planner], context: &Streams) -> Vec<Option<Planned<'_>>> {
        let mut planners = planners.iter_mut();
        let planned = self.pattern.members.iter().map(|member| {
            let planner = planners.next()?;
            let Some(Reader::Product(product)) = &member.reader else { return None };
            let (plan, hadamard) = plan(member, &product.matmul, context, planner)?;
            let add = product.add.as_ref();
            let adds_bias = add.is_some_and(|add| adds_bias(context, &add.operation, &plan));
            Some(Planned { member, product, plan, hadamard, adds_bias })
        });
        planned.collect()
    }

    /// Adds the norm and the SwiGLU of the pattern to the launch of a family, if it takes them. A
    /// single weight is a family only with a norm.
    fn launch<'a>(
        &'a self,
        planned: &[Option<Planned<'_>>],
        family: Option<FamilyPlan>,
        context: &Streams,
    ) -> Launch<'a> {
        let mut launch = Launch { family, norm: None, swiglu: None };
        let (Some(family), Some(Some(first))) = (&mut launch.family, planned.first()) else {
            return launch;
        };
        let k = family.first().k;
        let normalizes = |norm: &&Norm| {
            let row = context.tensors.get(&norm.operation.inputs[0].id);
            let has_row = row.is_some_and(|row| row.shape.last() == Some(&k));
            has_row && first.hadamard.is_none() && self.pattern.keeps_norm()
        };
        let norm = self.pattern.norm.as_ref().filter(normalizes).and_then(|norm| {
            let epsilon = scalar(context, *norm.operation.scalars.first()?)?;
            let ScalarIr::Float(epsilon) = epsilon else { return None };
            Some((norm, epsilon as f32, family.with_norm(norm.adds)?))
        });
        if let Some((norm, epsilon, plan)) = norm {
            (*family, launch.norm) = (plan, Some((norm, epsilon)));
        } else if planned.len() == 1 {
            return Launch { family: None, ..launch };
        }
        let swiglu = self.pattern.swiglu.as_ref();
        if let Some((swiglu, plan)) =
            swiglu.and_then(|swiglu| Some((swiglu, family.with_swiglu()?)))
        {
            (*family, launch.swiglu) = (plan, Some(swiglu));
        }
        launch
    }

    /// Runs the operations in their order, since the last reader of a tensor takes it, but planned
    /// products from the codes. A family runs after all of its operands are read, then SwiGLU, then
    /// drops.
    fn multiply(
        &self,
        planned: &[Option<Planned<'_>>],
        launch: &Launch<'_>,
        context: &mut Streams,
        fallback: Fallback<'_>,
    ) {
        let is_in = |views: &[Reshape], at| views.iter().any(|view| view.at == at);
        let swiglu = self.pattern.swiglu.as_ref();
        let comes_last = |at| {
            let dropped = self.pattern.drops.iter().any(|dropped| dropped.at == at);
            dropped || swiglu.is_some_and(|swiglu| swiglu.at == at)
        };
        let (mut factors, mut of_family) = (None, Vec::new());
        for at in 0..self.pattern.len {
            let of_output = is_in(&self.pattern.views, at);
            let skipped = of_output && launch.family.is_some() || launch.skips(&self.pattern, at);
            if skipped || comes_last(at) {
                continue;
            }
            let owner = planned.iter().flatten().find(|planned| planned.has(at));
            // It copies only what is not in contiguous memory, as what waits is.
            if is_in(&self.pattern.reshapes, at) {
                fallback(at).run(context);
                continue;
            }
            let Some(owner) = owner.filter(|_| !of_output) else {
                run_apart(at, context, fallback);
                continue;
            };
            let product = owner.product;
            if at == product.at {
                let weight = packed(context, &owner.member.dequantize);
                let input = launch.norm.is_none().then(|| float(context, &product.matmul.lhs));
                factors = Some((input, weight));
            }
            let Some((input, weight)) = factors.take_if(|_| at == product.end()) else { continue };
            let add = product.add.as_ref().filter(|_| owner.adds_bias);
            let bias = add.map(|add| float(context, &add.operation.rhs));
            if launch.family.is_some() {
                of_family.push((input, (weight, bias)));
                continue;
            }
            let input = input.expect("a norm joins families only");
            let operands = Operands { input, weight, bias };
            let output = output(context, owner);
            let values = run(owner, operands, output.shape.clone(), context, &self.device);
            context.handles.register_float_tensor::<CubeBackend>(&output.id, values);
            if product.add.is_some() && !owner.adds_bias {
                run_apart(at, context, fallback);
            }
        }
        if let Some(family) = &launch.family {
            multiply_family(family, launch, planned, of_family, context);
            self.pattern.views.iter().for_each(|view| run_apart(view.at, context, fallback));
        }
        if let Some(swiglu) = swiglu.filter(|_| launch.swiglu.is_none()) {
            run_apart(swiglu.at, context, fallback);
        }
        let drops = self.pattern.drops.iter().map(|dropped| dropped.at);
        let drops = drops.filter(|&at| !launch.skips(&self.pattern, at));
        drops.for_each(|at| fallback(at).run(context));
    }

    /// Dequantizes only the rows that are looked up. Returns `None` if blocks do not run along the
    /// rows.
    fn look_up(
        &self,
        dequantize: &CustomOpIr,
        select: &SelectOpIr,
        context: &mut Streams,
        fallback: Fallback<'_>,
    ) -> Option<()> {
        let output = now(context, &select.out);
        let layout = layout(context, dequantize)?.of_rows(output.shape[0]).ok()?;
        let norm = self.pattern.norm.iter().map(|_| 0);
        let reshapes = self.pattern.reshapes.iter().map(|reshape| reshape.at);
        norm.chain(reshapes).for_each(|at| run_apart(at, context, fallback));
        launch_chain();
        let rows = int(context, &select.indices);
        let packed = CubeBackend::fp4_select_rows(packed(context, dequantize), rows);
        let values = CubeBackend::fp4_dequantize(packed, layout, FloatDType::from(output.dtype));
        context.handles.register_float_tensor::<CubeBackend>(&output.id, values);
        self.pattern.drops.iter().for_each(|dropped| fallback(dropped.at).run(context));
        Some(())
    }
}

/// Runs an operation that is not fused, which may read what waits.
fn run_apart(at: usize, context: &mut Streams, fallback: Fallback<'_>) {
    launch_chain();
    fallback(at).run(context);
}

/// Transforms the input `[.., k]` of a product.
fn transformed(input: CubeTensor, hadamard: Option<Hadamard>) -> CubeTensor {
    let axis = input.meta.shape().num_dims() - 1;
    match hadamard {
        Some(hadamard) => {
            launch_chain();
            CubeBackend::fp4_hadamard(input, axis, hadamard, false)
        }
        None => input,
    }
}

/// Plans a product, if it has one weight, one dtype, and a plan. Returns it with the transform of
/// its input.
fn plan(
    member: &Member,
    operation: &MatmulOpIr,
    context: &Streams,
    planner: &mut Planner,
) -> Option<(MatmulPlan, Option<Hadamard>)> {
    let real = |tensor: &TensorIr| context.tensors.get(&tensor.id);
    let layout = layout(context, &member.dequantize)?;
    let layout = if member.transposed { layout.transposed() } else { layout };
    let [k, n] = layout.shape[..] else { return None };
    let (input, output) = (real(&operation.lhs)?, real(&operation.out)?);
    let m = input.shape.num_elements().checked_div(k)?;
    // A batch of weights would be another product.
    let weight = real(&operation.rhs)?;
    let one_weight = weight.shape.num_elements() == k * n
        && weight.shape[weight.shape.num_dims() - 2..] == [k, n]
        && input.shape[input.shape.num_dims() - 1] == k
        && output.shape.num_elements() == m * n;
    let same_dtype = [weight.dtype, input.dtype].iter().all(|&dtype| dtype == output.dtype);
    let scale = member.adapter.as_ref().and_then(|adapter| adapter.scale);
    let known_scale = scale.is_none_or(|scale| scalar(context, scale).is_some());
    if !one_weight || !same_dtype || !known_scale {
        return None;
    }
    Some((planner.plan(m, &layout, output.dtype)?, layout.hadamard))
}

/// Plans all products as one launch, if a kernel takes them together, and none has an adapter or an
/// addition of its own. `last` holds the matmuls of the last call with their plan.
fn family(
    planned: &[Option<Planned<'_>>],
    context: &Streams,
    last: &mut Option<(Vec<Matmul>, Option<FamilyPlan>)>,
) -> Option<FamilyPlan> {
    let planned: Vec<&Planned<'_>> = planned.iter().map(Option::as_ref).collect::<Option<_>>()?;
    let first = *planned.first()?;
    let by_row = |planned: &Planned<'_>| {
        let tensor_scale = planned.member.dequantize.inputs.get(2);
        let tensor_scale = tensor_scale.and_then(|scale| context.tensors.get(&scale.id));
        tensor_scale.map(|scale| scale.shape.num_elements() > 1)
    };
    let alike = |other: &&Planned<'_>| {
        other.adds_bias == first.adds_bias
            && other.hadamard == first.hadamard
            && other.product.add.is_some() == other.adds_bias
            && other.member.adapter.is_none()
            && by_row(other) == by_row(first)
    };
    if !planned.iter().all(alike) {
        return None;
    }
    let matmuls: Vec<Matmul> = planned.iter().map(|planned| *planned.plan.matmul()).collect();
    match last {
        Some((known, plan)) if *known == matmuls => plan.clone(),
        _ => {
            let plan = Matmul::family(&matmuls, first.plan.device());
            last.insert((matmuls, plan)).1.clone()
        }
    }
}

/// Runs the products of a family in one launch, given the input and the weight of each, and stores
/// the outputs.
fn multiply_family(
    family: &FamilyPlan,
    launch: &Launch<'_>,
    planned: &[Option<Planned<'_>>],
    operands: Vec<(Option<CubeTensor>, WeightTensors)>,
    context: &mut Streams,
) {
    let mut outputs: Vec<TensorIr> =
        planned.iter().flatten().map(|planned| output(context, planned)).collect();
    let (mut inputs, mut weights): (Vec<_>, Vec<_>) = operands.into_iter().unzip();
    if let Some(swiglu) = launch.swiglu {
        // The gate comes first.
        weights.rotate_left(swiglu.gate);
        outputs = vec![now(context, &swiglu.output)];
    }
    let (input, norm) = match launch.norm {
        Some((Norm { operation, adds }, epsilon)) => {
            let mut read: Vec<_> =
                operation.inputs.iter().map(|operand| float(context, operand)).collect();
            let weight = read.pop().expect("the weight comes last");
            let update = adds.then(|| read.pop().expect("an update"));
            let input = read.pop().expect("an input");
            if *adds {
                outputs.push(now(context, &operation.outputs[0]));
            }
            (input, Some(NormTensors { update, weight, epsilon }))
        }
        // Inputs are equal: reshapes of one tensor.
        None => {
            let hadamard = planned.iter().flatten().next().and_then(|first| first.hadamard);
            let input = inputs.swap_remove(0).expect("an input without a norm");
            (transformed(input, hadamard), None)
        }
    };
    let shapes = outputs.iter().map(|output| output.shape.clone()).collect();
    let values = matmul::run_family(family, input, norm, weights, shapes);
    for (output, values) in outputs.into_iter().zip(values) {
        context.handles.register_float_tensor::<CubeBackend>(&output.id, values);
    }
}

/// A weight and its bias in this run.
type WeightTensors = (Fp4Primitive<CubeBackend>, Option<CubeTensor>);

/// Runs a planned product, as a tensor of a shape.
fn run(
    planned: &Planned<'_>,
    operands: Operands,
    shape: Shape,
    context: &mut Streams,
    device: &CubeDevice,
) -> CubeTensor {
    let Operands { input, weight, bias } = operands;
    let transformed = transformed(input.clone(), planned.hadamard);
    let values = matmul::run(&planned.plan, transformed, weight, bias, shape.clone());
    let Some(adapter) = &planned.member.adapter else { return values };
    launch_chain();
    let delta = multiply_adapter(adapter, input, planned.plan.matmul().k, context);
    let values = CubeBackend::float_add(values, CubeBackend::float_reshape(delta, shape));
    queues::submit_launches(device);
    values
}

/// Looks up the output of a product, with its bias if it adds one.
fn output(context: &Streams, planned: &Planned<'_>) -> TensorIr {
    let add = planned.product.add.as_ref().filter(|_| planned.adds_bias);
    now(context, add.map_or(&planned.product.matmul.out, |add| &add.operation.out))
}

/// Multiplies the input by an adapter: `scale (x a) b`, as a matrix.
fn multiply_adapter(
    adapter: &Adapter,
    input: CubeTensor,
    k: usize,
    context: &mut Streams,
) -> CubeTensor {
    let [a, b] = [&adapter.matmul.lhs, &adapter.matmul.rhs].map(|factor| float(context, factor));
    let m = input.meta.num_elements() / k;
    let input = CubeBackend::float_reshape(input, Shape::new([m, k]));
    let product = CubeBackend::float_matmul(CubeBackend::float_matmul(input, a), b);
    match adapter.scale.and_then(|scale| scalar(context, scale)) {
        Some(scale) => CubeBackend::float_mul_scalar(product, scale.into()),
        None => product,
    }
}

/// Returns true if a vector `[n]` is added, which the product's kernel can do.
fn adds_bias(context: &Streams, add: &BinaryOpIr, plan: &MatmulPlan) -> bool {
    let real = |tensor: &TensorIr| context.tensors.get(&tensor.id);
    let (Some(output), Some(bias), Some(sum)) = (real(&add.lhs), real(&add.rhs), real(&add.out))
    else {
        return false;
    };
    let n = plan.matmul().n;
    bias.shape.last() == Some(&n)
        && bias.shape.num_elements() == n
        && bias.dtype == output.dtype
        && sum.shape == output.shape
}

/// Looks up a tensor of the pattern in this run, with the status that it has in the pattern.
fn now(context: &Streams, tensor: &TensorIr) -> TensorIr {
    TensorIr { status: tensor.status, ..context.tensors[&tensor.id].clone() }
}

/// Takes a float tensor of this run, in contiguous memory.
fn float(context: &mut Streams, tensor: &TensorIr) -> CubeTensor {
    let tensor = now(context, tensor);
    contiguous_in_order(context.handles.get_float_tensor::<CubeBackend>(&tensor))
}

/// Takes an int tensor of this run.
fn int(context: &mut Streams, tensor: &TensorIr) -> CubeTensor {
    let tensor = now(context, tensor);
    context.handles.get_int_tensor::<CubeBackend>(&tensor)
}

/// Takes the codes and scales of the weight.
fn packed(context: &mut Streams, dequantize: &CustomOpIr) -> Fp4Primitive<CubeBackend> {
    let [codes, scales, tensor_scale] = [0, 1, 2].map(|at| int(context, &dequantize.inputs[at]));
    Fp4Primitive { codes, scales, tensor_scale }
}

/// Looks up a scalar of this run; the pattern has its number.
fn scalar(context: &Streams, scalar: ScalarIr) -> Option<ScalarIr> {
    let ScalarIr::UInt(value) = scalar else { return None };
    context.scalars.get(&ScalarId { value }).copied()
}

/// Returns the layout of the weight.
fn layout(context: &Streams, dequantize: &CustomOpIr) -> Option<Fp4Layout> {
    let ScalarIr::UInt(tag) = scalar(context, *dequantize.scalars.first()?)? else { return None };
    let weight = context.tensors.get(&dequantize.outputs.first()?.id)?;
    Fp4Layout::from_tag(tag, weight.shape.to_vec())
}
