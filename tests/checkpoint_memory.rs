//! Memory and time of loading a checkpoint into a module, counted by the allocator.

use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::nn::{EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::Device;
use burn_fp4::{Checkpoint, CheckpointMap, Fp4Config, Fp4Module, LoadCheckpoint, PackedWeight};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

const WIDTH: usize = 1024;

/// Packed weights share pages of this length, the last of which are not full.
const HUGE_PAGE: usize = 2 << 20;

fn model(layers: usize) -> Vec<Linear> {
    let config = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
    (0..layers).map(|_| config.init(&Device::flex())).collect()
}

fn saved(layers: usize, dialect: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{dialect}-{layers}"));
    if path.exists() {
        fs::remove_dir_all(&path).expect("an old folder");
    }
    let mut saved = model(layers);
    saved.quantize_fp4(&Fp4Config::nvfp4()).unwrap();
    saved.save_fp4(&path, dialect, &CheckpointMap::new()).unwrap();
    path
}

fn loaded(path: &Path, layers: usize) -> Vec<Linear> {
    let mut loaded = model(layers);
    let checkpoint = Checkpoint::open(path).unwrap();
    let report = checkpoint.load_into(&mut loaded, &CheckpointMap::new()).unwrap();
    assert_eq!(report.packed().count(), layers);
    loaded
}

/// 8 million weights: the peak is the packed model and less than one packed tensor more.
#[test]
#[ignore = "slow"]
fn loading_peaks_at_the_packed_model_and_one_tensor() {
    const LAYERS: usize = 8;
    for dialect in ["modelopt", "compressed-tensors"] {
        let path = saved(LAYERS, dialect);
        let before = ALLOCATOR.current_usage();
        ALLOCATOR.reset_peak_usage();
        let model = loaded(&path, LAYERS);
        let (peak, after) = (ALLOCATOR.peak_usage() - before, ALLOCATOR.current_usage() - before);
        let packed = LAYERS * WIDTH * WIDTH * 9 / 16;
        println!("{dialect}: packed {packed} bytes, peak {peak}, after {after}");
        assert!(after >= packed, "the premise");
        assert!(after <= packed + HUGE_PAGE + (1 << 18), "after {after} of {packed}");
        assert!(peak - after <= packed / LAYERS + (1 << 18), "peak {peak}, after {after}");
        drop(model);
    }
    tied_codes_are_in_memory_once();
}

/// Checks an embedding with a tied output layer.
fn tied_codes_are_in_memory_once() {
    const ROWS: usize = 8192;
    let device = Device::flex();
    let embedding = || EmbeddingConfig::new(ROWS, WIDTH).init(&device);
    let head = || LinearConfig::new(WIDTH, ROWS).with_bias(false).init(&device);
    let map = CheckpointMap::new().tie("1.weight", "0.weight");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tied-memory");
    if path.exists() {
        fs::remove_dir_all(&path).expect("an old folder");
    }
    let mut first = vec![embedding()];
    first.quantize_fp4(&Fp4Config::nvfp4().container("Embedding", 1)).unwrap();
    first.save_fp4(&path, "modelopt", &CheckpointMap::new()).unwrap();
    drop(first);

    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let mut tied = (embedding(), head());
    Checkpoint::open(&path).unwrap().load_into(&mut tied, &map).unwrap();
    let (peak, after) = (ALLOCATOR.peak_usage() - before, ALLOCATOR.current_usage() - before);
    let packed = ROWS * WIDTH * 9 / 16;
    println!("tied: packed {packed} bytes, peak {peak}, after {after}");
    assert!(after >= packed, "the premise");
    assert!(after <= packed + HUGE_PAGE + (1 << 18), "after {after} of {packed}");
    // One tensor more: its bytes before they are moved to such pages.
    assert!(peak <= after + packed, "peak {peak} of {packed}");
    assert!(tied.1.weight.reparameterization::<PackedWeight>().is_some());
}

/// Measures load times, by hand: `cargo test --test checkpoint_memory -- --ignored --nocapture`.
#[test]
#[ignore = "takes time, and asserts none"]
fn speed_of_loading_next_to_reading_the_file() {
    const LAYERS: usize = 128;
    let path = saved(LAYERS, "modelopt");
    let file = path.join("model.safetensors");
    let bytes = fs::metadata(&file).unwrap().len() as f64;
    for _ in 0..3 {
        let begin = Instant::now();
        black_box(fs::read(&file).unwrap());
        let read = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        black_box(loaded(&path, LAYERS));
        let load = begin.elapsed().as_secs_f64();
        println!(
            "{:.0} MB: read {:.2} GB/s, loaded {:.2} GB/s, {:.2} of it",
            bytes / 1e6,
            bytes / read / 1e9,
            bytes / load / 1e9,
            read / load,
        );
    }
}
