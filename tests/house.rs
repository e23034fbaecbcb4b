//! The rules of the house, executable. Every failure names the file and what to do.
//!
//! Other rules are kept by tools: the length of functions and the count of their arguments by
//! clippy, documentation of public items and links in it by rustdoc, the layout by rustfmt.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::process::Command;

use burn_fp4::checkpoints::dialect::{self, Known, Program};
use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::{Method, ScaleRule};
use tests::house::{File, blocks, files, reached, read, root, uses};

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

const GUIDE: &str = "crates/burn-fp4/src/guide";

/// Folders and pages whose blocks are run.
const PAGES: [&str; 5] =
    ["README.md", "CONTRIBUTING.md", "docs/quantize-a-folder.md", "docs/recipes/", GUIDE];

/// The most characters of a line.
const COLUMNS: usize = 100;

/// Fails with the list of breaches of a rule, if there are any.
fn assert_kept(rule: &str, mut broken: Vec<String>) {
    broken.sort();
    broken.dedup();
    assert!(broken.is_empty(), "{rule}: {} breaches\n{}", broken.len(), broken.join("\n"));
}

/// Fails if a guard looked at fewer items than `least`.
fn assert_many<T: Debug + PartialOrd>(found: T, least: T) {
    assert!(found >= least, "found {found:?}, expected {least:?} or more");
}

/// Returns the sources of the crates.
fn sources() -> Vec<File> {
    let mut found = [files("crates", ".rs"), files("kernels-cubecl", ".rs")].concat();
    found.retain(|file| file.path.contains("/src/"));
    found
}

#[test]
fn crates_depend_downward_only() {
    let metadata = ["metadata", "--no-deps", "--format-version", "1", "--offline"];
    let output = Command::new(env!("CARGO")).args(metadata).current_dir(root()).output();
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.expect("cargo runs").stdout).expect("JSON");
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
    assert_many(arrows, 5);
}

#[test]
fn files_of_a_crate_use_each_other_one_way_and_the_oracle_uses_no_engine() {
    let sources = sources();
    let folder = |file: &File| file.path.split_inclusive("/src/").next().unwrap_or("").to_owned();
    let folders: BTreeSet<String> = sources.iter().map(folder).collect();
    let (mut broken, mut arrows, mut oracle) = (Vec::new(), 0, 0);
    for folder in folders {
        let uses = uses(&folder, &sources);
        for (from, used) in &uses {
            for (to, names) in used {
                arrows += 1;
                oracle += usize::from(to.contains("/reference/"));
                if reached(&uses, to).contains(from.as_str()) {
                    broken.push(format!("{from}: uses {names:?} of {to}, in a circle: move it"));
                }
                if from.contains("/reference/") && to.contains("/host/") {
                    broken.push(format!("{from}: is the oracle, but uses {names:?} of {to}"));
                }
            }
        }
    }
    assert_many(arrows, 500);
    assert_many(oracle, 5);
    assert_kept("files use each other one way", broken);
}

/// Returns the first cells of the rows of the table with this header.
fn first_cells(page: &str, header: &str) -> String {
    let text = read(page);
    let rows = text.lines().skip_while(|line| !line.starts_with(header));
    rows.take_while(|line| line.starts_with('|')).filter_map(|row| row.split('|').nth(1)).collect()
}

/// The variants of an enum of a file.
fn variants(file: &str, name: &str) -> Vec<String> {
    let syntax = syn::parse_file(&read(file)).expect("Rust");
    let mut found = syntax.items.iter().filter_map(|item| match item {
        syn::Item::Enum(item) if item.ident == name => Some(&item.variants),
        _ => None,
    });
    found.next().expect("the enum").iter().map(|variant| variant.ident.to_string()).collect()
}

#[test]
fn tables_of_the_guide_have_every_method_rule_and_error() {
    let [methods, errors] = ["methods", "errors"].map(|page| format!("{GUIDE}/{page}.md"));
    let mut broken = Vec::new();
    let mut check = |page: &str, header: &str, rows: &[String]| {
        let cells = first_cells(page, header);
        let missing = rows.iter().filter(|row| !cells.contains(&format!("`{row}`")));
        broken.extend(missing.map(|row| format!("{page}: `{row}` has no row below {header}")));
        assert_many(rows.len(), 4);
    };
    let named: Vec<_> = Method::NAMED.iter().map(|row| row.name.to_owned()).collect();
    check(&methods, "| method | what it minimizes", &named);
    let rules: Vec<_> = ScaleRule::ALL.iter().map(|rule| format!("{rule:?}")).collect();
    check(&methods, "| rule, on the command line | format |", &rules);
    for (name, file) in ERRORS_OF_THE_GUIDE {
        check(&errors, &format!("| `{name}` | cause"), &variants(file, name));
    }
    let text = read(&methods);
    for rule in ScaleRule::ALL {
        let row = text.lines().find(|line| line.starts_with(&format!("| `{rule:?}`")));
        let format = format!("| {} |", rule.row().format.row().name.to_uppercase());
        if !row.is_some_and(|row| row.contains(&format)) {
            broken.push(format!("{methods}: the row of `{rule:?}` lacks {format}"));
        }
    }
    assert_kept("tables of the guide are complete", broken);
}

#[test]
fn the_guide_has_every_reader_and_those_that_are_tested_are_cases_of_the_script() {
    const SCRIPT: &str = "tests/interop/readers.py";
    let page = format!("{GUIDE}/readers.md");
    let (text, script) = (read(&page), read(SCRIPT));
    let (mut rows, mut cases) = (BTreeSet::new(), BTreeSet::new());
    for dialect in dialect::written() {
        let (_, writer) = dialect::writer(dialect).expect("it is written");
        // Dialects without readers hold floats.
        let read = Fp4Format::ALL.iter().any(|format| !writer.readers(*format).is_empty());
        for format in Fp4Format::ALL.into_iter().filter(|_| read) {
            let (readers, name) = (writer.readers(format), format.row().name);
            let cell = |program| match readers.iter().find(|reader| reader.program == program) {
                Some(reader) if reader.known == Known::Test => "test",
                Some(_) => "source",
                None => "-",
            };
            let cells = Program::ALL.map(cell).join(" | ");
            rows.insert(format!("| `{dialect}` | {name} | {cells} |"));
            for reader in readers {
                let (program, inputs) = (reader.program.row(), reader.inputs);
                let (who, version) = (program.name, program.version);
                let file = match reader.known {
                    Known::Test => SCRIPT,
                    Known::Source(file) => file,
                };
                rows.insert(format!(
                    "| `{dialect}` | {name} | {who} | {version} | `{file}` | {inputs} |"
                ));
                if reader.known == Known::Test {
                    let program = who.to_lowercase().replace('.', "_");
                    cases.insert(format!("    (\"{dialect}\", \"{format}\", by_{program}),"));
                }
            }
        }
    }
    assert_many(cases.len(), 6);
    let found: BTreeSet<_> = text.lines().filter(|line| line.starts_with("| `")).collect();
    let missing = rows.iter().filter(|row| !found.contains(row.as_str()));
    let mut broken: Vec<_> = missing.map(|row| format!("{page}: add {row}")).collect();
    let unknown = found.iter().filter(|row| !rows.contains(**row));
    broken.extend(unknown.map(|row| format!("{page}: no writer has this reader: remove {row}")));
    let missing = cases.iter().filter(|case| !script.lines().any(|line| line == **case));
    broken.extend(missing.map(|case| format!("{SCRIPT}: add {case}")));
    assert_kept("the guide and the script have every reader", broken);
}

#[test]
fn documents_name_files_that_exist_and_crates() {
    let mut broken = Vec::new();
    let mut check = |page: &str, path: &str| {
        if !root().join(page).parent().expect("a folder").join(path).exists() {
            broken.push(format!("{page}: `{path}` does not exist"));
        }
    };
    let readme = read("README.md");
    let links = readme.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    let links: Vec<_> = links.filter(|link| !link.contains("://")).collect();
    assert_many(links.len(), 10);
    links.into_iter().for_each(|link| check("README.md", link));
    let pages: Vec<_> = files("docs/recipes", ".md").into_iter().map(|file| file.path).collect();
    assert_many(pages.len(), 4);
    for page in ["ARCHITECTURE.md", "CONTRIBUTING.md"].into_iter().chain(pages.iter().map(|p| &**p))
    {
        let text = read(page);
        let outside_blocks = text.split("```").step_by(2);
        let quoted = outside_blocks.flat_map(|text| text.split('`').skip(1).step_by(2));
        let is_path = |quoted: &&str| {
            let is_file = [".rs", ".md", ".toml", ".sh"].iter().any(|end| quoted.ends_with(end));
            let is_word = quoted.contains(char::is_alphanumeric) && !quoted.contains(' ');
            (quoted.contains('/') || is_file) && is_word && !quoted.contains("://")
        };
        // Of `folder/<name>.rs` it is the folder.
        let paths = quoted.filter(is_path).filter_map(|path| path.split("/<").next());
        let up = "../".repeat(page.matches('/').count());
        let paths: Vec<_> = paths.map(|path| format!("{up}{path}")).collect();
        assert_many((page, paths.len()), (page, 1));
        paths.iter().for_each(|path| check(page, path));
    }
    // All of `modules` is in the facade.
    let shown = RANKS.into_iter().filter(|name| *name != "burn-fp4-modules");
    let missing = shown.filter(|name| !readme.contains(&format!("\n| `{name}` |")));
    broken.extend(missing.map(|name| format!("README.md: `{name}` has no row: add it")));
    assert_kept("documents name files that exist, and crates", broken);
}

#[test]
fn links_of_the_guide_lead_to_files_and_to_documentation() {
    let links = read(&format!("{GUIDE}/links.txt"));
    let known: BTreeMap<_, _> = links.lines().filter_map(|line| line.split_once(": ")).collect();
    assert_many(known.len(), 50);
    let mut broken = Vec::new();
    for File { path, text } in files(GUIDE, ".md") {
        let defined = text.lines().filter(|line| line.starts_with('[') && line.contains("]: "));
        let defined: Vec<_> = defined.filter_map(|line| line.split_once(": ")).collect();
        for (label, target) in &known {
            let definitions = defined.iter().filter(|(other, _)| other == label).count();
            let used = text.matches(label).count() - definitions;
            if definitions != usize::from(used > 0) {
                broken.push(format!("{path}: {label}: {definitions} definitions, {used} uses"));
            }
            let page = target.strip_prefix("crate::guide::").map(|page| page.replace('#', ".md#"));
            let page = page.map(|page| if page.contains('#') { page } else { page + ".md" });
            let of_page = |(other, to): &&(&str, &str)| {
                other == label && page.as_deref().is_some_and(|page| page != *to)
            };
            let others = defined.iter().filter(of_page);
            broken.extend(
                others.map(|(_, to)| format!("{path}: {label} is {to}, but {target} in links.txt")),
            );
        }
        for (label, file) in defined {
            if !known.contains_key(label) {
                broken.push(format!("{path}: links.txt lacks {label}"));
            }
            let file = file.split('#').next().unwrap_or_default();
            if !root().join(GUIDE).join(file).exists() {
                broken.push(format!("{path}: `{file}` does not exist"));
            }
        }
        if text.contains("](crate::") {
            broken.push(format!("{path}: `](crate::..)` is no file: use `[label]`, and links.txt"));
        }
    }
    assert_kept("links of the guide lead somewhere", broken);
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
    for File { path, text } in
        [".rs", ".md", ".toml", ".sh", ".ci/run"].map(|ending| files("", ending)).concat()
    {
        let is_row = |line: &str| path.ends_with(".md") && line.starts_with('|');
        let wide = |line: &&str| !is_row(line) && width(line) > COLUMNS;
        broken.extend(text.lines().filter(wide).map(|line| format!("{path}: too wide: {line}")));
        let first = text.lines().find(|line| !line.is_empty() && !line.starts_with("#!"));
        if path.ends_with(".rs") && !first.is_some_and(|line| line.starts_with("//!")) {
            broken.push(format!("{path}: begin with `//!`"));
        }
    }
    assert_kept("lines are narrow, and files say what they hold", broken);
}

#[test]
fn all_blocks_of_the_documents_are_run_or_say_why_not() {
    const TABLE: &str = "tests/blocks.md";
    let table = read(TABLE);
    let rows = table.lines().filter_map(|line| {
        let cells: Vec<_> = line.strip_prefix("| ")?.strip_suffix(" |")?.split(" | ").collect();
        <[&str; 4]>::try_from(cells).ok()
    });
    let rows: Vec<[&str; 4]> = rows.skip(1).collect();
    let mut unused: BTreeSet<_> = rows.iter().collect();
    let included = [read("tests/harness/lib.rs"), read(&format!("{GUIDE}/mod.rs"))].concat();
    let mut broken = Vec::new();
    let pages = files("", ".md");
    for File { path, text } in
        pages.iter().filter(|page| PAGES.iter().any(|at| page.path.starts_with(at)))
    {
        for block in blocks(text) {
            let name = path.rsplit('/').next().unwrap_or_default();
            let in_rustdoc = included.contains(&format!("{name}\")]"));
            for part in block.parts().iter().filter(|_| !(block.is_doctest() && in_rustdoc)) {
                let fits = |row: &&[&str; 4]| match row[1].strip_suffix('*') {
                    Some(begin) => row[0] == path && part.starts_with(begin),
                    None => row[0] == path && part == row[1],
                };
                let Some(row) = rows.iter().filter(fits).max_by_key(|row| row[1].len()) else {
                    broken.push(format!("{path}: nothing runs `{part}`: add a row to {TABLE}"));
                    continue;
                };
                unused.remove(row);
                let mut words = part.split_whitespace();
                while words.any(|word| word == "--test") {
                    let test = words.next().unwrap_or_default();
                    let declared = read("tests/Cargo.toml").contains(&format!("name = \"{test}\""));
                    let of = |name: &str| root().join("crates").join(name).join("tests").join(test);
                    let own = of("cli").with_extension("rs").exists();
                    if !declared && !own && !of("checkpoints").exists() {
                        broken.push(format!("{path}: there is no test `{test}`"));
                    }
                }
            }
        }
    }
    broken.extend(unused.iter().map(|row| format!("{TABLE}: no block is {row:?}: remove it")));
    for [page, _, file, text] in rows.iter().filter(|row| row[2] != "-") {
        let source = read(file);
        let names_page = !file.contains("/tests/") || source.contains(&format!("\"{page}\""));
        if !source.contains(text) || !names_page {
            broken.push(format!("{TABLE}: {file} has no `{text}`, or does not read {page}"));
        }
    }
    assert_many(rows.len(), 30);
    assert_kept("all blocks of the documents are run", broken);
}

#[test]
fn examples_call_every_public_function() {
    let sources = sources();
    let mut code = String::new();
    let docs = sources.iter().map(|file| {
        let lines = file.text.lines().map(str::trim_start);
        let docs = lines.filter_map(|line| line.strip_prefix("///").or(line.strip_prefix("//!")));
        docs.collect::<Vec<_>>().join("\n")
    });
    for markdown in docs.chain(files(GUIDE, ".md").into_iter().map(|page| page.text)) {
        for block in blocks(&markdown).iter().filter(|block| block.is_doctest()) {
            code.extend(block.lines.iter().flat_map(|line| [*line, "\n"]));
        }
    }
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    // Called, or passed by its path.
    let called: BTreeSet<&str> = code
        .split(|c| !is_part(c))
        .filter(|word| {
            let (before, rest) = code.split_at(word.as_ptr() as usize - code.as_ptr() as usize);
            let behind = &rest[word.len()..];
            let call = behind.starts_with('(') || behind.starts_with("::<");
            !before.ends_with("fn ") && (call || before.ends_with("::"))
        })
        .collect();
    let (mut broken, mut count) = (Vec::new(), 0);
    for File { path, text } in &sources {
        // Commands have no functions, and backends are for no user.
        if path.starts_with("crates/cli/") || path.starts_with("crates/ops/src/devices/") {
            continue;
        }
        let mut hidden = false;
        for line in text.lines().map(str::trim_start) {
            let function = line.strip_prefix("pub const fn ").or(line.strip_prefix("pub fn "));
            if let Some(name) = function.and_then(|rest| rest.split(|c| !is_part(c)).next()) {
                count += 1;
                if !hidden && !called.contains(name) {
                    broken.push(format!("{path}: no example calls `{name}`: add one"));
                }
            }
            hidden = line == "#[doc(hidden)]" || hidden && line.starts_with('#');
        }
    }
    assert_many(count, 400);
    assert_kept("examples call every public function", broken);
}
