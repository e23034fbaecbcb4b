//! The rules of the house, executable. Every failure names the file and what to do.

use std::collections::BTreeSet;
use std::process::Command;

use burn_fp4::checkpoints::dialect::{self, Known, Program};
use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::{Method, ScaleRule};
use tests::house::blocks::blocks;
use tests::house::circles::circles;
use tests::house::imports::Crate;
use tests::house::runners::runs;
use tests::house::{File, assert_kept, files, read, root};

/// The crates, each allowed to depend on those before it.
const RANKS: [&str; 9] = [
    "burn-fp4-formats",
    "burn-fp4-search",
    "burn-fp4-policy",
    "burn-fp4-checkpoints",
    "burn-fp4-cubecl",
    "burn-fp4-ops",
    "burn-fp4-modules",
    "burn-fp4",
    "burn-fp4-cli",
];

/// The errors that have a table in the guide, and the files that define them.
const ERRORS_OF_THE_GUIDE: [(&str, &str); 4] = [
    ("Fp4Error", "crates/modules/src/error.rs"),
    ("RecipeError", "crates/policy/src/error.rs"),
    ("ReplayError", "crates/modules/src/replay/mod.rs"),
    ("OpsError", "crates/ops/src/error.rs"),
];

/// Folders and pages whose blocks are run.
const PAGES: [&str; 5] = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/quantize-a-folder.md",
    "docs/recipes/",
    "crates/burn-fp4/src/guide/",
];

/// Folders of functions that users call. Commands have no functions.
const CALLED: [&str; 7] = [
    "crates/modules/src/",
    "crates/ops/src/",
    "crates/formats/src/",
    "crates/search/src/",
    "crates/policy/src/",
    "crates/checkpoints/src/",
    "kernels-cubecl/src/",
];

/// The most characters of a line.
const COLUMNS: usize = 100;

/// Returns the sources of the crates.
fn sources() -> Vec<File> {
    let mut found = files("crates", ".rs");
    found.extend(files("kernels-cubecl", ".rs"));
    found.retain(|file| file.path.contains("/src/"));
    assert!(found.len() > 50, "found {} files", found.len());
    found
}

#[test]
fn crates_depend_downward_only() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rank = |name: &str| RANKS.iter().position(|known| *known == name);
    let mut arrows = 0;
    for package in metadata["packages"].as_array().expect("packages") {
        let name = package["name"].as_str().expect("a name");
        let Some(from) = rank(name) else { continue };
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let to = dependency["name"].as_str().expect("a name");
            if let Some(to_rank) = rank(to) {
                assert!(to_rank < from, "{name} depends on {to}");
                arrows += 1;
            }
        }
    }
    assert!(arrows >= 5, "found {arrows} arrows");
}

#[test]
fn files_of_a_crate_use_each_other_one_way() {
    let sources = sources();
    let folder = |file: &File| {
        let (folder, _) = file.path.split_once("/src/").expect("a source");
        format!("{folder}/src/")
    };
    let folders: BTreeSet<_> = sources.iter().map(folder).collect();
    let mut broken = Vec::new();
    let mut arrows = 0;
    for folder in folders {
        let parsed = Crate::parse(&folder, &sources);
        let (files, uses) = parsed.uses();
        let edges: Vec<Vec<_>> = uses.iter().map(|to| to.keys().copied().collect()).collect();
        arrows += edges.iter().map(Vec::len).sum::<usize>();
        for circle in circles(&edges) {
            for &from in &circle {
                for (to, names) in uses[from].iter().filter(|(to, _)| circle.contains(to)) {
                    let (from, to, names) = (files[from], files[*to], names.join(", "));
                    broken.push(format!("{from}: uses {names} of {to}, in a circle: move it down"));
                }
            }
        }
    }
    assert!(arrows > 500, "found {arrows} arrows");
    assert_kept("files of a crate use each other one way", broken);
}

#[test]
fn the_oracle_uses_no_engine() {
    let search = Crate::parse("crates/search/src/", &sources());
    let (files, uses) = search.uses();
    let is_in = |file: &str, folder| file.contains(folder);
    assert!(files.iter().any(|file| is_in(file, "/reference/")), "there is an oracle");
    let mut broken = Vec::new();
    for (from, to) in files.iter().zip(&uses).filter(|(from, _)| is_in(from, "/reference/")) {
        for (to, names) in to.iter().filter(|(to, _)| is_in(files[**to], "/host/")) {
            broken.push(format!("{from}: uses {} of {}", names.join(", "), files[*to]));
        }
    }
    assert_kept("the oracle uses no engine", broken);
}

#[test]
fn the_guide_has_every_method() {
    const PAGE: &str = "crates/burn-fp4/src/guide/methods.md";
    let text = read(PAGE);
    let header = "| method | what it minimizes";
    let table = text
        .lines()
        .skip_while(|line| !line.starts_with(header))
        .take_while(|line| line.starts_with('|'));
    let first_cells: String = table.filter_map(|row| row.split('|').nth(1)).collect();
    let missing = Method::NAMED.into_iter().map(|row| row.name);
    let missing = missing.filter(|name| !first_cells.contains(&format!("`{name}`")));
    let broken =
        missing.map(|method| format!("{PAGE}: `{method}` has no row in the table of methods"));
    assert_kept("the guide has every method", broken.collect());
}

#[test]
fn the_guide_has_every_rule() {
    const PAGE: &str = "crates/burn-fp4/src/guide/methods.md";
    let text = read(PAGE);
    let has = |rule: &ScaleRule| {
        let format = rule.row().format.row().name.to_uppercase();
        let row = |line: &&str| line.starts_with(&format!("| `{rule:?}`"));
        text.lines().find(row).is_some_and(|line| line.contains(&format!("| {format} |")))
    };
    let missing = ScaleRule::ALL.into_iter().filter(|rule| !has(rule));
    let broken =
        missing.map(|rule| format!("{PAGE}: `{rule:?}` has no row with its format: add it"));
    assert_kept("the guide has every rule", broken.collect());
}

/// The rows of both tables of readers: a dialect and format with a cell for every program, and a
/// program with its source.
fn rows_of_readers() -> Vec<String> {
    let mut rows = Vec::new();
    for dialect in dialect::written() {
        let (_, writer) = dialect::writer(dialect).expect("it is written");
        if Fp4Format::ALL.into_iter().all(|format| writer.readers(format).is_empty()) {
            // It holds floats.
            continue;
        }
        for format in Fp4Format::ALL {
            let (readers, name) = (writer.readers(format), format.row().name);
            let cell = |program| match readers.iter().find(|reader| reader.program == program) {
                Some(reader) if reader.known == Known::Test => "test",
                Some(_) => "source",
                None => "-",
            };
            let cells = Program::ALL.map(cell).join(" | ");
            rows.push(format!("| `{dialect}` | {name} | {cells} |"));
            rows.extend(readers.iter().map(|reader| {
                let program = reader.program.row();
                let file = match reader.known {
                    Known::Test => "`tests/interop/readers.py`".to_owned(),
                    Known::Source(file) => format!("`{file}`"),
                };
                let (who, version, inputs) = (program.name, program.version, reader.inputs);
                format!("| `{dialect}` | {name} | {who} | {version} | {file} | {inputs} |")
            }));
        }
    }
    rows
}

#[test]
fn the_guide_has_every_reader_and_no_other() {
    const PAGE: &str = "crates/burn-fp4/src/guide/readers.md";
    let text = read(PAGE);
    let rows = rows_of_readers();
    let missing = rows.iter().filter(|row| !text.lines().any(|line| line == **row));
    let mut broken: Vec<_> =
        missing.map(|row| format!("{PAGE}: a row is missing: add {row}")).collect();
    for line in text.lines().filter(|line| line.starts_with("| `")) {
        if !rows.iter().any(|row| row == line) {
            broken.push(format!("{PAGE}: no writer has this reader: remove {line}"));
        }
    }
    assert_kept("the guide has every reader and no other", broken);
}

#[test]
fn a_reader_that_is_tested_is_a_case_of_the_script() {
    const SCRIPT: &str = "tests/interop/readers.py";
    let text = read(SCRIPT);
    let mut broken = Vec::new();
    let mut count = 0;
    for dialect in dialect::written() {
        let (_, writer) = dialect::writer(dialect).expect("it is written");
        for format in Fp4Format::ALL {
            let tested = writer.readers(format).iter().filter(|r| r.known == Known::Test);
            for reader in tested {
                let program = reader.program.row().name.to_lowercase().replace('.', "_");
                let case = format!("    (\"{dialect}\", \"{format}\", by_{program}),");
                count += 1;
                if !text.lines().any(|line| line == case) {
                    broken.push(format!("{SCRIPT}: a case is missing: add {case}"));
                }
            }
        }
    }
    assert!(count > 5, "{count} are tested");
    assert_kept("a reader that is tested is a case of the script", broken);
}

#[test]
fn the_guide_has_every_error() {
    const PAGE: &str = "crates/burn-fp4/src/guide/errors.md";
    let page = read(PAGE);
    let mut broken = Vec::new();
    for (name, file) in ERRORS_OF_THE_GUIDE {
        let source = read(file);
        let variants = variants(&source, name);
        assert!(variants.len() > 3, "found {} variants of {name}", variants.len());
        let header = format!("| `{name}` | cause");
        let table = page
            .lines()
            .skip_while(|line| !line.starts_with(&header))
            .take_while(|line| line.starts_with('|'));
        let first_cells: String = table.filter_map(|row| row.split('|').nth(1)).collect();
        let missing = variants.into_iter().filter(|v| !first_cells.contains(&format!("`{v}`")));
        broken.extend(missing.map(|variant| {
            format!("{PAGE}: `{name}::{variant}` has no row: add its cause and remedy")
        }));
    }
    assert_kept("the guide has every error", broken);
}

/// The variants of an enum that is formatted, by its name.
fn variants<'s>(source: &'s str, name: &str) -> Vec<&'s str> {
    let (_, rest) = source.split_once(&format!("pub enum {name} {{\n")).expect("the enum");
    let (body, _) = rest.split_once("\n}").expect("its end");
    let indented = body.lines().filter_map(|line| line.strip_prefix("    "));
    let variants = indented.filter(|line| line.starts_with(char::is_uppercase));
    variants.filter_map(|line| line.split([' ', '(', ',']).next()).collect()
}

#[test]
fn the_readme_has_every_crate_and_its_links_lead_somewhere() {
    const PAGE: &str = "README.md";
    let text = read(PAGE);
    // What `modules` has is all in the facade.
    let shown = RANKS.into_iter().filter(|name| *name != "burn-fp4-modules");
    let missing = shown.filter(|name| !text.contains(&format!("\n| `{name}` |")));
    let mut broken: Vec<_> =
        missing.map(|name| format!("{PAGE}: `{name}` has no row: add it")).collect();
    let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let files = links.filter(|link| !link.contains("://"));
    let paths: Vec<_> = files.filter_map(|link| link.split('#').next()).collect();
    assert!(paths.len() > 10, "found {} links", paths.len());
    for path in paths.into_iter().filter(|path| !root().join(path).exists()) {
        broken.push(format!("{PAGE}: `{path}` does not exist"));
    }
    assert_kept("the README is complete", broken);
}

#[test]
fn links_of_the_guide_lead_to_files_and_to_documentation() {
    const GUIDE: &str = "crates/burn-fp4/src/guide";
    let links = read(&format!("{GUIDE}/links.txt"));
    let definitions: Vec<_> = links.lines().filter_map(|line| line.split_once(": ")).collect();
    assert!(definitions.len() > 50, "found {} definitions", definitions.len());
    let mut broken = Vec::new();
    for File { path, text } in files(GUIDE, ".md") {
        if text.contains("](crate::") {
            broken.push(format!("{path}: `](crate::..)` is no file: use `[label]`, and links.txt"));
        }
        for (label, target) in &definitions {
            let begin = format!("{label}: ");
            let defined: Vec<_> =
                text.lines().filter_map(|line| line.strip_prefix(&begin)).collect();
            let used = text.matches(label).count() - defined.len();
            let [file] = defined[..] else {
                if used + defined.len() > 0 {
                    let defined = defined.len();
                    broken.push(format!("{path}: {label} is used {used}, defined {defined} times"));
                }
                continue;
            };
            if used == 0 {
                broken.push(format!("{path}: {label} is defined and not used: remove it"));
            }
            let page = target.strip_prefix("crate::guide::");
            if page.is_some_and(|page| {
                let (page, anchor) = page.split_at(page.find('#').unwrap_or(page.len()));
                file != format!("{page}.md{anchor}")
            }) {
                broken.push(format!("{path}: {label} is another page than in links.txt"));
            }
            let there = root().join(GUIDE).join(file.split('#').next().unwrap_or_default());
            if !there.exists() {
                broken.push(format!("{path}: `{file}` does not exist"));
            }
        }
        for line in text.lines().filter(|line| line.starts_with('[')) {
            let label = line.split_once(": ").map(|(label, _)| label);
            let defines = label.is_some_and(|label| label.ends_with(']'));
            if defines && !definitions.iter().any(|(known, _)| Some(*known) == label) {
                broken.push(format!("{path}: links.txt lacks `{line}`"));
            }
        }
    }
    assert_kept("links of the guide lead somewhere", broken);
}

#[test]
fn lines_are_narrow() {
    // `cargo fmt` leaves comments and strings alone. Rows of tables cannot be broken, and neither
    // can web addresses.
    let width = |line: &str| {
        let words = line.split_whitespace().filter(|word| word.contains("://"));
        line.chars().count() - words.map(|word| word.chars().count()).sum::<usize>()
    };
    let mut broken = Vec::new();
    for file in [".rs", ".md", ".toml", ".sh", ".ci/run"].map(|ending| files("", ending)).concat() {
        let is_row = |line: &str| file.path.ends_with(".md") && line.starts_with('|');
        let wide = |line: &&str| !is_row(line) && width(line) > COLUMNS;
        broken.extend(file.text.lines().filter(wide).map(|line| format!("{}: {line}", file.path)));
    }
    assert_kept("lines are narrow", broken);
}

#[test]
fn files_say_what_they_hold() {
    let begins = |file: &File| {
        let mut lines = file.text.lines().filter(|line| !line.is_empty());
        lines.find(|line| !line.starts_with("#!")).is_some_and(|line| line.starts_with("//!"))
    };
    let silent = files("", ".rs").into_iter().filter(|file| !begins(file));
    let broken = silent.map(|file| format!("{}: begin with `//!`", file.path));
    assert_kept("files say what they hold", broken.collect());
}

#[test]
fn documents_name_files_that_exist() {
    let mut documents = files("docs/recipes", ".md");
    for path in ["ARCHITECTURE.md", "CONTRIBUTING.md"] {
        documents.push(File { path: path.to_owned(), text: read(path) });
    }
    assert!(documents.len() > 5, "found {} documents", documents.len());
    let mut broken = Vec::new();
    for File { path: document, text } in documents {
        let paths = named_paths(&text);
        assert!(!paths.is_empty(), "{document} names no path");
        let missing = paths.into_iter().filter(|path| !root().join(path).exists());
        broken.extend(missing.map(|path| format!("{document}: `{path}` does not exist")));
    }
    assert_kept("documents name files that exist", broken);
}

/// Returns the paths that a Markdown text names in backticks, outside of code blocks. Of
/// `folder/<name>.rs` it is the folder.
fn named_paths(markdown: &str) -> Vec<&str> {
    let is_path = |quoted: &&str| {
        let is_file = [".rs", ".md", ".toml", ".sh"].iter().any(|ending| quoted.ends_with(ending));
        let is_word = quoted.contains(char::is_alphanumeric) && !quoted.contains(' ');
        (quoted.contains('/') || is_file) && is_word && !quoted.contains("://")
    };
    let outside_blocks = markdown.split("```").step_by(2);
    let quoted = outside_blocks.flat_map(|text| text.split('`').skip(1).step_by(2));
    let folder = |path: &str| path.find('<').and_then(|name| path[..name].rfind('/'));
    quoted.filter(is_path).map(|path| folder(path).map_or(path, |end| &path[..end])).collect()
}

/// The list of all: `cargo test --test house blocks -- --nocapture`.
#[test]
fn all_blocks_of_the_documents_are_run_or_say_why_not() {
    let pages = files("", ".md").into_iter().map(|file| file.path);
    let pages: Vec<_> = pages.filter(|path| PAGES.iter().any(|at| path.starts_with(at))).collect();
    let (runs, broken) = runs(&pages);
    for run in &runs {
        println!("{}:{}: `{}`: {}", run.page, run.part.line, run.part.text, run.runner);
    }
    assert!(runs.len() > 80, "found {} parts of blocks", runs.len());
    assert_kept("all blocks of the documents are run", broken);
}

#[test]
fn examples_call_every_public_function() {
    let mut code = String::new();
    let mut add = |markdown: &str| {
        for block in blocks(markdown).iter().filter(|block| block.is_doctest()) {
            code.extend(block.lines.iter().flat_map(|line| [*line, "\n"]));
        }
    };
    let sources = sources();
    for file in &sources {
        let lines = file.text.lines().map(str::trim_start);
        let docs =
            lines.filter_map(|line| line.strip_prefix("///").or_else(|| line.strip_prefix("//!")));
        add(&docs.collect::<Vec<_>>().join("\n"));
    }
    files("crates/burn-fp4/src/guide", ".md").iter().for_each(|page| add(&page.text));
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    // Called, or passed by its path.
    let is_called = |name: &str| {
        code.match_indices(name).any(|(at, _)| {
            let (before, behind) = (&code[..at], &code[at + name.len()..]);
            let call = behind.starts_with('(') || behind.starts_with("::<");
            let path = before.ends_with("::") && !behind.starts_with(is_part);
            let definition = before.ends_with("fn ");
            !before.ends_with(is_part) && !definition && (call || path)
        })
    };
    let mut broken = Vec::new();
    let mut count = 0;
    for file in sources.iter().filter(|file| CALLED.iter().any(|at| file.path.starts_with(at))) {
        // Backends, and what only the project's tests call, are for no user.
        if file.path.starts_with("crates/ops/src/devices/") {
            continue;
        }
        let mut hidden = false;
        for line in file.text.lines().map(str::trim_start) {
            let function = line.strip_prefix("pub const fn ").or(line.strip_prefix("pub fn "));
            if let Some(name) = function.and_then(|rest| rest.split(|c| !is_part(c)).next()) {
                count += 1;
                if !hidden && !is_called(name) {
                    broken.push(format!("{}: no example calls `{name}`: add one", file.path));
                }
            }
            hidden = line == "#[doc(hidden)]" || hidden && line.starts_with('#');
        }
    }
    assert!(count > 400, "found {count} functions");
    assert_kept("examples call every public function", broken);
}

#[test]
fn every_rule_is_known_by_its_name() {
    for rule in ScaleRule::ALL {
        assert_eq!(rule.row().name.parse(), Ok(rule));
        let json = serde_json::to_string(&rule).expect("a unit variant");
        assert_eq!(json.trim_matches('"'), rule.row().name);
    }
    assert!("nearest".parse::<ScaleRule>().is_err());
}
