//! Forward passes over all batches, recorded, and what is done with them on devices.

use std::collections::BTreeSet;
use std::hash::Hash;
use std::path::Path;

use burn::module::Module;
use burn::tensor::Device;
use burn_fp4_ops::{FetchedGram, GramSum, Interpreter, OpsError, check_addable, is_host};
use burn_ir::TensorId;
use rayon::prelude::*;

use crate::error::Fp4Error;
use crate::pack::weight::AnyWeight;
use crate::transfer::moved;
use crate::walk::parameters::Walk;

use super::cache::{Cache, GramShape};
use super::execution::Execution;
use super::layer_inputs::LayerInput;
use super::recorder::Recorder;
use super::recording::{Memory, Recording};
use super::values::Values;

/// The path of a weight, and its new values.
pub(crate) type Replacement = (String, Box<dyn AnyWeight>);

/// Forward passes over all batches, recorded.
pub(crate) struct RecordedBatches<'a, M> {
    model: &'a M,
    /// The devices that batches run on, and the model on each.
    replicas: Vec<(Device, M)>,
    recordings: Vec<Recording>,
    values: Values,
    unreached: BTreeSet<String>,
}

impl<'a, M: Module> RecordedBatches<'a, M> {
    /// Records the batches; `forward` says which of its outputs are kept. If only the inputs of
    /// some weights are wanted, by path and axis, the others are left out.
    pub(crate) fn new<I: Module, O>(
        model: &'a M,
        batches: impl IntoIterator<Item = I>,
        devices: &[Device],
        wanted: Option<BTreeSet<(String, usize)>>,
        forward: &mut impl FnMut(&M, I) -> (O, Vec<TensorId>),
    ) -> Result<Self, Fp4Error> {
        let walk = Walk::over_values(model);
        for parameter in &walk.parameters {
            if let Some(name) = &parameter.reparameterization {
                let (path, name) = (parameter.path.clone(), name.clone());
                return Err(Fp4Error::Attached { path, name });
            }
        }
        let replicas = replicate(model, devices)?;
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
                recording.keep_inputs_of(wanted);
            }
        }
        let Some(first) = recordings.first() else {
            return Err(Fp4Error::Recording { problem: "there are no batches".to_owned() });
        };
        if !recordings.iter().all(|recording| recording.runs_like(first)) {
            let problem = "batches run different layers, or in another order".to_owned();
            return Err(Fp4Error::Recording { problem });
        }
        Ok(Self { model, replicas, recordings, values: recorder.into_values(), unreached })
    }

    /// The devices that batches run on.
    pub(crate) fn devices(&self) -> Vec<Device> {
        self.replicas.iter().map(|(device, _)| device.clone()).collect()
    }

    /// Batches whose activations fit into some memory of every device, at least one on each.
    /// Batches that no input is gathered of run one after the other.
    pub(crate) fn in_flight(&self, memory: usize) -> usize {
        if self.inputs().is_empty() {
            return self.replicas.len();
        }
        let Memory { peak, waiting } = self.memory_of_pass();
        let left = memory.saturating_sub(self.values.shared_bytes()).saturating_sub(peak);
        let on_each = left.checked_div(waiting).unwrap_or(usize::MAX);
        on_each.max(1).saturating_mul(self.replicas.len())
    }

    /// Batches of those in flight that run at the same time in some memory. On hosts one thread
    /// runs most operations: as many as there are threads. Other devices share each operation among
    /// their units: one.
    pub(crate) fn running(&self, memory: usize, in_flight: usize) -> usize {
        if !self.replicas.iter().all(|(device, _)| is_host(device)) {
            return 1;
        }
        let Memory { peak, waiting } = self.memory_of_pass();
        let taken = in_flight.saturating_mul(waiting).saturating_add(self.values.shared_bytes());
        let fit = memory.saturating_sub(taken).checked_div(peak).unwrap_or(usize::MAX);
        fit.clamp(1, rayon::current_num_threads())
    }

    /// The most memory that a pass takes.
    fn memory_of_pass(&self) -> Memory {
        let passes = self.recordings.iter().map(|recording| recording.memory(&self.values));
        passes.fold(Memory::default(), |most, pass| Memory {
            peak: most.peak.max(pass.peak),
            waiting: most.waiting.max(pass.waiting),
        })
    }

    /// Paths of matrices that nothing is multiplied by.
    pub(crate) fn unreached(&self) -> BTreeSet<String> {
        self.unreached.clone()
    }

    /// The forward passes, one for each batch.
    pub(crate) fn recordings(&self) -> &[Recording] {
        &self.recordings
    }

    /// The inputs of layers, in the order of execution.
    pub(crate) fn inputs(&self) -> &[LayerInput] {
        &self.recordings[0].inputs
    }

    /// The values that recordings share, on each of the devices, by number.
    pub(crate) fn constants(&self) -> Result<Vec<Interpreter>, OpsError> {
        let on = |(device, _): &(Device, M)| -> Result<Interpreter, OpsError> {
            let mut constants = Interpreter::on(device)?;
            for (number, data) in self.values.shared() {
                constants.insert_data(TensorId::new(number as u64), data.clone());
            }
            Ok(constants)
        };
        self.replicas.iter().map(on).collect()
    }

    /// Starts batches, on one device after the other.
    pub(crate) fn start<'r>(
        &self,
        chunk: &'r [Recording],
        constants: &mut [Interpreter],
    ) -> Result<Vec<Execution<'r>>, Fp4Error> {
        let devices = (0..self.replicas.len()).cycle();
        let passes = chunk.iter().zip(devices).map(|(recording, at)| {
            let (device, model) = &self.replicas[at];
            Execution::start(device, model, recording, &self.values, &mut constants[at])
        });
        passes.collect()
    }

    /// The shape of the statistics of an input of layers over some batches.
    pub(crate) fn gram_shape(
        &self,
        chunk: &[Recording],
        at: usize,
        blocks: Option<usize>,
    ) -> GramShape {
        let input = &self.inputs()[at];
        let (slices, channels) = (input.slices, input.channels());
        let block_size = blocks.filter(|size| channels.is_multiple_of(*size)).unwrap_or(channels);
        let rows = chunk.iter().map(|recording| recording.inputs[at].rows()).sum();
        GramShape { slices, channels, block_size, rows, drifts: false }
    }

    /// Replaces the values of weights from an input on: what reads them before runs first.
    pub(crate) fn replace(
        &self,
        passes: &mut [Execution<'_>],
        at: usize,
        replaced: &[Replacement],
    ) -> Result<(), Fp4Error> {
        // Where statistics came from the cache nothing has run yet, and something may depend on the
        // present values.
        for pass in &mut *passes {
            let paths = replaced.iter().map(|(path, _)| path.as_str());
            pass.finish_reading(paths, at);
        }
        self.exchange(passes, replaced)
    }

    /// Replaces the values of weights, the same for all batches on a device.
    pub(crate) fn exchange(
        &self,
        passes: &mut [Execution<'_>],
        replaced: &[Replacement],
    ) -> Result<(), Fp4Error> {
        let weights = replaced.iter().map(|(_, weight)| weight.device());
        let all: Vec<_> = self.devices().into_iter().chain(weights).collect();
        let replicas = moved(&all, || {
            let everywhere = |(_, weight): &Replacement| -> Vec<_> {
                self.replicas.iter().map(|(device, _)| weight.to_device(device)).collect()
            };
            replaced.iter().map(everywhere).collect::<Vec<_>>()
        })?;
        for ((path, _), weights) in replaced.iter().zip(&replicas) {
            for (pass, weight) in passes.iter_mut().zip(weights.iter().cycle()) {
                pass.replace(path, &**weight)?;
            }
        }
        Ok(())
    }

    /// Sums up the parts of an input of layers over batches, some of which run at the same time,
    /// and their drift from those of dense passes, if there are any.
    pub(crate) fn sum(
        &self,
        [passes, dense]: [&mut [Execution<'_>]; 2],
        running: usize,
        at: usize,
        shape: &GramShape,
    ) -> Result<Vec<FetchedGram>, Fp4Error> {
        let input = &self.inputs()[at];
        let named = |problem| input.named(problem);
        let GramShape { slices, channels, block_size, .. } = *shape;
        let sum = |_| match block_size == channels {
            true => Ok(GramSum::new(channels)),
            false => GramSum::in_blocks(channels, block_size),
        };
        let mut sums = (0..slices).map(sum).collect::<Result<Vec<_>, _>>().map_err(named)?;
        let parts = |pass: &mut Execution<'_>| {
            let of_pass = &pass.recording.inputs[at];
            pass.advance(of_pass.at);
            of_pass.cut(pass.interpreter.matrix(&of_pass.tensor))
        };
        let all_parts = |passes: &mut [Execution<'_>]| -> Vec<_> {
            match passes {
                [pass] => vec![parts(pass)],
                _ => passes.par_iter_mut().map(parts).collect(),
            }
        };
        let dense = if shape.drifts { dense } else { &mut [] };
        let mut dense = dense.chunks_mut(running);
        for passes in passes.chunks_mut(running) {
            let found = all_parts(passes);
            let mut dense = dense.next().map(all_parts).unwrap_or_default().into_iter();
            // In the order of the batches.
            for parts in found {
                let mut dense = dense.next().unwrap_or_default().into_iter();
                for (sum, part) in sums.iter_mut().zip(parts) {
                    match dense.next() {
                        Some(dense) => sum.add_with_drift(part, dense).map_err(named)?,
                        None => sum.add(part).map_err(named)?,
                    }
                }
            }
        }
        sums.into_iter().map(|sum| sum.fetch().map_err(named)).collect()
    }

    /// The cache of this module and these batches, run in some way.
    pub(crate) fn open(&self, directory: &Path, way: &impl Hash) -> Result<Cache, Fp4Error> {
        let mut hasher = Cache::digest_of(self.model)?;
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
fn replicate<M: Module>(model: &M, devices: &[Device]) -> Result<Vec<(Device, M)>, Fp4Error> {
    let home = match &model.devices()[..] {
        [device] => device.clone().inner(),
        devices => {
            let problem = format!("the module is on {} devices, not one", devices.len());
            return Err(Fp4Error::Recording { problem });
        }
    };
    if devices.is_empty() {
        return Ok(vec![(home, model.clone())]);
    }
    let devices: Vec<_> = devices.iter().map(|device| device.clone().inner()).collect();
    if let Some(twice) = (1..devices.len()).find(|&at| devices[..at].contains(&devices[at])) {
        let problem = format!("{:?} is named twice", devices[twice]);
        return Err(Fp4Error::Recording { problem });
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
