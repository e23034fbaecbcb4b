//! The host engine on the values of tensors, the same for every device whose memory is the host's
//! and for what other devices read back.

use burn::tensor::{Element, TensorData, bf16, f16};
use burn_fp4_search::formats::Packed;
use burn_fp4_search::host::{self, DequantTarget, HostElement, PackedView, View};
use burn_fp4_search::{BlockHessians, Fp4Scheme, Hadamard, HessianFactor, Importance};

use crate::layout::Fp4Layout;
use crate::squares::ranges_of;

/// The values of a float tensor in contiguous host memory.
#[derive(Clone, Copy)]
pub(crate) enum Values<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

/// Runs the same for the values of each dtype.
macro_rules! each_dtype {
    ($values:expr, $slice:ident => $body:expr) => {
        match $values {
            Values::F32($slice) => $body,
            Values::F16($slice) => $body,
            Values::Bf16($slice) => $body,
        }
    };
}

const CHECKED: &str = "callers check scheme, shape and dtype";

/// The largest magnitude `[1]`, or one for each packed row `[rows]`, in f32.
pub(crate) fn amax(values: Values<'_>, view: View, by_row: bool) -> TensorData {
    vector(each_dtype!(values, values => match by_row {
        true => host::row_amax(values, view),
        false => vec![host::tensor_amax(values)],
    }))
}

/// Codes and scales, given the amax `[1]` or `[rows]`.
pub(crate) fn quantize(
    values: Values<'_>,
    view: View,
    amax: &[f32],
    scheme: &Fp4Scheme,
    importance: Importance<'_>,
) -> Packed {
    each_dtype!(values, values => quantize_slice(values, view, amax, scheme, importance))
}

/// [`quantize`] of values of one dtype, for which alone the engine is compiled.
pub(crate) fn quantize_slice<T: HostElement>(
    values: &[T],
    view: View,
    amax: &[f32],
    scheme: &Fp4Scheme,
    importance: Importance<'_>,
) -> Packed {
    host::quantize_packed(values, view, scheme, amax, importance).expect(CHECKED)
}

/// Codes and scales by GPTQ of a matrix whose rows run along the blocked axis.
pub(crate) fn quantize_gptq(
    values: &[f32],
    rows: usize,
    amax: &[f32],
    scheme: &Fp4Scheme,
    hessian_factor: &HessianFactor,
) -> Packed {
    hessian_factor.quantize(values, rows, scheme, amax).expect(CHECKED)
}

/// Calls `use_importance` with what the importance of an extension's operation means.
pub(crate) fn with_importance<R>(
    values: &[f32],
    scheme: &Fp4Scheme,
    use_importance: impl FnOnce(Importance<'_>) -> R,
) -> R {
    if scheme.search.needs_hessians() {
        let hessians = BlockHessians::new(values.to_vec(), scheme.block_size).expect(CHECKED);
        use_importance(Importance::Blocks(&hessians))
    } else {
        use_importance(Importance::Channels(values))
    }
}

/// What dequantization makes of quantization, in the dtype of the values.
pub(crate) fn fake_quantize(
    values: Values<'_>,
    shape: &[usize],
    axis: usize,
    amax: &[f32],
    scheme: &Fp4Scheme,
    target: DequantTarget,
) -> TensorData {
    let view = View::along(shape, axis);
    each_dtype!(values, values => made_of(values, shape, |values, output| {
        host::fake_quantize(values, view, scheme, amax, target, output).expect(CHECKED);
    }))
}

/// Every 16 neighbours along an axis transformed, or back, in the dtype of the values.
pub(crate) fn hadamard(
    values: Values<'_>,
    shape: &[usize],
    axis: usize,
    hadamard: Hadamard,
    inverse: bool,
) -> TensorData {
    let view = View::along(shape, axis);
    each_dtype!(values, values => made_of(values, shape, |values, output| {
        host::hadamard(values, view, hadamard, inverse, output).expect(CHECKED);
    }))
}

/// `input x weight`, in the dtype of an input `[rows, K]`.
pub(crate) fn matmul(
    input: Values<'_>,
    rows: usize,
    weight: PackedView<'_>,
    layout: &Fp4Layout,
) -> TensorData {
    let [channels, outputs] = layout.shape[..] else { unreachable!("callers check the rank") };
    each_dtype!(input, input => made_of(input, &[rows, outputs], |input, output| {
        host::matmul(input, weight, [outputs, channels], output).expect(CHECKED);
    }))
}

/// `[6]`; see [`fp4_squared_error`](crate::Fp4Backend::fp4_squared_error).
pub(crate) fn squared_error(
    values: Values<'_>,
    packed: PackedView<'_>,
    layout: &Fp4Layout,
) -> TensorData {
    let sums = each_dtype!(values, values => host::squared_error(values, packed, layout.view()));
    vector(sums.expect(CHECKED).map(ranges_of).concat())
}

/// Writes the values of codes and scales in row-major order.
pub(crate) fn dequantize<T: HostElement>(
    packed: PackedView<'_>,
    layout: &Fp4Layout,
    output: &mut [T],
) {
    host::dequantize(packed, layout.view(), output).expect(CHECKED);
}

/// Calls `use_packed` with the slices of a packed tensor.
pub(crate) fn with_packed<R>(
    codes: &[u8],
    scales: &[u8],
    tensor_scale: &[i32],
    layout: &Fp4Layout,
    use_packed: impl FnOnce(PackedView<'_>) -> R,
) -> R {
    let tensor_scale: Vec<_> =
        tensor_scale.iter().map(|bits| f32::from_bits(*bits as u32)).collect();
    use_packed(PackedView {
        format: layout.format,
        block_size: layout.block_size,
        codes,
        scales,
        tensor_scale: &tensor_scale,
    })
}

/// Values of a shape in the dtype of those that they are made of.
fn made_of<T: HostElement + Element>(
    values: &[T],
    shape: &[usize],
    fill: impl FnOnce(&[T], &mut [T]),
) -> TensorData {
    let mut output = vec![T::default(); shape.iter().product()];
    fill(values, &mut output);
    TensorData::new(output, shape.to_vec())
}

/// f32 values as tensor data of shape `[len]`.
fn vector(values: Vec<f32>) -> TensorData {
    let len = values.len();
    TensorData::new(values, [len])
}
