//! What activations say about the inputs of a layer.

use burn_fp4_formats::{FormatError, check_length};
use faer::linalg::matmul::triangular::{self, BlockStructure};
use faer::{Accum, MatMut, MatRef, Par};

use crate::importance::check_symmetric;
use crate::{BlockHessians, SearchError};

/// `X^T X` of activations `X [rows, channels]`, summed in f64 over as many batches as are added.
#[derive(Debug, Clone, PartialEq)]
pub struct Gram {
    channels: usize,
    rows: usize,
    /// `[channels, channels]`, symmetric.
    values: Vec<f64>,
}

/// Rows widened to f64 at a time.
const CHUNK: usize = 1024;

impl Gram {
    /// Of no activations yet.
    pub fn new(channels: usize) -> Self {
        Self { channels, rows: 0, values: vec![0.0; channels * channels] }
    }

    /// Of activations `[rows, channels]`.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn of(activations: &[f32], channels: usize) -> Result<Self, SearchError> {
        let mut gram = Self::new(channels);
        gram.add(activations)?;
        Ok(gram)
    }

    /// Takes a matrix `[channels, channels]` that was summed elsewhere over `rows` activations.
    ///
    /// # Errors
    /// [`SearchError::Format`] for a wrong length, [`SearchError::Hessian`] for an element that is not
    /// finite, negative on the diagonal or not symmetric.
    pub fn from_values(
        values: Vec<f64>,
        channels: usize,
        rows: usize,
    ) -> Result<Self, SearchError> {
        check_length("Gram matrix", channels * channels, values.len())?;
        check_symmetric(&values, channels, None)?;
        Ok(Self { channels, rows, values })
    }

    /// Adds activations `[rows, channels]`.
    ///
    /// # Errors
    /// [`SearchError::Activation`] naming the first value that is not finite; [`SearchError::Format`] if
    /// the slice holds no whole number of rows. Nothing is added then.
    pub fn add(&mut self, activations: &[f32]) -> Result<(), SearchError> {
        let channels = self.channels;
        check_activations(activations, channels)?;
        for chunk in activations.chunks(CHUNK * channels.max(1)) {
            let wide: Vec<f64> = chunk.iter().map(|&value| value.into()).collect();
            let rows = wide.len() / channels;
            let x = MatRef::from_row_major_slice(&wide, rows, channels);
            // The lower half is enough.
            let gram = MatMut::from_row_major_slice_mut(&mut self.values, channels, channels);
            triangular::matmul(
                gram,
                BlockStructure::TriangularLower,
                Accum::Add,
                x.transpose(),
                BlockStructure::Rectangular,
                x,
                BlockStructure::Rectangular,
                1.0,
                Par::rayon(0),
            );
            self.rows += rows;
        }
        for row in 0..channels {
            for col in 0..row {
                self.values[col * channels + row] = self.values[row * channels + col];
            }
        }
        Ok(())
    }

    /// Adds what was summed over other activations.
    ///
    /// # Errors
    /// [`SearchError::Format`] for another number of channels.
    pub fn merge(&mut self, other: &Self) -> Result<(), SearchError> {
        check_length("channels", self.channels, other.channels)?;
        for (sum, value) in self.values.iter_mut().zip(&other.values) {
            *sum += value;
        }
        self.rows += other.rows;
        Ok(())
    }

    /// Input channels.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Activations that were added.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The matrix, `[channels, channels]`.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// The sum of squares of every channel.
    pub fn diagonal(&self) -> impl ExactSizeIterator<Item = f64> {
        (0..self.channels).map(|channel| self.values[channel * (self.channels + 1)])
    }

    /// The matrices along the diagonal, one for every block of channels.
    ///
    /// # Errors
    /// [`SearchError::Format`] if the blocks do not divide the channels.
    pub fn blocks(&self, block_size: usize) -> Result<BlockHessians, SearchError> {
        check_blocks(self.channels, block_size)?;
        let rows = (0..self.channels).flat_map(|channel| {
            let start = channel * self.channels + channel / block_size * block_size;
            &self.values[start..start + block_size]
        });
        BlockHessians::new(rows.map(|&value| value as f32).collect(), block_size)
    }
}

impl BlockHessians {
    /// `X^T X` of activations `[rows, channels]` within every block of channels, summed in f64.
    ///
    /// # Errors
    /// [`SearchError::Activation`] naming the first value that is not finite; [`SearchError::Format`] if
    /// the blocks do not divide the channels, or the slice holds no whole number of rows.
    pub fn of(
        activations: &[f32],
        channels: usize,
        block_size: usize,
    ) -> Result<Self, SearchError> {
        check_blocks(channels, block_size)?;
        check_activations(activations, channels)?;
        let square = block_size * block_size;
        let mut sums = vec![0.0f64; channels * block_size];
        for row in activations.chunks_exact(channels) {
            for (block, sums) in row.chunks_exact(block_size).zip(sums.chunks_exact_mut(square)) {
                for (&left, sums) in block.iter().zip(sums.chunks_exact_mut(block_size)) {
                    for (&right, sum) in block.iter().zip(sums) {
                        *sum += f64::from(left) * f64::from(right);
                    }
                }
            }
        }
        Self::new(sums.into_iter().map(|sum| sum as f32).collect(), block_size)
    }
}

/// # Errors
/// [`SearchError::Format`] if the blocks do not divide the channels.
pub(crate) fn check_blocks(channels: usize, block_size: usize) -> Result<(), SearchError> {
    if block_size > 0 && channels.is_multiple_of(block_size) {
        Ok(())
    } else {
        Err(FormatError::Indivisible { cols: channels, block_size }.into())
    }
}

/// # Errors
/// As [`Gram::add`].
pub(crate) fn check_activations(activations: &[f32], channels: usize) -> Result<(), SearchError> {
    if channels == 0 || !activations.len().is_multiple_of(channels) {
        let expected = activations.len() / channels.max(1) * channels;
        let (what, found) = ("activations", activations.len());
        return Err(FormatError::Length { what, expected, found }.into());
    }
    match activations.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(at) => Err(SearchError::Activation {
            row: at / channels,
            channel: at % channels,
            found: activations[at],
        }),
    }
}
