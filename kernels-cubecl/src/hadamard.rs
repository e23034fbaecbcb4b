use burn_fp4_search::host::View;
use burn_fp4_search::{Fp4Scheme, Hadamard};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::plan::{Share, UNITS};
use crate::quantize::extent;
use crate::share::{Extent, ExtentLaunch, item, load_blocks, place, store_blocks};
use crate::{Capability, Dtype, Launch, Operation, Problem, Refusal, plan};

/// Values that are transformed together.
const SIZE: u32 = Hadamard::SIZE as u32;

/// Transforms every 16 neighbours along an axis, or back, as
/// [`host::hadamard`](burn_fp4_search::host::hadamard) does.
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn hadamard(
    client: &Client,
    device: &Capability,
    values: Handle,
    view: View,
    dtype: Dtype,
    hadamard: Hadamard,
    inverse: bool,
) -> Result<Handle, Refusal> {
    // Groups are as long as NVFP4's blocks.
    let problem = Problem { view, dtype, scheme: Fp4Scheme::nvfp4() };
    let launch = plan(Operation::Hadamard, &problem, device)?;
    let signs = u32::from(hadamard.signs);
    let launch_kernel = match (dtype, launch.share.wide()) {
        (Dtype::F16, true) => launch_hadamard::<u32, f16>,
        (Dtype::F16, false) => launch_hadamard::<u16, f16>,
        (Dtype::Bf16, true) => launch_hadamard::<u32, bf16>,
        (Dtype::Bf16, false) => launch_hadamard::<u16, bf16>,
        (Dtype::F32, _) => launch_hadamard::<u32, f32>,
    };
    Ok(launch_kernel(client, values, &problem, launch, signs, inverse))
}

fn launch_hadamard<E: Int, F: Float>(
    client: &Client,
    values: Handle,
    problem: &Problem,
    launch: Launch,
    signs: u32,
    inverse: bool,
) -> Handle {
    let output = client.empty(problem.view.len() * problem.dtype.size());
    if launch.items == 0 {
        return output;
    }
    let share = launch.share;
    let vectors = problem.view.len() / share.vector as usize;
    let extent: ExtentLaunch = extent(problem, &launch);
    // SAFETY: the lengths are those of the problem, and units beyond `items` write nothing.
    unsafe {
        hadamard_kernel::launch_unchecked::<E, F>(
            client,
            launch.count(),
            CubeDim::new_1d(UNITS),
            share.words() as usize,
            share.vector as usize,
            BufferArg::from_raw_parts(values, vectors),
            BufferArg::from_raw_parts(output.clone(), vectors),
            extent,
            signs,
            inverse,
            share,
        );
    }
    output
}

#[cube(launch_unchecked)]
fn hadamard_kernel<E: Int, M: Size, F: Float, N: Size>(
    values: &[Vector<E, M>],
    output: &mut [Vector<F, N>],
    extent: Extent,
    signs: u32,
    #[comptime] inverse: bool,
    #[comptime] share: Share,
) {
    let item = item(&extent);
    if item < extent.items {
        let place = place(item, &extent, SIZE, share);
        let mut elements = load_blocks::<E, M>(values, &place, &extent, SIZE, share);
        #[unroll]
        for row in 0..share.rows {
            if comptime!(!inverse) {
                change_signs(&mut elements, row * SIZE, signs);
            }
            let mut sums = Array::<f32>::new(comptime!(SIZE as usize));
            #[unroll]
            for at in 0..SIZE {
                let mut sum = 0.0f32.runtime();
                #[unroll]
                for term in 0..SIZE {
                    let factor = comptime!(plain_factor(term, at));
                    sum = fma(elements[comptime!((row * SIZE + term) as usize)], factor, sum);
                }
                sums[comptime!(at as usize)] = sum;
            }
            if comptime!(inverse) {
                change_signs(&mut sums, 0u32, signs);
            }
            #[unroll]
            for at in 0..SIZE {
                elements[comptime!((row * SIZE + at) as usize)] = sums[comptime!(at as usize)];
            }
        }
        store_blocks::<F, N>(&elements, output, &place, &extent, SIZE, share);
    }
}

/// An element of the matrix without signs.
fn plain_factor(term: u32, sum: u32) -> f32 {
    Hadamard { signs: 0 }.factor(term as usize, sum as usize)
}

/// Negates those of 16 elements whose bit is set.
#[cube]
fn change_signs(elements: &mut Array<f32>, #[comptime] start: u32, signs: u32) {
    #[unroll]
    for index in 0..SIZE {
        let at = comptime!((start + index) as usize);
        let sign = ((signs >> index) & 1u32) << 31u32;
        elements[at] = f32::reinterpret(u32::reinterpret(elements[at]) ^ sign);
    }
}
