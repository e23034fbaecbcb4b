//! Operations of a decoder: on `flex` each is one operation, on devices with kernels norms and the
//! attention of a token are, elsewhere they are tensor operations.

// Burn 0.22 deprecates `NdArray`.
#![allow(deprecated)]

use burn::backend::{BackendTensor, DispatchTensorKind};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_fp4::Replay;
use burn_fp4_ops::{
    Activations, Hadamard, Int8Matrix, KvCache, KvFormat, OpsError, RotaryEmbedding, SampleOptions,
    add_rms_norm, attention, dense_matmul, hadamard, rms_norm, sample, swiglu,
};
use burn_fp4_search::host::quantize_heads;
use tests::engines::devices;
use tests::tensors::{floats, random};

/// Computes the same with the operations of `flex`, and with tensor operations, which other devices
/// have instead.
fn assert_same_as_tensor_operations(compute: impl Fn(&Device) -> Vec<f32>) {
    let device = Device::flex();
    let own = compute(&device);
    for other in [device.autodiff(), Device::ndarray()] {
        assert_close(&own, &compute(&other), 2e-5);
    }
}

/// Checks differences relative to the expected values, or absolute ones where these are below 1.
fn assert_close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(error <= tolerance * expected.abs().max(1.0), "{at}: {found} {expected}");
    }
}

/// Returns the tolerance of values of a dtype.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 0.01,
        DType::BF16 => 0.08,
        _ => 2e-5,
    }
}

/// Returns the tolerance of attention: dense products of a prompt on CUDA round f32 factors to 11
/// bits.
fn tolerance_of_attention(device: &str, dtype: DType) -> f32 {
    if device == "cuda" && dtype == DType::F32 { 2e-3 } else { tolerance(dtype) }
}

#[test]
fn norms_and_swiglu_are_those_of_tensor_operations() {
    for shape in [[1, 1, 576], [2, 3, 40], [1, 200, 512]] {
        assert_same_as_tensor_operations(|device| {
            let [hidden, update, gate, up] = [1, 2, 3, 4].map(|seed| random(seed, shape, device));
            let weight = random(5, [shape[2]], device);
            let normalized = rms_norm(hidden.clone(), weight.clone(), 1e-5);
            // The hidden states are also read elsewhere: they stay what they are.
            let [sums, normalized_sums] = add_rms_norm(hidden.clone(), update, weight, 1e-5);
            let gated = swiglu(gate.clone(), up);
            let all = [normalized, hidden, sums, normalized_sums, gated, gate];
            all.into_iter().flat_map(floats).collect()
        });
    }
}

/// The last shape has heads that are longer than the operation of `flex` takes.
#[test]
fn attention_is_that_of_tensor_operations_with_and_without_a_cache() {
    for (batch, heads, kv_heads, head_dim) in
        [(1, 9, 3, 64), (2, 4, 4, 6), (2, 14, 2, 16), (1, 2, 1, 260)]
    {
        assert_same_as_tensor_operations(|device| {
            let inv_freq: Vec<_> = (0..head_dim / 2).map(|at| 0.7f32.powi(at as i32)).collect();
            let rotary = RotaryEmbedding::new(&inv_freq, 20, device);
            let tokens = |seed, count, heads| random(seed, [batch, count, heads, head_dim], device);
            let mut found = Vec::new();
            let zeros = || KvCache::zeros([batch, kv_heads, 20, head_dim], DType::F32, device);
            let mut cache = Some(zeros());
            for (seed, (first, count)) in [(0, 5), (5, 1), (6, 9)].into_iter().enumerate() {
                let positions = Tensor::<1, Int>::arange(first..first + count, device);
                let positions = rotary.at(positions, 20, DType::F32);
                let count = count as usize;
                let queries = tokens(seed as u64, count, heads);
                let [keys, values] = [10, 20].map(|at| tokens(at + seed as u64, count, kv_heads));
                let (output, next) = attention(queries, keys, values, cache.take(), &positions);
                found.extend(floats(output));
                cache = Some(next);
            }
            let cache = cache.expect("the last one");
            found.extend([cache.keys(), cache.values()].into_iter().flat_map(floats));
            let positions = rotary.at(Tensor::arange(0..7, device), 7, DType::F32);
            let [keys, values] = [31, 32].map(|seed| tokens(seed, 7, kv_heads));
            let (output, cache) = attention(tokens(30, 7, heads), keys, values, None, &positions);
            assert_eq!(cache.dims(), [batch, kv_heads, 7, head_dim]);
            found.extend([output.unsqueeze(), cache.keys()].into_iter().flat_map(floats));
            found
        });
    }
}

/// A prompt, then one token at a time, from views, with a cache that the test holds for a while.
/// CUDA also takes a prompt of more than one cube, with heads for its matrix instructions.
#[test]
fn every_device_decodes_as_flex_does() {
    let compute = |device: &Device, dtype: DType, head_dim: usize, prompt: usize| {
        let values = |seed, count, heads| -> Tensor<4> {
            random::<4>(seed, [2, heads, count, head_dim], device).swap_dims(1, 2).cast(dtype)
        };
        let capacity = prompt + 5;
        let inv_freq: Vec<_> = (0..head_dim / 2).map(|at| 0.7f32.powi(at as i32)).collect();
        let rotary = RotaryEmbedding::new(&inv_freq, capacity + 1, device);
        let mut cache = KvCache::zeros([2, 2, capacity, head_dim], dtype, device);
        let (mut found, mut attended) = (Vec::new(), Vec::new());
        let mut held: Option<(KvCache, Vec<f32>)> = None;
        let steps = [(0, prompt), (prompt, 1), (prompt + 1, 1), (prompt + 2, 1)];
        for (seed, (first, count)) in steps.into_iter().enumerate() {
            let seed = 10 * seed as u64;
            let positions = first as i64..(first + count) as i64;
            let positions = Tensor::<1, Int>::arange(positions, device);
            let positions = rotary.at(positions, capacity, dtype);
            let queries = values(seed, count, 6);
            let [keys, new] = [1, 2].map(|at| values(seed + at, count, 2));
            let (output, next) = attention(queries, keys, new, Some(cache), &positions);
            let [hidden, update] = [3, 4].map(|at| values(seed + at, count, 6));
            let weight = random::<1>(seed + 5, [head_dim], device).cast(dtype);
            found.extend(floats(rms_norm(hidden.clone(), weight.clone(), 1e-5)));
            found.extend(add_rms_norm(hidden, update, weight, 1e-5).into_iter().flat_map(floats));
            attended.extend(floats(output));
            let all = |cache: &KvCache| -> Vec<f32> {
                [cache.keys(), cache.values()].into_iter().flat_map(floats).collect()
            };
            if let Some((cache, before)) = held.take() {
                assert_eq!(all(&cache), before, "{device:?}: a held cache changed");
            }
            if first == prompt + 1 {
                held = Some((next.clone(), all(&next)));
            }
            cache = next;
        }
        found.extend([cache.keys(), cache.values()].into_iter().flat_map(floats));
        [found, attended]
    };
    let expected = |head_dim, prompt| compute(&Device::flex(), DType::F32, head_dim, prompt);
    let [small, large] = [(16, 3), (64, 130)]
        .map(|(head_dim, prompt)| (head_dim, prompt, expected(head_dim, prompt)));
    for (name, device, dtypes) in devices() {
        let sizes = if name == "cuda" { vec![&small, &large] } else { vec![&small] };
        for (dtype, &(head_dim, prompt, ref expected)) in
            dtypes.into_iter().flat_map(|dtype| sizes.iter().map(move |&size| (dtype, size)))
        {
            println!("{name} {dtype:?}, {prompt} tokens");
            let [found, attended] = compute(&device, dtype, head_dim, prompt);
            assert_close(&found, &expected[0], tolerance(dtype));
            assert_close(&attended, &expected[1], tolerance_of_attention(name, dtype));
        }
    }
}

/// Makes heads `[batch, tokens, heads, head_dim]` that lie in another order in memory.
fn swapped(seed: u64, [batch, tokens, heads, head_dim]: [usize; 4], device: &Device) -> Tensor<4> {
    random::<4>(seed, [batch, heads, tokens, head_dim], device).swap_dims(1, 2)
}

#[test]
fn views_are_read_in_their_order_and_left_as_they_are() {
    assert_same_as_tensor_operations(|device| {
        let whole: Tensor<3> = random(1, [2, 48, 6], device);
        let view = || whole.clone().narrow(1, 8, 32).swap_dims(1, 2);
        let weight = random::<1>(2, [96], device).narrow(0, 64, 32);
        let [sums, normalized] = add_rms_norm(view(), view(), weight.clone(), 1e-5);
        let row = random::<3>(3, [1, 2, 32], device).narrow(1, 1, 1);
        let matrix = Int8Matrix::quantize(random(4, [40, 32], device)).expect("blocks of 32");
        let dense = random::<2>(5, [48, 40], device).narrow(0, 16, 32);
        let all = [
            rms_norm(view(), weight, 1e-5),
            sums,
            normalized,
            swiglu(view(), view()),
            dense_matmul(row.clone(), dense),
            matrix.product(row),
            matrix.product(view()),
            whole.clone(),
        ];
        let mut found: Vec<f32> = all.into_iter().flat_map(floats).collect();

        let rotary = RotaryEmbedding::new(&[1.0, 0.5, 0.1], 20, device);
        let positions = rotary.at(Tensor::arange(3..7, device), 9, DType::F32);
        let held: Tensor<4> = random(6, [4, 2, 9, 6], device);
        let half = |from| held.clone().narrow(0, from, 2);
        let cache = KvCache::Dense { keys: half(0), values: half(2) };
        let [queries, keys, values] =
            [(7, 4), (8, 2), (9, 2)].map(|(seed, heads)| swapped(seed, [2, 4, heads, 6], device));
        let (output, cache) = attention(queries, keys, values, Some(cache), &positions);
        found.extend(floats(output));
        found.extend([cache.keys(), cache.values(), held].into_iter().flat_map(floats));
        found
    });
}

#[test]
fn an_int8_matrix_rounds_its_input_on_flex_alone() {
    for (name, device, dtypes) in devices() {
        for &dtype in &dtypes {
            let matrix = Int8Matrix::quantize(random(1, [40, 96], &device)).expect("blocks of 32");
            let input = random::<2>(2, [3, 96], &device).cast(dtype);
            let exact = floats(matrix.product(input.clone()));
            let found = floats(matrix.with_activations(Activations::Int8).product(input));
            let rounds = name == "flex";
            assert_eq!(exact != found, rounds, "{name} {dtype:?}");
            let square = |values: &[f32]| values.iter().map(|x| x * x).sum::<f32>();
            let differences: Vec<f32> = exact.iter().zip(&found).map(|(a, b)| a - b).collect();
            let relative = (square(&differences) / square(&exact)).sqrt();
            assert!(relative < 0.01, "{name} {dtype:?}: {relative}");
        }
    }
}

#[test]
fn halves_are_near_the_results_in_f32() {
    let device = Device::flex();
    let compute = |dtype: DType| {
        let [x, y] = [1, 2].map(|seed| random::<3>(seed, [1, 3, 64], &device).cast(dtype));
        let weight = random::<1>(3, [64], &device).cast(dtype);
        let [sums, normalized] = add_rms_norm(x.clone(), y.clone(), weight.clone(), 1e-5);
        let dense = random::<2>(4, [64, 8], &device).cast(dtype) / 8.0;
        let matrix = Int8Matrix::quantize(random::<2>(5, [8, 64], &device) / 8.0);
        let row = x.clone().narrow(1, 0, 1);
        let transposed = random::<2>(9, [24, 64], &device).cast(dtype).transpose() / 8.0;
        let rows_of_table = random::<2>(10, [40, 64], &device).cast(dtype) / 8.0;
        let tied = rows_of_table.narrow(0, 7, 20).transpose();
        let rotary = RotaryEmbedding::new(&[1.0, 0.1], 4, &device);
        let positions = rotary.at(Tensor::arange(1..4, &device), 4, dtype);
        let [queries, keys, values] = [(6, 4), (7, 2), (8, 2)]
            .map(|(seed, heads)| random::<4>(seed, [1, 3, heads, 4], &device).cast(dtype));
        let cache = KvCache::zeros([1, 2, 4, 4], dtype, &device);
        let (output, cache) = attention(queries, keys, values, Some(cache), &positions);
        assert_eq!([output.dtype(), cache.keys().dtype()], [dtype; 2]);
        let all = [
            rms_norm(x.clone(), weight, 1e-5),
            sums,
            normalized,
            swiglu(x, y),
            dense_matmul(row.clone(), dense),
            dense_matmul(row.clone(), transposed),
            dense_matmul(row.clone(), tied),
            matrix.expect("blocks of 32").product(row),
            output,
        ];
        assert!(all.iter().all(|one| one.dtype() == dtype));
        all.into_iter().flat_map(floats).collect::<Vec<_>>()
    };
    let expected = compute(DType::F32);
    for (dtype, tolerance) in [(DType::F16, 0.01), (DType::BF16, 0.08)] {
        assert_close(&compute(dtype), &expected, tolerance);
    }
}

#[test]
fn one_row_times_a_dense_weight_in_either_order_is_the_product_of_tensor_operations() {
    for (channels, outputs) in [(64, 48), (300, 700)] {
        assert_same_as_tensor_operations(|device| {
            let input = |rows| random::<3>(1, [1, rows, channels], device) / 20.0;
            let weight: Tensor<2> = random(2, [channels, outputs], device);
            let transposed: Tensor<2> = random(3, [outputs, channels], device);
            let mut found = floats(dense_matmul(input(1), weight.clone()));
            found.extend(floats(dense_matmul(input(1), transposed.transpose())));
            found.extend(floats(dense_matmul(input(2), weight)));
            found
        });
    }
}

/// Returns the addresses of the parts of a KV cache on `flex`.
fn addresses(cache: &KvCache) -> Vec<*const u8> {
    let address = |kind: DispatchTensorKind| match kind {
        DispatchTensorKind::Flex(BackendTensor::Float(part) | BackendTensor::Int(part)) => {
            part.bytes().as_ptr()
        }
        other => panic!("on flex: {other:?}"),
    };
    match cache.clone() {
        KvCache::Dense { keys, values } => {
            [keys, values].map(|part| address(part.into_dispatch().kind)).to_vec()
        }
        KvCache::Packed { keys, values, .. } => {
            let parts = [keys.codes, keys.scales, values.codes, values.scales];
            parts.map(|part| address(part.into_dispatch().kind)).to_vec()
        }
    }
}

/// Allocates a packed cache. WGSL has no bytes: there the error says so, and the result is none.
fn packed_cache(shape: [usize; 4], format: KvFormat, device: &Device) -> Option<KvCache> {
    let cache = KvCache::packed_zeros(shape, format, device);
    if device.supports_dtype(DType::U8) {
        return Some(cache.expect("whole blocks"));
    }
    assert!(matches!(cache, Err(OpsError::Device(_))));
    None
}

/// Allocates a cache of each format, and a dense one.
fn caches(shape: [usize; 4], dtype: DType, device: &Device) -> Vec<KvCache> {
    let packed = KvFormat::ALL.into_iter().filter_map(|format| packed_cache(shape, format, device));
    [KvCache::zeros(shape, dtype, device)].into_iter().chain(packed).collect()
}

#[test]
fn a_kv_cache_is_updated_in_place_unless_it_is_held_elsewhere() {
    let device = Device::flex();
    let rotary = RotaryEmbedding::new(&[1.0, 0.1, 0.5, 0.2, 0.0, 0.3, 0.4, 0.6], 8, &device);
    let step = |cache: KvCache, position: i32| {
        let positions = rotary.at(Tensor::from_ints([position], &device), 8, DType::F32);
        let [queries, keys, values] = [1, 2, 3].map(|seed| random(seed, [1, 1, 1, 16], &device));
        attention(queries, keys, values, Some(cache), &positions).1
    };
    for cache in caches([1, 1, 8, 16], DType::F32, &device) {
        let places = addresses(&cache);
        let cache = step(step(cache, 0), 1);
        assert_eq!(addresses(&cache), places);
        let held = cache.clone();
        let before = floats(held.keys());
        let after = step(cache, 2);
        assert!(addresses(&after).iter().zip(places).all(|(after, before)| *after != before));
        assert_eq!(floats(held.keys()), before);
        assert_ne!(floats(after.keys()), before);
    }
}

#[test]
fn a_kv_cache_that_is_held_elsewhere_is_copied_on_every_device() {
    const SHAPE: [usize; 4] = [1, 2, 8, 32];
    for (name, device, _) in devices() {
        let rotary = RotaryEmbedding::new(&[0.5; 16], 8, &device);
        let decode = |mut cache: KvCache, holds: bool| {
            let (mut outputs, mut held) = (Vec::new(), Vec::new());
            for at in 0..4 {
                if holds {
                    held.push((cache.clone(), floats(cache.keys()), floats(cache.values())));
                }
                let [queries, keys, values] = [(1, 4), (2, 2), (3, 2)]
                    .map(|(seed, heads)| random(10 * at + seed, [1, 1, heads, 32], &device));
                let positions = Tensor::from_ints([at as i32], &device);
                let positions = rotary.at(positions, 8, DType::F32);
                let output;
                (output, cache) = attention(queries, keys, values, Some(cache), &positions);
                outputs.push(floats(output));
            }
            for (cache, keys, values) in held {
                assert_eq!(floats(cache.keys()), keys, "{name}");
                assert_eq!(floats(cache.values()), values, "{name}");
            }
            outputs.extend([cache.keys(), cache.values()].map(floats));
            outputs
        };
        let [held, alone] = [(); 2].map(|()| caches(SHAPE, DType::F32, &device));
        for (held, alone) in held.into_iter().zip(alone) {
            let what = format!("{name} {:?}", held.format());
            assert_eq!(decode(held, true), decode(alone, false), "{what}");
        }
    }
}

#[test]
fn a_replay_updates_its_kv_cache_in_place() {
    type Inputs = ([Tensor<4>; 3], Tensor<1, Int>);
    let step = |rotary: &RotaryEmbedding, cache: KvCache, (heads, position): Inputs| {
        let [queries, keys, values] = heads;
        let positions = rotary.at(position, 8, DType::F32);
        let (output, cache) = attention(queries, keys, values, Some(cache), &positions);
        (cache, output)
    };
    let run = |device: &Device| {
        let mut found = Vec::new();
        for cache in caches([1, 1, 8, 16], DType::F32, device) {
            let inv_freq = [1.0, 0.1, 0.5, 0.2, 0.0, 0.3, 0.4, 0.6];
            let rotary = RotaryEmbedding::new(&inv_freq, 8, device);
            let format = cache.format();
            let mut replay = Replay::with_state(rotary, cache, step);
            let mut places = Vec::new();
            for at in 0..3 {
                let heads = [1, 2, 3].map(|seed| random(10 * at + seed, [1, 1, 1, 16], device));
                let position = Tensor::from_ints([at as i32], device);
                let output = replay.run((heads, position)).expect("an output");
                found.extend(floats(output));
                let cache = replay.state().expect("a cache");
                assert_eq!(cache.format(), format);
                if *device == Device::flex() {
                    places.push(addresses(&cache));
                }
            }
            assert!(places.windows(2).all(|pair| pair[0] == pair[1]), "copied: {places:?}");
        }
        found
    };
    let expected = run(&Device::flex());
    for (name, device, _) in devices() {
        println!("{name}");
        // In WGSL only the dense cache, which is the first of four.
        let bytes = device.supports_dtype(DType::U8);
        let expected = if bytes { &expected[..] } else { &expected[..expected.len() / 4] };
        assert_close(&run(&device), expected, 2e-5);
    }
}

#[test]
fn packed_kv_caches_are_those_of_tensor_operations() {
    for format in KvFormat::ALL {
        assert_same_as_tensor_operations(|device| {
            let inv_freq: Vec<_> = (0..16).map(|at| 0.7f32.powi(at)).collect();
            let rotary = RotaryEmbedding::new(&inv_freq, 20, device);
            let cache = KvCache::packed_zeros([2, 2, 20, 32], format, device);
            let mut cache = cache.expect("whole blocks");
            let mut found = Vec::new();
            for (seed, (first, count)) in [(0, 5), (5, 1), (6, 9)].into_iter().enumerate() {
                let positions = Tensor::<1, Int>::arange(first..first + count, device);
                let positions = rotary.at(positions, 20, DType::F32);
                let tokens =
                    |seed, heads| random::<4>(seed, [2, count as usize, heads, 32], device);
                let [queries, keys, values] = [(1, 6), (2, 2), (3, 2)]
                    .map(|(at, heads)| tokens(10 * seed as u64 + at, heads));
                let (output, next) = attention(queries, keys, values, Some(cache), &positions);
                found.extend(floats(output));
                cache = next;
            }
            found.extend([cache.keys(), cache.values()].into_iter().flat_map(floats));
            found
        });
    }
}

/// A prompt of three tokens, then one token at a time, without RoPE. The cache has the bits of the
/// host, and attention is that of `flex` to its values.
#[test]
fn packed_kv_caches_hold_the_bits_of_the_host_on_every_device() {
    const HEAD_DIM: usize = 64;
    let flex = Device::flex();
    let transformed = |heads: Tensor<4>| {
        hadamard(heads, 3, Hadamard::with_signs(0)).expect("blocks divide the heads")
    };
    for (name, device, dtypes) in devices() {
        for (dtype, format) in
            dtypes.iter().flat_map(|dtype| KvFormat::ALL.map(|format| (*dtype, format)))
        {
            let what = format!("{name} {dtype:?} {format:?}");
            println!("{what}");
            let rotary = |device| RotaryEmbedding::new(&[0.0; HEAD_DIM / 2], 8, device);
            let (rotary, rotary_on_flex) = (rotary(&device), rotary(&flex));
            let cache = packed_cache([2, 2, 8, HEAD_DIM], format, &device);
            let Some(mut cache) = cache else { continue };
            for (first, count) in [(0, 3), (3, 1), (4, 1)] {
                let positions = |device: &Device| {
                    Tensor::<1, Int>::arange(first as i64..(first + count) as i64, device)
                };
                let heads = [(1, 6), (2, 2), (3, 2)].map(|(seed, heads)| {
                    let seed = 10 * first as u64 + seed;
                    random::<4>(seed, [2, count, heads, HEAD_DIM], &device).cast(dtype)
                });
                let [queries, keys, values] = heads.clone();
                let at = rotary.at(positions(&device), 8, dtype);
                let (output, next) = attention(queries, keys, values, Some(cache), &at);
                cache = next;
                let on_flex = |heads: Tensor<4>| {
                    Tensor::from_data(heads.cast(DType::F32).into_data(), (&flex, DType::F32))
                };
                let [queries, keys, values] = heads.map(on_flex);
                let KvCache::Packed { keys: packed_keys, values: packed_values, .. } = &cache
                else {
                    panic!("{what}: a dense cache");
                };
                let own_keys = match format.transforms_keys() {
                    true => transformed(keys),
                    false => keys,
                };
                for (new, packed) in [(own_keys, packed_keys), (values.clone(), packed_values)] {
                    let new = floats(new.swap_dims(1, 2));
                    let [mut codes, mut scales] = format
                        .bytes_of_head(HEAD_DIM)
                        .map(|bytes| vec![0; new.len() / HEAD_DIM * bytes]);
                    quantize_heads(&new, HEAD_DIM, format, &mut codes, &mut scales)
                        .expect("blocks");
                    for (part, expected) in [(&packed.codes, codes), (&packed.scales, scales)] {
                        let part = part.clone().narrow(2, first, count).into_data();
                        assert_eq!(part.as_slice::<u8>().expect("bytes"), expected, "{what}");
                    }
                }
                let [mut keys, values] = [cache.keys(), cache.values()].map(on_flex);
                if format.transforms_keys() {
                    keys = transformed(keys);
                }
                let new = [&keys, &values]
                    .map(|heads| heads.clone().narrow(2, first, count).swap_dims(1, 2));
                let dense = KvCache::Dense { keys, values };
                let [keys, values] = new;
                let at = rotary_on_flex.at(positions(&flex), 8, DType::F32);
                let (expected, _) = attention(queries, keys, values, Some(dense), &at);
                let tolerance = tolerance_of_attention(name, dtype);
                assert_close(&floats(output), &floats(expected), tolerance);
            }
        }
    }
}

#[test]
fn an_int8_matrix_multiplies_by_its_values_on_every_path() {
    let weight = |device: &Device| random::<2>(1, [300, 96], device);
    for inputs in [1, 5] {
        assert_same_as_tensor_operations(|device| {
            let matrix = Int8Matrix::quantize(weight(device)).expect("blocks of 32");
            floats(matrix.product(random::<2>(2, [inputs, 96], device)))
        });
    }
    let device = Device::flex();
    let matrix = Int8Matrix::quantize(weight(&device)).expect("blocks of 32");
    let error = (matrix.dequantize() - weight(&device)).square().sum().sqrt();
    let relative = floats(error / weight(&device).square().sum().sqrt())[0];
    assert!((0.003..0.008).contains(&relative), "{relative}");
    let nothing = matrix.product(Tensor::<2>::zeros([0, 96], &device));
    assert_eq!(nothing.dims(), [0, 300]);
    assert!(Int8Matrix::quantize(Tensor::zeros([2, 40], &device)).is_err());
}

#[test]
fn logits_that_are_not_finite_draw_a_token_of_the_row() {
    for (name, device, _) in devices() {
        let draw = |row: [f32; 4], uniform: f32, top_k: Option<usize>| {
            let logits = Tensor::<1>::from_floats(row, &device).unsqueeze::<2>();
            let options = SampleOptions { temperature: 1e-30, top_k, top_p: None };
            let uniform = Tensor::from_floats([uniform], &device);
            let token = sample(logits, uniform, options).into_data().iter::<i64>().next();
            token.expect("one token")
        };
        for top_k in [None, Some(1)] {
            for uniform in [0.0, 0.999_999_94, f32::NAN, -1.0] {
                let infinite = draw([0.0, f32::NAN, f32::INFINITY, 1.0], uniform, top_k);
                assert_eq!(infinite, 2, "{name} {uniform}");
                assert_eq!(draw([0.0, 1.0, f32::NAN, -1.0], uniform, top_k), 1, "{name} {uniform}");
                let nothing = draw([f32::NEG_INFINITY; 4], uniform, top_k);
                assert!((0..4).contains(&nothing), "{name} {uniform}: {nothing}");
            }
        }
    }
}

/// Equal steps of uniform values draw each token as often as its probability says, and none that
/// top-k or top-p leaves out.
#[test]
fn every_device_draws_tokens_by_their_probabilities() {
    const DRAWS: usize = 200;
    let row = [0.5f32, 2.0, -1.0, 1.5, 2.0, 0.0];
    for (name, device, _) in devices() {
        let draw = |options: SampleOptions| {
            let logits = Tensor::<1>::from_floats(row, &device).unsqueeze::<2>();
            let uniform: Vec<f32> = (0..DRAWS).map(|at| at as f32 / DRAWS as f32).collect();
            let uniform = Tensor::<1>::from_floats(uniform.as_slice(), &device);
            let tokens = sample(logits.repeat_dim(0, DRAWS), uniform, options);
            assert_eq!(tokens.dims(), [DRAWS, 1], "{name}");
            let mut counts = [0.0f64; 6];
            tokens.into_data().iter::<i64>().for_each(|token| counts[token as usize] += 1.0);
            counts.map(|count| count / DRAWS as f64)
        };
        let check = |options: SampleOptions, kept: &[usize]| {
            let weight = |at: usize| f64::from(row[at] / options.temperature).exp();
            let total: f64 = kept.iter().map(|&at| weight(at)).sum();
            for (at, found) in draw(options).into_iter().enumerate() {
                let expected = if kept.contains(&at) { weight(at) / total } else { 0.0 };
                let far = (found - expected).abs();
                assert!(far < 1.01 / DRAWS as f64, "{name} {options:?} {at}: {found} {expected}");
            }
        };
        let all = SampleOptions { temperature: 0.8, top_k: None, top_p: None };
        check(all, &[0, 1, 2, 3, 4, 5]);
        // Both of the equal logits are the largest.
        check(SampleOptions { top_k: Some(1), ..all }, &[1, 4]);
        check(SampleOptions { top_k: Some(3), ..all }, &[1, 3, 4]);
        check(SampleOptions { top_p: Some(0.8), ..all }, &[1, 3, 4]);
        check(SampleOptions { top_k: Some(2), top_p: Some(0.6), ..all }, &[1, 4]);
    }
}
