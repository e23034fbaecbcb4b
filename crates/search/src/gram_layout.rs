//! How sums of products of activations are laid out.

use std::ops::Range;

/// `X^T X` as tiles `[side, side]`: those of the upper half, a column of tiles after the other,
/// each from its first row to the diagonal, so that it is itself a matrix `[rows, side]`; or only
/// those along the diagonal. Channels beyond the last are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GramLayout {
    channels: usize,
    side: usize,
    diagonal: bool,
}

impl GramLayout {
    /// Side of the tiles in which devices sum up; those of a whole matrix are no larger elsewhere.
    pub const SIDE: usize = 128;

    /// How devices lay out what holds blocks along the diagonal; one block of all channels is the
    /// whole matrix. What their tiles have below the diagonal of the matrix is ignored.
    pub fn of_device(channels: usize, block_size: usize) -> Self {
        let inside = block_size > 0 && Self::SIDE.is_multiple_of(block_size);
        Self { channels, side: Self::SIDE, diagonal: inside || channels <= Self::SIDE }
    }

    /// The same with a tile for every block, or without channels beyond the last if these fit one
    /// tile: how a [`Gram`](crate::Gram) keeps it, with both halves of tiles on the diagonal.
    pub fn compact(channels: usize, block_size: usize) -> Self {
        let whole = block_size == channels;
        let side = if whole { channels.clamp(1, Self::SIDE) } else { block_size.max(1) };
        Self { channels, side, diagonal: !whole }
    }

    /// Channels of the matrix.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Rows and columns of a tile.
    pub fn side(&self) -> usize {
        self.side
    }

    /// Whether there are none but those along the diagonal.
    pub fn is_diagonal(&self) -> bool {
        self.diagonal
    }

    /// Columns of tiles.
    fn width(&self) -> usize {
        self.channels.div_ceil(self.side)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        let columns = self.width();
        if self.diagonal { columns } else { columns.saturating_mul(columns + 1) / 2 }
    }

    /// Elements of a tile.
    pub fn tile_len(&self) -> usize {
        self.side.saturating_mul(self.side)
    }

    /// Row and column of the first element of a tile.
    pub(crate) fn corner(&self, tile: usize) -> (usize, usize) {
        if self.diagonal {
            return (tile * self.side, tile * self.side);
        }
        // Columns before it hold `column * (column + 1) / 2` tiles.
        let column = ((8 * tile + 1).isqrt() - 1) / 2;
        ((tile - column * (column + 1) / 2) * self.side, column * self.side)
    }

    /// Where the tile is that has an element, and where in it this is; nothing for what is in no
    /// tile.
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

    /// The columns of tiles that some of them are in, with their rows of tiles there.
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
