//! [`Fp4Linear`]: a linear layer straight from codes, on hosts too.

use burn::module::{LoraAdapter, Module, Param};
use burn::nn::Linear;
use burn::tensor::module::linear;
use burn::tensor::{DType, Tensor};
use burn_fp4_ops::{self as ops, Activations, Fp8Path, Fp8Weight, OpsError};

use crate::error::Fp4Error;
use crate::packed_weight::PackedWeight;

/// A linear layer that multiplies straight from the codes of its weight, once it is quantized, on
/// every device: for hosts (`flex`, `ndarray`), where [`Linear`] dequantizes the whole weight for
/// every input. Records are the same as of [`Linear`].
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
    /// How products with a packed weight read their input. Not part of records.
    #[module(skip)]
    pub activations: Activations,
}

impl Fp4Linear {
    /// Sets how products with a packed weight read their input. [`Activations::Int8`] is the
    /// fastest on hosts, [`Activations::Fp8`] for many rows on Hopper; they say by how much outputs
    /// change. [`fp8_path`](Self::fp8_path) tells if products run in FP8.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Fp4Linear, ops::Activations};
    ///
    /// let layer = Fp4Linear::from(LinearConfig::new(64, 128).init(&Device::flex()))
    ///     .with_activations(Activations::Int8);
    /// # assert_eq!(layer.activations, Activations::Int8);
    /// ```
    #[must_use]
    pub fn with_activations(mut self, activations: Activations) -> Self {
        self.activations = activations;
        self
    }

    /// Returns how products with the packed weight run with [`Activations::Fp8`], or with
    /// [`Activations::Fp8Rounded`] if the layer has these, for an input of some rows and a dtype;
    /// none if the weight is dense or packed along the other axis.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{DType, Device};
    /// use burn_fp4_modules::{Fp4Config, Fp4Linear, Fp4Module, ops::Fp8Path};
    ///
    /// let mut layer = Fp4Linear::from(LinearConfig::new(64, 128).init(&Device::flex()));
    /// layer.quantize_fp4(&Fp4Config::mxfp4())?;
    /// let path = layer.fp8_path(512, DType::BF16)?;
    /// assert_eq!(path, Some(Fp8Path::Emulated)); // on a CPU
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Fp4Error::Device`] if the device fails.
    pub fn fp8_path(&self, rows: usize, dtype: DType) -> Result<Option<Fp8Path>, Fp4Error> {
        let Some(packed) = self.packed() else { return Ok(None) };
        Ok(Some(self.fp8_weight(packed)?.path(&packed.tensor(), rows, dtype)))
    }

    fn fp8_weight(&self, packed: &PackedWeight) -> Result<Fp8Weight, OpsError> {
        Ok(packed.fp8()?.with_rounding(self.activations == Activations::Fp8Rounded))
    }

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
    /// ([`dense_matmul`](ops::dense_matmul)), so that the last bits differ.
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
                let weight = packed.tensor::<2>();
                let product = match self.activations {
                    Activations::Fp8 | Activations::Fp8Rounded => {
                        ops::linear_in_fp8(input, &weight, bias, || self.fp8_weight(packed))
                    }
                    other => ops::linear_with(input, &weight, bias, other),
                };
                let product = product.unwrap_or_else(|error| panic!("Fp4Linear: {error}"));
                match adapted {
                    Some(adapted) => product + adapted,
                    None => product,
                }
            }
            None => {
                let product = ops::dense_matmul(input, self.weight.val());
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
        let Fp4Linear { weight, bias, .. } = layer;
        Self { weight, bias }
    }
}

impl From<Linear> for Fp4Linear {
    fn from(linear: Linear) -> Self {
        let Linear { weight, bias, .. } = linear;
        Self { weight, bias, activations: Activations::F32 }
    }
}
