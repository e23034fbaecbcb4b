//! Runs a matched pattern: straight from the codes, or its operations one by one.

use core::sync::atomic::{AtomicU64, Ordering};

use burn::backend::fusion::stream::{Context, ScalarId};
use burn::backend::ir::{BinaryOpIr, CustomOpIr, MatmulOpIr, ScalarIr, SelectOpIr, TensorIr};
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::{FloatDType, Shape};
use burn_cubecl::fusion::{CubeFusionHandle, FallbackOperation, FusedOperation};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fp4_cubecl::MatmulPlan;

use super::pattern::{Adapter, Pattern, Product, Reader};
use crate::devices::cube::matmul::{DENSE, FUSED, LOOKUPS, Planner};
use crate::devices::cube::{matmul, queues};
use crate::devices::extension::Fp4Backend;
use crate::layout::Fp4Layout;
use crate::primitive::Fp4Primitive;

type Streams = Context<CubeFusionHandle>;

/// Makes the operation at a position of the pattern, to be run unfused.
type Fallback<'a> = &'a dyn Fn(usize) -> Box<dyn FallbackOperation>;

/// A matched pattern on a device.
pub(super) struct FusedProduct {
    device: CubeDevice,
    /// Set by the first run, if the device multiplies by kernels.
    planner: Option<Planner>,
    pattern: Pattern,
}

impl FusedOperation for FusedProduct {
    const NAME: &'static str = "burn-fp4 product";

    type State = Pattern;

    fn num_ops_fused(&self) -> usize {
        self.pattern.len
    }

    fn run(&mut self, context: &mut Streams, fallback: Fallback<'_>) {
        let planner = self.planner.take();
        let mut planner =
            planner.or_else(|| Planner::new(&self.device, &self.device.client()).ok());
        let Pattern { dequantize, reader, len, .. } = &self.pattern;
        let counter = match (dequantize, reader) {
            (Some(dequantize), Some(Reader::Product(product))) => planner
                .as_mut()
                .and_then(|planner| self.multiply(planner, dequantize, product, context, fallback)),
            (Some(dequantize), Some(Reader::Lookup(select))) => {
                self.look_up(dequantize, select, context, fallback)
            }
            _ => None,
        };
        let counter = counter.unwrap_or_else(|| {
            (0..*len).for_each(|at| fallback(at).run(context));
            &DENSE
        });
        counter.fetch_add(1, Ordering::Relaxed);
        self.planner = planner;
    }

    fn to_state(&self) -> Pattern {
        self.pattern.clone()
    }

    fn from_state(device: &CubeDevice, pattern: Pattern) -> Self {
        Self::new(device.clone(), pattern)
    }
}

impl FusedProduct {
    pub(super) fn new(device: CubeDevice, pattern: Pattern) -> Self {
        Self { device, planner: None, pattern }
    }

    /// Runs the product from the codes. Returns the counter to bump, or `None` to fall back to
    /// unfused execution. Reshapes run individually; the addition is fused if it adds a bias `[n]`.
    fn multiply(
        &self,
        planner: &mut Planner,
        dequantize: &CustomOpIr,
        product: &Product,
        context: &mut Streams,
        fallback: Fallback<'_>,
    ) -> Option<&'static AtomicU64> {
        let Product { matmul: operation, bias_reshape, add } = product;
        let plan = self.plan(dequantize, operation, context, planner)?;
        let reshapes = self.pattern.reshapes.iter().chain(bias_reshape);
        reshapes.for_each(|&at| fallback(at).run(context));
        let with_bias = add.as_ref().filter(|add| adds_bias(context, add, &plan));
        let output = now(context, with_bias.map_or(&operation.out, |add| &add.out));
        let input = float(context, &operation.lhs);
        let bias = with_bias.map(|add| float(context, &add.rhs));
        let weight = packed(context, dequantize);
        let mut values = matmul::run(&plan, input.clone(), weight, bias, output.shape.clone());
        if let Some(adapter) = &self.pattern.adapter {
            let delta = multiply_adapter(adapter, input, plan.matmul().k, context);
            let delta = CubeBackend::float_reshape(delta, output.shape.clone());
            values = CubeBackend::float_add(values, delta);
            queues::submit_launches(&self.device);
        }
        context.handles.register_float_tensor::<CubeBackend>(&output.id, values);
        if add.is_some() && with_bias.is_none() {
            fallback(self.pattern.len - 1).run(context);
        }
        Some(&FUSED)
    }

    /// Plans the product, if it has one weight, one dtype, and a plan.
    fn plan(
        &self,
        dequantize: &CustomOpIr,
        operation: &MatmulOpIr,
        context: &Streams,
        planner: &mut Planner,
    ) -> Option<MatmulPlan> {
        let real = |tensor: &TensorIr| context.tensors.get(&tensor.id);
        let layout = layout(context, dequantize)?;
        let layout = if self.pattern.transposed { layout.transposed() } else { layout };
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
        let scale = self.pattern.adapter.as_ref().and_then(|adapter| adapter.scale);
        let known_scale = scale.is_none_or(|scale| scalar(context, scale).is_some());
        if !one_weight || !same_dtype || !known_scale {
            return None;
        }
        planner.plan(m, &layout, output.dtype)
    }

    /// Dequantizes only the rows that are looked up. Returns the counter to bump, or `None` if
    /// blocks do not run along the rows.
    fn look_up(
        &self,
        dequantize: &CustomOpIr,
        select: &SelectOpIr,
        context: &mut Streams,
        fallback: Fallback<'_>,
    ) -> Option<&'static AtomicU64> {
        let output = now(context, &select.out);
        let layout = layout(context, dequantize)?.of_rows(output.shape[0]).ok()?;
        self.pattern.reshapes.iter().for_each(|&at| fallback(at).run(context));
        let rows = int(context, &select.indices);
        let Fp4Primitive { codes, scales, tensor_scale } = packed(context, dequantize);
        let gather = |part: CubeTensor| CubeBackend::int_select(part, 0, rows.clone());
        let by_row = tensor_scale.meta.num_elements() > 1;
        let packed = Fp4Primitive {
            codes: gather(codes),
            scales: gather(scales),
            tensor_scale: if by_row { gather(tensor_scale) } else { tensor_scale },
        };
        let values = CubeBackend::fp4_dequantize(packed, layout, FloatDType::from(output.dtype));
        context.handles.register_float_tensor::<CubeBackend>(&output.id, values);
        Some(&LOOKUPS)
    }
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
    into_contiguous(context.handles.get_float_tensor::<CubeBackend>(&tensor))
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
