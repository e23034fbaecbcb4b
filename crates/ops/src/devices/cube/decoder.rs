//! Operations of a decoder on Cube devices with kernels.

use burn::backend::ops::IntTensorOps;
use burn::tensor::{DType, IntDType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_fp4_cubecl::{AttentionHandles, Capability, attend, rms_norm, sample};
use burn_fp4_search::host::{AttentionShape, SampleOptions};

use super::device::{kernel_dtype, output_tensor};
use super::queues;
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
        let [batch, tokens, heads, head_dim] = queries.meta.shape().dims();
        let [_, _, kv_heads, _] = keys.meta.shape().dims();
        let [_, _, capacity, _] = key_cache.meta.shape().dims();
        let shape = AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity };
        let [rows, _] = cos.meta.shape().dims();
        let [key_cache, value_cache] = [key_cache, value_cache].map(writable);
        let queries = into_contiguous(queries);
        let position = Self::int_cast(positions, IntDType::I32);
        let handle = |tensor: CubeTensor| into_contiguous(tensor).handle;
        let operands = AttentionHandles {
            queries: queries.handle.clone(),
            keys: handle(keys),
            values: handle(values),
            key_cache: key_cache.handle.clone(),
            value_cache: value_cache.handle.clone(),
            cos: handle(cos),
            sin: handle(sin),
            position: handle(position),
        };
        let dtype = kernel_dtype(queries.dtype);
        let capability = Capability::of(&queries.client);
        let output = attend(&queries.client, &capability, operands, shape, rows, dtype);
        queues::submit_launches(&queries.device);
        let shape = queries.meta.shape().clone();
        let output = output_tensor(&queries, output.expect(CHECKED), shape, queries.dtype);
        (output, key_cache, value_cache)
    }
}

impl SampleBackend for CubeBackend {
    fn decoder_sample(
        logits: CubeTensor,
        uniform: CubeTensor,
        options: SampleOptions,
    ) -> CubeTensor {
        let logits = into_contiguous(logits);
        let [rows, vocab_size] = logits.meta.shape().dims();
        let tokens = sample(
            &logits.client,
            &Capability::of(&logits.client),
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

/// Adds an update, and normalizes: the sums, and the normalized sums.
fn normalize(
    input: CubeTensor,
    update: Option<CubeTensor>,
    weight: CubeTensor,
    epsilon: f64,
) -> (Option<CubeTensor>, CubeTensor) {
    let input = into_contiguous(input);
    let shape = input.meta.shape().clone();
    let channels = shape[shape.num_dims() - 1];
    let rows = shape.num_elements() / channels.max(1);
    let output = rms_norm(
        &input.client,
        &Capability::of(&input.client),
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

/// Returns the tensor in contiguous memory that nothing else reads.
fn writable(tensor: CubeTensor) -> CubeTensor {
    let tensor = into_contiguous(tensor);
    if tensor.can_mut() { tensor } else { tensor.copy() }
}
