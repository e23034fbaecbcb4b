//! [`Candidate`]: a format that a weight may have, or none.

use core::fmt;

use burn_fp4_ops::Fp4Scheme;
use serde::{Deserialize, Serialize};

use crate::config::Fp4Config;

/// How a group of weights may be stored.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Candidate {
    /// Not quantized.
    Dense,
    /// In FP4, with the rule and the blocks of a scheme; the search is that of the configuration.
    Fp4(Fp4Scheme),
}

impl Candidate {
    /// Formats that every dialect of checkpoints can hold: NVFP4 with blocks of 16, MXFP4 and
    /// dense.
    pub const DEFAULT: [Self; 3] =
        [Self::Fp4(Fp4Scheme::nvfp4()), Self::Fp4(Fp4Scheme::mxfp4()), Self::Dense];
    /// NVFP4 with blocks of 16 and of 32, MXFP4 and dense.
    pub const ALL: [Self; 4] = [
        Self::Fp4(Fp4Scheme::nvfp4()),
        Self::Fp4(Fp4Scheme::nvfp4().with_block_size(32)),
        Self::Fp4(Fp4Scheme::mxfp4()),
        Self::Dense,
    ];

    /// Its scheme, with the search of a configuration, and its Hadamard transform if the scheme has
    /// none.
    pub(super) fn scheme(&self, config: &Fp4Config) -> Option<Fp4Scheme> {
        let Self::Fp4(scheme) = self else { return None };
        let hadamard = scheme.hadamard.or(config.scheme.hadamard);
        Some(scheme.with_method(config.scheme.method).with_hadamard(hadamard))
    }
}

impl fmt::Display for Candidate {
    /// `dense`, or the format and the size of its blocks, `nvfp4/16`, and of its own Hadamard
    /// transform: `nvfp4/16/hadamard64`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dense => f.pad("dense"),
            Self::Fp4(scheme) => {
                let transform = scheme.hadamard.map(|one| format!("/hadamard{}", one.size()));
                let transform = transform.unwrap_or_default();
                f.pad(&format!("{}/{}{transform}", scheme.format(), scheme.block_size))
            }
        }
    }
}
