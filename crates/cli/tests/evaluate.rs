//! `fp4 evaluate` as a user runs it.

mod model;

use std::path::{Path, PathBuf};
use std::time::Duration;

use burn_fp4_search::Method;
use model::{Tensor, fp4, random, write};
use safetensors::tensor::Dtype;
use serde_json::Value;

/// Floats that depend on those before them.
fn floats(name: &str, shape: [usize; 2], seed: u64) -> Tensor {
    let mut uniform = random(seed);
    let mut last = 0.0;
    let bytes = (0..shape[0] * shape[1]).flat_map(|_| {
        last = 0.7 * last + uniform();
        f32::to_le_bytes(last)
    });
    tensor(name, Dtype::F32, &shape, bytes.collect())
}

fn tensor(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Tensor {
    Tensor { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
}

fn layer() -> Vec<Tensor> {
    vec![
        floats("up.weight", [24, 64], 1),
        floats("up.calibration", [96, 64], 2),
        floats("up.evaluation", [80, 64], 3),
    ]
}

/// Writes a file of its own for each test.
fn file(test: &str, tensors: &[Tensor]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{test}.safetensors"));
    write(&path, tensors);
    path
}

fn evaluate(file: &Path, more: &[&str]) -> Vec<Value> {
    let output = fp4().arg("evaluate").arg(file).args(more).arg("--json").assert().success();
    serde_json::from_slice(&output.get_output().stdout).expect("an array of objects")
}

#[test]
fn every_method_on_every_format_and_block() {
    let found = evaluate(&file("all", &layer()), &["--methods", "all", "--blocks", "16,32"]);
    let defined = Method::NAMED.map(|row| 2 * row.formats.len());
    assert_eq!(found.len(), defined.into_iter().sum::<usize>());
    let error = |method: &str, format: &str, block: u64, of: &str| {
        let row = found.iter().find(|row| {
            row["method"] == method && row["format"] == format && row["block"] == block
        });
        row.unwrap_or_else(|| panic!("{method}"))[of].as_f64().expect("a number")
    };
    for (format, block) in [("nvfp4", 16), ("nvfp4", 32), ("mxfp4", 16), ("mxfp4", 32)] {
        let weight = |method| error(method, format, block, "weight_error_percent");
        let calibration = |method| error(method, format, block, "calibration_error_percent");
        assert!(weight("sse") <= weight("amax"));
        if format == "nvfp4" {
            assert!(weight("sse-tensor-scale") <= weight("sse"));
        }
        assert!(calibration("gptq") < calibration("gptq-original"));
        assert!(calibration("gptq-original") < calibration("sse"));
        let sqnr = error("sse", format, block, "sqnr_db");
        assert!((sqnr + 20.0 * (weight("sse") / 100.0).log10()).abs() < 1e-9);
    }
    for key in ["name", "seconds", "evaluation_error_percent"] {
        assert!(found.iter().all(|row| !row[key].is_null()), "{key}");
    }
}

#[test]
fn dampings_are_tried_one_after_the_other() {
    let more = ["--methods", "sse,gptq", "--formats", "nvfp4", "--damping", "0.3,3"];
    let found = evaluate(&file("damping", &layer()), &more);
    let dampings: Vec<_> = found.iter().map(|row| row["damping"].as_f64()).collect();
    assert_eq!(dampings, [None, Some(0.3), Some(3.0)]);
    let default =
        evaluate(&file("default", &layer()), &["--methods", "gptq", "--formats", "nvfp4"]);
    let error = |row: &Value| row["evaluation_error_percent"].as_f64();
    assert_eq!(error(&default[0]), error(&found[1]));
    assert!(error(&found[1]) != error(&found[2]));
    let negative = ["--methods", "gptq", "--damping=-1"];
    refuses("negative", &layer(), &negative, &["up.weight", "damping is -1"]);
    let without = fp4()
        .arg("evaluate")
        .arg(file("undamped", &layer()))
        .args(["--methods", "sse", "--formats", "nvfp4", "--damping", "0.1"])
        .assert()
        .success();
    let note = String::from_utf8_lossy(&without.get_output().stderr).into_owned();
    assert!(note.contains("--damping is for gptq"), "{note}");
}

#[test]
fn a_table_and_a_plot() {
    let plot = Path::new(env!("CARGO_TARGET_TMPDIR")).join("errors.svg");
    let output = fp4()
        .arg("evaluate")
        .arg(file("table", &layer()))
        .args(["--methods", "sse,gptq", "--formats", "nvfp4", "--plot"])
        .arg(&plot)
        .assert()
        .success();
    let table = String::from_utf8_lossy(&output.get_output().stdout).into_owned();
    assert!(table.contains("evaluation") && table.contains("gptq") && table.contains("up"));
    let svg = std::fs::read_to_string(plot).expect("a picture");
    assert!(svg.starts_with("<svg") && svg.contains("up, nvfp4 16") && svg.contains("gptq"));
}

/// Runs, expects exit code 2, and returns what is on stdout and on stderr.
fn fails(file: &Path, more: &[&str]) -> [String; 2] {
    let minute = Duration::from_secs(60);
    let output = fp4().arg("evaluate").arg(file).args(more).timeout(minute).assert().code(2);
    let output = output.get_output();
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned())
}

#[test]
fn a_method_that_fails_is_a_row_and_the_others_are_evaluated() {
    let file = file("failing", &layer());
    let more = ["--methods", "sse,gptq", "--formats", "nvfp4", "--damping=-1"];
    let [table, message] = fails(&file, &more);
    let row = |method: &str| table.lines().find(|line| line.contains(method)).expect("a row");
    assert!(row("gptq").contains("failed") && !row("sse").contains("failed"), "{table}");
    for word in ["1 of 2 evaluations failed", "up.weight", "damping is -1"] {
        assert!(message.contains(word), "{message} does not say {word}");
    }

    let [json, _] = fails(&file, &[&more[..], &["--json"]].concat());
    let found: Vec<Value> = serde_json::from_str(&json).expect("an array of objects");
    let [sse, gptq] = &found[..] else { panic!("two objects: {json}") };
    assert!(sse["evaluation_error_percent"].is_number() && sse.get("error").is_none());
    assert!(gptq["error"].as_str().expect("a message").contains("damping is -1"));
    assert_eq!((&gptq["method"], gptq.get("seconds")), (&Value::from("gptq"), None));

    let help = fp4().args(["evaluate", "--help"]).assert().success();
    let help = String::from_utf8_lossy(&help.get_output().stdout).into_owned();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("The exit code is 0 if none failed"), "{help}");
}

#[test]
fn a_method_cannot_choose_by_activations_that_are_all_zero() {
    let mut tensors = layer();
    let calibration = tensors.iter_mut().find(|tensor| tensor.name.ends_with(".calibration"));
    calibration.expect("activations").bytes.fill(0);
    let [printed, error] = fails(&file("zeros", &tensors), &["--methods", "sse,hessian,gptq"]);
    assert!(printed.contains("sse") && printed.contains("failed"), "{printed}");
    let says = "4 of 6 evaluations failed: hessian, gptq: tensor `";
    assert!(error.contains(says) && error.contains("every value is 0, so a method"), "{error}");
}

#[test]
fn what_was_measured_is_printed_before_a_plot_fails() {
    let nowhere = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no such folder").join("errors.svg");
    let nowhere = nowhere.to_str().expect("unicode");
    let more = ["--methods", "sse", "--formats", "nvfp4", "--plot", nowhere];
    let [table, message] = fails(&file("nowhere", &layer()), &more);
    assert!(table.contains("evaluation") && table.contains("sse"), "{table}");
    assert!(message.contains("no such folder"), "{message}");
}

#[test]
fn a_plot_without_a_finite_error_ends_with_an_error() {
    // The two blocks cancel in the outputs of the weight, but not in the outputs of the codes.
    let row = |name, first: [f32; 2], second: [f32; 2]| {
        let mut values = [0.0f32; 32];
        values[..2].copy_from_slice(&first);
        values[16..18].copy_from_slice(&second);
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        tensor(name, Dtype::F32, &[1, 32], bytes)
    };
    let infinite = [
        row("up.weight", [0.3, 6.0], [0.3, 5.0]),
        floats("up.calibration", [96, 32], 2),
        row("up.evaluation", [1.0, 0.0], [-1.0, 0.0]),
    ];
    let plot = Path::new(env!("CARGO_TARGET_TMPDIR")).join("infinite.svg");
    let plot = plot.to_str().expect("unicode");
    let more = ["--methods", "amax", "--formats", "nvfp4", "--plot", plot];
    let [table, message] = fails(&file("infinite_error", &infinite), &more);
    assert!(table.contains("inf"), "{table}");
    assert!(message.contains("infinite.svg: nothing to draw"), "{message}");
}

/// Runs on a broken file, expects exit code 2 and a message that says all of this.
fn refuses(test: &str, tensors: &[Tensor], more: &[&str], says: &[&str]) {
    let output =
        fp4().arg("evaluate").arg(file(test, tensors)).args(more).assert().failure().code(2);
    let message = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    for word in says {
        assert!(message.contains(word), "{message} does not say {word}");
    }
}

#[test]
fn what_is_wrong_with_a_file_is_named() {
    let without = |name: &str| layer().into_iter().filter(|t| t.name != name).collect::<Vec<_>>();
    let with = |tensor: Tensor| {
        let mut tensors = without(&tensor.name);
        tensors.push(tensor);
        tensors
    };
    let says = ["`up.evaluation` is missing; add the activations of `up.weight`"];
    refuses("missing", &without("up.evaluation"), &[], &says);
    refuses("no_weight", &without("up.weight"), &[], &["<name>.weight", "up.calibration"]);
    let narrow = with(floats("up.calibration", [96, 32], 4));
    refuses("narrow", &narrow, &[], &["up.calibration", "[any, 64]", "[96, 32]"]);
    let integers = tensor("up.weight", Dtype::I32, &[24, 64], vec![0; 24 * 64 * 4]);
    refuses("integers", &with(integers), &[], &["up.weight", "I32", "BF16"]);
    let flat = tensor("up.weight", Dtype::F32, &[24 * 64], vec![0; 24 * 64 * 4]);
    refuses("flat", &with(flat), &[], &["up.weight", "[rows, columns]", "[1536]"]);
    let mut nan = floats("up.calibration", [96, 64], 5);
    nan.bytes[4 * (64 * 3 + 7)..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    refuses("nan", &with(nan), &[], &["up.calibration", "row 3, channel 7", "NaN"]);
    let mut infinite = floats("up.weight", [24, 64], 6);
    infinite.bytes[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    refuses("infinite", &with(infinite), &[], &["up.weight", "not finite"]);
    let odd = vec![
        floats("up.weight", [8, 24], 1),
        floats("up.calibration", [9, 24], 2),
        floats("up.evaluation", [9, 24], 3),
    ];
    refuses("odd", &odd, &["--formats", "nvfp4"], &["up.weight", "24 columns", "16"]);
    refuses("method", &layer(), &["--methods", "best"], &["invalid value 'best'"]);
    refuses(
        "nothing",
        &layer(),
        &["--methods", "four-over-six", "--formats", "mxfp4"],
        &["four-over-six is not defined for mxfp4"],
    );
}
