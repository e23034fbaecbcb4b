//! Scales and codes that minimize `r^T H r` of each block.
//!
//! The units of a cube take the same block of different rows and share its H, in shared memory if
//! that is faster on the device.
//!
//! ```text
//!           block 0   block 1   ...
//! rows    +---------+---------+
//!   0     | cube 0  | cube 1  |     a unit of a cube takes a row of its block;
//!   ..    | H of 0  | H of 1  |     all read the same H
//! units-1 +---------+---------+
//!         | cube n  | ...
//! ```

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::memory::{PackedHandles, PackedOut, check_memory, store_tensor_scale};
use crate::numeric::rule::tensor_factor;
use crate::plan::{Blueprint, Capability, Launch, Operation, Problem, Refusal, plan};
use crate::search::block_hessian::{block_hessian, load_shared, shared_vectors};
use crate::search::hessian::search;
use crate::search::quantize_args::{QuantizeArgs, quantize_args};
use crate::tensor::indexing::origin_of;
use crate::tensor::load_store::load_blocks;

/// The Hessians of the blocks of a row in device memory.
#[derive(Debug, Clone)]
pub struct Hessians {
    /// f32 `[blocks, block_size, block_size]`, symmetric;
    /// [`BlockHessians::values`](burn_fp4_search::BlockHessians::values).
    pub values: Handle,
    /// f32 `[blocks, block_size]`;
    /// [`BlockHessians::bounds`](burn_fp4_search::BlockHessians::bounds).
    pub bounds: Handle,
}

/// Quantizes a tensor with the search [`Hessian`](burn_fp4_search::Method::Hessian) or
/// [`CoordinateDescent`](burn_fp4_search::Method::CoordinateDescent), given the result of
/// [`amax`](crate::amax()).
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, Hessians, Problem, dequantize, quantize_by_hessian};
/// use burn_fp4_search::host::View;
/// use burn_fp4_search::{BlockHessians, Fp4Scheme, Method};
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let upload = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
/// let scheme = Fp4Scheme::mxfp4().with_block_size(16).with_method(Method::Hessian);
/// let problem = Problem { view: View::rows(1, 16), dtype: Dtype::F32, scheme };
/// // The input of the first channel is small. An error there costs less than elsewhere.
/// let mut hessian = [0.0f32; 16 * 16];
/// (0..16).for_each(|at| hessian[at * 17] = if at == 0 { 0.25 } else { 1.0 });
/// let hessians = BlockHessians::new(hessian.to_vec(), 16)?;
/// let (values, bounds) = (upload(hessians.values()), upload(hessians.bounds()));
/// let hessians = Hessians { values, bounds };
///
/// let mut block = [0.5f32; 16];
/// block[0] = 8.0;
/// let (values, amax) = (upload(&block), client.empty(4)); // MXFP4 has no tensor scale
/// let packed = quantize_by_hessian(&client, &device, values, amax, hessians, &problem)?;
/// let restored = dequantize(&client, &device, packed, &problem)?;
/// block[0] = 6.0;
/// assert_eq!(f32::from_bytes(&client.read_one_unchecked(restored)), block);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn quantize_by_hessian(
    client: &Client,
    device: &Capability,
    values: Handle,
    amax: Handle,
    hessians: Hessians,
    problem: &Problem,
) -> Result<PackedHandles, Refusal> {
    let launch = plan(Operation::QuantizeByHessian, problem, device)?;
    problem.check_values(&values)?;
    problem.check_amax(&amax)?;
    let of_row = 4 * problem.view.axis;
    check_memory("the Hessians' bounds", &hessians.bounds, of_row)?;
    check_memory("the Hessians", &hessians.values, of_row * problem.scheme.block_size)?;
    let packed = PackedHandles::empty(client, problem);
    if launch.items > 0 {
        if launch.thread_tile.wide() {
            run::<u32>(client, values, amax, hessians, problem, launch, &packed);
        } else {
            run::<u16>(client, values, amax, hessians, problem, launch, &packed);
        }
    }
    Ok(packed)
}

fn run<E: Int>(
    client: &Client,
    values: Handle,
    amax: Handle,
    hessians: Hessians,
    problem: &Problem,
    launch: Launch,
    packed: &PackedHandles,
) {
    let size = problem.scheme.block_size;
    let words = size / 8;
    let blueprint = Blueprint::of(&problem.scheme, false);
    // SAFETY: the lengths match the problem; units beyond the last row write nothing.
    unsafe {
        hessian_kernel::launch_unchecked::<E>(
            client,
            launch.count(),
            CubeDim::new_1d(launch.units),
            launch.thread_tile.words() as usize,
            4,
            words,
            quantize_args(values, amax, Some(hessians.bounds), blueprint, problem, &launch),
            BufferArg::from_raw_parts(hessians.values, problem.view.axis * size / 4),
            packed.write(problem, words),
        );
    }
}

/// `args.weights` are the bounds of the Hessians.
#[cube(launch_unchecked)]
fn hessian_kernel<E: Int, N: Size, H: Size, W: Size>(
    args: &QuantizeArgs<E, N>,
    hessians: &[Vector<f32, H>],
    packed: &mut PackedOut<W>,
) {
    let size = comptime!(args.blueprint.block_size);
    let cube = CUBE_POS as u32;
    if cube < args.dims.items / CUBE_DIM {
        let block = cube % args.dims.blocks;
        let row = cube / args.dims.blocks * CUBE_DIM + UNIT_POS;
        if comptime!(args.thread_tile.through_shared_memory) {
            let vectors = comptime!(shared_vectors(size) as usize);
            let mut shared = Shared::<[Vector<f32, H>]>::new_slice(vectors);
            load_shared::<H>(&mut shared, hessians, args.weights, block, size);
            sync_cube();
            quantize_row::<E, N, H, W>(args, &shared, 0u32, packed, row, block);
        } else {
            let first = block * comptime!(size * size / 4);
            quantize_row::<E, N, H, W>(args, hessians, first, packed, row, block);
        }
    }
}

/// Quantizes a block of a row. Its H begins at `first`.
#[cube]
fn quantize_row<E: Int, N: Size, H: Size, W: Size>(
    args: &QuantizeArgs<E, N>,
    hessian: &[Vector<f32, H>],
    first: u32,
    packed: &mut PackedOut<W>,
    row: u32,
    block: u32,
) {
    let (blueprint, thread_tile) = comptime!((args.blueprint, args.thread_tile));
    let size = comptime!(blueprint.block_size);
    if row < args.dims.rows {
        let origin = origin_of(row, block, &args.dims, size, thread_tile);
        let elements = load_blocks::<E, N>(args.values, &origin, &args.dims, size, thread_tile);
        let tensor = tensor_factor(args.amax, row, &args.scale_args, blueprint);
        let mut words = Array::<u32>::new(comptime!((size / 8) as usize));
        let stay = (u32::cast_from(args.scale_args.one) - 1u32) & 1u32;
        let channel = block * size;
        let hessian = block_hessian::<H>(
            hessian,
            first,
            stay,
            args.weights,
            channel,
            thread_tile.through_shared_memory,
        );
        let scale =
            search::<H>(&elements, &mut words, &hessian, &tensor, &args.scale_args, blueprint);
        let mut row_codes = Vector::<u32, W>::empty();
        #[unroll]
        for word in 0..comptime!(size / 8) {
            row_codes.insert(comptime!(word as usize), words[word as usize]);
        }
        packed.codes[origin.index as usize] = row_codes;
        packed.scales[origin.index as usize] = u8::cast_from(scale);
        if block == 0u32 && (comptime!(blueprint.by_row) || row == 0u32) {
            store_tensor_scale::<W>(packed, row, tensor.decode, blueprint);
        }
    }
}
