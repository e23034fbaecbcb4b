//! [`Calibrate`]: statistics of the inputs of layers, from forward passes of an unmodified module.

use std::fmt;

use burn::module::Module;
use burn::tensor::Tensor;

use crate::error::Fp4Error;
use crate::statistics::Calibration;
use crate::walk::select::planned_axes;

use super::batches::RecordedBatches;
use super::options::CalibrationOptions;
use super::pipeline::{DensePasses, Pace, Way, run};

impl Calibration {
    /// Calibrates a module with forward passes, once it is [run](Calibrate::run).
    pub fn of<M: Module>(model: &M) -> Calibrate<'_, M> {
        Calibrate::new(model)
    }
}

/// A calibration to be [run](Self::run); see [`Calibration::of`].
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fp4_modules::{Calibration, CalibrationOptions};
///
/// let device = Device::flex();
/// let model = LinearConfig::new(64, 32).init(&device);
/// let batches = [Tensor::<2>::random([128, 64], Distribution::Default, &device)];
/// let options = CalibrationOptions::default().memory(1 << 30);
/// let forward = |model: &Linear, batch| model.forward(batch);
/// let calibration = Calibration::of(&model).options(options).run(batches, forward)?;
/// assert_eq!(calibration.get("weight", 0).unwrap().rows(), 128);
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[must_use = "nothing happens until it is run"]
pub struct Calibrate<'a, M> {
    model: &'a M,
    options: CalibrationOptions<'a>,
}

impl<M> fmt::Debug for Calibrate<'_, M> {
    /// Without the module.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calibrate").field("options", &self.options).finish_non_exhaustive()
    }
}

impl<'a, M: Module> Calibrate<'a, M> {
    pub(crate) fn new(model: &'a M) -> Self {
        Self { model, options: CalibrationOptions::default() }
    }

    /// Sets what is gathered, on which devices, in how much memory, and where to report
    /// progress.
    pub fn options(mut self, options: CalibrationOptions<'a>) -> Self {
        self.options = options;
        self
    }

    /// Runs the module over batches and sums up the inputs of its layers.
    ///
    /// `forward` gets the module and a batch, both on a device that records instead of computing:
    /// it has to run the module on the batch alone, and cannot read values. The operations then run
    /// on the device of the module.
    ///
    /// # Errors
    /// [`Fp4Error::Recording`] if the forward pass reads values (its control flow depends on data)
    /// or fails, or if batches run different layers; [`Fp4Error::Attached`] if something is
    /// attached to a parameter; [`Fp4Error::Parameter`] naming a weight whose inputs are not
    /// finite; [`Fp4Error::Device`]; [`Fp4Error::Cache`] for a file of the cache that is not whole
    /// or belongs to something else; with [`for_config`](CalibrationOptions::for_config) the errors
    /// of [`quantize_fp4`](crate::Fp4Module::quantize_fp4) for a configuration that does not fit
    /// the module.
    pub fn run<I: Module, O>(
        self,
        batches: impl IntoIterator<Item = I>,
        mut forward: impl FnMut(&M, I) -> O,
    ) -> Result<Calibration, Fp4Error> {
        let Self { model, options } = self;
        let wanted = options.config.as_ref().map(|config| planned_axes(model, config));
        let wanted = wanted.transpose()?;
        let mut forward = |model: &M, batch| (forward(model, batch), Vec::new());
        let batches = RecordedBatches::new(model, batches, &options.devices, wanted, &mut forward)?;
        Ok(gather(&batches, options)?.0)
    }
}

/// Sums up the inputs of the layers of an unchanged module over recorded batches. Returns the
/// outputs of each batch that are kept, too, as matrices.
///
/// # Errors
/// As [`run`].
pub(crate) fn gather<M: Module>(
    batches: &RecordedBatches<'_, M>,
    options: CalibrationOptions<'_>,
) -> Result<(Calibration, Vec<Vec<Tensor<2>>>), Fp4Error> {
    let in_flight = batches.in_flight(options.memory);
    let mut calibration = Calibration::new();
    calibration.set_unreached(batches.unreached());
    calibration.set_devices(batches.devices());
    let dense = DensePasses::None;
    let way = Way { in_flight, pace: Pace::Ahead, name: "dense", first: &[], dense };
    let outputs = run(batches, options, &way, |input, grams| {
        for (part, gram) in grams.into_iter().enumerate() {
            calibration.merge(input.uses(part), gram)?;
        }
        Ok(Vec::new())
    })?;
    Ok((calibration, outputs))
}
