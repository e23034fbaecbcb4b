//! Layers that inference engines run as one product, because they have the same input.

use std::collections::BTreeMap;

use crate::architecture::Architecture;
use crate::weight::Model;

/// The families of a model that have more than one member: weights by their places.
pub(crate) fn families(model: &Model<'_>) -> Vec<Vec<usize>> {
    let architecture = Architecture::of(model);
    let mut families: BTreeMap<(&str, usize), Vec<usize>> = BTreeMap::new();
    for (at, weight) in model.weights.iter().enumerate() {
        if weight.shape().len() >= 2
            && let Some(family) = architecture.family(weight.module())
        {
            families.entry(family).or_default().push(at);
        }
    }
    families.into_values().filter(|members| members.len() > 1).collect()
}
