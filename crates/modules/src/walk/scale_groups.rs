//! Which weights share a tensor scale.

use std::collections::{BTreeMap, BTreeSet, HashMap};

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
    /// Numbers of the lists of siblings, and behind them of paths, of which two are selected
    /// somewhere.
    used: BTreeSet<usize>,
}

impl ScaleGroups {
    /// Lines about the lists of a configuration that form no group.
    pub(crate) fn unused(&self, config: &Fp4Config) -> Vec<String> {
        let siblings = config.share_scale.iter().map(|names| ("share_scale", names, "siblings"));
        let paths = config.share_scale_of.iter().map(|paths| ("share_scale_of", paths, "weights"));
        let lists = siblings.chain(paths).enumerate();
        let unused = lists.filter(|(list, _)| !self.used.contains(list));
        let line = |(_, (what, names, of)): (_, (&str, &Vec<String>, &str))| {
            format!("{what} {{{}}}: no two selected {of}", names.join(","))
        };
        unused.map(line).collect()
    }
}

/// The families of parameters by the lists of a configuration: siblings, and behind them paths.
struct Lists<'c> {
    siblings: &'c [Vec<String>],
    paths: HashMap<&'c str, usize>,
}

impl<'c> Lists<'c> {
    fn new(config: &'c Fp4Config) -> Self {
        let lists = config.share_scale_of.iter().zip(config.share_scale.len()..);
        let paths = lists.flat_map(|(paths, list)| paths.iter().map(move |path| (&**path, list)));
        Self { siblings: &config.share_scale, paths: paths.collect() }
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
/// be shared. Siblings without tensor scales may differ: they share nothing then.
pub(crate) fn shared_scales(
    parameters: &[Parameter],
    schemes: &[Option<Fp4Scheme>],
    config: &Fp4Config,
) -> Result<ScaleGroups, Fp4Error> {
    let mut families: BTreeMap<Family<'_>, Vec<usize>> = BTreeMap::new();
    let lists = Lists::new(config);
    for (at, parameter) in parameters.iter().enumerate().filter(|(at, _)| schemes[*at].is_some()) {
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
    Ok(ScaleGroups { of, lone, used })
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
