//! Memory of quantizing a module in place, counted by the allocator.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_fp4::{Fp4Config, Fp4Module};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const WIDTH: usize = 1024;
const LAYERS: usize = 24;

/// 25 million weights. Each is freed when it is packed: the peak is hardly more than the dense
/// model, and afterwards only codes and scales are left.
#[test]
#[ignore = "slow"]
fn quantizing_in_place_peaks_barely_above_the_dense_model() {
    let device = Device::flex();
    let before = ALLOCATOR.current_usage();
    let config = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
    let mut model: Vec<Linear> = (0..LAYERS).map(|_| config.init(&device)).collect();
    for layer in &model {
        let _initialized: Tensor<2> = layer.weight.val();
    }
    let weights = model.num_params();
    let dense = ALLOCATOR.current_usage() - before;
    assert!(dense >= 4 * weights);

    ALLOCATOR.reset_peak_usage();
    let report = model.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    let peak = ALLOCATOR.peak_usage() - before;
    let after = ALLOCATOR.current_usage() - before;
    println!(
        "{weights} weights: dense {dense} bytes, peak {peak} ({:.3} of dense), after {after} \
         ({:.3} bits per weight)",
        peak as f64 / dense as f64,
        8.0 * after as f64 / weights as f64,
    );
    assert!(peak as f64 <= 1.15 * dense as f64);
    assert!(8.0 * after as f64 / weights as f64 <= 4.6);
    assert_eq!(report.quantized().count(), LAYERS);
}
