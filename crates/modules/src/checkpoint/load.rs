//! [`LoadCheckpoint`]: a checkpoint into a module.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Module, Param};
use burn::tensor::{Bool, Bytes, DType, Device, Int, Tensor, TensorData};
use burn_fp4_checkpoints::{Checkpoint, CheckpointError, Dtype, Model, Value, Weight};
use burn_fp4_ops::search::formats::{Packed, TensorScale};
use burn_fp4_ops::{Hadamard, OpsError};

use crate::error::Fp4Error;
use crate::pack::packed_parameter::with_values;
use crate::pack::provided::{DenseWeight, pack_provided};
use crate::packed_weight::PackedWeight;
use crate::transfer::caught;
use crate::walk::parameters::{MapParameters, map_parameters};

use super::bytes;
use super::map::CheckpointMap;
use super::mismatch::Mismatch;
use super::plan::{How, LoadPlan, ParameterTensors, Piece, PlannedParameter, described};
use super::report::{LoadReport, Loaded, LoadedFrom, LoadedParameter};

/// Checkpoints of other projects into modules.
pub trait LoadCheckpoint {
    /// Loads the checkpoint into a freshly built module: FP4 as packed weights, which are never
    /// dense, FP8 and floats in the dtype of the parameter, integers as they are.
    ///
    /// At no time there is more in memory than what the module holds in the end and one tensor: a
    /// parameter that is not initialized is not initialized first.
    ///
    /// ```
    /// use burn::nn::{Linear, LinearConfig};
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_modules::{
    ///     Checkpoint, CheckpointMap, Fp4Config, Fp4Error, Fp4Module, LoadCheckpoint,
    /// };
    ///
    /// # fn main() -> Result<(), Fp4Error> {
    /// # let folder = std::env::temp_dir().join(format!("burn-fp4-load-{}", std::process::id()));
    /// # let path = folder.join("Toy-NVFP4");
    /// # std::fs::create_dir_all(&folder).unwrap();
    /// let device = Device::flex();
    /// let build = || LinearConfig::new(64, 32).init(&device);
    /// # let mut layer: Linear = build();
    /// # layer.quantize_fp4(&Fp4Config::nvfp4())?;
    /// # layer.save_fp4(&path, "modelopt", &CheckpointMap::new())?;
    /// let mut layer: Linear = build();
    /// let report = Checkpoint::open(&path)?.load_into(&mut layer, &CheckpointMap::new())?;
    /// println!("{report}"); // weight [64, 32]: nvfp4 / 16, axis 0, from weight (..)
    /// let output = layer.forward(Tensor::<2>::ones([1, 64], &device));
    /// # assert_eq!(output.dims(), [1, 32]);
    /// # assert_eq!(report.packed().count(), 1);
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Fp4Error::Checkpoint`] for a file that cannot be read as its dialect;
    /// [`Fp4Error::Mismatch`] with every parameter and tensor that do not go together and that the
    /// map does not allow; [`Fp4Error::Attached`] for a module that is quantized already, or has
    /// other things attached; [`Fp4Error::Rename`], [`Fp4Error::Group`] and [`Fp4Error::Experts`]
    /// for the map; [`Fp4Error::Device`]. The module is then unchanged, but that a device may fail
    /// after some running statistics are loaded.
    fn load_into<M: Module>(
        &self,
        module: &mut M,
        map: &CheckpointMap,
    ) -> Result<LoadReport, Fp4Error>;

    /// Checks that the checkpoint can be loaded into a module. Reads no values, and initializes no
    /// parameter. Returns the report that [`load_into`](Self::load_into) would.
    ///
    /// # Errors
    /// As [`load_into`](Self::load_into), except for errors of the values and the device.
    fn check_load<M: Module>(
        &self,
        module: &M,
        map: &CheckpointMap,
    ) -> Result<LoadReport, Fp4Error>;
}

impl LoadCheckpoint for Checkpoint {
    fn load_into<M: Module>(
        &self,
        module: &mut M,
        map: &CheckpointMap,
    ) -> Result<LoadReport, Fp4Error> {
        load(&self.weights()?, &self.container().file_names(), module, map)
    }

    fn check_load<M: Module>(
        &self,
        module: &M,
        map: &CheckpointMap,
    ) -> Result<LoadReport, Fp4Error> {
        let weights = self.weights()?;
        let plan = LoadPlan::new(module, &weights, map)?;
        Ok(report(&plan, &weights, &self.container().file_names()))
    }
}

impl LoadCheckpoint for Model<'_> {
    fn load_into<M: Module>(
        &self,
        module: &mut M,
        map: &CheckpointMap,
    ) -> Result<LoadReport, Fp4Error> {
        load(&self.weights, &self.files, module, map)
    }

    fn check_load<M: Module>(
        &self,
        module: &M,
        map: &CheckpointMap,
    ) -> Result<LoadReport, Fp4Error> {
        let plan = LoadPlan::new(module, &self.weights, map)?;
        Ok(report(&plan, &self.weights, &self.files))
    }
}

/// Loads weights of files into a module.
fn load<M: Module>(
    weights: &[Weight<'_>],
    files: &[String],
    module: &mut M,
    map: &CheckpointMap,
) -> Result<LoadReport, Fp4Error> {
    let plan = LoadPlan::new(module, weights, map)?;
    let mut packing = Packing::new(&plan, weights);
    let mut loaded = module.clone();
    if !packing.parameters.is_empty() {
        pack_provided(&mut loaded, |dense| packing.give(dense))?;
    }
    drop(packing);
    // Clones of a module share running statistics: nothing but a device fails from here on.
    let found = |planned: &'_ PlannedParameter| planned.target.path.clone();
    let parameters = plan.parameters.iter().map(|one| (found(one), one)).collect();
    let mut dense = LoadDense { parameters, weights };
    *module = caught(|| Ok::<_, Fp4Error>(map_parameters(loaded, &mut dense)))?;
    Ok(report(&plan, weights, files))
}

/// Packed weights for the parameters that get one.
struct Packing<'p> {
    parameters: BTreeMap<&'p str, (&'p ParameterTensors, &'p How)>,
    weights: &'p [Weight<'p>],
    /// How many matrices are still to be made of a tensor.
    left: BTreeMap<&'p [Piece], usize>,
    /// Packed weights of more than one parameter.
    shared: BTreeMap<&'p [Piece], PackedWeight>,
}

impl<'p> Packing<'p> {
    fn new(plan: &'p LoadPlan, weights: &'p [Weight<'p>]) -> Self {
        let mut parameters = BTreeMap::new();
        let mut left: BTreeMap<&[Piece], usize> = BTreeMap::new();
        for planned in &plan.parameters {
            if let Ok((source, how @ How::Packed { .. })) = &planned.found {
                parameters.insert(planned.target.path.as_str(), (source, how));
                if planned.target.shape.len() == 2 {
                    *left.entry(&source.pieces).or_default() += 1;
                }
            }
        }
        Self { parameters, weights, left, shared: BTreeMap::new() }
    }

    /// The packed weight of a parameter.
    fn give(&mut self, dense: &DenseWeight<'_>) -> Result<Option<PackedWeight>, Fp4Error> {
        let Some(&(source, how)) = self.parameters.get(dense.path()) else { return Ok(None) };
        let &How::Packed { axis, .. } = how else { return Ok(None) };
        let key = source.pieces.as_slice();
        let left = self.left.get_mut(key).map_or(0, |left| {
            *left -= 1;
            *left
        });
        let known = match left {
            0 => self.shared.remove(key),
            _ => self.shared.get(key).cloned(),
        };
        let device = dense.device();
        if let Some(known) = known.filter(|known| known.device() == device) {
            return Ok(Some(known.shared(axis)));
        }
        let (host, hadamard) = packed(self.weights, source);
        let made = PackedWeight::from_packed(host, hadamard, dense.shape(), axis, &device);
        let made = made.map_err(|problem| match problem {
            OpsError::Device(_) => Fp4Error::at(dense.path(), problem),
            problem => Fp4Error::Mismatch(vec![Mismatch::Scales {
                parameter: dense.path().to_owned(),
                tensor: self.weights[key[0].weight].name.clone(),
                problem: problem.to_string(),
            }]),
        })?;
        if left > 0 {
            self.shared.insert(key, made.clone());
        }
        Ok(Some(made))
    }
}

/// Codes and scales of a weight, or of several that are stacked, as one matrix, with the Hadamard
/// transform of the values that they are of.
fn packed(weights: &[Weight<'_>], source: &ParameterTensors) -> (Packed, Option<Hadamard>) {
    let (mut codes, mut scales, mut multipliers) = (Vec::new(), Vec::new(), Vec::new());
    let (mut facts, mut rows) = (None, 0);
    for piece in &source.pieces {
        let Value::Fp4(whole) = &weights[piece.weight].value else { continue };
        let part = piece.matrix.map(|index| whole.matrix(index));
        let part = part.as_ref().unwrap_or(whole);
        let (front, back) = (part.plain_codes(), part.plain_scales());
        // What is not the file's own is moved.
        match source.stacked {
            false => codes = front.into_owned(),
            true => {
                codes.reserve_exact(front.len() * source.pieces.len() - codes.len());
                codes.extend_from_slice(&front);
            }
        }
        scales.extend_from_slice(&back);
        for multiplier in part.multipliers() {
            multipliers.extend(std::iter::repeat_n(multiplier, part.rows()));
        }
        rows += part.stacked() * part.rows();
        facts = Some((part.format, part.block_size, part.cols(), part.hadamard));
    }
    let (format, block_size, cols, hadamard) = facts.expect("a plan has pieces, all of them FP4");
    let one = multipliers[0];
    let all = multipliers.iter().all(|multiplier| multiplier.to_bits() == one.to_bits());
    let tensor_scale = if all { TensorScale::One(one) } else { TensorScale::PerRow(multipliers) };
    (Packed { format, block_size, rows, cols, codes, scales, tensor_scale }, hadamard)
}

/// Replaces the values of parameters.
struct LoadDense<'p> {
    parameters: BTreeMap<String, &'p PlannedParameter>,
    weights: &'p [Weight<'p>],
}

impl LoadDense<'_> {
    /// The values of a parameter that gets some.
    fn data(&self, path: &str) -> Option<(TensorData, DType)> {
        let planned = self.parameters.get(path)?;
        let Ok((source, How::Dense { dtype, turn })) = &planned.found else { return None };
        let mut parts = source.pieces.iter().map(|piece| {
            let (values, from, shape) = values(&self.weights[piece.weight], piece.matrix);
            bytes::data(&values, &shape, *turn, from, *dtype)
        });
        let first = parts.next()?;
        let shape = planned.target.shape.clone();
        let all = match source.stacked {
            false => first.into_bytes(),
            true => {
                let mut all = first.as_bytes().to_vec();
                parts.for_each(|part| all.extend_from_slice(part.as_bytes()));
                Bytes::from_bytes_vec(all)
            }
        };
        Some((TensorData::from_bytes(all, shape, *dtype), *dtype))
    }

    /// The truth values of a parameter that gets some.
    fn truth(&self, path: &str) -> Option<TensorData> {
        let planned = self.parameters.get(path)?;
        let Ok((source, How::Truth)) = &planned.found else { return None };
        let (values, _, _) = values(&self.weights[source.pieces[0].weight], None);
        let values: Vec<bool> = values.iter().map(|&byte| byte != 0).collect();
        Some(TensorData::new(values, planned.target.shape.clone()))
    }
}

/// Bytes, dtype and shape of a dense weight or of one of its matrices; FP8 and records of ggml are
/// decoded.
fn values<'w>(weight: &'w Weight<'_>, matrix: Option<usize>) -> (Cow<'w, [u8]>, DType, Vec<usize>) {
    match &weight.value {
        Value::Plain(tensor) if tensor.plain().is_none() => {
            let part = matrix.map(|index| tensor.part(1, index));
            let decoded = part.as_ref().unwrap_or(tensor).decode(Dtype::F32);
            let decoded = decoded.expect("a plan has no records but those that are decoded");
            (Cow::Owned(decoded.bytes.into_owned()), DType::F32, decoded.shape.to_vec())
        }
        Value::Plain(tensor) => {
            // A truth value is a byte; a plan has no other dtype that Burn has not.
            let dtype = tensor.plain().and_then(bytes::of_file).unwrap_or(DType::U8);
            let (bytes, shape) = (&tensor.bytes[..], &tensor.shape[..]);
            let Some(index) = matrix else { return (Cow::Borrowed(bytes), dtype, shape.to_vec()) };
            let length = bytes.len() / shape[0];
            let part = &bytes[index * length..(index + 1) * length];
            (Cow::Borrowed(part), dtype, shape[1..].to_vec())
        }
        Value::Fp8(whole) => {
            let part = matrix.map(|index| whole.matrix(index));
            let decoded: Result<_, CheckpointError> =
                part.as_ref().unwrap_or(whole).decode(Dtype::F32);
            let decoded = decoded.expect("F32 is one of the dtypes that FP8 is decoded to");
            (Cow::Owned(decoded.bytes.into_owned()), DType::F32, decoded.shape.to_vec())
        }
        Value::Fp4(_) => unreachable!("packed weights are attached, not loaded"),
    }
}

impl MapParameters for LoadDense<'_> {
    fn float<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some((data, dtype)) = self.data(path) else { return param };
        let device: Device = param.lazy_device();
        with_values(param, Tensor::from_data(data, (&device, dtype)))
    }

    fn int<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D, Int>>,
    ) -> Param<Tensor<D, Int>> {
        let Some((data, dtype)) = self.data(path) else { return param };
        let (id, device) = (param.id, param.lazy_device());
        param.transform_for_load(Tensor::from_data(data, (&device, dtype)), id)
    }

    fn bool<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let Some(data) = self.truth(path) else { return param };
        let (id, device) = (param.id, param.lazy_device());
        param.transform_for_load(Tensor::from_data(data, &device), id)
    }
}

fn report(plan: &LoadPlan, weights: &[Weight<'_>], files: &[String]) -> LoadReport {
    let mut left_out = BTreeSet::new();
    let parameters = plan.parameters.iter().map(|PlannedParameter { target, found }| {
        let (path, shape) = (target.path.clone(), target.shape.clone());
        let (tensors, loaded) = match found {
            Err(because) => (Vec::new(), Loaded::Kept { because: because.clone() }),
            Ok((source, how)) => {
                let from = |piece: &Piece| {
                    let weight = &weights[piece.weight];
                    if weight.input_scale.is_some() {
                        left_out.insert(piece.weight);
                    }
                    let file = files.get(weight.file).cloned().unwrap_or_default();
                    LoadedFrom { tensor: weight.name.clone(), matrix: piece.matrix, file }
                };
                let tensors = source.pieces.iter().map(from).collect();
                let stored = described(&weights[source.pieces[0].weight]);
                let loaded = match *how {
                    How::Packed { format, block_size, axis } => {
                        Loaded::Packed { format, block_size, axis }
                    }
                    How::Dense { dtype, .. } => {
                        Loaded::Dense { stored, dtype: format!("{dtype:?}") }
                    }
                    How::Truth => Loaded::Dense { stored, dtype: "Bool".to_owned() },
                };
                (tensors, loaded)
            }
        };
        LoadedParameter { path, shape, tensors, loaded }
    });
    let parameters = parameters.collect();
    LoadReport {
        parameters,
        unused: plan.unused.clone(),
        input_scales_left_out: left_out.len(),
        cache_scales_left_out: plan.cache_scales,
    }
}
