//! The better of two scales: amax on element 6, or on element 4; see
//! [`ScaleSearch::FourOverSix`](burn_fp4_search::ScaleSearch).

use burn_fp4_search::{ErrorMetric, ScaleRule, ScaleSearch};
use cubecl::prelude::*;

use super::task::Task;
use crate::arith::element::nearest_element;
use crate::arith::rule::{
    BlockScale, BlockScales, Factors, TensorFactor, nearest_scale, normalize, tensor_factor,
};
use crate::arith::scale_grid::scale_value;
use crate::layout::place::{Place, at_row};
use crate::layout::share::load_blocks;
use crate::layout::tile::sum_of_tile;
use crate::plan::{Recipe, Tile};

/// The better of two scales of one block of each row of a share, given the largest magnitudes.
#[cube]
pub(crate) fn four_over_six<E: Int, N: Size>(
    task: &Task<E, N>,
    elements: &Array<f32>,
    largest: &Array<f32>,
    place: &Place,
    scales: &mut BlockScales,
) {
    let (recipe, share) = comptime!((task.recipe, task.share));
    let block_size = comptime!(recipe.block_size);
    let rule = comptime!(recipe.rule);
    // Of the rows of the unit, or of all rows of the tile if it looks at them alone.
    let count = comptime!(if share.tile == Tile::Repeated { 16 } else { share.rows });
    let mut on_six = Array::<f32>::new(comptime!(count as usize));
    let mut on_four = Array::<f32>::new(comptime!(count as usize));
    if comptime!(share.tile == Tile::Repeated) {
        let tensor = tensor_factor(task.amax, place.row, &task.factors, recipe);
        #[unroll]
        for index in 0..16u32 {
            let row = place.row / 16 * 16 + index;
            let last = task.extent.rows - 1;
            let neighbour = at_row(place, &task.extent, min(row, last), block_size, share);
            let elements =
                load_blocks::<E, N>(task.values, &neighbour, &task.extent, block_size, share);
            let both = candidates(largest[0], &tensor, rule);
            let six = error(&elements, 0u32, &both.on_six, &tensor, &task.factors, recipe);
            let four = error(&elements, 0u32, &both.on_four, &tensor, &task.factors, recipe);
            on_six[index as usize] = select(row < task.extent.rows, six, 0.0f32);
            on_four[index as usize] = select(row < task.extent.rows, four, 0.0f32);
        }
    } else {
        #[unroll]
        for row in 0..share.rows {
            let tensor = tensor_factor(task.amax, place.row + row, &task.factors, recipe);
            let both = candidates(largest[row as usize], &tensor, rule);
            let start = comptime!(row * block_size);
            let six = error(elements, start, &both.on_six, &tensor, &task.factors, recipe);
            let four = error(elements, start, &both.on_four, &tensor, &task.factors, recipe);
            on_six[row as usize] = select(row < place.rows_left, six, 0.0f32);
            on_four[row as usize] = select(row < place.rows_left, four, 0.0f32);
        }
    }
    if comptime!(share.tile != Tile::None) {
        sum_of_tile(&mut on_six, count);
        sum_of_tile(&mut on_four, count);
    }
    #[unroll]
    for row in 0..share.rows {
        let tensor = tensor_factor(task.amax, place.row + row, &task.factors, recipe);
        let both = candidates(largest[row as usize], &tensor, rule);
        let take_four = on_four[row as usize] < on_six[row as usize];
        scales.codes[row as usize] = select(take_four, both.on_four.code, both.on_six.code);
        scales.factors[row as usize] = select(take_four, both.on_four.factor, both.on_six.factor);
    }
}

/// Amax on element 6, and on element 4.
#[derive(CubeType)]
struct Candidates {
    on_six: BlockScale,
    on_four: BlockScale,
}

/// Both come from the division form, whatever the rule.
#[cube]
fn candidates(largest: f32, tensor: &TensorFactor, #[comptime] rule: ScaleRule) -> Candidates {
    let exact = (largest / 6.0f32) * tensor.encode;
    Candidates {
        on_six: nearest_scale(exact, tensor, rule),
        on_four: nearest_scale(exact * 1.5f32, tensor, rule),
    }
}

/// The error of a row of a block, summed in element order, every operation rounded on its own.
#[cube]
fn error(
    elements: &Array<f32>,
    #[comptime] start: u32,
    scale: &BlockScale,
    tensor: &TensorFactor,
    factors: &Factors,
    #[comptime] recipe: Recipe,
) -> f32 {
    let value = scale_value(scale.code, comptime!(recipe.grid()));
    let mut error = 0.0f32.runtime();
    #[unroll]
    for k in 0..recipe.block_size {
        let element = elements[(start + k) as usize];
        let nearest =
            nearest_element(normalize(element, scale.factor, factors, comptime!(recipe.rule)));
        let difference = (nearest * value) * tensor.amax / factors.range - element;
        if comptime!(squares(recipe.search)) {
            error = fma(difference * difference, factors.one, error);
        } else {
            error += difference.abs();
        }
    }
    error
}

fn squares(search: ScaleSearch) -> bool {
    matches!(search, ScaleSearch::FourOverSix { error: ErrorMetric::Mse, .. })
}
