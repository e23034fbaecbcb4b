//! RMSNorm: `x / sqrt(mean(x^2) + epsilon) * weight` along rows. A cube takes a row.

use burn_fp4_search::host::View;
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::row::{sum_of_cube, widest_vector};
use crate::memory::check_memory;
use crate::numeric::element::narrow;
use crate::plan::{Capability, Conversion, Dtype, Refusal, UNITS};

/// Outputs of [`rms_norm`], in the shape and dtype of its input.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Normalized {
    /// The input plus the update; none without an update.
    pub sums: Option<Handle>,
    /// The normalized sums, or the normalized input.
    pub normalized: Handle,
}

/// Normalizes rows `[rows, channels]`, after adding an update of the same shape. All operands have
/// one dtype; the arithmetic is f32. Sums are rounded to the dtype before they are normalized.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, rms_norm};
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let upload = |values: &[f32]| client.create_from_slice(f32::as_bytes(values));
/// let read = |handle| f32::from_bytes(&client.read_one_unchecked(handle)).to_vec();
/// let (input, update) = (upload(&[3.0, -5.0]), Some(upload(&[1.0, 1.0])));
/// let weight = upload(&[1.0, 10.0]);
/// let found = rms_norm(&client, &device, input, update, weight, [1, 2], Dtype::F32, 0.0)?;
/// assert_eq!(read(found.sums.expect("an update")), [4.0, -4.0]);
/// assert_eq!(read(found.normalized), [1.0, -10.0]); // divided by 4, times the weight
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
#[allow(clippy::too_many_arguments)]
pub fn rms_norm(
    client: &Client,
    device: &Capability,
    input: Handle,
    update: Option<Handle>,
    weight: Handle,
    [rows, channels]: [usize; 2],
    dtype: Dtype,
    epsilon: f32,
) -> Result<Normalized, Refusal> {
    device.check_decoder(dtype)?;
    let (found, expected) = (rows.saturating_mul(channels), View::MAX_LEN);
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    let bytes = found * dtype.size();
    check_memory("input", &input, bytes)?;
    check_memory("weight", &weight, channels * dtype.size())?;
    if let Some(update) = &update {
        check_memory("update", update, bytes)?;
    }
    let outputs = Normalized {
        sums: update.as_ref().map(|_| client.empty(bytes)),
        normalized: client.empty(bytes),
    };
    if bytes == 0 {
        return Ok(outputs);
    }
    let launch = match dtype {
        Dtype::F32 => launch::<f32>,
        Dtype::F16 => launch::<f16>,
        Dtype::Bf16 => launch::<bf16>,
    };
    let vector = widest_vector(channels, dtype);
    let conversion = Conversion::to(dtype, device);
    let lengths = [rows, channels, vector];
    launch(client, device, [input, weight], update, &outputs, lengths, epsilon, conversion);
    Ok(outputs)
}

/// Largest number of vectors of a row that a unit keeps in registers. It reads others twice.
const KEPT: usize = 4;

#[allow(clippy::too_many_arguments)]
fn launch<F: Float>(
    client: &Client,
    device: &Capability,
    [input, weight]: [Handle; 2],
    update: Option<Handle>,
    outputs: &Normalized,
    [rows, channels, vector]: [usize; 3],
    epsilon: f32,
    conversion: Conversion,
) {
    let units = device.units_of_row(UNITS);
    let vectors = channels / vector;
    // CubeCL's CPU runtime does not compile rows of bf16 in registers.
    let kept = if device.plane > 1 { vectors.div_ceil(units as usize).min(KEPT) } else { 0 };
    let len = rows * vectors;
    let [x, y] = device.two_dimensions(rows as u32);
    let adds = update.is_some();
    let sums = outputs.sums.clone().unwrap_or_else(|| outputs.normalized.clone());
    // SAFETY: the lengths match the shape. Without an update it and the sums stand for the input
    // and the output, and are not used.
    unsafe {
        norm_kernel::launch_unchecked::<F>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(units),
            vector,
            BufferArg::from_raw_parts(input.clone(), len),
            BufferArg::from_raw_parts(update.unwrap_or(input), len),
            BufferArg::from_raw_parts(weight, vectors),
            BufferArg::from_raw_parts(sums, len),
            BufferArg::from_raw_parts(outputs.normalized.clone(), len),
            rows as u32,
            vectors as u32,
            epsilon,
            vector as u32,
            adds,
            kept as u32,
            conversion,
            device.plane,
            units,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn norm_kernel<F: Float, N: Size>(
    input: &[Vector<F, N>],
    update: &[Vector<F, N>],
    weight: &[Vector<F, N>],
    sums: &mut [Vector<F, N>],
    normalized: &mut [Vector<F, N>],
    rows: u32,
    vectors: u32,
    epsilon: f32,
    #[comptime] vector: u32,
    #[comptime] adds: bool,
    #[comptime] kept: u32,
    #[comptime] conversion: Conversion,
    #[comptime] plane: u32,
    #[comptime] units: u32,
) {
    if CUBE_POS as u32 >= rows {
        terminate!();
    }
    let first = CUBE_POS as u32 * vectors;
    // Loaded at once, before any of them is waited for.
    let mut values = Array::<Vector<F, N>>::new(comptime!(kept.max(1) as usize));
    let mut updates = Array::<Vector<F, N>>::new(comptime!(kept.max(1) as usize));
    let mut weights = Array::<Vector<F, N>>::new(comptime!(kept.max(1) as usize));
    #[unroll]
    for turn in 0..kept {
        let at = min(UNIT_POS + comptime!(turn * units), vectors - 1);
        values[turn as usize] = input[(first + at) as usize];
        if comptime!(adds) {
            updates[turn as usize] = update[(first + at) as usize];
        }
        weights[turn as usize] = weight[at as usize];
    }
    let mut squares = 0.0f32.runtime();
    #[unroll]
    for turn in 0..kept {
        let at = UNIT_POS + comptime!(turn * units);
        if comptime!(adds) {
            let added = updates[turn as usize];
            values[turn as usize] =
                sum_of::<F, N>(values[turn as usize], added, vector, conversion);
        }
        if at < vectors {
            if comptime!(adds) {
                sums[(first + at) as usize] = values[turn as usize];
            }
            squares = add_squares::<F, N>(squares, values[turn as usize], vector);
        }
    }
    let mut at = UNIT_POS + comptime!(kept * units);
    while at < vectors {
        let mut values = input[(first + at) as usize];
        if comptime!(adds) {
            values = sum_of::<F, N>(values, update[(first + at) as usize], vector, conversion);
            sums[(first + at) as usize] = values;
        }
        squares = add_squares::<F, N>(squares, values, vector);
        at += units;
    }
    let mean = sum_of_cube(squares, plane, units) / f32::cast_from(vectors * vector);
    let factor = 1.0f32 / (mean + epsilon).sqrt();
    #[unroll]
    for turn in 0..kept {
        let at = UNIT_POS + comptime!(turn * units);
        if at < vectors {
            let (values, weights) = (values[turn as usize], weights[turn as usize]);
            normalized[(first + at) as usize] =
                scaled::<F, N>(values, weights, factor, vector, conversion);
        }
    }
    let mut at = UNIT_POS + comptime!(kept * units);
    while at < vectors {
        let values = if comptime!(adds) {
            sums[(first + at) as usize]
        } else {
            input[(first + at) as usize]
        };
        normalized[(first + at) as usize] =
            scaled::<F, N>(values, weight[at as usize], factor, vector, conversion);
        at += units;
    }
}

/// Adds two vectors, rounded to their dtype.
#[cube]
pub(crate) fn sum_of<F: Float, N: Size>(
    values: Vector<F, N>,
    update: Vector<F, N>,
    #[comptime] vector: u32,
    #[comptime] conversion: Conversion,
) -> Vector<F, N> {
    let mut sum = Vector::<F, N>::empty();
    #[unroll]
    for index in 0..comptime!(vector as usize) {
        let value = f32::cast_from(values.extract(index));
        sum.insert(index, narrow::<F>(value + f32::cast_from(update.extract(index)), conversion));
    }
    sum
}

/// Adds the squares of a vector to a sum, one after the other.
#[cube]
pub(crate) fn add_squares<F: Float, N: Size>(
    squares: f32,
    values: Vector<F, N>,
    #[comptime] vector: u32,
) -> f32 {
    let mut squares = squares;
    #[unroll]
    for index in 0..comptime!(vector as usize) {
        let value = f32::cast_from(values.extract(index));
        squares = fma(value, value, squares);
    }
    squares
}

/// Multiplies a vector by a factor, then by weights, rounded once.
#[cube]
pub(crate) fn scaled<F: Float, N: Size>(
    values: Vector<F, N>,
    weights: Vector<F, N>,
    factor: f32,
    #[comptime] vector: u32,
    #[comptime] conversion: Conversion,
) -> Vector<F, N> {
    let mut output = Vector::<F, N>::empty();
    #[unroll]
    for index in 0..comptime!(vector as usize) {
        let value = f32::cast_from(values.extract(index)) * factor;
        let weight = f32::cast_from(weights.extract(index));
        output.insert(index, narrow::<F>(value * weight, conversion));
    }
    output
}
