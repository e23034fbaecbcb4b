//! Which tensors go into which file, and where in it, before anything is written.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use super::options::Shards;
use super::report::WriteReport;
use super::target::Target;
use crate::cast::squared_difference;
use crate::container::{gguf, safetensors};
use crate::dialect::{Envelope, has_dynamic_inputs};
use crate::dtype::DataType;
use crate::error::{CheckpointError, TensorProblem};
use crate::fp4::{Fp4Weight, Numbers, TensorScale};
use crate::fp8::Fp8Weight;
use crate::json::to_python;
use crate::reader::Reader;
use crate::tensor::{NewTensor, Tensor};
use crate::weight::{Model, Value, Weight};

/// The files to be written.
pub(super) struct PlannedFiles {
    pub(super) files: Vec<PlannedFile>,
    /// Names and texts of the configs and the index. None: a GGUF file stands alone.
    pub(super) texts: Option<Vec<(String, String)>>,
    pub(super) report: WriteReport,
    /// Weights whose values change, with the sums of squares of that and of them.
    pub(super) changed: Vec<(usize, [f64; 2])>,
    /// For every weight its file, and its place among the file's weights.
    homes: Vec<(usize, usize)>,
}

/// A file to be written.
pub(super) struct PlannedFile {
    /// Its name in the folder.
    pub(super) name: String,
    pub(super) header: Vec<u8>,
    /// The weights in it, by their place in the model.
    pub(super) weights: Vec<usize>,
    /// Offset and bytes of the tensors of each, in the order in which the dialect gives them.
    pub(super) places: Vec<Vec<(u64, u64)>>,
    pub(super) length: u64,
}

/// A tensor without its bytes.
struct Spec {
    name: String,
    dtype: DataType,
    shape: Vec<usize>,
    bytes: u64,
}

/// The files: names, and the weights in each.
type Assignment = Vec<(String, Vec<usize>)>;

impl PlannedFiles {
    /// Looks at values only where something is cast or folded: by a reader, if there is one.
    pub(super) fn new<'m>(
        model: &Model<'m>,
        target: &Target,
        reader: Option<&Reader<'m>>,
    ) -> Result<Self, CheckpointError> {
        let mut report = WriteReport::default();
        let mut specs = Vec::with_capacity(model.weights.len());
        let mut skeletons = Vec::with_capacity(model.weights.len());
        let options = target.options;
        let rewritten = std::iter::once(&options).chain(target.others.values()).any(|options| {
            let decoded = [options.decode_fp4, options.decode_fp8, options.decode_ggml];
            decoded.iter().any(Option::is_some)
                || options.cast.is_some()
                || options.cast_floats.is_some()
        });
        let mut changed = Vec::new();
        // Where not, the configs are the source's own.
        let other = rewritten || model.quantization.dialect != target.dialect.name();
        let dynamic = other && has_dynamic_inputs(model);
        for (at, weight) in model.weights.iter().enumerate() {
            let loaded = match reader.filter(|_| target.looks_at_values(weight)) {
                Some(reader) => &reader.weight(weight)?,
                None => weight,
            };
            let before = report.changed_values();
            let prepared = target.outline(loaded, &mut report)?;
            if report.changed_values() > before
                && let (Value::Fp4(read), Value::Fp4(written)) = (&loaded.value, &prepared.value)
            {
                changed.push((at, squared_difference(read, written)));
            }
            if dynamic
                && loaded.input_scale.is_none()
                && prepared.is_quantized()
                && !target.writer.quantizes_input(&prepared)
            {
                report.dynamic_inputs_left_out += 1;
            }
            specs.push(specs_of(&prepared, target)?);
            skeletons.push(skeleton(&prepared));
        }
        let all = || specs.iter().flatten();
        let mut names = HashSet::new();
        if let Some(twice) = all().find(|spec| !names.insert(&spec.name)) {
            return Err(CheckpointError::DuplicateName { name: twice.name.clone() });
        }
        let mut quantization = model.quantization.clone();
        if rewritten {
            quantization.dialect = "";
        }
        let outline = Model {
            weights: skeletons,
            files: model.files.clone(),
            config: model.config.clone(),
            quantization,
            gguf: model.gguf.clone(),
            sidecars: Vec::new(),
        };
        (report.tensors, report.bytes) = (all().count(), all().map(|spec| spec.bytes).sum());
        let homes = vec![(0, 0); model.weights.len()];
        let mut plan = Self { files: Vec::new(), texts: None, report, changed, homes };
        match target.writer.envelope(&outline)? {
            Envelope::Gguf(metadata) => plan.gguf(&specs, &metadata),
            Envelope::Folder { metadata, configs } => {
                let files = assign(model, &specs, options.shards);
                plan.folder(target, &specs, files, &metadata, configs)?;
            }
        }
        plan.report.files = plan.files.len();
        for (file, planned) in plan.files.iter().enumerate() {
            for (place, &at) in planned.weights.iter().enumerate() {
                plan.homes[at] = (file, place);
            }
        }
        Ok(plan)
    }

    /// The file of a weight, by its place, and offset and bytes of its tensors in it.
    pub(super) fn places(&self, at: usize) -> (usize, &[(u64, u64)]) {
        let (file, place) = self.homes[at];
        (file, &self.files[file].places[place])
    }

    /// Bytes of all tensors of a weight.
    pub(super) fn bytes(&self, at: usize) -> u64 {
        self.places(at).1.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Checks that the plan has a place for `found` bytes of a tensor.
    pub(super) fn check_length(
        &self,
        file: usize,
        tensor: &str,
        expected: u64,
        found: usize,
    ) -> Result<(), CheckpointError> {
        let found = found as u64;
        if found == expected {
            return Ok(());
        }
        let path = Path::new(&self.files[file].name);
        Err(CheckpointError::tensor(path, tensor, TensorProblem::Bytes { expected, found }))
    }

    fn gguf(&mut self, specs: &[Vec<Spec>], metadata: &gguf::Metadata) {
        let tensors: Vec<_> = specs
            .iter()
            .flatten()
            // Every dtype was checked to be one of ggml's when the specs were made.
            .filter_map(|s| Some((s.name.as_str(), s.dtype.ggml()?, s.shape.as_slice(), s.bytes)))
            .collect();
        let (header, offsets, length) = gguf::layout(&tensors, metadata);
        let weights: Vec<usize> = (0..specs.len()).collect();
        let places = places(specs, &weights, &offsets);
        self.files.push(PlannedFile { name: String::new(), header, weights, places, length });
    }

    fn folder(
        &mut self,
        target: &Target,
        specs: &[Vec<Spec>],
        files: Assignment,
        metadata: &[(String, String)],
        configs: Vec<(&'static str, serde_json::Value)>,
    ) -> Result<(), CheckpointError> {
        let mut shards = Vec::new();
        for (name, weights) in files {
            let mut tensors = Vec::new();
            for spec in weights.iter().flat_map(|&at| &specs[at]) {
                let DataType::Plain(dtype) = spec.dtype else {
                    let (dialect, weight) = (target.dialect.name(), spec.name.clone());
                    let what = match spec.dtype.is_float() {
                        true => CheckpointError::GGML_TO_DECODE,
                        false => "records of ggml",
                    };
                    return Err(CheckpointError::CannotHold { dialect, weight, what });
                };
                tensors.push((spec.name.as_str(), dtype, spec.shape.as_slice(), spec.bytes));
                shards.push((spec.name.clone(), name.clone()));
            }
            let (header, offsets, length) = safetensors::layout(&tensors, metadata);
            let places = places(specs, &weights, &offsets);
            self.files.push(PlannedFile { name, header, weights, places, length });
        }
        let configs = configs.iter().map(|(name, json)| ((*name).to_owned(), to_python(json)));
        let mut texts: Vec<(String, String)> = configs.collect();
        if !matches!(&self.files[..], [one] if one.name == safetensors::SINGLE) {
            // In the order of the weights, whichever file they are in.
            let order = specs.iter().flatten().map(|spec| spec.name.as_str());
            let order: HashMap<_, _> = order.zip(0_usize..).collect();
            shards.sort_by_key(|(name, _)| order.get(name.as_str()).copied());
            let index = target.writer.index(shards, self.report.bytes);
            texts.push((safetensors::INDEX.to_owned(), to_python(&index)));
        }
        self.texts = Some(texts);
        Ok(())
    }
}

/// Offset and bytes of the tensors of each weight.
fn places(specs: &[Vec<Spec>], weights: &[usize], offsets: &[u64]) -> Vec<Vec<(u64, u64)>> {
    let mut offsets = offsets.iter();
    let mut place = |spec: &Spec| offsets.next().map(|&offset| (offset, spec.bytes));
    weights.iter().map(|&at| specs[at].iter().filter_map(&mut place).collect()).collect()
}

fn specs_of(weight: &Weight<'_>, target: &Target) -> Result<Vec<Spec>, CheckpointError> {
    let tensors = target.tensors(weight)?;
    let spec = |tensor: NewTensor<'_>| {
        let bytes = tensor.dtype.bytes(&tensor.shape).ok_or_else(|| {
            let what = "a shape that is not a whole number of bytes";
            CheckpointError::cannot_hold(target.dialect.name(), &weight.name, what)
        })?;
        let (name, dtype, shape) = (tensor.name, tensor.dtype, tensor.shape);
        Ok(Spec { name, dtype, shape, bytes: bytes as u64 })
    };
    tensors.into_iter().map(spec).collect()
}

/// The weight without its bytes: what configs are written from.
fn skeleton(weight: &Weight<'_>) -> Weight<'static> {
    let bare = |tensor: &Tensor<'_>| Tensor {
        name: tensor.name.clone().into_owned().into(),
        file: Path::new(""),
        dtype: tensor.dtype,
        shape: tensor.shape.clone().into_owned().into(),
        bytes: (&[]).into(),
    };
    let one = || TensorScale::Multiplier(Numbers::new(&[1.0]));
    let value = match &weight.value {
        Value::Plain(tensor) => Value::Plain(bare(tensor)),
        Value::Fp8(fp8) => Value::Fp8(Fp8Weight {
            values: bare(&fp8.values),
            scales: bare(&fp8.scales),
            granularity: fp8.granularity,
        }),
        Value::Fp4(fp4) => Value::Fp4(Fp4Weight {
            format: fp4.format,
            block_size: fp4.block_size,
            shape: fp4.shape.clone(),
            transposed: fp4.transposed,
            storage: fp4.storage,
            codes: (&[]).into(),
            scales: (&[]).into(),
            tensor_scale: fp4.tensor_scale.as_ref().map(|_| one()),
            hadamard: fp4.hadamard,
            order: fp4.order,
        }),
    };
    Weight {
        name: weight.name.clone(),
        file: weight.file,
        value,
        input_scale: weight.input_scale.as_ref().map(|_| one()),
        pre_quant_scale: weight.pre_quant_scale.as_ref().map(bare),
    }
}

fn assign(model: &Model<'_>, specs: &[Vec<Spec>], shards: Shards) -> Assignment {
    let named = |name: &String| name.ends_with(".safetensors");
    let known = model.files.iter().all(named)
        && model.weights.iter().all(|weight| weight.file < model.files.len());
    match shards {
        Shards::AsRead if known => {
            let mut files: Assignment =
                model.files.iter().map(|name| (name.clone(), Vec::new())).collect();
            for (at, weight) in model.weights.iter().enumerate() {
                files[weight.file].1.push(at);
            }
            files
        }
        Shards::AsRead => vec![(safetensors::SINGLE.to_owned(), (0..specs.len()).collect())],
        Shards::Size(limit) => {
            let mut files: Vec<Vec<usize>> = vec![Vec::new()];
            let mut filled = 0;
            for (at, tensors) in specs.iter().enumerate() {
                let bytes: u64 = tensors.iter().map(|spec| spec.bytes).sum();
                if filled > 0 && filled + bytes > limit {
                    files.push(Vec::new());
                    filled = 0;
                }
                files.last_mut().expect("there is a first file").push(at);
                filled += bytes;
            }
            let count = files.len();
            let name = |at: usize| match count {
                1 => safetensors::SINGLE.to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", at + 1),
            };
            files.into_iter().enumerate().map(|(at, weights)| (name(at), weights)).collect()
        }
    }
}
