//! FP-Quant: known by its name, and refused: its layers multiply their input by a Hadamard matrix
//! that is part of the file.
//!
//! Source: `integrations/fp_quant.py` of transformers; IST-DASLab/FP-Quant.

use super::traits::{Dialect, Write, quant_method};
use crate::container::{CONFIG, Container};
use crate::error::CheckpointError;
use crate::weight::{Quantization, Weight};

/// FP-Quant's checkpoints.
pub(super) struct FpQuant;

impl Dialect for FpQuant {
    fn name(&self) -> &'static str {
        "fp-quant"
    }

    fn evidence(&self, container: &Container) -> Option<&'static str> {
        quant_method(container, &["fp_quant"])
    }

    fn suffixes(&self) -> &'static [&'static str] {
        &[".qweight"]
    }

    fn read<'a>(
        &self,
        container: &'a Container,
    ) -> Result<(Vec<Weight<'a>>, Quantization), CheckpointError> {
        Err(CheckpointError::Refused {
            path: container.config_path(CONFIG),
            what: "FP-Quant (forward_hadamard_matrix)".to_owned(),
            because: "its layers compute on transformed inputs",
            remedy: CheckpointError::WITHOUT,
        })
    }

    fn writer(&self) -> Option<&'static dyn Write> {
        None
    }
}
