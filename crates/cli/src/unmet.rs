//! Weights that are chosen to be quantized and cannot be.

use burn_fp4_checkpoints::{Model, Weight};
use burn_fp4_policy::Decision;

use crate::fold::{Folded, fold_weights, natural, short_reason};
use crate::remarks::Warning;

/// Warns of the weights that were chosen to be quantized and cannot be, once for every pattern of
/// names.
pub(crate) fn unmet(model: &Model<'_>, decisions: &[Decision]) -> Vec<Warning> {
    let mut unmet: Vec<(&Weight<'_>, String)> = Vec::new();
    for (weight, decision) in model.weights.iter().zip(decisions) {
        if let Decision::Keep(reason) = decision
            && reason.is_unmet()
        {
            unmet.push((weight, short_reason(reason, &weight.name)));
        }
    }
    unmet.sort_by(|(a, _), (b, _)| natural(&a.name).cmp(&natural(&b.name)));
    let rows = unmet.iter().map(|(weight, why)| (weight.module(), weight.shape(), why.clone()));
    let line = |one: Folded| {
        let (_, why) = &unmet[one.members[0]];
        let text = match one.members.len() {
            1 => format!("`{}` stays: {why}", one.name),
            count => format!("{count} x `{}` stay: {why}", one.name),
        };
        let weights = one.members.iter().map(|&at| unmet[at].0.name.clone()).collect();
        Warning { kind: "stays", weights, text }
    };
    fold_weights(&rows.collect::<Vec<_>>()).into_iter().map(line).collect()
}
