//! Keys and values in packed KV caches: codes and scales in memory, quantized and dequantized; see
//! [`KvFormat`].

use burn_fp4_search::formats::{E4M3, E8M0, ScaleGrid};
use burn_fp4_search::host::{AttentionShape, FP8_BINADES, KV_BLOCK, KvFormat, View};
use burn_fp4_search::{Fp4Scheme, PowerRounding, ScaleRule};
use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::head::{head_vector, rotated, to_vector};
use crate::memory::check_memory;
use crate::numeric::element::{element_value, nearest_magnitude, round_to_e2m1};
use crate::numeric::hadamard::transform;
use crate::numeric::rule::{
    BlockScale, TensorFactor, code_mask, normalize_magnitude, power_of_two_field,
};
use crate::numeric::scale_grid::{
    float_value, ones, power, power_code, power_reciprocal, round_to_float, scale_value,
};
use crate::plan::{Capability, Conversion, Dtype, Refusal, UNITS};
use crate::search::amax::largest_magnitude;
use crate::search::four_over_six::candidates;

/// Format and scales of a packed KV cache. The codes are where a dense cache has values.
#[derive(Debug, Clone)]
pub struct PackedKv {
    /// Format of keys and values.
    pub format: KvFormat,
    /// Scales of the keys, u8 `[batch, kv_heads, capacity, bytes]`.
    pub key_scales: Handle,
    /// Scales of the values, u8 `[batch, kv_heads, capacity, bytes]`.
    pub value_scales: Handle,
}

impl PackedKv {
    /// Checks that the device has kernels for the cache, and that memory holds the scales.
    pub(super) fn check(&self, device: &Capability, shape: &AttentionShape) -> Result<(), Refusal> {
        device.check_packed_kv()?;
        let &AttentionShape { batch, kv_heads, head_dim, capacity, .. } = shape;
        check_blocks(head_dim)?;
        let [_, scale_bytes] = self.format.bytes_of_head(head_dim);
        let expected = batch * kv_heads * capacity * scale_bytes;
        check_memory("scales of cached keys", &self.key_scales, expected)?;
        check_memory("scales of cached values", &self.value_scales, expected)
    }
}

/// Checks that blocks divide the channels of a head.
fn check_blocks(head_dim: usize) -> Result<(), Refusal> {
    let expected = head_dim.next_multiple_of(KV_BLOCK);
    if head_dim == expected {
        return Ok(());
    }
    let what = "channels of a head of a packed KV cache";
    Err(Refusal::Mismatch { what, expected, found: head_dim })
}

/// Memory of the vectors of a cache, as kernels take it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Words {
    /// Floats of the dtype, as many as in other vectors.
    Dense,
    /// Codes in a u16.
    U16,
    /// Codes in this many u32.
    U32(usize),
}

impl Words {
    /// Returns the memory of `vector` channels.
    pub(super) fn of(format: Option<KvFormat>, vector: u32) -> Self {
        match format.map(|format| vector * code_bits(format)) {
            None => Self::Dense,
            Some(16) => Self::U16,
            Some(bits) => Self::U32(bits as usize / 32),
        }
    }

    /// Returns the values of a vector in memory.
    pub(super) const fn width(self, vector: u32) -> usize {
        match self {
            Self::Dense => vector as usize,
            Self::U16 => 1,
            Self::U32(count) => count,
        }
    }
}

/// Returns the bits of a code.
const fn code_bits(format: KvFormat) -> u32 {
    match format {
        KvFormat::Fp8 => 8,
        KvFormat::NvFp4 | KvFormat::NvFp4Hadamard => 4,
    }
}

/// Returns the codes of a word that holds some of `vector` channels.
const fn codes_of_word(format: KvFormat, vector: u32) -> u32 {
    let codes = 32 / code_bits(format);
    if codes < vector { codes } else { vector }
}

/// Channels of a block.
const BLOCK: u32 = KV_BLOCK as u32;
/// Rule of NVFP4, as in [`KvFormat::scheme`].
const RULE: ScaleRule = Fp4Scheme::nvfp4().rule;

/// Decodes the channels of a vector, before they are multiplied by their scale.
#[cube]
pub(super) fn channels<C: Numeric, W: Size>(
    loaded: Vector<C, W>,
    #[comptime] vector: u32,
    #[comptime] format: Option<KvFormat>,
) -> Array<f32> {
    let mut values = Array::<f32>::new(comptime!(vector as usize));
    #[unroll]
    for index in 0..vector {
        let at = comptime!(index as usize);
        match comptime!(format) {
            None => {
                values[at] = f32::cast_from(loaded.extract(at));
            }
            Some(format) => {
                let codes = comptime!(codes_of_word(format, vector));
                let word = u32::cast_from(loaded.extract(comptime!((index / codes) as usize)));
                // The code goes to the highest bits.
                let code = word << comptime!(32 - code_bits(format) * (index % codes + 1));
                values[at] = if comptime!(format == KvFormat::Fp8) {
                    let bits = (code & 0x8000_0000u32) | ((code >> 4u32) & 0x07F0_0000u32);
                    f32::reinterpret(bits) * comptime!(power(127 - E4M3.bias))
                } else {
                    element_value(code)
                };
            }
        }
    }
    values
}

/// Returns the place of the scale of a vector of a head.
#[cube]
pub(super) fn scale_place(
    head: u32,
    column: u32,
    #[comptime] head_dim: u32,
    #[comptime] vector: u32,
    #[comptime] format: KvFormat,
) -> usize {
    if comptime!(format == KvFormat::Fp8) {
        head as usize
    } else {
        let block = column / comptime!(BLOCK / vector);
        (head * comptime!(head_dim / BLOCK) + block) as usize
    }
}

/// Returns the value of a scale.
#[cube]
pub(super) fn kv_scale<S: Int>(code: S, #[comptime] format: KvFormat) -> f32 {
    let grid = comptime!(match format {
        KvFormat::Fp8 => ScaleGrid::PowersOfTwo(E8M0),
        KvFormat::NvFp4 | KvFormat::NvFp4Hadamard => ScaleGrid::Float(E4M3),
    });
    scale_value(u32::cast_from(code), grid)
}

/// Loads the new key and value of a head, whose first vector is `from`, as f32: the rotated key,
/// then the value. Callers synchronize.
#[cube]
pub(super) fn load_own<F: Float, N: Size>(
    keys: &[Vector<F, N>],
    values: &[Vector<F, N>],
    cos: &[f32],
    sin: &[f32],
    from: u32,
    angles: u32,
    own: &mut Shared<[f32]>,
    #[comptime] head_dim: u32,
    #[comptime] vector: u32,
) {
    let columns = comptime!(head_dim / vector);
    let half = comptime!(columns / 2);
    if UNIT_POS < half {
        let at = from + UNIT_POS;
        let (first, second) = (keys[at as usize], keys[(at + half) as usize]);
        let (low, high) =
            rotated::<F, N>(first, second, cos, sin, angles + UNIT_POS * vector, vector);
        #[unroll]
        for index in 0..vector {
            let to = UNIT_POS * vector + index;
            own[to as usize] = low[index as usize];
            own[(to + comptime!(head_dim / 2)) as usize] = high[index as usize];
        }
    }
    if UNIT_POS < columns {
        let value = values[(from + UNIT_POS) as usize];
        #[unroll]
        for index in 0..vector {
            let to = head_dim + UNIT_POS * vector + index;
            own[to as usize] = f32::cast_from(value.extract(comptime!(index as usize)));
        }
    }
}

/// Quantizes the key and the value that [`load_own`] has loaded, and writes them to a head of the
/// cache. A unit takes a block. All units of a cube take part, and at least two for each block.
#[cube]
pub(super) fn quantize_own<C: Numeric, W: Size, S: Int>(
    own: &Shared<[f32]>,
    key_cache: &mut [Vector<C, W>],
    value_cache: &mut [Vector<C, W>],
    key_scales: &mut [S],
    value_scales: &mut [S],
    head: u32,
    #[comptime] head_dim: u32,
    #[comptime] vector: u32,
    #[comptime] format: KvFormat,
) {
    let blocks = comptime!(head_dim / BLOCK);
    let (of_values, block) = (UNIT_POS / blocks, UNIT_POS % blocks);
    let mut largests = Shared::<[f32]>::new_slice(comptime!((2 * blocks) as usize));
    let mut elements = Array::<f32>::new(comptime!(BLOCK as usize));
    if of_values < 2u32 {
        #[unroll]
        for index in 0..BLOCK {
            elements[comptime!(index as usize)] = own[(UNIT_POS * BLOCK + index) as usize];
        }
        if comptime!(format.transforms_keys()) && of_values == 0u32 {
            transform(&mut elements, 0u32, 0u32.runtime(), false);
        }
        largests[UNIT_POS as usize] = largest_magnitude(&elements, 0u32, BLOCK);
    }
    sync_cube();
    if of_values < 2u32 {
        let mut codes = Array::<u32>::new(comptime!(BLOCK as usize));
        let scale = if comptime!(format == KvFormat::Fp8) {
            let mut largest = largests[(of_values * blocks) as usize];
            #[unroll]
            for other in 1..blocks {
                largest = max_nan(largest, largests[(of_values * blocks + other) as usize]);
            }
            let scale = fp8_scale(largest);
            fp8_codes(&elements, scale, &mut codes);
            scale
        } else {
            let scale = nvfp4_scale(&elements, largests[UNIT_POS as usize]);
            nvfp4_codes(&elements, scale.factor, &mut codes);
            scale.code
        };
        let scale_at =
            if comptime!(format == KvFormat::Fp8) { head } else { head * blocks + block };
        let first = head * comptime!(head_dim / vector) + block * comptime!(BLOCK / vector);
        if of_values == 0u32 {
            key_scales[scale_at as usize] = S::cast_from(scale);
            store_codes::<C, W>(&codes, key_cache, first, vector, format);
        } else {
            value_scales[scale_at as usize] = S::cast_from(scale);
            store_codes::<C, W>(&codes, value_cache, first, vector, format);
        }
    }
}

/// Stores the codes of a block, from the vector `first` on.
#[cube]
fn store_codes<C: Numeric, W: Size>(
    codes: &Array<u32>,
    cache: &mut [Vector<C, W>],
    first: u32,
    #[comptime] vector: u32,
    #[comptime] format: KvFormat,
) {
    let of_word = comptime!(codes_of_word(format, vector));
    #[unroll]
    for part in 0..comptime!(BLOCK / vector) {
        let mut packed = Vector::<C, W>::empty();
        #[unroll]
        for word in 0..comptime!(vector / of_word) {
            let mut bits = 0u32.runtime();
            #[unroll]
            for index in 0..of_word {
                let code = codes[comptime!((part * vector + word * of_word + index) as usize)];
                bits |= code << comptime!(code_bits(format) * index);
            }
            packed.insert(comptime!(word as usize), C::cast_from(bits));
        }
        cache[(first + part) as usize] = packed;
    }
}

/// Returns the code of the scale of a head in FP8.
#[cube]
fn fp8_scale(largest: f32) -> u32 {
    let above = comptime!(u32::from(FP8_BINADES));
    let field = power_of_two_field(largest, PowerRounding::Ceil);
    let code = power_code(field, largest, E8M0);
    select(code == comptime!(ones(E8M0)), code, max(code, above) - above)
}

/// Writes the codes of a block in FP8.
#[cube]
fn fp8_codes(elements: &Array<f32>, scale: u32, codes: &mut Array<u32>) {
    let factor = power_reciprocal(scale, E8M0);
    #[unroll]
    for index in 0..BLOCK {
        let at = comptime!(index as usize);
        let value = elements[at] * factor;
        let sign = select(value < 0.0f32, comptime!(E4M3.sign_bit() as u32), 0u32);
        codes[at] = round_to_float(value.abs(), E4M3) | sign;
    }
}

/// Returns the scale of a block in NVFP4: the better of two.
#[cube]
fn nvfp4_scale(elements: &Array<f32>, largest: f32) -> BlockScale {
    let one = 1.0f32.runtime();
    let tensor = TensorFactor { amax: one, encode: one, decode: one };
    let both = candidates(largest, &tensor, RULE);
    let take_four = error(elements, &both.on_four) < error(elements, &both.on_six);
    BlockScale {
        code: select(take_four, both.on_four.code, both.on_six.code),
        factor: select(take_four, both.on_four.factor, both.on_six.factor),
    }
}

/// Sums the errors of a block in the order of its channels.
#[cube]
fn error(elements: &Array<f32>, scale: &BlockScale) -> f32 {
    let value = float_value(scale.code, E4M3);
    let mut error = 0.0f32.runtime();
    #[unroll]
    for index in 0..BLOCK {
        let magnitude = elements[comptime!(index as usize)].abs();
        let normalized = normalize_magnitude(magnitude, scale.factor, RULE);
        // The product is exact, fused or not.
        error += (nearest_magnitude(normalized) * value - magnitude).abs();
    }
    error
}

/// Writes the codes of a block in NVFP4.
#[cube]
fn nvfp4_codes(elements: &Array<f32>, factor: f32, codes: &mut Array<u32>) {
    let mask = code_mask(factor, RULE);
    #[unroll]
    for index in 0..BLOCK {
        let at = comptime!(index as usize);
        let normalized = normalize_magnitude(elements[at], factor, RULE);
        // -0 becomes 0.
        let normalized = select(normalized == 0.0f32, 0.0f32, normalized);
        codes[at] = (round_to_e2m1(normalized) >> 28u32) & mask;
    }
}

/// Dequantizes the heads of a cache `[heads, head_dim]`, multiplied in f32 and rounded once to the
/// dtype.
///
/// ```
/// # #[cfg(feature = "cpu")] {
/// use burn_fp4_cubecl::cubecl::Device;
/// use burn_fp4_cubecl::cubecl::prelude::CubeElement;
/// use burn_fp4_cubecl::{Capability, Dtype, dequantize_heads};
/// use burn_fp4_search::host::KvFormat;
///
/// let client = Device::default().client();
/// let device = Capability::of(&client);
/// let codes = client.create_from_slice(&[0x38; 16]); // ones
/// let scales = client.create_from_slice(&[128]); // 2^(128 - 127)
/// let packed = [codes, scales];
/// let values =
///     dequantize_heads(&client, &device, packed, KvFormat::Fp8, [1, 16], Dtype::F32)?;
/// assert_eq!(f32::from_bytes(&client.read_one_unchecked(values)), [2.0; 16]);
/// # }
/// # Ok::<(), burn_fp4_cubecl::Refusal>(())
/// ```
///
/// # Errors
/// [`Refusal`]; nothing is launched then.
pub fn dequantize_heads(
    client: &Client,
    device: &Capability,
    [codes, scales]: [Handle; 2],
    format: KvFormat,
    [heads, head_dim]: [usize; 2],
    dtype: Dtype,
) -> Result<Handle, Refusal> {
    device.check_decoder(dtype)?;
    device.check_packed_kv()?;
    check_blocks(head_dim)?;
    let (found, expected) = (heads.saturating_mul(head_dim), View::MAX_LEN);
    if found > expected {
        return Err(Refusal::TooLarge { found, expected });
    }
    let [code_bytes, scale_bytes] = format.bytes_of_head(head_dim);
    check_memory("codes", &codes, heads * code_bytes)?;
    check_memory("scales", &scales, heads * scale_bytes)?;
    let output = client.empty(found * dtype.size());
    if found > 0 {
        let vector = head_vector(head_dim as u32, dtype);
        let launch = match (dtype, Words::of(Some(format), vector)) {
            (Dtype::F32, Words::U16) => launch_dequantize::<f32, u16>,
            (Dtype::F32, _) => launch_dequantize::<f32, u32>,
            (Dtype::F16, _) => launch_dequantize::<f16, u32>,
            (Dtype::Bf16, _) => launch_dequantize::<bf16, u32>,
        };
        let form = (format, vector, Conversion::to(dtype, device));
        launch(client, device, [codes, scales, output.clone()], [heads, head_dim], form);
    }
    Ok(output)
}

fn launch_dequantize<F: Float, C: Numeric>(
    client: &Client,
    device: &Capability,
    [codes, scales, output]: [Handle; 3],
    [heads, head_dim]: [usize; 2],
    (format, vector, conversion): (KvFormat, u32, Conversion),
) {
    let vectors = heads * head_dim / vector as usize;
    let [_, scale_bytes] = format.bytes_of_head(head_dim);
    let width = Words::of(Some(format), vector).width(vector);
    let [x, y] = device.two_dimensions((vectors as u32).div_ceil(UNITS));
    // SAFETY: the lengths are those that memory was checked for, and units beyond the vectors
    // write nothing.
    unsafe {
        dequantize_kernel::launch_unchecked::<F, C>(
            client,
            CubeCount::Static(x, y, 1),
            CubeDim::new_1d(UNITS),
            vector as usize,
            width,
            BufferArg::from_raw_parts(codes, vectors),
            BufferArg::from_raw_parts(scales, heads * scale_bytes),
            BufferArg::from_raw_parts(output, vectors),
            vectors as u32,
            head_dim as u32,
            vector,
            format,
            conversion,
        );
    }
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn dequantize_kernel<F: Float, N: Size, C: Numeric, W: Size>(
    codes: &[Vector<C, W>],
    scales: &[u8],
    output: &mut [Vector<F, N>],
    vectors: u32,
    #[comptime] head_dim: u32,
    #[comptime] vector: u32,
    #[comptime] format: KvFormat,
    #[comptime] conversion: Conversion,
) {
    let at = CUBE_POS as u32 * UNITS + UNIT_POS;
    if at >= vectors {
        terminate!();
    }
    let columns = comptime!(head_dim / vector);
    let place = scale_place(at / columns, at % columns, head_dim, vector, format);
    let scale = kv_scale::<u8>(scales[place], format);
    let mut values = channels::<C, W>(codes[at as usize], vector, comptime!(Some(format)));
    #[unroll]
    for index in 0..vector {
        values[comptime!(index as usize)] *= scale;
    }
    output[at as usize] = to_vector::<F, N>(&values, vector, conversion);
}
