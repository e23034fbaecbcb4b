//! The bits of the reference quantizer from tensor operations alone, for devices without code of
//! their own, and as a second opinion on those that have it.
//!
//! Only comparisons, selections and single-rounded f32 arithmetic are used, so a backend whose f32
//! arithmetic is IEEE's gets every bit right. It needs several times the memory of the input. Searches
//! that sum by fused multiply-adds, from [`ScaleSearch::Sse`] on, and stochastic rounding read the values back and
//! run on the host.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{Backend, Scalar, TensorMetadata, get_or_init_device_settings};
use burn::tensor::{FloatDType, IntDType, Shape, Slice, TensorData, read_sync};
use burn_fp4_search::formats::{E2M1_VALUES, E4M3_VALUES, E8M0_VALUES, Fp4Format};
use burn_fp4_search::host::{Restore, View};
use burn_fp4_search::{
    Blocks, ErrorMetric, Fp4Scheme, GramTiles, Hadamard, Importance, Rounding, ScaleRule,
    ScaleSearch, TensorFactor, TensorScaling,
};

use crate::{Curvature, Fp4Backend, Fp4Layout, Fp4Primitive, host};

/// A float tensor with the operations used here.
struct F<B: Backend>(FloatTensor<B>);

impl<B: Backend> Clone for F<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// A mask.
struct Mask<B: Backend>(BoolTensor<B>);

impl<B: Backend> F<B> {
    fn shape(&self) -> Vec<usize> {
        self.0.shape().to_vec()
    }
    fn constant(value: f32, like: &Self) -> Self {
        let shape = Shape::from(vec![1; like.shape().len()]);
        Self(B::float_full(shape, value.into(), &like.0.device(), FloatDType::F32))
    }
    fn filled(value: f32, like: &Self) -> Self {
        Self(B::float_full(like.0.shape(), value.into(), &like.0.device(), FloatDType::F32))
    }
    fn reshape(&self, shape: &[usize]) -> Self {
        Self(B::float_reshape(self.0.clone(), Shape::from(shape.to_vec())))
    }
    fn add(&self, other: &Self) -> Self {
        Self(B::float_add(self.0.clone(), other.0.clone()))
    }
    fn sub(&self, other: &Self) -> Self {
        Self(B::float_sub(self.0.clone(), other.0.clone()))
    }
    fn mul(&self, other: &Self) -> Self {
        Self(B::float_mul(self.0.clone(), other.0.clone()))
    }
    fn div(&self, other: &Self) -> Self {
        Self(B::float_div(self.0.clone(), other.0.clone()))
    }
    /// A scalar as a tensor: backends may multiply by the reciprocal of a scalar divisor.
    fn div_by(&self, divisor: f32) -> Self {
        self.div(&Self::constant(divisor, self))
    }
    fn times(&self, factor: f32) -> Self {
        Self(B::float_mul_scalar(self.0.clone(), factor.into()))
    }
    fn plus(&self, term: f32) -> Self {
        Self(B::float_add_scalar(self.0.clone(), term.into()))
    }
    fn abs(&self) -> Self {
        Self(B::float_abs(self.0.clone()))
    }
    fn compare(
        &self,
        value: f32,
        op: fn(FloatTensor<B>, Scalar, burn::tensor::BoolDType) -> BoolTensor<B>,
    ) -> Mask<B> {
        let dtype = get_or_init_device_settings::<B>(&self.0.device()).bool_dtype;
        Mask(op(self.0.clone(), value.into(), dtype))
    }
    fn above(&self, value: f32) -> Mask<B> {
        self.compare(value, B::float_greater_elem)
    }
    fn at_least(&self, value: f32) -> Mask<B> {
        self.compare(value, B::float_greater_equal_elem)
    }
    fn below(&self, value: f32) -> Mask<B> {
        self.compare(value, B::float_lower_elem)
    }
    fn equals(&self, value: f32) -> Mask<B> {
        self.compare(value, B::float_equal_elem)
    }
    fn is_nan(&self) -> Mask<B> {
        let dtype = get_or_init_device_settings::<B>(&self.0.device()).bool_dtype;
        Mask(B::float_is_nan(self.0.clone(), dtype))
    }
    /// `value` where the mask is set, else this.
    fn or_where(&self, mask: Mask<B>, value: f32) -> Self {
        Self(B::float_mask_fill(self.0.clone(), mask.0, value.into()))
    }
    /// `other` where the mask is set, else this.
    fn or_from(&self, mask: Mask<B>, other: &Self) -> Self {
        Self(B::float_mask_where(self.0.clone(), mask.0, other.0.clone()))
    }
    /// Maximum along a dimension, which stays with length 1; NaN if a value is, 0 of no values.
    fn max_dim(&self, dim: usize) -> Self {
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
    /// `[start, end)` of a dimension.
    fn slice(&self, dim: usize, start: usize, end: usize) -> Self {
        let shape = self.shape();
        let slices: Vec<_> = (0..shape.len())
            .map(|at| {
                let (start, end) = if at == dim { (start, end) } else { (0, shape[at]) };
                Slice::new(start as isize, Some(end as isize), 1)
            })
            .collect();
        Self(B::float_slice(self.0.clone(), &slices))
    }
    fn to_int(&self, dtype: IntDType) -> IntTensor<B> {
        B::float_into_int(self.0.clone(), dtype)
    }
    /// `table[index]`, for integral floats from 0 on.
    fn look_up(&self, table: &[f32]) -> Self {
        let device = self.0.device();
        let count = self.shape().iter().product();
        let int = get_or_init_device_settings::<B>(&device).int_dtype;
        let indices = self.reshape(&[count]).to_int(int);
        let table = B::float_from_data(TensorData::new(table.to_vec(), [table.len()]), &device);
        Self(B::float_select(table, 0, indices)).reshape(&self.shape())
    }
}

impl<B: Backend> Mask<B> {
    /// 1 where set, else 0.
    fn as_float(&self) -> F<B> {
        F(B::bool_into_float(self.0.clone(), FloatDType::F32))
    }
}

/// The values in f32 with the axis moved last: `[rows, axis]`.
fn rows<B: Backend>(values: FloatTensor<B>, axis: usize) -> F<B> {
    let shape = values.shape();
    let rank = shape.num_dims();
    let order: Vec<_> = (0..rank).filter(|&dim| dim != axis).chain([axis]).collect();
    let moved = B::float_permute(B::float_cast(values, FloatDType::F32), &order);
    let cols = shape[axis];
    let rows = (0..rank).filter(|&dim| dim != axis).map(|dim| shape[dim]).product();
    F(moved).reshape(&[rows, cols])
}

/// The opposite of [`rows`], rounded to a dtype.
fn from_rows<B: Backend>(
    rows: F<B>,
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

/// Largest magnitude in f32: `[1]`, or `[rows]`.
pub fn amax<B: Backend>(values: FloatTensor<B>, axis: usize, by_row: bool) -> FloatTensor<B> {
    let magnitudes = rows::<B>(values, axis).abs();
    let [rows, cols] = magnitudes.shape()[..] else { unreachable!("rows makes a matrix") };
    if by_row {
        magnitudes.max_dim(1).reshape(&[rows]).0
    } else {
        magnitudes.reshape(&[1, rows * cols]).max_dim(1).reshape(&[1]).0
    }
}

/// The two factors of the tensor scale, and its amax, `[1, 1]` or `[rows, 1]`; see [`TensorFactor`].
struct Factors<B: Backend> {
    amax: F<B>,
    encode: F<B>,
    decode: F<B>,
}

fn factors<B: Backend>(amax: F<B>, scheme: &Fp4Scheme) -> Factors<B> {
    let fixed = match scheme.tensor_scale {
        _ if !scheme.rule.row().tensor_scale => Some(TensorFactor::ONE),
        TensorScaling::Multiplier(_) => Some(TensorFactor::new(scheme, f32::NAN)),
        _ => None,
    };
    if let Some(factor) = fixed {
        let filled = |value| F::filled(value, &amax);
        return Factors {
            encode: filled(factor.encode),
            decode: filled(factor.decode),
            amax: filled(factor.amax),
        };
    }
    let one = F::filled(1.0, &amax);
    let encode = match scheme.rule {
        ScaleRule::Gist => one.div(&amax).times(scheme.largest_code_product()),
        _ => F::filled(scheme.largest_code_product(), &amax).div(&amax),
    };
    let encode = saturate(&encode).or_where(encode.equals(0.0), 1.0);
    Factors { decode: one.div(&encode), amax, encode }
}

/// `min(value, FLT_MAX)` that keeps NaN.
fn saturate<B: Backend>(values: &F<B>) -> F<B> {
    values.or_where(values.above(f32::MAX), f32::MAX)
}

/// The E4M3 codes and values nearest to non-negative values.
fn round_to_e4m3<B: Backend>(exact: &F<B>) -> (F<B>, F<B>) {
    // Adding 2^23 leaves no room for a fraction: the sum is rounded to the nearest even integer.
    const INTEGER: f32 = 8_388_608.0;
    let clamped = exact.or_where(exact.above(448.0), 448.0);
    let mut step = F::filled(2f32.powi(-9), exact);
    let mut binade = F::filled(0.0, exact);
    for exponent in -5..=8 {
        let floor = 2f32.powi(exponent);
        step = step.or_where(clamped.at_least(floor), floor / 8.0);
        binade = binade.add(&clamped.at_least(floor).as_float());
    }
    let steps = clamped.div(&step).plus(INTEGER).plus(-INTEGER);
    let code = steps.add(&binade.times(8.0)).or_where(exact.is_nan(), 127.0);
    (code, steps.mul(&step))
}

/// MXFP4's scale codes from block amaxes; see [`ScaleRule::block_scale`].
fn power_of_two_scales<B: Backend>(amax: &F<B>, rule: ScaleRule) -> F<B> {
    let measured = match rule {
        ScaleRule::RoundUp => amax.times(1.0 / 6.0),
        _ => amax.clone(),
    };
    // The significand in [1, 2) and the biased exponent, by halving; both 0 for a subnormal.
    let large = measured.at_least(1.0).as_float();
    let mut significand = measured.or_from(measured.below(1.0), &measured.times(2f32.powi(126)));
    let mut exponent = large.times(126.0).plus(1.0);
    let subnormal = significand.below(1.0).as_float();
    for bits in [64, 32, 16, 8, 4, 2, 1] {
        let power = 2f32.powi(bits);
        let over = significand.at_least(power).as_float();
        exponent = exponent.add(&over.times(bits as f32));
        let divided = significand.div_by(power);
        significand = significand.or_from(significand.at_least(power), &divided);
    }
    let exponent = exponent.or_where(subnormal.above(0.0), 0.0);
    let up = match rule {
        ScaleRule::Even => significand.at_least(1.75).as_float(),
        ScaleRule::Ceil => significand.above(1.0).as_float(),
        ScaleRule::RoundUp => {
            // A subnormal was multiplied by 2^126: above 1/2 it lies above 2^-127.
            let above = significand.above(0.5).as_float().mul(&subnormal);
            significand.above(1.0).as_float().add(&above)
        }
        _ => F::filled(0.0, amax),
    };
    let code = exponent.add(&up);
    let code = if rule == ScaleRule::RoundUp { code } else { code.plus(-2.0) };
    let code = code.or_where(code.below(0.0), 0.0);
    let code = code.or_where(code.above(254.0), 254.0);
    code.or_where(amax.is_nan(), 255.0).or_where(amax.above(f32::MAX), 255.0)
}

/// Codes and values of the scales for block amaxes `[rows, blocks]`.
fn block_scales<B: Backend>(amax: &F<B>, factors: &Factors<B>, scheme: &Fp4Scheme) -> (F<B>, F<B>) {
    let exact = match scheme.rule {
        ScaleRule::Te => amax.mul(&factors.encode.times(1.0 / 6.0)),
        ScaleRule::TeDivision | ScaleRule::Gist => amax.div_by(6.0).mul(&factors.encode),
        ScaleRule::NoTensorScale => {
            let exact = amax.div_by(6.0);
            exact.or_where(exact.below(1e-12), 1e-12)
        }
        rule => {
            let codes = power_of_two_scales(amax, rule);
            let values = codes.look_up(&E8M0_VALUES);
            return (codes, values);
        }
    };
    round_to_e4m3(&exact)
}

/// Elements divided by their scale, `[rows, blocks, block_size]`.
fn normalize<B: Backend>(
    values: &F<B>,
    codes: &F<B>,
    scales: &F<B>,
    factors: &Factors<B>,
    scheme: &Fp4Scheme,
) -> F<B> {
    let [rows, blocks] = scales.shape()[..] else { unreachable!("scales are a matrix") };
    let each = |per_block: &F<B>| per_block.reshape(&[rows, blocks, 1]);
    match scheme.rule {
        ScaleRule::Te | ScaleRule::TeDivision => {
            let one = F::filled(1.0, scales);
            values.mul(&each(&saturate(&one.div(&scales.mul(&factors.decode)))))
        }
        ScaleRule::Gist => {
            let scales = scales.or_where(scales.below(1e-12), 1e-12);
            values.mul(&each(&F::filled(1.0, &scales).mul(&factors.encode).div(&scales)))
        }
        ScaleRule::NoTensorScale => values.div(&each(scales)),
        rule => {
            let table: Vec<_> =
                (0..=255).map(|code| rule.multiplier(code, TensorFactor::ONE)).collect();
            values.mul(&each(&codes.look_up(&table)))
        }
    }
}

/// The E2M1 codes nearest to normalized elements.
fn round_to_e2m1<B: Backend>(normalized: &F<B>, scheme: &Fp4Scheme) -> F<B> {
    let magnitude = normalized.abs();
    let mut codes = magnitude.above(0.25).as_float();
    for (midpoint, inclusive) in
        [(0.75, true), (1.25, false), (1.75, true), (2.5, false), (3.5, true), (5.0, false)]
    {
        let over = if inclusive { magnitude.at_least(midpoint) } else { magnitude.above(midpoint) };
        codes = codes.add(&over.as_float());
    }
    let mut negative = normalized.below(0.0).as_float();
    if scheme.rule.row().keeps_negative_zero {
        // 1 / -0 is -infinity.
        let reciprocal = F::constant(1.0, normalized).div(normalized);
        let negative_zero = reciprocal.below(f32::MIN).as_float();
        negative = negative.add(&negative_zero);
    }
    codes.add(&negative.above(0.0).as_float().times(8.0))
}

/// The largest amax among each 16 neighbouring rows, in every one of them.
fn share_among_tiles<B: Backend>(amax: &F<B>) -> F<B> {
    let [rows, blocks] = amax.shape()[..] else { unreachable!("amaxes are a matrix") };
    let tiles = by_tile(amax).max_dim(1);
    let shared = B::float_repeat_dim(tiles.0, 1, 16);
    F(shared).reshape(&[rows.next_multiple_of(16), blocks]).slice(0, 0, rows)
}

/// `[rows, blocks]` as `[rows / 16, 16, blocks]`, padded with zeros.
fn by_tile<B: Backend>(matrix: &F<B>) -> F<B> {
    let [rows, blocks] = matrix.shape()[..] else { unreachable!("a matrix") };
    let padded = rows.next_multiple_of(16);
    let mut parts = vec![matrix.0.clone()];
    if padded > rows {
        let shape = Shape::from(vec![padded - rows, blocks]);
        parts.push(B::float_zeros(shape, &matrix.0.device(), FloatDType::F32));
    }
    F(B::float_cat(parts, 0)).reshape(&[padded / 16, 16, blocks])
}

/// Everything [`quantize`] and [`fake_quantize`] need.
struct Quantized<B: Backend> {
    /// Element codes, `[rows, blocks, block_size]`.
    codes: F<B>,
    /// Scale codes, `[rows, blocks]`.
    scales: F<B>,
    /// `[1]` or `[rows]`.
    tensor_scale: F<B>,
}

fn quantize_rows<B: Backend>(
    values: F<B>,
    amax: FloatTensor<B>,
    scheme: &Fp4Scheme,
) -> Quantized<B> {
    let [rows, cols] = values.shape()[..] else { unreachable!("rows makes a matrix") };
    let blocks = cols / scheme.block_size;
    let tensor_scales = amax.shape().num_elements();
    let factors = factors(F(amax).reshape(&[tensor_scales, 1]), scheme);
    let values = values.reshape(&[rows, blocks, scheme.block_size]);
    let mut amax = values.abs().max_dim(2).reshape(&[rows, blocks]);
    if scheme.blocks == Blocks::Tile16x16 {
        amax = share_among_tiles(&amax);
    }
    let (codes, scales) = match scheme.search {
        ScaleSearch::Amax => block_scales(&amax, &factors, scheme),
        ScaleSearch::FourOverSix { error, .. } => {
            four_over_six(&values, &amax, &factors, scheme, error)
        }
        search => unreachable!("{search:?} is done on the host"),
    };
    let normalized = normalize(&values, &codes, &scales, &factors, scheme);
    Quantized {
        codes: round_to_e2m1(&normalized, scheme),
        scales: codes,
        tensor_scale: factors.decode.reshape(&[tensor_scales]),
    }
}

/// The better of two candidate scales; see [`ScaleSearch::FourOverSix`].
fn four_over_six<B: Backend>(
    values: &F<B>,
    amax: &F<B>,
    factors: &Factors<B>,
    scheme: &Fp4Scheme,
    metric: ErrorMetric,
) -> (F<B>, F<B>) {
    let [rows, blocks] = amax.shape()[..] else { unreachable!("amaxes are a matrix") };
    let on_six = amax.div_by(6.0).mul(&factors.encode);
    let candidates = [round_to_e4m3(&on_six), round_to_e4m3(&on_six.times(1.5))];
    let errors = candidates.each_ref().map(|(codes, scales)| {
        let normalized = normalize(values, codes, scales, factors, scheme);
        let elements = round_to_e2m1(&normalized, scheme).look_up(&E2M1_VALUES);
        let scaled = elements.mul(&scales.reshape(&[rows, blocks, 1]));
        let per_row = |factor: &F<B>| factor.reshape(&[factor.shape()[0], 1, 1]);
        let restored = scaled.mul(&per_row(&factors.amax)).div_by(scheme.largest_code_product());
        let difference = restored.sub(values);
        let terms = match metric {
            ErrorMetric::Mae => difference.abs(),
            ErrorMetric::Mse => difference.mul(&difference),
        };
        // In element order, then for tiles as a tree over rows: the order decides the last bit.
        let mut sum = F::filled(0.0, amax);
        for index in 0..scheme.block_size {
            sum = sum.add(&terms.slice(2, index, index + 1).reshape(&[rows, blocks]));
        }
        if scheme.blocks == Blocks::Tile16x16 {
            let mut tree = by_tile(&sum);
            for half in [8, 4, 2, 1] {
                tree = tree.slice(1, 0, half).add(&tree.slice(1, half, 2 * half));
            }
            let shared = F(B::float_repeat_dim(tree.0, 1, 16));
            sum = shared.reshape(&[rows.next_multiple_of(16), blocks]).slice(0, 0, rows);
        }
        sum
    });
    let [six, four] = candidates;
    let dtype = get_or_init_device_settings::<B>(&amax.0.device()).bool_dtype;
    let better = B::float_lower(errors[1].0.clone(), errors[0].0.clone(), dtype);
    let choose = |six: F<B>, four: &F<B>| six.or_from(Mask(better.clone()), four);
    (choose(six.0, &four.0), choose(six.1, &four.1))
}

/// Codes and scales; see [`Fp4Backend::fp4_quantize`].
pub fn quantize<B: Backend>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
) -> Fp4Primitive<B> {
    if needs_host(&scheme) {
        return quantize_on_host::<B>(values, amax, axis, scheme);
    }
    let values = rows::<B>(values, axis);
    let [rows, cols] = values.shape()[..] else { unreachable!("rows makes a matrix") };
    let quantized = quantize_rows(values, amax, &scheme);
    let pairs = quantized.codes.reshape(&[rows, cols / 2, 2]);
    let bytes = pairs.slice(2, 0, 1).add(&pairs.slice(2, 1, 2).times(16.0));
    Fp4Primitive {
        codes: bytes.reshape(&[rows, cols / 2]).to_int(IntDType::U8),
        scales: quantized.scales.to_int(IntDType::U8),
        tensor_scale: bits(&quantized.tensor_scale),
    }
}

/// Whether a scheme asks for what tensor operations lack: a fused multiply-add, or random numbers by counting.
fn needs_host(scheme: &Fp4Scheme) -> bool {
    !matches!(scheme.search, ScaleSearch::Amax | ScaleSearch::FourOverSix { .. })
        || scheme.rounding != Rounding::Nearest
}

/// Reads the values back and leaves the search to the host engine.
fn quantize_on_host<B: Backend>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
) -> Fp4Primitive<B> {
    let device = values.device();
    let view = View::along(&values.shape(), axis);
    let (values, amax) = (read::<B>(values), read::<B>(amax));
    upload::<B>(host::quantize(&values, view, &amax, &scheme, Importance::Uniform), &device)
}

/// See [`Fp4Backend::fp4_quantize_by_importance`]: on the host.
pub fn quantize_by_importance<B: Backend>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    costs: FloatTensor<B>,
    _the_host_finds_its_own_bounds: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
) -> Fp4Primitive<B> {
    let device = values.device();
    let view = View::along(&values.shape(), axis);
    let [values, amax, costs] = [values, amax, costs].map(read::<B>);
    let packed = host::with_importance(&costs, &scheme, |importance| {
        host::quantize(&values, view, &amax, &scheme, importance)
    });
    upload::<B>(packed, &device)
}

/// See [`Fp4Backend::fp4_quantize_gptq`]: on the host.
pub fn quantize_gptq<B: Backend>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
    curvature: Arc<Curvature>,
) -> Fp4Primitive<B> {
    let device = values.device();
    let F(matrix) = rows::<B>(values, axis);
    let count = matrix.shape()[0];
    let [matrix, amax] = [matrix, amax].map(read::<B>);
    let curvature = curvature.on_host().expect("callers look where it was made");
    upload::<B>(host::quantize_gptq(&matrix, count, &amax, &scheme, curvature), &device)
}

fn read<B: Backend>(tensor: FloatTensor<B>) -> Vec<f32> {
    let data = read_sync(B::float_into_data(B::float_cast(tensor, FloatDType::F32)));
    let data = data.expect("the device hands back its data");
    data.try_into_vec::<f32>().expect("just cast to f32")
}

fn upload<B: Backend>(packed: host::HostPacked, device: &B::Device) -> Fp4Primitive<B> {
    let upload = |data: TensorData, dtype| B::int_cast(B::int_from_data(data, device), dtype);
    Fp4Primitive {
        codes: upload(packed.codes, IntDType::U8),
        scales: upload(packed.scales, IntDType::U8),
        tensor_scale: upload(packed.tensor_scale, IntDType::I32),
    }
}

/// See [`Fp4Backend::fp4_fake_quantize`].
pub fn fake_quantize<B: Backend>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
    restore: Restore,
) -> FloatTensor<B> {
    let (shape, dtype) = (values.shape().to_vec(), FloatDType::from(values.dtype()));
    if needs_host(&scheme) {
        let layout = Fp4Layout::new(&values.shape(), axis, &scheme).expect("callers check it");
        let mut packed = quantize_on_host::<B>(values, amax, axis, scheme);
        if restore == Restore::BlockScaled {
            let (shape, device) = (packed.tensor_scale.shape(), packed.tensor_scale.device());
            let one = i64::from(1.0f32.to_bits());
            packed.tensor_scale = B::int_full(shape, one.into(), &device, IntDType::I32);
        }
        return dequantize::<B>(packed, layout, dtype);
    }
    let quantized = quantize_rows(rows::<B>(values, axis), amax, &scheme);
    let elements = quantized.codes.look_up(&E2M1_VALUES);
    let tensor_scale = match restore {
        Restore::Values => quantized.tensor_scale,
        Restore::BlockScaled => F::filled(1.0, &quantized.tensor_scale),
    };
    let restored = self::restore(&elements, &quantized.scales, &tensor_scale, scheme.format());
    from_rows(restored, &shape, axis, dtype)
}

/// See [`Fp4Backend::fp4_matmul`]. The product is the device's own, of the dense weight.
pub fn matmul<B: Fp4Backend>(
    input: FloatTensor<B>,
    weight: Fp4Primitive<B>,
    layout: Fp4Layout,
) -> FloatTensor<B> {
    let dtype = FloatDType::from(input.dtype());
    B::float_matmul(input, B::fp4_dequantize(weight, layout, dtype))
}

/// See [`Fp4Backend::fp4_hadamard`]. Products with a quarter are exact, so
/// that it does not matter that they are not fused with the additions.
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

/// See [`Fp4Backend::fp4_dequantize`].
pub fn dequantize<B: Backend>(
    packed: Fp4Primitive<B>,
    layout: Fp4Layout,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let rows = dequantize_rows(packed, &layout);
    from_rows(rows, &layout.shape, layout.axis, dtype)
}

fn dequantize_rows<B: Backend>(packed: Fp4Primitive<B>, layout: &Fp4Layout) -> F<B> {
    let [rows, half_cols] = layout.codes_shape();
    let [_, blocks] = layout.scales_shape();
    let int = get_or_init_device_settings::<B>(&packed.codes.device()).int_dtype;
    let bytes = B::int_cast(packed.codes, int);
    let low = B::bitwise_and_scalar(bytes.clone(), 15i64.into());
    let high = B::bitwise_right_shift_scalar(bytes, 4i64.into());
    let column = |codes| B::int_reshape(codes, Shape::from(vec![rows, half_cols, 1]));
    let codes = B::int_cat(vec![column(low), column(high)], 2);
    let codes = F::<B>(B::int_into_float(codes, FloatDType::F32));
    let elements = codes.look_up(&E2M1_VALUES).reshape(&[rows, blocks, layout.block_size]);
    let scales = F::<B>(B::int_into_float(B::int_cast(packed.scales, int), FloatDType::F32));
    restore(&elements, &scales, &from_bits(packed.tensor_scale), layout.format)
}

/// `(element x block scale) x tensor scale`, `[rows, cols]`.
fn restore<B: Backend>(
    elements: &F<B>,
    scales: &F<B>,
    tensor_scale: &F<B>,
    format: Fp4Format,
) -> F<B> {
    let [rows, blocks, block_size] = elements.shape()[..] else { unreachable!("blocks") };
    let table = match format {
        Fp4Format::NvFp4 => &E4M3_VALUES,
        Fp4Format::MxFp4 => &E8M0_VALUES,
    };
    let scales = scales.look_up(table).reshape(&[rows, blocks, 1]);
    let tensor_scale = tensor_scale.reshape(&[tensor_scale.shape()[0], 1, 1]);
    elements.mul(&scales).mul(&tensor_scale).reshape(&[rows, blocks * block_size])
}

/// See [`Fp4Backend::fp4_squared_error`].
pub fn squared_error<B: Fp4Backend>(
    values: FloatTensor<B>,
    packed: Fp4Primitive<B>,
    layout: Fp4Layout,
) -> FloatTensor<B> {
    let values = rows::<B>(values, layout.axis);
    let difference = dequantize_rows(packed, &layout).sub(&values);
    // The same in every run: the report shows it.
    let sum = |terms: F<B>| {
        let of_rows = B::fp4_untuned_sum(terms.0, 1, false);
        B::float_reshape(B::fp4_untuned_sum(of_rows, 0, false), Shape::from(vec![1]))
    };
    let error = sum(difference.mul(&difference));
    let energy = sum(values.mul(&values));
    B::float_cat(vec![error, energy], 0)
}

/// The bits of non-negative f32 values, in i32.
fn bits<B: Backend>(values: &F<B>) -> IntTensor<B> {
    let nans = values.is_nan();
    let values = values.or_where(values.is_nan(), 0.0);
    // The exponent field, and the significand scaled to an integer of 24 bits, both exact.
    let mut significand = values.or_from(values.below(1.0), &values.times(2f32.powi(126)));
    let mut field = values.at_least(1.0).as_float().times(126.0).plus(1.0);
    let normal = significand.at_least(1.0).as_float();
    for bits in [64, 32, 16, 8, 4, 2, 1] {
        let power = 2f32.powi(bits);
        field = field.add(&significand.at_least(power).as_float().times(bits as f32));
        let divided = significand.div_by(power);
        significand = significand.or_from(significand.at_least(power), &divided);
    }
    let exponent = field.mul(&normal).to_int(IntDType::I32);
    let mantissa = significand.sub(&normal).times(2f32.powi(23)).to_int(IntDType::I32);
    let bits = B::int_add(B::int_mul_scalar(exponent, (1i64 << 23).into()), mantissa);
    B::int_mask_fill(bits, nans.0, i64::from(f32::NAN.to_bits()).into())
}

/// The f32 values of bits in i32, not negative.
fn from_bits<B: Backend>(bits: IntTensor<B>) -> F<B> {
    let field = B::bitwise_right_shift_scalar(bits.clone(), 23i64.into());
    let mantissa = B::bitwise_and_scalar(bits, i64::from((1 << 23) - 1).into());
    let float = |ints| F::<B>(B::int_into_float(ints, FloatDType::F32));
    let (field, mantissa) = (float(field), float(mantissa));
    let significand = mantissa.add(&field.above(0.0).as_float().times(2f32.powi(23)));
    // 2^(field - 150), and 2^-149 for subnormals; the product is the value, exactly.
    let powers: Vec<_> = (0..=255i32)
        .map(|field| if field == 255 { f32::NAN } else { 2f32.powi(field.max(1) - 150) })
        .collect();
    significand.mul(&field.look_up(&powers))
}

/// See [`Fp4Backend::fp4_add_gram`]: a column of tiles after the other.
pub fn add_gram<B: Fp4Backend>(
    sums: FloatTensor<B>,
    activations: FloatTensor<B>,
    layout: GramTiles,
    first: usize,
) -> FloatTensor<B> {
    const SIDE: usize = GramTiles::SIDE;
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
    for start in (0..rows).step_by(GRAM_ROWS) {
        let end = rows.min(start + GRAM_ROWS);
        let x = B::float_reshape(part(&x, 0, start..end), Shape::new([end - start, columns, SIDE]));
        let x = B::float_swap_dims(x, 0, 1);
        let products = layout.columns(first..first + tiles).into_iter().map(|(column, rows)| {
            let right = Shape::new([rows.len(), end - start, SIDE]);
            let right = B::float_expand(part(&x, 0, column..column + 1), right);
            B::fp4_untuned_matmul(B::float_swap_dims(part(&x, 0, rows), 1, 2), right)
        });
        let products = B::float_cat(products.collect(), 0);
        sums = B::float_add(sums, B::float_cast(products, wide));
    }
    sums
}

/// Activations whose products are added up in f32.
const GRAM_ROWS: usize = 1024;
