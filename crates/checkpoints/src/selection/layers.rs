//! The number of a weight's layer, and the layers at the start and the end that are kept.

use super::preset::Preset;
use crate::container::CONFIG;
use crate::error::CheckpointError;
use crate::json::Json;
use crate::weight::Model;

/// The layers that are kept.
#[derive(Debug)]
pub(super) struct Layers {
    first: usize,
    last: usize,
    count: usize,
}

/// What stands before the number of a layer.
const CONTAINERS: [&str; 5] = ["layers", "layer", "blk", "h", "blocks"];

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
    pub(super) fn of(
        model: &Model<'_>,
        preset: Preset,
        first: usize,
        last: usize,
    ) -> Result<Self, CheckpointError> {
        let key = "num_hidden_layers";
        let config = model.config.as_ref();
        let stated = config.and_then(|c| c.get(key).or_else(|| c.at(&["text_config", key])));
        let stated = stated.and_then(Json::as_u64).map(|count| count as usize);
        let count = match stated {
            Some(count) => count,
            None if preset == Preset::Miles => {
                return Err(CheckpointError::Field {
                    path: CONFIG.into(),
                    field: key.to_owned(),
                    expected: "the number of layers, which this preset needs",
                    found: "nothing".to_owned(),
                });
            }
            None => {
                let numbers = model.weights.iter().filter_map(|weight| number(&weight.name));
                numbers.max().map_or(0, |last| last + 1)
            }
        };
        Ok(Self { first, last, count })
    }

    fn is_kept(&self, layer: usize) -> bool {
        let from_end = self.count.checked_sub(layer);
        layer < self.first || from_end.is_some_and(|left| (1..=self.last).contains(&left))
    }

    /// The layer of a weight, if it is kept.
    pub(super) fn keeps(&self, name: &str) -> Option<usize> {
        number(name).filter(|&layer| self.is_kept(layer))
    }

    /// The names of the layers that are kept, as transformers has them.
    pub(super) fn kept(&self) -> impl Iterator<Item = String> {
        let layers = (0..self.count).filter(|&layer| self.is_kept(layer));
        layers.map(|layer| format!("model.layers.{layer}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_a_number_behind_its_container() {
        assert_eq!(number("model.layers.12.mlp.experts.3.up_proj.weight"), Some(12));
        assert_eq!(number("blk.7.attn_q.weight"), Some(7));
        assert_eq!(number("model.mlp.experts.3.w1.weight"), None);
        let layers = Layers { first: 1, last: 2, count: 4 };
        let kept: Vec<usize> = (0..6).filter(|&layer| layers.is_kept(layer)).collect();
        assert_eq!(kept, [0, 2, 3]);
    }
}
