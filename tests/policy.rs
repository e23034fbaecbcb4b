//! One policy: files and modules decide the same about every weight.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_fp4::checkpoints::selection::Selection;
use burn_fp4::checkpoints::{Checkpoint, CheckpointError, Model};
use burn_fp4::policy::{Decision, Policy, PolicyError, Reason};
use burn_fp4::{
    Budget, Candidate, Change, CheckpointMap, FileLayout, Fp4Config, Fp4Error, Fp4Module,
    Fp4Report, Fp4Scheme, Hadamard, Indivisible, KeepReason, Method, Outcome, Recipe, RecipeFormat,
    RecipeWeights, Unused,
};
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
    Some(of_selection(model, &selection))
}

fn of_selection(model: &Model<'_>, selection: &Selection) -> Decided {
    let name = |at: &usize| model.weights[*at].name.clone();
    let decided = |(at, decision): (usize, &Decision)| match decision {
        Decision::Keep(_) => None,
        Decision::Quantize { scheme, group } => {
            Some((name(&at), (*scheme, selection.groups[*group].iter().map(name).collect())))
        }
    };
    selection.decisions.iter().enumerate().filter_map(decided).collect()
}

/// The reasons for which files keep matrices.
fn kept_in_files(model: &Model<'_>, recipe: &Recipe) -> BTreeMap<String, String> {
    let policy = Policy::new(recipe.clone()).expect("choices that go together");
    let selection = Selection::of(model, &policy).expect("a selection");
    let matrices = model.weights.iter().zip(&selection.decisions);
    let matrices = matrices.filter(|(weight, _)| weight.shape().len() >= 2);
    let kept = matrices.filter_map(|(weight, decision)| match decision {
        Decision::Keep(reason) => Some((weight.name.clone(), reason.to_string())),
        Decision::Quantize { .. } => None,
    });
    kept.collect()
}

/// The reasons for which a module keeps matrices, by their names and in the words of files.
fn kept_by_report(report: &Fp4Report) -> BTreeMap<String, String> {
    let matrices = report.parameters.iter().filter(|one| one.shape.len() >= 2);
    let kept = matrices.filter_map(|one| match &one.outcome {
        Outcome::Kept { reason } => Some((name_in_files(&one.path), reason)),
        _ => None,
    });
    let in_words = |reason: &KeepReason| match reason {
        KeepReason::Excluded { pattern } => Reason::Asked(pattern.clone()).to_string(),
        KeepReason::NotIncluded => Reason::NotAsked.to_string(),
        KeepReason::FirstLayers { layer } | KeepReason::LastLayers { layer } => {
            Reason::Layer(*layer).to_string()
        }
        KeepReason::Indivisible { length, block_size, .. } => {
            Reason::Columns { cols: *length, of: *block_size }.to_string()
        }
        KeepReason::AsInFiles { reason } => reason.clone(),
        other => panic!("{other:?}"),
    };
    kept.map(|(name, reason)| (name, in_words(reason))).collect()
}

/// The configuration of a recipe for the files of a model.
fn config(model: &Model<'_>, recipe: &Recipe) -> Result<Fp4Config, String> {
    let map = llama::names().model_type(model.architecture().expect("a known one"));
    let config = Fp4Config::of_recipe(recipe, &map).map_err(|error| error.to_string())?;
    // Another choice is as if it had been in the recipe.
    let keep = recipe.keep.iter().cloned().chain(["*.o_proj".to_owned()]);
    let more = Recipe { keep: keep.collect(), ..recipe.clone() };
    let more = Fp4Config::of_recipe(&more, &map).expect("one more name");
    assert_eq!(config.clone().exclude("*.o_proj"), more);
    // Nothing is lost in a file.
    let json = serde_json::to_string(&config).expect("plain data");
    Ok(serde_json::from_str(&json).expect("plain data"))
}

/// Quantizes a module as a recipe for its files says.
fn quantized(
    dense: &Llama<Linear>,
    model: &Model<'_>,
    recipe: &Recipe,
) -> Result<Fp4Report, String> {
    let config = config(model, recipe)?;
    dense.clone().quantize_fp4(&config).map_err(|error| error.to_string())
}

/// The name in files of a parameter of a module.
fn name_in_files(path: &str) -> String {
    match path.split_once('.') {
        Some(("lm_head", _)) => path.to_owned(),
        _ => format!("model.{path}"),
    }
}

/// The decisions that a report has about the parameters of a module, by their names in files.
fn of_report(report: &Fp4Report) -> Decided {
    let name = name_in_files;
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

/// Patterns that fit the names of a model in files, and the paths of its parameters.
const COMMON: [&str; 9] = [
    "*.o_proj",
    "**.layers.0.*",
    "**.layers.1.",
    "**.mlp.down_proj",
    "**.layers.1.mlp.up_proj.weight",
    "*.[gu]*_proj",
    "*.self_attn.*",
    "**.q_proj",
    NOTHING,
];

/// The pattern of these that fits nothing.
const NOTHING: &str = "*.nothing";

/// Returns true for a weight that is kept because another of its family is.
fn is_with(decision: &Decision) -> bool {
    matches!(decision, Decision::Keep(Reason::With(_)))
}

/// Choices that a recipe and the builder of a configuration have words for.
#[derive(Debug, Clone)]
struct Choices {
    base: Fp4Scheme,
    keep: Vec<&'static str>,
    only: Vec<&'static str>,
    entries: Vec<(&'static str, Fp4Scheme)>,
    ends: (usize, usize),
    shared: bool,
}

impl Choices {
    fn all() -> impl Strategy<Value = Self> {
        let scheme = || {
            let schemes = [
                Fp4Scheme::nvfp4(),
                Fp4Scheme::nvfp4().with_block_size(32),
                Fp4Scheme::nvfp4().with_method(Method::FOUR_OVER_SIX),
                Fp4Scheme::mxfp4(),
            ];
            select(schemes.to_vec())
        };
        let names = |most: usize| subsequence(&COMMON[..], 0..=most);
        let entries = vec((select(&COMMON[..]), scheme()), 0..3);
        (scheme(), names(2), names(3), entries, (0..2_usize, 0..2_usize), any::<bool>()).prop_map(
            |(base, keep, only, entries, ends, shared)| Self {
                base,
                keep,
                only,
                entries,
                ends,
                shared,
            },
        )
    }

    /// The mistake that files find in these choices without [`NOTHING`], in a word. None: files
    /// keep weights together, which a configuration does not.
    fn other_mistake(&self, model: &Model<'_>) -> Option<&'static str> {
        let mut fitting = self.clone();
        fitting.keep.retain(|name| *name != NOTHING);
        fitting.only.retain(|name| *name != NOTHING);
        fitting.entries.retain(|(name, _)| *name != NOTHING);
        if fitting.only.is_empty() && !self.only.is_empty() {
            return Some("nothing");
        }
        let policy = Policy::new(fitting.recipe()).expect("choices that go together");
        match Selection::of(model, &policy) {
            Err(CheckpointError::Policy(
                PolicyError::OtherFormat { .. } | PolicyError::OtherScheme { .. },
            )) => Some("shared"),
            Err(other) => panic!("{fitting:?}: {other}"),
            Ok(selection) if selection.decisions.iter().any(is_with) => None,
            Ok(selection) if selection.check_not_empty(model).is_err() => Some("nothing"),
            Ok(_) => Some("none"),
        }
    }

    fn recipe(&self) -> Recipe {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let entry = |(name, scheme): &(&str, Fp4Scheme)| RecipeWeights {
            names: owned(&[name]),
            format: Some(RecipeFormat::Fp4(scheme.format())),
            block_size: Some(scheme.block_size),
            method: Some(scheme.method),
            rule: Some(scheme.rule),
            hadamard: scheme.hadamard.map(Hadamard::size),
        };
        Recipe {
            format: Some(self.base.format()),
            block_size: Some(self.base.block_size),
            method: Some(self.base.method),
            rule: Some(self.base.rule),
            dialect: Some("modelopt".to_owned()),
            keep: owned(&self.keep),
            only: owned(&self.only),
            first_layers_high_precision: Some(self.ends.0),
            last_layers_high_precision: Some(self.ends.1),
            together: Some(self.shared),
            weights: self.entries.iter().map(entry).collect(),
            ..Recipe::default()
        }
    }

    fn config(&self) -> Fp4Config {
        let (first, last) = self.ends;
        let mut config = Fp4Config::new(self.base).keep_first(first).keep_last(last);
        config = config.indivisible(Indivisible::Skip);
        if self.only.is_empty() {
            // The preset of files keeps them.
            config = config.exclude("lm_head").exclude("embed_tokens");
        }
        config = self.keep.iter().fold(config, |config, name| config.exclude(*name));
        config = self.only.iter().fold(config, |config, name| config.include(*name));
        let with =
            |config: Fp4Config, (name, scheme): &(&str, Fp4Scheme)| config.with(*name, *scheme);
        config = self.entries.iter().fold(config, with);
        match self.shared {
            true => config
                .share_scale(["q_proj", "k_proj", "v_proj"])
                .share_scale(["gate_proj", "up_proj"]),
            false => config,
        }
    }
}

#[test]
#[ignore = "slow"]
fn a_configuration_decides_as_a_recipe_of_the_same_choices() {
    let device = Device::flex();
    let (same, failing) = (Cell::new(0), Cell::new(0));
    for name in &MODELS[1..] {
        let folder = Folder::open(&path(name)).expect("a folder");
        let (dense, _) = folder.load::<Linear>(&device).expect("a model");
        let checkpoint = Checkpoint::open(path(name)).expect("a checkpoint");
        let model = checkpoint.model().expect("its weights");
        let check = |choices: Choices| {
            let policy = Policy::new(choices.recipe()).expect("choices that go together");
            let found = |unused: Unused| {
                let config = choices.config().unused(unused);
                dense.clone().quantize_fp4(&config).map(|report| of_report(&report))
            };
            let text = format!("{name}: {choices:?}");
            let selection = match Selection::of(&model, &policy) {
                Ok(selection) => selection,
                Err(error) => {
                    failing.set(failing.get() + 1);
                    let kind = |found: Result<Decided, Fp4Error>| match found {
                        Ok(_) => "none",
                        Err(Fp4Error::Unused(_)) => "unused",
                        Err(Fp4Error::SharedScale { .. }) => "shared",
                        Err(Fp4Error::NothingSelected(_)) => "nothing",
                        Err(other) => panic!("{text}: {other}"),
                    };
                    let (problem, reported) =
                        (kind(found(Unused::Error)), kind(found(Unused::Report)));
                    match error {
                        // Of two mistakes a configuration names the one that no report allows.
                        CheckpointError::Policy(PolicyError::NoMatch { .. }) => {
                            let expected = if reported == "none" { "unused" } else { reported };
                            prop_assert_eq!(problem, expected, "{}", text);
                            if let Some(other) = choices.other_mistake(&model) {
                                prop_assert_eq!(reported, other, "{}", text);
                            }
                        }
                        CheckpointError::Policy(
                            PolicyError::OtherFormat { .. } | PolicyError::OtherScheme { .. },
                        ) => prop_assert_eq!([problem, reported], ["shared"; 2], "{}", text),
                        other => panic!("{text}: {other}"),
                    }
                    return Ok(());
                }
            };
            if selection.decisions.iter().any(is_with) {
                // A configuration quantizes the others of a family.
                return Ok(());
            }
            match (selection.check_not_empty(&model), found(Unused::Report)) {
                (Ok(()), Ok(found)) => {
                    prop_assert_eq!(found, of_selection(&model, &selection), "{}", text);
                    same.set(same.get() + 1);
                }
                (Err(_), Err(Fp4Error::NothingSelected(_))) => failing.set(failing.get() + 1),
                (expected, found) => panic!("{text}: {expected:?} and {found:?}"),
            }
            Ok(())
        };
        let config = Config { failure_persistence: None, ..Config::with_cases(96) };
        let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let run = TestRunner::new_with_rng(config, random).run(&Choices::all(), check);
        run.unwrap_or_else(|error| panic!("{error}"));
    }
    let counts = (same.get(), failing.get());
    assert!(counts.0 > 20 && counts.1 > 20, "{counts:?}");
}

/// Layers of which each has a path that ends as that of another one.
#[derive(Module, Debug)]
struct Nested {
    x: Side,
    z: Side,
    inner: Sides,
}

#[derive(Module, Debug)]
struct Sides {
    x: Side,
    z: Side,
}

#[derive(Module, Debug)]
struct Side {
    q: Linear,
}

#[test]
fn a_recipe_shares_no_scale_between_modules_whose_paths_end_alike() {
    let device = Device::flex();
    let side = || Side { q: LinearConfig::new(32, 32).init(&device) };
    let mut nested = Nested { x: side(), z: side(), inner: Sides { x: side(), z: side() } };
    // In files the outer two are gate and up of one layer, and the inner two of two layers.
    let mut map = CheckpointMap::new();
    for (path, name) in [
        ("x.q", "layers.0.gate_proj"),
        ("z.q", "layers.0.up_proj"),
        ("inner.x.q", "layers.1.gate_proj"),
        ("inner.z.q", "layers.2.up_proj"),
    ] {
        let escaped = |text: &str| text.replace('.', r"\.");
        map = map.rename(format!("^{}\\.", escaped(name)), format!("{path}."));
        map = map.rename_back(format!("^{}\\.", escaped(path)), format!("{name}."));
    }
    let config = Fp4Config::of_recipe(&Recipe::default(), &map).expect("a configuration");
    let report = nested.quantize_fp4(&config).expect("quantized");
    let shared = report.quantized().filter_map(|one| match &one.outcome {
        Outcome::Quantized { shares_scale_with: Some(_), .. } => Some(one.path.as_str()),
        _ => None,
    });
    assert!(shared.eq(["x.q.weight", "z.q.weight"]), "{report}");
}

/// Stacked experts, `[experts, in, out]`.
#[derive(Module, Debug)]
struct Experts {
    gate: Param<Tensor<3>>,
    up: Param<Tensor<3>>,
}

#[test]
fn stacked_parameters_that_are_many_tensors_in_files_share_a_scale_once() {
    let device = Device::flex();
    let stack = || Param::from_tensor(Tensor::<3>::ones([3, 32, 32], &device));
    let mut experts = Experts { gate: stack(), up: stack() };
    let map = CheckpointMap::new()
        .container("Experts", 1, FileLayout::OutIn)
        .experts("gate", "layers.0.mlp.experts.{}.gate_proj.weight")
        .experts("up", "layers.0.mlp.experts.{}.up_proj.weight");
    let config = Fp4Config::of_recipe(&Recipe::default(), &map).expect("a configuration");
    let report = experts.quantize_fp4(&config).expect("quantized");
    let shared = report.quantized().map(|one| match &one.outcome {
        Outcome::Quantized { shares_scale_with, .. } => shares_scale_with.as_deref(),
        other => panic!("{other:?}"),
    });
    assert!(shared.eq([Some("{gate,up}"); 2]), "{report}");
}

/// Three layers, and the reasons for which those that `config` does not quantize are kept.
fn kept_of_three(config: &Fp4Config) -> Result<Vec<(usize, KeepReason)>, Fp4Error> {
    let device = Device::flex();
    let mut layers: Vec<_> = (0..3).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
    let report = layers.quantize_fp4(config)?;
    let kept = (0..3).filter_map(|at| match &report.get(&format!("{at}.weight"))?.outcome {
        Outcome::Kept { reason } => Some((at, reason.clone())),
        _ => None,
    });
    Ok(kept.collect())
}

#[test]
fn an_override_keeps_weights_dense_unless_a_later_one_quantizes_them() {
    let config = || Fp4Config::nvfp4().with("*", Change::Dense);
    let kept = kept_of_three(&config().with("[01].*", Method::SSE)).expect("quantized");
    assert_eq!(kept, [(2, KeepReason::Excluded { pattern: "*".to_owned() })]);
    let all = kept_of_three(&config()).expect_err("nothing is left");
    assert!(matches!(all, Fp4Error::NothingSelected(_)), "{all}");
    let nothing = Fp4Config::nvfp4().with("3.*", Change::Dense);
    let nothing = kept_of_three(&nothing).expect_err("it fits nothing").to_string();
    assert!(nothing.contains("with `3.*` fits no selected weight"), "{nothing}");
}

#[test]
fn patterns_of_modules_that_fit_nothing_are_met_with_the_nearest() {
    for config in [Fp4Config::nvfp4().exclude("2.wieght"), Fp4Config::nvfp4().include("2.wieght")] {
        let error = kept_of_three(&config).expect_err("it fits nothing").to_string();
        assert!(error.contains("fits no parameter; did you mean `2.weight`?"), "{error}");
    }
    let config = Fp4Config::nvfp4().with("2.wieght", Change::Dense);
    let error = kept_of_three(&config).expect_err("it fits nothing").to_string();
    assert!(error.contains("fits no selected weight; did you mean `2.weight`?"), "{error}");
}

#[test]
fn a_recipe_is_obeyed_by_its_own_names_and_not_by_paths() {
    let map = CheckpointMap::new()
        .rename(r"^blocks\.(\d)\.up_proj\.", "$1.")
        .rename_back(r"^(\d)\.", "blocks.$1.up_proj.");
    let of = |text: &str| {
        let recipe = Recipe::parse(text).expect("a recipe");
        Fp4Config::of_recipe(&recipe, &map).expect("a configuration")
    };
    let excluded = |pattern: &str| KeepReason::Excluded { pattern: pattern.to_owned() };
    let table = "[[weights]]\nnames = ['*.1.*']\nformat = 'dense'\n";
    let config = of(&format!("first-layers-high-precision = 1\n{table}"));
    let kept = kept_of_three(&config).expect("quantized");
    let first = KeepReason::FirstLayers { layer: 0 };
    assert_eq!(kept, [(0, first), (1, excluded("*.1.*"))]);
    let kept = kept_of_three(&of("").exclude("blocks.2.up_proj")).expect("quantized");
    assert_eq!(kept, [(2, excluded("blocks.2.up_proj"))]);
    let path = kept_of_three(&of("").exclude("2.weight")).expect_err("a path").to_string();
    assert!(path.contains("`keep` pattern `2.weight` matches none of"), "{path}");
    let kept = kept_of_three(&of("preset = 'experts-only'")).expect_err("no experts").to_string();
    assert!(kept.contains("0.weight: not an expert"), "{kept}");
    // What the map and the recipe say is not said twice.
    for config in [of("").container("Linear", 1), of("").share_scale(["0", "1"])] {
        let error = kept_of_three(&config).expect_err("no effect");
        assert!(matches!(error, Fp4Error::Unused(_)), "{error}");
    }
}

#[test]
fn a_recipe_knows_the_roles_of_an_architecture_that_the_map_names() {
    let map = CheckpointMap::new()
        .rename(r"^model\.layers\.(\d)\.extra_proj\.", "$1.")
        .rename_back(r"^(\d)\.", "model.layers.$1.extra_proj.");
    let of = |map: &CheckpointMap| {
        kept_of_three(&Fp4Config::of_recipe(&Recipe::default(), map).expect("a configuration"))
    };
    assert!(of(&map).expect("quantized").is_empty());
    let error = of(&map.model_type("llama")).expect_err("no layer of Llama").to_string();
    assert!(error.contains("0.weight: not a known linear layer of llama"), "{error}");
}

#[test]
fn formats_of_a_recipe_are_not_chosen_again_by_a_budget() {
    let device = Device::flex();
    let layers: Vec<_> = (0..3).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
    let dense = Recipe::parse("[[weights]]\nnames = ['1.*']\nformat = 'dense'\n");
    let map = CheckpointMap::new();
    let config = Fp4Config::of_recipe(&dense.expect("a recipe"), &map).expect("a configuration");
    let found = layers.fp4_sensitivity(&config, &Candidate::DEFAULT).expect("errors");
    let paths: Vec<_> = found.groups.iter().flat_map(|group| group.paths.clone()).collect();
    assert_eq!(paths, ["0.weight", "2.weight"]);
    let error = found.choose(Budget::BitsPerWeight(8.0)).expect_err("a recipe");
    assert!(error.to_string().contains("a recipe has chosen the formats"), "{error}");
}

#[test]
#[ignore = "slow"]
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
            let report = quantized(&dense, &model, &recipe);
            let (expected, found) = (of_files(&model, &recipe), report.as_ref().map(of_report));
            let text = format!("{name}: {text}{found:?}");
            prop_assert_eq!(found.as_ref().ok(), expected.as_ref(), "{}", text);
            if let (Ok(report), Some(expected)) = (report, expected) {
                let (expected_kept, kept) =
                    (kept_in_files(&model, &recipe), kept_by_report(&report));
                prop_assert_eq!(kept, expected_kept, "{}", text);
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

/// The name to keep is that of a dense weight.
#[test]
fn quantizing_by_a_recipe_again_says_that_all_is_quantized() {
    let device = Device::flex();
    let mut layers: Vec<Linear> = (0..3).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
    let recipe = Recipe::parse("keep = ['0.weight']").expect("a recipe");
    let config = Fp4Config::of_recipe(&recipe, &CheckpointMap::new()).expect("a configuration");
    layers.quantize_fp4(&config).expect("two weights");
    match layers.quantize_fp4(&config) {
        Err(Fp4Error::AlreadyQuantized(paths)) => assert_eq!(paths, ["1.weight", "2.weight"]),
        other => panic!("{other:?}"),
    }
}
