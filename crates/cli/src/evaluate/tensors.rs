//! Matrices of a safetensors file.

use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::error::CliError;

/// A row-major matrix in f32.
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) values: Vec<f32>,
}

/// Reads the header and the bytes of a file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, CliError> {
    if path.is_dir() {
        return Err(CliError::Folder { path: path.to_owned() });
    }
    std::fs::read(path).map_err(|source| CliError::File { path: path.to_owned(), source })
}

/// The tensors of a file's bytes.
pub(crate) fn tensors<'a>(path: &Path, bytes: &'a [u8]) -> Result<SafeTensors<'a>, CliError> {
    SafeTensors::deserialize(bytes)
        .map_err(|source| CliError::Container { path: path.to_owned(), source })
}

/// A matrix with any number of columns, or with as many as `reason` asks for.
pub(crate) fn matrix(
    file: &SafeTensors<'_>,
    name: &str,
    cols: Option<usize>,
    reason: &str,
) -> Result<Matrix, CliError> {
    let missing = |_| CliError::Missing { name: name.to_owned(), reason: reason.to_owned() };
    let view = file.tensor(name).map_err(missing)?;
    let found = view.shape().to_vec();
    match (&found[..], cols) {
        (&[rows, columns], expected) if expected.is_none_or(|expected| expected == columns) => {
            Ok(Matrix { rows, cols: columns, values: values(&view, name)? })
        }
        (_, cols) => {
            let expected = match cols {
                Some(cols) => format!("[any, {cols}], {reason}"),
                None => "[rows, columns]".to_owned(),
            };
            Err(CliError::Shape { name: name.to_owned(), expected, found })
        }
    }
}

fn values(view: &TensorView<'_>, name: &str) -> Result<Vec<f32>, CliError> {
    let words =
        || view.data().chunks_exact(2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
    match view.dtype() {
        Dtype::F32 => {
            let values = view.data().chunks_exact(4);
            Ok(values.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        }
        Dtype::F16 => Ok(words().map(|bits| f16::from_bits(bits).to_f32()).collect()),
        Dtype::BF16 => Ok(words().map(|bits| bf16::from_bits(bits).to_f32()).collect()),
        found => Err(CliError::Dtype { name: name.to_owned(), found }),
    }
}
