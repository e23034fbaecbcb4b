//! Gram matrices of activations by tensor operations.

use std::ops::Range;

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape, Slice};
use burn_fp4_search::GramLayout;

/// [`fp4_solve`](crate::Fp4Backend::fp4_solve) using U `[channels, channels]` of `H^-1 = U^T U`.
pub(crate) fn solve<B: Backend>(
    factor: FloatTensor<B>,
    columns: FloatTensor<B>,
    matmul: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let half = matmul(factor.clone(), columns);
    matmul(B::float_transpose(factor), half)
}

/// [`fp4_add_gram`](crate::Fp4Backend::fp4_add_gram), one column of tiles at a time, with the
/// device's [`fp4_deterministic_matmul`](crate::Fp4Backend::fp4_deterministic_matmul).
pub(crate) fn add_gram<B: Backend>(
    sums: FloatTensor<B>,
    activations: FloatTensor<B>,
    layout: GramLayout,
    first: usize,
    matmul: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    const SIDE: usize = GramLayout::SIDE;
    let [rows, channels] = activations.shape().dims();
    let tiles = sums.shape()[0];
    if rows * tiles == 0 {
        return sums;
    }
    let wide: FloatDType = sums.dtype().into();
    let x = B::float_cast(activations, FloatDType::F32);
    let columns = channels.div_ceil(SIDE);
    let missing = Shape::new([rows, columns * SIDE - channels]);
    let missing = B::float_zeros(missing, &x.device(), FloatDType::F32);
    let x = B::float_cat(vec![x, missing], 1);
    let part = |x: &FloatTensor<B>, axis: usize, range: Range<usize>| {
        let mut slices = vec![Slice::full(); axis];
        slices.push(Slice::from(range));
        B::float_slice(x.clone(), &slices)
    };
    let mut sums = sums;
    for start in (0..rows).step_by(GramLayout::F32_ROWS) {
        let end = rows.min(start + GramLayout::F32_ROWS);
        let x = B::float_reshape(part(&x, 0, start..end), Shape::new([end - start, columns, SIDE]));
        let x = B::float_swap_dims(x, 0, 1);
        let products = layout.columns(first..first + tiles).into_iter().map(|(column, rows)| {
            let right = Shape::new([rows.len(), end - start, SIDE]);
            let right = B::float_expand(part(&x, 0, column..column + 1), right);
            matmul(B::float_swap_dims(part(&x, 0, rows), 1, 2), right)
        });
        let products = B::float_cat(products.collect(), 0);
        sums = B::float_add(sums, B::float_cast(products, wide));
    }
    sums
}
