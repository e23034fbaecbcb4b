//! [`CalibrationOptions`]: what is gathered, in how much memory, and where it is kept.

use std::fmt;
use std::path::PathBuf;

use burn::tensor::Device;
use burn_fp4_ops::search::Needs;

use crate::config::Fp4Config;
use crate::statistics::Calibration;

/// Options of a calibration: the statistics, the memory, the devices and the cache.
///
/// ```
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fp4_modules::{Calibration, CalibrationOptions, Fp4Config, Method};
///
/// # let cache = std::env::temp_dir().join(format!("burn-fp4-doc-cache-{}", std::process::id()));
/// # let device = Device::flex();
/// # let model = LinearConfig::new(64, 32).init(&device);
/// # let batches = [Tensor::<2>::random([128, 64], Distribution::Default, &device)];
/// # let forward = |model: &Linear, batch| model.forward(batch);
/// let config = Fp4Config::nvfp4().method(Method::Hessian);
/// let mut told = Vec::new();
/// let options = CalibrationOptions::default()
///     .memory(1 << 30)
///     .for_config(&config) // 4 blocks of 16 x 16 instead of 64 x 64
///     .devices([device.clone()]).cache(&cache)
///     .on_progress(|progress| told.push((progress.done, progress.total)));
/// let calibration = Calibration::of(&model).options(options).run(batches, forward)?;
/// assert!(!calibration.get("weight", 0).unwrap().is_whole());
/// assert_eq!(told, [(1, 1)]);
/// # std::fs::remove_dir_all(cache).unwrap();
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[must_use]
pub struct CalibrationOptions<'a> {
    pub(crate) memory: usize,
    /// The configuration that the statistics are for, without a calibration.
    pub(crate) config: Option<Fp4Config>,
    pub(crate) devices: Vec<Device>,
    pub(crate) cache: Option<PathBuf>,
    pub(crate) progress: Box<dyn FnMut(CalibrationProgress) + 'a>,
}

/// How far a calibration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CalibrationProgress {
    /// Inputs of layers whose statistics are complete.
    pub done: usize,
    /// All inputs of layers.
    pub total: usize,
}

impl fmt::Debug for CalibrationOptions<'_> {
    /// Without the function that progress is reported to.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CalibrationOptions")
            .field("memory", &self.memory)
            .field("config", &self.config)
            .field("devices", &self.devices)
            .field("cache", &self.cache)
            .finish_non_exhaustive()
    }
}

impl Default for CalibrationOptions<'_> {
    fn default() -> Self {
        let progress = Box::new(|_| {});
        Self { memory: 3 << 30, config: None, devices: Vec::new(), cache: None, progress }
    }
}

impl<'a> CalibrationOptions<'a> {
    /// Bytes that the activations of all batches in flight may take on a device at a time: 3 GiB.
    /// Tensors that batches and the module bring along count, too, but for parameters; those that
    /// are the same in several batches, such as tables of position encodings, are on every device
    /// once and count once. A pass ends with the last input that is gathered: what a model computes
    /// after it does not count. What does not fit runs after the rest, from its beginning; at least
    /// one batch is in flight. The statistics of one input of a layer, f64 `[in, in]` or less for
    /// each slice of the weight, come on top; with the drift that corrections take, twice f64 `[in,
    /// in]`.
    pub fn memory(mut self, bytes: usize) -> Self {
        self.memory = bytes;
        self
    }

    /// Gathers what this configuration asks for and no more: inputs of the weights that it selects,
    /// and of these `X^T X`: all of it for GPTQ and with a Hadamard transform, as without this, but
    /// only its blocks `[in / block_size, block_size, block_size]` for other methods. Of inputs
    /// that such blocks do not divide all of it is gathered, and of all inputs if the configuration
    /// has several schemes.
    pub fn for_config(mut self, config: &Fp4Config) -> Self {
        self.config = Some(config.with_calibration(&Calibration::new()));
        self
    }

    /// The size of the blocks of which Gram matrices consist, unless they are whole.
    pub(crate) fn blocks(&self) -> Option<usize> {
        let config = self.config.as_ref().filter(|config| config.overrides.is_empty())?;
        let only = match config.scheme.needs() {
            Needs::SecondMoments | Needs::BlockHessians => true,
            Needs::Nothing | Needs::Gram => false,
        };
        only.then_some(config.scheme.block_size)
    }

    /// Divides the batches among these devices, each with a copy of the module, and later the
    /// weights that are quantized by what was found. Without this, or of none, all happens on the
    /// device of the module.
    pub fn devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        self.devices = devices.into_iter().collect();
        self
    }

    /// Keeps statistics in files of this directory as soon as they are complete. A calibration that
    /// was interrupted continues from them if module and batches are the same, bit for bit, and so
    /// are what is gathered, the configuration of a sequential quantization, and the batches in
    /// flight.
    pub fn cache(mut self, directory: impl Into<PathBuf>) -> Self {
        self.cache = Some(directory.into());
        self
    }

    /// Calls `tell` each time the statistics of an input of layers are complete.
    pub fn on_progress(mut self, tell: impl FnMut(CalibrationProgress) + 'a) -> Self {
        self.progress = Box::new(tell);
        self
    }
}
