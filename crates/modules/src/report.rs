//! [`Fp4Report`]: the outcome for every parameter.

use core::fmt;

use burn_fp4_ops::search::Method;
use burn_fp4_ops::{Fp4Format, Fp4Scheme, MatmulPath};
use serde::{Deserialize, Serialize};

/// Report of [`quantize_fp4`](crate::Fp4Module::quantize_fp4), or of one of its relatives, with an
/// entry for every float parameter of a module.
///
/// Displayed it is a table, in which parameters of a repeated pattern are one row; `{:#}` has a row
/// for each. Serialized it has everything.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_fp4_modules::{Fp4Config, Fp4Module};
///
/// let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
/// let report = layer.quantize_fp4(&Fp4Config::nvfp4())?;
/// assert_eq!(report.bytes_before(), 4 * (64 * 32 + 32)); // with the bias
/// assert!(report.bytes_after() < report.bytes_before() / 5);
/// let weight = report.get("weight").unwrap();
/// assert!(weight.is_quantized() && weight.bits_per_value() < 4.6);
/// assert!(weight.relative_error().unwrap() < 0.2);
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Fp4Report {
    /// Every float parameter, in the order of the module.
    pub parameters: Vec<ParameterReport>,
    /// Parts of the configuration that nothing uses
    /// ([`Unused::Report`](crate::Unused::Report)), and weights that were to share a tensor scale
    /// with siblings that are not selected.
    #[serde(default)]
    pub unused: Vec<String>,
}

/// Report entry for a parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ParameterReport {
    /// Path in the module.
    pub path: String,
    /// Name of the struct that holds it.
    pub container: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its dtype.
    pub dtype: String,
    /// Quantized, trained, adapted or kept.
    pub outcome: Outcome,
    /// Bytes of the dense values.
    pub bytes_before: usize,
    /// Bytes of what is stored now.
    pub bytes_after: usize,
}

/// Outcome for a parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Outcome {
    /// It is packed now.
    Quantized {
        /// Format, rule, blocks and the method that chose scales and codes.
        scheme: Fp4Scheme,
        /// The method asked for.
        asked: Method,
        /// Why the method is not the one asked for, for all of the weight or for some slices of it.
        fallback: Option<Fallback>,
        /// Axis that its blocks run along.
        axis: usize,
        /// The group of parameters whose tensor scale it shares.
        shares_scale_with: Option<String>,
        /// Error of the values that `val()` returns; infinite if one is infinite in its dtype.
        weight_error: SquaredError,
        /// Error of the outputs of its layer for the calibrated inputs, if they were measured; see
        /// [`ParameterReport::relative_output_error`].
        output_error: Option<SquaredError>,
        /// How products with it run.
        products: MatmulPath,
    },
    /// It is packed now, with codes and scales that were provided.
    Provided {
        /// Format of the codes.
        format: Fp4Format,
        /// Elements that share a block scale.
        block_size: usize,
        /// Axis that its blocks run along.
        axis: usize,
        /// Error of the values that `val()` returns, if the dense values were read.
        weight_error: Option<SquaredError>,
        /// How products with it run.
        products: MatmulPath,
    },
    /// It is used as if it were, and trained.
    FakeQuantized {
        /// Format, rule and blocks.
        scheme: Fp4Scheme,
        /// Axis that its blocks run along.
        axis: usize,
        /// Set if its tensor scale is trained too.
        learned: bool,
    },
    /// It has an adapter now, which is trained: `val()` is the weight `+ scale a b`.
    Adapted {
        /// Columns of `a` and rows of `b`.
        rank: usize,
        /// Multiplier of the product of the factors.
        scale: f64,
    },
    /// It is dense, and its adapter was added to it.
    Merged,
    /// It was not changed; [`lora_fp4`](crate::Fp4Module::lora_fp4) froze it.
    Kept {
        /// Why.
        reason: KeepReason,
    },
}

/// Sums of squares: of the differences that quantization made, and of the original values.
///
/// A sum that is not finite is infinite, never NaN. JSON has null in its place.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SquaredError {
    /// Sum of the squared differences.
    #[serde(with = "infinite_as_null")]
    pub error: f64,
    /// Sum of the squared original values.
    #[serde(with = "infinite_as_null")]
    pub energy: f64,
}

impl SquaredError {
    /// Makes the two of the sums `[error, energy]`.
    pub(crate) fn new(sums: [f64; 2]) -> Self {
        let [error, energy] = sums.map(|sum| if sum.is_nan() { f64::INFINITY } else { sum });
        Self { error, energy }
    }

    /// Returns `sqrt(error / energy)`: 0 without any error, NaN if the energy is infinite.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Fp4Config, Fp4Module, Outcome};
    ///
    /// let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
    /// let report = layer.quantize_fp4(&Fp4Config::nvfp4())?;
    /// let weight = report.get("weight").unwrap();
    /// if let Outcome::Quantized { weight_error, .. } = &weight.outcome {
    ///     assert_eq!(weight.relative_error(), Some(weight_error.relative()));
    /// }
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    #[must_use]
    pub fn relative(&self) -> f64 {
        // Rounding may leave less than 0 of a sum.
        if self.error <= 0.0 {
            0.0
        } else if self.energy.is_infinite() {
            f64::NAN
        } else {
            (self.error / self.energy).sqrt()
        }
    }

    /// Adds up errors of several weights; nothing without any.
    pub(crate) fn sum(errors: impl Iterator<Item = Self>) -> Option<Self> {
        errors.reduce(|sum, one| Self {
            error: sum.error + one.error,
            energy: sum.energy + one.energy,
        })
    }
}

mod infinite_as_null {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        value.is_finite().then_some(value).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(value: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(value)?.unwrap_or(f64::INFINITY))
    }
}

/// Reason for which a weight, or a part of it, got the scales with the smallest squared error
/// instead of the scales that a method finds by statistics of inputs.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Fallback {
    /// The calibration has no inputs of it along its blocked axis, or only zeros.
    NoInputs,
    /// The calibration has blocks of `X^T X` where the method needs all of it, or blocks of another
    /// size.
    OtherBlocks,
    /// Some slices over its leading axes, such as experts, had no inputs, or only zeros.
    Slices {
        /// Their numbers.
        without_inputs: Vec<usize>,
    },
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoInputs => write!(f, "no calibrated inputs"),
            Self::OtherBlocks => write!(f, "calibrated for another method or block size"),
            Self::Slices { without_inputs } => write!(f, "no inputs of slices {without_inputs:?}"),
        }
    }
}

/// Why a parameter was not changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum KeepReason {
    /// The type of its layer, the container, is not one that is quantized;
    /// [`Fp4Config::container`](crate::Fp4Config::container) adds it.
    Container,
    /// It has fewer than two axes.
    Rank,
    /// No pattern includes it.
    NotIncluded,
    /// A pattern excludes it.
    Excluded {
        /// The pattern.
        pattern: String,
    },
    /// It belongs to one of the first layers.
    FirstLayers {
        /// Its layer.
        layer: usize,
    },
    /// It belongs to one of the last layers.
    LastLayers {
        /// Its layer.
        layer: usize,
    },
    /// No whole number of blocks, and the configuration says to skip.
    Indivisible {
        /// The blocked axis.
        axis: usize,
        /// Its length.
        length: usize,
        /// Elements of a block.
        block_size: usize,
    },
    /// A [recipe](crate::Fp4Config::of_recipe) keeps such weights of files, or could not quantize
    /// it there.
    AsInFiles {
        /// Why, as `fp4 quantize` says it.
        reason: String,
    },
    /// It is quantized to FP4 already.
    AlreadyQuantized,
    /// It was trained without fake quantization.
    NotFakeQuantized,
    /// No codes were provided for it.
    NotProvided,
    /// It has no adapter to be merged.
    NotAdapted,
    /// The parameter group of the adapters does not have it.
    NotInGroup,
    /// One of its axes has the length 0.
    Empty,
    /// Something else is attached to it.
    Reparameterized {
        /// Its name.
        name: String,
    },
    /// It belongs to something that is attached to another parameter.
    PartOfReparameterization,
}

impl fmt::Display for KeepReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Container => write!(f, "its layer type is not selected"),
            Self::Rank => write!(f, "not a matrix"),
            Self::NotIncluded => write!(f, "not included"),
            Self::Excluded { pattern } => write!(f, "excluded by `{pattern}`"),
            Self::FirstLayers { layer } => write!(f, "layer {layer}, among the first"),
            Self::LastLayers { layer } => write!(f, "layer {layer}, among the last"),
            Self::Indivisible { axis, length, block_size } => {
                write!(f, "axis {axis} of {length} is not a multiple of {block_size}")
            }
            Self::AsInFiles { reason } => f.write_str(reason),
            Self::AlreadyQuantized => write!(f, "quantized before"),
            Self::NotFakeQuantized => write!(f, "not fake-quantized"),
            Self::NotProvided => write!(f, "no codes provided"),
            Self::NotAdapted => write!(f, "no adapter"),
            Self::NotInGroup => write!(f, "not in the group"),
            Self::Empty => write!(f, "no values"),
            Self::Reparameterized { name } => write!(f, "has `{name}` attached"),
            Self::PartOfReparameterization => write!(f, "belongs to an attachment"),
        }
    }
}

impl ParameterReport {
    /// Number of values.
    #[must_use]
    pub fn values(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns true if it was quantized.
    #[must_use]
    pub fn is_quantized(&self) -> bool {
        matches!(self.outcome, Outcome::Quantized { .. } | Outcome::Provided { .. })
    }

    /// Stored bits per value; 0 without values.
    #[must_use]
    pub fn bits_per_value(&self) -> f64 {
        bits(self.bytes_after, self.values())
    }

    /// Returns `|quantized - dense| / |dense|`, Euclidean: 0 for an all-zero weight, nothing for a
    /// parameter that is not packed or whose dense values were not read.
    #[must_use]
    pub fn relative_error(&self) -> Option<f64> {
        self.weight_error().map(|error| error.relative())
    }

    /// Returns `|X (quantized - dense)| / |X dense|` for the calibrated inputs X, Euclidean: how
    /// far the outputs of the layer are off.
    ///
    /// Known where the method asked for takes whole Gram matrices, as GPTQ does, and where a budget
    /// has measured it: for other methods it would take as long as their search. CPUs take its
    /// products in f64, other devices in f32, of sums over the inputs that begin in f32: terms that
    /// cancel leave a small error imprecise, and 0 if rounding makes the sum negative.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_fp4_modules::{Calibration, Fp4Config, Fp4Module, Method};
    ///
    /// let device = Device::flex();
    /// let mut layer = LinearConfig::new(64, 32).init(&device);
    /// let inputs = Tensor::<2>::random([256, 64], Distribution::Normal(0.0, 1.0), &device);
    /// let mut calibration = Calibration::new();
    /// calibration.add("weight", 0, inputs)?;
    /// let config = Fp4Config::nvfp4().method(Method::GPTQ).with_calibration(&calibration);
    /// let report = layer.quantize_fp4(&config)?;
    /// let error = report.get("weight").unwrap().relative_output_error();
    /// assert!(error.unwrap() < 0.2);
    /// assert_eq!(report.relative_output_error(), error); // of the only layer
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    #[must_use]
    pub fn relative_output_error(&self) -> Option<f64> {
        self.output_error().map(|error| error.relative())
    }

    /// Returns how products with it run; nothing if it is not packed.
    #[must_use]
    pub fn products(&self) -> Option<&MatmulPath> {
        match &self.outcome {
            Outcome::Quantized { products, .. } | Outcome::Provided { products, .. } => {
                Some(products)
            }
            _ => None,
        }
    }

    pub(crate) fn weight_error(&self) -> Option<SquaredError> {
        match self.outcome {
            Outcome::Quantized { weight_error, .. } => Some(weight_error),
            Outcome::Provided { weight_error, .. } => weight_error,
            _ => None,
        }
    }

    pub(crate) fn output_error(&self) -> Option<SquaredError> {
        match self.outcome {
            Outcome::Quantized { output_error, .. } => output_error,
            _ => None,
        }
    }
}

fn bits(bytes: usize, values: usize) -> f64 {
    if values == 0 { 0.0 } else { 8.0 * bytes as f64 / values as f64 }
}

impl Fp4Report {
    /// Returns the entry of the parameter with a path, such as `layers.0.weight`.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<&ParameterReport> {
        self.parameters.iter().find(|parameter| parameter.path == path)
    }

    /// The parameters that were quantized.
    pub fn quantized(&self) -> impl Iterator<Item = &ParameterReport> {
        self.parameters.iter().filter(|parameter| parameter.is_quantized())
    }

    /// The parameters that [`lora_fp4`](crate::Fp4Module::lora_fp4) gave an adapter.
    pub fn adapted(&self) -> impl Iterator<Item = &ParameterReport> {
        let adapted = |one: &&ParameterReport| matches!(one.outcome, Outcome::Adapted { .. });
        self.parameters.iter().filter(adapted)
    }

    /// Bytes of all float parameters before.
    #[must_use]
    pub fn bytes_before(&self) -> usize {
        self.parameters.iter().map(|parameter| parameter.bytes_before).sum()
    }

    /// Bytes of all float parameters now.
    #[must_use]
    pub fn bytes_after(&self) -> usize {
        self.parameters.iter().map(|parameter| parameter.bytes_after).sum()
    }

    /// Stored bits per quantized value; 0 without any.
    #[must_use]
    pub fn bits_per_weight(&self) -> f64 {
        let (bytes, values) = self.quantized().fold((0, 0), |(bytes, values), parameter| {
            (bytes + parameter.bytes_after, values + parameter.values())
        });
        bits(bytes, values)
    }

    /// Relative error over all quantized values whose dense ones are known.
    pub fn relative_error(&self) -> f64 {
        let errors = self.parameters.iter().filter_map(ParameterReport::weight_error);
        SquaredError::sum(errors).map_or(0.0, |error| error.relative())
    }

    /// Relative error over the outputs of all layers whose calibrated inputs are known; nothing
    /// without any.
    pub fn relative_output_error(&self) -> Option<f64> {
        let errors = self.parameters.iter().filter_map(ParameterReport::output_error);
        SquaredError::sum(errors).map(|error| error.relative())
    }

    /// Returns true if products with every packed weight run straight from its codes, for any
    /// number of rows of input.
    #[must_use]
    pub fn multiplies_codes(&self) -> bool {
        self.quantized().all(|parameter| parameter.products() == Some(&MatmulPath::FromCodes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinite_errors_and_those_that_are_not_known_come_back_from_json() {
        let sums = |error, energy| SquaredError::new([error, energy]);
        let outcome = |weight_error| Outcome::Provided {
            format: Fp4Format::NvFp4,
            block_size: 16,
            axis: 0,
            weight_error,
            products: MatmulPath::FromCodes,
        };
        for weight_error in [
            None,
            Some(sums(0.5, 2.0)),
            Some(sums(f64::INFINITY, 2.0)),
            Some(sums(0.5, f64::INFINITY)),
            Some(sums(f64::INFINITY, f64::INFINITY)),
            Some(sums(f64::NAN, f64::NAN)),
        ] {
            let json = serde_json::to_string(&outcome(weight_error)).expect("plain data");
            let found: Outcome = serde_json::from_str(&json).expect(&json);
            assert_eq!(found, outcome(weight_error), "{json}");
        }
    }

    #[test]
    fn an_error_relative_to_more_than_is_known_is_not_a_number() {
        let relative = |error, energy| SquaredError::new([error, energy]).relative();
        assert_eq!(relative(0.25, 4.0), 0.25);
        assert_eq!((relative(0.0, 0.0), relative(-1e-9, 1.0)), (0.0, 0.0));
        assert_eq!(relative(f64::NAN, 1.0), f64::INFINITY);
        assert!(relative(1.0, f64::INFINITY).is_nan());
    }
}
