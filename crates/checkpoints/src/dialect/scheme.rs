//! The quantization of the weights of a model, in groups: what configs are written from.

use std::iter;

use burn_fp4_formats::Fp4Format;
use burn_fp4_policy::{Matcher, Pattern, Syntax};

use crate::architecture::Architecture;
use crate::container::CONFIG;
use crate::dtype::Dtype;
use crate::error::CheckpointError;
use crate::fp8::Granularity;
use crate::weight::{Model, Value, Weight};

/// The quantization of a weight and its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scheme {
    /// FP4.
    Fp4 {
        format: Fp4Format,
        block_size: usize,
        /// True if the input is quantized to FP4 with a scale that the file has.
        activations: bool,
        /// True if the input is multiplied before it is quantized (AWQ).
        smoothed: bool,
    },
    /// FP8 with float scales.
    Fp8 { granularity: Granularity, activations: bool },
    /// MXFP8: a power of two for every 32 numbers of a row.
    MxFp8,
}

/// Returns the quantization of a weight.
pub(super) fn scheme(weight: &Weight<'_>) -> Option<Scheme> {
    let activations = weight.input_scale.is_some();
    match &weight.value {
        Value::Plain(_) => None,
        Value::Fp4(fp4) => Some(Scheme::Fp4 {
            format: fp4.format,
            block_size: fp4.block_size,
            activations,
            smoothed: weight.pre_quant_scale.is_some(),
        }),
        Value::Fp8(fp8) => Some(match fp8.granularity {
            Granularity::Block { rows: 1, .. } if fp8.scales.is(&[Dtype::U8, Dtype::F8_E8M0]) => {
                Scheme::MxFp8
            }
            granularity => Scheme::Fp8 { granularity, activations },
        }),
    }
}

/// The schemes of a model in the order in which they appear, with the modules of each.
pub(super) fn schemes<'m>(model: &'m Model<'_>) -> Vec<(Scheme, Vec<&'m str>)> {
    let mut groups: Vec<(Scheme, Vec<&str>)> = Vec::new();
    for weight in &model.weights {
        let Some(scheme) = scheme(weight) else { continue };
        match groups.iter_mut().find(|(known, _)| *known == scheme) {
            Some((_, modules)) => modules.push(weight.module()),
            None => groups.push((scheme, vec![weight.module()])),
        }
    }
    groups
}

/// The algorithms of ModelOpt that quantize inputs as the layers run.
const DYNAMIC: [&str; 3] = ["FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "W4A8_MXFP4_FP8"];

/// Returns true if the source says that inputs are quantized as the layers run, with scales that no
/// file has.
pub(crate) fn has_dynamic_inputs(model: &Model<'_>) -> bool {
    let key = "quantization_config";
    let config = model.config.as_ref();
    let config = config.and_then(|c| c.get(key).or_else(|| c["text_config"].get(key)));
    let export = model.quantization.quant_config.as_ref();
    let export = export.and_then(|export| export.get("quantization"));
    [config, export].into_iter().flatten().any(says_dynamic)
}

fn says_dynamic(config: &serde_json::Value) -> bool {
    let entries = |key| config[key].as_object().into_iter().flat_map(serde_json::Map::values);
    let algorithm = |of: &serde_json::Value| {
        let name = of["quant_algo"].as_str().unwrap_or_default();
        DYNAMIC.iter().any(|known| known.eq_ignore_ascii_case(name))
    };
    // compressed-tensors, where `dynamic` of NVFP4 is a text: it has a scale in the file.
    entries("config_groups").any(|group| group["input_activations"]["dynamic"] == true)
        // Quark.
        || config["global_quant_config"]["input_tensors"]["is_dynamic"] == true
        // DeepSeek.
        || config["activation_scheme"] == "dynamic"
        // ModelOpt.
        || algorithm(config)
        || entries("quantized_layers").any(algorithm)
}

/// Returns true if a weight could be a layer's matrix that is not quantized, of floats or of
/// numbers that are not read as floats: a matrix `X.weight`.
fn is_kept_matrix(weight: &Weight<'_>) -> bool {
    match &weight.value {
        Value::Plain(tensor) => {
            let matrix = tensor.plain().is_some() && tensor.shape.len() >= 2;
            weight.name.ends_with(".weight") && matrix
        }
        Value::Fp8(_) | Value::Fp4(_) => false,
    }
}

/// Parses the texts of a list in a config, and leaves out all other values.
pub(super) fn patterns(list: Option<&serde_json::Value>, syntax: Syntax) -> Vec<Pattern> {
    let items = list.and_then(serde_json::Value::as_array).into_iter().flatten();
    let texts = items.filter_map(serde_json::Value::as_str);
    texts.map(|text| Pattern::parse(text, syntax)).collect()
}

/// The ignore list of a model in another syntax.
///
/// A pattern stays one where it can be said and hits no quantized module; otherwise the modules
/// that it hits are listed. Kept matrices that no pattern hits are added, and output layers of the
/// architecture without a tensor, so that no reader takes them for quantized ones; each also by its
/// name in transformers.
pub(super) fn ignore_list(
    model: &Model<'_>,
    syntax: Syntax,
) -> Result<Vec<String>, CheckpointError> {
    let patterns: Result<Vec<(&Pattern, Matcher)>, CheckpointError> =
        model.quantization.ignore.iter().map(|pattern| Ok((pattern, pattern.matcher()?))).collect();
    let patterns = patterns?;
    let quantized: Vec<&str> =
        model.weights.iter().filter(|w| w.is_quantized()).map(Weight::module).collect();
    let mut list: Vec<String> = Vec::new();
    let mut kept: Vec<&Matcher> = Vec::new();
    for (pattern, matcher) in &patterns {
        let misses = !quantized.iter().any(|module| matcher.matches(module));
        if let Some(text) = pattern.write(syntax).filter(|_| misses) {
            list.push(text);
            kept.push(matcher);
        }
    }
    let kept_matrices = model.weights.iter().filter(|weight| is_kept_matrix(weight));
    let modules = kept_matrices.map(|weight| weight.module().to_owned()).chain(absent_heads(model));
    let listed = |module: &String| kept.iter().any(|matcher| matcher.matches(module));
    let architecture = Architecture::of(model);
    for module in modules.filter(|module| !listed(module)) {
        let renamed = architecture.renamed(&module);
        list.extend(iter::once(module).chain(renamed));
    }
    let mut seen = std::collections::HashSet::new();
    list.retain(|text| seen.insert(text.clone()));
    Ok(list)
}

/// The output layers of the architecture that have no tensor, by the names of transformers. A
/// model of several modalities may have them within its language model.
fn absent_heads(model: &Model<'_>) -> Vec<String> {
    let outer = |weight: &Weight<'_>| {
        let before = weight.module().strip_suffix("model.embed_tokens")?;
        (!before.is_empty()).then(|| before.to_owned())
    };
    let outer = model.weights.iter().find_map(outer);
    let heads = Architecture::of(model).tied_output_layers().iter();
    let named = |head: &&str| {
        let within = outer.as_ref().map(|outer| format!("{outer}{head}"));
        iter::once((*head).to_owned()).chain(within).collect::<Vec<_>>()
    };
    let absent = |names: &Vec<String>| {
        !model.weights.iter().any(|weight| names.iter().any(|name| weight.module() == name))
    };
    heads.map(named).filter(absent).flatten().collect()
}

/// Returns `config.json` with the quantization in its place; all other fields stay.
pub(super) fn with_quantization(
    model: &Model<'_>,
    quantization: serde_json::Value,
) -> serde_json::Value {
    let key = "quantization_config";
    let mut config =
        model.config.as_ref().and_then(|config| config.as_object()).cloned().unwrap_or_default();
    // MLX has its own field for it.
    config.shift_remove("quantization");
    let nested = !config.contains_key(key);
    match config.get_mut("text_config").and_then(|text| text.get_mut(key)) {
        Some(old) if nested => *old = quantization,
        Some(_) | None => drop(config.insert(key.to_owned(), quantization)),
    }
    config.into()
}

/// Returns the configs of a model of floats, which state no quantization. None: a weight has one.
pub(super) fn configs_of_floats(
    model: &Model<'_>,
) -> Option<Vec<(&'static str, serde_json::Value)>> {
    let config = || model.config.as_ref().map(|config| (CONFIG, without_quantization(config)));
    schemes(model).is_empty().then(|| config().into_iter().collect())
}

/// Returns `config.json` without its quantization.
pub(super) fn without_quantization(config: &serde_json::Value) -> serde_json::Value {
    let mut config = config.clone();
    if let Some(fields) = config.as_object_mut() {
        fields.shift_remove("quantization_config");
        fields.shift_remove("quantization");
        if let Some(text_config) = fields.get_mut("text_config").and_then(|c| c.as_object_mut()) {
            text_config.shift_remove("quantization_config");
        }
    }
    config
}

/// `__metadata__` as transformers writes it.
pub(super) fn torch_metadata() -> Vec<(String, String)> {
    vec![("format".to_owned(), "pt".to_owned())]
}
