//! [`Policy`]: from choices and weights to decisions.
//!
//! A weight is kept for the first [`Reason`] that there is. Where readers run layers as one (query,
//! key and value; gate and up) all of them are kept if one is, and those that are not share a
//! tensor scale. Such layers are a family: [`families`].

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::iter;

use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::{Fp4Scheme, Hadamard, Method, Sse, TensorScaling};

use crate::error::{PolicyError, RecipeError};
use crate::pattern::Patterns;
use crate::preset::{Preset, PresetNames};
use crate::reason::Reason;
use crate::recipe::{Recipe, RecipeWeights};
use crate::weight::{Constraints, Fused, WeightInfo};

/// A recipe with its schemes: all that a user has to say about the weights of a model.
///
/// ```
/// use burn_fp4_policy::search::Fp4Scheme;
/// use burn_fp4_policy::{Policy, Preset, Recipe, WeightInfo};
///
/// let down = ("*.down_proj".to_owned(), Some(Fp4Scheme::mxfp4()));
/// let policy = Policy::with_schemes(Recipe::default(), Fp4Scheme::nvfp4(), [down]);
/// assert_eq!((policy.preset(), policy.schemes().count()), (Preset::AllLinear, 2));
/// let weight = WeightInfo { name: "layers.0.down_proj", ..WeightInfo::default() };
/// policy.check_used(&[weight])?;
/// assert!(policy.check_used(&[]).is_err(), "`*.down_proj` matches no weight");
/// # Ok::<(), burn_fp4_policy::PolicyError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Policy {
    recipe: Recipe,
    base: Fp4Scheme,
    /// One for every entry of the recipe; `None` for dense weights.
    schemes: Vec<Option<Fp4Scheme>>,
}

/// The fate of a weight.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    /// It is kept.
    Keep(Reason),
    /// It is quantized.
    Quantize {
        /// Format, blocks, rule and method.
        scheme: Fp4Scheme,
        /// Number of the group whose tensor scale it shares.
        group: usize,
    },
}

/// The decision about every weight of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Decisions {
    /// One for each weight.
    pub weights: Vec<Decision>,
    /// The weights that are quantized with one tensor scale, in the order of the model. Most are
    /// alone.
    pub groups: Vec<Vec<usize>>,
    /// Entries of [`Recipe::weights`] with a scheme by which no weight is quantized.
    pub idle: Vec<usize>,
}

impl Policy {
    /// Makes the policy of a recipe.
    ///
    /// # Errors
    /// [`RecipeError`] for choices that do not go together.
    pub fn new(recipe: Recipe) -> Result<Self, RecipeError> {
        let (base, schemes) = (recipe.base()?, recipe.schemes()?);
        Ok(Self { recipe, base, schemes })
    }

    /// Makes the policy of schemes that a recipe may have no words for: one for the weights that
    /// match no override, and one for each override, by a pattern; `None` keeps weights dense. They
    /// take the place of the recipe's format, block size, method, rule and entries.
    #[must_use]
    pub fn with_schemes(
        recipe: Recipe,
        base: Fp4Scheme,
        overrides: impl IntoIterator<Item = (String, Option<Fp4Scheme>)>,
    ) -> Self {
        let entry = |(name, scheme)| {
            (RecipeWeights { names: vec![name], ..RecipeWeights::default() }, scheme)
        };
        let (weights, schemes) = overrides.into_iter().map(entry).unzip();
        Self { recipe: Recipe { weights, ..recipe }, base, schemes }
    }

    /// Returns the choices. Formats, block sizes, rules and methods are in the schemes.
    #[must_use]
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Returns the preset of the recipe, or the default.
    #[must_use]
    pub fn preset(&self) -> Preset {
        self.recipe.preset.unwrap_or_default()
    }

    /// Returns the scheme of weights that match no entry of [`Recipe::weights`].
    pub fn base(&self) -> Fp4Scheme {
        self.base
    }

    /// Returns the schemes that weights may be quantized by: [`base`](Self::base), and the schemes
    /// of the entries of [`Recipe::weights`] that are not dense.
    pub fn schemes(&self) -> impl Iterator<Item = &Fp4Scheme> {
        iter::once(&self.base).chain(self.schemes.iter().flatten())
    }

    /// Checks that every pattern matches a weight: one that matches nothing is a mistake.
    ///
    /// # Errors
    /// [`PolicyError::NoMatch`], [`PolicyError::Malformed`] and [`PolicyError::Pattern`].
    pub fn check_used(&self, weights: &[WeightInfo<'_>]) -> Result<(), PolicyError> {
        let names = || weights.iter().map(WeightInfo::names);
        Patterns::new(&self.recipe.keep)?.check_used("`keep`", names())?;
        Patterns::new(&self.recipe.only)?.check_used("`only`", names())?;
        let entries = self.recipe.weights.iter().flat_map(|entry| &entry.names);
        Patterns::new(entries)?.check_used("`weights`", names())
    }

    /// Decides about every weight.
    ///
    /// ```
    /// use burn_fp4_policy::{Constraints, Decision, Fused, Policy, Reason, Recipe, WeightInfo};
    ///
    /// let recipe = Recipe { keep: vec!["*.o_proj".to_owned()], ..Recipe::default() };
    /// let weights = ["layers.0.up_proj", "layers.0.o_proj"].map(|module| WeightInfo {
    ///     name: module,
    ///     shape: &[32, 64],
    ///     cols: 64,
    ///     ..WeightInfo::default()
    /// });
    /// let by = Constraints {
    ///     dialect: "modelopt",
    ///     columns: &|_, block_size| block_size,
    ///     fused: Fused::Together,
    ///     turns: false,
    ///     tensor_scales: true,
    /// };
    /// let policy = Policy::new(recipe).expect("a recipe");
    /// let decided = policy.decide(&weights, &by)?;
    /// assert_eq!(decided.weights[0], Decision::Quantize { scheme: policy.base(), group: 0 });
    /// assert_eq!(decided.weights[1], Decision::Keep(Reason::Asked("*.o_proj".to_owned())));
    /// # Ok::<(), burn_fp4_policy::PolicyError>(())
    /// ```
    ///
    /// # Errors
    /// [`PolicyError::Malformed`] and [`PolicyError::Pattern`]; [`PolicyError::OtherFormat`] and
    /// [`PolicyError::OtherScheme`] for layers that are fused and would be quantized differently;
    /// [`PolicyError::SharedScale`] for those that are [listed](Fused::Listed);
    /// [`PolicyError::NoTensorScale`]; [`PolicyError::Scheme`].
    pub fn decide(
        &self,
        weights: &[WeightInfo<'_>],
        by: &Constraints<'_>,
    ) -> Result<Decisions, PolicyError> {
        let entries = Entries::new(&self.recipe)?;
        let found: Vec<_> = weights.iter().map(|weight| entries.last(weight)).collect();
        let judge = Judge {
            policy: self,
            by,
            entries: &entries,
            names: PresetNames::of(self.preset())?,
            keep: Patterns::new(&self.recipe.keep)?,
            only: Patterns::new(&self.recipe.only)?,
        };
        let keeps = |(weight, entry): (_, &Option<_>)| judge.keeps(weight, *entry);
        let mut reasons: Vec<Option<Reason>> = weights.iter().zip(&found).map(keeps).collect();
        let fused = match (self.recipe.together, by.fused) {
            (Some(true), _) => Fused::Together,
            (Some(false), _) => Fused::Apart,
            // The converter of miles decides about each of a pair alone.
            (None, Fused::Together) if self.preset() == Preset::Miles => Fused::Scale,
            (None, fused) => fused,
        };
        let schemes: Vec<_> = found.iter().map(|entry| self.scheme(entry.map(|e| e.0))).collect();
        // A wrong block size is no matter of the columns.
        for pair in reasons.iter().zip(&schemes) {
            if let (None | Some(Reason::Columns { .. }), Some(scheme)) = pair {
                scheme.validate()?;
            }
        }
        let related = families(weights.iter().map(|weight| weight.family));
        if fused == Fused::Together {
            keep_together(|at| weights[at].name, &related, &mut reasons);
            if let Some(other) = of_another_format(&related, &reasons, &schemes) {
                let (dialect, weight) = (by.dialect, weights[other].name.to_owned());
                return Err(PolicyError::OtherFormat { dialect, weight });
            }
        }
        let mut sharing: HashMap<usize, usize> = HashMap::new();
        for (family, members) in related.iter().enumerate() {
            let quantized = members.iter().copied().filter(|&at| reasons[at].is_none()).collect();
            let sharers = match fused {
                Fused::Scale | Fused::Together if by.tensor_scales => {
                    fused_layers(self.preset(), weights, quantized, &schemes)
                }
                Fused::Listed => listed(weights, quantized, &schemes)?,
                Fused::Apart | Fused::Scale | Fused::Together => Vec::new(),
            };
            sharing.extend(sharers.into_iter().map(|at| (at, family)));
        }
        let group = |at: usize| reasons[at].is_none().then(|| sharing.get(&at).ok_or(at));
        let groups = families((0..reasons.len()).map(group));
        for members in &groups {
            let (first, scheme) = (members[0], schemes[members[0]]);
            if let Some(&other) = members.iter().find(|&&at| schemes[at] != scheme) {
                let [first, other] = [first, other].map(|at| {
                    let described = schemes[at]
                        .map(|Fp4Scheme { method, rule, .. }| format!(" ({method}, rule {rule})"));
                    format!("`{}`{}", weights[at].name, described.unwrap_or_default())
                });
                return Err(PolicyError::OtherScheme { first, other });
            }
        }
        let mut decisions: Vec<_> =
            reasons.into_iter().map(|reason| reason.map(Decision::Keep)).collect();
        for (group, members) in groups.iter().enumerate() {
            for &at in members {
                let Some(scheme) = schemes[at] else { continue };
                let scheme = match by.tensor_scales {
                    true => scheme,
                    false if scheme.method == Method::Sse(Sse::TensorScale) => {
                        let (dialect, method) = (by.dialect, scheme.method);
                        let weight = weights[at].name.to_owned();
                        return Err(PolicyError::NoTensorScale { dialect, weight, method });
                    }
                    false => scheme.without_tensor_scale(),
                };
                scheme.validate()?;
                decisions[at] = Some(Decision::Quantize { scheme, group });
            }
        }
        let used = groups.iter().flatten().filter_map(|&at| Some(found[at]?.0));
        let used: BTreeSet<usize> = used.collect();
        let idle = |at: &usize| self.schemes[*at].is_some() && !used.contains(at);
        let idle = (0..self.schemes.len()).filter(idle).collect();
        let weights = decisions.into_iter().map(|one| one.expect("kept, or in a group")).collect();
        Ok(Decisions { weights, groups, idle })
    }

    /// The scheme of weights that an entry is about; none if they stay dense.
    fn scheme(&self, entry: Option<usize>) -> Option<Fp4Scheme> {
        entry.map_or(Some(self.base), |at| self.schemes[at])
    }
}

/// Finds the families: members with equal keys, by their numbers, in the order of the first ones. A
/// member without a key is in none, and one with a key of its own is alone.
///
/// Names are the keys of files and of lists that a user has written
/// ([`Family`](crate::Family)); statistics of inputs, by their identity, belong to layers that were
/// seen to run.
///
/// ```
/// use burn_fp4_policy::{Family, Reason, families, keep_together};
///
/// let (names, lists) = (["mlp.gate", "mlp.up", "mlp.down"], [["gate", "up"]]);
/// let found = families(names.iter().map(|name| Family::of(name, &lists)));
/// assert_eq!(found, [[0, 1]]);
/// let mut reasons = [None, Some(Reason::NotAsked), None];
/// keep_together(|at| names[at], &found, &mut reasons);
/// assert_eq!(reasons[0], Some(Reason::With("mlp.up".to_owned())));
/// assert_eq!(reasons[2], None);
/// ```
#[must_use]
pub fn families<K: Eq + Hash>(keys: impl Iterator<Item = Option<K>>) -> Vec<Vec<usize>> {
    let mut numbers: HashMap<K, usize> = HashMap::new();
    let mut families: Vec<Vec<usize>> = Vec::new();
    for (at, key) in keys.enumerate() {
        let Some(key) = key else { continue };
        let number = *numbers.entry(key).or_insert(families.len());
        match families.get_mut(number) {
            Some(members) => members.push(at),
            None => families.push(vec![at]),
        }
    }
    families
}

/// Keeps all of a family if one is kept.
pub fn keep_together<'n>(
    name: impl Fn(usize) -> &'n str,
    families: &[Vec<usize>],
    reasons: &mut [Option<Reason>],
) {
    for members in families {
        let Some(&kept) = members.iter().find(|&&at| reasons[at].is_some()) else { continue };
        for &at in members {
            reasons[at].get_or_insert_with(|| Reason::With(name(kept).to_owned()));
        }
    }
}

/// The entries of a recipe for some of the weights, ready to be matched.
struct Entries<'r> {
    names: Patterns<'r>,
    /// Number of the entry that has the name.
    of: Vec<usize>,
}

impl<'r> Entries<'r> {
    fn new(recipe: &'r Recipe) -> Result<Self, PolicyError> {
        let names = recipe.weights.iter().flat_map(|entry| &entry.names);
        let of = recipe.weights.iter().enumerate();
        let of = of.flat_map(|(at, entry)| entry.names.iter().map(move |_| at)).collect();
        Ok(Self { names: Patterns::new(names)?, of })
    }

    /// Finds the last entry about a weight, and the first of its names that is.
    fn last(&self, weight: &WeightInfo<'_>) -> Option<(usize, usize)> {
        let matches = self.names.matches(weight.names()).map(|name| (self.of[name], name));
        matches.max_by_key(|&(at, name)| (at, Reverse(name)))
    }
}

/// The facts by which a weight is judged by itself.
struct Judge<'j> {
    policy: &'j Policy,
    by: &'j Constraints<'j>,
    entries: &'j Entries<'j>,
    names: PresetNames,
    keep: Patterns<'j>,
    only: Patterns<'j>,
}

impl Judge<'_> {
    /// Finds a reason to keep a weight. `entry` is the one that is about it, with the place of the
    /// name that is.
    fn keeps(&self, weight: &WeightInfo<'_>, entry: Option<(usize, usize)>) -> Option<Reason> {
        let recipe = &self.policy.recipe;
        if let Some(reason) = &weight.unfit {
            return Some(reason.clone());
        }
        if let Some(pattern) = self.keep.first(weight.names()) {
            return Some(Reason::Asked(pattern.to_owned()));
        }
        if let Some((layer, count)) = weight.layer
            && recipe.dense_layers(count).iter().any(|layers| layers.contains(&layer))
        {
            return Some(Reason::Layer(layer));
        }
        if self.only.is_empty() {
            if let Some(reason) = self.names.keeps(weight) {
                return Some(reason);
            }
            // Dialects with stacked matrices store them in either order of axes.
            if weight.transposed && weight.shape.len() == 2 && !self.by.turns {
                return Some(Reason::Transposed(self.by.dialect));
            }
        } else if self.only.first(weight.names()).is_none() {
            return Some(Reason::NotAsked);
        }
        let Some(scheme) = self.policy.scheme(entry.map(|(at, _)| at)) else {
            let name = entry.map_or("", |(_, name)| self.entries.names.text(name));
            return Some(Reason::Asked(name.to_owned()));
        };
        let of = (self.by.columns)(scheme.format(), scheme.block_size);
        // Both are powers of two.
        let (cols, of) = (weight.cols, of.max(scheme.columns_multiple()));
        (!cols.is_multiple_of(of)).then_some(Reason::Columns { cols, of })
    }
}

/// The layout of a scheme's codes.
fn layout(scheme: &Option<Fp4Scheme>) -> Option<(Fp4Format, usize, Option<Hadamard>)> {
    scheme.map(|scheme| (scheme.format(), scheme.block_size, scheme.hadamard))
}

/// Finds a quantized weight whose format differs from its family's.
fn of_another_format(
    families: &[Vec<usize>],
    reasons: &[Option<Reason>],
    schemes: &[Option<Fp4Scheme>],
) -> Option<usize> {
    families.iter().find_map(|members| {
        let mut chosen = members.iter().copied().filter(|&at| reasons[at].is_none());
        let first = layout(&schemes[chosen.next()?]);
        chosen.find(|&at| layout(&schemes[at]) != first)
    })
}

/// Finds the quantized layers of a family that share a tensor scale.
fn fused_layers(
    preset: Preset,
    weights: &[WeightInfo<'_>],
    mut quantized: Vec<usize>,
    schemes: &[Option<Fp4Scheme>],
) -> Vec<usize> {
    let Some(&first) = quantized.first() else { return Vec::new() };
    let scaled = layout(&schemes[first]).is_some_and(|(format, ..)| format.row().tensor_scale);
    // Layers with other columns have another input; the order of their rows is the file's. Stacked
    // matrices have a scale each, and stay alone.
    let single = |at: usize| weights[at].is_single() && !weights[at].transposed;
    quantized.retain(|&at| {
        let like = weights[at].cols == weights[first].cols
            && layout(&schemes[at]) == layout(&schemes[first]);
        scaled && like && single(first) && single(at) && preset.shares(weights[at].name)
    });
    quantized
}

/// Finds the quantized weights of a list of a user that share a tensor scale. Weights without
/// tensor scales may differ; they share nothing then.
///
/// # Errors
/// [`PolicyError::SharedScale`] for other schemes, and for tensor scales that cannot be shared.
fn listed(
    weights: &[WeightInfo<'_>],
    quantized: Vec<usize>,
    schemes: &[Option<Fp4Scheme>],
) -> Result<Vec<usize>, PolicyError> {
    let [first, _, ..] = quantized[..] else { return Ok(Vec::new()) };
    let chosen = || quantized.iter().filter_map(|&at| Some((at, schemes[at]?)));
    if !chosen().any(|(_, scheme)| scheme.format().row().tensor_scale) {
        let alike = quantized.iter().all(|&at| schemes[at] == schemes[first]);
        return Ok(if alike { quantized } else { Vec::new() });
    }
    for (at, scheme) in chosen() {
        let reason = if scheme.tensor_scale != TensorScaling::Tensor {
            "its scheme has one per row or a given one"
        } else if scheme.method == Method::Sse(Sse::TensorScale) {
            "its method, sse-tensor-scale, chooses one for every weight"
        } else if Some(scheme) != schemes[first] {
            "its scheme is not that of its siblings"
        } else {
            continue;
        };
        return Err(PolicyError::SharedScale { weight: weights[at].name.to_owned(), reason });
    }
    Ok(quantized)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weight::Family;

    #[test]
    fn families_are_in_the_order_of_their_first_members() {
        let keys = [Some(7), None, Some(3), Some(7), Some(3), Some(5)];
        assert_eq!(families(keys.into_iter()), [vec![0, 3], vec![2, 4], vec![5]]);
    }

    /// Decides about weights that a user has listed, the last of which is of another list.
    fn listed(schemes: [Fp4Scheme; 3]) -> Result<Decisions, PolicyError> {
        let names = ["a.x", "a.y", "b.x"];
        let overrides =
            names.iter().zip(schemes).map(|(name, scheme)| ((*name).to_owned(), Some(scheme)));
        let policy = Policy::with_schemes(Recipe::default(), Fp4Scheme::nvfp4(), overrides);
        let weights = names.map(|name| {
            let list = usize::from(name == "b.x");
            let family = Some(Family { parent: "", list, parameter: "" });
            WeightInfo { name, module: name, family, cols: 64, ..WeightInfo::default() }
        });
        let by = Constraints {
            dialect: "",
            columns: &|_, block_size| block_size,
            fused: Fused::Listed,
            turns: true,
            tensor_scales: true,
        };
        policy.decide(&weights, &by)
    }

    #[test]
    fn listed_weights_share_a_scale_or_are_refused() {
        let [nvfp4, mxfp4] = [Fp4Scheme::nvfp4(), Fp4Scheme::mxfp4()];
        let groups = |schemes| listed(schemes).expect("they can share").groups;
        // Whatever the shapes are: these have none.
        assert_eq!(groups([nvfp4, nvfp4, mxfp4]), [vec![0, 1], vec![2]]);
        // Without tensor scales there is nothing to share where schemes differ.
        assert_eq!(groups([mxfp4, mxfp4, nvfp4]), [vec![0, 1], vec![2]]);
        let small = mxfp4.with_block_size(16);
        assert_eq!(groups([mxfp4, small, nvfp4]), [vec![0], vec![1], vec![2]]);
        let by_row = nvfp4.with_tensor_scale(TensorScaling::Row);
        // One of a list alone is not asked.
        assert_eq!(groups([nvfp4, nvfp4, by_row]), [vec![0, 1], vec![2]]);
        let search = nvfp4.with_method(Method::Sse(Sse::TensorScale));
        for (schemes, weight, says) in [
            ([nvfp4, mxfp4, nvfp4], "a.y", "its scheme is not that of its siblings"),
            ([mxfp4, nvfp4, nvfp4], "a.y", "its scheme is not that of its siblings"),
            ([by_row, nvfp4, nvfp4], "a.x", "its scheme has one per row or a given one"),
            ([nvfp4, search, nvfp4], "a.y", "its method, sse-tensor-scale, chooses one"),
        ] {
            let error = listed(schemes).expect_err("they cannot share").to_string();
            let says = format!("`{weight}` shares its tensor scale, but {says}");
            assert!(error.starts_with(&says), "{error}");
        }
    }
}
