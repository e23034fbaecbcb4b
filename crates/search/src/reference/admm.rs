//! The alternating direction method of multipliers: alternates between the real minimum of `r^T H
//! r` and the nearest codes.
//!
//! With `w = x / s`, H scaled to largest eigenvalue 1 and penalty 1, it alternates `q = (H + I)^-1
//! (H w + z - u)`, `z = nearest(q + u)`, `u = u + q - z`; then the scale moves to the best one for
//! z. [`published`] does this from the rule's scale and keeps the last iterate (qwantize's
//! `nvfp4_admm`). [`improve`] also starts from a better solution and keeps the best iterate.

use super::block::{Block, Choice};
use super::solution::{self, BlockProblem, Solution, nearest, product};
use crate::importance::BlockHessian;

/// Number of times that the scale moves.
const OUTER: usize = 3;
/// Number of steps for a scale.
const INNER: usize = 10;

/// Runs ADMM from the best known solution.
pub(super) fn choose(block: &Block<'_>, hessian: BlockHessian<'_>) -> Choice {
    fn of_size<const B: usize>(block: &Block<'_>, hessian: BlockHessian<'_>) -> Choice {
        let operator = Operator::<B>::new(hessian.values);
        solution::choose(block, hessian, |problem, start| improve(problem, &operator, start))
    }
    match hessian.size {
        16 => of_size::<16>(block, hessian),
        _ => of_size::<32>(block, hessian),
    }
}

/// Runs ADMM as published.
pub(super) fn choose_published(block: &Block<'_>, hessian: BlockHessian<'_>) -> Choice {
    fn of_size<const B: usize>(block: &Block<'_>, hessian: BlockHessian<'_>) -> Choice {
        let operator = Operator::<B>::new(hessian.values);
        solution::choose(block, hessian, |problem, _| published(problem, &operator))
    }
    match hessian.size {
        16 => of_size::<16>(block, hessian),
        _ => of_size::<32>(block, hessian),
    }
}

/// H over its largest eigenvalue, and the inverse of the sum of that and the identity.
pub(crate) struct Operator<const B: usize> {
    scaled: [[f32; B]; B],
    inverse: [[f32; B]; B],
}

impl<const B: usize> Operator<B> {
    pub(crate) fn new(hessian: &[f32]) -> Self {
        let largest = largest_eigenvalue::<B>(hessian).max(1e-6);
        let scaled = core::array::from_fn(|i| {
            core::array::from_fn(|j| (f64::from(hessian[i * B + j]) / largest) as f32)
        });
        Self { scaled, inverse: inverse_plus_identity(&scaled) }
    }
}

/// Computes the largest eigenvalue by power iteration, more precisely than a penalty needs.
fn largest_eigenvalue<const B: usize>(hessian: &[f32]) -> f64 {
    let mut vector: [f64; B] = core::array::from_fn(|i| 1.0 + i as f64 / B as f64);
    let mut length = 0.0;
    for _ in 0..100 {
        let next: [f64; B] = core::array::from_fn(|i| {
            (0..B).map(|j| f64::from(hessian[i * B + j]) * vector[j]).sum()
        });
        length = next.iter().map(|x| x * x).sum::<f64>().sqrt();
        if length == 0.0 {
            return 0.0;
        }
        vector = next.map(|x| x / length);
    }
    length
}

/// Computes `(M + I)^-1` by Gauss-Jordan elimination. The matrix is positive definite, so every
/// pivot is at least 1.
fn inverse_plus_identity<const B: usize>(matrix: &[[f32; B]; B]) -> [[f32; B]; B] {
    let mut left: [[f64; B]; B] =
        core::array::from_fn(|i| core::array::from_fn(|j| matrix[i][j].into()));
    let mut right = [[0.0; B]; B];
    for i in 0..B {
        left[i][i] += 1.0;
        right[i][i] = 1.0;
    }
    for pivot in 0..B {
        let scale = 1.0 / left[pivot][pivot];
        left[pivot] = left[pivot].map(|x| x * scale);
        right[pivot] = right[pivot].map(|x| x * scale);
        for row in (0..B).filter(|&row| row != pivot) {
            let factor = left[row][pivot];
            for col in 0..B {
                left[row][col] -= factor * left[pivot][col];
                right[row][col] -= factor * right[pivot][col];
            }
        }
    }
    right.map(|row| row.map(|x| x as f32))
}

/// Returns the last iterate from the rule's scale.
#[inline(always)]
pub(crate) fn published<const B: usize>(
    problem: &BlockProblem<'_, B>,
    operator: &Operator<B>,
) -> Solution<B> {
    let mut last = Solution { scale: problem.own, elements: [0.0; B], cost: 0.0 };
    for _ in 0..OUTER {
        let Some((elements, next)) = steps(problem, operator, last.scale) else { break };
        last.elements = elements;
        let Some(next) = next else { break };
        last.scale = next;
    }
    last.cost = problem.cost(last.scale, &last.elements);
    last
}

/// Returns the best of a solution and of all iterates from its scale and from the rule's. Steps
/// depend on their scale alone, so they run once for each scale.
#[inline(always)]
pub(crate) fn improve<const B: usize>(
    problem: &BlockProblem<'_, B>,
    operator: &Operator<B>,
    start: Solution<B>,
) -> Solution<B> {
    let mut best = start;
    let mut keep = |scale, elements| {
        let cost = problem.cost(scale, &elements);
        if cost < best.cost {
            best = Solution { scale, elements, cost };
        }
    };
    let mut taken = [0u8; 2 * OUTER];
    let mut count = 0;
    for mut scale in [problem.own, start.scale] {
        for _ in 0..OUTER {
            if taken[..count].contains(&scale) {
                break;
            }
            taken[count] = scale;
            count += 1;
            let Some((elements, next)) = steps(problem, operator, scale) else { break };
            keep(scale, elements);
            let Some(next) = next else { break };
            keep(next, elements);
            scale = next;
        }
    }
    best
}

/// Runs the steps for a scale. Returns their elements, and the best scale for these if it is
/// another; `None` for a scale of 0.
#[inline(always)]
fn steps<const B: usize>(
    problem: &BlockProblem<'_, B>,
    operator: &Operator<B>,
    scale: u8,
) -> Option<([f32; B], Option<u8>)> {
    let value = problem.normalization.value(scale);
    if value == 0.0 {
        return None;
    }
    let normalized = problem.scaled.map(|x| x / value);
    let wanted = product(operator.scaled.as_flattened(), &normalized);
    let mut elements = nearest(&normalized);
    let mut dual = [0.0; B];
    for _ in 0..INNER {
        let mut right = [0.0; B];
        for i in 0..B {
            right[i] = wanted[i] + elements[i] - dual[i];
        }
        let free = product(operator.inverse.as_flattened(), &right);
        for i in 0..B {
            right[i] = free[i] + dual[i];
        }
        elements = nearest(&right);
        for i in 0..B {
            dual[i] = right[i] - elements[i];
        }
    }
    let weighted = problem.product(&elements);
    let [mut numerator, mut denominator] = [0.0f32; 2];
    for i in 0..B {
        numerator = problem.scaled[i].mul_add(weighted[i], numerator);
        denominator = elements[i].mul_add(weighted[i], denominator);
    }
    if !(numerator > 0.0 && denominator > 1e-12) {
        return Some((elements, None));
    }
    let next = problem.normalization.nearest(numerator / denominator);
    Some((elements, (next != scale).then_some(next)))
}
