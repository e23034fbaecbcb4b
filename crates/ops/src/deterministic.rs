//! Recorded products, sums and normalizations with fixed, not autotuned, kernels. Statistics are
//! then identical in every run, and for any number of equal GPUs.
//!
//! Autotuning may choose another kernel in another run, or on another device of the same kind.
//! Kernels differ in the order of their sums, so the inputs of layers, and with them the codes of
//! weights, would differ from run to run.

use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Shape;
use burn_ir::{
    BackendIr, FloatOperationIr, HandleKind, ModuleOperationIr, NumericOperationIr, OperationIr,
    TensorIr,
};
use burn_router::TensorInterpreter;

use crate::devices::extension::Fp4Backend;

/// Runs a product, a sum, a mean or a normalization with fixed kernels. Returns false for any other
/// operation, such as a convolution or attention as one operation.
pub(crate) fn run<B: BackendIr + Fp4Backend>(
    interpreter: &mut TensorInterpreter<B>,
    operation: &OperationIr,
) -> bool {
    let mut take = |tensor: &TensorIr| match interpreter.get_tensor(tensor) {
        HandleKind::Float(tensor) => tensor,
        _ => unreachable!("operations on floats have floats"),
    };
    let (result, out) = match operation {
        OperationIr::Float(_, FloatOperationIr::Matmul(op)) => {
            let (left, right) = (take(&op.lhs), take(&op.rhs));
            (matmul::<B>(left, right, &op.out.shape), &op.out)
        }
        OperationIr::Module(ModuleOperationIr::Linear(op)) => {
            let (x, weight) = (take(&op.x), take(&op.weight));
            let bias = op.bias.as_ref().map(&mut take);
            (linear::<B>(x, weight, bias, &op.out.shape), &op.out)
        }
        OperationIr::Module(ModuleOperationIr::LayerNorm(op)) => {
            let (x, gamma) = (take(&op.input), take(&op.gamma));
            let beta = op.beta.as_ref().map(&mut take);
            (layer_norm::<B>(x, gamma, beta, op.epsilon.elem()), &op.out)
        }
        OperationIr::NumericFloat(_, operation) => {
            let (input, axes, mean, out) = match operation {
                NumericOperationIr::SumDim(op) => (&op.input, vec![op.axis], false, &op.out),
                NumericOperationIr::MeanDim(op) => (&op.input, vec![op.axis], true, &op.out),
                NumericOperationIr::SumDims(op) => (&op.input, op.axes.clone(), false, &op.out),
                NumericOperationIr::Sum(op) => (&op.input, all(&op.input), false, &op.out),
                NumericOperationIr::Mean(op) => (&op.input, all(&op.input), true, &op.out),
                _ => return false,
            };
            let sum = axes
                .into_iter()
                .fold(take(input), |values, axis| B::fp4_deterministic_sum(values, axis, mean));
            (B::float_reshape(sum, out.shape.clone()), out)
        }
        _ => return false,
    };
    interpreter.register_tensor_to_device(out.id, HandleKind::Float(result));
    true
}

/// Returns the axes of a tensor, the last first.
fn all(tensor: &TensorIr) -> Vec<usize> {
    (0..tensor.shape.num_dims()).rev().collect()
}

/// Computes `x weight + bias`.
fn linear<B: Fp4Backend>(
    x: FloatTensor<B>,
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
    shape: &Shape,
) -> FloatTensor<B> {
    let product = matmul::<B>(x, weight, shape);
    match bias {
        Some(bias) => B::float_add(product, along_last::<B>(bias, shape.num_dims())),
        None => product,
    }
}

/// Multiplies, as one product if `right` is a single matrix.
fn matmul<B: Fp4Backend>(
    left: FloatTensor<B>,
    right: FloatTensor<B>,
    shape: &Shape,
) -> FloatTensor<B> {
    let [.., inner, outputs] = right.shape()[..] else { unreachable!("matrices have two axes") };
    if right.shape().num_elements() > inner * outputs {
        return B::fp4_deterministic_matmul(left, right);
    }
    let rows = shape.num_elements() / outputs.max(1);
    let left = B::float_reshape(left, Shape::new([rows, inner]));
    let right = B::float_reshape(right, Shape::new([inner, outputs]));
    B::float_reshape(B::fp4_deterministic_matmul(left, right), shape.clone())
}

/// Reshapes a vector to lie along the last axis.
fn along_last<B: Fp4Backend>(vector: FloatTensor<B>, rank: usize) -> FloatTensor<B> {
    let mut shape = vec![1; rank];
    shape[rank - 1] = vector.shape().num_elements();
    B::float_reshape(vector, shape.into())
}

/// Computes `(x - mean) / sqrt(variance + epsilon) gamma + beta` along the last axis.
fn layer_norm<B: Fp4Backend>(
    x: FloatTensor<B>,
    gamma: FloatTensor<B>,
    beta: Option<FloatTensor<B>>,
    epsilon: f64,
) -> FloatTensor<B> {
    let rank = x.shape().num_dims();
    let axis = rank - 1;
    let mean = B::fp4_deterministic_sum(x.clone(), axis, true);
    let centered = B::float_sub(x, mean);
    let squares = B::float_mul(centered.clone(), centered.clone());
    let variance = B::fp4_deterministic_sum(squares, axis, true);
    let deviation = B::float_sqrt(B::float_add_scalar(variance, epsilon.into()));
    let scaled = B::float_mul(B::float_div(centered, deviation), along_last::<B>(gamma, rank));
    match beta {
        Some(beta) => B::float_add(scaled, along_last::<B>(beta, rank)),
        None => scaled,
    }
}
