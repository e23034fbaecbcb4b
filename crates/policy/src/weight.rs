//! [`WeightInfo`], its [`Family`] and [`Constraints`]: the facts that decisions are made from.

use burn_fp4_search::formats::Fp4Format;

use crate::reason::Reason;

/// Facts about a weight, from its name, shape and owner; its values are not needed.
#[derive(Debug, Clone, Default)]
pub struct WeightInfo<'w> {
    /// Its name, for patterns.
    pub name: &'w str,
    /// Name of its module, which patterns may have instead.
    pub module: &'w str,
    /// Reason to keep it that no choice overrides.
    pub unfit: Option<Reason>,
    /// Its role in the model, by which presets choose.
    pub role: Role,
    /// True if it is in a feed-forward network, and false if it is not. None: its name tells.
    pub feed_forward: Option<bool>,
    /// True if it is FP8, which is decoded before it is quantized.
    pub fp8: bool,
    /// Number of its layer, and how many layers there are; none outside of layers.
    pub layer: Option<(usize, usize)>,
    /// Layers that inference engines fuse with its own.
    pub family: Option<Family<'w>>,
    /// Its shape: a matrix, or a stack of matrices with a tensor scale each.
    pub shape: &'w [usize],
    /// Columns of each matrix, along which blocks run.
    pub cols: usize,
    /// True if the model's parameter is `[inputs, outputs]`.
    pub transposed: bool,
}

/// Family of a layer: query, key and value; gate and up.
///
/// ```
/// use burn_fp4_policy::Family;
///
/// let lists = [["q_proj", "k_proj"], ["gate", "up"]];
/// let family = Family::of("layers.0.mlp.up", &lists).expect("its name is in a list");
/// assert_eq!((family.parent, family.list), ("layers.0.mlp.", 1));
/// assert_eq!(Family::of("layers.0.mlp.gate", &lists), Some(family));
/// assert_eq!(Family::of("layers.0.mlp.down", &lists), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Family<'n> {
    /// The names before the layer's own.
    pub parent: &'n str,
    /// Number of the list that the layer's name is in.
    pub list: usize,
    /// Name of the weight in its layer, where layers have several; otherwise empty.
    pub parameter: &'n str,
}

impl<'n> Family<'n> {
    /// Finds the family of a module by the first of the lists with an end of its name.
    #[must_use]
    pub fn of<L: AsRef<[S]>, S: AsRef<str>>(module: &'n str, lists: &[L]) -> Option<Self> {
        let parent = |ends: &L| ends.as_ref().iter().find_map(|end| stem(module, end.as_ref()));
        let of = |(list, ends)| Some(Self { parent: parent(ends)?, list, parameter: "" });
        lists.iter().enumerate().find_map(of)
    }
}

/// Returns the part of a module's name before `end`, if it ends so at a dot.
///
/// ```
/// use burn_fp4_policy::stem;
///
/// assert_eq!(stem("layers.0.o_proj", "o_proj"), Some("layers.0."));
/// assert_eq!(stem("layers.0.qo_proj", "o_proj"), None);
/// ```
#[must_use]
pub fn stem<'m>(module: &'m str, end: &str) -> Option<&'m str> {
    module.strip_suffix(end).filter(|stem| stem.is_empty() || stem.ends_with('.'))
}

/// Role of a weight in its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// The matrix of a linear layer.
    #[default]
    Linear,
    /// Something else, such as `an embedding`, `a router` or `the output layer`.
    Other(&'static str),
    /// Not a known linear layer of the architecture of this name.
    Unlisted(&'static str),
}

/// Facts about what reads the quantized weights: the dialect of a file, or a module.
#[allow(missing_debug_implementations, reason = "it holds a function")]
pub struct Constraints<'c> {
    /// Name of the dialect, for reasons.
    pub dialect: &'static str,
    /// Number that has to divide the columns of a weight in blocks of this size.
    pub columns: &'c dyn Fn(Fp4Format, usize) -> usize,
    /// Layers that are fused, unless the recipe says [`together`](crate::Recipe::together).
    pub fused: Fused,
    /// True if readers load `[outputs, inputs]` where the model's parameter is `[inputs, outputs]`.
    pub turns: bool,
    /// True if there is a place for tensor scales; where not, they are 1.
    pub tensor_scales: bool,
}

/// Consequences for layers that inference engines fuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fused {
    /// None: each is for itself.
    Apart,
    /// Quantized ones share a tensor scale.
    Scale,
    /// They share a tensor scale and a format, and all are kept if one is.
    Together,
    /// Quantized ones share a tensor scale, because the user has listed them: where one of them has
    /// a tensor scale, all have one scheme. Any shapes may share.
    Listed,
}

impl<'w> WeightInfo<'w> {
    /// The names that patterns may have.
    pub(crate) fn names(&self) -> [&'w str; 2] {
        [self.name, self.module]
    }

    /// Returns true unless it is a stack of more than one matrix.
    pub(crate) fn is_single(&self) -> bool {
        self.shape.iter().rev().skip(2).product::<usize>() == 1
    }
}
