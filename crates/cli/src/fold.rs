//! Weights of a repeated pattern as one, and their reasons in words that they share.

use std::collections::BTreeMap;

use burn_fp4_policy::Reason;

pub(crate) use burn_fp4_policy::fold::{Folded, fold, natural};

/// The module of a weight in the words in which it differs from another one.
pub(crate) fn short<'n>(name: &'n str, other: &str) -> &'n str {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let parent = other.strip_suffix(".weight").unwrap_or(other).rsplit_once('.');
    let within = |(parent, _): (&str, &str)| module.strip_prefix(parent)?.strip_prefix('.');
    parent.and_then(within).unwrap_or(module)
}

/// The reason for which a weight is kept, in words that weights of one pattern share.
pub(crate) fn short_reason(reason: &Reason, name: &str) -> String {
    match reason {
        Reason::With(other) => Reason::With(short(other, name).to_owned()).to_string(),
        Reason::Layer(_) => "a layer in high precision".to_owned(),
        other => other.to_string(),
    }
}

/// Folds weights, each with its module, its shape and a key: matrices by pattern, shape and key,
/// and behind them vectors by key alone, of which a model has many.
pub(crate) fn fold_weights<K: Ord + Clone>(weights: &[(&str, &[usize], K)]) -> Vec<Folded> {
    let (vectors, matrices): (Vec<usize>, Vec<usize>) =
        (0..weights.len()).partition(|&at| weights[at].1.len() < 2);
    let named = matrices.iter().map(|&at| &weights[at]);
    let mut folded = fold(named.map(|(name, shape, key)| (*name, (*shape, key.clone()))));
    for one in &mut folded {
        one.members.iter_mut().for_each(|at| *at = matrices[*at]);
    }
    let mut alike: BTreeMap<&K, Vec<usize>> = BTreeMap::new();
    for at in vectors {
        alike.entry(&weights[at].2).or_default().push(at);
    }
    let row = |members: Vec<usize>| match members[..] {
        [one] => Folded::alone(weights[one].0, one),
        _ => Folded { name: "vectors and scalars (see --all)".to_owned(), members },
    };
    folded.extend(alike.into_values().map(row));
    folded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_one_row_behind_the_matrices_of_a_pattern() {
        let (matrix, vector) = ([2, 2].as_slice(), [2].as_slice());
        let weights =
            [("l.0.norm", vector, 'a'), ("l.0.up", matrix, 'a'), ("l.1.norm", vector, 'a')];
        let all = [&weights[..], &[("l.1.up", matrix, 'a'), ("bias", vector, 'b')]].concat();
        let folded = fold_weights(&all);
        let rows: Vec<_> = folded.iter().map(|one| (one.name.as_str(), &one.members[..])).collect();
        let vectors = ("vectors and scalars (see --all)", &[0, 2][..]);
        assert_eq!(rows, [("l.{0..1}.up", &[1, 3][..]), vectors, ("bias", &[4])]);
        let shapes = [folded[0].shape(matrix), folded[1].shape(vector), folded[2].shape(vector)];
        assert_eq!(shapes, ["2 x [2, 2]", "2 tensors", "[2]"]);
    }
}
