//! Hadamard transform of neighbours along an axis, before the operands of a matmul are quantized.

use burn_fp4_search::formats::FormatError;
use burn_fp4_search::host::View;
use burn_fp4_search::{Fp4Scheme, Hadamard, SearchError};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use crate::memory::check_memory;
use crate::numeric::element::narrow;
use crate::numeric::hadamard::{SIZE, sum_by_butterflies, transform};
use crate::plan::{
    Capability, Conversion, Dtype, Launch, Operation, Problem, Refusal, ThreadTile, UNITS, plan,
};
use crate::tensor::indexing::{Dims, DimsLaunch, dims, tile_index, tile_origin};
use crate::tensor::load_store::{load_blocks, store_blocks};

/// Transforms neighbours along an axis, or transforms them back; see
/// [`host::hadamard`](burn_fp4_search::host::hadamard), whose bits it has. On the wgpu runtime the
/// transform of 16 neighbours is refused.
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
    if hadamard.size() > SIZE as usize {
        return butterflies(client, device, values, view, dtype, hadamard);
    }
    if device.portable.is_some() {
        return Err(Refusal::Device { lacks: "has no kernel for 16 neighbours" });
    }
    // A transform is as long as a block of this size.
    let scheme = Fp4Scheme::default().with_block_size(SIZE as usize);
    let problem = Problem { view, dtype, scheme };
    let launch = plan(Operation::Hadamard, &problem, device)?;
    problem.check_values(&values)?;
    let signs = u32::from(hadamard.signs());
    let launch_kernel = match (dtype, launch.thread_tile.wide()) {
        (Dtype::F16, true) => launch_hadamard::<u32, f16>,
        (Dtype::F16, false) => launch_hadamard::<u16, f16>,
        (Dtype::Bf16, true) => launch_hadamard::<u32, bf16>,
        (Dtype::Bf16, false) => launch_hadamard::<u16, bf16>,
        (Dtype::F32, _) => launch_hadamard::<u32, f32>,
    };
    Ok(launch_kernel(client, values, &problem, launch, signs, inverse))
}

/// Transforms more than 16 neighbours: there and back are the same. A unit takes a group of them.
fn butterflies(
    client: &Client,
    device: &Capability,
    values: Handle,
    view: View,
    dtype: Dtype,
    hadamard: Hadamard,
) -> Result<Handle, Refusal> {
    device.check_portable(dtype)?;
    let size = hadamard.size();
    if !view.axis.is_multiple_of(size) {
        let problem = FormatError::Indivisible { cols: view.axis, block_size: size };
        return Err(SearchError::from(problem).into());
    }
    let (found, expected) = (view.len(), View::MAX_LEN);
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    check_memory("values", &values, found * dtype.size())?;
    let output = client.empty(found * dtype.size());
    if found > 0 {
        let launch = match dtype {
            Dtype::F32 => launch_butterflies::<f32>,
            Dtype::F16 => launch_butterflies::<f16>,
            Dtype::Bf16 => launch_butterflies::<bf16>,
        };
        launch(client, device, [values, output.clone()], view, dtype, hadamard);
    }
    Ok(output)
}

/// Units of a cube: an activation of a token has few groups.
const BUTTERFLY_UNITS: u32 = 32;

fn launch_butterflies<F: Float>(
    client: &Client,
    device: &Capability,
    [values, output]: [Handle; 2],
    view: View,
    dtype: Dtype,
    hadamard: Hadamard,
) {
    let groups = (view.len() / hadamard.size()) as u32;
    let [x, y] = device.two_dimensions(groups.div_ceil(BUTTERFLY_UNITS));
    // SAFETY: the lengths match the view, and units beyond the groups write nothing.
    unsafe {
        butterflies_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(BUTTERFLY_UNITS),
            BufferArg::from_raw_parts(values, view.len()),
            BufferArg::from_raw_parts(output, view.len()),
            groups,
            view.inner as u32,
            hadamard.scale(),
            hadamard.size() as u32,
            Conversion::to(dtype, device),
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn butterflies_kernel<F: Float>(
    values: &[F],
    output: &mut [F],
    groups: u32,
    inner: u32,
    scale: f32,
    #[comptime] size: u32,
    #[comptime] conversion: Conversion,
) {
    let group = ABSOLUTE_POS as u32;
    if group < groups {
        let first = group / inner * size * inner + group % inner;
        let mut elements = Array::<f32>::new(comptime!(size as usize));
        #[unroll]
        for at in 0..size {
            elements[comptime!(at as usize)] =
                f32::cast_from(values[(first + at * inner) as usize]);
        }
        sum_by_butterflies(&mut elements, scale, size);
        #[unroll]
        for at in 0..size {
            output[(first + at * inner) as usize] =
                narrow::<F>(elements[comptime!(at as usize)], conversion);
        }
    }
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
