//! Errors of casting and decoding weights to a float dtype.

use burn_fp4_checkpoints::{Dtype, Tensor, Value, Weight};

use crate::accuracy::Tally;
use crate::percent::Percent;
use crate::warnings::CAST_ERROR;

/// Bytes that are cast at a time to measure the error.
const PIECE: usize = 1 << 20;

/// Measures the error of casting a tensor of floats. None: it cannot be cast, which writing it
/// tells.
pub(crate) fn error_of_cast(tensor: &Tensor<'_>, dtype: Dtype) -> Option<Tally> {
    let squares = squares_of_cast(tensor, dtype)?;
    let other = match dtype {
        // Advised only if this cast is warned of.
        Dtype::F16 if Percent::of(squares).0 > CAST_ERROR => {
            squares_of_cast(tensor, Dtype::BF16).unwrap_or_default()
        }
        _ => [0.0; 2],
    };
    Some(Tally { other, ..Tally::of_values(squares) })
}

/// Sums the squares of what a cast changes, and of the values.
fn squares_of_cast(tensor: &Tensor<'_>, dtype: Dtype) -> Option<[f64; 2]> {
    let from = tensor.plain()?;
    let mut squares = [0.0; 2];
    for bytes in tensor.bytes.chunks(PIECE) {
        let shape = vec![8 * bytes.len() / from.bitsize()];
        let piece = Tensor::new(tensor.name.clone(), from, shape, bytes).ok()?;
        let (before, after) = (piece.to_f32().ok()?, piece.decode(dtype).ok()?.to_f32().ok()?);
        for (before, after) in before.into_iter().zip(after) {
            let (before, after) = (f64::from(before), f64::from(after));
            squares[0] += (after - before).powi(2);
            squares[1] += before * before;
        }
    }
    Some(squares)
}

/// Measures the error of decoding a weight, whatever it is in.
pub(crate) fn error_of_decoding(weight: &Weight<'_>, dtype: Dtype) -> Option<Tally> {
    if let Value::Plain(tensor) = &weight.value
        && tensor.plain().is_some()
    {
        return error_of_cast(tensor, dtype);
    }
    let (shape, values) = weight.values().ok()?;
    let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
    error_of_cast(&Tensor::new(weight.name.clone(), Dtype::F32, shape, bytes).ok()?, dtype)
}
