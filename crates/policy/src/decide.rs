//! [`Policy`]: from choices and weights to decisions.
//!
//! A weight is kept for the first [`Reason`] that there is. Where readers run layers as one (query,
//! key and value; gate and up) all of them are kept if one is, and those that are not share a
//! tensor scale.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::iter;

use burn_fp4_search::formats::Fp4Format;
use burn_fp4_search::{Fp4Scheme, Method, Sse, TensorScaling};

use crate::error::{PolicyError, RecipeError};
use crate::families::{families, keep_together};
use crate::pattern::Patterns;
use crate::preset::{Names, Preset};
use crate::reason::Reason;
use crate::recipe::{Recipe, RecipeWeights};
use crate::weight::{Constraints, Fused, WeightInfo};

/// A recipe with its schemes: all that a user has to say about the weights of a model.
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

    /// Makes the policy of schemes that a recipe has no words for: one for the weights that match
    /// no override, and one for each override, by a pattern. They take the place of the recipe's
    /// format, block size, method, rule and entries.
    #[must_use]
    pub fn with_schemes(
        recipe: Recipe,
        base: Fp4Scheme,
        overrides: impl IntoIterator<Item = (String, Fp4Scheme)>,
    ) -> Self {
        let entry = |(name, scheme)| {
            (RecipeWeights { names: vec![name], ..RecipeWeights::default() }, Some(scheme))
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

    /// Returns the schemes that weights may be quantized by: [`base`](Self::base), and those of the
    /// entries of [`Recipe::weights`] that are not dense.
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
    /// [`PolicyError::Scheme`].
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
            names: Names::of(self.preset())?,
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
        let sharing = match fused {
            Fused::Scale | Fused::Together if by.tensor_scales => {
                fused_layers(self.preset(), weights, &related, &reasons, &schemes)
            }
            Fused::Listed => listed(weights, &related, &reasons, &schemes)?,
            Fused::Apart | Fused::Scale | Fused::Together => HashMap::new(),
        };
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
    names: Names,
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
        let (cols, of) = (weight.cols, (self.by.columns)(scheme.format(), scheme.block_size));
        (!cols.is_multiple_of(of)).then_some(Reason::Columns { cols, of })
    }
}

/// The layout of a scheme's codes.
fn layout(scheme: &Option<Fp4Scheme>) -> Option<(Fp4Format, usize)> {
    scheme.map(|scheme| (scheme.format(), scheme.block_size))
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

/// Finds the weights of families that can share a tensor scale: by weight the number of its family.
fn fused_layers(
    preset: Preset,
    weights: &[WeightInfo<'_>],
    families: &[Vec<usize>],
    reasons: &[Option<Reason>],
    schemes: &[Option<Fp4Scheme>],
) -> HashMap<usize, usize> {
    let shares = |first: usize, at: usize| {
        let layout = [first, at].map(|at| layout(&schemes[at]));
        layout[0].is_some_and(|(format, _)| format.row().tensor_scale) && layout[0] == layout[1]
    };
    let mut sharing: HashMap<usize, usize> = HashMap::new();
    for (number, members) in families.iter().enumerate() {
        let first = members.iter().copied().find(|&at| reasons[at].is_none());
        for &at in members {
            // Layers with other columns have another input; the order of their rows is the file's.
            // Stacked matrices have a scale each, and stay alone.
            let like = first.is_some_and(|first| {
                let (a, b) = (&weights[first], &weights[at]);
                let single = |one: &WeightInfo<'_>| one.is_single() && !one.transposed;
                a.cols == b.cols && single(a) && single(b) && shares(first, at)
            });
            if like && preset.shares(weights[at].name) {
                sharing.insert(at, number);
            }
        }
    }
    sharing
}

/// Finds the weights that share a tensor scale because a user has listed them: by weight the number
/// of its family. Weights without tensor scales may differ; they share nothing then.
///
/// # Errors
/// [`PolicyError::SharedScale`] for other schemes, and for tensor scales that cannot be shared.
fn listed(
    weights: &[WeightInfo<'_>],
    families: &[Vec<usize>],
    reasons: &[Option<Reason>],
    schemes: &[Option<Fp4Scheme>],
) -> Result<HashMap<usize, usize>, PolicyError> {
    let mut sharing = HashMap::new();
    for (number, members) in families.iter().enumerate() {
        let chosen = members.iter().filter(|&&at| reasons[at].is_none());
        let chosen: Vec<(usize, Fp4Scheme)> =
            chosen.filter_map(|&at| Some((at, schemes[at]?))).collect();
        let [(_, first), _, ..] = chosen[..] else { continue };
        if chosen.iter().any(|(_, scheme)| scheme.format().row().tensor_scale) {
            for (at, scheme) in &chosen {
                let refuse = |reason| {
                    let weight = weights[*at].name.to_owned();
                    Err(PolicyError::SharedScale { weight, reason })
                };
                if scheme.tensor_scale != TensorScaling::Tensor {
                    return refuse("its scheme has one per row or a given one");
                }
                if scheme.method == Method::Sse(Sse::TensorScale) {
                    return refuse("its method, sse-tensor-scale, chooses one for every weight");
                }
                if *scheme != first {
                    return refuse("its scheme is not that of its siblings");
                }
            }
        } else if chosen.iter().any(|(_, scheme)| *scheme != first) {
            continue;
        }
        sharing.extend(chosen.into_iter().map(|(at, _)| (at, number)));
    }
    Ok(sharing)
}
