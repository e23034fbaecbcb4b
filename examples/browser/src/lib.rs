//! A layer with FP4 weights in a browser: quantized in WebAssembly with the bits of the reference,
//! multiplied by a kernel through WebGPU.
//!
//! A browser cannot wait for a GPU. So the layer is quantized on Burn's CPU device, and moved or
//! loaded as a record, the driver is tested by [`init_async`], and outputs are read by
//! `into_data_async`.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor};
use burn_fp4::prelude::*;
use burn_fp4::{init_async, ops};
use wasm_bindgen::prelude::*;

/// Input and output channels of the layer.
const CHANNELS: usize = 2048;
/// Products between two readings of the clock.
const PRODUCTS: usize = 50;

/// Quantizes a layer, multiplies on the GPU and compares with the CPU. Returns a summary in lines.
///
/// # Errors
/// The browser has no WebGPU, its driver fails the self-test, outputs differ from the CPU's, or a
/// product dequantized its weight.
#[wasm_bindgen]
pub async fn run() -> Result<String, JsError> {
    console_error_panic_hook::set_once();
    let gpu = Device::wgpu_options().init_async().await?;
    init_async(&gpu).await?;

    let mut lines = Vec::new();
    let cpu = Device::flex();
    let layer = LinearConfig::new(CHANNELS, CHANNELS).with_bias(false).init(&cpu);
    for (name, config) in [("NVFP4", Fp4Config::nvfp4()), ("MXFP4", Fp4Config::mxfp4())] {
        let mut packed = layer.clone();
        let start = now();
        let report = packed.quantize_fp4(&config)?;
        let (error, bits) = (100.0 * report.relative_error(), report.bits_per_weight());
        let took = now() - start;
        lines.push(format!(
            "{name}: quantized in {took:.0} ms, error {error:.1} %, {bits:.2} bits a weight"
        ));

        let input = Tensor::<2>::random([1, CHANNELS], Distribution::Default, &cpu);
        let expected = packed.forward(input.clone()).into_data_async().await?;
        let packed = match name {
            "NVFP4" => packed.to_device_fp4(&gpu),
            // As a page loads a record that it has downloaded.
            _ => {
                let mut fresh = LinearConfig::new(CHANNELS, CHANNELS).with_bias(false).init(&gpu);
                fresh.load_fp4_record(packed.into_record())?;
                fresh
            }
        };
        let input = Tensor::<2>::from_data(input.into_data_async().await?, &gpu);
        let found = packed.forward(input.clone()).into_data_async().await?;
        let largest = |values: &[f32]| values.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        let expected: Vec<f32> = expected.iter().collect();
        let errors: Vec<f32> = found.iter::<f32>().zip(&expected).map(|(a, b)| a - b).collect();
        let difference = largest(&errors) / largest(&expected);
        lines.push(format!("differs from the CPU by {difference:.1e} of the largest output"));
        if difference > 1e-5 {
            return Err(JsError::new(&lines.join("\n")));
        }
        lines.push(format!("FP4 product: {:.2} ms", time(&packed, input.clone()).await?));
        if ops::fused_products().dense > 0 {
            return Err(JsError::new("a product dequantized its weight"));
        }
    }
    let dense = layer.to_device(&gpu);
    let input = Tensor::<2>::ones([1, CHANNELS], &gpu);
    lines.push(format!("dense f32 product: {:.2} ms", time(&dense, input).await?));
    Ok(lines.join("\n"))
}

/// Measures the mean time of a product in milliseconds.
async fn time(layer: &Linear, input: Tensor<2>) -> Result<f64, JsError> {
    // Compiles, and lets Burn choose a kernel.
    layer.forward(input.clone()).into_data_async().await?;
    let start = now();
    let mut output = layer.forward(input.clone());
    for _ in 1..PRODUCTS {
        output = layer.forward(input.clone());
    }
    output.into_data_async().await?;
    Ok((now() - start) / PRODUCTS as f64)
}

/// Returns the time of the browser in milliseconds.
fn now() -> f64 {
    js_sys::Date::now()
}
