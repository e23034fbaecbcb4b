use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_fp4_ops::matmul;

use crate::PackedWeight;

/// A linear layer that multiplies straight from the codes of its weight, once it is quantized, on every device: for
/// hosts (`flex`, `ndarray`), where [`Linear`] dequantizes the whole weight for every input. Its records are those of
/// [`Linear`].
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
    /// The layer for inputs `[.., d_input]`, giving `[.., d_output]`. Sums are f32 and rounded once, before the bias is
    /// added.
    ///
    /// # Panics
    /// If the last axis of the input is not `d_input`, or its dtype is not f32, f16 or bf16.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let bias = self.bias.as_ref().map(|bias| bias.val());
        let packed = self.weight.reparameterization::<PackedWeight>();
        match packed.map(PackedWeight::tensor::<2>).filter(|packed| packed.axis() == 0) {
            Some(packed) => {
                let output = matmul(input, &packed);
                let output = output.unwrap_or_else(|error| panic!("Fp4Linear: {error}"));
                match bias {
                    Some(bias) => output + bias.unsqueeze(),
                    None => output,
                }
            }
            None => burn::tensor::module::linear(input, self.weight.val(), bias),
        }
    }
}

impl From<Linear> for Fp4Linear {
    fn from(linear: Linear) -> Self {
        let Linear { weight, bias, .. } = linear;
        Self { weight, bias }
    }
}
