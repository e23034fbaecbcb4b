//! Operations of a decoder on Cube devices, by kernels.

use burn::backend::ops::{FloatTensorOps, IntTensorOps};
use burn::tensor::{DType, IntDType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fp4_cubecl::{
    AttentionHandles, Capability, PackedKv, Refusal, argmax, attend, attention_weights,
    check_flash_attention, check_prefill, dense_gemv, dequantize_heads, flash_attention, int8_gemv,
    rms_norm, rotate_into_cache, sample, swiglu,
};
use burn_fp4_search::host::{AttentionShape, KvFormat, SampleOptions};

use super::device::{decoder_capability, kernel_dtype, output_tensor, writable};
use super::matmul::{counters, launch_chain};
use super::{deterministic, queues};
use crate::devices::decoder::{DecoderBackend, SampleBackend};

const CHECKED: &str = "callers check shapes and dtypes";

impl DecoderBackend for CubeBackend {
    fn decoder_rms_norm(input: CubeTensor, weight: CubeTensor, epsilon: f64) -> CubeTensor {
        normalize(input, None, weight, epsilon).1
    }

    fn decoder_add_rms_norm(
        hidden: CubeTensor,
        update: CubeTensor,
        weight: CubeTensor,
        epsilon: f64,
    ) -> (CubeTensor, CubeTensor) {
        let (sums, normalized) = normalize(hidden, Some(update), weight, epsilon);
        (sums.expect("there is an update"), normalized)
    }

    fn decoder_swiglu(gate: CubeTensor, up: CubeTensor) -> CubeTensor {
        let (gate, up) = (into_contiguous(gate), into_contiguous(up));
        let shape = gate.meta.shape().clone();
        let gated = swiglu(
            &gate.client,
            &decoder(&gate),
            gate.handle.clone(),
            up.handle,
            shape.num_elements(),
            kernel_dtype(gate.dtype),
        );
        output_tensor(&gate, gated.expect(CHECKED), shape, gate.dtype)
    }

    fn decoder_gemv(input: CubeTensor, weight: CubeTensor) -> CubeTensor {
        let ([m, k], [_, n]) = (input.meta.shape().dims(), weight.meta.shape().dims());
        let transposed = !weight.meta.is_tiled() && weight.meta.strides()[..] == [1, k];
        let input = into_contiguous(input);
        let weight = if transposed { weight } else { into_contiguous(weight) };
        let product = dense_gemv(
            &input.client,
            &decoder(&input),
            input.handle.clone(),
            weight.handle.clone(),
            [m, n, k],
            transposed,
            kernel_dtype(input.dtype),
        );
        match product {
            Err(Refusal::TooLarge { .. }) => Self::float_matmul(input, weight),
            output => {
                output_tensor(&input, output.expect(CHECKED), Shape::new([m, n]), input.dtype)
            }
        }
    }

    fn decoder_int8_weight_matmul(
        input: CubeTensor,
        codes: CubeTensor,
        scales: CubeTensor,
    ) -> CubeTensor {
        let ([m, k], [n, _]) = (input.meta.shape().dims(), codes.meta.shape().dims());
        let input = into_contiguous(input);
        let matrix = [codes, scales].map(|part| into_contiguous(part).handle);
        let product = int8_gemv(
            &input.client,
            &decoder(&input),
            input.handle.clone(),
            matrix,
            [m, n, k],
            kernel_dtype(input.dtype),
        );
        output_tensor(&input, product.expect(CHECKED), Shape::new([m, n]), input.dtype)
    }

    fn decoder_attention(
        queries: CubeTensor,
        keys: CubeTensor,
        values: CubeTensor,
        key_cache: CubeTensor,
        value_cache: CubeTensor,
        cos: CubeTensor,
        sin: CubeTensor,
        positions: CubeTensor,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let cache = [key_cache, value_cache].map(writable);
        let output = attend_to(&cache, None, [queries, keys, values], [cos, sin], positions);
        let [key_cache, value_cache] = cache;
        (output, key_cache, value_cache)
    }

    fn decoder_packed_attention(
        queries: CubeTensor,
        keys: CubeTensor,
        values: CubeTensor,
        key_codes: CubeTensor,
        key_scales: CubeTensor,
        value_codes: CubeTensor,
        value_scales: CubeTensor,
        cos: CubeTensor,
        sin: CubeTensor,
        positions: CubeTensor,
        format: KvFormat,
    ) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
        let cache = [key_codes, value_codes].map(writable);
        let [key_scales, value_scales] = [key_scales, value_scales].map(writable);
        let packed = PackedKv {
            format,
            key_scales: key_scales.handle.clone(),
            value_scales: value_scales.handle.clone(),
        };
        let output =
            attend_to(&cache, Some(packed), [queries, keys, values], [cos, sin], positions);
        let [key_codes, value_codes] = cache;
        (output, key_codes, key_scales, value_codes, value_scales)
    }
}

/// Returns true if tokens are few behind a cache that is long. A cube of flash attention has 128
/// queries of a head and reads all positions one after the other: the last 16 tokens of 32768 took
/// 605 us on an H200, matmuls by cuBLAS 142 us. The last 128 took 606 and 549 us.
fn is_short_behind_long(shape: &AttentionShape) -> bool {
    shape.tokens <= 64 && shape.capacity > 4096
}

/// Attends from new tokens to a cache, which they join; `packed` belongs to its codes. Returns the
/// outputs.
fn attend_to(
    cache: &[CubeTensor; 2],
    packed: Option<PackedKv>,
    [queries, keys, values]: [CubeTensor; 3],
    [cos, sin]: [CubeTensor; 2],
    positions: CubeTensor,
) -> CubeTensor {
    let [batch, tokens, heads, head_dim] = queries.meta.shape().dims();
    let [_, _, kv_heads, _] = keys.meta.shape().dims();
    let [_, _, capacity, _] = cache[0].meta.shape().dims();
    let shape = AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity };
    let [rows, _] = cos.meta.shape().dims();
    let queries = into_contiguous(queries);
    let positions = into_contiguous(CubeBackend::int_cast(positions, IntDType::I32)).handle;
    let handle = |tensor: CubeTensor| into_contiguous(tensor).handle;
    let [key_cache, value_cache] = cache.each_ref().map(|cache| cache.handle.clone());
    let operands = AttentionHandles {
        queries: queries.handle.clone(),
        keys: handle(keys),
        values: handle(values),
        key_cache,
        value_cache,
        packed: packed.clone(),
        cos: handle(cos),
        sin: handle(sin),
        position: positions.clone(),
    };
    let dtype = kernel_dtype(queries.dtype);
    let (client, capability) = (&queries.client, decoder(&queries));
    let tensor = |handle, shape: [usize; 4]| {
        output_tensor(&queries, handle, Shape::new(shape), queries.dtype)
    };
    if tokens == 1 {
        let counters = counters(client);
        let counters = counters.as_deref();
        let output = attend(client, &capability, operands, shape, rows, dtype, counters);
        queues::submit_launches(&queries.device);
        return tensor(output.expect(CHECKED), [batch, tokens, heads, head_dim]);
    }
    let rotated = rotate_into_cache(client, &capability, operands, shape, rows, dtype);
    let rotated = rotated.expect(CHECKED);
    let [key_cache, value_cache] = match packed {
        None => cache.clone(),
        Some(PackedKv { format, key_scales, value_scales }) => {
            let [codes_of_keys, codes_of_values] = cache;
            [(codes_of_keys, key_scales), (codes_of_values, value_scales)].map(|(codes, scales)| {
                let form = [batch * kv_heads * capacity, head_dim];
                let codes = [codes.handle.clone(), scales];
                let dense = dequantize_heads(client, &capability, codes, format, form, dtype);
                tensor(dense.expect(CHECKED), [batch, kv_heads, capacity, head_dim])
            })
        }
    };
    let by_matmuls = is_short_behind_long(&shape) && check_prefill(&shape, rows).is_ok();
    if !by_matmuls && check_flash_attention(&capability, &shape, rows, dtype).is_ok() {
        let cache = [key_cache, value_cache].map(|cache| cache.handle);
        let output =
            flash_attention(client, &capability, rotated, cache, positions, shape, rows, dtype);
        return tensor(output.expect(CHECKED), [batch, tokens, heads, head_dim]);
    }
    // Queries that share a key head are rows of one matmul.
    let of_key_head = |channels| [batch, kv_heads, heads / kv_heads * tokens, channels];
    let rotated = tensor(rotated, of_key_head(head_dim));
    let keys = CubeBackend::float_swap_dims(key_cache, 2, 3);
    let scores = into_contiguous(deterministic::matmul(rotated, keys)).handle;
    let weights = attention_weights(client, &capability, scores, positions, shape, rows, dtype);
    let weights = tensor(weights.expect(CHECKED), of_key_head(capacity));
    let output = into_contiguous(deterministic::matmul(weights, value_cache)).handle;
    let output = tensor(output, [batch, heads, tokens, head_dim]);
    into_contiguous(CubeBackend::float_swap_dims(output, 1, 2))
}

impl SampleBackend for CubeBackend {
    fn decoder_argmax(values: CubeTensor) -> CubeTensor {
        let values = into_contiguous(values);
        let [rows, cols] = values.meta.shape().dims();
        let indices = argmax(
            &values.client,
            &decoder(&values),
            values.handle.clone(),
            [rows, cols],
            kernel_dtype(values.dtype),
        )
        .expect(CHECKED);
        output_tensor(&values, indices, Shape::new([rows, 1]), DType::I32)
    }

    fn decoder_sample(
        logits: CubeTensor,
        uniform: CubeTensor,
        options: SampleOptions,
    ) -> CubeTensor {
        let logits = into_contiguous(logits);
        let [rows, vocab_size] = logits.meta.shape().dims();
        let tokens = sample(
            &logits.client,
            &decoder(&logits),
            logits.handle.clone(),
            into_contiguous(uniform).handle,
            [rows, vocab_size],
            kernel_dtype(logits.dtype),
            options,
        )
        .expect(CHECKED);
        output_tensor(&logits, tokens, Shape::new([rows, 1]), DType::I32)
    }
}

/// Returns the capability of a tensor's device.
fn decoder(tensor: &CubeTensor) -> Capability {
    decoder_capability(&tensor.device, &tensor.client, tensor.dtype).expect(CHECKED)
}

/// Adds an update, and normalizes: the sums, and the normalized sums.
fn normalize(
    input: CubeTensor,
    update: Option<CubeTensor>,
    weight: CubeTensor,
    epsilon: f64,
) -> (Option<CubeTensor>, CubeTensor) {
    launch_chain();
    let input = into_contiguous(input);
    let shape = input.meta.shape().clone();
    let channels = shape[shape.num_dims() - 1];
    let rows = shape.num_elements() / channels.max(1);
    let output = rms_norm(
        &input.client,
        &decoder(&input),
        input.handle.clone(),
        update.map(|update| into_contiguous(update).handle),
        into_contiguous(weight).handle,
        [rows, channels],
        kernel_dtype(input.dtype),
        epsilon as f32,
    )
    .expect(CHECKED);
    let tensor = |handle| output_tensor(&input, handle, shape.clone(), input.dtype);
    (output.sums.map(tensor), tensor(output.normalized))
}
