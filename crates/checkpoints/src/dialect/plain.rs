//! Checkpoints without quantization: every tensor is a weight.

use burn_fp4_formats::Fp4Format;

use super::parts::{self, Scales};
use super::readers::ReadBy;
use super::scheme::{torch_metadata, without_quantization};
use super::traits::{Dialect, Envelope, Write};
use crate::container::{CONFIG, Container};
use crate::dtype::Dtype;
use crate::error::CheckpointError;
use crate::tensor::{NewTensor, Tensor};
use crate::weight::{Model, Quantization, Value, Weight};

/// No quantization; also what a checkpoint is that says nothing about one.
pub(super) struct Plain {
    /// The names of the dialects, one of which a quantized checkpoint has to be read in.
    pub(super) dialects: fn() -> Vec<&'static str>,
}

/// The writer.
struct Writer;

const NAME: &str = "plain";

/// Ends of names that only some dialect can explain.
const QUANTIZED: [&str; 8] = [
    "weight_scale",
    "weight_scale_2",
    ".weight_packed",
    "weight_scale_inv",
    "_blocks",
    ".qweight",
    "._weight_qdata",
    ".scales",
];

/// Dtypes of which a tensor is only a part of a weight: block scales, codes.
const PARTS: [Dtype; 2] = [Dtype::F8_E8M0, Dtype::F4];

/// Returns true for a tensor that only some dialect can explain, with others. The values of FP8
/// without scales were cast.
pub(super) fn is_part(scales: &Scales<'_>, tensor: &Tensor<'_>) -> bool {
    QUANTIZED.iter().any(|end| tensor.name.ends_with(end))
        || tensor.is(&PARTS)
        || scales.of_fp8(tensor).is_some()
}

/// Checks that no tensor is a part of a quantized weight.
pub(super) fn check(
    container: &Container,
    mut dialects: Vec<&'static str>,
) -> Result<(), CheckpointError> {
    let scales = Scales::of(container);
    let Some(tensor) = container.tensors().find(|tensor| is_part(&scales, tensor)) else {
        return Ok(());
    };
    dialects.retain(|name| *name != NAME);
    let (path, tensor) = (container.root().to_owned(), tensor.name.into_owned());
    Err(CheckpointError::NotPlain { path, tensor, dialects })
}

impl Dialect for Plain {
    fn name(&self) -> &'static str {
        NAME
    }

    fn evidence(&self, _: &Container) -> Option<&'static str> {
        None
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        let scales = Scales::of(container);
        if let Some(tensor) = container.tensors().find(|tensor| is_part(&scales, tensor)) {
            let mut dialects = (self.dialects)();
            dialects.retain(|name| *name != NAME);
            return Err(CheckpointError::NoDialect {
                path: container.root().to_owned(),
                tensor: tensor.name.into_owned(),
                dialects,
            });
        }
        let weights = parts::read(container, &[], |_, _| Ok(None))?;
        Ok((weights, Quantization { dialect: self.name(), ..Quantization::default() }))
    }

    fn patterns_file(&self, _: &Container) -> Option<&'static str> {
        None
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        Some(&Writer)
    }
}

impl Write for Writer {
    fn tensors<'w>(&self, weight: &'w Weight<'_>) -> Result<Vec<NewTensor<'w>>, CheckpointError> {
        let cannot = |what| CheckpointError::cannot_hold(NAME, &weight.name, what);
        match &weight.value {
            Value::Plain(tensor) => Ok(vec![NewTensor::copy(&weight.name, tensor)]),
            Value::Fp8(_) => Err(cannot(CheckpointError::FP8_TO_DECODE)),
            Value::Fp4(_) => Err(cannot(CheckpointError::FP4_TO_DECODE)),
        }
    }

    fn readers(&self, _: Fp4Format) -> &'static [ReadBy] {
        &[]
    }

    fn envelope(&self, model: &Model<'_>) -> Result<Envelope, CheckpointError> {
        let config = model.config.as_ref().map(without_quantization);
        let configs = config.into_iter().map(|config| (CONFIG, config)).collect();
        Ok(Envelope::Folder { metadata: torch_metadata(), configs })
    }
}
