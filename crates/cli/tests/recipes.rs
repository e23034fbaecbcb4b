//! Recipes that models in Burn were quantized by, given to `fp4 quantize` of the same folder.

mod model;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::{
    Budget, Calibration, Candidate, CheckpointMap, Fp4Config, Fp4Error, Fp4Format, Fp4Module,
    Fp4Scheme, Method, Outcome, Recipe, ScaleRule, Sse, Unused,
};
use llama::{CalibrationWindows, Folder, Llama, Tokens, fp4_config, scheme};
use model::{Packed, packed, packed_in, run, succeeds};
use tempfile::tempdir;

const BOOK: &str = include_str!("../../../examples/data/genesis.txt");

/// The path of the small model that comes with the project.
fn genesis() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/genesis")
}

fn load() -> Llama<Linear> {
    let folder = Folder::open(&genesis()).expect("the model");
    folder.load(&Device::flex()).expect("its weights").0
}

/// The inputs that the layers of the model are given for a part of the book.
fn calibration(model: &Llama<Linear>) -> Calibration {
    let folder = Folder::open(&genesis()).expect("the model");
    let tokenizer = folder.tokenizer().expect("a tokenizer");
    let tokens = Tokens::new(&tokenizer, BOOK, 0.1).expect("tokens");
    let windows = CalibrationWindows { windows: 4, context: 64, seed: 1 };
    windows.run(model, Default::default(), &tokens, &Device::flex()).expect("statistics")
}

fn of_module(model: &Llama<Linear>) -> Packed {
    packed(&model.checkpoint_fp4(&llama::names()).expect("a checkpoint").weights)
}

#[test]
#[ignore = "slow"]
fn what_a_budget_has_chosen_is_what_fp4_quantizes_by_its_recipe() {
    let folder = tempdir().expect("a folder");
    let dense = load();
    let known = calibration(&dense);
    let config = fp4_config(&dense, scheme(Fp4Format::NvFp4, Method::SSE)).unused(Unused::Report);
    let found = dense.fp4_sensitivity(&config.with_calibration(&known), &Candidate::ALL);
    let found = found.expect("what formats cost");
    let mut kinds = BTreeSet::new();
    for (at, bits) in [4.3, 4.45, 9.0].into_iter().enumerate() {
        let choice = found.choose(Budget::BitsPerWeight(bits)).expect("a choice");
        let mut model = dense.clone();
        let quantized = choice.config.with_calibration(&Calibration::new());
        let report = model.quantize_fp4(&quantized).expect("quantized");
        let path = folder.path().join(format!("{at}.toml"));
        report.save_recipe(&path, &llama::names()).expect("a recipe");
        let expected = of_module(&model);
        kinds.extend(expected.values().map(|(kind, ..)| kind.clone()));

        let input = genesis();
        // Of the dialects that hold NVFP4 in blocks of 32.
        let options = format!("--out {at} --dialect modelopt --recipe {at}.toml");
        succeeds(folder.path(), &format!("quantize {} {options}", input.display()));
        assert!(packed_in(&folder.path().join(at.to_string())) == expected, "{bits}");

        let recipe = Recipe::read(&path).expect("the recipe");
        let mut again = load();
        let config = Fp4Config::of_recipe(&recipe, &llama::names());
        let again_report = again.quantize_fp4(&config.expect("a configuration"));
        assert!(of_module(&again) == expected, "{bits}");
        let names = |report: &burn_fp4::Fp4Report| -> Vec<String> {
            report.quantized().map(|one| one.path.clone()).collect()
        };
        assert_eq!(names(&again_report.expect("quantized")), names(&report));
    }
    assert!(kinds.len() > 1, "{kinds:?}");
}

#[test]
fn one_call_with_a_budget_saves_a_recipe_for_every_dialect_that_can_say_it() {
    let folder = tempdir().expect("a folder");
    let mut model = load();
    let known = calibration(&model);
    let config = fp4_config(&model, scheme(Fp4Format::NvFp4, Method::SSE)).unused(Unused::Report);
    let config = config.with_calibration(&known).budget(Budget::BitsPerWeight(4.4));
    let report = model.quantize_fp4(&config).expect("quantized");
    let path = folder.path().join("recipe.toml");
    report.save_recipe(&path, &llama::names()).expect("a recipe");
    let (input, expected) = (genesis(), of_module(&model));
    for dialect in ["compressed-tensors", "modelopt", "gguf"] {
        // Layers that run as one share a tensor scale, whoever reads the file.
        let out = if dialect == "gguf" { "out.gguf" } else { dialect };
        let options = format!("--out {out} --dialect {dialect} --recipe recipe.toml");
        succeeds(folder.path(), &format!("quantize {} {options}", input.display()));
        let found = packed_in(&folder.path().join(out));
        assert!(found == expected, "{dialect}");
    }
    let options = "--out gpt-oss --dialect gpt-oss --recipe recipe.toml";
    let (code, _, error) = run(folder.path(), &format!("quantize {} {options}", input.display()));
    assert!(code == 2 && error.contains("the dialect `gpt-oss` cannot hold"), "{error}");
}

#[test]
fn calibrated_methods_take_the_statistics_that_are_saved_beside_a_recipe() {
    let folder = tempdir().expect("a folder");
    let mut model = load();
    let known = calibration(&model);
    known.save(folder.path().join("known.safetensors"), &llama::names()).expect("statistics");
    let config = fp4_config(&model, scheme(Fp4Format::NvFp4, Method::Sse(Sse::Weighted)));
    let report = model.quantize_fp4(&config.with_calibration(&known)).expect("quantized");
    report.save_recipe(folder.path().join("recipe.toml"), &llama::names()).expect("a recipe");
    let options = "--out out --recipe recipe.toml --calibration known.safetensors";
    succeeds(folder.path(), &format!("quantize {} {options}", genesis().display()));
    let (found, expected) = (packed_in(&folder.path().join("out")), of_module(&model));
    let names = |packed: &Packed| packed.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&found), names(&expected));
    for (name, (kind, codes, _)) in &found {
        let (expected_kind, expected, _) = &expected[name];
        assert_eq!((kind, codes.len()), (expected_kind, expected.len()), "{name}");
        // The file holds statistics in f32: a tie of two scales may be broken otherwise.
        let different = codes.iter().zip(expected).filter(|(one, other)| one != other).count();
        assert!(100 * different <= codes.len(), "{name}: {different} of {}", codes.len());
    }
}

#[test]
fn each_weight_has_its_method_in_a_module_as_in_files() {
    const RECIPE: &str = "method = \"amax\"\n\n\
        [[weights]]\nnames = [\"*.down_proj\"]\nmethod = \"sse\"\n\n\
        [[weights]]\nnames = [\"*.o_proj\"]\nmethod = \"four-over-six\"\n\n\
        [[weights]]\nnames = [\"*.1.*.up_proj\", \"*.1.*.gate_proj\"]\nformat = \"mxfp4\"\n";
    let folder = tempdir().expect("a folder");
    fs::write(folder.path().join("recipe.toml"), RECIPE).expect("a recipe");
    let options = "--out out --dialect modelopt --recipe recipe.toml";
    succeeds(folder.path(), &format!("quantize {} {options}", genesis().display()));
    let mut model = load();
    let recipe = Recipe::parse(RECIPE).expect("a recipe");
    let config = Fp4Config::of_recipe(&recipe, &llama::names()).expect("a configuration");
    let report = model.quantize_fp4(&config).expect("quantized");
    let methods = report.quantized().filter_map(|one| match &one.outcome {
        Outcome::Quantized { scheme, .. } => Some(scheme.method.to_string()),
        _ => None,
    });
    let methods: BTreeSet<_> = methods.collect();
    assert!(methods.iter().eq(["amax", "four-over-six", "sse"]), "{methods:?}");
    assert!(packed_in(&folder.path().join("out")) == of_module(&model));
    // The report says it all again.
    report.save_recipe(folder.path().join("again.toml"), &llama::names()).expect("a recipe");
    let again = Recipe::read(folder.path().join("again.toml")).expect("the recipe");
    let mut other = load();
    let config = Fp4Config::of_recipe(&again, &llama::names()).expect("a configuration");
    other.quantize_fp4(&config).expect("quantized");
    assert!(of_module(&other) == of_module(&model));
}

/// A module is told what a recipe of files means for it, or that it means nothing.
#[test]
fn recipes_that_a_module_cannot_obey_are_errors() {
    let model = load();
    let of = |text: &str| {
        let recipe = Recipe::parse(text).expect("a recipe");
        model.clone().quantize_fp4(&Fp4Config::of_recipe(&recipe, &llama::names())?)
    };
    let report = of("format = \"mxfp4\"\npreset = \"mlp-only\"\nkeep = [\"*.0.*\"]\n");
    let report = report.expect("quantized");
    let paths: Vec<_> = report.quantized().map(|one| one.path.as_str()).collect();
    assert_eq!(paths.len(), 9, "{report}");
    assert!(paths.iter().all(|path| path.contains("mlp.") && !path.contains(".0.")));
    // Why the others are kept is said as by the command.
    let reason = |path: &str| match &report.get(path).expect("a parameter").outcome {
        Outcome::Kept { reason } => reason.to_string(),
        other => panic!("{path}: {other:?}"),
    };
    assert_eq!(reason("layers.0.mlp.up_proj.weight"), "excluded by `*.0.*`");
    assert_eq!(reason("layers.1.self_attn.q_proj.weight"), "not a feed-forward network");
    let sharers = |text: &str| {
        let report = of(text).expect("quantized");
        let mut groups: BTreeMap<String, usize> = BTreeMap::new();
        for one in report.quantized() {
            if let Outcome::Quantized { shares_scale_with: Some(group), .. } = &one.outcome {
                *groups.entry(group.clone()).or_default() += 1;
            }
        }
        groups.into_values().collect::<BTreeSet<_>>()
    };
    assert_eq!(sharers(""), BTreeSet::from([2, 3]));
    assert!(sharers("together = false").is_empty());

    let key = "[[weights]]\nnames = [\"*.0.*.k_proj\"]\n";
    let error = of(&format!("{key}format = \"mxfp4\"\n")).expect_err("it runs as one");
    assert!(matches!(error, Fp4Error::Checkpoint(_)), "{error}");
    assert!(error.to_string().contains("layers.0.self_attn."), "{error}");
    let error =
        of("[[weights]]\nnames = [\"*.gate\"]\nmethod = \"amax\"\n").expect_err("no such name");
    assert!(error.to_string().contains("`weights` pattern `*.gate`"), "{error}");
    for wrong in ["block-size = 8", "preset = \"miles\""] {
        let error = of(wrong).expect_err(wrong);
        assert!(matches!(error, Fp4Error::Recipe(_)), "{error}");
    }
}

#[test]
fn what_a_recipe_cannot_say_is_not_saved() {
    let folder = tempdir().expect("a folder");
    let path = folder.path().join("recipe.toml");
    let dense = load();
    let saved = |config: Fp4Config, map: CheckpointMap| {
        let report = dense.clone().quantize_fp4(&config).expect("quantized");
        report.save_recipe(&path, &map)
    };
    let config = fp4_config(&dense, Fp4Scheme::nvfp4());
    let of = |config: Fp4Config| saved(config, llama::names());
    let mut given = config.clone();
    given.scheme = given.scheme.with_tensor_scale(burn_fp4::TensorScaling::Row);
    given.share_scale.clear();
    let mut two = config.clone();
    two.share_scale = vec![vec!["q_proj".to_owned(), "k_proj".to_owned()]];
    let one = config.clone().exclude("**.k_proj.*").unused(Unused::Report);
    for (config, says) in [
        (given, "more of a scheme"),
        (two, "which weights share its tensor scale"),
        (one, "would keep it: runs as one with"),
    ] {
        let error = of(config).expect_err(says);
        assert!(matches!(error, Fp4Error::RecipeParameter { .. }), "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
    // Names that would not be found again.
    let map = CheckpointMap::new().rename_back("^layers", "blocks");
    let error = saved(config.clone(), map).expect_err("another name");
    assert!(matches!(error, Fp4Error::Mismatch(_)), "{error}");
    assert!(!path.exists());

    // Nothing shared is said too.
    let mut alone = config;
    alone.share_scale.clear();
    alone.scheme = alone.scheme.with_rule(ScaleRule::TeDivision);
    of(alone).expect("a recipe");
    let text = fs::read_to_string(&path).expect("the recipe");
    assert!(text.contains("together = false") && text.contains("rule = \"te-division\""), "{text}");
}
