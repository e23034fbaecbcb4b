//! Operations of a decoder: on `flex` each is one operation, elsewhere they are tensor operations.

use burn::backend::{BackendTensor, DispatchTensorKind};
use burn::tensor::{DType, Device, Int, Tensor};
use burn_fp4_ops::{
    Int8Matrix, KvCache, RotaryEmbedding, add_rms_norm, attention, dense_matmul, rms_norm, swiglu,
};
use tests::tensors::{floats, random};

/// Computes the same with the operations of `flex`, and with tensor operations, which an autodiff
/// device has instead.
fn assert_same_on_an_autodiff_device(compute: impl Fn(&Device) -> Vec<f32>) {
    let device = Device::flex();
    let (own, composed) = (compute(&device), compute(&device.clone().autodiff()));
    assert_eq!(own.len(), composed.len());
    for (at, (own, composed)) in own.iter().zip(&composed).enumerate() {
        assert!((own - composed).abs() <= 2e-5 * composed.abs().max(1.0), "{at}: {own} {composed}");
    }
}

#[test]
fn norms_and_swiglu_are_those_of_tensor_operations() {
    for shape in [[1, 1, 576], [2, 3, 40], [1, 200, 512]] {
        assert_same_on_an_autodiff_device(|device| {
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

#[test]
fn attention_is_that_of_tensor_operations_with_and_without_a_cache() {
    for (batch, heads, kv_heads, head_dim) in [(1, 9, 3, 64), (2, 4, 4, 6), (2, 14, 2, 16)] {
        assert_same_on_an_autodiff_device(|device| {
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
            found.extend([cache.keys, cache.values].into_iter().flat_map(floats));
            let positions = rotary.at(Tensor::arange(0..7, device), 7, DType::F32);
            let [keys, values] = [31, 32].map(|seed| tokens(seed, 7, kv_heads));
            let (output, cache) = attention(tokens(30, 7, heads), keys, values, None, &positions);
            assert_eq!(cache.keys.dims(), [batch, kv_heads, 7, head_dim]);
            found.extend([output.unsqueeze(), cache.keys].into_iter().flat_map(floats));
            found
        });
    }
}

#[test]
fn one_row_times_a_dense_weight_in_either_order_is_the_product_of_tensor_operations() {
    for (channels, outputs) in [(64, 48), (300, 700)] {
        assert_same_on_an_autodiff_device(|device| {
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

/// Returns the address of the values of a tensor on `flex`.
fn address(tensor: &Tensor<4>) -> *const u8 {
    match tensor.clone().into_dispatch().kind {
        DispatchTensorKind::Flex(BackendTensor::Float(tensor)) => tensor.bytes().as_ptr(),
        other => panic!("on flex: {other:?}"),
    }
}

#[test]
fn a_kv_cache_is_updated_in_place_unless_it_is_held_elsewhere() {
    let device = Device::flex();
    let rotary = RotaryEmbedding::new(&[1.0, 0.1], 8, &device);
    let step = |cache: KvCache, position: i32| {
        let positions = rotary.at(Tensor::from_ints([position], &device), 8, DType::F32);
        let [queries, keys, values] = [1, 2, 3].map(|seed| random(seed, [1, 1, 1, 4], &device));
        attention(queries, keys, values, Some(cache), &positions).1
    };
    let cache = KvCache::zeros([1, 1, 8, 4], DType::F32, &device);
    let addresses = [address(&cache.keys), address(&cache.values)];
    let cache = step(step(cache, 0), 1);
    assert_eq!([address(&cache.keys), address(&cache.values)], addresses);
    let held = cache.clone();
    let before = floats(held.keys.clone());
    let after = step(cache, 2);
    assert_ne!(address(&after.keys), addresses[0]);
    assert_eq!(floats(held.keys), before);
    assert_ne!(floats(after.keys), before);
}

#[test]
fn an_int8_matrix_multiplies_by_its_values_on_every_path() {
    let weight = |device: &Device| random::<2>(1, [300, 96], device);
    for inputs in [1, 5] {
        assert_same_on_an_autodiff_device(|device| {
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
