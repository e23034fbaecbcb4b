//! The steps of GPTQ in order; `mod.rs` numbers them.

use core::ops::Range;

use burn_fp4_search::host::View;
use burn_fp4_search::{Gptq, Method};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use super::block_update::{
    CodesLaunch, GptqBlockArgsLaunch, accept_kernel, aim_kernel, change_kernel, copy_kernel,
    move_kernel, pack_kernel, round_kernel,
};
use super::hessian_factor::HessianFactorHandles;
use super::propagate::{Errors, Region, propagate};
use crate::memory::{PackedHandles, check_memory};
use crate::numeric::rule::tensor_scale_args;
use crate::plan::{Blueprint, Capability, Dtype, Launch, Operation, Problem, Refusal, UNITS, plan};
use crate::quantize::quantize_weighted;
use crate::quantize_by_hessian::{Hessians, quantize_by_hessian};

/// Quantizes a tensor with [`Gptq`], given the result of [`amax`](crate::amax()) and a scheme of
/// [`DampedHessian::scheme`](burn_fp4_search::DampedHessian::scheme).
///
/// `values` are f32 `[channels, rows]`, with the channels in the order of the Hessian factor. Axis
/// and dtype of the problem do not apply to them. Codes and scales are in the order of the problem.
///
/// ```no_run
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, Problem, amax, hessian_factor, quantize_gptq};
/// use burn_fp4_search::host::View;
/// use burn_fp4_search::{Fp4Scheme, Gptq, Gram};
///
/// let client = Device::cuda(0).expect("a GPU").client();
/// let device = Capability::of(&client);
/// let (weight, activations) = ([0.5f32; 4 * 32], [1.0f32; 64 * 32]);
/// let gram = Gram::of(&activations, 32)?;
/// let damped = Gptq::DEFAULT.damped_hessian(&gram, 16)?;
/// let factor = hessian_factor(&client, &device, &gram, &damped)?;
///
/// let scheme = damped.scheme(&Fp4Scheme::nvfp4())?;
/// let (view, dtype, options) = (View::rows(4, 32), Dtype::F32, damped.options());
/// let problem = Problem { view, dtype, scheme };
/// // `[channels, rows]`, with the channels in the order of the factor.
/// let column = |&channel: &usize| [0, 1, 2, 3].map(|row| weight[row * 32 + channel]);
/// let values: Vec<f32> = damped.order().iter().flat_map(column).collect();
/// let values = client.create_from_slice(f32::as_bytes(&values));
/// let largest = amax(&client, &device, values.clone(), view, dtype, false)?;
/// let packed = quantize_gptq(&client, &device, values, largest, &factor, options, &problem)?;
/// assert_eq!(client.read_one_unchecked(packed.codes).len(), problem.code_bytes());
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; launches before it have no effect.
pub fn quantize_gptq(
    client: &Client,
    device: &Capability,
    values: Handle,
    amax: Handle,
    hessian_factor: &HessianFactorHandles,
    options: &Gptq,
    problem: &Problem,
) -> Result<PackedHandles, Refusal> {
    let launch = plan(Operation::Gptq, problem, device)?;
    let (rows, channels) = (problem.view.packed_rows(), problem.view.axis);
    for (what, expected, found) in [
        ("channels of the Hessian factor", channels, hessian_factor.channels),
        ("block size of the Hessian factor", problem.scheme.block_size, hessian_factor.block_size),
    ] {
        if found != expected {
            return Err(Refusal::Mismatch { what, expected, found });
        }
    }
    check_memory("values", &values, 4 * rows * channels)?;
    problem.check_amax(&amax)?;
    let packed = PackedHandles::empty(client, problem);
    if rows * channels == 0 {
        return Ok(packed);
    }
    let f32s = |count: usize| client.empty(4 * count);
    let size = problem.scheme.block_size;
    let view = View::along(&[size, rows], 0);
    let weight = WeightState {
        client,
        device,
        hessian_factor,
        amax,
        original: values,
        elements: f32s(channels * rows),
        scales: client.empty(problem.scale_bytes()),
        errors: f32s(GROUP.min(channels) * rows),
        of_block: Problem { view, dtype: Dtype::F32, scheme: problem.scheme },
        rows,
        channels,
        launch,
    };
    weight.round()?;
    if options.sweeps + options.refits > 0 {
        weight.improve(options)?;
    }
    weight.pack(&packed, problem);
    Ok(packed)
}

/// Channels that are updated together.
const GROUP: usize = Gptq::GROUP;

/// A weight in the course of quantization.
struct WeightState<'a> {
    client: &'a Client,
    device: &'a Capability,
    hessian_factor: &'a HessianFactorHandles,
    amax: Handle,
    /// f32 `[channels, rows]`.
    original: Handle,
    /// E2M1 values of the codes, f32 `[channels, rows]`.
    elements: Handle,
    /// `[blocks, rows]`.
    scales: Handle,
    /// Errors, or changes, of a group's channels, f32 `[GROUP, rows]`.
    errors: Handle,
    /// Problem of one block of all rows.
    of_block: Problem,
    rows: usize,
    channels: usize,
    /// Launch of the kernels with a unit for every row.
    launch: Launch,
}

/// Launches a kernel with a unit for every row of a weight.
macro_rules! for_rows {
    ($weight:expr, $kernel:ident, $($arg:expr),* $(,)?) => {{
        let launch = &$weight.launch;
        // SAFETY: the arguments have their lengths; units beyond the last row do nothing.
        unsafe {
            $kernel::launch_unchecked(
                $weight.client,
                launch.count(),
                CubeDim::new_1d(launch.units),
                $($arg),*
            )
        }
    }};
}

/// Launches a kernel with a unit for every item.
macro_rules! for_items {
    ($weight:expr, $items:expr, $kernel:ident, $($arg:expr),* $(,)?) => {{
        let cubes = ($items as u32).div_ceil(UNITS);
        // SAFETY: the arguments have their lengths; units beyond the last item do nothing.
        unsafe {
            $kernel::launch_unchecked(
                $weight.client,
                CubeCount::Static(cubes, 1, 1),
                CubeDim::new_1d(UNITS),
                $($arg),*
            )
        }
    }};
}

/// Arguments of kernels.
impl WeightState<'_> {
    /// Returns the memory of an f32 matrix `[.., width]` from a row on.
    fn from(matrix: &Handle, row: usize, width: usize) -> Handle {
        matrix.clone().offset_start((4 * row * width) as u64)
    }

    /// Returns an argument of `length` values.
    fn values(handle: &Handle, length: usize) -> BufferArg {
        // SAFETY: every length below is that of the allocation, or has been checked.
        unsafe { BufferArg::from_raw_parts(handle.clone(), length) }
    }

    /// Returns a matrix `[channels, rows]`.
    fn matrix(&self, handle: &Handle) -> BufferArg {
        Self::values(handle, self.channels * self.rows)
    }

    /// Returns a matrix `[channels, channels]`: the factor, or the Hessian.
    fn square(&self, handle: &Handle) -> BufferArg {
        Self::values(handle, self.channels * self.channels)
    }

    fn codes(&self) -> CodesLaunch {
        let blocks = self.channels / self.of_block.scheme.block_size;
        CodesLaunch::new(
            self.matrix(&self.elements),
            Self::values(&self.scales, blocks * self.rows),
            Self::values(&self.errors, GROUP.min(self.channels) * self.rows),
        )
    }

    /// Returns the arguments for some channels of a group.
    fn block_args(&self, channels: Range<usize>, group: usize) -> GptqBlockArgsLaunch {
        let [rows, all, first, end, group] =
            [self.rows, self.channels, channels.start, channels.end, group].map(|n| n as u32);
        let scheme = &self.of_block.scheme;
        let amax = Self::values(&self.amax, scheme.tensor_scales(self.rows));
        let blueprint = Blueprint::of(scheme, false);
        GptqBlockArgsLaunch::new(
            amax,
            rows,
            all,
            first,
            end,
            group,
            tensor_scale_args(&self.of_block),
            blueprint,
        )
    }

    /// Iterates over the channels of each group.
    fn groups(&self) -> impl Iterator<Item = Range<usize>> {
        let channels = self.channels;
        (0..channels).step_by(GROUP).map(move |group| group..channels.min(group + GROUP))
    }

    /// Iterates over the channels of each block of a group.
    fn blocks(&self, group: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let size = self.of_block.scheme.block_size;
        group.clone().step_by(size).map(move |block| block..block + size)
    }
}

/// Steps of the algorithm.
impl WeightState<'_> {
    /// Runs steps 1 to 3: rounds block after block and propagates the errors to later channels.
    fn round(&self) -> Result<(), Refusal> {
        let factor = &self.hessian_factor.factor;
        let weights = self.client.empty(4 * self.channels * self.rows);
        let items = self.channels * self.rows;
        let (from, to) = (self.matrix(&self.original), self.matrix(&weights));
        for_items!(self, items, copy_kernel, from, to, items as u32);
        for group in self.groups() {
            for block in self.blocks(&group) {
                let sse = self.of_block.scheme.with_method(Method::SSE);
                let chosen = quantize_weighted(
                    self.client,
                    self.device,
                    Self::from(&weights, block.start, self.rows),
                    self.amax.clone(),
                    Some(Self::from(&self.hessian_factor.channel_weights, block.start, 1)),
                    &Problem { scheme: sse, ..self.of_block },
                )?;
                for_rows!(
                    self,
                    round_kernel,
                    self.matrix(&weights),
                    Self::values(&chosen.scales, self.rows),
                    self.square(factor),
                    self.codes(),
                    self.block_args(block.clone(), group.start),
                );
                let others = Region::of(block.end..group.end);
                self.propagate(&weights, factor, block, group.start, others);
            }
            let others = Region::of(group.end..self.channels);
            self.propagate(&weights, factor, group.clone(), group.start, others);
        }
        Ok(())
    }

    /// Runs steps 4 to 6: sweeps over all blocks, with `R = (w - q) H` kept up to date.
    fn improve(&self, options: &Gptq) -> Result<(), Refusal> {
        let hessian = &self.hessian_factor.hessian;
        let residuals = self.client.empty(4 * self.channels * self.rows);
        for group in self.groups() {
            let items = group.len() * self.rows;
            let (original, args) =
                (self.matrix(&self.original), self.block_args(group.clone(), group.start));
            for_items!(self, items, change_kernel, original, self.codes(), args);
            let region = Region { fresh: group.start == 0, ..Region::of(0..self.channels) };
            self.propagate(&residuals, hessian, group.clone(), group.start, region);
        }
        let rounds = options.sweeps.max(options.refits);
        for round in 0..rounds {
            let (moves, refits) = (round < options.sweeps, round < options.refits);
            let is_last = round + 1 == rounds;
            if moves {
                self.sweep(&residuals, is_last && !refits, |block, group| {
                    self.move_codes(&residuals, block, group);
                    Ok(())
                })?;
            }
            if refits {
                self.sweep(&residuals, is_last, |block, group| {
                    self.choose_anew(&residuals, block, group)
                })?;
            }
        }
        Ok(())
    }

    /// Lets `improve` change one block after the other, and updates the residuals. In the last
    /// sweep only residuals of later channels are updated: no others are read again.
    fn sweep(
        &self,
        residuals: &Handle,
        is_last: bool,
        improve: impl Fn(Range<usize>, usize) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let hessian = &self.hessian_factor.hessian;
        for group in self.groups() {
            for block in self.blocks(&group) {
                improve(block.clone(), group.start)?;
                // Within the group at once, beyond it at its end.
                let start = if is_last { block.end } else { group.start };
                let near = Region::of(start..group.end);
                self.propagate(residuals, hessian, block, group.start, near);
            }
            let others = if is_last {
                Region::of(group.end..self.channels)
            } else {
                Region { skipped: group.clone(), ..Region::of(0..self.channels) }
            };
            self.propagate(residuals, hessian, group.clone(), group.start, others);
        }
        Ok(())
    }

    /// Runs step 5: moves every code of a block to the best one while all others stay.
    fn move_codes(&self, residuals: &Handle, block: Range<usize>, group: usize) {
        for_rows!(
            self,
            move_kernel,
            self.matrix(residuals),
            self.square(&self.hessian_factor.hessian),
            self.codes(),
            self.block_args(block, group),
        );
    }

    /// Runs step 6: searches scale and codes of a block again, with all other blocks fixed.
    fn choose_anew(
        &self,
        residuals: &Handle,
        block: Range<usize>,
        group: usize,
    ) -> Result<(), Refusal> {
        let size = self.of_block.scheme.block_size;
        let targets = self.client.empty(4 * size * self.rows);
        for_rows!(
            self,
            aim_kernel,
            self.matrix(residuals),
            Self::values(&self.hessian_factor.inverses, self.channels * size),
            Self::values(&targets, size * self.rows),
            self.codes(),
            self.block_args(block.clone(), group),
        );
        let Hessians { values, bounds } = &self.hessian_factor.blocks;
        let hessians = Hessians {
            values: Self::from(values, block.start, size),
            bounds: Self::from(bounds, block.start, 1),
        };
        let chosen = quantize_by_hessian(
            self.client,
            self.device,
            targets.clone(),
            self.amax.clone(),
            hessians,
            &self.of_block,
        )?;
        for_rows!(
            self,
            accept_kernel,
            Self::values(&targets, size * self.rows),
            Self::values(&chosen.codes, self.of_block.code_bytes() / 4),
            Self::values(&chosen.scales, self.rows),
            self.square(&self.hessian_factor.hessian),
            self.codes(),
            self.block_args(block, group),
        );
        Ok(())
    }

    /// Propagates the errors of some channels of a group to a region.
    fn propagate(
        &self,
        target: &Handle,
        matrix: &Handle,
        from: Range<usize>,
        group: usize,
        region: Region,
    ) {
        let errors = Errors {
            values: &self.errors,
            group: GROUP.min(self.channels),
            from: from.start - group..from.end - group,
            first: from.start,
        };
        let shape = [self.rows, self.channels];
        propagate(self.client, self.device, target, matrix, errors, shape, region);
    }

    /// Runs step 7: writes codes and scales, with the blocks in their old order.
    fn pack(&self, packed: &PackedHandles, problem: &Problem) {
        let blocks = problem.blocks();
        let words = problem.scheme.block_size / 8;
        for_items!(
            self,
            blocks * self.rows,
            pack_kernel,
            words,
            Self::values(&self.hessian_factor.order, blocks),
            packed.write(problem, words),
            self.codes(),
            self.block_args(0..self.channels, 0),
        );
    }
}
