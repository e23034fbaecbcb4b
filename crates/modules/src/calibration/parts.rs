//! [`Fp4Parts`]: a module that does not fit into memory, quantized part by part.

use std::collections::BTreeMap;

use burn::backend::Capture;
use burn::module::Module;
use burn::tensor::Tensor;
use burn_fp4_checkpoints::{Fp4Weight, Model, Value};
use burn_ir::TensorId;

use crate::checkpoint::map::CheckpointMap;
use crate::checkpoint::outline::Outline;
use crate::checkpoint::save::outline;
use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::pack::job::Jobs;
use crate::pack::packed_parameter::settled_parameters;
use crate::pack::quantize::{attach, quantize_jobs};
use crate::report::{Fp4Report, Outcome, ParameterReport};
use crate::walk::parameters::{Parameter, Walk};
use crate::walk::select::{ModulePlan, ParameterPlan, select_among};

use super::batches::RecordedBatches;
use super::calibrate::gather;
use super::options::CalibrationOptions;
use super::pipeline::{DensePasses, Pace, Way, run};
use super::sequential::layer_by_layer;

/// The activations that a part reads or gives, for each batch.
type Activations<const D: usize> = Vec<Vec<Tensor<D>>>;

/// Inputs that the weights of a part are calibrated on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calibrated {
    /// Inputs as dense layers leave them, as by
    /// [`quantize_fp4`](crate::Fp4Module::quantize_fp4) with a calibration of the dense module.
    Dense,
    /// Inputs as the quantized layers before leave them, as by
    /// [`quantize_fp4_sequential`](crate::Fp4Module::quantize_fp4_sequential) without a
    /// [correction](burn_fp4_ops::Gptq::correction).
    Sequential,
    /// As [`Sequential`](Self::Sequential), with the correction. Pass each batch as quantized
    /// layers left it, then the same batches, in the same order, as dense layers left them: `[a,
    /// b, a', b']`. Parts return this order. For the first part both halves are equal.
    /// [`Fp4Parts::sequential`] chooses between the two.
    Corrected,
}

/// Decisions about a module of which only a part is in memory at a time.
///
/// A part is a module whose parameters have the paths that they have in the whole module: a
/// decoder as a `Vec<Option<Layer>>` with one layer, for example. Parts are quantized in the order
/// in which the forward pass runs them, each on the activations that the one before has left. The
/// codes are those of the whole module at once if as many batches are in flight, and so are the
/// entries of the report. Weights that share a tensor scale have to be in one part.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_fp4_modules::{
///     Calibrated, Calibration, CalibrationOptions, CheckpointMap, Fp4Config, Fp4Module, Fp4Parts,
///     Method,
/// };
///
/// let device = Device::flex();
/// let layers: Vec<_> = (0..2).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
/// let forward = |layers: &Vec<Linear>, x| layers.iter().fold(x, |x, layer| layer.forward(x));
/// let batch = Tensor::<2>::random([128, 64], Distribution::Default, &device);
/// let config = Fp4Config::nvfp4().method(Method::GPTQ);
///
/// let whole: Vec<Linear> = layers.clone(); // need not be initialized
/// let decided = Fp4Parts::new(&whole, &config)?;
/// let outline = decided.outline(&CheckpointMap::new())?; // for `Model::plan`
/// assert!(decided.needs_inputs() && outline.weights[0].is_quantized());
/// let mut activations = vec![vec![batch.clone()]];
/// let (mut packed, mut reports) = (Vec::new(), Vec::new());
/// for at in 0..2 {
///     let mut part: Vec<Option<Linear>> = vec![None, None];
///     part[at] = Some(layers[at].clone()); // or loaded from files
///     let run = |part: &Vec<Option<Linear>>, x: Vec<Tensor<2>>| {
///         let layer = part[at].as_ref().unwrap();
///         x.into_iter().map(|x| layer.forward(x)).collect()
///     };
///     let options = CalibrationOptions::default();
///     assert!(decided.part_needs_inputs(&part)?);
///     let dense = Calibrated::Dense;
///     let (report, outputs) =
///         decided.calibrate_and_quantize(&mut part, dense, options, activations, run)?;
///     reports.extend(report.parameters);
///     activations = outputs;
///     packed.extend(part.remove(at)); // or written to files
/// }
///
/// println!("{}", decided.report(reports)?);
///
/// let mut whole = layers;
/// let calibration = Calibration::of(&whole).run([batch], forward)?;
/// whole.quantize_fp4(&config.with_calibration(&calibration))?;
/// for (part, whole) in packed.iter().zip(&whole) {
///     assert_eq!(part.weight.val().into_data(), whole.weight.val().into_data());
/// }
/// # Ok::<(), burn_fp4_modules::Fp4Error>(())
/// ```
#[derive(Debug)]
pub struct Fp4Parts {
    config: Fp4Config,
    plan: ModulePlan,
    /// By path the place in the plan.
    places: BTreeMap<String, usize>,
}

impl Fp4Parts {
    /// Decides about every parameter of a module. Reads no values, and initializes no parameter.
    ///
    /// # Errors
    /// As [`quantize_fp4`](crate::Fp4Module::quantize_fp4) for a configuration that does not fit
    /// the module.
    pub fn new<M: Module>(whole: &M, config: &Fp4Config) -> Result<Self, Fp4Error> {
        let plan = select_among(settled_parameters(whole), config)?;
        let paths = plan.parameters.iter().map(|(parameter, _)| parameter.path.clone());
        let places = paths.zip(0..).collect();
        Ok(Self { config: config.clone(), plan, places })
    }

    /// Returns true if statistics of inputs decide about the codes of a weight of the module.
    #[must_use]
    pub fn needs_inputs(&self) -> bool {
        self.plan.needs_inputs()
    }

    /// Returns true if statistics of inputs decide about the codes of a weight of a part.
    ///
    /// # Errors
    /// [`Fp4Error::Part`] for a part of another module.
    pub fn part_needs_inputs<M: Module>(&self, part: &M) -> Result<bool, Fp4Error> {
        Ok(self.plan_of(settled_parameters(part))?.needs_inputs())
    }

    /// Returns the quantized module as it will be [saved](crate::Fp4Module::checkpoint_fp4),
    /// without values: for [`Model::plan`].
    ///
    /// # Errors
    /// [`Fp4Error::Rename`], [`Fp4Error::Group`] and [`Fp4Error::Experts`] for the map;
    /// [`Fp4Error::Mismatch`] for names that are not loaded back.
    pub fn outline(&self, map: &CheckpointMap) -> Result<Model<'static>, Fp4Error> {
        let parameters = self.plan.parameters.iter().map(|(parameter, _)| parameter);
        let Outline { mut model, of } = outline(parameters, map)?;
        for (weight, of) in model.weights.iter_mut().zip(of) {
            let (parameter, plan) = &self.plan.parameters[of[0]];
            let ParameterPlan::Quantize(plan) = plan else { continue };
            let placement = map.placement(&parameter.container, parameter.shape.len());
            let mut fp4 = Fp4Weight::outline(
                plan.layout.format,
                plan.layout.block_size,
                weight.shape().to_vec(),
                placement.input_first_in_files(),
                plan.layout.format.row().tensor_scale,
            );
            fp4.hadamard = plan.layout.hadamard;
            weight.value = Value::Fp4(fp4);
        }
        Ok(model)
    }

    /// Quantizes the weights of a part by methods that take no statistics of inputs. Weights that
    /// ask for some fall back to the squared error, as the report says.
    ///
    /// # Errors
    /// As [`quantize_fp4`](crate::Fp4Module::quantize_fp4); [`Fp4Error::Part`] for a part of
    /// another module.
    pub fn quantize<M: Module>(&self, part: &mut M) -> Result<Fp4Report, Fp4Error> {
        let selection = self.plan_of(Walk::over_values(part).parameters)?;
        let mut jobs = Jobs::new(&selection);
        jobs.measure(part, false)?;
        attach(part, &selection, jobs)
    }

    /// Returns how parts are calibrated one after the other: [corrected](Calibrated::Corrected) if
    /// the method of a weight asks for it.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::Device;
    /// use burn_fp4_modules::{Calibrated, Fp4Config, Fp4Parts, Method};
    ///
    /// let module = LinearConfig::new(64, 32).init(&Device::flex());
    /// let with = |method| Fp4Parts::new(&module, &Fp4Config::nvfp4().method(method));
    /// assert_eq!(with(Method::GPTQ)?.sequential(), Calibrated::Corrected);
    /// assert_eq!(with(Method::Hessian)?.sequential(), Calibrated::Sequential);
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    #[must_use]
    pub fn sequential(&self) -> Calibrated {
        if self.plan.corrects() { Calibrated::Corrected } else { Calibrated::Sequential }
    }

    /// Quantizes the weights of a part with statistics of their inputs over batches, and returns
    /// the activations that the part leaves: those of its [dense](Calibrated::Dense) weights, of
    /// its [quantized](Calibrated::Sequential) ones, or [both](Calibrated::Corrected).
    ///
    /// `forward` runs the part on the activations of a batch, as for
    /// [`Calibrate::run`](crate::Calibrate::run). To save work for the last part it may return
    /// none. One pass both calibrates and gives the outputs.
    ///
    /// # Errors
    /// As [`Calibrate::run`](crate::Calibrate::run) and
    /// [`quantize_fp4`](crate::Fp4Module::quantize_fp4); [`Fp4Error::Part`] for a part of another
    /// module; [`Fp4Error::Recording`] for an output that the part does not compute.
    pub fn calibrate_and_quantize<M: Module, const D: usize>(
        &self,
        part: &mut M,
        on: Calibrated,
        options: CalibrationOptions<'_>,
        batches: Vec<Vec<Tensor<D>>>,
        forward: impl FnMut(&M, Vec<Tensor<D>>) -> Vec<Tensor<D>>,
    ) -> Result<(Fp4Report, Vec<Vec<Tensor<D>>>), Fp4Error> {
        let selection = self.plan_of(Walk::over_values(part).parameters)?;
        let mut shapes = Vec::new();
        let mut forward = kept(forward, &mut shapes);
        let (report, outputs) = match on {
            Calibrated::Sequential | Calibrated::Corrected => {
                let dense = match on {
                    Calibrated::Corrected => DensePasses::OfSecondHalf,
                    _ => DensePasses::None,
                };
                if on == Calibrated::Corrected && !batches.len().is_multiple_of(2) {
                    let problem = format!(
                        "{} batches: a correction needs as many dense as quantized ones; append \
                         the dense activations",
                        batches.len()
                    );
                    return Err(Fp4Error::Recording { problem });
                }
                let options = (options, dense);
                layer_by_layer(part, &selection, &self.config, options, batches, &mut forward)?
            }
            Calibrated::Dense => {
                let options = options.for_config(&self.config);
                let wanted = Some(selection.axes_of_inputs());
                let devices = options.devices.clone();
                let recorded = RecordedBatches::new(part, batches, &devices, wanted, &mut forward)?;
                let (calibration, outputs) = gather(&recorded, options)?;
                drop(recorded);
                let jobs = Jobs::new(&selection);
                (quantize_jobs(part, &selection, jobs, &calibration)?, outputs)
            }
        };
        drop(forward);
        Ok((report, shaped(outputs, shapes)))
    }

    /// Runs a part over batches without a change, and returns the activations that it leaves: the
    /// same bits as by [`calibrate_and_quantize`](Self::calibrate_and_quantize), for parts that
    /// were quantized before. Sequential quantization needs the quantized values, dense:
    /// [`materialize`](Module::materialize) decodes them.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_modules::{CalibrationOptions, Fp4Config, Fp4Parts};
    ///
    /// let device = Device::flex();
    /// let mut part = LinearConfig::new(64, 32).init(&device);
    /// let decided = Fp4Parts::new(&part, &Fp4Config::nvfp4())?;
    /// let batches = vec![vec![Tensor::<2>::ones([2, 64], &device)]];
    /// let forward = |part: &Linear, x: Vec<Tensor<2>>| {
    ///     x.into_iter().map(|x| part.forward(x)).collect()
    /// };
    /// let outputs = decided.run(&part, CalibrationOptions::default(), batches, forward)?;
    /// assert_eq!(outputs[0][0].dims(), [2, 32]);
    /// decided.quantize(&mut part)?; // by a method without statistics
    /// # Ok::<(), burn_fp4_modules::Fp4Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Calibrate::run`](crate::Calibrate::run).
    pub fn run<M: Module, const D: usize>(
        &self,
        part: &M,
        options: CalibrationOptions<'_>,
        batches: Vec<Vec<Tensor<D>>>,
        forward: impl FnMut(&M, Vec<Tensor<D>>) -> Vec<Tensor<D>>,
    ) -> Result<Vec<Vec<Tensor<D>>>, Fp4Error> {
        let mut shapes = Vec::new();
        let mut forward = kept(forward, &mut shapes);
        let (devices, none) = (options.devices.clone(), Some(Default::default()));
        let recorded = RecordedBatches::new(part, batches, &devices, none, &mut forward)?;
        drop(forward);
        let in_flight = recorded.in_flight(options.memory);
        let dense = DensePasses::None;
        let way = Way { in_flight, pace: Pace::Ahead, name: "run", first: &[], dense };
        let outputs = run(&recorded, options, &way, |_, _| Ok(Vec::new()))?;
        Ok(shaped(outputs, shapes))
    }

    /// Puts the reports of parts together: one about the module. A parameter that no part had is
    /// reported as kept if it is.
    ///
    /// # Errors
    /// [`Fp4Error::Part`] for a weight to be quantized that no part had.
    pub fn report(
        &self,
        parts: impl IntoIterator<Item = ParameterReport>,
    ) -> Result<Fp4Report, Fp4Error> {
        let mut known: BTreeMap<String, ParameterReport> =
            parts.into_iter().map(|one| (one.path.clone(), one)).collect();
        let parameters = self.plan.parameters.iter().map(|(parameter, plan)| {
            match (known.remove(&parameter.path), plan) {
                (Some(known), _) => Ok(known),
                (None, ParameterPlan::Keep(reason)) => {
                    let outcome = Outcome::Kept { reason: reason.clone() };
                    Ok(parameter.report(outcome, parameter.bytes_now()))
                }
                (None, ParameterPlan::Quantize(_)) => {
                    let (path, found) =
                        (parameter.path.clone(), "quantizes it, and no part had it");
                    Err(Fp4Error::Part { path, found: found.to_owned() })
                }
            }
        });
        let parameters = parameters.collect::<Result<_, _>>()?;
        Ok(Fp4Report { parameters, unused: self.plan.unused.clone() })
    }

    /// The decisions about the parameters of a part.
    /// Checks that weights with one tensor scale are in one part.
    fn check_groups(&self, part: &ModulePlan) -> Result<(), Fp4Error> {
        let has = |path: &str| part.plans().any(|(_, one, _)| one.path == path);
        for (_, parameter, plan) in part.plans().filter(|(_, _, plan)| plan.shares.is_some()) {
            let mut sharing = self.plan.plans().filter(|(_, _, one)| one.shares == plan.shares);
            if let Some((_, other, _)) = sharing.find(|(_, other, _)| !has(&other.path)) {
                let other = &other.path;
                let found = format!("has one tensor scale for it and `{other}`, of another part");
                return Err(Fp4Error::Part { path: parameter.path.clone(), found });
            }
        }
        Ok(())
    }

    fn plan_of(&self, parameters: Vec<Parameter>) -> Result<ModulePlan, Fp4Error> {
        let plan = |parameter: Parameter| {
            let error = |found| Err(Fp4Error::Part { path: parameter.path.clone(), found });
            if let Some(name) = &parameter.reparameterization {
                let (path, name) = (parameter.path, name.clone());
                return Err(Fp4Error::Attached { path, name });
            }
            let Some(&at) = self.places.get(&parameter.path) else {
                return error("does not have it".to_owned());
            };
            let (whole, plan) = &self.plan.parameters[at];
            if whole.shape != parameter.shape {
                let (expected, found) = (&whole.shape, &parameter.shape);
                return error(format!("has {expected:?} there, and the part has {found:?}"));
            }
            Ok((parameter, plan.clone()))
        };
        let parameters = parameters.into_iter().map(plan).collect::<Result<_, _>>()?;
        let part = ModulePlan { parameters, unused: Vec::new() };
        self.check_groups(&part)?;
        Ok(part)
    }
}

/// A forward pass that keeps all of its outputs. Notes the shapes of these.
fn kept<M, const D: usize>(
    mut forward: impl FnMut(&M, Vec<Tensor<D>>) -> Vec<Tensor<D>>,
    shapes: &mut Vec<Vec<[usize; D]>>,
) -> impl FnMut(&M, Vec<Tensor<D>>) -> (Vec<Tensor<D>>, Vec<TensorId>) {
    move |part, batch| {
        let outputs = forward(part, batch);
        let id = |output: &Tensor<D>| {
            let recorded = output.clone().try_into_primitive::<Capture>();
            recorded.expect("computed where the batch is").id()
        };
        shapes.push(outputs.iter().map(Tensor::dims).collect());
        let ids = outputs.iter().map(id).collect();
        (outputs, ids)
    }
}

/// The matrices that were kept, in the shapes of the outputs.
fn shaped<const D: usize>(
    outputs: Vec<Vec<Tensor<2>>>,
    shapes: Vec<Vec<[usize; D]>>,
) -> Activations<D> {
    let of_batch = |(outputs, shapes): (Vec<Tensor<2>>, Vec<[usize; D]>)| {
        outputs.into_iter().zip(shapes).map(|(output, shape)| output.reshape(shape)).collect()
    };
    outputs.into_iter().zip(shapes).map(of_batch).collect()
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Device, Distribution};
    use burn_fp4_ops::Gptq;
    use burn_fp4_ops::search::Method;

    use super::*;
    use crate::Fp4Module;
    use crate::statistics::Calibration;

    /// Leaves a sum, and an update of it.
    #[derive(Module, Debug)]
    struct Block {
        mix: Linear,
        up: Linear,
        down: Linear,
    }

    impl Block {
        fn forward(&self, activations: Vec<Tensor<2>>) -> Vec<Tensor<2>> {
            let hidden = activations.into_iter().reduce(|sum, update| sum + update).unwrap();
            let hidden = hidden.clone() + self.mix.forward(hidden);
            let update = self.down.forward(self.up.forward(hidden.clone()).tanh());
            vec![hidden, update]
        }
    }

    fn blocks(device: &Device) -> Vec<Block> {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        let block = |_| Block { mix: linear(32, 32), up: linear(32, 64), down: linear(64, 32) };
        (0..3).map(block).collect()
    }

    fn whole_forward(blocks: &[Block], x: Tensor<2>) -> Vec<Tensor<2>> {
        blocks.iter().fold(vec![x], |activations, block| block.forward(activations))
    }

    /// The report of the parts, and the packed blocks.
    fn in_parts(
        blocks: &[Block],
        config: &Fp4Config,
        on: Calibrated,
        memory: usize,
        batches: &[Tensor<2>],
    ) -> (Fp4Report, Vec<Block>) {
        let decided = Fp4Parts::new(&blocks.to_vec(), config).unwrap();
        let mut activations: Vec<_> = batches.iter().map(|batch| vec![batch.clone()]).collect();
        if on == Calibrated::Corrected {
            activations = [activations.clone(), activations].concat();
        }
        let (mut reports, mut packed) = (Vec::new(), Vec::new());
        for (at, block) in blocks.iter().enumerate() {
            let mut part: Vec<Option<Block>> = vec![None; blocks.len()];
            part[at] = Some(block.clone());
            let forward = |part: &Vec<Option<Block>>, activations| {
                part[at].as_ref().unwrap().forward(activations)
            };
            let options = || CalibrationOptions::default().memory(memory);
            let before = activations.clone();
            let (report, left) = decided
                .calibrate_and_quantize(&mut part, on, options(), activations, forward)
                .unwrap();
            reports.extend(report.parameters);
            // The same activations without quantizing.
            let mut dense = vec![None; blocks.len()];
            dense[at] = Some(block.clone());
            let quantized = part.clone().materialize();
            let run = |part, batches| decided.run(part, options(), batches, forward).unwrap();
            let again = match on {
                Calibrated::Dense => run(&dense, before),
                Calibrated::Sequential => run(&quantized, before),
                Calibrated::Corrected => {
                    let (first, second) = before.split_at(before.len() / 2);
                    [run(&quantized, first.to_vec()), run(&dense, second.to_vec())].concat()
                }
            };
            let data = |all: &[Vec<Tensor<2>>]| -> Vec<_> {
                all.iter().flatten().map(|one| one.to_data()).collect()
            };
            assert_eq!(data(&again), data(&left));
            activations = left;
            packed.extend(part.remove(at));
        }
        (decided.report(reports).unwrap(), packed)
    }

    #[test]
    fn parts_are_quantized_as_the_whole_is() {
        let device = Device::flex();
        let blocks = blocks(&device);
        let random = |rows| Tensor::random([rows, 32], Distribution::Normal(0.0, 1.0), &device);
        let batches: Vec<Tensor<2>> = [40, 40, 24, 40].map(random).to_vec();
        let gptq = |correction| {
            let method = Method::Gptq(Gptq { correction, ..Gptq::DEFAULT });
            Fp4Config::nvfp4().method(method).exclude("1.up.weight")
        };
        let forward = |blocks: &Vec<Block>, x| whole_forward(blocks, x);
        // One batch in flight, some, and all of them.
        for memory in [1, 60_000, usize::MAX] {
            for on in [Calibrated::Dense, Calibrated::Sequential, Calibrated::Corrected] {
                let config = gptq(if on == Calibrated::Corrected { 0.5 } else { 0.0 });
                let options = CalibrationOptions::default().memory(memory);
                let mut whole = blocks.clone();
                let expected = match on {
                    Calibrated::Dense => {
                        let calibrate =
                            Calibration::of(&whole).options(options.for_config(&config));
                        let found = calibrate.run(batches.clone(), forward).unwrap();
                        whole.quantize_fp4(&config.with_calibration(&found)).unwrap()
                    }
                    Calibrated::Sequential | Calibrated::Corrected => whole
                        .quantize_fp4_sequential(&config, options, batches.clone(), forward)
                        .unwrap(),
                };
                let (report, packed) = in_parts(&blocks, &config, on, memory, &batches);
                assert_eq!(report, expected, "{on:?}");
                let bits = |blocks: &Vec<Block>| {
                    let saved = blocks.checkpoint_fp4(&CheckpointMap::new()).unwrap().weights;
                    let bytes = |value| match value {
                        Value::Fp4(fp4) => [fp4.codes.into_owned(), fp4.scales.into_owned()],
                        Value::Plain(plain) => [plain.bytes.into_owned(), Vec::new()],
                        Value::Fp8(_) => unreachable!("none is FP8"),
                    };
                    saved.into_iter().map(|one| (one.name, bytes(one.value))).collect::<Vec<_>>()
                };
                assert_eq!(bits(&packed), bits(&whole), "{on:?}, {memory} bytes");
            }
        }
    }

    #[test]
    fn a_correction_takes_dense_batches_and_the_whole_matrix() {
        let device = Device::flex();
        let blocks = blocks(&device);
        let batches = |count| vec![vec![Tensor::<2>::ones([4, 32], &device)]; count];
        let quantize = |method, count| {
            let decided = Fp4Parts::new(&blocks, &Fp4Config::nvfp4().method(method)).unwrap();
            let forward = |blocks: &Vec<Block>, x: Vec<Tensor<2>>| {
                blocks.iter().fold(x, |x, block| block.forward(x))
            };
            let (on, options) = (Calibrated::Corrected, CalibrationOptions::default());
            let batches = batches(count);
            decided.calibrate_and_quantize(&mut blocks.clone(), on, options, batches, forward)
        };
        let error = quantize(Method::GPTQ, 3).unwrap_err();
        assert!(error.to_string().contains("append the dense activations"), "{error}");
        for method in [Method::GPTQ, Method::Hessian] {
            let (report, left) = quantize(method, 2).unwrap();
            assert_eq!((report.quantized().count(), left.len()), (9, 2));
        }
    }

    #[test]
    fn a_part_of_another_module_is_an_error() {
        let blocks = blocks(&Device::flex());
        let decided = Fp4Parts::new(&blocks, &Fp4Config::nvfp4()).unwrap();
        let mut more = [blocks.clone(), blocks.clone()].concat();
        let error = decided.quantize(&mut more).unwrap_err();
        assert!(matches!(&error, Fp4Error::Part { path, .. } if path == "3.mix.weight"), "{error}");
        let mut wide = blocks.clone();
        wide[0].up = LinearConfig::new(32, 96).init(&Device::flex());
        let error = decided.quantize(&mut wide).unwrap_err();
        assert!(error.to_string().contains("has [32, 64] there"), "{error}");
        let error = decided.report([]).unwrap_err();
        assert!(matches!(&error, Fp4Error::Part { .. }), "{error}");
        let mut part = blocks;
        decided.quantize(&mut part).unwrap();
        assert!(matches!(decided.quantize(&mut part), Err(Fp4Error::Attached { .. })));
    }

    #[test]
    fn an_outline_has_the_names_and_shapes_that_are_saved() {
        let mut blocks = blocks(&Device::flex());
        let config = Fp4Config::nvfp4().exclude("1.up.weight");
        let map = CheckpointMap::new();
        let outline = Fp4Parts::new(&blocks, &config).unwrap().outline(&map).unwrap();
        let facts = |model: &Model<'_>| -> Vec<_> {
            let weights = model.weights.iter();
            weights.map(|one| (one.name.clone(), one.shape().to_vec(), one.kind())).collect()
        };
        let dense = blocks.outline_fp4(&map).unwrap();
        assert_eq!(facts(&dense), facts(&blocks.checkpoint_fp4(&map).unwrap()));
        blocks.quantize_fp4(&config).unwrap();
        assert_eq!(facts(&outline), facts(&blocks.checkpoint_fp4(&map).unwrap()));
    }
}
