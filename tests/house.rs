//! The rules of the house, executable. Every failure names the file, the line and what to do.

use std::collections::BTreeSet;
use std::process::Command;

use burn_fp4::checkpoints::dialect::{self, Known, Program};
use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::{Method, ScaleRule};
use tests::house::arrows::{Arrow, Crate};
use tests::house::circles::circles;
use tests::house::functions::functions;
use tests::house::lines::{COLUMNS, has_header, named_paths, wide_lines};
use tests::house::tokens::{Token, mask, tokens, without_tests};
use tests::house::{Breach, File, assert_kept, files, root};

/// The crates, each allowed to depend on those before it.
const RANKS: [&str; 8] = [
    "burn-fp4-formats",
    "burn-fp4-checkpoints",
    "burn-fp4-search",
    "burn-fp4-cubecl",
    "burn-fp4-ops",
    "burn-fp4-modules",
    "burn-fp4",
    "burn-fp4-cli",
];

/// The files that may name a format or the number format of its block scales; any other asks the
/// rows of `Fp4Format`, `Minifloat` or `ScaleRule`.
const FORMATS_ARE_NAMED_IN: [&str; 20] = [
    // What formats are, how files hold them, and what is compiled for each.
    "crates/checkpoints/src/cast.rs",
    "crates/checkpoints/src/dialect/",
    "crates/checkpoints/src/fp8.rs",
    "crates/checkpoints/src/storage.rs",
    "crates/formats/src/format.rs",
    "crates/formats/src/lib.rs",
    "crates/formats/src/minifloat.rs",
    "crates/search/src/host/scale_grid.rs",
    "crates/search/src/method.rs",
    "crates/search/src/modelopt.rs",
    "crates/search/src/rule.rs",
    // Presets and defaults, by which users choose a format, and what is exported of a name.
    "crates/burn-fp4/src/lib.rs",
    "crates/modules/src/config.rs",
    "crates/modules/src/sensitivity/candidate.rs",
    "crates/modules/src/training/activations.rs",
    "crates/modules/src/training/train_linear.rs",
    "crates/ops/src/lib.rs",
    "crates/ops/src/train/recipe.rs",
    "crates/search/src/lib.rs",
    "crates/search/src/scheme.rs",
];

/// The files that may name a scale rule, as that of a scheme or a preset; any other asks its row.
const RULES_ARE_NAMED_IN: [&str; 2] =
    ["crates/cli/src/quantize/options.rs", "crates/search/src/scheme.rs"];

/// The files where a new search or method has to be decided about, as the recipe of a method in
/// CONTRIBUTING.md says; they may name them.
const METHODS_ARE_DECIDED_IN: [&str; 8] = [
    "crates/modules/src/config.rs",
    "crates/modules/src/pack/",
    "crates/ops/src/devices/cube/mod.rs",
    "crates/search/src/host/choose.rs",
    "crates/search/src/method.rs",
    "crates/search/src/reference/",
    "kernels-cubecl/src/plan/launch.rs",
    "kernels-cubecl/src/search/",
];

/// The files that may name a search or a method too, of which a new one makes no difference to
/// them; any other asks the row.
const METHODS_ARE_NAMED_IN: [&str; 11] = [
    // How one of them is done, or what is done without a search.
    "crates/modules/src/training/weights.rs",
    "crates/modules/src/walk/scale_groups.rs",
    "crates/ops/src/devices/portable/",
    "crates/search/src/hessian_factor.rs",
    "crates/search/src/host/gptq.rs",
    "crates/search/src/host/quantize.rs",
    "crates/search/src/importance.rs",
    "crates/search/src/scheme.rs",
    "kernels-cubecl/src/gptq/quantize.rs",
    "kernels-cubecl/src/quantize.rs",
    // The default of a command.
    "crates/cli/src/quantize/options.rs",
];

/// The folders of the engines, which have a file for each method, or one that is listed below.
const METHODS_ARE_IN: [&str; 3] = [REFERENCE, HOST, KERNELS];
const REFERENCE: &str = "crates/search/src/reference";
const HOST: &str = "crates/search/src/host";
const KERNELS: &str = "kernels-cubecl/src/search";

/// What else is in those folders, used by several methods.
const SHARED_BY_METHODS: [&str; 3] = [
    "mod block solution",
    "mod arch choose codes decode dequantize element fake_quantize hadamard matmul quantize \
     scale_grid simd_batch solution tile_reduce view",
    "mod best block_hessian choose quantize_args",
];

/// Where the methods are that have no file of their name in the folder of an engine.
const METHODS_ELSEWHERE: [(&str, &str, &str); 15] = [
    // The same search, with weights.
    (REFERENCE, "sse_weighted", "crates/search/src/reference/sse.rs"),
    (HOST, "sse_weighted", "crates/search/src/host/sse.rs"),
    (KERNELS, "sse_weighted", "kernels-cubecl/src/search/sse.rs"),
    // The same steps from another point.
    (REFERENCE, "admm_published", "crates/search/src/reference/admm.rs"),
    (HOST, "admm_published", "crates/search/src/host/admm.rs"),
    (HOST, "gptq_textbook", "crates/search/src/host/gptq.rs"),
    // Many times `sse`, of any engine.
    (REFERENCE, "sse_tensor_scale", "crates/search/src/best_tensor_scale.rs"),
    (HOST, "sse_tensor_scale", "crates/search/src/best_tensor_scale.rs"),
    (KERNELS, "sse_tensor_scale", "crates/ops/src/importance.rs"),
    // Engines sum over a matrix in orders of their own, so that no definition has the bits of all:
    // tests compare the errors of outputs that they leave.
    (REFERENCE, "gptq", "crates/search/src/host/gptq.rs"),
    (REFERENCE, "gptq_textbook", "crates/search/src/host/gptq.rs"),
    // Kernels with a folder of their own.
    (KERNELS, "gptq", "kernels-cubecl/src/gptq/quantize.rs"),
    (KERNELS, "gptq_textbook", "kernels-cubecl/src/gptq/quantize.rs"),
    // No kernel: Cube devices read the weight back, and the host quantizes it.
    (KERNELS, "admm", "crates/search/src/host/admm.rs"),
    (KERNELS, "admm_published", "crates/search/src/host/admm.rs"),
];

/// Circles through this file do not count: an error has the types that it tells of, and what they
/// do returns it.
const ERRORS: &str = "error.rs";

/// The errors that have a table in the guide, and the files that define them.
const ERRORS_OF_THE_GUIDE: [(&str, &str); 4] = [
    ("Fp4Error", "crates/modules/src/error.rs"),
    ("RecipeError", "crates/search/src/error.rs"),
    ("ReplayError", "crates/modules/src/replay/mod.rs"),
    ("OpsError", "crates/ops/src/error.rs"),
];

/// The most lines of a function.
const FUNCTION: usize = 80;

/// The most lines of a CubeCL kernel, which the compiler has to see whole.
const KERNEL: usize = 120;

/// The most arguments of a function of the kernels, where Clippy does not count them.
const ARGUMENTS: usize = 8;

/// The sources of the crates.
fn sources() -> Vec<File> {
    let mut found = files("crates", ".rs");
    found.extend(files("kernels-cubecl", ".rs"));
    found.retain(|file| file.path.contains("/src/"));
    assert!(found.len() > 50, "found {} files", found.len());
    found
}

fn breach(file: &str, line: usize, what: String) -> Breach {
    Breach { file: file.to_owned(), line, what }
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
fn no_drawers() {
    let is_drawer = |path: &str| {
        let stem = path.rsplit('/').next().and_then(|name| name.strip_suffix(".rs"));
        stem.is_some_and(|stem| ["base", "utils", "helpers", "common", "misc"].contains(&stem))
    };
    let drawers = sources().into_iter().filter(|file| is_drawer(&file.path));
    let what = "name the file after what it holds";
    let broken = drawers.map(|file| breach(&file.path, 1, what.to_owned()));
    assert_kept("files are named after what they hold", broken.collect());
}

#[test]
fn files_of_a_crate_use_each_other_one_way() {
    let sources = sources();
    let folder = |file: &File| {
        let (folder, _) = file.path.split_once("/src/").expect("a source");
        format!("{folder}/src/")
    };
    let folders: BTreeSet<_> = sources.iter().map(folder).collect();
    let broken = folders.iter().flat_map(|folder| circles_of(folder, &read_crate(folder)));
    assert_kept("files of a crate use each other one way", broken.collect());
}

/// The crate whose sources are in a folder, which ends in `/`.
fn read_crate(folder: &str) -> Crate {
    let own = |file: File| Some((file.path.strip_prefix(folder)?.to_owned(), file.text));
    Crate::new(sources().into_iter().filter_map(own).collect())
}

/// One breach for every arrow of a circle, and for every path that leads nowhere.
fn circles_of(folder: &str, files: &Crate) -> Vec<Breach> {
    let path = |file: usize| format!("{folder}{}", files.files[file]);
    let (arrows, unknown) = files.arrows();
    let mut broken: Vec<_> = unknown
        .iter()
        .map(|u| {
            breach(&path(u.file), u.line, format!("`{}` leads nowhere that is understood", u.path))
        })
        .collect();
    let counted = |arrow: &&Arrow| files.files[arrow.to] != ERRORS;
    let mut edges = vec![Vec::new(); files.files.len()];
    for arrow in arrows.iter().filter(counted) {
        edges[arrow.from].push(arrow.to);
    }
    for circle in circles(&edges) {
        let inside = |arrow: &&Arrow| circle.contains(&arrow.from) && circle.contains(&arrow.to);
        broken.extend(arrows.iter().filter(inside).filter(counted).map(|arrow| {
            let (name, to, count) = (&arrow.name, &files.files[arrow.to], circle.len());
            let what = format!("`{name}` of {to} is in a circle of {count} files: move it down");
            breach(&path(arrow.from), arrow.line, what)
        }));
    }
    broken
}

#[test]
fn the_oracle_uses_no_engine() {
    const FOLDER: &str = "crates/search/src/";
    let search = read_crate(FOLDER);
    let (arrows, _) = search.arrows();
    let is_wrong = |arrow: &&Arrow| {
        let [from, to] = [arrow.from, arrow.to].map(|file| search.files[file].as_str());
        from.starts_with("reference/") && to.starts_with("host/")
    };
    let broken = arrows.iter().filter(is_wrong).map(|arrow| {
        let (file, name) = (format!("{FOLDER}{}", search.files[arrow.from]), &arrow.name);
        breach(&file, arrow.line, format!("`{name}` is the host's: define it beside the oracle"))
    });
    assert!(search.files.iter().any(|file| file.starts_with("reference/")), "there is an oracle");
    assert_kept("the oracle uses no engine", broken.collect());
}

#[test]
fn formats_are_named_where_their_facts_are() {
    named_only_in(&FORMATS_ARE_NAMED_IN, "the format's row", |tokens, at| {
        names_a_format(tokens[at].text)
    });
}

#[test]
fn rules_are_named_where_their_facts_are() {
    let names = ScaleRule::ALL.map(|rule| format!("{rule:?}"));
    named_only_in(&RULES_ARE_NAMED_IN, "the rule's row", |tokens, at| {
        let is = |at: usize, text: &str| tokens.get(at).is_some_and(|token| token.text == text);
        let variant = tokens.get(at + 3).map_or("", |token| token.text);
        is(at, "ScaleRule") && is(at + 1, ":") && is(at + 2, ":") && names.contains(&variant.into())
    });
}

#[test]
fn methods_are_named_where_something_is_decided() {
    let listed = [&METHODS_ARE_DECIDED_IN[..], &METHODS_ARE_NAMED_IN].concat();
    named_only_in(&listed, "the method's row", |tokens, at| {
        let is = |at: usize, text: &str| tokens.get(at).is_some_and(|token| token.text == text);
        let variant = tokens.get(at + 3).map_or("", |token| token.text);
        let camel = |text: &str| {
            text.starts_with(char::is_uppercase) && text.chars().any(char::is_lowercase)
        };
        ["ScaleSearch", "Method", "ChosenBy"].contains(&tokens[at].text)
            && is(at + 1, ":")
            && is(at + 2, ":")
            && camel(variant)
    });
}

#[test]
fn contributing_names_where_methods_are_decided_about() {
    const DOCUMENT: &str = "CONTRIBUTING.md";
    let text = std::fs::read_to_string(root().join(DOCUMENT)).expect("the document");
    let (_, recipe) = text.split_once("\n**A method**").expect("the recipe of a method");
    let (recipe, _) = recipe.split_once("\n**A device.**").expect("the recipe of a device");
    let named = named_paths(recipe);
    // A folder is named by a file in it.
    let missing = METHODS_ARE_DECIDED_IN
        .into_iter()
        .filter(|listed| !named.iter().any(|(_, path)| path.starts_with(listed)));
    let broken = missing.map(|listed| {
        breach(DOCUMENT, 1, format!("the recipe of a method does not name `{listed}`: add it"))
    });
    assert_kept("where methods are decided about is in CONTRIBUTING.md", broken.collect());
}

#[test]
fn the_guide_has_every_method() {
    const PAGE: &str = "crates/burn-fp4/src/guide/methods.md";
    let text = std::fs::read_to_string(root().join(PAGE)).expect("the page");
    let header = "| method | what it minimizes";
    let table = text
        .lines()
        .skip_while(|line| !line.starts_with(header))
        .take_while(|line| line.starts_with('|'));
    let first_cells: String = table.filter_map(|row| row.split('|').nth(1)).collect();
    let missing = Method::ALL.into_iter().filter(|m| !first_cells.contains(&format!("`{m}`")));
    let broken = missing
        .map(|method| breach(PAGE, 1, format!("`{method}` has no row in the table of methods")));
    assert_kept("the guide has every method", broken.collect());
}

#[test]
fn the_guide_has_every_rule() {
    const PAGE: &str = "crates/burn-fp4/src/guide/methods.md";
    let text = std::fs::read_to_string(root().join(PAGE)).expect("the page");
    let has = |rule: &ScaleRule| {
        let format = rule.row().format.row().name.to_uppercase();
        let row = |line: &&str| line.starts_with(&format!("| `{rule:?}`"));
        text.lines().find(row).is_some_and(|line| line.contains(&format!("| {format} |")))
    };
    let missing = ScaleRule::ALL.into_iter().filter(|rule| !has(rule));
    let broken = missing
        .map(|rule| breach(PAGE, 1, format!("`{rule:?}` has no row with its format: add it")));
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
    let text = std::fs::read_to_string(root().join(PAGE)).expect("the page");
    let rows = rows_of_readers();
    let missing = rows.iter().filter(|row| !text.lines().any(|line| line == **row));
    let mut broken: Vec<_> =
        missing.map(|row| breach(PAGE, 1, format!("a row is missing: add {row}"))).collect();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| line.starts_with("| `")) {
        if !rows.iter().any(|row| row == line) {
            broken.push(breach(
                PAGE,
                number + 1,
                "no writer has this reader: remove it".to_owned(),
            ));
        }
    }
    assert_kept("the guide has every reader and no other", broken);
}

#[test]
fn a_reader_that_is_tested_is_a_case_of_the_script() {
    const SCRIPT: &str = "tests/interop/readers.py";
    let text = std::fs::read_to_string(root().join(SCRIPT)).expect("the script");
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
                    broken.push(breach(SCRIPT, 1, format!("a case is missing: add {case}")));
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
    let page = std::fs::read_to_string(root().join(PAGE)).expect("the page");
    let mut broken = Vec::new();
    for (name, file) in ERRORS_OF_THE_GUIDE {
        let source = std::fs::read_to_string(root().join(file)).expect("the source");
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
            breach(PAGE, 1, format!("`{name}::{variant}` has no row: add its cause and remedy"))
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
    let text = std::fs::read_to_string(root().join(PAGE)).expect("the page");
    // What `modules` has is all in the facade.
    let shown = RANKS.into_iter().filter(|name| *name != "burn-fp4-modules");
    let missing = shown.filter(|name| !text.contains(&format!("\n| `{name}` |")));
    let mut broken: Vec<_> =
        missing.map(|name| breach(PAGE, 1, format!("`{name}` has no row: add it"))).collect();
    let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let files = links.filter(|link| !link.contains("://"));
    let paths: Vec<_> = files.filter_map(|link| link.split('#').next()).collect();
    assert!(paths.len() > 10, "found {} links", paths.len());
    for path in paths.into_iter().filter(|path| !root().join(path).exists()) {
        broken.push(breach(PAGE, 1, format!("`{path}` does not exist")));
    }
    assert_kept("the README is complete", broken);
}

/// Fails where a name is used outside of the files and folders listed, and where a listed one uses
/// none.
fn named_only_in(list: &[&str], source: &str, is_name: impl Fn(&[Token<'_>], usize) -> bool) {
    let mut broken = Vec::new();
    let mut naming = BTreeSet::new();
    for file in sources() {
        let masked = mask(&file.text);
        let tokens = without_tests(&tokens(&masked));
        for at in (0..tokens.len()).filter(|&at| is_name(&tokens, at)) {
            // A folder stands for all files in it.
            let is_listed = |listed: &&&str| match listed.ends_with('/') {
                true => file.path.starts_with(**listed),
                false => file.path == **listed,
            };
            if let Some(listed) = list.iter().find(is_listed) {
                naming.insert(*listed);
            } else {
                let what = format!("`{}`: ask {source} instead of its name", tokens[at].text);
                broken.push(breach(&file.path, tokens[at].line, what));
            }
        }
    }
    for listed in list.iter().filter(|listed| !naming.contains(*listed)) {
        let what = "uses no such name: take it from the list in tests/house.rs".to_owned();
        broken.push(breach(listed, 1, what));
    }
    assert_kept(&format!("names are used where {source} is"), broken);
}

/// Words that begin with a format or the number format of its block scales, in any case: `NvFp4`,
/// `nvfp4`, `E4M3_MAX`, `E4m3Range`.
fn names_a_format(word: &str) -> bool {
    let word = word.to_lowercase();
    ["nvfp4", "mxfp4", "e4m3", "e8m0"].iter().any(|format| word.starts_with(format))
}

#[test]
fn a_method_has_a_file_of_its_name_in_every_engine() {
    let methods = Method::ALL.map(|method| method.row().name.replace('-', "_"));
    let mut broken = Vec::new();
    for (folder, shared) in METHODS_ARE_IN.into_iter().zip(SHARED_BY_METHODS) {
        let stems = stems(folder);
        let shared: Vec<_> = shared.split(' ').collect();
        let path = |stem: &str| format!("{folder}/{stem}.rs");
        for stem in stems.iter().filter(|stem| !shared.contains(&stem.as_str())) {
            if !methods.contains(stem) {
                let what = "no method has this name: rename it, or list what it holds for several";
                broken.push(breach(&path(stem), 1, what.to_owned()));
            }
        }
        for stem in shared.into_iter().filter(|stem| !stems.contains(*stem)) {
            let what = "does not exist: take it from the list in tests/house.rs";
            broken.push(breach(&path(stem), 1, what.to_owned()));
        }
        for method in &methods {
            let is_method =
                |(engine, name, _): &&(&str, &str, &str)| *engine == folder && name == method;
            match (stems.contains(method), METHODS_ELSEWHERE.iter().find(is_method)) {
                (true, None) => {}
                (false, Some((_, _, file))) if root().join(file).is_file() => {}
                (false, Some((_, _, file))) => {
                    let what = format!("does not exist, but is listed for `{method}`");
                    broken.push(breach(file, 1, what));
                }
                (false, None) => {
                    let what = format!("define `{method}` here, or list where it is, and why");
                    broken.push(breach(&path(method), 1, what));
                }
                (true, Some(_)) => {
                    let what = "exists: take it from the methods that are elsewhere";
                    broken.push(breach(&path(method), 1, what.to_owned()));
                }
            }
        }
    }
    for (folder, name, file) in METHODS_ELSEWHERE {
        if !methods.iter().any(|method| method == name) {
            broken.push(breach(file, 1, format!("no method `{name}`, which {folder} should have")));
        }
    }
    assert_kept("a method has a file of its name in every engine", broken);
}

/// The names of the files in a folder.
fn stems(folder: &str) -> BTreeSet<String> {
    let name = |file: File| {
        let name = file.path.strip_prefix(folder)?.strip_prefix('/')?.strip_suffix(".rs")?;
        (!name.contains('/')).then(|| name.to_owned())
    };
    files(folder, ".rs").into_iter().filter_map(name).collect()
}

#[test]
fn functions_are_short() {
    let mut broken = Vec::new();
    let mut found = 0;
    for file in files("", ".rs") {
        let masked = mask(&file.text);
        for function in functions(&tokens(&masked)) {
            found += 1;
            let most = if function.kernel { KERNEL } else { FUNCTION };
            if function.lines > most {
                let (name, lines) = (function.name, function.lines);
                let what = format!("`{name}` has {lines} lines of at most {most}: name its parts");
                broken.push(breach(&file.path, function.line, what));
            }
        }
    }
    assert!(found > 1000, "found {found} functions");
    assert_kept("functions fit on a screen", broken);
}

#[test]
fn functions_of_kernels_have_few_arguments() {
    let mut broken = Vec::new();
    let mut found = 0;
    for file in files("kernels-cubecl/src", ".rs") {
        let masked = mask(&file.text);
        for function in functions(&tokens(&masked)) {
            found += 1;
            let (name, arguments) = (function.name, function.arguments);
            if arguments > ARGUMENTS {
                let what = format!("`{name}` has {arguments} arguments of at most {ARGUMENTS}");
                broken.push(breach(&file.path, function.line, what));
            }
        }
    }
    assert!(found > 100, "found {found} functions");
    assert_kept("functions of kernels have few arguments", broken);
}

#[test]
fn lines_are_narrow() {
    let endings = [".rs", ".md", ".toml", ".sh", ".ci/run"];
    let checked = endings.map(|ending| files("", ending));
    assert!(checked.iter().all(|files| !files.is_empty()));
    let broken = checked.iter().flatten().flat_map(|file| {
        let wide = wide_lines(&file.text, file.path.ends_with(".md")).into_iter();
        wide.map(|(line, width)| {
            breach(
                &file.path,
                line,
                format!("{width} columns of at most {COLUMNS}: break the line"),
            )
        })
    });
    assert_kept("lines are narrow", broken.collect());
}

#[test]
fn files_say_what_they_hold() {
    let silent = files("", ".rs").into_iter().filter(|file| !has_header(&file.text));
    let what = "begin with `//!` and what the file holds";
    let broken = silent.map(|file| breach(&file.path, 1, what.to_owned()));
    assert_kept("files say what they hold", broken.collect());
}

#[test]
fn contributing_names_what_exists() {
    const DOCUMENT: &str = "CONTRIBUTING.md";
    let text = std::fs::read_to_string(root().join(DOCUMENT)).expect("the document");
    let named = named_paths(&text);
    assert!(named.len() > 20, "found {} paths", named.len());
    let missing = named.into_iter().filter(|(_, path)| !root().join(path).exists());
    let broken = missing.map(|(line, path)| {
        breach(DOCUMENT, line, format!("`{path}` does not exist: name it from the project's root"))
    });
    assert_kept("what CONTRIBUTING.md names exists", broken.collect());
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
