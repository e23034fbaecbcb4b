//! Configs say only what the programs named as readers accept.

use std::fs;

use burn_fp4_checkpoints::dialect::{Program, writer};
use burn_fp4_checkpoints::{Checkpoint, Dtype, Model, Numbers, TensorScale, Value, WriteOptions};
use burn_fp4_formats::Fp4Format;

use super::folder;
use super::models::{mixed, model};

/// `LINEAR_ALGOS` in `vllm/model_executor/layers/quantization/modelopt.py` of vLLM 0.33.0.
const VLLM: [&str; 6] =
    ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8"];
/// `from_config` in `sglang/srt/layers/quantization/modelopt_quant.py` of SGLang 0.5.23.
const SGLANG: [&str; 4] = ["FP8", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"];
/// The members of `QuantAlgo` of TensorRT-LLM with a linear layer (`get_quant_method` in
/// `tensorrt_llm/_torch/modules/linear.py`) that are FP4.
const TENSOR_RT_LLM: [&str; 5] =
    ["NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8", "W4A8_MXFP4_MXFP8"];

/// A model as the dialect holds it.
fn written(name: &str, source: &Model<'_>) -> Checkpoint {
    let path = folder(&format!("readers-{name}")).join("out");
    source.write(&path, "modelopt", &WriteOptions::default()).expect("written");
    Checkpoint::open(&path).expect("a checkpoint")
}

/// `quant_algo` of both configs, and of every layer that they name.
fn algorithms(checkpoint: &Checkpoint) -> Vec<String> {
    let container = checkpoint.container();
    let export = container.quant_config().and_then(|export| export.get("quantization"));
    let mut found = Vec::new();
    for config in [container.quantization(), export] {
        let config = config.expect("a config");
        let of = |json: &serde_json::Value| {
            json["quant_algo"].as_str().expect("an algorithm").to_owned()
        };
        found.push(of(config));
        let layers = config["quantized_layers"].as_object().into_iter().flatten();
        found.extend(layers.map(|(_, layer)| of(layer)));
    }
    found
}

#[test]
fn every_reader_of_modelopt_accepts_the_algorithm_that_is_written() {
    let accepted = |program| match program {
        Program::Vllm => &VLLM[..],
        Program::SgLang => &SGLANG,
        Program::TensorRtLlm => &TENSOR_RT_LLM,
        program => panic!("{program:?} reads no such file"),
    };
    let (_, modelopt) = writer("modelopt").expect("a writer");
    for format in Fp4Format::ALL {
        for input in [None, Some(0.5)] {
            let name = format!("{format}-{}", input.is_some());
            let checkpoint = written(&name, &model(format, [0.25, 0.25], input));
            let algorithms = algorithms(&checkpoint);
            assert!(!modelopt.readers(format).is_empty() && algorithms.len() == 2);
            for reader in modelopt.readers(format) {
                let accepts = accepted(reader.program);
                for algorithm in &algorithms {
                    assert!(accepts.contains(&&**algorithm), "{reader:?}: {algorithm}");
                }
            }
        }
    }
}

/// TensorRT-LLM alone: vLLM and SGLang know no MXFP4 with NVFP4 here.
#[test]
fn tensorrt_llm_accepts_every_fp4_layer_of_a_mixed_model() {
    let algorithms = algorithms(&written("mixed", &mixed()));
    assert_eq!(algorithms.iter().filter(|name| *name == "MIXED_PRECISION").count(), 2);
    let fp4: Vec<_> = algorithms.iter().filter(|name| name.contains("FP4")).collect();
    assert!(fp4.iter().any(|name| name.contains("MXFP4")), "{fp4:?}");
    assert!(fp4.iter().all(|name| TENSOR_RT_LLM.contains(&&***name)), "{fp4:?}");
}

/// `_from_config` of its class for NVFP4.
#[test]
fn the_export_of_modelopt_has_the_fields_that_vllm_asks_for() {
    let checkpoint = written("fields", &model(Fp4Format::NvFp4, [0.25, 0.25], None));
    let export = checkpoint.container().quant_config().expect("an export");
    for field in ["group_size", "kv_cache_quant_algo", "exclude_modules"] {
        assert!(export["quantization"].get(field).is_some(), "{field}");
    }
}

#[test]
fn a_file_of_modelopt_that_says_mxfp4_is_read_as_before() {
    let source = model(Fp4Format::MxFp4, [1.0, 1.0], None);
    let now = written("now", &source);
    let path = folder("readers-mxfp4").join("before");
    source.write(&path, "modelopt", &WriteOptions::default()).expect("written");
    for name in ["config.json", "hf_quant_config.json"] {
        let text = fs::read_to_string(path.join(name)).expect("a config");
        let before = text.replace("W4A8_MXFP4_FP8", "mxfp4");
        assert_ne!(text, before);
        fs::write(path.join(name), before).expect("a config");
    }
    let before = Checkpoint::open(&path).expect("a checkpoint");
    let values = |checkpoint: &Checkpoint| -> Vec<_> {
        let weights = checkpoint.weights().expect("weights");
        weights.iter().map(|weight| weight.values().expect("values").1).collect()
    };
    assert_eq!(values(&before), values(&now));
}

#[test]
fn inputs_that_modelopt_rounds_with_mxfp4_are_counted_where_nothing_rounds_them() {
    let now = written("inputs", &model(Fp4Format::MxFp4, [1.0, 1.0], None));
    let path = folder("readers-rounding").join("out");
    let report = now
        .model()
        .and_then(|model| model.write(&path, "compressed-tensors", &WriteOptions::default()))
        .expect("written");
    assert_eq!(report.dynamic_inputs_left_out, 2);
}

/// vLLM and SGLang register a scale of the inputs for `FP8`, with the least f32 in it, and none for
/// rows and blocks, whose inputs they quantize as layers run.
#[test]
fn fp8_has_the_input_scales_that_readers_of_modelopt_load_and_no_others() {
    let mut source = mixed();
    let scale = || Some(TensorScale::Multiplier(Numbers::new(&[0.25])));
    for weight in &mut source.weights {
        if matches!(weight.value, Value::Fp8(_)) {
            weight.input_scale = scale();
        }
    }
    let path = folder("readers-input-scales").join("out");
    let report = source.write(&path, "modelopt", &WriteOptions::default()).expect("written");
    assert_eq!(report.input_scales_left_out, 3);
    let read = Checkpoint::open(&path).expect("a checkpoint");
    let weights = read.weights().expect("weights");
    let scaled = weights
        .iter()
        .filter(|weight| matches!(weight.value, Value::Fp8(_)) && weight.input_scale.is_some());
    assert_eq!(scaled.map(|weight| weight.name.as_str()).collect::<Vec<_>>(), ["a.tensor.weight"]);
    source.weights.iter_mut().for_each(|weight| weight.input_scale = None);
    let path = folder("readers-no-input-scales").join("out");
    let error = source.write(&path, "modelopt", &WriteOptions::default()).expect_err("refused");
    let says = "`a.tensor.weight`: the dialect `modelopt` cannot hold FP8 weights with one scale \
                and none for their inputs; decode them";
    assert_eq!(error.to_string(), says);
    let decode = WriteOptions { decode_fp8: Some(Dtype::BF16), ..WriteOptions::default() };
    source.write(&path, "modelopt", &decode).expect("decoded");
    // Their readers multiply such weights by inputs of 16 bits.
    let path = folder("readers-of-other-configs").join("out");
    source.write(&path, "compressed-tensors", &WriteOptions::default()).expect("written");
}

/// `ModelOptFp8PbWoLinearMethod` of vLLM, and ModelOpt's own files.
#[test]
fn scales_of_fp8_in_blocks_have_the_four_axes_that_readers_of_modelopt_register() {
    let source = mixed();
    let checkpoint = written("four-axes", &source);
    let scales = checkpoint.container().get("a.block.weight_scale").expect("scales");
    assert_eq!(scales.shape[..], [2, 1, 2, 1]);
    let read = checkpoint.weights().expect("weights");
    for weight in source.weights.iter().filter(|weight| weight.name.starts_with("a.")) {
        let found = read.iter().find(|found| found.name == weight.name).expect("the weight");
        assert_eq!(found.values().expect("floats"), weight.values().expect("floats"));
    }
}
