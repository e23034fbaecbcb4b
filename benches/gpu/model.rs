//! Speed of the public API: operations on Burn tensors, and a model quantized in place.

use std::sync::Arc;
use std::time::Instant;

use benches::Row;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_fp4::ops::HessianFactor;
use burn_fp4::{Fp4Config, Fp4Module, Fp4Scheme, Gptq, ops};

use crate::Arguments;
use crate::figures::Figures;

/// Rows and columns of a weight.
pub(crate) const SIDE: usize = 8192;

#[derive(Module, Debug)]
pub(crate) struct Stack {
    pub(crate) layers: Vec<Linear>,
}

impl Stack {
    pub(crate) fn new(count: usize, device: &Device) -> Self {
        let layers = (0..count).map(|_| {
            let mut layer = LinearConfig::new(SIDE, SIDE).with_bias(false).init(device);
            layer.weight = layer.weight.map(|weight| weight.cast(DType::BF16));
            layer
        });
        Self { layers: layers.collect() }
    }
}

/// Adds the public operations on Burn tensors, and a model quantized in place, to the table.
pub(crate) fn measure(arguments: &Arguments, figures: &mut Figures) {
    let device = Device::cuda(0);
    let wait = || device.sync().expect("the device answers");
    let weight = Tensor::<2>::random([SIDE, SIDE], Distribution::Normal(0.0, 0.02), &device)
        .cast(DType::BF16);
    let scheme = Fp4Scheme::nvfp4();
    let time = |run: &dyn Fn()| wall(arguments, &device, run);
    let copy = time(&|| drop(weight.clone().mul_scalar(2.0)));
    let packed = ops::quantize(weight.clone(), 0, &scheme).expect("a valid problem");
    let bytes = 2 * SIDE * SIDE;
    let mut row = |name: &str, values, bytes, seconds| {
        figures.push(Row::new(name, values, bytes, seconds, copy));
    };
    let quantize = time(&|| drop(ops::quantize(weight.clone(), 0, &scheme)));
    row("Burn tensor: quantize, 8192 x 8192", SIDE * SIDE, 2 * bytes + packed.bytes(), quantize);
    let dequantize = time(&|| drop(packed.dequantize_to(burn::tensor::FloatDType::BF16)));
    row("Burn tensor: dequantize, 8192 x 8192", SIDE * SIDE, bytes + packed.bytes(), dequantize);

    let side = 4096;
    let weight = Tensor::<2>::random([side, side], Distribution::Normal(0.0, 0.02), &device)
        .cast(DType::BF16);
    let inputs = Tensor::<2>::random([16384, side], Distribution::Normal(0.0, 1.0), &device)
        .cast(DType::BF16);
    let mut seconds = 0.0;
    // So does the first of these.
    for _ in 0..2 {
        let start = Instant::now();
        let gram = ops::gram(inputs.clone()).expect("finite");
        eprintln!("Gram matrix in {:?}", start.elapsed());
        let hessian_factor =
            HessianFactor::new(&gram, &Gptq::default(), 16, &device).expect("not singular");
        eprintln!("and its Hessian factor in {:?}", start.elapsed());
        let packed = ops::quantize_with_hessian_factor(
            weight.clone(),
            0,
            &scheme,
            &Arc::new(hessian_factor),
        );
        let packed = packed.expect("a valid problem");
        device.sync().expect("the device answers");
        eprintln!("and GPTQ in {:?}", start.elapsed());
        drop(packed);
        seconds = start.elapsed().as_secs_f64();
    }
    row("gptq, 4096 x 4096, 16384 inputs", side * side, 2 * side * side, seconds);

    let layers = (arguments.model << 20) / (SIDE * SIDE);
    // The first one compiles.
    Stack::new(1, &device).quantize_fp4(&Fp4Config::nvfp4()).expect("a valid model");
    let mut times = Vec::new();
    for _ in 0..3 {
        let mut model = Stack::new(layers, &device);
        wait();
        let start = Instant::now();
        model.quantize_fp4(&Fp4Config::nvfp4()).expect("a valid model");
        wait();
        let elapsed = start.elapsed();
        times.push(elapsed.as_secs_f64());
        eprintln!("{} weights in {elapsed:?}", layers * SIDE * SIDE);
    }
    times.sort_by(f64::total_cmp);
    let values = layers * SIDE * SIDE;
    row(&format!("model of {layers} Linear, quantize_fp4"), values, 2 * values, times[1]);
}

/// Measures the median seconds of a run between two waits, after three warm-up runs. The result is
/// kept until the second wait: a tensor dropped before it ran is not computed.
pub(crate) fn wall<R>(arguments: &Arguments, device: &Device, mut run: impl FnMut() -> R) -> f64 {
    let mut times: Vec<_> = (0..arguments.runs + 3)
        .map(|_| {
            device.sync().expect("the device answers");
            let start = Instant::now();
            let result = run();
            device.sync().expect("the device answers");
            let seconds = start.elapsed().as_secs_f64();
            drop(result);
            seconds
        })
        .skip(3)
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
