//! [`Int8Input`]: an input rounded to 8-bit integers, a block at a time.

use pulp::{Simd, WithSimd};

use super::arch::arch;
use super::dense::HostElement;
use super::threads::{Work, for_each_chunk, per_microsecond};

/// Number of channels of a chunk: two codes of each of 64 bytes.
pub(super) const CHUNK: usize = 128;
/// Number of lanes of a chunk. A lane has 8 channels, which are 4 bytes of codes.
pub(super) const LANES: usize = 16;
/// Element of the largest magnitude, doubled: added to doubled elements, it makes them unsigned.
pub(super) const OFFSET: i32 = 12;

/// Holds 128 channels of a row of the input.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct Chunk {
    /// Integers of the even channels, whose codes are the lower ones of bytes.
    pub(super) even: [i8; CHUNK / 2],
    pub(super) odd: [i8; CHUNK / 2],
    /// Half of the scale of each block, in the order of [`block_lane`]; elements are doubled.
    pub(super) half_scales: [f32; LANES],
    /// `-OFFSET` times the sum of the integers of each block, in the same order.
    pub(super) offsets: [i32; LANES],
}

/// Returns the first lane of a block, when products of `R` packed rows share the lanes: in each
/// four, two blocks of the first row and then of the second, or one block of each of four rows.
#[inline(always)]
pub(super) fn block_lane<const R: usize>(block: usize) -> usize {
    const { assert!(R == 2 || R == 4) };
    match R {
        2 => block / 2 * 4 + block % 2,
        _ => 4 * block,
    }
}

impl Chunk {
    const ZEROS: Self = Self {
        even: [0; CHUNK / 2],
        odd: [0; CHUNK / 2],
        half_scales: [0.0; LANES],
        offsets: [0; LANES],
    };
}

/// Holds an input in chunks. Zeros complete the last chunk of a row.
pub(super) struct Int8Input {
    chunks: Vec<Chunk>,
    pub(super) rows: usize,
    /// Number of chunks of a row.
    pub(super) len: usize,
}

impl Int8Input {
    pub(super) fn new<T: HostElement>(
        input: &[T],
        [rows, channels]: [usize; 2],
        block_size: usize,
    ) -> Self {
        let len = channels.div_ceil(CHUNK);
        let mut chunks = vec![Chunk::ZEROS; rows * len];
        let work = Work::new(input.len(), per_microsecond::VALUES);
        for_each_chunk(
            work,
            &mut chunks,
            len,
            || (),
            |(), row, chunks| {
                let input = &input[row * channels..][..channels];
                arch().dispatch(Quantize { input, block_size, chunks });
            },
        );
        Self { chunks, rows, len }
    }

    pub(super) fn row(&self, row: usize) -> &[Chunk] {
        &self.chunks[row * self.len..][..self.len]
    }
}

/// Rounds the blocks of a row.
struct Quantize<'a, T> {
    input: &'a [T],
    block_size: usize,
    chunks: &'a mut [Chunk],
}

impl<T: HostElement> WithSimd for Quantize<'_, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (chunk, input) in self.chunks.iter_mut().zip(self.input.chunks(CHUNK)) {
            let mut values = [0.0; CHUNK];
            T::read(input, &mut values[..input.len()]);
            match self.block_size {
                16 => chunk.round::<16, 2>(&values),
                _ => chunk.round::<32, 4>(&values),
            }
        }
    }
}

impl Chunk {
    /// Rounds blocks of `B` values, for products of `R` packed rows at a time.
    #[inline(always)]
    fn round<const B: usize, const R: usize>(&mut self, values: &[f32; CHUNK]) {
        let mut integers = [0; CHUNK];
        let blocks = values.as_chunks::<B>().0.iter().zip(integers.as_chunks_mut::<B>().0);
        for (block, (values, integers)) in blocks.enumerate() {
            let mut amax = 0;
            for value in values {
                // Bits of magnitudes order like them, with NaN above infinity.
                amax = amax.max(value.magnitude());
            }
            let amax = f32::from_bits(amax);
            let scale = if amax < f32::INFINITY { amax / 127.0 } else { f32::NAN };
            // Of zeros and NaN any integers will do; these are small.
            let divisor = if scale > 0.0 { scale } else { 1.0 };
            for (integer, value) in integers.iter_mut().zip(values) {
                *integer = nearest_integer(value / divisor);
            }
            let mut sum = 0;
            for integer in integers {
                sum += *integer;
            }
            for row in 0..R {
                let lane = block_lane::<R>(block) + row * 4 / R;
                self.half_scales[lane] = 0.5 * scale;
                self.offsets[lane] = -OFFSET * sum;
            }
        }
        for at in 0..CHUNK / 2 {
            self.even[at] = integers[2 * at] as i8;
            self.odd[at] = integers[2 * at + 1] as i8;
        }
    }
}

/// Rounds to the nearest integer of magnitude 127 at most, ties to even. NaN becomes 127.
#[inline(always)]
fn nearest_integer(value: f32) -> i32 {
    // 1.5 * 2^23 makes 1 the unit in the last place.
    const SHIFT: f32 = 12_582_912.0;
    let clamped = if value < 127.0 { value } else { 127.0 };
    let clamped = if clamped > -127.0 { clamped } else { -127.0 };
    (clamped + SHIFT).to_bits().wrapping_sub(SHIFT.to_bits()) as i32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::int8_matmul::quantized;

    #[test]
    fn inputs_are_rounded_as_the_reference_rounds_them() {
        let specials = [0.0, -0.0, f32::MAX, 1e-45, -1e-40, f32::INFINITY, f32::NAN, 1e-38];
        let values: Vec<f32> = (0..576)
            .map(|at| match at / 32 {
                block @ 0..8 => specials[block] * ((at % 5) as f32 - 2.0),
                8 => (at % 32) as f32 + 96.5,
                _ => ((at * 37 % 101) as f32 - 50.0) * 1.7f32.powi(at as i32 / 32 - 12),
            })
            .collect();
        for block_size in [16, 32] {
            let input = Int8Input::new(&values, [1, values.len()], block_size);
            for (index, block) in values.chunks(block_size).enumerate() {
                let (expected, scale) = quantized(block);
                let found: Vec<_> = (index * block_size..(index + 1) * block_size)
                    .map(|at| {
                        let chunk = &input.row(0)[at / CHUNK];
                        let half = if at % 2 == 0 { &chunk.even } else { &chunk.odd };
                        i32::from(half[at % CHUNK / 2])
                    })
                    .collect();
                let chunk = &input.row(0)[index * block_size / CHUNK];
                let at = index % (CHUNK / block_size);
                let lanes = match block_size {
                    16 => vec![block_lane::<2>(at), block_lane::<2>(at) + 2],
                    _ => (0..4).map(|row| block_lane::<4>(at) + row).collect(),
                };
                for lane in lanes {
                    let half_scale = chunk.half_scales[lane];
                    assert_eq!(half_scale.is_finite(), scale.is_finite(), "{block:?}");
                    if scale.is_finite() {
                        assert_eq!(half_scale, 0.5 * scale);
                        assert_eq!(chunk.offsets[lane], -OFFSET * expected.iter().sum::<i32>());
                    }
                }
                if scale.is_finite() {
                    assert_eq!(found, expected, "{block:?}");
                }
            }
            let last = input.row(0)[4];
            assert_eq!(
                (last.even[32..].to_vec(), last.half_scales[8..].to_vec()),
                (vec![0; 32], vec![0.0; 8])
            );
        }
    }
}
