//! Matrices of a file.

use burn_fp4_checkpoints::{Container, Reader, Value, Weight};

use crate::error::CliError;

/// A row-major matrix in f32.
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) values: Vec<f32>,
}

/// A matrix with any number of columns, or with as many as `reason` asks for.
pub(crate) fn matrix(
    file: &Container,
    name: &str,
    cols: Option<usize>,
    reason: &str,
) -> Result<Matrix, CliError> {
    let Some(tensor) = file.get(name) else {
        return Err(CliError::Missing { name: name.to_owned(), reason: reason.to_owned() });
    };
    match (&*tensor.shape, cols) {
        (&[rows, columns], expected) if expected.is_none_or(|expected| expected == columns) => {
            let weight = Weight::new(name, 0, Value::Plain(tensor));
            let values = Reader::new(file).values(&weight).map_err(CliError::from);
            Ok(Matrix { rows, cols: columns, values: values.map_err(CliError::meanwhile)? })
        }
        (found, cols) => {
            let expected = match cols {
                Some(cols) => format!("[any, {cols}], {reason}"),
                None => "[rows, columns]".to_owned(),
            };
            Err(CliError::Shape { name: name.to_owned(), expected, found: found.to_vec() })
        }
    }
}
