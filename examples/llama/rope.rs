//! Rotary position embeddings (RoPE, arXiv 2104.09864). Channels are paired as in `transformers`:
//! channel `i` of the first half of a head with channel `i` of the second half.

use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Cosines and sines of every position, `[positions, head_dim / 2]`.
#[derive(Module, Debug)]
pub(super) struct RotaryEmbedding {
    cos: Tensor<2>,
    sin: Tensor<2>,
    /// Index of the channel that each channel of a head is paired with, `[head_dim]`.
    partners: Tensor<1, Int>,
}

impl RotaryEmbedding {
    /// Computes the tables for `positions` positions.
    pub(super) fn new(inv_freq: &[f32], positions: usize, device: &Device) -> Self {
        let table = |function: fn(f64) -> f64| {
            // The angle is rounded to f32, as `transformers` does.
            let angle = |position| move |inv_freq| f64::from(position as f32 * inv_freq);
            let angles = (0..positions).flat_map(|at| inv_freq.iter().copied().map(angle(at)));
            let values: Vec<f32> = angles.map(|angle| function(angle) as f32).collect();
            let data = TensorData::new(values, [positions, inv_freq.len()]);
            Tensor::from_data(data, (device, DType::F32))
        };
        let half = inv_freq.len() as i32;
        let partners: Vec<i32> = (half..2 * half).chain(0..half).collect();
        let partners = TensorData::new(partners, [2 * inv_freq.len()]);
        let partners = Tensor::from_data(partners, device);
        Self { cos: table(f64::cos), sin: table(f64::sin), partners }
    }

    /// Selects the rows of these positions, in `dtype`.
    pub(super) fn at(&self, positions: &Tensor<1, Int>, dtype: DType) -> PositionEmbeddings {
        let rows = |table: &Tensor<2>| -> Tensor<4> {
            table.clone().select(0, positions.clone()).cast(dtype).unsqueeze()
        };
        let (cos, sin) = (rows(&self.cos), rows(&self.sin));
        PositionEmbeddings {
            cos: Tensor::cat(vec![cos.clone(), cos], 3),
            sin: Tensor::cat(vec![sin.clone().neg(), sin], 3),
            partners: self.partners.clone(),
        }
    }
}

/// Cosines and sines of the positions of one forward pass.
pub(super) struct PositionEmbeddings {
    /// Cosine for each channel, `[1, 1, tokens, head_dim]`.
    cos: Tensor<4>,
    /// Sine for each partner, negative in the first half of a head, `[1, 1, tokens, head_dim]`.
    sin: Tensor<4>,
    partners: Tensor<1, Int>,
}

impl PositionEmbeddings {
    /// Rotates heads `[batch, tokens, heads, head_dim]` into `[batch, heads, tokens, head_dim]`.
    ///
    /// Burn's fusion makes one kernel of each rotation. For that, all views come first, and the
    /// partners are selected from a view that nothing else in the kernel reads.
    pub(super) fn rotate<const N: usize>(&self, heads: [Tensor<4>; N]) -> [Tensor<4>; N] {
        let views = heads.map(|heads| [heads.clone(), heads].map(|view| view.swap_dims(1, 2)));
        views.map(|[heads, partners]| {
            let partners = partners.select(3, self.partners.clone());
            heads * self.cos.clone() + partners * self.sin.clone()
        })
    }
}
