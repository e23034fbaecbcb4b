//! `fp4 quantize --device`: the bits of the host, or an error that says what to do.

mod model;

use model::{SMALL, fails, names, succeeds};
use tempfile::tempdir;

#[cfg(not(feature = "cuda"))]
#[test]
fn a_device_that_cannot_quantize_is_refused_with_a_remedy() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let says = ["--device cuda", "cargo install --path crates/cli --features cuda"];
    for more in ["--out out", "--dry-run"] {
        fails(folder.path(), &format!("quantize model --device cuda {more}"), 2, &says);
    }
    assert_eq!(names(folder.path()), ["model"]);
    let says = ["--device wgpu", "round quotients", "leave --device out"];
    fails(folder.path(), "quantize model --device wgpu --out out", 2, &says);
    // The host needs no feature.
    let said = succeeds(folder.path(), "quantize model --out out --device flex");
    assert!(!said.contains("flex"), "{said}");
}

#[cfg(feature = "cpu")]
mod on_the_cpu_runtime {
    use std::fs;

    use model::assert_same;
    use safetensors::Dtype;

    use super::*;

    const ON: &str = "--device cpu-runtime";

    /// Statistics `X^T X` of the layers of a model.
    fn grams(path: &std::path::Path) {
        let gram = |tensor: &model::Tensor| {
            let cols = tensor.shape[1];
            let at = |row: usize, col: usize| if row == col { 1.0 + (row % 5) as f32 } else { 0.1 };
            let value = |i| f32::to_le_bytes(at(i / cols, i % cols));
            let (name, shape) = (tensor.name.clone(), vec![cols, cols]);
            let bytes = (0..cols * cols).flat_map(value).collect();
            model::Tensor { name, dtype: Dtype::F32, shape, bytes }
        };
        let tensors = model::tensors(SMALL);
        let layers = tensors.iter().filter(|tensor| tensor.name.contains("_proj"));
        model::write(path, &layers.map(gram).collect::<Vec<_>>());
    }

    #[test]
    fn every_method_with_kernels_writes_the_bytes_of_the_host() {
        let folder = tempdir().expect("a folder");
        model::model(folder.path(), "model", SMALL);
        grams(&folder.path().join("grams.safetensors"));
        for (method, format, more) in [
            ("amax", "nvfp4", ""),
            ("amax", "nvfp4", "--preset miles"),
            ("amax", "mxfp4", "--rule even"),
            ("four-over-six", "nvfp4", ""),
            ("sse", "nvfp4", ""),
            ("sse", "nvfp4", "--dialect mlx"),
            ("sse", "mxfp4", ""),
            ("sse-weighted", "nvfp4", "--calibration grams.safetensors"),
            ("hessian", "mxfp4", "--calibration grams.safetensors"),
            ("coordinate-descent", "nvfp4", "--calibration grams.safetensors"),
        ] {
            let options = format!("--method {method} --format {format} {more}");
            if more == "--preset miles" {
                let input =
                    concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/miles_moe_bf16");
                succeeds(folder.path(), &format!("quantize {input} --out host {options}"));
                succeeds(folder.path(), &format!("quantize {input} --out kernels {options} {ON}"));
            } else {
                succeeds(folder.path(), &format!("quantize model --out host {options}"));
                let said = succeeds(
                    folder.path(),
                    &format!("quantize model --out kernels {options} {ON}"),
                );
                assert!(said.contains(", on cpu-runtime)"), "{said}");
            }
            let [host, kernels] = ["host", "kernels"].map(|name| folder.path().join(name));
            assert_same(&host, &kernels);
            [host, kernels].iter().for_each(|path| fs::remove_dir_all(path).expect("a folder"));
        }
    }

    #[test]
    fn every_float_and_every_layout_is_the_same() {
        let folder = tempdir().expect("a folder");
        // f16, and f32 of what llama.cpp keeps.
        model::gguf(&folder.path().join("f16.gguf"));
        succeeds(folder.path(), "quantize f16.gguf --out host.gguf");
        succeeds(folder.path(), &format!("quantize f16.gguf --out kernels.gguf {ON}"));
        assert_same(&folder.path().join("host.gguf"), &folder.path().join("kernels.gguf"));
        // Experts in one tensor, inputs before outputs; and f32.
        let input = folder.path().join("experts");
        fs::create_dir(&input).expect("a folder");
        let mut experts = model::tensor("model.layers.0.mlp.experts.down_proj", &[3, 64, 96], 5);
        let values = model::values(3 * 64 * 96, 9);
        experts.dtype = Dtype::F32;
        experts.bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        model::write(&input.join("model.safetensors"), &[experts]);
        for kind in ["qwen3_vl_moe", "mixtral"] {
            let config = format!(r#"{{"model_type": "{kind}", "num_hidden_layers": 1}}"#);
            fs::write(input.join("config.json"), config).expect("a config");
            let quantize = "quantize experts --dialect modelopt --only *experts*";
            succeeds(folder.path(), &format!("{quantize} --out {kind}-host"));
            succeeds(folder.path(), &format!("{quantize} --out {kind}-kernels {ON}"));
            let [host, kernels] = ["host", "kernels"].map(|on| format!("{kind}-{on}"));
            assert_same(&folder.path().join(host), &folder.path().join(kernels));
        }
    }

    #[test]
    fn methods_of_the_host_are_refused_before_anything_is_written() {
        let folder = tempdir().expect("a folder");
        model::model(folder.path(), "model", SMALL);
        grams(&folder.path().join("grams.safetensors"));
        for method in ["sse-tensor-scale", "admm", "gptq", "gptq-original"] {
            let options = format!("--method {method} --calibration grams.safetensors {ON}");
            let says = ["--device cpu-runtime", method, "runs on the CPU only"];
            fails(folder.path(), &format!("quantize model --out out {options}"), 2, &says);
        }
        assert_eq!(names(folder.path()), ["grams.safetensors", "model"]);
    }

    #[test]
    fn what_is_not_finite_is_named_as_on_the_host() {
        let folder = tempdir().expect("a folder");
        let mut tensors = model::tensors(SMALL);
        for (bits, shown) in [([0xC0, 0x7F], "NaN"), ([0x80, 0xFF], "-inf")] {
            let broken = "model.layers.1.mlp.up_proj.weight";
            let tensor = tensors.iter_mut().find(|tensor| tensor.name == broken).expect("one");
            tensor.bytes[6..8].copy_from_slice(&bits);
            model::write(&folder.path().join("nan.safetensors"), &tensors);
            let says = ["nan.safetensors", broken, "not finite", shown];
            fails(
                folder.path(),
                &format!("quantize nan.safetensors --out out --only *_proj {ON}"),
                2,
                &says,
            );
        }
        assert_eq!(names(folder.path()), ["nan.safetensors"]);
    }
}
