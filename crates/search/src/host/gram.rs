//! `X^T X` of activations, added to the tiles in which devices sum.

use rayon::prelude::*;

use crate::gram_layout::GramLayout;
use crate::matrix::{Matrix, add_product};

/// Activations that are summed in f32; these sums are added up in f64.
const ROWS: usize = 1024;
/// Number of elements of a tile.
const TILE: usize = GramLayout::SIDE * GramLayout::SIDE;

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
    const SIDE: usize = GramLayout::SIDE;
    let channels = layout.channels();
    assert_eq!((layout.side(), sums.len() % TILE), (SIDE, 0), "whole tiles of devices");
    let mut columns = Vec::new();
    let mut rest = sums;
    for (column, rows) in layout.columns(first..first + rest.len() / TILE) {
        let (sums, after) = rest.split_at_mut(rows.len() * TILE);
        columns.push((column, rows, sums));
        rest = after;
    }
    columns.into_par_iter().for_each(|(column, rows, sums)| {
        let mut products = vec![0.0; sums.len()];
        for chunk in activations.chunks(ROWS * channels.max(1)) {
            let x = Matrix::row_major(chunk, chunk.len() / channels, channels);
            let part = |from: usize, to: usize| {
                let range = (from * SIDE).min(channels)..(to * SIDE).min(channels);
                x.part(0..chunk.len() / channels, range)
            };
            let (left, right) = (part(rows.start, rows.end), part(column, column + 1));
            products.fill(0.0);
            add_product(&mut products, SIDE, 1.0, left.transposed(), right);
            for (sum, product) in sums.iter_mut().zip(&products) {
                *sum += f64::from(*product);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gram::Gram;

    #[test]
    fn tiles_hold_the_products_of_their_channels() {
        for (channels, block_size) in [(300, 300), (96, 96), (320, 32), (3, 3)] {
            let rows = ROWS + 7;
            let value = |at: usize| ((at * 7919 % 1013) as f32 - 500.0) / 500.0;
            let activations: Vec<f32> = (0..rows * channels).map(value).collect();
            let layout = GramLayout::of_device(channels, block_size);
            let mut tiles = vec![1.0; layout.count() * TILE];
            // In two parts, as a device has them that holds some of the tiles.
            let middle = layout.count() / 2;
            let (before, after) = tiles.split_at_mut(middle * TILE);
            add_gram(before, &activations, layout, 0);
            add_gram(after, &activations, layout, middle);
            let expected = Gram::of(&activations, channels).expect("finite activations");
            for row in 0..channels {
                for col in row..channels {
                    let Some((tile, at)) = layout.place(row, col) else { continue };
                    let (found, exact) =
                        (tiles[tile * TILE + at], 1.0 + expected.get(row, col).expect("known"));
                    assert!((found - exact).abs() < 1e-2, "{row}, {col}: {found}, {exact}");
                }
            }
        }
    }
}
