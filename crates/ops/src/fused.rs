//! Products of unmodified layers and their lookups of rows, straight from the codes of the weight.
//!
//! On a Cube device operations wait in a stream before they run. A layer with a packed weight puts
//! two there that belong together, [`fp4_dequantize`](crate::Fp4Backend::fp4_dequantize) and what
//! reads its output. A fuser finds them. A product is one kernel, with the reshapes that stand
//! between, a transpose of the weight, and the addition of a bias behind. An adapter that is added
//! to the weight, `scale a b`, becomes two thin products that are added to the output. Of an
//! embedding, codes and scales of the rows are gathered, and only these dequantized. Where a plan
//! refuses, or a dense product is faster, the operations run one by one.

use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

use burn::backend::DispatchDevice;
use burn::backend::fusion::stream::{Context, ScalarId};
use burn::backend::fusion::{FuserProperties, FuserStatus, OperationFuser, get_client};
use burn::backend::ir::{
    BaseOperationIr, BinaryOpIr, CustomOpIr, FloatOperationIr, MatmulOpIr, NumericOperationIr,
    OperationIr, ScalarIr, SelectOpIr, TensorIr,
};
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::{FloatDType, Shape};
use burn_cubecl::fusion::{
    CubeFuser, CubeFusionHandle, CubeOptimization, FallbackOperation, FusedOperation,
    OptimizationProvider, RegistryError, register,
};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::{Capability, Dtype, Packed, Product, ProductPlan, gemv, mma};
use serde::{Deserialize, Serialize};

use crate::cube::{beside, handles, has_kernels, kernel_dtype};
use crate::{Fp4Backend, Fp4Layout, Fp4Primitive, OpsError};

/// How often products with packed weights and lookups of their rows ran, since the program started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FusedProducts {
    /// Products straight from the codes.
    pub fused: u64,
    /// Lookups of rows straight from the codes.
    pub lookups: u64,
    /// Recognized, but dequantized first: a dense product is faster, or a plan refused.
    pub dense: u64,
}

static FUSED: AtomicU64 = AtomicU64::new(0);
static LOOKUPS: AtomicU64 = AtomicU64::new(0);
static DENSE: AtomicU64 = AtomicU64::new(0);

/// How often products with packed weights and lookups of their rows ran, since the program started.
pub fn fused_products() -> FusedProducts {
    FusedProducts {
        fused: FUSED.load(Ordering::Relaxed),
        lookups: LOOKUPS.load(Ordering::Relaxed),
        dense: DENSE.load(Ordering::Relaxed),
    }
}

static REGISTERED: OnceLock<Result<(), RegistryError>> = OnceLock::new();

/// See [`init`](crate::init).
pub(crate) fn init() -> Result<(), OpsError> {
    REGISTERED
        .get_or_init(|| register(Provider))
        .clone()
        .map_err(|error| OpsError::Registration(error.to_string()))
}

/// Whether products with packed weights on this device run straight from the codes.
pub(crate) fn is_active(device: &burn::tensor::Device) -> bool {
    crate::has_kernels(device) && matches!(REGISTERED.get(), Some(Ok(())))
}

/// Launches the operations that wait in the stream of this thread, if products are looked for
/// there. It does not wait for the device to take them, let alone run them: one that fails here
/// fails again where its results are read, which can say so.
pub(crate) fn settle(device: &burn::tensor::Device) {
    if is_active(device) {
        drain(device);
    }
}

/// Launches the operations that wait in the stream of this thread, as [`settle`] does.
pub(crate) fn drain(device: &burn::tensor::Device) {
    if let DispatchDevice::Cube(device) = device.clone().inner().as_dispatch() {
        let _ = get_client::<CubeBackend>(device).try_sync(|| ());
    }
}

struct Provider;

impl OptimizationProvider for Provider {
    type Operation = FusedProduct;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        let closed = !has_kernels(device);
        CubeFuser::new(Fuser { device: device.clone(), state: State::new(closed) })
    }
}

/// What was seen of a segment, an operation at a time.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Segment {
    dequantize: Option<CustomOpIr>,
    /// The weight as it is read: the output of the first operation, or of what follows it.
    weight: Option<TensorIr>,
    /// Whether that is the transpose.
    transposed: bool,
    /// What is added to the weight before it is read.
    adapter: Option<Adapter>,
    /// Reshapes to be run before the weight is read: of anything else.
    before: Vec<usize>,
    end: Option<End>,
    /// Operations of the segment.
    len: usize,
}

/// `scale a b`, in the shape of the weight.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Adapter {
    product: MatmulOpIr,
    scale: Option<ScalarIr>,
    /// What came of it so far.
    delta: TensorIr,
    /// Whether the weight has it.
    added: bool,
}

/// What reads the weight.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum End {
    Multiplication(Box<Multiplication>),
    /// Of rows of the weight.
    Lookup(Box<SelectOpIr>),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Multiplication {
    matmul: MatmulOpIr,
    /// Reshapes after it, of what may be a bias.
    after: Vec<usize>,
    add: Option<BinaryOpIr>,
}

#[derive(Debug, Clone)]
struct State {
    segment: Segment,
    closed: bool,
    /// Whether it never opens.
    off: bool,
}

impl State {
    fn new(off: bool) -> Self {
        Self { segment: Segment::default(), closed: off, off }
    }
}

impl Segment {
    /// Takes the next operation, if it belongs.
    fn take(&mut self, operation: &OperationIr) -> bool {
        match &mut self.end {
            Some(End::Multiplication(multiplication)) => multiplication.take(operation, self.len),
            Some(End::Lookup(_)) => false,
            None => match self.weight.clone() {
                Some(weight) => self.take_before_end(operation, &weight),
                None => self.take_dequantize(operation),
            },
        }
    }

    fn take_dequantize(&mut self, operation: &OperationIr) -> bool {
        let OperationIr::Custom(custom) = operation else { return false };
        let [output] = &custom.outputs[..] else { return false };
        if custom.id != DEQUANTIZE {
            return false;
        }
        self.weight = Some(output.clone());
        self.dequantize = Some(custom.clone());
        true
    }

    /// Takes what stands between dequantization and what reads the weight, or that.
    fn take_before_end(&mut self, operation: &OperationIr, weight: &TensorIr) -> bool {
        // Its only reader, so that nobody misses what is not made.
        let reads_weight = |tensor: &TensorIr| tensor.id == weight.id && is_last_use(tensor);
        let dequantized = |tensor: &TensorIr| {
            let made = self.dequantize.as_ref().and_then(|dequantize| dequantize.outputs.first());
            reads_weight(tensor) && made.is_some_and(|made| made.id == tensor.id)
        };
        if let Some(adapter) = &mut self.adapter
            && !adapter.added
        {
            return match adapter.take(operation, weight) {
                Some(weight) => {
                    self.weight = Some(weight);
                    true
                }
                None => false,
            };
        }
        match operation {
            OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape))
                if reshape.input.id == weight.id =>
            {
                let reads = reads_weight(&reshape.input);
                if reads {
                    self.weight = Some(reshape.out.clone());
                }
                reads
            }
            OperationIr::BaseFloat(BaseOperationIr::Reshape(_))
            | OperationIr::BaseInt(BaseOperationIr::Reshape(_)) => {
                self.before.push(self.len);
                true
            }
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(swap)) => {
                let transposes = dequantized(&swap.input)
                    && swap.input.shape.num_dims() == 2
                    && swap.dim1 != swap.dim2;
                if transposes {
                    self.weight = Some(swap.out.clone());
                    self.transposed = true;
                }
                transposes
            }
            OperationIr::BaseFloat(BaseOperationIr::Select(select)) => {
                let reads = dequantized(&select.tensor) && select.dim == 0;
                if reads {
                    self.end = Some(End::Lookup(Box::new(select.clone())));
                }
                reads
            }
            OperationIr::Float(_, FloatOperationIr::Matmul(matmul)) => {
                let operands = [matmul.lhs.id, matmul.rhs.id];
                if !operands.contains(&weight.id) {
                    // Only right behind the dequantization.
                    let adapts = self.len == 1 && matmul.out.shape == weight.shape;
                    if adapts {
                        let (product, delta) = (matmul.clone(), matmul.out.clone());
                        self.adapter = Some(Adapter { product, scale: None, delta, added: false });
                    }
                    return adapts;
                }
                let reads = reads_weight(&matmul.rhs) && matmul.lhs.id != weight.id;
                if reads {
                    let (matmul, after, add) = (matmul.clone(), Vec::new(), None);
                    let multiplication = Multiplication { matmul, after, add };
                    self.end = Some(End::Multiplication(Box::new(multiplication)));
                }
                reads
            }
            _ => false,
        }
    }

    /// Whether nothing can follow.
    fn is_complete(&self) -> bool {
        match &self.end {
            Some(End::Multiplication(multiplication)) => multiplication.add.is_some(),
            Some(End::Lookup(_)) => true,
            None => false,
        }
    }
}

impl Adapter {
    /// Takes what follows the product of its factors, and gives the weight as it is then.
    fn take(&mut self, operation: &OperationIr, weight: &TensorIr) -> Option<TensorIr> {
        let reads = |tensor: &TensorIr, id| tensor.id == id && is_last_use(tensor);
        match operation {
            OperationIr::NumericFloat(_, NumericOperationIr::MulScalar(scaled))
                if self.scale.is_none() && reads(&scaled.lhs, self.delta.id) =>
            {
                self.scale = Some(scaled.rhs);
                self.delta = scaled.out.clone();
                Some(weight.clone())
            }
            OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape))
                if reads(&reshape.input, self.delta.id) && reshape.out.shape == weight.shape =>
            {
                self.delta = reshape.out.clone();
                Some(weight.clone())
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Add(add))
                if reads(&add.lhs, weight.id) && reads(&add.rhs, self.delta.id) =>
            {
                self.added = true;
                Some(add.out.clone())
            }
            _ => None,
        }
    }

    /// What it adds to the product of an input with the weight, as a matrix.
    fn multiply(&self, input: CubeTensor, channels: usize, context: &mut Streams) -> CubeTensor {
        let [a, b] = [&self.product.lhs, &self.product.rhs].map(|factor| float(context, factor));
        let rows = input.meta.num_elements() / channels;
        let input = CubeBackend::float_reshape(input, Shape::new([rows, channels]));
        let product = CubeBackend::float_matmul(CubeBackend::float_matmul(input, a), b);
        match self.scale.and_then(|scale| scalar(context, scale)) {
            Some(scale) => CubeBackend::float_mul_scalar(product, scale.into()),
            None => product,
        }
    }
}

impl Multiplication {
    /// Takes what follows it, the operation at this place of the segment.
    fn take(&mut self, operation: &OperationIr, at: usize) -> bool {
        let output = self.matmul.out.id;
        match operation {
            OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape)) => {
                let of_bias =
                    self.add.is_none() && self.after.is_empty() && reshape.input.id != output;
                if of_bias {
                    self.after.push(at);
                }
                of_bias
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Add(add)) => {
                let of_product = self.add.is_none()
                    && add.lhs.id == output
                    && is_last_use(&add.lhs)
                    && add.rhs.id != output;
                if of_product {
                    self.add = Some(add.clone());
                }
                of_product
            }
            _ => false,
        }
    }
}

/// Whether an operation is the last to read a tensor.
fn is_last_use(tensor: &TensorIr) -> bool {
    tensor.status == burn::backend::ir::TensorStatus::ReadWrite
}

/// The name that the extension's macro gives the operation.
const DEQUANTIZE: &str = "fp4_dequantize";

#[derive(Clone)]
struct Fuser {
    device: CubeDevice,
    state: State,
}

impl OperationFuser<CubeOptimization> for Fuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if self.state.closed {
            return;
        }
        if self.state.segment.take(operation) {
            self.state.segment.len += 1;
            self.state.closed = self.state.segment.is_complete();
        } else {
            self.state.closed = true;
        }
    }

    fn finish(&mut self) -> CubeOptimization {
        let (device, segment) = (self.device.clone(), self.state.segment.clone());
        CubeOptimization::new(FusedProduct { device, segment })
    }

    fn reset(&mut self) {
        self.state = State::new(self.state.off);
    }

    fn status(&self) -> FuserStatus {
        if self.state.closed { FuserStatus::Closed } else { FuserStatus::Open }
    }

    fn properties(&self) -> FuserProperties {
        let ready = self.state.segment.end.is_some();
        // More than any of Burn's own gives for what reads the weight, and what follows it.
        FuserProperties { score: if ready { 1 << 20 } else { 0 }, ready }
    }

    fn len(&self) -> usize {
        self.state.segment.len
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// The product of an input with a weight of this layout, if it is to run straight from the codes.
pub(crate) fn planned(
    inputs: usize,
    layout: &Fp4Layout,
    dtype: Dtype,
    device: &Capability,
) -> Option<(Product, ProductPlan)> {
    let [channels, outputs] = layout.shape[..] else { return None };
    if layout.axis != 0 {
        return None;
    }
    let Fp4Layout { format, block_size, .. } = *layout;
    let product = Product { inputs, outputs, channels, format, block_size, dtype };
    match product.plan(device) {
        Ok(ProductPlan::Dense) | Err(_) => None,
        Ok(plan) => Some((product, plan)),
    }
}

/// Runs a product as planned.
pub(crate) fn multiply(
    input: &CubeTensor,
    weight: Packed,
    bias: Option<Handle>,
    product: &Product,
    plan: ProductPlan,
    device: &Capability,
) -> Handle {
    let kernel = match plan {
        ProductPlan::Mma(_) => mma,
        _ => gemv,
    };
    kernel(&input.client, device, weight, input.handle.clone(), bias, product).expect("planned")
}

/// A segment that is run at once.
struct FusedProduct {
    device: CubeDevice,
    segment: Segment,
}

type Streams = Context<CubeFusionHandle>;
type Fallback<'a> = &'a dyn Fn(usize) -> Box<dyn FallbackOperation>;

impl FusedOperation for FusedProduct {
    const NAME: &'static str = "burn-fp4 product";

    type State = Segment;

    fn num_ops_fused(&self) -> usize {
        self.segment.len
    }

    fn run(&mut self, context: &mut Streams, fallback: Fallback<'_>) {
        let Segment { dequantize, end, len, .. } = &self.segment;
        let ran = match (dequantize, end) {
            (Some(dequantize), Some(End::Multiplication(multiplication))) => {
                self.multiply(dequantize, multiplication, context, fallback)
            }
            (Some(dequantize), Some(End::Lookup(select))) => {
                self.look_up(dequantize, select, context, fallback)
            }
            _ => None,
        };
        match ran {
            Some(counter) => counter.fetch_add(1, Ordering::Relaxed),
            None => {
                (0..*len).for_each(|at| fallback(at).run(context));
                DENSE.fetch_add(1, Ordering::Relaxed)
            }
        };
    }

    fn to_state(&self) -> Segment {
        self.segment.clone()
    }

    fn from_state(device: &CubeDevice, segment: Segment) -> Self {
        Self { device: device.clone(), segment }
    }
}

/// A tensor as it is now, with the status that it has in a segment.
fn now(context: &Streams, tensor: &TensorIr) -> TensorIr {
    TensorIr { status: tensor.status, ..context.tensors[&tensor.id].clone() }
}

/// A float tensor as it is now, in contiguous memory.
fn float(context: &mut Streams, tensor: &TensorIr) -> CubeTensor {
    let tensor = now(context, tensor);
    into_contiguous(context.handles.get_float_tensor::<CubeBackend>(&tensor))
}

/// An int tensor as it is now.
fn int(context: &mut Streams, tensor: &TensorIr) -> CubeTensor {
    let tensor = now(context, tensor);
    context.handles.get_int_tensor::<CubeBackend>(&tensor)
}

/// Codes and scales that would be dequantized.
fn packed(context: &mut Streams, dequantize: &CustomOpIr) -> Fp4Primitive<CubeBackend> {
    let [codes, scales, tensor_scale] = [0, 1, 2].map(|at| int(context, &dequantize.inputs[at]));
    Fp4Primitive { codes, scales, tensor_scale }
}

/// A scalar as it is now: a segment has its number.
fn scalar(context: &Streams, scalar: ScalarIr) -> Option<ScalarIr> {
    let ScalarIr::UInt(value) = scalar else { return None };
    context.scalars.get(&ScalarId { value }).copied()
}

/// The layout of the weight that would be dequantized.
fn layout(context: &Streams, dequantize: &CustomOpIr) -> Option<Fp4Layout> {
    let ScalarIr::UInt(tag) = scalar(context, *dequantize.scalars.first()?)? else { return None };
    let weight = context.tensors.get(&dequantize.outputs.first()?.id)?;
    Fp4Layout::from_tag(tag, weight.shape.to_vec())
}

impl FusedProduct {
    /// Runs a product straight from the codes and says what counts it, unless it is not to run so:
    /// the reshapes one by one, and everything else at once, if what is added is a bias.
    fn multiply(
        &self,
        dequantize: &CustomOpIr,
        multiplication: &Multiplication,
        context: &mut Streams,
        fallback: Fallback<'_>,
    ) -> Option<&'static AtomicU64> {
        let device = Capability::of(&self.device.client());
        let Multiplication { matmul, after, add } = multiplication;
        let (product, plan) = self.plan(dequantize, matmul, context, &device)?;
        self.segment.before.iter().chain(after).for_each(|&at| fallback(at).run(context));
        let with_bias = add.as_ref().filter(|add| adds_bias(context, add, &product));
        let input = float(context, &matmul.lhs);
        let bias = with_bias.map(|add| float(context, &add.rhs).handle);
        let weight = handles(packed(context, dequantize));
        let output = multiply(&input, weight, bias, &product, plan, &device);
        let made = now(context, with_bias.map_or(&matmul.out, |add| &add.out));
        let mut output: CubeTensor = beside(&input, output, made.shape.clone(), made.dtype);
        if let Some(adapter) = &self.segment.adapter {
            let adapted = adapter.multiply(input, product.channels, context);
            let adapted = CubeBackend::float_reshape(adapted, made.shape.clone());
            output = CubeBackend::float_add(output, adapted);
        }
        context.handles.register_float_tensor::<CubeBackend>(&made.id, output);
        if add.is_some() && with_bias.is_none() {
            fallback(self.segment.len - 1).run(context);
        }
        Some(&FUSED)
    }

    /// The product, if it is one that is to run straight from the codes.
    fn plan(
        &self,
        dequantize: &CustomOpIr,
        matmul: &MatmulOpIr,
        context: &Streams,
        device: &Capability,
    ) -> Option<(Product, ProductPlan)> {
        let real = |tensor: &TensorIr| context.tensors.get(&tensor.id);
        let layout = layout(context, dequantize)?;
        let layout = if self.segment.transposed { layout.transposed() } else { layout };
        let [channels, outputs] = layout.shape[..] else { return None };
        let (input, output) = (real(&matmul.lhs)?, real(&matmul.out)?);
        let inputs = input.shape.num_elements().checked_div(channels)?;
        // A batch of weights would be another product.
        let rhs = real(&matmul.rhs)?;
        let one_weight = rhs.shape.num_elements() == channels * outputs
            && rhs.shape[rhs.shape.num_dims() - 2..] == [channels, outputs]
            && input.shape[input.shape.num_dims() - 1] == channels
            && output.shape.num_elements() == inputs * outputs;
        let scaled = self.segment.adapter.as_ref().and_then(|adapter| adapter.scale);
        if scaled.is_some_and(|scale| scalar(context, scale).is_none()) {
            return None;
        }
        let same_dtype = [rhs.dtype, input.dtype].iter().all(|&dtype| dtype == output.dtype);
        if !one_weight || !same_dtype {
            return None;
        }
        planned(inputs, &layout, kernel_dtype(output.dtype), device)
    }

    /// Dequantizes the rows that are looked up and no others, and says what counts it, unless
    /// blocks do not run along the rows.
    fn look_up(
        &self,
        dequantize: &CustomOpIr,
        select: &SelectOpIr,
        context: &mut Streams,
        fallback: Fallback<'_>,
    ) -> Option<&'static AtomicU64> {
        let made = now(context, &select.out);
        let of_rows = layout(context, dequantize)?.of_rows(made.shape[0]).ok()?;
        self.segment.before.iter().for_each(|&at| fallback(at).run(context));
        let rows = int(context, &select.indices);
        let Fp4Primitive { codes, scales, tensor_scale } = packed(context, dequantize);
        let gathered = |part: CubeTensor| CubeBackend::int_select(part, 0, rows.clone());
        let by_row = tensor_scale.meta.num_elements() > 1;
        let packed = Fp4Primitive {
            codes: gathered(codes),
            scales: gathered(scales),
            tensor_scale: if by_row { gathered(tensor_scale) } else { tensor_scale },
        };
        let dtype = FloatDType::from(made.dtype);
        let values = CubeBackend::fp4_dequantize(packed, of_rows, dtype);
        context.handles.register_float_tensor::<CubeBackend>(&made.id, values);
        Some(&LOOKUPS)
    }
}

/// Whether what is added to a product is one value for each of its outputs, as its kernel can do.
fn adds_bias(context: &Streams, add: &BinaryOpIr, product: &Product) -> bool {
    let real = |tensor: &TensorIr| context.tensors.get(&tensor.id);
    let (Some(output), Some(bias), Some(sum)) = (real(&add.lhs), real(&add.rhs), real(&add.out))
    else {
        return false;
    };
    bias.shape.last() == Some(&product.outputs)
        && bias.shape.num_elements() == product.outputs
        && bias.dtype == output.dtype
        && sum.shape == output.shape
}
