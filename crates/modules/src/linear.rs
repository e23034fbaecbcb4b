//! [`Fp4Linear`]: a linear layer straight from codes, on hosts too.

use burn::module::{LoraAdapter, Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn::tensor::module::linear;
use burn_fp4_ops::dense_matmul;

use crate::packed_weight::PackedWeight;

/// A linear layer that multiplies straight from the codes of its weight, once it is quantized, on
/// every device: for hosts (`flex`, `ndarray`), where [`Linear`] dequantizes the whole weight for
/// every input. Records are the same as of [`Linear`].
/// [`set_fp4_activations`](crate::Fp4Module::set_fp4_activations) has it read inputs in 8 bits.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_modules::{Fp4Config, Fp4Linear, Fp4Module};
///
/// let device = Device::flex();
/// let mut linear = Fp4Linear::from(LinearConfig::new(64, 128).init(&device));
/// linear.quantize_fp4(&Fp4Config::nvfp4())?;
/// let output = linear.forward(Tensor::<3>::ones([2, 1, 64], &device));
/// assert_eq!(output.dims(), [2, 1, 128]);
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[derive(Module, Debug)]
pub struct Fp4Linear {
    /// `[d_input, d_output]`, dense or packed.
    pub weight: Param<Tensor<2>>,
    /// `[d_output]`.
    pub bias: Option<Param<Tensor<1>>>,
}

impl Fp4Linear {
    /// Returns the packed weight, if its blocks run along the input.
    fn packed(&self) -> Option<&PackedWeight> {
        let packed = self.weight.reparameterization::<PackedWeight>();
        packed.filter(|packed| packed.layout().axis == 0)
    }

    /// The layer for inputs `[.., d_input]`, giving `[.., d_output]`. Sums are f32 and rounded
    /// once, before the bias is added. No rows of input give no rows of output. An
    /// [adapter](PackedWeight::adapter) adds two thin products, `(x a) b`.
    ///
    /// A dense weight is multiplied by one row of input in another order of sums than by more rows
    /// ([`dense_matmul`]), so that the last bits differ.
    ///
    /// # Panics
    /// If the last axis of the input is not `d_input`, or its dtype is not f32, f16 or bf16.
    #[must_use]
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let bias = self.bias.as_ref().map(|bias| bias.val());
        match self.packed() {
            Some(packed) => {
                // Burn's product of no rows fails on some devices.
                let adapter = packed.adapter().filter(|_| !input.shape().contains(&0));
                let adapted = adapter.map(|adapter| adapted(input.clone(), adapter));
                let product = packed.linear(input, bias);
                let product = product.unwrap_or_else(|error| panic!("Fp4Linear: {error}"));
                match adapted {
                    Some(adapted) => product + adapted,
                    None => product,
                }
            }
            None => {
                let product = dense_matmul(input, self.weight.val());
                match bias {
                    Some(bias) => product + bias.unsqueeze(),
                    None => product,
                }
            }
        }
    }
}

/// Returns the product of an input and an adapter, in the dtype of the input.
fn adapted<const D: usize>(input: Tensor<D>, adapter: &LoraAdapter) -> Tensor<D> {
    let dtype = input.dtype();
    let inner = linear(input.cast(adapter.a.dtype()), adapter.a.val(), None);
    linear(inner, adapter.b.val(), None).mul_scalar(adapter.scale).cast(dtype)
}

impl From<Fp4Linear> for Linear {
    fn from(layer: Fp4Linear) -> Self {
        let Fp4Linear { weight, bias } = layer;
        Self { weight, bias }
    }
}

impl From<Linear> for Fp4Linear {
    fn from(linear: Linear) -> Self {
        let Linear { weight, bias, .. } = linear;
        Self { weight, bias }
    }
}
