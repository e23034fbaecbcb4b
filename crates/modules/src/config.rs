//! Which parameters of a module are quantized, and how.

use burn_fp4_ops::search::{ChosenBy, Method};
use burn_fp4_ops::{Fp4Scheme, Gptq, Saturated, ScaleSearch};
use serde::{Deserialize, Serialize};

use crate::budget::Budget;
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
/// override that fits no parameter, a group of siblings of which nowhere two are selected, a
/// calibration that no method reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unused {
    /// An error that names it: it is most likely misspelt.
    #[default]
    Error,
    /// A line in the report.
    Report,
}

/// The part of a method that is not the search of a scheme: the variants of [`ChosenBy`] that are
/// more.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum BeyondBlocks {
    #[default]
    Nothing,
    /// Where the search of a scheme is [`ScaleSearch::Sse`].
    SseTensorScale,
    /// Where the search of a scheme is [`ScaleSearch::Sse`].
    SseWeighted,
    /// In the place of the searches of all schemes.
    Gptq(Gptq),
}

/// A scheme for some of the weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Override {
    /// Pattern of the paths of these weights.
    pub pattern: String,
    /// How they are quantized.
    pub scheme: Fp4Scheme,
}

/// A container type whose weights are quantized.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// Name of the struct that holds the parameter, such as `Linear`.
    pub name: String,
    /// Axis of its weights that a product contracts, which the blocks run along.
    pub axis: usize,
}

/// Which parameters of a module are quantized, and how.
///
/// Paths are as in Burn's records, such as `layers.0.attention.query.weight`. In a pattern `*`
/// stands for any part of one component and `**` for any number of components.
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
pub struct Fp4Config {
    /// How each weight is quantized.
    pub scheme: Fp4Scheme,
    /// How some weights are quantized instead; of several that fit a path the last one counts.
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
    /// Handling of a weight that blocks do not divide.
    pub indivisible: Indivisible,
    /// Handling of a part of this configuration that nothing uses.
    pub unused: Unused,
    /// Set by [`method`](Self::method) and [`gptq`](Self::gptq), told by
    /// [`chosen_by`](Self::chosen_by).
    pub(crate) beyond_blocks: BeyondBlocks,
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
    pub const CONTAINERS: [(&str, usize); 4] =
        [("Linear", 0), ("Fp4Linear", 0), ("Fp4TrainLinear", 0), ("Fp4Embedding", 1)];

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
            indivisible: Indivisible::Error,
            unused: Unused::Error,
            beyond_blocks: BeyondBlocks::Nothing,
            saturated: Saturated::PassThrough,
            learn_tensor_scale: false,
            calibration: Calibration::new(),
        }
    }

    /// This configuration with statistics of the inputs of layers, which the methods need that are
    /// [`calibrated`](burn_fp4_ops::search::MethodRow::calibrated). A weight without statistics
    /// falls back to [`Method::Sse`], and the report says so; if no selected weight has any, that
    /// is an error.
    pub fn with_calibration(&self, calibration: &Calibration) -> Self {
        Self { calibration: calibration.clone(), ..self.clone() }
    }

    /// Chooses scales and codes by a method: sets the search of the scheme and what goes beyond it,
    /// and nothing else. The rule and the blocks of the scheme stay, and so do schemes of
    /// [overrides](Self::with), which have searches of their own, but GPTQ takes the place of all
    /// of them. [`chosen_by`](Self::chosen_by) tells.
    ///
    /// Methods that are [`calibrated`](burn_fp4_ops::search::MethodRow::calibrated) need statistics
    /// of inputs: [`with_calibration`](Self::with_calibration), or
    /// [`quantize_fp4_sequential`](crate::Fp4Module::quantize_fp4_sequential). A method that does
    /// not go with the scheme is an error once a module is quantized:
    /// [`Fp4Error::Scheme`](crate::Fp4Error::Scheme).
    ///
    /// ```
    /// use burn_fp4_modules::{Fp4Config, Method};
    ///
    /// let config = Fp4Config::nvfp4().method(Method::SseTensorScale);
    /// let by_name = Fp4Config::nvfp4().method("sse-tensor-scale".parse()?);
    /// assert_eq!(config, by_name);
    /// # Ok::<(), burn_fp4_modules::ops::search::SearchError>(())
    /// ```
    pub fn method(mut self, method: Method) -> Self {
        let chosen_by = ChosenBy::from(method);
        self.scheme.search = chosen_by.search();
        self.beyond_blocks = match chosen_by {
            ChosenBy::Search(_) => BeyondBlocks::Nothing,
            ChosenBy::SseTensorScale => BeyondBlocks::SseTensorScale,
            ChosenBy::SseWeighted => BeyondBlocks::SseWeighted,
            ChosenBy::Gptq(options) => BeyondBlocks::Gptq(options),
        };
        self
    }

    /// The options of [`Method::Gptq`] and [`Method::GptqTextbook`]: quantizes calibrated weights
    /// ([`with_calibration`](Self::with_calibration)) by GPTQ with these, whatever search the
    /// scheme has. Weights have to be finite then, whatever the scheme says.
    ///
    /// ```
    /// use burn_fp4_modules::{Fp4Config, Method, ops::Gptq};
    ///
    /// let config = Fp4Config::nvfp4().gptq(Gptq { damping: 0.05, ..Gptq::DEFAULT });
    /// assert_eq!(config.chosen_by(&config.scheme).method(), Method::Gptq);
    /// ```
    pub fn gptq(mut self, options: Gptq) -> Self {
        self.beyond_blocks = BeyondBlocks::Gptq(options);
        self
    }

    /// How the scales and codes of weights with a scheme are chosen: by GPTQ if this says so,
    /// otherwise by the search of the scheme, and by what [`method`](Self::method) makes of
    /// [`Sse`](burn_fp4_ops::ScaleSearch::Sse).
    ///
    /// ```
    /// use burn_fp4_modules::{Fp4Config, Method, ops::Fp4Scheme};
    ///
    /// let config = Fp4Config::nvfp4().method(Method::SseWeighted);
    /// assert_eq!(config.chosen_by(&config.scheme).method(), Method::SseWeighted);
    /// let of_some = Fp4Scheme::mxfp4(); // an override, with a search of its own
    /// assert_eq!(config.chosen_by(&of_some).method(), Method::Amax);
    /// ```
    pub fn chosen_by(&self, scheme: &Fp4Scheme) -> ChosenBy {
        match (self.beyond_blocks, scheme.search) {
            (BeyondBlocks::Gptq(options), _) => ChosenBy::Gptq(options),
            (BeyondBlocks::SseTensorScale, ScaleSearch::Sse) => ChosenBy::SseTensorScale,
            (BeyondBlocks::SseWeighted, ScaleSearch::Sse) => ChosenBy::SseWeighted,
            (_, search) => ChosenBy::Search(search),
        }
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
    /// configuration's, of which the method counts; schemes of [`with`](Self::with), and a budget
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

    /// Lets the weights of sibling modules with these names share a tensor scale.
    pub fn share_scale(mut self, siblings: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.share_scale.push(siblings.into_iter().map(Into::into).collect());
        self
    }

    /// Quantizes the selected weights that a pattern fits by another scheme. Where several patterns
    /// fit, the last one counts.
    pub fn with(mut self, pattern: impl Into<String>, scheme: Fp4Scheme) -> Self {
        self.overrides.push(Override { pattern: pattern.into(), scheme });
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
    fn a_method_sets_all_that_it_says_and_nothing_else() {
        let base = Fp4Config::nvfp4().exclude("head.*").method(Method::SseWeighted);
        for method in Method::ALL {
            let config = base.clone().method(method);
            assert_eq!(config.chosen_by(&config.scheme), ChosenBy::from(method));
            let rest = Fp4Config { beyond_blocks: base.beyond_blocks, ..config };
            let rest = Fp4Config { scheme: rest.scheme.with_search(ScaleSearch::Sse), ..rest };
            assert_eq!(rest, base);
        }
    }

    #[test]
    fn a_method_is_for_schemes_with_its_search_and_gptq_for_all() {
        let by = |config: &Fp4Config, search| {
            config.chosen_by(&Fp4Scheme::nvfp4().with_search(search)).method()
        };
        let weighted = Fp4Config::nvfp4().method(Method::SseWeighted);
        let gptq = Fp4Config::nvfp4().gptq(Gptq::TEXTBOOK);
        for search in Method::ALL.map(|method| method.row().chosen_by.search()) {
            let expected = match search {
                ScaleSearch::Sse => Method::SseWeighted,
                search => search.method(),
            };
            assert_eq!(by(&weighted, search), expected);
            assert_eq!(by(&gptq, search), Method::GptqTextbook);
        }
    }

    #[test]
    fn configurations_come_back_from_json() {
        for method in Method::ALL {
            let config = Fp4Config::nvfp4().method(method);
            let json = serde_json::to_string(&config).unwrap();
            assert_eq!(serde_json::from_str::<Fp4Config>(&json).unwrap(), config, "{json}");
        }
        assert_eq!(serde_json::from_str::<Fp4Config>("{}").unwrap(), Fp4Config::default());
    }
}
