//! NVIDIA ModelOpt: `X.weight` with `X.weight_scale` and, for NVFP4, `X.weight_scale_2`.
//!
//! | tensor              | dtype        | shape                    | meaning                    |
//! |---------------------|--------------|--------------------------|----------------------------|
//! | `X.weight`          | U8           | `[N, K/2]`               | codes, low nibble first    |
//! | `X.weight_scale`    | F8_E4M3, U8  | `[N, K/16]`, `[N, K/32]` | block scales, E4M3 or E8M0 |
//! | `X.weight_scale_2`  | F32          | `[]`, or one a matrix    | tensor scale, a multiplier |
//! | `X.input_scale`     | F32          | `[]`                     | of the input, a multiplier |
//! | `X.pre_quant_scale` | of the model | `[K]`                    | multiplies the input (AWQ) |
//!
//! A parameter that is not called `weight` puts its name before the scales:
//! `experts.gate_up_proj_weight_scale`. The stacked experts of Llama 4 and gpt-oss are transposed:
//! codes `[E, K/2, N]`, scales `[E, K/16, N]`. FP8 in blocks has scales `[N/128, 1, K/128, 1]`.
//! FP8 of DeepSeek keeps `X.weight_scale_inv` with two axes, which is written as `X.weight_scale`.
//!
//! Sources: `quant_utils.py`, `unified_export_hf.py`, `convert_hf_config.py` and `moe_utils.py` in
//! `modelopt/torch/export`.

use burn_fp4_formats::Fp4Format;
use burn_fp4_policy::Syntax;
use serde_json::json;

use super::parts::{self, Parts, Reader};
use super::readers::{Program, ReadBy, source};
use super::scheme::{self, Scheme};
use super::traits::{Dialect, Envelope, ScaleConvention, ScaleSupport, Write, quant_method};
use crate::container::{CONFIG, Container, QUANT_CONFIG};
use crate::dtype::{DataType, Dtype};
use crate::error::CheckpointError;
use crate::fp4::{Fp4Weight, Numbers, Order, TensorScale};
use crate::fp8::{Fp8Weight, Granularity};
use crate::storage::transpose;
use crate::tensor::{NewTensor, Tensor};
use crate::weight::{Model, Quantization, Value, Weight};

/// ModelOpt's exported Hugging Face checkpoints.
pub(super) struct ModelOpt;

/// Blocks of FP8_PB_WO.
const FP8_BLOCK: [usize; 2] = [128, 128];

/// The values of `quant_algo` whose weights are understood.
const ALGORITHMS: [&str; 12] = [
    "NVFP4",
    "W4A16_NVFP4",
    "NVFP4_AWQ",
    "W4A8_NVFP4_FP8",
    "MXFP4",
    "W4A8_MXFP4_FP8",
    "MXFP8",
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "FP8_PB_REAL",
    "MIXED_PRECISION",
];

impl Dialect for ModelOpt {
    fn name(&self) -> &'static str {
        "modelopt"
    }

    fn evidence(&self, container: &Container) -> Option<&'static str> {
        let config = || container.quant_config().map(|_| QUANT_CONFIG);
        quant_method(container, self.quant_methods()).or_else(config)
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["weight_scale", "weight_scale_2", "weight_scale_inv"]
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &["modelopt"]
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        let quantization = quantization(container, self.name())?;
        let companions = ["weight_scale", "weight_scale_2", "weight_scale_inv"];
        let weights = parts::read(container, &companions, read_weight)?;
        Ok((weights, quantization))
    }

    fn patterns_file(&self, container: &Container) -> Option<&'static str> {
        let config = container.quantization().is_some_and(|config| config.get("ignore").is_some());
        Some(if config { CONFIG } else { QUANT_CONFIG })
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        Some(&Self)
    }
}

/// Reads the configs; refuses algorithms that are not understood.
pub(super) fn quantization(
    container: &Container,
    dialect: &'static str,
) -> Result<Quantization, CheckpointError> {
    let config = container.quantization();
    let export = container.quant_config().and_then(|export| export.get("quantization"));
    for (source, field, file) in
        [(config, "ignore", CONFIG), (export, "exclude_modules", QUANT_CONFIG)]
    {
        let Some(source) = source else { continue };
        if let Some(algorithm) = source["quant_algo"].as_str() {
            check_algorithm(container, file, "quant_algo".to_owned(), algorithm)?;
        }
        for (module, layer) in source["quantized_layers"].as_object().into_iter().flatten() {
            if let Some(algorithm) = layer["quant_algo"].as_str() {
                let field = format!("quantized_layers.{module}.quant_algo");
                check_algorithm(container, file, field, algorithm)?;
            }
        }
        for item in source[field].as_array().into_iter().flatten() {
            if !item.is_string() {
                return Err(CheckpointError::Field {
                    path: container.config_path(file),
                    field: field.to_owned(),
                    expected: "texts",
                    found: item.to_string(),
                    remedy: "correct the list",
                });
            }
        }
    }
    let list = config.and_then(|config| config.get("ignore"));
    let list = list.or_else(|| export?.get("exclude_modules"));
    // ModelOpt writes null for what is not quantized.
    let stated = |value: &&serde_json::Value| !value.is_null();
    let field = |name| config.and_then(|config| config.get(name)).filter(stated).cloned();
    let exported = |name| container.quant_config().and_then(|export| export.get(name)).cloned();
    let exported_cache = || export?.get("kv_cache_quant_algo").filter(stated).cloned();
    Ok(Quantization {
        dialect,
        ignore: scheme::patterns(list, Syntax::Glob),
        kv_cache: field("kv_cache_scheme").or_else(exported_cache),
        producer: field("producer").or_else(|| exported("producer")),
        quant_config: container.quant_config().cloned(),
    })
}

fn check_algorithm(
    container: &Container,
    file: &str,
    field: String,
    algorithm: &str,
) -> Result<(), CheckpointError> {
    let path = container.config_path(file);
    if algorithm.eq_ignore_ascii_case("NVFP4_SVD") {
        let because = "the low-rank part of its weights would be lost";
        let what = format!("`{field}` {algorithm}");
        let remedy = CheckpointError::WITHOUT;
        return Err(CheckpointError::Refused { path, what, because, remedy });
    }
    if ALGORITHMS.iter().any(|known| known.eq_ignore_ascii_case(algorithm)) {
        return Ok(());
    }
    let (found, remedy) = (algorithm.to_owned(), CheckpointError::ANOTHER);
    let expected = "an algorithm of FP4 or FP8";
    Err(CheckpointError::Field { path, field, expected, found, remedy })
}

/// The name that the scales of a parameter start with.
fn base(name: &str) -> String {
    if name == "weight" || name.ends_with(".weight") {
        name.to_owned()
    } else {
        format!("{name}_weight")
    }
}

/// The name of a scale of the layer's input.
fn of_input(name: &str, scale: &str) -> String {
    match name.strip_suffix("weight") {
        Some(module) if module.is_empty() || module.ends_with('.') => format!("{module}{scale}"),
        _ => format!("{name}_{scale}"),
    }
}

fn read_weight<'a>(
    reader: &mut Reader<'a>,
    tensor: &Tensor<'a>,
) -> Result<Option<Weight<'a>>, CheckpointError> {
    let name = &*tensor.name;
    let base = base(name);
    let scales = reader.take(&format!("{base}_scale"));
    // Layers that stay in DeepSeek's FP8 keep its name for the scales.
    let scales = scales.or_else(|| reader.take(&format!("{base}_scale_inv")));
    let Some(mut scales) = scales else { return Ok(None) };
    if let [rows, 1, cols, 1] = scales.shape[..] {
        scales.shape = vec![rows, cols].into();
    }
    let value = if tensor.is(&[Dtype::U8, Dtype::I8, Dtype::F4]) {
        let second = format!("{base}_scale_2");
        let stated = reader.numbers(&second)?;
        let nvfp4 = scales.is(&[Dtype::F8_E4M3]);
        if nvfp4 && stated.is_none() {
            reader.need(tensor, &second)?;
        }
        let tensor_scale = stated.map(TensorScale::Multiplier);
        let codes = tensor.clone();
        let parts = Parts { codes, scales, tensor_scale, order: Order::ScalesFirst };
        let format = parts.format()?;
        Value::Fp4(parts.rows_or_columns(format)?)
    } else {
        Value::Fp8(Fp8Weight::new(tensor.clone(), scales, FP8_BLOCK)?)
    };
    let mut weight = Weight::new(name, 0, value);
    let input = reader.numbers(&of_input(name, "input_scale"))?;
    weight.input_scale = input.map(TensorScale::Multiplier);
    weight.pre_quant_scale = reader.take(&of_input(name, "pre_quant_scale"));
    Ok(Some(weight))
}

/// MLX has NVFP4 under other names of tensors.
pub(super) const VLLM: ReadBy =
    source(Program::Vllm, "vllm/model_executor/layers/quantization/modelopt.py");
pub(super) const SGLANG: ReadBy =
    source(Program::SgLang, "sglang/srt/layers/quantization/modelopt_quant.py");
const READERS_OF_NVFP4: [ReadBy; 3] =
    [VLLM, SGLANG, source(Program::TensorRtLlm, "tensorrt_llm/_torch/model_config.py at 008e0af8")];
/// vLLM and SGLang refuse the algorithm, and take such a layer of a mixed model for a dense one.
const READERS_OF_MXFP4: [ReadBy; 1] =
    [source(Program::TensorRtLlm, "tensorrt_llm/_torch/modules/linear.py at 00bbf71e")
        .rounding("rounds inputs to FP8")];

impl Write for ModelOpt {
    fn tensors<'w>(&self, weight: &'w Weight<'_>) -> Result<Vec<NewTensor<'w>>, CheckpointError> {
        tensors(weight)
    }

    fn readers(&self, format: Fp4Format) -> &'static [ReadBy] {
        match format {
            Fp4Format::NvFp4 => &READERS_OF_NVFP4,
            Fp4Format::MxFp4 => &READERS_OF_MXFP4,
        }
    }

    fn scale_support_of(&self, weight: &Weight<'_>) -> ScaleSupport {
        match &weight.value {
            Value::Fp4(fp4) if !fp4.format.row().tensor_scale => {
                ScaleSupport { tensor_scale: ScaleConvention::Folded, ..self.scale_support() }
            }
            // Readers find the scales of these inputs as layers run, and load no others.
            Value::Fp8(fp8) if fp8.granularity != Granularity::Tensor => {
                ScaleSupport { input_scale: false, ..self.scale_support() }
            }
            Value::Plain(_) | Value::Fp8(_) | Value::Fp4(_) => self.scale_support(),
        }
    }

    fn quantizes_input(&self, weight: &Weight<'_>) -> bool {
        let of_weights = ["W4A16_NVFP4", "FP8_PB_WO"];
        scheme::scheme(weight).is_none_or(|scheme| !of_weights.contains(&algorithm(scheme).0))
    }

    fn fuses(&self) -> bool {
        true
    }

    fn envelope(&self, model: &Model<'_>) -> Result<Envelope, CheckpointError> {
        let metadata = scheme::torch_metadata();
        if model.quantization.dialect == self.name() {
            let config = model.config.clone().map(|config| (CONFIG, config));
            let export = model.quantization.quant_config.clone();
            let export = export.map(|export| (QUANT_CONFIG, export));
            return Ok(Envelope::Folder {
                metadata,
                configs: config.into_iter().chain(export).collect(),
            });
        }
        // A cache of fewer bits is stated.
        let floats = scheme::configs_of_floats(model);
        if let Some(configs) = floats.filter(|_| model.quantization.kv_cache.is_none()) {
            return Ok(Envelope::Folder { metadata, configs });
        }
        let (config, export) = configs(model)?;
        let config = scheme::with_quantization(model, config);
        Ok(Envelope::Folder { metadata, configs: vec![(CONFIG, config), (QUANT_CONFIG, export)] })
    }
}

/// The tensors of a weight: codes, block scales, tensor scale, input scale.
pub(super) fn tensors<'w>(weight: &'w Weight<'_>) -> Result<Vec<NewTensor<'w>>, CheckpointError> {
    let name = &weight.name;
    let base = base(name);
    let mut tensors = match &weight.value {
        Value::Plain(tensor) => return Ok(vec![NewTensor::copy(name, tensor)]),
        // ModelOpt's only name for such weights, `FP8`, says that the file has a scale of the
        // inputs: vLLM and SGLang would multiply by the least f32 instead.
        Value::Fp8(Fp8Weight { granularity: Granularity::Tensor, .. })
            if weight.input_scale.is_none() =>
        {
            let what = CheckpointError::FP8_WITHOUT_INPUT_SCALE;
            return Err(CheckpointError::cannot_hold(ModelOpt.name(), name, what));
        }
        Value::Fp8(fp8) => {
            let mut scales = NewTensor::copy(format!("{base}_scale"), &fp8.scales);
            match (fp8.granularity, &scales.shape[..]) {
                (Granularity::Tensor, [1]) => scales.shape = Vec::new(),
                (Granularity::Block { rows: 2.., .. }, &[rows, cols]) => {
                    scales.shape = vec![rows, 1, cols, 1];
                }
                _ => {}
            }
            vec![NewTensor::copy(name, &fp8.values), scales]
        }
        Value::Fp4(fp4) => fp4_tensors(name, &base, fp4),
    };
    tensors.extend(weight.input_scale.as_ref().map(|scale| input_scale(name, scale)));
    if let Some(scale) = &weight.pre_quant_scale {
        tensors.push(NewTensor::copy(of_input(name, "pre_quant_scale"), scale));
    }
    Ok(tensors)
}

/// The scale of the layer's input.
pub(super) fn input_scale<'w>(name: &str, scale: &TensorScale<'_>) -> NewTensor<'w> {
    let (shape, bytes) = (scalar(scale.stated()), scale.multipliers().bytes().to_vec());
    NewTensor::bytes(of_input(name, "input_scale"), Dtype::F32, shape, bytes)
}

/// `[]` for one number.
fn scalar(numbers: &Numbers<'_>) -> Vec<usize> {
    if numbers.len() == 1 { Vec::new() } else { vec![numbers.len()] }
}

fn fp4_tensors<'w>(name: &str, base: &str, fp4: &'w Fp4Weight<'_>) -> Vec<NewTensor<'w>> {
    let dtype = match fp4.format {
        Fp4Format::NvFp4 => Dtype::F8_E4M3,
        Fp4Format::MxFp4 => Dtype::U8,
    };
    let columns = fp4.transposed && fp4.shape.len() == 3;
    let turn = move |bytes: &[u8], last: usize| match columns {
        true => transpose(bytes, fp4.stacked(), fp4.rows(), last),
        false => bytes.to_vec(),
    };
    let shape = move |mut shape: Vec<usize>| {
        if columns {
            shape.swap(1, 2);
        }
        shape
    };
    let codes = move || Ok(turn(&fp4.plain_codes(), fp4.cols() / 2).into());
    let scales = move || Ok(turn(&fp4.plain_scales(), fp4.cols() / fp4.block_size).into());
    let (codes_shape, scales_shape) = (shape(fp4.codes_shape()), shape(fp4.scales_shape()));
    let mut tensors = vec![
        NewTensor::made(name, DataType::Plain(Dtype::U8), codes_shape, codes),
        NewTensor::made(format!("{base}_scale"), DataType::Plain(dtype), scales_shape, scales),
    ];
    // NVFP4 is never without, even if the source has none: then it is 1.
    let multipliers = fp4.tensor_scale.as_ref().map(|scale| scale.multipliers().into_owned());
    let multipliers = match fp4.format {
        Fp4Format::NvFp4 => Some(multipliers.unwrap_or_else(|| Numbers::new(&[1.0]))),
        Fp4Format::MxFp4 => None,
    };
    if let Some(numbers) = multipliers {
        let (shape, bytes) = (scalar(&numbers), numbers.bytes().to_vec());
        tensors.push(NewTensor::bytes(format!("{base}_scale_2"), Dtype::F32, shape, bytes));
    }
    tensors
}

/// `quant_algo` of a scheme, and its `group_size`.
fn algorithm(scheme: Scheme) -> (&'static str, Option<usize>) {
    match scheme {
        Scheme::Fp4 { format: Fp4Format::NvFp4, block_size, smoothed: true, .. } => {
            ("NVFP4_AWQ", Some(block_size))
        }
        Scheme::Fp4 { format: Fp4Format::NvFp4, block_size, activations: true, .. } => {
            ("NVFP4", Some(block_size))
        }
        Scheme::Fp4 { format: Fp4Format::NvFp4, block_size, .. } => {
            ("W4A16_NVFP4", Some(block_size))
        }
        // No engine reads ModelOpt's `mxfp4`. This is its name for the same weights with
        // inputs in FP8, whose scales TensorRT-LLM finds as layers run.
        Scheme::Fp4 { format: Fp4Format::MxFp4, block_size, .. } => {
            ("W4A8_MXFP4_FP8", Some(block_size))
        }
        Scheme::MxFp8 => ("MXFP8", Some(32)),
        Scheme::Fp8 { granularity: Granularity::Tensor, .. } => ("FP8", None),
        Scheme::Fp8 { granularity: Granularity::Row, .. } => ("FP8_PER_CHANNEL_PER_TOKEN", None),
        Scheme::Fp8 { granularity: Granularity::Block { .. }, .. } => ("FP8_PB_WO", None),
    }
}

/// The quantization of numbers, in the words of `config.json`.
fn floats(bits: u64, group_size: Option<usize>) -> serde_json::Value {
    let mut spec = json!({"dynamic": false, "num_bits": bits, "type": "float"});
    if let Some(size) = group_size {
        spec["group_size"] = json!(size);
    }
    spec
}

/// `weights` and `input_activations` of a config group, for the algorithms that have one
/// (`convert_hf_config.py`).
fn group(scheme: Scheme) -> Option<serde_json::Value> {
    let (weights, activations) = match scheme {
        Scheme::Fp4 { format: Fp4Format::NvFp4, block_size, activations, .. } => {
            let spec = floats(4, Some(block_size));
            (spec.clone(), activations.then_some(spec))
        }
        Scheme::Fp8 { granularity: Granularity::Tensor, .. } => {
            (floats(8, None), Some(floats(8, None)))
        }
        Scheme::MxFp8 => (floats(8, Some(32)), Some(floats(8, Some(32)))),
        Scheme::Fp4 { .. } | Scheme::Fp8 { .. } => return None,
    };
    let activations = activations.map(|spec| ("input_activations", spec));
    Some(activations.into_iter().chain([("weights", weights)]).collect())
}

/// `quantization_config` of `config.json`, and `hf_quant_config.json`.
fn configs(model: &Model<'_>) -> Result<(serde_json::Value, serde_json::Value), CheckpointError> {
    let schemes = scheme::schemes(model);
    let ignore = scheme::ignore_list(model, Syntax::Glob)?;
    let mut config = json!({});
    let mut export = json!({});
    let mut groups = serde_json::Map::new();
    let mut layers = serde_json::Map::new();
    let mixed = schemes.len() > 1;
    for (at, (scheme, modules)) in schemes.iter().enumerate() {
        let (name, group_size) = algorithm(*scheme);
        for module in modules.iter().filter(|_| mixed) {
            let mut layer = json!({"quant_algo": name});
            if let Some(size) = group_size {
                layer["group_size"] = json!(size);
            }
            layers.insert((*module).to_owned(), layer);
        }
        if let Some(mut group) = group(*scheme) {
            group["targets"] = if mixed { json!(modules) } else { json!(["Linear"]) };
            groups.insert(format!("group_{at}"), group);
        }
    }
    let single = schemes.first().map(|(scheme, _)| algorithm(*scheme));
    let algorithm = if mixed { Some(("MIXED_PRECISION", None)) } else { single };
    if !groups.is_empty() {
        config["config_groups"] = groups.into();
    }
    if mixed {
        config["quantized_layers"] = json!(layers);
    }
    config["ignore"] = json!(ignore);
    if let Some((name, group_size)) = algorithm {
        config["quant_algo"] = json!(name);
        export["quant_algo"] = json!(name);
        // vLLM asks for the field, as ModelOpt writes it, if `config.json` says nothing.
        export["kv_cache_quant_algo"] = json!(null);
        if let Some(size) = group_size {
            export["group_size"] = json!(size);
        }
    }
    if let Some(scheme) = &model.quantization.kv_cache {
        // `config.json` has the words for this name.
        let words = match scheme.as_str() {
            Some("FP8") => floats(8, None),
            Some(_) | None => scheme.clone(),
        };
        config["kv_cache_scheme"] = words;
        let fp8 = scheme["num_bits"] == 8 && scheme["type"] == "float";
        // A scheme without a name of ModelOpt's stands in `config.json` alone.
        if let Some(name) = scheme.as_str().or(fp8.then_some("FP8")) {
            export["kv_cache_quant_algo"] = json!(name);
        }
    }
    export["exclude_modules"] = json!(ignore);
    if mixed {
        export["quantized_layers"] = layers.into();
    }
    let producer = model.quantization.producer.clone();
    let producer = producer.unwrap_or_else(|| json!({"name": "modelopt"}));
    config["producer"] = producer.clone();
    config["quant_method"] = json!("modelopt");
    Ok((config, json!({"producer": producer, "quantization": export})))
}
