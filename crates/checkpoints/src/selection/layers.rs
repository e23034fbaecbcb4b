//! The number of a weight's layer, and the layers at the start and the end that are kept.

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

/// The number of the layer of a weight.
fn number(name: &str) -> Option<usize> {
    let mut parts = name.split('.').peekable();
    while let Some(part) = parts.next() {
        let number = parts.peek().and_then(|next| next.parse().ok());
        if let (true, Some(number)) = (CONTAINERS.contains(&part), number) {
            return Some(number);
        }
    }
    None
}

impl Layers {
    /// # Errors
    /// The converter of miles needs the number of layers, whatever is kept.
    pub(super) fn of(model: &Model<'_>, policy: &Policy) -> Result<Self, CheckpointError> {
        let recipe = policy.recipe();
        let key = "num_hidden_layers";
        let config = model.config.as_ref();
        let stated =
            config.and_then(|c| c.get(key).or_else(|| c["text_config"].get(key))?.as_u64());
        let stated = stated.map(|count| count as usize);
        let count = match stated {
            Some(count) => count,
            None if policy.preset() == Preset::Miles => {
                return Err(CheckpointError::Field {
                    path: CONFIG.into(),
                    field: key.to_owned(),
                    expected: "the number of layers, which this preset needs",
                    found: "nothing".to_owned(),
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
        self.kept.clone().into_iter().flatten().map(|layer| format!("model.layers.{layer}"))
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
