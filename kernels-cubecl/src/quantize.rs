//! Codes and scales of a tensor.

use burn_fp4_search::ScaleSearch;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::arith::codes::{limits_all, nearest_codes};
use crate::arith::rule::{Factors, code_mask, normalize, tensor_factor};
use crate::arith::stochastic::{Draw, draw, random_bits, random_words, round_stochastically};
use crate::layout::place::{item, place};
use crate::layout::share::load_blocks;
use crate::layout::stage::{Exchange, exchange, packed_place};
use crate::memory::check_memory;
use crate::packed::{PackedHandles, PackedOut, store_tensor_scale};
use crate::plan::{Capability, Launch, Operation, Problem, Recipe, Refusal, UNITS, plan};
use crate::search::amax::largest_magnitudes;
use crate::search::choose::choose_scales;
use crate::search::quantize_args::{QuantizeArgs, quantize_args};

/// Codes and scales of a tensor, given the amax of [`amax`](crate::amax()) in device memory.
///
/// `values` are the dense tensor of the problem, contiguous; `amax` is f32, one for every tensor
/// scale. The tensor is read once, whichever axis the blocks run along.
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn quantize(
    client: &Client,
    device: &Capability,
    values: Handle,
    amax: Handle,
    problem: &Problem,
) -> Result<PackedHandles, Refusal> {
    quantize_weighted(client, device, values, amax, None, problem)
}

/// [`quantize`] for errors that cost as much as their input channel: `weights` are f32, one for
/// every element along the axis, not negative. The search is [`Sse`](burn_fp4_search::ScaleSearch).
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn quantize_weighted(
    client: &Client,
    device: &Capability,
    values: Handle,
    amax: Handle,
    weights: Option<Handle>,
    problem: &Problem,
) -> Result<PackedHandles, Refusal> {
    let launch = plan(Operation::Quantize, problem, device)?;
    problem.check_values(&values)?;
    problem.check_amax(&amax)?;
    if let Some(weights) = &weights {
        if problem.scheme.search != ScaleSearch::Sse {
            let (operation, found) = (Operation::Quantize, problem.scheme.search);
            return Err(Refusal::Search { operation, found });
        }
        check_memory("weights", weights, 4 * problem.view.axis)?;
    }
    Ok(if launch.share.wide() {
        launch_quantize::<u32>(client, values, amax, weights, problem, launch)
    } else {
        launch_quantize::<u16>(client, values, amax, weights, problem, launch)
    })
}

fn launch_quantize<E: Int>(
    client: &Client,
    values: Handle,
    amax: Handle,
    weights: Option<Handle>,
    problem: &Problem,
    launch: Launch,
) -> PackedHandles {
    let recipe = Recipe::of(&problem.scheme, weights.is_some());
    let packed = PackedHandles::empty(client, problem);
    if launch.items == 0 {
        return packed;
    }
    let words = problem.scheme.block_size / 8;
    // SAFETY: the lengths are those of the problem, and units beyond `items` write nothing.
    unsafe {
        quantize_kernel::launch_unchecked::<E>(
            client,
            launch.count(),
            CubeDim::new_1d(UNITS),
            launch.share.words() as usize,
            words,
            quantize_args(values, amax, weights, recipe, problem, &launch),
            packed.write(problem, words),
            draw(&problem.scheme),
        );
    }
    packed
}

#[cube(launch_unchecked)]
fn quantize_kernel<E: Int, N: Size, W: Size>(
    args: &QuantizeArgs<E, N>,
    packed: &mut PackedOut<W>,
    draw: Draw,
) {
    let (recipe, share) = comptime!((args.recipe, args.share));
    let block_size = comptime!(recipe.block_size);
    let item = item(&args.extent);
    // Units beyond the last share repeat it, so that whole planes exchange values, and store
    // nothing.
    let place = place(min(item, args.extent.items - 1), &args.extent, block_size, share);
    let rows_left = select(item < args.extent.items, place.rows_left, 0u32);
    let elements = load_blocks::<E, N>(args.values, &place, &args.extent, block_size, share);
    let largest = largest_magnitudes::<E, N>(args, &elements, &place);
    let chosen = choose_scales::<E, N>(args, &elements, &largest, &place);
    let words = comptime!(block_size / 8);
    let mut block_codes = Array::<Vector<u32, W>>::new(comptime!(share.rows as usize));
    let mut block_scales = chosen.codes;
    #[unroll]
    for row in 0..share.rows {
        let mut codes = Array::<u32>::new(comptime!(words as usize));
        let start = comptime!(row * block_size);
        let factor = chosen.factors[row as usize];
        if comptime!(recipe.stochastic) {
            let group = (place.index + row * args.extent.blocks) * words;
            drawn_codes(&elements, &mut codes, start, factor, group, &args.factors, &draw, recipe);
        } else {
            let limits = comptime!(limits_all(recipe, share.rows));
            let of_row = largest[row as usize];
            let factors = &args.factors;
            nearest_codes(&elements, &mut codes, start, of_row, factor, factors, limits, recipe);
        }
        let mut row_codes = Vector::<u32, W>::empty();
        #[unroll]
        for word in 0..words {
            row_codes.insert(comptime!(word as usize), codes[word as usize]);
        }
        block_codes[row as usize] = row_codes;
    }

    if comptime!(share.staged) {
        exchange::<W>(&mut block_codes, &mut block_scales, words, share, Exchange::ToStore);
    }
    let target = packed_place(&place, &args.extent, share);
    #[unroll]
    for row in 0..share.rows {
        if row < rows_left {
            let index = target.index + row * args.extent.blocks;
            packed.codes[index as usize] = block_codes[row as usize];
            packed.scales[index as usize] = u8::cast_from(block_scales[row as usize]);
            // The first block of all is known by its number: its row, and its place there, are
            // divisions.
            let begins =
                if comptime!(recipe.by_row) { target.block == 0u32 } else { index == 0u32 };
            if begins {
                let tensor = tensor_factor(args.amax, target.row + row, &args.factors, recipe);
                store_tensor_scale::<W>(packed, target.row + row, tensor.decode, recipe);
            }
        }
    }
}

/// Codes of the block that starts at `start` of the elements, each drawn between its neighbours,
/// given the factor of its scale. `group` is the number of its first eight elements.
#[cube]
fn drawn_codes(
    elements: &Array<f32>,
    codes: &mut Array<u32>,
    #[comptime] start: u32,
    factor: f32,
    group: u32,
    factors: &Factors,
    draw: &Draw,
    #[comptime] recipe: Recipe,
) {
    let rule = comptime!(recipe.rule);
    let mask = code_mask(factor, rule);
    #[unroll]
    for word in 0..comptime!(recipe.block_size / 8) {
        let mut packed = 0u32;
        let random = random_words(group + word, draw);
        #[unroll]
        for index in 0..8u32 {
            let element = comptime!(7 - index);
            let at = comptime!((start + word * 8 + element) as usize);
            let normalized = normalize(elements[at], factor, factors, rule);
            let bits = random_bits(&random, element);
            packed = (packed << 4u32) | (round_stochastically(normalized, bits) >> 28u32);
        }
        codes[word as usize] = packed & mask;
    }
}
