//! Forward passes of Burn's own layers in bf16, dense and quantized in place: launched, replayed,
//! and the bound from the memory bandwidth.

use benches::Row;
use burn::nn::LinearConfig;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_fp4::{Fp4Config, Fp4Linear, Fp4Module, Replay, ops};
use burn_fp4_cubecl::cubecl::client::Client;

use crate::Arguments;
use crate::figures::Figures;
use crate::model::{SIDE, Stack, wall};
use crate::products::Turn;

/// Hidden size and intermediate size of the stack.
const HIDDEN: usize = 4096;
const INNER: usize = 11008;

/// Measures single layers, and the linear layers of a decoder.
pub(crate) fn measure(client: &Client, arguments: &Arguments, figures: &mut Figures) {
    let device = Device::cuda(0);
    let bandwidth = bandwidth(arguments, &device);
    layers(client, arguments, &device, bandwidth, figures);
    stack(arguments, &device, bandwidth, figures);
}

/// Measures the bytes per second that a device copy reads and writes.
fn bandwidth(arguments: &Arguments, device: &Device) -> f64 {
    let values = random([SIDE, SIDE], device);
    let copies = 20;
    let seconds = wall(arguments, device, || {
        (0..copies).map(|_| values.clone().mul_scalar(2.0)).collect::<Vec<_>>()
    });
    let bytes = 4 * SIDE * SIDE;
    eprintln!("a copy moves {:.0} GB/s", (copies * bytes) as f64 / seconds / 1e9);
    (copies * bytes) as f64 / seconds
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::<D>::random(shape, Distribution::Normal(0.0, 1.0), device).cast(DType::BF16)
}

/// Several layers, so that their weights are not in the cache.
fn layers(
    client: &Client,
    arguments: &Arguments,
    device: &Device,
    bandwidth: f64,
    figures: &mut Figures,
) {
    const LAYERS: usize = 6;
    let dense = Stack::new(LAYERS, device);
    let mut quantized = dense.clone();
    let report = quantized.quantize_fp4(&Fp4Config::nvfp4()).expect("a valid model");
    let bytes = [2 * SIDE * SIDE, report.bytes_after() / LAYERS];
    let turn = Turn::new(client, SIDE, SIDE);
    for rows in [1, 4, 16, 64, 256, 1024, 2048] {
        let x = random([rows, SIDE], device);
        let mut copy = 0.0;
        for (stack, name, bytes) in [(&dense, "bf16", bytes[0]), (&quantized, "nvfp4", bytes[1])] {
            let layers = |stack: &Stack, x: Tensor<2>| -> Vec<_> {
                stack.layers.iter().map(|layer| layer.forward(x.clone())).collect()
            };
            let launched = wall(arguments, device, || layers(stack, x.clone()));
            let mut replay = Replay::new(stack.clone(), layers);
            let replayed = wall(arguments, device, || replay.run(x.clone()));
            assert!(replay.is_graph(), "CUDA has graphs");
            let floor = bytes as f64 / bandwidth;
            if name == "bf16" {
                copy = launched / LAYERS as f64;
            }
            let mut times = vec![
                ("launched", launched / LAYERS as f64),
                ("replayed", replayed / LAYERS as f64),
                ("floor", floor),
            ];
            if name == "nvfp4" {
                times.push(("kernel alone", turn.seconds(arguments, rows)));
            }
            for (how, seconds) in times {
                let name = format!("Linear::forward, {rows} rows, {name}, {how}");
                figures.push(Row::new(&name, SIDE * SIDE, bytes, seconds, copy));
            }
        }
    }
}

/// Measures one token through the linear layers of 16 decoder layers.
fn stack(arguments: &Arguments, device: &Device, bandwidth: f64, figures: &mut Figures) {
    let shapes = [(HIDDEN, HIDDEN); 4].into_iter().chain([
        (HIDDEN, INNER),
        (HIDDEN, INNER),
        (INNER, HIDDEN),
    ]);
    let layers: Vec<_> = (0..16)
        .flat_map(|_| shapes.clone())
        .map(|(inputs, outputs)| {
            let mut layer = LinearConfig::new(inputs, outputs).with_bias(false).init(device);
            layer.weight = layer.weight.map(|weight| weight.cast(DType::BF16));
            layer
        })
        .collect();
    let dense = Stack { layers };
    let mut quantized = dense.clone();
    let report = quantized.quantize_fp4(&Fp4Config::nvfp4()).expect("a valid model");
    let token = random([1, HIDDEN], device);
    let values = report.bytes_before() / 2;
    let mut copy = 0.0;
    for (stack, name, bytes) in
        [(&dense, "bf16", 2 * values), (&quantized, "nvfp4", report.bytes_after())]
    {
        let products = ops::fused_products();
        let launched = wall(arguments, device, || drop(through(stack, token.clone()).into_data()));
        eprintln!("stack in {name}: products from {products:?} to {:?}", ops::fused_products());
        let threads = std::thread::scope(|scope| {
            let run = || {
                let own = stack.clone();
                let token = token.clone();
                let shared =
                    wall(arguments, device, || drop(through(stack, token.clone()).into_data()));
                let cloned =
                    wall(arguments, device, || drop(through(&own, token.clone()).into_data()));
                [shared, cloned]
            };
            scope.spawn(run).join().expect("the thread runs")
        });
        let mut replay = Replay::new(stack.clone(), through);
        let replayed = wall(arguments, device, || {
            drop(replay.run(token.clone()).expect("recordable").into_data());
        });
        let expected = through(stack, token.clone()).into_data();
        let found = replay.run(token.clone()).expect("recordable").into_data();
        assert_eq!(expected, found, "stack in {name}: replay differs from forward");
        if name == "bf16" {
            copy = launched;
        }
        for (how, seconds) in [
            ("launched", launched),
            ("launched, other thread", threads[0]),
            ("launched, cloned on another thread", threads[1]),
            ("replayed", replayed),
            ("floor", bytes as f64 / bandwidth),
        ] {
            let name = format!("decoder stack, one token, {name}, {how}");
            figures.push(Row::new(&name, values, bytes, seconds, copy));
        }
    }
    let layers = quantized.layers.into_iter().map(Fp4Linear::from).collect::<Vec<_>>();
    let launched = wall(arguments, device, || {
        drop(chained(&layers, Fp4Linear::forward, token.clone()).into_data());
    });
    let name = "decoder stack, one token, nvfp4, Fp4Linear, launched";
    figures.push(Row::new(name, values, report.bytes_after(), launched, copy));
}

fn through(stack: &Stack, token: Tensor<2>) -> Tensor<2> {
    chained(&stack.layers, |layer, x| layer.forward(x), token)
}

/// Linear layers of decoder layers, without attention and norms.
fn chained<L>(
    layers: &[L],
    forward: impl Fn(&L, Tensor<2>) -> Tensor<2>,
    token: Tensor<2>,
) -> Tensor<2> {
    let mut hidden = token;
    for block in layers.chunks(7) {
        let [query, key, value, output, gate, up, down] = block else { unreachable!("seven") };
        let mixed = forward(query, hidden.clone())
            + forward(key, hidden.clone())
            + forward(value, hidden.clone());
        hidden = hidden + forward(output, mixed).tanh();
        let inner = forward(gate, hidden.clone()).tanh() * forward(up, hidden.clone());
        hidden = hidden + forward(down, inner).tanh();
    }
    hidden
}
