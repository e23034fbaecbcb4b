//! Tiles: maxima and sums over 16 neighbouring rows.

use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape};

use super::floats::Floats;

/// Rows of a tile.
const ROWS: usize = 16;

/// Gives every row the largest amax among its 16 neighbours.
pub(super) fn share_amax<B: Backend>(amax: &Floats<B>) -> Floats<B> {
    in_every_row(by_tile(amax).max_dim(1), amax)
}

/// Gives every row the sum over its 16 neighbours, as a tree: the order decides the last bit.
pub(super) fn share_sum<B: Backend>(sums: &Floats<B>) -> Floats<B> {
    let mut tree = by_tile(sums);
    for half in [8, 4, 2, 1] {
        tree = tree.slice(1, 0, half).add(&tree.slice(1, half, 2 * half));
    }
    in_every_row(tree, sums)
}

/// Reshapes `[rows, blocks]` to `[rows / 16, 16, blocks]`, padded with zeros.
fn by_tile<B: Backend>(matrix: &Floats<B>) -> Floats<B> {
    let [rows, blocks] = matrix.shape()[..] else { unreachable!("a matrix") };
    let padded = rows.next_multiple_of(ROWS);
    let mut parts = vec![matrix.0.clone()];
    if padded > rows {
        let shape = Shape::from(vec![padded - rows, blocks]);
        parts.push(B::float_zeros(shape, &matrix.0.device(), FloatDType::F32));
    }
    Floats(B::float_cat(parts, 0)).reshape(&[padded / ROWS, ROWS, blocks])
}

/// Repeats `[rows / 16, 1, blocks]` to the shape of a matrix `[rows, blocks]`.
fn in_every_row<B: Backend>(tiles: Floats<B>, like: &Floats<B>) -> Floats<B> {
    let [rows, blocks] = like.shape()[..] else { unreachable!("a matrix") };
    let repeated = Floats(B::float_repeat_dim(tiles.0, 1, ROWS));
    repeated.reshape(&[rows.next_multiple_of(ROWS), blocks]).slice(0, 0, rows)
}
