//! Operations of a decoder on Burn's `flex` device.

use burn::backend::Flex;
use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::{DType, Element, FloatDType, Shape, bf16, f16, read_sync};
use burn_flex::FlexTensor;
use burn_fp4_search::Activations;
use burn_fp4_search::host::{
    self, AttentionShape, HostElement, Int8Weight, KvFormat, KvMut, Rotary,
};
use bytemuck::Pod;

use super::decoder::{DecoderBackend, HostDecoderBackend};

const CHECKED: &str = "callers check shapes and dtypes";

impl DecoderBackend for Flex {
    fn decoder_rms_norm(input: FlexTensor, weight: FlexTensor, epsilon: f64) -> FlexTensor {
        let (input, weight) = (contiguous(input), contiguous(weight));
        let mut output = zeros(input.layout().shape().clone());
        host::rms_norm(values(&input), values(&weight), epsilon as f32, output.storage_mut())
            .expect(CHECKED);
        output
    }

    fn decoder_add_rms_norm(
        hidden: FlexTensor,
        update: FlexTensor,
        weight: FlexTensor,
        epsilon: f64,
    ) -> (FlexTensor, FlexTensor) {
        let (mut hidden, mut update) = (contiguous(hidden), contiguous(update));
        let weight = contiguous(weight);
        let (sums, normalized) = (values_mut(&mut hidden), values_mut(&mut update));
        host::add_rms_norm(sums, normalized, values(&weight), epsilon as f32).expect(CHECKED);
        (hidden, update)
    }

    fn decoder_swiglu(gate: FlexTensor, up: FlexTensor) -> FlexTensor {
        let (mut gate, up) = (contiguous(gate), contiguous(up));
        host::swiglu(values_mut(&mut gate), values(&up)).expect(CHECKED);
        gate
    }

    fn decoder_gemv(input: FlexTensor, weight: FlexTensor) -> FlexTensor {
        match input.dtype() {
            DType::BF16 => gemv::<bf16>(input, weight),
            DType::F16 => gemv::<f16>(input, weight),
            _ => gemv::<f32>(input, weight),
        }
    }

    fn decoder_int8_weight_matmul(
        input: FlexTensor,
        codes: FlexTensor,
        scales: FlexTensor,
    ) -> FlexTensor {
        int8_weight_matmul(input, codes, scales, Activations::F32)
    }

    fn decoder_attention(
        queries: FlexTensor,
        keys: FlexTensor,
        new_values: FlexTensor,
        key_cache: FlexTensor,
        value_cache: FlexTensor,
        cos: FlexTensor,
        sin: FlexTensor,
        positions: FlexTensor,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let [_, _, capacity, _] = dims(&key_cache);
        let [mut key_cache, mut value_cache] = [key_cache, value_cache].map(contiguous);
        let cache = [&mut key_cache, &mut value_cache].map(|cache| KvMut::Dense(values_mut(cache)));
        let queries = attend([queries, keys, new_values], cache, capacity, [cos, sin], positions);
        (queries, key_cache, value_cache)
    }

    fn decoder_packed_attention(
        queries: FlexTensor,
        keys: FlexTensor,
        new_values: FlexTensor,
        key_codes: FlexTensor,
        key_scales: FlexTensor,
        value_codes: FlexTensor,
        value_scales: FlexTensor,
        cos: FlexTensor,
        sin: FlexTensor,
        positions: FlexTensor,
        format: KvFormat,
    ) -> (FlexTensor, FlexTensor, FlexTensor, FlexTensor, FlexTensor) {
        let [_, _, capacity, _] = dims(&key_codes);
        let mut keys_in_cache = [key_codes, key_scales].map(contiguous);
        let mut values_in_cache = [value_codes, value_scales].map(contiguous);
        let cache = [&mut keys_in_cache, &mut values_in_cache].map(|parts| {
            let [codes, scales] = parts.each_mut().map(values_mut);
            KvMut::Packed { format, codes, scales }
        });
        let queries = attend([queries, keys, new_values], cache, capacity, [cos, sin], positions);
        let ([key_codes, key_scales], [value_codes, value_scales]) =
            (keys_in_cache, values_in_cache);
        (queries, key_codes, key_scales, value_codes, value_scales)
    }
}

/// Multiplies one row by a dense weight in either order of memory, with sums in f32.
fn gemv<T: HostElement + Element + Pod>(input: FlexTensor, weight: FlexTensor) -> FlexTensor {
    let [_, n] = dims(&weight);
    let input = contiguous(Flex::float_cast(input, FloatDType::F32));
    let mut sums = zeros(Shape::new([1, n]));
    let transposed = weight.transpose(0, 1);
    let product = if transposed.is_contiguous() && !weight.is_contiguous() {
        host::gemv_rows(values(&input), floats::<T>(&transposed), sums.storage_mut())
    } else {
        host::gemv(values(&input), floats::<T>(&contiguous(weight)), sums.storage_mut())
    };
    product.expect(CHECKED);
    Flex::float_cast(sums, FloatDType::from(T::dtype()))
}

/// Attends from new tokens to a cache, which they join. Returns the outputs.
fn attend(
    [queries, keys, new_values]: [FlexTensor; 3],
    cache: [KvMut<'_>; 2],
    capacity: usize,
    rotary: [FlexTensor; 2],
    positions: FlexTensor,
) -> FlexTensor {
    let [batch, tokens, heads, head_dim] = dims(&queries);
    let [_, _, kv_heads, _] = dims(&keys);
    let shape = AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity };
    let positions = read_sync(Flex::int_into_data(positions)).expect("memory of the host");
    let position = |at: i64| usize::try_from(at).expect("attention: a position is negative");
    let positions: Vec<_> = positions.iter::<i64>().map(position).collect();
    let [mut queries, keys, new_values] = [queries, keys, new_values].map(contiguous);
    let [cos, sin] = rotary.map(contiguous);
    host::attention(
        values_mut(&mut queries),
        [values(&keys), values(&new_values)],
        cache,
        Rotary { cos: values(&cos), sin: values(&sin) },
        &positions,
        shape,
    )
    .unwrap_or_else(|error| panic!("attention: {error}"));
    queries
}

/// Multiplies by the transpose of a matrix of signed bytes.
fn int8_weight_matmul(
    input: FlexTensor,
    codes: FlexTensor,
    scales: FlexTensor,
    activations: Activations,
) -> FlexTensor {
    let ([m, k], [n, _]) = (dims(&input), dims(&codes));
    let (input, codes, scales) = (contiguous(input), codes.to_contiguous(), contiguous(scales));
    let weight = Int8Weight { codes: codes.as_slice().expect(CHECKED), scales: values(&scales) };
    let mut output = zeros(Shape::new([m, n]));
    let products = output.storage_mut();
    host::int8_weight_matmul(values(&input), weight, [n, k], activations, products).expect(CHECKED);
    output
}

impl HostDecoderBackend for Flex {
    fn decoder_int8_int8_matmul(
        input: FlexTensor,
        codes: FlexTensor,
        scales: FlexTensor,
    ) -> FlexTensor {
        int8_weight_matmul(input, codes, scales, Activations::Int8)
    }
}

fn dims<const N: usize>(tensor: &FlexTensor) -> [usize; N] {
    tensor.layout().shape().dims()
}

/// Allocates zeros. `FlexTensor::zeros` copies them to align them for any dtype.
fn zeros(shape: Shape) -> FlexTensor {
    FlexTensor::filled_typed(shape, DType::F32, 0f32)
}

/// Puts values into row-major order. Unlike `to_contiguous`, does not share memory that is.
fn contiguous(values: FlexTensor) -> FlexTensor {
    if values.is_contiguous() { values } else { values.to_contiguous() }
}

fn values(contiguous: &FlexTensor) -> &[f32] {
    floats(contiguous)
}

fn floats<T: Element + Pod>(contiguous: &FlexTensor) -> &[T] {
    contiguous.as_slice().expect(CHECKED)
}

/// Borrows the values of a contiguous tensor for writing; copies them if others hold them.
fn values_mut<T: Element + Pod>(contiguous: &mut FlexTensor) -> &mut [T] {
    let (start, end) = contiguous.layout().contiguous_offsets().expect(CHECKED);
    &mut contiguous.storage_mut()[start..end]
}
