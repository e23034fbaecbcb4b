//! Mistakes in FP4 checkpoints that show in no error: scales in the wrong direction,
//! scales that ran out of range, layers that cannot run as one.

use std::fmt;

use crate::dialect;
use crate::facts::Fp4Facts;
use crate::fp4::Fp4Weight;
use crate::selection::{self, families};
use crate::weight::{Model, Value, Weight};

/// A warning about a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trap {
    /// The weight, unless it is about all of them.
    pub weight: Option<String>,
    /// How many other weights it is true of too.
    pub others: usize,
    /// The suspicion, and what follows from it.
    pub what: String,
}

impl fmt::Display for Trap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.weight, self.others) {
            (Some(weight), 0) => write!(f, "`{weight}`: {}", self.what),
            (Some(weight), 1) => write!(f, "`{weight}` and 1 other: {}", self.what),
            (Some(weight), n) => write!(f, "`{weight}` and {n} others: {}", self.what),
            (None, _) => f.write_str(&self.what),
        }
    }
}

/// No weight of a trained network is larger, and no largest one smaller.
const PLAUSIBLE: [f32; 2] = [1e-6, 1e4];

/// The traps of a model, given the facts of its FP4 weights, each in the place of the weight.
///
/// ```
/// use burn_fp4_checkpoints::{Fp4Weight, Model, Value, Weight, traps};
/// use burn_fp4_formats::Fp4Format;
///
/// let mut fp4 = Fp4Weight::outline(Fp4Format::NvFp4, 16, vec![1, 16], false, false);
/// (fp4.codes, fp4.scales) = (vec![0x22; 8].into(), vec![0].into());
/// let facts = [Some(fp4.facts())];
/// let weights = vec![Weight::new("up.weight", 0, Value::Fp4(fp4))];
/// let found = traps(&Model { weights, ..Model::default() }, &facts);
/// let text = "`up.weight`: 1 of 1 blocks have scale 0 and other codes: they are lost";
/// assert_eq!(found[0].to_string(), text);
/// ```
#[must_use]
pub fn traps(model: &Model<'_>, facts: &[Option<Fp4Facts>]) -> Vec<Trap> {
    let mut traps = Vec::new();
    for (weight, facts) in model.weights.iter().zip(facts) {
        let mut add = |what: String| {
            push(&mut traps, Trap { weight: Some(weight.name.clone()), others: 0, what });
        };
        let Some(facts) = facts else { continue };
        alone(facts, &mut add);
        if let Value::Fp4(Fp4Weight { tensor_scale: Some(scale), .. }) = &weight.value
            && let Some(number) = scale.stated().to_vec().into_iter().find(|n| !n.is_finite())
        {
            add(format!("its tensor scale is {number}: no value of it is right"));
        }
        let input = weight.input_scale.as_ref().map(|scale| scale.stated().to_vec());
        if input.is_some_and(|input| input.iter().all(|&scale| scale == 1.0)) {
            add("the scale of its input is the constant 1: inputs beyond 2688 saturate".to_owned());
        }
    }
    together(model, facts, &mut traps);
    traps.extend(missing_layers(model));
    // GGUF is known by its format, which says nothing of FP4.
    let claimed = !["", "plain", "gguf"].contains(&model.quantization.dialect);
    if claimed && !model.weights.iter().any(Weight::is_quantized) {
        let dialect = model.quantization.dialect;
        let what = format!("it says that it is quantized ({dialect}), but no weight is");
        traps.push(Trap { weight: None, others: 0, what });
    }
    traps
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
/// assert_eq!(missing_layers(&model).expect("a trap").to_string(), says);
/// # Ok::<(), burn_fp4_checkpoints::CheckpointError>(())
/// ```
#[must_use]
pub fn missing_layers(model: &Model<'_>) -> Option<Trap> {
    let (count, missing, first) = selection::missing_layers(model)?;
    let what = format!(
        "config.json counts {count} layers, and {missing} of them have no weight, such as layer \
         {first}: files may be missing"
    );
    Some(Trap { weight: None, others: 0, what })
}

/// Adds a trap, or counts it with the same one of another weight.
fn push(traps: &mut Vec<Trap>, trap: Trap) {
    match traps.iter_mut().find(|known| known.what == trap.what) {
        Some(known) => known.others += 1,
        None => traps.push(trap),
    }
}

/// Finds traps in one weight.
fn alone(facts: &Fp4Facts, add: &mut impl FnMut(String)) {
    let Fp4Facts { blocks, largest, .. } = facts;
    let [least, most] = PLAUSIBLE;
    if *largest > most || (*largest > 0.0 && *largest < least) {
        add(format!(
            "its largest value is {largest:.3e}: its tensor scale may be the reciprocal of what \
             the dialect states"
        ));
    }
    if facts.lost_blocks > 0 {
        let lost = facts.lost_blocks;
        add(format!("{lost} of {blocks} blocks have scale 0 and other codes: they are lost"));
    }
    if facts.nan_blocks > 0 {
        add(format!("{} of {blocks} blocks have a NaN for their scale", facts.nan_blocks));
    }
    if facts.saturated_blocks * 4 > *blocks && *blocks > 16 {
        let saturated = facts.saturated_blocks;
        add(format!(
            "{saturated} of {blocks} blocks have the largest scale: its tensor scale may be too \
             small"
        ));
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

/// Finds traps in weights that inference engines run as one.
fn together(model: &Model<'_>, facts: &[Option<Fp4Facts>], traps: &mut Vec<Trap>) {
    // The readers of a dialect that is only read are unknown.
    let written = dialect::writer(model.quantization.dialect);
    let fused = written.map_or(true, |(_, writer)| writer.fuses());
    for members in families(model) {
        let kind = |at: usize| match &model.weights[at].value {
            Value::Fp4(fp4) => Some((fp4.format, fp4.block_size)),
            Value::Plain(_) | Value::Fp8(_) => None,
        };
        let scale = |at: usize| Some(facts.get(at)?.as_ref()?.multiplier.to_bits());
        let first = members[0];
        let of_another_kind = members.iter().find(|&&at| kind(at) != kind(first));
        let of_another_scale = members.iter().find(|&&at| fused && scale(at) != scale(first));
        let (other, what) = match (of_another_kind, of_another_scale) {
            (Some(other), _) => {
                (other, "is quantized otherwise: engines that run both as one refuse that (vLLM)")
            }
            (None, Some(other)) => (
                other,
                "has another tensor scale: engines that run both as one round block scales again",
            ),
            (None, None) => continue,
        };
        let [weight, other] = [first, *other].map(|at| &model.weights[at].name);
        let what = format!("`{other}` {what}");
        traps.push(Trap { weight: Some(weight.clone()), others: 0, what });
    }
}

#[cfg(test)]
mod tests {
    use burn_fp4_formats::Fp4Format;

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

    fn texts(traps: &[Trap]) -> Vec<String> {
        traps.iter().map(Trap::to_string).collect()
    }

    #[test]
    fn the_layer_that_differs_is_named() {
        let (q, k) = (fp4("q_proj.weight", &[0.5]), fp4("k_proj.weight", &[0.5]));
        let (model, facts) = model(vec![q.clone(), k.clone(), dense("v_proj.weight")]);
        let found = texts(&traps(&model, &facts));
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("`q_proj.weight`: `v_proj.weight` is quantized"), "{found:?}");

        let (model, facts) = self::model(vec![q, k, fp4("v_proj.weight", &[0.25])]);
        let found = texts(&traps(&model, &facts));
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("`q_proj.weight`: `v_proj.weight` has another"), "{found:?}");
        assert!(traps(&model, &[]).is_empty(), "without facts nothing is known");
    }

    #[test]
    fn a_tensor_scale_that_is_not_finite_is_told() {
        for number in [f32::INFINITY, f32::NAN] {
            let mut weight = fp4("o_proj.weight", &[0.5]);
            if let Value::Fp4(fp4) = &mut weight.value {
                fp4.tensor_scale = Some(TensorScale::Divisor(Numbers::new(&[number])));
            }
            let (model, facts) = model(vec![weight]);
            let found = texts(&traps(&model, &facts)).join("; ");
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
