//! [`FakeQuantWeight`]: attached to a weight that is trained as if it were quantized.

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, Reparameterization};
use burn::tensor::{DType, Device, Tensor};
use burn_fp4_ops::{Fp4Scheme, Saturated, fake_quantize_for_training, fake_quantize_with_amax};
use serde::{Deserialize, Serialize};

/// A weight that is trained in full precision and used as if it were quantized.
///
/// Attached to a parameter it makes `val()` round the values to those that quantization leaves. The
/// stored values stay as they are: an optimizer changes them by gradients that pass straight
/// through the rounding. Where the tensor scale is learned it is a parameter of its own,
/// `<parameter>.fp4_fake.amax`: the magnitude that the scale is made from.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_fp4_modules::ops::Fp4Scheme;
/// use burn_fp4_modules::{FakeQuantWeight, Fp4Config, Fp4Module};
///
/// let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
/// layer.fake_quantize_fp4(&Fp4Config::mxfp4())?;
/// let attached = layer.weight.reparameterization::<FakeQuantWeight>().unwrap();
/// assert_eq!((attached.scheme(), attached.axis()), (&Fp4Scheme::mxfp4(), 0));
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct FakeQuantWeight {
    pub(crate) settings: FakeQuantSettings,
    pub(crate) amax: Option<Param<Tensor<1>>>,
}

/// How a weight is fake-quantized.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct FakeQuantSettings {
    pub(crate) scheme: Fp4Scheme,
    pub(crate) axis: usize,
    pub(crate) saturated: Saturated,
}

/// The container type that visitors and mappers get, followed by the settings as JSON: a visitor
/// sees parameters without what is attached to them, and a name would become part of record paths.
const CONTAINER: &str = "Struct:FakeQuantWeight:";

/// The part of record paths that the learned magnitude has.
pub(crate) const AMAX: &str = "amax";

impl FakeQuantWeight {
    /// How it is quantized.
    pub fn scheme(&self) -> &Fp4Scheme {
        &self.settings.scheme
    }

    /// Axis that its blocks run along.
    #[must_use]
    pub fn axis(&self) -> usize {
        self.settings.axis
    }

    /// The learned parameter of the tensor scale, if it is learned: `[1]`, of which the magnitude
    /// counts.
    #[must_use]
    pub fn amax(&self) -> Option<&Param<Tensor<1>>> {
        self.amax.as_ref()
    }

    fn container(&self) -> String {
        let settings = serde_json::to_string(&self.settings).expect("plain data");
        format!("{CONTAINER}{settings}")
    }

    /// The settings in a container type that [`container`](Self::container) gave.
    pub(crate) fn settings_of(container: &str) -> Option<FakeQuantSettings> {
        serde_json::from_str(container.strip_prefix(CONTAINER)?).ok()
    }
}

impl Reparameterization for FakeQuantWeight {
    const NAME: &'static str = "fp4_fake";

    /// # Panics
    /// If the parameter was given another shape since, or a dtype that is not quantized.
    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let FakeQuantSettings { scheme, axis, saturated } = &self.settings;
        let output = match &self.amax {
            Some(amax) => {
                let amax = amax.val().cast(DType::F32).abs();
                fake_quantize_with_amax(base, amax, *axis, scheme, *saturated)
            }
            None => fake_quantize_for_training(base, *axis, scheme, *saturated),
        };
        output.expect("checked when it was attached")
    }
}

impl Module for FakeQuantWeight {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let container = self.container();
        visitor.enter_module(AMAX, &container);
        if let Some(amax) = &self.amax {
            visitor.visit_float(amax);
        }
        visitor.exit_module(AMAX, &container);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let container = self.container();
        mapper.enter_module(AMAX, &container);
        let amax = self.amax.map(|amax| mapper.map_float(amax));
        mapper.exit_module(AMAX, &container);
        Self { amax, ..self }
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.amax.collect_devices(devices)
    }

    fn to_device(self, device: &Device) -> Self {
        Self { amax: self.amax.to_device(device), ..self }
    }

    fn fork(self, device: &Device) -> Self {
        Self { amax: self.amax.fork(device), ..self }
    }

    fn valid(&self) -> Self {
        Self { amax: self.amax.valid(), ..self.clone() }
    }

    fn train(self) -> Self {
        Self { amax: self.amax.train(), ..self }
    }

    fn materialize(self) -> Self {
        self
    }
}
