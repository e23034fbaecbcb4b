//! [`Gram`]: sums of products of the inputs of a layer.

use std::borrow::Cow;

use burn_fp4_formats::{FormatError, check_length};
use rayon::prelude::*;

use crate::error::SearchError;
use crate::gram_layout::GramLayout;
use crate::hadamard::Hadamard;
use crate::importance::{BlockHessians, check_symmetric};
use crate::matrix::{Matrix, Real, add_product};

/// Holds `X^T X` of activations `X [rows, channels]`, over any number of batches: the whole
/// matrix, which GPTQ needs, or only the blocks along its diagonal, which the searches by Hessian
/// need. Sums are in f64; of a whole matrix products of [1024](GramLayout::F32_ROWS) activations
/// are first summed in f32, unless its range is too small for them.
///
/// ```
/// use burn_fp4_search::Gram;
///
/// let mut gram = Gram::of(&[1.0, 2.0], 2)?; // an activation of two channels
/// gram.merge(&Gram::of(&[3.0, 0.0], 2)?)?; // of another batch
/// assert_eq!((gram.rows(), gram.amax(), gram.get(0, 1)), (2, 3.0, Some(2.0)));
/// assert!(gram.diagonal().eq([10.0, 4.0]));
/// assert_eq!((gram.channels(), gram.tokens()), (2, 2)); // neither activation is all zero
/// assert!(gram.is_whole() && gram.has_blocks(1));
/// assert_eq!(gram.blocks(2)?.values(), [10.0, 2.0, 2.0, 4.0]);
/// // Weights [1, 1] make 3 of both activations.
/// assert_eq!(gram.squared_outputs(&[1.0, 1.0])?, 9.0 + 9.0);
///
/// let mut blocks = Gram::in_blocks(4, 2)?;
/// blocks.add(&[1.0, 2.0, 3.0, 4.0])?;
/// assert_eq!((blocks.get(2, 3), blocks.get(1, 2)), (Some(12.0), None));
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Gram {
    layout: GramLayout,
    rows: usize,
    tokens: usize,
    amax: f32,
    /// Tiles of the layout, with both halves of the tiles on the diagonal.
    values: Vec<f64>,
    /// [`drift`](Self::drift), if it is known.
    drift: Option<Vec<f32>>,
}

impl Gram {
    /// Creates the whole matrix, of no activations yet.
    #[must_use]
    pub fn new(channels: usize) -> Self {
        Self::of_nothing(GramLayout::compact(channels, channels))
    }

    /// Creates the blocks along the diagonal, of no activations yet.
    ///
    /// # Errors
    /// [`SearchError::Format`] if the blocks do not divide the channels.
    pub fn in_blocks(channels: usize, block_size: usize) -> Result<Self, SearchError> {
        check_blocks(channels, block_size)?;
        Ok(Self::of_nothing(GramLayout::compact(channels, block_size)))
    }

    fn of_nothing(layout: GramLayout) -> Self {
        let values = vec![0.0; layout.count() * layout.tile_len()];
        Self { layout, rows: 0, tokens: 0, amax: 0.0, values, drift: None }
    }

    /// Sums the whole matrix of activations `[rows, channels]`.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn of(activations: &[f32], channels: usize) -> Result<Self, SearchError> {
        let mut gram = Self::new(channels);
        gram.add(activations)?;
        Ok(gram)
    }

    /// Takes blocks `[channels / block_size, block_size, block_size]` that were summed elsewhere
    /// over `rows` activations with the largest magnitude `amax`. One block of all channels is the
    /// whole matrix. All activations count as [`tokens`](Self::tokens).
    ///
    /// ```
    /// use burn_fp4_search::Gram;
    ///
    /// let gram = Gram::from_values(&[10.0, 2.0, 2.0, 4.0], 2, 2, 2, 3.0)?;
    /// assert_eq!(gram, Gram::of(&[1.0, 2.0, 3.0, 0.0], 2)?);
    /// // The same from its own values, with and without a copy.
    /// let copied = Gram::from_tiles(&[gram.values()], gram.layout(), 2, 2, 3.0)?;
    /// let moved = Gram::from_own_tiles(gram.values().to_vec(), 2, 2, 2, 3.0)?;
    /// assert!(copied == gram && moved == gram);
    /// assert_eq!(gram.with_tokens(1)?.tokens(), 1); // if one of the two was all zero
    /// # Ok::<(), burn_fp4_search::SearchError>(())
    /// ```
    ///
    /// # Errors
    /// [`SearchError::Format`] for a wrong length or blocks that do not divide the channels,
    /// [`SearchError::Hessian`] for an element that is not finite, negative on the diagonal or not
    /// symmetric.
    pub fn from_values(
        values: &[f64],
        channels: usize,
        block_size: usize,
        rows: usize,
        amax: f32,
    ) -> Result<Self, SearchError> {
        check_whole_or_blocks(channels, block_size)?;
        check_length("Gram matrix", channels * block_size, values.len())?;
        let whole = block_size == channels;
        for (block, matrix) in values.chunks_exact((block_size * block_size).max(1)).enumerate() {
            check_symmetric(matrix, block_size, (!whole).then_some(block))?;
        }
        let mut gram = Self::of_nothing(GramLayout::compact(channels, block_size));
        gram.fill(|row, col| values[row * block_size + col % block_size]);
        Ok(Self { rows, tokens: rows, amax, ..gram })
    }

    /// Takes the same blocks as [`from_values`](Self::from_values) from the tiles that hold them.
    ///
    /// # Errors
    /// [`SearchError::Format`] for another number of tiles, a wrong length of one, or blocks that
    /// do not divide the channels or are not held; [`SearchError::Hessian`] for an element that is
    /// not finite or negative on the diagonal.
    pub fn from_tiles(
        tiles: &[&[f64]],
        layout: GramLayout,
        block_size: usize,
        rows: usize,
        amax: f32,
    ) -> Result<Self, SearchError> {
        let channels = layout.channels();
        check_whole_or_blocks(channels, block_size)?;
        check_length("tiles of a Gram matrix", layout.count(), tiles.len())?;
        for tile in tiles {
            check_length("tile of a Gram matrix", layout.tile_len(), tile.len())?;
        }
        if layout == GramLayout::compact(channels, block_size) {
            let mut values = vec![0.0; layout.count() * layout.tile_len()];
            // On all threads: the first touch of new memory takes longer than the copy.
            let own = values.par_chunks_exact_mut(layout.tile_len()).zip(tiles);
            own.for_each(|(own, tile)| own.copy_from_slice(tile));
            return Self::from_own_tiles(values, channels, block_size, rows, amax);
        }
        if layout.is_diagonal() && channels > layout.side() {
            check_blocks(layout.side(), block_size)?;
        }
        let mut gram = Self::of_nothing(GramLayout::compact(channels, block_size));
        gram.fill(|row, col| {
            let (tile, at) = layout.place(row, col).expect("tiles hold whole blocks");
            tiles[tile][at]
        });
        gram.check_elements()?;
        Ok(Self { rows, tokens: rows, amax, ..gram })
    }

    /// Takes the result of [`values`](Self::values) without a copy.
    ///
    /// # Errors
    /// As [`from_tiles`](Self::from_tiles).
    pub fn from_own_tiles(
        values: Vec<f64>,
        channels: usize,
        block_size: usize,
        rows: usize,
        amax: f32,
    ) -> Result<Self, SearchError> {
        check_whole_or_blocks(channels, block_size)?;
        let layout = GramLayout::compact(channels, block_size);
        let expected = layout.count().saturating_mul(layout.tile_len());
        check_length("Gram matrix", expected, values.len())?;
        let mut gram = Self { layout, rows, tokens: rows, amax, values, drift: None };
        gram.mirror();
        gram.check_elements()?;
        Ok(gram)
    }

    /// Sets the number of activations that are not all zero, if they were counted elsewhere.
    ///
    /// # Errors
    /// [`SearchError::Format`] if there are fewer activations.
    pub fn with_tokens(self, tokens: usize) -> Result<Self, SearchError> {
        check_length("tokens of a Gram matrix", tokens.min(self.rows), tokens)?;
        Ok(Self { tokens, ..self })
    }

    /// Sets the [drift](Self::drift) of the activations, `[channels, channels]`.
    ///
    /// ```
    /// use burn_fp4_search::Gram;
    ///
    /// // An input [1, 2] that is [1.5, 2] if no layer is quantized.
    /// let gram = Gram::of(&[1.0, 2.0], 2)?.with_drift(vec![0.5, 0.0, 1.0, 0.0])?;
    /// assert_eq!(gram.drift().unwrap()[2], 2.0 * 0.5);
    /// # Ok::<(), burn_fp4_search::SearchError>(())
    /// ```
    ///
    /// # Errors
    /// [`SearchError::Format`] for a wrong length, or if the matrix is not whole;
    /// [`SearchError::Drift`] for a value that is not finite.
    pub fn with_drift(self, drift: Vec<f32>) -> Result<Self, SearchError> {
        let channels = self.channels();
        check_length("channels of a block", channels, self.block_size())?;
        check_length("drift", channels * channels, drift.len())?;
        if let Some(&found) = drift.iter().find(|value| !value.is_finite()) {
            return Err(SearchError::Drift { found });
        }
        Ok(Self { drift: Some(drift), ..self })
    }

    /// Adds activations `[rows, channels]`.
    ///
    /// # Errors
    /// [`SearchError::Activation`] naming the first value that is not finite;
    /// [`SearchError::Format`] if the slice does not hold a whole number of rows. Then nothing is
    /// added.
    pub fn add(&mut self, activations: &[f32]) -> Result<(), SearchError> {
        let channels = self.channels();
        check_activations(activations, channels)?;
        self.rows += activations.len() / channels;
        let rows = activations.chunks_exact(channels);
        self.tokens += rows.filter(|row| row.iter().any(|x| *x != 0.0)).count();
        let amax = activations.iter().fold(0.0f32, |amax, x| amax.max(x.abs()));
        self.amax = self.amax.max(amax);
        let square = amax * amax;
        let fits_f32 = square >= f32::MIN_POSITIVE / f32::EPSILON
            && (square * GramLayout::F32_ROWS as f32).is_finite();
        match (self.is_whole(), fits_f32) {
            (false, _) => self.add_blocks(activations),
            (true, true) => self.add_whole(activations, |chunk| Cow::Borrowed(chunk)),
            (true, false) => self.add_whole(activations, widened),
        }
        Ok(())
    }

    /// Adds activations that are summed in `T` at first.
    fn add_whole<T: Real>(
        &mut self,
        activations: &[f32],
        converted: impl Fn(&[f32]) -> Cow<'_, [T]>,
    ) {
        let channels = self.channels();
        for chunk in activations.chunks(GramLayout::F32_ROWS * channels) {
            let values = converted(chunk);
            let x = Matrix::row_major(&values, values.len() / channels, channels);
            add_to_tiles(&mut self.values, self.layout, 0, x);
        }
        self.mirror();
    }

    fn add_blocks(&mut self, activations: &[f32]) {
        let (channels, size) = (self.channels(), self.layout.side());
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

    /// Sets every element, given a function of row and column that is called with row <= column.
    fn fill(&mut self, element: impl Fn(usize, usize) -> f64 + Sync) {
        let (layout, side) = (self.layout, self.layout.side());
        let tiles = self.values.par_chunks_exact_mut(layout.tile_len()).enumerate();
        tiles.for_each(|(tile, values)| {
            let (first_row, first_col) = layout.corner(tile);
            for (row, values) in (first_row..layout.channels()).zip(values.chunks_exact_mut(side)) {
                for (col, value) in (first_col..layout.channels()).zip(values) {
                    *value = element(row.min(col), row.max(col));
                }
            }
        });
    }

    /// Copies the upper halves of the tiles on the diagonal to their lower halves.
    fn mirror(&mut self) {
        let (layout, side) = (self.layout, self.layout.side());
        let tiles = self.values.par_chunks_exact_mut(layout.tile_len()).enumerate();
        let diagonal = tiles.filter(|(tile, _)| {
            let (row, col) = layout.corner(*tile);
            row == col
        });
        diagonal.for_each(|(_, values)| {
            for row in 0..side {
                for col in 0..row {
                    values[row * side + col] = values[col * side + row];
                }
            }
        });
    }

    /// Checks every element.
    ///
    /// # Errors
    /// [`SearchError::Hessian`] for an element that is not finite or negative on the diagonal.
    fn check_elements(&self) -> Result<(), SearchError> {
        let side = self.layout.side();
        let block = |channel: usize| (!self.is_whole()).then_some(channel / side);
        let tiles = self.values.par_chunks_exact(self.layout.tile_len()).enumerate();
        let bad = tiles.find_map_first(|(tile, values)| {
            let at = values.iter().position(|value| !value.is_finite())?;
            let (row, col) = self.layout.corner(tile);
            Some((row + at / side, col + at % side, values[at], "is not finite"))
        });
        let negative = || {
            let mut diagonal = self.diagonal().enumerate();
            let (channel, found) = diagonal.find(|(_, found)| *found < 0.0)?;
            Some((channel, channel, found, "is negative, on the diagonal"))
        };
        match bad.or_else(negative) {
            None => Ok(()),
            Some((row, col, found, problem)) => {
                Err(SearchError::Hessian { block: block(row), row, col, found, problem })
            }
        }
    }

    /// Adds sums over other activations. If only one of the two has a drift, the other counts as
    /// having none.
    ///
    /// # Errors
    /// [`SearchError::Format`] for another number of channels, or blocks of another size.
    pub fn merge(&mut self, other: &Self) -> Result<(), SearchError> {
        check_length("channels", self.channels(), other.channels())?;
        check_length("channels of a block", self.block_size(), other.block_size())?;
        self.values.par_iter_mut().zip(&other.values).for_each(|(sum, value)| *sum += value);
        match (&mut self.drift, &other.drift) {
            (Some(sums), Some(drift)) => {
                sums.par_iter_mut().zip(drift).for_each(|(sum, value)| *sum += value);
            }
            (own, Some(drift)) => *own = Some(drift.clone()),
            (_, None) => {}
        }
        self.rows += other.rows;
        self.tokens += other.tokens;
        self.amax = self.amax.max(other.amax);
        Ok(())
    }

    /// Number of input channels.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.layout.channels()
    }

    /// Number of channels of a block along the diagonal; all channels if the matrix is whole.
    #[must_use]
    pub fn block_size(&self) -> usize {
        if self.is_whole() { self.channels() } else { self.layout.side() }
    }

    /// Returns true if the whole matrix is known.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        !self.layout.is_diagonal()
    }

    /// Returns true if blocks of this size along the diagonal are known.
    #[must_use]
    pub fn has_blocks(&self, block_size: usize) -> bool {
        block_size > 0 && self.block_size().is_multiple_of(block_size)
    }

    /// Number of activations added.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of activations that are not all zero. Layers that choose their inputs, such as
    /// experts, may mask the others with zeros: this counts the inputs that a layer was chosen for.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Largest magnitude of the activations, from which their tensor scale is computed.
    #[must_use]
    pub fn amax(&self) -> f32 {
        self.amax
    }

    /// Returns the sum of products of two channels; `None` if it is not known.
    #[must_use]
    pub fn get(&self, row: usize, col: usize) -> Option<f64> {
        let (tile, at) = self.layout.place(row, col)?;
        Some(self.values[tile * self.layout.tile_len() + at])
    }

    /// Returns an element that the constructors guarantee to be known; see [`get`](Self::get).
    pub(crate) fn known(&self, row: usize, col: usize) -> f64 {
        self.get(row, col).expect("of a block that is known")
    }

    /// Returns the layout of [`values`](Self::values).
    #[must_use]
    pub fn layout(&self) -> GramLayout {
        self.layout
    }

    /// Returns the tiles of [`layout`](Self::layout): blocks `[channels / block_size, block_size,
    /// block_size]`, or the upper half of a whole matrix.
    #[must_use]
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// Rounds [`values`](Self::values) to f32.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        self.values.par_iter().map(|&value| value as f32).collect()
    }

    /// Returns `X^T (Y - X)` `[channels, channels]`, if it is known: X are the inputs of a layer
    /// behind quantized layers, Y the same behind dense ones.
    #[must_use]
    pub fn drift(&self) -> Option<&[f32]> {
        self.drift.as_deref()
    }

    /// Iterates over the sums of squares of the channels.
    #[must_use]
    pub fn diagonal(&self) -> impl ExactSizeIterator<Item = f64> {
        (0..self.channels()).map(|channel| self.known(channel, channel))
    }

    /// Sums the squares of the outputs of rows `[rows, channels]`: `tr(W H W^T)` for rows W and
    /// this matrix H. In f64, because a good search leaves its errors where H is small: in f32 the
    /// rounding errors of the terms that cancel would be larger than the result. The rounding of H
    /// itself remains; the sum is 0 if it would be negative for that.
    ///
    /// # Errors
    /// [`SearchError::Format`] if the slice does not hold a whole number of rows, or the matrix is
    /// not whole; [`SearchError::Activation`] naming the first value that is not finite.
    pub fn squared_outputs(&self, rows: &[f32]) -> Result<f64, SearchError> {
        check_length("channels of a block", self.channels(), self.block_size())?;
        // `tr(W H W^T)` is the sum of the products of the elements of `W^T W` and H.
        let channels = self.channels();
        check_activations(rows, channels)?;
        let mut products = Self::new(channels);
        products.add_whole(rows, widened);
        let len = self.layout.tile_len();
        let tiles = self.values.par_chunks_exact(len).zip(products.values.par_chunks_exact(len));
        let sums: Vec<f64> = tiles
            .enumerate()
            .map(|(tile, (own, other))| {
                let sum: f64 = own.iter().zip(other).map(|(own, other)| own * other).sum();
                let (row, col) = self.layout.corner(tile);
                // Tiles off the diagonal stand for both halves.
                if row == col { sum } else { 2.0 * sum }
            })
            .collect();
        let sum: f64 = sums.iter().sum();
        Ok(if sum < 0.0 { 0.0 } else { sum })
    }

    /// Returns the matrix of the inputs after a Hadamard transform, `T^T H T`. The
    /// [`amax`](Self::amax) stays that of the inputs before it.
    ///
    /// ```
    /// use burn_fp4_search::{Gram, Hadamard};
    ///
    /// let gram = Gram::of(&[1.0; 16], 16)?.transformed(Hadamard::of_size(16)?)?;
    /// // All sixteen inputs are 1; transformed, the first is 4 and the others are 0.
    /// assert_eq!((gram.get(0, 0), gram.get(0, 1)), (Some(16.0), Some(0.0)));
    /// # Ok::<(), burn_fp4_search::SearchError>(())
    /// ```
    ///
    /// # Errors
    /// [`SearchError::Format`] if the size of the transform does not divide the channels, or the
    /// known blocks.
    pub fn transformed(mut self, hadamard: Hadamard) -> Result<Self, SearchError> {
        let (size, side) = (hadamard.size(), self.layout.side());
        check_blocks(self.channels(), size)?;
        check_blocks(self.block_size(), size)?;
        let values = self.values.par_chunks_exact_mut(self.layout.tile_len());
        values.for_each(|tile| transform_squares(tile, side, hadamard));
        self.mirror();
        if let Some(drift) = &mut self.drift {
            let channels = self.layout.channels();
            let rows = drift.par_chunks_exact_mut(size * channels);
            rows.for_each(|rows| transform_squares(rows, channels, hadamard));
        }
        Ok(self)
    }

    /// Returns the matrices along the diagonal, one for every block of channels.
    ///
    /// # Errors
    /// [`SearchError::Format`] if the blocks do not divide the known ones.
    pub fn blocks(&self, block_size: usize) -> Result<BlockHessians, SearchError> {
        check_blocks(self.block_size(), block_size)?;
        let values = (0..self.channels()).flat_map(|channel| {
            let first = channel / block_size * block_size;
            (first..first + block_size).map(move |other| self.known(channel, other) as f32)
        });
        BlockHessians::new(values.collect(), block_size)
    }
}

fn widened(values: &[f32]) -> Cow<'_, [f64]> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// Adds `X^T X` of some activations, summed in `T`, to tiles of a layout from tile `first` on.
/// Tiles below the diagonal are not computed, so that the work is half of that of a product.
pub(crate) fn add_to_tiles<T: Real>(
    tiles: &mut [f64],
    layout: GramLayout,
    first: usize,
    x: Matrix<'_, T>,
) {
    let (side, channels) = (layout.side(), layout.channels());
    let mut columns = Vec::new();
    let mut rest = tiles;
    for (column, rows) in layout.columns(first..first + rest.len() / layout.tile_len()) {
        let (tiles, after) = rest.split_at_mut(rows.len() * layout.tile_len());
        columns.push((column, rows, tiles));
        rest = after;
    }
    columns.into_par_iter().for_each(|(column, rows, sums)| {
        let part = |from: usize, to: usize| {
            x.columns((from * side).min(channels)..(to * side).min(channels))
        };
        let mut products = vec![T::default(); sums.len()];
        let left = part(rows.start, rows.end).transposed();
        add_product(&mut products, side, T::ONE, left, part(column, column + 1));
        for (sum, product) in sums.iter_mut().zip(products) {
            *sum += product.into();
        }
    });
}

/// Replaces every square `[size, size]` M of a matrix `[.., cols]` by `T^T M T`.
fn transform_squares<T: Real>(matrix: &mut [T], cols: usize, hadamard: Hadamard) {
    let size = hadamard.size();
    let mut square = vec![0.0; size * size];
    for row in (0..matrix.len() / cols).step_by(size) {
        for col in (0..cols).step_by(size) {
            let place = |at: usize| (row + at / size) * cols + col + at % size;
            (0..size * size).for_each(|at| square[at] = matrix[place(at)].into());
            transform_square(&mut square, hadamard);
            (0..size * size).for_each(|at| matrix[place(at)] = T::of(square[at]));
        }
    }
}

/// Replaces a matrix M `[size, size]` by `T^T M T`.
fn transform_square(square: &mut [f64], hadamard: Hadamard) {
    let size = hadamard.size();
    let negative = |at: usize| size == 16 && hadamard.signs() >> at & 1 == 1;
    for at in (0..size * size).filter(|at| negative(at / size) != negative(at % size)) {
        square[at] = -square[at];
    }
    // Butterflies of rows, then of columns.
    for step in [size, 1] {
        for line in 0..size {
            let first = line * (size + 1 - step);
            let mut half = 1;
            while half < size {
                for left in (0..size).filter(|at| at & half == 0) {
                    let [left, right] = [left, left + half].map(|at| first + at * step);
                    let (a, b) = (square[left], square[right]);
                    (square[left], square[right]) = (a + b, a - b);
                }
                half *= 2;
            }
        }
    }
    square.iter_mut().for_each(|value| *value /= size as f64);
}

impl BlockHessians {
    /// Sums `X^T X` of activations `[rows, channels]` within every block of channels, in f64.
    ///
    /// # Errors
    /// [`SearchError::Activation`] naming the first value that is not finite;
    /// [`SearchError::Format`] if the blocks do not divide the channels, or the slice does not hold
    /// a whole number of rows.
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

/// Checks blocks, or one block of all channels.
///
/// # Errors
/// As [`check_blocks`], unless there is one block of all channels.
fn check_whole_or_blocks(channels: usize, block_size: usize) -> Result<(), SearchError> {
    if block_size == channels { Ok(()) } else { check_blocks(channels, block_size) }
}

/// Checks that blocks divide the channels.
///
/// # Errors
/// [`SearchError::Format`] if they do not.
pub(crate) fn check_blocks(channels: usize, block_size: usize) -> Result<(), SearchError> {
    if block_size > 0 && channels.is_multiple_of(block_size) {
        Ok(())
    } else {
        Err(FormatError::Indivisible { cols: channels, block_size }.into())
    }
}

/// Checks that activations are whole rows of finite values.
///
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squares_beyond_the_range_of_f32_are_summed() {
        for exponent in [-90, 90] {
            let value = 2f32.powi(exponent);
            let gram = Gram::of(&[value, 3.0 * value], 2).unwrap();
            let square = f64::from(value).powi(2);
            assert_eq!(
                [(0, 0), (0, 1), (1, 1)].map(|(row, col)| gram.get(row, col)),
                [Some(square), Some(3.0 * square), Some(9.0 * square),]
            );
        }
    }

    /// Sums of integers, for which no order of summation matters.
    #[test]
    fn however_it_is_given_it_is_the_same() {
        for (channels, block_size) in
            [(3, 3), (128, 128), (129, 129), (300, 300), (128, 16), (320, 32), (300, 100)]
        {
            let rows = if channels == 3 { GramLayout::F32_ROWS + 7 } else { 5 };
            let x: Vec<f32> = (0..rows * channels).map(|at| (at * 7 % 11) as f32 - 5.0).collect();
            let mut gram = match block_size == channels {
                true => Gram::new(channels),
                false => Gram::in_blocks(channels, block_size).unwrap(),
            };
            gram.add(&x[..2 * channels]).unwrap();
            gram.add(&x[2 * channels..]).unwrap();
            let sum = |row: usize, col: usize| -> f64 {
                x.chunks(channels).map(|x| f64::from(x[row] * x[col])).sum()
            };
            let mut squares = Vec::new();
            for row in 0..channels {
                for col in 0..channels {
                    let known = row / block_size == col / block_size;
                    assert_eq!(gram.get(row, col), known.then(|| sum(row, col)), "{row}, {col}");
                    squares.extend(known.then(|| sum(row, col)));
                }
            }
            let (rows, amax) = (gram.rows(), gram.amax());
            let found = Gram::from_values(&squares, channels, block_size, rows, amax).unwrap();
            assert_eq!(found, gram);
            // A layout of devices, with arbitrary values below the diagonal.
            let layout = GramLayout::of_device(channels, block_size);
            let mut tiles = vec![vec![0.0; layout.tile_len()]; layout.count()];
            for (tile, values) in tiles.iter_mut().enumerate() {
                let (first_row, first_col) = layout.corner(tile);
                for (at, value) in values.iter_mut().enumerate() {
                    let (row, col) =
                        (first_row + at / layout.side(), first_col + at % layout.side());
                    if row.max(col) < channels {
                        *value = if row <= col { sum(row, col) } else { f64::NAN };
                    }
                }
            }
            let own = |values| Gram::from_own_tiles(values, channels, block_size, rows, amax);
            assert_eq!(own(gram.values().to_vec()).unwrap(), gram);
            assert!(matches!(own(vec![1.0]), Err(SearchError::Format(_))));
            let tiles: Vec<_> = tiles.iter().map(Vec::as_slice).collect();
            let from_tiles = |tiles| Gram::from_tiles(tiles, layout, block_size, rows, amax);
            assert_eq!(from_tiles(&tiles).unwrap(), gram);
            assert!(matches!(from_tiles(&tiles[1..]), Err(SearchError::Format(_))));
        }
    }

    /// Sums of integers, for which no order of summation matters.
    #[test]
    fn squares_of_outputs_are_those_of_the_products_with_the_activations() {
        for channels in [3, 128, 300] {
            let integers = |count: usize, seed: usize| -> Vec<f32> {
                (0..count).map(|at| (at * seed % 11) as f32 - 5.0).collect()
            };
            let (x, rows) = (integers(7 * channels, 7), integers(4 * channels, 3));
            let gram = Gram::of(&x, channels).unwrap();
            let product = |x: &[f32], row: &[f32]| -> f32 {
                x.iter().zip(row).map(|(x, weight)| x * weight).sum()
            };
            let squares = x.chunks(channels).flat_map(|x| {
                rows.chunks(channels).map(move |row| f64::from(product(x, row)).powi(2))
            });
            assert_eq!(gram.squared_outputs(&rows), Ok(squares.sum()));
        }
        let blocks = Gram::in_blocks(32, 16).unwrap();
        assert!(matches!(blocks.squared_outputs(&[0.0; 32]), Err(SearchError::Format(_))));
    }

    #[test]
    fn rows_of_zeros_are_no_tokens() {
        let mut gram = Gram::of(&[0.0, 0.0, -0.0, 1.0, 0.0, 0.0], 2).unwrap();
        assert_eq!((gram.rows(), gram.tokens()), (3, 1));
        gram.merge(&Gram::of(&[2.0, 0.0], 2).unwrap()).unwrap();
        assert_eq!((gram.rows(), gram.tokens()), (4, 2));
        assert_eq!(gram.clone().with_tokens(3).unwrap().tokens(), 3);
        assert!(matches!(gram.with_tokens(5), Err(SearchError::Format(_))));
    }

    #[test]
    fn tiles_are_checked() {
        let layout = GramLayout::compact(300, 300);
        let mut tiles = vec![vec![1.0; layout.tile_len()]; layout.count()];
        let check = |tiles: &[Vec<f64>], block_size| {
            let tiles: Vec<_> = tiles.iter().map(Vec::as_slice).collect();
            Gram::from_tiles(&tiles, layout, block_size, 1, 1.0)
        };
        assert!(check(&tiles, 300).is_ok());
        assert!(matches!(check(&tiles, 7), Err(SearchError::Format(_))));
        tiles[3][2 * 128 + 5] = f64::INFINITY;
        let problem = "is not finite";
        let found = f64::INFINITY;
        let error = SearchError::Hessian { block: None, row: 2, col: 261, found, problem };
        assert_eq!(check(&tiles, 300), Err(error));
        tiles[3][2 * 128 + 5] = 1.0;
        tiles[5][129 * 3] = -1.0;
        let (problem, found) = ("is negative, on the diagonal", -1.0);
        let error = SearchError::Hessian { block: None, row: 259, col: 259, found, problem };
        assert_eq!(check(&tiles, 300), Err(error));
        // Tiles along the diagonal do not hold larger blocks.
        let narrow = GramLayout::of_device(320, 32);
        let tile = vec![1.0; narrow.tile_len()];
        let error = Gram::from_tiles(&[&tile[..]; 3], narrow, 160, 1, 1.0);
        assert!(matches!(error, Err(SearchError::Format(_))));
    }

    #[test]
    fn drifts_are_added_up_and_checked() {
        let gram = |drift: Option<[f32; 4]>| {
            let gram = Gram::of(&[1.0, 2.0], 2).unwrap();
            match drift {
                Some(drift) => gram.with_drift(drift.to_vec()).unwrap(),
                None => gram,
            }
        };
        let drift = Some([1.0, -2.0, 0.5, 4.0]);
        for (first, second, sum) in [
            (drift, drift, Some([2.0, -4.0, 1.0, 8.0])),
            (drift, None, drift),
            (None, drift, drift),
            (None, None, None),
        ] {
            let mut merged = gram(first);
            merged.merge(&gram(second)).unwrap();
            assert_eq!(merged.drift(), sum.as_ref().map(|sum| &sum[..]));
        }
        let short = gram(None).with_drift(vec![0.0; 3]).unwrap_err();
        assert!(matches!(short, SearchError::Format(_)), "{short}");
        let infinite = gram(None).with_drift(vec![0.0, f32::INFINITY, 0.0, 0.0]).unwrap_err();
        assert_eq!(infinite, SearchError::Drift { found: f32::INFINITY });
        let mut blocks = Gram::in_blocks(4, 2).unwrap();
        blocks.add(&[1.0; 4]).unwrap();
        assert!(blocks.with_drift(vec![0.0; 16]).is_err());
    }
}
