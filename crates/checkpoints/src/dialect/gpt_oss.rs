//! gpt-oss: the stacked experts in MXFP4, everything else as it was.
//!
//! | tensor             | dtype | shape              | meaning                 |
//! |--------------------|-------|--------------------|-------------------------|
//! | `experts.X_blocks` | U8    | `[E, N, K/32, 16]` | codes, low nibble first |
//! | `experts.X_scales` | U8    | `[E, N, K/32]`     | E8M0 block scales       |
//!
//! The model's parameter is `[E, K, N]`. OpenAI's own release ends the names in `.blocks` and
//! `.scales`.
//!
//! Sources: `gpt_oss/torch/weights.py` of openai/gpt-oss, `integrations/mxfp4.py` of transformers.

use burn_fp4_formats::Fp4Format;
use burn_fp4_policy::Syntax;
use serde_json::json;

use super::parts::{self, Parts, Reader};
use super::readers::{Program, ReadBy, source, tested};
use super::scheme::{configs_of_floats, ignore_list, patterns, torch_metadata, with_quantization};
use super::traits::{Dialect, Envelope, ScaleConvention, ScaleSupport, Write, quant_method};
use crate::container::{CONFIG, Container};
use crate::dtype::{DataType, Dtype};
use crate::error::CheckpointError;
use crate::fp4::Order;
use crate::tensor::{NewTensor, Tensor};
use crate::weight::{Model, Quantization, Value, Weight};

/// gpt-oss, in transformers' names and OpenAI's.
pub(super) struct GptOss;

/// Bytes of the codes of a block of 32.
const BLOCK_BYTES: usize = 16;

impl Dialect for GptOss {
    fn name(&self) -> &'static str {
        "gpt-oss"
    }

    fn evidence(&self, container: &Container) -> Option<&'static str> {
        quant_method(container, self.quant_methods())
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["_blocks"]
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &["mxfp4"]
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        let weights = parts::read(container, &["_blocks", "_scales", ".blocks"], read_weight)?;
        let ignore = container.quantization().and_then(|c| c.get("modules_to_not_convert"));
        let ignore = patterns(ignore, Syntax::Unmarked);
        let dialect = self.name();
        Ok((weights, Quantization { dialect, ignore, ..Quantization::default() }))
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        Some(&Self)
    }
}

fn read_weight<'a>(
    reader: &mut Reader<'a>,
    tensor: &Tensor<'a>,
) -> Result<Option<Weight<'a>>, CheckpointError> {
    let found = [("_blocks", "_scales"), (".blocks", ".scales")].into_iter().find_map(|(b, s)| {
        let name = tensor.name.strip_suffix(b)?;
        Some((name, format!("{name}{s}")))
    });
    let Some((name, scales)) = found else { return Ok(None) };
    let scales = reader.need(tensor, &scales)?;
    if !tensor.is(&[Dtype::U8]) {
        return Err(tensor.wrong_dtype("U8"));
    }
    let [front @ .., blocks, BLOCK_BYTES] = &tensor.shape[..] else {
        return Err(tensor.wrong_shape("[.., rows, blocks, 16]"));
    };
    let mut codes = tensor.clone();
    codes.shape = [front, &[blocks * BLOCK_BYTES]].concat().into();
    let parts = Parts { codes, scales, tensor_scale: None, order: Order::default() };
    let mut weight = parts.rows(Fp4Format::MxFp4)?;
    weight.transposed = true;
    Ok(Some(Weight::new(name, 0, Value::Fp4(weight))))
}

/// All of them run gpt-oss alone.
const READERS: [ReadBy; 5] = [
    source(Program::Vllm, "vllm/model_executor/layers/quantization/mxfp4.py"),
    source(Program::SgLang, "sglang/srt/layers/quantization/mxfp4.py"),
    source(Program::TensorRtLlm, "tensorrt_llm/_torch/models/modeling_gpt_oss.py at 050b6cb9"),
    tested(Program::Transformers),
    source(Program::Mlx, "mlx_lm/models/gpt_oss.py"),
];

impl Write for GptOss {
    fn tensors<'w>(&self, weight: &'w Weight<'_>) -> Result<Vec<NewTensor<'w>>, CheckpointError> {
        let cannot = |what| Err(CheckpointError::cannot_hold(self.name(), &weight.name, what));
        let fp4 = match &weight.value {
            Value::Plain(tensor) => return Ok(vec![NewTensor::copy(&weight.name, tensor)]),
            Value::Fp8(_) => return cannot(CheckpointError::FP8_TO_DECODE),
            Value::Fp4(fp4) => fp4,
        };
        if fp4.shape.len() != 3 || weight.name.ends_with(".weight") {
            return cannot(CheckpointError::NOT_EXPERTS);
        }
        if fp4.format != Fp4Format::MxFp4 || fp4.block_size != 2 * BLOCK_BYTES {
            return cannot(CheckpointError::NOT_MXFP4);
        }
        if weight.pre_quant_scale.is_some() {
            return cannot("a scale before quantization");
        }
        let scales = fp4.scales_shape();
        let blocks = [&scales[..], &[BLOCK_BYTES]].concat();
        let bytes = DataType::Plain(Dtype::U8);
        let name = &weight.name;
        Ok(vec![
            NewTensor::made(format!("{name}_blocks"), bytes, blocks, move || Ok(fp4.plain_codes())),
            NewTensor::made(
                format!("{name}_scales"),
                bytes,
                scales,
                move || Ok(fp4.plain_scales()),
            ),
        ])
    }

    fn readers(&self, format: Fp4Format) -> &'static [ReadBy] {
        match format {
            Fp4Format::NvFp4 => &[],
            Fp4Format::MxFp4 => &READERS,
        }
    }

    fn scale_support(&self) -> ScaleSupport {
        ScaleSupport { tensor_scale: ScaleConvention::Folded, input_scale: false }
    }

    fn quantizes_input(&self, _: &Weight<'_>) -> bool {
        false
    }

    fn envelope(&self, model: &Model<'_>) -> Result<Envelope, CheckpointError> {
        let own = model.quantization.dialect == self.name();
        let configs = match (&model.config, configs_of_floats(model)) {
            (Some(config), _) if own => vec![(CONFIG, config.clone())],
            (_, Some(configs)) => configs,
            (_, None) => {
                let modules = ignore_list(model, Syntax::Unmarked)?;
                let quantization =
                    json!({"modules_to_not_convert": modules, "quant_method": "mxfp4"});
                vec![(CONFIG, with_quantization(model, quantization))]
            }
        };
        Ok(Envelope::Folder { metadata: torch_metadata(), configs })
    }
}
