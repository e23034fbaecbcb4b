//! The Hadamard transform by tensor operations.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape, Slice, TensorData};
use burn_fp4_search::Hadamard;
use burn_fp4_search::host::View;

/// [`fp4_hadamard`](crate::Fp4Backend::fp4_hadamard) by tensor operations. Products with a quarter
/// are exact, so fusing them with the additions would change nothing.
pub fn hadamard<B: Backend>(
    values: FloatTensor<B>,
    axis: usize,
    hadamard: Hadamard,
    inverse: bool,
) -> FloatTensor<B> {
    const SIZE: usize = Hadamard::SIZE;
    let (shape, dtype, device) = (values.shape(), values.dtype(), values.device());
    let View { outer, axis, inner } = View::along(&shape, axis);
    let groups = Shape::from(vec![outer * axis / SIZE, SIZE, inner]);
    let values = B::float_reshape(B::float_cast(values, FloatDType::F32), groups.clone());
    let mut sums = B::float_zeros(groups, &device, FloatDType::F32);
    for term in 0..SIZE {
        let factors: Vec<f32> = (0..SIZE)
            .map(|sum| match inverse {
                false => hadamard.factor(term, sum),
                true => hadamard.factor(sum, term),
            })
            .collect();
        let factors = B::float_from_data(TensorData::new(factors, [1, SIZE, 1]), &device);
        let every = Slice::from(0..);
        let slices = [every, Slice::from(term..term + 1), every];
        let line = B::float_slice(values.clone(), &slices);
        sums = B::float_add(sums, B::float_mul(line, factors));
    }
    B::float_cast(B::float_reshape(sums, shape), dtype.into())
}
