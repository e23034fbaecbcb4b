use std::collections::BTreeMap;

use burn::tensor::Tensor;
use burn_fp4_ops::{Gram, gram};

use crate::Fp4Error;

/// What is known of the inputs of layers, by the path of their weight.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fp4_modules::{Calibration, Fp4Config, Fp4Module, ops::Gptq};
///
/// let device = Device::flex();
/// let mut layer = LinearConfig::new(64, 32).init(&device);
/// let inputs = Tensor::<2>::random([256, 64], Distribution::Normal(0.0, 1.0), &device);
///
/// let mut calibration = Calibration::new();
/// calibration.add("weight", inputs)?;
/// let config = Fp4Config::nvfp4().gptq(Gptq::default());
/// let report = layer.quantize_fp4_calibrated(&config, &calibration)?;
/// # assert!(report.to_string().contains("gptq"));
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Calibration {
    grams: BTreeMap<String, Gram>,
}

impl Calibration {
    /// Of nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds inputs `[.., in]` of the layer whose weight has this path, to those added before.
    ///
    /// Every call reads a matrix `[in, in]` back from the device: few large batches beat many small ones.
    ///
    /// # Errors
    /// [`Fp4Error::Parameter`] naming the path: a value that is not finite, another number of channels than
    /// before, or a dtype that is not a float.
    pub fn add<const D: usize>(&mut self, path: &str, inputs: Tensor<D>) -> Result<(), Fp4Error> {
        let named = |source| Fp4Error::Parameter { path: path.to_owned(), source };
        let found = gram(inputs).map_err(named)?;
        match self.grams.get_mut(path) {
            Some(gram) => gram.merge(&found).map_err(|error| named(error.into())),
            None => {
                self.grams.insert(path.to_owned(), found);
                Ok(())
            }
        }
    }

    /// Takes statistics that were gathered elsewhere.
    pub fn insert(&mut self, path: impl Into<String>, gram: Gram) {
        self.grams.insert(path.into(), gram);
    }

    /// Paths, and what is known of the inputs there.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Gram)> {
        self.grams.iter().map(|(path, gram)| (path.as_str(), gram))
    }

    /// What is known of the inputs of a layer.
    pub fn get(&self, path: &str) -> Option<&Gram> {
        self.grams.get(path)
    }
}
