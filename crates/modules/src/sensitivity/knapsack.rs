//! The multiple-choice knapsack problem: one item of each group, with the least sum of errors
//! within a sum of bytes.
//!
//! The relaxation, in which a group may take two items in parts, is solved exactly: items on the
//! lower convex hull of a group, and steps along the hulls in the order of the error that they save
//! for each byte. It gives the bound. What is taken in whole is a solution, and is repaired by the
//! single changes that save most, of any items, as long as they fit.

/// An item of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Item {
    pub(super) bytes: usize,
    /// Finite.
    pub(super) error: f64,
}

/// Allocation of bytes: one item of each group.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Allocation {
    /// Index of the item, for each group.
    pub(super) items: Vec<usize>,
    /// Lower bound of the sum of errors of every allocation within the bytes.
    pub(super) bound: f64,
}

/// Finds an allocation within this many bytes whose sum of errors is near the bound. Returns `None`
/// if even the smallest items of all groups take more. No group is empty.
pub(super) fn choose(groups: &[Vec<Item>], bytes: usize) -> Option<Allocation> {
    let hulls: Vec<Vec<usize>> = groups.iter().map(|items| hull(items)).collect();
    let mut items: Vec<usize> = hulls.iter().map(|hull| hull[0]).collect();
    let taken = |items: &[usize]| -> usize {
        items.iter().zip(groups).map(|(&item, group)| group[item].bytes).sum()
    };
    let mut left = bytes.checked_sub(taken(&items))?;

    let mut steps: Vec<(f64, usize, usize, usize)> = Vec::new();
    for (at, hull) in hulls.iter().enumerate() {
        for step in hull.windows(2) {
            let (from, to) = (groups[at][step[0]], groups[at][step[1]]);
            let rate = (from.error - to.error) / (to.bytes - from.bytes) as f64;
            steps.push((rate, at, step[0], step[1]));
        }
    }
    // Along a hull rates fall, so that its steps stay in order: the sort is stable.
    steps.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut saved_in_part = 0.0;
    for &(rate, at, from, to) in &steps {
        let more = groups[at][to].bytes - groups[at][from].bytes;
        if more > left {
            saved_in_part = rate * left as f64;
            break;
        }
        items[at] = to;
        left -= more;
    }
    let error = |items: &[usize]| -> f64 {
        items.iter().zip(groups).map(|(&item, group)| group[item].error).sum()
    };
    let bound = error(&items) - saved_in_part;
    while let Some((at, item)) = best_change(groups, &items, left) {
        left = left + groups[at][items[at]].bytes - groups[at][item].bytes;
        items[at] = item;
    }
    Some(Allocation { items, bound })
}

/// The items of a group on its lower convex hull, from the smallest to the one with the least
/// error.
fn hull(items: &[Item]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    let key = |&at: &usize| (items[at].bytes, items[at].error);
    order.sort_by(|a, b| {
        let ((bytes, error), (other, than)) = (key(a), key(b));
        bytes.cmp(&other).then(error.total_cmp(&than))
    });
    let mut hull: Vec<usize> = Vec::new();
    for at in order {
        let new = items[at];
        if hull.last().is_some_and(|&last| new.error >= items[last].error) {
            continue;
        }
        while let [.., before, last] = hull[..] {
            let (before, last) = (items[before], items[last]);
            let to_new = (before.error - new.error) * (last.bytes - before.bytes) as f64;
            let to_last = (before.error - last.error) * (new.bytes - before.bytes) as f64;
            if to_new < to_last {
                break;
            }
            hull.pop();
        }
        hull.push(at);
    }
    hull
}

/// The change of one group that saves most error and takes no more than the bytes that are left.
fn best_change(groups: &[Vec<Item>], items: &[usize], left: usize) -> Option<(usize, usize)> {
    let mut best = (0.0, None);
    for (at, group) in groups.iter().enumerate() {
        let now = group[items[at]];
        for (item, other) in group.iter().enumerate() {
            let saved = now.error - other.error;
            if other.bytes <= now.bytes + left && saved > best.0 {
                best = (saved, Some((at, item)));
            }
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tries every allocation and returns the least sum of errors.
    fn least(groups: &[Vec<Item>], bytes: usize) -> Option<f64> {
        let Some((first, rest)) = groups.split_first() else { return Some(0.0) };
        let with = |item: &Item| Some(item.error + least(rest, bytes.checked_sub(item.bytes)?)?);
        first.iter().filter_map(with).min_by(f64::total_cmp)
    }

    #[test]
    fn choices_fit_and_lie_between_the_bound_and_what_the_repair_may_miss() {
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888);
            (state >> 33) % below
        };
        let mut exact = 0;
        for _ in 0..500 {
            let groups: Vec<Vec<Item>> = (0..5)
                .map(|_| {
                    let item =
                        |_| Item { bytes: 1 + random(30) as usize, error: random(1000) as f64 };
                    (0..4).map(item).collect()
                })
                .collect();
            for bytes in [5, 20, 40, 60, 80, 200] {
                let (found, least) = (choose(&groups, bytes), least(&groups, bytes));
                assert_eq!(found.is_some(), least.is_some(), "{groups:?} {bytes}");
                let (Some(found), Some(least)) = (found, least) else { continue };
                let of = |(&item, group): (&usize, &Vec<Item>)| group[item];
                let taken: Vec<Item> = found.items.iter().zip(&groups).map(of).collect();
                assert!(taken.iter().map(|item| item.bytes).sum::<usize>() <= bytes);
                let error: f64 = taken.iter().map(|item| item.error).sum();
                assert!(found.bound <= least + 1e-9 && least <= error, "{groups:?} {bytes}");
                let largest = groups.iter().flatten().map(|item| item.error).fold(0.0, f64::max);
                assert!(error - found.bound <= largest, "{groups:?} {bytes}");
                exact += usize::from(error == least);
            }
        }
        assert!(exact > 1000, "{exact}");
    }

    #[test]
    fn items_above_the_line_between_two_others_are_not_on_the_hull() {
        let items: Vec<Item> = [(10, 0.0), (1, 10.0), (5, 9.0), (4, 4.0), (2, 11.0)]
            .map(|(bytes, error)| Item { bytes, error })
            .into();
        assert_eq!(hull(&items), [1, 3, 0]);
    }
}
