//! The pattern that a user may have meant by one that matches nothing.

use std::collections::BTreeSet;

use strsim::osa_distance;

/// Characters of wild cards.
const WILD: [char; 2] = ['*', '?'];

/// Finds the pattern nearest to one that matches no name: its words spelt as the names have them,
/// and with wild cards around them. `matches` tells whether a pattern matches any name.
pub(crate) fn nearest(
    names: &[&str],
    pattern: &str,
    matches: impl Fn(&str) -> bool,
) -> Option<String> {
    if let Some(regex) = pattern.strip_prefix("re:") {
        // Matched from the start of a name, and to its end only with `$`.
        let open = regex.strip_suffix('$').unwrap_or(regex);
        let start = format!(".*{}", regex.strip_prefix('^').unwrap_or(regex));
        let both = format!(".*{}", open.strip_prefix('^').unwrap_or(open));
        let all = [start, open.to_owned(), both].map(|regex| format!("re:{regex}"));
        return all.into_iter().find(|found| matches(found));
    }
    let widened = |text: &str| {
        let mut all = vec![text.to_owned()];
        if !text.contains(WILD) {
            all.extend([format!("{text}.*"), format!("*.{text}"), format!("*.{text}.*")]);
        }
        if text.len() >= LEAST {
            all.push(format!("*{}*", text.trim_matches('*')));
        }
        all.into_iter().find(|found| matches(found))
    };
    widened(pattern).or_else(|| widened(&spelt(names, pattern)?))
}

/// The least letters that are looked for inside of words: fewer are everywhere.
const LEAST: usize = 3;

/// Spells the words of a pattern as the names have them.
fn spelt(names: &[&str], pattern: &str) -> Option<String> {
    let known: BTreeSet<&str> = names.iter().flat_map(|name| name.split('.')).collect();
    let words: Option<Vec<String>> = pattern.split('.').map(|word| respelt(&known, word)).collect();
    words.map(|words| words.join("."))
}

/// A word of a pattern as a name has it, whatever wild cards are around it.
fn respelt(known: &BTreeSet<&str>, word: &str) -> Option<String> {
    let letters = word.trim_matches(WILD);
    let is_part =
        |name: &&str| if letters == word { *name == word } else { name.contains(letters) };
    if letters.is_empty() || letters.contains(WILD) || known.iter().any(is_part) {
        return Some(word.to_owned());
    }
    // Every number is near to every other, and none of them is meant.
    let is_number = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    if is_number(letters) {
        return None;
    }
    let found = known.iter().filter(|name| !is_number(name));
    let found = found.filter_map(|name| Some((distance(name, letters)?, name)));
    let (_, found) = found.min_by_key(|(edits, _)| *edits)?;
    Some(word.replace(letters, found))
}

/// The number of edits between a word of a name and letters that may be it misspelt. None: they are
/// different words, as `q_proj` and `o_proj` are.
fn distance(name: &str, letters: &str) -> Option<usize> {
    let [name, letters] = [name, letters].map(str::to_lowercase);
    if name.replace('_', "") == letters.replace('_', "") {
        return Some(0);
    }
    let (names, parts) = (name.split('_'), letters.split('_'));
    if names.clone().count() != parts.clone().count() {
        return None;
    }
    names.zip(parts).try_fold(0, |sum, (name, part)| {
        // Other numbers are other layers, and so are other short words.
        let digits = |text: &str| -> String { text.chars().filter(char::is_ascii_digit).collect() };
        let edits = osa_distance(name, part);
        let near = edits <= (part.chars().count() + 1) / 4 && digits(name) == digits(part);
        near.then_some(sum + edits)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::{Pattern, Syntax};

    #[test]
    fn a_pattern_is_spelt_as_the_names_are() {
        let names = ["lm_head.weight", "model.layers.0.mlp.up_proj.weight", "a.o_proj.weight"];
        let matches = |pattern: &str| {
            let matcher = Pattern::parse(pattern, Syntax::Recipe).matcher().expect("a pattern");
            let module = |name: &str| matcher.matches(name.trim_end_matches(".weight"));
            names.iter().any(|name| matcher.matches(name) || module(name))
        };
        for (pattern, expected) in [
            ("lm_haed", Some("lm_head")),
            ("*.o_porj", Some("*.o_proj")),
            ("model.layer.*.mlp.*", Some("model.layers.*.mlp.*")),
            ("*up_prj*", Some("*up_proj*")),
            ("model.layers.0.mlp", Some("model.layers.0.mlp.*")),
            ("o_proj", Some("*.o_proj")),
            ("o_porj", Some("*.o_proj")),
            ("mlp", Some("*.mlp.*")),
            ("mlp.up_proj", Some("*.mlp.up_proj")),
            ("_proj", Some("*_proj*")),
            ("oj", None),
            ("model.layers.7.mlp.up_proj", None),
            ("nothing*", None),
            ("re:lm_haed", None),
            ("re:up_proj", Some("re:.*up_proj")),
            ("re:model\\.layers$", Some("re:model\\.layers")),
            ("re:^mlp$", Some("re:.*mlp")),
            ("*.UP_PROJ", Some("*.up_proj")),
            ("*.upproj", Some("*.up_proj")),
            ("*.q_proj", None),
            ("*.k_proj", None),
            ("lm_heal_x", None),
        ] {
            assert_eq!(nearest(&names, pattern, matches).as_deref(), expected, "{pattern}");
        }
    }
}
