//! A replay equals a forward pass bit for bit, on every device of this build. A GPU replays a
//! captured graph; other devices run the pass.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, Relu};
use burn::tensor::{DType, Device, Distribution, IndexingUpdateOp, Int, Tensor};
use burn_fp4::{Fp4Config, Fp4Module, Replay, ReplayError, ReplayParts, ReplayTensors};
use burn_fp4_ops::{
    Fp4Scheme, GraphState, Int8Matrix, KvCache, KvFormat, OpsError, RotaryEmbedding, attention,
};
use tests::compare::{ROUNDING_OF_FACTORS, assert_near};
use tests::engines::devices;
use tests::modules::seeded;
use tests::tensors::{floats, random};

const CHANNELS: usize = 64;
const CONTEXT: usize = 16;

#[derive(Module, Debug)]
struct Net {
    table: Embedding,
    first: Linear,
    second: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        packed(Self::dense(device))
    }

    fn dense(device: &Device) -> Self {
        let net = Self {
            table: EmbeddingConfig::new(32, CHANNELS).init(device),
            first: LinearConfig::new(CHANNELS, 2 * CHANNELS).init(device),
            second: LinearConfig::new(2 * CHANNELS, CHANNELS).init(device),
        };
        seeded(net, 7)
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(Relu::new().forward(self.first.forward(x)))
    }
}

fn packed<M: Module>(mut module: M) -> M {
    module.quantize_fp4(&Fp4Config::nvfp4()).expect("a valid model");
    module
}

fn on_another_thread<T: Send + 'static>(make: impl FnOnce() -> T + Send + 'static) -> T {
    std::thread::spawn(make).join().expect("the thread runs")
}

/// KV cache: keys and values of attention, by position.
#[derive(Clone)]
struct Cache {
    keys: Tensor<2>,
    values: Tensor<2>,
    /// Tokens so far, `[1]`.
    length: Tensor<1, Int>,
}

impl Cache {
    fn new(device: &Device) -> Self {
        let zeros = || Tensor::zeros([CONTEXT, CHANNELS], device);
        Self { keys: zeros(), values: zeros(), length: Tensor::zeros([1], device) }
    }
}

impl ReplayTensors for Cache {
    fn take_apart(self, parts: &mut ReplayParts) {
        (self.keys, self.values, self.length).take_apart(parts);
    }

    fn put_together(parts: &mut ReplayParts) -> Self {
        let (keys, values, length) = ReplayTensors::put_together(parts);
        Self { keys, values, length }
    }
}

/// A decode step: a token is written into the KV cache and attends to the tokens before it.
fn decode(net: &Net, cache: Cache, token: Tensor<2, Int>) -> (Cache, Vec<Tensor<2>>) {
    let Cache { keys, values, length } = cache;
    let x = net.table.forward(token).reshape([1, CHANNELS]);
    let hidden = net.forward(x.clone());
    let write = |cache: Tensor<2>, row: Tensor<2>| {
        cache.select_assign(0, length.clone(), row, IndexingUpdateOp::Assign)
    };
    let keys = write(keys, hidden.clone());
    let values = write(values, x.clone() + hidden);
    let positions = Tensor::<1, Int>::arange(0..CONTEXT as i64, &x.device());
    let later = positions.greater(length.clone().expand([CONTEXT])).unsqueeze_dim(0);
    let scores = x.matmul(keys.clone().transpose()).mask_fill(later, f32::NEG_INFINITY);
    let attended = burn::tensor::activation::softmax(scores.clone(), 1).matmul(values.clone());
    (Cache { keys, values, length: length + 1 }, vec![attended, scores])
}

/// Runs a test on each device, in f32, after [`burn_fp4::init`].
fn each_device(test: impl Fn(&str, &Device)) {
    burn_fp4::init().expect("before any operation");
    for (name, device, dtypes) in devices() {
        assert!(dtypes.contains(&DType::F32));
        test(name, &device);
    }
}

fn has_graphs(device: &str) -> bool {
    ["cuda", "wgpu"].contains(&device)
}

#[test]
fn a_replay_equals_a_forward_pass() {
    each_device(|name, device| {
        let net = Net::new(device);
        let mut replay = Replay::new(net.clone(), |net: &Net, x: Tensor<2>| net.forward(x));
        for (seed, rows) in [1, 5, 1, 64, 5].into_iter().enumerate() {
            let x = random(seed as u64, [rows, CHANNELS], device);
            let found = replay.run(x.clone()).expect("a pass that can be captured");
            assert_eq!(floats(found), floats(net.forward(x)), "{name}: {rows} rows");
            assert_eq!(replay.is_graph(), has_graphs(name), "{name}");
        }
        assert_eq!(replay.captures(), if has_graphs(name) { 3 } else { 0 }, "{name}");
    });
}

#[test]
fn a_step_that_attends_to_a_packed_kv_cache_is_captured() {
    type Inputs = ([Tensor<4>; 3], Tensor<1, Int>);
    fn step(rotary: &RotaryEmbedding, cache: KvCache, inputs: Inputs) -> (KvCache, Tensor<3>) {
        let ([queries, keys, values], position) = inputs;
        let positions = rotary.at(position, 8, DType::F32);
        let (output, cache) = attention(queries, keys, values, Some(cache), &positions);
        (cache, output)
    }
    each_device(|name, device| {
        for format in KvFormat::ALL {
            let rotary = RotaryEmbedding::new(&[0.5; 16], 8, device);
            let cache = || KvCache::packed_zeros([1, 2, 8, 32], format, device);
            if !device.supports_dtype(DType::U8) {
                // WGSL.
                assert!(matches!(cache(), Err(OpsError::Device(_))), "{name}");
                continue;
            }
            let cache = || cache().expect("whole blocks");
            let mut replay = Replay::with_state(rotary.clone(), cache(), step);
            let mut plain = cache();
            for at in 0..4 {
                let heads = [(1, 4), (2, 2), (3, 2)]
                    .map(|(seed, count)| random(10 * at + seed, [1, 1, count, 32], device));
                let position = Tensor::from_ints([at as i32], device);
                let expected;
                (plain, expected) = step(&rotary, plain, (heads.clone(), position.clone()));
                if name == "wgpu" {
                    // Tensor operations upload values.
                    let refused = replay.run((heads, position)).is_err();
                    assert!(refused, "{name}, {format:?}");
                    break;
                }
                let found = replay.run((heads, position)).expect("a pass that can be captured");
                assert_eq!(floats(found), floats(expected), "{name}, {format:?} at {at}");
                assert_eq!(replay.is_graph(), has_graphs(name), "{name}");
            }
        }
    });
}

/// Rotations and an output layer in int8 are no parameters. They and the weights are made by three
/// threads, and two others replay.
#[test]
fn tables_of_other_threads_than_the_weights_are_captured() {
    type Model = (Linear, RotaryEmbedding, Int8Matrix);
    type Inputs = (Tensor<4>, Tensor<1, Int>);
    fn step((layer, rotary, head): &Model, cache: KvCache, inputs: Inputs) -> (KvCache, Tensor<3>) {
        let (x, position) = inputs;
        let positions = rotary.at(position, 8, DType::F32);
        let heads = layer.forward(x);
        let (output, cache) =
            attention(heads.clone(), heads.clone(), heads, Some(cache), &positions);
        (cache, head.product(output))
    }
    each_device(|name, device| {
        let [for_layer, for_tables, for_head] = [(); 3].map(|()| device.clone());
        let make = move || packed(LinearConfig::new(32, 32).init(&for_layer));
        let layer = on_another_thread(make);
        let make = move || RotaryEmbedding::new(&[0.5; 16], 8, &for_tables);
        let rotary = on_another_thread(make);
        let make =
            move || Int8Matrix::quantize(random(3, [48, 64], &for_head)).expect("whole blocks");
        let model = (layer, rotary, on_another_thread(make));
        for thread in 0..2 {
            let (name, device, model) = (name.to_owned(), device.clone(), model.clone());
            on_another_thread(move || {
                let cache = || KvCache::zeros([1, 2, 8, 32], DType::F32, &device);
                let (mut plain, mut replay) =
                    (cache(), Replay::with_state(model.clone(), cache(), step));
                for at in 0..3 {
                    let x: Tensor<4> = random(at, [1, 1, 2, 32], &device);
                    let inputs = (x, Tensor::from_ints([at as i32], &device));
                    let found = replay.run(inputs.clone()).expect("a pass that can be captured");
                    let expected;
                    (plain, expected) = step(&model, plain, inputs);
                    assert_eq!(floats(found), floats(expected), "{name}, {thread} at {at}");
                    assert_eq!(replay.is_graph(), has_graphs(&name), "{name}");
                }
            });
        }
    });
}

/// Captured products of few rows prefetch the weight of the next product, if the GPU can. The last
/// one prefetches the first weight.
#[test]
fn a_stack_of_layers_is_replayed() {
    const WIDTHS: [usize; 6] = [256, 512, 256, 1024, 768, 256];
    struct Narrow;
    impl ModuleMapper for Narrow {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.cast(DType::BF16))
        }
    }
    fn stack(layers: &[Linear], x: Tensor<2>) -> Tensor<2> {
        layers.iter().fold(x, |x, layer| layer.forward(x))
    }
    burn_fp4::init().expect("before any operation");
    for (name, device, dtypes) in devices() {
        if !dtypes.contains(&DType::BF16) {
            continue;
        }
        let layer = |widths: &[usize]| LinearConfig::new(widths[0], widths[1]).init(&device);
        let layers: Vec<Linear> = WIDTHS.windows(2).map(layer).collect();
        let layers = packed(seeded(layers, 11).map(&mut Narrow));
        let forward = |layers: &Vec<Linear>, x: Tensor<2>| stack(layers, x);
        let mut replay = Replay::new(layers.clone(), forward);
        for (seed, rows) in [1, 3, 16, 1, 40, 3].into_iter().enumerate() {
            let x = random(seed as u64, [rows, WIDTHS[0]], &device).cast(DType::BF16);
            let found = floats(replay.run(x.clone()).expect("can be captured"));
            assert_eq!(found, floats(stack(&layers, x)), "{name}: {rows} rows");
        }
        assert_eq!(replay.is_graph(), has_graphs(name), "{name}");
    }
}

#[test]
fn a_later_run_does_not_change_earlier_outputs() {
    each_device(|name, device| {
        let net = Net::new(device);
        let mut replay = Replay::new(net, |net: &Net, x: Tensor<2>| {
            let y = net.forward(x.clone());
            // An input, views of a result, and a result.
            (x, y.clone().transpose(), [y.clone().slice([0..1, 3..9]), y])
        });
        let inputs = [0, 1, 2].map(|seed| random(seed, [3, CHANNELS], device));
        let outputs = inputs.clone().map(|x| replay.run(x).expect("can be captured"));
        for (x, (same, transposed, [part, y])) in inputs.into_iter().zip(outputs) {
            let expected = replay.model().forward(x.clone());
            assert_eq!(floats(same), floats(x), "{name}");
            assert_eq!(floats(transposed), floats(expected.clone().transpose()), "{name}");
            assert_eq!(floats(part), floats(expected.clone().slice([0..1, 3..9])), "{name}");
            assert_eq!(floats(y), floats(expected), "{name}");
        }
    });
}

#[test]
fn a_cache_is_written_in_place() {
    each_device(|name, device| {
        let net = Net::new(device);
        let mut replay = Replay::with_state(net.clone(), Cache::new(device), decode);
        let mut cache = Cache::new(device);
        for token in 0..CONTEXT {
            let token = Tensor::<2, Int>::from_ints([[3 * token as i32 % 32]], device);
            let found = replay.run(token.clone()).expect("can be captured");
            let (next, expected) = decode(&net, cache, token);
            cache = next;
            for (found, expected) in found.into_iter().zip(expected) {
                assert_eq!(floats(found), floats(expected), "{name}");
            }
            let state = replay.state().expect("no run panicked");
            assert_eq!(floats(state.keys), floats(cache.keys.clone()), "{name}");
            assert_eq!(floats(state.values), floats(cache.values.clone()), "{name}");
            assert_eq!(state.length.into_data(), cache.length.clone().into_data(), "{name}");
        }
        replay.set_state(Cache::new(device));
        let token = Tensor::<2, Int>::from_ints([[5]], device);
        let found = replay.run(token.clone()).expect("can be captured").remove(0);
        let (_, expected) = decode(&net, Cache::new(device), token);
        assert_eq!(floats(found), floats(expected[0].clone()), "{name}");
    });
}

/// State that is not updated in place, or is swapped, is carried from run to run too.
#[test]
fn state_that_is_not_updated_in_place_is_carried_along() {
    fn step(
        scale: &f32,
        (a, b, c): (Tensor<1>, Tensor<1>, Vec<Tensor<1, Int>>),
        x: Option<Tensor<1>>,
    ) -> ((Tensor<1>, Tensor<1>, Vec<Tensor<1, Int>>), Tensor<1>) {
        let sum = a.clone() + b.clone().mul_scalar(*scale) + x.expect("given");
        ((b, a, c.into_iter().rev().collect()), sum)
    }
    each_device(|name, device| {
        let ints = [1, 2, 3].map(|value| Tensor::from_ints([value, -value], device)).to_vec();
        let mut state = (random(1, [8], device), random(2, [8], device), ints);
        let mut replay = Replay::with_state(0.5, state.clone(), step);
        for seed in 3..8 {
            let x = random(seed, [8], device);
            let found = replay.run(Some(x.clone())).expect("can be captured");
            let (next, expected) = step(&0.5, state, Some(x));
            state = next;
            assert_eq!(floats(found), floats(expected), "{name}");
            let now = replay.state().expect("no run panicked");
            assert_eq!(floats(now.0), floats(state.0.clone()), "{name}");
            for (now, expected) in now.2.into_iter().zip(state.2.clone()) {
                assert_eq!(now.into_data(), expected.into_data(), "{name}");
            }
        }
    });
}

#[test]
fn shapes_share_a_state() {
    fn sum(_: &Relu, total: Tensor<1>, x: Tensor<2>) -> (Tensor<1>, Tensor<1>) {
        let total = total + x.sum_dim(0).reshape([4]);
        (total.clone(), total)
    }
    each_device(|name, device| {
        let mut replay = Replay::with_state(Relu::new(), Tensor::zeros([4], device), sum);
        let mut total = Tensor::<1>::zeros([4], device);
        for (seed, rows) in [1, 3, 1, 2, 3, 1].into_iter().enumerate() {
            let x = random(seed as u64, [rows, 4], device);
            let found = replay.run(x.clone()).expect("can be captured");
            let (next, _) = sum(&Relu::new(), total, x);
            total = next;
            assert_eq!(floats(found), floats(total.clone()), "{name}");
        }
    });
}

/// The old state may be an output itself, or a part or a view of one.
#[test]
fn an_old_state_can_be_an_output() {
    type Outputs = (Tensor<2>, Tensor<2>, Tensor<2>, Tensor<2>);
    fn step(_: &Relu, a: Tensor<2>, x: Tensor<2>) -> (Tensor<2>, Outputs) {
        let part = a.clone().slice([1..2, 0..3]);
        (a.clone() + x.clone(), (a.clone(), part, a.transpose(), x))
    }
    each_device(|name, device| {
        let mut state = random(1, [4, 8], device);
        let mut replay = Replay::with_state(Relu::new(), state.clone(), step);
        for seed in 2..6 {
            let x = random(seed, [4, 8], device);
            let found = replay.run(x.clone()).expect("can be captured");
            let (next, expected) = step(&Relu::new(), state, x);
            state = next;
            assert_eq!(floats(found.0), floats(expected.0), "{name}");
            assert_eq!(floats(found.1), floats(expected.1), "{name}");
            assert_eq!(floats(found.2), floats(expected.2), "{name}");
            assert_eq!(floats(found.3), floats(expected.3), "{name}");
            assert_eq!(floats(replay.state().expect("kept")), floats(state.clone()), "{name}");
        }
    });
}

/// The new state is updated in place and is an output, for inputs of several shapes.
#[test]
fn a_new_state_can_be_an_output() {
    fn step(_: &Relu, keys: Tensor<2>, x: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        let at = Tensor::arange(0..x.dims()[0] as i64, &x.device());
        let keys = keys.select_assign(0, at, x, IndexingUpdateOp::Add);
        (keys.clone(), keys)
    }
    each_device(|name, device| {
        let mut state = random(1, [4, 8], device);
        let mut replay = Replay::with_state(Relu::new(), state.clone(), step);
        for (seed, rows) in [1, 2, 1, 3, 2, 1].into_iter().enumerate() {
            let x = random(seed as u64, [rows, 8], device);
            let found = replay.run(x.clone()).expect("can be captured");
            let (next, expected) = step(&Relu::new(), state, x);
            state = next;
            assert_eq!(floats(found), floats(expected), "{name}");
        }
        assert_eq!(replay.captures(), if has_graphs(name) { 3 } else { 0 }, "{name}");
    });
}

#[test]
fn a_changed_model_is_captured_again() {
    each_device(|name, device| {
        let net = Net::new(device);
        let mut replay = Replay::new(net.clone(), |net: &Net, x: Tensor<2>| net.forward(x));
        let x = random(1, [2, CHANNELS], device);
        let before = floats(replay.run(x.clone()).expect("can be captured"));
        // A change of a clone does not matter.
        let mut other = net.clone();
        other.first.weight = other.first.weight.map(|weight| weight.mul_scalar(2.0));
        drop((net, other));
        assert_eq!(floats(replay.run(x.clone()).expect("can be captured")), before, "{name}");

        replay.change(|net| {
            *net = net.clone().materialize();
            net.quantize_fp4(&Fp4Config::mxfp4()).expect("a valid model");
        });
        assert_eq!(replay.captures(), 0);
        let after = floats(replay.run(x.clone()).expect("can be captured"));
        assert_ne!(after, before, "{name}");
        assert_eq!(after, floats(replay.into_model().forward(x)), "{name}");
    });
}

#[test]
fn a_replay_moves_to_other_threads() {
    each_device(|name, device| {
        let net = Net::new(device);
        let mut replay = Replay::with_state(net.clone(), Cache::new(device), decode);
        let mut cache = Cache::new(device);
        for token in 0..6 {
            let token = Tensor::<2, Int>::from_ints([[token]], device);
            let (next, expected) = decode(&net, cache, token.clone());
            cache = next;
            let (returned, found) = std::thread::spawn(move || {
                let found = replay.run(token).expect("can be captured");
                (replay, found)
            })
            .join()
            .expect("the thread runs");
            replay = returned;
            // Burn tunes its products for each thread, and may sum in another order.
            let [found, expected] = [&found[0], &expected[0]].map(|x| floats(x.clone()));
            assert_near(name, &found, &expected, ROUNDING_OF_FACTORS);
        }
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let (net, device) = (net.clone(), device.clone());
                std::thread::spawn(move || {
                    let forward = |net: &Net, x: Tensor<2>| net.forward(x);
                    let mut replay = Replay::new(net.clone(), forward);
                    for (seed, rows) in [1, 2, 1, 2].into_iter().enumerate() {
                        let x = random(seed as u64, [rows, CHANNELS], &device);
                        let found = replay.run(x.clone()).expect("can be captured");
                        assert_eq!(floats(found), floats(net.forward(x)));
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("equal"));
    });
}

/// The pass runs five times for a capture, the last time to be recorded. There it takes memory, or
/// on wgpu uploads values, as another thread might.
#[test]
fn a_recording_that_is_refused_is_repeated_and_voids_other_captures_of_the_state() {
    const UNDISTURBED: usize = usize::MAX / 2;
    static RUNS: AtomicUsize = AtomicUsize::new(UNDISTURBED);
    fn step(uploads: &bool, total: Tensor<1>, x: Tensor<1>) -> (Tensor<1>, Tensor<1>) {
        let device = x.device();
        let mut total = total + x.sum();
        if RUNS.fetch_add(1, Ordering::Relaxed) == 4 {
            let values = match uploads {
                true => Tensor::from_floats([1.0], &device),
                false => random::<1>(1, [1], &device),
            };
            let taken = Tensor::<1>::random([1 << 24], Distribution::Default, &device);
            total = total + (values + taken.narrow(0, 0, 1)) * 0.0;
        }
        (total.clone(), total)
    }
    each_device(|name, device| {
        let zero = Tensor::zeros([1], device);
        let mut replay = Replay::with_state(name == "wgpu", zero, step);
        let mut total = 0.0;
        for (length, disturbs) in [(3, false), (5, true), (3, false), (5, false)] {
            RUNS.store(if disturbs { 0 } else { UNDISTURBED }, Ordering::Relaxed);
            let found = replay.run(Tensor::ones([length], device)).expect("captured again");
            total += length as f32;
            assert_eq!(floats(found), [total], "{name}: {length}");
            if disturbs {
                let runs = if has_graphs(name) { 10 } else { 1 };
                assert_eq!(RUNS.load(Ordering::Relaxed), runs, "{name}: two attempts");
            }
        }
        assert_eq!(replay.captures(), if has_graphs(name) { 2 } else { 0 }, "{name}");
    });
}

/// As in a service: one thread captures, others quantize, load data, allocate and read.
#[test]
fn other_threads_use_a_device_during_a_capture() {
    const THREADS: u64 = 4;
    each_device(|name, device| {
        let captures = if has_graphs(name) { 24 } else { 2 };
        let net = Net::new(device);
        let captured = AtomicUsize::new(0);
        let scheme = Fp4Scheme::nvfp4();
        let work = |thread: u64, round: u64| {
            // Another size in each round, so that memory is taken and not used again.
            let rows = 64 + 64 * ((7 * round + thread) % 61) as usize;
            let values = random::<2>(100 * thread + round, [rows, 256], device);
            let expected = values.clone().into_data();
            let packed = burn_fp4_ops::quantize(values.clone(), 1, &scheme).expect("finite");
            let found = floats(packed.dequantize());
            assert_eq!(values.into_data(), expected, "{name}: data, thread {thread}");
            let host = Tensor::<2>::from_data(expected, &Device::flex());
            let host = burn_fp4_ops::quantize(host, 1, &scheme).expect("finite").dequantize();
            assert_eq!(found, floats(host), "{name}: packed, thread {thread}");
        };
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (work, captured) = (&work, &captured);
                scope.spawn(move || {
                    let mut round = 0;
                    while captured.load(Ordering::Relaxed) < captures {
                        work(thread, round);
                        round += 1;
                    }
                });
            }
            for seed in 0..captures {
                let forward = |net: &Net, x: Tensor<2>| net.forward(x);
                let mut replay = Replay::new(net.clone(), forward);
                let x = random(seed as u64, [1 + seed % 3, CHANNELS], device);
                let found = replay.run(x.clone());
                // The others end, whatever is found.
                captured.fetch_add(1, Ordering::Relaxed);
                let found = found.unwrap_or_else(|error| {
                    captured.store(captures, Ordering::Relaxed);
                    panic!("{name}: {error}")
                });
                assert_eq!(floats(found), floats(net.forward(x)), "{name}: capture {seed}");
                assert_eq!(replay.is_graph(), has_graphs(name), "{name}");
            }
        });
    });
}

/// Memory belongs to the thread that allocated it. This thread owns only the biases of the first
/// model, and all of the second but codes and scales of a layer.
#[test]
fn a_model_can_come_from_several_threads() {
    each_device(|name, device| {
        let forward = |net: &Net, x: Tensor<2>| net.forward(x);
        let dense = Net::dense(device);
        let net = on_another_thread(move || packed(dense));
        let mut replay = Replay::new(net.clone(), forward);
        for (seed, rows) in [1, 5, 1].into_iter().enumerate() {
            let x = random(seed as u64, [rows, CHANNELS], device);
            let found = replay.run(x.clone()).expect("can be captured");
            assert_eq!(floats(found), floats(net.forward(x)), "{name}: {rows} rows");
            assert_eq!(replay.is_graph(), has_graphs(name), "{name}");
        }

        let mut net = Net::dense(device);
        let second = net.second.clone();
        net.second = on_another_thread(move || packed(second));
        replay.change(|old| *old = net.clone());
        let x = random(3, [2, CHANNELS], device);
        let found = replay.run(x.clone()).expect("can be captured");
        assert_eq!(replay.is_graph(), has_graphs(name), "{name}");
        // Burn tunes its products for each thread, and may sum in another order.
        let [found, expected] = [found, net.forward(x)].map(floats);
        assert_near(name, &found, &expected, ROUNDING_OF_FACTORS);
    });
}

/// Only tensors of other threads than the one with the most bytes are copied, with their layout.
#[test]
// Without a Cube device a `GraphState` has no values, and what follows it never runs.
#[cfg_attr(not(any(feature = "cpu", feature = "cuda")), allow(unused_mut, unused_variables))]
fn tensors_of_other_threads_are_gathered() {
    each_device(|name, device| {
        // Others have no memory of threads.
        if !["cpu", "cuda"].contains(&name) {
            return;
        }
        let most = random::<2>(1, [64, 64], device);
        let of_another = device.clone();
        let views = on_another_thread(move || {
            let matrix = random::<2>(2, [8, 32], &of_another);
            let row = random::<2>(3, [1, 32], &of_another);
            [matrix.clone(), matrix.transpose(), row.expand([8, 32])]
        });
        let weights = views.iter().chain([&most]).map(|tensor| tensor.clone().into_dispatch());
        let state = GraphState::new(device, weights.collect(), vec![]);
        let mut state = state.expect("it has streams");
        assert!(state.is_mixed(), "{name}");
        let mut gathered = |tensor: &Tensor<2>| {
            let gathered = state.gather(tensor.clone().into_dispatch()).expect("it is computed");
            gathered.map(Tensor::<2>::from_dispatch)
        };
        assert!(gathered(&most).is_none(), "{name}");
        for view in views {
            let copy = gathered(&view).expect("of another thread");
            assert!(gathered(&copy).is_none(), "{name}");
            assert_eq!(copy.dims(), view.dims(), "{name}");
            assert_eq!(floats(copy), floats(view), "{name}");
        }
    });
}

#[test]
fn the_oldest_graph_is_dropped_first() {
    each_device(|name, device| {
        let forward = |net: &Net, x: Tensor<2>| net.forward(x);
        let mut replay = Replay::new(Net::new(device), forward).with_most_captures(2);
        for (seed, rows) in [1, 2, 3, 2, 1].into_iter().enumerate() {
            let x = random(seed as u64, [rows, CHANNELS], device);
            let found = replay.run(x.clone()).expect("can be captured");
            assert_eq!(floats(found), floats(replay.model().forward(x)), "{name}");
            assert!(replay.captures() <= 2);
        }
    });
}

#[test]
fn a_state_of_another_shape_is_an_error() {
    each_device(|name, device| {
        let mut replay = Replay::with_state(
            Relu::new(),
            Tensor::<1>::zeros([4], device),
            |_: &Relu, state: Tensor<1>, x: Tensor<1>| (Tensor::cat(vec![state, x.clone()], 0), x),
        );
        let error = replay.run(Tensor::zeros([1], device)).expect_err("it grows");
        assert!(matches!(error, ReplayError::State(_)), "{name}: {error}");
    });
}

/// On a device with graphs a pass cannot read values during a capture. It is an error, and the
/// device stays usable.
#[test]
fn reading_values_during_a_capture_is_an_error() {
    each_device(|name, device| {
        let forward = |_: &Relu, x: Tensor<1>| {
            let sum = x.clone().sum().into_scalar::<f32>();
            x.mul_scalar(sum)
        };
        let mut replay = Replay::new(Relu::new(), forward);
        let x = random(1, [4], device);
        let result = replay.run(x.clone());
        if has_graphs(name) {
            let error = result.map(floats).expect_err("a graph holds no values");
            assert!(matches!(error, ReplayError::Capture { .. }), "{error}");
        } else {
            assert_eq!(
                floats(result.expect("run without a graph")),
                floats(forward(&Relu::new(), x.clone()))
            );
        }
        let mut replay = Replay::new(Relu::new(), |_: &Relu, x: Tensor<1>| x.mul_scalar(2.0));
        assert_eq!(
            floats(replay.run(x.clone()).expect("can be captured")),
            floats(x.mul_scalar(2.0))
        );
    });
}

/// On a device with graphs the inner replay fails; it must not deadlock.
#[test]
fn a_capture_inside_a_capture_is_an_error() {
    each_device(|name, device| {
        let net = Net::new(device);
        let pass = |net: &Net, x: Tensor<2>| {
            let mut inner = Replay::new(net.clone(), Net::forward);
            inner.run(x.clone()).unwrap_or(x)
        };
        let x = random(3, [1, CHANNELS], device);
        let mut outer = Replay::new(net.clone(), pass);
        let found = floats(outer.run(x.clone()).expect("the inner one may fail"));
        let expected = if has_graphs(name) { x } else { net.forward(x) };
        assert_eq!(found, floats(expected), "{name}");
    });
}

/// After a failed capture the state is unchanged, and the replay continues.
#[test]
fn a_failed_capture_keeps_the_state() {
    type Inputs = (Tensor<1>, Option<Tensor<1>>);
    fn step(_: &Relu, total: Tensor<1>, (x, read): Inputs) -> (Tensor<1>, Tensor<1>) {
        let factor = read.map_or(1.0, |read| read.into_scalar::<f32>());
        let total = total + x.mul_scalar(factor);
        (total.clone(), total)
    }
    each_device(|name, device| {
        let mut replay = Replay::with_state(Relu::new(), Tensor::zeros([4], device), step);
        let mut total = vec![0.0; 4];
        let ones = || Tensor::<1>::ones([4], device);
        for run in 0..6 {
            let read = (run % 2 == 1).then(|| Tensor::full([1], 2.0, device));
            let reads = read.is_some();
            let found = replay.run((ones(), read));
            if reads && has_graphs(name) {
                assert!(matches!(found, Err(ReplayError::Capture { .. })), "{name}");
            } else {
                total.iter_mut().for_each(|value| *value += if reads { 2.0 } else { 1.0 });
                assert_eq!(floats(found.expect("can be captured")), total, "{name}");
            }
            assert_eq!(floats(replay.state().expect("kept")), total, "{name}");
        }
    });
}

/// Without graphs, a panic of the pass loses its state; a capture keeps it.
#[test]
fn a_replay_works_with_a_new_state_after_a_panic() {
    fn step(_: &Relu, total: Tensor<1>, x: Tensor<1>) -> (Tensor<1>, Tensor<1>) {
        assert_ne!(x.dims(), [3], "of three");
        let total = total + x.sum();
        (total.clone(), total)
    }
    each_device(|name, device| {
        let mut replay = Replay::with_state(Relu::new(), Tensor::zeros([1], device), step);
        replay.run(Tensor::ones([2], device)).expect("can be captured");
        let panicking = AssertUnwindSafe(|| drop(replay.run(Tensor::ones([3], device))));
        catch_unwind(panicking).expect_err("the pass panics");
        if !has_graphs(name) {
            assert_eq!(replay.state().err(), Some(ReplayError::Lost), "{name}");
            let error = replay.run(Tensor::ones([2], device)).err();
            assert_eq!(error, Some(ReplayError::Lost), "{name}");
        }
        replay.set_state(Tensor::zeros([1], device));
        let found = replay.run(Tensor::ones([2], device)).expect("can be captured");
        assert_eq!(floats(found), [2.0], "{name}");
    });
}

#[test]
fn inputs_with_gradients_are_not_captured() {
    each_device(|name, device| {
        let mut replay = Replay::new(Relu::new(), |_: &Relu, x: Tensor<1>| x.clone() * x);
        let x = Tensor::<1>::full([2], 3.0, &device.clone().autodiff()).require_grad();
        let y = replay.run(x.clone()).expect("run without a graph");
        assert!(!replay.is_graph(), "{name}");
        let gradient = x.grad(&y.sum().backward()).expect("it is differentiated");
        assert_eq!(floats(gradient), [6.0, 6.0], "{name}");
    });
}

/// With graphs, the pass runs only until it is captured; without, it runs each time.
#[test]
fn a_replay_does_not_run_the_pass() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    each_device(|name, device| {
        RUNS.store(0, Ordering::Relaxed);
        let mut replay = Replay::new(Relu::new(), |_: &Relu, x: Tensor<1>| {
            RUNS.fetch_add(1, Ordering::Relaxed);
            x + 1.0
        });
        for run in 0..10 {
            replay.run(random(run, [4], device)).expect("can be captured");
        }
        let expected = if has_graphs(name) { 5 } else { 10 };
        assert_eq!(RUNS.load(Ordering::Relaxed), expected, "{name}");
    });
}

#[test]
fn a_pass_that_runs_once_hands_its_state_to_the_next() {
    for (name, device, _) in devices() {
        let add = |_: &Relu, total: Tensor<1>, x: Tensor<1>| {
            let total = total + x.sum();
            (total.clone(), total)
        };
        let mut replay = Replay::with_state(Relu::new(), Tensor::zeros([1], &device), add);
        let prompt = replay.run_once(Tensor::ones([5], &device)).expect("a pass");
        assert_eq!((floats(prompt), replay.captures()), (vec![5.0], 0), "{name}");
        assert!(!replay.is_graph());
        for total in [6.0, 7.0] {
            let next = replay.run(Tensor::ones([1], &device)).expect("a pass");
            assert_eq!(floats(next), [total], "{name}");
        }
        let prompt = replay.run_once(Tensor::ones([2], &device)).expect("a pass");
        assert_eq!((floats(prompt), replay.captures()), (vec![9.0], 0), "{name}");
    }
}
