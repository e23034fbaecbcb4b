//! Lists of names: which weights are worth 4 bits, and which are better left alone.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::PolicyError;
use crate::pattern::{Matcher, Pattern, Syntax};
use crate::reason::Reason;
use crate::weight::{Role, WeightInfo};

/// Which weights are quantized, by their names.
///
/// ```
/// use burn_fp4_policy::Preset;
///
/// assert_eq!(Preset::default().row().name, "all-linear");
/// assert_eq!("mlp-only".parse(), Ok(Preset::MlpOnly));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", try_from = "String")]
pub enum Preset {
    /// Every linear layer but those that no one quantizes.
    #[default]
    AllLinear,
    /// All of these in feed-forward networks and experts.
    MlpOnly,
    /// All of these in experts.
    ExpertsOnly,
    /// The weights that the converter of miles quantizes (`tools/convert_hf_to_nvfp4.py` of
    /// radixark/miles as of pull request 1054): experts, routed and shared, by parts of names.
    Miles,
}

/// The facts of a [`Preset`].
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PresetRow {
    /// Its name on command lines.
    pub name: &'static str,
    /// The weights it chooses, in a line.
    pub summary: &'static str,
}

/// Names of feed-forward networks, dense or of experts, where the owner of the weights does not
/// know them.
const MLP: [&str; 8] = [
    "*mlp*",
    "*feed_forward*",
    "*block_sparse_moe*",
    "*.ffn*",
    "*.fc[12]",
    "*.DenseReluDense.*",
    "*experts*",
    "*.moe.*",
];
/// Names of experts, routed or shared.
const EXPERTS: [&str; 3] = ["*experts*", "*_exps", "*shared_expert*"];

/// Parts of the names of what miles' converter quantizes: one of each list.
const MILES_WITHIN: [&str; 4] =
    [".experts.", ".shared_experts.", "block_sparse_moe.experts.", ".moe.experts."];
const MILES_ENDS: [&str; 7] = [
    ".w1.weight",
    ".w2.weight",
    ".w3.weight",
    ".gate_proj.weight",
    ".up_proj.weight",
    ".down_proj.weight",
    ".gate_up_proj.weight",
];

impl Preset {
    /// Every preset.
    pub const ALL: [Self; 4] = [Self::AllLinear, Self::MlpOnly, Self::ExpertsOnly, Self::Miles];

    /// The facts of the preset.
    #[must_use]
    pub const fn row(self) -> &'static PresetRow {
        match self {
            Self::AllLinear => &PresetRow {
                name: "all-linear",
                summary: "every linear layer but embeddings, the output, routers and the like",
            },
            Self::MlpOnly => &PresetRow {
                name: "mlp-only",
                summary: "of those, the feed-forward networks and experts",
            },
            Self::ExpertsOnly => {
                &PresetRow { name: "experts-only", summary: "of those, the experts" }
            }
            Self::Miles => &PresetRow {
                name: "miles",
                summary: "the experts, in the dialect miles and with the bytes of its converter",
            },
        }
    }

    /// Returns true if a weight shares its tensor scale with its family: miles knows pairs of gate
    /// and up, and of these only what is quantized.
    pub(crate) fn shares(self, name: &str) -> bool {
        let pair = [".gate_proj.", ".up_proj.", ".w1.", ".w3."];
        self != Self::Miles || pair.iter().any(|part| name.contains(part))
    }
}

/// The names of a preset, ready to be matched.
pub(crate) struct PresetNames {
    preset: Preset,
    /// Names, one of which is asked for, and what a weight is that has none of them.
    asked: Option<(Vec<Matcher>, &'static str)>,
}

impl PresetNames {
    /// # Errors
    /// [`PolicyError::Pattern`].
    pub(crate) fn of(preset: Preset) -> Result<Self, PolicyError> {
        let asked: Option<(&[&str], _)> = match preset {
            Preset::AllLinear | Preset::Miles => None,
            Preset::MlpOnly => Some((&MLP, "not a feed-forward network")),
            Preset::ExpertsOnly => Some((&EXPERTS, "not an expert")),
        };
        let ready = |glob: &&str| Pattern::parse(glob, Syntax::Glob).matcher();
        let asked = asked.map(|(globs, what)| -> Result<_, PolicyError> {
            Ok((globs.iter().map(ready).collect::<Result<_, _>>()?, what))
        });
        Ok(Self { preset, asked: asked.transpose()? })
    }

    /// Finds a reason to keep a matrix.
    pub(crate) fn keeps(&self, weight: &WeightInfo<'_>) -> Option<Reason> {
        let WeightInfo { name, module, .. } = weight;
        if self.preset == Preset::Miles {
            let within = MILES_WITHIN.iter().any(|part| name.contains(part));
            let expert = within && MILES_ENDS.iter().any(|end| name.ends_with(end));
            let parameter = |end: &&str| name.ends_with(end.trim_end_matches(".weight"));
            if within && weight.shape.len() == 3 && MILES_ENDS.iter().any(parameter) {
                return Some(Reason::Stacked);
            }
            return (!expert || weight.fp8).then_some(Reason::Preset("not an expert of miles"));
        }
        match weight.role {
            Role::Linear => {}
            Role::Other(what) => return Some(Reason::Preset(what)),
            Role::Unlisted(architecture) => return Some(Reason::Unlisted(architecture)),
        }
        let (asked, what) = self.asked.as_ref()?;
        let chosen = match (self.preset, weight.feed_forward) {
            (Preset::MlpOnly, Some(known)) => known,
            _ => asked.iter().any(|m| m.matches(module)),
        };
        (!chosen).then_some(Reason::Preset(what))
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.row().name)
    }
}

impl TryFrom<String> for Preset {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        name.parse()
    }
}

impl FromStr for Preset {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|preset| preset.row().name == name);
        let names = || Self::ALL.map(|preset| preset.row().name).join(", ");
        found.ok_or_else(|| format!("preset `{name}`: unknown; choose one of {}", names()))
    }
}
