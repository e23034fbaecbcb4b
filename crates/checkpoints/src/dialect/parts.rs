//! Steps that all dialects share: the parts of a weight are taken out of a container, and put
//! together with every shape checked.

use std::cell::LazyCell;
use std::collections::HashMap;

use burn_fp4_formats::{FormatError, Fp4Format, ScaleLayout};
use burn_fp4_policy::{Matcher, Pattern};

use crate::container::Container;
use crate::dtype::Dtype;
use crate::error::{CheckpointError, TensorProblem};
use crate::fp4::{Fp4Weight, Numbers, Order, TensorScale};
use crate::storage::Storage;
use crate::tensor::Tensor;
use crate::weight::{Quantization, Value, Weight};

/// Takes tensors out of a container, each once.
pub(super) struct Reader<'a> {
    container: &'a Container,
    taken: Vec<bool>,
}

impl<'a> Reader<'a> {
    /// The tensor of a name, if it is there and no other weight has it.
    pub(super) fn take(&mut self, name: &str) -> Option<Tensor<'a>> {
        let at = self.container.position(name)?;
        let free = !std::mem::replace(&mut self.taken[at], true);
        free.then(|| self.container.tensor(at))
    }

    /// The tensor without which `of` means nothing.
    pub(super) fn need(
        &mut self,
        of: &Tensor<'a>,
        name: &str,
    ) -> Result<Tensor<'a>, CheckpointError> {
        let missing = || of.error(TensorProblem::Missing { companion: name.to_owned() });
        self.take(name).ok_or_else(missing)
    }

    /// Returns true if a tensor is there.
    pub(super) fn has(&self, name: &str) -> bool {
        self.container.position(name).is_some()
    }

    /// The numbers of a scale, if it is there.
    pub(super) fn numbers(&mut self, name: &str) -> Result<Option<Numbers<'a>>, CheckpointError> {
        self.take(name).map(Numbers::of).transpose()
    }
}

/// A weight, if the tensor stands for one.
type MaybeWeight<'a> = Result<Option<Weight<'a>>, CheckpointError>;

/// The weights of a container. `main` makes a weight of the tensor that stands for it and takes
/// the others; what nobody takes is a weight of its own.
///
/// A tensor whose name ends in one of `companions` belongs to a weight: alone it is an error. So is
/// FP8 that nobody takes with a tensor that may be its scale.
pub(super) fn read<'a>(
    container: &'a Container,
    companions: &[&str],
    mut main: impl FnMut(&mut Reader<'a>, &Tensor<'a>) -> MaybeWeight<'a>,
) -> Result<Vec<Weight<'a>>, CheckpointError> {
    let mut reader = Reader { container, taken: vec![false; container.len()] };
    // Only those that are there: most tensors are parts of others.
    let mut found: Vec<(usize, Weight<'a>)> = Vec::new();
    for (at, tensor) in container.tensors().enumerate() {
        if let Some(mut weight) = main(&mut reader, &tensor)? {
            weight.file = container.file_of(at);
            reader.taken[at] = true;
            found.push((at, weight));
        }
    }
    let alone = reader.taken.iter().filter(|taken| !**taken).count();
    let mut weights = Vec::with_capacity(found.len() + alone);
    let mut found = found.into_iter().peekable();
    let scales = LazyCell::new(|| Scales::of(container));
    for at in 0..container.len() {
        if let Some((_, weight)) = found.next_if(|(main, _)| *main == at) {
            weights.push(weight);
        } else if !reader.taken[at] {
            weights.push(plain(container, companions, &scales, at)?);
        }
    }
    Ok(weights)
}

/// Tensors that may scale FP8, by the names of the parameter and of the module that each may belong
/// to: producers have more names for scales than dialects read.
pub(super) struct Scales<'a>(HashMap<&'a str, &'a str>);

/// The part of a name that makes a tensor a scale.
const SCALE: &str = "scale";

/// Most words between the name of a parameter and [`SCALE`], such as `weight`: a name of a file may
/// have millions.
const WORDS: usize = 3;

impl<'a> Scales<'a> {
    /// Finds the tensors of a container whose names say that they are scales.
    pub(super) fn of(container: &'a Container) -> Self {
        let mut scales = HashMap::new();
        for name in container.names() {
            let begin = name.rfind('.').map_or(0, |dot| dot + 1);
            let Some(word) = name[begin..].rfind(SCALE) else { continue };
            let module = begin.checked_sub(1);
            // `up_proj_scale` may be of a parameter `up_proj`.
            let parameters = name[begin..begin + word].rmatch_indices('_').take(WORDS);
            let parameters = parameters.map(|(at, _)| begin + at);
            for end in module.into_iter().chain(parameters) {
                scales.entry(&name[..end]).or_insert(name);
            }
        }
        Self(scales)
    }

    /// Returns the name of a tensor that may scale one of FP8.
    pub(super) fn of_fp8(&self, tensor: &Tensor<'_>) -> Option<&'a str> {
        if !is_fp8(tensor) {
            return None;
        }
        let module = tensor.name.strip_suffix(".weight");
        let owners = [Some(&*tensor.name), module];
        owners.into_iter().flatten().find_map(|owner| self.0.get(owner).copied())
    }
}

/// Returns true for FP8 that is not a scale itself, such as the block scales of NVFP4.
fn is_fp8(tensor: &Tensor<'_>) -> bool {
    let last = tensor.name.rsplit('.').next().unwrap_or_default();
    tensor.dtype.is_fp8() && !last.contains(SCALE)
}

/// Checks that every matrix of FP8 has scales, unless the configs say that it is not quantized: its
/// values without them would be others. `file` has the patterns of what is not.
///
/// Patterns are compiled only where there is such a matrix: a model that needs none of them is read
/// whatever they are.
pub(super) fn check_scaled(
    container: &Container,
    file: &str,
    weights: &[Weight<'_>],
    quantization: &Quantization,
) -> Result<(), CheckpointError> {
    let unscaled = |weight: &&Weight<'_>| match &weight.value {
        Value::Plain(tensor) => is_fp8(tensor) && tensor.shape.len() >= 2,
        Value::Fp8(_) | Value::Fp4(_) => false,
    };
    let mut unscaled = weights.iter().filter(unscaled).peekable();
    if unscaled.peek().is_none() {
        return Ok(());
    }
    let matchers: Result<Vec<Matcher>, _> =
        quantization.ignore.iter().map(Pattern::matcher).collect();
    let path = container.root();
    let matchers = matchers.map_err(|source| CheckpointError::Pattern {
        path: container.config_path(file),
        source: Box::new(source),
    })?;
    let ignored =
        |weight: &Weight<'_>| matchers.iter().any(|matcher| matcher.matches(weight.module()));
    match unscaled.find(|weight| !ignored(weight)) {
        None => Ok(()),
        Some(weight) => {
            let problem = TensorProblem::Missing { companion: format!("{}_scale", weight.name) };
            Err(CheckpointError::tensor(path, &weight.name, problem))
        }
    }
}

/// A tensor that is no part of another weight.
fn plain<'a>(
    container: &'a Container,
    companions: &[&str],
    scales: &LazyCell<Scales<'a>, impl FnOnce() -> Scales<'a>>,
    at: usize,
) -> Result<Weight<'a>, CheckpointError> {
    let tensor = container.tensor(at);
    if let Some(end) = companions.iter().find(|end| tensor.name.ends_with(**end)) {
        let part = (*end).to_owned();
        return Err(tensor.error(TensorProblem::Alone { part }));
    }
    if is_fp8(&tensor)
        && let Some(scale) = scales.of_fp8(&tensor)
    {
        let scale = scale.to_owned();
        return Err(tensor.error(TensorProblem::UnreadScale { scale }));
    }
    Ok(Weight::new(tensor.name.to_string(), container.file_of(at), Value::Plain(tensor)))
}

/// The parts of an FP4 weight.
pub(super) struct Parts<'a> {
    pub(super) codes: Tensor<'a>,
    pub(super) scales: Tensor<'a>,
    pub(super) tensor_scale: Option<TensorScale<'a>>,
    pub(super) order: Order,
}

impl<'a> Parts<'a> {
    /// NVFP4 if the block scales are E4M3, MXFP4 if they are E8M0. Plain bytes are the former if
    /// there is a tensor scale: MXFP4 has none.
    pub(super) fn format(&self) -> Result<Fp4Format, CheckpointError> {
        match (self.scales.plain(), &self.tensor_scale) {
            (Some(Dtype::F8_E4M3), _) => Ok(Fp4Format::NvFp4),
            (Some(Dtype::U8 | Dtype::I8), Some(_)) => Ok(Fp4Format::NvFp4),
            (Some(Dtype::F8_E8M0 | Dtype::U8 | Dtype::I8), None) => Ok(Fp4Format::MxFp4),
            (Some(Dtype::F8_E8M0), Some(_)) => {
                Err(self.scales.wrong_dtype("F8_E4M3, as there is a tensor scale"))
            }
            _ => Err(self.scales.wrong_dtype("F8_E4M3, F8_E8M0, U8 or I8")),
        }
    }

    /// Codes and scales row by row.
    pub(super) fn rows(self, format: Fp4Format) -> Result<Fp4Weight<'a>, CheckpointError> {
        let codes = self.codes.shape.to_vec();
        let [stack @ .., rows, last] = &codes[..] else {
            return Err(self.codes.wrong_shape("[.., rows, cols / 2]"));
        };
        let cols = self.cols(*last)?;
        let [scales_stack @ .., scales_rows, blocks] = &self.scales.shape[..] else {
            return Err(self.scales.wrong_shape("[.., rows, blocks]"));
        };
        if (stack, rows) != (scales_stack, scales_rows) {
            return Err(self.scales.wrong_shape(format!("{stack:?} + [{rows}, blocks]")));
        }
        let block_size = self.block_size(format, cols, *blocks)?;
        let shape = [stack, &[*rows, cols]].concat();
        self.build(format, block_size, shape, Storage::Rows)
    }

    /// Stacked codes and scales either row by row or transposed: the shapes say which, as eight
    /// or sixteen codes to a scale can only lie along one axis.
    pub(super) fn rows_or_columns(
        self,
        format: Fp4Format,
    ) -> Result<Fp4Weight<'a>, CheckpointError> {
        let (codes, scales) = (self.codes.shape.to_vec(), self.scales.shape.to_vec());
        let ([stack, half, rows], [scales_stack, blocks, scales_rows]) = (&codes[..], &scales[..])
        else {
            return self.rows(format);
        };
        if half == blocks || rows != scales_rows || stack != scales_stack {
            return self.rows(format);
        }
        let cols = self.cols(*half)?;
        let block_size = self.block_size(format, cols, *blocks)?;
        let shape = vec![*stack, *rows, cols];
        let mut weight = self.build(format, block_size, shape, Storage::Columns)?;
        weight.transposed = true;
        Ok(weight)
    }

    /// Codes row by row, scales in tiles of 128x4, padded with zeros.
    pub(super) fn tiled(
        self,
        format: Fp4Format,
        high_first: bool,
    ) -> Result<Fp4Weight<'a>, CheckpointError> {
        let [rows, last] = self.codes.shape[..] else {
            return Err(self.codes.wrong_shape("[rows, cols / 2]"));
        };
        let cols = self.cols(last)?;
        let block_size = format.row().block_size;
        let expected = ScaleLayout::Tiled128x4.len(rows, cols.div_ceil(block_size));
        if self.scales.len() != expected {
            return Err(self.scales.wrong_shape(format!("{expected} scales in tiles of 128x4")));
        }
        self.build(format, block_size, vec![rows, cols], Storage::Tiled { high_first })
    }

    /// Codes of the last axis of the codes' shape.
    fn cols(&self, last: usize) -> Result<usize, CheckpointError> {
        match self.codes.plain() {
            Some(Dtype::U8 | Dtype::I8) => Ok(2 * last),
            // The shape counts elements.
            Some(Dtype::F4) => Ok(last),
            Some(Dtype::U32) => Ok(8 * last),
            _ => Err(self.codes.wrong_dtype("U8, I8, F4 or U32")),
        }
    }

    fn block_size(
        &self,
        format: Fp4Format,
        cols: usize,
        blocks: usize,
    ) -> Result<usize, CheckpointError> {
        let sizes = format.row().block_sizes;
        let fits = |size: &&usize| **size * blocks == cols;
        sizes.iter().find(fits).copied().ok_or_else(|| {
            let expected = format!("[.., {cols} / {sizes:?}]");
            self.scales.wrong_shape(expected)
        })
    }

    fn build(
        self,
        format: Fp4Format,
        block_size: usize,
        shape: Vec<usize>,
        storage: Storage,
    ) -> Result<Fp4Weight<'a>, CheckpointError> {
        if shape.contains(&0) {
            return Err(self.codes.wrong_shape("no axis of 0"));
        }
        // A byte is a scale: the shape of tensors of another dtype says nothing of their bytes.
        match format {
            Fp4Format::NvFp4 if !self.scales.is(&[Dtype::F8_E4M3, Dtype::U8, Dtype::I8]) => {
                return Err(self.scales.wrong_dtype("F8_E4M3, U8 or I8"));
            }
            Fp4Format::MxFp4 if !self.scales.is(&[Dtype::F8_E8M0, Dtype::U8, Dtype::I8]) => {
                return Err(self.scales.wrong_dtype("F8_E8M0, U8 or I8"));
            }
            Fp4Format::NvFp4 | Fp4Format::MxFp4 => {}
        }
        let cols = shape[shape.len() - 1];
        if !cols.is_multiple_of(block_size) {
            return Err(self.codes.error(FormatError::Indivisible { cols, block_size }));
        }
        let weight = Fp4Weight {
            format,
            block_size,
            shape,
            transposed: false,
            storage,
            codes: self.codes.bytes,
            scales: self.scales.bytes,
            tensor_scale: self.tensor_scale,
            hadamard: None,
            order: self.order,
        };
        let found = weight.tensor_scale.as_ref().map_or(1, |scale| scale.stated().len());
        if found != 1 && found != weight.stacked() {
            let expected = weight.stacked();
            let problem = FormatError::Length { what: "tensor scales", expected, found };
            return Err(CheckpointError::tensor(self.codes.file, &self.codes.name, problem));
        }
        Ok(weight)
    }
}
