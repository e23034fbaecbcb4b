//! [`Fp4Embedding`]: a table whose rows are looked up from codes.

use burn::module::{Module, Param};
use burn::nn::Embedding;
use burn::tensor::{FloatDType, Int, Tensor};
use burn_fp4_ops::{dense_matmul, embedding};

use crate::packed_weight::PackedWeight;

/// A table of vectors that are looked up straight from the codes of its weight, once it is
/// quantized along axis 1, on every device: for hosts (`flex`, `ndarray`), where [`Embedding`]
/// dequantizes the whole table for every lookup. Records are the same as of [`Embedding`].
///
/// A tied output layer is [`project`](Self::project).
///
/// ```
/// use burn::nn::EmbeddingConfig;
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_fp4_modules::{Fp4Config, Fp4Embedding, Fp4Module};
///
/// let device = Device::flex();
/// let mut table = Fp4Embedding::from(EmbeddingConfig::new(100, 64).init(&device));
/// table.quantize_fp4(&Fp4Config::nvfp4())?;
/// let vectors = table.forward(Tensor::<2, Int>::from_data([[3, 97]], &device));
/// assert_eq!(vectors.dims(), [1, 2, 64]);
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[derive(Module, Debug)]
pub struct Fp4Embedding {
    /// `[n_embedding, d_model]`, dense or packed.
    pub weight: Param<Tensor<2>>,
}

impl Fp4Embedding {
    /// Returns the packed weight, if its blocks run along the vectors and it has no adapter.
    fn packed(&self) -> Option<&PackedWeight> {
        let packed = self.weight.reparameterization::<PackedWeight>();
        packed.filter(|packed| packed.adapter().is_none() && packed.layout().axis == 1)
    }

    /// The vectors at indices `[batch, length]`: `[batch, length, d_model]`.
    ///
    /// # Panics
    /// If the indices are on another device, and on hosts for one out of range, as [`Embedding`]
    /// does.
    #[must_use]
    pub fn forward(&self, indices: Tensor<2, Int>) -> Tensor<3> {
        match self.packed() {
            Some(packed) => {
                let dtype = FloatDType::from(self.weight.base().dtype());
                let vectors = embedding(&packed.tensor::<2>(), indices, dtype);
                vectors.unwrap_or_else(|error| panic!("Fp4Embedding: {error}"))
            }
            None => burn::tensor::module::embedding(self.weight.val(), indices),
        }
    }

    /// The products of hidden states `[.., d_model]` with every vector of the table,
    /// `[.., n_embedding]`: the logits of an output layer that is tied to the embedding. Once the
    /// weight is quantized along axis 1 they are computed straight from its codes, which are in
    /// memory once for both uses. [`set_fp4_activations`](crate::Fp4Module::set_fp4_activations)
    /// has them read hidden states in 8 bits.
    ///
    /// ```
    /// use burn::nn::EmbeddingConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_modules::{Fp4Config, Fp4Embedding, Fp4Module};
    ///
    /// let device = Device::flex();
    /// let mut table = Fp4Embedding::from(EmbeddingConfig::new(100, 64).init(&device));
    /// table.quantize_fp4(&Fp4Config::nvfp4())?;
    /// let logits = table.project(Tensor::<3>::ones([1, 2, 64], &device));
    /// assert_eq!(logits.dims(), [1, 2, 100]);
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Panics
    /// If the last axis of the hidden states is not `d_model`, or their dtype is not f32, f16 or
    /// bf16.
    #[must_use]
    pub fn project<const D: usize>(&self, hidden: Tensor<D>) -> Tensor<D> {
        match self.packed() {
            Some(packed) => {
                let logits = packed.linear(hidden, None);
                logits.unwrap_or_else(|error| panic!("Fp4Embedding: {error}"))
            }
            None => dense_matmul(hidden, self.weight.val().transpose()),
        }
    }
}

impl From<Fp4Embedding> for Embedding {
    fn from(embedding: Fp4Embedding) -> Self {
        Self { weight: embedding.weight }
    }
}

impl From<Embedding> for Fp4Embedding {
    fn from(embedding: Embedding) -> Self {
        Self { weight: embedding.weight }
    }
}
