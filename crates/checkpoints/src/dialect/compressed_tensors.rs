//! compressed-tensors (llm-compressor, vLLM): `X.weight_packed` with `X.weight_scale` and, for
//! NVFP4, `X.weight_global_scale`.
//!
//! | tensor                  | dtype   | shape       | meaning                                |
//! |-------------------------|---------|-------------|----------------------------------------|
//! | `X.weight_packed`       | U8      | `[N, K/2]`  | codes, low nibble first                |
//! | `X.weight_scale`        | F8_E4M3 | `[N, K/16]` | block scales of `nvfp4-pack-quantized` |
//! | `X.weight_scale`        | U8      | `[N, K/32]` | E8M0 scales of `mxfp4-pack-quantized`  |
//! | `X.weight_global_scale` | F32     | `[1]`       | tensor scale, a **divisor**            |
//! | `X.input_global_scale`  | F32     | `[1]`       | of the input, a **divisor**            |
//!
//! The scales are of shape `[1]`: with `[]` torch divides the block scales in bf16, and one value
//! in seven changes. The scales of the cache are named after the attention,
//! `self_attn.k_scale`; here they have ModelOpt's names, `self_attn.k_proj.k_scale`.
//!
//! A `Conv1D` of transformers (GPT-2) is `[K, N]` and becomes `[N, K/2]`: AutoRound packs it so,
//! and vLLM's GPT-2 has linear layers, which turns only what is called `weight`.
//!
//! Sources: `compressors/{nvfp4,mxfp4}/base.py`, `quantization/quant_{scheme,args,config}.py`,
//! `entrypoints/convert/converters/modelopt_nvfp4.py` of compressed-tensors 0.20.

use burn_fp4_formats::Fp4Format;
use burn_fp4_policy::Syntax;
use serde_json::json;

use super::parts::{self, Parts, Reader};
use super::readers::{Program, ReadBy, source, tested};
use super::scheme::{self, Scheme};
use super::traits::{Dialect, Envelope, ScaleConvention, ScaleSupport, Write, quant_method};
use crate::architecture::Architecture;
use crate::container::{CONFIG, Container};
use crate::dtype::{DataType, Dtype};
use crate::error::{CheckpointError, TensorProblem};
use crate::fp4::{Fp4Weight, Numbers, Order, TensorScale};
use crate::fp8::{Fp8Weight, Granularity};
use crate::tensor::{NewTensor, Tensor};
use crate::weight::{Model, Quantization, Value, Weight};

/// The checkpoints of compressed-tensors.
pub(super) struct CompressedTensors;

/// The values of `format` whose weights are understood.
const FORMATS: [&str; 8] = [
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "float-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    "dense",
    "compressed",
];

/// The name of a scale of the cache, and the layer of the attention that has it in ModelOpt.
const CACHE_SCALES: [(&str, &str); 2] = [(".k_scale", ".k_proj"), (".v_scale", ".v_proj")];

impl Dialect for CompressedTensors {
    fn name(&self) -> &'static str {
        "compressed-tensors"
    }

    fn evidence(&self, container: &Container) -> Option<&'static str> {
        quant_method(container, self.quant_methods())
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &[".weight_packed"]
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &["compressed-tensors"]
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        let config = container.quantization();
        let block = check_config(container, config)?;
        let companions = [".weight_scale", ".weight_global_scale", ".weight_packed"];
        let mut weights = parts::read(container, &companions, |reader, tensor| {
            read_weight(reader, tensor, block)
        })?;
        for weight in &mut weights {
            if let Some(name) = of_layer(container, &weight.name) {
                weight.name = name;
            }
        }
        let ignore = config.and_then(|config| config.get("ignore"));
        let quantization = Quantization {
            dialect: self.name(),
            ignore: scheme::patterns(ignore, Syntax::Regex),
            kv_cache: config
                .and_then(|c| c.get("kv_cache_scheme"))
                .filter(|s| !s.is_null())
                .cloned(),
            producer: None,
            quant_config: None,
        };
        Ok((weights, quantization))
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        Some(&Self)
    }
}

/// The name that ModelOpt has for a scale of the cache. Other parameters may be called so too: it
/// stands in an attention that has the layer.
fn of_layer(container: &Container, name: &str) -> Option<String> {
    CACHE_SCALES.iter().find_map(|(scale, layer)| {
        let parent = name.strip_suffix(scale).filter(|parent| !parent.ends_with(layer))?;
        let there = |end: &&str| container.position(&format!("{parent}{layer}{end}")).is_some();
        let known = parent.ends_with("attn") || [".weight_packed", ".weight"].iter().any(there);
        known.then(|| format!("{parent}{layer}{scale}"))
    })
}

/// The name here of a scale of the cache.
fn in_attention(name: &str) -> Option<String> {
    CACHE_SCALES.iter().find_map(|(scale, layer)| {
        let parent = name.strip_suffix(scale)?.strip_suffix(layer)?;
        Some(format!("{parent}{scale}"))
    })
}

/// Refuses transforms and formats that are not understood; the size of FP8's blocks.
fn check_config(
    container: &Container,
    config: Option<&serde_json::Value>,
) -> Result<[usize; 2], CheckpointError> {
    let path = || container.config_path(CONFIG);
    let mut block = [128, 128];
    let Some(config) = config else { return Ok(block) };
    if let Some(groups) = config["transform_config"]["config_groups"].as_object()
        && !groups.is_empty()
    {
        let kind = |group: &serde_json::Value| group["type"].as_str().unwrap_or("?").to_owned();
        let kinds: Vec<String> = groups.values().map(kind).collect();
        let what = format!("transform_config ({})", kinds.join(", "));
        let because = "its layers compute on transformed inputs";
        let (path, remedy) = (path(), CheckpointError::WITHOUT);
        return Err(CheckpointError::Refused { path, what, because, remedy });
    }
    let groups = config["config_groups"].as_object();
    let groups = || groups.into_iter().flat_map(serde_json::Map::values);
    let formats = groups().chain([config]).map(|of| &of["format"]);
    for format in formats.filter(|format| !format.is_null()) {
        if !format.as_str().is_some_and(|format| FORMATS.contains(&format)) {
            return Err(CheckpointError::Field {
                path: path(),
                field: "format".to_owned(),
                expected: "a format of FP4 or FP8",
                found: format.to_string(),
                remedy: CheckpointError::ANOTHER,
            });
        }
    }
    for group in groups() {
        let sizes = group["weights"]["block_structure"].as_array();
        if let Some([rows, cols]) = sizes.map(Vec::as_slice)
            && let (Some(rows), Some(cols)) = (rows.as_u64(), cols.as_u64())
        {
            block = [rows as usize, cols as usize];
        }
    }
    Ok(block)
}

fn read_weight<'a>(
    reader: &mut Reader<'a>,
    tensor: &Tensor<'a>,
    block: [usize; 2],
) -> Result<Option<Weight<'a>>, CheckpointError> {
    if let Some(module) = tensor.name.strip_suffix(".weight_packed") {
        let scales = reader.need(tensor, &format!("{module}.weight_scale"))?;
        let zero = format!("{module}.weight_zero_point");
        if reader.has(&zero) {
            let because = "FP4 has no zero point";
            return Err(CheckpointError::Refused {
                path: tensor.file.to_owned(),
                what: zero,
                because,
                remedy: CheckpointError::WITHOUT,
            });
        }
        let global = format!("{module}.weight_global_scale");
        let stated = reader.numbers(&global)?;
        if scales.is(&[Dtype::F8_E4M3]) && stated.is_none() {
            let problem = TensorProblem::Missing { companion: global };
            return Err(CheckpointError::tensor(tensor.file, &tensor.name, problem));
        }
        let tensor_scale = stated.map(TensorScale::Divisor);
        let codes = tensor.clone();
        let parts = Parts { codes, scales, tensor_scale, order: Order::ScalesFirst };
        let format = parts.format()?;
        let value = Value::Fp4(parts.rows(format)?);
        let mut weight = Weight::new(format!("{module}.weight"), 0, value);
        let input = reader.numbers(&format!("{module}.input_global_scale"))?;
        weight.input_scale = input.map(TensorScale::Divisor);
        return Ok(Some(weight));
    }
    let Some(module) = tensor.name.strip_suffix(".weight") else { return Ok(None) };
    let Some(scales) = reader.take(&format!("{module}.weight_scale")) else { return Ok(None) };
    let value = Value::Fp8(Fp8Weight::new(tensor.clone(), scales, block)?);
    let mut weight = Weight::new(&*tensor.name, 0, value);
    let input = reader.numbers(&format!("{module}.input_scale"))?;
    weight.input_scale = input.map(TensorScale::Multiplier);
    Ok(Some(weight))
}

/// SGLang has MXFP4 for experts alone; TensorRT-LLM needs scales of inputs for NVFP4, and has
/// weights of MXFP4 with unquantized inputs for experts alone.
const READERS_OF_NVFP4: [ReadBy; 3] = [
    source(
        Program::Vllm,
        "vllm/model_executor/layers/quantization/compressed_tensors/schemes/\
         compressed_tensors_w4a4_nvfp4.py",
    ),
    source(
        Program::SgLang,
        "sglang/srt/layers/quantization/compressed_tensors/schemes/\
         compressed_tensors_w4a16_nvfp4.py",
    ),
    tested(Program::Transformers),
];
const READERS_OF_MXFP4: [ReadBy; 2] = [
    source(
        Program::Vllm,
        "vllm/model_executor/layers/quantization/compressed_tensors/schemes/\
         compressed_tensors_w4a4_mxfp4.py",
    )
    .rounding("rounds inputs to MXFP4 on Blackwell"),
    tested(Program::Transformers),
];

impl Write for CompressedTensors {
    fn tensors<'w>(&self, weight: &'w Weight<'_>) -> Result<Vec<NewTensor<'w>>, CheckpointError> {
        let cannot = |what| CheckpointError::cannot_hold(self.name(), &weight.name, what);
        if weight.pre_quant_scale.is_some() {
            return Err(cannot("a scale before quantization"));
        }
        let module = || {
            let what = "a quantized parameter that is not the `weight` of a module";
            weight.name.strip_suffix(".weight").ok_or_else(|| cannot(what))
        };
        match &weight.value {
            Value::Plain(tensor) => {
                let cache = in_attention(&weight.name);
                Ok(vec![NewTensor::copy(cache.as_ref().unwrap_or(&weight.name), tensor)])
            }
            Value::Fp8(fp8) => {
                let module = module()?;
                let mut tensors = fp8_tensors(module, fp8);
                let input = weight.input_scale.as_ref().map(TensorScale::multipliers);
                tensors.extend(input.map(|numbers| scale(module, "input_scale", &numbers)));
                Ok(tensors)
            }
            Value::Fp4(fp4) => {
                if fp4.shape.len() != 2 {
                    return Err(cannot("stacked matrices"));
                }
                let module = module()?;
                if fp4.block_size != fp4.format.row().block_size {
                    return Err(cannot("blocks of another size"));
                }
                let mut tensors = fp4_tensors(module, fp4);
                if fp4.format == Fp4Format::NvFp4 {
                    let one = TensorScale::Divisor(Numbers::new(&[1.0]));
                    let global = fp4.tensor_scale.as_ref().unwrap_or(&one).divisors();
                    tensors.push(scale(module, "weight_global_scale", &global));
                    let input = weight.input_scale.as_ref().map(TensorScale::divisors);
                    tensors.extend(input.map(|n| scale(module, "input_global_scale", &n)));
                }
                Ok(tensors)
            }
        }
    }

    fn readers(&self, format: Fp4Format) -> &'static [ReadBy] {
        match format {
            Fp4Format::NvFp4 => &READERS_OF_NVFP4,
            Fp4Format::MxFp4 => &READERS_OF_MXFP4,
        }
    }

    fn scale_support(&self) -> ScaleSupport {
        ScaleSupport { tensor_scale: ScaleConvention::Divisor, input_scale: true }
    }

    fn scale_support_of(&self, weight: &Weight<'_>) -> ScaleSupport {
        match &weight.value {
            Value::Fp4(fp4) if !fp4.format.row().tensor_scale => {
                ScaleSupport { tensor_scale: ScaleConvention::Folded, input_scale: false }
            }
            Value::Plain(_) | Value::Fp8(_) | Value::Fp4(_) => self.scale_support(),
        }
    }

    fn quantizes_input(&self, weight: &Weight<'_>) -> bool {
        scheme::scheme(weight).is_none_or(|scheme| !group(scheme).2.is_null())
    }

    fn fuses(&self) -> bool {
        true
    }

    fn turns(&self) -> bool {
        true
    }

    fn envelope(&self, model: &Model<'_>) -> Result<Envelope, CheckpointError> {
        let metadata = scheme::torch_metadata();
        let own = model.quantization.dialect == self.name();
        let floats = scheme::configs_of_floats(model);
        // A cache of fewer bits is stated.
        let floats = floats.filter(|_| model.quantization.kv_cache.is_none());
        let configs = match (&model.config, floats) {
            (Some(config), _) if own => vec![(CONFIG, config.clone())],
            (_, Some(configs)) => configs,
            (_, None) => {
                vec![(CONFIG, scheme::with_quantization(model, quantization_config(model)?))]
            }
        };
        Ok(Envelope::Folder { metadata, configs })
    }
}

/// A scale of shape `[1]`.
fn scale<'w>(module: &str, name: &str, numbers: &Numbers<'_>) -> NewTensor<'w> {
    let bytes = numbers.bytes().to_vec();
    NewTensor::bytes(format!("{module}.{name}"), Dtype::F32, [numbers.len()], bytes)
}

fn fp4_tensors<'w>(module: &str, fp4: &'w Fp4Weight<'_>) -> Vec<NewTensor<'w>> {
    let dtype = DataType::Plain(match fp4.format {
        Fp4Format::NvFp4 => Dtype::F8_E4M3,
        Fp4Format::MxFp4 => Dtype::U8,
    });
    let (packed, scale) = (format!("{module}.weight_packed"), format!("{module}.weight_scale"));
    let (codes, scales) = (fp4.codes_shape(), fp4.scales_shape());
    vec![
        NewTensor::made(packed, DataType::Plain(Dtype::U8), codes, move || Ok(fp4.plain_codes())),
        NewTensor::made(scale, dtype, scales, move || Ok(fp4.plain_scales())),
    ]
}

fn fp8_tensors<'w>(module: &str, fp8: &'w Fp8Weight<'_>) -> Vec<NewTensor<'w>> {
    let mut scales = NewTensor::copy(format!("{module}.weight_scale"), &fp8.scales);
    match fp8.granularity {
        Granularity::Tensor if scales.shape.is_empty() => scales.shape = vec![1],
        Granularity::Row if scales.shape.len() < fp8.values.shape.len() => scales.shape.push(1),
        Granularity::Tensor | Granularity::Row | Granularity::Block { .. } => {}
    }
    vec![NewTensor::copy(format!("{module}.weight"), &fp8.values), scales]
}

/// The quantization of numbers (`quant_args.py`).
fn args(bits: u64, strategy: &str, dynamic: serde_json::Value) -> serde_json::Value {
    json!({
        "num_bits": bits,
        "type": "float",
        "strategy": strategy,
        "symmetric": true,
        "dynamic": dynamic,
    })
}

/// `format` of a group, its weights and its input (`quant_scheme.py`).
fn group(scheme: Scheme) -> (&'static str, serde_json::Value, serde_json::Value) {
    let grouped = |bits, strategy, size: u64, scale: &str, dynamic| {
        let mut args = args(bits, strategy, dynamic);
        args["group_size"] = json!(size);
        args["scale_dtype"] = json!(scale);
        args
    };
    let (no, none) = (json!(false), json!(null));
    match scheme {
        Scheme::Fp4 { format: Fp4Format::NvFp4, activations, .. } => {
            let args = |dynamic| grouped(4, "tensor_group", 16, "torch.float8_e4m3fn", dynamic);
            let input = if activations { args(json!("local")) } else { none };
            ("nvfp4-pack-quantized", args(no), input)
        }
        Scheme::Fp4 { format: Fp4Format::MxFp4, .. } => {
            ("mxfp4-pack-quantized", grouped(4, "group", 32, "torch.uint8", no), none)
        }
        Scheme::MxFp8 => ("mxfp8-quantized", grouped(8, "group", 32, "torch.uint8", no), none),
        Scheme::Fp8 { granularity, activations } => {
            let mut weights = match granularity {
                Granularity::Tensor => args(8, "tensor", no.clone()),
                Granularity::Row => args(8, "channel", no.clone()),
                Granularity::Block { .. } => args(8, "block", no.clone()),
            };
            if let Granularity::Block { rows, cols } = granularity {
                weights["block_structure"] = json!([rows, cols]);
            }
            let input = match granularity {
                _ if activations => args(8, "tensor", no),
                // As ModelOpt's FP8_PER_CHANNEL_PER_TOKEN, and FP8_DYNAMIC here.
                Granularity::Row => args(8, "token", json!(true)),
                Granularity::Tensor | Granularity::Block { .. } => none,
            };
            ("float-quantized", weights, input)
        }
    }
}

/// The targets that cover all of these modules: the class of linear layers, and the names of those
/// that may be of another, such as embeddings and GPT-2's `Conv1D`.
fn targets(modules: &[&str], architecture: Architecture<'_>) -> serde_json::Value {
    let other = |module: &&&str| !architecture.is_linear(module);
    std::iter::once("Linear").chain(modules.iter().filter(other).copied()).collect()
}

fn quantization_config(model: &Model<'_>) -> Result<serde_json::Value, CheckpointError> {
    let schemes = scheme::schemes(model);
    let mut groups = serde_json::Map::new();
    let mut formats = Vec::new();
    for (at, (scheme, modules)) in schemes.iter().enumerate() {
        let (format, weights, input) = group(*scheme);
        let targets = match schemes.len() {
            1 => targets(modules, Architecture::of(model)),
            _ => json!(modules),
        };
        formats.push(format);
        let group = json!({
            "targets": targets,
            "weights": weights,
            "input_activations": input,
            "output_activations": null,
            "format": format,
        });
        groups.insert(format!("group_{at}"), group);
    }
    formats.dedup();
    let format = match formats[..] {
        [] => "dense",
        [one] => one,
        _ => "mixed-precision",
    };
    // ModelOpt's object is the same three fields; of its names only this one has a counterpart.
    let kv_cache = match &model.quantization.kv_cache {
        Some(scheme) if scheme.is_object() => scheme.clone(),
        Some(scheme) if *scheme == "FP8" => args(8, "tensor", json!(false)),
        Some(_) | None => json!(null),
    };
    Ok(json!({
        "config_groups": groups,
        "format": format,
        "ignore": scheme::ignore_list(model, Syntax::Regex)?,
        "kv_cache_scheme": kv_cache,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }))
}
