//! Memory of quantized modules that move between devices, counted by the allocator.

// Burn 0.22 deprecates `NdArray`.
#![allow(deprecated)]

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Device;
use burn_fp4::{Fp4Config, Fp4Module, PackedWeight};
use peak_alloc::PeakAlloc;
use tests::tensors::floats;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const WIDTH: usize = 1024;
const LAYERS: usize = 4;
/// Bytes of the weights in f32.
const DENSE: usize = 4 * LAYERS * WIDTH * WIDTH;

/// Returns a packed model on one host device. It was printed: that makes Burn initialize its lazy
/// parameters.
fn used() -> Vec<Linear> {
    let device = Device::ndarray();
    let config = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
    let mut model: Vec<Linear> = (0..LAYERS).map(|_| config.init(&device)).collect();
    model.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    for layer in &model {
        assert!(format!("{layer}").contains("Linear"));
        assert!(layer.weight.is_initialized(), "the premise");
    }
    model
}

/// Bytes of codes and scales, with some room for tensor scales.
fn is_packed_size(bytes: usize) -> bool {
    bytes as f64 <= 1.1 * (4.5 / 32.0) * DENSE as f64
}

/// The only test of this binary: memory is counted for the whole process.
#[test]
fn moved_modules_hold_codes_and_no_dense_zeros() {
    let there = Device::flex();
    let before = ALLOCATOR.current_usage();
    let held = || ALLOCATOR.current_usage().saturating_sub(before);

    // Burn's own move also copies the placeholders of dense values of a module that was used.
    let mut moved = used().to_device(&there);
    let by_burn = held();
    moved.compact_fp4();
    let compacted = held();
    assert!(by_burn >= DENSE, "the premise: {by_burn} bytes of {DENSE}");
    assert!(is_packed_size(compacted), "{compacted} bytes of {DENSE} once compacted");
    drop(moved);

    let model = used();
    ALLOCATOR.reset_peak_usage();
    let (peak_before, device) = (ALLOCATOR.current_usage(), there.clone());
    let moved = model.to_device_fp4(&device);
    let peak = ALLOCATOR.peak_usage() - peak_before;
    assert!(is_packed_size(held()), "{} bytes of {DENSE} moved", held());
    assert!(is_packed_size(peak), "{peak} bytes of {DENSE} for the move");
    assert_eq!(moved.devices(), [device]);
    for layer in &moved {
        assert!(layer.weight.reparameterization::<PackedWeight>().is_some());
        assert_eq!(layer.weight.dims(), [WIDTH, WIDTH]);
    }
    // The bits are the same as by Burn's move.
    let again = moved.clone().to_device(&Device::ndarray());
    assert_eq!(floats(moved[0].weight.val()), floats(again[0].weight.val()));
}
