//! Heads of a KV cache in FP8, by tensor operations; see
//! [`KvFormat`](burn_fp4_search::host::KvFormat).

use burn::backend::Backend;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{FloatDType, IntDType};
use burn_fp4_search::PowerRounding;
use burn_fp4_search::formats::{E4M3, E4M3_VALUES, E8M0, E8M0_VALUES};
use burn_fp4_search::host::FP8_BINADES;

use super::floats::Floats;
use super::scale_grid::{round_to_float, round_to_power_of_two};

/// Quantizes f32 heads `[heads, head_dim]`: codes of that shape, and scales `[heads, 1]`.
pub(crate) fn quantize<B: Backend>(values: FloatTensor<B>) -> [IntTensor<B>; 2] {
    let values = Floats::<B>(values);
    let magnitudes = values.abs();
    let scales = round_to_power_of_two(&magnitudes.max_dim(1), PowerRounding::Ceil, &E8M0);
    let nan = f32::from(E8M0.nan_code());
    let lower = scales.plus(-f32::from(FP8_BINADES));
    let lower = lower.or_where(lower.below(0.0), 0.0);
    let scales = lower.or_where(scales.equals(nan), nan);
    let factors = E8M0_VALUES.map(|value| 1.0 / value);
    let factors = scales.look_up(&factors);
    let (codes, _) = round_to_float(&magnitudes.mul(&factors), &E4M3);
    let signs = values.mul(&factors).below(0.0).as_float();
    let codes = codes.add(&signs.times(f32::from(E4M3.sign_bit())));
    [codes, scales].map(|codes| codes.to_int(IntDType::U8))
}

/// Dequantizes heads to f32.
pub(crate) fn dequantize<B: Backend>(codes: IntTensor<B>, scales: IntTensor<B>) -> FloatTensor<B> {
    let float = |codes| Floats::<B>(B::int_into_float(codes, FloatDType::F32));
    let (codes, scales) = (float(codes), float(scales));
    codes.look_up(&E4M3_VALUES).mul(&scales.look_up(&E8M0_VALUES)).0
}
