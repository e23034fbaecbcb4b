//! [`decide`]: decisions about the parameters of a module, from those about their tensors in files.

use std::collections::BTreeSet;

use burn_fp4_checkpoints::selection::Selection;
use burn_fp4_ops::Fp4Scheme;
use burn_fp4_policy::{Decision, Decisions, Policy, Reason, families};

use crate::error::Fp4Error;

use super::map::CheckpointMap;
use super::outline::{Outline, ParameterOutline};

/// Decides about the parameters of a module as a policy decides about the files that it is saved
/// to. Names and shapes in files decide, by the same selection as in the command `fp4`.
///
/// # Errors
/// [`Fp4Error::Checkpoint`] as [`Selection::of`]; [`Fp4Error::RecipeParameter`] for a parameter of
/// several schemes or tensor scales, or with blocks along another axis than files have them. For
/// the map as [`Outline::new`].
pub(crate) fn decide(
    parameters: &[ParameterOutline<'_>],
    policy: &Policy,
    map: &CheckpointMap,
) -> Result<Decisions, Fp4Error> {
    let outline = Outline::new(parameters, map)?;
    let selection = Selection::of(&outline.model, policy)?;
    // The parameters that share a tensor scale, by the tensors of a group. A stacked parameter is a
    // tensor for each of its matrices. One that is tied to others is in no group of theirs.
    let sharing = |group: usize| -> BTreeSet<usize> {
        selection.groups[group].iter().map(|&tensor| outline.of[tensor][0]).collect()
    };
    let mut weights = vec![Decision::Keep(Reason::NoMatrix); parameters.len()];
    let mut sharers: Vec<Option<BTreeSet<usize>>> = vec![None; parameters.len()];
    let mut decided = vec![false; parameters.len()];
    for (of, decision) in outline.of.iter().zip(&selection.decisions) {
        for &at in of {
            let shares = match decision {
                Decision::Quantize { group, .. } if at == of[0] => Some(sharing(*group)),
                Decision::Quantize { .. } => Some(BTreeSet::from([at])),
                Decision::Keep(_) => None,
            };
            let known = parameters[at];
            if !decided[at] {
                let placement = map.placement(known.container, known.shape.len());
                if shares.is_some() && !placement.has_matrices() {
                    let problem = "its blocks cannot run along its input in files; keep it";
                    return Err(impossible(known.path, problem));
                }
                (weights[at], sharers[at], decided[at]) = (decision.clone(), shares, true);
            } else if scheme(&weights[at]) != scheme(decision) || sharers[at] != shares {
                let problem = "its matrices are several tensors in files, of several schemes or \
                               tensor scales; choose one for all of them";
                return Err(impossible(known.path, problem));
            }
        }
    }
    let groups = families(sharers.into_iter());
    for (number, members) in groups.iter().enumerate() {
        for &at in members {
            if let Decision::Quantize { group, .. } = &mut weights[at] {
                *group = number;
            }
        }
    }
    Ok(Decisions { weights, groups, idle: Vec::new() })
}

/// The scheme of a decision; none of dense weights.
fn scheme(decision: &Decision) -> Option<&Fp4Scheme> {
    match decision {
        Decision::Quantize { scheme, .. } => Some(scheme),
        Decision::Keep(_) => None,
    }
}

/// Returns the error of something that a recipe or a module cannot express.
pub(super) fn impossible(path: &str, problem: &str) -> Fp4Error {
    Fp4Error::RecipeParameter { path: path.to_owned(), problem: problem.to_owned() }
}
