//! DeepSeek: FP8 in blocks of 128x128, and from V4 on experts in MXFP4.
//!
//! | tensor | dtype | shape | meaning |
//! |---|---|---|---|
//! | `X.weight` | I8 | `[N, K/2]` | codes of an expert, low nibble first |
//! | `X.scale` | F8_E8M0 | `[N, K/32]` | its block scales |
//! | `X.weight` | F8_E4M3 | `[N, K]` | FP8 |
//! | `X.scale` | F32, F8_E8M0 | `[N/128, K/128]` | its scales; they multiply |
//! | `X.weight_scale_inv` | F32, F8_E8M0 | `[N/128, K/128]` | the same under another name |
//!
//! `quant_method: "fp8"`; `expert_dtype: "fp4"` of the model's config says that there is FP4.
//!
//! Sources: `inference/convert.py` and `inference/model.py` of deepseek-ai's releases.

use burn_fp4_policy::Syntax;

use super::parts::{self, Parts, Reader};
use super::scheme::patterns;
use super::traits::{Dialect, Write, quant_method};
use crate::container::{CONFIG, Container};
use crate::dtype::Dtype;
use crate::error::CheckpointError;
use crate::fp4::Order;
use crate::fp8::Fp8Weight;
use crate::tensor::Tensor;
use crate::weight::{Quantization, Value, Weight};

/// DeepSeek's releases.
pub(super) struct DeepSeek;

impl Dialect for DeepSeek {
    fn name(&self) -> &'static str {
        "deepseek"
    }

    fn evidence(&self, container: &Container) -> Option<&'static str> {
        quant_method(container, self.quant_methods())
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["weight_scale_inv"]
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &["fp8"]
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        let config = container.quantization();
        let size = |at: usize| config?["weight_block_size"][at].as_u64();
        let block = [0, 1].map(|at| size(at).map_or(128, |size| size as usize));
        let weights = parts::read(container, &[".weight_scale_inv"], |reader, tensor| {
            read_weight(container, reader, tensor, block)
        })?;
        let ignore = config.and_then(|config| config.get("modules_to_not_convert"));
        let ignore = patterns(ignore, Syntax::Unmarked);
        let dialect = self.name();
        Ok((weights, Quantization { dialect, ignore, ..Quantization::default() }))
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        None
    }
}

fn read_weight<'a>(
    container: &Container,
    reader: &mut Reader<'a>,
    tensor: &Tensor<'a>,
    block: [usize; 2],
) -> Result<Option<Weight<'a>>, CheckpointError> {
    let Some(module) = tensor.name.strip_suffix(".weight") else { return Ok(None) };
    let quantized = [Dtype::I8, Dtype::U8, Dtype::F4, Dtype::F8_E4M3, Dtype::F8_E5M2];
    if !tensor.is(&quantized) {
        return Ok(None);
    }
    let newer = reader.take(&format!("{module}.scale"));
    let scales = match newer {
        Some(scales) => scales,
        None => reader.need(tensor, &format!("{module}.weight_scale_inv"))?,
    };
    if tensor.is(&[Dtype::F8_E4M3, Dtype::F8_E5M2]) {
        let value = Value::Fp8(Fp8Weight::new(tensor.clone(), scales, block)?);
        return Ok(Some(Weight::new(&*tensor.name, 0, value)));
    }
    let expert_dtype = container.config().map(|config| &config["expert_dtype"]);
    if let Some(found) = expert_dtype.filter(|dtype| **dtype != "fp4") {
        return Err(CheckpointError::Field {
            path: container.config_path(CONFIG),
            field: "expert_dtype".to_owned(),
            expected: "fp4, as there are weights of 4 bits",
            found: found.to_string(),
            remedy: CheckpointError::CORRECT,
        });
    }
    let codes = tensor.clone();
    let parts = Parts { codes, scales, tensor_scale: None, order: Order::default() };
    let format = parts.format()?;
    Ok(Some(Weight::new(&*tensor.name, 0, Value::Fp4(parts.rows(format)?))))
}
