//! Warnings about results that are written without an error and are not what a user expects.

mod model;

use std::fs;
use std::path::Path;

use model::{SMALL, fails, run, succeeds};
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::tempdir;

/// A tensor of f32.
fn floats(name: &str, shape: &[usize], values: &[f32]) -> model::Tensor {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    model::Tensor { name: name.to_owned(), dtype: Dtype::F32, shape: shape.to_vec(), bytes }
}

/// Runs a command that prints JSON; the object, and what it says on stderr.
fn in_json(folder: &Path, command: &str) -> (serde_json::Value, String) {
    let (code, text, said) = run(folder, &format!("{command} --json"));
    assert_eq!(code, 0, "fp4 {command}: {said}");
    (serde_json::from_str(&text).expect("an object"), said)
}

/// The warnings of a kind.
fn of_kind<'r>(report: &'r serde_json::Value, kind: &str) -> Vec<&'r serde_json::Value> {
    let warnings = report["warnings"].as_array().expect("a list");
    warnings.iter().filter(|warning| warning["kind"] == kind).collect()
}

#[test]
fn blocks_that_one_large_value_makes_zero_are_warned_of_and_no_reciprocal_is_blamed() {
    const NAME: &str = "layers.0.o_proj.weight";
    let folder = tempdir().expect("a folder");
    let mut values = model::values(32 * 64, 5);
    // Zeros of the source are not lost.
    values[64..128].fill(0.0);
    values[0] = 1e6;
    model::write(&folder.path().join("m.safetensors"), &[floats(NAME, &[32, 64], &values)]);
    let (report, said) = in_json(folder.path(), "quantize m.safetensors --out out");
    let says = format!(
        "`{NAME}`: 96.09 % of its blocks become zero: next to its largest value they are below \
         the range of NVFP4; pass --keep '{NAME}' to `fp4 quantize` to keep it, or --format \
         mxfp4, in which the mean error of its blocks is "
    );
    assert!(said.contains(&format!("warning: {says}")), "{said}");
    let zeroed = of_kind(&report, "zeroed-blocks");
    assert!(zeroed.len() == 1 && zeroed[0]["weights"] == json!([NAME]), "{report}");
    assert!(zeroed[0]["text"].as_str().is_some_and(|text| text.starts_with(&says)), "{report}");
    // 123 of 128: all but the first and four of zeros.
    assert_eq!(report["errors"]["weights"][0]["zeroed_blocks_percent"], 96.09375);
    assert!(report["errors"]["mean_percent"].as_f64().expect("a number") < 1.0, "{report}");
    let found = succeeds(folder.path(), "inspect out");
    let says = "127 of 128 blocks are zero and 0 have one of the smallest scales, next to a \
                largest value of 1.000e6: unless the source has them, one value is too large";
    assert!(found.contains(says) && !found.contains("reciprocal"), "{found}");
    // Blocks of MXFP4 have no tensor scale.
    let mxfp4 = "quantize m.safetensors --out mxfp4 --format mxfp4";
    let (report, said) = in_json(folder.path(), mxfp4);
    assert!(!said.contains("become zero"), "{said}");
    assert!(of_kind(&report, "zeroed-blocks").is_empty());
    assert!(report["errors"]["weights"][0].get("zeroed_blocks_percent").is_none(), "{report}");
    let found = succeeds(folder.path(), "inspect mxfp4");
    assert!(!found.contains("blocks are zero"), "{found}");
    // A usual weight loses none.
    values[0] = 0.1;
    model::write(&folder.path().join("m.safetensors"), &[floats(NAME, &[32, 64], &values)]);
    let (report, said) = in_json(folder.path(), "quantize m.safetensors --out usual");
    assert_eq!(report["errors"]["weights"][0]["zeroed_blocks_percent"], 0.0);
    assert!(!said.contains("become zero"), "{said}");
}

/// Blocks along columns lie apart in memory.
#[test]
fn blocks_that_became_zero_are_counted_along_the_inputs_of_a_layer() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("gpt2");
    fs::create_dir(&path).expect("a folder");
    fs::write(path.join("config.json"), r#"{"model_type": "gpt2"}"#).expect("a config");
    // [inputs, outputs]: the first output has a large value and a block of zeros.
    let mut values = model::values(64 * 32, 5);
    values[0] = 1e6;
    (48..64).for_each(|input| values[32 * input] = 0.0);
    let name = "h.0.mlp.c_fc.weight";
    model::write(&path.join("model.safetensors"), &[floats(name, &[64, 32], &values)]);
    let (report, _) = in_json(folder.path(), "quantize gpt2 --out out");
    // 126 of 128.
    assert_eq!(report["errors"]["weights"][0]["zeroed_blocks_percent"], 98.4375);
}

#[test]
fn an_embedding_in_fp4_is_warned_of_where_readers_do_not_load_it() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let only = "quantize model --only *.embed_tokens --only *.o_proj --out";
    let says = "`model.embed_tokens.weight`: an embedding by its name, and readers of \
                `compressed-tensors` (vLLM, SGLang, transformers) have FP4 for linear layers alone";
    let (report, said) = in_json(folder.path(), &format!("{only} out"));
    assert!(said.contains(&format!("warning: {says}")), "{said}");
    let weights = &of_kind(&report, "embedding")[0]["weights"];
    assert_eq!(*weights, json!(["model.embed_tokens.weight"]));
    let found = succeeds(folder.path(), "inspect out");
    assert!(found.contains(&format!("warning: {says}")), "{found}");
    // llama.cpp has embeddings in FP4.
    let (_, _, said) = run(folder.path(), &format!("{only} out.gguf"));
    assert!(!said.contains("embedding"), "{said}");
    let said = run(folder.path(), "convert out.gguf --out modelopt --dialect modelopt").2;
    assert!(said.contains("readers of `modelopt` (vLLM, SGLang, "), "{said}");
    let options = "--dialect compressed-tensors --keep *.embed_tokens --decode-fp4 bf16";
    let said = run(folder.path(), &format!("convert out.gguf --out kept {options}")).2;
    assert!(said.contains("an embedding"), "{said}");
    let options = "--dialect compressed-tensors --decode-fp4 bf16";
    let (code, _, said) = run(folder.path(), &format!("convert out --out plain {options}"));
    assert!(code == 0 && !said.contains("an embedding"), "{said}");
}

#[test]
fn layers_that_a_recipe_takes_apart_are_warned_of_once_with_the_engines() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    fs::write(folder.path().join("apart.toml"), "together = false\n").expect("a recipe");
    let plan = "quantize model --dry-run --recipe apart.toml";
    let said = run(folder.path(), plan).2;
    let says = "warning: `model.layers.0.self_attn.k_proj.weight` and 1 other: `q_proj` has \
                another tensor scale: engines that run both as one (vLLM, SGLang) scale one of \
                them again, which changes its values\n";
    assert!(said.contains(says), "{said}");
    assert_eq!(said.matches("another tensor scale").count(), 2, "{said}");
    let (report, _) = in_json(folder.path(), plan);
    let unlike = of_kind(&report, "unlike-scales");
    let weights = ["0", "1"].map(|at| format!("model.layers.{at}.self_attn.k_proj.weight"));
    assert!(unlike.len() == 2 && unlike[1]["weights"] == json!(weights), "{unlike:?}");
    // What one of them is kept for, others are refused for.
    let said = run(folder.path(), &format!("{plan} --dialect modelopt --keep *.up_proj")).2;
    let says = "mlp.gate_proj.weight` and 1 other: `up_proj` is quantized otherwise: engines that \
                run both as one (vLLM, SGLang, TensorRT-LLM) need one format";
    assert!(said.contains(says), "{said}");
    for options in ["--dialect gguf", "--format mxfp4"] {
        let said = run(folder.path(), &format!("{plan} {options}")).2;
        assert!(!said.contains("warning"), "{options}: {said}");
    }
    let said = run(folder.path(), "quantize model --dry-run").2;
    assert!(!said.contains("warning"), "{said}");
}

/// Statistics of a layer that no token reached.
#[test]
fn statistics_that_are_all_zero_are_said_with_the_method_that_was_used() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let tensors = model::tensors(SMALL);
    let identity = |name: &str, cols: usize, seen: bool| {
        let at = |i: usize| if seen && i.is_multiple_of(cols + 1) { 1.0 } else { 0.0 };
        floats(name, &[cols, cols], &(0..cols * cols).map(at).collect::<Vec<_>>())
    };
    let layers = || tensors.iter().filter(|tensor| tensor.name.contains("_proj"));
    let write = |path: &str, seen: &dyn Fn(&str) -> bool| {
        let all = layers().map(|one| identity(&one.name, one.shape[1], seen(&one.name)));
        model::write(&folder.path().join(path), &all.collect::<Vec<_>>());
    };
    write("zeros.safetensors", &|_| false);
    succeeds(folder.path(), "quantize model --out sse --method sse");
    for method in ["gptq", "hessian", "sse-weighted"] {
        let options = format!("--method {method} --calibration zeros.safetensors");
        let (report, said) =
            in_json(folder.path(), &format!("quantize model --out {method} {options}"));
        let says = "warning: `model.layers.0.mlp.down_proj.weight`: quantized by `sse`: its \
                    statistics are all zero (and 13 more weights); calibrate with more text, or ";
        assert!(said.contains(says), "{said}");
        let rows = report["weights"].as_array().expect("rows");
        let row = rows.iter().find(|row| row["name"] == "model.layers.1.mlp.up_proj.weight");
        let row = row.expect("a row");
        assert_eq!(row["method"], "sse");
        let note = row["note"].as_str().expect("a note");
        assert!(note.ends_with("; quantized by `sse`: its statistics are all zero"), "{note}");
        let unseen = of_kind(&report, "unseen-inputs");
        assert_eq!(unseen[0]["weights"].as_array().map(Vec::len), Some(14));
        assert!(unseen[0]["text"].as_str().is_some_and(|text| said.contains(text)), "{said}");
        assert_eq!(model::packed_in(&folder.path().join(method)).len(), 14);
        let [found, expected] =
            [method, "sse"].map(|out| model::packed_in(&folder.path().join(out)));
        assert!(found == expected, "{method}");
    }
    let (_, said, _) = run(
        folder.path(),
        "quantize model --out text --method gptq --calibration zeros.safetensors",
    );
    assert!(said.contains("14 of 19 weights quantized (nvfp4 in blocks of 16, sse"), "{said}");
    // Only one of them.
    write("one.safetensors", &|name| !name.contains("0.self_attn.o_proj"));
    let options = "--method gptq --calibration one.safetensors";
    let (code, text, said) = run(folder.path(), &format!("quantize model --out one {options}"));
    assert!(code == 0 && said.contains("0.self_attn.o_proj.weight`: quantized by `sse`"), "{said}");
    assert!(!said.contains("more weight"), "{said}");
    assert!(
        text.contains("(13 nvfp4 in blocks of 16, gptq; 1 nvfp4 in blocks of 16, sse"),
        "{text}"
    );
    // Nothing is measured by them.
    let (report, said) =
        in_json(folder.path(), "quantize model --out measured --calibration zeros.safetensors");
    assert!(!said.contains("warning"), "{said}");
    assert!(report["errors"].get("mean_output_percent").is_none(), "{report}");
}

#[test]
fn experts_that_saw_no_token_are_counted() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("model");
    fs::create_dir(&path).expect("a folder");
    let config = r#"{"model_type": "mixtral", "num_hidden_layers": 1}"#;
    fs::write(path.join("config.json"), config).expect("a config");
    let name = "model.layers.0.mlp.experts.down_proj";
    model::write(&path.join("model.safetensors"), &[model::tensor(name, &[3, 32, 64], 2)]);
    let gram = |i: usize| if i < 4096 && i.is_multiple_of(65) { 1.0 } else { 0.0 };
    let grams: Vec<f32> = (0..3 * 4096).map(gram).collect();
    model::write(&folder.path().join("g.safetensors"), &[floats(name, &[3, 64, 64], &grams)]);
    let options = "--only *experts* --dialect modelopt --method gptq --calibration g.safetensors";
    let (report, said) = in_json(folder.path(), &format!("quantize model --out out {options}"));
    let note = "2 of its 3 matrices quantized by `sse`: their statistics are all zero";
    assert!(said.contains(&format!("warning: `{name}`: {note}; calibrate")), "{said}");
    let row = &report["weights"][0];
    assert!(row["method"].as_str().is_none_or(|method| method.starts_with("gptq")), "{row}");
    assert!(row["note"].as_str().expect("a note").ends_with(note), "{row}");
}

#[test]
fn an_empty_pattern_is_refused_as_such() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    for option in ["--keep", "--only"] {
        let output = model::fp4()
            .current_dir(folder.path())
            .args(["quantize", "model", "--dry-run", option, ""])
            .output()
            .expect("it runs");
        let error = String::from_utf8_lossy(&output.stderr);
        let says = "error: pattern ``: it is empty and matches nothing; write a name, or remove it";
        assert!(output.status.code() == Some(2) && error.contains(says), "{error}");
    }
    fs::write(folder.path().join("r.toml"), "keep = [\"\"]\n").expect("a recipe");
    let says = ["r.toml: line 1: pattern ``: it is empty"];
    fails(folder.path(), "quantize model --dry-run --recipe r.toml", 2, &says);
}

#[test]
fn the_path_of_statistics_in_a_recipe_starts_at_the_recipe() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let path = folder.path().join("recipes");
    fs::create_dir(&path).expect("a folder");
    let moments = |tensor: &model::Tensor| {
        floats(&tensor.name, &[tensor.shape[1]], &vec![1.0; tensor.shape[1]])
    };
    let tensors = model::tensors(SMALL);
    let layers = tensors.iter().filter(|tensor| tensor.name.contains("_proj"));
    model::write(&path.join("m.safetensors"), &layers.map(moments).collect::<Vec<_>>());
    let recipe = "method = \"sse-weighted\"\ncalibration = \"m.safetensors\"\n";
    fs::write(path.join("r.toml"), recipe).expect("a recipe");
    succeeds(folder.path(), "quantize model --out out --recipe recipes/r.toml");
    succeeds(&path, "quantize ../model --out out --recipe r.toml");
    let absolute = path.join("m.safetensors").display().to_string();
    let recipe = format!("method = \"sse-weighted\"\ncalibration = '{absolute}'\n");
    fs::write(folder.path().join("r.toml"), recipe).expect("a recipe");
    succeeds(folder.path(), "quantize model --out absolute --recipe r.toml");
    // The command line is relative to where it runs.
    let options = "--recipe recipes/r.toml --calibration m.safetensors";
    let command = format!("quantize model --out none {options}");
    fails(folder.path(), &command, 2, &["m.safetensors: No such file"]);
}

#[test]
fn bytes_in_json_are_those_of_the_files() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let of = |path: &str| -> u64 {
        let files = model::bytes(&folder.path().join(path));
        let weights =
            files.iter().filter(|(name, _)| name.is_empty() || name.ends_with(".safetensors"));
        weights.map(|(_, bytes)| bytes.len() as u64).sum()
    };
    let (report, _) = in_json(folder.path(), "quantize model --out out");
    assert_eq!(report["bytes_before"], of("model"));
    assert_eq!(report["bytes_after"], of("out"));
    for (out, options) in [("mx", "--dialect modelopt --format mxfp4"), ("out.gguf", "")] {
        let (report, _) = in_json(folder.path(), &format!("convert out --out {out} {options}"));
        assert_eq!(report["bytes"], of(out), "{out}");
        let tensors = report["tensor_bytes"].as_u64().expect("a number");
        assert!(tensors > 0 && tensors < of(out), "{out}: {tensors}");
    }
}

/// A layer whose values have a deviation of 0.02.
fn layer(name: &str, seed: u64) -> model::Tensor {
    let values: Vec<f32> = model::values(32 * 64, seed).iter().map(|value| 0.7 * value).collect();
    floats(name, &[32, 64], &values)
}

/// The first value of a tensor of f32 is another one.
fn with_first(mut tensor: model::Tensor, value: f32) -> model::Tensor {
    tensor.bytes[..4].copy_from_slice(&value.to_le_bytes());
    tensor
}

#[test]
fn an_error_that_one_large_value_hides_is_warned_of_by_the_error_of_blocks() {
    const NAME: &str = "layers.0.o_proj.weight";
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("m.safetensors");
    model::write(&path, &[with_first(layer(NAME, 5), 3e4)]);
    let (found, said) = in_json(folder.path(), "quantize m.safetensors --out out");
    let error = &found["errors"]["weights"][0];
    let of = |key: &str| error[key].as_f64().expect("a number");
    assert!(of("error_percent") < 0.1 && of("block_error_percent") > 12.0, "{error}");
    assert!(of("small_blocks_percent") > 90.0 && of("zeroed_blocks_percent") < 1.0, "{error}");
    let hidden = of_kind(&found, "hidden-error");
    let text = hidden[0]["text"].as_str().expect("a text");
    assert!(hidden.len() == 1 && hidden[0]["weights"] == json!([NAME]), "{found}");
    assert!(text.contains("is that of its largest values; the mean error of its blocks is"));
    let (_, advised) = text
        .split_once(", or --format mxfp4, in which the mean error of its blocks is ")
        .unwrap_or_else(|| panic!("{text}"));
    assert!(said.contains(text), "{said}");
    // The advice is what MXFP4 leaves.
    let (found, _) = in_json(folder.path(), "quantize m.safetensors --out mx --format mxfp4");
    let of_mxfp4 = found["errors"]["weights"][0]["block_error_percent"].as_f64().expect("a number");
    let advised: f64 = advised.strip_suffix(" %").and_then(|n| n.parse().ok()).expect("a number");
    // The advice is about blocks of 16; the run's are of 32, whose mean is a little smaller.
    assert!((advised - of_mxfp4).abs() < 1.0, "{advised}, {of_mxfp4}");
    // The advice helps, and a usual weight needs none: its blocks have the error of the whole.
    for (tensor, options) in
        [(with_first(layer(NAME, 5), 3e4), "--format mxfp4"), (layer(NAME, 5), "")]
    {
        model::write(&path, &[tensor]);
        let _ = fs::remove_dir_all(folder.path().join("other"));
        let command = format!("quantize m.safetensors --out other {options}");
        let (found, said) = in_json(folder.path(), &command);
        assert!(of_kind(&found, "hidden-error").is_empty(), "{said}");
        let error = &found["errors"]["weights"][0];
        let of_blocks = error["block_error_percent"].as_f64().expect("a number");
        assert!((7.0..13.0).contains(&of_blocks), "{error}");
    }
}

#[test]
fn a_neighbor_whose_values_cost_a_weight_its_precision_is_named() {
    let folder = tempdir().expect("a folder");
    let names = ["gate_proj", "up_proj"].map(|name| format!("layers.0.mlp.{name}.weight"));
    let other = layer("layers.1.o_proj.weight", 7);
    let tensors = [with_first(layer(&names[0], 5), 3e4), layer(&names[1], 6), other];
    model::write(&folder.path().join("m.safetensors"), &tensors);
    let (found, _) = in_json(folder.path(), "quantize m.safetensors --out out");
    let of_up = found["warnings"].as_array().expect("a list").iter();
    let of_up: Vec<_> = of_up.filter(|one| one["weights"] == json!([names[1]])).collect();
    assert_eq!(of_up.len(), 1, "{found}");
    let text = of_up[0]["text"].as_str().expect("a text");
    let says = format!("it shares its tensor scale with `{}`, whose largest value is", names[0]);
    assert!(text.contains(&says), "{text}");
    let says = format!("set `together = false` in a recipe, or pass --keep '{}'", names[0]);
    assert!(text.ends_with(&says), "{text}");
    // Both remedies are ones.
    fs::write(folder.path().join("apart.toml"), "together = false\n").expect("a recipe");
    for options in ["--recipe apart.toml".to_owned(), format!("--keep {}", names[0])] {
        let command = format!("quantize m.safetensors --dry-run {options}");
        succeeds(folder.path(), &command);
    }
    let command = "quantize m.safetensors --out apart --recipe apart.toml";
    let (found, _) = in_json(folder.path(), command);
    let error = found["errors"]["weights"][1]["block_error_percent"].as_f64();
    assert!(error.is_some_and(|error| error < 13.0), "{found}");
}

#[test]
fn weights_of_zeros_are_warned_of() {
    const NAME: &str = "layers.0.o_proj.weight";
    let folder = tempdir().expect("a folder");
    let zeros = floats(NAME, &[32, 64], &[0.0; 32 * 64]);
    model::write(
        &folder.path().join("m.safetensors"),
        &[zeros, layer("layers.1.o_proj.weight", 1)],
    );
    let expected = json!({
        "kind": "all-zero",
        "weights": [NAME],
        "text": format!("`{NAME}`: all of its values are zero, and stay zero in FP4"),
    });
    for command in ["inspect m.safetensors", "quantize m.safetensors --out out", "inspect out"] {
        let (found, _) = in_json(folder.path(), command);
        assert_eq!(of_kind(&found, "all-zero"), [&expected], "{command}");
    }
    // Small values are no reciprocals of large ones.
    let tiny: Vec<f32> = model::values(32 * 64, 1).iter().map(|value| value * 1e-29).collect();
    model::write(&folder.path().join("tiny.safetensors"), &[floats(NAME, &[32, 64], &tiny)]);
    for command in [
        "inspect tiny.safetensors",
        "quantize tiny.safetensors --out tiny --dialect modelopt",
        "inspect tiny",
    ] {
        let (found, _) = in_json(folder.path(), command);
        assert!(of_kind(&found, "reciprocal-scale").is_empty(), "{found}");
        let text = of_kind(&found, "tiny-values")[0]["text"].as_str().expect("a text");
        assert!(text.ends_with("no trained weight is as small"), "{command}: {text}");
    }
}

/// The kinds and the texts of the warnings about weights.
fn about_weights(report: &serde_json::Value) -> Vec<(String, String)> {
    let warnings = report["warnings"].as_array().expect("a list").iter();
    let about = warnings.filter(|one| !one["weights"].as_array().expect("a list").is_empty());
    let text = |value: &serde_json::Value| value.as_str().expect("a text").to_owned();
    about.map(|one| (text(&one["kind"]), text(&one["text"]))).collect()
}

#[test]
fn inspection_warns_before_a_run_as_the_run_does_after_it() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("m.safetensors");
    let pair = ["gate_proj", "up_proj"].map(|name| format!("layers.0.mlp.{name}.weight"));
    let scaled = |name: &str, factor: f32| {
        let values: Vec<f32> = model::values(32 * 64, 3).iter().map(|v| factor * v).collect();
        floats(name, &[32, 64], &values)
    };
    let single = "layers.1.o_proj.weight";
    let zeroed = with_first(layer(single, 5), 1e6);
    let cases: [(&str, Vec<model::Tensor>, &[&str]); 7] = [
        ("usual", vec![layer(single, 5)], &[]),
        (
            "one large value",
            vec![with_first(layer(single, 5), 3e4)],
            &["hidden-error", "large-value"],
        ),
        ("a larger one", vec![zeroed], &["zeroed-blocks", "large-value"]),
        ("tiny values", vec![scaled(single, 1e-20)], &["tiny-values"]),
        ("large values", vec![scaled(single, 1e7)], &["large-value"]),
        (
            "a neighbor",
            vec![layer(&pair[0], 1), scaled(&pair[1], 1e-9)],
            &["large-error", "tiny-values"],
        ),
        (
            "an odd shape",
            vec![layer(single, 5), model::tensor("layers.2.o_proj.weight", &[8, 40], 1)],
            &["stays"],
        ),
    ];
    for (at, (case, tensors, kinds)) in cases.iter().enumerate() {
        model::write(&path, tensors);
        let (before, _) = in_json(folder.path(), "inspect m.safetensors");
        let (after, _) = in_json(folder.path(), &format!("quantize m.safetensors --out out-{at}"));
        let sorted = |report| {
            let mut all = about_weights(report);
            all.sort();
            all
        };
        let [before, after] = [&before, &after].map(sorted);
        assert_eq!(before, after, "{case}");
        let mut expected = kinds.to_vec();
        expected.sort_unstable();
        let found: Vec<&str> = before.iter().map(|(kind, _)| kind.as_str()).collect();
        assert_eq!(found, expected, "{case}");
    }
}

/// Tries every fourth block, so numbers differ a little from all blocks'.
#[test]
fn inspection_warns_of_large_weights_by_a_part_of_their_blocks() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("m.safetensors");
    let values = model::values(512 * 512, 7);
    for (at, (largest, kinds)) in
        [(0.0, vec![]), (3e4, vec!["hidden-error", "large-value"])].into_iter().enumerate()
    {
        let mut tensor = floats("layers.0.o_proj.weight", &[512, 512], &values);
        if largest > 0.0 {
            tensor = with_first(tensor, largest);
        }
        model::write(&path, &[tensor]);
        let (before, _) = in_json(folder.path(), "inspect m.safetensors");
        let (after, _) = in_json(folder.path(), &format!("quantize m.safetensors --out out-{at}"));
        for report in [&before, &after] {
            let mut found: Vec<_> =
                about_weights(report).into_iter().map(|(kind, _)| kind).collect();
            found.sort();
            assert_eq!(found, kinds, "{report}");
        }
    }
}

#[test]
fn mxfp4_is_not_advised_where_nvfp4_has_the_smaller_error() {
    const NAME: &str = "layers.0.o_proj.weight";
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("m.safetensors");
    // Most block scales are subnormal numbers of E4M3, with bits enough to be precise.
    let tensor = with_first(floats(NAME, &[32, 64], &model::values(32 * 64, 5)), 2200.0);
    model::write(&path, &[tensor]);
    let (before, _) = in_json(folder.path(), "inspect m.safetensors");
    let (after, _) = in_json(folder.path(), "quantize m.safetensors --out out");
    let error = &after["errors"]["weights"][0];
    let of = |key: &str| error[key].as_f64().expect("a number");
    assert!(of("small_blocks_percent") > 50.0, "{error}");
    let (in_mxfp4, _) = in_json(folder.path(), "quantize m.safetensors --out mx --format mxfp4");
    let of_mxfp4 = in_mxfp4["errors"]["weights"][0]["block_error_percent"].as_f64();
    assert!(of("block_error_percent") < of_mxfp4.expect("a number"), "{error} {in_mxfp4}");
    let (of_result, _) = in_json(folder.path(), "inspect out");
    for report in [&before, &after, &of_result] {
        assert_eq!(about_weights(report), [], "{error}");
    }
}

#[test]
fn inspection_says_what_a_run_would_do() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let found = succeeds(folder.path(), "inspect model");
    let says = "`fp4 quantize` would quantize 14 of 19 weights; --dry-run shows its plan\n";
    assert!(found.contains(says), "{found}");
    let (json, _) = in_json(folder.path(), "inspect model");
    assert_eq!(json["plan"], says.trim_end());
    let odd = |name: &str, cols| model::tensor(&format!("layers.0.{name}.weight"), &[8, cols], 1);
    model::write(
        &folder.path().join("odd.safetensors"),
        &[odd("o_proj", 24), odd("down_proj", 40)],
    );
    let found = succeeds(folder.path(), "inspect odd.safetensors");
    let says = "`fp4 quantize` would end with an error: none of 2 tensors would be quantized: ";
    assert!(found.contains(says), "{found}");
    let says = "warning: `layers.0.o_proj` stays: 24 columns are not a multiple of 16\n";
    assert!(found.contains(says), "{found}");
    // A zero is a zero in every format.
    let zeros = floats("layers.1.o_proj.weight", &[32, 64], &[0.0; 32 * 64]);
    model::write(&folder.path().join("zeros.safetensors"), &[zeros]);
    let found = succeeds(folder.path(), "inspect zeros.safetensors");
    assert!(found.contains("would quantize 1 of 1 weight; "), "{found}");
    assert!(found.contains("all of its values are zero, and stay zero in FP4"), "{found}");
    let nan = with_first(layer("layers.1.o_proj.weight", 5), f32::NAN);
    model::write(&folder.path().join("nan.safetensors"), &[nan]);
    let found = succeeds(folder.path(), "inspect nan.safetensors");
    let says = "would end with an error: `layers.1.o_proj.weight` has NaN or infinite values; pass \
                --keep";
    assert!(found.split_whitespace().collect::<Vec<_>>().join(" ").contains(says), "{found}");
    // Of a quantized model there is nothing to say.
    succeeds(folder.path(), "quantize model --out out");
    assert!(!succeeds(folder.path(), "inspect out").contains("would"));
}

#[test]
fn every_warning_and_note_is_in_json() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let mut tensors = model::tensors(SMALL);
    tensors[0].bytes[..2].copy_from_slice(&[0xC0, 0x7F]);
    tensors.remove(2);
    model::write(&folder.path().join("model/model-00001-of-00001.safetensors"), &tensors);
    fs::remove_file(folder.path().join("model/model.safetensors.index.json")).expect("an index");
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        fs::remove_file(folder.path().join("model").join(shard)).expect("a shard");
    }
    fs::write(folder.path().join("model/old.pt"), "").expect("a file");
    for command in [
        "quantize model --out out --dialect modelopt --block-size 32",
        "convert model --out plain --dialect plain",
        "inspect model",
    ] {
        let (found, said) = in_json(folder.path(), command);
        let texts = |key: &str| -> Vec<String> {
            let list = found[key].as_array().expect("a list").iter();
            list.map(|one| one["text"].as_str().or(one.as_str()).expect("a text").to_owned())
                .collect()
        };
        let (warnings, notes) = (texts("warnings"), texts("notes"));
        let broken = of_kind(&found, "not-finite");
        assert_eq!(broken[0]["weights"], json!(["model.embed_tokens.weight"]), "{command}");
        let inspects = command.starts_with("inspect");
        assert_eq!(notes.is_empty(), inspects, "{command}: {notes:?}");
        // Warnings of an inspection are printed with their subjects.
        for text in warnings.iter().filter(|_| !inspects) {
            assert!(said.contains(&format!("warning: {text}\n")), "{command}: {text}: {said}");
        }
        assert_eq!(said.matches("warning: ").count(), warnings.len() * usize::from(!inspects));
    }
}

#[test]
fn the_kinds_of_warnings_are_listed_in_one_place_that_helps_name() {
    let folder = tempdir().expect("a folder");
    let list = succeeds(folder.path(), "warnings");
    for says in [
        "  hidden-error          the mean error of blocks is beyond 12 % (MXFP4: 15 %) and 1.5 ",
        "  large-error           the error of the weight is beyond 20 %",
        "  saturated-blocks      more than a quarter of the blocks have the largest scale",
        "  unlike-scales ",
    ] {
        assert!(list.contains(says), "{list} does not say {says}");
    }
    for command in ["quantize", "convert", "inspect", "compare"] {
        let help = succeeds(folder.path(), &format!("{command} --help"));
        let said = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains("`warnings` has all warnings"), "{help}");
        assert!(said.contains("`fp4 warnings` lists the kinds"), "{help}");
        assert!(!help.contains("unlike-scales"), "{help}");
    }
}

#[test]
fn layers_of_integers_are_warned_of() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let mut tensors = model::tensors(SMALL);
    let layer = tensors.iter_mut().find(|tensor| tensor.name.contains("o_proj")).expect("a layer");
    (layer.dtype, layer.bytes) = (Dtype::I8, vec![1; layer.bytes.len() / 2]);
    let name = layer.name.clone();
    model::write(&folder.path().join("model/model.safetensors"), &tensors);
    fs::remove_file(folder.path().join("model/model.safetensors.index.json")).expect("an index");
    let (found, said) = in_json(folder.path(), "quantize model --dry-run");
    assert_eq!(of_kind(&found, "unread-numbers")[0]["weights"], json!([name]));
    assert!(said.contains("stays, as its numbers are I8, which is not read as floats"), "{said}");
    // Readers do not change such a layer.
    succeeds(folder.path(), "quantize model --out out");
    let config = fs::read_to_string(folder.path().join("out/config.json")).expect("a config");
    let config: Value = serde_json::from_str(&config).expect("JSON");
    let ignore = config["quantization_config"]["ignore"].as_array().expect("a list");
    let module = name.strip_suffix(".weight").expect("a weight");
    assert!(ignore.contains(&json!(module)), "{config}");
}

#[test]
fn weights_whose_outputs_are_not_measured_are_named() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let tensors = model::tensors(SMALL);
    let identity = |tensor: &model::Tensor| {
        let cols = tensor.shape[1];
        let at = |i: usize| if i.is_multiple_of(cols + 1) { 1.0 } else { 0.0 };
        floats(&tensor.name, &[cols, cols], &(0..cols * cols).map(at).collect::<Vec<_>>())
    };
    let layers = tensors.iter().filter(|tensor| tensor.name.contains("_proj"));
    let missing = "model.layers.0.self_attn.o_proj.weight";
    let some = layers.filter(|tensor| tensor.name != missing).map(identity);
    model::write(&folder.path().join("g.safetensors"), &some.collect::<Vec<_>>());
    let command = "quantize model --calibration g.safetensors --out";
    let (found, _) = in_json(folder.path(), &format!("{command} json"));
    assert_eq!(of_kind(&found, "no-output-error")[0]["weights"], json!([missing]));
    let said = succeeds(folder.path(), &format!("{command} text"));
    assert!(said.contains("; mean error of outputs ") && said.contains(" (of 13 of 14 weights)"));
}
