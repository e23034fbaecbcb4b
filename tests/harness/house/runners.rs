//! Runners of the blocks of the documents that rustdoc does not run.

use std::fmt;

use self::Runner::{Nothing, Script, Test};
use super::blocks::{Part, blocks};
use super::{read, root};

/// Runner of a command or a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runner {
    /// rustdoc: a page that a source includes.
    Doctest(&'static str),
    /// A test: its file, which names the page, and its function.
    Test(&'static str, &'static str),
    /// A script, and the line or function of it.
    Script(&'static str, &'static str),
    /// Nothing, for this reason.
    Nothing(&'static str),
}

impl fmt::Display for Runner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Doctest(file) => write!(f, "doctest of {file}"),
            Test(file, name) => write!(f, "test `{name}` of {file}"),
            Script(file, line) => write!(f, "{file}: `{line}`"),
            Nothing(reason) => write!(f, "not run: {reason}"),
        }
    }
}

/// A page, a command or the first line of a block on it, and what runs it. A command that ends with
/// a space stands for all that begin with it.
type Row = (&'static str, &'static str, Runner);

const README: &str = "README.md";
const FOLDER: &str = "docs/quantize-a-folder.md";
const CONTRIBUTING: &str = "CONTRIBUTING.md";
const CALIBRATE: &str = "crates/burn-fp4/src/guide/calibrate.md";
const SENSITIVITY: &str = "crates/burn-fp4/src/guide/sensitivity.md";
const SERVE: &str = "crates/burn-fp4/src/guide/serve.md";

const DOCS: &str = "crates/cli/tests/docs.rs";
const OF_PAGE: Runner = Test(DOCS, "the_commands_of_the_page_do_what_it_says");
const OF_GUIDE: Runner = Test(DOCS, "the_commands_of_the_guide_do_what_it_says");

const RELEASE: &str = ".ci/release";
const INSTALL: Runner = Script(RELEASE, "cargo install --path crates/cli");
const LLAMA: Runner = Script(RELEASE, "commands_with_llama");
const NEW_CRATE: Runner = Script(RELEASE, "new_crate");

const CI: &str = ".ci/run";
const TESTS: Runner = Script(CI, "step cargo test --locked");
const README_LLAMA: Runner = Script(CI, "commands=$(sed -n '/^llama() {/");
const DEVICES: Runner = Script(CI, "cargo test-device --features tests/cpu,burn-fp4-cli/cpu");

const HUGGING_FACE: Runner = Nothing("downloads from Hugging Face");
const GPU: Runner = Nothing("needs an NVIDIA GPU");

const ROWS: &[Row] = &[
    (README, "hf download ", HUGGING_FACE),
    (README, "fp4 ", Test(DOCS, "the_commands_of_the_readme_do_what_it_says")),
    (README, "[dependencies]", NEW_CRATE),
    (README, "cargo run --example quantize_model", Script(CI, "--example quantize_model")),
    (README, "cargo test", TESTS),
    (README, "cargo install --path crates/cli", INSTALL),
    (README, "use burn::tensor::{Device, FloatDType};", GPU),
    (README, "llama() ", README_LLAMA),
    (README, "llama ", README_LLAMA),
    (README, "rm -rf /tmp/genesis-fp4", README_LLAMA),
    (FOLDER, "cargo install --path crates/cli", INSTALL),
    (FOLDER, "hf download ", HUGGING_FACE),
    (FOLDER, "fp4 ", OF_PAGE),
    (FOLDER, "preset = ", OF_PAGE),
    (FOLDER, "[[weights]]", OF_PAGE),
    (FOLDER, "cargo run --release --bin llama -- ", LLAMA),
    (FOLDER, "cargo install --path crates/cli --features cuda", GPU),
    ("docs/recipes/device.md", "cargo test ", TESTS),
    ("docs/recipes/dialect.md", "cargo test ", TESTS),
    ("docs/recipes/method.md", "cargo test --test ", TESTS),
    ("docs/recipes/method.md", "cargo test --workspace --features tests/cpu ", DEVICES),
    ("docs/recipes/rule.md", "cargo test --test ", TESTS),
    ("docs/recipes/rule.md", "cargo test --workspace --features tests/cpu ", DEVICES),
    (CONTRIBUTING, "cargo test", TESTS),
    (CONTRIBUTING, "cargo test --workspace", TESTS),
    (CONTRIBUTING, ".ci/run quick", Script(CI, "== quick")),
    (CONTRIBUTING, ".ci/run", Script(CI, "== quick")),
    (CONTRIBUTING, "cargo bench ", GPU),
    (
        CONTRIBUTING,
        "<!-- table: methods; `amax`; `gptq` -->           some rows of methods.json, or all",
        Test("docs/page.rs", "what_is_between_the_comments_is_made"),
    ),
    (
        CALIBRATE,
        "@torch.no_grad()",
        Test(DOCS, "the_script_of_the_guide_is_the_one_that_is_checked"),
    ),
    (CALIBRATE, "python ", Nothing("needs PyTorch and transformers: tests/interop/README.md")),
    (
        "crates/burn-fp4/src/guide/cpu_layers.md",
        "trait Reparameterization {",
        Nothing("a proposal to Burn"),
    ),
    ("crates/burn-fp4/src/guide/methods.md", "fp4 ", OF_GUIDE),
    (
        "crates/burn-fp4/src/guide/numerics.md",
        "element: E2M1, 4 bits                     bit  3   2 1   0",
        Nothing("a drawing; the block of Rust below it checks its values"),
    ),
    (SENSITIVITY, "cargo run --release --bin llama -- ", LLAMA),
    (SERVE, "hf download ", HUGGING_FACE),
    (SERVE, "cargo install --path crates/cli", INSTALL),
    (SERVE, "fp4 ", OF_GUIDE),
    (SERVE, "vllm serve ", Nothing("needs vLLM and a GPU; the page says how vLLM was tested")),
    (SERVE, "cargo run --release -p llama --features cuda -- ", GPU),
    (SERVE, "cargo run --release --bin llama -- ", LLAMA),
];

/// Pages whose code rustdoc compiles, and the source that includes them.
const INCLUDED: [(&str, &str); 2] = [
    (README, "tests/harness/lib.rs"),
    ("crates/burn-fp4/src/guide/", "crates/burn-fp4/src/guide/mod.rs"),
];

/// A part of a block, and what runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Path of the page.
    pub page: String,
    /// The part.
    pub part: Part,
    /// Its runner.
    pub runner: Runner,
}

/// Lists what runs the parts of all blocks of some pages; and the breaches: parts that nothing
/// runs, rows without a part, and runners that do not exist.
pub fn runs(pages: &[String]) -> (Vec<Run>, Vec<String>) {
    let (mut runs, mut broken) = (Vec::new(), Vec::new());
    let mut used = vec![false; ROWS.len()];
    for page in pages {
        let text = read(page);
        for block in blocks(&text) {
            let doctest = block.is_doctest();
            for part in block.parts() {
                let found = match doctest {
                    true => source_of(page),
                    false => row_of(page, &part.text).map(|at| {
                        used[at] = true;
                        ROWS[at].2
                    }),
                };
                match found {
                    Some(runner) => runs.push(Run { page: page.clone(), part, runner }),
                    None => broken.push(format!(
                        "{page}:{}: nothing runs `{}`: run it in a test or script, or say why \
                         not, in {}",
                        part.line,
                        part.text,
                        file!()
                    )),
                }
            }
        }
    }
    for ((page, text, _), _) in ROWS.iter().zip(&used).filter(|(_, used)| !**used) {
        broken.push(format!("{page}: has no `{text}`: remove its row in {}", file!()));
    }
    for run in &runs {
        broken.extend(breach(run));
    }
    (runs, broken)
}

/// Returns the source that includes a page into documentation.
fn source_of(page: &str) -> Option<Runner> {
    let (_, source) = INCLUDED.iter().find(|(included, _)| page.starts_with(included))?;
    let name = page.rsplit('/').next()?;
    let text = read(source);
    let is_included = text.lines().any(|line| {
        line.trim().strip_prefix("#[doc = include_str!(\"").is_some_and(|path| {
            path.strip_suffix("\")]").and_then(|path| path.rsplit('/').next()) == Some(name)
        })
    });
    is_included.then_some(Runner::Doctest(source))
}

/// Finds the row of a part. The longest one counts.
fn row_of(page: &str, text: &str) -> Option<usize> {
    let fits = |(at, begin): (&str, &str)| {
        at == page && if begin.ends_with(' ') { text.starts_with(begin) } else { text == begin }
    };
    let rows = ROWS.iter().enumerate().filter(|(_, row)| fits((row.0, row.1)));
    rows.max_by_key(|(_, row)| row.1.len()).map(|(at, _)| at)
}

/// States why a runner does not run a part, if that is so.
fn breach(run: &Run) -> Option<String> {
    let Run { page, part, runner } = run;
    let at = format!("{page}:{}", part.line);
    match *runner {
        Runner::Doctest(_) | Nothing(_) => None,
        Test(file, name) => {
            let text = read(file);
            // `docs/page.rs` makes all pages.
            let names_page = !file.contains("/tests/") || text.contains(&format!("\"{page}\""));
            let exists = text.contains(&format!("fn {name}()")) && names_page;
            (!exists).then(|| format!("{at}: {file} has no test `{name}` of this page"))
        }
        Script(file, line) => {
            if !read(file).contains(line) {
                return Some(format!("{at}: {file} has no `{line}`"));
            }
            let mut words = part.text.split_whitespace();
            let mut targets = Vec::new();
            while let Some(word) = words.next() {
                if word == "--test" {
                    targets.extend(words.next());
                }
            }
            let missing = targets.into_iter().find(|name| !is_test(name))?;
            Some(format!("{at}: there is no test `{missing}`"))
        }
    }
}

/// Returns true if there is a test binary of this name.
fn is_test(name: &str) -> bool {
    let is_declared = read("tests/Cargo.toml").contains(&format!("[[test]]\nname = \"{name}\"\n"));
    let files = [format!("crates/cli/tests/{name}.rs"), format!("crates/checkpoints/tests/{name}")];
    is_declared || files.iter().any(|file| root().join(file).exists())
}
