//! [`CheckpointMap`]: which tensor of a checkpoint is which parameter, and how it lies there.

use serde::{Deserialize, Serialize};

/// The table of [`Fp4Config::CONTAINERS`](crate::Fp4Config::CONTAINERS).
pub(crate) const CONTAINERS: [(&str, usize); 4] =
    [("Linear", 0), ("Fp4Linear", 0), ("Fp4TrainLinear", 0), ("Fp4Embedding", 1)];

/// How files hold the weights of a container type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileLayout {
    /// `[.., out, in]`, as PyTorch's linear layers: dense matrices are transposed on the way.
    OutIn,
    /// With the axes of the parameter, as the stacked experts of gpt-oss and Llama 4.
    AsIs,
}

/// Which tensors of a checkpoint are which parameters of a module, in both directions.
///
/// The default has PyTorch's conventions, as `burn-store` has them:
///
/// - a tensor belongs to the parameter of its name;
/// - matrices of linear layers are `[out, in]` in files and `[in, out]` in Burn, whatever their
///   `LinearLayout`; all other tensors have the axes of their parameters;
/// - `gamma` and `beta` of normalizations are `weight` and `bias` in files.
///
/// FP4 runs along the input in files. In a module that is the axis of the
/// [container](Self::container); codes keep their order.
///
/// ```
/// use burn_fp4_modules::{CheckpointMap, FileLayout};
///
/// // A Llama of `transformers`, into a module without the outermost `model.`.
/// let map = CheckpointMap::new()
///     .model_type("llama")
///     .rename(r"^model\.", "")
///     .rename_back(r"^(embed_tokens|layers|norm)\.", "model.$1.")
///     .tie("lm_head.weight", "embed_tokens.weight")
///     .container("Experts", 1, FileLayout::OutIn)
///     .experts("experts.up", "experts.{}.up_proj.weight");
/// # let _ = map;
/// ```
///
/// A mismatch is an error, or a line of the report:
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_fp4_modules::{Checkpoint, CheckpointMap, Fp4Config, Fp4Module, LoadCheckpoint};
///
/// # fn main() -> Result<(), burn_fp4_modules::Fp4Error> {
/// # let folder = std::env::temp_dir().join(format!("burn-fp4-map-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).unwrap();
/// # let path = folder.join("Toy-NVFP4");
/// let build = |bias| LinearConfig::new(64, 32).with_bias(bias).init(&Device::flex());
/// let (mut saved, mut layer) = (build(false), build(true));
/// saved.quantize_fp4(&Fp4Config::nvfp4())?;
/// saved.save_fp4(&path, "modelopt", &CheckpointMap::new().shard_size(5 << 30))?;
/// let map = CheckpointMap::new().allow_missing().allow_unused().allow_misfits();
/// let report = Checkpoint::open(&path)?.load_into(&mut layer, &map)?;
/// assert_eq!(report.kept().count(), 1); // the bias
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[must_use]
pub struct CheckpointMap {
    /// Regular expressions and replacements, from names in files to paths.
    pub(crate) renames: Vec<(String, String)>,
    /// From paths to names in files.
    pub(crate) renames_back: Vec<(String, String)>,
    pub(crate) containers: Vec<ContainerLayout>,
    /// A parameter, and the one whose tensor it takes.
    pub(crate) ties: Vec<(String, String)>,
    pub(crate) experts: Vec<Experts>,
    pub(crate) allow_missing: bool,
    pub(crate) allow_unused: bool,
    pub(crate) allow_misfits: bool,
    pub(crate) shard_size: Option<u64>,
    pub(crate) model_type: Option<String>,
}

/// The weights of a container type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ContainerLayout {
    pub(crate) name: String,
    /// The axis of the input.
    pub(crate) axis: usize,
    pub(crate) file: FileLayout,
    /// Set if a caller named it: every map knows the layers of Burn.
    pub(crate) named: bool,
}

/// Matrices that are stacked on one side; `{}` stands for their number on the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Experts {
    pub(crate) parameter: String,
    pub(crate) tensor: String,
}

impl Default for CheckpointMap {
    fn default() -> Self {
        Self::new()
    }
}

impl CheckpointMap {
    /// PyTorch's conventions; everything has to fit.
    pub fn new() -> Self {
        let container = |(name, axis): (&str, usize)| ContainerLayout {
            name: name.to_owned(),
            axis,
            file: FileLayout::OutIn,
            named: false,
        };
        Self {
            renames: Vec::new(),
            renames_back: Vec::new(),
            containers: CONTAINERS.map(container).into(),
            ties: Vec::new(),
            experts: Vec::new(),
            allow_missing: false,
            allow_unused: false,
            allow_misfits: false,
            shard_size: None,
            model_type: None,
        }
    }

    /// Replaces all that a regular expression matches in the names of a file, on the way to
    /// paths of the module. Several apply one after the other.
    ///
    /// `$1` is its first group, `$$` a dollar. A group that letters, digits or `_` follow needs
    /// braces: `${1}_proj`. `$1_proj` is the group of the name `1_proj`, and a group that the
    /// expression does not have is an error.
    pub fn rename(mut self, pattern: impl Into<String>, replacement: impl Into<String>) -> Self {
        self.renames.push((pattern.into(), replacement.into()));
        self
    }

    /// The opposite of [`rename`](Self::rename), for saving: from paths to names in the file.
    pub fn rename_back(
        mut self,
        pattern: impl Into<String>,
        replacement: impl Into<String>,
    ) -> Self {
        self.renames_back.push((pattern.into(), replacement.into()));
        self
    }

    /// Says along which axis the weights of a container type are multiplied, and how files hold
    /// them. `Container { name: "Experts", axis: 1 }` of an `Fp4Config` is
    /// `container("Experts", 1, ..)` here. Of containers that are not named, blocks run along the
    /// last axis: a weight that its file says to be the other way round is an error.
    pub fn container(mut self, name: impl Into<String>, axis: usize, file: FileLayout) -> Self {
        let name = name.into();
        self.containers.retain(|container| container.name != name);
        self.containers.push(ContainerLayout { name, axis, file, named: true });
        self
    }

    /// Lets a parameter take the tensor of another one, where the file has none of its own: an
    /// output layer that is tied to its embedding. Of packed ones the codes are in memory once.
    /// Saved is the tensor of `with` alone, if both are the same bit for bit.
    pub fn tie(mut self, parameter: impl Into<String>, with: impl Into<String>) -> Self {
        self.ties.push((parameter.into(), with.into()));
        self
    }

    /// Matches matrices that are stacked on one side and have names of their own on the other.
    /// `{}` stands for their number, 0 and up; both are the ends of whole components of paths, and
    /// what precedes them is the same:
    ///
    /// - `experts("experts.up", "experts.{}.up_proj.weight")`: the file has a tensor for each
    ///   matrix of the parameter `[experts, ..]`;
    /// - `experts("experts.{}.up.weight", "experts.up_proj")`: the file has a stacked tensor, the
    ///   module a parameter for each.
    pub fn experts(mut self, parameter: impl Into<String>, tensor: impl Into<String>) -> Self {
        self.experts.push(Experts { parameter: parameter.into(), tensor: tensor.into() });
        self
    }

    /// Leaves parameters without a tensor as they are; the report names them.
    pub fn allow_missing(mut self) -> Self {
        self.allow_missing = true;
        self
    }

    /// Ignores tensors without a parameter, and what the map says that matches nothing; the report
    /// names them.
    pub fn allow_unused(mut self) -> Self {
        self.allow_unused = true;
        self
    }

    /// Leaves parameters as they are whose tensors have another shape or type; the report names
    /// both.
    pub fn allow_misfits(mut self) -> Self {
        self.allow_misfits = true;
        self
    }

    /// Saves files of at most `bytes` bytes of data each, unless a single weight has more. GGUF is
    /// always one file.
    pub fn shard_size(mut self, bytes: u64) -> Self {
        self.shard_size = Some(bytes);
        self
    }

    /// Names the architecture of the files, as the `model_type` of `config.json` does. A recipe
    /// then decides by its roles and families, which the command `fp4` finds in the folder of a
    /// model; otherwise, and for architectures that it does not know, by names as in Llama-like
    /// models.
    pub fn model_type(mut self, name: impl Into<String>) -> Self {
        self.model_type = Some(name.into());
        self
    }

    /// Returns true if the map has a container.
    pub(crate) fn knows(&self, container: &str) -> bool {
        self.containers.iter().any(|known| known.name == container)
    }

    /// How the weights of a container lie in files.
    pub(crate) fn placement(&self, container: &str, rank: usize) -> Placement {
        match self.containers.iter().find(|known| known.name == container) {
            Some(known) => Placement { axis: known.axis, rank, file: known.file },
            None => Placement { axis: rank.saturating_sub(1), rank, file: FileLayout::AsIs },
        }
    }
}

/// How a parameter lies in files.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Placement {
    /// The axis of the input.
    pub(crate) axis: usize,
    rank: usize,
    file: FileLayout,
}

impl Placement {
    /// Returns true if the input is the last axis but one in the module; in files blocks run along
    /// the last one.
    pub(crate) fn input_first(self) -> bool {
        self.axis + 2 == self.rank
    }

    /// Returns true if the blocks of matrices can run along the axis.
    pub(crate) fn has_matrices(self) -> bool {
        self.rank >= 2 && (self.input_first() || self.axis + 1 == self.rank)
    }

    /// Returns true if the last two axes of dense values change places.
    pub(crate) fn turns_dense(self) -> bool {
        self.input_first() && self.file == FileLayout::OutIn
    }

    /// Returns true if files have the input first, too.
    pub(crate) fn input_first_in_files(self) -> bool {
        self.input_first() && self.file == FileLayout::AsIs
    }
}

/// A shape whose last two axes changed places, if asked.
pub(crate) fn turned(shape: &[usize], turn: bool) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if let (true, rank @ 2..) = (turn, shape.len()) {
        shape.swap(rank - 2, rank - 1);
    }
    shape
}
