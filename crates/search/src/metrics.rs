//! How far a quantized weight is from the original, in its values and in the outputs of its layer.

use burn_fp4_formats::{Packed, check_length};

use crate::SearchError;
use crate::gram::check_activations;
use crate::matrix::{Matrix, product};

/// How far a quantized weight is from the original, as the other projects measure it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Metrics {
    /// `|Wq - W| / |W|` in percent, Euclidean; 0 for an all-zero weight that stayed so.
    pub weight_error_percent: f64,
    /// The same in decibels: `-20 log10(|Wq - W| / |W|)`; infinite where there is no error.
    pub sqnr_db: f64,
}

/// Activations that are multiplied at a time.
const CHUNK: usize = 1024;

impl Metrics {
    /// Of a weight `[rows, cols]` and its quantized form.
    ///
    /// # Errors
    /// [`SearchError::Format`] if the weight does not have the shape of the packed one.
    pub fn of(weight: &[f32], packed: &Packed) -> Result<Self, SearchError> {
        let errors = errors(weight, packed)?;
        let energy: f64 = weight.iter().map(|&value| f64::from(value).powi(2)).sum();
        let error: f64 = errors.iter().map(|&value| f64::from(value).powi(2)).sum();
        let ratio = ratio(error, energy);
        Ok(Self { weight_error_percent: 100.0 * ratio, sqnr_db: -20.0 * ratio.log10() })
    }

    /// `|X (Wq - W)^T| / |X W^T|` in percent for activations `X [rows, cols]`: one product of the
    /// difference, so that nothing cancels, its squares summed in f64.
    ///
    /// # Errors
    /// [`SearchError::Format`] if a length does not fit, [`SearchError::Activation`] naming the
    /// first value that is not finite.
    pub fn output_error_percent(
        weight: &[f32],
        packed: &Packed,
        activations: &[f32],
    ) -> Result<f64, SearchError> {
        let errors = errors(weight, packed)?;
        let (rows, cols) = (packed.rows, packed.cols);
        check_activations(activations, cols)?;
        let mut sums = [0.0; 2];
        for chunk in activations.chunks(CHUNK * cols) {
            let count = chunk.len() / cols;
            let x = Matrix::row_major(chunk, count, cols);
            for (matrix, sum) in [errors.as_slice(), weight].into_iter().zip(&mut sums) {
                let outputs = product(x, Matrix::row_major(matrix, rows, cols).transposed());
                *sum += outputs.iter().map(|&y| f64::from(y).powi(2)).sum::<f64>();
            }
        }
        Ok(100.0 * ratio(sums[0], sums[1]))
    }
}

fn errors(weight: &[f32], packed: &Packed) -> Result<Vec<f32>, SearchError> {
    let quantized = packed.dequantize();
    check_length("weight", quantized.len(), weight.len())?;
    Ok(quantized.iter().zip(weight).map(|(quantized, weight)| quantized - weight).collect())
}

fn ratio(error: f64, energy: f64) -> f64 {
    if error == 0.0 { 0.0 } else { (error / energy).sqrt() }
}
