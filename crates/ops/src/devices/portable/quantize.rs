//! Quantization by tensor operations.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, IntDType};
use burn_fp4_search::formats::E2M1_VALUES;
use burn_fp4_search::host::DequantTarget;
use burn_fp4_search::{Blocks, Fp4Scheme, Method};

use super::bits::bits;
use super::block_scale::block_scales;
use super::dequantize::restore;
use super::element::{normalize, round_to_e2m1};
use super::floats::{Floats, from_rows, rows};
use super::four_over_six::four_over_six;
use super::on_host::{needs_host, quantize_on_host};
use super::tensor_scale::factors;
use super::tiles::share_amax;
use crate::layout::{Fp4Layout, Fp4Primitive};

/// [`fp4_amax`](crate::Fp4Backend::fp4_amax) by tensor operations.
pub fn amax<B: Backend>(values: FloatTensor<B>, axis: usize, by_row: bool) -> FloatTensor<B> {
    let magnitudes = rows::<B>(values, axis).abs();
    let [rows, cols] = magnitudes.shape()[..] else { unreachable!("rows makes a matrix") };
    if by_row {
        magnitudes.max_dim(1).reshape(&[rows]).0
    } else {
        magnitudes.reshape(&[1, rows * cols]).max_dim(1).reshape(&[1]).0
    }
}

/// Codes and scales as floats, for [`quantize`] and [`fake_quantize`].
struct Quantized<B: Backend> {
    /// Element codes, `[rows, blocks, block_size]`.
    codes: Floats<B>,
    /// Scale codes, `[rows, blocks]`.
    scales: Floats<B>,
    /// `[1]` or `[rows]`.
    tensor_scale: Floats<B>,
}

/// Quantizes a matrix `[rows, cols]`.
fn quantize_rows<B: Backend>(
    values: Floats<B>,
    amax: FloatTensor<B>,
    scheme: &Fp4Scheme,
) -> Quantized<B> {
    let [rows, cols] = values.shape()[..] else { unreachable!("rows makes a matrix") };
    let blocks = cols / scheme.block_size;
    let tensor_scales = amax.shape().num_elements();
    let factors = factors(Floats(amax).reshape(&[tensor_scales, 1]), scheme);
    let values = values.reshape(&[rows, blocks, scheme.block_size]);
    let mut amax = values.abs().max_dim(2).reshape(&[rows, blocks]);
    if scheme.blocks == Blocks::Tile16x16 {
        amax = share_amax(&amax);
    }
    let (codes, scales) = match scheme.method {
        Method::Amax => block_scales(&amax, &factors, scheme),
        Method::FourOverSix { error, .. } => four_over_six(&values, &amax, &factors, scheme, error),
        method => unreachable!("{method} is done on the host"),
    };
    let normalized = normalize(&values, &codes, &scales, &factors, scheme);
    Quantized {
        codes: round_to_e2m1(&normalized, scheme),
        scales: codes,
        tensor_scale: factors.decode.reshape(&[tensor_scales]),
    }
}

/// [`fp4_quantize`](crate::Fp4Backend::fp4_quantize) by tensor operations.
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

/// [`fp4_fake_quantize`](crate::Fp4Backend::fp4_fake_quantize) by tensor operations, and where the
/// host quantizes with the device's [`fp4_dequantize`](crate::Fp4Backend::fp4_dequantize).
pub fn fake_quantize<B: Backend>(
    values: FloatTensor<B>,
    amax: FloatTensor<B>,
    axis: usize,
    scheme: Fp4Scheme,
    target: DequantTarget,
    dequantize: fn(Fp4Primitive<B>, Fp4Layout, FloatDType) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let (shape, dtype) = (values.shape().to_vec(), FloatDType::from(values.dtype()));
    if needs_host(&scheme) {
        let layout = Fp4Layout::new(&values.shape(), axis, &scheme).expect("callers check it");
        let mut packed = quantize_on_host::<B>(values, amax, axis, scheme);
        if target == DequantTarget::WithoutTensorScale {
            let (shape, device) = (packed.tensor_scale.shape(), packed.tensor_scale.device());
            let one = i64::from(1.0f32.to_bits());
            packed.tensor_scale = B::int_full(shape, one.into(), &device, IntDType::I32);
        }
        return dequantize(packed, layout, dtype);
    }
    let quantized = quantize_rows(rows::<B>(values, axis), amax, &scheme);
    let elements = quantized.codes.look_up(&E2M1_VALUES);
    let tensor_scale = match target {
        DequantTarget::Full => quantized.tensor_scale,
        DequantTarget::WithoutTensorScale => Floats::filled(1.0, &quantized.tensor_scale),
    };
    let restored = restore(&elements, &quantized.scales, &tensor_scale, scheme.format());
    from_rows(restored, &shape, axis, dtype)
}
