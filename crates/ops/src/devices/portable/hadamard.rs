//! The Hadamard transform by tensor operations.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape, Slice, TensorData};
use burn_fp4_search::Hadamard;
use burn_fp4_search::host::View;

/// [`fp4_hadamard`](crate::Fp4Backend::fp4_hadamard) by tensor operations, with the sums of
/// [`host::hadamard`](burn_fp4_search::host::hadamard). Products with a quarter are exact, so
/// fusing them with the additions would change nothing.
pub fn hadamard<B: Backend>(
    values: FloatTensor<B>,
    axis: usize,
    hadamard: Hadamard,
    inverse: bool,
) -> FloatTensor<B> {
    let (shape, dtype) = (values.shape(), values.dtype());
    let View { outer, axis, inner } = View::along(&shape, axis);
    let size = hadamard.size();
    let groups = Shape::from(vec![outer * axis / size, size, inner]);
    let values = B::float_reshape(B::float_cast(values, FloatDType::F32), groups);
    let sums = match size {
        16 => sum_16::<B>(values, hadamard, inverse),
        _ => sum_by_butterflies::<B>(values, hadamard),
    };
    B::float_cast(B::float_reshape(sums, shape), dtype.into())
}

/// Sums lines `[groups, 16, inner]` in their order.
fn sum_16<B: Backend>(values: FloatTensor<B>, hadamard: Hadamard, inverse: bool) -> FloatTensor<B> {
    let (groups, device) = (values.shape(), values.device());
    let mut sums = B::float_zeros(groups, &device, FloatDType::F32);
    for term in 0..16 {
        let factors = (0..16).map(|sum| match inverse {
            false => hadamard.factor(term, sum),
            true => hadamard.factor(sum, term),
        });
        let factors = of_lines::<B>(factors.collect(), &device);
        let line = part::<B>(values.clone(), term);
        sums = B::float_add(sums, B::float_mul(line, factors));
    }
    sums
}

/// Sums lines `[groups, size, inner]` by butterflies.
fn sum_by_butterflies<B: Backend>(values: FloatTensor<B>, hadamard: Hadamard) -> FloatTensor<B> {
    let shape = values.shape();
    let (size, inner) = (hadamard.size(), shape[2]);
    let (mut sums, mut half) = (values, 1);
    while half < size {
        let pairs = Shape::from(vec![shape[0] * size / (2 * half), 2, half * inner]);
        let pairs = B::float_reshape(sums, pairs);
        let (left, right) = (part::<B>(pairs.clone(), 0), part::<B>(pairs, 1));
        let sum = B::float_add(left.clone(), right.clone());
        sums = B::float_cat(vec![sum, B::float_sub(left, right)], 1);
        half *= 2;
    }
    B::float_mul_scalar(B::float_reshape(sums, shape), hadamard.scale().into())
}

/// Makes factors `[1, lines, 1]`.
fn of_lines<B: Backend>(factors: Vec<f32>, device: &B::Device) -> FloatTensor<B> {
    let lines = factors.len();
    B::float_from_data(TensorData::new(factors, [1, lines, 1]), device)
}

/// Takes one line of a tensor `[groups, lines, inner]`.
fn part<B: Backend>(values: FloatTensor<B>, line: usize) -> FloatTensor<B> {
    let every = Slice::from(0..);
    B::float_slice(values, &[every, Slice::from(line..line + 1), every])
}
