//! `fp4 report`: the page of a finished model, in a terminal, as JSON and as HTML.

mod model;

use std::fs;
use std::path::Path;

use model::{SMALL, Sizes, fails, fp4, succeeds};
use serde_json::Value;
use tempfile::tempdir;

/// Makes a model, and its quantized forms in three dialects.
fn quantized(folder: &Path) -> [&'static str; 3] {
    model::model(folder, "model", SMALL);
    succeeds(folder, "quantize model --out ct");
    succeeds(folder, "convert ct --dialect modelopt --out mo");
    succeeds(folder, "convert ct --dialect gguf --out m.gguf");
    ["ct", "mo", "m.gguf"]
}

fn report(folder: &Path, model: &str) -> Value {
    let json = succeeds(folder, &format!("report {model} --reference model --json"));
    serde_json::from_str(&json).expect("JSON")
}

#[test]
fn a_report_is_the_same_for_every_dialect() {
    let folder = tempdir().expect("a folder");
    let reports = quantized(folder.path()).map(|model| report(folder.path(), model));
    let of = |report: &Value| {
        let weight = |row: &Value| {
            let keys = ["name", "format", "blocks", "saturated_blocks"];
            (keys.map(|key| row[key].to_string()), row["error_percent"].as_f64().expect("an error"))
        };
        let mut weights: Vec<_> =
            report["weights"].as_array().expect("weights").iter().map(weight).collect();
        weights.sort_by(|a, b| a.0.cmp(&b.0));
        weights
    };
    let first = of(&reports[0]);
    for report in &reports {
        assert_eq!(report["quantized"], 14, "{report}");
        let error = report["weight_error_percent"].as_f64().expect("an error");
        assert!((7.0..11.0).contains(&error), "{error}");
        let rounding = report["fp8_rounding_percent"].as_f64().expect("an error");
        assert!((1.0..4.0).contains(&rounding), "{rounding}");
        for (found, expected) in of(report).iter().zip(&first) {
            assert_eq!(found.0, expected.0);
            // Dialects state tensor scales and their reciprocals, each rounded to f32.
            assert!((found.1 - expected.1).abs() <= 1e-6 * expected.1, "{found:?}, {expected:?}");
        }
    }
    let dialects = reports.each_ref().map(|report| report["model"]["dialect"].clone());
    assert_eq!(dialects, ["compressed-tensors", "modelopt", "gguf"]);
    let programs = |report: &Value| {
        let readers = report["readers"].as_array().expect("readers").clone();
        readers.iter().map(|reader| reader["program"].as_str().expect("text").to_owned()).collect()
    };
    let read: [Vec<String>; 3] = reports.each_ref().map(programs);
    assert!(read[0].contains(&"vLLM".to_owned()), "{read:?}");
    assert_eq!(read[2], ["llama.cpp"]);
}

#[test]
fn a_damaged_layer_comes_first() {
    let folder = tempdir().expect("a folder");
    quantized(folder.path());
    let path = folder.path().join("ct/model-00001-of-00002.safetensors");
    let mut file = fs::read(&path).expect("a shard");
    let length = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
    let header: Value = serde_json::from_slice(&file[8..8 + length]).expect("a header");
    let mut names = header.as_object().expect("tensors").keys();
    let scales = names.rfind(|name| name.ends_with("proj.weight_scale"));
    let scales = scales.expect("scales of a layer").clone();
    let offset = |at: usize| header[&scales]["data_offsets"][at].as_u64().expect("an offset");
    let [first, end] = [offset(0), offset(1)].map(|offset| 8 + length + offset as usize);
    // A tenth of the block scales is lost, as in a file that was not written to its end.
    file[first..first + (end - first) / 10].fill(0);
    fs::write(&path, file).expect("a damaged shard");
    let damaged = scales.strip_suffix("_scale").expect("a name");

    let found = report(folder.path(), "ct");
    assert_eq!(found["weights"][0]["name"], damaged, "{found}");
    let [worst, second] =
        [0, 1].map(|at| found["weights"][at]["error_percent"].as_f64().expect("an error"));
    assert!(worst > 25.0 && second < 12.0, "{worst}, {second}");
    let text = succeeds(folder.path(), "report ct --reference model");
    assert!(text.contains(&format!("worst: {damaged}, error ")), "{text}");
    let module = damaged.strip_suffix(".weight").expect("a weight");
    let all = succeeds(folder.path(), "report ct --reference model --all");
    let line = all.lines().skip_while(|line| !line.starts_with('─')).nth(1).expect("a row");
    assert!(line.trim_start().starts_with(module), "{all}");
}

#[test]
fn a_page_fits_80_columns_and_stands_in_a_file() {
    let folder = tempdir().expect("a folder");
    quantized(folder.path());
    let mut command = fp4();
    command.current_dir(folder.path()).env("COLUMNS", "80");
    let command = command.args(["report", "ct", "--reference", "model", "--html", "page.html"]);
    let output = command.output().expect("it runs");
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{text}");
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    for word in [
        "model ct: compressed-tensors, ",
        "14 weights quantized (4.5",
        "mean error ",
        "of blocks",
        "readers: vLLM",
        "next: llama report ct --reference model",
    ] {
        assert!(text.contains(word), "{text} does not say {word}");
    }
    let page = fs::read_to_string(folder.path().join("page.html")).expect("a page");
    for word in ["<svg", "prefers-color-scheme: dark", "self_attn.q_proj", "readers: ", "</html>"] {
        assert!(page.contains(word), "{page}");
    }
}

#[test]
fn models_without_a_name_in_common_are_refused() {
    let folder = tempdir().expect("a folder");
    quantized(folder.path());
    model::gguf(&folder.path().join("other.gguf"));
    let says =
        ["other.gguf: no weight has the name of one in model", "token_embd.weight", "pass a"];
    fails(folder.path(), "report other.gguf --reference model", 2, &says);
    fails(folder.path(), "report ct --reference none", 2, &["none: no such file or folder"]);
}

#[test]
fn a_reference_that_cannot_be_one_is_refused() {
    let folder = tempdir().expect("a folder");
    quantized(folder.path());
    let says = ["model: no weight is in FP4, but 14 of ct are; pass the quantized model first"];
    fails(folder.path(), "report model --reference ct", 2, &says);
    model::model(folder.path(), "wide", Sizes(2, 64, 96));
    let says =
        ["ct: no weight could be compared with wide (", "pass the model that it was made from"];
    fails(folder.path(), "report ct --reference wide", 2, &says);
}

#[test]
fn a_report_warns_of_fused_layers_with_tensor_scales_of_their_own() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    fs::write(folder.path().join("recipe.toml"), "together = false\n").expect("a recipe");
    succeeds(folder.path(), "quantize model --out apart --recipe recipe.toml");
    let text = succeeds(folder.path(), "report apart --reference model");
    assert!(text.contains("has another tensor scale"), "{text}");
}

#[test]
fn a_page_that_cannot_be_written_is_refused_before_the_work() {
    let folder = tempdir().expect("a folder");
    quantized(folder.path());
    // Neither model is there: the page is looked at first.
    for command in ["report no-model --reference none", "compare no-model none"] {
        let command = format!("{command} --html no/page.html");
        fails(folder.path(), &command, 2, &["no/page.html: "]);
    }
    // A page of an earlier run stays until there is another one.
    fs::write(folder.path().join("page.html"), "before").expect("a page");
    fails(folder.path(), "report ct --reference none --html page.html", 2, &["none: no such"]);
    assert_eq!(fs::read_to_string(folder.path().join("page.html")).expect("a page"), "before");
    fails(folder.path(), "report ct --reference none --html other.html", 2, &["none: no such"]);
    assert!(!folder.path().join("other.html").exists());
}
