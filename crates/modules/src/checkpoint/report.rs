//! [`LoadReport`]: where every parameter came from.

use core::fmt;

use burn_fp4_ops::Fp4Format;
use serde::Serialize;

use super::mismatch::Mismatch;

/// Where every parameter of a module came from.
///
/// Displayed it is a line for each; serialized it is all there is to know.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// Every parameter, in the order of the module.
    pub parameters: Vec<LoadedParameter>,
    /// Tensors without a parameter ([`allow_unused`](crate::CheckpointMap::allow_unused)), in the
    /// order of the file, and rules of the map that match nothing.
    pub unused: Vec<Mismatch>,
    /// Weights whose scale for a quantized input was left out: here inputs are not quantized.
    pub input_scales_left_out: usize,
    /// Scales of a quantized cache of keys and values that were left out: modules have no such
    /// cache.
    pub cache_scales_left_out: usize,
}

/// Where a parameter came from.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LoadedParameter {
    /// Path in the module.
    pub path: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The tensors that it was made of: one, or one for each matrix; empty if it was kept.
    pub tensors: Vec<LoadedFrom>,
    /// Its values now.
    pub loaded: Loaded,
}

/// A tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LoadedFrom {
    /// Name of the weight in the file, without the endings of its parts.
    pub tensor: String,
    /// Which of its stacked matrices, if not all of it.
    pub matrix: Option<usize>,
    /// Name of the file.
    pub file: String,
}

/// The values of a parameter after loading.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Loaded {
    /// The codes and scales of the file.
    Packed {
        /// Format of the codes.
        format: Fp4Format,
        /// Elements that share a block scale.
        block_size: usize,
        /// Axis of the parameter that its blocks run along.
        axis: usize,
    },
    /// Values.
    Dense {
        /// Type of the tensor in the file.
        stored: String,
        /// The dtype of the parameter.
        dtype: String,
    },
    /// Its values from before.
    Kept {
        /// Why.
        because: Mismatch,
    },
}

impl LoadReport {
    /// The parameter with a path.
    #[must_use]
    pub fn get(&self, path: &str) -> Option<&LoadedParameter> {
        self.parameters.iter().find(|parameter| parameter.path == path)
    }

    /// The parameters that are packed now.
    pub fn packed(&self) -> impl Iterator<Item = &LoadedParameter> {
        let packed = |one: &&LoadedParameter| matches!(one.loaded, Loaded::Packed { .. });
        self.parameters.iter().filter(packed)
    }

    /// The parameters that were left as they were, with the reasons.
    pub fn kept(&self) -> impl Iterator<Item = (&LoadedParameter, &Mismatch)> {
        self.parameters.iter().filter_map(|one| match &one.loaded {
            Loaded::Kept { because } => Some((one, because)),
            Loaded::Packed { .. } | Loaded::Dense { .. } => None,
        })
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for LoadedParameter { path, shape, tensors, loaded } in &self.parameters {
            let from = match &tensors[..] {
                [] => String::new(),
                [one] => format!(" from {one}"),
                [first, .., last] => format!(" from {first} to {last}"),
            };
            match loaded {
                Loaded::Packed { format, block_size, axis } => {
                    writeln!(f, "{path} {shape:?}: {format} / {block_size}, axis {axis},{from}")?;
                }
                Loaded::Dense { stored, dtype } if stored == dtype => {
                    writeln!(f, "{path} {shape:?}: {dtype},{from}")?;
                }
                Loaded::Dense { stored, dtype } => {
                    writeln!(f, "{path} {shape:?}: {dtype} of {stored},{from}")?;
                }
                Loaded::Kept { because } => writeln!(f, "{path} {shape:?}: kept: {because}")?,
            }
        }
        for unused in &self.unused {
            writeln!(f, "unused: {unused}")?;
        }
        for (what, count) in [
            ("quantized inputs", self.input_scales_left_out),
            ("a quantized cache", self.cache_scales_left_out),
        ] {
            if count > 0 {
                writeln!(f, "scales of {what} that were left out: {count}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for LoadedFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.matrix {
            Some(matrix) => write!(f, "{}[{matrix}] ({})", self.tensor, self.file),
            None => write!(f, "{} ({})", self.tensor, self.file),
        }
    }
}
