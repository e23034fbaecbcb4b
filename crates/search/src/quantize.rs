use burn_fp4_formats::{FormatError, Packed, TensorScale};

use crate::{Fp4Scheme, ScaleSearch, SearchError, TensorFactor, TensorScaling, four_over_six};

/// The amax that the tensor scale is made from: one value, or one per row.
///
/// A NaN among the values makes the result NaN.
pub fn amax(values: &[f32], cols: usize, scheme: &Fp4Scheme) -> Vec<f32> {
    match scheme.tensor_scale {
        TensorScaling::Amax(amax) => vec![amax],
        TensorScaling::Row => values.chunks(cols.max(1)).map(largest_magnitude).collect(),
        TensorScaling::Tensor | TensorScaling::Multiplier(_) => vec![largest_magnitude(values)],
    }
}

fn largest_magnitude(values: &[f32]) -> f32 {
    let mut largest = 0.0;
    for value in values {
        if value.is_nan() {
            return f32::NAN;
        }
        largest = f32::max(largest, value.abs());
    }
    largest
}

/// **The reference quantizer**: the codes and scales of a row-major `[rows, cols]` matrix whose
/// blocks run along its rows.
///
/// NaN and infinity give what the references give; the callers above reject them unless told not to.
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

/// [`quantize`] with the amax that the tensor scale is made from given: one, or one per row.
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
    scheme.check_columns(cols)?;
    let expect = |what, expected, found| {
        if expected == found { Ok(()) } else { Err(FormatError::Length { what, expected, found }) }
    };
    expect("values", rows * cols, values.len())?;
    expect("amax", scheme.tensor_scales(rows), amax.len())?;

    let factors: Vec<_> = amax.iter().map(|&amax| TensorFactor::new(scheme, amax)).collect();
    let factor = |row: usize| if factors.len() == 1 { factors[0] } else { factors[row] };
    let blocks = cols / scheme.block_size;
    let mut scales = vec![0; rows * blocks];
    let mut codes = vec![0; rows * cols / 2];
    for first in (0..rows).step_by(scheme.tile_rows()) {
        let tile = first..rows.min(first + scheme.tile_rows());
        for block in 0..blocks {
            let elements = |row: usize| {
                let start = row * cols + block * scheme.block_size;
                &values[start..start + scheme.block_size]
            };
            let tile_rows: Vec<_> = tile.clone().map(elements).collect();
            let scale = choose_scale(scheme, &tile_rows, factor(first));
            for row in tile.clone() {
                scales[row * blocks + block] = scale;
                let multiplier = scheme.rule.multiplier(scale, factor(row));
                for (index, &element) in elements(row).iter().enumerate() {
                    let code = scheme.rule.code(element, scale, multiplier);
                    let at = row * cols + block * scheme.block_size + index;
                    codes[at / 2] |= code << (4 * (at % 2));
                }
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
        tensor_scale: match scheme.tensor_scale {
            TensorScaling::Row => {
                TensorScale::PerRow(factors.iter().map(|factor| factor.decode).collect())
            }
            _ => TensorScale::One(factors[0].decode),
        },
    })
}

/// The scale of a block, given as the rows of its tile (one row unless tiles are 16 x 16).
fn choose_scale(scheme: &Fp4Scheme, tile: &[&[f32]], factor: TensorFactor) -> u8 {
    let mut amax = 0.0;
    for row in tile {
        let largest = largest_magnitude(row);
        if largest.is_nan() || largest > amax {
            amax = largest;
        }
    }
    match scheme.search {
        ScaleSearch::Amax => scheme.rule.block_scale(amax, factor),
        ScaleSearch::FourOverSix { error, .. } => {
            let [on_six, on_four] = four_over_six::candidates(amax, factor);
            let total = |scale| {
                let mut errors = [0.0; 16];
                for (sum, row) in errors.iter_mut().zip(tile) {
                    *sum = four_over_six::error(scheme, error, row, scale, factor);
                }
                four_over_six::sum_rows(errors)
            };
            if total(on_four) < total(on_six) { on_four } else { on_six }
        }
    }
}
