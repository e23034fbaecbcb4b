//! A training step of a linear layer, dense and with FP4.

use std::time::Instant;

use benches::Row;
use burn::module::Module;
use burn::nn::LinearConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_fp4::{Fp4Config, Fp4Module, Fp4Scheme, Fp4TrainLinear, Method, TrainRecipe};

use crate::Arguments;
use crate::figures::Figures;

/// Rows and columns of the weight.
const SIDE: usize = 4096;
/// Rows of the input.
const BATCH: usize = 512;

/// Steps between two waits.
const STEPS: usize = 20;

/// Measures steps of forward pass, backward pass and SGD in bf16, with a bf16 input that requires a
/// gradient.
pub(crate) fn measure(arguments: &Arguments, figures: &mut Figures) {
    let device = Device::cuda(0).autodiff();
    let linear = || {
        let mut linear = LinearConfig::new(SIDE, SIDE).with_bias(false).init(&device);
        linear.weight =
            linear.weight.map(|weight| weight.cast(DType::BF16).detach().require_grad());
        linear
    };
    let input = Tensor::<2>::random([BATCH, SIDE], Distribution::Normal(0.0, 1.0), &device)
        .cast(DType::BF16);
    let runs = arguments.runs;
    let dense = step(&device, linear(), &input, runs, |linear, x| linear.forward(x));
    let mut row = |name: &str, seconds| {
        let name = format!("step of a Linear, 4096 x 4096, batch 512: {name}");
        let row = Row::new(&name, BATCH * SIDE, 6 * SIDE * SIDE, seconds, dense);
        eprintln!("{name}: {:.0} us, {:.2} x dense", seconds * 1e6, seconds / dense);
        figures.push(row);
    };
    row("bf16", dense);
    for (name, scheme) in [
        ("nvfp4 weights", Fp4Scheme::nvfp4()),
        ("mxfp4 weights", Fp4Scheme::mxfp4()),
        ("nvfp4 weights by sse", Fp4Scheme::nvfp4().with_method(Method::SSE)),
    ] {
        let mut aware = linear();
        aware.fake_quantize_fp4(&Fp4Config::new(scheme)).expect("a valid model");
        row(name, step(&device, aware, &input, runs, |linear, x| linear.forward(x)));
    }
    let layer = Fp4TrainLinear::new(linear(), TrainRecipe::NVFP4, 0).expect("a consistent recipe");
    row("nvfp4 recipe", step(&device, layer, &input, runs, |layer, x| layer.forward(x)));
    // Measured again: the first variant runs on a cold machine.
    row("bf16, again", step(&device, linear(), &input, runs, |linear, x| linear.forward(x)));
}

/// Measures the median seconds of a step.
fn step<M: Module>(
    device: &Device,
    mut module: M,
    input: &Tensor<2>,
    runs: usize,
    forward: impl Fn(&M, Tensor<2>) -> Tensor<2>,
) -> f64 {
    let mut optimizer = SgdConfig::new().init();
    let mut times = Vec::new();
    for _ in 0..runs + 2 {
        device.sync().expect("the device answers");
        let start = Instant::now();
        for _ in 0..STEPS {
            let output = forward(&module, input.clone().require_grad());
            let gradients = GradientsParams::from_grads(output.sum().backward(), &module);
            module = optimizer.step(1e-6, module, gradients);
        }
        device.sync().expect("the device answers");
        times.push(start.elapsed().as_secs_f64() / STEPS as f64);
    }
    // The first runs compile and tune.
    let mut times = times.split_off(2);
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
