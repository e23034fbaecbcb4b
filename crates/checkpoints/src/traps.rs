//! What is often wrong with FP4 checkpoints and shows in no error: scales in the wrong direction,
//! scales that ran out of range, layers that cannot run as one.

use std::fmt;

use crate::dialect;
use crate::facts::Fp4Facts;
use crate::selection::families;
use crate::weight::{Model, Value, Weight};

/// A warning about a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trap {
    /// The weight, unless it is about all of them.
    pub weight: Option<String>,
    /// How many other weights it is true of too.
    pub others: usize,
    /// What is suspicious, and what follows from it.
    pub what: String,
}

impl fmt::Display for Trap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.weight, self.others) {
            (Some(weight), 0) => write!(f, "`{weight}`: {}", self.what),
            (Some(weight), n) => write!(f, "`{weight}` and {n} others: {}", self.what),
            (None, _) => f.write_str(&self.what),
        }
    }
}

/// No weight of a trained network is larger, and no largest one smaller.
const PLAUSIBLE: [f32; 2] = [1e-6, 1e4];

/// The traps of a model, given the facts of its FP4 weights.
pub fn traps(model: &Model<'_>, facts: &[Option<Fp4Facts>]) -> Vec<Trap> {
    let mut traps = Vec::new();
    for (weight, facts) in model.weights.iter().zip(facts) {
        let mut add = |what: String| {
            push(&mut traps, Trap { weight: Some(weight.name.clone()), others: 0, what });
        };
        let Some(facts) = facts else { continue };
        alone(facts, &mut add);
        let input = weight.input_scale.as_ref().map(|scale| scale.stated().to_vec());
        if input.is_some_and(|input| input.iter().all(|&scale| scale == 1.0)) {
            add("the scale of its input is the constant 1: inputs beyond 2688 saturate".to_owned());
        }
    }
    together(model, facts, &mut traps);
    let claimed = !model.quantization.dialect.is_empty() && model.quantization.dialect != "plain";
    if claimed && !model.weights.iter().any(Weight::is_quantized) {
        let dialect = model.quantization.dialect;
        let what = format!("it says that it is quantized ({dialect}), but no weight is");
        traps.push(Trap { weight: None, others: 0, what });
    }
    traps
}

/// Adds a trap, or counts it with the same one of another weight.
fn push(traps: &mut Vec<Trap>, trap: Trap) {
    match traps.iter_mut().find(|known| known.what == trap.what) {
        Some(known) => known.others += 1,
        None => traps.push(trap),
    }
}

/// What shows in one weight.
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
pub fn unlike_scales(model: &Model<'_>) -> Vec<[usize; 2]> {
    let scale = |at: usize| match &model.weights[at].value {
        Value::Fp4(fp4) => fp4.multipliers().first().map(|scale| scale.to_bits()),
        Value::Plain(_) | Value::Fp8(_) => None,
    };
    let unlike = |members: &Vec<usize>| {
        let first = scale(members[0])?;
        let other = members.iter().find(|&&at| scale(at).is_some_and(|other| other != first))?;
        Some([members[0], *other])
    };
    families(model).values().filter_map(unlike).collect()
}

/// What shows in weights that inference engines run as one.
fn together(model: &Model<'_>, facts: &[Option<Fp4Facts>], traps: &mut Vec<Trap>) {
    // Those of a dialect that is only read are unknown.
    let written = dialect::writer(model.quantization.dialect);
    let fused = written.map_or(true, |(_, writer)| writer.fuses());
    for members in families(model).values() {
        let name = |at: usize| model.weights[at].name.as_str();
        let kinds = members.iter().map(|&at| match &model.weights[at].value {
            Value::Fp4(fp4) => Some((fp4.format, fp4.block_size)),
            Value::Plain(_) | Value::Fp8(_) => None,
        });
        let kinds: Vec<_> = kinds.collect();
        let what = if kinds.iter().any(|kind| *kind != kinds[0]) {
            "is quantized otherwise: engines that run both as one refuse that (vLLM)"
        } else {
            let scale = |at: usize| facts[at].map(|facts| facts.multiplier.to_bits());
            if !fused || members.iter().all(|&at| scale(at) == scale(members[0])) {
                continue;
            }
            "has another tensor scale: engines that run both as one round block scales again"
        };
        let other = members.iter().find(|&&at| at != members[0]).copied().unwrap_or(members[0]);
        let what = format!("`{}` {what}", name(other));
        traps.push(Trap { weight: Some(name(members[0]).to_owned()), others: 0, what });
    }
}
