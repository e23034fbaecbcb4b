//! Models of architectures that are not like Llama: what is quantized of them, and how.

mod model;

use std::fs;
use std::path::Path;

use burn_fp4_checkpoints::{Checkpoint, Value};
use model::{Tensor, fails, names, packed_in, run, succeeds, tensor};
use tempfile::tempdir;

/// Makes the folder of a model in one file.
fn folder(parent: &Path, name: &str, config: &str, shapes: &[(&str, &[usize])]) {
    let path = parent.join(name);
    fs::create_dir_all(&path).expect("a folder");
    let tensor = |(at, (name, shape)): (usize, &(&str, &[usize]))| tensor(name, shape, at as u64);
    let tensors: Vec<Tensor> = shapes.iter().enumerate().map(tensor).collect();
    model::write(&path.join("model.safetensors"), &tensors);
    fs::write(path.join("config.json"), config).expect("a config");
}

const GPT2: &str = r#"{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}"#;
const GPT2_LAYER: [(&str, &[usize]); 5] = [
    ("transformer.wte.weight", &[96, 64]),
    ("transformer.h.0.attn.c_attn.weight", &[64, 192]),
    ("transformer.h.0.attn.c_proj.weight", &[64, 64]),
    ("transformer.h.0.mlp.c_fc.weight", &[64, 256]),
    ("transformer.h.0.mlp.c_proj.weight", &[256, 64]),
];

/// Relative errors of the weights that are FP4, by name, in the axes of the parameters.
fn errors(parent: &Path, before: &str, after: &str) -> Vec<(String, f64)> {
    let open = |name| Checkpoint::open(parent.join(name)).expect("a checkpoint");
    let (before, after) = (open(before), open(after));
    let (before, after) = (before.weights().expect("weights"), after.weights().expect("weights"));
    let mut errors = Vec::new();
    for weight in after.iter().filter(|weight| matches!(weight.value, Value::Fp4(_))) {
        let original = before.iter().find(|one| one.name == weight.name).expect("the same name");
        let (found, expected) = (weight.values().expect("floats"), original.values());
        let expected = expected.expect("floats");
        assert_eq!(found.0, expected.0, "{}", weight.name);
        let pairs = || found.1.iter().zip(&expected.1).map(|(a, b)| (f64::from(*a), f64::from(*b)));
        let error: f64 = pairs().map(|(a, b)| (a - b).powi(2)).sum();
        let norm: f64 = pairs().map(|(_, b)| b * b).sum();
        errors.push((weight.name.clone(), (error / norm).sqrt()));
    }
    errors
}

#[test]
fn layers_of_gpt_2_are_quantized_along_their_inputs_and_decoded_in_their_axes() {
    let parent = tempdir().expect("a folder");
    folder(parent.path(), "model", GPT2, &GPT2_LAYER);
    let (code, _, error) = run(parent.path(), "quantize model --out out");
    assert_eq!(code, 0, "{error}");
    let says = "warning: the model stores layers as [inputs, outputs]; they are written as \
                [outputs, inputs], and transformers fills such layers with random values";
    assert!(error.contains(says), "{error}");
    let json = succeeds(parent.path(), "quantize model --dry-run --json");
    let json: serde_json::Value = serde_json::from_str(&json).expect("an object");
    let mut turned = json["warnings"].as_array().expect("a list").iter();
    let turned = turned.find(|warning| warning["kind"] == "turned-layers").expect("a warning");
    assert_eq!(turned["weights"].as_array().map(Vec::len), Some(4));
    // A conversion says it too.
    fs::write(parent.path().join("forced.toml"), "only = [\"*.c_fc\"]\n").expect("a recipe");
    let forced = "quantize model --out forced --dialect modelopt --recipe forced.toml";
    let (_, _, error) = run(parent.path(), forced);
    assert!(error.contains("expect [outputs, inputs]: they read other values"), "{error}");
    let (_, _, error) =
        run(parent.path(), "convert forced --out again --dialect compressed-tensors");
    assert!(error.contains("warning: the model stores layers as [inputs, outputs]"), "{error}");
    let checkpoint = Checkpoint::open(parent.path().join("out")).expect("a checkpoint");
    for (name, inputs, outputs) in [
        ("attn.c_attn", 64, 192),
        ("attn.c_proj", 64, 64),
        ("mlp.c_fc", 64, 256),
        ("mlp.c_proj", 256, 64),
    ] {
        let tensor = checkpoint.container().get(&format!("transformer.h.0.{name}.weight_packed"));
        assert_eq!(tensor.expect("codes").shape[..], [outputs, inputs / 2], "{name}");
    }
    let config = fs::read_to_string(parent.path().join("out/config.json")).expect("a config");
    // `Conv1D` is no class of linear layers.
    assert!(config.contains("\"transformer.h.0.attn.c_attn\""), "{config}");
    let errors = errors(parent.path(), "model", "out");
    assert_eq!(errors.len(), 4);
    for (name, error) in errors {
        assert!((0.05..0.12).contains(&error), "{name}: {error}");
    }
}

#[test]
fn layers_of_gpt_2_stay_where_readers_would_turn_them_again() {
    let parent = tempdir().expect("a folder");
    folder(parent.path(), "model", GPT2, &GPT2_LAYER);
    for dialect in ["modelopt", "mlx"] {
        let says = ["[inputs, outputs]", dialect, "write the dialect compressed-tensors", "--only"];
        let quantize = format!("quantize model --out {dialect} --dialect {dialect}");
        fails(parent.path(), &quantize, 2, &says);
        let (code, _, error) = run(parent.path(), &format!("{quantize} --only *.c_*"));
        assert_eq!(code, 0, "{error}");
        let says = format!("readers of `{dialect}` expect [outputs, inputs]");
        assert!(error.contains(&says), "{error}");
        let errors = errors(parent.path(), "model", dialect);
        assert_eq!(errors.len(), 4, "{dialect}");
        for (name, error) in errors {
            assert!((0.05..0.12).contains(&error), "{dialect}: {name}: {error}");
        }
    }
}

#[test]
fn layers_of_gpt_2_become_floats_where_a_conversion_would_have_them_turned() {
    let parent = tempdir().expect("a folder");
    folder(parent.path(), "model", GPT2, &GPT2_LAYER);
    succeeds(parent.path(), "quantize model --out out");
    for (dialect, to) in [("modelopt", "to-modelopt"), ("mlx", "to-mlx"), ("gguf", "to.gguf")] {
        let said = succeeds(parent.path(), &format!("convert out --out {to} --dialect {dialect}"));
        let says = format!(
            "note: `transformer.h.0.attn.c_attn.weight`: kept as BF16: stored as \
             [inputs, outputs], and readers of `{dialect}` expect [outputs, inputs]\n"
        );
        assert!(said.contains(&says), "{said}");
        assert_eq!(said.matches(": kept as BF16: ").count(), 4, "{said}");
        assert!(!said.contains("known that reads"), "nothing is FP4: {said}");
        let checkpoint = Checkpoint::open(parent.path().join(to)).expect("a checkpoint");
        let tensor = checkpoint.container().get("transformer.h.0.attn.c_attn.weight");
        let tensor = tensor.expect("floats");
        assert_eq!(
            (tensor.dtype.to_string().as_str(), &tensor.shape[..]),
            ("BF16", &[64, 192][..])
        );
    }
    // A copy keeps what was forced.
    succeeds(parent.path(), "quantize model --out forced --dialect modelopt --only *.c_*");
    succeeds(parent.path(), "convert forced --out copy --dialect modelopt");
    assert_eq!(packed_in(&parent.path().join("copy")).len(), 4);
}

#[test]
fn a_tied_output_layer_of_gpt_2_is_ignored() {
    let parent = tempdir().expect("a folder");
    folder(parent.path(), "model", GPT2, &GPT2_LAYER);
    succeeds(parent.path(), "quantize model --out out");
    let config = fs::read_to_string(parent.path().join("out/config.json")).expect("a config");
    let config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    let expected = serde_json::json!(["transformer.wte", "lm_head"]);
    assert_eq!(config["quantization_config"]["ignore"], expected);
}

#[test]
fn query_key_and_value_of_bert_share_a_tensor_scale() {
    let parent = tempdir().expect("a folder");
    let layer = |name: &str| format!("bert.encoder.layer.0.{name}.weight");
    let shapes: Vec<(String, Vec<usize>)> = [
        ("attention.self.query", [64, 64]),
        ("attention.self.key", [64, 64]),
        ("attention.self.value", [64, 64]),
        ("attention.output.dense", [64, 64]),
        ("intermediate.dense", [128, 64]),
    ]
    .map(|(name, shape)| (layer(name), shape.to_vec()))
    .into_iter()
    .chain([
        ("bert.embeddings.word_embeddings.weight".to_owned(), vec![96, 64]),
        ("cls.predictions.decoder.weight".to_owned(), vec![96, 64]),
        ("classifier.weight".to_owned(), vec![32, 64]),
    ])
    .collect();
    let shapes: Vec<_> = shapes.iter().map(|(name, shape)| (name.as_str(), &shape[..])).collect();
    folder(parent.path(), "model", r#"{"model_type": "bert"}"#, &shapes);
    let (_, _, said) = run(parent.path(), "quantize model --out out --dialect modelopt");
    assert!(!said.contains("warning"), "{said}");
    let checkpoint = Checkpoint::open(parent.path().join("out")).expect("a checkpoint");
    let weights = checkpoint.weights().expect("weights");
    let scale = |name: &str| {
        let weight = weights.iter().find(|one| one.name == layer(name)).expect("a weight");
        match &weight.value {
            Value::Fp4(fp4) => fp4.multipliers(),
            Value::Plain(_) | Value::Fp8(_) => panic!("{name} is FP4"),
        }
    };
    assert_eq!(scale("attention.self.query"), scale("attention.self.key"));
    assert_eq!(scale("attention.self.query"), scale("attention.self.value"));
    assert_ne!(scale("attention.self.query"), scale("attention.output.dense"));
    assert_eq!(packed_in(&parent.path().join("out")).len(), 5);
}

#[test]
fn a_convolution_of_three_axes_does_not_stop_the_run() {
    let parent = tempdir().expect("a folder");
    let shapes: [(&str, &[usize]); 3] = [
        ("model.conv1.weight", &[32, 16, 16]),
        ("model.encoder.conv.weight", &[64, 8, 32]),
        ("model.layers.0.fc1.weight", &[64, 64]),
    ];
    folder(parent.path(), "model", r#"{"model_type": "whisper"}"#, &shapes);
    let plan = succeeds(parent.path(), "quantize model --dry-run");
    assert_eq!(plan.matches("a convolution").count(), 2, "{plan}");
    for dialect in ["compressed-tensors", "modelopt", "mlx"] {
        let command = format!("quantize model --out {dialect} --dialect {dialect}");
        succeeds(parent.path(), &command);
        let packed = packed_in(&parent.path().join(dialect));
        assert_eq!(packed.keys().collect::<Vec<_>>(), ["model.layers.0.fc1.weight"], "{dialect}");
    }
}

#[test]
fn a_stack_that_a_dialect_cannot_hold_is_a_row_of_the_plan_and_an_error_that_says_keep() {
    let parent = tempdir().expect("a folder");
    let shapes: [(&str, &[usize]); 3] = [
        ("model.layers.0.mlp.experts.down_proj", &[4, 64, 64]),
        ("model.layers.1.mlp.experts.down_proj", &[4, 64, 64]),
        ("model.layers.0.self_attn.o_proj.weight", &[64, 64]),
    ];
    folder(parent.path(), "model", r#"{"model_type": "gpt_oss"}"#, &shapes);
    let keep = "--keep 'model.layers.*.mlp.experts.down_proj'";
    let other = "--dialect modelopt";
    let says = ["model.layers.0.mlp.experts.down_proj`", "compressed-tensors", keep, other];
    fails(parent.path(), "quantize model --out out", 2, &says);
    let (code, plan, error) = run(parent.path(), "quantize model --dry-run");
    assert!(code == 2 && error.contains(keep), "{error}");
    let row = plan.lines().find(|line| line.contains("model.layers.{0..1}.mlp.experts.down_proj"));
    let row = row.unwrap_or_else(|| panic!("{plan}"));
    assert!(row.contains("2 x [4, 64, 64]") && row.contains("cannot hold"), "{row}");
    assert!(plan.contains("1 of 3 weights quantized"), "{plan}");
    let pattern = "model.layers.*.mlp.experts.down_proj";
    succeeds(parent.path(), &format!("quantize model --out out --keep {pattern}"));
    // Its readers have the axes of stacked matrices as the file has them.
    let (code, _, said) = run(parent.path(), "quantize model --out stacked --dialect modelopt");
    assert!(code == 0 && !said.contains("warning"), "{said}");
    assert_eq!(packed_in(&parent.path().join("stacked")).len(), 3);
}

#[test]
fn an_unknown_architecture_is_a_warning_with_the_plan_and_in_json() {
    let parent = tempdir().expect("a folder");
    let names: Vec<String> =
        (0..12).map(|layer| format!("layers.{layer}.mlp.down_proj.weight")).collect();
    let shapes: Vec<_> = names.iter().map(|name| (name.as_str(), &[64, 64][..])).collect();
    folder(parent.path(), "model", r#"{"model_type": "unheard_of"}"#, &shapes);
    let warning = "warning: model_type `unheard_of`: the architecture is not known";
    let row = "layers.{0..11}.mlp.down_proj";
    let (code, out, said) = run(parent.path(), "quantize model --out out");
    assert!(code == 0 && said.contains(warning) && said.contains(row), "{said}");
    assert!(said.contains("12 x [64, 64]") && !out.contains(row), "{said}{out}");
    let (code, plan, said) = run(parent.path(), "quantize model --dry-run");
    assert!(code == 0 && said.contains(warning) && !said.contains(row), "{said}");
    assert!(plan.contains(row), "{plan}");
    let all = succeeds(parent.path(), "quantize model --dry-run --all");
    let rows: Vec<_> = all.lines().filter(|line| line.contains("down_proj")).collect();
    assert_eq!(rows.len(), 12, "{all}");
    assert!(rows[2].starts_with("layers.2.") && rows[10].starts_with("layers.10."), "{all}");
    let json = succeeds(parent.path(), "quantize model --dry-run --json");
    let json: serde_json::Value = serde_json::from_str(&json).expect("an object");
    let kind = &json["warnings"][0]["kind"];
    assert!(kind == "unknown-architecture" && json["warnings"].as_array().map(Vec::len) == Some(1));
    assert_eq!(json["warnings"][0]["weights"], serde_json::json!([]));
    assert_eq!(json["weights"][2]["name"], "layers.2.mlp.down_proj.weight");
    fs::remove_file(parent.path().join("model/config.json")).expect("a config");
    let (_, _, said) = run(parent.path(), "quantize model/model.safetensors --dry-run");
    assert!(said.contains("warning: no model_type in a config.json"), "{said}");
    // Who says which weights needs no warning.
    let (_, _, said) =
        run(parent.path(), "quantize model/model.safetensors --dry-run --only *.mlp.*");
    assert!(!said.contains("warning"), "{said}");
    assert_eq!(self::names(parent.path()), ["model", "out"]);
}

#[test]
fn the_output_layer_of_gpt_neox_is_ignored_by_its_name_in_transformers_too() {
    let parent = tempdir().expect("a folder");
    let shapes: [(&str, &[usize]); 2] = [
        ("gpt_neox.layers.0.mlp.dense_h_to_4h.weight", &[64, 64]),
        ("embed_out.weight", &[96, 64]),
    ];
    folder(parent.path(), "model", r#"{"model_type": "gpt_neox"}"#, &shapes);
    succeeds(parent.path(), "quantize model --out out");
    let config = fs::read_to_string(parent.path().join("out/config.json")).expect("a config");
    for name in ["embed_out", "lm_head"] {
        assert!(config.contains(&format!("\"{name}\"")), "{name}: {config}");
    }
}

#[test]
fn architectures_that_transformers_loads_in_another_way_or_not_at_all_are_noted() {
    let parent = tempdir().expect("a folder");
    for (kind, layer, says) in [
        ("llama", "model.layers.0.mlp.up_proj.weight", None),
        (
            "t5",
            "encoder.block.0.layer.1.DenseReluDense.wi.weight",
            Some("CompressedTensorsConfig(run_compressed=False)"),
        ),
        (
            "mixtral",
            "model.layers.0.block_sparse_moe.experts.0.w2.weight",
            Some("transformers stacks the experts of `mixtral`"),
        ),
    ] {
        let config = format!(r#"{{"model_type": "{kind}", "dtype": "bfloat16"}}"#);
        folder(parent.path(), kind, &config, &[(layer, &[64, 64])]);
        succeeds(
            parent.path(),
            &format!("quantize {kind} --dialect modelopt --out {kind}-modelopt"),
        );
        for command in [
            format!("quantize {kind} --out {kind}-out"),
            format!("convert {kind}-modelopt --dialect compressed-tensors --out {kind}-converted"),
        ] {
            let (code, text, notes) = run(parent.path(), &command);
            let said = text + &notes.split_whitespace().collect::<Vec<_>>().join(" ");
            assert_eq!(code, 0, "{kind}: {said}");
            match says {
                Some(says) => assert!(said.contains(says), "{command} {kind}: {said}"),
                None => assert!(!said.contains("transformers"), "{command} {kind}: {said}"),
            }
        }
    }
}
