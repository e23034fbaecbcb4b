//! A transformer of Burn's own modules, none of which knows of FP4.

use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Bool, Device, Int, Tensor};

use crate::text::{CONTEXT, Predicts, Size, Text};

/// A classifier that predicts the next character.
#[derive(Module, Debug)]
pub struct Reader {
    characters: Embedding,
    positions: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

impl Reader {
    /// An untrained model.
    pub fn new(text: &Text, size: Size, device: &Device) -> Self {
        let Size { blocks, width, heads } = size;
        Self {
            characters: EmbeddingConfig::new(text.characters, width).init(device),
            positions: EmbeddingConfig::new(CONTEXT, width).init(device),
            encoder: TransformerEncoderConfig::new(width, 4 * width, heads, blocks)
                .with_norm_first(true)
                .with_dropout(0.0)
                .init(device),
            head: LinearConfig::new(width, text.characters).init(device),
        }
    }
}

impl Predicts for Reader {
    fn scores(&self, windows: Tensor<2, Int>) -> Tensor<3> {
        let device = windows.device();
        let [n, context] = windows.dims();
        let positions = Tensor::<1, Int>::arange(0..context as i64, &device).unsqueeze();
        let future = Tensor::<2, Bool>::tril_mask([context, context], 0, &device);
        let hidden = self.characters.forward(windows) + self.positions.forward(positions);
        let input = TransformerEncoderInput::new(hidden)
            .mask_attn(future.unsqueeze::<3>().expand([n, context, context]));
        self.head.forward(self.encoder.forward(input))
    }
}
