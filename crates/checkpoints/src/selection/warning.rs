//! Warnings about a plan, before weights are quantized.

use std::fmt;

use burn_fp4_policy::{
    Decision, Patterns, Policy, PolicyError, Preset, Reason, RecipeWeights, Role,
};

use super::layers::Layers;
use crate::architecture::{Architecture, stated};
use crate::weight::{Model, Weight};

/// A reason to look at a selection before its result is used.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// The architecture is not known. Weights are assumed to have the names of Llama-like models.
    UnknownArchitecture {
        /// The `model_type` in `config.json`, if it states one.
        model_type: Option<String>,
    },
    /// Weights that are not known are quantized as stacks of matrices, because they have three
    /// axes.
    StacksByShape {
        /// Their names.
        weights: Vec<String>,
    },
    /// Weights stay because their numbers are of a dtype that is not read as floats, though they
    /// are linear layers by their names.
    UnreadNumbers {
        /// Their names.
        weights: Vec<String>,
        /// The dtype of the first.
        dtype: String,
    },
    /// More layers are asked to be kept than the model has.
    FewerLayers {
        /// The first and the last layers that are asked to be kept.
        asked: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// No weight is quantized by one of the patterns of `only`.
    IdlePattern {
        /// The pattern.
        pattern: String,
        /// A weight that it matches: the one that is nearest to being quantized.
        weight: String,
        /// Why that stays dense.
        stays: String,
    },
    /// No weight is quantized by a table `[[weights]]` of a recipe.
    IdleTable {
        /// Its number, starting at 1.
        table: usize,
        /// The first of its names.
        names: String,
        /// A weight that it names: one that a later table quantizes, or one that `only` would
        /// choose, if there is one.
        weight: String,
        /// Why that stays dense. None: a later table decides about it.
        stays: Option<String>,
        /// True if `only` would choose the weight.
        by_only: bool,
    },
}

impl Warning {
    /// Warns of an architecture that is not known. A user's own list of names needs no warning, nor
    /// do GGUF files, whose names are the same for all architectures.
    pub(super) fn of_architecture(
        model: &Model<'_>,
        architecture: Architecture<'_>,
        policy: &Policy,
    ) -> Option<Self> {
        let by_names = policy.recipe().only.is_empty() && policy.preset() != Preset::Miles;
        let guessed = by_names && model.gguf.is_none();
        (guessed && architecture.name().is_none()).then(|| Self::UnknownArchitecture {
            model_type: stated(model.config.as_ref()).map(str::to_owned),
        })
    }

    /// Warns of weights that are quantized as stacks of matrices by the number of their axes alone.
    pub(super) fn of_stacks(
        model: &Model<'_>,
        architecture: Architecture<'_>,
        quantized: impl Iterator<Item = usize>,
    ) -> Result<Option<Self>, PolicyError> {
        let roles = architecture.roles()?;
        let unlisted = |module: &str| matches!(roles.role(module, 3), Role::Unlisted(_));
        let guessed = quantized.map(|at| &model.weights[at]).filter(|weight| {
            weight.shape().len() == 3
                && model.gguf.is_none()
                && (architecture.name().is_none() || unlisted(weight.module()))
        });
        let weights: Vec<String> = guessed.map(|weight| weight.name.clone()).collect();
        Ok((!weights.is_empty()).then_some(Self::StacksByShape { weights }))
    }

    /// Warns of linear layers whose numbers are not read, such as integers of another method.
    pub(super) fn of_numbers(
        model: &Model<'_>,
        architecture: Architecture<'_>,
        decisions: &[Decision],
    ) -> Result<Option<Self>, PolicyError> {
        let roles = architecture.roles()?;
        let mut first = None;
        let mut weights = Vec::new();
        for (weight, decision) in model.weights.iter().zip(decisions) {
            let Decision::Keep(Reason::Dtype(dtype)) = decision else { continue };
            let axes = weight.shape().len();
            let role = roles.role(weight.module(), axes);
            if axes >= 2 && weight.name.ends_with("weight") && !matches!(role, Role::Other(_)) {
                first.get_or_insert_with(|| dtype.clone());
                weights.push(weight.name.clone());
            }
        }
        Ok(first.map(|dtype| Self::UnreadNumbers { weights, dtype }))
    }

    /// Warns of patterns of `only` by which no weight is quantized, where others quantize some.
    /// Weights that are chosen and cannot be quantized are another warning.
    pub(super) fn of_only(
        policy: &Policy,
        model: &Model<'_>,
        decisions: &[Decision],
    ) -> Result<Vec<Self>, PolicyError> {
        let mut warnings = Vec::new();
        for pattern in &policy.recipe().only {
            let matcher = Patterns::new([pattern])?;
            let about = model.weights.iter().zip(decisions);
            let about = about.filter(|(weight, _)| matcher.first(weight.names()).is_some());
            let nearest = about.min_by_key(|(_, decision)| match decision {
                Decision::Quantize { .. } => (0, 0),
                Decision::Keep(reason) => (1, reason.place()),
            });
            if let Some((weight, Decision::Keep(reason))) = nearest
                && !reason.is_unmet()
            {
                let (pattern, weight) = (pattern.clone(), weight.name.clone());
                warnings.push(Self::IdlePattern { pattern, weight, stays: reason.to_string() });
            }
        }
        Ok(warnings)
    }

    /// Warns of a table of a recipe by which no weight is quantized.
    pub(super) fn of_idle(
        tables: &[RecipeWeights],
        table: usize,
        model: &Model<'_>,
        decisions: &[Decision],
    ) -> Result<Self, PolicyError> {
        let patterns = Patterns::new(&tables[table].names)?;
        let about = model.weights.iter().zip(decisions);
        let about = about.filter(|(weight, _)| patterns.first(weight.names()).is_some());
        let about = about.min_by_key(|(weight, decision)| match decision {
            Decision::Quantize { .. } => (0, 0),
            Decision::Keep(reason) if is_choice(weight, reason) => (1, 0),
            Decision::Keep(reason) => (2, reason.place()),
        });
        let (weight, stays, by_only) = match about {
            Some((weight, Decision::Keep(reason))) => {
                (&*weight.name, Some(reason.to_string()), is_choice(weight, reason))
            }
            Some((weight, Decision::Quantize { .. })) => (&*weight.name, None, false),
            None => ("", None, false),
        };
        let (names, weight) = (tables[table].to_string(), weight.to_owned());
        Ok(Self::IdleTable { table: table + 1, names, weight, stays, by_only })
    }

    /// Warns of layers that are asked to be kept and are not there.
    pub(super) fn of_layers(layers: &Layers) -> Option<Self> {
        let (asked, layers) = (layers.asked(), layers.count());
        (asked > layers).then_some(Self::FewerLayers { asked, layers })
    }

    /// Returns the name of its kind, which stays the same from version to version.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::UnknownArchitecture { .. } => "unknown-architecture",
            Self::StacksByShape { .. } => "stacks-by-shape",
            Self::UnreadNumbers { .. } => "unread-numbers",
            Self::FewerLayers { .. } => "fewer-layers",
            Self::IdlePattern { .. } => "idle-pattern",
            Self::IdleTable { .. } => "idle-table",
        }
    }

    /// Returns the weights that it is about. Empty: it is about the whole model.
    #[must_use]
    pub fn weights(&self) -> &[String] {
        match self {
            Self::StacksByShape { weights } | Self::UnreadNumbers { weights, .. } => weights,
            Self::IdlePattern { weight, .. } | Self::IdleTable { weight, .. } => {
                std::slice::from_ref(weight)
            }
            Self::UnknownArchitecture { .. } | Self::FewerLayers { .. } => &[],
        }
    }
}

/// Returns true if a weight stays because of its role, or because `only` does not name it.
fn is_choice(weight: &Weight<'_>, reason: &Reason) -> bool {
    match reason {
        // Weights with more axes are no stacks of matrices, whatever `only` says.
        Reason::Preset(_) => matches!(weight.shape().len(), 2 | 3),
        Reason::Unlisted(_) | Reason::Transposed(_) | Reason::NotAsked => true,
        _ => false,
    }
}

/// Names the first of some weights, and counts the others.
fn named(weights: &[String]) -> String {
    match weights {
        [] => String::new(),
        [one] => format!("`{one}`"),
        [first, others @ ..] => format!("`{first}` (and {} more)", others.len()),
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownArchitecture { model_type } => {
                match model_type {
                    Some(name) => write!(f, "model_type `{name}`")?,
                    None => write!(f, "no model_type in a config.json")?,
                }
                let rest = ": the architecture is not known, so names and shapes alone decide; \
                            check the plan";
                f.write_str(rest)
            }
            Self::StacksByShape { weights } => write!(
                f,
                "{}: taken for a stack of matrices [outputs, inputs], because it has three axes; \
                 keep it if it is not one",
                named(weights)
            ),
            Self::UnreadNumbers { weights, dtype } => write!(
                f,
                "{}: stays, as its numbers are {dtype}, which is not read as floats; start from \
                 the model before it was quantized",
                named(weights)
            ),
            Self::FewerLayers { asked, layers: 0 } => write!(
                f,
                "high precision for {asked} of the layers: no name has the number of a layer; \
                 keep weights by name"
            ),
            Self::FewerLayers { asked, layers } => write!(
                f,
                "high precision for {asked} of the layers: the model has {layers}; ask for fewer"
            ),
            Self::IdlePattern { pattern, weight, stays } => write!(
                f,
                "`only` pattern `{pattern}`: quantizes no weight: `{weight}` stays ({stays}); \
                 remove the pattern, or name another matrix with it"
            ),
            Self::IdleTable { table, names, weight, stays, by_only } => {
                write!(f, "`[[weights]]` table {table} (`{names}`): quantizes no weight: ")?;
                match stays {
                    Some(reason) => {
                        let or = if *by_only { ", or choose the weight with `only`" } else { "" };
                        write!(f, "`{weight}` stays ({reason}); remove the table{or}")
                    }
                    None => {
                        write!(f, "a later table decides about `{weight}`; remove one of the two")
                    }
                }
            }
        }
    }
}
