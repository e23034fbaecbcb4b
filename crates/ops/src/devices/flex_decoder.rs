//! Operations of a decoder on Burn's `flex` device.

use burn::backend::Flex;
use burn::backend::ops::IntTensorOps;
use burn::tensor::{DType, Shape, read_sync};
use burn_flex::FlexTensor;
use burn_fp4_search::Activations;
use burn_fp4_search::host::{self, AttentionShape, Int8Weight, Rotary};

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

    fn decoder_gemv(input: FlexTensor, weight: FlexTensor) -> FlexTensor {
        let [_, n] = dims(&weight);
        let input = contiguous(input);
        let mut output = zeros(Shape::new([1, n]));
        let transposed = weight.transpose(0, 1);
        let product = if transposed.is_contiguous() && !weight.is_contiguous() {
            host::gemv_rows(values(&input), values(&transposed), output.storage_mut())
        } else {
            host::gemv(values(&input), values(&contiguous(weight)), output.storage_mut())
        };
        product.expect(CHECKED);
        output
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
        let [batch, tokens, heads, head_dim] = dims(&queries);
        let [_, _, kv_heads, _] = dims(&keys);
        let [_, _, capacity, _] = dims(&key_cache);
        let shape = AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity };
        let positions = read_sync(Flex::int_into_data(positions)).expect("memory of the host");
        let position = |at: i64| usize::try_from(at).expect("attention: a position is negative");
        let positions: Vec<_> = positions.iter::<i64>().map(position).collect();
        let (mut queries, keys) = (contiguous(queries), contiguous(keys));
        let new_values = contiguous(new_values);
        let (mut key_cache, mut value_cache) = (contiguous(key_cache), contiguous(value_cache));
        let (cos, sin) = (contiguous(cos), contiguous(sin));
        host::attention(
            values_mut(&mut queries),
            [values(&keys), values(&new_values)],
            [values_mut(&mut key_cache), values_mut(&mut value_cache)],
            Rotary { cos: values(&cos), sin: values(&sin) },
            &positions,
            shape,
        )
        .unwrap_or_else(|error| panic!("attention: {error}"));
        (queries, key_cache, value_cache)
    }
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
    fn decoder_swiglu(gate: FlexTensor, up: FlexTensor) -> FlexTensor {
        let (mut gate, up) = (contiguous(gate), contiguous(up));
        host::swiglu(values_mut(&mut gate), values(&up)).expect(CHECKED);
        gate
    }

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
    contiguous.as_slice().expect(CHECKED)
}

/// Borrows the values of a contiguous tensor for writing; copies them if others hold them.
fn values_mut(contiguous: &mut FlexTensor) -> &mut [f32] {
    let (start, end) = contiguous.layout().contiguous_offsets().expect(CHECKED);
    &mut contiguous.storage_mut()[start..end]
}
