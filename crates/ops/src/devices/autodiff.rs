//! Gradients of fake quantization (straight through), the Hadamard transform (its inverse), and
//! products. The other operations have none.

use std::sync::Arc;

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, binary, unary};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, AutodiffBackend, TensorMetadata};
use burn::tensor::FloatDType;
use burn_fp4_search::host::DequantTarget;
use burn_fp4_search::{Draw, Fp4Scheme, GramLayout, Hadamard};

use super::extension::Fp4Backend;
use crate::factorization::Factorization;
use crate::layout::{Fp4Layout, Fp4Primitive};
use crate::saturated::Saturated;
use crate::train::recipe::TrainRecipe;
use crate::train::{gradient, saturation};

/// Converts to the inner backend; the integers are the same.
fn inner<B: Fp4Backend, C: CheckpointStrategy>(
    packed: Fp4Primitive<Autodiff<B, C>>,
) -> Fp4Primitive<B> {
    Fp4Primitive { codes: packed.codes, scales: packed.scales, tensor_scale: packed.tensor_scale }
}

/// Converts to the backend with gradients; the integers are the same.
fn outer<B: Fp4Backend, C: CheckpointStrategy>(
    packed: Fp4Primitive<B>,
) -> Fp4Primitive<Autodiff<B, C>> {
    Fp4Primitive { codes: packed.codes, scales: packed.scales, tensor_scale: packed.tensor_scale }
}

/// Gradient of the input of a product with a packed weight.
#[derive(Debug)]
struct ByTransposed;

impl<B: Fp4Backend> Backward<B, 1> for ByTransposed {
    type State = (Fp4Primitive<B>, Fp4Layout);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (weight, layout) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            let weight = B::fp4_dequantize(weight, layout, grad.dtype().into());
            B::float_matmul(grad, B::float_swap_dims(weight, 0, 1))
        });
    }
}

/// Inputs kept for the gradients of saturating elements and of the amax.
#[derive(Debug, Clone)]
struct Forward<B: Fp4Backend> {
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
    saturated: Saturated,
}

/// Gradients of the values and of the amax of fake quantization.
#[derive(Debug)]
struct StraightThrough;

impl<B: Fp4Backend> Backward<B, 2> for StraightThrough {
    type State = Option<Forward<B>>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let forward = ops.state;
        let again = forward.clone();
        binary::<B, _, _>(
            ops.parents,
            ops.node,
            grads,
            |grad| match forward {
                Some(Forward { values, amax, axis, scheme, saturated: Saturated::Zero }) => {
                    let beyond = saturation::beyond::<B>(values, amax, axis, scheme);
                    B::float_mask_fill(grad, beyond, 0f32.into())
                }
                _ => grad,
            },
            |grad| {
                let Forward { values, amax, axis, scheme, .. } =
                    again.expect("kept for a tracked amax");
                saturation::amax_gradient::<B>(grad, values, amax, axis, scheme)
            },
        );
    }
}

/// Gradient of an orthogonal transform, which is its inverse.
#[derive(Debug)]
struct Orthogonal;

impl<B: Fp4Backend> Backward<B, 1> for Orthogonal {
    type State = (usize, Hadamard, bool);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (axis, hadamard, inverse) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            B::fp4_hadamard(grad, axis, hadamard, !inverse)
        });
    }
}

/// Gradients of a product whose operands are quantized.
#[derive(Debug)]
struct Product;

impl<B: Fp4Backend> Backward<B, 2> for Product {
    type State = (Option<NodeId>, Option<NodeId>, TrainRecipe, Draw);

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let (input, weight, recipe, draw) = ops.state;
        let mut output = |node: Option<NodeId>| {
            node.map(|node| checkpointer.retrieve_node_output::<FloatTensor<B>>(node))
        };
        let (input, weight) = (output(input), output(weight));
        binary::<B, _, _>(
            ops.parents,
            ops.node,
            grads,
            |grad| {
                let weight = weight.expect("kept for a tracked input");
                gradient::input_gradient::<B>(grad, weight, &recipe, draw)
            },
            |grad| {
                let input = input.expect("kept for a tracked weight");
                gradient::weight_gradient::<B>(grad, input, &recipe, draw)
            },
        );
    }
}

/// Multiplies by a packed weight, whose transpose gives the gradient of the input.
fn tracked_product<B: Fp4Backend, C: CheckpointStrategy>(
    product: impl FnOnce(FloatTensor<B>, Fp4Primitive<B>, Fp4Layout) -> FloatTensor<B>,
    input: FloatTensor<Autodiff<B, C>>,
    weight: Fp4Primitive<Autodiff<B, C>>,
    layout: Fp4Layout,
) -> FloatTensor<Autodiff<B, C>> {
    let weight = inner::<B, C>(weight);
    let (input, node) = input.into_parts();
    let output = product(input, weight.clone(), layout.clone());
    match ByTransposed.prepare::<C>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish((weight, layout), output),
        OpsKind::UnTracked(prepared) => prepared.finish(output),
    }
}

impl<B: Fp4Backend, C: CheckpointStrategy> Fp4Backend for Autodiff<B, C> {
    fn fp4_amax(values: FloatTensor<Self>, axis: usize, by_row: bool) -> FloatTensor<Self> {
        Self::from_inner(B::fp4_amax(values.into_primitive(), axis, by_row))
    }

    fn fp4_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        outer(B::fp4_quantize(values.into_primitive(), amax.into_primitive(), axis, scheme))
    }

    fn fp4_quantize_by_importance(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        importance: FloatTensor<Self>,
        bounds: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
    ) -> Fp4Primitive<Self> {
        let (values, amax) = (values.into_primitive(), amax.into_primitive());
        let (importance, bounds) = (importance.into_primitive(), bounds.into_primitive());
        outer(B::fp4_quantize_by_importance(values, amax, importance, bounds, axis, scheme))
    }

    fn fp4_quantize_gptq(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
        factorization: Arc<Factorization>,
    ) -> Fp4Primitive<Self> {
        let (values, amax) = (values.into_primitive(), amax.into_primitive());
        outer(B::fp4_quantize_gptq(values, amax, axis, scheme, factorization))
    }

    fn fp4_solve(
        columns: FloatTensor<Self>,
        factorization: Arc<Factorization>,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::fp4_solve(columns.into_primitive(), factorization))
    }

    fn fp4_dequantize(
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::fp4_dequantize(inner(packed), layout, dtype))
    }

    fn fp4_largest(packed: Fp4Primitive<Self>, layout: Fp4Layout) -> FloatTensor<Self> {
        Self::from_inner(B::fp4_largest(inner(packed), layout))
    }

    fn fp4_dequantize_int8(codes: IntTensor<Self>, scales: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::fp4_dequantize_int8(codes, scales.into_primitive()))
    }

    fn fp4_select_rows(packed: Fp4Primitive<Self>, rows: IntTensor<Self>) -> Fp4Primitive<Self> {
        outer(B::fp4_select_rows(inner(packed), rows))
    }

    fn fp4_matmul(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        tracked_product(B::fp4_matmul, input, weight, layout)
    }

    fn fp4_int8_matmul(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        tracked_product(B::fp4_int8_matmul, input, weight, layout)
    }

    fn fp4_fp8_rows(weight: Fp4Primitive<Self>, layout: Fp4Layout) -> FloatTensor<Self> {
        Self::from_inner(B::fp4_fp8_rows(inner(weight), layout))
    }

    fn fp4_fp8_matmul(
        input: FloatTensor<Self>,
        weight: Fp4Primitive<Self>,
        rows: FloatTensor<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        let rows = rows.into_primitive();
        let product = |input, weight, layout| B::fp4_fp8_matmul(input, weight, rows, layout);
        tracked_product(product, input, weight, layout)
    }

    fn fp4_fake_quantize(
        values: FloatTensor<Self>,
        amax: FloatTensor<Self>,
        axis: usize,
        scheme: Fp4Scheme,
        target: DequantTarget,
        saturated: Saturated,
    ) -> FloatTensor<Self> {
        let (amax_tracked, amax_node) = (amax.is_tracked(), amax.node());
        let amax = amax.into_primitive();
        let (values, node) = values.into_parts();
        let output = B::fp4_fake_quantize(
            values.clone(),
            amax.clone(),
            axis,
            scheme,
            target,
            Saturated::PassThrough,
        );
        match StraightThrough.prepare::<C>([node, amax_node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => {
                let kept = (amax_tracked || saturated == Saturated::Zero).then_some(Forward {
                    values,
                    amax,
                    axis,
                    scheme,
                    saturated,
                });
                prepared.finish(kept, output)
            }
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        }
    }

    fn fp4_hadamard(
        values: FloatTensor<Self>,
        axis: usize,
        hadamard: Hadamard,
        inverse: bool,
    ) -> FloatTensor<Self> {
        let (values, node) = values.into_parts();
        let output = B::fp4_hadamard(values, axis, hadamard, inverse);
        match Orthogonal.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish((axis, hadamard, inverse), output),
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        }
    }

    fn fp4_train_product(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        recipe: TrainRecipe,
        draw: Draw,
    ) -> FloatTensor<Self> {
        let (input_tracked, weight_tracked) = (input.is_tracked(), weight.is_tracked());
        let nodes = [input.node(), weight.node()];
        match Product.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prepared) => {
                let kept_input = weight_tracked.then(|| prepared.checkpoint(&input));
                let kept_weight = input_tracked.then(|| prepared.checkpoint(&weight));
                let (input, weight) = (input.into_primitive(), weight.into_primitive());
                let output = B::fp4_train_product(input, weight, recipe, draw);
                prepared.finish((kept_input, kept_weight, recipe, draw), output)
            }
            OpsKind::UnTracked(prepared) => {
                let (input, weight) = (input.into_primitive(), weight.into_primitive());
                prepared.finish(B::fp4_train_product(input, weight, recipe, draw))
            }
        }
    }

    fn fp4_add_gram(
        sums: FloatTensor<Self>,
        activations: FloatTensor<Self>,
        layout: GramLayout,
        first: usize,
    ) -> FloatTensor<Self> {
        let (sums, activations) = (sums.into_primitive(), activations.into_primitive());
        Self::from_inner(B::fp4_add_gram(sums, activations, layout, first))
    }

    fn fp4_deterministic_matmul(
        left: FloatTensor<Self>,
        right: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::fp4_deterministic_matmul(left.into_primitive(), right.into_primitive()))
    }

    fn fp4_deterministic_sum(
        values: FloatTensor<Self>,
        axis: usize,
        mean: bool,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::fp4_deterministic_sum(values.into_primitive(), axis, mean))
    }

    fn fp4_squared_error(
        values: FloatTensor<Self>,
        packed: Fp4Primitive<Self>,
        layout: Fp4Layout,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::fp4_squared_error(values.into_primitive(), inner(packed), layout))
    }
}
