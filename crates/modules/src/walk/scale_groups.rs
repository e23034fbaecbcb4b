//! Which weights share a tensor scale.

use std::collections::BTreeMap;

use burn_fp4_ops::search::{Method, Sse};
use burn_fp4_ops::{Fp4Scheme, TensorScaling};

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::report::Reason;
use crate::walk::parameters::Parameter;

/// The groups of weights that share a tensor scale.
pub(crate) struct ScaleGroups {
    /// By parameter the name of its group.
    pub(crate) of: BTreeMap<usize, String>,
    /// Lines about the weights whose siblings are not selected.
    pub(crate) lone: Vec<String>,
}

impl ScaleGroups {
    /// Lines about the siblings of a configuration that form no group.
    pub(crate) fn unused(&self, config: &Fp4Config) -> Vec<String> {
        let mut lines = Vec::new();
        for group in &config.share_scale {
            let siblings = group.join(",");
            if !self.of.values().any(|name| name.contains(&format!("{{{siblings}}}"))) {
                lines.push(format!("share_scale {{{siblings}}}: no two selected siblings"));
            }
        }
        lines
    }
}

/// Divides the selected parameters, those without a reason to be kept, into groups.
///
/// # Errors
/// [`Fp4Error::SharedScale`] if members of a group have other schemes, or tensor scales that cannot
/// be shared.
pub(crate) fn shared_scales(
    parameters: &[Parameter],
    reasons: &[Option<Reason>],
    schemes: &[Fp4Scheme],
    config: &Fp4Config,
) -> Result<ScaleGroups, Fp4Error> {
    let mut members: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (at, parameter) in parameters.iter().enumerate() {
        if reasons[at].is_some() {
            continue;
        }
        let components: Vec<_> = parameter.path.split('.').collect();
        let [parents @ .., sibling, name] = components.as_slice() else { continue };
        let group = config.share_scale.iter().find(|group| group.iter().any(|one| one == sibling));
        if let Some(group) = group {
            let parent = parents.join(".");
            let group = format!("{parent}.{{{}}}.{name}", group.join(","));
            members.entry(group.trim_start_matches('.').to_owned()).or_default().push(at);
        }
    }
    let mut lone = Vec::new();
    members.retain(|group, members| {
        if let [at] = members[..] {
            let path = &parameters[at].path;
            lone.push(format!(
                "`{path}` has a tensor scale of its own: nothing else of {group} is selected"
            ));
        }
        members.len() > 1
    });
    for members in members.values() {
        for &at in members {
            let refuse =
                |reason| Err(Fp4Error::SharedScale { path: parameters[at].path.clone(), reason });
            if schemes[at].tensor_scale != TensorScaling::Tensor {
                return refuse("its scheme has one per row or a given one");
            }
            if schemes[at].method == Method::Sse(Sse::TensorScale) {
                return refuse("its method, sse-tensor-scale, chooses one for every weight");
            }
            if schemes[at] != schemes[members[0]] {
                return refuse("its scheme is not that of its siblings");
            }
        }
    }
    let of = members
        .into_iter()
        .flat_map(|(group, at)| at.into_iter().map(move |at| (at, group.clone())))
        .collect();
    Ok(ScaleGroups { of, lone })
}
