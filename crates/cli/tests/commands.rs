//! The other commands as a user runs them, and the help of all of them.

mod model;

use std::fs;

use model::{SMALL, assert_same, fails, run, succeeds};
use tempfile::tempdir;

#[test]
fn every_command_explains_itself() {
    let folder = tempdir().expect("a folder");
    let help = succeeds(folder.path(), "--help");
    let commands =
        ["quantize", "convert", "inspect", "compare", "evaluate", "formats", "completions"];
    assert!(help.contains("Exit codes: 0 done"), "{help}");
    for command in commands {
        assert!(help.contains(command), "{help}");
        let own = succeeds(folder.path(), &format!("{command} --help"));
        assert!(own.contains("Usage: fp4 ") && own.len() > 200, "{own}");
    }
    let help = succeeds(folder.path(), "quantize --help");
    for word in ["--dry-run", "--resume", "miles", "imatrix", "--recipe", "twice"] {
        assert!(help.contains(word), "{help} does not say {word}");
    }
    // What an option takes, and where a pattern begins and ends.
    for word in ["te-division", "four-over-six", "gpt-oss", "torchao", "mlp-only", "`$`", ".gguf"] {
        assert!(help.contains(word), "{help} does not say {word}");
    }
    assert_eq!(run(folder.path(), "quantise").0, 2);
}

#[test]
fn the_help_of_quantize_names_the_readers_of_each_dialect_in_80_columns() {
    let folder = tempdir().expect("a folder");
    let help = succeeds(folder.path(), "quantize --help");
    let formats = succeeds(folder.path(), "formats");
    let lines = [
        "  compressed-tensors  nvfp4  vLLM, SGLang, transformers*",
        "                      mxfp4  vLLM, transformers*",
        "  modelopt            nvfp4  vLLM, SGLang, TensorRT-LLM",
        "                      mxfp4  TensorRT-LLM",
        "  gguf                nvfp4  llama.cpp*",
    ];
    for (name, text) in [("quantize --help", &help), ("formats", &formats)] {
        let table: Vec<&str> =
            text.lines().skip_while(|line| !line.starts_with("Readers (")).collect();
        for line in lines {
            assert!(table.contains(&line), "{name} has no line `{line}`: {text}");
        }
        let rows = table.iter().skip(1).take_while(|line| !line.is_empty());
        rows.for_each(|line| assert!(line.len() <= 80, "{name}: {line}"));
    }
    // What one preset does is not in everyone's first paragraphs.
    let (front, _) = help.split_once("Usage: ").expect("the usage");
    assert!(!front.contains("miles") && front.lines().count() < 20, "{front}");
}

#[test]
fn what_no_program_reads_or_all_read_otherwise_is_said_when_it_is_written() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let rounds = "TensorRT-LLM rounds inputs to FP8; no other program is known";
    for (command, note) in [
        ("quantize model --out mx --dialect modelopt --format mxfp4", rounds),
        ("quantize model --out wide --dialect modelopt --block-size 32", "no program is known"),
        ("quantize model --out nv --dialect modelopt", ""),
        ("quantize model --out mx-ct --format mxfp4", ""),
        ("convert nv --out mx-2 --dialect modelopt --format mxfp4", rounds),
        ("convert mx-ct --out mx-3 --dialect modelopt", rounds),
        ("convert mx --out mx-4 --dialect compressed-tensors", ""),
        ("convert mx --out mx-5 --dialect modelopt", ""),
    ] {
        let (code, said, errors) = run(folder.path(), command);
        assert_eq!(code, 0, "{command}: {errors}");
        let notes: Vec<&str> = said.lines().chain(errors.lines()).collect();
        let notes: Vec<_> = notes.iter().filter(|line| line.contains("known that reads")).collect();
        match note {
            "" => assert!(notes.is_empty(), "{command}: {notes:?}"),
            note => assert!(notes.len() == 1 && notes[0].contains(note), "{command}: {notes:?}"),
        }
    }
}

#[test]
fn a_conversion_there_and_back_is_the_same() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out a --dialect modelopt");
    let said = succeeds(folder.path(), "convert a --out b --dialect compressed-tensors");
    assert!(said.contains("scales were inverted"), "{said}");
    succeeds(folder.path(), "compare a b --tolerance 0.00001");
    succeeds(folder.path(), "convert a --out again --dialect modelopt");
    assert_same(&folder.path().join("a"), &folder.path().join("again"));
    succeeds(folder.path(), "convert a --out a.gguf --dialect gguf");
    succeeds(folder.path(), "compare a a.gguf --tolerance 0.00001");
    succeeds(folder.path(), "convert a --out dense --dialect plain --decode-fp4 f32");
    succeeds(folder.path(), "compare a dense");
    let cast = succeeds(folder.path(), "convert a --out mx --dialect modelopt --format mxfp4");
    assert!(cast.contains("blocks were cast"), "{cast}");
    fails(folder.path(), "convert a --out x --dialect mlx", 2, &["mlx", "--inexact"]);
    fails(folder.path(), "convert a --out x --dialect plain", 2, &["plain", "--decode-fp4"]);
    // Of a model of floats nothing is said.
    for from in ["model", "dense"] {
        let to = format!("{from}-floats");
        succeeds(folder.path(), &format!("convert {from} --out {to} --dialect compressed-tensors"));
        let config = folder.path().join(to).join("config.json");
        let config = fs::read_to_string(config).expect("a config");
        assert!(config.contains("llama") && !config.contains("quantization"), "{config}");
    }
    succeeds(folder.path(), "convert a --out mlx --dialect mlx --inexact");
    fails(folder.path(), "convert a --out b --dialect modelopt", 2, &["b: exists"]);
    let (code, _, error) = run(folder.path(), "convert a --out x --dialect quark");
    assert!(code == 2 && error.contains("modelopt"), "{error}");
}

#[test]
fn a_checkpoint_is_not_read_as_what_it_says_it_is_not() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out mlx --dialect mlx");
    let wrong = "convert mlx --from modelopt --dialect mlx --out x";
    fails(folder.path(), wrong, 2, &["mlx (quantization of config.json)", "`modelopt`"]);
    fails(folder.path(), "inspect mlx --from plain", 2, &["`plain`", "mlx ("]);
    succeeds(folder.path(), "convert mlx --from mlx --dialect mlx --out same");
    // The configs of miles are those of ModelOpt.
    succeeds(folder.path(), "quantize model --out modelopt --dialect modelopt");
    succeeds(folder.path(), "inspect modelopt --from miles");
    assert_eq!(model::names(folder.path()), ["mlx", "model", "modelopt", "same"]);
}

#[test]
fn inspection_counts_and_warns() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out out --dialect modelopt");
    let table = succeeds(folder.path(), "inspect out");
    assert!(table.contains("14 of 19 weights quantized") && table.contains("nvfp4 16"), "{table}");
    assert!(!table.contains("warning"), "{table}");
    let json = succeeds(folder.path(), "inspect out --json");
    let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
    let weights = report["weights"].as_array().expect("weights");
    let down = weights.iter().find(|row| row["name"] == "model.layers.0.mlp.down_proj.weight");
    let down = down.expect("a weight");
    let bits = down["bits_per_weight"].as_f64().expect("a number");
    assert!((4.5..4.51).contains(&bits), "{bits}");
    assert_eq!((&down["blocks"], &down["zero_blocks"]), (&1536.into(), &0.into()));

    // The scale of one of two that run as one, in the wrong direction.
    let shard = folder.path().join("out/model-00001-of-00002.safetensors");
    let mut bytes = fs::read(&shard).expect("a shard");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
    let names =
        ["gate_proj", "up_proj"].map(|name| format!("model.layers.0.mlp.{name}.weight_scale_2"));
    let found = names.iter().find(|name| header.get(name.as_str()).is_some()).expect("a scale");
    let at = 8 + length + header[found.as_str()]["data_offsets"][0].as_u64().expect("one") as usize;
    let scale = f32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    bytes[at..at + 4].copy_from_slice(&(1.0 / scale).to_le_bytes());
    fs::write(&shard, bytes).expect("a shard");
    let table = succeeds(folder.path(), "inspect out");
    assert!(table.contains("may be the reciprocal"), "{table}");
    assert!(table.contains("has another tensor scale"), "{table}");
    // Who reads GGUF runs each by itself.
    succeeds(folder.path(), "convert out --out out.gguf");
    let table = succeeds(folder.path(), "inspect out.gguf");
    assert!(!table.contains("has another tensor scale"), "{table}");
    for (dialect, more, noted) in [
        ("compressed-tensors", "", true),
        ("modelopt", "--format mxfp4", false),
        ("plain", "--decode-fp4 f32", false),
    ] {
        let to = format!("--out to-{dialect} --dialect {dialect} {more}");
        let said = succeeds(folder.path(), &format!("convert out.gguf {to}"));
        assert_eq!(said.contains("different tensor scales"), noted, "{said}");
    }
}

#[test]
fn a_comparison_tells_by_its_exit_code() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out out");
    let same = succeeds(folder.path(), "compare out out");
    assert!(same.contains("0 of 19 weights differ"), "{same}");
    let (code, table, _) = run(folder.path(), "compare model out --html page.html");
    assert!(code == 1 && table.contains("14 of 19 weights differ"), "{table}");
    let page = fs::read_to_string(folder.path().join("page.html")).expect("a page");
    for word in ["<svg", "prefers-color-scheme: dark", "self_attn.q_proj", "</html>"] {
        assert!(page.contains(word), "the page does not say {word}");
    }
    assert!(!page.contains("http") && !page.contains("<script"), "the page stands alone");
    succeeds(folder.path(), "compare model out --tolerance 20");
    for bad in ["nan", "inf", "-1", "x"] {
        let (code, _, error) = run(folder.path(), &format!("compare out out --tolerance={bad}"));
        assert!(code == 2 && error.contains("a finite number, 0 or more"), "{bad}: {error}");
    }
    // A weight that is missing is a difference.
    let first = model::tensors(SMALL).remove(0);
    model::write(&folder.path().join("one.safetensors"), &[first]);
    let (code, table, _) = run(folder.path(), "compare one.safetensors model");
    assert!(code == 1 && table.contains("only in B: lm_head.weight"), "{table}");
    fails(folder.path(), "compare model nowhere", 2, &["nowhere"]);
    fails(folder.path(), "compare out model --html no/page.html", 2, &["no/page.html"]);
}

#[test]
fn each_checkpoint_of_a_comparison_is_given_its_dialect() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out out");
    // A file alone does not say its dialect.
    let shard = folder.path().join("out/model-00001-of-00002.safetensors");
    fs::copy(shard, folder.path().join("alone.safetensors")).expect("a file");
    let alone = "compare alone.safetensors alone.safetensors";
    fails(folder.path(), alone, 2, &["nothing says what", "(--from-a)"]);
    let from_a = "--from-a compressed-tensors";
    fails(folder.path(), &format!("{alone} {from_a}"), 2, &["nothing says what", "(--from-b)"]);
    let from_b = "--from-b compressed-tensors";
    fails(folder.path(), &format!("{alone} {from_b}"), 2, &["nothing says what", "(--from-a)"]);
    let same = succeeds(folder.path(), &format!("{alone} {from_a} {from_b}"));
    assert!(same.contains("0 of "), "{same}");
    // A folder says two.
    let second = folder.path().join("out/hf_quant_config.json");
    fs::write(second, r#"{"quantization": {}}"#).expect("a config");
    fails(folder.path(), "compare out model", 2, &["several dialects", "(--from-a)"]);
    fails(folder.path(), "compare model out", 2, &["several dialects", "(--from-b)"]);
    fails(folder.path(), "inspect out", 2, &["several dialects", "(--from)"]);
    succeeds(folder.path(), &format!("compare model out {from_b} --tolerance 20"));
}

#[test]
fn infinities_are_compared() {
    let folder = tempdir().expect("a folder");
    let write = |name: &str, values: &[f32]| {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (name, shape) = (folder.path().join(name), vec![values.len()]);
        let dtype = safetensors::Dtype::F32;
        let tensor = model::Tensor { name: "a.weight".to_owned(), dtype, shape, bytes };
        model::write(&name, &[tensor]);
    };
    let inf = f32::INFINITY;
    write("inf.safetensors", &[inf, 3.0, 4.0]);
    write("finite.safetensors", &[1.0, 3.0, 4.0]);
    write("other.safetensors", &[-inf, 3.0, 4.0]);
    write("beside.safetensors", &[inf, 3.0, 4.5]);
    for (a, b) in [("inf", "finite"), ("finite", "inf"), ("inf", "other")] {
        let command = format!("compare {a}.safetensors {b}.safetensors --tolerance 1000");
        let (code, table, _) = run(folder.path(), &command);
        assert!(code == 1 && table.contains("1 of 1 weights differ"), "{table}");
        assert!(table.contains("infinite"), "{table}");
    }
    let same = succeeds(folder.path(), "compare inf.safetensors inf.safetensors");
    assert!(same.contains("0 of 1 weights differ; all together by 0.0000 %"), "{same}");
    // An error of 0.5 beside numbers of norm 5.
    let (code, table, _) = run(folder.path(), "compare inf.safetensors beside.safetensors");
    assert!(code == 1 && table.contains("10.0000"), "{table}");
}

#[test]
fn formats_and_completions_are_printed() {
    let folder = tempdir().expect("a folder");
    let formats = succeeds(folder.path(), "formats --scales");
    for word in ["nvfp4", "mxfp4", "448", "1.5", "4.5 bits", "2^(c - 127)"] {
        assert!(formats.contains(word), "{formats} does not say {word}");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(succeeds(folder.path(), &format!("completions {shell}")).contains("quantize"));
    }
    assert_eq!(run(folder.path(), "completions dos").0, 2);
}
