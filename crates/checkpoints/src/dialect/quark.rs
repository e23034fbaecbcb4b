//! AMD Quark: ModelOpt's shapes, its own config.
//!
//! | tensor             | dtype         | shape                      | meaning                   |
//! |--------------------|---------------|----------------------------|---------------------------|
//! | `X.weight`         | U8            | `[N, K/2]`                 | codes, low nibble first   |
//! | `X.weight_scale`   | U8 or F8_E4M3 | `[N, K/32]` or `[N, K/16]` | E8M0 or E4M3 block scales |
//! | `X.weight_scale_2` | F32           | `[]`                       | tensor scale of NVFP4     |
//! | `X.input_scale_2`  | F32           | `[]`                       | of the input              |
//!
//! Sources: `quantization/quark/schemes/quark_ocp_mx.py` of vLLM, Quark's `export` documentation.

use burn_fp4_policy::Syntax;

use super::parts::{self, Parts, Reader};
use super::scheme::patterns;
use super::traits::{Dialect, Write, quant_method};
use crate::container::{CONFIG, Container};
use crate::dtype::Dtype;
use crate::error::CheckpointError;
use crate::fp4::{Order, TensorScale};
use crate::fp8::Fp8Weight;
use crate::tensor::Tensor;
use crate::weight::{Quantization, Value, Weight};

/// AMD Quark's exported Hugging Face checkpoints.
pub(super) struct Quark;

impl Dialect for Quark {
    fn name(&self) -> &'static str {
        "quark"
    }

    fn evidence(&self, container: &Container) -> Option<&'static str> {
        quant_method(container, self.quant_methods())
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &["weight_scale", "weight_scale_2"]
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &["quark"]
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        let config = container.quantization();
        refuse_rotations(container, config)?;
        let companions = [".weight_scale", ".weight_scale_2"];
        let weights = parts::read(container, &companions, read_weight)?;
        let ignore = config.and_then(|config| config.get("exclude"));
        let ignore = patterns(ignore, Syntax::Both);
        let dialect = self.name();
        Ok((weights, Quantization { dialect, ignore, ..Quantization::default() }))
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        None
    }
}

/// Rotations leave layers that compute on rotated inputs.
fn refuse_rotations(
    container: &Container,
    config: Option<&serde_json::Value>,
) -> Result<(), CheckpointError> {
    let algorithms = config.and_then(|config| config["algo_config"].as_array());
    for algorithm in algorithms.into_iter().flatten() {
        let name = algorithm["name"].as_str().unwrap_or_default();
        // `rotation`, `quarot`, and what names the matrix.
        if ["rot", "hadamard"].iter().any(|part| name.to_ascii_lowercase().contains(part)) {
            return Err(CheckpointError::Refused {
                path: container.config_path(CONFIG),
                what: format!("algo_config `{name}`"),
                because: "its layers compute on rotated inputs",
                remedy: CheckpointError::WITHOUT,
            });
        }
    }
    Ok(())
}

fn read_weight<'a>(
    reader: &mut Reader<'a>,
    tensor: &Tensor<'a>,
) -> Result<Option<Weight<'a>>, CheckpointError> {
    let Some(module) = tensor.name.strip_suffix(".weight") else { return Ok(None) };
    let Some(scales) = reader.take(&format!("{module}.weight_scale")) else { return Ok(None) };
    let (value, input) = if tensor.is(&[Dtype::U8, Dtype::I8, Dtype::F4]) {
        let stated = reader.numbers(&format!("{module}.weight_scale_2"))?;
        let (codes, tensor_scale) = (tensor.clone(), stated.map(TensorScale::Multiplier));
        let parts = Parts { codes, scales, tensor_scale, order: Order::ScalesFirst };
        let format = parts.format()?;
        (Value::Fp4(parts.rows(format)?), "input_scale_2")
    } else {
        (Value::Fp8(Fp8Weight::new(tensor.clone(), scales, [128, 128])?), "input_scale")
    };
    let mut weight = Weight::new(&*tensor.name, 0, value);
    let input = reader.numbers(&format!("{module}.{input}"))?;
    weight.input_scale = input.map(TensorScale::Multiplier);
    Ok(Some(weight))
}
