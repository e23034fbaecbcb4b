//! ComfyUI and Black Forest Labs: single files whose metadata names the quantized layers; block
//! scales in tiles, the **high** nibble first.
//!
//! | tensor             | dtype   | shape               | meaning                        |
//! |--------------------|---------|---------------------|--------------------------------|
//! | `X.weight`         | U8      | `[N, K/2]`          | codes; N and K padded to 16    |
//! | `X.weight_scale`   | F8_E4M3 | N to 128, K/16 to 4 | block scales in tiles of 128x4 |
//! | `X.weight_scale_2` | F32     | `[]`                | tensor scale, a multiplier     |
//!
//! `__metadata__` has `_quantization_metadata`: `{"layers": {X: {"format": "nvfp4"}}}`. The padding
//! is part of the weight here: the file does not say how much of it there is.
//!
//! Sources: `comfy_kitchen/float_utils.py` (`pack_uint4`), `comfy/quant_ops.py` of ComfyUI.

use std::collections::HashMap;

use burn_fp4_formats::Fp4Format;

use super::parts::{self, Parts, Reader};
use super::traits::{Dialect, Write};
use crate::container::Container;
use crate::error::CheckpointError;
use crate::fp4::{Numbers, Order, TensorScale};
use crate::fp8::Fp8Weight;
use crate::tensor::Tensor;
use crate::weight::{Quantization, Value, Weight};

/// ComfyUI's single files.
pub(super) struct ComfyUi;

const METADATA: &str = "_quantization_metadata";

impl Dialect for ComfyUi {
    fn name(&self) -> &'static str {
        "comfyui"
    }

    fn evidence(&self, container: &Container) -> Option<&'static str> {
        container.metadata_text(METADATA).map(|_| "_quantization_metadata of the metadata")
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["weight_scale", "weight_scale_2"]
    }

    fn names_itself(&self) -> bool {
        true
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        let text = container.metadata_text(METADATA).unwrap_or("{}");
        let metadata: serde_json::Value = serde_json::from_str(text).map_err(|source| {
            let path = container.root().to_owned();
            CheckpointError::Json { path, what: METADATA, source }
        })?;
        let layers = metadata["layers"].as_object().into_iter().flatten();
        let layers: HashMap<&str, &str> = layers
            .map(|(name, layer)| (name.as_str(), layer["format"].as_str().unwrap_or_default()))
            .collect();
        let companions = [".weight_scale", ".weight_scale_2"];
        let weights = parts::read(container, &companions, |reader, tensor| {
            read_weight(container, &layers, reader, tensor)
        })?;
        Ok((weights, Quantization { dialect: self.name(), ..Quantization::default() }))
    }

    fn patterns_file(&self, _: &Container) -> Option<&'static str> {
        None
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        None
    }
}

fn read_weight<'a>(
    container: &Container,
    layers: &HashMap<&str, &str>,
    reader: &mut Reader<'a>,
    tensor: &Tensor<'a>,
) -> Result<Option<Weight<'a>>, CheckpointError> {
    let Some(module) = tensor.name.strip_suffix(".weight") else { return Ok(None) };
    // Opened as this dialect without metadata, a file has only NVFP4.
    let format = match layers.get(module) {
        Some(format) => *format,
        None if layers.is_empty() && reader.has(&format!("{module}.weight_scale_2")) => "nvfp4",
        None => return Ok(None),
    };
    let scales = reader.need(tensor, &format!("{module}.weight_scale"))?;
    let value = match format {
        "nvfp4" => {
            let second = reader.need(tensor, &format!("{module}.weight_scale_2"))?;
            let tensor_scale = Some(TensorScale::Multiplier(Numbers::of(second)?));
            let codes = tensor.clone();
            let parts = Parts { codes, scales, tensor_scale, order: Order::ScalesFirst };
            Value::Fp4(parts.tiled(Fp4Format::NvFp4, true)?)
        }
        "float8_e4m3fn" | "float8_e5m2" => {
            Value::Fp8(Fp8Weight::new(tensor.clone(), scales, [128, 128])?)
        }
        _ => {
            return Err(CheckpointError::Field {
                path: container.root().to_owned(),
                field: format!("{METADATA} of `{module}`"),
                expected: "nvfp4, float8_e4m3fn or float8_e5m2",
                found: format.to_owned(),
                remedy: CheckpointError::ANOTHER,
            });
        }
    };
    let mut weight = Weight::new(&*tensor.name, 0, value);
    let input = reader.numbers(&format!("{module}.input_scale"))?;
    weight.input_scale = input.map(TensorScale::Multiplier);
    Ok(Some(weight))
}
