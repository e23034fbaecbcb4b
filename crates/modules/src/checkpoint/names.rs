//! The names by which parameters and tensors find each other.

use regex::Regex;

use crate::error::Fp4Error;

use super::map::{CheckpointMap, Experts};
use super::mismatch::Mismatch;

/// The renames of a map, compiled, and what else it says of names.
pub(crate) struct Names<'m> {
    map: &'m CheckpointMap,
    renames: Vec<(Regex, &'m str)>,
    renames_back: Vec<(Regex, &'m str)>,
}

/// The tensors of a parameter, by their names after renaming.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The first of these that there is.
    One(Vec<String>),
    /// One for each matrix of the parameter: what stands before and behind its number.
    Each(String, String),
    /// A matrix of a stacked one.
    Matrix(String, usize),
}

impl Wanted {
    /// The tensor of a matrix.
    pub(crate) fn numbered(before: &str, behind: &str, index: usize) -> String {
        format!("{before}{index}{behind}")
    }
}

/// Containers whose parameters have other names in files, as `burn-store` knows them.
const NORMALIZATIONS: [&str; 4] = ["BatchNorm", "LayerNorm", "GroupNorm", "RmsNorm"];

/// Placeholder for the number of an expert.
const NUMBER: &str = "{}";

impl<'m> Names<'m> {
    /// # Errors
    /// [`Fp4Error::Rename`] for a pattern that is no regular expression, [`Fp4Error::Group`] for a
    /// replacement by a group that there is not, [`Fp4Error::Experts`] for a pair of names of which
    /// not exactly one has a number.
    pub(crate) fn new(map: &'m CheckpointMap) -> Result<Self, Fp4Error> {
        for Experts { parameter, tensor } in &map.experts {
            let numbers = |name: &str| name.matches(NUMBER).count();
            if numbers(parameter) + numbers(tensor) != 1 {
                let (parameter, tensor) = (parameter.clone(), tensor.clone());
                return Err(Fp4Error::Experts { parameter, tensor });
            }
        }
        let compile = |renames: &'m [(String, String)]| {
            let one = |(pattern, replacement): &'m (String, String)| {
                let regex = Regex::new(pattern);
                let regex = regex.map_err(|problem| {
                    let (pattern, problem) = (pattern.clone(), problem.into());
                    Fp4Error::Rename { pattern, problem }
                })?;
                if let Some(group) = unknown_group(&regex, replacement) {
                    let (pattern, replacement) = (pattern.clone(), replacement.clone());
                    return Err(Fp4Error::Group { pattern, replacement, group });
                }
                Ok((regex, replacement.as_str()))
            };
            renames.iter().map(one).collect::<Result<Vec<_>, Fp4Error>>()
        };
        let (renames, renames_back) = (compile(&map.renames)?, compile(&map.renames_back)?);
        Ok(Self { map, renames, renames_back })
    }

    /// The name of a tensor as paths of the module are.
    pub(crate) fn in_module(&self, tensor: &str) -> String {
        replaced(&self.renames, tensor)
    }

    /// The name in a file.
    pub(crate) fn in_file(&self, name: &str) -> String {
        replaced(&self.renames_back, name)
    }

    /// The name in a file of a parameter's tensor.
    ///
    /// # Errors
    /// [`Mismatch::RenamedBack`] for a name that is not loaded into the parameter.
    pub(crate) fn saved(&self, name: &str, parameter: &str) -> Result<String, Mismatch> {
        let tensor = self.in_file(name);
        let loaded = self.in_module(&tensor);
        if loaded == name {
            return Ok(tensor);
        }
        Err(Mismatch::RenamedBack { parameter: parameter.to_owned(), tensor, loaded })
    }

    /// The tensors of a parameter.
    pub(crate) fn wanted(&self, path: &str, container: &str) -> Wanted {
        let experts = self.map.experts.iter().find_map(|experts| wanted_by(experts, path));
        experts.unwrap_or_else(|| {
            let other = name_in_files(path, container);
            Wanted::One([path.to_owned()].into_iter().chain(other).collect())
        })
    }

    /// The path of the parameter that a parameter is tied to.
    pub(crate) fn tied_to(&self, path: &str) -> Option<&'m str> {
        let tie = self.map.ties.iter().find(|(parameter, _)| parameter == path);
        tie.map(|(_, with)| with.as_str())
    }

    /// The renames that match none of the names of a file.
    pub(crate) fn idle_renames<'n>(&self, tensors: impl Iterator<Item = &'n str>) -> Vec<Mismatch> {
        idle(&self.renames, "rename", "tensor", tensors)
    }

    /// The renames back that match none of the names of a module.
    pub(crate) fn idle_renames_back<'n>(
        &self,
        names: impl Iterator<Item = &'n str>,
    ) -> Vec<Mismatch> {
        idle(&self.renames_back, "rename_back", "parameter", names)
    }

    /// Returns the rules of the map for paths and containers that match no parameter.
    pub(crate) fn idle_rules(&self, parameters: &[(&str, &str)]) -> Vec<Mismatch> {
        let mut idle = Vec::new();
        for (parameter, with) in &self.map.ties {
            let has = |name: &&String| parameters.iter().any(|(path, _)| path == name);
            if let Some(absent) = [parameter, with].into_iter().find(|name| !has(name)) {
                let rule = format!("tie({parameter:?}, {with:?})");
                idle.push(Mismatch::Rule { rule, what: format!("parameter `{absent}`") });
            }
        }
        for experts in &self.map.experts {
            if !parameters.iter().any(|(path, _)| wanted_by(experts, path).is_some()) {
                let Experts { parameter, tensor } = experts;
                let rule = format!("experts({parameter:?}, {tensor:?})");
                idle.push(Mismatch::Rule { rule, what: "parameter".to_owned() });
            }
        }
        for container in self.map.containers.iter().filter(|container| container.named) {
            let name = &container.name;
            if !parameters.iter().any(|(_, container)| container == name) {
                let rule = format!("container({name:?}, {}, ..)", container.axis);
                idle.push(Mismatch::Rule { rule, what: "parameter".to_owned() });
            }
        }
        idle
    }
}

/// The renames that match no name, where each applies to what those before it made.
fn idle<'n>(
    renames: &[(Regex, &str)],
    call: &str,
    what: &str,
    names: impl Iterator<Item = &'n str>,
) -> Vec<Mismatch> {
    let mut matched = vec![false; renames.len()];
    for name in names {
        let mut name = name.to_owned();
        for ((regex, replacement), matched) in renames.iter().zip(&mut matched) {
            *matched |= regex.is_match(&name);
            name = regex.replace_all(&name, *replacement).into_owned();
        }
    }
    let unmatched = renames.iter().zip(matched).filter(|(_, matched)| !matched);
    unmatched
        .map(|((regex, replacement), _)| Mismatch::Rule {
            rule: format!("{call}({:?}, {replacement:?})", regex.as_str()),
            what: what.to_owned(),
        })
        .collect()
}

/// The first group of a replacement that the expression does not have, as `regex` reads it.
fn unknown_group(regex: &Regex, replacement: &str) -> Option<String> {
    let mut rest = replacement;
    while let Some(at) = rest.find('$') {
        rest = &rest[at + 1..];
        if let Some(behind) = rest.strip_prefix('$') {
            rest = behind;
            continue;
        }
        let braced = rest.strip_prefix('{').and_then(|inner| inner.split_once('}'));
        let end = rest.find(|char: char| !char.is_ascii_alphanumeric() && char != '_');
        let (group, behind) = braced.unwrap_or(rest.split_at(end.unwrap_or(rest.len())));
        rest = behind;
        let known = match group.parse::<usize>() {
            Ok(number) => number < regex.captures_len(),
            // A dollar that nothing follows is one.
            Err(_) if group.is_empty() => braced.is_none(),
            Err(_) => regex.capture_names().flatten().any(|name| name == group),
        };
        if !known {
            return Some(group.to_owned());
        }
    }
    None
}

fn replaced(renames: &[(Regex, &str)], name: &str) -> String {
    renames.iter().fold(name.to_owned(), |name, (regex, replacement)| {
        regex.replace_all(&name, *replacement).into_owned()
    })
}

/// The path that PyTorch has for a parameter of a normalization.
fn name_in_files(path: &str, container: &str) -> Option<String> {
    if !NORMALIZATIONS.contains(&container) {
        return None;
    }
    let (module, name) = path.rsplit_once('.').map_or(("", path), |(module, name)| (module, name));
    let name = match name {
        "gamma" => "weight",
        "beta" => "bias",
        _ => return None,
    };
    Some(if module.is_empty() { name.to_owned() } else { format!("{module}.{name}") })
}

fn wanted_by(Experts { parameter, tensor }: &Experts, path: &str) -> Option<Wanted> {
    // Whole components only: `up` is not the end of `backup`.
    let whole = |prefix: &&str| prefix.is_empty() || prefix.ends_with('.');
    if let Some((before, behind)) = tensor.split_once(NUMBER) {
        let prefix = path.strip_suffix(parameter.as_str()).filter(whole)?;
        return Some(Wanted::Each(format!("{prefix}{before}"), behind.to_owned()));
    }
    let (before, behind) = parameter.split_once(NUMBER)?;
    let numbered = path.strip_suffix(behind)?;
    let digits = numbered.rfind(|char: char| !char.is_ascii_digit()).map_or(0, |at| at + 1);
    let prefix = numbered[..digits].strip_suffix(before).filter(whole)?;
    let index = numbered[digits..].parse().ok()?;
    Some(Wanted::Matrix(format!("{prefix}{tensor}"), index))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(map: &CheckpointMap, path: &str, container: &str) -> Wanted {
        Names::new(map).expect("a map").wanted(path, container)
    }

    fn one(names: &[&str]) -> Wanted {
        Wanted::One(names.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn normalizations_have_the_names_of_pytorch_too() {
        let map = CheckpointMap::new();
        assert_eq!(wanted(&map, "a.gamma", "RmsNorm"), one(&["a.gamma", "a.weight"]));
        assert_eq!(wanted(&map, "beta", "LayerNorm"), one(&["beta", "bias"]));
        assert_eq!(wanted(&map, "a.gamma", "Mine"), one(&["a.gamma"]));
        assert_eq!(wanted(&map, "a.running_mean", "BatchNorm"), one(&["a.running_mean"]));
    }

    #[test]
    fn experts_are_whole_components_of_a_path() {
        let map = CheckpointMap::new().experts("up", "up.{}.weight").experts("e.{}.w", "e.w");
        let each = Wanted::Each("m.up.".to_owned(), ".weight".to_owned());
        assert_eq!(wanted(&map, "m.up", "Experts"), each);
        assert_eq!(wanted(&map, "m.backup", "Experts"), one(&["m.backup"]));
        assert_eq!(wanted(&map, "e.12.w", "Linear"), Wanted::Matrix("e.w".to_owned(), 12));
        assert_eq!(wanted(&map, "me.12.w", "Linear"), one(&["me.12.w"]));
        assert_eq!(wanted(&map, "e.x.w", "Linear"), one(&["e.x.w"]));
    }

    #[test]
    fn rules_that_say_nothing_are_errors() {
        let both = CheckpointMap::new().experts("e.{}", "e.{}.weight");
        assert!(matches!(Names::new(&both), Err(Fp4Error::Experts { .. })));
        let neither = CheckpointMap::new().experts("e", "f");
        assert!(matches!(Names::new(&neither), Err(Fp4Error::Experts { .. })));
        let regex = CheckpointMap::new().rename("(", "");
        assert!(matches!(Names::new(&regex), Err(Fp4Error::Rename { .. })));
    }

    #[test]
    fn a_group_that_a_pattern_does_not_have_is_an_error() {
        let unknown = |replacement: &str| {
            let map = CheckpointMap::new().rename(r"^(\w+)\.(?<last>\w+)$", replacement);
            match Names::new(&map) {
                Ok(_) => None,
                Err(Fp4Error::Group { group, .. }) => Some(group),
                Err(error) => panic!("{error}"),
            }
        };
        for (replacement, group) in [
            ("$1_proj", "1_proj"),
            ("${1}_$3", "3"),
            ("$first", "first"),
            ("${no}", "no"),
            ("${}", ""),
        ] {
            assert_eq!(unknown(replacement).as_deref(), Some(group), "{replacement}");
        }
        for replacement in ["${1}_proj", "$1.$last", "$0", "a$", "$$9", "$.", "${1"] {
            assert_eq!(unknown(replacement), None, "{replacement}");
        }
        let back = CheckpointMap::new().rename_back("^(layers)", "$1_x");
        assert!(matches!(Names::new(&back), Err(Fp4Error::Group { .. })));
    }

    #[test]
    fn rules_that_match_nothing_are_named() {
        let map = CheckpointMap::new()
            .rename("^model", "outer")
            .rename("^outer", "")
            .rename("^model", "")
            .rename_back("^blocks", "layers")
            .tie("head", "embed")
            .tie("head", "embedding")
            .container("Experts", 1, crate::FileLayout::OutIn)
            .container("Mine", 1, crate::FileLayout::OutIn)
            .experts("up", "up.{}.weight")
            .experts("down", "down.{}.weight");
        let names = Names::new(&map).expect("a map");
        let told =
            |idle: Vec<Mismatch>| -> Vec<String> { idle.iter().map(ToString::to_string).collect() };
        let behind = ": correct it, or take it out";
        // What one rename made is what the next one sees.
        let found = told(names.idle_renames(["model.a", "b"].into_iter()));
        assert_eq!(
            found,
            [format!(r#"`rename("^model", "")` of the map: it matches no tensor{behind}"#)]
        );
        assert_eq!(names.idle_renames_back(["layers.0"].into_iter()).len(), 1);
        assert!(names.idle_renames_back(["blocks.0"].into_iter()).is_empty());
        let found = told(names.idle_rules(&[("head", ""), ("embed", ""), ("a.up", "Experts")]));
        let expected = [
            r#"`tie("head", "embedding")` of the map: it matches no parameter `embedding`"#,
            r#"`experts("down", "down.{}.weight")` of the map: it matches no parameter"#,
            r#"`container("Mine", 1, ..)` of the map: it matches no parameter"#,
        ];
        assert_eq!(found, expected.map(|text| format!("{text}{behind}")));
    }

    #[test]
    fn renames_apply_one_after_the_other() {
        let map = CheckpointMap::new().rename(r"^model\.", "").rename(r"\.(\w)_proj\.", ".$1.");
        let names = Names::new(&map).expect("a map");
        assert_eq!(names.in_module("model.layers.0.q_proj.weight"), "layers.0.q.weight");
    }
}
