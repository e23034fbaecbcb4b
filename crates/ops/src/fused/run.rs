//! Runs a segment: the product or the lookup straight from the codes, or its operations one by one.

use core::sync::atomic::{AtomicU64, Ordering};

use burn::backend::ir::{BinaryOpIr, CustomOpIr, MatmulOpIr, SelectOpIr, TensorIr};
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::FloatDType;
use burn_cubecl::fusion::{FallbackOperation, FusedOperation};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fp4_cubecl::{Capability, MatmulPlan};

use super::multiplication::Multiplication;
use super::segment::{End, Segment};
use super::streams::{Streams, float, int, layout, now, packed, scalar};
use crate::counts::{DENSE, FUSED, LOOKUPS};
use crate::devices::cube::device::{beside, kernel_dtype};
use crate::devices::cube::lane;
use crate::devices::cube::packed::handles;
use crate::devices::cube::prefetch;
use crate::devices::cube::product;
use crate::devices::extension::Fp4Backend;
use crate::primitive::Fp4Primitive;

/// A segment that is run at once.
pub(super) struct FusedProduct {
    device: CubeDevice,
    /// What the device can do, once asked.
    capability: Option<Capability>,
    segment: Segment,
}

/// Runs an operation of the segment as it is.
type Fallback<'a> = &'a dyn Fn(usize) -> Box<dyn FallbackOperation>;

impl FusedOperation for FusedProduct {
    const NAME: &'static str = "burn-fp4 product";

    type State = Segment;

    fn num_ops_fused(&self) -> usize {
        self.segment.len
    }

    fn run(&mut self, context: &mut Streams, fallback: Fallback<'_>) {
        let capability =
            self.capability.get_or_insert_with(|| Capability::of(&self.device.client()));
        let capability = *capability;
        let Segment { dequantize, end, len, .. } = &self.segment;
        let ran = match (dequantize, end) {
            (Some(dequantize), Some(End::Multiplication(multiplication))) => {
                self.multiply(&capability, dequantize, multiplication, context, fallback)
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
        Self::new(device.clone(), segment)
    }
}

impl FusedProduct {
    pub(super) fn new(device: CubeDevice, segment: Segment) -> Self {
        Self { device, capability: None, segment }
    }

    /// Runs a product straight from the codes and says what counts it, unless it is not to run so:
    /// the reshapes one by one, and everything else at once, if what is added is a bias.
    fn multiply(
        &self,
        capability: &Capability,
        dequantize: &CustomOpIr,
        multiplication: &Multiplication,
        context: &mut Streams,
        fallback: Fallback<'_>,
    ) -> Option<&'static AtomicU64> {
        let Multiplication { matmul, after, add } = multiplication;
        let plan = self.plan(dequantize, matmul, context, capability)?;
        self.segment.before.iter().chain(after).for_each(|&at| fallback(at).run(context));
        let with_bias = add.as_ref().filter(|add| adds_bias(context, add, &plan));
        let input = float(context, &matmul.lhs);
        let bias = with_bias.map(|add| float(context, &add.rhs).handle);
        let weight = handles(packed(context, dequantize));
        let output = prefetch::run(&plan, &input.client, weight, input.handle.clone(), bias);
        let output = output.expect("tensors have the lengths of their shapes");
        let made = now(context, with_bias.map_or(&matmul.out, |add| &add.out));
        let mut output: CubeTensor = beside(&input, output, made.shape.clone(), made.dtype);
        if let Some(adapter) = &self.segment.adapter {
            let adapted = adapter.multiply(input, plan.matmul().k, context);
            let adapted = CubeBackend::float_reshape(adapted, made.shape.clone());
            output = CubeBackend::float_add(output, adapted);
        }
        context.handles.register_float_tensor::<CubeBackend>(&made.id, output);
        lane::launch_now(&self.device);
        if add.is_some() && with_bias.is_none() {
            fallback(self.segment.len - 1).run(context);
        }
        Some(&FUSED)
    }

    /// The product as planned, if it is one that is to run straight from the codes.
    fn plan(
        &self,
        dequantize: &CustomOpIr,
        matmul: &MatmulOpIr,
        context: &Streams,
        device: &Capability,
    ) -> Option<MatmulPlan> {
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
        product::planned(inputs, &layout, kernel_dtype(output.dtype), device)
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
fn adds_bias(context: &Streams, add: &BinaryOpIr, plan: &MatmulPlan) -> bool {
    let real = |tensor: &TensorIr| context.tensors.get(&tensor.id);
    let (Some(output), Some(bias), Some(sum)) = (real(&add.lhs), real(&add.rhs), real(&add.out))
    else {
        return false;
    };
    bias.shape.last() == Some(&plan.matmul().n)
        && bias.shape.num_elements() == plan.matmul().n
        && bias.dtype == output.dtype
        && sum.shape == output.shape
}
