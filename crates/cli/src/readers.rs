//! Programs that read what is written: a table for helps, and what a choice excludes.

use burn_fp4_checkpoints::dialect::{Known, Program, ReadBy, writer, written};
use burn_fp4_checkpoints::selection::DEFAULT;
use burn_fp4_checkpoints::{Model, TransformersLoad, Value, Weight};
use burn_fp4_search::formats::Fp4Format;

use crate::error::CliError;
use crate::remarks::{Remarks, Warning};
use crate::table::is_narrow;

/// Every dialect and format that a program reads, with these programs.
pub(crate) fn table() -> String {
    let mut text = "Readers (* in a test; the others according to their source):".to_owned();
    for dialect in written() {
        let mut name = dialect;
        for format in Fp4Format::ALL {
            let readers = writer(dialect).map_or(&[][..], |(_, writer)| writer.readers(format));
            if !readers.is_empty() {
                let readers: Vec<String> = readers.iter().map(with_star).collect();
                let (format, readers) = (format.row().name, readers.join(", "));
                text.push_str(&match (is_narrow(), name) {
                    (true, "") => format!("\n    {format}\n      {readers}"),
                    (true, name) => format!("\n  {name}\n    {format}\n      {readers}"),
                    (false, name) => format!("\n  {name:18}  {format}  {readers}"),
                });
                name = "";
            }
        }
    }
    let versions = Program::ALL.map(|program| {
        let row = program.row();
        format!("{} {}", row.name, row.version)
    });
    let lines: Vec<String> = versions.chunks(3).map(|some| some.join(", ")).collect();
    format!("{text}\n  Versions: {}", lines.join(",\n    "))
}

fn with_star(reader: &ReadBy) -> String {
    let star = if reader.known == Known::Test { "*" } else { "" };
    format!("{}{star}", reader.program.row().name)
}

/// Notes on formats, with their block sizes, in a dialect: that none of its readers has them, or
/// that all of them do more than multiply by the weights.
///
/// # Errors
/// As [`writer`].
pub(crate) fn notes(
    dialect: &str,
    formats: impl IntoIterator<Item = (Fp4Format, usize)>,
) -> Result<Vec<String>, CliError> {
    let (_, of_dialect) = writer(dialect)?;
    let mut notes = Vec::new();
    for (format, block_size) in formats {
        let what = format!("{format} in blocks of {block_size} in the dialect `{dialect}`");
        let readers = match block_size == format.row().block_size {
            true => of_dialect.readers(format),
            false => &[],
        };
        let note = if readers.is_empty() {
            format!("{what}: no program is known that reads it; `fp4 formats` prints the readers")
        } else if readers.iter().all(|reader| !reader.inputs.is_empty()) {
            let does = |reader: &ReadBy| format!("{} {}", reader.program.row().name, reader.inputs);
            let all: Vec<String> = readers.iter().map(does).collect();
            format!("{what}: {}; no other program is known that reads it", all.join(", "))
        } else {
            continue;
        };
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
    Ok(notes)
}

/// Returns true if weights have the names of llama.cpp.
fn has_gguf_names(model: &Model<'_>) -> bool {
    let known = |name: &str| name.starts_with("token_embd") || name.split('.').any(|p| p == "blk");
    model.weights.iter().any(|weight| known(&weight.name))
}

/// The note on a GGUF file that llama.cpp cannot run.
pub(crate) fn gguf_note(model: &Model<'_>) -> Option<String> {
    let why = match (has_gguf_names(model), &model.gguf) {
        (true, Some(_)) => return None,
        (true, None) => "the file has no metadata of the model",
        (false, _) => "the tensors keep the names of the input",
    };
    Some(format!("{why}, so llama.cpp cannot run the file"))
}

/// The note on a folder that is made from a GGUF file.
pub(crate) fn from_gguf_note(model: &Model<'_>) -> String {
    match has_gguf_names(model) {
        true => "the tensors keep their names of GGUF, and there is no config.json; no program is \
                 known that loads the result"
            .to_owned(),
        false => "a GGUF file has no config.json and no tokenizer; copy both from the original \
                  model into the result"
            .to_owned(),
    }
}

/// The note on a KV cache of 8 bits that the configs of miles state where the source does not.
pub(crate) fn cache_note(dialect: &str, model: &Model<'_>) -> Option<String> {
    let added = dialect == "miles" && model.quantization.kv_cache.is_none();
    added.then(|| {
        "as the converter of miles does, the configs state a KV cache of 8 bits; remove \
         `kv_cache_scheme` and `kv_cache_quant_algo` from them to keep it in 16 bits"
            .to_owned()
    })
}

/// Warns of readers that do not load layers that the source stores as `[inputs, outputs]`.
///
/// # Errors
/// If the dialect is not written.
pub(crate) fn turned_warning(dialect: &str, weights: Vec<String>) -> Result<Warning, CliError> {
    let (_, writer) = writer(dialect)?;
    let text = match writer.turns() {
        true => "the model stores layers as [inputs, outputs]; they are written as [outputs, \
                 inputs], and transformers fills such layers with random values instead: do not \
                 load the result with it"
            .to_owned(),
        false => format!(
            "the model stores layers as [inputs, outputs], and readers of `{dialect}` expect \
             [outputs, inputs]: they read other values; write the dialect {DEFAULT}"
        ),
    };
    Ok(Warning { kind: "turned-layers", weights, text })
}

/// Returns true if a packed weight is a layer that the source stores as `[inputs, outputs]`.
pub(crate) fn is_turned(weight: &Weight<'_>) -> bool {
    match &weight.value {
        Value::Fp4(fp4) => fp4.transposed && fp4.shape.len() == 2,
        Value::Plain(_) | Value::Fp8(_) => false,
    }
}

/// Says how transformers loads FP4 weights of compressed-tensors where the plain call does not: if
/// its code needs them decoded, or if the other weights are not bf16, as it decodes to bf16 and
/// does not multiply numbers of two dtypes. Warns of what it does not load. Unknown architectures
/// get neither. `packed` are the weights in FP4, by their places in the model.
pub(crate) fn remark_transformers(
    dialect: &str,
    model: &Model<'_>,
    packed: &[usize],
    remarks: &mut Remarks,
) {
    let known = model.architecture().zip(model.transformers_load());
    let Some((architecture, load)) = known.filter(|_| dialect == DEFAULT) else { return };
    let config = model.config.as_ref();
    let field = |key| config.and_then(|c| c.get(key).or_else(|| c["text_config"].get(key)));
    let stated = ["dtype", "torch_dtype"].into_iter().find_map(field);
    let stated = stated.and_then(serde_json::Value::as_str);
    let found = || {
        let floats = model.weights.iter().filter_map(|weight| match &weight.value {
            Value::Plain(tensor) if tensor.shape.len() >= 2 => tensor.plain(),
            Value::Plain(_) | Value::Fp8(_) | Value::Fp4(_) => None,
        });
        let mut known = floats.filter_map(|dtype| match dtype.to_string().as_str() {
            "BF16" => Some("bfloat16"),
            "F16" => Some("float16"),
            "F32" => Some("float32"),
            "F64" => Some("float64"),
            _ => None,
        });
        known.next()
    };
    let dtype = stated.or_else(found).filter(|dtype| *dtype != "bfloat16");
    let decodes = "quantization_config=CompressedTensorsConfig(run_compressed=False)";
    match (load, dtype) {
        (TransformersLoad::Packed, None) => {}
        (TransformersLoad::Packed, Some(dtype)) => remarks.note(format!(
            "the model is in {dtype}, and transformers decodes FP4 to bfloat16: load the result \
             with from_pretrained(.., dtype=\"bfloat16\")"
        )),
        (TransformersLoad::Decoded, _) => remarks.note(format!(
            "the code of `{architecture}` in transformers needs decoded weights: load the result \
             with from_pretrained(.., dtype=\"bfloat16\", {decodes})"
        )),
        (TransformersLoad::Never, _) => {
            let name = |&at: &usize| model.weights[at].name.clone();
            let weights = packed.iter().map(name).filter(|name| name.contains("experts")).collect();
            let text = format!(
                "transformers stacks the experts of `{architecture}` and leaves the quantized \
                 ones out: do not load the result with it"
            );
            remarks.warn(Warning { kind: "stacked-experts", weights, text });
        }
    }
}
