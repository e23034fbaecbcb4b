//! GGUF files in quantized types of ggml, as a user reads them and quantizes them anew.

mod model;

use std::fs;
use std::path::Path;

use burn_fp4_checkpoints::Checkpoint;
use model::{fails, records, run, succeeds};
use tempfile::tempdir;

/// Writes a model in Q4_K, Q6_K and Q4_0, and a type that is not decoded if asked for.
fn write(path: &Path, more: bool) {
    let mut tensors = vec![
        records("token_embd.weight", 14, 16, 210),
        records("blk.0.attn_q.weight", 12, 32, 144),
        records("blk.0.ffn_gate.weight", 12, 48, 144),
        records("blk.0.ffn_up.weight", 2, 48, 8 * 18),
    ];
    if more {
        tensors.push(records("blk.0.ffn_down.weight", 16, 32, 66));
    }
    model::write_gguf(path, &tensors);
}

#[test]
fn quantized_types_of_ggml_become_fp4_by_their_values_or_stay_as_they_are() {
    let folder = tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    write(&path("q.gguf"), false);
    let listed = succeeds(folder.path(), "inspect q.gguf");
    assert!(listed.contains("Q4_K") && listed.contains("4.50"), "{listed}");
    assert!(!listed.contains("warning"), "{listed}");
    let plan = succeeds(folder.path(), "quantize q.gguf --dry-run");
    assert!(plan.contains("from Q4_K"), "{plan}");
    let (_, _, notes) = run(folder.path(), "quantize q.gguf --dry-run");
    let notes = notes.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(notes.contains("the error of that format stays"), "{notes}");
    // Their values in f32 are quantized to the same bytes.
    succeeds(folder.path(), "convert q.gguf --out f32.gguf --decode-ggml f32");
    succeeds(folder.path(), "compare q.gguf f32.gguf");
    for format in ["nvfp4", "mxfp4"] {
        for source in ["q", "f32"] {
            let out = format!("--out {source}-{format}.gguf --format {format}");
            succeeds(folder.path(), &format!("quantize {source}.gguf {out}"));
        }
        let open = |source: &str| Checkpoint::open(path(&format!("{source}-{format}.gguf")));
        let (ours, dense) = (open("q").expect("FP4"), open("f32").expect("FP4"));
        for tensor in dense.container().tensors().filter(|t| t.name.starts_with("blk.")) {
            assert_eq!(ours.container().get(&tensor.name).expect("a tensor").bytes, tensor.bytes);
        }
        let source = Checkpoint::open(path("q.gguf")).expect("a checkpoint");
        let [kept, before] = [&ours, &source].map(|c| c.container().get("token_embd.weight"));
        let (kept, before) = (kept.expect("kept"), before.expect("an embedding"));
        assert_eq!((kept.dtype, kept.bytes), (before.dtype, before.bytes));
        let facts = ours.weights().expect("weights");
        assert_eq!(facts.iter().filter(|weight| weight.is_quantized()).count(), 3);
    }
    let (code, table, _) = run(folder.path(), "compare q.gguf q-nvfp4.gguf");
    assert!(code == 1 && table.contains("error of quantized weights 8."), "{table}");
}

#[test]
fn types_that_have_no_place_or_are_not_decoded_are_said() {
    let folder = tempdir().expect("a folder");
    write(&folder.path().join("q.gguf"), true);
    let plan = succeeds(folder.path(), "quantize q.gguf --dry-run");
    assert!(plan.contains("numbers of dtype IQ2_XXS"), "{plan}");
    assert!(plan.contains("3 of 5 weights quantized"), "{plan}");
    let says = ["`token_embd.weight`", "records of ggml", "`fp4 convert --decode-ggml bf16`"];
    fails(folder.path(), "convert q.gguf --out out --dialect plain", 2, &says);
    fails(folder.path(), "quantize q.gguf --out out --dialect modelopt", 2, &says);
    let says = ["q.gguf", "`blk.0.ffn_down.weight`", "found IQ2_XXS"];
    fails(folder.path(), "convert q.gguf --out out --dialect plain --decode-ggml f32", 2, &says);
}

#[test]
fn methods_are_evaluated_on_a_gguf_file() {
    let folder = tempdir().expect("a folder");
    let floats = |name: &str, rows: usize, seed| {
        let values = model::values(rows * 256, seed);
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        (name.to_owned(), vec![rows, 256], 0, bytes)
    };
    let (calibration, evaluation) =
        (floats("up.calibration", 300, 1), floats("up.evaluation", 40, 2));
    let weight = records("up.weight", 12, 16, 144);
    model::write_gguf(&folder.path().join("q.gguf"), &[weight, calibration, evaluation]);
    let table = succeeds(folder.path(), "evaluate q.gguf --methods sse,gptq --formats nvfp4");
    assert!(table.contains("gptq") && !table.contains("failed"), "{table}");
}

#[test]
fn a_pickle_is_refused_with_the_command_that_converts_it() {
    let folder = tempdir().expect("a folder");
    fs::write(folder.path().join("pytorch_model.bin"), "PK").expect("a file");
    let says = ["pytorch_model.bin: a pickle of PyTorch", "python3 -c \"import glob"];
    for command in ["inspect .", "inspect pytorch_model.bin", "quantize . --dry-run"] {
        fails(folder.path(), command, 2, &says);
    }
}
