//! Which weights of which architecture are linear layers, how they are stored, and which of them
//! have one input: compared with what transformers computes.
//!
//! `architectures.txt` is printed by `tests/interop/architectures.py names`.

use std::collections::{BTreeMap, BTreeSet};

use burn_fp4_checkpoints::selection::{Matrices, Selection, Warning};
use burn_fp4_checkpoints::{Checkpoint, Dtype, Model, Tensor, Value, Weight, WriteOptions};
use burn_fp4_formats::Fp4Format;
use burn_fp4_policy::{Decision, Policy, Reason, Recipe};
use serde_json::json;

use super::models::fp4;
use super::random::Random;

/// Weights of a layer of every architecture.
const TRUTH: &str = include_str!("architectures.txt");

/// A weight as transformers uses it.
struct Known {
    name: &'static str,
    shape: Vec<usize>,
    linear: bool,
    transposed: bool,
    /// The layers of one input have one number.
    family: Option<usize>,
}

fn known(line: &'static str) -> Known {
    let mut words = line.split(' ');
    let mut next = || words.next().expect("a name, a shape and a mark");
    let (name, shape, mark) = (next(), next(), next());
    Known {
        name,
        shape: shape.split(',').map(|axis| axis.parse().expect("a number")).collect(),
        linear: mark.starts_with('+'),
        transposed: mark.starts_with("+t"),
        family: mark.trim_start_matches(['+', '-', 't']).parse().ok(),
    }
}

/// The architectures: their configs, and their weights.
fn architectures() -> Vec<(&'static str, serde_json::Value, Vec<Known>)> {
    let one = |text: &'static str| {
        let (head, lines) = text.split_once('\n').expect("a head");
        let (name, sizes) = head.split_once(' ').expect("a name and sizes");
        let mut config: serde_json::Value = sizes.parse().expect("JSON");
        config["model_type"] = json!(name);
        (name, config, lines.lines().map(known).collect())
    };
    TRUTH.split("# ").skip(1).map(one).collect()
}

fn dense(name: &str, shape: &[usize]) -> Weight<'static> {
    let bytes = vec![0; 2 * shape.iter().product::<usize>()];
    let tensor = Tensor::new(name.to_owned(), Dtype::BF16, shape.to_vec(), bytes);
    Weight::new(name, 0, Value::Plain(tensor.expect("a shape")))
}

fn model(config: Option<serde_json::Value>, weights: &[Known]) -> Model<'static> {
    let weights = weights.iter().map(|known| dense(known.name, &known.shape)).collect();
    Model { weights, config, ..Model::default() }
}

fn select(model: &Model<'_>, dialect: &str) -> Selection {
    of_recipe(model, &format!("dialect = '{dialect}'"))
}

fn of_recipe(model: &Model<'_>, text: &str) -> Selection {
    let recipe = Recipe::parse(text).expect("a recipe");
    let policy = Policy::new(recipe).expect("choices that go together");
    Selection::of(model, &policy).expect("a selection")
}

#[test]
fn linear_layers_of_every_architecture_are_quantized_and_nothing_else() {
    let all = architectures();
    for (name, config, weights) in all {
        let model = model(Some(config), &weights);
        let selection = select(&model, "compressed-tensors");
        assert_eq!(selection.warnings, [], "{name}");
        for (known, decision) in weights.iter().zip(&selection.decisions) {
            let quantized = matches!(decision, Decision::Quantize { .. });
            assert_eq!(quantized, known.linear, "{name}: {}: {decision:?}", known.name);
        }
    }
}

#[test]
fn feed_forward_networks_of_every_architecture_are_found_by_the_preset_for_them() {
    // All other linear layers, by their names.
    let others =
        ["attn", "attention", "pooler", "project", "classifier", ".transform.", "_transform"];
    let mut without = Vec::new();
    for (name, config, weights) in architectures() {
        let model = model(Some(config), &weights);
        let selection = of_recipe(&model, "preset = 'mlp-only'");
        let mut count = 0;
        for (known, decision) in weights.iter().zip(&selection.decisions) {
            let lower = known.name.to_lowercase();
            let other = others.iter().any(|part| lower.contains(part)) || lower.contains("mixer");
            let expected = known.linear && !other;
            let quantized = matches!(decision, Decision::Quantize { .. });
            assert_eq!(quantized, expected, "{name}: {}: {decision:?}", known.name);
            count += usize::from(quantized);
        }
        if count == 0 {
            let error = selection.check_not_empty(&model).expect_err("nothing").to_string();
            assert!(error.contains("not a feed-forward network"), "{error}");
            without.push(name);
        }
    }
    assert_eq!(without, ["mamba", "falcon_mamba", "mamba2"]);
    // Names tell it of an architecture that is not known.
    let names = ["l.0.fc1.weight", "l.0.DenseReluDense.wi.weight", "l.0.q_proj.weight"];
    let weights = names.iter().map(|name| dense(name, &[32, 32])).collect();
    let model = Model { weights, ..Model::default() };
    assert_eq!(of_recipe(&model, "preset = 'mlp-only'").groups, [[0], [1]]);
}

#[test]
fn blocks_run_along_the_inputs_of_every_architecture() {
    let mut turned = BTreeSet::new();
    for (name, config, weights) in architectures() {
        let model = model(Some(config), &weights);
        let outline = select(&model, "compressed-tensors").outline(&model);
        for (known, weight) in weights.iter().zip(&model.weights).filter(|(one, _)| one.linear) {
            let [.., rows, cols] = known.shape[..] else { panic!("a matrix") };
            let expected = if known.transposed { [cols, rows] } else { [rows, cols] };
            let found = Matrices::of(&model, weight);
            assert_eq!([found.rows, found.cols], expected, "{name}: {}", known.name);
            assert_eq!(found.transposed, known.transposed, "{name}: {}", known.name);
            let outline = outline.weights.iter().find(|one| one.name == known.name);
            let Some(Value::Fp4(fp4)) = outline.map(|one| &one.value) else { panic!("it is FP4") };
            assert_eq!(fp4.shape[fp4.shape.len() - 2..], expected, "{name}: {}", known.name);
            assert_eq!(fp4.transposed, known.transposed, "{name}: {}", known.name);
            if known.transposed {
                turned.insert(name);
            }
        }
    }
    assert_eq!(
        turned,
        ["gpt2", "gpt_oss", "imagegpt", "llama4", "llama4_text", "openai-gpt"].into()
    );
}

#[test]
fn a_tensor_scale_is_shared_by_the_layers_of_one_input() {
    for (name, config, weights) in architectures() {
        let model = model(Some(config), &weights);
        let selection = select(&model, "compressed-tensors");
        let mut expected: BTreeMap<usize, BTreeSet<&str>> = BTreeMap::new();
        for known in weights.iter().filter(|known| known.linear) {
            if let Some(family) = known.family {
                expected.entry(family).or_default().insert(known.name);
            }
        }
        let shared = |members: &BTreeSet<&str>| members.len() > 1;
        let expected: BTreeSet<_> = expected.into_values().filter(shared).collect();
        let names = |group: &Vec<usize>| group.iter().map(|&at| weights[at].name).collect();
        let found: BTreeSet<_> = selection.groups.iter().map(names).filter(shared).collect();
        assert_eq!(found, expected, "{name}");
    }
}

#[test]
fn a_model_of_an_unknown_architecture_is_quantized_by_names_with_a_warning() {
    let names = ["layers.0.q_proj.weight", "layers.0.odd.weight", "embed.weight"];
    let weights = || names.iter().map(|name| dense(name, &[32, 32])).collect();
    let kind = |kind: &str| json!({"model_type": kind});
    for (config, model_type) in
        [(None, None), (Some(kind("unheard_of")), Some("unheard_of".to_owned()))]
    {
        let model = Model { weights: weights(), config, ..Model::default() };
        let selection = select(&model, "compressed-tensors");
        assert_eq!(selection.warnings, [Warning::UnknownArchitecture { model_type }]);
        assert_eq!(selection.groups, [[0], [1]]);
    }
    let config = Some(kind("llama"));
    let model = Model { weights: weights(), config, ..Model::default() };
    let selection = select(&model, "compressed-tensors");
    assert_eq!((selection.warnings, selection.groups), (vec![], vec![vec![0]]));
    assert_eq!(selection.decisions[1], Decision::Keep(Reason::Unlisted("llama")));
}

/// In a model of text a tower of images is another modality.
#[test]
fn a_tower_that_is_saved_alone_is_quantized() {
    let name = "vision_model.encoder.layers.0.self_attn.q_proj.weight";
    for (model_type, groups) in [("siglip_vision_model", 1), ("siglip", 0)] {
        let weights = vec![dense(name, &[32, 32])];
        let config = Some(json!({"model_type": model_type}));
        let selection = select(&Model { weights, config, ..Model::default() }, "modelopt");
        assert_eq!(selection.groups.len(), groups, "{model_type}");
    }
}

/// Names of a `BertModel` without a head, as MiniLM is saved.
#[test]
fn layers_of_an_encoder_without_a_head_are_known_by_their_ends() {
    let layer = |name: &str| format!("encoder.layer.0.{name}.weight");
    let linear = [
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    ];
    let weights = linear.map(|name| dense(&layer(name), &[32, 32])).into_iter();
    let others = ["embeddings.word_embeddings.weight", "pooler.dense.weight"];
    let weights = weights.chain(others.map(|name| dense(name, &[32, 32]))).collect();
    let config = Some(json!({"model_type": "bert"}));
    let selection = select(&Model { weights, config, ..Model::default() }, "compressed-tensors");
    assert_eq!(selection.groups, [vec![0, 1, 2], vec![3], vec![4], vec![5], vec![7]]);
}

#[test]
fn heads_stay_in_models_of_any_architecture() {
    let heads = ["head", "vit.head", "classifier", "score", "lm_head", "value_head", "to_logits"];
    let names = heads.map(|name| format!("{name}.weight"));
    let weights = names.iter().map(|name| dense(name, &[32, 32]));
    let weights = weights.chain([dense("head.fc1.weight", &[32, 32])]).collect();
    let selection = select(&Model { weights, ..Model::default() }, "compressed-tensors");
    for (name, decision) in names.iter().zip(&selection.decisions) {
        assert_eq!(*decision, Decision::Keep(Reason::Preset("the output layer")), "{name}");
    }
    assert_eq!(selection.groups, [[heads.len()]], "a layer within a head is one like any other");
}

/// The list of modules that are not quantized, in the configs of a dialect.
fn ignored(model: &Model<'_>, dialect: &str) -> Vec<String> {
    let path = super::folder("heads").join("out");
    model.write(&path, dialect, &WriteOptions::default()).expect("written");
    let checkpoint = Checkpoint::open(&path).expect("a checkpoint");
    let config = checkpoint.container().quantization().expect("a config");
    let list = config["ignore"].as_array().expect("a list");
    list.iter().map(|name| name.as_str().expect("a text").to_owned()).collect()
}

#[test]
fn output_layers_without_a_tensor_are_ignored_by_their_names_in_the_architecture() {
    for (kind, layer, embedding, heads) in [
        ("t5", "encoder.block.0.layer.0.SelfAttention.q", &["shared"][..], &["lm_head"][..]),
        ("llama", "model.layers.0.self_attn.q_proj", &["model.embed_tokens"], &["lm_head"]),
        (
            "gemma3",
            "language_model.model.layers.0.self_attn.q_proj",
            &["language_model.model.embed_tokens", "model.language_model.embed_tokens"],
            &["lm_head", "language_model.lm_head"],
        ),
        (
            "gpt_neox",
            "gpt_neox.layers.0.attention.dense",
            &["gpt_neox.embed_in"],
            &["embed_out", "lm_head"],
        ),
        ("opt", "model.decoder.layers.0.fc1", &["model.decoder.embed_tokens"], &["lm_head"]),
        ("whisper", "model.decoder.layers.0.fc1", &["model.decoder.embed_tokens"], &["proj_out"]),
        ("vit", "vit.encoder.layer.0.output.dense", &["vit.embeddings.projection"], &[]),
    ] {
        let dense = |name: &str| dense(&format!("{name}.weight"), &[32, 32]);
        let config = Some(json!({"model_type": kind}));
        let weights = vec![dense(embedding[0]), dense(layer)];
        let model = Model { weights, config, ..Model::default() };
        let mut outline = select(&model, "compressed-tensors").outline(&model);
        let packed = Random(5).packed(Fp4Format::NvFp4, 32, 32, 0.5);
        outline.weights[1] = fp4(&format!("{layer}.weight"), std::slice::from_ref(&packed));
        for dialect in ["compressed-tensors", "modelopt"] {
            let expected = [embedding, heads].concat();
            assert_eq!(ignored(&outline, dialect), expected, "{kind} in {dialect}");
        }
        let Some(head) = heads.first() else { continue };
        // One that is quantized is not ignored.
        outline.weights.push(fp4(&format!("{head}.weight"), &[packed]));
        assert_eq!(ignored(&outline, "compressed-tensors"), embedding, "{kind}");
    }
}

#[test]
fn convolutions_are_no_stacks_of_matrices() {
    let weights = [
        ("model.conv1.weight", vec![32, 16, 16]),
        ("model.encoder.conv.weight", vec![64, 8, 32]),
        ("patches.weight", vec![32, 3, 16, 16]),
        ("layers.0.experts.up_proj", vec![4, 32, 16]),
    ];
    let weights = weights.iter().map(|(name, shape)| dense(name, shape)).collect();
    let model = Model { weights, ..Model::default() };
    let selection = select(&model, "modelopt");
    let convolution = Decision::Keep(Reason::Preset("a convolution"));
    assert_eq!(selection.decisions[..3], [&convolution; 3].map(Clone::clone));
    assert_eq!(selection.groups, [[3]]);
    // Asked for by its name, a stack of three axes is what the user says it is.
    let forced = of_recipe(&model, "only = ['model.conv1']\ndialect = 'modelopt'");
    assert_eq!(forced.groups, [[0]]);
}

#[test]
fn a_weight_stored_by_inputs_is_kept_where_no_reader_turns_it() {
    let config = || Some(json!({"model_type": "gpt2"}));
    let weights = || vec![dense("h.0.attn.c_attn.weight", &[64, 192])];
    let model = Model { weights: weights(), config: config(), ..Model::default() };
    for dialect in ["modelopt", "mlx", "gguf"] {
        let selection = select(&model, dialect);
        let Decision::Keep(reason) = &selection.decisions[0] else { panic!("{dialect}") };
        assert_eq!(*reason, Reason::Transposed(dialect));
        let text = selection.check_not_empty(&model).expect_err("nothing is left").to_string();
        assert!(text.contains("[inputs, outputs]"), "{text}");
        assert!(
            text.ends_with("; write the dialect compressed-tensors, or name weights with `only`")
        );
        let forced = of_recipe(&model, &format!("only = ['*c_attn']\ndialect = '{dialect}'"));
        let outline = forced.outline(&model);
        assert_eq!(outline.weights[0].shape(), [192, 64], "{dialect}");
    }
}

#[test]
fn weights_that_a_dialect_cannot_hold_are_kept_by_a_plan_and_named_by_an_error() {
    let weights = vec![
        dense("layers.0.q_proj.weight", &[32, 32]),
        dense("layers.0.experts.up_proj", &[4, 32, 32]),
        dense("layers.0.k_proj.weight", &[32, 32]),
        dense("layers.0.o_proj.weight", &[32, 32]),
    ];
    let model = Model { weights, ..Model::default() };
    let mut selection = select(&model, "compressed-tensors");
    let error = selection.keep_unheld(&model).expect_err("a stack").to_string();
    assert!(error.starts_with("`layers.0.experts.up_proj`: the dialect"), "{error}");
    let Decision::Keep(Reason::CannotHold { dialect, .. }) = selection.decisions[1] else {
        panic!("{:?}", selection.decisions[1]);
    };
    assert_eq!(dialect, "compressed-tensors");
    assert_eq!(selection.groups, [vec![0, 2], vec![3]]);
    assert!(matches!(selection.decisions[3], Decision::Quantize { group: 1, .. }));
    assert!(select(&model, "modelopt").keep_unheld(&model).is_ok());
}
