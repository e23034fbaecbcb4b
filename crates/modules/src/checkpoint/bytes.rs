//! Values of tensors: turned, stacked, in the dtypes of Burn.

use std::borrow::Cow;

use burn::tensor::{Bytes, DType, TensorData};
use burn_fp4_checkpoints::Dtype;
use rayon::prelude::*;

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

/// Numbers of a file in a dtype of Burn, matrices `[.., rows, cols]` as `[.., cols, rows]` if
/// asked.
pub(crate) fn data(
    values: &[u8],
    shape: &[usize],
    turn: bool,
    from: DType,
    to: DType,
) -> TensorData {
    let mut own = zeros(values.len(), from.size());
    match (turn, shape) {
        (true, [.., rows, cols]) => turn_matrices(values, &mut own, from.size(), [*rows, *cols]),
        _ => own.copy_from_slice(values),
    }
    let data = TensorData::from_bytes(own, [shape.iter().product::<usize>()], from);
    if from == to { data } else { data.convert_dtype(to) }
}

/// Makes zeros for numbers of `size` bytes, in memory of their alignment: `Bytes::from_bytes_vec`
/// copies all into memory of another one.
fn zeros(len: usize, size: usize) -> Bytes {
    match size {
        1 => Bytes::from_elems(vec![0_u8; len]),
        2 => Bytes::from_elems(vec![0_u16; len / 2]),
        4 => Bytes::from_elems(vec![0_u32; len / 4]),
        _ => Bytes::from_elems(vec![0_u64; len / 8]),
    }
}

/// Turns matrices `[.., rows, cols]` of numbers of `size` bytes into `[.., cols, rows]`, if asked.
pub(crate) fn turned<'b>(
    bytes: Cow<'b, [u8]>,
    shape: &[usize],
    size: usize,
    turn: bool,
) -> Cow<'b, [u8]> {
    let (true, [.., rows, cols]) = (turn, shape) else { return bytes };
    let mut turned = vec![0; bytes.len()];
    turn_matrices(&bytes, &mut turned, size, [*rows, *cols]);
    turned.into()
}

fn turn_matrices(from: &[u8], into: &mut [u8], size: usize, matrix: [usize; 2]) {
    match size {
        1 => turn_sized::<1>(from, into, matrix),
        2 => turn_sized::<2>(from, into, matrix),
        4 => turn_sized::<4>(from, into, matrix),
        _ => turn_sized::<8>(from, into, matrix),
    }
}

/// Columns that a thread turns together, so that what it writes stays in its cache.
const COLUMNS: usize = 32;

fn turn_sized<const SIZE: usize>(from: &[u8], into: &mut [u8], [rows, cols]: [usize; 2]) {
    let (from, _) = from.as_chunks::<SIZE>();
    let (into, _) = into.as_chunks_mut::<SIZE>();
    let matrix = (rows * cols).max(1);
    for (from, into) in from.chunks_exact(matrix).zip(into.chunks_exact_mut(matrix)) {
        let parts = into.par_chunks_mut(COLUMNS * rows).enumerate();
        parts.for_each(|(part, into)| {
            let columns = into.len() / rows;
            for (row, from) in from.chunks_exact(cols).enumerate() {
                let from = &from[part * COLUMNS..][..columns];
                for (col, number) in from.iter().enumerate() {
                    into[col * rows + row] = *number;
                }
            }
        });
    }
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

    #[test]
    fn numbers_are_in_memory_that_burn_takes_as_it_is() {
        let numbers = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0];
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
        let found = |turn| {
            let data = data(&bytes, &[2, 3], turn, DType::F32, DType::F32);
            data.into_bytes().try_into_vec::<f32>().expect("memory of f32, not of bytes")
        };
        assert_eq!(found(false), numbers);
        assert_eq!(found(true), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
