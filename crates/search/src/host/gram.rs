//! `X^T X` of activations, added to the tiles in which devices sum.

use crate::gram::add_to_tiles;
use crate::gram_layout::GramLayout;
use crate::matrix::Matrix;

/// Adds `X^T X` of activations `[rows, channels]` to tiles `[tiles, SIDE, SIDE]` of a
/// [layout of devices](GramLayout::of_device), from tile `first` on. Tiles below the diagonal are
/// not computed, so that the work is half of that of a product.
///
/// ```
/// use burn_fp4_search::host::add_gram;
/// use burn_fp4_search::{Gram, GramLayout};
///
/// let activations = [1.0, 2.0, 3.0, 0.0]; // two of two channels
/// let layout = GramLayout::of_device(2, 2); // one tile
/// let mut tile = vec![0.0; layout.tile_len()];
/// add_gram(&mut tile, &activations, layout, 0);
/// let gram = Gram::from_tiles(&[&tile[..]], layout, 2, 2, 3.0)?;
/// assert_eq!(gram, Gram::of(&activations, 2)?);
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
///
/// # Panics
/// If a slice does not hold a whole number of rows or tiles.
pub fn add_gram(sums: &mut [f64], activations: &[f32], layout: GramLayout, first: usize) {
    let channels = layout.channels();
    let whole = sums.len().is_multiple_of(layout.tile_len());
    assert!(layout.side() == GramLayout::SIDE && whole, "whole tiles of devices");
    for chunk in activations.chunks(GramLayout::F32_ROWS * channels.max(1)) {
        let x = Matrix::row_major(chunk, chunk.len() / channels, channels);
        add_to_tiles(sums, layout, first, x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_hold_the_products_of_their_channels() {
        for (channels, block_size) in [(300, 300), (96, 96), (320, 32), (3, 3)] {
            let rows = GramLayout::F32_ROWS + 7;
            let value = |at: usize| ((at * 7919 % 1013) as f32 - 500.0) / 500.0;
            let activations: Vec<f32> = (0..rows * channels).map(value).collect();
            let layout = GramLayout::of_device(channels, block_size);
            let mut tiles = vec![1.0; layout.count() * layout.tile_len()];
            // In two parts, as a device has them that holds some of the tiles.
            let middle = layout.count() / 2;
            let (before, after) = tiles.split_at_mut(middle * layout.tile_len());
            add_gram(before, &activations, layout, 0);
            add_gram(after, &activations, layout, middle);
            for row in 0..channels {
                for col in row..channels {
                    let Some((tile, at)) = layout.place(row, col) else { continue };
                    let found = tiles[tile * layout.tile_len() + at];
                    let product = |x: &[f32]| f64::from(x[row]) * f64::from(x[col]);
                    let exact = 1.0 + activations.chunks(channels).map(product).sum::<f64>();
                    assert!((found - exact).abs() < 1e-2, "{row}, {col}: {found}, {exact}");
                }
            }
        }
    }
}
