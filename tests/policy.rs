//! One policy: files and modules decide the same about every weight.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::checkpoints::selection::{Decision, Policy, Selection};
use burn_fp4::checkpoints::{Checkpoint, Model};
use burn_fp4::{Fp4Config, Fp4Module, Fp4Report, Fp4Scheme, Outcome, Recipe, Unused};
use llama::{Folder, Llama};
use proptest::collection::vec;
use proptest::option::of;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

const MODELS: [&str; 4] = ["genesis", "llama3", "qwen2", "qwen3"];

fn path(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(model)
}

/// The weights that are quantized: their schemes, and the others whose tensor scale they share.
type Decided = BTreeMap<String, (Fp4Scheme, BTreeSet<String>)>;

/// Decides about the weights of files; none if there is an error or nothing to be quantized.
fn of_files(model: &Model<'_>, recipe: &Recipe) -> Option<Decided> {
    let policy = Policy::new(recipe.clone()).ok()?;
    let selection = Selection::of(model, &policy).ok()?;
    selection.check_not_empty(model).ok()?;
    let name = |at: &usize| model.weights[*at].name.clone();
    let decided = |(at, decision): (usize, &Decision)| match decision {
        Decision::Keep(_) => None,
        Decision::Quantize { scheme, group } => {
            Some((name(&at), (*scheme, selection.groups[*group].iter().map(name).collect())))
        }
    };
    Some(selection.decisions.iter().enumerate().filter_map(decided).collect())
}

/// Quantizes a module as a recipe for its files says.
fn quantized(dense: &Llama<Linear>, recipe: &Recipe) -> Result<Fp4Report, String> {
    let mut module = dense.clone();
    let config = Fp4Config::of_recipe(recipe, &module, &llama::names());
    let config = config.map_err(|error| error.to_string())?.unused(Unused::Report);
    module.quantize_fp4(&config).map_err(|error| error.to_string())
}

/// The decisions that a report has about the parameters of a module, by their names in files.
fn of_report(report: &Fp4Report) -> Decided {
    let name = |path: &str| match path.split_once('.') {
        Some(("lm_head", _)) => path.to_owned(),
        _ => format!("model.{path}"),
    };
    let mut groups: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    let quantized = report.quantized().map(|one| match &one.outcome {
        Outcome::Quantized { scheme, shares_scale_with, .. } => {
            (name(&one.path), *scheme, shares_scale_with.as_deref())
        }
        other => panic!("{}: {other:?}", one.path),
    });
    let quantized: Vec<_> = quantized.collect();
    for (name, _, group) in &quantized {
        if let Some(group) = group {
            groups.entry(group).or_default().insert(name.clone());
        }
    }
    let decided = quantized.into_iter().map(|(name, scheme, group)| {
        // Formats without tensor scales have none to share.
        let group = group.filter(|_| scheme.format().row().tensor_scale);
        let alone = || BTreeSet::from([name.clone()]);
        let members = group.map_or_else(alone, |group| groups[group].clone());
        (name, (scheme, members))
    });
    decided.collect()
}

/// Names of which a model has some.
const NAMES: [&str; 12] = [
    "*.o_proj",
    "*.layers.0.*",
    "re:.*\\.(k|v)_proj\\.weight$",
    "**.mlp.down_proj",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.1.self_attn.",
    "*.[gu]*_proj",
    "*",
    "model.**.q_proj",
    "*norm*",
    "*embed*",
    "*.nothing",
];

/// A recipe in TOML.
fn recipes() -> impl Strategy<Value = String> {
    let names = |most: usize| subsequence(&NAMES[..], 0..=most);
    let line = |key: &'static str, values: &'static [&'static str]| {
        of(select(values)).prop_map(move |value| {
            value.map_or_else(String::new, |value| format!("{key} = {value}\n"))
        })
    };
    let choices = move || {
        let format = line("format", &["'nvfp4'", "'mxfp4'"]);
        let block_size = line("block-size", &["16", "32"]);
        let method = line("method", &["'amax'", "'four-over-six'"]);
        (format, block_size, method).prop_map(|(a, b, c)| format!("{a}{b}{c}"))
    };
    let entry = (subsequence(&NAMES[..], 1..=2), any::<bool>(), choices());
    let entry = entry.prop_map(|(names, dense, choices)| {
        let choices = if dense { "format = 'dense'\n" } else { &choices };
        format!("[[weights]]\nnames = {names:?}\n{choices}")
    });
    let ends = (
        line("first-layers-high-precision", &["0", "1"]),
        line("last-layers-high-precision", &["1", "9"]),
    );
    let readers = (
        line("together", &["true", "false"]),
        line("dialect", &["'compressed-tensors'", "'modelopt'", "'gguf'", "'mlx'"]),
        line("preset", &["'all-linear'", "'mlp-only'", "'experts-only'"]),
    );
    (choices(), names(2), names(3), ends, readers, vec(entry, 0..3)).prop_map(
        |(choices, keep, only, (first, last), (together, dialect, preset), entries)| {
            let preset = if only.is_empty() { preset } else { String::new() };
            let lists = format!("keep = {keep:?}\nonly = {only:?}\n");
            let entries = entries.concat();
            format!("{choices}{lists}{first}{last}{together}{dialect}{preset}{entries}")
        },
    )
}

#[test]
fn modules_and_files_decide_the_same_by_every_recipe() {
    let device = Device::flex();
    let quantizing = Cell::new(0);
    for name in MODELS {
        let folder = Folder::open(&path(name)).expect("a folder");
        let (dense, _) = folder.load::<Linear>(&device).expect("a model");
        let checkpoint = Checkpoint::open(path(name)).expect("a checkpoint");
        let model = checkpoint.model().expect("its weights");
        let same = |text: String| {
            let recipe = Recipe::parse(&text).expect("a recipe");
            let report = quantized(&dense, &recipe);
            let (expected, found) = (of_files(&model, &recipe), report.as_ref().map(of_report));
            let text = format!("{name}: {text}{found:?}");
            prop_assert_eq!(found.as_ref().ok(), expected.as_ref(), "{}", text);
            if let (Ok(report), Some(expected)) = (report, expected) {
                match report.recipe(&llama::names()) {
                    Ok(saved) => prop_assert_eq!(of_files(&model, &saved), Some(expected)),
                    // It has no tensor scales, which no recipe says.
                    Err(error) => prop_assert!(text.contains("'mlx'"), "{}: {}", error, text),
                }
                quantizing.set(quantizing.get() + 1);
            }
            Ok(())
        };
        // The only one that is not tiny.
        let cases = if name == "genesis" { 8 } else { 64 };
        let config = Config { failure_persistence: None, ..Config::with_cases(cases) };
        let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let run = TestRunner::new_with_rng(config, random).run(&recipes(), same);
        run.unwrap_or_else(|error| panic!("{error}"));
    }
    assert!(quantizing.get() > 20, "{} recipes quantize something", quantizing.get());
}
