//! The path patterns of a configuration.

use std::collections::BTreeSet;

use burn_fp4_ops::Fp4Scheme;
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::report::Reason;
use crate::walk::parameters::Parameter;

/// The patterns of a configuration.
pub(crate) struct Patterns {
    include: GlobSet,
    exclude: GlobSet,
    overrides: GlobSet,
}

impl Patterns {
    /// # Errors
    /// [`Fp4Error::Pattern`]; [`Fp4Error::Sensitivity`] for a budget, which is not a decision about
    /// each parameter yet.
    pub(crate) fn new(config: &Fp4Config) -> Result<Self, Fp4Error> {
        if config.budget.is_some() {
            return Err(Fp4Error::Sensitivity(
                "only `quantize_fp4` keeps a budget: choose formats by `fp4_sensitivity` before",
            ));
        }
        let overrides: Vec<_> = config.overrides.iter().map(|one| one.pattern.clone()).collect();
        Ok(Self {
            include: globs(&config.include)?,
            exclude: globs(&config.exclude)?,
            overrides: globs(&overrides)?,
        })
    }

    /// Returns true if a pattern of [`Fp4Config::include`] fits a path, or there are none.
    pub(crate) fn includes(&self, path: &str) -> bool {
        self.include.is_empty() || self.include.is_match(components(path))
    }

    /// The first pattern of [`Fp4Config::exclude`] that fits a path, by number.
    pub(crate) fn excluded_by(&self, path: &str) -> Option<usize> {
        self.exclude.matches(components(path)).first().copied()
    }

    /// Numbers of the overrides that fit a path.
    pub(crate) fn overrides_of(&self, path: &str) -> Vec<usize> {
        self.overrides.matches(components(path))
    }

    /// By what a parameter is quantized if it is selected.
    pub(crate) fn scheme(&self, path: &str, config: &Fp4Config) -> Fp4Scheme {
        let last = self.overrides_of(path).into_iter().max();
        last.map_or(config.scheme, |at| config.overrides[at].scheme)
    }

    /// Lines about the patterns that fit no parameter, and the overrides that fit no selected one.
    pub(crate) fn unused(
        &self,
        parameters: &[Parameter],
        reasons: &[Option<Reason>],
        config: &Fp4Config,
    ) -> Vec<String> {
        let all: Vec<_> = parameters.iter().map(|parameter| components(&parameter.path)).collect();
        let selected: Vec<_> = all
            .iter()
            .zip(reasons)
            .filter(|(_, reason)| reason.is_none())
            .map(|(path, _)| path.clone())
            .collect();
        let overrides: Vec<_> = config.overrides.iter().map(|one| &one.pattern).collect();
        let include: Vec<_> = config.include.iter().collect();
        let exclude: Vec<_> = config.exclude.iter().collect();
        let mut lines = Vec::new();
        for (what, fits, set, patterns, paths) in [
            ("include", "no parameter", &self.include, include, &all),
            ("exclude", "no parameter", &self.exclude, exclude, &all),
            ("with", "no selected weight", &self.overrides, overrides, &selected),
        ] {
            let used: BTreeSet<usize> = paths.iter().flat_map(|path| set.matches(path)).collect();
            for (at, pattern) in patterns.into_iter().enumerate() {
                if !used.contains(&at) {
                    lines.push(format!("{what} `{pattern}` fits {fits}"));
                }
            }
        }
        lines
    }
}

/// Paths match component by component, so dots are to a pattern what slashes are to a glob.
fn components(path: &str) -> String {
    path.replace('.', "/")
}

fn globs(patterns: &[String]) -> Result<GlobSet, Fp4Error> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        let glob = GlobBuilder::new(&components(pattern)).literal_separator(true).build();
        let error = |problem| Fp4Error::Pattern { pattern: pattern.clone(), problem };
        set.add(glob.map_err(error)?);
    }
    set.build().map_err(|problem| Fp4Error::Pattern { pattern: patterns.join(", "), problem })
}

/// Lines about the containers that were added and that no parameter lies in.
pub(crate) fn unused_containers(parameters: &[Parameter], config: &Fp4Config) -> Vec<String> {
    let known: BTreeSet<_> = parameters.iter().map(|one| one.container.as_str()).collect();
    let added = config.containers.iter().map(|container| container.name.as_str());
    let default = |name: &str| Fp4Config::CONTAINERS.iter().any(|(known, _)| *known == name);
    let added = added.filter(|name| !default(name) && !known.contains(name));
    added.map(|name| format!("container `{name}` holds no parameter")).collect()
}
