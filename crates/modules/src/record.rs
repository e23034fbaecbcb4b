//! Records of quantized modules: Burn's own, which name what their tensors are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use burn::module::{Module, Param, ParamId, Reparameterization, Reparameterizer};
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::{Bytes, DType, Device, Int, Tensor, TensorData};
use burn_fp4_ops::{Fp4Tensor, OpsError};
use burn_pack::{Reader, Writer};

use crate::Fp4Error;
use crate::packed::{PackedWeight, placeholder};
use crate::select::Walk;

/// The tensors of a record, by name.
pub(crate) type Tensors = BTreeMap<String, burn_pack::Tensor>;

pub(crate) fn from_record(record: ModuleRecord) -> Result<Tensors, Fp4Error> {
    let bytes = record.into_bytes().map_err(unreadable)?;
    from_reader(Reader::from_bytes(bytes).map_err(unreadable)?)
}

pub(crate) fn from_file(path: &Path) -> Result<Tensors, Fp4Error> {
    let reader = Reader::from_file(path).map_err(|error| Fp4Error::Record {
        problem: format!("cannot read {}: {error}", path.display()),
        names: Vec::new(),
    })?;
    from_reader(reader)
}

fn from_reader(reader: Reader) -> Result<Tensors, Fp4Error> {
    let tensors = reader.into_tensors().map_err(unreadable)?;
    Ok(tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect())
}

fn unreadable(error: impl std::fmt::Display) -> Fp4Error {
    Fp4Error::Record { problem: error.to_string(), names: Vec::new() }
}

fn problem(problem: &str, names: impl IntoIterator<Item = String>) -> Fp4Error {
    Fp4Error::Record { problem: problem.to_owned(), names: names.into_iter().collect() }
}

/// A packed weight in a record.
struct Entry {
    /// Name of the layout, as in the path.
    layout: String,
    /// dtype that `val()` returns.
    dtype: DType,
    id: Option<u64>,
    codes: burn_pack::Tensor,
    scales: burn_pack::Tensor,
    tensor_scale: burn_pack::Tensor,
}

/// Loads a record: packed weights are attached where the module has dense ones, everything else is
/// loaded by Burn.
pub(crate) fn load<M: Module>(module: &mut M, mut tensors: Tensors) -> Result<(), Fp4Error> {
    let walk = Walk::over(module);
    let (mut attached, mut others) = (BTreeSet::new(), BTreeSet::new());
    for parameter in &walk.parameters {
        match parameter.reparameterization.as_deref() {
            Some(PackedWeight::NAME) => attached.insert(parameter.path.clone()),
            Some(_) => others.insert(parameter.path.clone()),
            None => false,
        };
    }
    let entries = take_packed(&mut tensors, &attached)?;
    let taken: Vec<_> = entries.keys().filter(|path| others.contains(*path)).cloned().collect();
    if !taken.is_empty() {
        return Err(problem(
            "it has packed weights where the module has something else attached",
            taken,
        ));
    }

    // Burn is told to allow for what is missing, so that is checked here: the dense values that
    // packed ones stand for are not in the record.
    let missing = walk.paths.iter().filter(|path| {
        let packed = entries.contains_key(path.as_str()) || attached.contains(path.as_str());
        !packed && !tensors.contains_key(path.as_str())
    });
    let missing: Vec<_> = missing.cloned().collect();
    if !missing.is_empty() {
        return Err(problem("the module has parameters that the record lacks", missing));
    }
    let unknown: Vec<_> = entries
        .keys()
        .chain(tensors.keys())
        .filter(|name| !walk.paths.contains(name))
        .cloned()
        .collect();
    if !unknown.is_empty() {
        return Err(problem("the record has tensors that the module lacks", unknown));
    }

    let mut attach = Attach { entries, error: None };
    let quantized = module.clone().apply_reparameterization(&mut attach);
    if let Some(error) = attach.error {
        return Err(error);
    }
    let rest = Writer::new(tensors.into_values().collect()).into_bytes().map_err(unreadable)?;
    let rest = ModuleRecord::from_bytes(rest).map_err(unreadable)?.allow_partial(true);
    *module = quantized.try_load_record(rest).map_err(|error| match error {
        RecordError::Validation(message) | RecordError::Io(message) => problem(&message, []),
    })?;
    Ok(())
}

/// Takes the packed weights out of the tensors, except those that the module has attached already,
/// which Burn can load; of both the placeholder, whose one value says nothing but the dtype.
fn take_packed(
    tensors: &mut Tensors,
    attached: &BTreeSet<String>,
) -> Result<BTreeMap<String, Entry>, Fp4Error> {
    let marker = format!(".{}.", PackedWeight::NAME);
    let found: Vec<_> = tensors
        .keys()
        .filter_map(|name| {
            let (path, rest) = name.rsplit_once(&marker)?;
            let layout = rest.strip_suffix(".codes")?;
            Some((path.to_owned(), layout.to_owned()))
        })
        .collect();
    let mut entries = BTreeMap::new();
    for (path, layout) in found {
        let base = tensors.remove(&path);
        let base =
            base.ok_or_else(|| problem("a packed weight has no parameter", [path.clone()]))?;
        if attached.contains(&path) {
            continue;
        }
        let mut part = |part: &str| {
            let name = format!("{path}{marker}{layout}.{part}");
            tensors.remove(&name).ok_or_else(|| problem("a packed weight is incomplete", [name]))
        };
        let (codes, scales, tensor_scale) =
            (part("codes")?, part("scales")?, part("tensor_scale")?);
        let (dtype, id) = (base.dtype, base.param_id);
        entries.insert(path, Entry { layout, dtype, id, codes, scales, tensor_scale });
    }
    Ok(entries)
}

/// Attaches packed weights to dense parameters.
struct Attach {
    entries: BTreeMap<String, Entry>,
    error: Option<Fp4Error>,
}

impl Reparameterizer for &mut Attach {
    type Reparam = PackedWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<PackedWeight>) {
        let Some(entry) = self.entries.remove(path) else {
            return (param, None);
        };
        let (dtype, id) = (entry.dtype, entry.id.map(ParamId::from));
        let mut base = placeholder(param, dtype);
        base.id = id.unwrap_or(base.id);
        match packed::<D>(path, entry, base.lazy_shape().to_vec(), &base.lazy_device()) {
            Ok(packed) => (base, Some(packed)),
            Err(error) => {
                self.error.get_or_insert(error);
                (base, None)
            }
        }
    }
}

fn packed<const D: usize>(
    path: &str,
    entry: Entry,
    shape: Vec<usize>,
    device: &Device,
) -> Result<PackedWeight, Fp4Error> {
    let layout = PackedWeight::parse_layout(&entry.layout, shape)
        .ok_or_else(|| problem(&format!("unknown layout `{}`", entry.layout), [path.to_owned()]))?;
    let device = device.clone().without_autodiff();
    let codes: Tensor<2, Int> = tensor(entry.codes, DType::U8, &device)?;
    let scales: Tensor<2, Int> = tensor(entry.scales, DType::U8, &device)?;
    let tensor_scale: Tensor<1, Int> = tensor(entry.tensor_scale, DType::I32, &device)?;
    let parameter = |source: OpsError| Fp4Error::Parameter { path: path.to_owned(), source };
    let packed =
        Fp4Tensor::<D>::from_parts(codes, scales, tensor_scale, layout).map_err(parameter)?;
    Ok(PackedWeight::new(&packed))
}

fn tensor<const D: usize>(
    tensor: burn_pack::Tensor,
    dtype: DType,
    device: &Device,
) -> Result<Tensor<D, Int>, Fp4Error> {
    let (name, found, shape, _, bytes): (_, _, _, _, Bytes) =
        tensor.into_parts().map_err(unreadable)?;
    if found != dtype || shape.num_dims() != D {
        let expected = format!("expected {dtype:?} of rank {D}, found {found:?} {shape:?}");
        return Err(problem(&expected, [name]));
    }
    // Read now: bytes of a file stay in the file, which may be gone when the weight is first used.
    let bytes = Bytes::from_bytes_vec(bytes.to_vec());
    Ok(Tensor::from_data(TensorData::from_bytes(bytes, shape, found), (device, dtype)))
}
