//! A group of weights as it is read, and as it is quantized.

use std::ops::Range;
use std::path::Path;

use burn_fp4_checkpoints::{Dtype, Fp4Weight, Model, Numbers, Reader, TensorScale, Value, Weight};
use burn_fp4_search::formats::{Packed, bf16, f16};
use burn_fp4_search::host::{HostElement, PackedView, squared_error};
use burn_fp4_search::{Fp4Scheme, Needs, SearchError, Statistics, squared_output_error};

use super::engine::Engine;
use super::group::{Group, native};
use super::jobs::Job;
#[cfg(any(feature = "cpu", feature = "cuda"))]
use super::kernels::{Failure, KernelElement, Kernels};
use super::statistics::{Known, StatisticsFile};
use crate::accuracy::Squares;
use crate::error::CliError;

/// Values one after another, in the type of the file.
pub(super) enum Floats {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
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
    /// How far it is from what was read.
    pub(super) squares: Squares,
}

/// The engine and the statistics that weights are quantized with.
pub(super) struct Quantizer<'q> {
    pub(super) engine: &'q Engine,
    pub(super) statistics: Option<&'q StatisticsFile>,
}

impl Quantizer<'_> {
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
                kernels.check(how, &group.members[0].name, group.view)
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
        let (packed, squares) = match self.engine {
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
        let parts = group.iter().zip(&whole.rows).zip(squares);
        let quantized = |((&at, rows), squares): ((&usize, &Range<usize>), Squares)| {
            let weight = part(&outline.weights[at], &packed, rows.clone());
            Quantized { at, weight, squares }
        };
        Ok(parts.map(quantized).collect())
    }

    fn on_host<T: HostElement>(
        &self,
        group: &Group<'_>,
        how: &Fp4Scheme,
        values: &[T],
    ) -> Result<Measured, CliError> {
        let len = group.view.len();
        self.slices(group, how, |at, given| {
            let values = &values[at * len..][..len];
            let quantized = how.method.quantize_view(values, group.view, how, given);
            let measured = quantized.and_then(|packed| measured(group, how, values, packed, given));
            measured.map_err(|source| self.blame(source, group, at * len, values))
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
        let len = group.view.len();
        let uploaded = kernels.upload(values);
        self.slices(group, how, |at, given| {
            let quantized = kernels.quantize(&uploaded, at, group.view, how, given);
            let values = || &uploaded.values()[at * len..][..len];
            let measured =
                quantized.and_then(|packed| Ok(measured(group, how, values(), packed, given)?));
            measured.map_err(|failure| match failure {
                Failure::Search(source) => self.blame(source, group, at * len, values()),
                Failure::Device(problem) => {
                    CliError::OnDevice { name: group.members[0].name.clone(), problem }
                }
            })
        })
    }

    /// Every stacked matrix by itself, with the statistics of its inputs.
    fn slices(
        &self,
        group: &Group<'_>,
        how: &Fp4Scheme,
        quantize: impl Fn(usize, Statistics<'_>) -> Result<(Packed, Vec<Squares>), CliError>,
    ) -> Result<Measured, CliError> {
        let name = &group.members[0].name;
        let axes = [group.first.stacked, group.first.cols];
        let slice = |at: usize| {
            let known = match self.statistics.filter(|_| how.method.row().calibrated) {
                Some(statistics) => statistics.of(name, at, axes)?,
                None => Known::Nothing,
            };
            let given = match &known {
                Known::Nothing => Statistics::None,
                Known::SecondMoments(moments) => Statistics::SecondMoments(moments),
                Known::Gram(gram) => Statistics::Gram(gram),
            };
            quantize(at, given)
        };
        let mut sums = vec![Squares::default(); group.members.len()];
        let mut matrices = Vec::with_capacity(group.first.stacked);
        for at in 0..group.first.stacked {
            let (packed, squares) = slice(at)?;
            sums.iter_mut().zip(squares).for_each(|(sum, squares)| sum.add(squares));
            matrices.push(packed);
        }
        Ok((matrices, sums))
    }

    /// The error, of the weight or of the statistics that it is about. The values are those of the
    /// group from a place on.
    fn blame<T: HostElement>(
        &self,
        source: SearchError,
        group: &Group<'_>,
        begin: usize,
        values: &[T],
    ) -> CliError {
        let given = matches!(
            source,
            SearchError::Weight { .. } | SearchError::Hessian { .. } | SearchError::Singular
        );
        if let Some(statistics) = self.statistics.filter(|_| given) {
            return statistics.blame(&group.members[0].name, source);
        }
        // The first that has a NaN or an infinity; the first of all, if it is about something else.
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

/// The stacked matrices of a group, and the errors of its members.
type Measured = (Vec<Packed>, Vec<Squares>);

/// A matrix that was quantized, with the errors of the members of its group.
///
/// Errors of outputs are as much work as the search itself: only a method that takes whole Gram
/// matrices, and so minimizes them, is worth it.
fn measured<T: HostElement>(
    group: &Group<'_>,
    how: &Fp4Scheme,
    values: &[T],
    packed: Packed,
    given: Statistics<'_>,
) -> Result<(Packed, Vec<Squares>), SearchError> {
    let gram = match given {
        Statistics::Gram(gram) if how.method.row().needs == Needs::Gram => Some(gram),
        Statistics::None | Statistics::SecondMoments(_) | Statistics::Gram(_) => None,
    };
    let of_member = |(member, rows): (usize, &Range<usize>)| -> Result<Squares, SearchError> {
        let part = |per_row: usize| rows.start * per_row..rows.end * per_row;
        let (values, view) = (&values[part(packed.cols)], group.view_of(member));
        let member = PackedView {
            codes: &packed.codes[part(packed.cols / 2)],
            scales: &packed.scales[part(packed.cols / packed.block_size)],
            ..PackedView::from(&packed)
        };
        let outputs = gram.map(|gram| squared_output_error(values, member, view, gram));
        let values = squared_error(values, member, view)?;
        Ok(Squares { values, outputs: outputs.transpose()? })
    };
    let squares = group.rows.iter().enumerate().map(of_member).collect::<Result<_, _>>()?;
    Ok((packed, squares))
}

/// Rows of all matrices, as the weight of an outline.
fn part(outline: &Weight<'_>, packed: &[Packed], rows: Range<usize>) -> Weight<'static> {
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
    weight.codes = of(|m| &m.codes, codes).into();
    weight.scales = of(|m| &m.scales, scales).into();
    let multipliers: Vec<f32> = packed.iter().map(|matrix| matrix.tensor_scale.of_row(0)).collect();
    weight.tensor_scale = scaled.then(|| TensorScale::Multiplier(Numbers::new(&multipliers)));
    Weight::new(outline.name.clone(), outline.file, Value::Fp4(weight))
}
