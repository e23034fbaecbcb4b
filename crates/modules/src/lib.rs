//! Quantize any Burn module in place.
//!
//! [`Fp4Module`] adds methods to every [`Module`]. A quantized parameter keeps
//! its place, its id and its shape; its [`val`](burn::module::Param::val), which every layer calls in
//! its forward pass, dequantizes.
//!
//! | file           | what it holds                                                              |
//! |----------------|----------------------------------------------------------------------------|
//! | `config.rs`    | [`Fp4Config`]: which parameters, how, and what shares a tensor scale        |
//! | `calibration.rs`| [`Calibration`]: what is known of the inputs of layers                   |
//! | `capture.rs`   | a forward pass as a list of operations, and where it multiplies by weights |
//! | `calibrate.rs` | [`Calibrate`]: what layers meet when these operations run                  |
//! | `cache.rs`     | statistics in files, for calibrations that are interrupted                 |
//! | `select.rs`    | one walk over the module that decides about every float parameter          |
//! | `paths.rs`     | float parameters with their paths, for whatever looks at them              |
//! | `packed.rs`    | [`PackedWeight`]: the codes and scales in a parameter's place               |
//! | `linear.rs`    | [`Fp4Linear`]: a linear layer straight from codes, on hosts too            |
//! | `fake_quant.rs`| [`FakeQuantWeight`]: weights trained as if they were quantized, and packed after that |
//! | `fake_quantize.rs`| [`FakeQuantize`]: activations, in a forward pass                        |
//! | `train_linear.rs`| [`Fp4TrainLinear`]: a linear layer whose three products are quantized     |
//! | `quantize.rs`  | [`Fp4Module::quantize_fp4`]                                                 |
//! | `calibrated.rs`| the same layer by layer, or divided among devices                          |
//! | `weight.rs`    | one weight, and by what it is quantized                                    |
//! | `record.rs`    | [`Fp4Module::load_fp4_record`]: records into fresh or quantized modules      |
//! | `report.rs`    | [`Fp4Report`]: what was done to every parameter, or why not                 |

mod cache;
mod calibrate;
mod calibrated;
mod calibration;
mod capture;
mod config;
mod error;
mod fake_quant;
mod fake_quantize;
mod linear;
mod packed;
mod paths;
mod quantize;
mod record;
mod report;
mod select;
mod train_linear;
mod weight;

use std::path::Path;

use burn::module::Module;
use burn::store::ModuleRecord;

pub use burn_fp4_ops as ops;
pub use calibrate::{Calibrate, CalibrationOptions, CalibrationProgress};
pub use calibration::Calibration;
pub use config::{Container, Fp4Config, Indivisible};
pub use error::Fp4Error;
pub use fake_quant::FakeQuantWeight;
pub use fake_quantize::{ActivationRange, FakeQuantize, FakeQuantizeConfig};
pub use linear::Fp4Linear;
pub use packed::PackedWeight;
pub use report::{ChosenBy, Fp4Report, Outcome, ParameterReport, Reason};
pub use train_linear::Fp4TrainLinear;

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
/// let output = net.second.forward(Relu::new().forward(net.first.forward(Tensor::<2>::ones([1, 64], &device))));
/// assert_eq!(output.dims(), [1, 10]);
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
pub trait Fp4Module: Module {
    /// Replaces the selected weights by their FP4 codes and scales.
    ///
    /// Everything is checked before anything is changed: that values are finite by one transfer from each device, which
    /// [`FollowReference`](crate::ops::NonFinite::FollowReference) saves where no tensor scale is shared. What the report
    /// says takes one more. Kernels read nothing else back, but GPTQ whether a Gram matrix is singular; a search without
    /// a kernel reads the weight. Each dense weight is freed as soon as its packed form stands. Quantized parameters are
    /// frozen; [`Module::materialize`] makes the module dense again.
    ///
    /// # Errors
    /// [`Fp4Error`], naming the parameter where there is one. The module is then unchanged, unless the
    /// device itself failed half-way, or GPTQ without damping met inputs that leave a channel undetermined:
    /// then some weights are packed and the rest dense.
    fn quantize_fp4(&mut self, config: &Fp4Config) -> Result<Fp4Report, Fp4Error> {
        quantize::quantize(self, config)
    }

    /// [`quantize_fp4`](Self::quantize_fp4) layer by layer, in the order in which they are executed: what is known of the
    /// inputs of a layer comes from batches that ran through the quantized layers before it. For GPTQ and the
    /// searches by Hessian; `forward` is that of [`Calibrate::run`].
    ///
    /// A weight that is used several times is quantized when its last inputs are known. All batches are in flight at
    /// a time, whatever memory the options allow.
    ///
    /// # Errors
    /// As [`quantize_fp4`](Self::quantize_fp4) and [`Calibrate::run`]. The module is then unchanged.
    fn quantize_fp4_sequential<I: Module, O>(
        &mut self,
        config: &Fp4Config,
        options: CalibrationOptions<'_>,
        batches: impl IntoIterator<Item = I>,
        forward: impl FnMut(&Self, I) -> O,
    ) -> Result<Fp4Report, Fp4Error> {
        calibrated::sequential(self, config, options, batches, forward)
    }

    /// Makes the selected weights behave as if they were quantized, while they are trained in full precision:
    /// gradients pass straight through the rounding. Everything else goes on as before: optimizers, records,
    /// [`valid`](Module::valid) and [`train`](Module::train).
    ///
    /// [`Fp4Config::saturated`] and [`Fp4Config::learn_tensor_scale`] say more about gradients. The scale search
    /// may be `Amax`, `FourOverSix` or `Sse`.
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
    /// As [`quantize_fp4`](Self::quantize_fp4), and [`Fp4Error::FakeQuantization`] for what only makes sense
    /// once: searches that need activations, GPTQ, calibration, shared tensor scales. The module is then unchanged.
    fn fake_quantize_fp4(&mut self, config: &Fp4Config) -> Result<Fp4Report, Fp4Error> {
        fake_quant::fake_quantize(self, config)
    }

    /// Packs every fake-quantized weight. Outputs stay the same, bit for bit.
    ///
    /// # Errors
    /// [`Fp4Error::NothingFakeQuantized`]; [`Fp4Error::Attached`] if anything else is attached to a parameter,
    /// such as an adapter or a weight that is packed already; [`Fp4Error::Parameter`] for a weight that is no
    /// longer finite. The module is then unchanged.
    fn convert_fp4(&mut self) -> Result<Fp4Report, Fp4Error> {
        fake_quant::convert(self)
    }

    /// Loads a record taken from a quantized module ([`Module::into_record`]) into this one, which
    /// may be freshly built or quantized already, on any device.
    ///
    /// Burn's own `load_record` asks that the module be quantized like the record, and
    /// [`validate(false)`](ModuleRecord::validate), since the dense weights are not in the record.
    ///
    /// # Errors
    /// [`Fp4Error::Record`] if the record does not fit the module. The module is then unchanged.
    fn load_fp4_record(&mut self, record: ModuleRecord) -> Result<(), Fp4Error> {
        record::load(self, record::from_record(record)?)
    }

    /// [`load_fp4_record`](Self::load_fp4_record) from a file that `save_file` wrote.
    ///
    /// # Errors
    /// As there, and if the file cannot be read.
    fn load_fp4_file(&mut self, path: impl AsRef<Path>) -> Result<(), Fp4Error> {
        record::load(self, record::from_file(path.as_ref())?)
    }

    /// Frees the zeros that moving a quantized module between devices leaves in the place of its
    /// dense weights.
    ///
    /// A quantized parameter needs one stored value to keep its shape; Burn copies all of them when
    /// it moves a parameter that was used before. Nothing else changes.
    fn compact_fp4(&mut self) {
        packed::compact(self);
    }
}

impl<M: Module> Fp4Module for M {}
