//! Memory of quantizing the folder of a language model, counted by the allocator.

use std::path::{Path, PathBuf};

use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::{Fp4Format, Method};
use llama::{CalibrationWindows, Folder, Llama, QuantizeFolder, QuantizeOptions, Tokens};
use peak_alloc::PeakAlloc;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Bytes of a decoder layer in f32: 256 x 256 four times, and 256 x 768 three times.
const LAYER: usize = 4 * (4 * 256 * 256 + 3 * 256 * 768);

fn out(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("llama_memory").join(name);
    if path.exists() {
        std::fs::remove_dir_all(&path).expect("an old folder");
    }
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    path
}

/// Makes a model of random weights and quantizes it. Returns the peaks of both.
fn peaks(layers: usize, sequential: bool) -> [usize; 2] {
    let (device, path) = (Device::flex(), out(&format!("{layers}-{sequential}")));
    let config = format!(
        r#"{{"model_type": "llama", "vocab_size": 256, "hidden_size": 256,
             "intermediate_size": 768, "num_hidden_layers": {layers}, "num_attention_heads": 8,
             "max_position_embeddings": 64, "dtype": "bfloat16"}}"#
    );
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    llama::create_random(&config, &path, &device).expect("a folder");
    let created = ALLOCATOR.peak_usage() - before;

    let folder = Folder::open(&path).expect("a folder");
    let text = "In the beginning God created the heaven and the earth. ".repeat(9);
    let tokens = Tokens::new(&folder.tokenizer().expect("a tokenizer"), &text, 0.1).unwrap();
    let calibration = CalibrationWindows { windows: 4, context: 64, seed: 1 };
    let (format, method) = (Fp4Format::NvFp4, Some(Method::GPTQ));
    let (damping, correction, hadamard) = (None, None, None);
    let options =
        QuantizeOptions { format, method, sequential, damping, correction, hadamard, calibration };
    let config =
        Llama::<Linear>::new(&folder.config, &device).and_then(|model| options.config(&model));
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    let job = QuantizeFolder {
        folder: &folder,
        config: &config.expect("a configuration"),
        options: &options,
        tokens: &tokens,
        dialect: "compressed-tensors",
        device: &device,
        resume: false,
    };
    let done = job.run(&out(&format!("{layers}-{sequential}-fp4"))).expect("quantized");
    assert_eq!(done.report.quantized().count(), 7 * layers);
    [created, ALLOCATOR.peak_usage() - before]
}

/// Four more layers. Threads that quantize side by side take a little more or less in each run.
#[test]
#[ignore = "slow"]
fn memory_does_not_depend_on_the_number_of_layers() {
    for sequential in [false, true] {
        let [few, many] = [2, 6].map(|layers| peaks(layers, sequential));
        println!("sequential {sequential}: {few:?} with 2 layers, {many:?} with 6");
        for (few, many) in few.into_iter().zip(many) {
            assert!(few > LAYER / 2, "{few} of {LAYER}: the premise");
            assert!(many < few + 3 * LAYER / 2, "{many} with 6 layers, {few} with 2");
        }
    }
}
