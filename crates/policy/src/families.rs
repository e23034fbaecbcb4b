//! Families: layers that have the same input, which inference engines fuse and GPTQ quantizes side
//! by side.

use std::collections::HashMap;
use std::hash::Hash;

use crate::reason::Reason;

/// Family of a layer: query, key and value; gate and up.
///
/// ```
/// use burn_fp4_policy::Family;
///
/// let lists = [["q_proj", "k_proj"], ["gate", "up"]];
/// let family = Family::of("layers.0.mlp.up", &lists).expect("its name is in a list");
/// assert_eq!((family.parent, family.list), ("layers.0.mlp.", 1));
/// assert_eq!(Family::of("layers.0.mlp.gate", &lists), Some(family));
/// assert_eq!(Family::of("layers.0.mlp.down", &lists), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Family<'n> {
    /// The names before the layer's own.
    pub parent: &'n str,
    /// Number of the list that the layer's name is in.
    pub list: usize,
    /// Name of the weight in its layer, where layers have several; otherwise empty.
    pub parameter: &'n str,
}

impl<'n> Family<'n> {
    /// Finds the family of a module by the first of the lists with an end of its name.
    #[must_use]
    pub fn of<L: AsRef<[S]>, S: AsRef<str>>(module: &'n str, lists: &[L]) -> Option<Self> {
        let parent = |ends: &L| ends.as_ref().iter().find_map(|end| stem(module, end.as_ref()));
        let of = |(list, ends)| Some(Self { parent: parent(ends)?, list, parameter: "" });
        lists.iter().enumerate().find_map(of)
    }
}

/// Returns the part of a module's name before `end`, if it ends so at a dot.
///
/// ```
/// use burn_fp4_policy::stem;
///
/// assert_eq!(stem("layers.0.o_proj", "o_proj"), Some("layers.0."));
/// assert_eq!(stem("layers.0.qo_proj", "o_proj"), None);
/// ```
#[must_use]
pub fn stem<'m>(module: &'m str, end: &str) -> Option<&'m str> {
    module.strip_suffix(end).filter(|stem| stem.is_empty() || stem.ends_with('.'))
}

/// Finds the families: members with equal keys, by their numbers, in the order of the first ones. A
/// member without a key is in none, and one with a key of its own is alone.
///
/// Names are the keys of files and of lists that a user has written ([`Family`]); statistics of
/// inputs, by their identity, belong to layers that were seen to run.
///
/// ```
/// use burn_fp4_policy::{Family, Reason, families, keep_together};
///
/// let (names, lists) = (["mlp.gate", "mlp.up", "mlp.down"], [["gate", "up"]]);
/// let found = families(names.iter().map(|name| Family::of(name, &lists)));
/// assert_eq!(found, [[0, 1]]);
/// let mut reasons = [None, Some(Reason::NotAsked), None];
/// keep_together(|at| names[at], &found, &mut reasons);
/// assert_eq!(reasons[0], Some(Reason::With("mlp.up".to_owned())));
/// assert_eq!(reasons[2], None);
/// ```
#[must_use]
pub fn families<K: Eq + Hash>(keys: impl Iterator<Item = Option<K>>) -> Vec<Vec<usize>> {
    let mut numbers: HashMap<K, usize> = HashMap::new();
    let mut families: Vec<Vec<usize>> = Vec::new();
    for (at, key) in keys.enumerate() {
        let Some(key) = key else { continue };
        let number = *numbers.entry(key).or_insert(families.len());
        match families.get_mut(number) {
            Some(members) => members.push(at),
            None => families.push(vec![at]),
        }
    }
    families
}

/// Keeps all of a family if one is kept.
pub fn keep_together<'n>(
    name: impl Fn(usize) -> &'n str,
    families: &[Vec<usize>],
    reasons: &mut [Option<Reason>],
) {
    for members in families {
        let Some(&kept) = members.iter().find(|&&at| reasons[at].is_some()) else { continue };
        for &at in members {
            reasons[at].get_or_insert_with(|| Reason::With(name(kept).to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_in_the_order_of_their_first_members() {
        let keys = [Some(7), None, Some(3), Some(7), Some(3), Some(5)];
        assert_eq!(families(keys.into_iter()), [vec![0, 3], vec![2, 4], vec![5]]);
    }
}
