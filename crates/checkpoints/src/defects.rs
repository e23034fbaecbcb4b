//! Mistakes in FP4 checkpoints that show in no error: scales in the wrong direction,
//! scales that ran out of range, layers that cannot run as one.

use std::fmt;

use burn_fp4_formats::Fp4Format;
use burn_fp4_policy::Role;

use crate::architecture::{Architecture, EMBEDDING};
use crate::dialect::{self, ReadBy};
use crate::facts::Fp4Facts;
use crate::fp4::Fp4Weight;
use crate::selection::{self, families};
use crate::weight::{Model, Value, Weight};

/// A mistake in a checkpoint, or in a plan to write one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Defect {
    /// The mistake.
    pub kind: DefectKind,
    /// The weights that have it. Empty: it is about the whole checkpoint.
    pub weights: Vec<String>,
    /// The suspicion, and what follows from it.
    pub what: String,
}

/// The kind of a [`Defect`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum DefectKind {
    /// All values of a weight are zero.
    AllZero,
    /// One value is too large for the block scales of the others.
    LargeValue,
    /// A tensor scale may be the reciprocal of what the dialect states.
    ReciprocalScale,
    /// All values are far smaller than in trained networks.
    TinyValues,
    /// Blocks have codes and a scale of 0.
    LostBlocks,
    /// Block scales are NaN.
    NanScales,
    /// Many blocks have the largest block scale.
    SaturatedBlocks,
    /// A tensor scale is NaN or infinite.
    TensorScale,
    /// The scale of an input is the constant 1.
    InputScale,
    /// Layers that engines run as one have different tensor scales.
    UnlikeScales,
    /// Layers that engines run as one have different formats.
    UnlikeFormats,
    /// An embedding is FP4 where readers do not load it.
    Embedding,
    /// Layers that the config counts have no weight.
    MissingLayers,
    /// The configs name a quantization, and no weight has one.
    NoneQuantized,
}

impl DefectKind {
    /// Returns the name of the kind, which stays the same from version to version.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllZero => "all-zero",
            Self::LargeValue => "large-value",
            Self::ReciprocalScale => "reciprocal-scale",
            Self::TinyValues => "tiny-values",
            Self::LostBlocks => "lost-blocks",
            Self::NanScales => "nan-scales",
            Self::SaturatedBlocks => "saturated-blocks",
            Self::TensorScale => "tensor-scale",
            Self::InputScale => "input-scale",
            Self::UnlikeScales => "unlike-scales",
            Self::UnlikeFormats => "unlike-formats",
            Self::Embedding => "embedding",
            Self::MissingLayers => "missing-layers",
            Self::NoneQuantized => "none-quantized",
        }
    }
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.weights[..] {
            [] => f.write_str(&self.what),
            [weight] => write!(f, "`{weight}`: {}", self.what),
            [weight, _] => write!(f, "`{weight}` and 1 other: {}", self.what),
            [weight, others @ ..] => {
                write!(f, "`{weight}` and {} others: {}", others.len(), self.what)
            }
        }
    }
}

/// No weight of a trained network is larger, and no largest one smaller.
const PLAUSIBLE: [f32; 2] = [1e-6, 1e4];

/// The text of [`DefectKind::AllZero`].
pub const ALL_ZERO: &str = "all of its values are zero, and stay zero in FP4";

/// Describes a largest magnitude that no weight of a trained network has.
///
/// ```
/// use burn_fp4_checkpoints::{DefectKind, implausible};
///
/// let (kind, text) = implausible(1e-9).expect("a small weight");
/// assert_eq!(kind, DefectKind::TinyValues);
/// assert_eq!(text, "its largest value is 1.000e-9: no trained weight is as small");
/// assert!(implausible(0.1).is_none() && implausible(0.0).is_none());
/// ```
#[must_use]
pub fn implausible(largest: f32) -> Option<(DefectKind, String)> {
    let [least, most] = PLAUSIBLE;
    let (kind, how) = match largest {
        large if large > most => (DefectKind::LargeValue, "large"),
        small if small > 0.0 && small < least => (DefectKind::TinyValues, "small"),
        _ => return None,
    };
    let text = format!("its largest value is {largest:.3e}: no trained weight is as {how}");
    Some((kind, text))
}

/// Finds the defects of a model, given the facts of its FP4 weights, each in the place of the
/// weight.
///
/// ```
/// use burn_fp4_checkpoints::{Fp4Weight, Model, Value, Weight, defects};
/// use burn_fp4_formats::Fp4Format;
///
/// let mut fp4 = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![1, 16], false, false);
/// (fp4.codes, fp4.scales) = (vec![0x22; 8].into(), vec![0].into());
/// let facts = [Some(fp4.facts())];
/// let weights = vec![Weight::new("up.weight", 0, Value::Fp4(fp4))];
/// let found = defects(&Model { weights, ..Model::default() }, &facts);
/// let text = "`up.weight`: 1 of 1 blocks have scale 0 and other codes: they are lost";
/// assert_eq!(found[0].to_string(), text);
/// ```
#[must_use]
pub fn defects(model: &Model<'_>, facts: &[Option<Fp4Facts>]) -> Vec<Defect> {
    let mut defects = Vec::new();
    for (weight, facts) in model.weights.iter().zip(facts) {
        let mut add = |kind, what| push(&mut defects, kind, &weight.name, what);
        let Some(facts) = facts else { continue };
        let scaled = match &weight.value {
            Value::Fp4(fp4) => fp4.format.row().tensor_scale,
            Value::Plain(_) | Value::Fp8(_) => false,
        };
        alone(facts, scaled, &mut add);
        if let Value::Fp4(Fp4Weight { tensor_scale: Some(scale), .. }) = &weight.value
            && let Some(number) = scale.stated().to_vec().into_iter().find(|n| !n.is_finite())
        {
            let what = format!("its tensor scale is {number}: no value of it is right");
            add(DefectKind::TensorScale, what);
        }
        let input = weight.input_scale.as_ref().map(|scale| scale.stated().to_vec());
        if input.is_some_and(|input| input.iter().all(|&scale| scale == 1.0)) {
            let what = "the scale of its input is the constant 1: inputs beyond 2688 saturate";
            add(DefectKind::InputScale, what.to_owned());
        }
    }
    let dialect = model.quantization.dialect;
    let scale = |at: usize| Some(facts.get(at)?.as_ref()?.multiplier.to_bits());
    together(model, scale, dialect, &mut defects);
    let is_fp4 = |at: usize| matches!(model.weights[at].value, Value::Fp4(_));
    defects.extend(packed_embedding(model, dialect, is_fp4));
    defects.extend(missing_layers(model));
    // GGUF is known by its format, which says nothing of FP4.
    let claimed = !["", "plain", "gguf"].contains(&model.quantization.dialect);
    if claimed && !model.weights.iter().any(Weight::is_quantized) {
        let what = format!("it says that it is quantized ({dialect}), but no weight is");
        defects.push(Defect { kind: DefectKind::NoneQuantized, weights: Vec::new(), what });
    }
    defects
}

/// Finds layers that `config.json` counts and no weight is in.
///
/// ```
/// use burn_fp4_checkpoints::{Dtype, Model, Tensor, Value, Weight, missing_layers};
///
/// let tensor = Tensor::new("w", Dtype::BF16, vec![2], vec![0; 4])?;
/// let weights = vec![Weight::new("layers.1.norm.weight", 0, Value::Plain(tensor))];
/// let config = Some(serde_json::json!({"num_hidden_layers": 3}));
/// let model = Model { weights, config, ..Model::default() };
/// let says = "config.json counts 3 layers, and 2 of them have no weight, such as layer 0: files \
///             may be missing";
/// assert_eq!(missing_layers(&model).expect("a defect").to_string(), says);
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
#[must_use]
pub fn missing_layers(model: &Model<'_>) -> Option<Defect> {
    let (count, missing, first) = selection::missing_layers(model)?;
    let what = format!(
        "config.json counts {count} layers, and {missing} of them have no weight, such as layer \
         {first}: files may be missing"
    );
    Some(Defect { kind: DefectKind::MissingLayers, weights: Vec::new(), what })
}

/// Adds a defect of a weight, to the same one of other weights if there is one.
fn push(defects: &mut Vec<Defect>, kind: DefectKind, weight: &str, what: String) {
    match defects.iter_mut().find(|known| known.kind == kind && known.what == what) {
        Some(known) => known.weights.push(weight.to_owned()),
        None => defects.push(Defect { kind, weights: vec![weight.to_owned()], what }),
    }
}

/// Blocks of a weight below which their shares say nothing.
const FEW: u64 = 16;
/// A block scale that is large, and a thousand times the largest subnormal one.
const LARGE: f32 = 16.0;

/// Finds defects in one weight. `scaled`: its format has a tensor scale.
fn alone(facts: &Fp4Facts, scaled: bool, add: &mut impl FnMut(DefectKind, String)) {
    let Fp4Facts { blocks, largest, zero_blocks, small_blocks, multiplier, .. } = facts;
    let [_, most] = PLAUSIBLE;
    // A reciprocal as tensor scale leaves the block scales as they are. Small ones alone have no
    // other cause than small values where there is no tensor scale.
    let spread = facts.scales[1] >= LARGE * multiplier;
    let hidden = scaled && spread && 2 * (zero_blocks + small_blocks) > *blocks;
    if *blocks > 0 && zero_blocks == blocks {
        add(DefectKind::AllZero, ALL_ZERO.to_owned());
    } else if hidden && *blocks > FEW && *largest > 0.0 {
        let what = format!(
            "{zero_blocks} of {blocks} blocks are zero and {small_blocks} have one of the smallest \
             scales, next to a largest value of {largest:.3e}: unless the source has them, one \
             value is too large for the others; compare the weight with its source"
        );
        add(DefectKind::LargeValue, what);
    } else if scaled && *largest > most {
        // Tensor scales of trained networks are below 1: their reciprocals make values large.
        let what = format!(
            "its largest value is {largest:.3e}: its tensor scale may be the reciprocal of what \
             the dialect states"
        );
        add(DefectKind::ReciprocalScale, what);
    } else if let Some((kind, what)) = implausible(*largest) {
        add(kind, what);
    }
    if facts.lost_blocks > 0 {
        let lost = facts.lost_blocks;
        let what = format!("{lost} of {blocks} blocks have scale 0 and other codes: they are lost");
        add(DefectKind::LostBlocks, what);
    }
    if facts.nan_blocks > 0 {
        let what = format!("{} of {blocks} blocks have a NaN for their scale", facts.nan_blocks);
        add(DefectKind::NanScales, what);
    }
    if facts.saturated_blocks * 4 > *blocks && *blocks > FEW {
        let saturated = facts.saturated_blocks;
        let what = format!(
            "{saturated} of {blocks} blocks have the largest scale: its tensor scale may be too \
             small"
        );
        add(DefectKind::SaturatedBlocks, what);
    }
}

/// Pairs of FP4 weights that inference engines run as one though their tensor scales differ, by
/// their places in the model.
///
/// ```
/// use burn_fp4_checkpoints::unlike_scales;
/// use burn_fp4_checkpoints::{Fp4Weight, Model, Numbers, TensorScale, Value, Weight};
/// use burn_fp4_formats::Fp4Format;
///
/// let weights = [("mlp.gate_proj", 0.5), ("mlp.up_proj", 0.25)].map(|(name, scale)| {
///     let mut fp4 = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![1, 16], false, false);
///     fp4.tensor_scale = Some(TensorScale::Multiplier(Numbers::new(&[scale])));
///     Weight::new(format!("{name}.weight"), 0, Value::Fp4(fp4))
/// });
/// let model = Model { weights: weights.into(), ..Model::default() };
/// assert_eq!(unlike_scales(&model), [[0, 1]]);
/// ```
#[must_use]
pub fn unlike_scales(model: &Model<'_>) -> Vec<[usize; 2]> {
    let scaled = |&at: &usize| match &model.weights[at].value {
        Value::Fp4(fp4) => {
            Some((at, fp4.multipliers().into_iter().map(f32::to_bits).collect::<Vec<_>>()))
        }
        Value::Plain(_) | Value::Fp8(_) => None,
    };
    let unlike = |members: &Vec<usize>| {
        let mut scaled = members.iter().filter_map(scaled);
        let (one, scales) = scaled.next()?;
        let (other, _) = scaled.find(|(_, others)| *others != scales)?;
        Some([one, other])
    };
    families(model).iter().filter_map(unlike).collect()
}

/// Finds defects of a plan before a byte is written: layers that the readers of a dialect run as
/// one and that have other formats or tensor scales, and embeddings. `groups` are the weights that
/// share a tensor scale, by their places in the outline.
///
/// ```
/// use burn_fp4_checkpoints::{Fp4Weight, Model, Value, Weight, planned_defects};
/// use burn_fp4_formats::Fp4Format;
///
/// let weights = ["mlp.gate_proj", "mlp.up_proj"].map(|name| {
///     let fp4 = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![1, 16], false, true);
///     Weight::new(format!("{name}.weight"), 0, Value::Fp4(fp4))
/// });
/// let outline = Model { weights: weights.into(), ..Model::default() };
/// assert!(planned_defects(&outline, &[vec![0, 1]], "modelopt").is_empty());
/// let apart = planned_defects(&outline, &[vec![0], vec![1]], "modelopt");
/// let text = "`mlp.gate_proj.weight`: `up_proj` has another tensor scale: engines that run both \
///             as one (vLLM, SGLang, TensorRT-LLM) scale one of them again, which changes its \
///             values";
/// assert_eq!(apart[0].to_string(), text);
/// ```
#[must_use]
pub fn planned_defects(outline: &Model<'_>, groups: &[Vec<usize>], dialect: &str) -> Vec<Defect> {
    let mut defects = Vec::new();
    let fp4 = |at: usize| match &outline.weights[at].value {
        Value::Fp4(fp4) => Some(fp4),
        Value::Plain(_) | Value::Fp8(_) => None,
    };
    let mut group_of = vec![None; outline.weights.len()];
    for (group, members) in groups.iter().enumerate() {
        members.iter().for_each(|&at| group_of[at] = Some(group as u32));
    }
    let scale =
        |at: usize| group_of[at].filter(|_| fp4(at).is_some_and(|fp4| fp4.tensor_scale.is_some()));
    together(outline, scale, dialect, &mut defects);
    defects.extend(packed_embedding(outline, dialect, |at| fp4(at).is_some()));
    defects
}

/// Finds embeddings that are FP4 where readers of the dialect have FP4 for linear layers alone.
/// `is_fp4` says of a weight, by its place, if it is FP4 in what they read.
///
/// ```
/// use burn_fp4_checkpoints::{Fp4Weight, Model, Value, Weight, packed_embedding};
/// use burn_fp4_formats::Fp4Format;
///
/// let fp4 = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![1, 16], false, true);
/// let weights = vec![Weight::new("embed_tokens.weight", 0, Value::Fp4(fp4))];
/// let model = Model { weights, ..Model::default() };
/// let found = packed_embedding(&model, "modelopt", |_| true).expect("an embedding");
/// assert_eq!(found.weights, ["embed_tokens.weight"]);
/// assert!(packed_embedding(&model, "gguf", |_| true).is_none(), "llama.cpp loads it");
/// ```
#[must_use]
pub fn packed_embedding(
    model: &Model<'_>,
    dialect: &str,
    is_fp4: impl Fn(usize) -> bool,
) -> Option<Defect> {
    let (_, writer) = dialect::writer(dialect).ok().filter(|(_, writer)| writer.fuses())?;
    let roles = Architecture::of(model).roles().ok()?;
    let is_embedding = |weight: &Weight<'_>| {
        roles.role(weight.module(), weight.shape().len()) == Role::Other(EMBEDDING)
    };
    let weights = model.weights.iter().enumerate();
    let mut found = weights.filter(|(at, weight)| is_fp4(*at) && is_embedding(weight));
    let (_, first) = found.next()?;
    let format = match &first.value {
        Value::Fp4(fp4) => fp4.format,
        Value::Plain(_) | Value::Fp8(_) => Fp4Format::NvFp4,
    };
    let what = format!(
        "an embedding by its name, and readers of `{dialect}`{} have FP4 for linear layers alone: \
         they do not load it; keep it dense",
        in_brackets(writer.readers(format).iter())
    );
    let names = std::iter::once(first).chain(found.map(|(_, weight)| weight));
    let weights = names.map(|weight| weight.name.clone()).collect();
    Some(Defect { kind: DefectKind::Embedding, weights, what })
}

/// Names programs behind a word. Empty: there are none.
fn in_brackets<'r>(readers: impl Iterator<Item = &'r ReadBy>) -> String {
    let names: Vec<&str> = readers.map(|reader| reader.program.row().name).collect();
    if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) }
}

/// Finds defects of weights that readers of a dialect run as one. `scale` is equal for weights that
/// have the same tensor scale.
fn together(
    model: &Model<'_>,
    scale: impl Fn(usize) -> Option<u32>,
    dialect: &str,
    defects: &mut Vec<Defect>,
) {
    // The readers of a dialect that is only read are unknown.
    let written = dialect::writer(dialect).map(|(_, writer)| writer);
    if written.as_ref().is_ok_and(|writer| !writer.fuses()) {
        return;
    }
    for members in families(model) {
        let kind = |at: usize| match &model.weights[at].value {
            Value::Fp4(fp4) => Some((fp4.format, fp4.block_size)),
            Value::Plain(_) | Value::Fp8(_) => None,
        };
        let first = members[0];
        let of_another_kind = members.iter().find(|&&at| kind(at) != kind(first));
        let of_another_scale = members.iter().find(|&&at| scale(at) != scale(first));
        let (kind_of, other, has, then) = match (of_another_kind, of_another_scale) {
            (Some(other), _) => {
                let kind = DefectKind::UnlikeFormats;
                (kind, *other, "is quantized otherwise", "need one format")
            }
            (None, Some(other)) => (
                DefectKind::UnlikeScales,
                *other,
                "has another tensor scale",
                "scale one of them again, which changes its values",
            ),
            (None, None) => continue,
        };
        let format = [first, other].into_iter().find_map(kind).map(|(format, _)| format);
        let readers = written.as_ref().ok().zip(format);
        let readers = readers.map_or(&[][..], |(writer, format)| writer.readers(format));
        let engines = in_brackets(readers.iter().filter(|reader| reader.program.row().fuses));
        let other = within(&model.weights[other].name, &model.weights[first].name);
        let what = format!("`{other}` {has}: engines that run both as one{engines} {then}");
        push(defects, kind_of, &model.weights[first].name, what);
    }
}

/// Returns the name of a module in the words in which it differs from that of a neighbor.
fn within<'n>(name: &'n str, neighbor: &str) -> &'n str {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let parent = neighbor.strip_suffix(".weight").unwrap_or(neighbor).rsplit_once('.');
    let after = |(parent, _): (&str, &str)| module.strip_prefix(parent)?.strip_prefix('.');
    parent.and_then(after).unwrap_or(module)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::fp4::{Numbers, TensorScale};
    use crate::tensor::Tensor;

    fn fp4(name: &str, scales: &[f32]) -> Weight<'static> {
        let shape = vec![scales.len(), 1, 16];
        let mut fp4 = Fp4Weight::outline(Fp4Format::NvFp4, 16, shape, false, false);
        fp4.codes = vec![0x22; 8 * scales.len()].into();
        fp4.scales = vec![0x38; scales.len()].into();
        fp4.tensor_scale = Some(TensorScale::Multiplier(Numbers::new(scales)));
        Weight::new(name, 0, Value::Fp4(fp4))
    }

    fn dense(name: &str) -> Weight<'static> {
        let tensor = Tensor::new("x", Dtype::BF16, vec![1, 16], vec![0; 32]).expect("a shape");
        Weight::new(name, 0, Value::Plain(tensor))
    }

    fn model(weights: Vec<Weight<'static>>) -> (Model<'static>, Vec<Option<Fp4Facts>>) {
        let facts = |weight: &Weight<'_>| match &weight.value {
            Value::Fp4(fp4) => Some(fp4.facts()),
            Value::Plain(_) | Value::Fp8(_) => None,
        };
        let facts = weights.iter().map(facts).collect();
        (Model { weights, ..Model::default() }, facts)
    }

    fn texts(defects: &[Defect]) -> Vec<String> {
        defects.iter().map(Defect::to_string).collect()
    }

    #[test]
    fn the_layer_that_differs_is_named() {
        let (q, k) = (fp4("q_proj.weight", &[0.5]), fp4("k_proj.weight", &[0.5]));
        let (model, facts) = model(vec![q.clone(), k.clone(), dense("v_proj.weight")]);
        let found = texts(&defects(&model, &facts));
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("`q_proj.weight`: `v_proj` is quantized"), "{found:?}");

        let (model, facts) = self::model(vec![q, k, fp4("v_proj.weight", &[0.25])]);
        let found = texts(&defects(&model, &facts));
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("`q_proj.weight`: `v_proj` has another"), "{found:?}");
        assert!(defects(&model, &[]).is_empty(), "without facts nothing is known");
    }

    #[test]
    fn layers_of_a_repeated_pattern_are_one_defect() {
        let pairs = (0..3).flat_map(|layer| {
            [("gate_proj", 0.5), ("up_proj", 0.25)]
                .map(|(name, scale)| fp4(&format!("layers.{layer}.mlp.{name}.weight"), &[scale]))
        });
        let (model, facts) = model(pairs.collect());
        let found = texts(&defects(&model, &facts));
        assert_eq!(found.len(), 1);
        let says = "`layers.0.mlp.gate_proj.weight` and 2 others: `up_proj` has another tensor";
        assert!(found[0].starts_with(says), "{found:?}");
    }

    /// A weight with a block of large values among 32, of which the others have a code and a scale.
    fn outlier(code: u8, scale: u8, multiplier: f32) -> Weight<'static> {
        let mut fp4 = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![32, 16], false, true);
        let others = [[code | code << 4; 8]; 31];
        fp4.codes = [&[[0x77; 8]][..], &others].concat().concat().into();
        fp4.scales = [&[0x7E][..], &[scale; 31]].concat().into();
        fp4.tensor_scale = Some(TensorScale::Multiplier(Numbers::new(&[multiplier])));
        Weight::new("o_proj.weight", 0, Value::Fp4(fp4))
    }

    #[test]
    fn a_value_that_hides_the_others_is_no_reciprocal() {
        for (weight, says) in [
            (outlier(0, 0, 372.0), "31 of 32 blocks are zero and 0 have one of the smallest"),
            (outlier(7, 1, 372.0), "0 of 32 blocks are zero and 31 have one of the smallest"),
            (outlier(7, 0x50, 372.0), "tensor scale may be the reciprocal"),
            (outlier(7, 0x50, 1e-12), "no trained weight is as small"),
            // Not larger than a weight of a trained network is.
            (outlier(0, 0, 1e-4), "31 of 32 blocks are zero"),
        ] {
            let (model, facts) = model(vec![weight]);
            let found = texts(&defects(&model, &facts));
            assert!(found.len() == 1 && found[0].contains(says), "{found:?}");
        }
        // The second is a weight of small values, in a dialect without tensor scales.
        let mut small = outlier(7, 1, 1.0);
        if let Value::Fp4(fp4) = &mut small.value {
            (fp4.scales, fp4.tensor_scale) = (vec![4; 32].into(), None);
        }
        for weight in [outlier(7, 0x50, 1e-4), small] {
            let (model, facts) = model(vec![weight]);
            assert_eq!(defects(&model, &facts), []);
        }
    }

    #[test]
    fn an_embedding_is_a_defect_where_readers_have_fp4_for_linear_layers_alone() {
        let names = ["model.embed_tokens.weight", "transformer.wpe.weight", "o_proj.weight"];
        let model =
            Model { weights: names.map(|name| fp4(name, &[0.5])).into(), ..Model::default() };
        let groups = [vec![0], vec![1], vec![2]];
        let of = |dialect: &str| texts(&planned_defects(&model, &groups, dialect));
        let says = "`model.embed_tokens.weight` and 1 other: an embedding by its name, and readers \
                    of `compressed-tensors` (vLLM, SGLang, transformers) have FP4 for linear";
        let found = of("compressed-tensors");
        assert!(found.len() == 1 && found[0].starts_with(says), "{found:?}");
        // These have FP4 embeddings.
        assert!(of("gguf").is_empty() && of("mlx").is_empty());
    }

    #[test]
    fn a_tensor_scale_that_is_not_finite_is_told() {
        for number in [f32::INFINITY, f32::NAN] {
            let mut weight = fp4("o_proj.weight", &[0.5]);
            if let Value::Fp4(fp4) = &mut weight.value {
                fp4.tensor_scale = Some(TensorScale::Divisor(Numbers::new(&[number])));
            }
            let (model, facts) = model(vec![weight]);
            let found = texts(&defects(&model, &facts)).join("; ");
            let says = format!("`o_proj.weight`: its tensor scale is {number}: no value");
            assert!(found.contains(&says), "{found}");
        }
    }

    #[test]
    fn scales_are_compared_with_those_of_every_matrix_of_every_member() {
        let (k, v) = (fp4("k_proj.weight", &[0.5]), fp4("v_proj.weight", &[0.25]));
        let (qkv, _) = model(vec![dense("q_proj.weight"), k, v]);
        assert_eq!(unlike_scales(&qkv), [[1, 2]]);
        let experts = [("ffn_gate_exps.weight", [0.5, 0.5]), ("ffn_up_exps.weight", [0.5, 0.25])];
        let (experts, _) = model(experts.map(|(name, scales)| fp4(name, &scales)).into());
        assert_eq!(unlike_scales(&experts), [[0, 1]]);
    }
}
