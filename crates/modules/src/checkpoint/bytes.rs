//! Values of tensors: turned, stacked, in the dtypes of Burn.

use std::borrow::Cow;

use burn::tensor::{Bytes, DType, TensorData};
use burn_fp4_checkpoints::Dtype;

/// The dtypes that files and Burn have in common. Truth values are apart: devices store them in
/// their own ways.
const DTYPES: [(Dtype, DType); 12] = [
    (Dtype::F64, DType::F64),
    (Dtype::F32, DType::F32),
    (Dtype::F16, DType::F16),
    (Dtype::BF16, DType::BF16),
    (Dtype::I64, DType::I64),
    (Dtype::I32, DType::I32),
    (Dtype::I16, DType::I16),
    (Dtype::I8, DType::I8),
    (Dtype::U64, DType::U64),
    (Dtype::U32, DType::U32),
    (Dtype::U16, DType::U16),
    (Dtype::U8, DType::U8),
];

/// The dtype in Burn of what a file holds.
pub(crate) fn of_file(dtype: Dtype) -> Option<DType> {
    DTYPES.iter().find(|(file, _)| *file == dtype).map(|(_, burn)| *burn)
}

/// The dtype in a file of what Burn holds.
pub(crate) fn in_file(dtype: DType) -> Option<Dtype> {
    DTYPES.iter().find(|(_, burn)| *burn == dtype).map(|(file, _)| *file)
}

/// Values in another dtype.
pub(crate) fn data(bytes: Vec<u8>, shape: &[usize], from: DType, to: DType) -> TensorData {
    let data = TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape.to_vec(), from);
    if from == to { data } else { data.convert_dtype(to) }
}

/// Matrices `[.., rows, cols]` of numbers of so many bytes as `[.., cols, rows]`, if asked.
pub(crate) fn turned<'b>(
    bytes: Cow<'b, [u8]>,
    shape: &[usize],
    size: usize,
    turn: bool,
) -> Cow<'b, [u8]> {
    let (true, [.., rows, cols]) = (turn, shape) else { return bytes };
    match size {
        1 => turn_matrices::<1>(&bytes, *rows, *cols).into(),
        2 => turn_matrices::<2>(&bytes, *rows, *cols).into(),
        4 => turn_matrices::<4>(&bytes, *rows, *cols).into(),
        _ => turn_matrices::<8>(&bytes, *rows, *cols).into(),
    }
}

/// Rows and columns that are turned together, so that both sides stay in the cache.
const TILE: usize = 32;

fn turn_matrices<const SIZE: usize>(bytes: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let mut turned = vec![0; bytes.len()];
    let (from, _) = bytes.as_chunks::<SIZE>();
    let (to, _) = turned.as_chunks_mut::<SIZE>();
    let matrix = (rows * cols).max(1);
    for (from, to) in from.chunks_exact(matrix).zip(to.chunks_exact_mut(matrix)) {
        for first_row in (0..rows).step_by(TILE) {
            for first_col in (0..cols).step_by(TILE) {
                for row in first_row..rows.min(first_row + TILE) {
                    for col in first_col..cols.min(first_col + TILE) {
                        to[col * rows + row] = from[row * cols + col];
                    }
                }
            }
        }
    }
    turned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_are_turned_one_by_one() {
        let (stack, rows, cols) = (2, 35, 70);
        let numbers: Vec<u16> = (0..(stack * rows * cols) as u16).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let found = turned(Cow::Borrowed(&bytes), &[stack, rows, cols], 2, true);
        let found: Vec<u16> =
            found.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
        let at = |index: usize| {
            let (matrix, col, row) =
                (index / (rows * cols), index % (rows * cols) / rows, index % rows);
            (matrix * rows * cols + row * cols + col) as u16
        };
        assert_eq!(found, (0..numbers.len()).map(at).collect::<Vec<_>>());
    }
}
