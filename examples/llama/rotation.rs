//! Rotary position embeddings (arXiv 2104.09864), with the pairs of channels that `transformers`
//! has: a channel of the first half of a head, and the one as far into the second half.

use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// Cosines and sines of every position, `[positions, depth / 2]`.
#[derive(Module, Debug)]
pub(super) struct Rotation {
    cosines: Tensor<2>,
    sines: Tensor<2>,
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
        Self { cosines: table(f64::cos), sines: table(f64::sin) }
    }

    /// For tokens at these positions, in numbers of this dtype.
    pub(super) fn at(&self, positions: &Tensor<1, Int>, dtype: DType) -> Turn {
        let part =
            |table: &Tensor<2>| table.clone().select(0, positions.clone()).cast(dtype).unsqueeze();
        Turn { cosines: part(&self.cosines), sines: part(&self.sines) }
    }
}

/// Cosines and sines of some tokens, `[1, 1, tokens, depth / 2]`.
pub(super) struct Turn {
    cosines: Tensor<4>,
    sines: Tensor<4>,
}

impl Turn {
    /// Turns heads `[batch, heads, tokens, depth]`.
    pub(super) fn turn(&self, heads: Tensor<4>) -> Tensor<4> {
        let [_, _, _, depth] = heads.dims();
        let (cosines, sines) = (&self.cosines, &self.sines);
        let first = heads.clone().narrow(3, 0, depth / 2);
        let second = heads.narrow(3, depth / 2, depth / 2);
        let turned = first.clone() * cosines.clone() - second.clone() * sines.clone();
        Tensor::cat(vec![turned, second * cosines.clone() + first * sines.clone()], 3)
    }
}
