//! Speed of linear layers on the host, dense and quantized: `cargo bench --bench layers`.

use benches::{Row, median_seconds, print};
use burn::nn::LinearConfig;
use burn::tensor::{Device, Distribution, Tensor};
use burn_fp4::{Fp4Config, Fp4Linear, Fp4Module};
use clap::Parser;

/// Measures linear layers on the host in f32, dense and quantized.
#[derive(Parser)]
struct Arguments {
    /// Input and output features of a layer.
    #[arg(long, default_value_t = 4096)]
    side: usize,
    /// Timed runs per layer; the median counts.
    #[arg(long, default_value_t = 15)]
    runs: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Option that `cargo bench` passes.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() {
    let Arguments { side, runs, json, .. } = Arguments::parse();
    let mut rows = Vec::new();
    // Burn 0.22 deprecates `ndarray`.
    #[allow(deprecated)]
    let devices = [("flex", Device::flex()), ("ndarray", Device::ndarray())];
    for (name, device) in devices {
        let dense = LinearConfig::new(side, side).with_bias(false).init(&device);
        let mut quantized = dense.clone();
        quantized.quantize_fp4(&Fp4Config::nvfp4()).expect("a valid layer");
        let straight = Fp4Linear::from(quantized.clone());
        for inputs in [1, 4, 16, 64, 256] {
            let x = Tensor::<2>::random([inputs, side], Distribution::Normal(0.0, 1.0), &device);
            let in_dense = median_seconds(runs, || drop(dense.forward(x.clone())));
            let in_place = median_seconds(runs, || drop(quantized.forward(x.clone())));
            let from_codes = median_seconds(runs, || drop(straight.forward(x.clone())));
            let mut row = |kind: &str, bytes, seconds| {
                let name = format!("{name}, {inputs} inputs, {kind}");
                rows.push(Row::new(&name, side * side, bytes, seconds, in_dense));
            };
            let packed = side * side * 9 / 16;
            row("Linear", 4 * side * side, in_dense);
            row("Linear, quantized in place", packed, in_place);
            row("Fp4Linear", packed, from_codes);
        }
    }
    print(&rows, json);
}
