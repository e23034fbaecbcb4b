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
    /// The [suffixes](Dialect::suffixes) of all dialects.
    pub(super) suffixes: fn() -> Vec<&'static str>,
}

/// Finds the tensors of a container that only some dialect can explain, with others.
pub(super) struct PartFinder<'a> {
    suffixes: Vec<&'static str>,
    scales: Scales<'a>,
}

/// The writer.
struct Writer;

const NAME: &str = "plain";

/// Dtypes of which a tensor is only a part of a weight: block scales, codes.
const PARTS: [Dtype; 2] = [Dtype::F8_E8M0, Dtype::F4];

impl PartFinder<'_> {
    /// Returns true for a part of a quantized weight. The values of FP8 without scales were cast.
    pub(super) fn is_part(&self, tensor: &Tensor<'_>) -> bool {
        self.suffixes.iter().any(|end| tensor.name.ends_with(end))
            || tensor.is(&PARTS)
            || self.scales.of_fp8(tensor).is_some()
    }
}

impl Plain {
    /// Returns the finder of parts in a container.
    pub(super) fn part_finder<'a>(&self, container: &'a Container) -> PartFinder<'a> {
        PartFinder { suffixes: (self.suffixes)(), scales: Scales::of(container) }
    }

    /// Checks that no tensor is a part of a quantized weight.
    pub(super) fn check(&self, container: &Container) -> Result<(), CheckpointError> {
        let Some(tensor) = self.first_part(container) else { return Ok(()) };
        let (path, dialects) = (container.root().to_owned(), self.other_dialects());
        Err(CheckpointError::NotPlain { path, tensor, dialects })
    }

    /// Returns the name of the first tensor that is a part of a quantized weight.
    fn first_part(&self, container: &Container) -> Option<String> {
        let finder = self.part_finder(container);
        let part = container.tensors().find(|tensor| finder.is_part(tensor));
        part.map(|tensor| tensor.name.into_owned())
    }

    /// Returns the dialects of quantized checkpoints.
    fn other_dialects(&self) -> Vec<&'static str> {
        let mut dialects = (self.dialects)();
        dialects.retain(|name| *name != NAME);
        dialects
    }
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
        if let Some(tensor) = self.first_part(container) {
            let (path, dialects) = (container.root().to_owned(), self.other_dialects());
            return Err(CheckpointError::NoDialect { path, tensor, dialects });
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
