//! Rotary position embeddings (RoPE, arXiv 2104.09864) and the causal mask. Channels are paired as
//! in `transformers`: channel `i` of the first half of a head with channel `i` of the second half.

use std::sync::OnceLock;

use burn::module::{Module, ParamId};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

use crate::devices::decoder::decoder_code;
use crate::devices::readable;

/// Cosines and sines of every position, `[positions, head_dim / 2]`.
#[derive(Module, Debug)]
pub struct RotaryEmbedding {
    cos: Tensor<2>,
    sin: Tensor<2>,
    /// Index of the channel that each channel of a head is paired with, `[head_dim]`.
    partners: Tensor<1, Int>,
    /// Identifies the values, for copies that captures read.
    #[module(skip)]
    id: ParamId,
}

impl RotaryEmbedding {
    /// Computes the tables for `positions` positions. `inv_freq` holds the rotation of each pair of
    /// channels from one position to the next, in radians.
    #[must_use]
    pub fn new(inv_freq: &[f32], positions: usize, device: &Device) -> Self {
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
        Self { cos: table(f64::cos), sin: table(f64::sin), partners, id: ParamId::new() }
    }

    /// Prepares the positions `[tokens]` of a forward pass, for attention to `keys` keys in
    /// `dtype`.
    #[must_use]
    pub fn at(&self, positions: Tensor<1, Int>, keys: usize, dtype: DType) -> Positions {
        let own_operations = decoder_code(&positions.device(), [dtype]).is_some();
        let Self { cos, sin, partners, id } = self.clone();
        let tables = [cos.into_dispatch(), sin.into_dispatch(), partners.into_dispatch()];
        let [cos, sin, partners] = readable(id, tables);
        let (cos, sin) = (Tensor::from_dispatch(cos), Tensor::from_dispatch(sin));
        let partners = Tensor::from_dispatch(partners);
        let prepared =
            Positions { positions, keys, dtype, cos, sin, partners, rows: OnceLock::new() };
        // Before the layers, as Burn's fusion would not fuse them in between.
        if !own_operations {
            prepared.rows();
        }
        prepared
    }
}

/// Positions of the new tokens of a forward pass, prepared once for all layers.
#[derive(Debug, Clone)]
pub struct Positions {
    pub(super) positions: Tensor<1, Int>,
    keys: usize,
    dtype: DType,
    /// Of every position, as in [`RotaryEmbedding`].
    pub(super) cos: Tensor<2>,
    pub(super) sin: Tensor<2>,
    partners: Tensor<1, Int>,
    rows: OnceLock<Rows>,
}

/// Operands of the tensor operations of attention, which all layers share.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    /// Cosine for each channel, `[1, 1, tokens, head_dim]`.
    cos: Tensor<4>,
    /// Sine for each partner, negative in the first half of a head, `[1, 1, tokens, head_dim]`.
    sin: Tensor<4>,
    partners: Tensor<1, Int>,
    /// True where a key is at a later position than a query, `[1, 1, tokens, keys]`.
    pub(super) causal_mask: Tensor<4, Bool>,
}

impl Positions {
    /// Returns the number of positions that have a rotation.
    pub(super) fn count(&self) -> usize {
        self.cos.dims()[0]
    }

    /// Returns the number of pairs of channels that are rotated.
    pub(super) fn pairs(&self) -> usize {
        self.cos.dims()[1]
    }

    pub(super) fn rows(&self) -> &Rows {
        self.rows.get_or_init(|| {
            let Self { positions, keys, .. } = self;
            let rows = |table: &Tensor<2>| -> Tensor<4> {
                table.clone().select(0, positions.clone()).cast(self.dtype).unsqueeze()
            };
            let (cos, sin) = (rows(&self.cos), rows(&self.sin));
            let [count] = positions.dims();
            let keys_at = Tensor::<1, Int>::arange(0..*keys as i64, &positions.device());
            let keys_at = keys_at.unsqueeze_dim::<2>(0).expand([count, *keys]);
            let queries_at = positions.clone().unsqueeze_dim::<2>(1).expand([count, *keys]);
            Rows {
                cos: Tensor::cat(vec![cos.clone(), cos], 3),
                sin: Tensor::cat(vec![sin.clone().neg(), sin], 3),
                partners: self.partners.clone(),
                causal_mask: keys_at.greater(queries_at).unsqueeze(),
            }
        })
    }
}

impl Rows {
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
