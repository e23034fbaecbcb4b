//! **The reference quantizer**, the oracle of every engine, bit for bit: slow and plain. It tries
//! every scale, and imports nothing from an engine.
//!
//! | file                       | what it chooses for a block                                     |
//! |----------------------------|-----------------------------------------------------------------|
//! | `amax.rs`                  | the rule's scale                                                |
//! | `four_over_six.rs`         | the better of two scales                                        |
//! | `sse.rs`                   | the best scale by squared error                                 |
//! | `hessian.rs`               | the best scale by `r^T H r`                                     |
//! | `coordinate_descent.rs`    | scale and codes, improved one at a time                         |
//! | `admm.rs`                  | scale and codes by ADMM                                         |
//! | `int8_matmul.rs`           | nothing: a product with an input of 8-bit integers              |
//! | `block.rs`, `solution.rs`  | nothing: problems and results of these searches                 |

pub(crate) mod admm;
mod amax;
mod block;
mod coordinate_descent;
mod four_over_six;
mod hessian;
#[cfg(test)]
pub(crate) mod int8_matmul;
pub(crate) mod solution;
mod sse;

use core::ops::Range;

use burn_fp4_formats::{E2M1, Packed, check_length};

pub use amax::amax;
use block::{Block, Choice};

use crate::error::SearchError;
use crate::importance::Importance;
use crate::method::{Admm, Method};
use crate::rounding::{Draw, Rounding, stochastic_code};
use crate::rule::TensorFactor;
use crate::scheme::Fp4Scheme;

/// Quantizes a row-major `[rows, cols]` matrix, whose blocks run along its rows, with the reference
/// quantizer.
///
/// NaN and infinity give the results of the published references. The user-facing operations reject
/// them by default.
///
/// ```
/// use burn_fp4_search::{Fp4Scheme, quantize};
///
/// let row: Vec<f32> = (0..16).map(|at| at as f32 / 4.0).collect();
/// let packed = quantize(&row, 1, 16, &Fp4Scheme::nvfp4())?;
/// assert_eq!(packed.dequantize()[15], 3.75, "the largest magnitude is exact");
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
///
/// # Errors
/// An inconsistent scheme, a number of columns that the block size does not divide, or a slice that
/// does not hold `rows * cols` values.
pub fn quantize(
    values: &[f32],
    rows: usize,
    cols: usize,
    scheme: &Fp4Scheme,
) -> Result<Packed, SearchError> {
    quantize_with_amax(values, rows, cols, scheme, &amax(values, cols, scheme))
}

/// Quantizes a matrix as [`quantize`] does, with a given amax for the tensor scale: one, or one per
/// row.
///
/// ```
/// use burn_fp4_search::{Fp4Scheme, quantize_with_amax};
///
/// let packed = quantize_with_amax(&[1.0; 16], 1, 16, &Fp4Scheme::nvfp4(), &[2688.0])?;
/// assert_eq!(packed.tensor_scale.of_row(0), 1.0, "amax / 2688");
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
///
/// # Errors
/// As [`quantize`], and if the number of amaxes is neither.
pub fn quantize_with_amax(
    values: &[f32],
    rows: usize,
    cols: usize,
    scheme: &Fp4Scheme,
    amax: &[f32],
) -> Result<Packed, SearchError> {
    quantize_by_importance(values, rows, cols, scheme, amax, Importance::Uniform)
}

/// Quantizes a matrix as [`quantize_with_amax`] does, for errors with different costs.
///
/// # Errors
/// As [`quantize_with_amax`], and [`SearchError::Importance`] if the search of the scheme takes
/// another kind.
pub fn quantize_by_importance(
    values: &[f32],
    rows: usize,
    cols: usize,
    scheme: &Fp4Scheme,
    amax: &[f32],
    importance: Importance<'_>,
) -> Result<Packed, SearchError> {
    scheme.check_columns(cols)?;
    importance.check(scheme, cols)?;
    check_length("values", rows * cols, values.len())?;
    check_length("amax", scheme.tensor_scales(rows), amax.len())?;

    let factors: Vec<_> = amax.iter().map(|&amax| TensorFactor::new(scheme, amax)).collect();
    let matrix = Matrix { values, rows, cols, scheme, factors: &factors, importance };
    let mut codes = vec![0; rows * cols / 2];
    let mut scales = vec![0; rows * cols / scheme.block_size];
    for tile in matrix.tiles() {
        let choice = matrix.choose(&tile);
        for row in tile.rows.clone() {
            scales[row * (cols / scheme.block_size) + tile.block] = choice.scale;
            for col in matrix.cols_of(&tile) {
                let at = row * cols + col;
                codes[at / 2] |= matrix.code(&tile, row, col, &choice) << (4 * (at % 2));
            }
        }
    }
    Ok(Packed {
        format: scheme.format(),
        block_size: scheme.block_size,
        rows,
        cols,
        codes,
        scales,
        tensor_scale: scheme.tensor_scale.stored(&factors),
    })
}

/// A matrix to quantize.
struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    cols: usize,
    scheme: &'a Fp4Scheme,
    /// One, or one per row.
    factors: &'a [TensorFactor],
    importance: Importance<'a>,
}

/// The blocks with this number in some rows, which share a scale.
struct Tile {
    rows: Range<usize>,
    block: usize,
}

impl Matrix<'_> {
    fn tiles(&self) -> impl Iterator<Item = Tile> {
        let (rows, tile_rows) = (self.rows, self.scheme.tile_rows());
        let blocks = self.cols / self.scheme.block_size;
        (0..rows).step_by(tile_rows).flat_map(move |first| {
            let rows = first..rows.min(first + tile_rows);
            (0..blocks).map(move |block| Tile { rows: rows.clone(), block })
        })
    }

    fn cols_of(&self, tile: &Tile) -> Range<usize> {
        let first = tile.block * self.scheme.block_size;
        first..first + self.scheme.block_size
    }

    fn factor(&self, row: usize) -> TensorFactor {
        if self.factors.len() == 1 { self.factors[0] } else { self.factors[row] }
    }

    /// Chooses the scale of a tile, and the values of its codes if they are not the nearest ones.
    fn choose(&self, tile: &Tile) -> Choice {
        let cols = self.cols_of(tile);
        let elements = |row: usize| &self.values[row * self.cols..][cols.clone()];
        let rows: Vec<_> = tile.rows.clone().map(elements).collect();
        let amax = amax::largest_magnitude(rows.iter().copied().flatten());
        let block = &Block::new(self.scheme, &rows, self.factor(tile.rows.start), amax);
        let importance = self.importance.of_block(tile.block, self.scheme.block_size);
        match self.scheme.method {
            Method::Amax => amax::choose(block),
            Method::FourOverSix { error, .. } => four_over_six::choose(block, error),
            Method::Sse(_) => sse::choose(block, importance),
            Method::Hessian => hessian::choose(block, importance.hessian()),
            Method::CoordinateDescent => coordinate_descent::choose(block, importance.hessian()),
            Method::Admm(Admm::BestIterate) => admm::choose(block, importance.hessian()),
            Method::Admm(Admm::Published) => admm::choose_published(block, importance.hessian()),
            Method::Gptq(_) => unreachable!("refused by `Importance::check`"),
        }
    }

    /// Returns the code of an element, given the choice for its tile.
    fn code(&self, tile: &Tile, row: usize, col: usize, choice: &Choice) -> u8 {
        let at = row * self.cols + col;
        if let Some(elements) = &choice.elements {
            // Zeros become positive.
            return E2M1.encode(elements[col - self.cols_of(tile).start] + 0.0);
        }
        let (rule, scale) = (self.scheme.rule, choice.scale);
        let multiplier = rule.multiplier(scale, self.factor(row));
        match self.scheme.rounding {
            Rounding::Nearest => rule.code(self.values[at], scale, multiplier),
            Rounding::Stochastic(draw) => {
                let bits = draw.group(at as u32 / Draw::GROUP)[at % Draw::GROUP as usize];
                stochastic_code(rule.normalized(self.values[at], scale, multiplier), bits)
            }
        }
    }
}
