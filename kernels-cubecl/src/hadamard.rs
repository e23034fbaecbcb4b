//! Hadamard transform of every 16 neighbours along an axis, before the operands of a matmul are
//! quantized.

use burn_fp4_search::host::View;
use burn_fp4_search::{Fp4Scheme, Hadamard};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::numeric::hadamard::{SIZE, transform};
use crate::plan::{
    Capability, Dtype, Launch, Operation, Problem, Refusal, ThreadTile, UNITS, plan,
};
use crate::tensor::indexing::{Dims, DimsLaunch, dims, tile_index, tile_origin};
use crate::tensor::load_store::{load_blocks, store_blocks};

/// Transforms every 16 neighbours along an axis, or transforms them back; see
/// [`host::hadamard`](burn_fp4_search::host::hadamard).
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, hadamard};
/// use burn_fp4_search::Hadamard;
/// use burn_fp4_search::host::View;
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let read = |handle| f32::from_bytes(&client.read_one_unchecked(handle)).to_vec();
/// let mut outlier = [0.0f32; 16];
/// outlier[3] = 8.0;
/// let values = client.create_from_slice(f32::as_bytes(&outlier));
/// let (view, dtype, transform) = (View::rows(1, 16), Dtype::F32, Hadamard::default());
/// let spread = hadamard(&client, &device, values, view, dtype, transform, false)?;
/// assert!(read(spread.clone()).iter().all(|value| value.abs() == 2.0));
/// let back = hadamard(&client, &device, spread, view, dtype, transform, true)?;
/// assert_eq!(read(back), outlier);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
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
    // A transform is as long as a block of this size.
    let scheme = Fp4Scheme::default().with_block_size(SIZE as usize);
    let problem = Problem { view, dtype, scheme };
    let launch = plan(Operation::Hadamard, &problem, device)?;
    problem.check_values(&values)?;
    let signs = u32::from(hadamard.signs);
    let launch_kernel = match (dtype, launch.thread_tile.wide()) {
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
    let thread_tile = launch.thread_tile;
    let vectors = problem.view.len() / thread_tile.vector as usize;
    let dims: DimsLaunch = dims(problem, &launch);
    // SAFETY: the lengths match the problem, and units beyond `items` write nothing.
    unsafe {
        hadamard_kernel::launch_unchecked::<E, F>(
            client,
            launch.count(),
            CubeDim::new_1d(UNITS),
            thread_tile.words() as usize,
            thread_tile.vector as usize,
            BufferArg::from_raw_parts(values, vectors),
            BufferArg::from_raw_parts(output.clone(), vectors),
            dims,
            signs,
            inverse,
            thread_tile,
        );
    }
    output
}

#[cube(launch_unchecked)]
fn hadamard_kernel<E: Int, M: Size, F: Float, N: Size>(
    values: &[Vector<E, M>],
    output: &mut [Vector<F, N>],
    dims: Dims,
    signs: u32,
    #[comptime] inverse: bool,
    #[comptime] thread_tile: ThreadTile,
) {
    let tile_index = tile_index(&dims);
    if tile_index < dims.items {
        let origin = tile_origin(tile_index, &dims, SIZE, thread_tile);
        let mut elements = load_blocks::<E, M>(values, &origin, &dims, SIZE, thread_tile);
        #[unroll]
        for row in 0..thread_tile.rows {
            transform(&mut elements, comptime!(row * SIZE), signs, inverse);
        }
        store_blocks::<F, N>(&elements, output, &origin, &dims, SIZE, thread_tile);
    }
}
