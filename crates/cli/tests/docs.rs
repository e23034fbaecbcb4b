//! Every command of the README, of docs/quantize-a-folder.md and of the guide that begins with
//! `fp4`, run as it stands there, and the output that is shown.

mod model;

use std::fs;
use std::path::Path;
use std::process::Command;

use burn_fp4_checkpoints::{Checkpoint, Weight};
use model::{SMALL, Tensor};
use safetensors::tensor::Dtype;
use tempfile::tempdir;

/// The texts of a page's code blocks of a language.
fn blocks<'p>(page: &'p str, language: &str) -> Vec<&'p str> {
    let fence = format!("```{language}\n");
    let begin = page.split(&fence).skip(1);
    begin.map(|rest| rest.split("```").next().expect("a first part")).collect()
}

/// A page, by its path from the root of the project.
fn read(path: &str) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    fs::read_to_string(page).expect("the page")
}

/// Runs the commands of a page in a folder; how many there were.
#[cfg(unix)]
fn run(page: &str, folder: &Path) -> usize {
    let commands: Vec<&str> = blocks(page, "sh").into_iter().flat_map(str::lines).collect();
    let program = Path::new(env!("CARGO_BIN_EXE_fp4")).parent().expect("a folder");
    let path = format!("{}:{}", program.display(), std::env::var("PATH").expect("a path"));
    let mut count = 0;
    for command in commands.into_iter().filter(|command| command.starts_with("fp4 ")) {
        let output = Command::new("sh")
            .current_dir(folder)
            .env("PATH", &path)
            .args(["-c", command])
            .output()
            .expect("a shell");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{command}: {error}");
        count += 1;
    }
    count
}

#[cfg(unix)]
#[test]
fn the_commands_of_the_readme_do_what_it_says() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "Qwen3-8B", SMALL);
    assert_eq!(run(&read("README.md"), folder.path()), 2);
    assert!(folder.path().join("Qwen3-8B-NVFP4").exists());
}

#[cfg(unix)]
#[test]
fn the_commands_of_the_page_on_transforms_do_what_it_says() {
    let page = read("crates/burn-fp4/src/guide/hadamard.md");
    let folder = tempdir().expect("a folder");
    let model = model::model(folder.path(), "model", SMALL);
    let checkpoint = Checkpoint::open(&model).expect("a checkpoint");
    // Inputs that do not depend on each other.
    let statistics = |weight: &Weight<'_>| {
        let &[_, cols] = weight.shape() else { return None };
        let one = |at: usize| f32::from(at / cols == at % cols).to_le_bytes();
        let bytes = (0..cols * cols).flat_map(one).collect();
        Some(Tensor { name: weight.name.clone(), dtype: Dtype::F32, shape: vec![cols; 2], bytes })
    };
    let weights = checkpoint.weights().expect("weights");
    let statistics: Vec<Tensor> = weights.iter().filter_map(statistics).collect();
    model::write(&folder.path().join("statistics.safetensors"), &statistics);
    let recipes = blocks(&page, "toml");
    fs::write(folder.path().join("recipe.toml"), recipes[0]).expect("a recipe");
    assert_eq!((recipes.len(), run(&page, folder.path())), (1, 2));
    let written = Checkpoint::open(folder.path().join("out")).expect("a checkpoint");
    assert_eq!(written.dialect(), "fp-quant");
}

#[cfg(unix)]
#[test]
fn the_commands_of_the_page_do_what_it_says() {
    let page = read("docs/quantize-a-folder.md");
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    model::gguf(&folder.path().join("model-f16.gguf"));
    // Q6_K and Q4_K.
    let mixed = [
        model::records("token_embd.weight", 14, 16, 210),
        model::records("blk.0.attn_q.weight", 12, 32, 144),
    ];
    model::write_gguf(&folder.path().join("model-Q4_K_M.gguf"), &mixed);
    let recipes = blocks(&page, "toml");
    assert_eq!(recipes.len(), 2);
    for (name, recipe) in ["recipe.toml", "mixed.toml"].iter().zip(&recipes) {
        fs::write(folder.path().join(name), recipe).expect("a recipe");
    }
    assert_eq!(run(&page, folder.path()), 13);
    let all = [
        "model-nvfp4/tokenizer.json",
        "model-ends",
        "model-nvfp4.gguf",
        "model-bf16",
        "model-mixed",
        "errors.html",
        "report.html",
        "model-modelopt",
    ];
    for made in all {
        assert!(folder.path().join(made).exists(), "{made}");
    }
}

#[test]
fn the_output_on_the_page_is_what_the_command_prints() {
    let page = read("docs/quantize-a-folder.md");
    let shown = blocks(&page, "text").into_iter().find(|block| block.starts_with("model-nvfp4: "));
    let genesis = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/genesis");
    let folder = tempdir().expect("a folder");
    let output = model::fp4()
        .current_dir(folder.path())
        .env("COLUMNS", "80")
        .arg("quantize")
        .arg(genesis)
        .args(["--out", "model-nvfp4"])
        .output()
        .expect("it runs");
    assert_eq!(String::from_utf8_lossy(&output.stdout), shown.expect("an output"));
}

#[test]
fn the_script_of_the_guide_is_the_one_that_is_checked() {
    let page = read("crates/burn-fp4/src/guide/calibrate.md");
    let shown = blocks(&page, "python");
    assert_eq!(shown.len(), 1);
    assert!(read("tests/interop/calibration.py").contains(shown[0]));
}

#[cfg(unix)]
#[test]
fn the_commands_of_the_guide_do_what_it_says() {
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let floats = |name: &str, shape: [usize; 2], seed| Tensor {
        name: name.to_owned(),
        dtype: Dtype::F32,
        shape: shape.to_vec(),
        bytes: model::values(shape[0] * shape[1], seed)
            .into_iter()
            .flat_map(f32::to_le_bytes)
            .collect(),
    };
    let layer = [
        floats("up.weight", [24, 64], 1),
        floats("up.calibration", [96, 64], 2),
        floats("up.evaluation", [80, 64], 3),
    ];
    model::write(&folder.path().join("layers.safetensors"), &layer);
    assert_eq!(run(&read("crates/burn-fp4/src/guide/serve.md"), folder.path()), 6);
    assert_eq!(run(&read("crates/burn-fp4/src/guide/methods.md"), folder.path()), 1);
    for made in ["model-nvfp4", "model-modelopt", "errors.svg"] {
        assert!(folder.path().join(made).exists(), "{made}");
    }
}
