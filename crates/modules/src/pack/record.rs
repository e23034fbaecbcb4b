//! Records of quantized modules: Burn's own, which name what their tensors are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use burn::module::{LoraAdapter, Module, Param, ParamId, Reparameterization, Reparameterizer};
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::kind::Basic;
use burn::tensor::{Bytes, DType, Device, Tensor, TensorData};
use burn_fp4_ops::formats::check_scales;
use burn_fp4_ops::{Fp4Tensor, OpsError, weight_data, without_padding};
use burn_pack::{HEADER_SIZE, Header, Reader, Writer};

use crate::error::Fp4Error;
use crate::packed_weight::{PackedWeight, edit_next, with_edits};
use crate::walk::parameters::{Kind, StoredParameter, Walk};

use super::packed_parameter::packed_weights;
use super::packed_parameter::placeholder;

/// The tensors of a record, by name.
pub(crate) type Tensors = BTreeMap<String, burn_pack::Tensor>;

pub(crate) fn from_record(record: ModuleRecord) -> Result<Tensors, Fp4Error> {
    let bytes = record.into_bytes().map_err(unreadable)?;
    from_reader(Reader::from_bytes(bytes).map_err(unreadable)?)
}

pub(crate) fn from_file(path: &Path) -> Result<Tensors, Fp4Error> {
    // As Burn finds it.
    let path = match path.extension().is_none() && !path.exists() {
        true => path.with_extension(burn_pack::EXTENSION),
        false => path.to_owned(),
    };
    let failed = |error: &dyn std::fmt::Display| Fp4Error::Record {
        problem: format!("cannot read {}: {error}", path.display()),
        names: Vec::new(),
    };
    check_header(&path).map_err(|error| failed(&error))?;
    from_reader(Reader::from_file_exact(&path).map_err(|error| failed(&error))?)
}

/// Burn allocates as much as the header claims before it reads on.
fn check_header(path: &Path) -> io::Result<()> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut header = [0; HEADER_SIZE];
    file.read_exact(&mut header)?;
    let claimed = match Header::from_bytes(&header) {
        Ok(header) => u64::from(header.metadata_size),
        Err(error) => return Err(io::Error::other(error.to_string())),
    };
    if claimed > len {
        return Err(io::Error::other(format!("metadata of {claimed} bytes in a file of {len}")));
    }
    Ok(())
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
struct RecordEntry {
    /// Name of the layout, as in the path.
    layout: String,
    /// dtype that `val()` returns.
    dtype: DType,
    id: Option<u64>,
    codes: burn_pack::Tensor,
    scales: burn_pack::Tensor,
    tensor_scale: burn_pack::Tensor,
    adapter: Option<Adapter>,
}

/// The adapter over a packed weight.
struct Adapter {
    /// The part of the path that says the scale.
    name: String,
    scale: f64,
    a: burn_pack::Tensor,
    b: burn_pack::Tensor,
}

/// Loads a record: packed weights are attached where the module has dense ones, and replace the
/// packed ones that it has; everything else is loaded by Burn.
///
/// Everything is checked before anything is loaded: clones of a module share running statistics, so
/// that Burn would change them in the module itself.
pub(crate) fn load<M: Module>(module: &mut M, mut tensors: Tensors) -> Result<(), Fp4Error> {
    let walk = Walk::over(module);
    let entries = take_packed(&mut tensors)?;
    let attached = packed_weights(module);
    let taken = walk.parameters.iter().filter(|parameter| {
        let other =
            parameter.reparameterization.as_deref().is_some_and(|it| it != PackedWeight::NAME);
        other && entries.contains_key(&parameter.path)
    });
    let taken: Vec<_> = taken.map(|parameter| parameter.path.clone()).collect();
    if !taken.is_empty() {
        return Err(problem(
            "it has packed weights where the module has something else attached",
            taken,
        ));
    }
    let dense: Vec<_> =
        attached.keys().filter(|path| !entries.contains_key(*path)).cloned().collect();
    if !dense.is_empty() {
        return Err(problem("it has dense weights where the module has packed ones", dense));
    }
    let others = entries.iter().filter(|(path, entry)| {
        attached.get(*path).is_some_and(|packed| packed.names() != entry.names())
    });
    let others: Vec<_> = others.map(|(path, _)| path.clone()).collect();
    if !others.is_empty() {
        return Err(problem(
            "weights of the module are packed in another way, or have other adapters",
            others,
        ));
    }

    // Burn is to accept what is missing, so that is checked here: the dense values of packed
    // weights are not in the record.
    let mut known: BTreeMap<&str, &StoredParameter> = BTreeMap::new();
    for stored in &walk.stored {
        let part = format!(".{}.", PackedWeight::NAME);
        let of_packed =
            stored.path.rsplit_once(&part).is_some_and(|(path, _)| attached.contains_key(path));
        if !of_packed {
            known.insert(&stored.path, stored);
        }
    }
    let missing =
        known.keys().filter(|path| !entries.contains_key(**path) && !tensors.contains_key(**path));
    let missing: Vec<_> = missing.map(|path| (*path).to_owned()).collect();
    if !missing.is_empty() {
        return Err(problem("the module has parameters that the record lacks", missing));
    }
    let names = entries.keys().chain(tensors.keys());
    let unknown: Vec<_> =
        names.filter(|name| !known.contains_key(name.as_str())).cloned().collect();
    if !unknown.is_empty() {
        return Err(lacking(unknown, |path| known.contains_key(path)));
    }
    tensors.iter().try_for_each(|(name, tensor)| check(tensor, known[name.as_str()]))?;
    entries.iter().try_for_each(|(name, entry)| check_base(name, entry, known[name.as_str()]))?;

    let freeze = never_frozen(&walk, &entries, &attached);
    let attached = attached.into_keys().collect();
    let mut attach = AttachRecorded { entries, attached, freeze, error: None };
    let quantized = with_edits(|| module.clone().apply_reparameterization(&mut attach));
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

/// Returns the error about tensors that a module has no parameters for. The factors of an adapter
/// are below the path of a parameter, which tells them from a module whose field has their name.
fn lacking(names: Vec<String>, is_parameter: impl Fn(&str) -> bool) -> Fp4Error {
    let marker = format!(".{}.", LoraAdapter::NAME);
    let is_factor = |name: &String| {
        let found = name.rsplit_once(&marker);
        found.is_some_and(|(path, factor)| matches!(factor, "a" | "b") && is_parameter(path))
    };
    let lacks = match names.iter().any(is_factor) {
        true => {
            "the record has adapters of dense weights that the module lacks; call `lora_fp4` on \
             the module before loading, or `merge_lora_fp4` before saving"
        }
        false => "the record has tensors that the module lacks",
    };
    problem(lacks, names)
}

/// See [`AttachRecorded::freeze`].
fn never_frozen(
    walk: &Walk,
    entries: &BTreeMap<String, RecordEntry>,
    attached: &BTreeMap<String, PackedWeight>,
) -> Option<BTreeSet<String>> {
    let is_new = |(path, entry): (&String, &RecordEntry)| {
        entry.adapter.is_some() && !attached.contains_key(path)
    };
    entries.iter().any(is_new).then(|| {
        let factors = walk.parameters.iter().filter(|one| one.inside_reparameterization);
        factors.map(|factor| factor.path.clone()).collect()
    })
}

/// # Errors
/// [`Fp4Error::Record`] if a tensor is not what a parameter can hold on its device.
fn check(tensor: &burn_pack::Tensor, stored: &StoredParameter) -> Result<(), Fp4Error> {
    let found = tensor.dtype;
    let fits = match stored.kind {
        Kind::Float => found.is_float() || matches!(found, DType::QFloat(_)),
        Kind::Int => found.is_int() || found.is_uint(),
        Kind::Bool => found.is_bool(),
    };
    let shape = tensor.shape.to_vec();
    if !fits || shape != stored.shape {
        let StoredParameter { kind, shape: expected, .. } = stored;
        let expected = format!("expected {kind:?} {expected:?}, found {found:?} {shape:?}");
        return Err(problem(&expected, [tensor.name.clone()]));
    }
    match found {
        // Devices store what Burn quantized, whether they compute with it or not.
        DType::QFloat(_) => Ok(()),
        _ => supported(&tensor.name, found, &stored.device),
    }
}

/// # Errors
/// [`Fp4Error::Record`] if the values of a packed weight cannot have the dtype that the record
/// says.
fn check_base(path: &str, entry: &RecordEntry, stored: &StoredParameter) -> Result<(), Fp4Error> {
    if stored.kind != Kind::Float || !entry.dtype.is_float() {
        let expected = format!("expected {:?}, found {:?}", stored.kind, entry.dtype);
        return Err(problem(&expected, [path.to_owned()]));
    }
    supported(path, entry.dtype, &stored.device)
}

/// # Errors
/// [`Fp4Error::Record`] if a device does not have a dtype. Every device stores bytes for kernels,
/// whether it computes with them or not.
fn supported(name: &str, dtype: DType, device: &Device) -> Result<(), Fp4Error> {
    match dtype == DType::U8 || device.supports_dtype(dtype) {
        true => Ok(()),
        false => {
            Err(problem(&format!("the device {device:?} has no {dtype:?}"), [name.to_owned()]))
        }
    }
}

/// Takes the packed weights out of the tensors, with their placeholders, whose one value says
/// nothing but the dtype.
fn take_packed(tensors: &mut Tensors) -> Result<BTreeMap<String, RecordEntry>, Fp4Error> {
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
        let mut part = |part: &str| {
            let name = format!("{path}{marker}{layout}.{part}");
            tensors.remove(&name).ok_or_else(|| problem("a packed weight is incomplete", [name]))
        };
        let (codes, scales, tensor_scale) =
            (part("codes")?, part("scales")?, part("tensor_scale")?);
        let adapter = take_adapter(tensors, &format!("{path}{marker}"))?;
        let (dtype, id) = (base.dtype, base.param_id);
        entries
            .insert(path, RecordEntry { layout, dtype, id, codes, scales, tensor_scale, adapter });
    }
    Ok(entries)
}

/// Takes the adapter out whose tensors have names with this beginning, if there is one.
fn take_adapter(tensors: &mut Tensors, prefix: &str) -> Result<Option<Adapter>, Fp4Error> {
    let below = tensors.range(prefix.to_owned()..).map(|(name, _)| name);
    let name = below.take_while(|name| name.starts_with(prefix)).find_map(|name| {
        let (adapter, _) = name.strip_prefix(prefix)?.rsplit_once('.')?;
        Some((adapter.to_owned(), PackedWeight::parse_adapter(adapter)?))
    });
    let Some((name, scale)) = name else { return Ok(None) };
    let mut factor = |factor: &str| {
        let name = format!("{prefix}{name}.{factor}");
        tensors.remove(&name).ok_or_else(|| problem("an adapter is incomplete", [name]))
    };
    let (a, b) = (factor("a")?, factor("b")?);
    Ok(Some(Adapter { name, scale, a, b }))
}

impl RecordEntry {
    /// The parts of paths that say how to read what is below them.
    fn names(&self) -> (String, Option<String>) {
        (self.layout.clone(), self.adapter.as_ref().map(|adapter| adapter.name.clone()))
    }
}

/// Attaches packed weights to dense parameters, or puts them in the place of others.
struct AttachRecorded {
    entries: BTreeMap<String, RecordEntry>,
    /// Paths of weights that are packed already.
    attached: BTreeSet<String>,
    /// If adapters are attached to a module without, as `lora_fp4` does: the factors that the
    /// module has already. Everything else is frozen.
    freeze: Option<BTreeSet<String>>,
    error: Option<Fp4Error>,
}

impl Reparameterizer for &mut AttachRecorded {
    type Reparam = PackedWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<PackedWeight>) {
        let param = match &self.freeze {
            Some(factors) if !factors.contains(path) => param.set_require_grad(false),
            _ => param,
        };
        let Some(entry) = self.entries.remove(path) else {
            return (param, None);
        };
        let id = entry.id.map(ParamId::from);
        let attached = self.attached.contains(path);
        let mut base = if attached { param } else { placeholder(param, entry.dtype) };
        base.id = id.unwrap_or(base.id);
        match packed::<D>(path, entry, base.lazy_shape().to_vec(), &base.lazy_device()) {
            // What is attached already is mapped next.
            Ok(packed) if attached => {
                edit_next(Box::new(|before| packed.with_activations(before.activations())));
                (base, None)
            }
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
    entry: RecordEntry,
    shape: Vec<usize>,
    device: &Device,
) -> Result<PackedWeight, Fp4Error> {
    let layout = PackedWeight::parse_layout(&entry.layout, shape)
        .ok_or_else(|| problem(&format!("unknown layout `{}`", entry.layout), [path.to_owned()]))?;
    let plain = device.clone().without_autodiff();
    let codes = data::<2>(entry.codes, &[DType::U8], &plain)?;
    let scales = data::<2>(entry.scales, &[DType::U8], &plain)?;
    let tensor_scale = data::<1>(entry.tensor_scale, &[DType::I32], &plain)?;
    // Checked here, since a browser cannot wait for what a GPU would hand back.
    let blocks = scales.shape()[1];
    let values: Vec<_> =
        tensor_scale.iter::<i32>().map(|bits| f32::from_bits(bits as u32)).collect();
    let checked =
        scales.as_slice::<u8>().map_err(|error| problem(&error.to_string(), [path.to_owned()]))?;
    let checked = check_scales(layout.format, blocks, checked, &values);
    let at = |problem: OpsError| Fp4Error::at(path, problem);
    checked.map_err(|problem| at(problem.into()))?;
    let [codes, scales] = [codes, scales].map(|data| without_padding(tensor(data, &plain)));
    let packed =
        Fp4Tensor::<D>::from_parts_unread(codes, scales, tensor(tensor_scale, &plain), layout);
    let packed = PackedWeight::from(packed.map_err(at)?);
    let Some(Adapter { scale, a, b, .. }) = entry.adapter else { return Ok(packed) };
    let [channels, outputs] = packed.layout().shape[..] else {
        return Err(problem("only matrices have adapters", [path.to_owned()]));
    };
    let floats = [DType::F32, DType::F16, DType::BF16, DType::F64];
    let (ids, names) = ([a.param_id, b.param_id], [a.name.clone(), b.name.clone()]);
    let factor = |part| data::<2>(part, &floats, device).map(|data| tensor(data, device));
    let (a, b): (Tensor<2>, Tensor<2>) = (factor(a)?, factor(b)?);
    let ([rows, rank], [inner, cols]) = (a.dims(), b.dims());
    if [rows, inner, cols] != [channels, rank, outputs] || rank == 0 || a.dtype() != b.dtype() {
        let expected = format!("expected factors of one dtype, [{channels}, r] and [r, {outputs}]");
        return Err(problem(&expected, names));
    }
    let factor = |tensor, id: Option<u64>| {
        let mut param = Param::from_tensor(tensor);
        param.id = id.map_or(param.id, ParamId::from);
        param
    };
    let adapter = LoraAdapter { a: factor(a, ids[0]), b: factor(b, ids[1]), scale };
    Ok(packed.with_adapter(Some(adapter)))
}

/// Reads a tensor of rank `D` into host memory.
fn data<const D: usize>(
    tensor: burn_pack::Tensor,
    dtypes: &[DType],
    device: &Device,
) -> Result<TensorData, Fp4Error> {
    let (name, found, shape, _, bytes): (_, _, _, _, Bytes) =
        tensor.into_parts().map_err(unreadable)?;
    if !dtypes.contains(&found) || shape.num_dims() != D {
        let expected = format!("expected {dtypes:?} of rank {D}, found {found:?} {shape:?}");
        return Err(problem(&expected, [name]));
    }
    supported(&name, found, device)?;
    // Read now: bytes of a file stay in the file, which may be gone when the weight is first used.
    let bytes = Bytes::from_bytes_vec(bytes.to_vec());
    Ok(TensorData::from_bytes(bytes, shape, found))
}

/// Puts values on a device, in their own dtype.
fn tensor<const D: usize, K: Basic>(data: TensorData, device: &Device) -> Tensor<D, K> {
    let dtype = data.dtype();
    Tensor::from_data(weight_data(data, device), (device, dtype))
}
