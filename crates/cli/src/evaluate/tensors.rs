//! Matrices of a file.

use burn_fp4_checkpoints::{Container, Reader, Value, Weight};

use crate::error::CliError;

/// A row-major matrix in f32.
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) values: Vec<f32>,
}

/// Reads a matrix of any number of columns, or activations with the columns of their weight.
pub(crate) fn matrix(
    file: &Container,
    name: &str,
    weight: Option<(&str, usize)>,
) -> Result<Matrix, CliError> {
    let Some(tensor) = file.get(name) else {
        let weight = weight.map_or(name, |(weight, _)| weight).to_owned();
        return Err(CliError::Missing { name: name.to_owned(), weight });
    };
    match (&*tensor.shape, weight) {
        (&[rows, columns], weight) if weight.is_none_or(|(_, expected)| expected == columns) => {
            let weight = Weight::new(name, 0, Value::Plain(tensor));
            let values = Reader::new(file).values(&weight).map_err(CliError::from);
            Ok(Matrix { rows, cols: columns, values: values.map_err(CliError::during_run)? })
        }
        (found, weight) => {
            let expected = match weight {
                Some((weight, cols)) => format!("[any, {cols}], the inputs of `{weight}`"),
                None => "[rows, columns]".to_owned(),
            };
            Err(CliError::Shape { name: name.to_owned(), expected, found: found.to_vec() })
        }
    }
}
