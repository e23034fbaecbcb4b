//! Names of a repeated pattern as one: `model.layers.{0..35}.mlp.down_proj`.

use std::collections::{BTreeMap, BTreeSet};

use burn_fp4_policy::Reason;

use crate::counted::counted;

/// Names of one pattern.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Folded {
    /// The pattern, or the name of the only member.
    pub(crate) name: String,
    /// The members, by their places in what was folded.
    pub(crate) members: Vec<usize>,
}

impl Folded {
    /// Makes a row of one weight.
    pub(crate) fn alone(name: &str, at: usize) -> Self {
        Self { name: name.to_owned(), members: vec![at] }
    }

    /// Describes the shape of its members, which they share unless they are vectors.
    pub(crate) fn shape(&self, shape: &[usize]) -> String {
        match (self.members.len(), shape.len()) {
            (1, _) => format!("{shape:?}"),
            (count, 0 | 1) => counted(count, "tensor"),
            (count, _) => format!("{count} x {shape:?}"),
        }
    }
}

/// The module of a weight in the words in which it differs from another one.
pub(crate) fn short<'n>(name: &'n str, other: &str) -> &'n str {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let parent = other.strip_suffix(".weight").unwrap_or(other).rsplit_once('.');
    let within = |(parent, _): (&str, &str)| module.strip_prefix(parent)?.strip_prefix('.');
    parent.and_then(within).unwrap_or(module)
}

/// The reason for which a weight is kept, in words that weights of one pattern share.
pub(crate) fn short_reason(reason: &Reason, name: &str) -> String {
    match reason {
        Reason::With(other) => Reason::With(short(other, name).to_owned()).to_string(),
        Reason::Layer(_) => "a layer in high precision".to_owned(),
        other => other.to_string(),
    }
}

/// A part of a name, in natural order: numbers by their size, before texts.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part<'n> {
    /// A number: how many digits it has without leading zeros, and these.
    Number(usize, &'n str),
    Text(&'n str),
}

/// The parts of a name, by which names are in natural order: layer 2 is before layer 10.
pub(crate) fn natural(name: &str) -> Vec<Part<'_>> {
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
pub(crate) fn fold<'n, K: Ord>(names: impl IntoIterator<Item = (&'n str, K)>) -> Vec<Folded> {
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

/// Folds weights, each with its module, its shape and a key: matrices by pattern, shape and key,
/// and behind them vectors by key alone, of which a model has many.
pub(crate) fn fold_weights<K: Ord + Clone>(weights: &[(&str, &[usize], K)]) -> Vec<Folded> {
    let (vectors, matrices): (Vec<usize>, Vec<usize>) =
        (0..weights.len()).partition(|&at| weights[at].1.len() < 2);
    let named = matrices.iter().map(|&at| &weights[at]);
    let mut folded = fold(named.map(|(name, shape, key)| (*name, (*shape, key.clone()))));
    for one in &mut folded {
        one.members.iter_mut().for_each(|at| *at = matrices[*at]);
    }
    let mut alike: BTreeMap<&K, Vec<usize>> = BTreeMap::new();
    for at in vectors {
        alike.entry(&weights[at].2).or_default().push(at);
    }
    let row = |members: Vec<usize>| match members[..] {
        [one] => Folded::alone(weights[one].0, one),
        _ => Folded { name: "vectors and scalars (see --all)".to_owned(), members },
    };
    folded.extend(alike.into_values().map(row));
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
    fn vectors_are_one_row_behind_the_matrices_of_a_pattern() {
        let (matrix, vector) = ([2, 2].as_slice(), [2].as_slice());
        let weights =
            [("l.0.norm", vector, 'a'), ("l.0.up", matrix, 'a'), ("l.1.norm", vector, 'a')];
        let all = [&weights[..], &[("l.1.up", matrix, 'a'), ("bias", vector, 'b')]].concat();
        let folded = fold_weights(&all);
        let rows: Vec<_> = folded.iter().map(|one| (one.name.as_str(), &one.members[..])).collect();
        let vectors = ("vectors and scalars (see --all)", &[0, 2][..]);
        assert_eq!(rows, [("l.{0..1}.up", &[1, 3][..]), vectors, ("bias", &[4])]);
        let shapes = [folded[0].shape(matrix), folded[1].shape(vector), folded[2].shape(vector)];
        assert_eq!(shapes, ["2 x [2, 2]", "2 tensors", "[2]"]);
    }

    #[test]
    fn numbers_that_are_part_of_a_word_stay() {
        let names = [("conv1.weight", 0), ("conv2.weight", 0), ("l.01.w", 0), ("l.1.w", 0)];
        let same = |(name, _): &(&str, u8)| ((*name).to_owned(), 1);
        assert_eq!(folded(&names), names.iter().map(same).collect::<Vec<_>>());
    }
}
