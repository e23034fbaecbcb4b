//! The pattern that a user may have meant by one that matches nothing.

use std::collections::BTreeSet;

use strsim::osa_distance;

/// Characters of wild cards.
const WILD: [char; 2] = ['*', '?'];

/// Finds the pattern nearest to one that matches no name: with what is in a module, or with its
/// words spelt as those of the names are. The caller checks that it matches.
pub(super) fn nearest(names: &[&str], pattern: &str) -> Option<String> {
    if pattern.starts_with("re:") {
        return None;
    }
    let within = format!("{pattern}.");
    if !pattern.contains(WILD) && names.iter().any(|name| name.starts_with(&within)) {
        return Some(format!("{within}*"));
    }
    let known: BTreeSet<&str> = names.iter().flat_map(|name| name.split('.')).collect();
    let words: Option<Vec<String>> = pattern.split('.').map(|word| respelt(&known, word)).collect();
    words.map(|words| words.join(".")).filter(|found| found != pattern)
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
    let distance = |name: &&str| osa_distance(name, letters);
    let found = known.iter().filter(|name| !is_number(name)).min_by_key(|name| distance(name))?;
    let near = distance(found) <= (letters.chars().count() / 3).max(1);
    near.then(|| word.replace(letters, found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_spelt_as_the_names_are() {
        let names = ["lm_head.weight", "model.layers.0.mlp.up_proj.weight", "a.o_proj.weight"];
        for (pattern, expected) in [
            ("lm_haed", Some("lm_head")),
            ("*.o_porj", Some("*.o_proj")),
            ("model.layer.*.mlp.*", Some("model.layers.*.mlp.*")),
            ("*up_prj*", Some("*up_proj*")),
            ("model.layers.0.mlp", Some("model.layers.0.mlp.*")),
            ("model.layers.7.mlp.up_proj", None),
            ("nothing*", None),
            ("re:lm_haed", None),
        ] {
            assert_eq!(nearest(&names, pattern).as_deref(), expected, "{pattern}");
        }
    }
}
