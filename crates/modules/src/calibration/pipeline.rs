//! Runs recorded batches from one input of layers to the next, and gathers the statistics of each.
//!
//! ```text
//! for as many batches at a time as are in flight
//!     start     their passes, with the weights in place that they begin with
//!     for each input of layers, in the order of execution
//!         gather    its statistics: from the cache, or summed up on devices by passes that run
//!                   until there; a thread of the host puts the Gram matrices together
//!         finish    with them: store them, pass them to `seen`, report the progress
//!         replace   the weights that `seen` returns
//!     finish    the passes, if outputs of them are kept
//! ```
//!
//! With [dense passes](DensePasses) each batch also runs through weights that are not replaced, and
//! the drift of the inputs of the first pass from those of the second is gathered, too.
//!
//! [In turn](Pace::InTurn) an input is finished before the next is gathered. [Ahead](Pace::Ahead)
//! it is finished once the next is gathered, so that devices work while the host does: a pipeline
//! of depth one.

use std::iter;
use std::panic::resume_unwind;
use std::thread::{self, Scope, ScopedJoinHandle};

use burn::module::Module;
use burn::tensor::Tensor;
use burn_fp4_ops::{FetchedGram, Gram, OpsError};

use crate::error::Fp4Error;
use crate::transfer::caught;

use super::batches::{RecordedBatches, Replacement};
use super::cache::{Cache, GramShape};
use super::execution::Execution;
use super::layer_inputs::LayerInput;
use super::options::{CalibrationOptions, CalibrationProgress};
use super::recording::Recording;

/// How inputs of layers follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pace {
    /// Nothing runs before the weights are replaced that the statistics of the one before complete.
    InTurn,
    /// Devices do not wait, and no weights are replaced.
    Ahead,
}

/// Passes through dense weights, for the drift of inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DensePasses {
    /// Runs none.
    None,
    /// Runs every batch.
    OfAll,
    /// Runs the second half of all batches, which dense layers have left.
    OfSecondHalf,
}

/// A way to run batches.
pub(crate) struct Way<'a> {
    /// Batches that are started at a time.
    pub(crate) in_flight: usize,
    pub(crate) pace: Pace,
    /// The use of the statistics, which tells caches apart.
    pub(crate) name: &'a str,
    /// Weights to begin with, in the place of the module's.
    pub(crate) first: &'a [Replacement],
    pub(crate) dense: DensePasses,
}

/// Runs the batches. `seen` takes the statistics of each input of layers, one Gram matrix for every
/// part of it, and returns new values of weights: none if devices go [ahead](Pace::Ahead) of it.
/// Returns the outputs of each batch that are kept, as matrices.
///
/// # Errors
/// Errors of `seen`; [`Fp4Error::Parameter`] naming a weight whose inputs are not finite;
/// [`Fp4Error::Device`]; [`Fp4Error::Cache`].
pub(crate) fn run<M: Module>(
    batches: &RecordedBatches<'_, M>,
    options: CalibrationOptions<'_>,
    way: &Way<'_>,
    seen: impl FnMut(&LayerInput, Vec<Gram>) -> Result<Vec<Replacement>, Fp4Error>,
) -> Result<Vec<Vec<Tensor<2>>>, Fp4Error> {
    if batches.inputs().is_empty() && batches.recordings()[0].outputs.is_empty() {
        return Ok(Vec::new());
    }
    let all = batches.recordings();
    let (recordings, dense) = match way.dense {
        DensePasses::None => (all, &[][..]),
        DensePasses::OfAll => (all, all),
        DensePasses::OfSecondHalf => all.split_at(all.len() / 2),
    };
    let in_flight = way.in_flight.min(recordings.len());
    let blocks = options.blocks();
    let cache = match &options.cache {
        Some(directory) => {
            Some(batches.open(directory, &(way.name, in_flight, blocks, way.dense))?)
        }
        None => None,
    };
    let dense = dense.chunks(in_flight).chain(iter::repeat(&[][..]));
    let chunks: Vec<_> = recordings.chunks(in_flight).zip(dense).collect();
    let together = chunks.first().map_or(0, |(passes, dense)| passes.len() + dense.len());
    let running = batches.running(options.memory, together);
    let progress = options.progress;
    let pipeline = Pipeline { batches, chunks, running, blocks, cache, progress, seen };
    caught(|| pipeline.run(way.pace, way.first))
}

/// A run of batches.
struct Pipeline<'a, M, S> {
    batches: &'a RecordedBatches<'a, M>,
    /// Batches that are in flight at a time, with the ones that dense passes run.
    chunks: Vec<(&'a [Recording], &'a [Recording])>,
    /// Batches of these that run at the same time.
    running: usize,
    /// The size of the blocks of which Gram matrices consist, unless they are whole.
    blocks: Option<usize>,
    cache: Option<Cache>,
    progress: Box<dyn FnMut(CalibrationProgress) + 'a>,
    seen: S,
}

/// Statistics that a thread puts together, one Gram matrix for each part of an input.
struct Gathering<'scope> {
    /// Inputs of layers before it, over all chunks.
    number: usize,
    /// Set if they come from the cache.
    cached: bool,
    shape: GramShape,
    grams: ScopedJoinHandle<'scope, Result<Vec<Gram>, OpsError>>,
}

impl<M: Module, S> Pipeline<'_, M, S>
where
    S: FnMut(&LayerInput, Vec<Gram>) -> Result<Vec<Replacement>, Fp4Error>,
{
    fn run(mut self, pace: Pace, first: &[Replacement]) -> Result<Vec<Vec<Tensor<2>>>, Fp4Error> {
        let batches = self.batches;
        let mut outputs = Vec::new();
        let mut constants = batches.constants()?;
        thread::scope(|scope| {
            let mut waiting = None;
            for chunk in 0..self.chunks.len() {
                let (recordings, dense) = self.chunks[chunk];
                let mut passes = batches.start(recordings, &mut constants)?;
                let mut dense = batches.start(dense, &mut constants)?;
                batches.exchange(&mut passes, first)?;
                for input in 0..batches.inputs().len() {
                    let gathering = self.gather(scope, [&mut passes, &mut dense], chunk, input)?;
                    let ready = match pace {
                        Pace::Ahead => waiting.replace(gathering),
                        Pace::InTurn => Some(gathering),
                    };
                    let Some(ready) = ready else { continue };
                    let replaced = self.finish(ready)?;
                    // Devices that nothing is moved between need not wait for each other.
                    if !replaced.is_empty() {
                        batches.replace(&mut passes, input, &replaced)?;
                    }
                }
                outputs.extend(passes.into_iter().chain(dense).map(Execution::finish));
            }
            match waiting {
                Some(last) => self.finish(last).map(drop),
                None => Ok(()),
            }
        })?;
        Ok(outputs)
    }

    /// Starts to gather the statistics of an input of layers.
    fn gather<'scope>(
        &self,
        scope: &'scope Scope<'scope, '_>,
        passes: [&mut [Execution<'_>]; 2],
        chunk: usize,
        input: usize,
    ) -> Result<Gathering<'scope>, Fp4Error> {
        let number = chunk * self.batches.inputs().len() + input;
        let (recordings, dense) = self.chunks[chunk];
        let shape = self.batches.gram_shape(recordings, input, self.blocks);
        let drifts = !dense.is_empty() && shape.block_size == shape.channels;
        let shape = GramShape { drifts, ..shape };
        let known = match &self.cache {
            Some(cache) => cache.load(number, &shape)?,
            None => None,
        };
        let cached = known.is_some();
        let grams = match known {
            Some(grams) => scope.spawn(|| Ok(grams)),
            None => {
                let fetched = self.batches.sum(passes, self.running, input, &shape)?;
                scope.spawn(|| fetched.into_iter().map(FetchedGram::gather).collect())
            }
        };
        Ok(Gathering { number, cached, shape, grams })
    }

    /// Waits for statistics, stores them, and passes them on; the new values of weights.
    fn finish(&mut self, gathering: Gathering<'_>) -> Result<Vec<Replacement>, Fp4Error> {
        let Gathering { number, cached, shape, grams } = gathering;
        let inputs = self.batches.inputs();
        let input = &inputs[number % inputs.len()];
        let grams = match grams.join() {
            Ok(grams) => grams.map_err(|problem| input.named(problem))?,
            Err(panic) => resume_unwind(panic),
        };
        if let (Some(cache), false) = (&self.cache, cached) {
            cache.store(number, &shape, &grams)?;
        }
        let replaced = (self.seen)(input, grams)?;
        let total = self.chunks.len() * inputs.len();
        (self.progress)(CalibrationProgress { done: number + 1, total });
        Ok(replaced)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::collections::BTreeSet;

    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Device, Distribution, Tensor};

    use super::*;

    fn way(pace: Pace, name: &str) -> Way<'_> {
        let dense = DensePasses::None;
        Way { in_flight: usize::MAX, pace, name, first: &[], dense }
    }

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
        let pass = &mut |layers: &Vec<Linear>, x| (forward(layers, x), Vec::new());
        let recorded = RecordedBatches::new(layers, batches.to_vec(), &[], None, pass).unwrap();
        let mut found = Vec::new();
        let seen = |input: &LayerInput, mut grams: Vec<Gram>| {
            found.append(&mut grams);
            let complete = found.len() == 2 && input.weights[0].path == "0.weight";
            let halved = || layers[0].weight.val() * -0.5;
            let replaced =
                complete.then(|| -> Replacement { ("0.weight".to_owned(), Box::new(halved())) });
            Ok(replaced.into_iter().collect())
        };
        run(&recorded, options, &way(Pace::InTurn, "halved"), seen).unwrap();
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
    fn statistics_do_not_depend_on_how_many_batches_run_at_the_same_time() {
        let device = Device::flex();
        let layers = layers(&device);
        // Their sums are rounded in f64.
        let random = |at: i32| {
            Tensor::random([5, 8], Distribution::Normal(0.0, 1.0), &device) * 1e6f32.powi(at)
        };
        let batches: Vec<Tensor<2>> = (-2..3).map(random).collect();
        let in_pool = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let pass = &mut |layers: &Vec<Linear>, x| (forward(layers, x), Vec::new());
                let recorded = RecordedBatches::new(&layers, batches.clone(), &[], None, pass);
                let running = |memory| recorded.as_ref().unwrap().running(memory, 5);
                assert_eq!([running(1), running(usize::MAX)], [1, threads]);
                in_turn(&layers, &batches, CalibrationOptions::default())
            })
        };
        assert_eq!(in_pool(1), in_pool(3));
    }

    #[test]
    fn a_cache_is_told_apart_by_sign_and_position() {
        let device = Device::flex();
        let plain = layers(&device);
        let directory = std::env::temp_dir().join(format!("burn-fp4-apart-{}", std::process::id()));
        let open = |layers: &Vec<Linear>, x: Tensor<2>| {
            let pass = &mut |layers: &Vec<Linear>, x| (forward(layers, x), Vec::new());
            let recorded = RecordedBatches::new(layers, [x], &[], None, pass).unwrap();
            recorded.open(&directory, &()).unwrap();
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
        let wanted = BTreeSet::from([("1.weight".to_owned(), 0)]);
        let pass = &mut |layers: &Vec<Linear>, x| (forward(layers, x), Vec::new());
        let recorded = RecordedBatches::new(&layers, [x], &[], Some(wanted), pass).unwrap();
        assert!(recorded.unreached().is_empty());
        let gathered = Cell::new(0);
        let options = CalibrationOptions::default().on_progress(|progress| {
            assert_eq!(progress.total, 1);
            gathered.set(progress.done);
        });
        let seen = |input: &LayerInput, grams: Vec<Gram>| {
            assert_eq!((input.weights[0].path.as_str(), grams.len()), ("1.weight", 1));
            Ok(Vec::new())
        };
        run(&recorded, options, &way(Pace::Ahead, "dense"), seen).unwrap();
        assert_eq!(gathered.get(), 1);
    }
}
