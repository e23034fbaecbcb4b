//! Statistics of the inputs of layers, from forward passes of a module as it is.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hash;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread::{self, ScopedJoinHandle};

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_fp4_ops::{FetchedGram, Gram, GramSum, OpsError, Replay, check_addable};
use burn_ir::{TensorId, TensorIr};
use xxhash_rust::xxh3::Xxh3;

use crate::cache::{Cache, Contents};
use crate::capture::{Recorder, Recording, Values};
use crate::layer_inputs::{LayerInput, Recorded};
use crate::paths::{TakeFloats, each_float};
use crate::select::{Walk, planned_axes};
use crate::weight::AnyWeight;
use crate::{Calibration, Fp4Config, Fp4Error};

/// What is gathered, how much at a time, and where it is kept.
pub struct CalibrationOptions<'a> {
    memory: usize,
    /// What it is gathered for, without a calibration.
    config: Option<Fp4Config>,
    pub(crate) devices: Vec<Device>,
    cache: Option<PathBuf>,
    progress: Box<dyn FnMut(CalibrationProgress) + 'a>,
}

/// How far a calibration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CalibrationProgress {
    /// Inputs of layers whose statistics stand.
    pub done: usize,
    /// Of so many.
    pub total: usize,
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
    /// once and count once. What does not fit runs after the rest, from its beginning; at least one
    /// batch is in flight. The statistics of one input of a layer, f64 `[in, in]` or less for each
    /// slice of the weight, come on top.
    pub fn memory(mut self, bytes: usize) -> Self {
        self.memory = bytes;
        self
    }

    /// Gathers what this configuration asks for and no more: inputs of the weights that it selects,
    /// and of these `X^T X` whole for GPTQ, which is what is gathered without this, but only its
    /// blocks `[in / block_size, block_size, block_size]` for a search by Hessian. Of inputs that
    /// such blocks do not divide it is whole, and so are all if the configuration has several
    /// schemes.
    pub fn for_config(mut self, config: &Fp4Config) -> Self {
        self.config = Some(config.with_calibration(&Calibration::new()));
        self
    }

    /// The size of the blocks of which Gram matrices consist, unless they are whole.
    fn blocks(&self) -> Option<usize> {
        let config = self.config.as_ref()?;
        let only = config.gptq.is_none() && config.overrides.is_empty();
        (only && config.scheme.search.needs_hessians()).then_some(config.scheme.block_size)
    }

    /// Divides the batches among these devices, each with a copy of the module, and later the
    /// weights that are quantized by what was found. Without this, or of none, all happens on the
    /// device of the module.
    pub fn devices(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        self.devices = devices.into_iter().collect();
        self
    }

    /// Keeps statistics in files of this directory as soon as they stand. A calibration that was
    /// interrupted goes on from them, if module and batches are the same, bit for bit, and so are
    /// what is gathered, the configuration of a sequential quantization, and the batches in flight.
    pub fn cache(mut self, directory: impl Into<PathBuf>) -> Self {
        self.cache = Some(directory.into());
        self
    }

    /// Tells how far it is, each time the statistics of an input of layers stand.
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

    /// Runs the module over batches and sums up the inputs of its layers.
    ///
    /// `forward` gets the module and a batch, both on a device that records instead of computing:
    /// it has to run the module on the batch alone, and cannot read values. The operations then run
    /// on the device of the module.
    ///
    /// # Errors
    /// [`Fp4Error::Capture`] if the forward pass reads values (its control flow depends on data) or
    /// fails, or if batches run different layers; [`Fp4Error::Attached`] if something is attached
    /// to a parameter; [`Fp4Error::Parameter`] naming a weight whose inputs are not finite;
    /// [`Fp4Error::Device`]; [`Fp4Error::Cache`] for a file of the cache that is not whole or
    /// belongs to something else; with [`for_config`](CalibrationOptions::for_config) those of
    /// [`quantize_fp4`](crate::Fp4Module::quantize_fp4) for a configuration that does not fit the
    /// module.
    pub fn run<I: Module, O>(
        self,
        batches: impl IntoIterator<Item = I>,
        mut forward: impl FnMut(&M, I) -> O,
    ) -> Result<Calibration, Fp4Error> {
        let Self { model, options } = self;
        let wanted = options.config.as_ref().map(|config| planned_axes(model, config));
        let prepared = Prepared::new(model, batches, &options, wanted.transpose()?, &mut forward)?;
        let in_flight = prepared.in_flight(options.memory);
        let mut calibration = Calibration::new();
        calibration.set_unreached(prepared.unreached());
        calibration.set_devices(prepared.devices());
        prepared.run(options, in_flight, Pace::Ahead, "dense", &[], |input, grams| {
            for (part, gram) in grams.into_iter().enumerate() {
                calibration.merge(input.uses(part), gram)?;
            }
            Ok(Vec::new())
        })?;
        Ok(calibration)
    }
}

/// How inputs of layers follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Nothing runs before the weights are replaced that the statistics of the one before complete.
    InTurn,
    /// Devices go on at once.
    Ahead,
}

/// A weight to go on with, by path.
pub(crate) type Replacement = (String, Box<dyn AnyWeight>);

/// Statistics that are on their way into matrices, one for each part of an input.
struct Gathering<'scope> {
    /// Inputs of layers before it.
    done: usize,
    cached: bool,
    contents: Contents,
    grams: ScopedJoinHandle<'scope, Result<Vec<Gram>, OpsError>>,
}

/// Forward passes over all batches, recorded.
pub(crate) struct Prepared<'a, M> {
    model: &'a M,
    /// Where to run it, and it there.
    there: Vec<(Device, M)>,
    recordings: Vec<Recording>,
    values: Values,
    unreached: BTreeSet<String>,
}

impl<'a, M: Module> Prepared<'a, M> {
    /// Records the batches. If only the inputs of some weights are wanted, by path and axis, the
    /// others are left out.
    pub(crate) fn new<I: Module, O>(
        model: &'a M,
        batches: impl IntoIterator<Item = I>,
        options: &CalibrationOptions<'_>,
        wanted: Option<BTreeSet<(String, usize)>>,
        forward: &mut impl FnMut(&M, I) -> O,
    ) -> Result<Self, Fp4Error> {
        let walk = Walk::over_values(model);
        for parameter in &walk.parameters {
            if let Some(name) = &parameter.reparameterization {
                let (path, name) = (parameter.path.clone(), name.clone());
                return Err(Fp4Error::Attached { path, name });
            }
        }
        let there = copies(model, &options.devices)?;
        let mut recorder = Recorder::new()?;
        let recordings = batches.into_iter().map(|batch| recorder.record(model, batch, forward));
        let mut recordings = recordings.collect::<Result<Vec<_>, _>>()?;
        let matrices = walk.parameters.into_iter().filter(|parameter| parameter.shape.len() == 2);
        let mut unreached: BTreeSet<_> = matrices.map(|parameter| parameter.path).collect();
        for recording in &mut recordings {
            for weight in recording.inputs.iter().flat_map(|input| &input.weights) {
                unreached.remove(&weight.path);
            }
            if let Some(wanted) = &wanted {
                for input in &mut recording.inputs {
                    input
                        .weights
                        .retain(|weight| wanted.contains(&(weight.path.clone(), weight.axis)));
                }
                recording.inputs.retain(|input| !input.weights.is_empty());
            }
        }
        let Some(first) = recordings.first() else {
            return Err(Fp4Error::Capture { problem: "there are no batches".to_owned() });
        };
        let same = |recording: &Recording| {
            let uses = |recording: &Recording| -> Vec<_> {
                let inputs = recording.inputs.iter();
                inputs.map(|input| (input.slices, input.weights.clone())).collect()
            };
            uses(recording) == uses(first)
        };
        if !recordings.iter().all(same) {
            let problem = "batches run different layers, or in another order".to_owned();
            return Err(Fp4Error::Capture { problem });
        }
        Ok(Self { model, there, recordings, values: recorder.into_values(), unreached })
    }

    /// Where it runs.
    pub(crate) fn devices(&self) -> Vec<Device> {
        self.there.iter().map(|(device, _)| device.clone()).collect()
    }

    /// Batches whose activations fit into some memory of every device, at least one on each.
    pub(crate) fn in_flight(&self, memory: usize) -> usize {
        let (mut peak, mut waiting) = (0, 0);
        for recording in &self.recordings {
            let of_one = recording.memory(&self.values);
            (peak, waiting) = (of_one.peak.max(peak), of_one.waiting.max(waiting));
        }
        let left = memory.saturating_sub(self.values.shared_bytes()).saturating_sub(peak);
        let on_each = left.checked_div(waiting).unwrap_or(usize::MAX);
        on_each.max(1).saturating_mul(self.there.len())
    }

    /// Paths of matrices that nothing is multiplied by.
    pub(crate) fn unreached(&self) -> BTreeSet<String> {
        self.unreached.clone()
    }

    /// The inputs of layers, in the order of execution.
    pub(crate) fn inputs(&self) -> &[LayerInput] {
        &self.recordings[0].inputs
    }

    /// Runs the batches side by side, some at a time, from one input of layers to the next. `seen`
    /// takes the statistics of each, one Gram matrix for every part of it, and may give weights to
    /// go on with, unless devices go [ahead](Pace::Ahead) of it; `how` it makes these is what tells
    /// caches apart. Batches begin with the weights in `first` in the place of the module's.
    pub(crate) fn run(
        &self,
        mut options: CalibrationOptions<'_>,
        in_flight: usize,
        pace: Pace,
        how: &str,
        first: &[Replacement],
        mut seen: impl FnMut(&LayerInput, Vec<Gram>) -> Result<Vec<Replacement>, Fp4Error>,
    ) -> Result<(), Fp4Error> {
        let inputs = self.inputs();
        if inputs.is_empty() {
            return Ok(());
        }
        let in_flight = in_flight.min(self.recordings.len());
        let chunks: Vec<_> = self.recordings.chunks(in_flight).collect();
        let total = chunks.len() * inputs.len();
        let blocks = options.blocks();
        let cache = match &options.cache {
            Some(directory) => Some(self.open(directory, &(how, in_flight, blocks))?),
            None => None,
        };
        let mut finish = |Gathering { done, cached, contents, grams }: Gathering<'_>| {
            let input = &inputs[done % inputs.len()];
            let grams = match grams.join() {
                Ok(grams) => grams.map_err(|problem| input.named(problem))?,
                Err(panic) => resume_unwind(panic),
            };
            if let (Some(cache), false) = (&cache, cached) {
                cache.store(done, &contents, &grams)?;
            }
            let replaced = seen(input, grams)?;
            (options.progress)(CalibrationProgress { done: done + 1, total });
            Ok::<_, Fp4Error>(replaced)
        };
        let constants = self.there.iter().map(|(device, _)| self.constants(device));
        let mut constants = constants.collect::<Result<Vec<_>, _>>()?;
        thread::scope(|scope| {
            let mut waiting = None;
            for (number, chunk) in chunks.iter().enumerate() {
                let mut runs = self.start(chunk, &mut constants)?;
                self.exchange(&mut runs, first)?;
                for at in 0..inputs.len() {
                    let done = number * inputs.len() + at;
                    let contents = self.contents(chunk, at, blocks);
                    let known = match &cache {
                        Some(cache) => cache.load(done, &contents)?,
                        None => None,
                    };
                    let cached = known.is_some();
                    let grams = match known {
                        Some(grams) => scope.spawn(|| Ok(grams)),
                        None => {
                            let fetched = self.sum(&mut runs, at, &contents)?;
                            scope.spawn(|| fetched.into_iter().map(FetchedGram::gather).collect())
                        }
                    };
                    let gathering = Gathering { done, cached, contents, grams };
                    // Devices go on with the next while the host gathers one.
                    let ready = match pace {
                        Pace::Ahead => waiting.replace(gathering),
                        Pace::InTurn => Some(gathering),
                    };
                    let replaced = ready.map(&mut finish).transpose()?.unwrap_or_default();
                    // Devices that nothing is moved between need not wait for each other.
                    if !replaced.is_empty() {
                        self.replace(&mut runs, at, &replaced)?;
                    }
                }
            }
            waiting.map(finish).transpose()
        })?;
        Ok(())
    }

    /// The values on a device that recordings share, by number.
    fn constants(&self, device: &Device) -> Result<Replay, OpsError> {
        let mut constants = Replay::on(device)?;
        for (number, data) in self.values.shared() {
            constants.insert_data(TensorId::new(number as u64), data.clone());
        }
        Ok(constants)
    }

    /// Starts batches, on one device after the other.
    fn start<'r>(
        &self,
        chunk: &'r [Recording],
        constants: &mut [Replay],
    ) -> Result<Vec<Run<'r>>, Fp4Error> {
        let devices = (0..self.there.len()).cycle();
        let runs = chunk.iter().zip(devices).map(|(recording, at)| {
            let (device, model) = &self.there[at];
            Run::start(device, model, recording, &self.values, &mut constants[at])
        });
        runs.collect()
    }

    /// What the statistics of an input of layers have to be like.
    fn contents(&self, chunk: &[Recording], at: usize, blocks: Option<usize>) -> Contents {
        let input = &self.inputs()[at];
        let (slices, channels) = (input.slices, input.channels());
        let block_size = blocks.filter(|size| channels.is_multiple_of(*size)).unwrap_or(channels);
        let rows = chunk.iter().map(|recording| recording.inputs[at].rows()).sum();
        Contents { slices, channels, block_size, rows }
    }

    /// Goes on from an input with other values of weights: the same for all batches on a device.
    fn replace(
        &self,
        runs: &mut [Run<'_>],
        at: usize,
        replaced: &[Replacement],
    ) -> Result<(), Fp4Error> {
        // Where statistics came from the cache nothing has run yet, and something may depend on the
        // present values.
        for run in &mut *runs {
            let paths = replaced.iter().map(|(path, _)| path.as_str());
            run.finish_reading(paths, at);
        }
        self.exchange(runs, replaced)
    }

    /// Goes on with other values of weights, whatever has read them.
    fn exchange(&self, runs: &mut [Run<'_>], replaced: &[Replacement]) -> Result<(), Fp4Error> {
        let weights = replaced.iter().map(|(_, weight)| weight.device());
        let all: Vec<_> = self.devices().into_iter().chain(weights).collect();
        let there = moved(&all, || {
            let everywhere = |(_, weight): &Replacement| -> Vec<_> {
                self.there.iter().map(|(device, _)| weight.to_device(device)).collect()
            };
            replaced.iter().map(everywhere).collect::<Vec<_>>()
        })?;
        for ((path, _), there) in replaced.iter().zip(&there) {
            for (run, weight) in runs.iter_mut().zip(there.iter().cycle()) {
                run.replace(path, &**weight)?;
            }
        }
        Ok(())
    }

    /// Sums up the parts of an input of layers over batches.
    fn sum(
        &self,
        runs: &mut [Run<'_>],
        at: usize,
        contents: &Contents,
    ) -> Result<Vec<FetchedGram>, Fp4Error> {
        let input = &self.inputs()[at];
        let named = |problem| input.named(problem);
        let Contents { slices, channels, block_size, .. } = *contents;
        let sum = |_| match block_size == channels {
            true => Ok(GramSum::new(channels)),
            false => GramSum::in_blocks(channels, block_size),
        };
        let mut sums = (0..slices).map(sum).collect::<Result<Vec<_>, _>>().map_err(named)?;
        for run in runs {
            let of_run = &run.recording.inputs[at];
            run.advance(of_run.at);
            let parts = of_run.cut(run.replay.matrix(&of_run.tensor));
            for (sum, part) in sums.iter_mut().zip(parts) {
                sum.add(part).map_err(named)?;
            }
        }
        sums.into_iter().map(|sum| sum.fetch().map_err(named)).collect()
    }

    /// The cache of this module and these batches, run in some way.
    fn open(&self, directory: &Path, way: &impl Hash) -> Result<Cache, Fp4Error> {
        let mut parameters = Digest { hasher: Cache::digest(), error: None };
        each_float(self.model, &mut parameters);
        if let Some(error) = parameters.error {
            return Err(error);
        }
        let mut hasher = parameters.hasher;
        way.hash(&mut hasher);
        for input in self.inputs() {
            (input.slices, &input.weights).hash(&mut hasher);
        }
        for recording in &self.recordings {
            recording.digest(&self.values, &mut hasher);
        }
        Cache::open(directory, &hasher)
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

/// What moves tensors between devices, with these waited for before and after: Burn's transfers
/// wait neither for what still uses the memory that they write to, nor hold what they read from
/// until it is read.
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

/// Takes down the values of float parameters, one read after the other.
struct Digest {
    hasher: Xxh3,
    error: Option<Fp4Error>,
}

impl TakeFloats for Digest {
    fn take<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        if self.error.is_some() {
            return;
        }
        match param.val().without_autodiff().try_into_data() {
            Ok(data) => {
                (&path, data.dtype(), data.shape().as_slice()).hash(&mut self.hasher);
                self.hasher.update(data.as_bytes());
            }
            Err(error) => {
                self.error = Some(Fp4Error::at(path, OpsError::Device(format!("{error:?}"))));
            }
        }
    }
}

/// A forward pass under way.
struct Run<'a> {
    recording: &'a Recording,
    replay: Replay,
    next: usize,
}

impl<'a> Run<'a> {
    /// Takes the values that recordings share from `constants` on the same device.
    fn start<M: Module>(
        device: &Device,
        model: &M,
        recording: &'a Recording,
        values: &Values,
        constants: &mut Replay,
    ) -> Result<Self, Fp4Error> {
        let parameters = &recording.parameters;
        let mut insert = Insert { parameters, replay: Replay::on(device)?, error: None };
        each_float(model, &mut insert);
        if let Some(error) = insert.error {
            return Err(error);
        }
        let mut replay = insert.replay;
        for (id, &number) in &recording.values {
            let value = values.get(number);
            if value.is_shared() {
                let (shape, dtype) = (value.data.shape().clone(), value.data.dtype());
                let constant = TensorIr::uninit(TensorId::new(number as u64), shape, dtype);
                replay.share(*id, constants, &constant)?;
            } else {
                replay.insert_data(*id, value.data.clone());
            }
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

    /// Runs all operations before an input that read weights.
    fn finish_reading<'p>(&mut self, paths: impl Iterator<Item = &'p str>, input: usize) {
        let recording = self.recording;
        let at = recording.inputs[input].at;
        let until = paths.map(|path| recording.parameters[path].read_before(at)).max();
        self.advance(until.unwrap_or(0));
    }

    /// Goes on with another value of a weight, also where it has been brought into another form
    /// already.
    fn replace(&mut self, path: &str, weight: &dyn AnyWeight) -> Result<(), Fp4Error> {
        let recording = self.recording;
        // Nothing may read it.
        let Some(Recorded { id, views, .. }) = recording.parameters.get(path) else {
            return Ok(());
        };
        weight.insert(&mut self.replay, *id).map_err(|problem| Fp4Error::at(path, problem))?;
        // What nothing reads any more stays as it is.
        let next = self.next;
        for (view, _) in views.iter().filter(|(view, until)| *view < next && *until >= next) {
            self.replay.run(&recording.operations[*view]);
        }
        Ok(())
    }
}

/// Gives the operations the parameters of a module.
struct Insert<'a> {
    parameters: &'a BTreeMap<String, Recorded>,
    replay: Replay,
    error: Option<Fp4Error>,
}

impl TakeFloats for Insert<'_> {
    fn take<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        if let Some(recorded) = self.parameters.get(&path)
            && let Err(problem) = self.replay.insert(recorded.id, param.val())
        {
            self.error.get_or_insert(Fp4Error::at(path, problem));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Distribution;

    use super::*;

    /// A layer that is used twice, with its weight in another form, and one after it.
    fn forward(layers: &[Linear], x: Tensor<2>) -> Tensor<2> {
        let [twice, last] = layers else { panic!("two layers") };
        let weight = || twice.weight.val().transpose().transpose();
        let x = x.matmul(weight()).tanh();
        // Read apart from products.
        let sum = twice.weight.val().abs().sum_dim(0);
        let x = x.matmul(weight()).tanh() + sum;
        last.forward(x)
    }

    fn layers(device: &Device) -> Vec<Linear> {
        (0..2).map(|_| LinearConfig::new(8, 8).with_bias(false).init(device)).collect()
    }

    /// Statistics by input, where the first layer is negated and halved as soon as its inputs are
    /// known.
    fn in_turn(
        layers: &Vec<Linear>,
        batches: &[Tensor<2>],
        options: CalibrationOptions<'_>,
    ) -> Vec<Gram> {
        let run = &mut |layers: &Vec<Linear>, x| forward(layers, x);
        let prepared = Prepared::new(layers, batches.to_vec(), &options, None, run).unwrap();
        let mut found = Vec::new();
        let seen = |input: &LayerInput, mut grams: Vec<Gram>| {
            found.append(&mut grams);
            let complete = found.len() == 2 && input.weights[0].path == "0.weight";
            let halved = || layers[0].weight.val() * -0.5;
            let replaced =
                complete.then(|| -> Replacement { ("0.weight".to_owned(), Box::new(halved())) });
            Ok(replaced.into_iter().collect())
        };
        prepared.run(options, usize::MAX, Pace::InTurn, "halved", &[], seen).unwrap();
        found
    }

    #[test]
    fn what_goes_on_from_a_cache_is_what_was_never_interrupted() {
        let device = Device::flex();
        let layers = layers(&device);
        let random = |_| Tensor::random([5, 8], Distribution::Normal(0.0, 1.0), &device);
        let batches: Vec<Tensor<2>> = (0..2).map(random).collect();
        let directory =
            std::env::temp_dir().join(format!("burn-fp4-resumed-{}", std::process::id()));
        let options = || CalibrationOptions::default().cache(&directory);
        let expected = in_turn(&layers, &batches, CalibrationOptions::default());
        assert_eq!(expected.len(), 3);
        assert_eq!(in_turn(&layers, &batches, options()), expected);
        let of_model = std::fs::read_dir(&directory).unwrap().next().unwrap().unwrap().path();
        for kept in (0..3).rev() {
            for lost in kept..3 {
                std::fs::remove_file(of_model.join(format!("{lost:05}.safetensors"))).unwrap();
            }
            assert_eq!(in_turn(&layers, &batches, options()), expected, "{kept} of the cache");
        }
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn a_cache_is_told_apart_by_sign_and_position() {
        let device = Device::flex();
        let plain = layers(&device);
        let options = CalibrationOptions::default();
        let directory = std::env::temp_dir().join(format!("burn-fp4-apart-{}", std::process::id()));
        let open = |layers: &Vec<Linear>, x: Tensor<2>| {
            let run = &mut |layers: &Vec<Linear>, x| forward(layers, x);
            let prepared = Prepared::new(layers, [x], &options, None, run).unwrap();
            prepared.open(&directory, &()).unwrap();
        };
        let x = Tensor::<2>::random([5, 8], Distribution::Default, &device);
        let with = |change: fn(Tensor<2>) -> Tensor<2>| {
            let mut layers = plain.clone();
            layers[1].weight = layers[1].weight.clone().map(change);
            layers
        };
        open(&plain, x.clone());
        open(&with(|weight| -weight), x.clone());
        open(&with(|weight| weight.transpose()), x.clone());
        open(&with(|weight| weight.flip([0])), x.clone());
        open(&plain, x.clone().flip([0]));
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 5);
        open(&plain, x);
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 5);
        std::fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn only_wanted_inputs_are_gathered() {
        let device = Device::flex();
        let layers = layers(&device);
        let x = Tensor::<2>::random([5, 8], Distribution::Default, &device);
        let options = CalibrationOptions::default();
        let wanted = BTreeSet::from([("1.weight".to_owned(), 0)]);
        let run = &mut |layers: &Vec<Linear>, x| forward(layers, x);
        let prepared = Prepared::new(&layers, [x], &options, Some(wanted), run).unwrap();
        assert!(prepared.unreached().is_empty());
        let gathered = Cell::new(0);
        let options = CalibrationOptions::default().on_progress(|progress| {
            assert_eq!(progress.total, 1);
            gathered.set(progress.done);
        });
        let seen = |input: &LayerInput, grams: Vec<Gram>| {
            assert_eq!((input.weights[0].path.as_str(), grams.len()), ("1.weight", 1));
            Ok(Vec::new())
        };
        prepared.run(options, usize::MAX, Pace::Ahead, "dense", &[], seen).unwrap();
        assert_eq!(gathered.get(), 1);
    }
}
