//! Quantize any Burn module in place.
//!
//! [`Fp4Module`] adds methods to every [`Module`]. A quantized parameter keeps
//! its place, its id and its shape; its [`val`](burn::module::Param::val), which every layer calls
//! in its forward pass, dequantizes.
//!
//! | file                   | what it holds                                                      |
//! |------------------------|--------------------------------------------------------------------|
//! | `lib.rs`               | [`Fp4Module`]: what a user calls                                   |
//! | `config.rs`            | [`Fp4Config`]: which parameters, how, what shares a tensor scale   |
//! | `budget.rs`            | [`Budget`]: the size that quantized weights may have               |
//! | `report.rs`            | [`Fp4Report`]: what was done to every parameter, or why not        |
//! | `report_table.rs`      | the report as a table                                              |
//! | `error.rs`             | [`Fp4Error`]                                                       |
//! | `statistics.rs`        | [`Calibration`]: statistics of the inputs of layers                |
//! | `packed_weight.rs`     | [`PackedWeight`]: codes and scales, attached to a parameter        |
//! | `fake_quant_weight.rs` | [`FakeQuantWeight`]: attached to a weight that is trained          |
//! | `linear.rs`            | [`Fp4Linear`]: a linear layer straight from codes, on hosts too    |
//! | `embedding.rs`         | [`Fp4Embedding`]: a table whose rows are looked up from codes      |
//! | `transfer.rs`          | transfers from devices, and between them; panics of devices        |
//! | `walk/`                | the parameters of a module, and the decision about each            |
//! | `pack/`                | packed weights in the place of dense ones; records of them         |
//! | `calibration/`         | [`Calibrate`]: the statistics from forward passes; layer by layer  |
//! | `training/`            | fake quantization, [`Fp4TrainLinear`], adapters over codes         |
//! | `checkpoint/`          | [`LoadCheckpoint`]: files of other projects, in and out            |
//! | `replay/`              | [`Replay`]: a forward pass recorded once and replayed              |
//! | `sensitivity/`         | [`Sensitivity`]: what FP4 costs each weight, choice under a budget |
//!
//! Folders use the files above them; `pack/` uses `walk/`, `calibration/`, `training/`,
//! `checkpoint/` and `sensitivity/` use both. Names of weights in files, `checkpoint/map.rs` to
//! `checkpoint/decide.rs`, are below all of them: configurations and decisions may have these.

#![warn(missing_debug_implementations)]

mod budget;
mod calibration;
mod checkpoint;
mod config;
mod embedding;
mod error;
mod fake_quant_weight;
mod linear;
mod pack;
mod packed_weight;
mod replay;
mod report;
mod report_table;
mod sensitivity;
mod statistics;
mod training;
mod transfer;
mod walk;

use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Lora, Module};
use burn::store::ModuleRecord;
#[cfg(feature = "autodiff")]
use burn::tensor::Tensor;
use burn::tensor::{DType, Device};
use burn_fp4_ops::{Activations, Fp8Path};

pub use budget::Budget;
pub use burn_fp4_checkpoints as checkpoints;
pub use burn_fp4_checkpoints::{Checkpoint, CheckpointError, WriteReport};
pub use burn_fp4_ops as ops;
pub use burn_fp4_ops::search::Method;
pub use burn_fp4_policy as policy;
pub use burn_fp4_policy::{Recipe, RecipeError, RecipeFormat, RecipeWeights};
pub use calibration::calibrate::Calibrate;
pub use calibration::options::{CalibrationOptions, CalibrationProgress};
pub use calibration::parts::{Calibrated, Fp4Parts};
pub use checkpoint::load::LoadCheckpoint;
pub use checkpoint::map::{CheckpointMap, FileLayout};
pub use checkpoint::mismatch::Mismatch;
pub use checkpoint::report::{LoadReport, Loaded, LoadedFrom, LoadedParameter};
pub use config::{Change, Container, FileChoices, Fp4Config, Indivisible, Override, Unused};
pub use embedding::Fp4Embedding;
pub use error::Fp4Error;
pub use fake_quant_weight::FakeQuantWeight;
pub use linear::Fp4Linear;
pub use pack::provided::DenseWeight;
pub use packed_weight::PackedWeight;
pub use replay::{Replay, ReplayError, ReplayParts, ReplayTensors};
pub use report::{Fallback, Fp4Report, KeepReason, Outcome, ParameterReport, SquaredError};
pub use sensitivity::budget::BudgetChoice;
pub use sensitivity::candidate::Candidate;
pub use sensitivity::report::{CandidateSensitivity, GroupSensitivity, Sensitivity};
pub use statistics::Calibration;
pub use training::activations::{ActivationRange, FakeQuantize, FakeQuantizeConfig};
pub use training::train_linear::Fp4TrainLinear;

/// FP4 for every Burn module.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig, Relu};
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_modules::{Fp4Config, Fp4Module};
///
/// #[derive(Module, Debug)]
/// struct Net {
///     first: Linear,
///     second: Linear,
/// }
///
/// let device = Device::flex();
/// let mut net = Net {
///     first: LinearConfig::new(64, 128).init(&device),
///     second: LinearConfig::new(128, 10).init(&device),
/// };
/// let report = net.quantize_fp4(&Fp4Config::nvfp4())?;
/// println!("{report}");
/// let hidden = net.first.forward(Tensor::<2>::ones([1, 64], &device));
/// let output = net.second.forward(Relu::new().forward(hidden));
/// assert_eq!(output.dims(), [1, 10]);
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
pub trait Fp4Module: Module {
    /// Replaces the selected weights by their FP4 codes and scales.
    ///
    /// Everything is checked before anything is changed: that values are finite, and whether
    /// weights that share an id still have the same values. That takes one transfer from each
    /// device, and the report takes another. For GPTQ the report shows the error of outputs, which
    /// takes two products of a weight and the Gram matrix of its inputs. Besides these transfers,
    /// only GPTQ (whether a Gram matrix is singular), the search for a tensor scale and searches
    /// without a kernel on the device (the weight) read anything back. Each dense weight is freed
    /// as soon as it is packed. Quantized parameters have no gradient; [`Module::materialize`]
    /// makes the module dense again, to be trained, saved and loaded as before.
    ///
    /// Weights of rank 3 or more are quantized matrix by matrix over their leading axes where
    /// statistics of inputs decide, such as the experts of `[experts, in, out]`, each by its own
    /// inputs.
    ///
    /// # Errors
    /// [`Fp4Error`], naming the parameter where there is one. The module is then unchanged, unless
    /// it is [`Fp4Error::Partial`]: a device failed half-way, or GPTQ without damping found a
    /// singular Gram matrix. That error names the weights that are packed; the others are as they
    /// were.
    fn quantize_fp4(&mut self, config: &Fp4Config) -> Result<Fp4Report, Fp4Error> {
        match config.budget {
            Some(budget) => sensitivity::budget::quantize_within(self, config, budget),
            None => pack::quantize::quantize(self, config),
        }
    }

    /// [`quantize_fp4`](Self::quantize_fp4) layer by layer, in the order in which they are
    /// executed: the statistics of the inputs of a layer come from batches that ran through the
    /// quantized layers before it. For methods that need statistics of inputs; others run no
    /// batches. `forward` is that of [`Calibrate::run`].
    ///
    /// GPTQ makes up for what these layers have changed in the inputs, as far as its
    /// [correction](burn_fp4_ops::Gptq::correction) says. Every batch then also runs through dense
    /// layers, and its activations take twice the memory. A report counts the correction of a
    /// weight as an error of it, so compare the outputs of the module.
    ///
    /// A weight that is used several times is quantized when its last inputs are known. All batches
    /// are in flight at a time, whatever memory the options allow.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_fp4_modules::{CalibrationOptions, Fp4Config, Fp4Module, Method};
    ///
    /// let device = Device::flex();
    /// let mut layers: Vec<_> = (0..2).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
    /// let batches = [Tensor::<2>::random([128, 64], Distribution::Default, &device)];
    /// let forward = |layers: &Vec<Linear>, batch| layers[1].forward(layers[0].forward(batch));
    /// let config = Fp4Config::nvfp4().method(Method::GPTQ);
    /// let options = CalibrationOptions::default();
    /// let report = layers.quantize_fp4_sequential(&config, options, batches, forward)?;
    /// assert_eq!(report.quantized().count(), 2);
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`quantize_fp4`](Self::quantize_fp4) and [`Calibrate::run`].
    fn quantize_fp4_sequential<I: Module, O>(
        &mut self,
        config: &Fp4Config,
        options: CalibrationOptions<'_>,
        batches: impl IntoIterator<Item = I>,
        forward: impl FnMut(&Self, I) -> O,
    ) -> Result<Fp4Report, Fp4Error> {
        calibration::sequential::sequential(self, config, options, batches, forward)
    }

    /// Measures each candidate for each weight that a configuration selects: its bits, and the
    /// error of the weight and of its outputs. The module is not changed.
    ///
    /// The schemes of the candidates replace the schemes of the configuration; its method
    /// quantizes, and its calibration has the statistics of inputs. Candidates that the method is
    /// not defined for are left out. [`choose`](Sensitivity::choose) picks among the others, within
    /// a [`Budget`].
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_fp4_modules::{Budget, Calibration, Candidate, Fp4Config, Fp4Module, Method};
    ///
    /// let device = Device::flex();
    /// let mut layers: Vec<_> = (0..4).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
    /// let batches = (0..2).map(|_| Tensor::<2>::random([64, 64], Distribution::Default, &device));
    /// let forward = |layers: &Vec<Linear>, batch| {
    ///     layers.iter().fold(batch, |batch, layer| layer.forward(batch))
    /// };
    /// let calibration = Calibration::of(&layers).run(batches, forward)?;
    ///
    /// let config = Fp4Config::nvfp4().method(Method::GPTQ).with_calibration(&calibration);
    /// let sensitivity = layers.fp4_sensitivity(&config, &Candidate::DEFAULT)?;
    /// println!("{sensitivity}");
    /// let choice = sensitivity.choose(Budget::BitsPerWeight(12.0))?;
    /// let report = layers.quantize_fp4(&choice.config)?;
    /// # assert!(report.quantized().count() >= 2);
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`quantize_fp4`](Self::quantize_fp4), of any candidate; [`Fp4Error::Scheme`] if the
    /// method is defined for none in FP4; [`Fp4Error::Sensitivity`] without candidates.
    fn fp4_sensitivity(
        &self,
        config: &Fp4Config,
        candidates: &[Candidate],
    ) -> Result<Sensitivity, Fp4Error> {
        Ok(sensitivity::measure::measure(self, config, candidates, false)?.sensitivity)
    }

    /// [`fp4_sensitivity`](Self::fp4_sensitivity), and by how much the loss of a batch is expected
    /// to grow by second order: half the mean over batches of the sum over outputs of
    /// `(dW^T gradient)^2`, which is `dW^T F dW / 2` with the blocks of the empirical Fisher
    /// information `F`. It holds near a minimum of the loss, where gradients cancel over batches.
    ///
    /// `loss` returns the loss of a batch `[1]`: the negative logarithm of the likelihood of what
    /// was to be predicted, summed over the batch, not its mean, so that the growth is that of the
    /// sum. It runs once for each batch, on the module that it is given: this one on its device
    /// with autodiff, where batches have to be as well, without dropout, and with gradients of all
    /// weights. Many small batches beat a few large ones.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::{Device, Distribution, Tensor, activation::log_softmax};
    /// use burn_fp4_modules::{Candidate, Fp4Config, Fp4Module};
    ///
    /// let device = Device::flex();
    /// let model = LinearConfig::new(64, 10).init(&device);
    /// let device = device.autodiff();
    /// let batches = (0..8).map(|_| Tensor::<2>::random([4, 64], Distribution::Default, &device));
    /// // Of the first class; a model that is trained has better ones.
    /// let loss = |model: &Linear, batch| {
    ///     log_softmax(model.forward(batch), 1).narrow(1, 0, 1).sum().neg()
    /// };
    /// let config = Fp4Config::nvfp4();
    /// let found = model.fp4_sensitivity_of_loss(&config, &Candidate::DEFAULT, batches, loss)?;
    /// # assert!(found.groups[0].candidates[0].loss > Some(0.0));
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// As there; [`Fp4Error::Sensitivity`] without batches, or for a loss that does not depend on
    /// the module it is given; [`Fp4Error::NotComparable`] naming weights that it does not depend
    /// on.
    #[cfg(feature = "autodiff")]
    fn fp4_sensitivity_of_loss<I>(
        &self,
        config: &Fp4Config,
        candidates: &[Candidate],
        batches: impl IntoIterator<Item = I>,
        loss: impl FnMut(&Self, I) -> Tensor<1>,
    ) -> Result<Sensitivity, Fp4Error> {
        sensitivity::loss::measure(self, config, candidates, batches, loss)
    }

    /// Sets how products with packed weights read their input: those of [`Fp4Linear`] and
    /// [`Fp4Embedding::project`]. Burn's own layers dequantize, and keep their inputs. Returns the
    /// number of weights that are multiplied so.
    ///
    /// [`Activations::Int8`] is the fastest on hosts, [`Activations::Fp8`] for many rows on Hopper
    /// ([`fp8_paths`](Self::fp8_paths)). Their pages say by how much outputs change. Call this for
    /// a module or for some of its layers, after quantizing or loading: records do not hold it. A
    /// weight that is packed keeps it when a record is loaded. An embedding with an adapter
    /// follows it once the adapter is merged.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_modules::{Fp4Config, Fp4Linear, Fp4Module, ops::Activations};
    ///
    /// let layer = || Fp4Linear::from(LinearConfig::new(64, 64).init(&Device::flex()));
    /// let mut layers = vec![layer(), layer()];
    /// layers.quantize_fp4(&Fp4Config::nvfp4())?;
    /// assert_eq!(layers.set_fp4_activations(Activations::Int8)?, 2);
    /// let output = layers[0].forward(Tensor::<2>::ones([1, 64], &Device::flex()));
    /// # assert_eq!(output.dims(), [1, 64]);
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Fp4Error::NoFp4Layers`] if there is no such weight. The module is then unchanged.
    fn set_fp4_activations(&mut self, activations: Activations) -> Result<usize, Fp4Error> {
        pack::activations::set(self, activations)
    }

    /// Returns how products with [`Activations::Fp8`] run, for an input of some rows and a dtype:
    /// by path of each weight that [`set_fp4_activations`](Self::set_fp4_activations) sets, with
    /// [`Activations::Fp8Rounded`] for a weight that has these.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{DType, Device};
    /// use burn_fp4_modules::{Fp4Config, Fp4Linear, Fp4Module, ops::Fp8Path};
    ///
    /// let mut layer = Fp4Linear::from(LinearConfig::new(64, 128).init(&Device::flex()));
    /// layer.quantize_fp4(&Fp4Config::mxfp4())?;
    /// let paths = layer.fp8_paths(512, DType::BF16)?;
    /// assert_eq!(paths["weight"], Fp8Path::Emulated); // on a CPU
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Fp4Error::Device`] if the device fails.
    fn fp8_paths(&self, rows: usize, dtype: DType) -> Result<BTreeMap<String, Fp8Path>, Fp4Error> {
        pack::activations::fp8_paths(self, rows, dtype)
    }

    /// Replaces dense weights by codes and scales that come from elsewhere: of a checkpoint, of a
    /// search of one's own. `give` is called for every float parameter of rank 2 or more that
    /// nothing is attached to, and returns a packed weight, or `None` to leave it dense. A
    /// parameter that is not initialized stays so, unless `give` reads its values.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Fp4Error, Fp4Module, PackedWeight, ops};
    ///
    /// let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
    /// let report = layer.pack_fp4(|weight| {
    ///     let Some(values) = weight.tensor::<2>() else { return Ok(None) };
    ///     let scheme = ops::Fp4Scheme::nvfp4();
    ///     let packed = ops::quantize_with_best_tensor_scale(values, 0, &scheme)?;
    ///     Ok::<_, Fp4Error>(Some(PackedWeight::from(packed)))
    /// })?;
    /// # assert_eq!(report.quantized().count(), 1);
    /// # Ok::<(), Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of `give`; [`Fp4Error::Provided`] for codes of another shape or on another device
    /// than the parameter; [`Fp4Error::NothingSelected`] without any codes. The module is then
    /// unchanged.
    fn pack_fp4(
        &mut self,
        give: impl FnMut(&DenseWeight<'_>) -> Result<Option<PackedWeight>, Fp4Error>,
    ) -> Result<Fp4Report, Fp4Error> {
        pack::provided::pack_provided(self, give)
    }

    /// Attaches adapters to the weights of rank 2 that the parameter group of `lora` has, packed
    /// ones and dense ones such as embeddings, and freezes every other float parameter. The report
    /// says which is which. Codes stay as they are: `val()` is `dequantized + scale a b`,
    /// [`Fp4Linear`] multiplies by the codes and adds two thin products.
    ///
    /// Burn's own [`apply_lora`](Module::apply_lora) cannot attach anything to a packed weight, and
    /// does not say so: Burn puts what is attached already back over it.
    ///
    /// ```
    /// use burn::module::Lora;
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_modules::{Fp4Config, Fp4Module, PackedWeight};
    ///
    /// let device = Device::flex().autodiff();
    /// let mut layer = LinearConfig::new(64, 32).init(&device);
    /// layer.quantize_fp4(&Fp4Config::nvfp4())?;
    /// let report = layer.lora_fp4(&Lora::new(4, 8.0))?;
    /// assert_eq!(report.adapted().next().unwrap().path, "weight");
    ///
    /// let gradients = layer.forward(Tensor::<2>::ones([1, 64], &device)).sum().backward();
    /// let packed = layer.weight.reparameterization::<PackedWeight>().unwrap();
    /// assert!(packed.adapter().unwrap().b.grad(&gradients).is_some());
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Fp4Error::NothingAdapted`] if the group has no weight of rank 2 or the rank is 0;
    /// [`Fp4Error::Attached`] if a parameter has an adapter already. The module is then unchanged.
    fn lora_fp4(&mut self, lora: &Lora) -> Result<Fp4Report, Fp4Error> {
        training::lora::attach(self, lora)
    }

    /// Folds every adapter into its weight, so that the module can be saved and quantized as before
    /// [`lora_fp4`](Self::lora_fp4). A packed weight is quantized again, by the scheme that the
    /// configuration has for its path, along the axis that it has; the errors in the report say
    /// what that costs. A dense weight stays dense, in its dtype. What the configuration selects
    /// does not matter, and what was frozen stays frozen.
    ///
    /// ```
    /// use burn::module::{Lora, Module};
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Fp4Config, Fp4Module, PackedWeight};
    ///
    /// let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
    /// layer.quantize_fp4(&Fp4Config::nvfp4())?;
    /// layer.lora_fp4(&Lora::new(4, 8.0))?;
    /// let mut layer = layer.train(); // .. and train it
    /// layer.merge_lora_fp4(&Fp4Config::nvfp4())?;
    /// let packed = layer.weight.reparameterization::<PackedWeight>().unwrap();
    /// assert!(packed.adapter().is_none());
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Fp4Error::NothingAdapted`] if there is none; [`Fp4Error::Uncalibrated`] for a method that
    /// needs statistics of inputs; [`Fp4Error::Attached`] for attachments that are neither codes
    /// nor adapters, such as fake quantization; [`Fp4Error::NotFinite`]; [`Fp4Error::Parameter`].
    /// The module is then unchanged.
    fn merge_lora_fp4(&mut self, config: &Fp4Config) -> Result<Fp4Report, Fp4Error> {
        training::lora::merge(self, config)
    }

    /// Makes the selected weights behave as if they were quantized, while they are trained in full
    /// precision: gradients pass straight through the rounding. Everything else works as before:
    /// optimizers, records, [`valid`](Module::valid) and [`train`](Module::train).
    ///
    /// [`Fp4Config::saturated`] and [`Fp4Config::learn_tensor_scale`] say more about gradients. The
    /// method may be [`Method::Amax`], [`Method::FOUR_OVER_SIX`] or [`Method::SSE`].
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::optim::{AdamConfig, GradientsParams};
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_modules::{Fp4Config, Fp4Module};
    ///
    /// let device = Device::flex().autodiff();
    /// let mut layer = LinearConfig::new(64, 32).init(&device);
    /// layer.fake_quantize_fp4(&Fp4Config::mxfp4())?;
    ///
    /// let mut optimizer = AdamConfig::new().init();
    /// let loss = layer.forward(Tensor::<2>::ones([1, 64], &device)).sum();
    /// let gradients = GradientsParams::from_grads(loss.backward(), &layer);
    /// layer = optimizer.step(1e-3, layer, gradients);
    ///
    /// let report = layer.convert_fp4()?; // packed now
    /// # assert_eq!(report.quantized().count(), 1);
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`quantize_fp4`](Self::quantize_fp4), and [`Fp4Error::FakeQuantization`] for what cannot
    /// be repeated at every step: methods that need activations or search for the tensor scale,
    /// calibration, shared tensor scales.
    /// The module is then unchanged.
    fn fake_quantize_fp4(&mut self, config: &Fp4Config) -> Result<Fp4Report, Fp4Error> {
        training::weights::fake_quantize(self, config)
    }

    /// Packs every fake-quantized weight. Outputs stay the same, bit for bit.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Fp4Config, Fp4Module, PackedWeight};
    ///
    /// let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
    /// layer.fake_quantize_fp4(&Fp4Config::nvfp4())?;
    /// let trained = layer.weight.val();
    /// layer.convert_fp4()?;
    /// assert!(layer.weight.reparameterization::<PackedWeight>().is_some());
    /// assert_eq!(layer.weight.val().into_data(), trained.into_data());
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Fp4Error::NothingFakeQuantized`]; [`Fp4Error::Attached`] if anything else is attached to a
    /// parameter, such as an adapter or a weight that is packed already; [`Fp4Error::Parameter`]
    /// for a weight that is no longer finite. The module is then unchanged.
    fn convert_fp4(&mut self) -> Result<Fp4Report, Fp4Error> {
        training::weights::convert(self)
    }

    /// Loads a record taken from a quantized module ([`Module::into_record`]) into this one, which
    /// may be freshly built or quantized in the same way already, on any device. Adapters are
    /// loaded with the codes; if the module had none, everything else is frozen, as
    /// [`lora_fp4`](Self::lora_fp4) does. Otherwise what is trained stays so: a record does not
    /// say.
    ///
    /// Burn's own `load_record` asks that the module be quantized like the record, and
    /// [`validate(false)`](ModuleRecord::validate), since the dense weights are not in the record.
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Fp4Config, Fp4Module};
    ///
    /// let build = || LinearConfig::new(64, 32).init(&Device::flex());
    /// let (mut layer, mut fresh) = (build(), build());
    /// layer.quantize_fp4(&Fp4Config::nvfp4())?;
    /// fresh.load_fp4_record(layer.clone().into_record())?;
    /// assert_eq!(fresh.weight.val().into_data(), layer.weight.val().into_data());
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Fp4Error::Record`] if the record does not fit the module. The module is then unchanged.
    fn load_fp4_record(&mut self, record: ModuleRecord) -> Result<(), Fp4Error> {
        pack::record::load(self, pack::record::from_record(record)?)
    }

    /// [`load_fp4_record`](Self::load_fp4_record) from a file that `save_file` wrote.
    ///
    /// ```
    /// use burn::module::Module;
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Fp4Config, Fp4Module};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let path = std::env::temp_dir().join(format!("burn-fp4-doc-{}.bpk", std::process::id()));
    /// let build = || LinearConfig::new(64, 32).init(&Device::flex());
    /// let (mut layer, mut fresh) = (build(), build());
    /// layer.quantize_fp4(&Fp4Config::nvfp4())?;
    /// layer.clone().save_file(&path)?;
    /// fresh.load_fp4_file(&path)?;
    /// assert_eq!(fresh.weight.val().into_data(), layer.weight.val().into_data());
    /// # std::fs::remove_file(&path)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Fp4Error::Record`], as there and if the file cannot be read.
    fn load_fp4_file(&mut self, path: impl AsRef<Path>) -> Result<(), Fp4Error> {
        pack::record::load(self, pack::record::from_file(path.as_ref())?)
    }

    /// Saves the module as a checkpoint of a dialect: `"modelopt"`, `"compressed-tensors"`,
    /// `"gguf"` and the others that [`checkpoints`] writes. Packed weights keep
    /// their codes and scales; everything else is saved unchanged.
    ///
    /// Nothing is at `path` until all of it is; the same module makes the same bytes. The report
    /// says what a dialect cannot hold exactly: a tensor scale that it states as a divisor comes
    /// back as another number for about one in six.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{CheckpointMap, Fp4Config, Fp4Error, Fp4Module};
    ///
    /// # fn main() -> Result<(), Fp4Error> {
    /// # let folder = std::env::temp_dir().join(format!("burn-fp4-save-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder).unwrap();
    /// # let path = folder.join("Toy-NVFP4");
    /// let mut layers = vec![LinearConfig::new(64, 32).init(&Device::flex())];
    /// layers.quantize_fp4(&Fp4Config::nvfp4())?;
    /// let map = CheckpointMap::new().shard_size(5 << 30);
    /// let report = layers.save_fp4(&path, "compressed-tensors", &map)?;
    /// println!("{} tensors in {} files", report.tensors, report.files);
    /// # assert_eq!(report.tensors, 4);
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`checkpoint_fp4`](Self::checkpoint_fp4); [`Fp4Error::Checkpoint`] for a dialect that is
    /// unknown, is only read or cannot hold a weight, a path that exists, and what the file system
    /// refuses.
    fn save_fp4(
        &self,
        path: impl AsRef<Path>,
        dialect: &str,
        map: &CheckpointMap,
    ) -> Result<WriteReport, Fp4Error> {
        checkpoint::save::save(self, path.as_ref(), dialect, map)
    }

    /// Returns the model that [`save_fp4`](Self::save_fp4) writes, in host memory: add a
    /// `config.json`, scales of inputs or other options, and [write](checkpoints::Model::write) it.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::checkpoints::Value;
    /// use burn_fp4_modules::{CheckpointMap, Fp4Config, Fp4Module};
    ///
    /// let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
    /// layer.quantize_fp4(&Fp4Config::nvfp4())?;
    /// let mut checkpoint = layer.checkpoint_fp4(&CheckpointMap::new())?;
    /// checkpoint.config = Some(serde_json::json!({"model_type": "toy"}));
    /// let packed = checkpoint.weights.iter().find(|weight| weight.name == "weight").unwrap();
    /// assert!(matches!(packed.value, Value::Fp4(_)));
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Fp4Error::Mismatch`] for weights whose blocks run along another axis than files have them,
    /// tensor scales for each row, tied parameters with different values, names that are not
    /// loaded back, and what the map says that matches nothing; [`Fp4Error::Attached`] for adapters
    /// and fake quantization; [`Fp4Error::Rename`], [`Fp4Error::Group`] and [`Fp4Error::Experts`]
    /// for the map.
    fn checkpoint_fp4(&self, map: &CheckpointMap) -> Result<checkpoints::Model<'static>, Fp4Error> {
        checkpoint::save::model(self, map)
    }

    /// Returns the dense module as [`checkpoint_fp4`](Self::checkpoint_fp4) does, without values
    /// and with its float parameters alone. Initializes no parameter: for [`Model::plan`] of a
    /// module that does not fit into memory.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{CheckpointMap, Fp4Module};
    ///
    /// let layer = LinearConfig::new(64, 32).init(&Device::flex());
    /// let outline = layer.outline_fp4(&CheckpointMap::new())?;
    /// assert_eq!(outline.weights[0].shape(), [32, 64]); // as in files
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Fp4Error::Rename`], [`Fp4Error::Group`] and [`Fp4Error::Experts`] for the map;
    /// [`Fp4Error::Mismatch`] for names that are not loaded back.
    ///
    /// [`Model::plan`]: checkpoints::Model::plan
    fn outline_fp4(&self, map: &CheckpointMap) -> Result<checkpoints::Model<'static>, Fp4Error> {
        let parameters = pack::packed_parameter::settled_parameters(self);
        Ok(checkpoint::save::outline(&parameters, map)?.model)
    }

    /// Moves a module. Other than [`to_device`](Module::to_device) it allocates no zeros in the
    /// place of dense weights that were looked at before, be it to print a layer.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Fp4Config, Fp4Module, PackedWeight};
    ///
    /// let device = Device::flex();
    /// let mut layer = LinearConfig::new(64, 32).init(&device);
    /// layer.quantize_fp4(&Fp4Config::nvfp4())?;
    /// let moved = layer.to_device_fp4(&device);
    /// let packed = moved.weight.reparameterization::<PackedWeight>().unwrap();
    /// assert_eq!(packed.device(), device);
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    #[must_use]
    fn to_device_fp4(mut self, device: &Device) -> Self {
        self.compact_fp4();
        self.to_device(device)
    }

    /// Frees the zeros that moving a quantized module between devices leaves in the place of its
    /// dense weights.
    ///
    /// A quantized parameter needs one stored value to keep its shape; Burn copies all of them when
    /// it moves a parameter that was used before. Nothing else changes.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Fp4Config, Fp4Module};
    ///
    /// let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
    /// layer.quantize_fp4(&Fp4Config::nvfp4())?;
    /// println!("{layer}"); // which looks at the dense weight
    /// layer.compact_fp4();
    /// assert!(!layer.weight.is_initialized());
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    fn compact_fp4(&mut self) {
        pack::packed_parameter::compact(self);
    }
}

impl<M: Module> Fp4Module for M {}
