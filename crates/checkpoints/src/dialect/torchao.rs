//! torchao: the parts of a tensor subclass under names of their own, and what they are as JSON in
//! the file's metadata.
//!
//! | tensor                       | dtype      | meaning                                        |
//! |------------------------------|------------|------------------------------------------------|
//! | `m._weight_qdata`            | U8         | codes `[N, K/2]`, low nibble first             |
//! | `m._weight_scale`            | E4M3, E8M0 | block scales, in tiles if `is_swizzled_scales` |
//! | `m._weight_per_tensor_scale` | F32        | tensor scale, a multiplier; may be missing     |
//!
//! `__metadata__` has `tensor_names`, a list, and for each name its `_type` and `_data`.
//!
//! Sources: `prototype/safetensors/safetensors_support.py`, `prototype/mx_formats/nvfp4_tensor.py`.

use burn_fp4_formats::Fp4Format;

use super::parts::{self, Parts, Reader};
use super::traits::{Dialect, Write, quant_method};
use crate::container::Container;
use crate::error::CheckpointError;
use crate::fp4::{Order, TensorScale};
use crate::fp8::Fp8Weight;
use crate::tensor::Tensor;
use crate::weight::{Quantization, Value, Weight};

/// torchao's safetensors files.
pub(super) struct TorchAo;

const QDATA: &str = "_qdata";

impl Dialect for TorchAo {
    fn name(&self) -> &'static str {
        "torchao"
    }

    fn evidence(&self, container: &Container) -> Option<&'static str> {
        let named = || container.metadata_text("tensor_names");
        quant_method(container, self.quant_methods())
            .or_else(|| named().map(|_| "tensor_names of the metadata"))
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["._weight_qdata"]
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &["torchao"]
    }

    fn names_itself(&self) -> bool {
        true
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        let weights = parts::read(container, &[QDATA], |reader, tensor| {
            read_weight(container, reader, tensor)
        })?;
        Ok((weights, Quantization { dialect: self.name(), ..Quantization::default() }))
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        None
    }
}

fn read_weight<'a>(
    container: &Container,
    reader: &mut Reader<'a>,
    tensor: &Tensor<'a>,
) -> Result<Option<Weight<'a>>, CheckpointError> {
    let Some(stem) = tensor.name.strip_suffix(QDATA) else { return Ok(None) };
    let Some((module, parameter)) = stem.rsplit_once("._") else { return Ok(None) };
    let name = format!("{module}.{parameter}");
    let field = |expected, found: &str, remedy| CheckpointError::Field {
        path: tensor.file.to_owned(),
        field: name.clone(),
        expected,
        found: found.to_owned(),
        remedy,
    };
    let Some(text) = container.metadata_text(&name) else {
        let remedy = "save the model again with its metadata";
        return Err(field("a description of the tensor in the metadata", "nothing", remedy));
    };
    let facts: serde_json::Value = serde_json::from_str(text).map_err(|source| {
        let path = tensor.file.to_owned();
        CheckpointError::Json { path, what: "metadata of a tensor", source }
    })?;
    let kind = facts["_type"].as_str().unwrap_or_default();
    let data = &facts["_data"];
    let element = data["elem_dtype"]["_data"].as_str();
    let format = match (kind, element) {
        ("NVFP4Tensor", _) => Some(Fp4Format::NvFp4),
        ("MXTensor", Some(element)) if element.contains("float4") => Some(Fp4Format::MxFp4),
        ("MXTensor" | "Float8Tensor", _) => None,
        _ => {
            let expected = "NVFP4Tensor, MXTensor or Float8Tensor";
            return Err(field(expected, kind, CheckpointError::ANOTHER));
        }
    };
    let scales = reader.need(tensor, &format!("{stem}_scale"))?;
    let Some(format) = format else {
        let value = Value::Fp8(Fp8Weight::new(tensor.clone(), scales, [128, 128])?);
        return Ok(Some(Weight::new(name, 0, value)));
    };
    let stated = reader.numbers(&format!("{stem}_per_tensor_scale"))?;
    let (codes, tensor_scale) = (tensor.clone(), stated.map(TensorScale::Multiplier));
    let parts = Parts { codes, scales, tensor_scale, order: Order::ScalesFirst };
    let value = match data["is_swizzled_scales"] == true {
        true => parts.tiled(format, false)?,
        false => parts.rows(format)?,
    };
    let mut weight = Weight::new(name, 0, Value::Fp4(value));
    let input = reader.numbers(&format!("{stem}_act_per_tensor_scale"))?;
    weight.input_scale = input.map(TensorScale::Multiplier);
    Ok(Some(weight))
}
