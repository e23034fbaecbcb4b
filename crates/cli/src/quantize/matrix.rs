//! Reads a group of weights, and quantizes it.

use std::collections::BTreeMap;
use std::iter;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use burn_fp4_checkpoints::{Dtype, Fp4Weight, Model, Numbers, Reader, TensorScale, Value, Weight};
use burn_fp4_search::formats::{Packed, bf16, f16};
use burn_fp4_search::host::{self, HostElement, PackedView, View, squared_error, tensor_amax};
use burn_fp4_search::{
    Fp4Scheme, Hadamard, Method, SearchError, Statistics, TensorScaling, squared_output_error,
};

use super::engine::Engine;
use super::group::{Group, native};
use super::jobs::Job;
#[cfg(any(feature = "cpu", feature = "cuda"))]
use super::kernels::{Failure, KernelElement, Kernels};
use super::statistics::{Known, StatisticsFile};
use crate::accuracy::Tally;
use crate::blocks::{blocks, in_mxfp4};
use crate::error::CliError;
use crate::remarks::{Remarks, Warning};

/// Values one after another, in the type of the file.
pub(super) enum Floats {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Floats {
    /// Transforms every stacked matrix of a group along the inputs of its layers, in f32.
    fn transformed(self, group: &Group<'_>, hadamard: Hadamard) -> Result<Self, CliError> {
        fn of<T: HostElement>(
            values: &[T],
            group: &Group<'_>,
            hadamard: Hadamard,
        ) -> Result<Floats, SearchError> {
            let mut transformed = vec![0.0f32; values.len()];
            let matrices = transformed.chunks_mut(group.view.len());
            for (target, source) in matrices.zip(values.chunks(group.view.len())) {
                host::hadamard(source, group.view, hadamard, false, target)?;
            }
            Ok(Floats::F32(transformed))
        }
        let transformed = match &self {
            Self::F32(values) => of(values, group, hadamard),
            Self::F16(values) => of(values, group, hadamard),
            Self::BF16(values) => of(values, group, hadamard),
        };
        let name = || group.members[0].name.clone();
        transformed.map_err(|source| CliError::TensorOf {
            file: PathBuf::new(),
            name: name(),
            source,
        })
    }
}

/// Reads the weights of a group one behind the other: one matrix, as they have the same columns.
pub(super) fn read<'c>(
    model: &Model<'c>,
    group: &[usize],
    reader: &Reader<'c>,
) -> Result<Floats, CliError> {
    let weights = || group.iter().map(move |&at| &model.weights[at]);
    let dtype = match &model.weights[group[0]].value {
        Value::Plain(tensor) if native(&weights()) => tensor.plain(),
        Value::Plain(_) | Value::Fp8(_) | Value::Fp4(_) => None,
    };
    let len = weights().map(Weight::len).sum();
    match dtype {
        Some(Dtype::F16) => as_they_are(weights(), len, reader).map(Floats::F16),
        Some(Dtype::BF16) => as_they_are(weights(), len, reader).map(Floats::BF16),
        Some(Dtype::F32) => as_they_are(weights(), len, reader).map(Floats::F32),
        _ => {
            if let [alone] = group {
                return Ok(Floats::F32(reader.values(&model.weights[*alone])?));
            }
            let mut values = Vec::with_capacity(len);
            for weight in weights() {
                values.extend(reader.values(weight)?);
            }
            Ok(Floats::F32(values))
        }
    }
}

/// Little-endian floats, read into their place.
fn as_they_are<'w, 'c: 'w, T: bytemuck::Pod>(
    weights: impl Iterator<Item = &'w Weight<'c>>,
    len: usize,
    reader: &Reader<'c>,
) -> Result<Vec<T>, CliError> {
    let mut values = vec![T::zeroed(); len];
    let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
    for weight in weights {
        let Value::Plain(tensor) = &weight.value else { continue };
        let (own, others) = rest.split_at_mut(tensor.bytes.len());
        reader.read(&tensor.name, &tensor.bytes, own)?;
        rest = others;
    }
    if cfg!(target_endian = "big") {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        bytes.chunks_exact_mut(size_of::<T>()).for_each(<[u8]>::reverse);
    }
    Ok(values)
}

/// A weight that is quantized.
pub(super) struct Quantized {
    /// Its place in the model.
    pub(super) at: usize,
    pub(super) weight: Weight<'static>,
    /// Its error against what was read.
    pub(super) tally: Tally,
}

/// The engine and the statistics that weights are quantized with.
pub(super) struct Quantizer<'q> {
    pub(super) engine: &'q Engine,
    statistics: Option<&'q StatisticsFile>,
    /// Weights with statistics that errors of outputs cannot be measured by, and why.
    unusable: Mutex<BTreeMap<String, String>>,
}

impl<'q> Quantizer<'q> {
    pub(super) fn new(engine: &'q Engine, statistics: Option<&'q StatisticsFile>) -> Self {
        Self { engine, statistics, unusable: Mutex::default() }
    }

    /// Checks that the engine can quantize all of it.
    ///
    /// # Errors
    /// [`CliError::Device`], which names the method or the weight.
    #[cfg_attr(not(any(feature = "cpu", feature = "cuda")), expect(unused_variables))]
    pub(super) fn check(&self, model: &Model<'_>, jobs: &[Job]) -> Result<(), CliError> {
        match self.engine {
            Engine::Host => Ok(()),
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Engine::Kernels(kernels) => jobs.iter().try_for_each(|job| {
                let Some(how) = &job.how else { return Ok(()) };
                let group = Group::of(model, &job.weights);
                if how.method.row().calibrated && self.runs(&group)?.len() > 1 {
                    let name = &group.members[0].name;
                    return Err(CliError::Conflict(format!(
                        "--device: `{name}` and others share a tensor scale and have different \
                         statistics, which the CPU alone can use; leave --device out"
                    )));
                }
                let engine = how.without_hadamard();
                kernels.check(&engine, &group.members[0].name, group.view)
            }),
        }
    }

    /// The weights of a group, quantized.
    pub(super) fn quantize(
        &self,
        model: &Model<'_>,
        outline: &Model<'_>,
        group: &[usize],
        how: &Fp4Scheme,
        floats: Floats,
    ) -> Result<Vec<Quantized>, CliError> {
        let whole = Group::of(model, group);
        let floats = match how.hadamard {
            Some(hadamard) => floats.transformed(&whole, hadamard)?,
            None => floats,
        };
        let (packed, tallies) = match self.engine {
            Engine::Host => match floats {
                Floats::F32(values) => self.on_host(&whole, how, &values),
                Floats::F16(values) => self.on_host(&whole, how, &values),
                Floats::BF16(values) => self.on_host(&whole, how, &values),
            },
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Engine::Kernels(kernels) => match floats {
                Floats::F32(values) => self.on_device(kernels, &whole, how, values),
                Floats::F16(values) => self.on_device(kernels, &whole, how, values),
                Floats::BF16(values) => self.on_device(kernels, &whole, how, values),
            },
        }?;
        let parts = group.iter().zip(&whole.rows).zip(tallies);
        let quantized = |((&at, rows), tally): ((&usize, &Range<usize>), Tally)| {
            let weight = part(&outline.weights[at], &packed, rows.clone(), how.hadamard);
            Quantized { at, weight, tally }
        };
        Ok(parts.map(quantized).collect())
    }

    fn on_host<T: HostElement>(
        &self,
        group: &Group<'_>,
        how: &Fp4Scheme,
        values: &[T],
    ) -> Result<Measured, CliError> {
        self.matrices(group, how, values, |part, how, given| {
            let quantized = how.method.quantize_view(&values[part.values()], part.view, how, given);
            quantized.map_err(|source| self.blame(source, group, &part, values))
        })
    }

    #[cfg(any(feature = "cpu", feature = "cuda"))]
    fn on_device<T: KernelElement>(
        &self,
        kernels: &Kernels,
        group: &Group<'_>,
        how: &Fp4Scheme,
        values: Vec<T>,
    ) -> Result<Measured, CliError> {
        let uploaded = kernels.upload(values);
        // Members with other statistics were refused before.
        self.matrices(group, how, uploaded.values(), |part, how, given| {
            let quantized = kernels.quantize(&uploaded, part.at, part.view, how, given);
            quantized.map_err(|failure| match failure {
                Failure::Search(source) => self.blame(source, group, &part, uploaded.values()),
                Failure::Device(problem) => {
                    CliError::OnDevice { name: group.members[0].name.clone(), problem }
                }
            })
        })
    }

    /// Quantizes every stacked matrix by itself, and in it the members that have the same
    /// statistics as one. All share the tensor scale.
    fn matrices<T: HostElement>(
        &self,
        group: &Group<'_>,
        how: &Fp4Scheme,
        values: &[T],
        quantize: impl Fn(Part, &Fp4Scheme, Statistics<'_>) -> Result<Packed, CliError>,
    ) -> Result<Measured, CliError> {
        let runs = self.runs(group)?;
        // Methods without statistics may choose the tensor scale by all members.
        let parts = match how.method.row().calibrated {
            true => runs.clone(),
            false => iter::once(0..group.members.len()).collect(),
        };
        let len = group.view.len();
        let mut sums = vec![Tally::default(); group.members.len()];
        let mut matrices = Vec::with_capacity(group.first.stacked);
        for at in 0..group.first.stacked {
            let how = match (&parts[..], how.tensor_scale) {
                ([_, _, ..], TensorScaling::Tensor) => {
                    let amax = tensor_amax(&values[at * len..][..len]);
                    &how.with_tensor_scale(TensorScaling::Amax(amax))
                }
                _ => how,
            };
            let mut whole: Option<Packed> = None;
            for members in &parts {
                let part = Part::of(group, at, members.clone());
                let mut known = self.known(group, members.start, at, how)?;
                let unseen = matches!(known, Known::Unseen);
                // Values and statistics are transformed already.
                let engine = how.without_hadamard();
                let fallback = engine.with_method(Method::FALLBACK);
                let used = if unseen { &fallback } else { &engine };
                let packed = quantize(part, used, known.given(used))?;
                for member in members.clone() {
                    if member > members.start && runs.iter().any(|run| run.start == member) {
                        // Memory is planned for the statistics of one member.
                        drop(known);
                        known = self.known(group, member, at, how)?;
                    }
                    let tally =
                        measured(group, member, values, &part, &packed, used.method, &known);
                    let tally = tally.map_err(|source| self.blame(source, group, &part, values));
                    sums[member].add(Tally { unseen: [u64::from(unseen), 1], ..tally? });
                }
                match &mut whole {
                    None => whole = Some(packed),
                    Some(whole) => {
                        whole.rows += packed.rows;
                        whole.codes.extend(packed.codes);
                        whole.scales.extend(packed.scales);
                    }
                }
            }
            matrices.extend(whole);
        }
        let unusable = self.unusable.lock().unwrap_or_else(PoisonError::into_inner);
        for run in runs {
            // Statistics of other matrices of the stack may be usable, but an error of a part would
            // pass for the error of the whole.
            if unusable.contains_key(&group.members[run.start].name) {
                sums[run].iter_mut().for_each(|sum| sum.outputs = None);
            }
        }
        Ok((matrices, sums))
    }

    /// The members of a group that have the same statistics one after another.
    fn runs(&self, group: &Group<'_>) -> Result<Vec<Range<usize>>, CliError> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for (at, member) in group.members.iter().enumerate() {
            let same = match (self.statistics, at.checked_sub(1)) {
                (Some(file), Some(before)) => {
                    file.is_same(&group.members[before].name, &member.name)?
                }
                (None, Some(_)) => true,
                (_, None) => false,
            };
            match runs.last_mut() {
                Some(run) if same => run.end += 1,
                _ => runs.push(at..at + 1),
            }
        }
        Ok(runs)
    }

    /// The statistics of a member that a method needs, or that errors of outputs are measured by.
    /// Only a method that needs them is told that they are all zero.
    fn known(
        &self,
        group: &Group<'_>,
        member: usize,
        at: usize,
        how: &Fp4Scheme,
    ) -> Result<Known, CliError> {
        let name = &group.members[member].name;
        let calibrated = how.method.row().calibrated;
        let used = |file: &&StatisticsFile| calibrated || file.has_gram(name, &group.first);
        let Some(file) = self.statistics.filter(used) else { return Ok(Known::Nothing) };
        let found = file.of(name, at, [group.first.stacked, group.first.cols]);
        let found = found.and_then(|known| match how.hadamard {
            Some(hadamard) => known.transformed(hadamard).map_err(|e| file.blame(name, e)),
            None => Ok(known),
        });
        match found {
            Err(error @ CliError::TensorOf { .. }) if !calibrated => {
                let mut unusable = self.unusable.lock().unwrap_or_else(PoisonError::into_inner);
                unusable.entry(name.clone()).or_insert_with(|| error.to_string());
                Ok(Known::Nothing)
            }
            Ok(Known::Unseen) if !calibrated => Ok(Known::Nothing),
            known => known,
        }
    }

    /// Warns of statistics that are unusable, by which errors of outputs were to be measured.
    /// Returns the weights that they are of.
    pub(super) fn warn(&self, remarks: &mut Remarks) -> Vec<String> {
        let unusable = self.unusable.lock().unwrap_or_else(PoisonError::into_inner);
        let weights: Vec<String> = unusable.keys().cloned().collect();
        let Some(first) = unusable.values().next() else { return weights };
        let others = match unusable.len() - 1 {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        let text = format!(
            "{first}{others}: the error of its outputs is not measured; calibrate again to have it"
        );
        let kind = "unusable-statistics";
        remarks.warn(Warning { kind, weights: weights.clone(), text });
        weights
    }

    /// The error, of the weight or of the statistics that it is about. The values are the whole
    /// group's.
    fn blame<T: HostElement>(
        &self,
        source: SearchError,
        group: &Group<'_>,
        part: &Part,
        values: &[T],
    ) -> CliError {
        let given = matches!(
            source,
            SearchError::ChannelWeight { .. } | SearchError::Hessian { .. } | SearchError::Singular
        );
        if let Some(statistics) = self.statistics.filter(|_| given) {
            return statistics.blame(&group.members[part.first].name, source);
        }
        // The first that has a NaN or an infinity; the first of all, if it is about something else.
        let begin = part.at * group.view.len();
        let values = &values[begin..][..group.view.len()];
        let bad = values.iter().position(|value| !value.to_f32().is_finite()).unwrap_or(0);
        let mut ends = group.members.iter().scan(0, |end, weight| {
            *end += weight.len();
            Some(*end)
        });
        let at = ends.position(|end| begin + bad < end).unwrap_or(0);
        let weight = group.members[at];
        let file = match &weight.value {
            Value::Plain(tensor) => tensor.file,
            Value::Fp8(fp8) => fp8.values.file,
            Value::Fp4(_) => Path::new(""),
        };
        CliError::TensorOf { file: file.to_owned(), name: weight.name.clone(), source }
    }
}

/// The stacked matrices of a group, and the sums over its members.
type Measured = (Vec<Packed>, Vec<Tally>);

/// Members of a group, in one of the stacked matrices.
#[derive(Clone, Copy)]
struct Part {
    /// The stacked matrix.
    at: usize,
    /// The first member.
    first: usize,
    /// The place of the first value in the group.
    begin: usize,
    /// The layout of the values.
    view: View,
}

impl Part {
    fn of(group: &Group<'_>, at: usize, members: Range<usize>) -> Self {
        let begin = at * group.view.len() + group.rows[members.start].start * group.first.cols;
        let rows = group.rows[members.start].start..group.rows[members.end - 1].end;
        let view = match members.len() == group.members.len() {
            true => group.view,
            false => View::rows(rows.len(), group.first.cols),
        };
        Self { at, first: members.start, begin, view }
    }

    /// The range of its values in the group.
    fn values(&self) -> Range<usize> {
        self.begin..self.begin + self.view.len()
    }
}

/// The sums over a member, of a part that was quantized.
fn measured<T: HostElement>(
    group: &Group<'_>,
    member: usize,
    values: &[T],
    part: &Part,
    packed: &Packed,
    method: Method,
    known: &Known,
) -> Result<Tally, SearchError> {
    let rows = &group.rows[member];
    let first = rows.start - group.rows[part.first].start;
    let within = |per_row: usize| first * per_row..(first + rows.len()) * per_row;
    let (values, view) = (&values[part.values()][within(packed.cols)], group.view_of(member));
    let quantized = PackedView {
        codes: &packed.codes[within(packed.cols / 2)],
        scales: &packed.scales[within(packed.cols / packed.block_size)],
        ..PackedView::from(packed)
    };
    let outputs = match known {
        Known::Gram(gram) => Some(squared_output_error(values, quantized, view, gram)?),
        Known::Nothing | Known::Unseen | Known::SecondMoments(_) => None,
    };
    let blocks = blocks(values, quantized, view);
    let squares = squared_error(values, quantized, view)?;
    let tally = Tally { values: squares, outputs, blocks, ..Tally::default() };
    Ok(tally.with_other(|| in_mxfp4(values, quantized, view, method)))
}

/// Rows of all matrices, as the weight of an outline.
fn part(
    outline: &Weight<'_>,
    packed: &[Packed],
    rows: Range<usize>,
    hadamard: Option<Hadamard>,
) -> Weight<'static> {
    let (codes, scales) = (|m: &Packed| m.cols / 2, |m: &Packed| m.cols / m.block_size);
    let of = |bytes: fn(&Packed) -> &[u8], per_row: fn(&Packed) -> usize| -> Vec<u8> {
        let range = |matrix: &Packed| rows.start * per_row(matrix)..rows.end * per_row(matrix);
        let parts: Vec<&[u8]> = packed.iter().map(|m| &bytes(m)[range(m)]).collect();
        parts.concat()
    };
    let first = &packed[0];
    let (shape, transposed, scaled) = match &outline.value {
        Value::Fp4(fp4) => (fp4.shape.clone(), fp4.transposed, fp4.tensor_scale.is_some()),
        Value::Plain(_) | Value::Fp8(_) => (outline.shape().to_vec(), false, false),
    };
    let mut weight = Fp4Weight::outline(first.format, first.block_size, shape, transposed, false);
    weight.hadamard = hadamard;
    weight.codes = of(|m| &m.codes, codes).into();
    weight.scales = of(|m| &m.scales, scales).into();
    let multipliers: Vec<f32> = packed.iter().map(|matrix| matrix.tensor_scale.of_row(0)).collect();
    weight.tensor_scale = scaled.then(|| TensorScale::Multiplier(Numbers::new(&multipliers)));
    Weight::new(outline.name.clone(), outline.file, Value::Fp4(weight))
}
