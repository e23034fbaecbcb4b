//! [`Fp4Report`]: what was done to every parameter, or why not.

use core::fmt;

use burn_fp4_ops::search::ChosenBy;
use burn_fp4_ops::{Fp4Format, Fp4Scheme, MatmulPath};
use serde::{Deserialize, Deserializer, Serialize};

/// What [`quantize_fp4`](crate::Fp4Module::quantize_fp4), or one of its relatives, did to every
/// float parameter of a module.
///
/// Displayed it is a table; serialized it is all there is to know.
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

/// What was done to a parameter.
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
    /// What was done.
    pub outcome: Outcome,
    /// Bytes of the dense values.
    pub bytes_before: usize,
    /// Bytes of what is stored now.
    pub bytes_after: usize,
}

/// Whether a parameter was quantized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Outcome {
    /// It is packed now.
    Quantized {
        /// Format, rule and blocks.
        scheme: Fp4Scheme,
        /// How scales and codes were to be chosen.
        asked: ChosenBy,
        /// How they were.
        chosen_by: ChosenBy,
        /// Why that is not what was asked for, for all of the weight or for some slices of it.
        fallback: Option<Fallback>,
        /// Axis that its blocks run along.
        axis: usize,
        /// The group of parameters whose tensor scale it shares.
        shares_scale_with: Option<String>,
        /// Sum of squared differences between the values before and now, as `val()` gives them:
        /// infinite if one is infinite in its dtype, which JSON says by null.
        #[serde(deserialize_with = "infinite_if_null")]
        squared_error: f64,
        /// Sum of squares of the values before.
        energy: f64,
        /// Whether products run straight from its codes.
        products: MatmulPath,
    },
    /// It is packed now, with codes and scales that were handed over.
    Given {
        /// What the bits mean.
        format: Fp4Format,
        /// Elements that share a block scale.
        block_size: usize,
        /// Axis that its blocks run along.
        axis: usize,
        /// Sum of squared differences between the values before and now, if the values before were
        /// looked at.
        squared_error: Option<f64>,
        /// Sum of squares of the values before, if they were looked at.
        energy: Option<f64>,
        /// Whether products run straight from its codes.
        products: MatmulPath,
    },
    /// It is used as if it were, and trained.
    FakeQuantized {
        /// Format, rule and blocks.
        scheme: Fp4Scheme,
        /// Axis that its blocks run along.
        axis: usize,
        /// Whether its tensor scale is trained too.
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
    /// It was left as it was; by [`lora_fp4`](crate::Fp4Module::lora_fp4) it was frozen.
    Kept {
        /// Why.
        reason: Reason,
    },
}

/// Why a weight, or a part of it, got the scales with the smallest squared error instead of those
/// that a method finds by statistics of inputs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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

/// Why a parameter was left as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Reason {
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
    /// It is quantized to FP4 already.
    AlreadyQuantized,
    /// It was trained without fake quantization.
    NotFakeQuantized,
    /// No codes were given for it.
    NotGiven,
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

impl fmt::Display for Reason {
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
            Self::AlreadyQuantized => write!(f, "quantized before"),
            Self::NotFakeQuantized => write!(f, "not fake-quantized"),
            Self::NotGiven => write!(f, "no codes given"),
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
    pub fn values(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it was quantized.
    pub fn is_quantized(&self) -> bool {
        matches!(self.outcome, Outcome::Quantized { .. } | Outcome::Given { .. })
    }

    /// Stored bits per value; 0 without values.
    pub fn bits_per_value(&self) -> f64 {
        bits(self.bytes_after, self.values())
    }

    /// `|quantized - dense| / |dense|`, Euclidean; 0 for an all-zero weight; nothing if it was
    /// kept, or if the dense values were not looked at.
    pub fn relative_error(&self) -> Option<f64> {
        self.squares().map(|(error, energy)| relative(error, energy))
    }

    /// Whether products run straight from the codes; nothing if it is not packed.
    pub fn products(&self) -> Option<&MatmulPath> {
        match &self.outcome {
            Outcome::Quantized { products, .. } | Outcome::Given { products, .. } => Some(products),
            _ => None,
        }
    }

    /// Sums of squared errors and of squared values, if known.
    fn squares(&self) -> Option<(f64, f64)> {
        match self.outcome {
            Outcome::Quantized { squared_error, energy, .. } => Some((squared_error, energy)),
            Outcome::Given { squared_error, energy, .. } => Some((squared_error?, energy?)),
            _ => None,
        }
    }
}

fn infinite_if_null<'de, D: Deserializer<'de>>(value: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or(f64::INFINITY))
}

fn bits(bytes: usize, values: usize) -> f64 {
    if values == 0 { 0.0 } else { 8.0 * bytes as f64 / values as f64 }
}

fn relative(squared_error: f64, energy: f64) -> f64 {
    if squared_error == 0.0 { 0.0 } else { (squared_error / energy).sqrt() }
}

impl Fp4Report {
    /// What was done to the parameter with a path, such as `layers.0.weight`.
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
    pub fn bytes_before(&self) -> usize {
        self.parameters.iter().map(|parameter| parameter.bytes_before).sum()
    }

    /// Bytes of all float parameters now.
    pub fn bytes_after(&self) -> usize {
        self.parameters.iter().map(|parameter| parameter.bytes_after).sum()
    }

    /// Stored bits per quantized value; 0 without any.
    pub fn bits_per_weight(&self) -> f64 {
        let (bytes, values) = self.quantized().fold((0, 0), |(bytes, values), parameter| {
            (bytes + parameter.bytes_after, values + parameter.values())
        });
        bits(bytes, values)
    }

    /// Relative error over all quantized values whose dense ones are known.
    pub fn relative_error(&self) -> f64 {
        let squares = self.parameters.iter().filter_map(ParameterReport::squares);
        let (error, energy) = squares.fold((0.0, 0.0), |sums: (f64, f64), (error, energy)| {
            (sums.0 + error, sums.1 + energy)
        });
        relative(error, energy)
    }

    /// Whether products with every packed weight run straight from its codes, for any number of
    /// rows of input.
    pub fn multiplies_codes(&self) -> bool {
        self.quantized().all(|parameter| parameter.products() == Some(&MatmulPath::FromCodes))
    }
}
