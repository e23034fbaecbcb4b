//! [`Metrics`]: the error of a quantized weight, and of the outputs of its layer.

use burn_fp4_formats::{Packed, check_length};

use crate::error::SearchError;
use crate::gram::{Gram, check_activations};
use crate::host::{self, HostElement, PackedView, View};
use crate::matrix::{Matrix, product};
use crate::quantize_weight::dense_rows;

/// The error of a quantized weight, in the measures of other projects.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Metrics {
    /// `|Wq - W| / |W|` in percent, Euclidean; 0 for an all-zero weight that stayed so.
    pub weight_error_percent: f64,
    /// The same ratio in decibels: `-20 log10(|Wq - W| / |W|)`; infinite without an error.
    pub sqnr_db: f64,
}

/// Number of activations multiplied at a time.
const CHUNK: usize = 1024;

impl Metrics {
    /// Compares a weight `[rows, cols]` with its quantized form.
    ///
    /// ```
    /// use burn_fp4_search::{Fp4Scheme, Metrics, quantize};
    ///
    /// let weight: Vec<f32> = (0..16).map(|at| (at as f32).sin()).collect();
    /// let packed = quantize(&weight, 1, 16, &Fp4Scheme::nvfp4())?;
    /// let metrics = Metrics::of(&weight, &packed)?;
    /// assert!(metrics.weight_error_percent < 15.0 && metrics.sqnr_db > 16.0);
    /// # Ok::<(), burn_fp4_search::SearchError>(())
    /// ```
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

    /// Computes `|X (Wq - W)^T| / |X W^T|` in percent for activations `X [rows, cols]`. One product
    /// of the difference, so that nothing cancels; its squares are summed in f64.
    ///
    /// ```
    /// use burn_fp4_search::{Fp4Scheme, Metrics, quantize};
    ///
    /// let weight: Vec<f32> = (0..16).map(|at| (at as f32).sin()).collect();
    /// let packed = quantize(&weight, 1, 16, &Fp4Scheme::nvfp4())?;
    /// // Each channel alone: the outputs are the elements of the weight.
    /// let mut channels = [0.0; 16 * 16];
    /// (0..16).for_each(|channel| channels[channel * 17] = 1.0);
    /// let error = Metrics::output_error_percent(&weight, &packed, &channels)?;
    /// assert!((error - Metrics::of(&weight, &packed)?.weight_error_percent).abs() < 1e-6);
    /// # Ok::<(), burn_fp4_search::SearchError>(())
    /// ```
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

/// Sums the squares of the errors of a layer's outputs, and of the outputs: `tr(E H E^T)` for the
/// errors E of its weight, and `tr(W H W^T)` for the weight W, given the Gram matrix H of its
/// inputs. Products are in f64.
///
/// ```
/// use burn_fp4_search::formats::Fp4Format;
/// use burn_fp4_search::host::View;
/// use burn_fp4_search::{Gram, Method, squared_output_error};
///
/// let weight: Vec<f32> = (0..16).map(|at| at as f32).collect();
/// let gram = Gram::of(&[1.0; 16], 16)?;
/// let packed = Method::Amax.quantize(&weight, 1, 16, Fp4Format::NvFp4, 16, None)?;
/// let sums = squared_output_error(&weight, (&packed).into(), View::rows(1, 16), &gram)?;
/// assert_eq!(sums[1], f64::from(120 * 120), "the only output is the sum of all");
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
///
/// # Errors
/// As [`host::squared_error`] and [`Gram::squared_outputs`].
pub fn squared_output_error<T: HostElement>(
    values: &[T],
    packed: PackedView<'_>,
    view: View,
    gram: &Gram,
) -> Result<[f64; 2], SearchError> {
    check_length("values", view.len(), values.len())?;
    let rows = dense_rows(values, view);
    let mut errors = vec![0.0; rows.len()];
    host::dequantize(packed, View::rows(view.packed_rows(), view.axis), &mut errors)?;
    errors.iter_mut().zip(&rows).for_each(|(value, exact)| *value -= exact);
    let outputs = gram.squared_outputs(&rows)?;
    // Codes and scales can stand for values beyond the range of f32.
    let finite = errors.iter().all(|error| error.is_finite());
    Ok([if finite { gram.squared_outputs(&errors)? } else { f64::INFINITY }, outputs])
}

fn errors(weight: &[f32], packed: &Packed) -> Result<Vec<f32>, SearchError> {
    let quantized = packed.dequantize();
    check_length("weight", quantized.len(), weight.len())?;
    Ok(quantized.iter().zip(weight).map(|(quantized, weight)| quantized - weight).collect())
}

fn ratio(error: f64, energy: f64) -> f64 {
    if error == 0.0 { 0.0 } else { (error / energy).sqrt() }
}
