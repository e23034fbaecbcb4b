//! [`GramLayout`]: tiles of a Gram matrix in memory.

use std::ops::Range;

/// Lays out `X^T X` as tiles `[side, side]`. A whole matrix has the tiles of its upper half, one
/// column of tiles after the other, each from the first row to the diagonal, so that a column is
/// itself a matrix `[rows, side]`. A block-diagonal matrix has the tiles along the diagonal.
/// Channels beyond the last are 0.
///
/// ```
/// use burn_fp4_search::GramLayout;
///
/// let whole = GramLayout::of_device(300, 300);
/// assert_eq!((whole.side(), whole.count(), whole.tile_len()), (128, 6, 128 * 128));
/// // Tile 2 is the second of column 1; tiles 3 and 4 are the first two of column 2.
/// assert_eq!(whole.columns(2..5), [(1, 1..2), (2, 0..2)]);
///
/// let blocks = GramLayout::compact(64, 16); // a tile for every block of 16 channels
/// assert!(blocks.is_diagonal());
/// assert_eq!((blocks.channels(), blocks.side(), blocks.count()), (64, 16, 4));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GramLayout {
    channels: usize,
    side: usize,
    diagonal: bool,
}

impl GramLayout {
    /// Side of the tiles in which devices sum. Tiles of whole matrices are never larger.
    pub const SIDE: usize = 128;

    /// Activations whose products are summed in f32, before the sum is added in f64.
    pub const F32_ROWS: usize = 1024;

    /// Returns the layout of devices for a matrix of blocks along the diagonal; one block of all
    /// channels is the whole matrix. Elements of tiles below the diagonal of the matrix are
    /// ignored.
    #[must_use]
    pub fn of_device(channels: usize, block_size: usize) -> Self {
        let inside = block_size > 0 && Self::SIDE.is_multiple_of(block_size);
        Self { channels, side: Self::SIDE, diagonal: inside || channels <= Self::SIDE }
    }

    /// Returns the layout of a [`Gram`](crate::Gram), with both halves of the tiles on the
    /// diagonal: a tile for every block, or a whole matrix without channels beyond the last if it
    /// fits one tile.
    #[must_use]
    pub fn compact(channels: usize, block_size: usize) -> Self {
        let whole = block_size == channels;
        let side = if whole { channels.clamp(1, Self::SIDE) } else { block_size.max(1) };
        Self { channels, side, diagonal: !whole }
    }

    /// Number of channels of the matrix.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Number of rows and columns of a tile.
    #[must_use]
    pub fn side(&self) -> usize {
        self.side
    }

    /// Returns true if only the tiles along the diagonal are stored.
    #[must_use]
    pub fn is_diagonal(&self) -> bool {
        self.diagonal
    }

    /// Number of columns of tiles.
    fn width(&self) -> usize {
        self.channels.div_ceil(self.side)
    }

    /// Number of tiles.
    #[must_use]
    pub fn count(&self) -> usize {
        let columns = self.width();
        if self.diagonal { columns } else { columns.saturating_mul(columns + 1) / 2 }
    }

    /// Number of elements of a tile.
    #[must_use]
    pub fn tile_len(&self) -> usize {
        self.side.saturating_mul(self.side)
    }

    /// Returns row and column of the first element of a tile.
    pub(crate) fn corner(&self, tile: usize) -> (usize, usize) {
        if self.diagonal {
            return (tile * self.side, tile * self.side);
        }
        // Columns before it hold `column * (column + 1) / 2` tiles.
        let column = ((8 * tile + 1).isqrt() - 1) / 2;
        ((tile - column * (column + 1) / 2) * self.side, column * self.side)
    }

    /// Returns the tile of an element and the element's index in it; `None` if no tile holds it.
    pub(crate) fn place(&self, row: usize, col: usize) -> Option<(usize, usize)> {
        let (row, col) = (row.min(col), row.max(col));
        let (tile_row, tile_col) = (row / self.side, col / self.side);
        if col >= self.channels || self.diagonal && tile_row != tile_col {
            return None;
        }
        let before =
            if self.diagonal { tile_col } else { tile_col * (tile_col + 1) / 2 + tile_row };
        Some((before, row % self.side * self.side + col % self.side))
    }

    /// Groups tiles by column: each column of tiles with the rows of tiles of it that are in the
    /// range.
    #[must_use]
    pub fn columns(&self, tiles: Range<usize>) -> Vec<(usize, Range<usize>)> {
        let mut columns = Vec::new();
        let mut start = 0;
        for column in 0..self.width() {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_one_place() {
        for (tiles, elements) in [
            (GramLayout::of_device(300, 300), 300 * 301 / 2),
            (GramLayout::of_device(3, 3), 3 * 4 / 2),
            (GramLayout::of_device(320, 32), 2 * 128 * 129 / 2 + 64 * 65 / 2),
            (GramLayout::compact(300, 300), 300 * 301 / 2),
            (GramLayout::compact(300, 100), 3 * 100 * 101 / 2),
        ] {
            let mut places = std::collections::BTreeSet::new();
            for row in 0..tiles.channels() {
                for col in row..tiles.channels() {
                    let place = tiles.place(row, col);
                    assert_eq!(place, tiles.place(col, row));
                    let Some((tile, at)) = place else { continue };
                    assert!(tile < tiles.count() && at < tiles.tile_len());
                    let (first_row, first_col) = tiles.corner(tile);
                    let (row, col) = (row - first_row, col - first_col);
                    assert_eq!(at, row * tiles.side() + col);
                    assert!(places.insert((tile, at)));
                }
            }
            assert_eq!(places.len(), elements);
            assert_eq!(tiles.place(0, tiles.channels()), None);
        }
    }

    #[test]
    fn columns_are_those_of_a_range() {
        let tiles = GramLayout::of_device(300, 300);
        assert_eq!(tiles.count(), 6);
        assert_eq!(tiles.columns(2..5), [(1, 1..2), (2, 0..2)]);
        let tiles = GramLayout::of_device(300, 4);
        assert_eq!(tiles.columns(1..3), [(1, 1..2), (2, 2..3)]);
    }
}
