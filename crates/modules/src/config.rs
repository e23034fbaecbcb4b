//! Which parameters of a module are quantized, and how.

use burn_fp4_ops::search::Method;
use burn_fp4_ops::search::formats::Fp4Format;
use burn_fp4_ops::{Fp4Scheme, Hadamard, Saturated, ScaleRule};
use burn_fp4_policy::{Policy, Preset, Recipe, RecipeError};
use serde::{Deserialize, Serialize};

use crate::budget::Budget;
use crate::checkpoint::map::{self, CheckpointMap};
use crate::error::Fp4Error;
use crate::statistics::Calibration;

/// Handling of a selected weight whose blocked axis is not a multiple of the block size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Indivisible {
    /// An error that names the parameter.
    #[default]
    Error,
    /// Leave the weight dense and say so in the report.
    Skip,
}

/// Handling of a part of a configuration that nothing uses: a pattern, an added container or an
/// override that fits no parameter, a group of weights of which nowhere two are selected, a path of
/// such a group that is no selected weight, a calibration that no method reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unused {
    /// An error that names it: it is most likely misspelt.
    #[default]
    Error,
    /// A line in the report.
    Report,
}

/// A choice for some of the weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Override {
    /// Pattern of the paths of these weights.
    pub pattern: String,
    /// Difference from the scheme of the other weights.
    pub change: Change,
}

/// Difference of an [`Override`] from the scheme of a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// They stay dense.
    Dense,
    /// Another format, with its own rule and block size. The method stays.
    Format(Fp4Format),
    /// Another method. Format, rule and blocks stay.
    Method(Method),
    /// Another scheme, with its own method.
    Scheme(Fp4Scheme),
}

impl Change {
    /// Returns the scheme of weights with this change from `base`; `None` for dense ones.
    #[must_use]
    pub fn of(self, base: &Fp4Scheme) -> Option<Fp4Scheme> {
        Some(match self {
            Self::Dense => return None,
            Self::Format(format) if format == base.format() => *base,
            Self::Format(format) => Fp4Scheme::of(ScaleRule::of_format(format))
                .with_method(base.method)
                .with_hadamard(base.hadamard)
                .with_non_finite(base.non_finite),
            Self::Method(method) => base.with_method(method),
            Self::Scheme(scheme) => scheme,
        })
    }
}

impl From<Fp4Format> for Change {
    fn from(format: Fp4Format) -> Self {
        Self::Format(format)
    }
}

impl From<Method> for Change {
    fn from(method: Method) -> Self {
        Self::Method(method)
    }
}

impl From<Fp4Scheme> for Change {
    fn from(scheme: Fp4Scheme) -> Self {
        Self::Scheme(scheme)
    }
}

/// A container type whose weights are quantized.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Container {
    /// Name of the struct that holds the parameter, such as `Linear`.
    pub name: String,
    /// Axis of its weights that a product contracts, which the blocks run along.
    pub axis: usize,
}

/// Choices of a [`Recipe`] for which an [`Fp4Config`] has no other field, and the names of weights
/// in files, by which a recipe decides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct FileChoices {
    /// Names and axes of the module's weights in files, which patterns match instead of paths.
    pub map: CheckpointMap,
    /// [`Recipe::dialect`].
    pub dialect: Option<String>,
    /// [`Recipe::preset`].
    pub preset: Option<Preset>,
    /// [`Recipe::together`].
    pub together: Option<bool>,
}

/// Which parameters of a module are quantized, and how.
///
/// Paths are as in Burn's records, such as `layers.0.attention.query.weight`. Patterns have the
/// [syntax of recipes](burn_fp4_policy#patterns), and match a path or that of its module.
///
/// ```
/// use burn::nn::transformer::TransformerEncoderConfig;
/// use burn::tensor::Device;
/// use burn_fp4_modules::{Fp4Config, Fp4Module, ops::Fp4Scheme};
///
/// // Four blocks of six linear layers.
/// let mut encoder = TransformerEncoderConfig::new(32, 64, 4, 4).init(&Device::flex());
/// let config = Fp4Config::nvfp4()
///     .exclude("**.output.*")
///     .with("**.linear_outer.*", Fp4Scheme::mxfp4())
///     .keep_first(1).keep_last(1)
///     .share_scale(["query", "key", "value"]);
/// let report = encoder.quantize_fp4(&config)?;
/// assert_eq!(report.quantized().count(), 2 * 5);
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
///
/// Other containers than linear layers, whatever their shapes:
///
/// ```
/// use burn::nn::EmbeddingConfig;
/// use burn::tensor::Device;
/// use burn_fp4_modules::{Fp4Config, Fp4Module, Indivisible, Unused, ops::Fp4Scheme};
///
/// let table = |channels| EmbeddingConfig::new(10, channels).init(&Device::flex());
/// let config = Fp4Config::new(Fp4Scheme::mxfp4())
///     .without_container("Linear")
///     .container("Embedding", 1)
///     .include("*.weight")
///     .indivisible(Indivisible::Skip) // blocks of 32 do not divide 40
///     .unused(Unused::Report);
/// let report = vec![table(64), table(40)].quantize_fp4(&config)?;
/// assert_eq!(report.quantized().count(), 1);
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
///
/// For training:
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_fp4_modules::{FakeQuantWeight, Fp4Config, Fp4Module, ops::Saturated};
///
/// let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
/// let config = Fp4Config::nvfp4().saturated(Saturated::Zero).learn_tensor_scale();
/// layer.fake_quantize_fp4(&config)?;
/// let fake = layer.weight.reparameterization::<FakeQuantWeight>().unwrap();
/// assert!(fake.amax().is_some());
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[must_use]
#[non_exhaustive]
pub struct Fp4Config {
    /// How each weight is quantized.
    pub scheme: Fp4Scheme,
    /// Choices for some weights. If several fit a path, the last one wins.
    pub overrides: Vec<Override>,
    /// Container types whose weights of rank 2 or more are quantized, by default
    /// [`CONTAINERS`](Self::CONTAINERS).
    pub containers: Vec<Container>,
    /// If not empty, only paths that match one of these patterns are quantized.
    pub include: Vec<String>,
    /// Paths that match one of these patterns stay dense.
    pub exclude: Vec<String>,
    /// Layers at the start that stay dense. A layer is an element of the outermost list (`Vec` or
    /// array) on a parameter's path; in a module without lists, each selected weight is a layer.
    pub keep_first: usize,
    /// Layers at the end that stay dense.
    pub keep_last: usize,
    /// Memory that the selected weights may take. Each becomes one of [`Candidate::DEFAULT`], so
    /// that the errors of outputs are the smallest within it.
    ///
    /// [`Candidate::DEFAULT`]: crate::Candidate::DEFAULT
    pub budget: Option<Budget>,
    /// Names of sibling modules whose weights share one tensor scale, as kernels need it that fuse
    /// their products.
    pub share_scale: Vec<Vec<String>>,
    /// Whole paths of weights that share one tensor scale, wherever they are in the module. They
    /// count before [`share_scale`](Self::share_scale).
    pub share_scale_of: Vec<Vec<String>>,
    /// Handling of a weight that blocks do not divide.
    pub indivisible: Indivisible,
    /// Handling of a part of this configuration that nothing uses.
    pub unused: Unused,
    /// Set for the configuration [of a recipe](Self::of_recipe): the weights have the names, roles,
    /// layers and families that they have in files.
    pub files: Option<FileChoices>,
    /// For fake quantization: the gradient of elements that saturate.
    pub saturated: Saturated,
    /// For fake quantization: whether the tensor scale is a parameter to be trained.
    pub learn_tensor_scale: bool,
    /// Statistics of the inputs of layers. They are not serialized.
    #[serde(skip)]
    pub calibration: Calibration,
}

impl Default for Fp4Config {
    fn default() -> Self {
        Self::nvfp4()
    }
}

impl Fp4Config {
    /// Container types that are quantized without being asked for, and the axis of their blocks:
    /// Burn's linear layer and the layers of this crate.
    pub const CONTAINERS: [(&str, usize); 4] = map::CONTAINERS;

    /// Returns the axis that the blocks of a container's weights run along, if Burn or this crate
    /// has the container. Rows of an embedding are looked up whole.
    pub(crate) fn axis_of_container(name: &str) -> Option<usize> {
        let mut known = Self::CONTAINERS.into_iter().chain([("Embedding", 1)]);
        known.find(|(known, _)| *known == name).map(|(_, axis)| axis)
    }

    /// The weights of every `Linear`, in NVFP4 as TransformerEngine does it.
    pub fn nvfp4() -> Self {
        Self::new(Fp4Scheme::nvfp4())
    }

    /// The weights of every `Linear`, in MXFP4 by the rule of the OCP specification.
    pub fn mxfp4() -> Self {
        Self::new(Fp4Scheme::mxfp4())
    }

    /// The weights of every `Linear`, by a scheme.
    pub fn new(scheme: Fp4Scheme) -> Self {
        Self {
            scheme,
            overrides: Vec::new(),
            containers: Self::CONTAINERS
                .map(|(name, axis)| Container { name: name.to_owned(), axis })
                .into(),
            include: Vec::new(),
            exclude: Vec::new(),
            keep_first: 0,
            keep_last: 0,
            budget: None,
            share_scale: Vec::new(),
            share_scale_of: Vec::new(),
            indivisible: Indivisible::Error,
            unused: Unused::Error,
            files: None,
            saturated: Saturated::PassThrough,
            learn_tensor_scale: false,
            calibration: Calibration::new(),
        }
    }

    /// Makes the configuration of a recipe of `fp4 quantize`. It quantizes a module as the command
    /// quantizes its files. Weights have the names that the map gives them in files; use that of
    /// [`save_fp4`](crate::Fp4Module::save_fp4). Presets, layers, families and the constraints of
    /// the dialect are the same as for files.
    /// [`Fp4Report::save_recipe`](crate::Fp4Report::save_recipe) has an example.
    ///
    /// Patterns that are added later, by [`exclude`](Self::exclude) or [`with`](Self::with), match
    /// names in files, too. Containers and shared tensor scales cannot be added: the map has the
    /// axes, and layers that engines fuse share a tensor scale, unless the recipe says `together =
    /// false`, or names a dialect of which readers do not need that. Statistics of inputs are
    /// handed over by [`with_calibration`](Self::with_calibration): the recipe's `calibration` is a
    /// file of the command.
    ///
    /// Quantizing a module fails with [`Fp4Error::Checkpoint`] for names that match nothing, a
    /// dialect that is unknown, formats that fused layers cannot have, and if nothing is selected;
    /// with [`Fp4Error::RecipeParameter`] for a parameter that is several tensors in files of
    /// several schemes; and for a map that does not fit, as [`Fp4Report::recipe`].
    ///
    /// [`Fp4Report::recipe`]: crate::Fp4Report::recipe
    ///
    /// # Errors
    /// [`Fp4Error::Recipe`] for choices that do not go together, and for the preset `miles`, which
    /// is for files.
    pub fn of_recipe(recipe: &Recipe, map: &CheckpointMap) -> Result<Self, Fp4Error> {
        let (base, schemes) = (recipe.base()?, recipe.schemes()?);
        if let Some(preset @ Preset::Miles) = recipe.preset {
            return Err(RecipeError::Preset(preset.to_string()).into());
        }
        let entries = recipe.weights.iter().zip(schemes).flat_map(|(entry, scheme)| {
            let change = scheme.map_or(Change::Dense, Change::Scheme);
            // The last override wins, and the first name of an entry is the reason to keep.
            let names = entry.names.iter().rev();
            names.map(move |name| Override { pattern: name.clone(), change })
        });
        Ok(Self {
            overrides: entries.collect(),
            include: recipe.only.clone(),
            exclude: recipe.keep.clone(),
            keep_first: recipe.first_layers_high_precision.unwrap_or(0),
            keep_last: recipe.last_layers_high_precision.unwrap_or(0),
            indivisible: Indivisible::Skip,
            files: Some(FileChoices {
                map: map.clone(),
                dialect: recipe.dialect.clone(),
                preset: recipe.preset,
                together: recipe.together,
            }),
            ..Self::new(base)
        })
    }

    /// The choices for weights, as the policy has them.
    pub(crate) fn policy(&self) -> Policy {
        let files = self.files.as_ref();
        let recipe = Recipe {
            keep: self.exclude.clone(),
            only: self.include.clone(),
            first_layers_high_precision: Some(self.keep_first),
            last_layers_high_precision: Some(self.keep_last),
            dialect: files.and_then(|files| files.dialect.clone()),
            preset: files.and_then(|files| files.preset),
            together: files.and_then(|files| files.together),
            ..Recipe::default()
        };
        let scheme = |one: &Override| (one.pattern.clone(), one.change.of(&self.scheme));
        Policy::with_schemes(recipe, self.scheme, self.overrides.iter().map(scheme))
    }

    /// This configuration with one scheme for all that it quantizes.
    pub(crate) fn with_one_scheme(&self, scheme: Fp4Scheme) -> Self {
        let mut config = Self { scheme, ..self.clone() };
        for one in config.overrides.iter_mut().filter(|one| one.change != Change::Dense) {
            one.change = Change::Scheme(scheme);
        }
        config
    }

    /// This configuration with statistics of the inputs of layers, which the methods need that are
    /// [`calibrated`](burn_fp4_ops::search::MethodRow::calibrated). A weight without statistics
    /// falls back to [`Method::FALLBACK`], and the report says so; if no selected weight has any,
    /// that is an error.
    pub fn with_calibration(&self, calibration: &Calibration) -> Self {
        Self { calibration: calibration.clone(), ..self.clone() }
    }

    /// Sets the method of all weights without an [override](Self::with) that has its own method.
    /// The rule and the blocks of the scheme stay.
    ///
    /// Methods that are [`calibrated`](burn_fp4_ops::search::MethodRow::calibrated) need statistics
    /// of inputs: [`with_calibration`](Self::with_calibration), or
    /// [`quantize_fp4_sequential`](crate::Fp4Module::quantize_fp4_sequential). Weights have to be
    /// finite for GPTQ, whatever the scheme says. A method that does not go with the scheme is an
    /// error once a module is quantized: [`Fp4Error::Scheme`](crate::Fp4Error::Scheme).
    ///
    /// ```
    /// use burn_fp4_modules::{Fp4Config, Method, ops::{Gptq, search::Sse}};
    ///
    /// let config = Fp4Config::nvfp4().method(Method::Sse(Sse::TensorScale));
    /// let by_name = Fp4Config::nvfp4().method("sse-tensor-scale".parse()?);
    /// assert_eq!(config, by_name);
    /// let damped = Method::Gptq(Gptq { damping: 0.05, ..Gptq::DEFAULT });
    /// assert_eq!(Fp4Config::nvfp4().method(damped).scheme.method, damped);
    /// # Ok::<(), burn_fp4_modules::ops::search::SearchError>(())
    /// ```
    pub fn method(mut self, method: Method) -> Self {
        self.scheme = self.scheme.with_method(method);
        self
    }

    /// Quantizes weights after a Hadamard transform along their inputs, which spreads outliers. The
    /// layers stay as they are: their product transforms its input alike, and `val()` transforms
    /// back. It is for GPTQ: without GPTQ a language model was no better. Weights whose inputs the
    /// size of the transform does not divide are handled as those that blocks do not divide.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Fp4Config, Fp4Module, PackedWeight, ops::Hadamard};
    ///
    /// let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
    /// let config = Fp4Config::mxfp4().hadamard(Hadamard::of_size(32).expect("a known size"));
    /// layer.quantize_fp4(&config)?;
    /// let packed = layer.weight.reparameterization::<PackedWeight>().unwrap();
    /// assert_eq!(packed.layout().hadamard, config.scheme.hadamard);
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    pub fn hadamard(mut self, hadamard: Hadamard) -> Self {
        self.scheme = self.scheme.with_hadamard(Some(hadamard));
        self
    }

    /// Sets the gradient of elements that saturate under fake quantization.
    pub fn saturated(mut self, saturated: Saturated) -> Self {
        self.saturated = saturated;
        self
    }

    /// Makes the tensor scale of each fake-quantized weight a parameter to be trained.
    pub fn learn_tensor_scale(mut self) -> Self {
        self.learn_tensor_scale = true;
        self
    }

    /// Adds a container type whose weights are quantized along an axis, or changes its axis.
    pub fn container(mut self, name: impl Into<String>, axis: usize) -> Self {
        let name = name.into();
        self.containers.retain(|container| container.name != name);
        self.containers.push(Container { name, axis });
        self
    }

    /// Removes a container type.
    pub fn without_container(mut self, name: &str) -> Self {
        self.containers.retain(|container| container.name != name);
        self
    }

    /// Adds a pattern; once there is one, only matching paths are quantized.
    pub fn include(mut self, pattern: impl Into<String>) -> Self {
        self.include.push(pattern.into());
        self
    }

    /// Adds a pattern of paths that stay dense.
    pub fn exclude(mut self, pattern: impl Into<String>) -> Self {
        self.exclude.push(pattern.into());
        self
    }

    /// Keeps layers at the start dense.
    pub fn keep_first(mut self, layers: usize) -> Self {
        self.keep_first = layers;
        self
    }

    /// Keeps layers at the end dense.
    pub fn keep_last(mut self, layers: usize) -> Self {
        self.keep_last = layers;
        self
    }

    /// Chooses one of [`Candidate::DEFAULT`](crate::Candidate::DEFAULT) for each selected weight,
    /// or group that has to stay whole, so that all of them take no more than this and the sum of
    /// the relative errors of their outputs is small: what
    /// [`fp4_sensitivity`](crate::Fp4Module::fp4_sensitivity) and
    /// [`choose`](crate::Sensitivity::choose) do, with
    /// [`quantize_fp4`](crate::Fp4Module::quantize_fp4) in one call, whose report
    /// [saves](crate::Fp4Report::save_recipe) the choice. It needs a calibration with whole
    /// matrices `X^T X`, whatever the method does. The candidates' schemes take the place of this
    /// configuration's, of which the method counts; overrides ([`with`](Self::with)), and a budget
    /// that all weights fit as they are, are errors. The errors of outputs say nothing of the loss;
    /// where there is one,
    /// [`fp4_sensitivity_of_loss`](crate::Fp4Module::fp4_sensitivity_of_loss) chooses better.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_fp4_modules::{Budget, Calibration, Fp4Config, Fp4Module};
    ///
    /// let device = Device::flex();
    /// let mut layer = LinearConfig::new(64, 64).init(&device);
    /// let mut inputs = Calibration::new();
    /// inputs.add("weight", 0, Tensor::<2>::random([128, 64], Distribution::Default, &device))?;
    /// let config = Fp4Config::nvfp4().budget(Budget::BitsPerWeight(4.5));
    /// let report = layer.quantize_fp4(&config.with_calibration(&inputs))?;
    /// assert!(report.bits_per_weight() < 4.6);
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    pub fn budget(mut self, budget: Budget) -> Self {
        self.budget = Some(budget);
        self
    }

    /// Lets the weights of sibling modules with these names share a tensor scale, in every module
    /// that has two of them. A name may be the end of a path, such as `attention.query`. For
    /// weights that are no siblings there is [`share_scale_of`](Self::share_scale_of).
    pub fn share_scale(mut self, siblings: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.share_scale.push(siblings.into_iter().map(Into::into).collect());
        self
    }

    /// Lets the weights of these paths share a tensor scale, and no others. Paths are whole, such
    /// as `layers.0.attention.query.weight`. A path that is no selected weight counts as
    /// [unused](Self::unused); one that is here twice, or in two lists, is an
    /// [error](crate::Fp4Error::SharedScale).
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Fp4Config, Fp4Module};
    ///
    /// let device = Device::flex();
    /// let mut layers: Vec<_> = (0..3).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
    /// let config = Fp4Config::nvfp4().share_scale_of(["0.weight", "2.weight"]);
    /// let report = layers.quantize_fp4(&config)?;
    /// assert!(report.to_string().contains("{0.weight,2.weight}"));
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    pub fn share_scale_of(mut self, paths: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.share_scale_of.push(paths.into_iter().map(Into::into).collect());
        self
    }

    /// Quantizes the selected weights that a pattern fits with another format, method or scheme, or
    /// [keeps](Change::Dense) them. If several patterns fit, the last one wins.
    ///
    /// ```
    /// use burn_fp4_modules::{Change, Fp4Config, Method, ops::search::formats::Fp4Format};
    ///
    /// let config = Fp4Config::nvfp4()
    ///     .method(Method::GPTQ)
    ///     .with("**.down.*", Fp4Format::MxFp4) // with GPTQ too
    ///     .with("**.head.*", Method::SSE) // in NVFP4 too
    ///     .with("**.0.head.*", Change::Dense);
    /// let of = |at: usize| config.overrides[at].change.of(&config.scheme);
    /// let [down, head] = [0, 1].map(|at| of(at).expect("not dense"));
    /// assert_eq!((down.format(), down.method), (Fp4Format::MxFp4, Method::GPTQ));
    /// assert_eq!((head.format(), head.method), (Fp4Format::NvFp4, Method::SSE));
    /// assert_eq!(of(2), None);
    /// ```
    pub fn with(mut self, pattern: impl Into<String>, change: impl Into<Change>) -> Self {
        self.overrides.push(Override { pattern: pattern.into(), change: change.into() });
        self
    }

    /// Sets what happens to a part of this configuration that nothing uses.
    pub fn unused(mut self, unused: Unused) -> Self {
        self.unused = unused;
        self
    }

    /// Sets what happens to a weight that blocks do not divide.
    pub fn indivisible(mut self, indivisible: Indivisible) -> Self {
        self.indivisible = indivisible;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_come_back_from_json() {
        for row in Method::NAMED {
            let config = Fp4Config::nvfp4().method(row.method).with("a", row.method);
            let json = serde_json::to_string(&config).unwrap();
            assert_eq!(serde_json::from_str::<Fp4Config>(&json).unwrap(), config, "{json}");
        }
        let recipe = Recipe::parse("keep = ['a']\npreset = 'mlp-only'").unwrap();
        let map = CheckpointMap::new().rename("a", "b").experts("c", "d.{}").tie("e", "f");
        let config = Fp4Config::of_recipe(&recipe, &map).unwrap().with("*", Change::Dense);
        let json = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Fp4Config>(&json).unwrap(), config, "{json}");
        assert_eq!(serde_json::from_str::<Fp4Config>("{}").unwrap(), Fp4Config::default());
    }
}
