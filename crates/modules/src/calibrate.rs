//! Statistics of the inputs of layers, from forward passes of a module that knows nothing of it.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread::{self, ScopedJoinHandle};

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor};
use burn_fp4_ops::{FetchedGram, Fp4Scheme, Gram, GramSum, OpsError, Replay, check_addable};
use burn_ir::TensorId;

use crate::cache::Cache;
use crate::capture::{LayerInput, Recording};
use crate::paths::{TakeFloats, each_float};
use crate::quantize::read_vectors;
use crate::select::Walk;
use crate::{Calibration, Fp4Config, Fp4Error};

/// How much is calibrated at a time, and where it is kept.
pub struct CalibrationOptions<'a> {
    memory: usize,
    /// Of the Gram matrices only blocks of this size.
    blocks: Option<usize>,
    pub(crate) devices: Vec<Device>,
    cache: Option<PathBuf>,
    progress: Box<dyn FnMut(CalibrationProgress) + 'a>,
}

/// How far a calibration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CalibrationProgress {
    /// Inputs of layers that were seen.
    pub done: usize,
    /// Of so many.
    pub total: usize,
}

impl Default for CalibrationOptions<'_> {
    fn default() -> Self {
        let progress = Box::new(|_| {});
        Self { memory: 3 << 30, blocks: None, devices: Vec::new(), cache: None, progress }
    }
}

impl<'a> CalibrationOptions<'a> {
    /// Bytes that the activations of all batches in flight may take on a device at a time: 3 GiB. What does not fit runs after
    /// the rest, from its beginning; at least one batch is in flight. The statistics of one input of a layer, f64
    /// `[in, in]` or less, come on top.
    pub fn memory(mut self, bytes: usize) -> Self {
        self.memory = bytes;
        self
    }

    /// Gathers what this configuration asks for and no more: `X^T X` whole for GPTQ, which is what is gathered without
    /// this, but only its blocks `[in / block_size, block_size, block_size]` for a search by Hessian. Of inputs that
    /// such blocks do not divide it is whole.
    pub fn for_config(mut self, config: &Fp4Config) -> Self {
        let Fp4Scheme { search, block_size, .. } = config.scheme;
        let whole = config.gptq.is_some() || !search.needs_hessians();
        self.blocks = (!whole).then_some(block_size);
        self
    }

    /// Divides the batches among these devices, each with a copy of the module, and later the weights that are
    /// quantized by what was found. Without this, or of none, all happens on the device of the module.
    pub fn devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        self.devices = devices.into_iter().collect();
        self
    }

    /// Keeps statistics in files of this directory as soon as they stand. A calibration that was interrupted goes
    /// on from them, if module and batches are the same, and so are the configuration of a sequential quantization and
    /// the batches in flight.
    pub fn cache(mut self, directory: impl Into<PathBuf>) -> Self {
        self.cache = Some(directory.into());
        self
    }

    /// Tells how far it is, each time the inputs of a layer were seen.
    pub fn on_progress(mut self, tell: impl FnMut(CalibrationProgress) + 'a) -> Self {
        self.progress = Box::new(tell);
        self
    }
}

/// A calibration to be [run](Self::run); see [`Calibration::of`].
pub struct Calibrate<'a, M> {
    model: &'a M,
    options: CalibrationOptions<'a>,
}

impl<'a, M: Module> Calibrate<'a, M> {
    pub(crate) fn new(model: &'a M) -> Self {
        Self { model, options: CalibrationOptions::default() }
    }

    /// Sets what is gathered, where, in how much memory, and who is told.
    pub fn options(mut self, options: CalibrationOptions<'a>) -> Self {
        self.options = options;
        self
    }

    /// Runs the module over batches and sums up what its layers meet.
    ///
    /// `forward` gets the module and a batch, both on a device that records instead of computing: it has to run
    /// the module on the batch alone, and cannot read values. The operations then run on the device of the module.
    ///
    /// # Errors
    /// [`Fp4Error::Capture`] if the forward pass reads values (its control flow depends on data) or fails, or
    /// if batches meet different layers; [`Fp4Error::Attached`] if something is attached to a parameter;
    /// [`Fp4Error::Parameter`] naming a weight whose inputs are not finite; [`Fp4Error::Cache`].
    pub fn run<I: Module, O>(
        self,
        batches: impl IntoIterator<Item = I>,
        mut forward: impl FnMut(&M, I) -> O,
    ) -> Result<Calibration, Fp4Error> {
        let Self { model, options } = self;
        let prepared = Prepared::new(model, batches, &options.devices, &mut forward)?;
        let in_flight = prepared.in_flight(options.memory);
        let mut calibration = Calibration::new();
        calibration.set_unreached(prepared.unreached());
        calibration.set_devices(prepared.devices());
        prepared.run(options, in_flight, Pace::Ahead, "dense", |input, gram| {
            let uses = input.weights.iter().map(|weight| (weight.path.as_str(), weight.axis));
            calibration.merge(uses, gram)?;
            Ok(Vec::new())
        })?;
        Ok(calibration)
    }
}

/// How inputs of layers follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Nothing runs before what comes of the one before is known.
    InTurn,
    /// Devices go on at once.
    Ahead,
}

/// Statistics that are on their way into a matrix.
struct Gathering<'scope> {
    /// Inputs of layers before it.
    done: usize,
    cached: bool,
    gram: ScopedJoinHandle<'scope, Result<Gram, OpsError>>,
}

/// Forward passes over all batches, recorded.
pub(crate) struct Prepared<'a, M> {
    model: &'a M,
    /// Where to run it, and it there.
    there: Vec<(Device, M)>,
    recordings: Vec<Recording>,
    /// Paths of matrices.
    matrices: Vec<String>,
}

impl<'a, M: Module> Prepared<'a, M> {
    pub(crate) fn new<I: Module, O>(
        model: &'a M,
        batches: impl IntoIterator<Item = I>,
        devices: &[Device],
        forward: &mut impl FnMut(&M, I) -> O,
    ) -> Result<Self, Fp4Error> {
        let walk = Walk::over_values(model);
        for parameter in &walk.parameters {
            if let Some(name) = &parameter.reparameterization {
                let (path, name) = (parameter.path.clone(), name.clone());
                return Err(Fp4Error::Attached { path, name });
            }
        }
        let there = copies(model, devices)?;
        let recordings = batches.into_iter().map(|batch| Recording::of(model, batch, forward));
        let recordings = recordings.collect::<Result<Vec<_>, _>>()?;
        let Some(first) = recordings.first() else {
            return Err(Fp4Error::Capture { problem: "there are no batches".to_owned() });
        };
        let uses = |recording: &Recording| -> Vec<Vec<(String, usize)>> {
            let of = |input: &LayerInput| {
                input.weights.iter().map(|weight| (weight.path.clone(), weight.axis)).collect()
            };
            recording.inputs.iter().map(of).collect()
        };
        let expected = uses(first);
        if recordings.iter().any(|recording| uses(recording) != expected) {
            let problem = "batches meet different layers, or in another order".to_owned();
            return Err(Fp4Error::Capture { problem });
        }
        let matrices = walk.parameters.into_iter().filter(|parameter| parameter.shape.len() == 2);
        let matrices = matrices.map(|parameter| parameter.path).collect();
        Ok(Self { model, there, recordings, matrices })
    }

    /// Where it runs.
    pub(crate) fn devices(&self) -> Vec<Device> {
        self.there.iter().map(|(device, _)| device.clone()).collect()
    }

    /// Batches whose activations fit into some memory of every device, at least one on each.
    pub(crate) fn in_flight(&self, memory: usize) -> usize {
        let largest = |bytes: fn(&Recording) -> usize| self.recordings.iter().map(bytes).max();
        let peak = largest(|recording| recording.peak_bytes).unwrap_or(0);
        let waiting = largest(|recording| recording.waiting_bytes).unwrap_or(0);
        let on_each = memory.saturating_sub(peak).checked_div(waiting).unwrap_or(usize::MAX);
        on_each.max(1).saturating_mul(self.there.len())
    }

    /// Paths of matrices that nothing is multiplied by.
    pub(crate) fn unreached(&self) -> BTreeSet<String> {
        let inputs = self.recordings.iter().flat_map(|recording| &recording.inputs);
        let seen: BTreeSet<_> =
            inputs.flat_map(|input| &input.weights).map(|weight| weight.path.as_str()).collect();
        self.matrices.iter().filter(|path| !seen.contains(path.as_str())).cloned().collect()
    }

    /// What the layers meet, in the order of execution.
    pub(crate) fn inputs(&self) -> &[LayerInput] {
        &self.recordings[0].inputs
    }

    /// Runs the batches side by side, some at a time, from one input of layers to the next. `seen` takes what is known
    /// of each and may give weights, by path, to go on with, unless devices go [ahead](Pace::Ahead) of it; `how` it makes
    /// them is what tells caches apart.
    pub(crate) fn run(
        &self,
        mut options: CalibrationOptions<'_>,
        in_flight: usize,
        pace: Pace,
        how: &str,
        mut seen: impl FnMut(&LayerInput, Gram) -> Result<Vec<(String, Tensor<2>)>, Fp4Error>,
    ) -> Result<(), Fp4Error> {
        let in_flight = in_flight.min(self.recordings.len());
        let chunks: Vec<_> = self.recordings.chunks(in_flight).collect();
        let inputs = self.inputs();
        let total = chunks.len() * inputs.len();
        let cache = match &options.cache {
            Some(directory) => Some(self.open(directory, &(how, in_flight, options.blocks))?),
            None => None,
        };
        let blocks = options.blocks;
        let mut finish = |Gathering { done, cached, gram }: Gathering<'_>| {
            let input = &inputs[done % inputs.len()];
            let gram = match gram.join() {
                Ok(gram) => gram.map_err(|source| input.named(source))?,
                Err(panic) => resume_unwind(panic),
            };
            if let (Some(cache), false) = (&cache, cached) {
                cache.store(done, &gram)?;
            }
            let replaced = seen(input, gram)?;
            (options.progress)(CalibrationProgress { done: done + 1, total });
            Ok::<_, Fp4Error>(replaced)
        };
        thread::scope(|scope| {
            let mut waiting = None;
            for (number, chunk) in chunks.iter().enumerate() {
                let runs = chunk.iter().zip(self.there.iter().cycle());
                let runs =
                    runs.map(|(recording, (device, model))| Run::start(device, model, recording));
                let mut runs = runs.collect::<Result<Vec<_>, _>>()?;
                for at in 0..inputs.len() {
                    let done = number * inputs.len() + at;
                    let known = match &cache {
                        Some(cache) => cache.load(done)?,
                        None => None,
                    };
                    let cached = known.is_some();
                    let gram = match known {
                        Some(gram) => scope.spawn(|| Ok(gram)),
                        None => {
                            let fetched = self.sum(&mut runs, at, blocks)?;
                            scope.spawn(|| fetched.gather())
                        }
                    };
                    let gathering = Gathering { done, cached, gram };
                    // Devices go on with the next while the host gathers one.
                    let ready = match pace {
                        Pace::Ahead => waiting.replace(gathering),
                        Pace::InTurn => Some(gathering),
                    };
                    let replaced = ready.map(&mut finish).transpose()?.unwrap_or_default();
                    // Devices that nothing is moved between need not wait for each other.
                    if !replaced.is_empty() {
                        self.replace(&mut runs, &replaced)?;
                    }
                }
            }
            waiting.map(finish).transpose()
        })?;
        Ok(())
    }

    /// Goes on with other values of weights, by path: the same for all batches on a device.
    fn replace(
        &self,
        runs: &mut [Run<'_>],
        replaced: &[(String, Tensor<2>)],
    ) -> Result<(), Fp4Error> {
        let weights = replaced.iter().map(|(_, weight)| weight.device());
        let all: Vec<_> = self.devices().into_iter().chain(weights).collect();
        let there = moved(&all, || {
            let everywhere = |weight: &Tensor<2>| -> Vec<_> {
                let devices = self.there.iter().map(|(device, _)| device);
                devices.map(|device| weight.clone().to_device(device)).collect()
            };
            replaced.iter().map(|(_, weight)| everywhere(weight)).collect::<Vec<_>>()
        })?;
        for ((path, _), there) in replaced.iter().zip(&there) {
            for (run, weight) in runs.iter_mut().zip(there.iter().cycle()) {
                run.replace(path, weight)?;
            }
        }
        Ok(())
    }

    /// Sums up an input of layers over batches.
    fn sum(
        &self,
        runs: &mut [Run<'_>],
        at: usize,
        blocks: Option<usize>,
    ) -> Result<FetchedGram, Fp4Error> {
        let input = &self.inputs()[at];
        let channels = input.tensor.shape.last().copied().unwrap_or(1);
        let mut sum = match blocks {
            Some(size) if channels.is_multiple_of(size) => {
                GramSum::in_blocks(channels, size).map_err(|source| input.named(source))?
            }
            _ => GramSum::new(channels),
        };
        for run in runs {
            let of_run = &run.recording.inputs[at];
            run.advance(of_run.at);
            sum.add(run.replay.matrix(&of_run.tensor)).map_err(|source| input.named(source))?;
        }
        sum.fetch().map_err(|source| input.named(source))
    }

    /// The cache of this module and these batches, run in some way.
    fn open(&self, directory: &Path, way: &impl Hash) -> Result<Cache, Fp4Error> {
        let mut digests = Digests { found: Vec::new() };
        each_float(self.model, &mut digests);
        let digests = read_vectors(digests.found)?;
        let mut hasher = DefaultHasher::new();
        way.hash(&mut hasher);
        for (path, digest) in digests {
            path.hash(&mut hasher);
            digest.iter().for_each(|number| number.to_bits().hash(&mut hasher));
        }
        self.recordings.iter().for_each(|recording| recording.hash(&mut hasher));
        Cache::open(directory, hasher.finish())
    }
}

/// A module on each of some devices, or where it is.
fn copies<M: Module>(model: &M, devices: &[Device]) -> Result<Vec<(Device, M)>, Fp4Error> {
    let home = match &model.devices()[..] {
        [device] => device.clone().inner(),
        devices => {
            let problem = format!("the module is on {} devices, not one", devices.len());
            return Err(Fp4Error::Capture { problem });
        }
    };
    if devices.is_empty() {
        return Ok(vec![(home, model.clone())]);
    }
    let devices: Vec<_> = devices.iter().map(|device| device.clone().inner()).collect();
    if let Some(twice) = (1..devices.len()).find(|&at| devices[..at].contains(&devices[at])) {
        let problem = format!("{:?} is named twice", devices[twice]);
        return Err(Fp4Error::Capture { problem });
    }
    check_addable(&devices)?;
    // Clones share running statistics, so that these would be moved for all of them.
    let copy = |device: Device| match device == home {
        true => (device, model.clone()),
        false => (device.clone(), model.valid().to_device(&device)),
    };
    let all: Vec<_> = devices.iter().chain([&home]).cloned().collect();
    moved(&all, || devices.into_iter().map(copy).collect())
}

/// What moves tensors between devices, with these waited for before and after: Burn's transfers wait neither for what
/// still uses the memory that they write to, nor hold what they read from until it is read.
pub(crate) fn moved<R>(devices: &[Device], transfer: impl FnOnce() -> R) -> Result<R, Fp4Error> {
    if devices.iter().all(|device| *device == devices[0]) {
        return Ok(transfer());
    }
    let mut different: Vec<&Device> = Vec::new();
    for device in devices {
        if !different.contains(&device) {
            different.push(device);
        }
    }
    let wait = || -> Result<(), OpsError> {
        different
            .iter()
            .try_for_each(|device| device.sync())
            .map_err(|error| OpsError::Device(error.to_string()))
    };
    wait()?;
    let result = transfer();
    wait()?;
    Ok(result)
}

/// What tells the values of parameters apart: their largest magnitude, and the sum of their magnitudes in units of
/// 2^-20 of it. Integers add up to the same in any order.
struct Digests {
    found: Vec<(String, Tensor<1>)>,
}

impl TakeFloats for Digests {
    fn take<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        let magnitudes = param.val().without_autodiff().cast(DType::F32).abs();
        let largest = magnitudes.clone().max();
        let unit = largest.clone().clamp_min(f32::MIN_POSITIVE) / 2f32.powi(20);
        let sum = (magnitudes / unit.reshape([1; D])).int().sum();
        // An f32 holds 24 bits.
        let sum = sum.remainder_scalar(1 << 24).float().cast(DType::F32);
        self.found.push((path, Tensor::cat(vec![largest, sum], 0)));
    }
}

/// A forward pass under way.
struct Run<'a> {
    recording: &'a Recording,
    replay: Replay,
    next: usize,
}

impl<'a> Run<'a> {
    fn start<M: Module>(
        device: &Device,
        model: &M,
        recording: &'a Recording,
    ) -> Result<Self, Fp4Error> {
        let parameters = &recording.parameters;
        let mut insert = Insert { parameters, replay: Replay::on(device)?, error: None };
        each_float(model, &mut insert);
        if let Some(error) = insert.error {
            return Err(error);
        }
        let mut replay = insert.replay;
        for (id, data) in &recording.values {
            replay.insert_data(*id, data.clone());
        }
        Ok(Self { recording, replay, next: 0 })
    }

    /// Runs all operations before one.
    fn advance(&mut self, to: usize) {
        while self.next < to {
            self.replay.run(&self.recording.operations[self.next]);
            for tensor in &self.recording.forgotten[self.next] {
                self.replay.forget(tensor);
            }
            self.next += 1;
        }
    }

    /// Goes on with another value of a weight, wherever it has been brought into the shape of a product already.
    fn replace(&mut self, path: &str, weight: &Tensor<2>) -> Result<(), Fp4Error> {
        let named = |source| Fp4Error::Parameter { path: path.to_owned(), source };
        let id = self.recording.parameters[path];
        self.replay.insert(id, weight.clone()).map_err(named)?;
        let uses = self.recording.inputs.iter().flat_map(|input| &input.weights);
        let mut views: Vec<_> =
            uses.filter(|weight| weight.path == path).flat_map(|weight| &weight.views).collect();
        views.sort_unstable();
        views.dedup();
        for &view in views.into_iter().filter(|&&view| view < self.next) {
            self.replay.run(&self.recording.operations[view]);
        }
        Ok(())
    }
}

/// Gives the operations the parameters of a module.
struct Insert<'a> {
    parameters: &'a BTreeMap<String, TensorId>,
    replay: Replay,
    error: Option<Fp4Error>,
}

impl TakeFloats for Insert<'_> {
    fn take<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        if let Some(&id) = self.parameters.get(&path)
            && let Err(source) = self.replay.insert(id, param.val())
        {
            self.error.get_or_insert(Fp4Error::Parameter { path, source });
        }
    }
}
