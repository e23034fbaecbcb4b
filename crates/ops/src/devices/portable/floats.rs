//! Float tensors and masks of any backend, with the operations of this folder, and matrices of rows
//! along the blocked axis.

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, Scalar, TensorMetadata, get_or_init_device_settings};
use burn::tensor::{BoolDType, FloatDType, IntDType, Shape, Slice, TensorData};

/// A float tensor with the operations used here.
pub(super) struct Floats<B: Backend>(pub(super) FloatTensor<B>);

impl<B: Backend> Clone for Floats<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// A mask.
pub(super) struct Mask<B: Backend>(pub(super) BoolTensor<B>);

impl<B: Backend> Floats<B> {
    pub(super) fn shape(&self) -> Vec<usize> {
        self.0.shape().to_vec()
    }
    pub(super) fn constant(value: f32, like: &Self) -> Self {
        let shape = Shape::from(vec![1; like.shape().len()]);
        Self(B::float_full(shape, value.into(), &like.0.device(), FloatDType::F32))
    }
    pub(super) fn filled(value: f32, like: &Self) -> Self {
        Self(B::float_full(like.0.shape(), value.into(), &like.0.device(), FloatDType::F32))
    }
    pub(super) fn reshape(&self, shape: &[usize]) -> Self {
        Self(B::float_reshape(self.0.clone(), Shape::from(shape.to_vec())))
    }
    pub(super) fn add(&self, other: &Self) -> Self {
        Self(B::float_add(self.0.clone(), other.0.clone()))
    }
    pub(super) fn sub(&self, other: &Self) -> Self {
        Self(B::float_sub(self.0.clone(), other.0.clone()))
    }
    pub(super) fn mul(&self, other: &Self) -> Self {
        Self(B::float_mul(self.0.clone(), other.0.clone()))
    }
    pub(super) fn div(&self, other: &Self) -> Self {
        Self(B::float_div(self.0.clone(), other.0.clone()))
    }
    /// Divides by a tensor: backends may multiply by the reciprocal of a scalar divisor.
    pub(super) fn div_by(&self, divisor: f32) -> Self {
        self.div(&Self::constant(divisor, self))
    }
    pub(super) fn times(&self, factor: f32) -> Self {
        Self(B::float_mul_scalar(self.0.clone(), factor.into()))
    }
    pub(super) fn plus(&self, term: f32) -> Self {
        Self(B::float_add_scalar(self.0.clone(), term.into()))
    }
    pub(super) fn abs(&self) -> Self {
        Self(B::float_abs(self.0.clone()))
    }
    pub(super) fn compare(
        &self,
        value: f32,
        op: fn(FloatTensor<B>, Scalar, BoolDType) -> BoolTensor<B>,
    ) -> Mask<B> {
        let dtype = get_or_init_device_settings::<B>(&self.0.device()).bool_dtype;
        Mask(op(self.0.clone(), value.into(), dtype))
    }
    pub(super) fn above(&self, value: f32) -> Mask<B> {
        self.compare(value, B::float_greater_elem)
    }
    pub(super) fn at_least(&self, value: f32) -> Mask<B> {
        self.compare(value, B::float_greater_equal_elem)
    }
    pub(super) fn below(&self, value: f32) -> Mask<B> {
        self.compare(value, B::float_lower_elem)
    }
    pub(super) fn equals(&self, value: f32) -> Mask<B> {
        self.compare(value, B::float_equal_elem)
    }
    pub(super) fn is_nan(&self) -> Mask<B> {
        let dtype = get_or_init_device_settings::<B>(&self.0.device()).bool_dtype;
        Mask(B::float_is_nan(self.0.clone(), dtype))
    }
    /// Takes `value` where the mask is set, else this.
    pub(super) fn or_where(&self, mask: Mask<B>, value: f32) -> Self {
        Self(B::float_mask_fill(self.0.clone(), mask.0, value.into()))
    }
    /// Takes `other` where the mask is set, else this.
    pub(super) fn or_from(&self, mask: Mask<B>, other: &Self) -> Self {
        Self(B::float_mask_where(self.0.clone(), mask.0, other.0.clone()))
    }
    /// Takes the maximum along a dimension, which keeps length 1: NaN if a value is, 0 if empty.
    pub(super) fn max_dim(&self, dim: usize) -> Self {
        let mut shape = self.shape();
        if shape.contains(&0) {
            shape[dim] = 1;
            let device = self.0.device();
            return Self(B::float_zeros(Shape::from(shape), &device, FloatDType::F32));
        }
        let nans = Self(B::float_sum_dim(self.is_nan().as_float().0, dim));
        let largest = Self(B::float_max_dim(self.or_where(self.is_nan(), 0.0).0, dim));
        largest.or_where(nans.above(0.0), f32::NAN)
    }
    /// Slices `[start, end)` of a dimension.
    pub(super) fn slice(&self, dim: usize, start: usize, end: usize) -> Self {
        let shape = self.shape();
        let slices: Vec<_> = (0..shape.len())
            .map(|at| {
                let (start, end) = if at == dim { (start, end) } else { (0, shape[at]) };
                Slice::new(start as isize, Some(end as isize), 1)
            })
            .collect();
        Self(B::float_slice(self.0.clone(), &slices))
    }
    pub(super) fn to_int(&self, dtype: IntDType) -> IntTensor<B> {
        B::float_into_int(self.0.clone(), dtype)
    }
    /// Looks up `table[index]`, for indices stored as floats.
    pub(super) fn look_up(&self, table: &[f32]) -> Self {
        let device = self.0.device();
        let count = self.shape().iter().product();
        let int = get_or_init_device_settings::<B>(&device).int_dtype;
        let indices = self.reshape(&[count]).to_int(int);
        let table = B::float_from_data(TensorData::new(table.to_vec(), [table.len()]), &device);
        Self(B::float_select(table, 0, indices)).reshape(&self.shape())
    }
}

impl<B: Backend> Mask<B> {
    /// Converts to 1 where set, else 0.
    pub(super) fn as_float(&self) -> Floats<B> {
        Floats(B::bool_into_float(self.0.clone(), FloatDType::F32))
    }
}

/// Moves the axis last, and casts to f32: `[rows, axis]`.
pub(super) fn rows<B: Backend>(values: FloatTensor<B>, axis: usize) -> Floats<B> {
    let shape = values.shape();
    let rank = shape.num_dims();
    let order: Vec<_> = (0..rank).filter(|&dim| dim != axis).chain([axis]).collect();
    let moved = B::float_permute(B::float_cast(values, FloatDType::F32), &order);
    let cols = shape[axis];
    let rows = (0..rank).filter(|&dim| dim != axis).map(|dim| shape[dim]).product();
    Floats(moved).reshape(&[rows, cols])
}

/// Inverts [`rows`], rounded to a dtype.
pub(super) fn from_rows<B: Backend>(
    rows: Floats<B>,
    shape: &[usize],
    axis: usize,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let mut moved = shape.to_vec();
    moved.push(moved[axis]);
    moved.remove(axis);
    let order: Vec<_> = (0..axis).chain([shape.len() - 1]).chain(axis..shape.len() - 1).collect();
    B::float_cast(B::float_permute(rows.reshape(&moved).0, &order), dtype)
}
