//! Values of ggml's quantized types, decoded record by record.
//!
//! | record     | scales, at the front unless said               | elements                      |
//! |------------|------------------------------------------------|-------------------------------|
//! | Q4_0, Q5_0 | d                                              | `d * (q - 8)`, `d * (q - 16)` |
//! | Q4_1, Q5_1 | d, m                                           | `d * q + m`                   |
//! | Q8_0       | d                                              | `d * q`                       |
//! | IQ4_NL     | d                                              | `d * LEVELS[q]`               |
//! | Q2_K       | behind: d, m; of 16 elements s and t of 4 bits | `(d * s) * q - m * t`         |
//! | Q3_K       | behind: d; of 16 elements s of 6 bits          | `(d * (s - 32)) * (q - 4)`    |
//! | Q4_K, Q5_K | d, m; of 32 elements s and t of 6 bits         | `(d * s) * q - m * t`         |
//! | Q6_K       | behind: d; of 16 elements s of 8 bits          | `(d * s) * (q - 32)`          |
//! | IQ4_XS     | d; of 32 elements s of 6 bits                  | `(d * (s - 32)) * LEVELS[q]`  |
//!
//! d and m are f16, every operation is one of f32, and nothing is fused. `gguf.quants.dequantize`
//! gives the same bits.
//!
//! Sources: the structs of `ggml-common.h`, and `gguf-py/gguf/quants.py`, of llama.cpp.

use half::f16;

/// Decodes whole records of a type to as many values as they have.
pub(crate) type Decode = fn(records: &[u8], values: &mut [f32]);

/// Makes the decoder of all records of the function for one, whose arrays have the type's lengths.
macro_rules! decode {
    ($record:ident) => {
        |records, values| {
            let (records, values) = (records.as_chunks().0, values.as_chunks_mut().0);
            records.iter().zip(values).for_each(|(record, values)| $record(record, values));
        }
    };
}

pub(crate) const Q4_0: Decode = decode!(q4_0);
pub(crate) const Q4_1: Decode = decode!(q4_1);
pub(crate) const Q5_0: Decode = decode!(q5_0);
pub(crate) const Q5_1: Decode = decode!(q5_1);
pub(crate) const Q8_0: Decode = decode!(q8_0);
pub(crate) const Q2_K: Decode = decode!(q2_k);
pub(crate) const Q3_K: Decode = decode!(q3_k);
pub(crate) const Q4_K: Decode = decode!(q4_k);
pub(crate) const Q5_K: Decode = decode!(q5_k);
pub(crate) const Q6_K: Decode = decode!(q6_k);
pub(crate) const IQ4_NL: Decode = decode!(iq4_nl);
pub(crate) const IQ4_XS: Decode = decode!(iq4_xs);

/// The values of the 4-bit codes of IQ4_NL and IQ4_XS (`kvalues_iq4nl`).
const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

fn float(low: u8, high: u8) -> f32 {
    f16::from_le_bytes([low, high]).to_f32()
}

/// Value of a code of up to 6 bits, where the code `zero` means 0.
fn centred(code: u8, zero: i8) -> f32 {
    f32::from(code as i8 - zero)
}

fn level(code: u8) -> f32 {
    f32::from(LEVELS[usize::from(code)])
}

/// Unpacks codes of `BITS` bits: the lowest ones of all bytes are the first values, the bits above
/// them the next. `value` gets the place and the code.
fn unpack<const BITS: usize>(bytes: &[u8], values: &mut [f32], value: impl Fn(usize, u8) -> f32) {
    for (part, values) in values.chunks_exact_mut(bytes.len()).enumerate() {
        let begin = part * bytes.len();
        for (at, (byte, out)) in bytes.iter().zip(values).enumerate() {
            *out = value(begin + at, byte >> (BITS * part) & ((1 << BITS) - 1));
        }
    }
}

fn q4_0([d0, d1, codes @ ..]: &[u8; 18], values: &mut [f32; 32]) {
    let d = float(*d0, *d1);
    unpack::<4>(codes, values, |_, code| d * centred(code, 8));
}

fn q4_1([d0, d1, m0, m1, codes @ ..]: &[u8; 20], values: &mut [f32; 32]) {
    let (d, m) = (float(*d0, *d1), float(*m0, *m1));
    unpack::<4>(codes, values, |_, code| d * f32::from(code) + m);
}

fn q5_0([d0, d1, h0, h1, h2, h3, codes @ ..]: &[u8; 22], values: &mut [f32; 32]) {
    let (d, high) = (float(*d0, *d1), u32::from_le_bytes([*h0, *h1, *h2, *h3]));
    unpack::<4>(codes, values, |at, code| d * centred(code | fifth(high, at), 16));
}

fn q5_1([d0, d1, m0, m1, h0, h1, h2, h3, codes @ ..]: &[u8; 24], values: &mut [f32; 32]) {
    let (d, m) = (float(*d0, *d1), float(*m0, *m1));
    let high = u32::from_le_bytes([*h0, *h1, *h2, *h3]);
    unpack::<4>(codes, values, |at, code| d * f32::from(code | fifth(high, at)) + m);
}

/// The fifth bit of a code, in its place.
fn fifth(high: u32, at: usize) -> u8 {
    (high >> at & 1) as u8 * 16
}

fn q8_0([d0, d1, codes @ ..]: &[u8; 34], values: &mut [f32; 32]) {
    let d = float(*d0, *d1);
    for (value, code) in values.iter_mut().zip(codes) {
        *value = f32::from(*code as i8) * d;
    }
}

fn iq4_nl([d0, d1, codes @ ..]: &[u8; 18], values: &mut [f32; 32]) {
    let d = float(*d0, *d1);
    unpack::<4>(codes, values, |_, code| d * level(code));
}

/// 16 bytes of scales and offsets, 64 of codes, d and m.
fn q2_k(record: &[u8; 84], values: &mut [f32; 256]) {
    let [rest @ .., d0, d1, m0, m1] = record;
    let (scales, codes) = rest.split_at(16);
    let (d, m) = (float(*d0, *d1), float(*m0, *m1));
    let pieces = codes.chunks_exact(32).zip(values.chunks_exact_mut(128));
    for ((codes, values), scales) in pieces.zip(scales.chunks_exact(8)) {
        unpack::<2>(codes, values, |at, code| {
            let scale = scales[at / 16];
            d * f32::from(scale & 0xF) * f32::from(code) - m * f32::from(scale >> 4)
        });
    }
}

/// 32 bytes of third bits, 64 of the others, 12 of scales, and d.
fn q3_k(record: &[u8; 110], values: &mut [f32; 256]) {
    let [rest @ .., d0, d1] = record;
    let (high, rest) = rest.split_at(32);
    let (codes, packed) = rest.split_at(64);
    let d = float(*d0, *d1);
    // Low nibbles of the first 8 bytes, their high nibbles, and two bits each in the last 4.
    let scale = |at: usize| {
        let low = packed[at % 8] >> (4 * (at / 8)) & 0xF;
        d * centred(low | (packed[8 + at % 4] >> (2 * (at / 4)) & 3) << 4, 32)
    };
    let scales: [f32; 16] = std::array::from_fn(scale);
    let pieces = codes.chunks_exact(32).zip(values.chunks_exact_mut(128));
    for (half, (codes, values)) in pieces.enumerate() {
        unpack::<2>(codes, values, |at, code| {
            let third = high[at % 32] >> (4 * half + at / 32) & 1;
            scales[8 * half + at / 16] * centred(code | third << 2, 4)
        });
    }
}

/// Unpacks the 8 scales and 8 offsets of 6 bits in Q4_K and Q5_K, times d and m.
fn six_bits([d0, d1, m0, m1]: [u8; 4], packed: &[u8]) -> [(f32, f32); 8] {
    let (d, m) = (float(d0, d1), float(m0, m1));
    std::array::from_fn(|at| {
        // The last four have their low bits in the last bytes, and the others above the first.
        let (scale, offset) = match at {
            0..4 => (packed[at] & 0x3F, packed[at + 4] & 0x3F),
            _ => {
                let low = packed[at + 4];
                (low & 0xF | packed[at - 4] >> 6 << 4, low >> 4 | packed[at] >> 6 << 4)
            }
        };
        (d * f32::from(scale), m * f32::from(offset))
    })
}

/// d, m, 12 bytes of scales and offsets, and 128 of codes.
fn q4_k([d0, d1, m0, m1, rest @ ..]: &[u8; 144], values: &mut [f32; 256]) {
    let (packed, codes) = rest.split_at(12);
    let scales = six_bits([*d0, *d1, *m0, *m1], packed);
    let pieces = codes.chunks_exact(32).zip(values.chunks_exact_mut(64));
    for ((codes, values), scales) in pieces.zip(scales.chunks_exact(2)) {
        unpack::<4>(codes, values, |at, code| {
            let (scale, offset) = scales[at / 32];
            scale * f32::from(code) - offset
        });
    }
}

/// d, m, 12 bytes of scales and offsets, 32 of fifth bits, and 128 of the others.
fn q5_k([d0, d1, m0, m1, rest @ ..]: &[u8; 176], values: &mut [f32; 256]) {
    let (packed, rest) = rest.split_at(12);
    let (high, codes) = rest.split_at(32);
    let scales = six_bits([*d0, *d1, *m0, *m1], packed);
    let pieces = codes.chunks_exact(32).zip(values.chunks_exact_mut(64));
    for (pair, (codes, values)) in pieces.enumerate() {
        unpack::<4>(codes, values, |at, code| {
            let run = 2 * pair + at / 32;
            let (scale, offset) = scales[run];
            scale * f32::from(code | (high[at % 32] >> run & 1) << 4) - offset
        });
    }
}

/// 128 bytes of low nibbles, 64 of the two bits above, 16 scales, and d.
fn q6_k(record: &[u8; 210], values: &mut [f32; 256]) {
    let [rest @ .., d0, d1] = record;
    let (low, rest) = rest.split_at(128);
    let (high, scales) = rest.split_at(64);
    let d = float(*d0, *d1);
    let halves = low.chunks_exact(64).zip(high.chunks_exact(32)).zip(scales.chunks_exact(8));
    for (((low, high), scales), values) in halves.zip(values.chunks_exact_mut(128)) {
        unpack::<4>(low, values, |at, code| {
            let above = high[at % 32] >> (2 * (at / 32)) & 3;
            d * f32::from(scales[at / 16] as i8) * centred(code | above << 4, 32)
        });
    }
}

/// d, 2 bytes of the high bits of scales, 4 of their low ones, and 128 of codes.
fn iq4_xs([d0, d1, h0, h1, rest @ ..]: &[u8; 136], values: &mut [f32; 256]) {
    let (low, codes) = rest.split_at(4);
    let (d, high) = (float(*d0, *d1), u16::from_le_bytes([*h0, *h1]));
    let pieces = codes.chunks_exact(16).zip(values.chunks_exact_mut(32));
    for (at, (codes, values)) in pieces.enumerate() {
        let above = (high >> (2 * at) & 3) as u8;
        let scale = d * centred(low[at / 2] >> (4 * (at % 2)) & 0xF | above << 4, 32);
        unpack::<4>(codes, values, |_, code| scale * level(code));
    }
}
