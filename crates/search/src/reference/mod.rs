use burn_fp4_formats::{E2M1, Packed, TensorScale, check_length};

use crate::block::{Block, lowest, top};
use crate::importance::{BlockHessian, BlockImportance};
use crate::point::{Point, Target};
use crate::{
    Draw, Fp4Scheme, Importance, Rounding, ScaleSearch, SearchError, TensorFactor, TensorScaling,
    admm, coordinate_descent, four_over_six, hessian, joint, sse, stochastic_code,
};

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
    quantize_by_importance(values, rows, cols, scheme, amax, Importance::Uniform)
}

/// [`quantize_with_amax`] for errors that do not all cost the same.
///
/// # Errors
/// As there, and [`SearchError::Importance`] if the search of the scheme takes another kind.
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
            let importance = importance.of_block(block, scheme.block_size);
            let (scale, values) = choose(scheme, &tile_rows, factor(first), importance);
            for row in tile.clone() {
                scales[row * blocks + block] = scale;
                let multiplier = scheme.rule.multiplier(scale, factor(row));
                for (index, &element) in elements(row).iter().enumerate() {
                    let at = row * cols + block * scheme.block_size + index;
                    let code = match (&values, scheme.rounding) {
                        (None, Rounding::Nearest) => scheme.rule.code(element, scale, multiplier),
                        (None, Rounding::Stochastic(draw)) => {
                            let group = at as u32 / Draw::GROUP;
                            let bits = draw.group(group)[at % Draw::GROUP as usize];
                            stochastic_code(
                                scheme.rule.normalized(element, scale, multiplier),
                                bits,
                            )
                        }
                        // Of zeros the positive one.
                        (Some(values), _) => E2M1.encode(values[index] + 0.0),
                    };
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

/// The scale of a block, given as the rows of its tile (one row unless tiles are 16 x 16), and its E2M1
/// values where they need not be the nearest.
fn choose(
    scheme: &Fp4Scheme,
    tile: &[&[f32]],
    factor: TensorFactor,
    importance: BlockImportance<'_>,
) -> (u8, Option<Vec<f32>>) {
    let mut amax = 0.0;
    for row in tile {
        let largest = largest_magnitude(row);
        if largest.is_nan() || largest > amax {
            amax = largest;
        }
    }
    let block = Block::new(scheme, tile, factor, amax);
    match (scheme.search, importance) {
        (ScaleSearch::Amax, _) => (scheme.rule.block_scale(amax, factor), None),
        (ScaleSearch::FourOverSix { error, .. }, _) => {
            (four_over_six::choose(scheme, error, tile, amax, factor), None)
        }
        (ScaleSearch::Sse, importance) => (sse::choose(&block, importance), None),
        (ScaleSearch::Hessian, BlockImportance::Hessian(hessian)) => {
            (hessian::choose(&block, hessian), None)
        }
        (ScaleSearch::CoordinateDescent, BlockImportance::Hessian(hessian)) => {
            coordinate_descent::choose(&block, hessian)
        }
        (_, BlockImportance::Hessian(hessian)) => match scheme.block_size {
            16 => choose_point::<16>(&block, hessian),
            _ => choose_point::<32>(&block, hessian),
        },
        (search, importance) => unreachable!("checked before: {search:?} with {importance:?}"),
    }
}

/// [`admm`] or [`joint`], after coordinate descent has found where to begin.
fn choose_point<const B: usize>(
    block: &Block<'_>,
    hessian: BlockHessian<'_>,
) -> (u8, Option<Vec<f32>>) {
    let (scale, elements) = coordinate_descent::choose(block, hessian);
    let Some(elements) = elements else { return (scale, None) };
    let own = u32::from(block.scheme.rule.block_scale(block.amax, block.tensor));
    let (format, base) = (block.scheme.format(), block.unit.base);
    let scaled = block.scaled(0).try_into().expect("a block");
    let target = Target { format, base, scaled, hessian };
    let elements: [f32; B] = elements.try_into().expect("a block");
    let scale = scale.into();
    let start = Point { scale, elements, cost: target.cost(scale, &elements) };
    let operator = admm::Operator::new(hessian.values);
    let point = match block.scheme.search {
        ScaleSearch::AdmmPublished => admm::published(&target, &operator, own),
        ScaleSearch::Admm => admm::improve(&target, &operator, own, start),
        _ => {
            let top = top(format, base, block.amax * block.unit.factor);
            joint::improve(&target, lowest(format, base)..=top, start)
        }
    };
    (point.scale as u8, Some(point.elements.to_vec()))
}
