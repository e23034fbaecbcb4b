//! Names of a repeated pattern as one: `model.layers.{0..35}.mlp.down_proj`.

use std::collections::{BTreeMap, BTreeSet};

/// Names of one pattern.
#[derive(Debug, PartialEq, Eq)]
pub struct Folded {
    /// The pattern, or the name of the only member.
    pub name: String,
    /// The members, by their places in what was folded.
    pub members: Vec<usize>,
}

impl Folded {
    /// Makes a row of one weight.
    #[must_use]
    pub fn alone(name: &str, at: usize) -> Self {
        Self { name: name.to_owned(), members: vec![at] }
    }

    /// Describes the shape of its members, which they share unless they are vectors.
    #[must_use]
    pub fn shape(&self, shape: &[usize]) -> String {
        match (self.members.len(), shape.len()) {
            (1, _) => format!("{shape:?}"),
            (count, 0 | 1) => format!("{count} tensors"),
            (count, _) => format!("{count} x {shape:?}"),
        }
    }
}

/// A part of a name, in natural order: numbers by their size, before texts.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part<'n> {
    /// A number: how many digits it has without leading zeros, and these.
    Number(usize, &'n str),
    /// Anything else.
    Text(&'n str),
}

/// The parts of a name, by which names are in natural order: layer 2 is before layer 10.
///
/// ```
/// use burn_fp4_policy::fold::natural;
///
/// assert!(natural("layers.2") < natural("layers.10"));
/// ```
#[must_use]
pub fn natural(name: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let mut rest = name;
    while let Some(first) = rest.chars().next() {
        let is_digit = first.is_ascii_digit();
        let end = rest.find(|c: char| c.is_ascii_digit() != is_digit).unwrap_or(rest.len());
        let (part, after) = rest.split_at(end);
        let digits = part.trim_start_matches('0');
        parts.push(match is_digit {
            true => Part::Number(digits.len(), digits),
            false => Part::Text(part),
        });
        rest = after;
    }
    parts
}

/// The sets of numbers of a pattern, one for each of its places.
type Sets = Vec<BTreeSet<u64>>;

/// Folds names, each with a key: the names of one pattern have the same key. A pattern has every
/// combination of its numbers. The order is that of the first members.
///
/// ```
/// use burn_fp4_policy::fold::{Folded, fold};
///
/// let folded = fold([("layers.0.up", "nvfp4"), ("norm", "bf16"), ("layers.1.up", "nvfp4")]);
/// assert_eq!((folded[0].name.as_str(), folded[1].name.as_str()), ("layers.{0..1}.up", "norm"));
/// assert_eq!(folded[0].members, [0, 2]);
/// assert_eq!(folded[0].shape(&[64, 32]), "2 x [64, 32]");
/// assert_eq!(folded[1], Folded::alone("norm", 1));
/// ```
pub fn fold<'n, K: Ord>(names: impl IntoIterator<Item = (&'n str, K)>) -> Vec<Folded> {
    // By the texts around the numbers, and the key: numbers and the place of each name.
    let mut alike: BTreeMap<_, BTreeMap<Vec<u64>, Vec<usize>>> = BTreeMap::new();
    for (at, (name, key)) in names.into_iter().enumerate() {
        let (texts, numbers) = divide(name);
        alike.entry((texts, key)).or_default().entry(numbers).or_default().push(at);
    }
    let mut folded = Vec::new();
    for ((texts, _), names) in alike {
        for sets in products(&names.keys().map(Vec::as_slice).collect()) {
            let within = |numbers: &[u64]| sets.iter().zip(numbers).all(|(s, n)| s.contains(n));
            let members = names.iter().filter(|(numbers, _)| within(numbers));
            let mut members: Vec<usize> = members.flat_map(|(_, places)| places.clone()).collect();
            members.sort_unstable();
            folded.push(Folded { name: pattern(&texts, &sets), members });
        }
    }
    folded.sort_by_key(|folded| folded.members[0]);
    folded
}

/// The texts of a name before, between and behind the numbers that are whole words of it, and
/// these.
fn divide(name: &str) -> (Vec<String>, Vec<u64>) {
    let (mut texts, mut numbers) = (vec![String::new()], Vec::new());
    for (at, word) in name.split('.').enumerate() {
        let text = texts.last_mut().expect("there is a first text");
        if at > 0 {
            text.push('.');
        }
        match word.parse::<u64>() {
            // `007` and `+7` are no numbers of a pattern.
            Ok(number) if number.to_string() == word => {
                numbers.push(number);
                texts.push(String::new());
            }
            Ok(_) | Err(_) => text.push_str(word),
        }
    }
    (texts, numbers)
}

/// Sets of numbers whose combinations are these, each once.
fn products(tuples: &BTreeSet<&[u64]>) -> Vec<Sets> {
    let mut behind: BTreeMap<u64, BTreeSet<&[u64]>> = BTreeMap::new();
    for tuple in tuples {
        let Some((first, rest)) = tuple.split_first() else { return vec![Vec::new()] };
        behind.entry(*first).or_default().insert(rest);
    }
    let mut firsts: BTreeMap<BTreeSet<&[u64]>, BTreeSet<u64>> = BTreeMap::new();
    for (first, rest) in behind {
        firsts.entry(rest).or_default().insert(first);
    }
    let mut all = Vec::new();
    for (rest, firsts) in firsts {
        let with = |sets: Sets| [firsts.clone()].into_iter().chain(sets).collect();
        all.extend(products(&rest).into_iter().map(with));
    }
    all
}

fn pattern(texts: &[String], sets: &[BTreeSet<u64>]) -> String {
    let mut name = texts[0].clone();
    for (set, text) in sets.iter().zip(&texts[1..]) {
        name.push_str(&shown(set));
        name.push_str(text);
    }
    name
}

/// A set of numbers: `3`, `{0..35}`, `{0..2,7}`.
fn shown(set: &BTreeSet<u64>) -> String {
    let mut ranges: Vec<[u64; 2]> = Vec::new();
    for &number in set {
        match ranges.last_mut() {
            Some([_, last]) if number.checked_sub(1) == Some(*last) => *last = number,
            Some(_) | None => ranges.push([number; 2]),
        }
    }
    let range = |[first, last]: &[u64; 2]| match last - first {
        0 => first.to_string(),
        _ => format!("{first}..{last}"),
    };
    let ranges: Vec<String> = ranges.iter().map(range).collect();
    match set.len() {
        1 => ranges.concat(),
        _ => format!("{{{}}}", ranges.join(",")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folded(names: &[(&str, u8)]) -> Vec<(String, usize)> {
        let folded = fold(names.iter().copied());
        folded.into_iter().map(|one| (one.name, one.members.len())).collect()
    }

    #[test]
    fn layer_2_is_before_layer_10() {
        let mut names = ["layers.10.w", "layers.2.w", "layers.02.v", "layers.x", "a2", "a10b", "a"];
        names.sort_by_key(|name| natural(name));
        let expected = ["a", "a2", "a10b", "layers.02.v", "layers.2.w", "layers.10.w", "layers.x"];
        assert_eq!(names, expected);
        let large = "9".repeat(40);
        assert!(natural(&large) > natural("10"));
    }

    #[test]
    fn names_that_differ_in_a_number_are_one_row() {
        let names = [("l.0.up", 0), ("l.1.up", 0), ("l.2.up", 0), ("l.7.up", 0), ("norm", 0)];
        assert_eq!(folded(&names), [("l.{0..2,7}.up".to_owned(), 4), ("norm".to_owned(), 1)]);
        let up = |key| ("l.1.up", key);
        let two = [("l.0.up", 0), up(1), ("l.2.up", 0)];
        assert_eq!(folded(&two), [("l.{0,2}.up".to_owned(), 2), ("l.1.up".to_owned(), 1)]);
    }

    #[test]
    fn a_pattern_of_two_numbers_has_all_of_their_combinations() {
        let name = |layer: u64, expert: u64| format!("l.{layer}.experts.{expert}.up");
        let all: Vec<String> = (0..3).flat_map(|l| (0..4).map(move |e| name(l, e))).collect();
        let full = fold(all.iter().map(|name| (name.as_str(), 0)));
        assert_eq!((full.len(), full[0].name.as_str()), (1, "l.{0..2}.experts.{0..3}.up"));
        // Without one of them its layer is a row of its own.
        let some = fold(all.iter().filter(|n| **n != name(1, 2)).map(|n| (n.as_str(), 0)));
        let names: Vec<&str> = some.iter().map(|folded| folded.name.as_str()).collect();
        assert_eq!(names, ["l.{0,2}.experts.{0..3}.up", "l.1.experts.{0..1,3}.up"]);
        let mut members: Vec<usize> = some.into_iter().flat_map(|folded| folded.members).collect();
        members.sort_unstable();
        assert_eq!(members, (0..11).collect::<Vec<_>>());
    }

    #[test]
    fn numbers_that_are_part_of_a_word_stay() {
        let names = [("conv1.weight", 0), ("conv2.weight", 0), ("l.01.w", 0), ("l.1.w", 0)];
        let same = |(name, _): &(&str, u8)| ((*name).to_owned(), 1);
        assert_eq!(folded(&names), names.iter().map(same).collect::<Vec<_>>());
    }
}
