//! What activations say about the inputs of a layer.

use burn_fp4_formats::{FormatError, check_length};
use faer::linalg::matmul::triangular::{self, BlockStructure};
use faer::{Accum, MatMut, MatRef, Par};
use rayon::prelude::*;

use crate::importance::check_symmetric;
use crate::{BlockHessians, GramTiles, SearchError};

/// `X^T X` of activations `X [rows, channels]`, summed in f64 over as many batches as are added: all of it, as GPTQ
/// needs it, or only the blocks along its diagonal, as the searches by Hessian do.
#[derive(Debug, Clone, PartialEq)]
pub struct Gram {
    channels: usize,
    /// Channels of a block; all of them if the matrix is whole.
    block_size: usize,
    rows: usize,
    amax: f32,
    /// `[blocks, block_size, block_size]`, symmetric.
    values: Vec<f64>,
}

/// Rows widened to f64 at a time.
const CHUNK: usize = 1024;

impl Gram {
    /// The whole matrix, of no activations yet.
    pub fn new(channels: usize) -> Self {
        let values = vec![0.0; channels * channels];
        Self { channels, block_size: channels, rows: 0, amax: 0.0, values }
    }

    /// The blocks along the diagonal, of no activations yet.
    ///
    /// # Errors
    /// [`SearchError::Format`] if they do not divide the channels.
    pub fn in_blocks(channels: usize, block_size: usize) -> Result<Self, SearchError> {
        check_blocks(channels, block_size)?;
        let values = vec![0.0; channels * block_size];
        Ok(Self { channels, block_size, rows: 0, amax: 0.0, values })
    }

    /// The whole matrix of activations `[rows, channels]`.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn of(activations: &[f32], channels: usize) -> Result<Self, SearchError> {
        let mut gram = Self::new(channels);
        gram.add(activations)?;
        Ok(gram)
    }

    /// Takes blocks `[channels / block_size, block_size, block_size]` that were summed elsewhere over `rows`
    /// activations whose largest magnitude is `amax`; one block of all channels is the whole matrix.
    ///
    /// # Errors
    /// [`SearchError::Format`] for a wrong length or blocks that do not divide the channels, [`SearchError::Hessian`]
    /// for an element that is not finite, negative on the diagonal or not symmetric.
    pub fn from_values(
        values: Vec<f64>,
        channels: usize,
        block_size: usize,
        rows: usize,
        amax: f32,
    ) -> Result<Self, SearchError> {
        if block_size != channels {
            check_blocks(channels, block_size)?;
        }
        check_length("Gram matrix", channels * block_size, values.len())?;
        let whole = block_size == channels;
        for (block, matrix) in values.chunks_exact((block_size * block_size).max(1)).enumerate() {
            check_symmetric(matrix, block_size, (!whole).then_some(block))?;
        }
        Ok(Self { channels, block_size, rows, amax, values })
    }

    /// Takes blocks as [`from_values`](Self::from_values) does, from the tiles `[SIDE, SIDE]` that hold them.
    ///
    /// # Errors
    /// As there.
    pub fn from_tiles(
        tiles: &[&[f64]],
        layout: GramTiles,
        block_size: usize,
        rows: usize,
        amax: f32,
    ) -> Result<Self, SearchError> {
        check_length("tiles of a Gram matrix", layout.count(), tiles.len())?;
        for tile in tiles {
            let expected = GramTiles::SIDE * GramTiles::SIDE;
            check_length("tile of a Gram matrix", expected, tile.len())?;
        }
        let blocks = layout.blocks(tiles, block_size);
        Self::from_values(blocks, layout.channels(), block_size, rows, amax)
    }

    /// Adds activations `[rows, channels]`.
    ///
    /// # Errors
    /// [`SearchError::Activation`] naming the first value that is not finite; [`SearchError::Format`] if
    /// the slice holds no whole number of rows. Nothing is added then.
    pub fn add(&mut self, activations: &[f32]) -> Result<(), SearchError> {
        check_activations(activations, self.channels)?;
        self.rows += activations.len() / self.channels;
        self.amax = activations.iter().fold(self.amax, |amax, x| amax.max(x.abs()));
        if self.is_whole() {
            self.add_whole(activations);
        } else {
            self.add_blocks(activations);
        }
        Ok(())
    }

    fn add_whole(&mut self, activations: &[f32]) {
        let channels = self.channels;
        for chunk in activations.chunks(CHUNK * channels) {
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
        }
        for row in 0..channels {
            for col in 0..row {
                self.values[col * channels + row] = self.values[row * channels + col];
            }
        }
    }

    fn add_blocks(&mut self, activations: &[f32]) {
        let (channels, size) = (self.channels, self.block_size);
        self.values.par_chunks_exact_mut(size * size).enumerate().for_each(|(block, sums)| {
            for row in activations.chunks_exact(channels) {
                let row = &row[block * size..][..size];
                for (&left, sums) in row.iter().zip(sums.chunks_exact_mut(size)) {
                    for (&right, sum) in row.iter().zip(sums) {
                        *sum += f64::from(left) * f64::from(right);
                    }
                }
            }
        });
    }

    /// Adds what was summed over other activations.
    ///
    /// # Errors
    /// [`SearchError::Format`] for another number of channels, or blocks of another size.
    pub fn merge(&mut self, other: &Self) -> Result<(), SearchError> {
        check_length("channels", self.channels, other.channels)?;
        check_length("channels of a block", self.block_size, other.block_size)?;
        self.values.par_iter_mut().zip(&other.values).for_each(|(sum, value)| *sum += value);
        self.rows += other.rows;
        self.amax = self.amax.max(other.amax);
        Ok(())
    }

    /// Input channels.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Channels of a block along the diagonal; all of them if the matrix is whole.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Whether all of the matrix is known.
    pub fn is_whole(&self) -> bool {
        self.block_size == self.channels
    }

    /// Whether blocks of this size along the diagonal are known.
    pub fn has_blocks(&self, block_size: usize) -> bool {
        block_size > 0 && self.block_size.is_multiple_of(block_size)
    }

    /// Activations that were added.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Their largest magnitude: what a tensor scale for them is made from.
    pub fn amax(&self) -> f32 {
        self.amax
    }

    /// The blocks, `[channels / block_size, block_size, block_size]`.
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// [`values`](Self::values), rounded.
    pub fn to_f32(&self) -> Vec<f32> {
        self.values.par_iter().map(|&value| value as f32).collect()
    }

    /// The sum of squares of every channel.
    pub fn diagonal(&self) -> impl ExactSizeIterator<Item = f64> {
        let size = self.block_size;
        (0..self.channels).map(move |channel| self.values[channel * size + channel % size])
    }

    /// The matrices along the diagonal, one for every block of channels.
    ///
    /// # Errors
    /// [`SearchError::Format`] if the blocks do not divide those that are known.
    pub fn blocks(&self, block_size: usize) -> Result<BlockHessians, SearchError> {
        check_blocks(self.block_size, block_size)?;
        let size = self.block_size;
        let rows = (0..self.channels).flat_map(|channel| {
            let start = channel * size + channel % size / block_size * block_size;
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
        let mut gram = Gram::in_blocks(channels, block_size)?;
        gram.add(activations)?;
        gram.blocks(block_size)
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
