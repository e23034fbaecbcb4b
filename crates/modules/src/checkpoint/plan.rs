//! Every parameter with its tensors, checked before anything changes.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use burn::module::{Module, Param};
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use burn_fp4_checkpoints::{DataType, Dtype, Value, Weight};
use burn_fp4_ops::Fp4Format;

use crate::error::Fp4Error;
use crate::pack::packed_parameter::{float_dtype, settled_shape};
use crate::walk::parameters::{Kind, ModulePath, VisitParameters, Walk, visit_parameters};

use super::bytes;
use super::map::{CheckpointMap, turned};
use super::mismatch::Mismatch;
use super::names::{Names, Wanted};

/// A parameter of the module.
#[derive(Debug, Clone)]
pub(crate) struct LoadTarget {
    pub(crate) path: String,
    pub(crate) container: String,
    pub(crate) kind: Kind,
    /// As layers see it.
    pub(crate) shape: Vec<usize>,
    /// Dtype of floats: the one it has, or gets when it is initialized.
    dtype: Option<DType>,
    device: Device,
}

/// A weight of the file, or one of its matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Piece {
    pub(crate) weight: usize,
    pub(crate) matrix: Option<usize>,
}

/// The tensors that a parameter is made of.
#[derive(Debug, Clone)]
pub(crate) struct ParameterTensors {
    pub(crate) pieces: Vec<Piece>,
    /// Set if each piece is one of its matrices.
    pub(crate) stacked: bool,
}

/// The way to load a parameter.
#[derive(Debug, Clone)]
pub(crate) enum How {
    Packed { format: Fp4Format, block_size: usize, axis: usize },
    Dense { dtype: DType, turn: bool },
    Truth,
}

/// A parameter and the way to load it.
pub(crate) struct PlannedParameter {
    pub(crate) target: LoadTarget,
    pub(crate) found: Result<(ParameterTensors, How), Mismatch>,
}

/// Every parameter of a module.
pub(crate) struct LoadPlan {
    pub(crate) parameters: Vec<PlannedParameter>,
    /// Tensors that no parameter has, and rules of the map that match nothing.
    pub(crate) unused: Vec<Mismatch>,
    /// Scales of a quantized cache, which no parameter has either.
    pub(crate) cache_scales: usize,
}

impl LoadPlan {
    /// # Errors
    /// [`Fp4Error::Attached`]; [`Fp4Error::Mismatch`] with all that does not go together and is
    /// not allowed; [`Fp4Error::Rename`], [`Fp4Error::Group`] and [`Fp4Error::Experts`].
    pub(crate) fn new<M: Module>(
        module: &M,
        weights: &[Weight<'_>],
        map: &CheckpointMap,
    ) -> Result<Self, Fp4Error> {
        let names = Names::new(map)?;
        let targets = targets(module)?;
        let mut errors = Vec::new();
        let by_name = by_name(&names, weights, &mut errors);
        let search = TensorFinder { names: &names, by_name: &by_name, weights, targets: &targets };
        let mut parameters = Vec::with_capacity(targets.len());
        for target in &targets {
            let found = search.source(target).and_then(|source| {
                let how = check(target, map, weights, &source)?;
                Ok((source, how))
            });
            let allowed = |mismatch: &Mismatch| match mismatch {
                Mismatch::Missing { .. } => map.allow_missing,
                Mismatch::Shape { .. } | Mismatch::Type { .. } | Mismatch::Axis { .. } => {
                    map.allow_misfits
                }
                _ => false,
            };
            errors.extend(found.as_ref().err().filter(|one| !allowed(one)).cloned());
            parameters.push(PlannedParameter { target: target.clone(), found });
        }
        let (mut unused, cache_scales) = search.unused();
        unused.extend(names.idle_renames(weights.iter().map(|weight| weight.name.as_str())));
        let known: Vec<_> =
            targets.iter().map(|one| (one.path.as_str(), one.container.as_str())).collect();
        unused.extend(names.idle_rules(&known));
        errors.extend(unused.iter().filter(|_| !map.allow_unused).cloned());
        match errors.is_empty() {
            true => Ok(Self { parameters, unused, cache_scales }),
            false => Err(Fp4Error::Mismatch(errors)),
        }
    }
}

/// The parameters of a module, of every kind.
///
/// # Errors
/// [`Fp4Error::Attached`] if anything is attached to one of them.
fn targets<M: Module>(module: &M) -> Result<Vec<LoadTarget>, Fp4Error> {
    struct FindTargets(Vec<LoadTarget>);

    impl FindTargets {
        fn add(&mut self, path: &ModulePath, kind: Kind, shape: Vec<usize>, device: Device) {
            let (path, container) = (path.join(), path.container().to_owned());
            self.0.push(LoadTarget { path, container, kind, shape, dtype: None, device });
        }
    }

    impl VisitParameters for FindTargets {
        fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
            let dtype = float_dtype(param);
            let shape = match dtype.is_float() {
                true => settled_shape(param, dtype).to_vec(),
                false => param.lazy_shape().to_vec(),
            };
            self.add(path, Kind::Float, shape, param.lazy_device());
            if let Some(target) = self.0.last_mut() {
                target.dtype = Some(dtype);
            }
        }

        fn int<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D, Int>>) {
            self.add(path, Kind::Int, param.lazy_shape().to_vec(), param.lazy_device());
        }

        fn bool<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D, Bool>>) {
            self.add(path, Kind::Bool, param.lazy_shape().to_vec(), param.lazy_device());
        }
    }

    for parameter in Walk::over(module).parameters {
        if let Some(name) = parameter.reparameterization {
            return Err(Fp4Error::Attached { path: parameter.path, name });
        }
    }
    let mut targets = FindTargets(Vec::new());
    visit_parameters(module, &mut targets);
    Ok(targets.0)
}

/// The tensors by their names after renaming.
fn by_name(
    names: &Names<'_>,
    weights: &[Weight<'_>],
    errors: &mut Vec<Mismatch>,
) -> HashMap<String, usize> {
    let mut by_name = HashMap::with_capacity(weights.len());
    for (at, weight) in weights.iter().enumerate() {
        let name = names.in_module(&weight.name);
        if let Some(first) = by_name.insert(name.clone(), at) {
            let tensors = [first, at].map(|at| weights[at].name.clone());
            errors.push(Mismatch::Renamed { name, tensors });
        }
    }
    by_name
}

/// The shape of a weight, without what its numbers are.
fn shape<'w>(weight: &'w Weight<'_>) -> &'w [usize] {
    match &weight.value {
        Value::Plain(tensor) => &tensor.shape,
        Value::Fp8(fp8) => &fp8.values.shape,
        Value::Fp4(fp4) => &fp4.shape,
    }
}

/// Finds the tensors of parameters.
struct TensorFinder<'s> {
    names: &'s Names<'s>,
    by_name: &'s HashMap<String, usize>,
    weights: &'s [Weight<'s>],
    targets: &'s [LoadTarget],
}

impl TensorFinder<'_> {
    /// Returns the tensors of a parameter, or of the one that it is tied to.
    fn source(&self, target: &LoadTarget) -> Result<ParameterTensors, Mismatch> {
        let own = self.own(target);
        let tied = || {
            let with = self.names.tied_to(&target.path)?;
            let with = self.targets.iter().find(|target| target.path == with)?;
            self.own(with).ok()
        };
        match own {
            Err(Mismatch::Missing { parameter, shape, tensors }) => {
                tied().ok_or(Mismatch::Missing { parameter, shape, tensors })
            }
            own => own,
        }
    }

    fn own(&self, target: &LoadTarget) -> Result<ParameterTensors, Mismatch> {
        let find = |name: &String| self.by_name.get(name).copied();
        let whole = |weight| {
            let pieces = vec![Piece { weight, matrix: None }];
            ParameterTensors { pieces, stacked: false }
        };
        let missing = |tensors| Mismatch::Missing {
            parameter: target.path.clone(),
            shape: target.shape.clone(),
            tensors,
        };
        // Experts need not be stacked on one side only.
        let alike = find(&target.path).map(whole);
        match self.names.wanted(&target.path, &target.container) {
            Wanted::One(names) => {
                let found = names.iter().find_map(find).map(whole);
                found.ok_or_else(|| missing(names))
            }
            Wanted::Each(before, behind) => {
                let count = target.shape.first().copied().unwrap_or(0);
                let names: Vec<_> =
                    (0..count).map(|at| Wanted::numbered(&before, &behind, at)).collect();
                let absent: Vec<_> =
                    names.iter().filter(|name| find(name).is_none()).cloned().collect();
                if absent.len() == count {
                    return alike.ok_or_else(|| missing(absent.into_iter().take(1).collect()));
                }
                if !absent.is_empty() {
                    return Err(missing(absent));
                }
                let pieces = names.iter().filter_map(find);
                let pieces = pieces.map(|weight| Piece { weight, matrix: None }).collect();
                Ok(ParameterTensors { pieces, stacked: true })
            }
            Wanted::Matrix(name, index) => match find(&name) {
                Some(weight) => {
                    let found = shape(&self.weights[weight]);
                    if found.len() != 3 || index >= found[0] {
                        let expected = [&[index + 1], &target.shape[..]].concat();
                        let tensor = self.weights[weight].name.clone();
                        let (parameter, found) = (target.path.clone(), found.to_vec());
                        return Err(Mismatch::Shape { parameter, tensor, expected, found });
                    }
                    let pieces = vec![Piece { weight, matrix: Some(index) }];
                    Ok(ParameterTensors { pieces, stacked: false })
                }
                None => alike.ok_or_else(|| missing(vec![name])),
            },
        }
    }

    /// The tensors that have a name of a parameter, be they all that it needs or not.
    fn named(&self, target: &LoadTarget) -> Vec<usize> {
        let names = match self.names.wanted(&target.path, &target.container) {
            Wanted::One(names) => names,
            Wanted::Each(before, behind) => {
                let count = target.shape.first().copied().unwrap_or(0);
                (0..count).map(|at| Wanted::numbered(&before, &behind, at)).collect()
            }
            Wanted::Matrix(name, _) => vec![name],
        };
        names.iter().filter_map(|name| self.by_name.get(name).copied()).collect()
    }

    /// Tensors, and matrices of stacked ones, that no parameter has, and how many more are scales
    /// of a quantized cache. One that does not fit its parameter has one.
    fn unused(&self) -> (Vec<Mismatch>, usize) {
        let mut used: BTreeMap<usize, BTreeSet<Option<usize>>> = BTreeMap::new();
        for target in self.targets {
            match self.source(target) {
                Ok(source) => {
                    for Piece { weight, matrix } in source.pieces {
                        used.entry(weight).or_default().insert(matrix);
                    }
                }
                Err(_) => {
                    for weight in self.named(target) {
                        used.entry(weight).or_default().insert(None);
                    }
                }
            }
        }
        let (mut unused, mut cache_scales) = (Vec::new(), 0);
        for (at, weight) in self.weights.iter().enumerate() {
            let parameter = self.names.in_module(&weight.name);
            match used.get(&at) {
                None if weight.is_cache_scale() => cache_scales += 1,
                None => unused.push(Mismatch::Unused { tensor: weight.name.clone(), parameter }),
                Some(parts) if parts.contains(&None) => {}
                Some(parts) => {
                    let count = shape(weight)[0];
                    for index in (0..count).filter(|index| !parts.contains(&Some(*index))) {
                        let tensor = format!("{}[{index}]", weight.name);
                        let parameter = format!("{parameter}[{index}]");
                        unused.push(Mismatch::Unused { tensor, parameter });
                    }
                }
            }
        }
        (unused, cache_scales)
    }
}

/// Checks that a parameter can be made of tensors, and says how.
fn check(
    target: &LoadTarget,
    map: &CheckpointMap,
    weights: &[Weight<'_>],
    source: &ParameterTensors,
) -> Result<How, Mismatch> {
    let placement = map.placement(&target.container, target.shape.len());
    let first = &weights[source.pieces[0].weight];
    let packed = matches!(first.value, Value::Fp4(_));
    // Integers and truth values are no matrices of layers.
    let turns_dense = target.kind == Kind::Float && placement.turns_dense();
    let turn = if packed { placement.input_first() } else { turns_dense };
    let expected = turned(&target.shape, turn);
    for piece in &source.pieces {
        let weight = &weights[piece.weight];
        let (parameter, tensor) = (target.path.clone(), weight.name.clone());
        if weight.pre_quant_scale.is_some() {
            return Err(Mismatch::InputScaled { parameter, tensor });
        }
        let mut found = shape(weight)[usize::from(piece.matrix.is_some())..].to_vec();
        if source.stacked {
            found.insert(0, source.pieces.len());
        }
        if let Value::Fp4(fp4) = &weight.value
            && !map.knows(&target.container)
            && turned(&found, true) == target.shape
            && (fp4.transposed || found != expected)
        {
            // Of a container that the map does not know blocks run along the last axis; the shape
            // of a square one would fit either way.
            let (expected, found) = (placement.axis, placement.axis - 1);
            return Err(Mismatch::Axis { parameter, tensor, expected, found });
        }
        if found != expected {
            return Err(Mismatch::Shape { parameter, tensor, expected, found });
        }
        let others = (described(first), described(weight));
        if packed != matches!(weight.value, Value::Fp4(_)) || (packed && others.0 != others.1) {
            let (expected, found) = others;
            return Err(Mismatch::Type { parameter, tensor, expected, found });
        }
        if let Some(expected) = unfit(target, weight) {
            let found = described(weight);
            return Err(Mismatch::Type { parameter, tensor, expected, found });
        }
    }
    let Value::Fp4(fp4) = &first.value else { return Ok(dense(target, first, turn)) };
    if !placement.has_matrices() {
        let (parameter, tensor) = (target.path.clone(), first.name.clone());
        let (expected, found) = (target.shape.len() - 1, placement.axis);
        return Err(Mismatch::Axis { parameter, tensor, expected, found });
    }
    Ok(How::Packed { format: fp4.format, block_size: fp4.block_size, axis: placement.axis })
}

fn dense(target: &LoadTarget, weight: &Weight<'_>, turn: bool) -> How {
    match (target.kind, target.dtype, &weight.value) {
        (Kind::Float, Some(dtype), _) => How::Dense { dtype, turn },
        (Kind::Int, _, Value::Plain(tensor)) => match tensor.plain().and_then(bytes::of_file) {
            Some(dtype) => How::Dense { dtype, turn },
            None => How::Truth,
        },
        _ => How::Truth,
    }
}

/// Describes the type of a weight.
pub(crate) fn described(weight: &Weight<'_>) -> String {
    match &weight.value {
        Value::Plain(tensor) if tensor.is(&[Dtype::F8_E4M3, Dtype::F8_E5M2]) => {
            format!("{} without a scale", tensor.dtype)
        }
        Value::Plain(tensor) => tensor.dtype.to_string(),
        Value::Fp8(fp8) => fp8.values.dtype.to_string(),
        Value::Fp4(fp4) => {
            let packed = format!("{} in blocks of {}", fp4.format, fp4.block_size);
            match fp4.hadamard {
                Some(hadamard) => {
                    format!("{packed} after a Hadamard transform of {}", hadamard.size())
                }
                None => packed,
            }
        }
    }
}

/// Returns the type that a parameter would need, if it cannot hold a weight.
fn unfit(target: &LoadTarget, weight: &Weight<'_>) -> Option<String> {
    let plain = |dtypes: fn(DType) -> bool| match &weight.value {
        Value::Plain(tensor) => match tensor.dtype {
            DataType::Plain(dtype) => bytes::of_file(dtype).filter(|dtype| dtypes(*dtype)),
            DataType::Ggml(_) => None,
        },
        Value::Fp8(_) | Value::Fp4(_) => None,
    };
    match target.kind {
        Kind::Float => {
            let float = target.dtype.is_some_and(|dtype| dtype.is_float());
            let fits = match &weight.value {
                Value::Plain(tensor) => {
                    plain(|dtype| dtype.is_float()).is_some() || tensor.dtype.is_float()
                }
                Value::Fp8(_) => true,
                Value::Fp4(_) => (2..=4).contains(&target.shape.len()),
            };
            (!float || !fits).then(|| match target.dtype.filter(|_| !float) {
                Some(dtype) => format!("nothing, as the parameter holds {dtype:?}"),
                None => "floats, FP8 or FP4".to_owned(),
            })
        }
        Kind::Int => {
            let ints = plain(|dtype| dtype.is_int() || dtype.is_uint());
            let fits = ints.is_some_and(|dtype| target.device.supports_dtype(dtype));
            (!fits).then(|| "integers that the device has".to_owned())
        }
        Kind::Bool => {
            let truth = match &weight.value {
                Value::Plain(tensor) => tensor.is(&[Dtype::BOOL, Dtype::U8]),
                Value::Fp8(_) | Value::Fp4(_) => false,
            };
            (!truth).then(|| "BOOL or U8".to_owned())
        }
    }
}
