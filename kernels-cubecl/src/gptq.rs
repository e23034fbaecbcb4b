//! GPTQ: every rounding error is made up for by the weights that are still to be rounded; see `gptq.rs` in the
//! search crate, whose steps these are.
//!
//! Matrices lie channel by channel, `[channels, rows]`, so that the units of a cube, one for every row, load and
//! store neighbours. Sums are fused multiply-adds in a fixed order: a device always finds the same codes.

use core::ops::Range;

use burn_fp4_search::host::View;
use burn_fp4_search::{Gptq, ScaleSearch};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::block::{code_mask, normalize};
use crate::element::{element_value, nearest_element, round_to_e2m1};
use crate::plan::UNITS;
use crate::quantize::{empty, factors};
use crate::scale::{Factors, FactorsLaunch, Method, factor_of, scale_value, tensor_factor};
use crate::spread::{Region, Steps, spread};
use crate::{
    Capability, Curvature, Dtype, Hessians, Launch, Operation, Packed, Problem, Refusal, plan,
    quantize_by_hessian, quantize_weighted,
};

/// Codes and scales of a tensor by [`Gptq`], given the amax of [`amax`](crate::amax()) and a scheme of
/// [`Damped::scheme`](burn_fp4_search::Damped::scheme).
///
/// `values` are f32, `[channels, rows]`, the channels in the order of the curvature, whatever the problem says of
/// axis and dtype; codes and scales are in the order of the problem.
///
/// # Errors
/// [`Refusal`]; what was launched until then is of no consequence.
pub fn quantize_gptq(
    client: &Client,
    device: &Capability,
    values: Handle,
    amax: Handle,
    curvature: &Curvature,
    options: &Gptq,
    problem: &Problem,
) -> Result<Packed, Refusal> {
    let launch = plan(Operation::Gptq, problem, device)?;
    let packed = empty(client, problem);
    let (rows, channels) = (problem.view.packed_rows(), problem.view.axis);
    if rows * channels == 0 {
        return Ok(packed);
    }
    let f32s = |count: usize| client.empty(4 * count);
    let size = problem.scheme.block_size;
    let view = View::along(&[size, rows], 0);
    let state = State {
        client,
        device,
        curvature,
        amax,
        original: values,
        elements: f32s(channels * rows),
        scales: client.empty(problem.scale_bytes()),
        steps: f32s(GROUP.min(channels) * rows),
        of_block: Problem { view, dtype: Dtype::F32, scheme: problem.scheme },
        rows,
        channels,
        launch,
    };
    state.round()?;
    if options.sweeps + options.refits > 0 {
        state.improve(options)?;
    }
    state.pack(&packed, problem);
    Ok(packed)
}

/// Channels that are brought up to date together, so that the rest is by large products.
const GROUP: usize = 128;

/// A weight on its way.
struct State<'a> {
    client: &'a Client,
    device: &'a Capability,
    curvature: &'a Curvature,
    amax: Handle,
    /// f32 `[channels, rows]`.
    original: Handle,
    /// E2M1 values of the codes, f32 `[channels, rows]`.
    elements: Handle,
    /// `[blocks, rows]`.
    scales: Handle,
    /// What the channels of a group ask of the others, f32 `[GROUP, rows]`.
    steps: Handle,
    /// The problem of one block of all rows.
    of_block: Problem,
    rows: usize,
    channels: usize,
    /// Of kernels with a unit for every row.
    launch: Launch,
}

impl State<'_> {
    /// Memory from a row of an f32 matrix `[.., width]` on.
    fn from(matrix: &Handle, row: usize, width: usize) -> Handle {
        matrix.clone().offset_start((4 * row * width) as u64)
    }

    fn tensor_scales(&self) -> usize {
        self.of_block.scheme.tensor_scales(self.rows)
    }

    fn amax(&self) -> BufferArg {
        // SAFETY: the amax is that of the scheme.
        unsafe { BufferArg::from_raw_parts(self.amax.clone(), self.tensor_scales()) }
    }

    fn factors(&self) -> FactorsLaunch {
        factors(&self.of_block)
    }

    fn method(&self) -> Method {
        Method::of(&self.of_block.scheme, false)
    }

    fn matrix(&self, handle: &Handle) -> BufferArg {
        // SAFETY: matrices have a value for every channel and row.
        unsafe { BufferArg::from_raw_parts(handle.clone(), self.channels * self.rows) }
    }

    fn square(&self, handle: &Handle) -> BufferArg {
        // SAFETY: factor and Hessian have a value for every two channels.
        unsafe { BufferArg::from_raw_parts(handle.clone(), self.channels * self.channels) }
    }

    fn scales(&self) -> BufferArg {
        let scales = self.channels / self.of_block.scheme.block_size * self.rows;
        // SAFETY: a scale for every block of every row.
        unsafe { BufferArg::from_raw_parts(self.scales.clone(), scales) }
    }

    fn steps(&self) -> BufferArg {
        let steps = GROUP.min(self.channels) * self.rows;
        // SAFETY: the length it was made with.
        unsafe { BufferArg::from_raw_parts(self.steps.clone(), steps) }
    }

    fn extent(&self, channel: usize, group: usize) -> ExtentLaunch {
        let [rows, channels, channel, group] =
            [self.rows, self.channels, channel, group].map(|length| length as u32);
        ExtentLaunch::new(rows, channels, channel, group)
    }

    /// Rounds block after block, each error spread over the channels that follow.
    fn round(&self) -> Result<(), Refusal> {
        let size = self.of_block.scheme.block_size;
        let factor = &self.curvature.factor;
        let weights = self.client.empty(4 * self.channels * self.rows);
        self.copy(&self.original, &weights);
        for group in (0..self.channels).step_by(GROUP) {
            let end = self.channels.min(group + GROUP);
            for block in (group..end).step_by(size) {
                let sse = self.of_block.scheme.with_search(ScaleSearch::Sse);
                let chosen = quantize_weighted(
                    self.client,
                    self.device,
                    Self::from(&weights, block, self.rows),
                    self.amax.clone(),
                    Some(Self::from(&self.curvature.costs, block, 1)),
                    &Problem { scheme: sse, ..self.of_block },
                )?;
                // SAFETY: see the lengths of the arguments; units beyond the last row do nothing.
                unsafe {
                    round_kernel::launch_unchecked(
                        self.client,
                        self.launch.count(),
                        CubeDim::new_1d(self.launch.units),
                        self.matrix(&weights),
                        BufferArg::from_raw_parts(chosen.scales, self.rows),
                        self.amax(),
                        self.square(factor),
                        self.matrix(&self.elements),
                        self.scales(),
                        self.steps(),
                        self.extent(block, group),
                        self.factors(),
                        self.method(),
                    );
                }
                self.spread(&weights, factor, block..block + size, group, block + size..end);
            }
            self.spread(&weights, factor, group..end, group, end..self.channels);
        }
        Ok(())
    }

    /// Sweeps over all blocks, with `R = (w - q) H` kept up to date.
    fn improve(&self, options: &Gptq) -> Result<(), Refusal> {
        let hessian = &self.curvature.hessian;
        let residuals = self.client.empty(4 * self.channels * self.rows);
        for group in (0..self.channels).step_by(GROUP) {
            let end = self.channels.min(group + GROUP);
            let items = (end - group) * self.rows;
            // SAFETY: see the lengths of the arguments; units beyond the last item do nothing.
            unsafe {
                remainder_kernel::launch_unchecked(
                    self.client,
                    CubeCount::Static((items as u32).div_ceil(UNITS), 1, 1),
                    CubeDim::new_1d(UNITS),
                    self.matrix(&self.original),
                    self.matrix(&self.elements),
                    self.scales(),
                    self.amax(),
                    self.steps(),
                    self.extent(group, end),
                    self.factors(),
                    self.method(),
                );
            }
            let region = Region { fresh: group == 0, ..Region::of(0..self.channels) };
            self.spread_to(&residuals, hessian, group..end, group, region);
        }
        for sweep in 0..options.sweeps.max(options.refits) {
            if sweep < options.sweeps {
                self.sweep(&residuals, |block, group| {
                    self.move_codes(&residuals, block, group);
                    Ok(())
                })?;
            }
            if sweep < options.refits {
                self.sweep(&residuals, |block, group| self.choose_anew(&residuals, block, group))?;
            }
        }
        Ok(())
    }

    /// Lets `improve` change one block after the other and brings the residuals up to date.
    fn sweep(
        &self,
        residuals: &Handle,
        improve: impl Fn(usize, usize) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let (hessian, size) = (&self.curvature.hessian, self.of_block.scheme.block_size);
        for group in (0..self.channels).step_by(GROUP) {
            let end = self.channels.min(group + GROUP);
            for block in (group..end).step_by(size) {
                improve(block, group)?;
                // Within the group at once, beyond it together.
                self.spread(residuals, hessian, block..block + size, group, group..end);
            }
            let others = Region { skipped: group..end, ..Region::of(0..self.channels) };
            self.spread_to(residuals, hessian, group..end, group, others);
        }
        Ok(())
    }

    /// Moves every code of a block to the one that is best while all others stay.
    fn move_codes(&self, residuals: &Handle, block: usize, group: usize) {
        // SAFETY: see the lengths of the arguments; units beyond the last row do nothing.
        unsafe {
            move_kernel::launch_unchecked(
                self.client,
                self.launch.count(),
                CubeDim::new_1d(self.launch.units),
                self.matrix(residuals),
                self.square(&self.curvature.hessian),
                self.scales(),
                self.amax(),
                self.matrix(&self.elements),
                self.steps(),
                self.extent(block, group),
                self.factors(),
                self.method(),
            );
        }
    }

    /// Searches scale and codes of a block anew for what all other blocks leave to it.
    fn choose_anew(&self, residuals: &Handle, block: usize, group: usize) -> Result<(), Refusal> {
        let size = self.of_block.scheme.block_size;
        let square = size * size;
        let targets = self.client.empty(4 * size * self.rows);
        let of_targets = || {
            // SAFETY: the length it was just made with.
            unsafe { BufferArg::from_raw_parts(targets.clone(), size * self.rows) }
        };
        // SAFETY: see the lengths of the arguments; units beyond the last row do nothing.
        unsafe {
            aim_kernel::launch_unchecked(
                self.client,
                self.launch.count(),
                CubeDim::new_1d(self.launch.units),
                self.matrix(residuals),
                BufferArg::from_raw_parts(
                    self.curvature.inverses.clone(),
                    self.channels / size * square,
                ),
                self.scales(),
                self.amax(),
                self.matrix(&self.elements),
                of_targets(),
                self.extent(block, group),
                self.factors(),
                self.method(),
            );
        }
        let Hessians { values, bounds } = &self.curvature.blocks;
        let hessians = Hessians {
            values: Self::from(values, block, size),
            bounds: Self::from(bounds, block, 1),
        };
        let chosen = quantize_by_hessian(
            self.client,
            self.device,
            targets.clone(),
            self.amax.clone(),
            hessians,
            &self.of_block,
        )?;
        // SAFETY: see the lengths of the arguments; units beyond the last row do nothing.
        unsafe {
            accept_kernel::launch_unchecked(
                self.client,
                self.launch.count(),
                CubeDim::new_1d(self.launch.units),
                of_targets(),
                BufferArg::from_raw_parts(chosen.codes, self.of_block.code_bytes() / 4),
                BufferArg::from_raw_parts(chosen.scales, self.rows),
                self.square(&self.curvature.hessian),
                self.amax(),
                self.matrix(&self.elements),
                self.scales(),
                self.steps(),
                self.extent(block, group),
                self.factors(),
                self.method(),
            );
        }
        Ok(())
    }

    /// Subtracts what the steps of some channels of a group ask of others.
    fn spread(
        &self,
        target: &Handle,
        matrix: &Handle,
        from: Range<usize>,
        group: usize,
        to: Range<usize>,
    ) {
        self.spread_to(target, matrix, from, group, Region::of(to));
    }

    fn spread_to(
        &self,
        target: &Handle,
        matrix: &Handle,
        from: Range<usize>,
        group: usize,
        region: Region,
    ) {
        let steps = Steps {
            values: &self.steps,
            group: GROUP.min(self.channels),
            from: from.start - group..from.end - group,
            first: from.start,
        };
        spread(self.client, target, matrix, steps, [self.rows, self.channels], region);
    }

    fn copy(&self, from: &Handle, to: &Handle) {
        let items = self.channels * self.rows;
        // SAFETY: both have a value for every channel and row; units beyond do nothing.
        unsafe {
            copy_kernel::launch_unchecked(
                self.client,
                CubeCount::Static((items as u32).div_ceil(UNITS), 1, 1),
                CubeDim::new_1d(UNITS),
                self.matrix(from),
                self.matrix(to),
                items as u32,
            );
        }
    }

    /// Codes and scales, their blocks back where they came from.
    fn pack(&self, packed: &Packed, problem: &Problem) {
        let blocks = problem.blocks();
        let items = (blocks * self.rows) as u32;
        // SAFETY: the lengths are those of the problem; units beyond the last block do nothing.
        unsafe {
            pack_kernel::launch_unchecked(
                self.client,
                CubeCount::Static(items.div_ceil(UNITS), 1, 1),
                CubeDim::new_1d(UNITS),
                self.matrix(&self.elements),
                self.scales(),
                BufferArg::from_raw_parts(self.curvature.order.clone(), blocks),
                self.amax(),
                BufferArg::from_raw_parts(packed.codes.clone(), problem.code_bytes() / 4),
                BufferArg::from_raw_parts(packed.scales.clone(), problem.scale_bytes()),
                BufferArg::from_raw_parts(packed.tensor_scale.clone(), packed.tensor_scales),
                self.extent(0, blocks),
                self.factors(),
                self.method(),
            );
        }
    }
}

/// Where a kernel is.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Extent {
    rows: u32,
    channels: u32,
    /// The first channel of the block, or of all.
    channel: u32,
    /// The first channel of the group; where the channels are many, the one after the last.
    group: u32,
}

/// What a scale of a row multiplies elements with.
#[cube]
fn value_of(
    scale: u32,
    row: u32,
    amax: &[f32],
    factors: &Factors,
    #[comptime] method: Method,
) -> f32 {
    let tensor = tensor_factor(amax, row, factors, method);
    scale_value(scale, comptime!(method.rule.row().format)) * tensor.decode
}

/// What the scale of this block of a row multiplies elements with.
#[cube]
fn value_now(
    scales: &[u8],
    row: u32,
    amax: &[f32],
    extent: &Extent,
    factors: &Factors,
    #[comptime] method: Method,
) -> f32 {
    let block = extent.channel / comptime!(method.block_size);
    let scale = u32::cast_from(scales[(block * extent.rows + row) as usize]);
    value_of(scale, row, amax, factors, method)
}

/// The values of this block of a row.
#[cube]
fn load(matrix: &[f32], row: u32, extent: &Extent, #[comptime] size: u32) -> Array<f32> {
    let mut values = Array::<f32>::new(comptime!(size as usize));
    #[unroll]
    for k in 0..size {
        values[k as usize] = matrix[((extent.channel + k) * extent.rows + row) as usize];
    }
    values
}

/// Rounds the channels of a block in turn, each error spread over those of the block that follow. What the errors
/// ask of other channels is left in `steps`.
#[cube(launch_unchecked)]
fn round_kernel(
    weights: &[f32],
    chosen: &[u8],
    amax: &[f32],
    factor: &[f32],
    elements: &mut [f32],
    scales: &mut [u8],
    steps: &mut [f32],
    extent: Extent,
    factors: Factors,
    #[comptime] method: Method,
) {
    let row = ABSOLUTE_POS as u32;
    if row < extent.rows {
        let size = comptime!(method.block_size);
        let rule = comptime!(method.rule);
        let scale = u32::cast_from(chosen[row as usize]);
        let tensor = tensor_factor(amax, row, &factors, method);
        let block_scale = scale_value(scale, comptime!(rule.row().format));
        let multiplier = factor_of(scale, block_scale, &tensor, rule);
        let mask = code_mask(multiplier, rule);
        let value = block_scale * tensor.decode;
        scales[(extent.channel / size * extent.rows + row) as usize] = chosen[row as usize];
        let mut left = load(weights, row, &extent, size);
        #[unroll]
        for k in 0..size {
            let channel = extent.channel + k;
            let share = channel * extent.channels + extent.channel;
            let normalized = normalize(left[k as usize], multiplier, &factors, rule);
            let element = select(mask == 0u32, 0.0f32, nearest_element(normalized));
            elements[(channel * extent.rows + row) as usize] = element;
            let error = fma(-element, value, left[k as usize]) / factor[(share + k) as usize];
            steps[((channel - extent.group) * extent.rows + row) as usize] = error;
            #[unroll]
            for other in comptime!(k + 1)..size {
                left[other as usize] =
                    fma(-error, factor[(share + other) as usize], left[other as usize]);
            }
        }
    }
}

/// What the codes of some channels add to the original: `q - w`.
#[cube(launch_unchecked)]
fn remainder_kernel(
    original: &[f32],
    elements: &[f32],
    scales: &[u8],
    amax: &[f32],
    steps: &mut [f32],
    extent: Extent,
    factors: Factors,
    #[comptime] method: Method,
) {
    let item = ABSOLUTE_POS as u32;
    let channel = extent.channel + item / extent.rows;
    let row = item % extent.rows;
    if channel < extent.group {
        let block = channel / comptime!(method.block_size);
        let scale = u32::cast_from(scales[(block * extent.rows + row) as usize]);
        let value = value_of(scale, row, amax, &factors, method);
        let at = (channel * extent.rows + row) as usize;
        steps[item as usize] = fma(elements[at], value, -original[at]);
    }
}

/// Moves every code of a block to the one that is best while all others stay. The changes of the values are left in
/// `steps`.
#[cube(launch_unchecked)]
fn move_kernel(
    residuals: &[f32],
    hessian: &[f32],
    scales: &[u8],
    amax: &[f32],
    elements: &mut [f32],
    steps: &mut [f32],
    extent: Extent,
    factors: Factors,
    #[comptime] method: Method,
) {
    let row = ABSOLUTE_POS as u32;
    if row < extent.rows {
        let size = comptime!(method.block_size);
        let value = value_now(scales, row, amax, &extent, &factors, method);
        let mut left = load(residuals, row, &extent, size);
        #[unroll]
        for k in 0..size {
            let channel = extent.channel + k;
            let at = (channel * extent.rows + row) as usize;
            let curvature = channel * extent.channels + extent.channel;
            let element = elements[at];
            let step = left[k as usize] / (hessian[(curvature + k) as usize] * value);
            let next = nearest_element(element + step);
            // With a scale of 0 every code is the same.
            let change = select(value > 0.0f32, (next - element) * value, 0.0f32);
            if change != 0.0f32 {
                elements[at] = next;
            }
            steps[((channel - extent.group) * extent.rows + row) as usize] = change;
            #[unroll]
            for other in 0..size {
                left[other as usize] =
                    fma(-change, hessian[(curvature + other) as usize], left[other as usize]);
            }
        }
    }
}

/// Where the cost of a block, a quadratic form, would be 0: `q + R H^-1`.
#[cube(launch_unchecked)]
fn aim_kernel(
    residuals: &[f32],
    inverses: &[f32],
    scales: &[u8],
    amax: &[f32],
    elements: &[f32],
    targets: &mut [f32],
    extent: Extent,
    factors: Factors,
    #[comptime] method: Method,
) {
    let row = ABSOLUTE_POS as u32;
    if row < extent.rows {
        let size = comptime!(method.block_size);
        let value = value_now(scales, row, amax, &extent, &factors, method);
        let mut aims = load(elements, row, &extent, size);
        #[unroll]
        for k in 0..size {
            aims[k as usize] *= value;
        }
        let residuals = load(residuals, row, &extent, size);
        #[unroll]
        for j in 0..size {
            #[unroll]
            for k in 0..size {
                let inverse = inverses[((extent.channel + j) * size + k) as usize];
                aims[k as usize] = fma(residuals[j as usize], inverse, aims[k as usize]);
            }
        }
        #[unroll]
        for k in 0..size {
            targets[(k * extent.rows + row) as usize] = aims[k as usize];
        }
    }
}

/// Takes the codes and the scale that were chosen for a block where they cost less than those it has. The changes of
/// the values are left in `steps`.
#[cube(launch_unchecked)]
fn accept_kernel(
    targets: &[f32],
    codes: &[u32],
    chosen: &[u8],
    hessian: &[f32],
    amax: &[f32],
    elements: &mut [f32],
    scales: &mut [u8],
    steps: &mut [f32],
    extent: Extent,
    factors: Factors,
    #[comptime] method: Method,
) {
    let row = ABSOLUTE_POS as u32;
    if row < extent.rows {
        let size = comptime!(method.block_size);
        let of_scale = (extent.channel / size * extent.rows + row) as usize;
        let scale = u32::cast_from(scales[of_scale]);
        let value = value_of(scale, row, amax, &factors, method);
        let new_scale = chosen[row as usize];
        let new_value = value_of(u32::cast_from(new_scale), row, amax, &factors, method);
        let mut next = Array::<f32>::new(comptime!(size as usize));
        let mut error_now = Array::<f32>::new(comptime!(size as usize));
        let mut error_next = Array::<f32>::new(comptime!(size as usize));
        #[unroll]
        for word in 0..comptime!(size / 8) {
            let packed = codes[(row * comptime!(size / 8) + word) as usize];
            #[unroll]
            for index in 0..8u32 {
                let k = comptime!(word * 8 + index);
                let target = targets[(k * extent.rows + row) as usize];
                let element = elements[((extent.channel + k) * extent.rows + row) as usize];
                next[k as usize] = element_value(packed << comptime!(28 - 4 * index));
                error_now[k as usize] = fma(-element, value, target);
                error_next[k as usize] = fma(-next[k as usize], new_value, target);
            }
        }
        let cost_now = distance(&error_now, hessian, &extent, size);
        let cost_next = distance(&error_next, hessian, &extent, size);
        let better = cost_next < cost_now;
        if better {
            scales[of_scale] = new_scale;
        }
        #[unroll]
        for k in 0..size {
            let channel = extent.channel + k;
            let change = error_now[k as usize] - error_next[k as usize];
            steps[((channel - extent.group) * extent.rows + row) as usize] =
                select(better, change, 0.0f32);
            if better {
                elements[(channel * extent.rows + row) as usize] = next[k as usize];
            }
        }
    }
}

/// `r^T H r`.
#[cube]
fn distance(errors: &Array<f32>, hessian: &[f32], extent: &Extent, #[comptime] size: u32) -> f32 {
    let mut cost = 0.0f32.runtime();
    #[unroll]
    for i in 0..size {
        let curvature = (extent.channel + i) * extent.channels + extent.channel;
        let mut sum = 0.0f32.runtime();
        #[unroll]
        for j in 0..size {
            sum = fma(hessian[(curvature + j) as usize], errors[j as usize], sum);
        }
        cost = fma(errors[i as usize], sum, cost);
    }
    cost
}

#[cube(launch_unchecked)]
fn copy_kernel(from: &[f32], to: &mut [f32], items: u32) {
    if (ABSOLUTE_POS as u32) < items {
        to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}

/// Codes and scales of a packed tensor, from elements `[channels, rows]` and scales `[blocks, rows]`.
#[cube(launch_unchecked)]
fn pack_kernel(
    elements: &[f32],
    scales: &[u8],
    order: &[u32],
    amax: &[f32],
    codes: &mut [u32],
    packed_scales: &mut [u8],
    tensor_scale: &mut [u32],
    extent: Extent,
    factors: Factors,
    #[comptime] method: Method,
) {
    let item = ABSOLUTE_POS as u32;
    let block = item / extent.rows;
    let row = item % extent.rows;
    let blocks = extent.group;
    if block < blocks {
        let size = comptime!(method.block_size);
        let to = row * blocks + order[block as usize];
        #[unroll]
        for word in 0..comptime!(size / 8) {
            let mut packed = 0u32.runtime();
            #[unroll]
            for index in 0..8u32 {
                let channel = block * size + comptime!(word * 8 + 7 - index);
                // Of zeros the positive one.
                let element =
                    fma(elements[(channel * extent.rows + row) as usize], factors.one, 0.0f32);
                packed = (packed << 4u32) | (round_to_e2m1(element) >> 28u32);
            }
            codes[(to * comptime!(size / 8) + word) as usize] = packed;
        }
        packed_scales[to as usize] = scales[item as usize];
        if block == 0u32 && (comptime!(method.by_row) || row == 0u32) {
            let tensor = tensor_factor(amax, row, &factors, method);
            tensor_scale[row as usize] = u32::reinterpret(tensor.decode);
        }
    }
}
