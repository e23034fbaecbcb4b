//! Warnings about a plan, before weights are quantized.

use std::fmt;

use burn_fp4_policy::Preset;
use serde::Serialize;

use crate::architecture::{Architecture, stated};
use crate::weight::Model;

/// A reason to look at a selection before its result is used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Warning {
    /// The architecture is not known, and the names of its weights are taken for those of
    /// Llama-like models.
    UnknownArchitecture {
        /// The `model_type` in `config.json`, if it states one.
        model_type: Option<String>,
    },
}

impl Warning {
    /// The warnings about a choice. A user's own list of names needs none, nor do GGUF files, whose
    /// names are the same for all architectures.
    pub(super) fn of(
        model: &Model<'_>,
        architecture: Architecture<'_>,
        preset: Preset,
        only: &[String],
    ) -> Vec<Self> {
        let guessed = only.is_empty() && preset != Preset::Miles && model.gguf.is_none();
        match architecture.name() {
            None if guessed => {
                let model_type = stated(model.config.as_ref()).map(str::to_owned);
                vec![Self::UnknownArchitecture { model_type }]
            }
            Some(_) | None => Vec::new(),
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::UnknownArchitecture { model_type } = self;
        match model_type {
            Some(name) => write!(f, "model_type `{name}`: the architecture is not known")?,
            None => write!(f, "no model_type in a config.json: the architecture is not known")?,
        }
        f.write_str(", so names and shapes alone decide; check the plan")
    }
}
