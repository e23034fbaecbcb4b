//! NVIDIA ModelOpt's functions, with its arithmetic and its treatment of special values
//! (`modelopt.torch.kernels.quantization.gemm`, 0.47).
//!
//! Some divisions are multiplications by the reciprocal, as torch and Triton compile them for a
//! GPU. Triton's are not IEEE, so a scale may still differ in its last bit.

use burn_fp4_formats::{E2M1, FormatError, Fp4Format, Minifloat, unpack_nibbles};

/// The number format of the block scales.
const SCALE: Minifloat = Fp4Format::NvFp4.row().block_scale;

/// Amaxes of scales up to this value are replaced by 1.
const SMALLEST_SCALE_AMAX: f32 = 1.0 / (1 << 24) as f32;

/// Computes the scale of every block, as f32, from the block amaxes.
///
/// Unquantized it is `amax / 6`. Quantized, it is rounded to a block scale, where the largest amax
/// (`global_amax`, or the largest in `amax`) maps to `largest_scale` (448, or 256 to leave room for
/// Four Over Six). Unlike in a checkpoint, a small block scale may become 0.
#[must_use]
pub fn compute_fp4_scales(
    amax: &[f32],
    global_amax: Option<f32>,
    quantize_block_scales: bool,
    largest_scale: f32,
) -> Vec<f32> {
    const SIXTH: f32 = 1.0 / E2M1.max_value();
    let unquantized = amax.iter().map(|amax| amax * SIXTH);
    if !quantize_block_scales {
        return unquantized.collect();
    }
    let global_amax = global_amax.unwrap_or_else(|| amax.iter().copied().fold(0.0, f32::max));
    let scale_amax = global_amax * (SCALE.max_value() / largest_scale) * SIXTH;
    let scale_amax = if scale_amax <= SMALLEST_SCALE_AMAX { 1.0 } else { scale_amax };
    let to_code_range = SCALE.max_value() / scale_amax;
    let from_code_range = scale_amax / SCALE.max_value();
    unquantized
        .map(|scale| SCALE.decode(SCALE.encode(scale * to_code_range)) * from_code_range)
        .collect()
}

/// Computes the values of packed codes: `(element x scale) x global_scale`, one scale per
/// `block_size` elements in order.
///
/// # Errors
/// [`FormatError::Length`] if the scales do not cover the codes.
pub fn fp4_dequantize(
    packed: &[u8],
    scales: &[f32],
    global_scale: f32,
    block_size: usize,
) -> Result<Vec<f32>, FormatError> {
    let values = 2 * packed.len();
    if block_size == 0 || scales.len() * block_size != values {
        let expected = values.checked_div(block_size).unwrap_or(0);
        return Err(FormatError::Length { what: "block scales", expected, found: scales.len() });
    }
    let mut codes = vec![0; values];
    unpack_nibbles(packed, &mut codes);
    Ok(codes
        .iter()
        .enumerate()
        .map(|(index, &code)| E2M1.decode(code) * scales[index / block_size] * global_scale)
        .collect())
}

/// Rounds every value to the FP4 grid of its block: the nearest element times the block's scale
/// from [`compute_fp4_scales`].
///
/// The block size is the number of values divided by the number of amaxes. A scale of 0 makes its
/// block 0; a scale that is NaN or infinite counts as 1. A NaN becomes -6 times the scale.
///
/// # Errors
/// [`FormatError::Indivisible`] if the amaxes do not divide the values.
pub fn static_blockwise_fp4_fake_quant(
    values: &[f32],
    amax: &[f32],
    global_amax: Option<f32>,
    quantize_block_scales: bool,
    largest_scale: f32,
) -> Result<Vec<f32>, FormatError> {
    let block_size = block_size(values.len(), amax.len())?;
    let scales = compute_fp4_scales(amax, global_amax, quantize_block_scales, largest_scale);
    Ok(values
        .iter()
        .enumerate()
        .map(|(index, &value)| fake_quantize(value, scales[index / block_size]))
        .collect())
}

/// Returns the number of values per amax.
///
/// # Errors
/// [`FormatError::Indivisible`] if it is not whole.
pub fn block_size(values: usize, amaxes: usize) -> Result<usize, FormatError> {
    if amaxes > 0 && values.is_multiple_of(amaxes) {
        Ok(values / amaxes)
    } else {
        Err(FormatError::Indivisible { cols: values, block_size: amaxes })
    }
}

fn fake_quantize(value: f32, scale: f32) -> f32 {
    if scale == 0.0 {
        return 0.0;
    }
    let scale = if scale.is_finite() { scale } else { 1.0 };
    let normalized = value.abs() * (1.0 / scale);
    let magnitude =
        if normalized.is_nan() { E2M1.max_value() } else { E2M1.decode(E2M1.encode(normalized)) };
    if value >= 0.0 { magnitude * scale } else { -magnitude * scale }
}
