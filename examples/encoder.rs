//! A character model of Burn's own modules, none of which knows of FP4.

use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Bool, Device, Int, Tensor};

use crate::text::{CONTEXT, CharModel, Size, Text};

/// Burn's transformer encoder under a causal mask, as a model of the next character.
#[derive(Module, Debug)]
pub struct CharEncoder {
    characters: Embedding,
    positions: Embedding,
    encoder: TransformerEncoder,
    lm_head: Linear,
}

impl CharEncoder {
    /// Creates an untrained model.
    pub fn new(text: &Text, size: Size, device: &Device) -> Self {
        let Size { layers, hidden_size, heads } = size;
        Self {
            characters: EmbeddingConfig::new(text.vocab_size, hidden_size).init(device),
            positions: EmbeddingConfig::new(CONTEXT, hidden_size).init(device),
            encoder: TransformerEncoderConfig::new(hidden_size, 4 * hidden_size, heads, layers)
                .with_norm_first(true)
                .with_dropout(0.0)
                .init(device),
            lm_head: LinearConfig::new(hidden_size, text.vocab_size).init(device),
        }
    }
}

impl CharModel for CharEncoder {
    fn logits(&self, windows: Tensor<2, Int>) -> Tensor<3> {
        let device = windows.device();
        let [n, context] = windows.dims();
        let positions = Tensor::<1, Int>::arange(0..context as i64, &device).unsqueeze();
        let causal_mask = Tensor::<2, Bool>::tril_mask([context, context], 0, &device);
        let hidden = self.characters.forward(windows) + self.positions.forward(positions);
        let input = TransformerEncoderInput::new(hidden)
            .mask_attn(causal_mask.unsqueeze::<3>().expand([n, context, context]));
        self.lm_head.forward(self.encoder.forward(input))
    }
}
