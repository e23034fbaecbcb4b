//! Soak test of replay: changing inputs and threads, KV caches of every format, weights requantized
//! and dropped in between. No output may differ from the forward pass, and no memory may leak.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_fp4::ops::{KvCache, KvFormat, RotaryEmbedding, attention};
use burn_fp4::{Fp4Config, Fp4Module, Replay};

const SIDE: usize = 1024;
const HEAD_DIM: usize = 128;
/// Numbers of query heads and of key heads.
const HEADS: [usize; 2] = [SIDE / HEAD_DIM, 2];
const CONTEXT: usize = 64;
const ROUNDS: usize = 4;
const THREADS: usize = 8;

#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
    rotary_emb: RotaryEmbedding,
}

/// Runs the layers on rows `[rows, SIDE]`. The first row attends to the first rows of all steps.
fn step(net: &Net, cache: KvCache, (x, at): (Tensor<2>, Tensor<1, Int>)) -> (KvCache, Tensor<2>) {
    let mut hidden = x;
    for layer in &net.layers {
        hidden = Relu::new().forward(layer.forward(hidden.clone())) + hidden;
    }
    let first = hidden.clone().narrow(0, 0, 1);
    let heads = |count: usize| {
        let channels = count * HEAD_DIM;
        first.clone().narrow(1, 0, channels).reshape([1, 1, count, HEAD_DIM])
    };
    let [queries, keys] = HEADS.map(heads);
    let positions = net.rotary_emb.at(at, CONTEXT, DType::BF16);
    let (attended, cache) = attention(queries, keys.clone(), keys, Some(cache), &positions);
    (cache, hidden + attended.reshape([1, SIDE]))
}

/// Compares `replays` replays with forward passes, on several threads.
pub(crate) fn soak(replays: usize) {
    let device = Device::cuda(0);
    let layers = (0..6).map(|_| {
        let mut layer = LinearConfig::new(SIDE, SIDE).init(&device);
        layer.weight = layer.weight.map(|weight| weight.cast(DType::BF16));
        // The bias belongs to this thread's stream, whichever thread quantizes the weights.
        layer.bias = layer.bias.map(|bias| bias.map(|bias| bias.cast(DType::BF16)));
        layer
    });
    let rotary_emb = RotaryEmbedding::new(&[0.5; HEAD_DIM / 2], CONTEXT, &device);
    let dense = Net { layers: layers.collect(), rotary_emb };
    let mut packed = dense.clone();
    packed.quantize_fp4(&Fp4Config::nvfp4()).expect("a valid model");
    let (different, compared, failed) =
        (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    // Threads are reused: the device keeps memory for each thread it has seen.
    let (begin, end) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    let mut held = Vec::with_capacity(ROUNDS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (dense, packed, device) = (dense.clone(), packed.clone(), device.clone());
            let (different, compared, failed) = (&different, &compared, &failed);
            let (begin, end) = (&begin, &end);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let (runs, seed) = (replays / THREADS / ROUNDS, THREADS * round + thread);
                    let counts = thread_runs(&device, &dense, packed.clone(), seed, runs);
                    for (counter, count) in [different, compared, failed].into_iter().zip(counts) {
                        counter.fetch_add(count, Ordering::Relaxed);
                    }
                    end.wait();
                    begin.wait();
                }
            });
        }
        for round in 0..ROUNDS {
            end.wait();
            device.sync().expect("the device answers");
            let usage = device.memory_pool_usage().expect("a Cube device");
            println!(
                "soak: {} replays: {} of {} outputs different, {} not recorded; {} allocations, \
                 {} bytes in use, {} reserved",
                (round + 1) * replays / ROUNDS,
                different.load(Ordering::Relaxed),
                compared.load(Ordering::Relaxed),
                failed.load(Ordering::Relaxed),
                usage.number_allocs,
                usage.bytes_in_use,
                usage.bytes_reserved,
            );
            held.push((usage.number_allocs, usage.bytes_in_use));
            begin.wait();
        }
    });
    let wrong = different.into_inner() + failed.into_inner();
    assert_eq!(wrong, 0, "outputs that differ, and runs that could not be recorded");
    let (allocations, bytes) = held[0];
    let grew = held.iter().any(|&(later, held)| later > allocations || held > bytes);
    assert!(!grew, "allocations and bytes grew after the first round: {held:?}");
}

/// Makes an empty cache. Seeds take the packed formats in turn, then bf16.
fn empty_cache(seed: usize, device: &Device) -> KvCache {
    let shape = [1, HEADS[1], CONTEXT, HEAD_DIM];
    match KvFormat::ALL.into_iter().map(Some).chain([None]).cycle().nth(seed).flatten() {
        Some(format) => KvCache::packed_zeros(shape, format, device).expect("whole blocks"),
        None => KvCache::zeros(shape, DType::BF16, device),
    }
}

/// Returns the numbers of outputs that differ, outputs compared, and runs that failed to capture.
fn thread_runs(device: &Device, dense: &Net, packed: Net, seed: usize, runs: usize) -> [usize; 3] {
    let empty = || empty_cache(seed, device);
    let mut model = packed;
    let mut replay = Replay::with_state(model.clone(), empty(), step);
    let mut cache = empty();
    let [mut different, mut compared, mut failed] = [0; 3];
    for run in 0..runs {
        let rows = [1, 1, 1, 4][run % 4];
        let values = (0..rows * SIDE).map(|i| ((seed * 31 + run * 7 + i * 13) % 97) as f32 / 97.0);
        let x = TensorData::new::<f32, _>(values.collect(), [rows, SIDE]);
        let x = Tensor::<2>::from_data(x, device).cast(DType::BF16);
        let at = Tensor::<1, Int>::from_ints([(run % CONTEXT) as i32], device);
        let found = match replay.run((x.clone(), at.clone())) {
            Ok(found) => found,
            Err(error) => {
                eprintln!("thread {seed}, run {run}: {error}");
                failed += 1;
                continue;
            }
        };
        let (next, expected) = step(&model, cache, (x, at));
        cache = next;
        if run % 16 == 0 || rows > 1 {
            compared += 1;
            different += usize::from(found.into_data() != expected.into_data());
        }
        // Requantized, sometimes with another method, and dropped.
        if run % 64 == 63 {
            let config = if run % 128 == 63 { Fp4Config::mxfp4() } else { Fp4Config::nvfp4() };
            model = dense.clone();
            model.quantize_fp4(&config).expect("a valid model");
            let again = model.clone();
            replay.change(|old| *old = again);
        }
        if run % 100 == 99 {
            let state = replay.state().expect("no run panicked");
            replay = Replay::with_state(model.clone(), state, step);
        }
    }
    [different, compared, failed]
}
