//! `fp4 quantize` as a user runs it: what it writes, and that it is the same every time.

mod model;

use std::fs;
use std::path::Path;

use burn_fp4_checkpoints::{
    Checkpoint, Fp4Weight, Model, Numbers, TensorScale, Value, Weight, WriteOptions,
};
use burn_fp4_search::formats::Fp4Format;
use model::{SMALL, assert_same, fails, names, packed_in, run, succeeds};
use safetensors::Dtype;
use tempfile::tempdir;

fn golden(name: &str) -> String {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
    golden.to_str().expect("unicode").to_owned()
}

/// The options of the converter, in words of this program.
const MILES: &str = "--preset miles --first-layers-high-precision 1 --last-layers-high-precision 1 \
                     --keep *mlp.experts.0.up_proj*";

#[test]
fn the_preset_of_miles_writes_what_its_converter_wrote() {
    let folder = tempdir().expect("a folder");
    let input = golden("miles_moe_bf16");
    succeeds(folder.path(), &format!("quantize {input} --out out {MILES}"));
    assert_same(&folder.path().join("out"), Path::new(&golden("miles_moe")));
    // TransformerEngine from 2.14 on has other arithmetic.
    succeeds(folder.path(), &format!("quantize {input} --out te {MILES} --rule te"));
    let old = succeeds(folder.path(), "compare out te --tolerance 100");
    assert!(old.contains(" within the tolerance"), "{old}");
}

#[test]
fn a_plan_is_printed_and_nothing_is_written() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let plan = succeeds(folder.path(), "quantize model --dry-run");
    for word in [
        "the output layer",
        "an embedding",
        "shares a scale with k_proj, v_proj",
        "14 of 19 weights",
    ] {
        assert!(plan.contains(word), "{plan} does not say {word}");
    }
    assert_eq!(names(folder.path()), ["model"]);
    // What the run would refuse, the plan refuses.
    fails(folder.path(), "quantize model --dry-run --out model", 2, &["model: already exists"]);
    let json = succeeds(folder.path(), "quantize model --dry-run --json --keep *.1.*.q_proj");
    let json: serde_json::Value = serde_json::from_str(&json).expect("an object");
    // With its query a layer keeps its key and its value.
    assert_eq!(json["quantized"], 11);
    let weights = json["weights"].as_array().expect("weights");
    let key = weights.iter().find(|row| row["name"] == "model.layers.1.self_attn.k_proj.weight");
    let note = key.expect("the key")["note"].as_str().expect("a note");
    assert!(note.contains("runs as one with `model.layers.1.self_attn.q_proj.weight`"), "{note}");
}

/// As many bytes of tensors as no machine reads while a test runs.
#[cfg(unix)]
#[test]
fn a_plan_reads_nothing_but_headers() {
    let folder = tempdir().expect("a folder");
    let names = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "lm_head.weight",
    ];
    model::holes(&folder.path().join("holes.safetensors"), &names);
    let begun = std::time::Instant::now();
    let plan = succeeds(folder.path(), "quantize holes.safetensors --dry-run");
    let seconds = begun.elapsed().as_secs();
    assert!(plan.contains("6 of 8 weights quantized") && plan.contains("1.1 TB"), "{plan}");
    assert!(seconds < 30, "it took {seconds} s");
}

#[test]
fn what_is_not_copied_is_said() {
    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", SMALL);
    fs::create_dir(path.join("original")).expect("a folder");
    fs::write(path.join("original/params.json"), "{}").expect("a file");
    fs::write(path.join("pytorch_model.bin"), "weights").expect("a file");
    let said = "note: not copied: `original/`, `pytorch_model.bin`";
    let (code, _, error) = run(folder.path(), "quantize model --out out");
    assert!(code == 0 && error.contains(said), "{error}");
    let printed = succeeds(folder.path(), "convert model --out plain --dialect plain");
    assert!(printed.contains(said), "{printed}");
    for out in ["out", "plain"] {
        assert!(!folder.path().join(out).join("original").exists());
        assert!(folder.path().join(out).join("tokenizer.json").exists());
    }
}

/// The multiplier of a weight, and whether it is FP4.
fn multiplier(weight: &Weight<'_>) -> Option<f32> {
    match &weight.value {
        Value::Fp4(fp4) => Some(fp4.multipliers()[0]),
        Value::Plain(_) | Value::Fp8(_) => None,
    }
}

#[test]
fn layers_that_run_as_one_share_a_tensor_scale_across_shards() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out out --dialect modelopt");
    let checkpoint = Checkpoint::open(folder.path().join("out")).expect("a checkpoint");
    let weights = checkpoint.weights().expect("weights");
    let of = |name: &str| {
        let name = format!("model.layers.0.{name}.weight");
        let found = weights.iter().find(|weight| weight.name == name).expect("a weight");
        multiplier(found).expect("FP4")
    };
    assert_eq!(of("self_attn.q_proj"), of("self_attn.k_proj"));
    assert_eq!(of("self_attn.q_proj"), of("self_attn.v_proj"));
    assert_eq!(of("mlp.gate_proj"), of("mlp.up_proj"));
    assert_ne!(of("mlp.gate_proj"), of("mlp.down_proj"));
    assert!(folder.path().join("out/tokenizer.json").is_file());
}

/// A tensor of f32.
fn floats(name: &str, shape: &[usize], values: &[f32]) -> model::Tensor {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    model::Tensor { name: name.to_owned(), dtype: Dtype::F32, shape: shape.to_vec(), bytes }
}

/// The values of a weight of a folder or file.
fn values_in(path: &Path, name: &str) -> Vec<f64> {
    let checkpoint = Checkpoint::open(path).expect("a checkpoint");
    let weights = checkpoint.weights().expect("weights");
    let weight = weights.iter().find(|weight| weight.name == name).expect("a weight");
    let (_, values) = weight.values().expect("floats");
    values.into_iter().map(f64::from).collect()
}

/// Each has the error that its values have in the file, however small or large it is.
#[test]
fn a_run_says_how_good_it_was_and_what_to_type_next() {
    let folder = tempdir().expect("a folder");
    let name = |at: usize| format!("layers.{at}.o_proj.weight");
    let scaled = |(at, factor): (usize, &f32)| {
        let values: Vec<f32> =
            model::values(32 * 64, at as u64 + 1).iter().map(|value| value * factor).collect();
        floats(&name(at), &[32, 64], &values)
    };
    let factors = [1.0, 1e-30, 1e20, 0.0];
    let tensors: Vec<_> = factors.iter().enumerate().map(scaled).collect();
    model::write(&folder.path().join("model.safetensors"), &tensors);
    let said = succeeds(folder.path(), "quantize model.safetensors --out out");
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[1].starts_with("mean error ") && lines[1].contains(" %, worst "), "{said}");
    assert!(lines[1].contains(".o_proj.weight"), "{said}");
    assert_eq!(lines[2..], ["next: fp4 inspect out"]);
    let json = succeeds(folder.path(), "quantize model.safetensors --out again --json");
    let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
    assert_eq!((&report["quantized"], &report["errors"]["not_measured"]), (&4.into(), &0.into()));
    assert_eq!(report["next"], "fp4 inspect again");
    let (mut sum, mut worst) = (0.0, (0.0, String::new()));
    for at in 0..4 {
        let squares = |values: Vec<f64>| values.iter().map(|value| value * value).sum::<f64>();
        let before = values_in(&folder.path().join("model.safetensors"), &name(at));
        let after = values_in(&folder.path().join("out"), &name(at));
        let difference = before.iter().zip(&after).map(|(a, b)| a - b).collect();
        let error = squares(difference);
        let expected = if at == 3 { 0.0 } else { 100.0 * (error / squares(before)).sqrt() };
        assert_eq!(expected > 7.0 && expected < 9.5, at != 3, "{at}: {expected}");
        let found = &report["errors"]["weights"][at];
        assert_eq!(found["name"], name(at));
        let found = found["error_percent"].as_f64().expect("a number");
        assert!((found - expected).abs() < 1e-4, "{at}: {found}, expected {expected}");
        sum += found;
        if found > worst.0 {
            worst = (found, name(at));
        }
    }
    let errors = &report["errors"];
    assert!((errors["mean_percent"].as_f64().expect("a number") - sum / 4.0).abs() < 1e-9);
    assert_eq!(errors["worst"]["name"], worst.1);
}

#[test]
fn weights_that_lose_much_are_warned_of_with_what_to_do() {
    let folder = tempdir().expect("a folder");
    let tensor = |(name, factor): (&str, f32)| {
        let values: Vec<f32> =
            model::values(32 * 64, 5).iter().map(|value| value * factor).collect();
        floats(&format!("layers.0.{name}.weight"), &[32, 64], &values)
    };
    let weights = [("mlp.gate_proj", 1.0), ("mlp.up_proj", 1e-9), ("attn.o_proj", 1.0)];
    model::write(&folder.path().join("model.safetensors"), &weights.map(tensor));
    let (code, said, warned) = run(folder.path(), "quantize model.safetensors --out out");
    assert_eq!(code, 0, "{warned}");
    let says = "warning: `layers.0.mlp.up_proj.weight`: its error is 100.00 %; it shares its \
                tensor scale with `layers.0.mlp.gate_proj.weight`, whose largest value is 1e9 \
                times its own; set `together = false` in a recipe, or pass --keep \
                'layers.0.mlp.gate_proj.weight'";
    assert!(warned.lines().any(|line| line == says), "{warned}");
    assert!(said.contains("worst 100.00 %, layers.0.mlp.up_proj.weight"), "{said}");
    let advised = "quantize model.safetensors --keep layers.0.mlp.gate_proj.weight --out advised";
    let (code, said, warned) = run(folder.path(), advised);
    assert!(code == 0 && !warned.contains("its error is"), "{warned}");
    assert!(said.contains("1 of 3 weights quantized"), "{said}");
}

#[test]
fn with_statistics_gptq_says_the_error_of_outputs_too() {
    let folder = tempdir().expect("a folder");
    let (rows, cols, tokens) = (24, 64, 96);
    let (name, weight) = ("layers.0.o_proj.weight", model::values(24 * 64, 3));
    // Channels that depend on each other, as in language models.
    let mut random = model::random(11);
    let basis: Vec<f32> = (0..8 * cols).map(|_| random()).collect();
    let mut input = || -> Vec<f32> {
        let factors: Vec<f32> = (0..8).map(|_| random()).collect();
        let mixed = |col: usize| (0..8).map(|at| factors[at] * basis[at * cols + col]).sum::<f32>();
        let noise: Vec<f32> = (0..cols).map(|_| 0.05 * random()).collect();
        (0..cols).map(|col| mixed(col) + noise[col]).collect()
    };
    let inputs: Vec<Vec<f32>> = (0..tokens).map(|_| input()).collect();
    let gram: Vec<f32> = (0..cols * cols)
        .map(|at| inputs.iter().map(|x| x[at / cols] * x[at % cols]).sum())
        .collect();
    model::write(&folder.path().join("model.safetensors"), &[floats(name, &[rows, cols], &weight)]);
    model::write(&folder.path().join("gram.safetensors"), &[floats(name, &[cols, cols], &gram)]);
    let quantize = "quantize model.safetensors --calibration gram.safetensors --method";
    let json = succeeds(folder.path(), &format!("{quantize} gptq --out gptq --json"));
    let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
    let of = |key: &str| report["errors"]["weights"][0][key].as_f64().expect("a number");
    let quantized = values_in(&folder.path().join("gptq"), name);
    let squared = |matrix: &[f64]| -> f64 {
        let output = |x: &Vec<f32>, row: &[f64]| -> f64 {
            row.iter().zip(x).map(|(weight, x)| weight * f64::from(*x)).sum()
        };
        let outputs = inputs.iter().flat_map(|x| matrix.chunks(cols).map(move |r| output(x, r)));
        outputs.map(|output| output * output).sum()
    };
    let exact: Vec<f64> = weight.iter().copied().map(f64::from).collect();
    let errors: Vec<f64> = quantized.iter().zip(&exact).map(|(a, b)| a - b).collect();
    let expected = 100.0 * (squared(&errors) / squared(&exact)).sqrt();
    let found = of("output_error_percent");
    assert!((found - expected).abs() < 1e-2 * expected, "{found}, expected {expected}");
    assert!(found < 0.7 * of("error_percent"), "{json}");
    let said = succeeds(folder.path(), &format!("{quantize} gptq --out again"));
    assert!(said.contains("; mean error of outputs "), "{said}");
    // Outputs are measured by every method.
    let mut least = found;
    for method in ["hessian", "sse-weighted", "sse", "amax"] {
        let json = succeeds(folder.path(), &format!("{quantize} {method} --out {method} --json"));
        let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
        let outputs = report["errors"]["weights"][0]["output_error_percent"].as_f64();
        let outputs = outputs.expect("a number");
        assert!(outputs > least, "{method}: {outputs}");
        if method == "hessian" {
            least = outputs;
        }
    }
    // After a transform the file has other codes, and the error is that of the values.
    let transformed = format!("{quantize} gptq --out transformed --hadamard 64 --json");
    let json = succeeds(folder.path(), &transformed);
    let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
    let found = report["errors"]["weights"][0]["output_error_percent"].as_f64();
    let quantized = values_in(&folder.path().join("transformed"), name);
    let errors: Vec<f64> = quantized.iter().zip(&exact).map(|(a, b)| a - b).collect();
    let expected = 100.0 * (squared(&errors) / squared(&exact)).sqrt();
    let found = found.expect("a number");
    assert!((found - expected).abs() < 1e-2 * expected, "{found}, expected {expected}");
    let (_, _, note) = run(folder.path(), &format!("{quantize} sse --out noted"));
    assert!(note.contains("gram.safetensors only measures errors of outputs"), "{note}");
}

#[test]
fn every_dialect_and_format_is_written_and_read_again() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    for (dialect, format) in [
        ("modelopt", "nvfp4"),
        ("modelopt", "mxfp4"),
        ("compressed-tensors", "nvfp4"),
        ("compressed-tensors", "mxfp4"),
        ("miles", "nvfp4"),
        ("mlx", "nvfp4"),
        ("mlx", "mxfp4"),
        ("gguf", "nvfp4"),
        ("gguf", "mxfp4"),
    ] {
        let out = match dialect {
            "gguf" => format!("{format}.gguf"),
            _ => format!("{dialect}-{format}"),
        };
        let options = format!("--dialect {dialect} --format {format}");
        succeeds(folder.path(), &format!("quantize model --out {out} {options}"));
        let (code, json, error) = run(folder.path(), &format!("compare model {out} --json"));
        assert_eq!(code, 1, "{error}");
        let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
        let percent = report["quantized_error_percent"].as_f64().expect("a number");
        assert!((5.0..14.0).contains(&percent), "{out}: {percent}");
        assert_eq!(report["only_in_a"], serde_json::json!([]), "{out}");
    }
}

#[test]
fn weights_after_a_hadamard_transform_are_files_of_fp_quant() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let quantize = "quantize model --out out --format mxfp4 --hadamard 32";
    let (code, printed, notes) = run(folder.path(), quantize);
    assert!(code == 0 && printed.contains("fp-quant"), "{printed}");
    assert!(printed.contains("Hadamard transform of 32"), "{printed}");
    assert!(notes.contains("a Hadamard transform without GPTQ"), "{notes}");
    let checkpoint = Checkpoint::open(folder.path().join("out")).expect("a checkpoint");
    assert_eq!(checkpoint.dialect(), "fp-quant");
    let inspected = succeeds(folder.path(), "inspect out");
    assert!(inspected.contains("mxfp4 32 hadamard 32"), "{inspected}");
    // The error that the run measured in the other basis is that of the values.
    let compared = succeeds(folder.path(), "compare model out --tolerance 100 --json");
    let compared: serde_json::Value = serde_json::from_str(&compared).expect("an object");
    succeeds(folder.path(), "convert out --out plain --dialect plain --decode-fp4 f32");
    let decoded = succeeds(folder.path(), "compare out plain --tolerance 0.001");
    assert!(decoded.contains("all values that were compared are the same"), "{decoded}");
    let plan = succeeds(folder.path(), "quantize model --dry-run --json --hadamard 64");
    let plan: serde_json::Value = serde_json::from_str(&plan).expect("an object");
    let sizes = plan["weights"].as_array().expect("weights").iter();
    assert!(sizes.clone().any(|row| row["hadamard"] == 64), "{plan}");
    assert!(compared.is_object());

    fails(folder.path(), "quantize model --out x --hadamard 48", 2, &["48", "16, 32, 64, 128"]);
    let refused = "quantize model --out x --hadamard 32 --dialect modelopt";
    fails(folder.path(), refused, 2, &["Hadamard", "--dialect fp-quant"]);
    fs::write(folder.path().join("recipe.toml"), "hadamard = 32\nformat = \"mxfp4\"\n")
        .expect("a recipe");
    succeeds(folder.path(), "quantize model --out by-recipe --recipe recipe.toml");
    assert_same(&folder.path().join("by-recipe"), &folder.path().join("out"));
    fs::write(
        folder.path().join("some.toml"),
        "hadamard = 32\n[[weights]]\nnames = [\"*.down_proj\"]\nhadamard = 0\n",
    )
    .expect("a recipe");
    // A file of FP-Quant has one transform for all layers.
    fails(folder.path(), "quantize model --out x --recipe some.toml", 2, &["Hadamard"]);
}

#[test]
fn methods_and_memory_do_not_change_who_is_right() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let error = |out: &str| {
        let (_, json, _) = run(folder.path(), &format!("compare model {out} --json"));
        let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
        report["quantized_error_percent"].as_f64().expect("a number")
    };
    for method in ["amax", "four-over-six", "sse", "sse-tensor-scale"] {
        succeeds(folder.path(), &format!("quantize model --out {method} --method {method}"));
    }
    assert!(error("sse") < error("four-over-six") && error("four-over-six") < error("amax"));
    assert!(error("sse-tensor-scale") <= error("sse"));
    succeeds(folder.path(), "quantize model --out small --memory 68MB");
    assert_same(&folder.path().join("sse"), &folder.path().join("small"));
    let says = ["_proj.weight` needs ", " MB of memory, but --memory is 1.0 MB; raise it to "];
    fails(folder.path(), "quantize model --out none --memory 1MB", 2, &says);
}

#[test]
fn a_rule_is_chosen_by_its_former_name_too() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    for rule in ["gist", "torch-recipe"] {
        succeeds(folder.path(), &format!("quantize model --out {rule} --rule {rule}"));
    }
    assert_same(&folder.path().join("gist"), &folder.path().join("torch-recipe"));
}

#[test]
fn memory_is_that_of_statistics_too() {
    let folder = tempdir().expect("a folder");
    let weight = model::tensor("model.layers.0.mlp.down_proj.weight", &[16, 1024], 1);
    model::write(&folder.path().join("model.safetensors"), &[weight]);
    let at = |i: usize| if i.is_multiple_of(1025) { 1.0_f32 } else { 0.0 };
    let bytes = (0..1024 * 1024).flat_map(|i| at(i).to_le_bytes()).collect();
    let (name, shape) = ("model.layers.0.mlp.down_proj.weight".to_owned(), vec![1024, 1024]);
    let gram = model::Tensor { name, dtype: Dtype::F32, shape, bytes };
    model::write(&folder.path().join("gram.safetensors"), &[gram]);
    let run = |method: &str, memory: &str, code: i32| {
        let options = format!("--method {method} --calibration gram.safetensors");
        let command =
            format!("quantize model.safetensors --out {method} {options} --memory {memory}");
        match code {
            0 => drop(succeeds(folder.path(), &command)),
            _ => fails(folder.path(), &command, code, &["down_proj.weight` needs ", "--memory"]),
        }
    };
    // The Gram matrix takes 13 MB, its Hessian factor 17 MB more; the program 67 MB.
    run("sse-weighted", "70MB", 2);
    run("hessian", "70MB", 2);
    run("sse-weighted", "82MB", 0);
    run("gptq", "82MB", 2);
    run("gptq", "104MB", 0);
    let (code, _, error) =
        model::run(folder.path(), "quantize model.safetensors --out sse --memory 70MB");
    assert_eq!(code, 0, "{error}");
}

#[test]
fn memory_is_that_of_the_statistics_of_every_weight_of_a_group() {
    let folder = tempdir().expect("a folder");
    let names = ["q_proj", "k_proj", "v_proj"].map(|n| format!("layers.0.self_attn.{n}.weight"));
    let weights = names.each_ref().map(|name| model::tensor(name, &[16, 1024], 1));
    model::write(&folder.path().join("model.safetensors"), &weights);
    let identity: Vec<f32> =
        (0..1024 * 1024_usize).map(|at| if at.is_multiple_of(1025) { 1.0 } else { 0.0 }).collect();
    for (at, name) in names.iter().enumerate() {
        let file = format!("{at}.safetensors");
        model::write(&folder.path().join(&file), &[floats(name, &[1024, 1024], &identity)]);
        let options = format!("--method sse --calibration {file}");
        let quantize = format!("quantize model.safetensors --out out-{at} {options} --memory");
        let says = ["_proj.weight` needs ", "--memory"];
        fails(folder.path(), &format!("{quantize} 70MB"), 2, &says);
        succeeds(folder.path(), &format!("{quantize} 84MB"));
    }
}

#[test]
fn statistics_that_only_measure_may_be_unusable() {
    let folder = tempdir().expect("a folder");
    let [fine, stack] = ["self_attn.o_proj.weight", "mlp.experts.down_proj"]
        .map(|name| format!("model.layers.0.{name}"));
    let model = folder.path().join("model");
    fs::create_dir(&model).expect("a folder");
    let config = r#"{"model_type": "mixtral", "num_hidden_layers": 1}"#;
    fs::write(model.join("config.json"), config).expect("a config");
    let weights = [model::tensor(&fine, &[32, 64], 1), model::tensor(&stack, &[2, 32, 64], 2)];
    model::write(&model.join("model.safetensors"), &weights);
    let identity: Vec<f32> =
        (0..4096_usize).map(|at| if at.is_multiple_of(65) { 1.0 } else { 0.0 }).collect();
    let mut second = identity.clone();
    second[7] = f32::NAN;
    let both = [identity.clone(), second].concat();
    let grams = [floats(&fine, &[64, 64], &identity), floats(&stack, &[2, 64, 64], &both)];
    model::write(&folder.path().join("grams.safetensors"), &grams);
    let quantize = "quantize model --only *_proj* --dialect modelopt --calibration \
                    grams.safetensors --json --method";
    let (code, json, error) = run(folder.path(), &format!("{quantize} sse --out sse"));
    assert_eq!(code, 0, "{error}");
    let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
    let weights = report["errors"]["weights"].as_array().expect("a list");
    for (name, measured) in [(fine, true), (stack.clone(), false)] {
        let one = weights.iter().find(|one| one["name"] == *name).expect("its error");
        assert!(one["error_percent"].is_number(), "{json}");
        assert_eq!(one["output_error_percent"].is_number(), measured, "{json}");
    }
    let says = format!("grams.safetensors: tensor `{stack}`: ");
    assert!(error.contains(&says) && error.contains("outputs is not measured"), "{error}");
    // A method that chooses by them cannot do without.
    let (code, _, error) = run(folder.path(), &format!("{quantize} hessian --out hessian"));
    assert!(code != 0 && error.contains(&says), "{code}: {error}");
}

/// Layers that share a tensor scale may have been calibrated apart.
#[test]
fn weights_that_share_a_tensor_scale_are_quantized_by_their_own_statistics() {
    let folder = tempdir().expect("a folder");
    let names = ["q_proj", "k_proj", "v_proj"].map(|n| format!("layers.0.self_attn.{n}.weight"));
    let rows = [32, 16, 16];
    let weights: Vec<_> = (0..3).map(|at| model::tensor(&names[at], &[rows[at], 64], 7)).collect();
    model::write(&folder.path().join("model.safetensors"), &weights);
    let gram = |seed: u64| -> Vec<f32> {
        let mut random = model::random(seed);
        let inputs: Vec<f32> = (0..96 * 64).map(|_| random()).collect();
        let at = |i: usize| inputs.chunks(64).map(|x| x[i / 64] * x[i % 64]).sum();
        (0..64 * 64).map(at).collect()
    };
    let write = |file: &str, seeds: [u64; 3]| {
        let grams: Vec<_> =
            (0..3).map(|at| floats(&names[at], &[64, 64], &gram(seeds[at]))).collect();
        model::write(&folder.path().join(file), &grams);
    };
    let quantized = |seeds: [u64; 3], method: &str| {
        let _ = fs::remove_dir_all(folder.path().join("out"));
        write("grams.safetensors", seeds);
        let options = "--calibration grams.safetensors --out out --json --method";
        let json =
            succeeds(folder.path(), &format!("quantize model.safetensors {options} {method}"));
        let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
        let errors = report["errors"]["weights"].as_array().expect("a list").clone();
        (packed_in(&folder.path().join("out")), errors)
    };
    for method in ["gptq", "hessian", "sse-weighted", "sse", "sse-tensor-scale"] {
        let (own, errors) = quantized([1, 2, 2], method);
        let ([first, others], mut used) = ([[1; 3], [2; 3]].map(|s| quantized(s, method)), 0);
        for (at, name) in names.iter().enumerate() {
            let (expected, other) = if at == 0 { (&first, &others) } else { (&others, &first) };
            assert!(own[name] == expected.0[name], "{method}: {name}");
            used += usize::from(own[name] != other.0[name]);
            let place = errors.iter().position(|error| error["name"] == **name).expect("its error");
            assert_eq!(errors[place], expected.1[place], "{method}: {name}");
            assert!(errors[place]["output_error_percent"].is_number(), "{method}: {name}");
        }
        assert_eq!(used > 0, ["gptq", "hessian", "sse-weighted"].contains(&method), "{method}");
    }
}

/// Each matrix of a stack has statistics of its own.
#[test]
fn stacked_matrices_are_quantized_by_their_own_statistics() {
    let folder = tempdir().expect("a folder");
    let name = "model.layers.0.mlp.experts.down_proj";
    let config = r#"{"model_type": "mixtral", "num_hidden_layers": 1}"#;
    let grams = |count: usize, first: usize| {
        let of = |i: usize| {
            let (at, row, col) = (first + i / 4096, i / 64 % 64, i % 64);
            if row == col { 1.0 + ((at * 7 + row) % 5) as f32 } else { 0.1 * at as f32 }
        };
        let bytes = (0..count * 4096).flat_map(|i| f32::to_le_bytes(of(i))).collect();
        let shape = vec![count, 64, 64];
        model::Tensor { name: name.to_owned(), dtype: Dtype::F32, shape, bytes }
    };
    let whole = model::tensor(name, &[3, 32, 64], 5);
    let quantized = |input: &str, tensor: model::Tensor, statistics: model::Tensor| {
        let path = folder.path().join(input);
        fs::create_dir(&path).expect("a folder");
        fs::write(path.join("config.json"), config).expect("a config");
        model::write(&path.join("model.safetensors"), &[tensor]);
        model::write(&folder.path().join("grams.safetensors"), &[statistics]);
        let options = "--only *experts* --dialect modelopt --method hessian";
        let statistics = "--calibration grams.safetensors";
        let command = format!("quantize {input} --out {input}-out {options} {statistics}");
        succeeds(folder.path(), &command);
        let checkpoint = Checkpoint::open(folder.path().join(format!("{input}-out")));
        let checkpoint = checkpoint.expect("a checkpoint");
        let weights = checkpoint.weights().expect("weights");
        let Value::Fp4(fp4) = &weights[0].value else { panic!("it is quantized") };
        fp4.plain_codes().into_owned()
    };
    let all = quantized("all", model::tensor(name, &[3, 32, 64], 5), grams(3, 0));
    for at in 0..3 {
        let bytes = whole.bytes[at * 4096..][..4096].to_vec();
        let (dtype, shape) = (whole.dtype, vec![1, 32, 64]);
        let one = model::Tensor { name: name.to_owned(), dtype, shape, bytes };
        let alone = quantized(&format!("one-{at}"), one, grams(1, at));
        assert_eq!(alone, all[at * 1024..][..1024], "matrix {at}");
    }
}

/// Checks tensors that are kept, of which no more than a piece is in memory.
#[test]
fn what_is_kept_is_copied_in_pieces() {
    let folder = tempdir().expect("a folder");
    let tensors = [
        model::tensor("model.embed_tokens.weight", &[3000, 2048], 1),
        model::tensor("model.layers.0.mlp.down_proj.weight", &[64, 128], 2),
        model::tensor("model.empty", &[0, 128], 3),
    ];
    model::write(&folder.path().join("model.safetensors"), &tensors);
    // 5.9 MB besides what the program takes.
    succeeds(folder.path(), "quantize model.safetensors --out out --memory 73MB");
    let checkpoint = Checkpoint::open(folder.path().join("out")).expect("a checkpoint");
    for tensor in [&tensors[0], &tensors[2]] {
        let kept = checkpoint.container().get(&tensor.name).expect("it is there");
        assert!(*kept.bytes == tensor.bytes[..], "{} has the same bytes", tensor.name);
    }
}

#[test]
fn the_name_of_a_gguf_file_and_its_dialect_go_together() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    model::gguf(&folder.path().join("f16.gguf"));
    let before = names(folder.path());
    let says = ["out: the dialect `gguf` is a file", "ends in .gguf"];
    for out in ["out", "out/"] {
        for command in [
            format!("quantize model --out {out} --dialect gguf"),
            format!("quantize f16.gguf --out {out}"),
            format!("convert f16.gguf --out {out} --dialect gguf"),
        ] {
            fails(folder.path(), &command, 2, &says);
        }
    }
    let says = ["out.gguf: the dialect `modelopt` is a folder", "--dialect gguf"];
    for command in ["quantize model", "convert model"] {
        let command = format!("{command} --out out.gguf --dialect modelopt");
        fails(folder.path(), &command, 2, &says);
    }
    fails(folder.path(), "convert model --out out", 2, &["--dialect", "modelopt, "]);
    assert_eq!(names(folder.path()), before);
    // The name says it, and a slash behind it does not matter.
    let (code, _, note) = run(folder.path(), "quantize model --out a.gguf/");
    assert!(code == 0 && note.contains("note: ") && note.contains("llama.cpp"), "{note}");
    let said = succeeds(folder.path(), "convert a.gguf --out b.gguf");
    assert!(said.contains("so llama.cpp cannot run the file"), "{said}");
    assert_same(&folder.path().join("a.gguf"), &folder.path().join("b.gguf"));
    let (_, _, note) = run(folder.path(), "quantize f16.gguf --out c.gguf");
    assert!(!note.contains("llama.cpp"), "{note}");
    succeeds(folder.path(), "quantize model --out folder/");
    assert!(folder.path().join("folder/config.json").is_file());
}

#[test]
fn statistics_weigh_errors() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let mut moments = Vec::new();
    for tensor in model::tensors(SMALL).iter().filter(|t| t.name.contains("_proj")) {
        let cols = tensor.shape[1];
        let bytes = (0..cols).flat_map(|at| (0.1 + (at % 7) as f32).to_le_bytes()).collect();
        let (dtype, shape) = (safetensors::Dtype::F32, vec![cols]);
        moments.push(model::Tensor { name: tensor.name.clone(), dtype, shape, bytes });
    }
    model::write(&folder.path().join("moments.safetensors"), &moments);
    let sse = "--method sse-weighted --calibration moments.safetensors";
    succeeds(folder.path(), &format!("quantize model --out weighted {sse}"));
    succeeds(folder.path(), "quantize model --out sse");
    let (code, ..) = run(folder.path(), "compare sse weighted");
    assert_eq!(code, 1);
    fails(folder.path(), "quantize model --out x --method gptq", 2, &["gptq", "--calibration"]);
    let gptq = "quantize model --out x --method gptq --calibration moments.safetensors";
    fails(folder.path(), gptq, 2, &["_proj.weight", "X^T X", "moments.safetensors"]);
    // A number that is none, of the statistics.
    let good = moments[0].bytes.clone();
    moments[0].bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
    model::write(&folder.path().join("moments.safetensors"), &moments);
    let says = ["moments.safetensors", "`model.layers.0.mlp.down_proj.weight`", "NaN"];
    fails(folder.path(), &format!("quantize model --out x {sse}"), 2, &says);
    moments[0].bytes = good;
    let (code, _, note) = run(
        folder.path(),
        "quantize model --out ignored --method sse --calibration moments.safetensors",
    );
    assert!(code == 0 && note.contains("note: method `sse` needs no input statistics"), "{note}");
    assert!(note.contains("moments.safetensors"), "{note}");
    let other = "quantize model --out x --method sse-weighted --calibration other.safetensors";
    model::write(&folder.path().join("other.safetensors"), &[model::tensor("other", &[8], 1)]);
    let says = ["other.safetensors", "no statistics of the 14 weights", "it has `other`"];
    fails(folder.path(), other, 2, &says);
    moments.remove(0);
    model::write(&folder.path().join("moments.safetensors"), &moments);
    fails(folder.path(), &format!("quantize model --out x {sse}"), 2, &["no statistics of `"]);
    // The whole matrix serves every method.
    let gram = |tensor: &model::Tensor| {
        let cols = tensor.shape[1];
        let at = |row: usize, col: usize| if row == col { 1.0 + (row % 5) as f32 } else { 0.1 };
        let bytes =
            (0..cols * cols).flat_map(|i| f32::to_le_bytes(at(i / cols, i % cols))).collect();
        let (name, dtype) = (tensor.name.clone(), safetensors::Dtype::F32);
        model::Tensor { name, dtype, shape: vec![cols, cols], bytes }
    };
    let tensors = model::tensors(SMALL);
    let grams: Vec<_> = tensors.iter().filter(|t| t.name.contains("_proj")).map(gram).collect();
    model::write(&folder.path().join("grams.safetensors"), &grams);
    for method in ["sse-weighted", "hessian", "gptq"] {
        let options = format!("--method {method} --calibration grams.safetensors");
        succeeds(folder.path(), &format!("quantize model --out {method} {options}"));
    }
}

#[test]
fn gguf_becomes_gguf_with_its_names_and_metadata() {
    let folder = tempdir().expect("a folder");
    model::gguf(&folder.path().join("f16.gguf"));
    for (format, method) in [("nvfp4", "amax"), ("nvfp4", "sse"), ("mxfp4", "sse")] {
        let out = format!("{format}-{method}.gguf");
        let options = format!("--format {format} --method {method}");
        let said = succeeds(folder.path(), &format!("quantize f16.gguf --out {out} {options}"));
        assert!(said.contains("of 5 weights quantized"), "{said}");
        let bytes = fs::read(folder.path().join(&out)).expect("a file");
        assert!(bytes.windows(12).any(|part| part == b"general.name"));
        let number = if format == "nvfp4" { 39_u32 } else { 38 };
        for (key, number) in [("general.file_type", number), ("general.quantization_version", 2)] {
            let pair = [key.as_bytes(), &[4, 0, 0, 0], &number.to_le_bytes()].concat();
            assert!(bytes.windows(pair.len()).any(|part| part == pair), "{key}");
        }
        let checkpoint = Checkpoint::open(folder.path().join(&out)).expect("a checkpoint");
        let scale = checkpoint.container().get("blk.0.attn_q.scale").is_some();
        assert_eq!(scale, format == "nvfp4");
    }
    // 96 columns are whole blocks of MXFP4, and no whole records of NVFP4.
    let plan = succeeds(folder.path(), "quantize f16.gguf --dry-run");
    assert!(plan.contains("96 columns are not a multiple of 64"), "{plan}");
    // An imatrix: sums of squares under the names of the weights.
    let sums = |name: &str, cols: usize| {
        let bytes = (0..cols).flat_map(|at| (1.0 + (at % 9) as f32).to_le_bytes()).collect();
        (format!("{name}.in_sum2"), vec![1, cols], 0, bytes)
    };
    let imatrix = [sums("blk.0.attn_q.weight", 128), sums("blk.0.ffn_down.weight", 192)];
    model::write_gguf(&folder.path().join("imatrix.gguf"), &imatrix);
    let options = "--method sse-weighted --calibration imatrix.gguf --out weighted.gguf";
    succeeds(folder.path(), &format!("quantize f16.gguf {options}"));
    let gptq = "quantize f16.gguf --method gptq --calibration imatrix.gguf --out gptq.gguf";
    let says = ["imatrix.gguf", "mean squares only", "`gptq` needs X^T X", "`sse-weighted`"];
    fails(folder.path(), gptq, 2, &says);
    assert_eq!(run(folder.path(), "compare nvfp4-sse.gguf weighted.gguf").0, 1);
}

#[test]
fn fp8_is_read_and_quantized() {
    let folder = tempdir().expect("a folder");
    let input = folder.path().join("model");
    fs::create_dir(&input).expect("a folder");
    let values: Vec<u8> = (0..64 * 128).map(|at| (at * 37 % 0x7F) as u8).collect();
    let of = |name: &str, dtype, shape: Vec<usize>, bytes| model::Tensor {
        name: name.to_owned(),
        dtype,
        shape,
        bytes,
    };
    let scale = 0.01_f32.to_le_bytes().to_vec();
    let tensors = [
        of("a.up_proj.weight", safetensors::Dtype::F8_E4M3, vec![64, 128], values),
        of("a.up_proj.weight_scale", safetensors::Dtype::F32, vec![], scale),
    ];
    model::write(&input.join("model.safetensors"), &tensors);
    let config = r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}"#;
    fs::write(input.join("config.json"), config).expect("a config");
    succeeds(folder.path(), "quantize model --out out --dialect modelopt");
    let config = fs::read_to_string(folder.path().join("out/config.json")).expect("a config");
    assert!(config.contains("W4A16_NVFP4") && !config.contains("\"FP8\""), "{config}");
    // MLX has FP8 in other blocks.
    let convert = "convert model --dialect mlx --out mlx";
    let says = "use --keep 'a.up_proj' to write it as bf16, --decode-fp8 bf16, or --dialect ";
    fails(folder.path(), convert, 2, &[says]);
    succeeds(folder.path(), &format!("{convert} --decode-fp8 bf16"));
    // Readers of ModelOpt need a scale of the inputs, which the source does not have.
    let says = [
        "`a.up_proj.weight`: the dialect `modelopt` cannot hold FP8 weights with one scale and",
        "decode them with `fp4 convert --decode-fp8 bf16`",
    ];
    fails(folder.path(), "convert model --dialect modelopt --out mo", 2, &says);
}

#[test]
fn fp8_without_scales_is_read_as_it_is() {
    let folder = tempdir().expect("a folder");
    let input = folder.path().join("model");
    fs::create_dir(&input).expect("a folder");
    let tensor = |name: &str, dtype, shape: Vec<usize>, bytes| {
        let name = format!("layers.0.up_proj.{name}");
        model::Tensor { name, dtype, shape, bytes }
    };
    let cast = || {
        let bytes = (0..64 * 128).map(|at| (at * 37 % 0x7F) as u8).collect();
        tensor("weight", Dtype::F8_E4M3, vec![64, 128], bytes)
    };
    let write = |tensors: &[model::Tensor], config: &str| {
        model::write(&input.join("model.safetensors"), tensors);
        fs::write(input.join("config.json"), config).expect("a config");
    };
    let llama = r#"{"model_type": "llama"}"#;
    write(&[cast()], llama);
    let decode = "convert model --out dense --dialect plain --decode-fp8 bf16";
    let (code, said, note) = run(folder.path(), decode);
    assert!(code == 0 && said.contains("1 weight decoded to floats"), "{said}{note}");
    assert!(note.contains("note: model: 1 weight in FP8 without scales, read by the"), "{note}");
    let dense = Checkpoint::open(folder.path().join("dense")).expect("a checkpoint");
    let weights = dense.weights().expect("weights");
    assert_eq!(
        (weights[0].kind(), weights[0].values().expect("floats").1[2]),
        ("BF16".into(), 5.0)
    );
    succeeds(folder.path(), "compare model dense");
    let said = succeeds(folder.path(), "quantize model --out out");
    assert!(said.contains("1 of 1 weight quantized"), "{said}");
    // With scales of another name, or where the config says that there are some, it is no cast.
    let scale = || tensor("scale_weight", Dtype::F32, vec![], 2_f32.to_le_bytes().to_vec());
    write(&[cast(), scale()], llama);
    let says = ["nothing says which dialect `layers.0.up_proj.weight` is in"];
    fails(folder.path(), "quantize model --out x", 2, &says);
    let config = r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}"#;
    write(&[cast()], config);
    let says = ["`layers.0.up_proj.weight`: it needs `layers.0.up_proj.weight_scale`"];
    fails(folder.path(), "quantize model --out x", 2, &says);
}

#[test]
fn weights_of_subnormal_numbers_have_the_error_that_is_said() {
    let folder = tempdir().expect("a folder");
    let name = "layers.0.o_proj.weight";
    let tiny: Vec<f32> = model::values(32 * 64, 2).iter().map(|value| value * 1e-38).collect();
    model::write(&folder.path().join("m.safetensors"), &[floats(name, &[32, 64], &tiny)]);
    let report = succeeds(folder.path(), "quantize m.safetensors --out out --json");
    let report: serde_json::Value = serde_json::from_str(&report).expect("an object");
    let found = report["errors"]["mean_percent"].as_f64().expect("a number");
    let squares = |values: &[f64]| values.iter().map(|value| value * value).sum::<f64>();
    let after = values_in(&folder.path().join("out"), name);
    let difference: Vec<f64> = tiny.iter().zip(&after).map(|(a, b)| f64::from(*a) - b).collect();
    let before: Vec<f64> = tiny.iter().map(|&value| value.into()).collect();
    let expected = 100.0 * (squares(&difference) / squares(&before)).sqrt();
    assert!((found - expected).abs() < 0.01, "{found}, expected {expected}");
    assert!(after.iter().any(|value| *value != 0.0), "something is left");
    assert!(!succeeds(folder.path(), "inspect out").contains("inf"));
}

#[test]
fn a_scale_without_a_reciprocal_is_an_error_that_names_the_weight() {
    let folder = tempdir().expect("a folder");
    let name = "layers.0.o_proj.weight";
    let mut fp4 = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![1, 16], false, false);
    (fp4.codes, fp4.scales) = (vec![0x22; 8].into(), vec![0x38].into());
    fp4.tensor_scale = Some(TensorScale::Multiplier(Numbers::new(&[1e-44])));
    let weights = vec![Weight::new(name, 0, Value::Fp4(fp4))];
    let model = Model { weights, ..Model::default() };
    let written = model.write(folder.path().join("nv"), "modelopt", &WriteOptions::default());
    written.expect("ModelOpt states the scale itself");
    let convert = "convert nv --dialect compressed-tensors --out out";
    let fact = format!("tensor `{name}`: its tensor scale is 1e-44");
    let remedy = format!("finite f32 other than 0; pass --keep '{name}', or write another dialect");
    fails(folder.path(), convert, 2, &[&fact, &remedy]);
    let said = succeeds(folder.path(), &format!("{convert} --keep {name}"));
    assert!(said.contains(&format!("`{name}`: kept as BF16")), "{said}");
}

#[test]
fn wide_matrices_that_stay_are_noted_and_cast_if_asked() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("model");
    fs::create_dir(&path).expect("a folder");
    let wide = |name: &str, shape: &[usize], seed| {
        floats(name, shape, &model::values(shape.iter().product(), seed))
    };
    let write = |largest: f32| {
        let mut embedding = wide("model.embed_tokens.weight", &[64, 64], 1);
        embedding.bytes[..4].copy_from_slice(&largest.to_le_bytes());
        let norm = wide("model.norm.weight", &[64], 2);
        let layer = wide("model.layers.0.mlp.down_proj.weight", &[64, 64], 3);
        model::write(&path.join("model.safetensors"), &[embedding, norm, layer]);
        fs::write(path.join("config.json"), r#"{"model_type": "llama"}"#).expect("a config");
    };
    write(0.5);
    let note = "of the result are matrices that stay in f32 or f64; pass --cast-kept bf16";
    let (_, _, said) = run(folder.path(), "quantize model --out as-they-are");
    assert!(said.contains(note), "{said}");
    for dtype in ["bf16", "f16"] {
        let command = format!("quantize model --out {dtype} --cast-kept {dtype} --memory 90MB");
        let (code, _, said) = run(folder.path(), &command);
        assert!(code == 0 && !said.contains(note), "{said}");
        let open = Checkpoint::open(folder.path().join(dtype)).expect("a checkpoint");
        for weight in open.weights().expect("weights") {
            let kind = match weight.module() {
                "model.embed_tokens" => dtype.to_uppercase(),
                "model.norm" => "F32".to_owned(),
                _ => "nvfp4 16".to_owned(),
            };
            assert_eq!(weight.kind(), kind, "{}", weight.name);
        }
        let (_, compared, _) = run(folder.path(), &format!("compare as-they-are {dtype}"));
        assert!(compared.contains("1 quantized weight: 1 the same"), "{compared}");
    }
    let plan = succeeds(folder.path(), "quantize model --dry-run --json --cast-kept bf16");
    let plan: serde_json::Value = serde_json::from_str(&plan).expect("an object");
    assert_eq!(plan["settings"]["cast_kept"], "bf16");
    assert_eq!([&plan["weights"][0]["from"], &plan["weights"][0]["to"]], ["F32", "BF16"]);
    write(1e6);
    for (dtype, says) in [
        ("f16", "embed_tokens.weight`: the value 1e6 is beyond the range of F16; choose BF16"),
        ("f8", "expected bf16 or f16"),
    ] {
        let (code, _, said) =
            run(folder.path(), &format!("quantize model --out x --cast-kept {dtype}"));
        assert!(code == 2 && said.contains(says), "{said}");
    }
    succeeds(folder.path(), "quantize model --out x --cast-kept bf16");
}

#[test]
fn a_cast_that_loses_a_matrix_is_warned_of_by_its_error() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("model");
    fs::create_dir(&path).expect("a folder");
    let floats = |name: &str, scale: f32, seed| {
        let values = model::values(64 * 64, seed).into_iter();
        let bytes = values.flat_map(|value| (scale * value).to_le_bytes()).collect();
        let (dtype, shape) = (safetensors::Dtype::F32, vec![64, 64]);
        model::Tensor { name: name.to_owned(), dtype, shape, bytes }
    };
    let tensors = [
        floats("model.embed_tokens.weight", 1e-30, 1),
        floats("model.layers.0.mlp.down_proj.weight", 1.0, 2),
        floats("lm_head.weight", 1.0, 3),
    ];
    model::write(&path.join("model.safetensors"), &tensors);
    fs::write(path.join("config.json"), r#"{"model_type": "llama"}"#).expect("a config");
    let errors = |dtype: &str| {
        let command = format!("quantize model --out {dtype} --json --cast-kept {dtype}");
        let (code, report, said) = run(folder.path(), &command);
        assert_eq!(code, 0, "{said}");
        let report: serde_json::Value = serde_json::from_str(&report).expect("an object");
        assert_eq!(report["errors"]["weights"].as_array().map(Vec::len), Some(1), "{report}");
        let cast = report["cast"]["weights"].as_array().expect("a list").clone();
        let error = |name: &str| {
            let found = cast.iter().find(|one| one["name"] == format!("{name}.weight"));
            found.expect("a weight")["error_percent"].as_f64().expect("a number")
        };
        (error("model.embed_tokens"), error("lm_head"), said)
    };
    let (tiny, usual, said) = errors("f16");
    let says = "`model.embed_tokens.weight`: the cast changes it by 100.00 %; pass --cast-kept \
                bf16, which changes it by 0.";
    assert!(tiny == 100.0 && usual < 0.1 && said.contains(says), "{tiny} {usual} {said}");
    assert!(!said.contains("`lm_head"), "{said}");
    let (tiny, usual, said) = errors("bf16");
    assert!(tiny < 0.3 && usual < 0.3 && !said.contains("the cast"), "{tiny} {usual} {said}");
    let plain = succeeds(folder.path(), "quantize model --out again --json");
    let plain: serde_json::Value = serde_json::from_str(&plain).expect("an object");
    assert_eq!(plain["cast"], serde_json::Value::Null);
    // Values below the numbers of bf16 too are only kept by their own dtype.
    let tensors = [floats("model.embed_tokens.weight", 1e-43, 1), tensors[1].clone()];
    model::write(&path.join("model.safetensors"), &tensors);
    for dtype in ["bf16", "f16"] {
        let command = format!("quantize model --out least-{dtype} --cast-kept {dtype}");
        let (code, _, said) = run(folder.path(), &command);
        let says = "%; leave out --cast-kept, which keeps its dtype\n";
        assert!(code == 0 && said.contains(says), "{said}");
    }
}

#[test]
fn a_value_that_no_dtype_of_a_cast_has_gets_no_advice_to_choose_one() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("model");
    fs::create_dir(&path).expect("a folder");
    fs::write(path.join("config.json"), r#"{"model_type": "llama"}"#).expect("a config");
    let layer = model::tensor("model.layers.0.mlp.down_proj.weight", &[64, 64], 2);
    for (out, largest, says) in [
        ("some", 1e30, "beyond the range of F16; choose BF16"),
        ("none", 3.4e38, "beyond the range of F16; leave it in its dtype, or scale it down"),
    ] {
        let embedding = floats("model.embed_tokens.weight", &[1, 64], &[largest; 64]);
        model::write(&path.join("model.safetensors"), &[embedding, layer.clone()]);
        let command = format!("quantize model --out {out} --cast-kept f16");
        let (code, _, said) = run(folder.path(), &command);
        assert!(code == 2 && said.contains(says), "{said}");
    }
    succeeds(folder.path(), "quantize model --out x");
}

#[test]
fn float64_is_quantized_as_float32() {
    let folder = tempdir().expect("a folder");
    let write = |name: &str, wide: bool| {
        let mut tensors = Vec::new();
        for (at, weight) in ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"].iter().enumerate() {
            let values = model::values(32 * 64, at as u64 + 1);
            let mut tensor = floats(&format!("layers.0.{weight}.weight"), &[32, 64], &values);
            if wide && at != 1 {
                tensor.dtype = Dtype::F64;
                tensor.bytes = values.iter().flat_map(|&v| f64::from(v).to_le_bytes()).collect();
            }
            tensors.push(tensor);
        }
        model::write(&folder.path().join(format!("{name}.safetensors")), &tensors);
        let out = format!("quantize {name}.safetensors --out {name}");
        let said = succeeds(folder.path(), &out);
        assert!(said.contains("3 of 3 weights quantized"), "{said}");
    };
    write("narrow", false);
    write("wide", true);
    let [narrow, wide] = ["narrow", "wide"].map(|name| packed_in(&folder.path().join(name)));
    assert!(narrow.len() == 3 && narrow == wide, "the same codes and scales");
    succeeds(folder.path(), "compare narrow.safetensors wide.safetensors");
}

#[test]
fn dialects_without_a_place_for_a_choice_are_not_offered() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let (code, _, error) = run(folder.path(), "quantize model --out out --dialect plain");
    assert!(code == 2 && error.contains("[possible values: modelopt, "), "{error}");
    fs::write(folder.path().join("recipe.toml"), "dialect = \"plain\"\n").expect("a recipe");
    let says = ["dialect `plain` has no FP4; choose one of modelopt, miles, compressed-tensors, "];
    fails(folder.path(), "quantize model --out out --recipe recipe.toml", 2, &says);
    let (_, _, error) = run(folder.path(), "quantize model --out out --block-size 32");
    let says = "cannot hold blocks of another size; leave out the block size, or use --dialect \
                modelopt\n";
    assert!(error.ends_with(says), "{error}");
    succeeds(folder.path(), "quantize model --out out --block-size 32 --dialect modelopt");
    let (_, _, error) =
        run(folder.path(), "quantize model --out x --dialect gpt-oss --format mxfp4");
    assert!(error.contains("has no stacked experts; use --dialect modelopt or "), "{error}");
}

#[test]
fn a_recipe_says_the_same_as_the_command_line() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let recipe = "preset = \"mlp-only\"\nformat = \"mxfp4\"\nmethod = \"amax\"\n\
                  keep = [\"*.down_proj\"]\nfirst-layers-high-precision = 1\n";
    fs::write(folder.path().join("recipe.toml"), recipe).expect("a recipe");
    succeeds(folder.path(), "quantize model --out recipe --recipe recipe.toml");
    let options = "--preset mlp-only --format mxfp4 --method amax --keep *.down_proj \
                   --first-layers-high-precision 1";
    succeeds(folder.path(), &format!("quantize model --out options {options}"));
    assert_same(&folder.path().join("recipe"), &folder.path().join("options"));
    succeeds(folder.path(), "quantize model --out sse --recipe recipe.toml --method sse");
    assert_eq!(run(folder.path(), "compare sse recipe").0, 1);
    for (recipe, says) in [
        ("formt = \"mxfp4\"\n", ["recipe.toml: line 1: ", "`formt`"]),
        ("# 4 bits\n\nformat = \"mxfp5\"\n", ["recipe.toml: line 3: ", "`mxfp5`"]),
        ("keep = [\n\"a\",\n", ["recipe.toml: line ", "array"]),
        ("only = [\"a\"]\npreset = \"miles\"\n", ["recipe.toml: line 1: `only`", "with `preset`"]),
    ] {
        fs::write(folder.path().join("recipe.toml"), recipe).expect("a recipe");
        fails(folder.path(), "quantize model --out x --recipe recipe.toml", 2, &says);
    }
    // The file is right alone: the option is to blame.
    fs::write(folder.path().join("recipe.toml"), "method = \"sse\"\n").expect("a recipe");
    let options = "--recipe recipe.toml --method four-over-six --format mxfp4";
    let (code, _, error) = run(folder.path(), &format!("quantize model --out x {options}"));
    assert!(code == 2 && !error.contains("recipe.toml"), "{error}");
    assert!(error.contains("four-over-six"), "{error}");
    // The file has the method that the option does not go with.
    fs::write(folder.path().join("recipe.toml"), "method = \"four-over-six\"\n").expect("a recipe");
    let options = "quantize model --out x --recipe recipe.toml --format mxfp4";
    fails(folder.path(), options, 2, &["recipe.toml: line 1: ", "four-over-six", "mxfp4"]);
    // Which weights: what the command line says is instead of what a recipe does.
    let json = |recipe: &str, options: &str| {
        fs::write(folder.path().join("recipe.toml"), recipe).expect("a recipe");
        let command = format!("quantize model --recipe recipe.toml --dry-run --json {options}");
        let json = succeeds(folder.path(), &command);
        serde_json::from_str::<serde_json::Value>(&json).expect("an object")
    };
    let only = "only = [\"*.o_proj\"]\nmethod = \"amax\"\n";
    assert_eq!(json(only, "")["quantized"], 2);
    assert_eq!(json(only, "--preset mlp-only")["quantized"], 6);
    assert_eq!(json("preset = \"mlp-only\"\n", "--only *.o_proj")["quantized"], 2);
    let settings = &json(only, "--keep *.0.*")["settings"];
    let expected = serde_json::json!({
        "format": "nvfp4", "block_size": 16, "dialect": "compressed-tensors", "method": "amax",
        "rule": "te", "hadamard": null, "preset": null, "only": ["*.o_proj"], "keep": ["*.0.*"],
        "first_layers_high_precision": 0, "last_layers_high_precision": 0, "together": null,
        "calibration": null, "weights": [], "cast_kept": null,
    });
    assert_eq!(*settings, expected);
}

/// A recipe with other formats for some weights.
const MIXED: &str = r#"
method = "amax"

[[weights]]
names = ["*.mlp.*"]
format = "mxfp4"

[[weights]]
names = ["*.1.*.down_proj", "*.o_proj"]
format = "dense"

[[weights]]
names = ["model.layers.0.self_attn.o_proj.weight"]
format = "nvfp4"
method = "sse"
"#;

#[test]
fn a_recipe_chooses_formats_for_some_weights_in_every_dialect_that_can_say_them() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    fs::write(folder.path().join("mixed.toml"), MIXED).expect("a recipe");
    for (dialect, says) in [
        ("modelopt", "MIXED_PRECISION"),
        ("compressed-tensors", "mixed-precision"),
        ("mlx", "mxfp4"),
        ("gguf", ""),
    ] {
        let end = if dialect == "gguf" { ".gguf" } else { "" };
        let made = |name: &str, options: &str| {
            let out = format!("{dialect}-{name}{end}");
            let command = format!("quantize model --out {out} --dialect {dialect} {options}");
            succeeds(folder.path(), &command);
            folder.path().join(out)
        };
        let mixed = made("mixed", "--recipe mixed.toml");
        let found = packed_in(&mixed);
        let nvfp4 = packed_in(&made("nvfp4", "--method amax"));
        let mxfp4 = packed_in(&made("mxfp4", "--method amax --format mxfp4"));
        let sse = packed_in(&made("sse", "--method sse"));
        assert_eq!((found.len(), nvfp4.len()), (12, 14), "{dialect}");
        for (name, found) in &found {
            let expected = match name.as_str() {
                name if name.contains(".mlp.") => &mxfp4,
                "model.layers.0.self_attn.o_proj.weight" => &sse,
                _ => &nvfp4,
            };
            assert!(*found == expected[name], "{dialect}: {name}: {}", found.0);
        }
        assert!(!found.contains_key("model.layers.1.mlp.down_proj.weight"), "{dialect}");
        assert!(!found.contains_key("model.layers.1.self_attn.o_proj.weight"), "{dialect}");
        if !end.is_empty() {
            continue;
        }
        let config = fs::read_to_string(mixed.join("config.json")).expect("a config");
        assert!(config.contains(says), "{config} does not say {says}");
        // And it is the same model in another dialect.
        let other = if dialect == "modelopt" { "compressed-tensors" } else { "modelopt" };
        let convert = format!("convert {dialect}-mixed --out {dialect}-{other} --dialect {other}");
        succeeds(folder.path(), &convert);
        assert!(packed_in(&folder.path().join(format!("{dialect}-{other}"))) == found, "{dialect}");
    }
    let table = succeeds(folder.path(), "quantize model --dry-run --recipe mixed.toml");
    let counts = "12 of 19 weights quantized (6 nvfp4 in blocks of 16, amax; 5 mxfp4 ";
    let words = [
        "asked to keep `*.o_proj`",
        "; compressed-tensors, all-linear, 3 `[[weights]]` tables): ",
        "mxfp4 32",
        counts,
    ];
    for word in words {
        assert!(table.contains(word), "{table} does not say {word}");
    }
}

#[test]
fn statistics_that_no_method_of_a_recipe_needs_are_noted() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    fs::write(folder.path().join("mixed.toml"), MIXED).expect("a recipe");
    model::write(&folder.path().join("other.safetensors"), &[model::tensor("other", &[8], 1)]);
    let options = "--dry-run --recipe mixed.toml --calibration other.safetensors";
    let (code, _, note) = run(folder.path(), &format!("quantize model {options}"));
    let says = "note: none of the methods needs input statistics: other.safetensors is not used";
    assert!(code == 0 && note.contains(says), "{note}");
}

#[test]
fn recipes_that_cannot_be_obeyed_name_the_weight_and_the_dialect() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let bad = |options: &str, recipe: &str, says: &[&str]| {
        fs::write(folder.path().join("recipe.toml"), recipe).expect("a recipe");
        let command = format!("quantize model --out out.gguf --recipe recipe.toml {options}");
        let command =
            if options.contains("gguf") { command } else { command.replace("out.gguf", "out") };
        fails(folder.path(), &command, 2, says);
    };
    let of = |names: &str, rest: &str| format!("[[weights]]\nnames = [\"{names}\"]\n{rest}\n");
    // Dialects without a place for it.
    let large = of("*.o_proj", "block-size = 32");
    for dialect in ["compressed-tensors", "gguf", "mlx", "miles"] {
        let says = ["o_proj.weight`: the dialect `", dialect, "cannot hold"];
        bad(&format!("--dialect {dialect}"), &large, &says);
    }
    let small = of("*.o_proj", "format = \"mxfp4\"");
    let says = ["o_proj.weight`: the dialect `miles` cannot hold FP4 other than NVFP4"];
    bad("--dialect miles", &small, &says);
    bad("--dialect gpt-oss", &small, &["`: the dialect `gpt-oss` cannot hold"]);
    // Layers that run as one.
    let key = of("*.0.*.k_proj", "format = \"mxfp4\"");
    for dialect in ["modelopt", "compressed-tensors"] {
        let says = ["0.self_attn.", "_proj.weight`: the dialect `", dialect, "another format"];
        bad(&format!("--dialect {dialect}"), &key, &says);
    }
    let apart = format!("together = false\n{key}");
    fs::write(folder.path().join("recipe.toml"), apart).expect("a recipe");
    succeeds(folder.path(), "quantize model --out apart --recipe recipe.toml");
    let method = of("*.0.*.k_proj", "method = \"amax\"");
    let says = ["k_proj.weight` (amax, rule te)", "share a tensor scale; choose the same method"];
    bad("", &method, &says);
    // With options that differ the methods have one name.
    let tuned = "method = { four-over-six = { range = \"448\", error = \"mse\" } }";
    let tuned = format!("method = \"four-over-six\"\n{}", of("*.0.*.k_proj", tuned));
    bad("", &tuned, &["(four-over-six, rule te)", "(four-over-six (range 448), rule te)"]);
    let table = of("*.o_proj", "method = { gptq = { dampening = 0.1 } }");
    bad("", &table, &["recipe.toml: line 3: ", "unknown field `dampening`, expected one of"]);
    // Choices that do not go together, and names of nothing.
    let undefined = of("*.o_proj", "format = \"mxfp4\"\nmethod = \"four-over-six\"");
    let says = [
        "recipe.toml: line 4: weights `*.o_proj`: method `four-over-six` is not defined for mxfp4",
    ];
    bad("", &undefined, &says);
    bad("", &of("*.o_proj", "rule = \"even\""), &["weights `*.o_proj`: the rule `even`"]);
    bad("", &of("*.o_proj", "block-size = 8"), &["block size 8: expected 16 or 32"]);
    bad("", "block-size = 8", &["recipe.toml: line 1: block size 8: expected 16 or 32"]);
    let says = ["recipe.toml: line 2: `weights` pattern `*.q` matches none of 19"];
    bad("", &of("*.q", "method = \"sse\""), &says);
    let says = ["recipe.toml: line 2: unknown dialect `awq`; choose one of plain, "];
    bad("", "\ndialect = \"awq\"", &says);
    bad("", "\ndialect = \"plain\"", &["recipe.toml: line 2: the dialect `plain` has no FP4"]);
    bad("", &key, &["recipe.toml: `model.layers.0.self_attn.", "another format"]);
    bad("", &of("*.o_proj", "method = \"gptq\""), &["method `gptq` needs", "--save-calibration"]);
    let dense = of("*.o_proj", "format = \"dense\"\nmethod = \"sse\"");
    bad("", &dense, &["weights `*.o_proj`: dense ones have no method"]);
    bad("", "[[weights]]\nformat = \"dense\"\n", &["recipe.toml: line ", "`names`"]);
    let format = of("*.o_proj", "format = \"int4\"");
    bad(
        "",
        &format,
        &["recipe.toml: line 3: ", "`int4`: unknown; choose one of dense, nvfp4, mxfp4"],
    );
    bad(
        "",
        "preset = \"attention\"\n",
        &["recipe.toml: line 1: preset `attention`: unknown; choose one of ", "mlp-only"],
    );
    bad("", &of("*.o_proj", ""), &["weights `*.o_proj`: names without a choice; add a format"]);
    assert_eq!(names(folder.path()), ["apart", "model", "recipe.toml"]);
}

#[test]
fn tables_of_a_recipe_that_quantize_nothing_are_warned_of() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let warned = |recipe: &str| {
        fs::write(folder.path().join("recipe.toml"), recipe).expect("a recipe");
        let (code, _, error) = run(folder.path(), "quantize model --dry-run --recipe recipe.toml");
        assert_eq!(code, 0, "{error}");
        error
    };
    let table = |name: &str, choice: &str| format!("[[weights]]\nnames = ['{name}']\n{choice}\n");
    let mxfp4 = "format = 'mxfp4'";
    let head = warned(&format!("{}{}", table("*.mlp.*", mxfp4), table("lm_head", mxfp4)));
    let says = "`[[weights]]` table 2 (`lm_head`): quantizes no weight: `lm_head.weight` stays \
                (the output layer); remove the table, or choose the weight with `only`";
    assert!(head.contains(says) && head.matches("[[weights]]").count() == 1, "{head}");
    let twice = warned(&[table("*.o_proj", mxfp4), table("*.o_*", "method = 'amax'")].concat());
    let says = "table 1 (`*.o_proj`): quantizes no weight: a later table decides about `model.";
    assert!(twice.contains(says), "{twice}");
    // A later table is the reason, though other weights of the names stay.
    let later = warned(&[table("*.layers.0.*", mxfp4), table("*", "method = 'amax'")].concat());
    let says = "table 1 (`*.layers.0.*`): quantizes no weight: a later table decides about";
    assert!(later.contains(says) && later.matches("[[weights]]").count() == 1, "{later}");
    // A vector stays too, but only for the other weight there is something to do.
    let names = format!("[[weights]]\nnames = ['*norm*', 'lm_head']\n{mxfp4}\n");
    let says = "`lm_head.weight` stays (the output layer); remove the table, or choose";
    assert!(warned(&names).contains(says), "{}", warned(&names));
    // `only` does not override it.
    let kept = warned(&format!("keep = ['*.o_proj']\n{}", table("*.o_proj", mxfp4)));
    let says = "o_proj.weight` stays (asked to keep `*.o_proj`); remove the table\n";
    assert!(kept.contains(says), "{kept}");
    let dense = warned(&table("lm_head", "format = 'dense'"));
    assert!(!dense.contains("[[weights]]"), "it is what the user wants: {dense}");
}

#[test]
fn a_plan_names_the_schemes_that_weights_have() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let plan = |recipe: &str, json: &str| {
        fs::write(folder.path().join("recipe.toml"), recipe).expect("a recipe");
        succeeds(folder.path(), &format!("quantize model --dry-run --recipe recipe.toml {json}"))
    };
    let table = |name: &str, choice: &str| format!("[[weights]]\nnames = ['{name}']\n{choice}\n");
    // All weights have another format than the recipe.
    let all = plan(&format!("only = ['*.mlp.*']\n{}", table("*", "format = 'mxfp4'")), "");
    assert!(all.contains(" quantized (mxfp4 in blocks of 32, amax by rule even; "), "{all}");
    assert!(!all.contains("nvfp4") && !all.contains("method"), "{all}");
    let mixed = [
        table("*.o_proj", "method = 'amax'"),
        table("*.down_proj", "rule = 'te-division'"),
        table("*.mlp.[gu]*", "format = 'mxfp4'"),
    ];
    let text = plan(&mixed.concat(), "");
    let line = |word: &str| text.lines().find(|line| line.contains(word)).expect("a line");
    assert!(line(".o_proj").contains("amax") && line("weight ").contains("method"), "{text}");
    assert!(line(".down_proj").contains("rule te-division"), "{text}");
    assert!(!line(".up_proj").contains("rule") && !line(".q_proj").contains("sse"), "{text}");
    let by_sse = table("*.down_proj", "format = 'mxfp4'\nmethod = 'sse'");
    let two = plan(&[table("*.mlp.[gu]*", "format = 'mxfp4'"), by_sse].concat(), "");
    let said =
        |word: &str| two.lines().any(|line| line.contains(word) && line.contains("sse, rule"));
    assert!(said(".down_proj") && !said(".up_proj"), "{two}");
    assert!(text.contains("2 nvfp4 in blocks of 16, amax; "), "{text}");
    let report: serde_json::Value =
        serde_json::from_str(&plan(&mixed.concat(), "--json")).expect("an object");
    let rows = report["weights"].as_array().expect("a list");
    let of = |end: &str| {
        let row = rows.iter().find(|row| row["name"].as_str().is_some_and(|n| n.ends_with(end)));
        let row = row.expect("a row");
        [&row["method"], &row["rule"]].map(|value| value.as_str().unwrap_or("none").to_owned())
    };
    assert_eq!(of("o_proj.weight"), ["amax", "te"]);
    assert_eq!(of("up_proj.weight"), ["amax", "even"]);
    assert_eq!(of("lm_head.weight"), ["none", "none"]);
}

#[test]
fn weights_of_an_unknown_architecture_that_are_guessed_are_marked() {
    let folder = tempdir().expect("a folder");
    let tensors = ["layers.0.q_proj.weight", "layers.0.odd.weight"];
    let tensors = tensors.map(|name| model::tensor(name, &[32, 32], 1));
    model::write(&folder.path().join("model.safetensors"), &tensors);
    let plan = succeeds(folder.path(), "quantize model.safetensors --dry-run");
    let line = |word: &str| plan.lines().find(|line| line.contains(word)).expect("a line");
    assert!(line(".odd").contains("guessed by its shape"), "{plan}");
    assert!(!line(".q_proj").contains("guessed"), "{plan}");
}

#[cfg(unix)]
#[test]
fn a_path_of_statistics_that_is_no_text_is_refused() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    for last in ["--json", "--dry-run", "--resume"] {
        let output = model::fp4()
            .current_dir(folder.path())
            .args(["quantize", "model", "--out", "out", last, "--calibration"])
            .arg(OsStr::from_bytes(b"known-\xFF.safetensors"))
            .output()
            .expect("it runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{last}: {error}");
        assert!(error.contains(".safetensors: expected a path in UTF-8"), "{last}: {error}");
    }
    assert_eq!(names(folder.path()), ["model"]);
}

#[test]
fn what_is_quantized_already_is_kept_in_the_words_of_another_dialect() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out some --dialect modelopt --only *.o_proj");
    let said = succeeds(folder.path(), "quantize some --out all --dialect compressed-tensors");
    assert!(said.contains("12 of 19 weights quantized"), "{said}");
    let table = succeeds(folder.path(), "inspect all");
    assert!(table.contains("14 of 19 weights quantized"), "{table}");
}

/// The statistics of an expert that no token chose.
#[test]
fn statistics_of_no_inputs_leave_the_search_by_the_weight() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let tensors = model::tensors(SMALL);
    let layers = tensors.iter().filter(|tensor| tensor.name.contains("_proj"));
    let zeros = layers.map(|tensor| {
        let cols = tensor.shape[1];
        let (name, shape, bytes) = (tensor.name.clone(), vec![cols; 2], vec![0; 4 * cols * cols]);
        model::Tensor { name, dtype: Dtype::F32, shape, bytes }
    });
    model::write(&folder.path().join("zeros.safetensors"), &zeros.collect::<Vec<_>>());
    succeeds(folder.path(), "quantize model --out sse --method sse");
    let options = "--method sse-weighted --calibration zeros.safetensors";
    succeeds(folder.path(), &format!("quantize model --out weighted {options}"));
    let [sse, weighted] = ["sse", "weighted"].map(|out| {
        let mut files = model::bytes(&folder.path().join(out));
        files.retain(|name, _| name.ends_with(".safetensors"));
        files
    });
    assert!(!sse.is_empty() && sse == weighted, "all channels count the same");
}

#[test]
fn weights_that_were_chosen_and_cannot_be_quantized_are_named() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let options = "--only *.q_proj --only *.o_proj";
    let (code, _, error) = run(folder.path(), &format!("quantize model --out out {options}"));
    assert_eq!(code, 0, "{error}");
    let says = "q_proj` stay: runs as one with `k_proj`, which stays";
    assert!(error.contains("warning: ") && error.contains(says), "{error}");
    // All are named, in one line.
    assert_eq!(error.matches("which stays").count(), 1, "{error}");
    let (_, _, all) = run(folder.path(), "quantize model --out all");
    assert!(!all.contains("warning"), "{all}");
}

#[test]
fn a_dialect_of_experts_says_what_is_missing() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let plan = "quantize model --dry-run --dialect gpt-oss";
    // In any format: another one would not help.
    let says = ["the model has no stacked experts; use --dialect "];
    fails(folder.path(), plan, 2, &says);
    fails(folder.path(), &format!("{plan} --format mxfp4"), 2, &says);
}

#[test]
fn a_folder_made_from_gguf_says_that_no_program_loads_it() {
    let folder = tempdir().expect("a folder");
    model::gguf(&folder.path().join("model.gguf"));
    let (code, _, error) =
        run(folder.path(), "quantize model.gguf --out out --dialect compressed-tensors");
    assert_eq!(code, 0, "{error}");
    assert!(error.contains("no program is known that loads the result"), "{error}");
    assert!(!error.contains("from_pretrained"), "{error}");
}

#[test]
fn patterns_of_a_recipe_that_match_nothing_are_named() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let write = |text: &str| fs::write(folder.path().join("recipe.toml"), text).expect("a recipe");
    let plan = "quantize model --dry-run --recipe recipe.toml";
    let recipe = "method = \"sse\"\nkeep = [\n  \"*.q_proj\",\n  \"re:.*o_porj\",\n]\n";
    let says = ["recipe.toml: line 4: `keep` pattern `re:.*o_porj`", "matches none"];
    write(recipe);
    fails(folder.path(), plan, 2, &says);
    // Another option is not blamed, unless the pattern is its own.
    fails(folder.path(), &format!("{plan} --keep *.k_proj"), 2, &says);
    write("keep = [\"*.q_proj\"]\n");
    let (_, _, error) = run(folder.path(), &format!("{plan} --keep *.k_porj"));
    assert!(error.starts_with("error: --keep pattern `*.k_porj` matches none"), "{error}");
    write("\nonly = [\"*.{q,k}_proj\"]\n");
    let says = "recipe.toml: line 2: pattern `*.{q,k}_proj`: braces have no meaning";
    fails(folder.path(), plan, 2, &[says]);
    write("keep = [\"re:(\"]\n");
    fails(folder.path(), plan, 2, &["recipe.toml: line 1: pattern `re:(`: unclosed group"]);
}

#[test]
fn a_plan_without_a_quantized_weight_is_shown_and_explained() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let dry = |arguments: &str, says: &[&str]| {
        let (code, table, error) = run(folder.path(), &format!("quantize {arguments} --dry-run"));
        assert_eq!(code, 2, "{error}");
        assert!(table.contains("lm_head ") && table.contains("0 of 19 weights"), "{table}");
        says.iter().for_each(|word| assert!(error.contains(word), "{error} does not say {word}"));
    };
    dry("model --only lm_head --keep lm_*", &["`lm_head.weight`: asked to keep `lm_*`"]);
    dry("model --first-layers-high-precision 2", &["layer 0 stays in high precision"]);
    dry("model --only *layernorm", &["input_layernorm.weight`: not a matrix"]);
    succeeds(folder.path(), "quantize model --out out");
    let says = ["nothing is left to quantize", "is nvfp4 already", "`fp4 convert`"];
    dry("out", &says);
    fails(folder.path(), "quantize out --out x", 2, &says);
}

#[test]
fn all_reasons_why_nothing_is_quantized_are_told() {
    let folder = tempdir().expect("a folder");
    let name = |at: usize| format!("layers.{at}.o_proj.weight");
    let shapes: [&[usize]; 4] = [&[8, 24], &[8, 24], &[8, 40], &[2, 2, 2, 16]];
    let tensors: Vec<_> =
        shapes.iter().enumerate().map(|(at, shape)| model::tensor(&name(at), shape, 1)).collect();
    model::write(&folder.path().join("odd.safetensors"), &tensors);
    let says = [
        "none of 4 tensors would be quantized: `layers.0.o_proj.weight`: 24 columns ",
        " (and 1 more); `layers.2.o_proj.weight`: 40 columns ",
        "; `layers.3.o_proj.weight`: ",
    ];
    fails(folder.path(), "quantize odd.safetensors --out out", 2, &says);
}

#[test]
fn choices_that_do_not_go_together_are_named() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let bad = |options: &str, says: &[&str]| {
        fails(folder.path(), &format!("quantize model --out out {options}"), 2, says);
    };
    let says = ["--only pattern `nothing*`", "none of 19", "lm_head.weight`; name some of them"];
    bad("--only nothing*", &says);
    bad("--keep *.o_proj --keep *.qkv_proj", &["--keep pattern `*.qkv_proj`", "none of 19"]);
    bad("--keep *.o_porj", &["`*.o_porj` matches none of 19 tensors; did you mean `*.o_proj`?"]);
    bad("--only lm_haed", &["; did you mean `lm_head`?"]);
    bad("--keep o_proj", &["--keep pattern `o_proj`", "; did you mean `*.o_proj`?"]);
    bad("--keep model.layers.0.mlp", &["; did you mean `model.layers.0.mlp.*`?"]);
    bad("--preset experts-only", &["none of 19 tensors", "down_proj.weight`: not an expert"]);
    bad("--only *layernorm", &["name matrices of floats with --only, such as `model.layers.0."]);
    bad("--only *.q_proj", &["name `k_proj` and `v_proj` with --only too, or set `together "]);
    bad(
        "--first-layers-high-precision 9",
        &["; keep fewer layers in high precision: the model has 2"],
    );
    let says = ["`lm_head.weight`: asked to keep `*`", "; leave `*` out of what is kept"];
    bad("--keep *", &says);
    bad("--keep *_proj", &["none of 19", "down_proj.weight`: asked to keep `*_proj`"]);
    bad("--format mxfp4 --rule te", &["te", "mxfp4"]);
    bad("--format mxfp4 --method four-over-six", &["four-over-six", "mxfp4"]);
    bad("--format mxfp4 --preset miles", &["preset `miles` is for nvfp4, not mxfp4"]);
    bad("--format mxfp4 --dialect miles", &["miles", "cannot hold"]);
    bad("--block-size 48", &["48", "expected 16 or 32"]);
    bad("--keep *.{q,k}_proj", &["pattern `*.{q,k}_proj`: braces have no meaning; write "]);
    bad("--keep *.[kv_proj", &["pattern `*.[kv_proj`: `[` is not closed; write "]);
    bad("--keep *.q_proj,*.k_proj", &["none of 19", "a comma does not separate names"]);
    bad("--keep *.O_PROJ", &["; did you mean `*.o_proj`?"]);
    bad("--keep re:o_proj", &["; did you mean `re:.*o_proj`?"]);
    bad("--keep *.z_proj", &["none of 19", "lm_head.weight`; name some of them"]);
    bad("--keep re:(", &["pattern `re:(`: unclosed group"]);
    bad("--keep re:(?!a)b", &["pattern `re:(?!a)b`: look-around"]);
    bad("--keep re:a{9999}{99}", &["pattern `re:a{9999}{99}`: ", "size limit"]);
    for (option, known) in [
        ("--dialect quark", "compressed-tensors, "),
        ("--rule x", "te-division"),
        ("--method x", "four-over-six, "),
        ("--preset x", "mlp-only, "),
        ("--from x", "torchao, "),
    ] {
        let (code, _, error) = run(folder.path(), &format!("quantize model --out out {option}"));
        assert!(code == 2 && error.contains(known), "{error}");
    }
    assert_eq!(names(folder.path()), ["model"]);
}

#[test]
fn the_command_line_adds_to_what_a_recipe_keeps_and_says_what_it_replaces() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let recipe = "keep = [\"*.o_proj\"]\nmethod = \"amax\"\nonly = [\"*.mlp.*\", \"*.o_proj\"]\n";
    fs::write(folder.path().join("r.toml"), recipe).expect("a recipe");
    let dry = |options: &str| {
        let (code, json, said) = run(
            folder.path(),
            &format!("quantize model --dry-run --json --recipe r.toml {options}"),
        );
        assert_eq!(code, 0, "{said}");
        let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
        (report, said)
    };
    let (report, said) = dry("--keep *.down_proj --method amax");
    assert_eq!(report["settings"]["keep"], serde_json::json!(["*.o_proj", "*.down_proj"]));
    assert_eq!(report["quantized"], 4);
    assert!(!said.contains("replaces"), "{said}");
    for (options, names) in [
        ("--method sse", "`method`"),
        ("--preset mlp-only", "`only`"),
        ("--only *.mlp.* --method sse", "`method`, `only`"),
    ] {
        let (report, said) = dry(options);
        let note = format!("r.toml: the command line replaces its {names}");
        assert!(said.contains(&format!("note: {note}\n")), "{said}");
        assert!(report["notes"].as_array().is_some_and(|notes| notes.contains(&note.into())));
    }
}

#[test]
fn a_file_of_a_folder_is_read_with_the_config_next_to_it() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let file = "model/model-00001-of-00002.safetensors";
    let (code, _, said) = run(folder.path(), &format!("quantize {file} --out out"));
    assert_eq!(code, 0, "{said}");
    assert!(
        said.contains(&format!("note: {file}: read with the config.json next to it")),
        "{said}"
    );
    assert!(!said.contains("the architecture is not known"), "{said}");
    assert!(said.contains("note: of the other files only config.json is copied; give"), "{said}");
    let config = fs::read_to_string(folder.path().join("out/config.json")).expect("a config");
    assert!(config.contains("\"model_type\": \"llama\""), "{config}");
    assert!(config.contains("nvfp4-pack-quantized"), "{config}");
    // What is quantized names its dialect there.
    let (code, _, said) = run(folder.path(), "inspect out/model-00001-of-00002.safetensors");
    assert!(code == 0 && !said.contains("by the names of its tensors"), "{said}");
}

#[test]
fn a_method_that_chooses_a_tensor_scale_is_refused_where_there_is_none() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let command = "quantize model --out out --method sse-tensor-scale --dialect";
    let says = "method `sse-tensor-scale` chooses a tensor scale, and the dialect `mlx` has none; \
                choose the method `sse`";
    fails(folder.path(), &format!("{command} mlx"), 2, &[says]);
    succeeds(folder.path(), &format!("{command} modelopt --dry-run"));
}

#[test]
fn statistics_that_are_missing_or_of_another_shape_are_refused_with_what_writes_them() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let tensors = model::tensors(SMALL);
    let name =
        |part: &str| tensors.iter().find(|one| one.name.contains(part)).map(|one| one.name.clone());
    let of = |part: &str, shape: &[usize]| {
        let values = vec![1.0; shape.iter().product()];
        floats(&name(part).expect("a layer"), shape, &values)
    };
    let write = |path: &str, tensor| model::write(&folder.path().join(path), &[tensor]);
    write("short.safetensors", of("down_proj", &[3, 5]));
    write("one.safetensors", of("up_proj", &[128, 128]));
    write("other.safetensors", of("norm", &[128]));
    let made_by = "tests/interop/calibration.py";
    let options = "quantize model --out out --method gptq";
    fails(folder.path(), options, 2, &["needs input statistics; pass --calibration", made_by]);
    for (file, says) in [
        ("short", "expected X^T X of 1 x 192 inputs in F32, found [3, 5] of F32"),
        ("one", "no statistics of `model.layers.0."),
        ("other", "no statistics of the 14 weights to quantize"),
    ] {
        let command = format!("{options} --calibration {file}.safetensors");
        fails(folder.path(), &command, 2, &[says, made_by]);
    }
    fs::write(folder.path().join("r.toml"), "\nkeep = \"*.o_proj\"\n").expect("a recipe");
    let says = "r.toml: line 2: `keep`: expected a list, such as [\"a\", \"b\"], found the text";
    fails(folder.path(), "quantize model --dry-run --recipe r.toml", 2, &[says]);
}
