//! [`Patterns`]: a list of patterns, ready to match weights.

use std::collections::{HashMap, HashSet};

use crate::error::PolicyError;
use crate::nearest::nearest;
use crate::pattern::{Matcher, Pattern, Syntax, malformed};

/// A list of patterns, ready to match the names of weights and of their modules.
///
/// Exact names are looked up: a recipe of what was done to a model has one for every weight.
#[derive(Debug)]
pub struct Patterns<'t> {
    texts: Vec<&'t str>,
    exact: HashMap<String, Vec<usize>>,
    others: Vec<(usize, Matcher)>,
}

impl<'t> Patterns<'t> {
    /// Reads patterns in the [syntax of recipes](crate#patterns).
    ///
    /// # Errors
    /// [`PolicyError::Malformed`] for braces and brackets that are not closed, and
    /// [`PolicyError::Pattern`] for a regular expression that is none.
    pub fn new(texts: impl IntoIterator<Item = &'t String>) -> Result<Self, PolicyError> {
        let texts: Vec<&str> = texts.into_iter().map(String::as_str).collect();
        let mut exact: HashMap<String, Vec<usize>> = HashMap::new();
        let mut others = Vec::new();
        for (at, text) in texts.iter().enumerate() {
            if let Some(problem) = malformed(text) {
                return Err(PolicyError::Malformed { pattern: (*text).to_owned(), problem });
            }
            match Pattern::parse(text, Syntax::Recipe) {
                Pattern::Exact(text) => exact.entry(text).or_default().push(at),
                pattern => others.push((at, pattern.matcher_of(text)?)),
            }
        }
        Ok(Self { texts, exact, others })
    }

    /// Returns true if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Returns the text of a pattern.
    pub(crate) fn text(&self, at: usize) -> &'t str {
        self.texts[at]
    }

    /// Returns the numbers of the patterns that match one of these names, in no order.
    pub fn matches(&self, names: [&str; 2]) -> impl Iterator<Item = usize> {
        let same = names.into_iter().filter_map(|name| self.exact.get(name)).flatten().copied();
        let alike =
            move |(_, matcher): &&(usize, Matcher)| names.iter().any(|n| matcher.matches(n));
        same.chain(self.others.iter().filter(alike).map(|(at, _)| *at))
    }

    /// Returns the first pattern that matches one of these names.
    #[must_use]
    pub fn first(&self, names: [&str; 2]) -> Option<&'t str> {
        self.matches(names).min().map(|at| self.texts[at])
    }

    /// Finds the first pattern that matches nothing, which is a mistake.
    ///
    /// # Errors
    /// [`PolicyError::NoMatch`] with the list that the pattern is of.
    pub fn check_used<'n>(
        &self,
        list: &'static str,
        names: impl Iterator<Item = [&'n str; 2]> + Clone,
    ) -> Result<(), PolicyError> {
        match self.unused(names.clone()).first() {
            None => Ok(()),
            Some(&at) => Err(no_match(list, self.texts[at], names)),
        }
    }

    /// Returns the numbers of the patterns that match nothing.
    #[must_use]
    pub fn unused<'n>(&self, names: impl Iterator<Item = [&'n str; 2]> + Clone) -> Vec<usize> {
        let mut unused: Vec<usize> = Vec::new();
        for (at, matcher) in &self.others {
            let misses = |names: [&str; 2]| !names.iter().any(|name| matcher.matches(name));
            unused.extend(names.clone().all(misses).then_some(*at));
        }
        if !self.exact.is_empty() {
            let mut open: HashSet<&str> = self.exact.keys().map(String::as_str).collect();
            for name in names.flatten() {
                open.remove(name);
            }
            unused.extend(open.into_iter().flat_map(|text| &self.exact[text]));
        }
        unused.sort_unstable();
        unused
    }
}

fn no_match<'n>(
    list: &'static str,
    pattern: &str,
    weights: impl Iterator<Item = [&'n str; 2]> + Clone,
) -> PolicyError {
    let names: Vec<&str> = weights.clone().map(|[name, _]| name).collect();
    let matches = |found: &str| {
        let matcher = Pattern::parse(found, Syntax::Recipe).matcher();
        let hits = |matcher: Matcher| weights.clone().flatten().any(|name| matcher.matches(name));
        matcher.is_ok_and(hits)
    };
    let nearest = nearest(&names, pattern, matches);
    let first = names.first().copied().unwrap_or("none").to_owned();
    PolicyError::NoMatch { list, pattern: pattern.to_owned(), tensors: names.len(), first, nearest }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_pattern_as_the_user_wrote_it() {
        for text in ["**.a[9-0]", "a[9-0]", "re:(a"] {
            let error = Patterns::new(&[text.to_owned()]).expect_err("no pattern").to_string();
            assert!(error.starts_with(&format!("pattern `{text}`: ")), "{error}");
        }
    }
}
