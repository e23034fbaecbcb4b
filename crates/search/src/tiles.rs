//! How devices lay out what they sum up of activations.

use std::ops::Range;

use rayon::prelude::*;

/// `X^T X` as tiles `[SIDE, SIDE]`: those of the upper half, a column of tiles after the other, each from its first
/// row to the diagonal; or only those along the diagonal. Channels beyond the last are 0, and what a tile has below the
/// diagonal of the matrix does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GramTiles {
    channels: usize,
    diagonal: bool,
}

impl GramTiles {
    /// Channels of a tile.
    pub const SIDE: usize = 128;

    /// What holds blocks along the diagonal; one block of all channels is the whole matrix.
    pub fn new(channels: usize, block_size: usize) -> Self {
        let inside = block_size > 0 && Self::SIDE.is_multiple_of(block_size);
        Self { channels, diagonal: inside || channels <= Self::SIDE }
    }

    /// Channels of the matrix.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Whether there are none but those along the diagonal.
    pub fn is_diagonal(&self) -> bool {
        self.diagonal
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        let columns = self.channels.div_ceil(Self::SIDE);
        if self.diagonal { columns } else { columns * (columns + 1) / 2 }
    }

    /// The columns of tiles that some of them are in, with their rows of tiles there.
    pub fn columns(&self, tiles: Range<usize>) -> Vec<(usize, Range<usize>)> {
        let mut columns = Vec::new();
        let mut start = 0;
        for column in 0..self.channels.div_ceil(Self::SIDE) {
            let rows = if self.diagonal { column..column + 1 } else { 0..column + 1 };
            let end = start + rows.len();
            let [from, to] = [tiles.start, tiles.end].map(|at| at.clamp(start, end) - start);
            if from < to {
                columns.push((column, rows.start + from..rows.start + to));
            }
            start = end;
        }
        columns
    }

    /// The blocks `[channels / block_size, block_size, block_size]` that these tiles hold.
    pub(crate) fn blocks(&self, tiles: &[&[f64]], block_size: usize) -> Vec<f64> {
        let side = Self::SIDE;
        let at = |row: usize, column: usize| match self.diagonal {
            true => tiles[column],
            false => tiles[column * (column + 1) / 2 + row],
        };
        let mut values = vec![0.0; self.channels * block_size];
        // Rows of a block that share a row of tiles.
        let aligned = side.is_multiple_of(block_size) || block_size.is_multiple_of(side);
        let rows =
            if aligned || block_size == self.channels { block_size.clamp(1, side) } else { 1 };
        let parts = values.par_chunks_mut(rows * block_size.max(1)).enumerate();
        parts.for_each(|(part, values)| {
            let first = part * rows;
            let block = first / block_size * block_size;
            let (start, end) = (block / side, (block + block_size).div_ceil(side));
            for column in start..end {
                let channels = column * side..(column + 1) * side;
                let channels = channels.start.max(block)..channels.end.min(block + block_size);
                let mirrored = column < first / side;
                let tile =
                    if mirrored { at(column, first / side) } else { at(first / side, column) };
                for (row, values) in (first..).zip(values.chunks_exact_mut(block_size)) {
                    let values = &mut values[channels.start - block..channels.end - block];
                    for (value, channel) in values.iter_mut().zip(channels.clone()) {
                        let (row, channel) = (row % side, channel % side);
                        let below = mirrored || column == first / side && channel < row;
                        *value =
                            tile[if below { channel * side + row } else { row * side + channel }];
                    }
                }
            }
        });
        values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_make_up_the_matrix() {
        for (channels, block_size) in
            [(3, 3), (300, 300), (128, 16), (320, 32), (300, 100), (256, 128)]
        {
            let tiles = GramTiles::new(channels, block_size);
            let value = |row: usize, col: usize| (row.min(col) * 1000 + row.max(col)) as f64;
            let mut laid_out = vec![f64::NAN; tiles.count() * 128 * 128];
            let mut squares = laid_out.chunks_exact_mut(128 * 128);
            for (column, rows) in tiles.columns(0..tiles.count()) {
                for row in rows {
                    let square = squares.next().unwrap();
                    for (at, element) in square.iter_mut().enumerate() {
                        let (row, col) = (row * 128 + at / 128, column * 128 + at % 128);
                        if row <= col {
                            *element = value(row, col);
                        }
                    }
                }
            }
            assert!(squares.next().is_none());
            let laid_out: Vec<_> = laid_out.chunks_exact(128 * 128).collect();
            let found = tiles.blocks(&laid_out, block_size);
            assert_eq!(found.len(), channels * block_size);
            for (at, found) in found.into_iter().enumerate() {
                let row = at / block_size;
                let col = row / block_size * block_size + at % block_size;
                assert_eq!(found, value(row, col), "{channels} {block_size} {row} {col}");
            }
        }
    }

    #[test]
    fn columns_are_those_of_a_range() {
        let tiles = GramTiles::new(300, 300);
        assert_eq!(tiles.count(), 6);
        assert_eq!(tiles.columns(2..5), [(1, 1..2), (2, 0..2)]);
        let tiles = GramTiles::new(300, 4);
        assert_eq!(tiles.columns(1..3), [(1, 1..2), (2, 2..3)]);
    }
}
