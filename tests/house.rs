//! The rules of the house, executable. Every failure names the file and what to do.
//!
//! Other rules are kept by tools: the length of functions and the count of their arguments by
//! clippy, documentation of public items and links in it by rustdoc, the layout by rustfmt, pages
//! and their code by the tests of `docs`.

use std::collections::BTreeSet;
use std::fmt::Debug;

use burn_fp4::checkpoints::dialect::{self, Known, Program};
use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::{Method, ScaleRule};
use docs::{field, files, matches, packages, read, root, sources};
use tests::house::{reached, uses};

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

/// The most characters of a line.
const COLUMNS: usize = 100;

const GUIDE: &str = "crates/burn-fp4/src/guide";

/// Fails with the list of breaches of a rule, if there are any.
fn assert_kept(rule: &str, broken: impl IntoIterator<Item = String>) {
    let broken: BTreeSet<String> = broken.into_iter().collect();
    let list: Vec<_> = broken.iter().map(String::as_str).collect();
    assert!(list.is_empty(), "{rule}: {} breaches\n{}", list.len(), list.join("\n"));
}

/// Fails if a guard looked at fewer items than `least`.
fn assert_many<T: Debug + PartialOrd>(found: T, least: T) {
    assert!(found >= least, "found {found:?}, expected {least:?} or more");
}

#[test]
fn crates_depend_downward_only_and_are_in_the_readme() {
    let rank = |name: &str| RANKS.iter().position(|known| *known == name);
    let readme = read("README.md");
    let (mut broken, mut arrows) = (Vec::new(), 0);
    for package in packages() {
        let name = package["name"].as_str().expect("a name");
        // All of `modules` is in the facade.
        let is_shown = name == "burn-fp4-modules" || readme.contains(&format!("\n| `{name}` |"));
        if name.starts_with("burn-fp4") && !(is_shown && rank(name).is_some()) {
            broken.push(format!("{name}: add it to RANKS, and a row to the README"));
        }
        for to in field(&package["dependencies"], "name").filter(|to| rank(to).is_some()) {
            arrows += 1;
            if rank(name).is_some_and(|from| rank(to) >= Some(from)) {
                broken.push(format!("{name}: depends on {to}, which is above it: move the code"));
            }
        }
    }
    assert_many(arrows, 20);
    assert_kept("crates depend downward only", broken);
}

#[test]
fn files_of_a_crate_use_each_other_one_way_and_the_oracle_uses_no_engine() {
    let sources = sources();
    let folder = |path: &String| path.split_inclusive("/src/").next().unwrap_or("").to_owned();
    let folders: BTreeSet<String> = sources.keys().map(folder).collect();
    let (mut broken, mut arrows, mut oracle) = (Vec::new(), 0, 0);
    for folder in folders {
        let uses = uses(&folder, &sources);
        for (from, used) in &uses {
            for (to, path) in used {
                arrows += 1;
                oracle += usize::from(to.contains("/reference/"));
                if reached(&uses, to).contains(from.as_str()) {
                    broken.push(format!("{from}: uses `{path}` of {to}, in a circle: move it"));
                }
                if from.contains("/reference/") && to.contains("/host/") {
                    broken.push(format!("{from}: is the oracle, but uses `{path}` of {to}"));
                }
            }
        }
    }
    assert_many(arrows, 500);
    assert_many(oracle, 5);
    assert_kept("files use each other one way", broken);
}

#[test]
fn tables_of_the_guide_have_every_method_rule_and_error() {
    let variants = |name: &str, file: &str| -> Vec<[String; 2]> {
        let items = syn::parse_file(&read(file)).expect("Rust").items;
        let variants = items.into_iter().find_map(|item| match item {
            syn::Item::Enum(item) if item.ident == name => Some(item.variants),
            _ => None,
        });
        let variants = variants.expect("the enum").into_iter();
        variants.map(|variant| [variant.ident.to_string(), String::new()]).collect()
    };
    let methods = Method::NAMED.iter().map(|row| [row.name.to_owned(), String::new()]);
    let rules = ScaleRule::ALL.iter().map(|rule| {
        let format = rule.row().format.row().name.to_uppercase();
        [format!("{rule:?}"), format!("| {format} |")]
    });
    let mut tables = vec![
        ("methods", "| method | what it minimizes".to_owned(), methods.collect()),
        ("methods", "| rule, on the command line | format |".to_owned(), rules.collect()),
    ];
    for (error, file) in [
        ("Fp4Error", "crates/modules/src/error.rs"),
        ("RecipeError", "crates/policy/src/error.rs"),
        ("ReplayError", "crates/modules/src/replay/mod.rs"),
        ("OpsError", "crates/ops/src/error.rs"),
    ] {
        tables.push(("errors", format!("| `{error}` | cause"), variants(error, file)));
    }
    let mut broken = Vec::new();
    for (page, header, rows) in tables {
        let page = format!("{GUIDE}/{page}.md");
        let text = read(&page);
        let table = text.lines().skip_while(|line| !line.starts_with(&header));
        let table: Vec<_> = table.take_while(|line| line.starts_with('|')).collect();
        assert_many((&header, rows.len()), (&header, 4));
        for [name, cell] in rows {
            let begin = format!("`{name}`");
            let is_row = |row: &&str| row[1..].split('|').next().unwrap_or("").contains(&begin);
            if !table.iter().filter(|row| is_row(row)).any(|row| row.contains(&cell)) {
                broken.push(format!("{page}: add a row {begin} {cell} below {header}"));
            }
        }
    }
    assert_kept("tables of the guide are complete", broken);
}

#[test]
fn the_guide_has_every_reader_and_those_that_are_tested_are_cases_of_the_script() {
    const SCRIPT: &str = "tests/interop/readers.py";
    let (mut rows, mut cases) = (BTreeSet::new(), BTreeSet::new());
    for dialect in dialect::written() {
        let (_, writer) = dialect::writer(dialect).expect("it is written");
        // Dialects without readers hold floats.
        let read = Fp4Format::ALL.iter().any(|format| !writer.readers(*format).is_empty());
        for format in Fp4Format::ALL.into_iter().filter(|_| read) {
            let readers = writer.readers(format);
            let cell = |program| match readers.iter().find(|reader| reader.program == program) {
                Some(reader) if reader.known == Known::Test => "test",
                Some(_) => "source",
                None => "-",
            };
            rows.insert(format!(
                "| `{dialect}` | {format} | {} |",
                Program::ALL.map(cell).join(" | ")
            ));
            for reader in readers {
                let (program, inputs) = (reader.program.row(), reader.inputs);
                let (name, version) = (program.name, program.version);
                let file = match reader.known {
                    Known::Test => SCRIPT,
                    Known::Source(file) => file,
                };
                rows.insert(format!(
                    "| `{dialect}` | {format} | {name} | {version} | `{file}` | {inputs} |"
                ));
                if reader.known == Known::Test {
                    let program = name.to_lowercase().replace('.', "_");
                    cases.insert(format!("    (\"{dialect}\", \"{format}\", by_{program}),"));
                }
            }
        }
    }
    assert_many(cases.len(), 6);
    let page = format!("{GUIDE}/readers.md");
    let mut broken = Vec::new();
    for (file, begin, expected) in [(&*page, "| `", rows), (SCRIPT, "    (\"", cases)] {
        let text = read(file);
        let found = text.lines().filter(|line| line.starts_with(begin)).map(str::to_owned);
        let found: BTreeSet<String> = found.collect();
        broken.extend(expected.difference(&found).map(|row| format!("{file}: add {row}")));
        broken.extend(found.difference(&expected).map(|row| format!("{file}: remove {row}")));
    }
    assert_kept("the guide and the script have every reader, and no other", broken);
}

#[test]
fn documents_name_files_that_exist() {
    let mut broken = Vec::new();
    let mut check = |page: &str, paths: Vec<&str>, least: usize| {
        assert_many((page, paths.len()), (page, least));
        let exists = |path: &&str| root().join(path).exists();
        let absent = paths.into_iter().filter(|path| !exists(path));
        broken.extend(absent.map(|path| format!("{page}: `{path}` does not exist")));
    };
    let readme = read("README.md");
    let links = matches(r"\]\(([^)#]+)", &readme).into_iter();
    check("README.md", links.filter(|link| !link.contains("://")).collect(), 10);
    let mut pages = files("docs/recipes", ".md");
    assert_many(pages.len(), 4);
    pages.extend(["ARCHITECTURE.md", "CONTRIBUTING.md"].map(|page| (page.to_owned(), read(page))));
    for (page, text) in &pages {
        let text: String = text.split("```").step_by(2).collect();
        let is_path = |quoted: &&str| {
            let is_file = [".rs", ".md", ".toml", ".sh"].iter().any(|end| quoted.ends_with(end));
            let is_word = quoted.contains(char::is_alphanumeric) && !quoted.contains(' ');
            (quoted.contains('/') || is_file) && is_word && !quoted.contains("://")
        };
        let paths = matches("`([^`]*)`", &text).into_iter().filter(is_path);
        // Of `folder/<name>.rs` it is the folder.
        check(page, paths.filter_map(|path| path.split("/<").next()).collect(), 1);
    }
    assert_kept("documents name files that exist", broken);
}

#[test]
fn lines_are_narrow_and_files_say_what_they_hold() {
    // `cargo fmt` leaves comments and strings alone. Rows of tables cannot be broken, and neither
    // can web addresses.
    let width = |line: &str| {
        let words = line.split_whitespace().filter(|word| word.contains("://"));
        line.chars().count() - words.map(|word| word.chars().count()).sum::<usize>()
    };
    let mut broken = Vec::new();
    let endings = [".rs", ".md", ".toml", ".sh", ".ci/run"];
    for (path, text) in endings.into_iter().flat_map(|ending| files("", ending)) {
        let is_row = |line: &str| path.ends_with(".md") && line.starts_with('|');
        let wide = text.lines().filter(|line| !is_row(line) && width(line) > COLUMNS);
        broken.extend(wide.map(|line| format!("{path}: too wide: {line}")));
        if path.ends_with(".rs") && !text.trim_start().starts_with("//!") {
            broken.push(format!("{path}: begin with `//!`"));
        }
    }
    assert_kept("lines are narrow, and files say what they hold", broken);
}
