//! The number of a weight's layer, and the layers at the start and the end that are kept.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use burn_fp4_policy::{Policy, Preset};

use crate::container::CONFIG;
use crate::error::CheckpointError;
use crate::weight::Model;

/// The layers of a model, and how many of them are to be kept.
#[derive(Debug)]
pub(super) struct Layers {
    count: usize,
    /// Layers that are asked for to be kept.
    asked: usize,
    kept: [Range<usize>; 2],
}

/// Names before the number of a layer. The first in a name counts: T5's `block.3.layer.1` is in
/// layer 3.
const CONTAINERS: [&str; 6] = ["layers", "block", "layer", "blk", "h", "blocks"];

/// The names of the containers of a weight's layer, and the number of the layer.
fn place(name: &str) -> Option<(&str, usize)> {
    let mut begin = 0;
    for part in name.split('.') {
        let next = begin + part.len() + 1;
        let number = name.get(next..).and_then(|rest| rest.split('.').next()?.parse().ok());
        if let (true, Some(number)) = (CONTAINERS.contains(&part), number) {
            return Some((&name[..next], number));
        }
        begin = next;
    }
    None
}

/// The number of the layer of a weight.
fn number(name: &str) -> Option<usize> {
    place(name).map(|(_, number)| number)
}

/// The field with the number of layers.
const COUNT: &str = "num_hidden_layers";

/// The number of layers that the config states.
fn stated(model: &Model<'_>) -> Option<usize> {
    let config = model.config.as_ref()?;
    let count = config.get(COUNT).or_else(|| config["text_config"].get(COUNT))?.as_u64()?;
    Some(count as usize)
}

/// The number of layers that the config states, how many of these have no weight, and the first of
/// them. A model of several stacks is judged by the one with the most layers.
pub(crate) fn missing(model: &Model<'_>) -> Option<(usize, usize, usize)> {
    let count = stated(model)?;
    let mut stacks: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for weight in &model.weights {
        if let Some((stack, layer)) = place(&weight.name).filter(|(_, layer)| *layer < count) {
            stacks.entry(stack).or_default().insert(layer);
        }
    }
    let there = stacks.into_values().max_by_key(BTreeSet::len)?;
    // Not by trying all of them: a config may name any number.
    let first = (0..).find(|layer| !there.contains(layer))?;
    (there.len() < count).then(|| (count, count - there.len(), first))
}

impl Layers {
    /// # Errors
    /// The converter of miles needs the number of layers, whatever is kept.
    pub(super) fn of(model: &Model<'_>, policy: &Policy) -> Result<Self, CheckpointError> {
        let recipe = policy.recipe();
        let count = match stated(model) {
            Some(count) => count,
            None if policy.preset() == Preset::Miles => {
                return Err(CheckpointError::Field {
                    path: CONFIG.into(),
                    field: COUNT.to_owned(),
                    expected: "the number of layers, which this preset needs",
                    found: "nothing".to_owned(),
                    remedy: "state it there, or choose another preset",
                });
            }
            None => {
                let numbers = model.weights.iter().filter_map(|weight| number(&weight.name));
                numbers.max().map_or(0, |last| last.saturating_add(1))
            }
        };
        let first = recipe.first_layers_high_precision.unwrap_or(0);
        let last = recipe.last_layers_high_precision.unwrap_or(0);
        let asked = first.saturating_add(last);
        Ok(Self { count, asked, kept: recipe.dense_layers(count) })
    }

    /// Layers of the model.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Layers that are asked for to be kept.
    pub(super) fn asked(&self) -> usize {
        self.asked
    }

    /// The number of a weight's layer, and how many there are.
    pub(super) fn of_weight(&self, name: &str) -> Option<(usize, usize)> {
        number(name).map(|layer| (layer, self.count))
    }

    /// The names of the layers that are kept, as transformers has them.
    pub(super) fn kept(&self) -> impl Iterator<Item = String> {
        let inside = |layers: Range<usize>| layers.start..layers.end.min(self.count);
        let kept = self.kept.clone().into_iter().flat_map(inside);
        kept.map(|layer| format!("model.layers.{layer}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_a_number_behind_its_container() {
        assert_eq!(number("model.layers.12.mlp.experts.3.up_proj.weight"), Some(12));
        assert_eq!(number("blk.7.attn_q.weight"), Some(7));
        assert_eq!(number("decoder.block.3.layer.1.EncDecAttention.k.weight"), Some(3));
        assert_eq!(number("model.mlp.experts.3.w1.weight"), None);
        let layers = Layers { count: 4, asked: 3, kept: [0..1, 2..4] };
        let names = ["model.layers.0", "model.layers.2", "model.layers.3"];
        assert_eq!(layers.kept().collect::<Vec<_>>(), names);
        let layers = Layers { count: 2, asked: usize::MAX, kept: [0..usize::MAX, 2..2] };
        assert_eq!(layers.kept().collect::<Vec<_>>(), ["model.layers.0", "model.layers.1"]);
    }

    #[test]
    fn layers_are_missing_whatever_the_other_names_are() {
        let of = |names: &[&str]| {
            let weight = |name: &&str| {
                let tensor = crate::tensor::Tensor::new("x", crate::Dtype::U8, vec![0], vec![]);
                let value = crate::weight::Value::Plain(tensor.expect("an empty tensor"));
                crate::weight::Weight::new(*name, 0, value)
            };
            let weights = names.iter().map(weight).collect();
            let config = Some(serde_json::json!({"num_hidden_layers": 4}));
            missing(&Model { weights, config, ..Model::default() })
        };
        let two = ["layers.0.norm.weight", "layers.2.norm.weight"];
        assert_eq!(of(&two), Some((4, 2, 1)));
        for (odd, expected) in [
            ("layers.01.norm.weight", (4, 1, 3)),
            ("layers.3", (4, 1, 1)),
            ("adapter.layers.3", (4, 2, 1)),
        ] {
            assert_eq!(of(&[two[0], odd, two[1]]), Some(expected), "{odd}");
        }
        // The first number may be an expert's, which begins another stack.
        let experts = [0, 1, 2, 3].map(|n| format!("experts.{n}.layers.{n}.w"));
        assert_eq!(of(&experts.each_ref().map(String::as_str)), Some((4, 3, 0)));
    }

    #[test]
    fn numbers_of_layers_may_be_as_large_as_a_file_says() {
        let name = format!("model.layers.{}.up_proj.weight", usize::MAX);
        let tensor = crate::tensor::Tensor::new(name.clone(), crate::Dtype::U8, vec![0], vec![]);
        let value = crate::weight::Value::Plain(tensor.expect("an empty tensor"));
        let weights = vec![crate::weight::Weight::new(name, 0, value)];
        let model = Model { weights, ..Model::default() };
        let recipe = burn_fp4_policy::Recipe {
            first_layers_high_precision: Some(1),
            last_layers_high_precision: Some(2),
            ..Default::default()
        };
        let policy = Policy::new(recipe).expect("a policy");
        let layers = Layers::of(&model, &policy).expect("a number of layers");
        assert_eq!((layers.count, layers.kept().count()), (usize::MAX, 3));
    }
}
