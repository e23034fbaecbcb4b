//! The product with [`Activations::Int8`](crate::Activations::Int8), the oracle of the host engine.

use burn_fp4_formats::{E2M1, Packed, unpack_nibbles};

/// Number of channels after which the same sum continues.
const CHUNK: usize = 128;

/// Computes `input x weight^T` for an input `[inputs, channels]`: `[inputs, outputs]`.
///
/// Each block of the input is rounded to integers times a scale. The product of two blocks is an
/// exact integer times both scales. A block is added to the sum of its position in 128 channels;
/// these 8 or 4 sums are added as a tree.
pub(crate) fn int8_matmul(input: &[f32], weight: &Packed) -> Vec<f32> {
    let (size, channels) = (weight.block_size, weight.cols);
    let sums = CHUNK / size;
    let mut codes = vec![0; weight.rows * channels];
    unpack_nibbles(&weight.codes, &mut codes);
    let block_scale = weight.format.row().block_scale;
    let mut output = Vec::new();
    for input in input.chunks(channels) {
        let blocks: Vec<_> = input.chunks(size).map(quantized).collect();
        for row in 0..weight.rows {
            let mut sums = vec![0f32; sums];
            let len = sums.len();
            for (index, (values, scale)) in blocks.iter().enumerate() {
                let codes = &codes[row * channels + index * size..][..size];
                let twice = |code: &u8| (2.0 * E2M1.decode(*code)) as i32;
                let product: i32 = codes.iter().zip(values).map(|(code, x)| twice(code) * x).sum();
                let weight_scale = block_scale.decode(weight.scales[row * blocks.len() + index]);
                let factor = weight_scale * (0.5 * scale);
                let sum = &mut sums[index % len];
                *sum = (product as f32).mul_add(factor, *sum);
            }
            while sums.len() > 1 {
                let upper = sums.split_off(sums.len() / 2);
                sums.iter_mut().zip(upper).for_each(|(sum, upper)| *sum += upper);
            }
            output.push(sums[0] * weight.tensor_scale.of_row(row));
        }
    }
    output
}

/// Rounds a block to integers times a scale, which is NaN if a value is not finite.
pub(crate) fn quantized(block: &[f32]) -> (Vec<i32>, f32) {
    if !block.iter().all(|value| value.is_finite()) {
        return (vec![0; block.len()], f32::NAN);
    }
    let scale = block.iter().fold(0f32, |amax, value| amax.max(value.abs())) / 127.0;
    if scale == 0.0 {
        return (vec![0; block.len()], 0.0);
    }
    let integer = |value: &f32| (value / scale).clamp(-127.0, 127.0).round_ties_even() as i32;
    (block.iter().map(integer).collect(), scale)
}
