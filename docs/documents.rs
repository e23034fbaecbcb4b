//! Checks that code on pages and in documentation is run, and that links lead somewhere.

use std::collections::{BTreeMap, BTreeSet};

use docs::{blocks, field, files, matches, packages, read, root, sources};

const GUIDE: &str = "crates/burn-fp4/src/guide";

/// Fails with the list of breaches of a rule, if there are any.
fn assert_kept(rule: &str, broken: &[String]) {
    assert!(broken.is_empty(), "{rule}: {} breaches\n{}", broken.len(), broken.join("\n"));
}

#[test]
fn links_of_the_guide_lead_to_files_and_to_documentation() {
    let links = read(&format!("{GUIDE}/links.txt"));
    let known: BTreeMap<_, _> = links.lines().filter_map(|line| line.split_once(": ")).collect();
    assert!(known.len() > 50);
    let mut broken = Vec::new();
    for (path, text) in files(GUIDE, ".md") {
        let (definitions, body): (Vec<_>, Vec<_>) =
            text.lines().partition(|line| line.starts_with('[') && line.contains("]: "));
        let body = body.join("\n");
        let used = known.keys().copied().filter(|label| body.contains(*label));
        let used: BTreeSet<&str> = used.collect();
        let defined: Vec<_> = definitions.iter().filter_map(|line| line.split_once(": ")).collect();
        let labels: BTreeSet<&str> = defined.iter().map(|(label, _)| *label).collect();
        let (undefined, odd) = (used.difference(&labels), labels.difference(&used));
        broken.extend(undefined.map(|label| format!("{path}: define {label}, which it uses")));
        broken.extend(odd.map(|label| format!("{path}: {label}: unused, or not in links.txt")));
        for (label, file) in defined {
            let page = file.split('#').next().unwrap_or_default();
            if !root().join(GUIDE).join(page).exists() {
                broken.push(format!("{path}: `{page}` does not exist"));
            }
            let target = known.get(label).and_then(|to| to.strip_prefix("crate::guide::"));
            if target.is_some_and(|to| to != file.replacen(".md", "", 1)) {
                broken.push(format!("{path}: {label} is {file}, but {target:?} in links.txt"));
            }
        }
        if text.contains("](crate::") {
            broken.push(format!("{path}: `](crate::..)` is no file: use `[label]`, and links.txt"));
        }
    }
    assert_kept("links of the guide lead somewhere", &broken);
}

#[test]
fn all_blocks_of_the_documents_are_run_or_say_why_not() {
    const TABLE: &str = "tests/blocks.md";
    let table = read(TABLE);
    let cells = table.lines().map(|line| line.trim_matches(['|', ' ']).split(" | ").collect());
    let rows: Vec<[&str; 4]> =
        cells.filter_map(|cells: Vec<_>| cells.try_into().ok()).skip(1).collect();
    assert!(rows.len() > 30);
    let included = read("tests/harness/lib.rs") + &read(&format!("{GUIDE}/mod.rs"));
    let packages = packages();
    let targets = packages.iter().flat_map(|package| field(&package["targets"], "name"));
    let targets: BTreeSet<&str> = targets.collect();
    let mut pages = files(GUIDE, ".md");
    pages.extend(files("docs/recipes", ".md"));
    let others = ["README.md", "CONTRIBUTING.md", "docs/quantize-a-folder.md"];
    pages.extend(others.map(|page| (page.to_owned(), read(page))));
    let (mut broken, mut used) = (Vec::new(), BTreeSet::new());
    for (page, text) in &pages {
        let name = page.rsplit('/').next().unwrap_or_default();
        let in_rustdoc = included.contains(&format!("{name}\")]"));
        let of_user = blocks(text).into_iter().filter(|one| !(one.is_doctest() && in_rustdoc));
        for part in of_user.flat_map(|block| block.parts()) {
            let fits = |[of, block, ..]: &&[&str; 4]| match block.strip_suffix('*') {
                Some(begin) => of == page && part.starts_with(begin),
                None => of == page && part == *block,
            };
            match rows.iter().filter(fits).max_by_key(|row| row[1].len()) {
                Some(row) => drop(used.insert(row)),
                None => broken.push(format!("{page}: add a row to {TABLE} for `{part}`")),
            }
            let tests = matches(r"--test (\w+)", &part).into_iter();
            let unknown = tests.filter(|name| !targets.contains(name));
            broken.extend(unknown.map(|name| format!("{page}: there is no test `{name}`")));
        }
    }
    for row @ [page, _, file, text] in &rows {
        if !used.contains(row) {
            broken.push(format!("{TABLE}: no block is {row:?}: remove it"));
        }
        let source = if *file == "-" { String::new() } else { read(file) };
        let names_page = !file.contains("/tests/") || source.contains(&format!("\"{page}\""));
        if *file != "-" && !(source.contains(text) && names_page) {
            broken.push(format!("{TABLE}: {file} has no `{text}`, or does not read {page}"));
        }
    }
    assert_kept("all blocks of the documents are run", &broken);
}

#[test]
fn examples_call_every_public_function() {
    let sources = sources();
    let docs = |text: &String| matches(r"(?m)^ *//[/!](.*)$", text).join("\n");
    let mut pages: Vec<String> = sources.values().map(docs).collect();
    pages.extend(files(GUIDE, ".md").into_values());
    // Called, or passed by its path.
    let call = r"fn \w+|\b(\w+)(?:\(|::<)|::(\w+)\b";
    let examples = pages.iter().flat_map(|page| blocks(page));
    let examples = examples.filter(|block| block.is_doctest());
    let called: BTreeSet<&str> = examples.flat_map(|block| matches(call, block.text)).collect();
    // A hidden function is one that no user calls.
    let function = r"(?m)#\[doc\(hidden\)\]\n(?: *#.*\n)* *pub fn|^ *pub (?:const )?fn (\w+)";
    // Commands have no functions, and backends are for no user.
    let exempt = ["crates/cli/", "crates/ops/src/devices/"];
    let (mut broken, mut count) = (Vec::new(), 0);
    for (path, text) in sources {
        if exempt.iter().any(|folder| path.starts_with(folder)) {
            continue;
        }
        let functions = matches(function, &text);
        count += functions.len();
        let missing = functions.into_iter().filter(|name| !called.contains(name));
        broken.extend(missing.map(|name| format!("{path}: no example calls `{name}`: add one")));
    }
    assert!(count > 400);
    assert_kept("examples call every public function", &broken);
}
