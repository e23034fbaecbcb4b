//! SwiGLU: `gate / (1 + exp(-gate)) * up`, the gate of an MLP.

use burn_fp4_search::host::View;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::row::widest_vector;
use crate::memory::check_memory;
use crate::numeric::element::narrow;
use crate::plan::{Capability, Conversion, Dtype, Refusal, UNITS};

/// Computes SwiGLU of `len` gates and values, in f32 and rounded once.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, swiglu};
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let upload = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
/// let (gate, up) = (upload(&[0.0, 80.0]), upload(&[5.0, 0.5]));
/// let found = swiglu(&client, &device, gate, up, 2, Dtype::F32)?;
/// assert_eq!(f32::from_bytes(&client.read_one_unchecked(found)), [0.0, 40.0]);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn swiglu(
    client: &Client,
    device: &Capability,
    gate: Handle,
    up: Handle,
    len: usize,
    dtype: Dtype,
) -> Result<Handle, Refusal> {
    device.check_decoder(dtype)?;
    if len > View::MAX_LEN {
        return Err(Refusal::TooLarge { found: len, expected: View::MAX_LEN });
    }
    let bytes = len * dtype.size();
    check_memory("gate", &gate, bytes)?;
    check_memory("up", &up, bytes)?;
    let output = client.empty(bytes);
    if len == 0 {
        return Ok(output);
    }
    let launch = match dtype {
        Dtype::F32 => launch::<f32>,
        Dtype::F16 => launch::<f16>,
        Dtype::Bf16 => launch::<bf16>,
    };
    let vector = widest_vector(len, dtype);
    launch(client, device, [gate, up, output.clone()], [len, vector], dtype);
    Ok(output)
}

fn launch<F: Float>(
    client: &Client,
    device: &Capability,
    [gate, up, output]: [Handle; 3],
    [len, vector]: [usize; 2],
    dtype: Dtype,
) {
    let units = device.units_of_row(UNITS);
    let vectors = len / vector;
    let [x, y] = device.two_dimensions(vectors.div_ceil(units as usize) as u32);
    // SAFETY: the memory holds `len` values, which the vectors divide.
    unsafe {
        swiglu_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(units),
            vector,
            BufferArg::from_raw_parts(gate, vectors),
            BufferArg::from_raw_parts(up, vectors),
            BufferArg::from_raw_parts(output, vectors),
            vectors as u32,
            vector as u32,
            Conversion::to(dtype, device),
        );
    }
}

#[cube(launch_unchecked)]
fn swiglu_kernel<F: Float, N: Size>(
    gate: &[Vector<F, N>],
    up: &[Vector<F, N>],
    output: &mut [Vector<F, N>],
    vectors: u32,
    #[comptime] vector: u32,
    #[comptime] conversion: Conversion,
) {
    let at = ABSOLUTE_POS as u32;
    if at < vectors {
        let (gate, up) = (gate[at as usize], up[at as usize]);
        let mut gated = Vector::<F, N>::empty();
        #[unroll]
        for index in 0..comptime!(vector as usize) {
            let (gate, up) =
                (f32::cast_from(gate.extract(index)), f32::cast_from(up.extract(index)));
            gated.insert(index, narrow::<F>(silu(gate) * up, conversion));
        }
        output[at as usize] = gated;
    }
}

/// Computes `gate / (1 + exp(-gate))`.
#[cube]
pub(crate) fn silu(gate: f32) -> f32 {
    gate * (1.0f32 / (1.0f32 + (-gate).exp()))
}
