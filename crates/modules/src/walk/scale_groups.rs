//! Which weights share a tensor scale.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use burn_fp4_ops::search::{Method, Sse};
use burn_fp4_ops::{Fp4Scheme, TensorScaling};
use burn_fp4_policy::Family;

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::walk::parameters::Parameter;

/// The groups of weights that share a tensor scale.
pub(crate) struct ScaleGroups {
    /// The name of the group of each parameter that has one.
    pub(crate) of: BTreeMap<usize, String>,
    /// Lines about the weights whose siblings are not selected.
    pub(crate) lone: Vec<String>,
    /// Lines about the lists of a configuration that form no group, and about the paths in them
    /// that are no selected weights.
    pub(crate) unused: Vec<String>,
}

/// Returns the lines about lists. `used` has the numbers of the lists of siblings, and behind them
/// of paths, of which two are selected somewhere.
fn unused(config: &Fp4Config, used: &BTreeSet<usize>, selected: &HashSet<&str>) -> Vec<String> {
    let siblings = config.share_scale.iter().map(|names| ("share_scale", names, "siblings"));
    let paths = config.share_scale_of.iter().map(|paths| ("share_scale_of", paths, "weights"));
    let lists = siblings.chain(paths).enumerate();
    let line = |(list, (what, names, of)): (usize, (&str, &Vec<String>, &str))| {
        let subject = format!("{what} {{{}}}", names.join(","));
        let absent = names.iter().filter(|name| !selected.contains(name.as_str()));
        let absent: Vec<_> = absent.map(|name| format!("`{name}`")).collect();
        if list >= config.share_scale.len() && !absent.is_empty() {
            return Some(format!("{subject}: no selected weight is {}", absent.join(" or ")));
        }
        (!used.contains(&list)).then(|| format!("{subject}: no two selected {of}"))
    };
    lists.filter_map(line).collect()
}

/// The families of parameters by the lists of a configuration: siblings, and behind them paths.
struct Lists<'c> {
    siblings: &'c [Vec<String>],
    paths: HashMap<&'c str, usize>,
}

impl<'c> Lists<'c> {
    /// # Errors
    /// [`Fp4Error::SharedScale`] for a path that is in the lists twice.
    fn new(config: &'c Fp4Config) -> Result<Self, Fp4Error> {
        let mut paths = HashMap::new();
        for (of, list) in config.share_scale_of.iter().zip(config.share_scale.len()..) {
            for path in of {
                if paths.insert(path.as_str(), list).is_some() {
                    let reason = "`share_scale_of` has it twice; name it once";
                    return Err(Fp4Error::SharedScale { path: path.clone(), reason });
                }
            }
        }
        Ok(Self { siblings: &config.share_scale, paths })
    }

    /// The family of a parameter.
    fn family<'p>(&self, path: &'p str) -> Option<Family<'p>> {
        if let Some(&list) = self.paths.get(path) {
            return Some(Family { parent: "", list, parameter: "" });
        }
        let (module, parameter) = path.rsplit_once('.')?;
        Some(Family { parameter, ..Family::of(module, self.siblings)? })
    }
}

/// Divides the selected parameters, of which there are schemes, into groups.
///
/// # Errors
/// [`Fp4Error::SharedScale`] if members of a group have other schemes, or tensor scales that cannot
/// be shared, and for a path that `share_scale_of` has twice. Siblings without tensor scales may
/// differ: they share nothing then.
pub(crate) fn shared_scales(
    parameters: &[Parameter],
    schemes: &[Option<Fp4Scheme>],
    config: &Fp4Config,
) -> Result<ScaleGroups, Fp4Error> {
    let mut families: BTreeMap<Family<'_>, Vec<usize>> = BTreeMap::new();
    let lists = Lists::new(config)?;
    let mut selected = HashSet::new();
    for (at, parameter) in parameters.iter().enumerate().filter(|(at, _)| schemes[*at].is_some()) {
        selected.insert(parameter.path.as_str());
        if let Some(family) = lists.family(&parameter.path) {
            families.entry(family).or_default().push(at);
        }
    }
    let mut lone = Vec::new();
    let mut of = BTreeMap::new();
    let mut used = BTreeSet::new();
    for (Family { parent, list, parameter }, members) in families {
        let group = match config.share_scale.get(list) {
            Some(siblings) => format!("{parent}{{{}}}.{parameter}", siblings.join(",")),
            None => {
                let paths = &config.share_scale_of[list - config.share_scale.len()];
                format!("{{{}}}", paths.join(","))
            }
        };
        if let [at] = members[..] {
            let path = &parameters[at].path;
            lone.push(format!(
                "`{path}` has a tensor scale of its own: nothing else of {group} is selected"
            ));
            continue;
        }
        used.insert(list);
        let scaled = |&at: &usize| schemes[at].is_some_and(|one| one.format().row().tensor_scale);
        if members.iter().any(scaled) {
            check(parameters, &members, schemes)?;
        } else if members.iter().any(|&at| schemes[at] != schemes[members[0]]) {
            // They have nothing to share.
            continue;
        }
        of.extend(members.into_iter().map(|at| (at, group.clone())));
    }
    Ok(ScaleGroups { of, lone, unused: unused(config, &used, &selected) })
}

/// Checks that parameters can share a tensor scale.
fn check(
    parameters: &[Parameter],
    members: &[usize],
    schemes: &[Option<Fp4Scheme>],
) -> Result<(), Fp4Error> {
    let first = schemes[members[0]];
    for &at in members {
        let Some(scheme) = schemes[at] else { continue };
        let refuse =
            |reason| Err(Fp4Error::SharedScale { path: parameters[at].path.clone(), reason });
        if scheme.tensor_scale != TensorScaling::Tensor {
            return refuse("its scheme has one per row or a given one");
        }
        if scheme.method == Method::Sse(Sse::TensorScale) {
            return refuse("its method, sse-tensor-scale, chooses one for every weight");
        }
        if first != Some(scheme) {
            return refuse("its scheme is not that of its siblings");
        }
    }
    Ok(())
}
