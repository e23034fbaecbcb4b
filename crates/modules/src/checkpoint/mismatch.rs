//! [`Mismatch`]: a parameter and a tensor that do not go together.

use serde::Serialize;

/// Why a parameter and a tensor of a checkpoint do not go together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Mismatch {
    /// A parameter has no tensor.
    #[error("parameter `{parameter}` {shape:?}: expected a tensor {}", any(.tensors))]
    Missing {
        /// Path of the parameter.
        parameter: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The names, after renaming, that were looked for.
        tensors: Vec<String>,
    },
    /// A tensor has no parameter.
    #[error("tensor `{tensor}`: the module has no parameter `{parameter}`")]
    Unused {
        /// Name of the tensor.
        tensor: String,
        /// The name after renaming.
        parameter: String,
    },
    /// A tensor has another shape.
    #[error(
        "parameter `{parameter}`, tensor `{tensor}`: expected shape {expected:?} in the file, \
         found {found:?}"
    )]
    Shape {
        /// Path of the parameter.
        parameter: String,
        /// Name of the tensor.
        tensor: String,
        /// The shape that the parameter has in a file.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// A tensor has another type of numbers.
    #[error("parameter `{parameter}`, tensor `{tensor}`: expected {expected}, found {found}")]
    Type {
        /// Path of the parameter.
        parameter: String,
        /// Name of the tensor.
        tensor: String,
        /// The shape or type that the parameter, or its other tensors, ask for.
        expected: String,
        /// The shape or type of the tensor.
        found: String,
    },
    /// A rule of the map matches nothing.
    #[error("`{rule}` of the map: it matches no {what}: correct it, or take it out")]
    Rule {
        /// The call that made it.
        rule: String,
        /// The parameters or tensors that it would match.
        what: String,
    },
    /// The blocks of a packed weight would run along another axis.
    #[error(
        "parameter `{parameter}`, tensor `{tensor}`: expected blocks along axis {expected} \
         (`CheckpointMap::container`), found axis {found}"
    )]
    Axis {
        /// Path of the parameter.
        parameter: String,
        /// Name of the tensor.
        tensor: String,
        /// The axis of the container, or that which blocks can run along in files.
        expected: usize,
        /// The axis of the parameter, or of the container; of a container that the map does not
        /// name, the axis that the file says.
        found: usize,
    },
    /// The scales of a packed weight are none.
    #[error("parameter `{parameter}`, tensor `{tensor}`: {problem}")]
    Scales {
        /// Path of the parameter.
        parameter: String,
        /// Name of the tensor.
        tensor: String,
        /// The expected and the found values.
        problem: String,
    },
    /// Two tensors have the same name after renaming.
    #[error("tensors `{}` and `{}` are both renamed to `{name}`", .tensors[0], .tensors[1])]
    Renamed {
        /// The name.
        name: String,
        /// The names in the file.
        tensors: [String; 2],
    },
    /// The layer's input has to be multiplied by something before the weight is.
    #[error(
        "parameter `{parameter}`, tensor `{tensor}`: its layer multiplies its input first \
         (pre_quant_scale of AWQ), which layers of Burn do not"
    )]
    InputScaled {
        /// Path of the parameter.
        parameter: String,
        /// Name of the tensor.
        tensor: String,
    },
    /// A parameter would be saved under a name that is loaded into another one.
    #[error(
        "parameter `{parameter}`: expected a name that is loaded into it, found `{tensor}`, which \
         `rename` makes `{loaded}`: add a `rename_back`"
    )]
    RenamedBack {
        /// Path of the parameter.
        parameter: String,
        /// The name that it would have in the file.
        tensor: String,
        /// The name after renaming.
        loaded: String,
    },
    /// Tied parameters do not have the same values.
    #[error(
        "parameter `{parameter}` is tied to `{with}`: expected the same bits, found others: \
         quantize both alike, or save without `tie`"
    )]
    Tied {
        /// Path of the parameter.
        parameter: String,
        /// Path of the other one.
        with: String,
    },
}

fn any(names: &[String]) -> String {
    let quoted: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    quoted.join(" or ")
}
