//! The other commands as a user runs them, and the help of all of them.

mod model;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn_fp4_checkpoints::dialect::Program;
use burn_fp4_checkpoints::{Checkpoint, Weight};
use model::{SMALL, assert_same, fails, run, succeeds};
use tempfile::tempdir;

#[test]
fn every_command_explains_itself() {
    let folder = tempdir().expect("a folder");
    let help = succeeds(folder.path(), "--help");
    let commands = [
        "quantize",
        "convert",
        "inspect",
        "compare",
        "evaluate",
        "formats",
        "warnings",
        "completions",
    ];
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
        for program in Program::ALL {
            let row = program.row();
            let version = format!("{} {}", row.name, row.version);
            assert!(text.contains(&version), "{name} has no `{version}`: {text}");
        }
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
    let rounded = "note: `compressed-tensors` divides by tensor scales, where the input multiplies \
                   by them: 14 reciprocals written, of which 14 are rounded to f32, which changes \
                   values by ";
    assert!(said.contains(rounded) && said.contains("e-6 % at most"), "{said}");
    succeeds(folder.path(), "compare a b --tolerance 0.00001");
    let back = succeeds(folder.path(), "convert b --out back --dialect modelopt");
    let says = "note: `modelopt` multiplies by tensor scales, where the input divides by them: ";
    assert!(back.contains(says), "{back}");
    succeeds(folder.path(), "convert a --out again --dialect modelopt");
    assert_same(&folder.path().join("a"), &folder.path().join("again"));
    succeeds(folder.path(), "convert a --out a.gguf --dialect gguf");
    succeeds(folder.path(), "compare a a.gguf");
    succeeds(folder.path(), "convert a --out dense --dialect plain --decode-fp4 f32");
    succeeds(folder.path(), "compare a dense");
    let cast = succeeds(folder.path(), "convert a --out mx --dialect modelopt --format mxfp4");
    assert!(cast.contains("blocks cast"), "{cast}");
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
    fails(folder.path(), "convert a --out b --dialect modelopt", 2, &["b: already exists"]);
    let (code, _, error) = run(folder.path(), "convert a --out x --dialect quark");
    assert!(code == 2 && error.contains("modelopt"), "{error}");
}

/// The relative errors of weights that differ between two folders, in percent.
fn errors_between(before: &Path, after: &Path) -> BTreeMap<String, f64> {
    let [before, after] = [before, after].map(|path| Checkpoint::open(path).expect("a checkpoint"));
    let [before, after] = [&before, &after].map(|open| open.weights().expect("weights"));
    let of = |weight: &Weight<'_>| {
        let other = after.iter().find(|other| other.name == weight.name).expect("the same weight");
        let [a, b] = [weight, other].map(|weight| weight.values().expect("floats").1);
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
        let difference = a.iter().zip(&b).map(|(a, b)| f64::from(*a) - f64::from(*b));
        let error = squares(&mut { difference });
        (weight.name.clone(), 100.0 * (error / squares(&mut a.into_iter().map(f64::from))).sqrt())
    };
    before.iter().map(of).filter(|(_, error)| *error > 1e-4).collect()
}

#[test]
fn a_conversion_that_changes_values_says_the_error_it_makes() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out a --dialect modelopt");
    for (out, options) in
        [("mlx", "--dialect mlx --inexact"), ("mx", "--dialect modelopt --format mxfp4")]
    {
        let json = succeeds(folder.path(), &format!("convert a --out {out} {options} --json"));
        let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
        let expected = errors_between(&folder.path().join("a"), &folder.path().join(out));
        assert_eq!(expected.len(), 14);
        let found = report["errors"]["weights"].as_array().expect("weights");
        assert_eq!(found.len(), 14, "{json}");
        for row in found {
            let expected = expected[row["name"].as_str().expect("a name")];
            let found = row["error_percent"].as_f64().expect("a number");
            assert!((found - expected).abs() < 1e-3, "{row}: {expected}");
        }
        let said = succeeds(folder.path(), &format!("convert a --out again {options}"));
        fs::remove_dir_all(folder.path().join("again")).expect("a folder");
        assert!(said.contains("\n14 weights changed against the input: mean error "), "{said}");
        assert!(said.split_whitespace().any(|word| word == "worst"), "{said}");
        assert!(said.ends_with("\nnext: fp4 inspect again\n"), "{said}");
    }
    let said = succeeds(folder.path(), "convert a --out same --dialect modelopt");
    assert!(!said.contains("changed"), "{said}");
    // Nothing is FP4 of what is read.
    let first = model::tensors(SMALL).remove(0);
    model::write(&folder.path().join("one.safetensors"), &[first]);
    let said = succeeds(folder.path(), "convert one.safetensors --out one --dialect plain");
    assert!(said.starts_with("one: 1 tensor, 1 file, "), "{said}");
    assert!(said.contains("note: no weight is FP4; `fp4 quantize` makes"), "{said}");
}

#[test]
fn a_conversion_keeps_what_does_not_fit_and_what_is_asked_for() {
    let folder = tempdir().expect("a folder");
    let name = |name: &str| format!("model.layers.0.{name}.weight");
    let [odd, even, gate, up] =
        ["mlp.down_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"].map(name);
    let tensors = [
        model::tensor(&odd, &[32, 48], 1),
        model::tensor(&even, &[32, 64], 2),
        model::tensor(&gate, &[32, 64], 3),
        model::tensor(&up, &[32, 64], 4),
    ];
    model::write(&folder.path().join("model.safetensors"), &tensors);
    succeeds(folder.path(), "quantize model.safetensors --out nv --dialect modelopt");
    let convert = |out: &str, options: &str, kinds: [&str; 4], says: &str| {
        let said = succeeds(folder.path(), &format!("convert nv --out {out} {options}"));
        let open = Checkpoint::open(folder.path().join(out)).expect("a checkpoint");
        let weights = open.weights().expect("weights");
        for (name, kind) in [&odd, &even, &gate, &up].into_iter().zip(kinds) {
            let weight = weights.iter().find(|weight| weight.name == *name).expect("a weight");
            assert_eq!(weight.kind(), kind, "{options}: {name}");
        }
        assert!(said.contains(says), "{options}: {said}");
    };
    let (nv, mx) = ("nvfp4 16", "mxfp4 32");
    // Without a place for it in GGUF it is bf16.
    let says = format!("note: `{odd}`: kept as BF16: 48 columns are no");
    convert("out.gguf", "", ["BF16", nv, nv, nv], &says);
    let cast = "--dialect modelopt --format mxfp4";
    let says = format!("note: `{odd}`: kept as nvfp4 16: 48 columns are no");
    convert("cast", cast, [nv, mx, mx, mx], &says);
    // With one of a pair that runs as one the other is kept.
    let says = format!("note: `{gate}`: kept as nvfp4 16: runs as one with `up_proj`");
    convert("together", &format!("{cast} --keep *.up_proj"), [nv, mx, nv, nv], &says);
    let decoded = format!("--dialect modelopt --decode-fp4 f32 --keep {even}");
    convert(
        "decoded",
        &decoded,
        ["F32", nv, "F32", "F32"],
        &format!("`{even}`: kept as nvfp4 16: asked"),
    );
    fails(
        folder.path(),
        "convert nv --out x --dialect modelopt --keep *.o_porj",
        2,
        &["--keep pattern `*.o_porj`", "did you mean `*.o_proj`?"],
    );
}

#[test]
fn notes_of_a_conversion_are_about_what_stays_fp4() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out mx --dialect modelopt --format mxfp4");
    let convert = "convert mx --dialect modelopt --decode-fp4 bf16";
    let rounds = "TensorRT-LLM rounds inputs to FP8";
    let said = succeeds(folder.path(), &format!("{convert} --out some --keep *.o_proj"));
    assert!(said.contains("kept as mxfp4 32: asked") && said.contains(rounds), "{said}");
    let said = succeeds(folder.path(), &format!("{convert} --out none"));
    assert!(!said.contains(rounds), "{said}");
    let error = run(folder.path(), "convert mx --out experts --dialect gpt-oss").2;
    let says = "cannot hold quantized layers other than stacked experts; write another --dialect";
    assert!(error.contains(says) && !error.contains("preset"), "{error}");
    // Not one remedy after the other that does not help: no --inexact, no --format.
    succeeds(folder.path(), "quantize model --out nv");
    let error = run(folder.path(), "convert nv --out experts --dialect gpt-oss").2;
    assert!(error.contains(says), "{error}");
}

#[test]
fn the_dtype_that_transformers_needs_is_noted() {
    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", SMALL);
    let config = fs::read_to_string(path.join("config.json")).expect("a config");
    for (dtype, noted) in [("bfloat16", false), ("float16", true), ("float32", true)] {
        let stated = config.replacen('{', &format!(r#"{{"dtype": "{dtype}", "#), 1);
        fs::write(path.join("config.json"), stated).expect("a config");
        let note = format!(
            "note: the model is in {dtype}, and transformers decodes FP4 to bfloat16: load the \
             result with from_pretrained(.., dtype=\"bfloat16\")"
        );
        let (code, _, said) = run(folder.path(), &format!("quantize model --out {dtype}"));
        assert_eq!((code, said.contains(&note)), (0, noted), "{said}");
        let other = format!("quantize model --out {dtype}-modelopt --dialect modelopt");
        assert!(!run(folder.path(), &other).2.contains("from_pretrained"));
        let convert = format!("convert {dtype}-modelopt --dialect compressed-tensors");
        let said = succeeds(folder.path(), &format!("{convert} --out {dtype}-converted"));
        assert_eq!(said.contains(&note), noted, "{said}");
        let decoded = format!("{convert} --out {dtype}-decoded --decode-fp4 f32");
        assert!(!succeeds(folder.path(), &decoded).contains("from_pretrained"));
    }
    // Where no config says it, the weights do; transformers loads no file alone, and no model of an
    // unknown type.
    let of = |name: &str, config: &str, bytes: usize| {
        let dtype = if bytes == 4 { safetensors::Dtype::F32 } else { safetensors::Dtype::BF16 };
        let input = folder.path().join(name);
        fs::create_dir(&input).expect("a folder");
        let name = "model.layers.0.self_attn.o_proj.weight".to_owned();
        let tensor = model::Tensor { name, dtype, shape: vec![2, 64], bytes: vec![0; 128 * bytes] };
        model::write(&input.join("model.safetensors"), &[tensor]);
        fs::write(input.join("config.json"), config).expect("a config");
        let (input, out) = (input.display(), folder.path().join("quantized"));
        let quantize = format!("quantize {input} --out {}", out.display());
        let (code, _, said) = run(folder.path(), &quantize);
        assert_eq!(code, 0, "{said}");
        fs::remove_dir_all(out).expect("a folder");
        said.contains("the model is in float32")
    };
    let llama = r#"{"model_type": "llama"}"#;
    assert!(of("f32-alone", llama, 4) && !of("bf16-alone", llama, 2));
    assert!(!of("no-type", "{}", 4) && !of("unheard-of", r#"{"model_type": "unheard_of"}"#, 4));
}

#[test]
fn files_that_a_conversion_leaves_behind_are_named_with_what_to_copy() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out nv --dialect modelopt");
    let says = "a GGUF file has no place for `config.json`, `tokenizer.json`; keep them";
    let said = succeeds(folder.path(), "convert nv --out L.GGUF");
    assert!(said.contains(says) && folder.path().join("L.GGUF").is_file(), "{said}");
    let (_, _, said) = run(folder.path(), "quantize model --out from-model.gguf");
    assert!(said.contains(says), "{said}");
    // Its names are Hugging Face's, and nothing around it is.
    let said = succeeds(folder.path(), "convert L.GGUF --out back --dialect compressed-tensors");
    assert!(said.contains("no config.json and no tokenizer; copy both from"), "{said}");
    assert!(!said.contains("from_pretrained"), "{said}");
    let said = succeeds(folder.path(), "convert L.GGUF --out again.gguf");
    assert!(said.contains("so llama.cpp cannot run the file"), "{said}");
    succeeds(folder.path(), "compare nv again.gguf");
}

#[test]
fn a_cache_of_8_bits_that_miles_adds_is_noted() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let says = "the configs state a KV cache of 8 bits; remove `kv_cache_scheme`";
    let (_, _, said) = run(folder.path(), "quantize model --out miles --dialect miles");
    assert!(said.contains(says), "{said}");
    succeeds(folder.path(), "quantize model --out nv --dialect modelopt");
    let said = succeeds(folder.path(), "convert nv --out miles-2 --dialect miles");
    assert!(said.contains(says), "{said}");
    // The source says it.
    let said = succeeds(folder.path(), "convert miles --out nv-2 --dialect compressed-tensors");
    assert!(!said.contains(says), "{said}");
}

#[test]
fn a_stack_that_a_dialect_cannot_hold_is_converted_with_what_the_error_names() {
    let folder = tempdir().expect("a folder");
    let name = "model.layers.0.mlp.experts.gate_proj";
    let experts = model::tensor(name, &[2, 32, 64], 1);
    let layer = model::tensor("model.layers.0.self_attn.o_proj.weight", &[32, 64], 2);
    model::write(&folder.path().join("model.safetensors"), &[experts, layer]);
    succeeds(folder.path(), "quantize model.safetensors --out nv --dialect modelopt");
    let convert = "convert nv --out out --dialect compressed-tensors";
    let keep = "--keep 'model.layers.*.mlp.experts.gate_proj'";
    let says = ["cannot hold stacked matrices; use ", keep, "--decode-fp4", "or gguf"];
    fails(folder.path(), convert, 2, &says);
    let said = succeeds(folder.path(), &format!("{convert} {}", keep.replace('\'', "")));
    assert!(said.contains(&format!("`{name}`: kept as BF16: asked")), "{said}");
}

#[test]
fn a_model_that_is_not_whole_is_an_error_or_a_warning() {
    let folder = tempdir().expect("a folder");
    let path = model::model(folder.path(), "model", SMALL);
    let config = r#"{"model_type": "llama", "num_hidden_layers": 4}"#;
    fs::write(path.join("config.json"), config).expect("a config");
    let says = "config.json counts 4 layers, and 2 of them have no weight, such as layer 2: files";
    let (_, _, said) = run(folder.path(), "quantize model --dry-run");
    assert!(said.contains(says), "{said}");
    assert!(succeeds(folder.path(), "inspect model").contains(says));
    let shard = "model-00002-of-00002.safetensors";
    let said = succeeds(folder.path(), &format!("inspect model/{shard}"));
    assert!(said.contains("by its name shard 2 of 2, whose weights alone"), "{said}");
    fs::create_dir(folder.path().join("part")).expect("a folder");
    fs::copy(path.join(shard), folder.path().join("part").join(shard)).expect("a shard");
    let says = ["part: has 1 of the 2 shards that its files count; download the others"];
    fails(folder.path(), "quantize part --out out", 2, &says);
}

#[test]
fn a_checkpoint_is_not_read_as_what_it_says_it_is_not() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out mlx --dialect mlx");
    let wrong = "convert mlx --from modelopt --dialect mlx --out x";
    fails(folder.path(), wrong, 2, &["mlx (quantization of config.json)", "`modelopt`"]);
    fails(folder.path(), "inspect mlx --from plain", 2, &["`plain`", "mlx ("]);
    // Without a config the tensors say that it is quantized.
    let shard = "model-00001-of-00002.safetensors";
    fs::copy(folder.path().join("mlx").join(shard), folder.path().join("alone.safetensors"))
        .expect("a file");
    let says = "alone.safetensors: cannot be read as `plain`: `model.layers.";
    let (code, _, error) = run(folder.path(), "inspect alone.safetensors --from plain");
    assert!(code == 2 && error.contains(says), "{error}");
    assert!(error.contains("is a part of a quantized weight; name the dialect"), "{error}");
    fs::remove_file(folder.path().join("alone.safetensors")).expect("the file");
    let dense = format!("inspect model/{shard} --from plain");
    assert!(succeeds(folder.path(), &dense).contains("plain: 0 of "));
    succeeds(folder.path(), "convert mlx --from mlx --dialect mlx --out same");
    // Miles has ModelOpt's configs.
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
        let (code, _, said) = run(folder.path(), &format!("convert out.gguf {to}"));
        assert!(code == 0 && said.contains("different tensor scales") == noted, "{said}");
    }
}

#[test]
fn a_comparison_tells_by_its_exit_code() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out out");
    let same = succeeds(folder.path(), "compare out out");
    let all = "14 quantized weights: 14 the same; 5 other weights: 5 the same\n\
               mean error of quantized weights 0 %, of the others 0 %\n\
               all values that were compared are the same\n";
    assert_eq!(same, all);
    let (code, table, _) = run(folder.path(), "compare model out --html page.html");
    let counts = "14 quantized weights: 14 different; 5 other weights: 5 the same";
    assert!(code == 1 && table.contains(counts), "{table}");
    let verdict = table.lines().last().expect("a last line");
    assert!(verdict.starts_with("largest error 8."), "{verdict}");
    assert!(verdict.ends_with("_proj.weight: beyond the tolerance of 0 %"), "{verdict}");
    assert!(table.contains("\nmean error of quantized weights 8."), "{table}");
    let page = fs::read_to_string(folder.path().join("page.html")).expect("a page");
    let words = ["<svg", "prefers-color-scheme: dark", "self_attn.q_proj", "</html>"];
    for word in words.into_iter().chain([verdict, counts]) {
        assert!(page.contains(word), "the page does not say {word}");
    }
    assert!(!page.contains("http") && !page.contains("<script"), "the page stands alone");
    let within = succeeds(folder.path(), "compare model out --tolerance 20");
    assert!(within.contains("14 quantized weights: 14 within the tolerance; 5 "), "{within}");
    assert!(within.ends_with(": within the tolerance of 20 %\n"), "{within}");
    let json = succeeds(folder.path(), "compare model out --tolerance 20 --json");
    let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
    let quantized = report["quantized_error_percent"].as_f64().expect("a number");
    assert!(quantized > 7.0 && report["kept_error_percent"] == 0.0, "{json}");
    assert_eq!((&report["different"], &report["not_comparable"]), (&0.into(), &0.into()));
    assert_eq!(report["verdict"], within.lines().last().expect("a last line"));
    let help = succeeds(folder.path(), "compare --help");
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("1 a weight differs by more"), "{help}");
    for bad in ["nan", "inf", "-1", "x"] {
        let (code, _, error) = run(folder.path(), &format!("compare out out --tolerance={bad}"));
        assert!(code == 2 && error.contains("a finite number, 0 or more"), "{bad}: {error}");
    }
    // A weight that is missing is a difference.
    let first = model::tensors(SMALL).remove(0);
    model::write(&folder.path().join("one.safetensors"), &[first]);
    let (code, table, _) = run(folder.path(), "compare one.safetensors model");
    assert!(code == 1 && table.contains("only in B: lm_head.weight"), "{table}");
    assert!(table.ends_with("are the same; 18 weights only in A or B\n"), "{table}");
    fails(folder.path(), "compare model nowhere", 2, &["nowhere"]);
    fails(folder.path(), "compare out model --html no/page.html", 2, &["no/page.html"]);
}

#[test]
fn each_checkpoint_of_a_comparison_is_given_its_dialect() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out out");
    // The tensors of a file alone say its dialect, if only one reads them.
    let shard = folder.path().join("out/model-00001-of-00002.safetensors");
    fs::copy(shard, folder.path().join("alone.safetensors")).expect("a file");
    let (code, table, noted) = run(folder.path(), "inspect alone.safetensors");
    assert!(code == 0 && table.contains("compressed-tensors: "), "{table}");
    assert!(noted.contains("note: alone.safetensors: read as compressed-tensors, by"), "{noted}");
    succeeds(folder.path(), "compare alone.safetensors alone.safetensors");
    // The shapes of MLX say the format.
    for format in ["nvfp4", "mxfp4"] {
        let options = format!("--dialect mlx --format {format}");
        succeeds(folder.path(), &format!("quantize model --out mlx-{format} {options}"));
        let shard = folder.path().join(format!("mlx-{format}/model-00001-of-00002.safetensors"));
        fs::copy(shard, folder.path().join("mlx.safetensors")).expect("a file");
        let (code, table, noted) = run(folder.path(), "inspect mlx.safetensors");
        assert!(code == 0 && noted.contains("mlx.safetensors: read as mlx"), "{noted}");
        assert!(table.contains(format), "{table}");
    }
    let words = model::Tensor {
        name: "a.qweight".to_owned(),
        dtype: safetensors::Dtype::U32,
        shape: vec![2, 1],
        bytes: vec![0; 8],
    };
    model::write(&folder.path().join("other.safetensors"), &[words]);
    let says = ["nothing says which dialect", "name one of modelopt, ", " with --from"];
    fails(folder.path(), "inspect other.safetensors", 2, &says);
    let (_, _, error) = run(folder.path(), "inspect other.safetensors");
    assert!(!error.contains("open_as"), "{error}");
    let first = "compare other.safetensors alone.safetensors --json";
    assert!(run(folder.path(), first).2.contains(" with --from-a"));
    let second = "compare alone.safetensors other.safetensors --json";
    assert!(run(folder.path(), second).2.contains(" with --from-b"));
    let from_b = "--from-b compressed-tensors";
    // A folder says two.
    let second = folder.path().join("out/hf_quant_config.json");
    fs::write(second, r#"{"quantization": {}}"#).expect("a config");
    fails(folder.path(), "compare out model", 2, &["several dialects", " with --from-a"]);
    fails(folder.path(), "compare model out", 2, &["several dialects", " with --from-b"]);
    fails(folder.path(), "inspect out", 2, &["several dialects", " with --from"]);
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
        assert!(code == 1 && table.contains("1 weight: 1 not comparable"), "{table}");
        assert!(table.contains("infinite"), "{table}");
    }
    // JSON has neither infinity nor NaN.
    write("zeros.safetensors", &[0.0, 0.0, 0.0]);
    let json = run(folder.path(), "compare zeros.safetensors finite.safetensors --json").1;
    let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
    assert_eq!(report["weights"][0]["error_percent"], "inf");
    assert_eq!(report["kept_error_percent"], "inf");
    assert_eq!(report["weights"][0]["largest_difference"], 4.0);
    let json = run(folder.path(), "compare inf.safetensors finite.safetensors --json").1;
    let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
    assert!(report["weights"][0]["error_percent"].is_null(), "{json}");
    assert!(report["weights"][0]["problem"].is_string(), "{json}");
    let help = succeeds(folder.path(), "compare --help").replace("\n  ", " ").replace('\n', " ");
    assert!(
        help.contains("JSON does not have are the texts \"inf\", \"-inf\" and \"nan\""),
        "{help}"
    );
    let same = succeeds(folder.path(), "compare inf.safetensors inf.safetensors");
    assert!(same.contains("1 weight: 1 the same"), "{same}");
    // In f64 too, where a number may be beyond f32, in which values are compared.
    let wide = |name: &str, values: [f64; 2]| {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (dtype, shape) = (safetensors::Dtype::F64, vec![2]);
        let tensor = model::Tensor { name: "a.weight".to_owned(), dtype, shape, bytes };
        model::write(&folder.path().join(name), &[tensor]);
    };
    wide("wide.safetensors", [1e300, 1.0]);
    wide("near.safetensors", [-2e300, 1.0]);
    wide("up.safetensors", [f64::INFINITY, 1.0]);
    wide("down.safetensors", [f64::NEG_INFINITY, 1.0]);
    for (a, b, why) in [
        ("wide", "near", "1e300 is beyond the range of f32, in which values are compared"),
        ("up", "near", "-2e300 is beyond the range of f32, in which values are compared"),
        ("down", "up", "a value is infinite in one alone, or with the other sign"),
    ] {
        let command = format!("compare {a}.safetensors {b}.safetensors --tolerance 1000");
        let (code, table, _) = run(folder.path(), &command);
        assert!(code == 1 && table.ends_with(&format!("could be compared: {why}\n")), "{table}");
    }
    assert!(succeeds(folder.path(), "compare wide.safetensors wide.safetensors").contains("same"));
    // An error of 0.5 in numbers of norm 5.
    let (code, table, _) = run(folder.path(), "compare inf.safetensors beside.safetensors");
    assert!(code == 1 && table.contains("10.00 %"), "{table}");
}

#[test]
fn what_cannot_be_compared_is_no_small_error() {
    let folder = tempdir().expect("a folder");
    let write = |name: &str, shape: &[usize], values: &[f32]| {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let (dtype, shape) = (safetensors::Dtype::F32, shape.to_vec());
        let tensor = model::Tensor { name: "a.weight".to_owned(), dtype, shape, bytes };
        model::write(&folder.path().join(name), &[tensor]);
    };
    write("row.safetensors", &[1, 2], &[3.0, 4.0]);
    write("column.safetensors", &[2, 1], &[3.0, 4.0]);
    write("nan.safetensors", &[1, 2], &[3.0, f32::NAN]);
    write("near.safetensors", &[1, 2], &[3.0, 4.0 + 2.0_f32.powi(-21)]);
    for (a, b, why) in [
        ("row", "column", "shapes [1, 2] and [2, 1]"),
        ("nan", "nan", "a value is NaN"),
        ("row", "nan", "a value is NaN"),
    ] {
        let command = format!("compare {a}.safetensors {b}.safetensors --tolerance 1000");
        let (code, table, _) = run(folder.path(), &command);
        assert_eq!(code, 1, "{table}");
        let last = format!("1 weight: 1 not comparable\nno weight could be compared: {why}\n");
        assert!(table.ends_with(&last) && !table.contains("0.00"), "{table}");
    }
    // A rounding is seen, and within a tolerance it is not a difference.
    let (code, table, _) = run(folder.path(), "compare row.safetensors near.safetensors");
    let says = "largest error 9.5e-6 %, a.weight: beyond the tolerance of 0 %\n";
    assert!(code == 1 && table.ends_with(says), "{table}");
    let near = "compare row.safetensors near.safetensors --tolerance 0.0001";
    let table = succeeds(folder.path(), near);
    assert!(table.ends_with("a.weight: within the tolerance of 0.0001 %\n"), "{table}");
}

#[test]
fn a_folder_to_evaluate_is_refused_with_what_to_give_instead() {
    let folder = tempdir().expect("a folder");
    let says = ["model: a folder; give a file of weights and activations"];
    model::model(folder.path(), "model", SMALL);
    fails(folder.path(), "evaluate model", 2, &says);
}

#[test]
fn colors_only_reach_a_terminal() {
    let folder = tempdir().expect("a folder");
    let of = |variables: &[(&str, &str)]| {
        let output = model::fp4()
            .current_dir(folder.path())
            .args(["inspect", "nowhere"])
            .env_remove("NO_COLOR")
            .envs(variables.iter().copied())
            .output()
            .expect("it runs");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(of(&[]).starts_with("error: "), "{}", of(&[]));
    // As on a terminal.
    let forced = of(&[("CLICOLOR_FORCE", "1")]);
    assert!(forced.starts_with("\u{1b}[1m\u{1b}[31merror:\u{1b}[0m "), "{forced:?}");
    let none = of(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]);
    assert!(none.starts_with("error: "), "{none:?}");
}

#[test]
fn formats_and_completions_are_printed() {
    let folder = tempdir().expect("a folder");
    let formats = succeeds(folder.path(), "formats --scales");
    for word in ["nvfp4", "mxfp4", "448", "1.5", "4.5 bits", "2^(c - 127)", "Q6_K, IQ4_NL, "] {
        assert!(formats.contains(word), "{formats} does not say {word}");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(succeeds(folder.path(), &format!("completions {shell}")).contains("quantize"));
    }
    assert_eq!(run(folder.path(), "completions dos").0, 2);
}

#[test]
fn decoding_says_the_error_it_makes() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    succeeds(folder.path(), "quantize model --out out --dialect modelopt");
    for (dtype, changed) in [("bf16", true), ("f32", false)] {
        let command = format!("convert out --out {dtype} --dialect plain --decode-fp4 {dtype}");
        let said = succeeds(folder.path(), &command);
        assert!(said.contains("note: 14 weights decoded to floats"), "{said}");
        assert_eq!(said.contains("14 weights changed against the input: mean error"), changed);
        let between = errors_between(&folder.path().join("out"), &folder.path().join(dtype));
        let json = succeeds(
            folder.path(),
            &format!("convert out --out {dtype}-json --dialect plain --decode-fp4 {dtype} --json"),
        );
        let report: serde_json::Value = serde_json::from_str(&json).expect("an object");
        let errors = report["errors"]["weights"].as_array().expect("a list");
        assert_eq!(errors.len(), if changed { 14 } else { 0 });
        for error in errors {
            let name = error["name"].as_str().expect("a name");
            let found = error["error_percent"].as_f64().expect("a number");
            let expected = between[name];
            assert!((found - expected).abs() < 1e-3 * expected, "{name}: {found}, {expected}");
        }
    }
}

#[test]
fn a_conversion_of_floats_states_no_quantization() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    for dialect in ["modelopt", "compressed-tensors", "miles", "mlx", "gpt-oss", "plain"] {
        let command = format!("convert model --out {dialect} --dialect {dialect}");
        let said = succeeds(folder.path(), &command);
        assert!(said.contains("note: no weight is FP4"), "{said}");
        let path = folder.path().join(dialect);
        let config = fs::read_to_string(path.join("config.json")).expect("a config");
        assert!(!config.contains("quant"), "{dialect}: {config}");
        assert!(!path.join("hf_quant_config.json").exists(), "{dialect}");
        let found = succeeds(folder.path(), &format!("inspect {dialect}"));
        assert!(!found.contains("warning"), "{found}");
    }
}
