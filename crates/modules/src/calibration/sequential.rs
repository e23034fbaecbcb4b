//! Weights quantized layer by layer, each by the inputs that the quantized layers before it leave.

use std::borrow::Cow;
use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::Device;
use burn_fp4_ops::Gram;

use crate::config::Fp4Config;
use crate::error::{Fp4Error, caught};
use crate::pack::inputs::Inputs;
use crate::pack::install::{PackSource, pack};
use crate::pack::measure::{Measured, measure};
use crate::pack::schedule::{Job, quantize_each};
use crate::pack::weight::{AnyWeight, HessianFactorCache, Quantized, WeightTask, dense_weights};
use crate::packed_weight::PackedWeight;
use crate::report::Fp4Report;
use crate::walk::plan::{Selection, WeightPlan};
use crate::walk::select::select;

use super::batches::{RecordedBatches, Replacement};
use super::layer_inputs::{LayerInput, WeightUse};
use super::options::CalibrationOptions;
use super::pipeline::{Pace, Way, run};

/// See [`Fp4Module::quantize_fp4_sequential`](crate::Fp4Module::quantize_fp4_sequential).
pub(crate) fn sequential<M: Module, I: Module, O>(
    module: &mut M,
    config: &Fp4Config,
    options: CalibrationOptions<'_>,
    batches: impl IntoIterator<Item = I>,
    mut forward: impl FnMut(&M, I) -> O,
) -> Result<Fp4Report, Fp4Error> {
    let mut selection = select(module, config)?;
    selection.check_calibration_used(config)?;
    let measured = measure(module, &selection, true)?;
    if !selection.needs_inputs() {
        return pack(module, &selection, PackSource { measured, ..PackSource::default() });
    }
    let options = options.for_config(config);
    let asking = selection.plans().filter(|(_, _, plan)| plan.asked.needs_inputs());
    let wanted = asking.map(|(_, parameter, plan)| (parameter.path.clone(), plan.layout.axis));
    let wanted = Some(wanted.collect());
    let batches = RecordedBatches::new(module, batches, &options.devices, wanted, &mut forward)?;
    let mut layers = LayerByLayer::new(module, &selection, &measured, batches.inputs());
    selection.check_calibrated(|at, _| layers.to_come.contains_key(&measured.tied_to(at)))?;
    let first = layers.quantize_without_inputs()?;
    // What layers are multiplied by depends on what was made of those before them.
    let name = serde_json::to_string(config).expect("plain data");
    let way = Way { in_flight: usize::MAX, pace: Pace::InTurn, name: &name, first: &first };
    let devices = batches.devices();
    run(&batches, options, &way, |input, grams| layers.take(input, &grams, &devices))?;
    let packed = layers.into_packed();
    drop((batches, first));
    pack(module, &selection, PackSource { measured, packed, ..PackSource::default() })
}

/// Weights that are quantized one after the other, as soon as all their inputs are known. Weights
/// are known by the number of the first parameter that is tied to them.
struct LayerByLayer<'a> {
    measured: &'a Measured,
    /// By path: the number of the weight, and its plan.
    plans: BTreeMap<&'a str, (usize, &'a WeightPlan)>,
    /// The dense values, by path.
    dense: BTreeMap<String, Box<dyn AnyWeight>>,
    /// Paths of parameters that are packed together, by weight.
    tied: BTreeMap<usize, Vec<&'a str>>,
    /// How many inputs are still to come, by weight that is quantized by these.
    to_come: BTreeMap<usize, usize>,
    /// Statistics of the inputs until now, by weight.
    inputs: BTreeMap<usize, Inputs<'static>>,
    /// The weights that are quantized already.
    packed: BTreeMap<usize, Quantized>,
}

impl<'a> LayerByLayer<'a> {
    fn new<M: Module>(
        module: &M,
        selection: &'a Selection,
        measured: &'a Measured,
        inputs: &[LayerInput],
    ) -> Self {
        let plans: BTreeMap<&str, (usize, &WeightPlan)> = selection
            .plans()
            .map(|(at, parameter, plan)| (parameter.path.as_str(), (measured.tied_to(at), plan)))
            .collect();
        let mut tied: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
        for (path, (at, _)) in &plans {
            tied.entry(*at).or_default().push(path);
        }
        let dense = dense_weights(module, |path| plans.contains_key(path));
        let mut layers = Self {
            measured,
            plans,
            dense,
            tied,
            to_come: BTreeMap::new(),
            inputs: BTreeMap::new(),
            packed: BTreeMap::new(),
        };
        for weight in inputs.iter().flat_map(|input| &input.weights) {
            if let Some((at, _)) = layers.weight_of(weight) {
                *layers.to_come.entry(at).or_default() += 1;
            }
        }
        layers
    }

    /// The weight that takes part in a product, and its plan, if the input of the product decides
    /// about its codes.
    fn weight_of(&self, weight: &WeightUse) -> Option<(usize, &'a WeightPlan)> {
        let &(at, plan) = self.plans.get(weight.path.as_str())?;
        let asks = plan.asked.needs_inputs() && plan.layout.axis == weight.axis;
        asks.then_some((at, plan))
    }

    /// Quantizes the weights that need no statistics, before the first layer runs; their new
    /// values.
    fn quantize_without_inputs(&mut self) -> Result<Vec<Replacement>, Fp4Error> {
        let mut replaced = Vec::new();
        for (&at, paths) in self.tied.iter().filter(|(at, _)| !self.to_come.contains_key(at)) {
            let (path, (_, plan)) = (paths[0], self.plans[paths[0]]);
            let task = WeightTask { plan, amax: self.measured.amax(at), inputs: None };
            let weight =
                caught(|| self.dense[path].pack(&task, &mut HessianFactorCache::default()));
            let quantized = weight.map_err(|problem| Fp4Error::at(path, problem))?;
            replaced.extend(self.rounded(at, &quantized.packed));
            self.packed.insert(at, quantized);
        }
        Ok(replaced)
    }

    /// Takes the statistics of an input, one Gram matrix for each of its parts, and quantizes the
    /// weights that this was the last input of; their new values.
    fn take(
        &mut self,
        input: &LayerInput,
        grams: &[Gram],
        devices: &[Device],
    ) -> Result<Vec<Replacement>, Fp4Error> {
        let complete = self.add(input, grams)?;
        let jobs = complete.iter().map(|(at, path, inputs)| {
            let (plan, amax) = (self.plans[*path].1, self.measured.amax(*at));
            let task = WeightTask { plan, amax, inputs: Some(inputs) };
            Job { path, task, dense: self.dense[*path].clone_box() }
        });
        let results = quantize_each(jobs.collect(), devices)?;
        let mut replaced = Vec::new();
        for ((at, ..), quantized) in complete.iter().zip(results) {
            replaced.extend(self.rounded(*at, &quantized.packed));
            self.packed.insert(*at, quantized);
        }
        Ok(replaced)
    }

    /// Adds the statistics of an input to the weights that are multiplied by it. Returns the
    /// weights, with a path of each, whose inputs are then complete.
    fn add<'g>(
        &mut self,
        input: &'g LayerInput,
        grams: &'g [Gram],
    ) -> Result<Vec<(usize, &'g str, Inputs<'g>)>, Fp4Error> {
        let mut complete = Vec::new();
        for weight in &input.weights {
            let Some((at, plan)) = self.weight_of(weight) else { continue };
            let mut sum: Inputs<'_> =
                self.inputs.remove(&at).unwrap_or_else(|| Inputs::new(plan.slices()));
            for (nth, slice) in weight.slices.clone().enumerate() {
                // One for all slices, or one for each.
                let gram = &grams[if grams.len() == 1 { 0 } else { nth }];
                let added = sum.add(slice, Cow::Borrowed(gram));
                added.map_err(|error| Fp4Error::at(&weight.path, error))?;
            }
            let left = self.to_come.get_mut(&at).expect("counted in the beginning");
            *left -= 1;
            if *left > 0 {
                self.inputs.insert(at, sum.into_owned());
            } else {
                complete.push((at, weight.path.as_str(), sum));
            }
        }
        Ok(complete)
    }

    /// The values of a packed weight for all the parameters that have its codes.
    fn rounded(&self, at: usize, packed: &PackedWeight) -> Vec<Replacement> {
        let rounded = |path: &&str| ((*path).to_owned(), self.dense[*path].rounded(packed));
        self.tied[&at].iter().map(rounded).collect()
    }

    /// Returns the quantized weights, and frees dense values and statistics.
    fn into_packed(self) -> BTreeMap<usize, Quantized> {
        self.packed
    }
}
