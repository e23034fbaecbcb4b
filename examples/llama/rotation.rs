//! Rotary position embeddings (arXiv 2104.09864), with the pairs of channels that `transformers`
//! has: a channel of the first half of a head, and the one as far into the second half.

use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Cosines and sines of every position, `[positions, depth / 2]`.
#[derive(Module, Debug)]
pub(super) struct Rotation {
    cosines: Tensor<2>,
    sines: Tensor<2>,
    /// The channel that each channel of a head is paired with, `[depth]`.
    partners: Tensor<1, Int>,
}

impl Rotation {
    /// For so many positions, by angles from one position to the next.
    pub(super) fn new(frequencies: &[f32], positions: usize, device: &Device) -> Self {
        let table = |function: fn(f64) -> f64| {
            // The angle is rounded to f32, as `transformers` does.
            let of = |position| move |frequency| f64::from(position as f32 * frequency);
            let angles = (0..positions).flat_map(|at| frequencies.iter().copied().map(of(at)));
            let values: Vec<f32> = angles.map(|angle| function(angle) as f32).collect();
            let data = TensorData::new(values, [positions, frequencies.len()]);
            Tensor::from_data(data, (device, DType::F32))
        };
        let half = frequencies.len() as i32;
        let partners: Vec<i32> = (half..2 * half).chain(0..half).collect();
        let partners = TensorData::new(partners, [2 * frequencies.len()]);
        let partners = Tensor::from_data(partners, device);
        Self { cosines: table(f64::cos), sines: table(f64::sin), partners }
    }

    /// For tokens at these positions, in numbers of this dtype.
    pub(super) fn at(&self, positions: &Tensor<1, Int>, dtype: DType) -> Turn {
        let part = |table: &Tensor<2>| -> Tensor<4> {
            table.clone().select(0, positions.clone()).cast(dtype).unsqueeze()
        };
        let (cosines, sines) = (part(&self.cosines), part(&self.sines));
        Turn {
            cosines: Tensor::cat(vec![cosines.clone(), cosines], 3),
            sines: Tensor::cat(vec![sines.clone().neg(), sines], 3),
            partners: self.partners.clone(),
        }
    }
}

/// How some tokens are turned.
pub(super) struct Turn {
    /// Cosines of their angles, `[1, 1, tokens, depth]`.
    cosines: Tensor<4>,
    /// What a partner is multiplied by: sines, negative in the first half of a head.
    sines: Tensor<4>,
    partners: Tensor<1, Int>,
}

impl Turn {
    /// Turns heads `[batch, tokens, heads, depth]`, which become `[batch, heads, tokens, depth]`.
    ///
    /// Burn's fusion makes one kernel of each turn. It needs all views before, and partners
    /// selected from a tensor that nothing else in the kernel reads: a view of its own.
    pub(super) fn turn<const N: usize>(&self, heads: [Tensor<4>; N]) -> [Tensor<4>; N] {
        let views = heads.map(|heads| [heads.clone(), heads].map(|view| view.swap_dims(1, 2)));
        views.map(|[heads, partners]| {
            let partners = partners.select(3, self.partners.clone());
            heads * self.cosines.clone() + partners * self.sines.clone()
        })
    }
}
