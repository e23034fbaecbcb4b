//! The output of the commands, run as a user runs them.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn llama(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llama"));
    command.args(arguments).current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."));
    for variable in ["RUST_BACKTRACE", "RUST_LIB_BACKTRACE"] {
        command.env_remove(variable);
    }
    command
}

fn stdout(output: Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8(output.stdout).expect("text")
}

/// Returns a path that does not exist.
fn out(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if path.is_dir() {
        std::fs::remove_dir_all(&path).expect("a folder of an earlier run");
    }
    path
}

/// Checks that lines fit 80 columns, but for lines with a path of this test.
fn assert_narrow(output: &str) {
    let has_path = |line: &&str| line.contains(env!("CARGO_TARGET_TMPDIR"));
    for line in output.lines().filter(|line| !has_path(line)) {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn errors_print_without_a_backtrace() {
    let run = |command: &mut Command| {
        let output = command.output().expect("a program");
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).expect("text")
    };
    let arguments = ["perplexity", "tests/models/nothing"];
    let message = run(&mut llama(&arguments));
    let expected = "error: tests/models/nothing: has no config.json; ";
    assert!(message.starts_with(expected), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
    assert_eq!(run(llama(&arguments).env("RUST_BACKTRACE", "1")), message);
    let traced = run(llama(&arguments).env("RUST_LIB_BACKTRACE", "1"));
    assert!(traced.contains("Stack backtrace"), "{traced}");
}

#[test]
fn numbers_that_mean_nothing_are_refused_before_the_work() {
    for arguments in [
        &["train", "x", "--batch", "0"][..],
        &["train", "x", "--context", "1"],
        &["train", "x", "--learning-rate", "nan"],
        &["distill", "tests/models/genesis", "x", "--batch", "0"],
        &["distill", "tests/models/genesis", "x", "--distill-method", "gptq"],
        &["perplexity", "tests/models/genesis", "--window", "1"],
        &["perplexity", "tests/models/genesis", "--stride", "0"],
        &["generate", "tests/models/genesis", "--temperature", "inf"],
        &["generate", "tests/models/genesis", "--top-k", "5"],
        &["generate", "tests/models/genesis", "--temperature", "1", "--top-k", "0"],
    ] {
        let output = llama(arguments).output().expect("a program");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.starts_with("error: "), "{said}");
    }
}

#[test]
#[ignore = "slow"]
fn layers_that_engines_fuse_share_a_tensor_scale_after_distillation() {
    let (trained, distilled) = (out("to distill"), out("distilled"));
    let [trained, distilled] = [&trained, &distilled].map(|path| path.to_str().expect("text"));
    stdout(llama(&["train", trained, "--steps", "0"]).output().unwrap());
    let distill = ["distill", trained, distilled, "--steps", "2", "--batch", "1"];
    let text = stdout(llama(&distill).output().unwrap());
    assert!(text.contains("and 19 more: NVFP4") && text.contains("of a given amax"), "{text}");
    let report = ["report", distilled, "--reference", trained, "--held-out", "0.01"];
    let output = llama(&report).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned() + &stdout(output);
    // Lines may be broken anywhere.
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains("readers: vLLM") && !said.contains("tensor scale"), "{said}");
    // A dialect without tensor scales.
    let (mlx, distilled) = (out("mlx"), out("distilled for mlx"));
    let [mlx, distilled] = [&mlx, &distilled].map(|path| path.to_str().expect("text"));
    stdout(llama(&["quantize", trained, mlx, "--dialect", "mlx"]).output().unwrap());
    let distill = ["distill", trained, distilled, "--steps", "1", "--batch", "1"];
    stdout(llama(&[&distill[..], &["--dialect", "mlx"]].concat()).output().unwrap());
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let arguments = ["perplexity", "tests/models/genesis", "--text", "README.md"];
    let mut command = llama(&[&arguments[..], &["--held-out", "0.02", "--json"]].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("panicked"), "{said}");
}

#[test]
#[ignore = "slow"]
fn commands_print_80_columns_and_the_next_command() {
    let (trained, quantized) = (out("trained"), out("quantized it"));
    let [trained, quantized] = [&trained, &quantized].map(|path| path.to_str().expect("text"));
    let train = ["train", trained, "--steps", "2", "--batch", "1", "--context", "32"];
    let text = stdout(llama(&[&train[..], &["--held-out", "0.001"]].concat()).output().unwrap());
    assert!(text.ends_with(&format!("next: llama perplexity {trained}\n")), "{text}");
    assert_narrow(&text);

    let text = stdout(llama(&["quantize", trained, quantized]).output().unwrap());
    let next = format!("next: llama report '{quantized}' --reference {trained}\n");
    assert!(text.ends_with(&next), "{text}");
    assert_narrow(&text);

    let perplexity = ["perplexity", quantized, "--held-out", "0.01"];
    assert_narrow(&stdout(llama(&perplexity).output().unwrap()));
    let json = stdout(llama(&[&perplexity[..], &["--json"]].concat()).output().unwrap());
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert!(json["perplexity"].as_f64().is_some(), "{json}");

    let generate = ["generate", quantized, "--prompt", "And ", "--tokens", "4"];
    let text = stdout(llama(&generate).output().unwrap());
    assert!(text.contains("\nproducts: activations int8, lm_head int8\n"), "{text}");
    assert!(
        text.contains("\nprompt: 4 tokens, ") && text.contains("\ndecode: 4 tokens, "),
        "{text}"
    );
    assert_narrow(&text);
    // Activations of FP4 products, and the `lm_head`, are int8 by default, to generate alone.
    let printed = |command: &[&str], options: &[&str]| -> serde_json::Value {
        let text = stdout(llama(&[command, &["--json"], options].concat()).output().unwrap());
        serde_json::from_str(&text).expect("JSON")
    };
    let formats = |of: &serde_json::Value| [of["activations"].clone(), of["lm_head"].clone()];
    let (int8, f32) = (printed(&generate, &[]), ["--activations", "f32", "--lm-head", "as-loaded"]);
    assert_eq!(formats(&int8), ["int8", "int8"]);
    let asked = printed(&generate, &["--activations", "int8", "--lm-head", "int8"]);
    assert_eq!((formats(&asked), &asked["texts"]), (formats(&int8), &int8["texts"]));
    assert_eq!(formats(&printed(&generate, &f32)), ["f32", "as-loaded"]);
    assert_eq!(formats(&printed(&perplexity, &[])), ["f32", "as-loaded"]);
    // A dense model has no product with a choice, but that with an int8 `lm_head`.
    let dense = ["generate", trained, "--prompt", "And ", "--tokens", "2", "--activations", "int8"];
    assert_eq!(formats(&printed(&dense, &[])), ["int8", "int8"]);
    let refused = llama(&[&dense[..], &["--lm-head", "as-loaded"]].concat()).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("leave the option out"), "{said}");
    let in_fp8 = llama(&[&perplexity[..], &["--activations", "fp8"]].concat()).output().unwrap();
    let said = String::from_utf8_lossy(&in_fp8.stderr).into_owned();
    let first = "no layer multiplies in FP8 (layers.0.mlp.down_proj.weight: without FP8, ";
    assert!(!in_fp8.status.success() && said.contains(first), "{said}");
    let rounded = printed(&perplexity, &["--activations", "fp8-rounded"]);
    assert_eq!(formats(&rounded), ["fp8-rounded", "as-loaded"]);
    let [in_f32, rounded] = [&json, &rounded].map(|found| found["perplexity"].as_f64().unwrap());
    assert!(rounded != in_f32 && (rounded / in_f32 - 1.0).abs() < 0.1, "{rounded}, {in_f32}");
}

#[test]
fn sensitivity_fits_80_columns_and_names_the_recipe() {
    let recipe = out("sensitivity").with_extension("toml");
    let recipe = recipe.to_str().expect("text");
    let folder = "tests/models/genesis";
    let arguments = ["sensitivity", folder, "--method", "sse", "--loss-windows", "1"];
    let budget = ["--budget", "5", "--recipe", recipe, "--calibration-windows", "1"];
    let held_out = ["--context", "32", "--held-out", "0.004"];
    let text = stdout(llama(&[&arguments[..], &budget, &held_out].concat()).output().unwrap());
    let next = format!("next: llama quantize {folder} OUT --recipe {recipe}\n");
    assert!(text.ends_with(&next), "{text}");
    assert_narrow(&text);
}

/// Fills the first half of a tensor's bytes in a safetensors file with zeros.
fn damage(file: &Path, tensor: &str) {
    let mut bytes = std::fs::read(file).expect("a file");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
    let offset = |at: usize| header[tensor]["data_offsets"][at].as_u64().expect("an offset");
    let [first, end] = [offset(0), offset(1)].map(|offset| 8 + length + offset as usize);
    bytes[first..first + (end - first) / 2].fill(0);
    std::fs::write(file, bytes).expect("a file");
}

/// Before anything is loaded or trained.
#[test]
fn a_path_that_does_not_fit_the_dialect_is_refused() {
    let model = "tests/models/genesis";
    for (command, name, dialect, kind) in [
        ("quantize", "refused", "gguf", "a file"),
        ("quantize", "refused.gguf", "modelopt", "a folder"),
        ("distill", "refused.GGUF", "mlx", "a folder"),
    ] {
        let path = out(name);
        let arguments = [command, model, path.to_str().expect("text"), "--dialect", dialect];
        let output = llama(&arguments).output().expect("a process");
        let stderr = String::from_utf8_lossy(&output.stderr);
        let expected = format!("{}: the dialect `{dialect}` is {kind}; ", path.display());
        assert!(!output.status.success() && stderr.contains(&expected), "{stderr}");
        assert!(!path.exists());
    }
}

#[test]
#[ignore = "slow"]
fn a_report_is_the_same_for_every_dialect_and_shows_a_damaged_layer_first() {
    let reference = "tests/models/genesis";
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/genesis.txt");
    let book = std::fs::read_to_string(book).expect("the book");
    let end = out("end.txt");
    std::fs::write(&end, &book[book.len() - 3000..]).expect("a text");
    let end = end.to_str().expect("text");
    let json = |model: &str| -> serde_json::Value {
        let options = ["--window", "64", "--stride", "32", "--output-windows", "8", "--json"];
        let arguments = ["report", model, "--reference", reference, "--text"];
        let arguments = [&arguments[..], &[end], &options].concat();
        serde_json::from_str(&stdout(llama(&arguments).output().unwrap())).expect("JSON")
    };
    let figures = |report: &serde_json::Value| -> Vec<f64> {
        let text = &report["texts"][0];
        let keys = ["perplexity", "difference", "standard_error", "divergence"];
        let of_text = keys.map(|key| text[key].clone());
        let errors =
            ["weight_error_percent", "output_error_percent"].map(|key| report[key].clone());
        let figures = of_text.into_iter().chain(errors);
        figures.map(|figure| figure.as_f64().expect("a figure")).collect()
    };
    let mut reports = Vec::new();
    let dialects =
        [("modelopt", "report-mo"), ("compressed-tensors", "report-ct"), ("gguf", "r.gguf")];
    for (dialect, name) in dialects {
        let path = out(name);
        if path.is_file() {
            std::fs::remove_file(&path).expect("a file of an earlier run");
        }
        let path = path.to_str().expect("text");
        let mut quantize = llama(&["quantize", reference, path]);
        // The end of its name says that it is a GGUF file.
        if dialect != "gguf" {
            quantize.args(["--dialect", dialect]);
        }
        stdout(quantize.output().unwrap());
        reports.push(json(path));
    }
    let first = figures(&reports[0]);
    assert!(first.iter().all(|figure| *figure > 0.0), "{}", reports[0]);
    for report in &reports {
        for (figure, expected) in figures(report).into_iter().zip(&first) {
            assert!((figure - expected).abs() < 1e-3 * expected, "{figure}, {expected}: {report}");
        }
        assert_eq!(report["quantized"], 28, "{report}");
    }

    let folder = out("report-ct-damaged");
    std::fs::create_dir_all(&folder).expect("a folder");
    for entry in
        std::fs::read_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join("report-ct")).unwrap()
    {
        let path = entry.expect("an entry").path();
        std::fs::copy(&path, folder.join(path.file_name().expect("a name"))).expect("a copy");
    }
    let layer = "model.layers.2.mlp.up_proj.weight";
    damage(&folder.join("model.safetensors"), &format!("{layer}_scale"));
    let path = folder.to_str().expect("text");
    let report = json(path);
    assert_eq!(report["weights"][0]["name"], layer, "{report}");
    assert!(figures(&report)[3] > 1.5 * first[3], "the divergence grows: {report}");
    let page = out("report").with_extension("html");
    let page = page.to_str().expect("text");
    let arguments = ["report", path, "--reference", reference, "--html", page];
    let held_out = ["--text", end, "--window", "64", "--stride", "32"];
    let mut command = llama(&[&arguments[..], &held_out].concat());
    let text = stdout(command.env("COLUMNS", "80").output().unwrap());
    let said = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (_, errors) = said.split_once(&format!("worst: {layer}, error ")).expect(&text);
    assert!(errors.chars().take(30).collect::<String>().contains("of outputs "), "{text}");
    let outputs = |row: &serde_json::Value| row["output_error_percent"].as_f64().unwrap_or(0.0);
    let rows = report["weights"].as_array().expect("rows");
    let most = rows.iter().max_by(|a, b| outputs(a).total_cmp(&outputs(b))).expect("a row");
    let named = format!("worst outputs: {}, error ", most["name"].as_str().expect("a name"));
    assert_eq!(said.contains(&named), most["name"] != layer, "{text}");
    let long = |line: &&str| line.chars().count() > 80 && !line.contains(path);
    assert_eq!(text.lines().find(long), None, "{text}");
    let page = std::fs::read_to_string(page).expect("a page");
    assert!(page.contains("end.txt") && page.contains("<svg"), "{page}");
}
