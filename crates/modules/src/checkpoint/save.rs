//! Checkpoints out of modules.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Int, Tensor as BurnTensor};
use burn_fp4_checkpoints::{
    DataType, Dtype, Fp4Weight, Model, Numbers, Order, Shards, Storage, Tensor,
    TensorScale as Stated, Value, Weight, WriteOptions, WriteReport,
};
use burn_fp4_ops::Fp4Layout;
use burn_fp4_ops::search::formats::{Packed, TensorScale};

use crate::error::Fp4Error;
use crate::pack::packed_parameter::{check_nothing_trained, packed_weights};
use crate::packed_weight::PackedWeight;
use crate::transfer::caught;
use crate::walk::parameters::{ModulePath, Parameter, VisitParameters, Walk, visit_parameters};

use super::bytes;
use super::map::{CheckpointMap, Placement, turned};
use super::mismatch::Mismatch;
use super::names::{Names, Wanted};
use super::outline::{Outline, ParameterOutline};

/// See [`Fp4Module::save_fp4`](crate::Fp4Module::save_fp4).
pub(crate) fn save<M: Module>(
    module: &M,
    path: &Path,
    dialect: &str,
    map: &CheckpointMap,
) -> Result<WriteReport, Fp4Error> {
    let shards = map.shard_size.map_or(Shards::AsRead, Shards::Size);
    let options = WriteOptions { shards, ..WriteOptions::default() };
    Ok(model(module, map)?.write(path, dialect, &options)?)
}

/// See [`Fp4Module::checkpoint_fp4`](crate::Fp4Module::checkpoint_fp4).
pub(crate) fn model<M: Module>(
    module: &M,
    map: &CheckpointMap,
) -> Result<Model<'static>, Fp4Error> {
    let names = Names::new(map)?;
    let packed = packed_weights(module);
    check_nothing_trained(&Walk::over(module).parameters, &packed)?;
    let (visited, parameters, errors) = (Vec::new(), Vec::new(), Vec::new());
    let mut save = Save { names, map, packed, visited, parameters, errors, failed: None };
    caught(|| {
        visit_parameters(module, &mut save);
        Ok::<_, Fp4Error>(())
    })?;
    let Save { names, visited, parameters, mut errors, failed, .. } = save;
    if let Some(failed) = failed {
        return Err(failed);
    }
    let parameters = without_ties(&names, parameters, &mut errors);
    let weights = gathered(parameters, &mut errors);
    if !map.allow_unused {
        let known: Vec<_> = visited.iter().map(|(path, one)| (&**path, &**one)).collect();
        errors.extend(names.idle_rules(&known));
        errors.extend(names.idle_renames_back(weights.iter().map(|(name, ..)| name.as_str())));
    }
    let mut named = Vec::with_capacity(weights.len());
    for (name, path, value) in weights {
        match names.saved(&name, &path) {
            Ok(tensor) => named.push(Weight::new(tensor, 0, value)),
            Err(mismatch) => errors.push(mismatch),
        }
    }
    if !errors.is_empty() {
        return Err(Fp4Error::Mismatch(errors));
    }
    Ok(Model { weights: named, ..Model::default() })
}

/// The float parameters of a module as [`model`] gives them when they are dense, without values.
///
/// # Errors
/// As [`Outline::new`].
pub(crate) fn outline<'p>(
    parameters: impl IntoIterator<Item = &'p Parameter>,
    map: &CheckpointMap,
) -> Result<Outline, Fp4Error> {
    let parameters: Vec<&Parameter> = parameters.into_iter().collect();
    let known = parameters.iter().map(|one| ParameterOutline {
        path: &one.path,
        container: &one.container,
        shape: &one.shape,
        attached: one.inside_reparameterization,
    });
    let mut outline = Outline::new(&known.collect::<Vec<_>>(), map)?;
    for (weight, of) in outline.model.weights.iter_mut().zip(&outline.of) {
        let dtype = bytes::in_file(parameters[of[0]].stored_dtype());
        if let (Value::Plain(tensor), Some(dtype)) = (&mut weight.value, dtype) {
            tensor.dtype = DataType::Plain(dtype);
        }
    }
    Ok(outline)
}

/// A parameter, with the names that it has in files before they are renamed.
struct Saved {
    path: String,
    wanted: Wanted,
    value: Value<'static>,
}

/// Reads the parameters of a module.
struct Save<'m> {
    names: Names<'m>,
    map: &'m CheckpointMap,
    packed: BTreeMap<String, PackedWeight>,
    /// Path and container of every parameter.
    visited: Vec<(String, String)>,
    parameters: Vec<Saved>,
    errors: Vec<Mismatch>,
    /// The first packed weight that cannot be read back.
    failed: Option<Fp4Error>,
}

impl Save<'_> {
    fn add(&mut self, path: &ModulePath, value: Result<Value<'static>, Mismatch>) {
        let (container, path) = (path.container().to_owned(), path.join());
        let wanted = self.names.wanted(&path, &container);
        match value {
            Ok(value) => self.parameters.push(Saved { path, wanted, value }),
            Err(error) => self.errors.push(error),
        }
    }

    fn dense<const D: usize, K: Basic>(
        &mut self,
        path: &ModulePath,
        tensor: BurnTensor<D, K>,
        turn: bool,
    ) {
        let dtype = tensor.dtype();
        let data = tensor.into_data();
        let shape = data.shape().to_vec();
        let (dtype, values) = match bytes::in_file(dtype) {
            Some(file) => {
                let values = data.as_bytes().into();
                (Some(file), bytes::turned(values, &shape, dtype.size(), turn).into_owned())
            }
            None if dtype.is_bool() => {
                (Some(Dtype::BOOL), data.iter::<bool>().map(u8::from).collect())
            }
            None => (None, Vec::new()),
        };
        let name = path.join();
        let made = dtype
            .and_then(|dtype| Tensor::new(name.clone(), dtype, turned(&shape, turn), values).ok());
        let value = made.map(Value::Plain).ok_or_else(|| Mismatch::Type {
            parameter: name.clone(),
            tensor: name,
            expected: "numbers that files have".to_owned(),
            found: format!("{:?}", data.dtype()),
        });
        self.add(path, value);
    }
}

impl VisitParameters for Save<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<BurnTensor<D>>) {
        if path.is_attached() {
            return;
        }
        let name = path.join();
        self.visited.push((name.clone(), path.container().to_owned()));
        let placement = self.map.placement(path.container(), D);
        match self.packed.get(&name) {
            Some(packed) => {
                let layout = packed.layout();
                let checked = check_axis(&name, layout, placement);
                match checked.map(|()| packed.to_packed()) {
                    Err(error) => self.errors.push(error),
                    Ok(Ok(host)) => {
                        let value = packed_value(&name, layout, host, placement);
                        self.add(path, value);
                    }
                    Ok(Err(problem)) => {
                        self.failed.get_or_insert(Fp4Error::at(name, problem));
                    }
                }
            }
            None => {
                let turn = placement.turns_dense();
                self.dense(path, param.base().without_autodiff(), turn);
            }
        }
    }

    fn int<const D: usize>(&mut self, path: &ModulePath, param: &Param<BurnTensor<D, Int>>) {
        if !path.is_attached() {
            self.visited.push((path.join(), path.container().to_owned()));
            self.dense(path, param.val(), false);
        }
    }

    fn bool<const D: usize>(&mut self, path: &ModulePath, param: &Param<BurnTensor<D, Bool>>) {
        if !path.is_attached() {
            self.visited.push((path.join(), path.container().to_owned()));
            self.dense(path, param.val(), false);
        }
    }
}

/// Checks that blocks run along an axis that files can have them along.
fn check_axis(path: &str, layout: &Fp4Layout, placement: Placement) -> Result<(), Mismatch> {
    if layout.axis == placement.axis && placement.has_matrices() {
        return Ok(());
    }
    let (parameter, tensor) = (path.to_owned(), path.to_owned());
    let (expected, found) = match placement.has_matrices() {
        true => (placement.axis, layout.axis),
        false => (layout.shape.len() - 1, placement.axis),
    };
    Err(Mismatch::Axis { parameter, tensor, expected, found })
}

/// A packed weight as files have it: blocks along the last axis.
fn packed_value(
    path: &str,
    layout: &Fp4Layout,
    host: Packed,
    placement: Placement,
) -> Result<Value<'static>, Mismatch> {
    let shape = turned(&layout.shape, placement.input_first());
    let rows = shape[shape.len() - 2];
    let Packed { format, block_size, codes, scales, tensor_scale, .. } = host;
    let numbers: Vec<f32> = match tensor_scale {
        TensorScale::One(one) => vec![one],
        TensorScale::PerRow(scales) => {
            let alike = |rows: &[f32]| rows.iter().all(|one| one.to_bits() == rows[0].to_bits());
            if !scales.chunks(rows).all(alike) {
                let problem = "expected a tensor scale for each matrix, found one for each row";
                let (parameter, tensor) = (path.to_owned(), path.to_owned());
                return Err(Mismatch::Scales { parameter, tensor, problem: problem.to_owned() });
            }
            scales.chunks(rows).map(|rows| rows[0]).collect()
        }
    };
    let scaled = format.row().tensor_scale;
    Ok(Value::Fp4(Fp4Weight {
        format,
        block_size,
        shape,
        transposed: placement.input_first_in_files(),
        storage: Storage::Rows,
        codes: codes.into(),
        scales: scales.into(),
        tensor_scale: scaled.then(|| Stated::Multiplier(Numbers::new(&numbers))),
        hadamard: layout.hadamard,
        order: Order::ElementFirst,
    }))
}

/// The parameters without those that take the tensor of another one.
fn without_ties(
    names: &Names<'_>,
    parameters: Vec<Saved>,
    errors: &mut Vec<Mismatch>,
) -> Vec<Saved> {
    let at: HashMap<_, _> =
        parameters.iter().enumerate().map(|(at, one)| (one.path.clone(), at)).collect();
    let mut keep = vec![true; parameters.len()];
    for (index, one) in parameters.iter().enumerate() {
        let Some(with) = names.tied_to(&one.path) else { continue };
        let Some(&other) = at.get(with).filter(|&&other| other != index) else { continue };
        keep[index] = false;
        if !same(&one.value, &parameters[other].value) {
            let (parameter, with) = (one.path.clone(), with.to_owned());
            errors.push(Mismatch::Tied { parameter, with });
        }
    }
    parameters.into_iter().zip(keep).filter_map(|(one, keep)| keep.then_some(one)).collect()
}

/// Returns true if two weights have the same bits.
fn same(left: &Value<'_>, right: &Value<'_>) -> bool {
    match (left, right) {
        (Value::Plain(left), Value::Plain(right)) => {
            (left.dtype, &left.shape, &left.bytes) == (right.dtype, &right.shape, &right.bytes)
        }
        (Value::Fp4(left), Value::Fp4(right)) => {
            let facts =
                |one: &Fp4Weight<'_>| (one.format, one.block_size, one.hadamard, one.shape.clone());
            facts(left) == facts(right)
                && (&left.codes, &left.scales, &left.tensor_scale)
                    == (&right.codes, &right.scales, &right.tensor_scale)
        }
        _ => false,
    }
}

/// Name in files, path of (the first of) its parameters, and value.
type Named = (String, String, Value<'static>);

/// Takes stacked parameters apart, and puts single ones together, as files have them.
fn gathered(parameters: Vec<Saved>, errors: &mut Vec<Mismatch>) -> Vec<Named> {
    let mut weights: Vec<Named> = Vec::new();
    // Where a stacked weight stands, and the matrices that it is made of.
    let mut stacks: BTreeMap<String, (usize, BTreeMap<usize, Saved>)> = BTreeMap::new();
    for saved in parameters {
        match saved.wanted.clone() {
            // The last one is the name in files.
            Wanted::One(mut names) => {
                let name = names.pop().unwrap_or_else(|| saved.path.clone());
                weights.push((name, saved.path, saved.value));
            }
            Wanted::Each(before, behind) => {
                for (index, value) in matrices(&saved.value).into_iter().enumerate() {
                    let name = Wanted::numbered(&before, &behind, index);
                    weights.push((name, saved.path.clone(), value));
                }
            }
            Wanted::Matrix(name, index) => {
                let (_, found) =
                    stacks.entry(name).or_insert_with(|| (weights.len(), BTreeMap::new()));
                found.insert(index, saved);
            }
        }
    }
    let mut stacked: Vec<_> = stacks.into_iter().collect();
    // From the back, so that places stay what they are.
    stacked.sort_by_key(|(_, (at, _))| std::cmp::Reverse(*at));
    for (name, (at, found)) in stacked {
        match stack(&name, found) {
            Ok((path, value)) => weights.insert(at, (name, path, value)),
            Err(error) => errors.push(error),
        }
    }
    weights
}

/// The matrices of a stacked weight.
fn matrices(value: &Value<'static>) -> Vec<Value<'static>> {
    match value {
        Value::Fp4(fp4) => {
            let matrix = |index| {
                let part = fp4.matrix(index);
                let (codes, scales) = (part.codes.into_owned(), part.scales.into_owned());
                let tensor_scale = part
                    .tensor_scale
                    .map(|scale| Stated::Multiplier(Numbers::new(&scale.multipliers().to_vec())));
                Value::Fp4(Fp4Weight {
                    codes: codes.into(),
                    scales: scales.into(),
                    tensor_scale,
                    transposed: false,
                    shape: part.shape,
                    format: part.format,
                    block_size: part.block_size,
                    storage: part.storage,
                    hadamard: part.hadamard,
                    order: part.order,
                })
            };
            (0..fp4.stacked()).map(matrix).collect()
        }
        Value::Plain(tensor) => {
            let (count, shape) = (tensor.shape[0], tensor.shape[1..].to_vec());
            let length = (tensor.bytes.len() / count.max(1)).max(1);
            let part = |bytes: &[u8]| {
                let mut part = tensor.clone();
                (part.bytes, part.shape) = (bytes.to_vec().into(), shape.clone().into());
                Value::Plain(part)
            };
            tensor.bytes.chunks_exact(length).map(part).collect()
        }
        Value::Fp8(_) => Vec::new(),
    }
}

/// Single weights as one that is stacked, with the path of the first.
fn stack(name: &str, found: BTreeMap<usize, Saved>) -> Result<(String, Value<'static>), Mismatch> {
    let count = found.len();
    if let Some(absent) = (0..count).find(|index| !found.contains_key(index)) {
        let (parameter, shape) = (format!("{name}[{absent}]"), Vec::new());
        let tensors = found.into_values().map(|one| one.path).collect();
        return Err(Mismatch::Missing { parameter, shape, tensors });
    }
    let mut rest = found.into_values();
    let Some(Saved { path, value: mut all, .. }) = rest.next() else {
        let (parameter, shape) = (name.to_owned(), Vec::new());
        return Err(Mismatch::Missing { parameter, shape, tensors: Vec::new() });
    };
    let mut numbers = Vec::new();
    if let Value::Fp4(fp4) = &all {
        numbers.extend(fp4.tensor_scale.iter().flat_map(|scale| scale.stated().to_vec()));
    }
    for one in rest {
        let fits = match (&mut all, &one.value) {
            (Value::Plain(all), Value::Plain(one)) => {
                all.bytes.to_mut().extend_from_slice(&one.bytes);
                (all.dtype, &all.shape) == (one.dtype, &one.shape)
            }
            (Value::Fp4(all), Value::Fp4(one)) => {
                all.codes.to_mut().extend_from_slice(&one.codes);
                all.scales.to_mut().extend_from_slice(&one.scales);
                numbers.extend(one.tensor_scale.iter().flat_map(|scale| scale.stated().to_vec()));
                let facts = |one: &Fp4Weight<'_>| {
                    (one.format, one.block_size, one.hadamard, one.shape.clone())
                };
                facts(all) == facts(one)
            }
            _ => false,
        };
        if !fits {
            let (expected, found) = (format!("what `{path}` is"), "another shape or type".into());
            let (parameter, tensor) = (one.path, name.to_owned());
            return Err(Mismatch::Type { parameter, tensor, expected, found });
        }
    }
    match &mut all {
        Value::Plain(tensor) => tensor.shape.to_mut().insert(0, count),
        Value::Fp4(fp4) => {
            fp4.shape.insert(0, count);
            fp4.tensor_scale =
                fp4.tensor_scale.as_ref().map(|_| Stated::Multiplier(Numbers::new(&numbers)));
        }
        Value::Fp8(_) => {}
    }
    Ok((path, all))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use burn_fp4_ops::OpsError;

    use super::*;
    use crate::config::Fp4Config;
    use crate::pack::quantize::quantize;

    #[derive(Module, Debug)]
    struct Deep {
        weight: Param<BurnTensor<5>>,
    }

    #[test]
    fn a_weight_that_cannot_be_read_back_is_the_error_and_not_a_misfit_of_scales() {
        let weight = BurnTensor::<5>::ones([2, 1, 2, 16, 16], &Device::flex());
        let mut module = Deep { weight: Param::from_tensor(weight) };
        quantize(&mut module, &Fp4Config::nvfp4().container("Deep", 4)).unwrap();
        let error = model(&module, &CheckpointMap::new()).unwrap_err();
        let Fp4Error::Parameter { path, problem: OpsError::Shape { found, .. } } = &error else {
            panic!("{error}")
        };
        assert_eq!((path.as_str(), &found[..]), ("weight", &[2, 1, 2, 16, 16][..]));
    }
}
