//! miles: ModelOpt's NVFP4 names with what its converter writes around them.
//!
//! Its files say `quant_method: "modelopt"` and are read as such; nothing in them tells the two
//! apart, so that this dialect is chosen by name. What differs is what is written: every layer
//! has an input scale, the ignore list names every module that is not quantized and `qkv_proj`
//! with its parts, whole layers stand there with a dot at the end, and the index keeps the
//! order of the tensors.
//!
//! Source: `tools/convert_hf_to_nvfp4.py` of radixark/miles as of pull request 1054.

use std::collections::BTreeSet;

use burn_fp4_formats::Fp4Format;
use burn_fp4_policy::{Pattern, Syntax};
use serde_json::json;

use super::readers::ReadBy;
use super::traits::{Dialect, Envelope, Write, total_size, weight_map};
use super::{modelopt, scheme};
use crate::container::{CONFIG, Container, QUANT_CONFIG};
use crate::error::CheckpointError;
use crate::fp4::{Numbers, TensorScale};
use crate::tensor::NewTensor;
use crate::weight::{Model, Quantization, Value, Weight};

/// The checkpoints of miles' converter.
pub(super) struct Miles;

impl Dialect for Miles {
    fn name(&self) -> &'static str {
        "miles"
    }

    fn evidence(&self, _: &Container) -> Option<&'static str> {
        None
    }

    fn configs_of(&self) -> &'static str {
        modelopt::ModelOpt.name()
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        let (weights, mut quantization) = modelopt::ModelOpt.read(container)?;
        quantization.dialect = self.name();
        Ok((weights, quantization))
    }

    fn patterns_file(&self, container: &Container) -> Option<&'static str> {
        modelopt::ModelOpt.patterns_file(container)
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        Some(&Self)
    }
}

/// As every layer has an input scale.
const ROUNDING: &str = "rounds inputs to NVFP4";
const READERS: [ReadBy; 2] =
    [modelopt::VLLM.rounding(ROUNDING), modelopt::SGLANG.rounding(ROUNDING)];

impl Write for Miles {
    fn tensors<'w>(&self, weight: &'w Weight<'_>) -> Result<Vec<NewTensor<'w>>, CheckpointError> {
        let cannot = |what| Err(CheckpointError::cannot_hold(self.name(), &weight.name, what));
        let nvfp4 = match &weight.value {
            Value::Plain(_) => false,
            Value::Fp8(_) => return cannot(CheckpointError::FP8_TO_DECODE),
            Value::Fp4(fp4) if fp4.format == Fp4Format::NvFp4 && fp4.block_size == 16 => true,
            Value::Fp4(_) => return cannot("FP4 other than NVFP4 in blocks of 16"),
        };
        if weight.pre_quant_scale.is_some() {
            return cannot("a scale before quantization");
        }
        let mut tensors = modelopt::tensors(weight)?;
        if nvfp4 && weight.input_scale.is_none() {
            // The converter knows no activations and always writes 1.
            let scale = TensorScale::Multiplier(Numbers::new(&[1.0]));
            tensors.push(modelopt::input_scale(&weight.name, &scale));
        }
        Ok(tensors)
    }

    fn readers(&self, format: Fp4Format) -> &'static [ReadBy] {
        match format {
            Fp4Format::NvFp4 => &READERS,
            Fp4Format::MxFp4 => &[],
        }
    }

    fn fuses(&self) -> bool {
        true
    }

    fn envelope(&self, model: &Model<'_>) -> Result<Envelope, CheckpointError> {
        let metadata = scheme::torch_metadata();
        // A cache of fewer bits is stated.
        let floats = scheme::configs_of_floats(model);
        if let Some(configs) = floats.filter(|_| model.quantization.kv_cache.is_none()) {
            return Ok(Envelope::Folder { metadata, configs });
        }
        let ignore = ignore_list(model);
        let kin = [self.name(), modelopt::ModelOpt.name()].contains(&model.quantization.dialect);
        let old = model.config.as_ref().filter(|_| kin);
        let old = old.and_then(|config| config.get("quantization_config")).cloned();
        let mut config = old.filter(|old| old.is_object()).unwrap_or_else(|| json!({}));
        config["quant_algo"] = json!("NVFP4");
        config["quant_method"] = json!("modelopt");
        config["group_size"] = json!(16);
        config["ignore"] = json!(ignore);
        if config.get("kv_cache_scheme").is_none() {
            config["kv_cache_scheme"] = json!({"dynamic": false, "num_bits": 8, "type": "float"});
        }
        let export = model.quantization.quant_config.clone();
        let export = export.filter(|export| kin && export.is_object());
        let mut export = export.unwrap_or_else(|| json!({"producer": {"name": "modelopt"}}));
        export["quantization"] = json!({
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ignore,
        });
        let config = scheme::with_quantization(model, config);
        let configs = vec![(CONFIG, config), (QUANT_CONFIG, export)];
        Ok(Envelope::Folder { metadata, configs })
    }

    fn index(&self, shards: Vec<(String, String)>, total: u64) -> serde_json::Value {
        json!({"weight_map": weight_map(shards), "metadata": total_size(total)})
    }
}

/// Every module `X` whose `X.weight` is not quantized, sorted; `qkv_proj` with its parts; and
/// the layers that the source keeps whole.
fn ignore_list(model: &Model<'_>) -> BTreeSet<String> {
    let mut list = BTreeSet::new();
    for pattern in &model.quantization.ignore {
        if let (Pattern::Within(_), Some(text)) = (pattern, pattern.write(Syntax::Names)) {
            list.insert(text);
        }
    }
    for weight in model.weights.iter().filter(|weight| !weight.is_quantized()) {
        let Some(module) = weight.name.strip_suffix(".weight") else { continue };
        list.insert(module.to_owned());
        for part in ["q_proj", "k_proj", "v_proj"] {
            if let Some(parent) = module.strip_suffix(part).filter(|parent| parent.ends_with('.')) {
                list.insert(format!("{parent}qkv_proj"));
            }
        }
    }
    list
}
