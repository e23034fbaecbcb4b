//! [`QuantizeFolder`]: the model of a folder, of any size, quantized stage by stage.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::path::Path;
use std::time::{Instant, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail};
use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Device;
use burn_fp4::checkpoints::{
    CheckpointError, Model, Numbers, Output, Planned, Reader, Start, TensorScale, Value, Weight,
    WriteOptions,
};
use burn_fp4::{
    Calibrated, CalibrationOptions, Checkpoint, Fp4Config, Fp4Parts, Fp4Report, LoadCheckpoint,
    ParameterReport, WriteReport,
};
use examples::in_one_line;
use examples::progress::{self, ProgressBar};
use serde::{Deserialize, Serialize};

use super::folder::{Folder, names, narrow_outline, narrowed};
use super::model::Llama;
use super::part::{Activations, Part, Stage};
use super::quantize::{CalibrationWindows, QuantizeOptions, options};
use super::tokens::Tokens;

/// A folder to be quantized, and how.
///
/// One stage of the model is in memory at a time: it is loaded, calibrated on the activations that
/// the stage before has left, quantized and written. Memory holds its weights, the statistics of
/// their inputs, and the activations of the calibration windows.
///
/// The files have the bytes that they have if the model is quantized as a whole, unless another
/// number of batches fits into the memory for activations there: statistics are then summed up in
/// another order.
#[allow(missing_debug_implementations, reason = "a tokenizer and maps of files")]
pub struct QuantizeFolder<'a> {
    /// The source.
    pub folder: &'a Folder,
    /// Weights and methods, of `options` or of a recipe.
    pub config: &'a Fp4Config,
    /// Calibration.
    pub options: &'a QuantizeOptions,
    /// Text to calibrate on.
    pub tokens: &'a Tokens,
    /// Dialect of the files.
    pub dialect: &'a str,
    /// Device that quantizes.
    pub device: &'a Device,
    /// Go on where an interrupted run has stopped.
    pub resume: bool,
}

/// The outcome of a quantization.
#[derive(Debug)]
pub struct QuantizedFolder {
    /// The report about the model.
    pub report: Fp4Report,
    /// Number of files with tensors.
    pub files: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Time of each step, over all stages.
    pub seconds: Seconds,
}

/// Time of each step, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seconds {
    /// To open the folder and load weights.
    pub load: f64,
    /// To calibrate and quantize.
    pub quantize: f64,
    /// To write the files.
    pub save: f64,
}

/// A note in the journal on a weight that was quantized.
#[derive(Serialize, Deserialize)]
struct Note {
    report: ParameterReport,
    /// The bits of its tensor scales: a dialect may store reciprocals, which are rounded.
    tensor_scales: Vec<u32>,
}

impl QuantizeFolder<'_> {
    /// Quantizes the folder into a new one.
    ///
    /// # Errors
    /// A weight is missing or unknown, the text is shorter than a window, quantization fails, the
    /// dialect cannot hold a weight, something exists at `out`, an earlier run has left weights and
    /// this one does not resume it, or it runs in sequence and no method calibrates.
    pub fn run(&self, out: &Path) -> Result<QuantizedFolder> {
        let mut clock = Clock { device: self.device, since: Instant::now() };
        // Each stage brings the tables of positions along: as many rows as a window needs are
        // enough.
        let mut shapes = self.folder.config.clone();
        let context = self.options.calibration.context;
        shapes.max_position_embeddings = shapes.max_position_embeddings.min(context);
        let whole = Llama::<Linear>::new(&shapes, self.device)?;
        self.folder.check_dense(&whole)?;
        if self.resume && !self.can_resume() {
            bail!(
                "--resume: --sequential cannot go on with --hadamard or a GGUF file; remove what \
                 is unfinished and run the command without --resume"
            );
        }
        let decided = Fp4Parts::new(&whole, self.config)?;
        if self.options.sequential && !decided.needs_inputs() {
            bail!(
                "--sequential: no weight has a method that calibrates; choose gptq by --method or \
                 in the recipe, or leave --sequential out"
            );
        }
        let source = self.folder.checkpoint().model()?;
        let (outline, copied) = self.outline(&decided, &source)?;
        let planned = outline.plan(self.dialect, &WriteOptions::default())?;
        let mut output = self.create(&planned, out)?;
        let earlier = notes(&output)?;
        let load = clock.lap()?;
        let mut work = Work {
            job: self,
            whole: &whole,
            decided: &decided,
            outline: &outline,
            copied: &copied,
            reader: Reader::new(self.folder.checkpoint().container()),
            bar: progress::bar(0),
            clock,
            seconds: Seconds { load, ..Seconds::default() },
            reports: Vec::new(),
            earlier,
            calibrated: 0..0,
        };
        let done = work.stages(&mut output);
        work.bar.finish_and_clear();
        let Work { mut clock, mut seconds, reports, earlier, .. } = work;
        let partial = match done {
            Ok(()) => output.keep().to_owned(),
            Err(error) => {
                let any = (0..outline.weights.len()).any(|at| output.is_done(at));
                return Err(if any { self.unfinished(error, output.keep()) } else { error });
            }
        };
        output.finish().map_err(|error| self.unfinished(error.into(), &partial))?;
        seconds.save += clock.lap()?;
        let reports = earlier.into_values().map(|note| note.report).chain(reports);
        let mut report = decided.report(reports)?;
        for parameter in &mut report.parameters {
            set_bytes(parameter, &source, &outline);
        }
        let WriteReport { files, bytes, .. } = planned.report();
        Ok(QuantizedFolder { report, files, bytes, seconds })
    }

    /// Returns the files to be written, and which weights are copied: those that stay dense in the
    /// dtype and shape that they have in the source.
    fn outline<'s>(
        &self,
        decided: &Fp4Parts,
        source: &Model<'s>,
    ) -> Result<(Model<'s>, Vec<bool>)> {
        let mut outline: Model<'s> = decided.outline(&names())?;
        narrow_outline(&mut outline, self.folder.config.dtype.as_deref());
        let known = source.weights.iter().map(|weight| (weight.name.as_str(), &weight.value));
        let known: HashMap<&str, &Value<'s>> = known.collect();
        let copy = |weight: &mut Weight<'s>| {
            let (Value::Plain(planned), Some(Value::Plain(found))) =
                (&weight.value, known.get(weight.name.as_str()))
            else {
                return false;
            };
            let same = planned.dtype == found.dtype && planned.shape == found.shape;
            if same {
                weight.value = Value::Plain(found.clone());
            }
            same
        };
        let copied = outline.weights.iter_mut().map(copy).collect();
        let container = self.folder.checkpoint().container();
        outline.config = container.config().cloned();
        outline.sidecars = container.sidecars().to_vec();
        Ok((outline, copied))
    }

    /// Begins to write, or goes on.
    fn create<'p>(&self, planned: &'p Planned<'p>, out: &Path) -> Result<Output<'p>> {
        let start = if self.resume { Start::Resume } else { Start::First };
        planned.create(out, &self.task()?, start).map_err(|error| match error {
            CheckpointError::Unfinished { .. } if self.can_resume() => {
                anyhow!("{error}, or pass --resume to go on")
            }
            error => error.into(),
        })
    }

    /// Returns true if an interrupted run can be resumed. In sequence, what is done has to be read
    /// back: an unfinished GGUF file cannot be, nor transformed layers before all have a matrix.
    fn can_resume(&self) -> bool {
        let is_read_back = self.config.scheme.hadamard.is_none() && self.dialect != "gguf";
        is_read_back || !self.options.sequential
    }

    /// Says how to go on after an error.
    fn unfinished(&self, error: anyhow::Error, partial: &Path) -> anyhow::Error {
        let partial = partial.display();
        let failed = |cause: &(dyn std::error::Error + 'static)| cause.is::<std::io::Error>();
        let line = in_one_line(&error);
        if !self.can_resume() {
            return anyhow!("{line}; remove {partial} and run the command again");
        }
        if error.chain().any(failed) {
            return anyhow!(
                "{line}; run the same command with --resume to go on, or remove {partial}"
            );
        }
        anyhow!("{line}; add --resume after you fix the cause, or remove {partial} to start over")
    }

    /// Describes everything that the bytes follow from, for the journal.
    fn task(&self) -> Result<String> {
        let QuantizeOptions { sequential, calibration, .. } = self.options;
        let CalibrationWindows { windows, context, seed } = calibration;
        let mut hasher = DefaultHasher::new();
        self.tokens.hash(&mut hasher);
        let mut parts = vec![
            format!("the configuration {}", serde_json::to_string(self.config)?),
            format!("sequential: {sequential}, by {:?}", self.config.scheme.method),
            format!("--calibration-windows {windows} --context {context} --seed {seed}"),
            format!("tokens with the hash {:016x}", hasher.finish()),
            format!("{:?} in {:?}", self.device, self.device.settings().float_dtype),
        ];
        let container = self.folder.checkpoint().container();
        let files = container.files().map(|(path, _)| path.to_owned());
        for path in files.chain(container.configs()) {
            let name = path.display();
            let metadata = std::fs::metadata(&path).with_context(|| name.to_string())?;
            let modified = metadata.modified().with_context(|| name.to_string())?;
            let modified = modified.duration_since(UNIX_EPOCH).unwrap_or_default();
            parts.push(format!("{name} of {} bytes at {modified:?}", metadata.len()));
        }
        Ok(parts.join("; "))
    }
}

/// Sets the bytes of a parameter to what the files have before and after, where a dense weight has
/// another dtype in memory.
fn set_bytes(parameter: &mut ParameterReport, source: &Model<'_>, outline: &Model<'_>) {
    // Burn calls the weight of a norm gamma.
    let name = parameter.path.strip_suffix(".gamma").map(|norm| format!("{norm}.weight"));
    let name = name.as_deref().unwrap_or(&parameter.path);
    let of = |model: &Model<'_>| {
        let weight = model.weights.iter().find(|weight| path(weight) == name);
        weight.and_then(|weight| match &weight.value {
            Value::Plain(tensor) => tensor.dtype.bytes(&tensor.shape),
            Value::Fp8(_) => Some(weight.bytes()),
            Value::Fp4(_) => None,
        })
    };
    let (before, after) = (of(source), of(outline));
    parameter.bytes_before = before.unwrap_or(parameter.bytes_before);
    parameter.bytes_after = after.unwrap_or(parameter.bytes_after);
}

/// Reads the notes of an earlier run, by the place of the weight.
fn notes(output: &Output<'_>) -> Result<BTreeMap<usize, Note>> {
    let noted = output.earlier().filter(|(_, note)| !note.is_empty());
    noted.map(|(at, note)| Ok((at, serde_json::from_str(note)?))).collect()
}

/// Measures steps on a device.
struct Clock<'a> {
    device: &'a Device,
    since: Instant,
}

impl Clock<'_> {
    /// Returns the seconds since the last lap.
    fn lap(&mut self) -> Result<f64> {
        self.device.sync()?;
        let seconds = self.since.elapsed().as_secs_f64();
        self.since = Instant::now();
        Ok(seconds)
    }
}

/// A quantization under way.
struct Work<'w, 's> {
    job: &'w QuantizeFolder<'w>,
    /// The model, of which no parameter is initialized.
    whole: &'w Llama<Linear>,
    decided: &'w Fp4Parts,
    outline: &'w Model<'s>,
    copied: &'w [bool],
    reader: Reader<'s>,
    bar: ProgressBar,
    clock: Clock<'w>,
    seconds: Seconds,
    /// Entries of the weights that this run has quantized.
    reports: Vec<ParameterReport>,
    /// Notes of an earlier run.
    earlier: BTreeMap<usize, Note>,
    /// Numbers of the stages that this run calibrates, from the first to the last.
    calibrated: Range<usize>,
}

/// A stage and its use in this run.
struct StageWork {
    stage: Stage,
    /// Its weights, by their places.
    places: Vec<usize>,
    /// Weights of it are still to be written.
    to_write: bool,
    /// Weights of it are still to be quantized or narrowed.
    to_make: bool,
    /// Statistics of its inputs decide about codes that are still to be made.
    calibrates: bool,
    /// A later stage needs the activations that it leaves.
    gives: bool,
}

impl Work<'_, '_> {
    /// Brings the model through memory, stage by stage.
    fn stages(&mut self, output: &mut Output<'_>) -> Result<()> {
        let stages = self.plan(output)?;
        let calibrates = |one: &StageWork| one.calibrates;
        let first = stages.iter().position(calibrates).unwrap_or(0);
        let end = stages.iter().rposition(calibrates).map_or(0, |last| last + 1);
        self.calibrated = first..end;
        let mut activations = Vec::new();
        self.bar.set_length(stages.len() as u64);
        for (at, work) in stages.iter().enumerate() {
            self.bar.set_message(match work.stage {
                Stage::Embedding => "embedding".to_owned(),
                Stage::Layer(layer) if work.to_make => format!("layer {layer}"),
                Stage::Layer(layer) => format!("layer {layer}, run again"),
                Stage::Head => "head".to_owned(),
            });
            activations = self.stage(at, work, activations, output)?;
            if self.calibrated.is_empty() {
                self.bar.set_position(at as u64 + 1);
            }
        }
        Ok(())
    }

    /// Finds out what is left to do.
    fn plan(&self, output: &Output<'_>) -> Result<Vec<StageWork>> {
        let weights = &self.outline.weights;
        let mut stages = Vec::new();
        for stage in Stage::all(&self.job.folder.config) {
            let mut places: Vec<usize> =
                (0..weights.len()).filter(|&at| Stage::of(path(&weights[at])) == stage).collect();
            let part = self.whole.part(stage, true);
            let needs_inputs = self.decided.part_needs_inputs(&part)?;
            let tied = !self.whole.has_lm_head();
            // The head calibrates a tied embedding, as nothing else is multiplied by it.
            if needs_inputs && tied && stage == Stage::Embedding {
                places.clear();
            } else if needs_inputs && tied && stage == Stage::Head {
                let embeds = |at: &usize| Stage::of(path(&weights[*at])) == Stage::Embedding;
                places.extend((0..weights.len()).filter(embeds));
            }
            let to_write = places.iter().any(|&at| !output.is_done(at));
            let to_make = to_write && places.iter().any(|&at| !self.copied[at]);
            let calibrates = to_make && needs_inputs && stage != Stage::Embedding;
            stages.push(StageWork { stage, places, to_write, to_make, calibrates, gives: false });
        }
        let last = stages.iter().rposition(|one| one.calibrates).unwrap_or(0);
        stages[..last].iter_mut().for_each(|one| one.gives = true);
        Ok(stages)
    }

    /// Quantizes a stage, if that is left to do, and writes it. Returns the activations that it
    /// leaves, if a later stage needs them.
    fn stage(
        &mut self,
        number: usize,
        work: &StageWork,
        activations: Vec<Activations>,
        output: &mut Output<'_>,
    ) -> Result<Vec<Activations>> {
        let mut left = Vec::new();
        if work.to_make || work.gives {
            let mut part = self.load(work, output)?;
            self.seconds.load += self.clock.lap()?;
            let report;
            (report, left) = self.quantize(number, work, &mut part, activations)?;
            self.seconds.quantize += self.clock.lap()?;
            if work.to_make {
                self.write(work, &part, report, output)?;
            }
        }
        if work.to_write {
            for &at in work.places.iter().filter(|&&at| self.copied[at]) {
                output.copy(at, &self.reader)?;
            }
            output.flush()?;
        }
        self.seconds.save += self.clock.lap()?;
        Ok(left)
    }

    /// Returns a part for the weights of a stage.
    fn part(&self, work: &StageWork) -> Part {
        let embeds = |at: &usize| Stage::of(path(&self.outline.weights[*at])) == Stage::Embedding;
        self.whole.part(work.stage, work.places.iter().any(embeds))
    }

    /// Loads the weights of a stage: as they were quantized, if that is done and decides about the
    /// activations.
    fn load(&self, work: &StageWork, output: &Output<'_>) -> Result<Part> {
        let mut part = self.part(work);
        let quantized = |at: &usize| self.outline.weights[*at].is_quantized();
        let mut quantized = work.places.iter().copied().filter(quantized).peekable();
        if work.to_make || !self.job.options.sequential || quantized.peek().is_none() {
            self.job.folder.load_part(&mut part)?;
            return Ok(part);
        }
        let files = output.files().context(
            "--resume: a GGUF file cannot be read before it is finished, and --sequential needs \
             what is done; remove the unfinished file and run the command without --resume",
        )?;
        let (source, made) = (self.job.folder.reopen()?, Checkpoint::open(files)?);
        let (mut model, made) = (source.model()?, made.model()?);
        for at in quantized {
            let name = &self.outline.weights[at].name;
            let found = made.weights.iter().find(|one| one.name == *name);
            let parameter = path(&self.outline.weights[at]);
            let of = model.weights.iter_mut().find(|one| path(one) == parameter);
            let (Some(found), Some(of), Some(note)) = (found, of, self.earlier.get(&at)) else {
                bail!("--resume: {name}: not in the unfinished files; remove them to start over");
            };
            *of = found.clone();
            if let Value::Fp4(fp4) = &mut of.value {
                let scales = note.tensor_scales.iter().map(|&bits| f32::from_bits(bits));
                let scales: Vec<f32> = scales.collect();
                fp4.tensor_scale =
                    (!scales.is_empty()).then(|| TensorScale::Multiplier(Numbers::new(&scales)));
            }
        }
        model.load_into(&mut part, &names().allow_unused())?;
        Ok(part)
    }

    /// Quantizes the weights of a part that are left to do, and runs it if a later stage needs the
    /// activations that it leaves.
    fn quantize(
        &self,
        number: usize,
        work: &StageWork,
        part: &mut Part,
        activations: Vec<Activations>,
    ) -> Result<(Vec<ParameterReport>, Vec<Activations>)> {
        let StageWork { stage, to_make, calibrates, gives, .. } = *work;
        let on = match self.job.options.sequential {
            true => self.decided.sequential(),
            false => Calibrated::Dense,
        };
        let (quantized, dense) = (on != Calibrated::Dense, on != Calibrated::Sequential);
        let forward = |part: &Part, batch| {
            let left = part.forward(batch);
            // Without them nothing is computed behind the last input.
            if gives { left } else { Vec::new() }
        };
        let decided = self.decided;
        if stage == Stage::Embedding {
            let embed = |part: &Part, asked| if asked { self.embed(part) } else { Ok(Vec::new()) };
            let dense = match on == Calibrated::Corrected && !to_make && self.quantizes(work) {
                true => embed(&self.dense(work)?, gives)?,
                false => embed(part, gives && dense)?,
            };
            let report = if to_make { decided.quantize(part)?.parameters } else { Vec::new() };
            return Ok((report, [embed(part, gives && quantized)?, dense].concat()));
        }
        if to_make && (gives || calibrates) {
            let options = self.options(number);
            let (report, left) =
                decided.calibrate_and_quantize(part, on, options, activations, forward)?;
            return Ok((report.parameters, left));
        }
        if to_make {
            return Ok((decided.quantize(part)?.parameters, Vec::new()));
        }
        let run = |part: &Part, activations| {
            decided.run(part, self.options(number), activations, forward)
        };
        let part = part.clone().materialize();
        if on != Calibrated::Corrected || !self.quantizes(work) {
            return Ok((Vec::new(), run(&part, activations)?));
        }
        let mut behind_quantized = activations;
        let behind_dense = behind_quantized.split_off(behind_quantized.len() / 2);
        let left = run(&part, behind_quantized)?;
        Ok((Vec::new(), [left, run(&self.dense(work)?, behind_dense)?].concat()))
    }

    /// Returns true if a weight of a stage is quantized. Otherwise its dense weights are the same.
    fn quantizes(&self, work: &StageWork) -> bool {
        work.places.iter().any(|&at| self.outline.weights[at].is_quantized())
    }

    /// Loads the dense weights of a stage.
    fn dense(&self, work: &StageWork) -> Result<Part> {
        let mut part = self.part(work);
        self.job.folder.load_part(&mut part)?;
        Ok(part)
    }

    /// Looks up the calibration windows.
    fn embed(&self, part: &Part) -> Result<Vec<Activations>> {
        let QuantizeFolder { options, tokens, device, .. } = self.job;
        let batches = options.calibration.batches(tokens, device)?;
        Ok(batches.into_iter().map(|batch| part.embed(batch)).collect())
    }

    /// Returns the options of the calibration of a stage, given its number. It moves the bar, which
    /// counts the inputs that this run gathers: those of an earlier one do not tell how long they
    /// take.
    fn options(&self, number: usize) -> CalibrationOptions<'_> {
        let (bar, calibrated) = (&self.bar, self.calibrated.clone());
        options(self.job.device).on_progress(move |told| {
            bar.set_length((told.total * calibrated.len()) as u64);
            bar.set_position((told.total * (number - calibrated.start) + told.done) as u64);
        })
    }

    /// Writes the weights of a part that are not copied, with notes for a run that resumes this
    /// one.
    fn write(
        &mut self,
        work: &StageWork,
        part: &Part,
        reports: Vec<ParameterReport>,
        output: &mut Output<'_>,
    ) -> Result<()> {
        let weights = &self.outline.weights;
        let places: HashMap<&str, usize> =
            work.places.iter().map(|&at| (weights[at].name.as_str(), at)).collect();
        let mut quantized: HashMap<String, ParameterReport> = reports
            .into_iter()
            .filter(ParameterReport::is_quantized)
            .map(|one| (one.path.clone(), one))
            .collect();
        let dtype = self.job.folder.config.dtype.as_deref();
        for weight in narrowed(part, dtype)?.weights {
            let Some(&at) = places.get(weight.name.as_str()) else { continue };
            if self.copied[at] {
                continue;
            }
            let report = quantized.remove(path(&weight));
            let note = report.map(|report| Note { report, tensor_scales: tensor_scales(&weight) });
            let text = note.as_ref().map(serde_json::to_string).transpose()?;
            output.write_noting(at, &weight, text.as_deref().unwrap_or_default())?;
            // A stage of which some weights were done is quantized again.
            self.earlier.remove(&at);
            self.reports.extend(note.map(|note| note.report));
        }
        Ok(())
    }
}

/// Returns the path of a weight's parameter in [`Llama`].
fn path<'w>(weight: &'w Weight<'_>) -> &'w str {
    weight.name.strip_prefix("model.").unwrap_or(&weight.name)
}

/// Returns the bits of the tensor scales of a weight.
fn tensor_scales(weight: &Weight<'_>) -> Vec<u32> {
    let Value::Fp4(fp4) = &weight.value else { return Vec::new() };
    let scale = fp4.tensor_scale.as_ref();
    scale.map_or(Vec::new(), |scale| {
        scale.multipliers().to_vec().into_iter().map(f32::to_bits).collect()
    })
}
