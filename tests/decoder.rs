//! Compares the kernels of a decoder with exact sums, on CubeCL's CPU runtime (`--features cpu`), a
//! GPU (`cuda`), or a device of CubeCL's wgpu runtime that has shared memory (`wgpu`). CUDA also
//! runs them as such a device would.

#![cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]

use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::cubecl::prelude::*;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::{
    AttentionHandles, Capability, Counters, Dtype as KernelDtype, PackedKv, Portable, Refusal,
    WgmmaSupport, argmax, attend, attention_weights, check_flash_attention, cubecl, dense_gemv,
    dequantize_heads, flash_attention, int8_gemv, rms_norm, rotate_into_cache, sample, swiglu,
};
use burn_fp4_search::Hadamard;
use burn_fp4_search::host::{self, SampleOptions, quantize_int8};
use tests::compare::assert_bits;
use tests::inputs::{Dtype, Random};
use tests::on_device::{assert_products, exact_products, floats, kernel_dtype, upload_rounded};

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

struct Device {
    client: Client,
    capability: Capability,
}

impl Device {
    /// The device. A GPU is tested with the limits of wgpu, too: with planes, and without.
    fn all() -> Vec<Self> {
        let client = cubecl::Device::default().client();
        let found = Capability::tested(&client).expect("a driver that gives the host's values");
        assert_eq!(found.check_decoder(KernelDtype::F32), Ok(()), "{found:?}");
        let most = Portable {
            f16: true,
            bf16: true,
            cmma_f16: false,
            cmma_bf16: false,
            decoder: true,
            units: 1024,
            shared_memory: 48 << 10,
        };
        let least = Portable { units: 256, shared_memory: 16 << 10, ..most };
        let as_wgpu = |plane, portable| Capability { plane, portable: Some(portable), ..found };
        let capabilities = match found.portable {
            None if found.plane > 1 => {
                vec![found, as_wgpu(found.plane, most), as_wgpu(1, least)]
            }
            None => vec![found],
            Some(portable) => {
                let least = Portable { units: 256, shared_memory: 16 << 10, ..portable };
                vec![found, as_wgpu(1, least)]
            }
        };
        let with = |capability| Self { client: client.clone(), capability };
        capabilities.into_iter().map(with).collect()
    }

    /// Returns a dtype, or f32 if the device has no buffers of it.
    fn dtype(&self, wanted: Dtype) -> Dtype {
        match self.capability.check_decoder(kernel_dtype(wanted)) {
            Ok(()) => wanted,
            Err(_) => Dtype::F32,
        }
    }
}

/// Allows for the rounding of the results to a dtype, and for that of sums in f32.
fn assert_rounded(what: &str, found: &[f32], expected: &[f64], dtype: KernelDtype) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let tolerance = match dtype {
        KernelDtype::F32 => 4e-6,
        KernelDtype::F16 => 1e-3,
        KernelDtype::Bf16 => 8e-3,
    };
    for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let far = (f64::from(found) - expected).abs();
        assert!(far <= tolerance * expected.abs().max(1.0), "{what} {at}: {found} {expected}");
    }
}

#[test]
fn swiglu_is_that_of_exact_values() {
    for device in Device::all() {
        let Device { client, capability } = &device;
        let mut random = Random::new(43);
        for len in [1, 6, 513, 4096] {
            for dtype in DTYPES {
                let dtype = kernel_dtype(device.dtype(dtype));
                let what = format!("{len} {dtype:?}");
                let mut values = |size: f32| {
                    let values = (0..len).map(|_| size * random.normal()).collect();
                    upload_rounded(client, values, dtype)
                };
                let (mut gate, up) = (values(20.0), values(1.0));
                if len > 2 {
                    // The exponential of the first one leaves f32.
                    let mut gates = gate.0.clone();
                    gates[..3].copy_from_slice(&[-200.0, 200.0, 0.0]);
                    gate = upload_rounded(client, gates, dtype);
                }
                let found = swiglu(client, capability, gate.1, up.1.clone(), len, dtype);
                let found = floats(client, found.expect("memory of the length"), dtype);
                let exact = gate.0.iter().zip(&up.0).map(|(&gate, &up)| {
                    let gate = f64::from(gate);
                    gate / (1.0 + (-gate).exp()) * f64::from(up)
                });
                assert_rounded(&what, &found, &exact.collect::<Vec<_>>(), dtype);
                let short = swiglu(client, capability, up.1.clone(), up.1, len + 64, dtype);
                assert!(matches!(short, Err(Refusal::Memory { .. })), "{what}: {short:?}");
            }
        }
    }
}

#[test]
fn norms_are_those_of_exact_sums() {
    for device in Device::all() {
        let Device { client, capability } = &device;
        let mut random = Random::new(41);
        for (rows, channels) in [(1, 8), (3, 40), (2, 513), (1, 2560)] {
            for dtype in DTYPES {
                let dtype = kernel_dtype(device.dtype(dtype));
                let what = format!("{rows} x {channels} {dtype:?}");
                let mut values = |count: usize| {
                    upload_rounded(
                        &device.client,
                        (0..count).map(|_| random.normal()).collect(),
                        dtype,
                    )
                };
                let [input, update] = [(); 2].map(|()| values(rows * channels));
                let weight = values(channels);
                let run = |update: Option<&Handle>| {
                    rms_norm(
                        client,
                        capability,
                        input.1.clone(),
                        update.cloned(),
                        weight.1.clone(),
                        [rows, channels],
                        dtype,
                        1e-5,
                    )
                    .expect("memory of the shape")
                };
                let normalized = |x: &[f32]| -> Vec<f64> {
                    let rows = x.chunks(channels).map(|row| {
                        let squares: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
                        let factor = (squares / channels as f64 + 1e-5).sqrt().recip();
                        let weighted = row.iter().zip(&weight.0);
                        weighted.map(|(&x, &w)| f64::from(x) * factor * f64::from(w)).collect()
                    });
                    rows.collect::<Vec<Vec<f64>>>().concat()
                };
                let alone = run(None);
                assert!(alone.sums.is_none());
                let found = floats(&device.client, alone.normalized, dtype);
                assert_rounded(&what, &found, &normalized(&input.0), dtype);
                let both = run(Some(&update.1));
                let sums = floats(&device.client, both.sums.expect("an update"), dtype);
                let exact =
                    input.0.iter().zip(&update.0).map(|(&x, &y)| f64::from(x) + f64::from(y));
                assert_rounded(&what, &sums, &exact.collect::<Vec<_>>(), dtype);
                let found = floats(&device.client, both.normalized, dtype);
                assert_rounded(&what, &found, &normalized(&sums), dtype);
            }
        }
        let short = || client.empty(8);
        let refused =
            rms_norm(client, capability, short(), None, short(), [2, 4], KernelDtype::F32, 0.0);
        assert!(matches!(refused, Err(Refusal::Memory { what: "input", expected: 32, .. })));
    }
}

/// Makes cosines and sines of RoPE, `[positions, head_dim / 2]`.
fn rotations(positions: usize, head_dim: usize) -> [Vec<f32>; 2] {
    let angle = |at: usize| (at / (head_dim / 2)) as f32 * 0.7f32.powi((at % 5) as i32);
    let functions: [fn(f32) -> f32; 2] = [f32::cos, f32::sin];
    functions.map(|function| (0..positions * head_dim / 2).map(|at| function(angle(at))).collect())
}

/// Attends with exact sums, to rotated keys.
struct ExactAttention<'a> {
    shape: host::AttentionShape,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl ExactAttention<'_> {
    fn rotate(&self, head: &[f32], position: usize) -> Vec<f64> {
        let half = head.len() / 2;
        let channel = |at: usize| {
            let table = |table: &[f32]| f64::from(table[position * half + at % half]);
            let partner = f64::from(head[(at + half) % head.len()]);
            let sign = if at < half { -1.0 } else { 1.0 };
            f64::from(head[at]) * table(self.cos) + sign * partner * table(self.sin)
        };
        (0..head.len()).map(channel).collect()
    }

    /// Returns the outputs of queries at a position, for a cache that holds it.
    fn attend(&self, queries: &[f32], keys: &[f32], values: &[f32], position: usize) -> Vec<f64> {
        let host::AttentionShape { heads, kv_heads, head_dim, capacity, .. } = self.shape;
        let mut outputs = Vec::new();
        for (at, query) in queries.chunks(head_dim).enumerate() {
            let (sequence, head) = (at / heads, at % heads);
            let cached = sequence * kv_heads + head / (heads / kv_heads);
            let of = |cache: &'_ [f32], at: usize| -> Vec<f64> {
                let from = (cached * capacity + at) * head_dim;
                cache[from..from + head_dim].iter().copied().map(f64::from).collect()
            };
            let query = self.rotate(query, position);
            let weights = (0..=position).map(|at| {
                let key = of(keys, at);
                let score: f64 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
                (score / (head_dim as f64).sqrt()).exp()
            });
            let weights: Vec<f64> = weights.collect();
            let sum: f64 = weights.iter().sum();
            outputs.extend((0..head_dim).map(|channel| {
                let weighted =
                    weights.iter().enumerate().map(|(at, w)| w * of(values, at)[channel]);
                weighted.sum::<f64>() / sum
            }));
        }
        outputs
    }
}

/// Tokens one after the other, past the ends of tiles; the last shapes have a key head for more
/// query heads than a cube takes, and channels that no wide vector divides.
#[test]
fn attention_of_a_token_is_that_of_exact_sums() {
    for device in Device::all() {
        let Device { client, capability } = &device;
        let counters = Counters::new(client);
        let mut random = Random::new(43);
        // CubeCL's CPU runtime runs the units of a cube as threads, and barriers take long.
        let fast = capability.plane > 1 || capability.portable.is_some();
        let shapes: &[_] = match fast {
            false => &[(2, 4, 2, 8), (1, 9, 1, 12)],
            _ => &[
                (1, 4, 4, 16),
                (2, 6, 2, 32),
                (1, 18, 1, 8),
                (2, 2, 1, 12),
                (3, 32, 8, 128),
                (1, 14, 2, 64),
            ],
        };
        for (at, &(batch, heads, kv_heads, head_dim)) in shapes.iter().enumerate() {
            // The last is so long that the parts of the second kernel take several tiles each.
            let capacity = match fast {
                false => 20,
                _ if at == shapes.len() - 1 => 1300,
                _ if at == shapes.len() - 2 => 900,
                _ => 150,
            };
            let shape =
                host::AttentionShape { batch, tokens: 1, heads, kv_heads, head_dim, capacity };
            let dtype = kernel_dtype(device.dtype(DTYPES[at % 3]));
            let [cos, sin] = rotations(capacity, head_dim);
            let exact = ExactAttention { shape, cos: &cos, sin: &sin };
            let mut values = |count: usize| {
                upload_rounded(&device.client, (0..count).map(|_| random.normal()).collect(), dtype)
            };
            // The cache holds earlier tokens, and what nothing may read behind the last.
            let [keys, cached_values] =
                [(); 2].map(|()| values(batch * kv_heads * capacity * head_dim));
            let (mut key_values, mut value_values) = (keys.0, cached_values.0);
            for position in [0, 7, 8, capacity - 1] {
                let queries = values(batch * heads * head_dim);
                let [new_keys, new_values] = [(); 2].map(|()| values(batch * kv_heads * head_dim));
                let upload = |table: &[f32]| client.create_from_slice(f32::as_bytes(table));
                let operands = AttentionHandles {
                    queries: queries.1,
                    keys: new_keys.1,
                    values: new_values.1,
                    key_cache: keys.1.clone(),
                    value_cache: cached_values.1.clone(),
                    packed: None,
                    cos: upload(&cos),
                    sin: upload(&sin),
                    position: client.create_from_slice(i32::as_bytes(&[position as i32])),
                };
                let run = |operands, counters| {
                    let output =
                        attend(client, capability, operands, shape, capacity, dtype, counters);
                    floats(client, output.expect("memory of the shape"), dtype)
                };
                // Writes the same key and value.
                let joined = run(operands.clone(), Some(&counters));
                let found = run(operands, None);
                let cache = |handle: &Handle| floats(&device.client, handle.clone(), dtype);
                let what = format!("{shape:?} {dtype:?} at {position}");
                assert_bits(&what, &joined, &found);
                for head in 0..batch * kv_heads {
                    let to = (head * capacity + position) * head_dim;
                    let new = head * head_dim..(head + 1) * head_dim;
                    let rotated = exact.rotate(&new_keys.0[new.clone()], position);
                    let written = cache(&keys.1)[to..to + head_dim].to_vec();
                    assert_rounded(&what, &written, &rotated, dtype);
                    key_values[to..to + head_dim].copy_from_slice(&written);
                    value_values[to..to + head_dim].copy_from_slice(&new_values.0[new]);
                }
                // Nothing else is written.
                assert_eq!(cache(&keys.1), key_values, "{what}");
                assert_eq!(cache(&cached_values.1), value_values, "{what}");
                let expected = exact.attend(&queries.0, &key_values, &value_values, position);
                assert_rounded(&what, &found, &expected, dtype);
            }
        }
    }
}

/// Tokens of a prompt behind cached ones, one of them beyond the cache.
#[test]
fn a_prompt_is_rotated_into_the_cache_and_weighed_as_exact_sums_say() {
    for device in Device::all() {
        let Device { client, capability } = &device;
        let mut random = Random::new(44);
        let shapes = [(1, 3, 4, 2, 8, 9), (2, 5, 6, 2, 12, 40), (1, 7, 8, 8, 64, 600)];
        for (at, (batch, tokens, heads, kv_heads, head_dim, capacity)) in
            shapes.into_iter().enumerate()
        {
            let shape = host::AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity };
            let dtype = kernel_dtype(device.dtype(DTYPES[at]));
            let [cos, sin] = rotations(capacity, head_dim);
            // RoPE ends before the cache, or with it.
            let rows = capacity - at;
            let exact = ExactAttention { shape, cos: &cos, sin: &sin };
            let mut values = |count: usize| {
                upload_rounded(&device.client, (0..count).map(|_| random.normal()).collect(), dtype)
            };
            let queries = values(batch * tokens * heads * head_dim);
            let [keys, new_values] = [(); 2].map(|()| values(batch * tokens * kv_heads * head_dim));
            let [mut key_cache, mut value_cache] =
                [(); 2].map(|()| values(batch * kv_heads * capacity * head_dim));
            let scores = values(batch * heads * tokens * capacity);
            // The last counts as the last of the cache and RoPE.
            let mut positions: Vec<_> = (2..2 + tokens as i32).collect();
            positions[tokens - 1] = capacity as i32 + 5;
            let upload = |table: &[f32]| client.create_from_slice(f32::as_bytes(table));
            let position = client.create_from_slice(i32::as_bytes(&positions));
            let operands = AttentionHandles {
                queries: queries.1,
                keys: keys.1,
                values: new_values.1,
                key_cache: key_cache.1.clone(),
                value_cache: value_cache.1.clone(),
                packed: None,
                cos: upload(&cos),
                sin: upload(&sin),
                position: position.clone(),
            };
            let rotated = rotate_into_cache(client, capability, operands, shape, rows, dtype);
            let rotated = floats(&device.client, rotated.expect("memory of the shape"), dtype);
            let weights =
                attention_weights(client, capability, scores.1, position, shape, rows, dtype);
            let weights = floats(&device.client, weights.expect("memory of the shape"), dtype);
            let what = format!("{shape:?} {dtype:?}");
            for (sequence, token) in (0..batch).flat_map(|at| (0..tokens).map(move |to| (at, to))) {
                let position = (positions[token] as usize).min(rows - 1);
                let chunk = |at: usize| at * head_dim..(at + 1) * head_dim;
                for head in 0..heads {
                    let from = (sequence * tokens + token) * heads + head;
                    let row = (sequence * heads + head) * tokens + token;
                    let expected = exact.rotate(&queries.0[chunk(from)], position);
                    assert_rounded(&what, &rotated[chunk(row)], &expected, dtype);

                    let row = row * capacity..(row + 1) * capacity;
                    let score = |at: usize| f64::from(scores.0[row.start + at]);
                    let weight = |at: usize| (score(at) / (head_dim as f64).sqrt()).exp();
                    let sum: f64 = (0..=position).map(weight).sum();
                    // Multiplied by their number, so that their mean is 1.
                    let count = (position + 1) as f32;
                    let expected =
                        |at| if at > position { 0.0 } else { weight(at) / sum * f64::from(count) };
                    let expected: Vec<_> = (0..capacity).map(expected).collect();
                    let found: Vec<_> = weights[row].iter().map(|weight| weight * count).collect();
                    assert_rounded(&what, &found, &expected, dtype);
                }
                for head in 0..kv_heads {
                    let from = (sequence * tokens + token) * kv_heads + head;
                    let to = (sequence * kv_heads + head) * capacity + position;
                    let expected = exact.rotate(&keys.0[chunk(from)], position);
                    let found = floats(&device.client, key_cache.1.clone(), dtype);
                    assert_rounded(&what, &found[chunk(to)], &expected, dtype);
                    key_cache.0[chunk(to)].copy_from_slice(&found[chunk(to)]);
                    value_cache.0[chunk(to)].copy_from_slice(&new_values.0[chunk(from)]);
                }
            }
            // Nothing else is written.
            assert_eq!(floats(&device.client, key_cache.1, dtype), key_cache.0, "{what}");
            assert_eq!(floats(&device.client, value_cache.1, dtype), value_cache.0, "{what}");
        }
    }
}

/// Prompts behind cached tokens, in tiles with and without a mask, and positions in any order, one
/// of them beyond the cache or RoPE. Devices without WGMMA emulate it.
#[test]
fn flash_attention_is_that_of_exact_sums() {
    let client = &cubecl::Device::default().client();
    let mut capability = Capability::of(client);
    if capability.portable.is_some() {
        return; // too little shared memory, and often no buffers of 16 bits
    }
    let emulated = capability.wgmma == WgmmaSupport::None;
    if emulated {
        capability.wgmma = WgmmaSupport::Emulated;
    }
    let mut random = Random::new(46);
    let shapes: &[_] = match emulated {
        true => &[(1, 70, 1, 1, 64, 112)],
        false => &[
            (1, 3, 4, 2, 64, 90),
            (2, 130, 4, 4, 128, 140),
            (1, 700, 6, 2, 128, 1000),
            (3, 257, 8, 1, 64, 257),
        ],
    };
    // Barriers of the CPU runtime are slow.
    let spreads: &[_] = if emulated { &[6.0] } else { &[1.0, 6.0] };
    let shapes =
        shapes.iter().flat_map(|&shape| spreads.iter().map(move |&spread| (shape, spread)));
    for (at, ((batch, tokens, heads, kv_heads, head_dim, capacity), spread)) in shapes.enumerate() {
        let shape = host::AttentionShape { batch, tokens, heads, kv_heads, head_dim, capacity };
        let dtype = [KernelDtype::Bf16, KernelDtype::F16][at / 2 % 2];
        assert_eq!(check_flash_attention(&capability, &shape, capacity, dtype), Ok(()));
        let rows = capacity - at % 2;
        // Not rotated.
        let [cos, sin] = [1.0, 0.0].map(|angle| vec![angle; capacity * head_dim / 2]);
        let exact = ExactAttention { shape, cos: &cos, sin: &sin };
        let mut values = |count: usize, spread: f32| {
            let values = (0..count).map(|_| spread * random.normal()).collect();
            upload_rounded(client, values, dtype)
        };
        let queries = values(batch * heads * tokens * head_dim, spread);
        let [keys, cached] = [(); 2].map(|()| values(batch * kv_heads * capacity * head_dim, 1.0));
        let mut positions: Vec<_> = (0..tokens).map(|token| capacity - tokens + token).collect();
        if spread > 1.0 {
            positions.reverse();
            positions[0] = capacity + 7;
        }
        let position: Vec<_> = positions.iter().map(|&position| position as i32).collect();
        let position = client.create_from_slice(i32::as_bytes(&position));
        let cache = [keys.1, cached.1];
        let found =
            flash_attention(client, &capability, queries.1, cache, position, shape, rows, dtype);
        let found = floats(client, found.expect("memory of the shape"), dtype);
        for (token, position) in positions.into_iter().enumerate() {
            // The queries of all heads of the token.
            let chunk = |head: usize| (head * tokens + token) * head_dim;
            let of_token =
                (0..batch * heads).flat_map(|head| &queries.0[chunk(head)..][..head_dim]);
            let of_token: Vec<f32> = of_token.copied().collect();
            let expected = exact.attend(&of_token, &keys.0, &cached.0, position.min(rows - 1));
            let found = (0..batch).flat_map(|sequence| {
                &found[(sequence * tokens + token) * heads * head_dim..][..heads * head_dim]
            });
            let found: Vec<f32> = found.copied().collect();
            assert_rounded(&format!("{shape:?} {dtype:?} at {position}"), &found, &expected, dtype);
        }
    }
    let few = host::AttentionShape {
        batch: 1,
        tokens: 2,
        heads: 1,
        kv_heads: 1,
        head_dim: 64,
        capacity: 4,
    };
    let run = |shape, bytes: [usize; 4]| {
        let [queries, keys, values, position] = bytes.map(|bytes| client.empty(bytes));
        let (cache, dtype) = ([keys, values], KernelDtype::F16);
        flash_attention(client, &capability, queries, cache, position, shape, 4, dtype)
    };
    let names = ["queries", "cached keys", "cached values", "position"];
    for (at, name) in names.into_iter().enumerate() {
        let mut bytes = [256, 512, 512, 8];
        bytes[at] -= 2;
        let refused = run(few, bytes);
        assert!(matches!(refused, Err(Refusal::Memory { what, .. }) if what == name), "{name}");
    }
    let [no_tokens, no_sequences] =
        [host::AttentionShape { tokens: 0, ..few }, host::AttentionShape { batch: 0, ..few }];
    for none in [no_tokens, no_sequences] {
        assert!(run(none, [256, 512, 512, 8]).is_ok());
    }
}

/// A packed cache, and the values that it holds.
struct PackedCache {
    codes: Handle,
    scales: Handle,
    values: Vec<f32>,
}

impl PackedCache {
    /// Makes a cache of random values of at most 4, so that a stray write is seen. Larger scores
    /// would need a wider tolerance.
    fn random(
        client: &Client,
        random: &mut Random,
        format: host::KvFormat,
        heads: usize,
        head_dim: usize,
    ) -> Self {
        let [code_bytes, scale_bytes] = format.bytes_of_head(head_dim);
        // No code of E4M3 is NaN without the bits 3 and 7.
        let codes = (0..heads * code_bytes).map(|_| random.bits() as u8 & 0x77);
        let codes: Vec<u8> = codes.collect();
        // 2^-6 in E8M0, 0.5 in E4M3.
        let scale = if format == host::KvFormat::Fp8 { 121 } else { 0x30 };
        let scales = vec![scale; heads * scale_bytes];
        let mut values = vec![0.0; heads * head_dim];
        host::dequantize_heads(&codes, &scales, head_dim, format, &mut values)
            .expect("whole blocks");
        let [codes, scales] = [codes, scales].map(|bytes| client.create_from_slice(&bytes));
        Self { codes, scales, values }
    }

    /// Compares new heads `[batch, tokens, kv_heads, head_dim]`, from position `place` on, with
    /// those that the host quantizes, and keeps their values.
    fn check_written(
        &mut self,
        client: &Client,
        new: &[f32],
        format: host::KvFormat,
        shape: host::AttentionShape,
        place: usize,
        what: &str,
    ) {
        let host::AttentionShape { tokens, kv_heads, head_dim, capacity, .. } = shape;
        let [code_bytes, scale_bytes] = format.bytes_of_head(head_dim);
        let heads = new.len() / head_dim;
        let mut codes = vec![0; heads * code_bytes];
        let mut scales = vec![0; heads * scale_bytes];
        host::quantize_heads(new, head_dim, format, &mut codes, &mut scales).expect("whole blocks");
        let mut dense = vec![0.0; new.len()];
        host::dequantize_heads(&codes, &scales, head_dim, format, &mut dense)
            .expect("whole blocks");
        let written =
            [&self.codes, &self.scales].map(|handle| client.read_one_unchecked(handle.clone()));
        for head in 0..heads {
            let (row, kv_head) = (head / kv_heads, head % kv_heads);
            let (sequence, token) = (row / tokens, row % tokens);
            let to = (sequence * kv_heads + kv_head) * capacity + place + token;
            let part = |at: usize, bytes: usize| at * bytes..(at + 1) * bytes;
            let found = &written[0][part(to, code_bytes)];
            assert_eq!(found, &codes[part(head, code_bytes)], "{what}: codes");
            let found = &written[1][part(to, scale_bytes)];
            assert_eq!(found, &scales[part(head, scale_bytes)], "{what}: scales");
            self.values[part(to, head_dim)].copy_from_slice(&dense[part(head, head_dim)]);
        }
    }
}

/// A prompt, and tokens one after the other, past the ends of tiles. RoPE turns by 0, so that the
/// bits are those of the host.
#[test]
fn packed_kv_caches_hold_the_bits_of_the_host_and_are_attended_to_as_their_values() {
    for device in Device::all() {
        let Device { client, capability } = &device;
        let counters = Counters::new(client);
        if capability.check_packed_kv().is_err() {
            assert!(capability.portable.is_some(), "{capability:?}");
            continue;
        }
        let mut random = Random::new(48);
        let fast = capability.plane > 1;
        let shapes: &[_] = match fast {
            false => &[(1, 2, 1, 16, 20), (2, 4, 2, 32, 12)],
            true => &[
                (2, 4, 2, 16, 150),
                (1, 9, 3, 64, 300),
                (3, 32, 8, 128, 700),
                (1, 18, 1, 48, 300),
                (2, 14, 2, 80, 300),
            ],
        };
        let cases =
            shapes.iter().flat_map(|shape| host::KvFormat::ALL.map(|format| (shape, format)));
        for (at, (&(batch, heads, kv_heads, head_dim, capacity), format)) in cases.enumerate() {
            let shape =
                host::AttentionShape { batch, tokens: 1, heads, kv_heads, head_dim, capacity };
            let dtype = kernel_dtype(device.dtype(DTYPES[(at + at / 3) % 3]));
            let angles = capacity * head_dim / 2;
            let (cos, sin) = (vec![1.0; angles], vec![0.0; angles]);
            let exact = ExactAttention { shape, cos: &cos, sin: &sin };
            let cached = batch * kv_heads * capacity;
            let mut caches = [(); 2]
                .map(|()| PackedCache::random(client, &mut random, format, cached, head_dim));
            let tokens: &[usize] = &[3, 1, 1, 1, 1, 1, 1];
            let last = capacity - 1;
            let places = [0, 3, 7, 8, last.min(127), last.min(128), last];
            for (&tokens, place) in tokens.iter().zip(places) {
                let mut values = |count: usize| {
                    let values = (0..count).map(|_| random.normal()).collect();
                    upload_rounded(client, values, dtype)
                };
                let queries = values(batch * tokens * heads * head_dim);
                let new = [(); 2].map(|()| values(batch * tokens * kv_heads * head_dim));
                let positions: Vec<_> = (place as i32..(place + tokens) as i32).collect();
                let upload = |table: &[f32]| client.create_from_slice(f32::as_bytes(table));
                let operands = AttentionHandles {
                    queries: queries.1,
                    keys: new[0].1.clone(),
                    values: new[1].1.clone(),
                    key_cache: caches[0].codes.clone(),
                    value_cache: caches[1].codes.clone(),
                    packed: Some(PackedKv {
                        format,
                        key_scales: caches[0].scales.clone(),
                        value_scales: caches[1].scales.clone(),
                    }),
                    cos: upload(&cos),
                    sin: upload(&sin),
                    position: client.create_from_slice(i32::as_bytes(&positions)),
                };
                let shape = host::AttentionShape { tokens, ..shape };
                let what = format!("{shape:?} {format:?} {dtype:?} at {place}");
                let output = match tokens {
                    1 => {
                        let counters = Some(&counters);
                        attend(client, capability, operands, shape, capacity, dtype, counters)
                    }
                    _ => rotate_into_cache(client, capability, operands, shape, capacity, dtype),
                };
                let found = floats(client, output.expect("memory of the shape"), dtype);

                for (of, (cache, (new, _))) in caches.iter_mut().zip(&new).enumerate() {
                    let mut new = new.clone();
                    if of == 0 && format.transforms_keys() {
                        new = transformed(&new);
                    }
                    cache.check_written(client, &new, format, shape, place, &what);
                    // Nothing else is written, and all of it is read as on the host.
                    let codes = [cache.codes.clone(), cache.scales.clone()];
                    let form = [cached, head_dim];
                    let dense = dequantize_heads(client, capability, codes, format, form, dtype);
                    let dense = floats(client, dense.expect("memory of the shape"), dtype);
                    assert_eq!(dense, cache.values, "{what}");
                }
                if tokens > 1 {
                    // The queries alone: matmuls read the dequantized cache.
                    let expected = turned_queries(&queries.0, format, shape);
                    assert_rounded(&what, &found, &expected, dtype);
                    continue;
                }
                let keys = match format.transforms_keys() {
                    true => transformed(&caches[0].values),
                    false => caches[0].values.clone(),
                };
                let expected = exact.attend(&queries.0, &keys, &caches[1].values, place);
                assert_rounded(&what, &found, &expected, dtype);
            }
        }
    }
}

/// Moves queries `[batch, tokens, heads, head_dim]` to `[batch, heads, tokens, head_dim]`, and
/// transforms them as the format says.
fn turned_queries(
    queries: &[f32],
    format: host::KvFormat,
    shape: host::AttentionShape,
) -> Vec<f64> {
    let host::AttentionShape { tokens, heads, head_dim, .. } = shape;
    let queries = match format.transforms_keys() {
        true => transformed(queries),
        false => queries.to_vec(),
    };
    let mut turned = vec![0.0; queries.len()];
    for (at, head) in queries.chunks(head_dim).enumerate() {
        let (row, of) = (at / heads, at % heads);
        let (sequence, token) = (row / tokens, row % tokens);
        let to = ((sequence * heads + of) * tokens + token) * head_dim;
        for (to, from) in turned[to..to + head_dim].iter_mut().zip(head) {
            *to = f64::from(*from);
        }
    }
    turned
}

/// Transforms each 16 neighbours, or back.
fn transformed(values: &[f32]) -> Vec<f32> {
    let mut output = vec![0.0f32; values.len()];
    let (view, transform) = (host::View::rows(values.len() / 16, 16), Hadamard::with_signs(0));
    host::hadamard(values, view, transform, false, &mut output).expect("whole groups");
    output
}

#[test]
fn few_rows_times_a_dense_weight_are_exact_sums() {
    for device in Device::all() {
        let Device { client, capability } = &device;
        let mut random = Random::new(46);
        for (at, (m, n, k)) in [(1, 37, 64), (3, 50, 36), (8, 200, 520)].into_iter().enumerate() {
            let dtype = device.dtype(DTYPES[at % 3]);
            let kernel_dtype = kernel_dtype(dtype);
            let mut values = |count: usize| {
                upload_rounded(
                    &device.client,
                    (0..count).map(|_| random.normal()).collect(),
                    kernel_dtype,
                )
            };
            let (input, weight) = (values(m * k), values(n * k));
            let mut columns = vec![0.0; n * k];
            for (at, &value) in weight.0.iter().enumerate() {
                columns[at % k * n + at / k] = value;
            }
            let (_, columns) = upload_rounded(&device.client, columns, kernel_dtype);
            let exact = exact_products(&weight.0, &input.0, None, k);
            for (weight, transposed) in [(weight.1, true), (columns, false)] {
                let what = format!("{m} x {n} x {k} {dtype:?}, transposed {transposed}");
                let input = input.1.clone();
                let output = dense_gemv(
                    client,
                    capability,
                    input,
                    weight,
                    [m, n, k],
                    transposed,
                    kernel_dtype,
                );
                let found =
                    floats(&device.client, output.expect("memory of the shape"), kernel_dtype);
                assert_products(&what, &found, &exact, dtype);
            }
            let input = || input.1.clone();
            let refused =
                dense_gemv(client, capability, input(), input(), [9, 1, 4], true, kernel_dtype);
            assert!(matches!(refused, Err(Refusal::Mismatch { expected: 8, found: 9, .. })));
        }
    }
}

#[test]
fn few_rows_times_a_matrix_of_signed_bytes_are_exact_sums() {
    for device in Device::all() {
        let Device { client, capability } = &device;
        let mut random = Random::new(47);
        for (wanted, (m, n, k)) in [
            (Dtype::F32, (1, 37, 64)),
            (Dtype::Bf16, (3, 50, 96)),
            (Dtype::F16, (8, 200, 544)),
            (Dtype::Bf16, (16, 33, 1056)),
        ] {
            let dtype = device.dtype(wanted);
            let kernel_dtype = kernel_dtype(dtype);
            let mut values = |count: usize| (0..count).map(|_| random.normal()).collect::<Vec<_>>();
            let mut weight = values(n * k);
            // Codes of both signs at their limits, and blocks of zeros.
            (weight[0], weight[1]) = (-100.0, 100.0);
            weight[32..64].fill(0.0);
            let (codes, scales) = quantize_int8(&weight).expect("whole blocks");
            assert!(codes.contains(&-127) && codes.contains(&127));
            let weight: Vec<f32> = codes
                .iter()
                .zip(0..)
                .map(|(&code, at)| f32::from(code) * scales[at / 32])
                .collect();
            let input = upload_rounded(&device.client, values(m * k), kernel_dtype);
            let exact = exact_products(&weight, &input.0, None, k);
            let bytes: Vec<u8> = codes.iter().map(|&code| code.cast_unsigned()).collect();
            let matrix = || {
                let scales = client.create_from_slice(f32::as_bytes(&scales));
                [client.create_from_slice(&bytes), scales]
            };
            let run = |shape| {
                int8_gemv(client, capability, input.1.clone(), matrix(), shape, kernel_dtype)
            };
            let output = run([m, n, k]).expect("memory of the shape");
            let what = format!("{m} x {n} x {k} {dtype:?}");
            assert_products(&what, &floats(&device.client, output, kernel_dtype), &exact, dtype);
            for (shape, what) in
                [([17, 1, 32], "rows of the input"), ([1, 1, 33], "channels of whole blocks")]
            {
                assert!(
                    matches!(run(shape), Err(Refusal::Mismatch { what: at, .. }) if at == what)
                );
            }
            assert!(matches!(run([m, n + 1, k]), Err(Refusal::Memory { what: "codes", .. })));
        }
    }
}

#[test]
fn argmax_is_the_first_of_the_largest_values() {
    for device in Device::all() {
        let Device { client, capability } = &device;
        let mut random = Random::new(45);
        for (dtype, cols) in DTYPES.into_iter().zip([33, 40, 5000]) {
            let dtype = kernel_dtype(device.dtype(dtype));
            const ROWS: usize = 12;
            let mut values: Vec<f32> = (0..ROWS * cols).map(|_| 2.0 * random.normal()).collect();
            let mut expect = Vec::new();
            for (row, values) in values.chunks_mut(cols).enumerate() {
                let largest = match row {
                    0 => f32::INFINITY,
                    1 => 0.0,
                    _ => 100.0,
                };
                if row == 1 {
                    values.fill(-0.0);
                }
                values[..3].fill(f32::NAN);
                let first = 3 + random.below(cols - 3);
                let second = first + random.below(cols - first);
                values[second] = largest;
                // Zeros of both signs are equal: the first is at 3.
                values[first] = largest;
                expect.push(if row == 1 { 3 } else { first as i32 });
            }
            let (_, uploaded) = upload_rounded(&device.client, values, dtype);
            let found = argmax(client, capability, uploaded, [ROWS, cols], dtype);
            let bytes = client.read_one_unchecked(found.expect("memory of the shape"));
            assert_eq!(i32::from_bytes(&bytes), expect, "{dtype:?} {cols}");
        }
        let infinite = client.create_from_slice(f32::as_bytes(&[f32::NAN, f32::NEG_INFINITY]));
        let found = argmax(client, capability, infinite, [1, 2], KernelDtype::F32);
        let bytes = client.read_one_unchecked(found.expect("memory of the shape"));
        assert_eq!(i32::from_bytes(&bytes), [1]);
    }
}

/// Uniform values from 0 to 1 in equal steps draw each token as often as its probability says.
#[test]
fn tokens_are_drawn_as_often_as_their_probabilities_say() {
    const DRAWS: usize = 500;
    for device in Device::all() {
        let Device { client, capability } = &device;
        let mut random = Random::new(47);
        let uniform: Vec<f32> = (0..DRAWS).map(|at| (at as f32 + 0.5) / DRAWS as f32).collect();
        let all = SampleOptions { temperature: 1.0, top_k: None, top_p: None };
        let cases = [
            (40, Dtype::F32, all),
            (33, Dtype::F32, SampleOptions { temperature: 0.5, ..all }),
            (600, Dtype::F32, SampleOptions { top_k: Some(7), ..all }),
            (64, Dtype::Bf16, SampleOptions { top_k: Some(9), temperature: 2.0, ..all }),
            (64, Dtype::F16, SampleOptions { top_p: Some(0.6), ..all }),
            (72, Dtype::Bf16, SampleOptions { top_k: Some(20), top_p: Some(0.8), ..all }),
            (12, Dtype::F32, SampleOptions { top_k: Some(1), top_p: Some(0.01), ..all }),
            // Units keep few vectors; the last one of the row has the largest logits.
            (8200, Dtype::Bf16, SampleOptions { top_k: Some(40), ..all }),
            // One unit has more of the largest than it keeps.
            (24_576, Dtype::Bf16, SampleOptions { top_k: Some(5), ..all }),
        ];
        // By several units; a single one reads all, slowly on CubeCL's CPU runtime.
        let rows_are_shared = capability.plane > 1 || capability.portable.is_some();
        for (vocab_size, dtype, options) in cases {
            if vocab_size > 1000 && !rows_are_shared {
                continue;
            }
            let dtype = kernel_dtype(device.dtype(dtype));
            let what = format!("{vocab_size} {dtype:?} {options:?}");
            let mut row: Vec<f32> = (0..vocab_size).map(|_| 2.0 * random.normal()).collect();
            match vocab_size {
                8200 => row[8192..].iter_mut().for_each(|logit| *logit += 6.0),
                24_576 => row.iter_mut().step_by(4096).skip(1).for_each(|logit| *logit += 20.0),
                _ => {}
            }
            let (row, _) = upload_rounded(&device.client, row, dtype);
            let (_, logits) = upload_rounded(&device.client, row.repeat(DRAWS), dtype);
            let uniform = client.create_from_slice(f32::as_bytes(&uniform));
            let drawn =
                sample(client, capability, logits, uniform, [DRAWS, vocab_size], dtype, options);
            let bytes = client.read_one_unchecked(drawn.expect("memory of the shape"));
            let mut counts = vec![0usize; vocab_size];
            i32::from_bytes(&bytes).iter().for_each(|&token| counts[token as usize] += 1);

            let mut sorted = row.clone();
            sorted.sort_by(|left, right| right.total_cmp(left));
            let weight =
                |logit: f32| (f64::from(logit - sorted[0]) / f64::from(options.temperature)).exp();
            let kth = options.top_k.map_or(f32::MIN, |top_k| sorted[top_k - 1]);
            let kept = || sorted.iter().copied().filter(|&logit| logit >= kth);
            let needed = f64::from(options.top_p.unwrap_or(1.0)) * kept().map(weight).sum::<f64>();
            let mut sum = 0.0;
            let reached = kept().find(|&logit| {
                sum += weight(logit);
                sum >= needed
            });
            let least = options.top_p.map_or(kth, |_| reached.unwrap_or(f32::MIN));
            let probability = |logit: f32| if logit >= least { weight(logit) } else { 0.0 };
            let total: f64 = row.iter().map(|&logit| probability(logit)).sum();
            for (token, (&count, &logit)) in counts.iter().zip(&row).enumerate() {
                let expected = DRAWS as f64 * probability(logit) / total;
                let far = (count as f64 - expected).abs();
                assert!(far < 1.001, "{what} token {token}: {count} of {expected}");
                assert!(count == 0 || probability(logit) > 0.0, "{what} token {token}");
            }
        }
    }
}
