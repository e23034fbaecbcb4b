//! Layers that inference engines fuse, because they have the same input.

use std::collections::BTreeMap;

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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
#[must_use]
pub fn stem<'m>(module: &'m str, end: &str) -> Option<&'m str> {
    module.strip_suffix(end).filter(|stem| stem.is_empty() || stem.ends_with('.'))
}

/// Finds the families with more than one member; weights have their numbers.
#[must_use]
pub fn families<'n>(of: impl Iterator<Item = Option<Family<'n>>>) -> Vec<Vec<usize>> {
    let mut families: BTreeMap<Family<'_>, Vec<usize>> = BTreeMap::new();
    for (at, family) in of.enumerate() {
        if let Some(family) = family {
            families.entry(family).or_default().push(at);
        }
    }
    families.into_values().filter(|members| members.len() > 1).collect()
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
