//! Products of unmodified layers, straight from the codes of their weight.
//!
//! On a Cube device operations wait in a stream before they run. A layer with a packed weight puts two there that
//! belong together, [`fp4_dequantize`](crate::Fp4Backend::fp4_dequantize) and the product that reads its output:
//! a fuser finds them, with the reshapes that stand between and the addition of a bias behind, and runs one kernel
//! instead. Where a plan refuses, or a dense product is faster, it runs the operations one by one.

use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

use burn::backend::DispatchDevice;
use burn::backend::fusion::stream::{Context, ScalarId};
use burn::backend::fusion::{FuserProperties, FuserStatus, OperationFuser, get_client};
use burn::backend::ir::{
    BaseOperationIr, BinaryOpIr, CustomOpIr, FloatOperationIr, MatmulOpIr, NumericOperationIr,
    OperationIr, ScalarIr, TensorIr,
};
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

use crate::cube::{beside, has_kernels, kernel_dtype};
use crate::{Fp4Layout, OpsError};

/// How often products with packed weights ran, since the start of the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FusedProducts {
    /// Straight from the codes.
    pub fused: u64,
    /// Recognized, but dequantized first: a dense product is faster, or a plan refused.
    pub dense: u64,
}

static FUSED: AtomicU64 = AtomicU64::new(0);
static DENSE: AtomicU64 = AtomicU64::new(0);

/// How often products with packed weights ran, since the start of the program.
pub fn fused_products() -> FusedProducts {
    FusedProducts { fused: FUSED.load(Ordering::Relaxed), dense: DENSE.load(Ordering::Relaxed) }
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

/// Launches the operations that wait in the stream of this thread, if products are looked for there. It does not wait
/// for the device to take them, let alone run them: one that fails here fails again where its results are read, which can
/// say so.
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
    /// The weight as the product reads it: the output of the first operation, or of its reshape.
    weight: Option<TensorIr>,
    /// Reshapes to be run before the product: of anything but the weight.
    before: Vec<usize>,
    matmul: Option<MatmulOpIr>,
    /// Reshapes after it, of what may be a bias.
    after: Vec<usize>,
    add: Option<BinaryOpIr>,
    /// Operations of the segment.
    len: usize,
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
        let Some(weight) = &self.weight else {
            return match operation {
                OperationIr::Custom(custom) if custom.id == DEQUANTIZE => {
                    let [output] = &custom.outputs[..] else { return false };
                    self.weight = Some(output.clone());
                    self.dequantize = Some(custom.clone());
                    true
                }
                _ => false,
            };
        };
        match (operation, &self.matmul) {
            (OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape)), None) => {
                if reshape.input.id == weight.id {
                    // Its only reader, so that nobody misses what is not made.
                    if !is_last_use(&reshape.input) {
                        return false;
                    }
                    self.weight = Some(reshape.out.clone());
                } else {
                    self.before.push(self.len);
                }
                true
            }
            (OperationIr::Float(_, FloatOperationIr::Matmul(matmul)), None) => {
                let reads = matmul.rhs.id == weight.id && is_last_use(&matmul.rhs);
                if reads && matmul.lhs.id != weight.id {
                    self.matmul = Some(matmul.clone());
                    return true;
                }
                false
            }
            (OperationIr::BaseFloat(BaseOperationIr::Reshape(reshape)), Some(matmul)) => {
                let of_bias = self.add.is_none()
                    && self.after.is_empty()
                    && reshape.input.id != matmul.out.id;
                if of_bias {
                    self.after.push(self.len);
                }
                of_bias
            }
            (OperationIr::NumericFloat(_, NumericOperationIr::Add(add)), Some(matmul)) => {
                let of_product = self.add.is_none()
                    && add.lhs.id == matmul.out.id
                    && is_last_use(&add.lhs)
                    && add.rhs.id != matmul.out.id;
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
            // Nothing follows the addition of a bias.
            self.state.closed = self.state.segment.add.is_some();
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
        let ready = self.state.segment.matmul.is_some();
        // More than any of Burn's own gives for a product and what follows it.
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

/// A segment that is run as one product.
struct FusedProduct {
    device: CubeDevice,
    segment: Segment,
}

type Fallback<'a> = &'a dyn Fn(usize) -> Box<dyn FallbackOperation>;

impl FusedOperation for FusedProduct {
    const NAME: &'static str = "burn-fp4 product";

    type State = Segment;

    fn num_ops_fused(&self) -> usize {
        self.segment.len
    }

    fn run(&mut self, context: &mut Context<CubeFusionHandle>, fallback: Fallback<'_>) {
        let device = Capability::of(&self.device.client());
        match self.plan(context, &device) {
            Some(product) => {
                FUSED.fetch_add(1, Ordering::Relaxed);
                self.launch(context, fallback, product, &device);
            }
            None => {
                DENSE.fetch_add(1, Ordering::Relaxed);
                (0..self.segment.len).for_each(|at| fallback(at).run(context));
            }
        }
    }

    fn to_state(&self) -> Segment {
        self.segment.clone()
    }

    fn from_state(device: &CubeDevice, segment: Segment) -> Self {
        Self { device: device.clone(), segment }
    }
}

impl FusedProduct {
    /// The product, if it is one that is to run straight from the codes.
    fn plan(
        &self,
        context: &Context<CubeFusionHandle>,
        device: &Capability,
    ) -> Option<(Product, ProductPlan)> {
        let real = |tensor: &TensorIr| context.tensors.get(&tensor.id);
        let (dequantize, matmul) =
            (self.segment.dequantize.as_ref()?, self.segment.matmul.as_ref()?);
        let [scalar, ..] = &dequantize.scalars[..] else { return None };
        let ScalarIr::UInt(value) = *scalar else { return None };
        let ScalarIr::UInt(tag) = *context.scalars.get(&ScalarId { value })? else { return None };
        let weight = real(dequantize.outputs.first()?)?;
        let layout = Fp4Layout::from_tag(tag, weight.shape.to_vec())?;
        let [channels, outputs] = layout.shape[..] else { return None };
        let (input, output) = (real(&matmul.lhs)?, real(&matmul.out)?);
        let inputs = input.shape.num_elements().checked_div(channels)?;
        // A batch of weights would be another product.
        let rhs = real(&matmul.rhs)?;
        let one_weight = rhs.shape.num_elements() == channels * outputs
            && rhs.shape[rhs.shape.num_dims() - 2..] == [channels, outputs]
            && input.shape[input.shape.num_dims() - 1] == channels
            && output.shape.num_elements() == inputs * outputs;
        let same_dtype = [weight.dtype, input.dtype].iter().all(|&dtype| dtype == output.dtype);
        if !one_weight || !same_dtype {
            return None;
        }
        planned(inputs, &layout, kernel_dtype(output.dtype), device)
    }

    /// Whether what is added to a product is one value for each of its outputs, so that its kernel can do it.
    fn adds_bias(&self, context: &Context<CubeFusionHandle>, product: &Product) -> bool {
        let real = |tensor: &TensorIr| context.tensors.get(&tensor.id);
        let Some(add) = &self.segment.add else { return false };
        let (Some(output), Some(bias), Some(sum)) =
            (real(&add.lhs), real(&add.rhs), real(&add.out))
        else {
            return false;
        };
        bias.shape.last() == Some(&product.outputs)
            && bias.shape.num_elements() == product.outputs
            && bias.dtype == output.dtype
            && sum.shape == output.shape
    }

    /// Runs the reshapes one by one, and everything else at once, if what is added is a bias.
    fn launch(
        &self,
        context: &mut Context<CubeFusionHandle>,
        fallback: Fallback<'_>,
        (product, plan): (Product, ProductPlan),
        device: &Capability,
    ) {
        let Segment { dequantize, before, matmul, after, add, .. } = &self.segment;
        let planned = "planned";
        let (dequantize, matmul) =
            (dequantize.as_ref().expect(planned), matmul.as_ref().expect(planned));
        before.iter().chain(after).for_each(|&at| fallback(at).run(context));
        // The tensor as it is now, with the status that it has in this segment.
        let now = |context: &Context<CubeFusionHandle>, tensor: &TensorIr| TensorIr {
            status: tensor.status,
            ..context.tensors[&tensor.id].clone()
        };
        let float = |context: &mut Context<CubeFusionHandle>, tensor: &TensorIr| {
            let tensor = now(context, tensor);
            into_contiguous(context.handles.get_float_tensor::<CubeBackend>(&tensor))
        };
        let with_bias = add.as_ref().filter(|_| self.adds_bias(context, &product));
        let input = float(context, &matmul.lhs);
        let bias = with_bias.map(|add| float(context, &add.rhs).handle);
        let [codes, scales, tensor_scale] = [0, 1, 2].map(|at| {
            let tensor = now(context, &dequantize.inputs[at]);
            into_contiguous(context.handles.get_int_tensor::<CubeBackend>(&tensor))
        });
        let tensor_scales = tensor_scale.meta.num_elements();
        let [codes, scales, tensor_scale] =
            [codes, scales, tensor_scale].map(|tensor| tensor.handle);
        let weight = Packed { codes, scales, tensor_scale, tensor_scales };
        let output = multiply(&input, weight, bias, &product, plan, device);
        let made = now(context, with_bias.map_or(&matmul.out, |add| &add.out));
        let output: CubeTensor = beside(&input, output, made.shape.clone(), made.dtype);
        context.handles.register_float_tensor::<CubeBackend>(&made.id, output);
        if add.is_some() && with_bias.is_none() {
            fallback(self.segment.len - 1).run(context);
        }
    }
}
