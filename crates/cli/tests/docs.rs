//! Every command of docs/quantize-a-folder.md, run as it stands there.

mod model;

use std::fs;
use std::path::Path;
use std::process::Command;

use model::SMALL;
use tempfile::tempdir;

/// The texts of a page's code blocks of a language.
fn blocks<'p>(page: &'p str, language: &str) -> Vec<&'p str> {
    let fence = format!("```{language}\n");
    let begin = page.split(&fence).skip(1);
    begin.map(|rest| rest.split("```").next().expect("a first part")).collect()
}

#[cfg(unix)]
#[test]
fn the_commands_of_the_page_do_what_it_says() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/quantize-a-folder.md");
    let page = fs::read_to_string(page).expect("the page");
    let folder = tempdir().expect("a folder");
    model::model(folder.path(), "model", SMALL);
    let recipes = blocks(&page, "toml");
    fs::write(folder.path().join("recipe.toml"), recipes[0]).expect("a recipe");
    let commands: Vec<&str> = blocks(&page, "sh").into_iter().flat_map(str::lines).collect();
    let program = Path::new(env!("CARGO_BIN_EXE_fp4")).parent().expect("a folder");
    let path = format!("{}:{}", program.display(), std::env::var("PATH").expect("a path"));
    let mut run = 0;
    for command in commands.into_iter().filter(|command| command.starts_with("fp4 ")) {
        let output = Command::new("sh")
            .current_dir(folder.path())
            .env("PATH", &path)
            .args(["-c", command])
            .output()
            .expect("a shell");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{command}: {error}");
        run += 1;
    }
    assert_eq!((run, recipes.len()), (9, 1));
    for made in ["model-nvfp4/tokenizer.json", "model.gguf", "errors.html", "model-modelopt"] {
        assert!(folder.path().join(made).exists(), "{made}");
    }
}
