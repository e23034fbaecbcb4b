//! [`FakeQuantize`]: activations rounded in a forward pass to what quantization leaves of them.

use burn::module::{Flag, Module, Param, RunningState};
use burn::tensor::{DType, Device, Tensor};
use burn_fp4_ops::{
    Fp4Scheme, OpsError, Rounding, Saturated, TensorScaling, amax, fake_quantize_for_training,
    fake_quantize_with_amax,
};
use serde::{Deserialize, Serialize};

use crate::error::Fp4Error;

/// Where the tensor scale of activations comes from; block scales follow the activations either
/// way.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ActivationRange {
    /// The amax of every tensor.
    Dynamic,
    /// A running amax, as Burn's `BatchNorm` keeps its statistics: updated in training, fixed
    /// otherwise. Until it has seen anything it is the amax of the tensor itself.
    Static {
        /// How much of it a training step replaces, in (0, 1].
        momentum: f64,
    },
}

/// Settings of a [`FakeQuantize`].
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_modules::ops::{Fp4Scheme, Saturated};
/// use burn_fp4_modules::{ActivationRange, FakeQuantizeConfig};
///
/// let device = Device::flex();
/// let quantize = FakeQuantizeConfig::new(64)
///     .with_scheme(Fp4Scheme::mxfp4())
///     .with_range(ActivationRange::Dynamic)
///     .with_saturated(Saturated::Zero)
///     .init(&device)?;
/// assert_eq!(quantize.scheme(), &Fp4Scheme::mxfp4());
/// let rounded = quantize.forward(Tensor::<2>::full([1, 64], 1.1, &device)); // 4 * 2^-2
/// assert_eq!(rounded.into_data(), Tensor::<2>::ones([1, 64], &device).into_data());
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[must_use]
#[non_exhaustive]
pub struct FakeQuantizeConfig {
    /// Length of the last axis, which the blocks run along.
    pub channels: usize,
    /// How the activations are quantized: NVFP4.
    pub scheme: Fp4Scheme,
    /// Where the tensor scale comes from: a running amax with momentum 0.1.
    pub range: ActivationRange,
    /// The gradient of elements that saturate: that of the others.
    pub saturated: Saturated,
}

impl FakeQuantizeConfig {
    /// For activations `[.., channels]`.
    pub fn new(channels: usize) -> Self {
        Self {
            channels,
            scheme: Fp4Scheme::nvfp4(),
            range: ActivationRange::Static { momentum: 0.1 },
            saturated: Saturated::PassThrough,
        }
    }

    /// Sets how the activations are quantized.
    pub fn with_scheme(mut self, scheme: Fp4Scheme) -> Self {
        self.scheme = scheme;
        self
    }

    /// Sets where the tensor scale comes from.
    pub fn with_range(mut self, range: ActivationRange) -> Self {
        self.range = range;
        self
    }

    /// Sets the gradient of elements that saturate.
    pub fn with_saturated(mut self, saturated: Saturated) -> Self {
        self.saturated = saturated;
        self
    }

    /// The module.
    ///
    /// # Errors
    /// [`Fp4Error::Scheme`] if the scheme is inconsistent or its blocks do not divide the channels,
    /// [`Fp4Error::FakeQuantization`] for a search that needs activations of its own, stochastic
    /// rounding, a momentum outside its range, or a running amax with another tensor scale.
    pub fn init(&self, device: &Device) -> Result<FakeQuantize, Fp4Error> {
        let refuse = |what, reason| Err(Fp4Error::FakeQuantization { what, reason });
        let Self { channels, scheme, range, saturated } = *self;
        scheme.check_columns(channels).map_err(OpsError::from)?;
        if !scheme.method.is_blockwise() {
            return refuse("the method", "it is for weights; use amax, four-over-six or sse");
        }
        if scheme.rounding != Rounding::Nearest {
            return refuse("stochastic rounding", "every step would draw the same numbers");
        }
        if let ActivationRange::Static { momentum } = range {
            if !(momentum > 0.0 && momentum <= 1.0) {
                return refuse("momentum", "it must be above 0, and at most 1");
            }
            let own = scheme.tensor_scale != TensorScaling::Tensor;
            if own && scheme.rule.row().tensor_scale {
                return refuse("a running amax", "the scheme has another tensor scale");
            }
        }
        Ok(FakeQuantize {
            amax: RunningState::new(Tensor::zeros([1], (device, DType::F32))),
            training: Param::from_bool(true),
            channels,
            scheme,
            range,
            saturated,
        })
    }
}

/// Activations rounded to what quantization leaves of them, for models that are to run on quantized
/// activations.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fp4_modules::FakeQuantizeConfig;
///
/// let device = Device::flex();
/// let quantize = FakeQuantizeConfig::new(64).init(&device)?;
/// let activations = Tensor::<3>::random([2, 5, 64], Distribution::Normal(0.0, 1.0), &device);
/// let rounded = quantize.forward(activations);
/// # assert_eq!(rounded.dims(), [2, 5, 64]);
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[derive(Module, Debug)]
pub struct FakeQuantize {
    /// The running amax `[1]`; 0 as long as nothing was seen.
    pub amax: RunningState<Tensor<1>>,
    /// Set if the running amax follows the inputs seen on an autodiff device.
    pub training: Param<Flag>,
    #[module(skip)]
    channels: usize,
    #[module(skip)]
    scheme: Fp4Scheme,
    #[module(skip)]
    range: ActivationRange,
    #[module(skip)]
    saturated: Saturated,
}

impl FakeQuantize {
    /// Rounds activations `[.., channels]`. Gradients pass straight through.
    ///
    /// NaN and infinity give what the references give; nothing is read back. Once seen in training
    /// they stay in the running amax, as they do in the statistics of Burn's `BatchNorm`.
    ///
    /// # Panics
    /// If the last axis has another length, or the dtype is not f32, f16 or bf16.
    #[must_use]
    pub fn forward<const D: usize>(&self, activations: Tensor<D>) -> Tensor<D> {
        let found = activations.dims()[D - 1];
        assert_eq!(found, self.channels, "the last axis of the activations");
        // No amax of nothing goes into the running one.
        if activations.shape().contains(&0) {
            return activations;
        }
        let checked = "the scheme was checked with the channels";
        let Some(momentum) = self.momentum() else {
            let (scheme, saturated) = (&self.scheme, self.saturated);
            return fake_quantize_for_training(activations, D - 1, scheme, saturated)
                .expect(checked);
        };
        let device = activations.device();
        let seen = self.amax.value_sync().to_device(&device);
        let own = amax(activations.clone()).expect(checked);
        let own = if device.is_autodiff() { Tensor::from_inner(own) } else { own };
        let learns = device.is_autodiff() && self.training.is_enabled();
        let followed = match learns {
            true => seen.clone() * (1.0 - momentum) + own.clone() * momentum,
            false => seen.clone(),
        };
        let amax = followed.mask_where(seen.equal_elem(0.0), own);
        if learns {
            self.amax.update(amax.clone().detach());
        }
        fake_quantize_with_amax(activations, amax.detach(), D - 1, &self.scheme, self.saturated)
            .expect(checked)
    }

    /// How the activations are quantized.
    pub fn scheme(&self) -> &Fp4Scheme {
        &self.scheme
    }

    /// Returns the momentum of the running amax, if the tensor scale is made from it.
    fn momentum(&self) -> Option<f64> {
        match self.range {
            ActivationRange::Static { momentum } if self.scheme.rule.row().tensor_scale => {
                Some(momentum)
            }
            _ => None,
        }
    }
}
