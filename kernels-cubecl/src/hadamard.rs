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
            let start = comptime!(row * SIZE);
            let mut sums = Array::<f32>::new(comptime!(SIZE as usize));
            #[unroll]
            for at in 0..SIZE {
                // 1/4, with the sign that all terms of a sum share on the way back.
                let quarter = if comptime!(inverse) {
                    f32::reinterpret(0x3E80_0000u32 | sign_bit(signs, at))
                } else {
                    0.25f32.runtime()
                };
                let mut sum = 0.0f32.runtime();
                #[unroll]
                for term in 0..SIZE {
                    let value = elements[comptime!((start + term) as usize)];
                    let bits = u32::reinterpret(value);
                    let signed = if comptime!(inverse) {
                        value
                    } else {
                        f32::reinterpret(bits ^ sign_bit(signs, term))
                    };
                    if comptime!((term & at).count_ones().is_multiple_of(2)) {
                        sum = fma(signed, quarter, sum);
                    } else {
                        sum = fma(signed, -quarter, sum);
                    }
                }
                sums[comptime!(at as usize)] = sum;
            }
            #[unroll]
            for at in 0..SIZE {
                elements[comptime!((start + at) as usize)] = sums[comptime!(at as usize)];
            }
        }
        store_blocks::<F, N>(&elements, output, &place, &extent, SIZE, share);
    }
}

/// The sign bit of one of 16 signs.
#[cube]
fn sign_bit(signs: u32, #[comptime] index: u32) -> u32 {
    ((signs >> index) & 1u32) << 31u32
}
