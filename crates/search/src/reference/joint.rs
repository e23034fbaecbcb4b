//! The best scale and codes of a block under `r^T H r`, of all there are: for every scale, the
//! point of the lattice of codes that is closest in the metric of H, by sphere decoding.
//!
//! With `H = R^T R` and R upper triangular, the cost is a sum of squares, one for each element and
//! those after it. Elements are chosen from the last to the first, each trying its values from the
//! best outward (Schnorr and Euchner), and a branch ends where the sum exceeds the best known, that
//! of coordinate descent or of any other scale.

use burn_fp4_formats::E2M1;

use super::block::{Block, Choice};
use super::solution::{self, BlockProblem, Solution};
use crate::importance::BlockHessian;
use crate::method::Method;

/// Branches searched in a block before the best so far is kept. Blocks of ordinary weights need a
/// few thousand.
const BRANCHES: usize = 1 << 20;

/// The only block size that [`Fp4Scheme::validate`](crate::Fp4Scheme::validate) lets pass.
const SIZE: usize = Method::Joint.row().block_sizes[0];

/// The best scale and codes of a block.
pub(super) fn choose(block: &Block<'_>, hessian: BlockHessian<'_>) -> Choice {
    solution::choose::<SIZE>(block, hessian, improve)
}

struct Search<const B: usize> {
    /// R over its diagonal, and the squares of that.
    ratios: [[f64; B]; B],
    squares: [f64; B],
    values: [f64; 15],
    problem: [f64; B],
    scale: f64,
    chosen: [f64; B],
    best: f64,
    found: Option<[f64; B]>,
    branches: usize,
}

/// The best scale and codes, at least as good as the start.
pub(crate) fn improve<const B: usize>(
    problem: &BlockProblem<'_, B>,
    start: Solution<B>,
) -> Solution<B> {
    let Some(factor) = cholesky::<B>(problem.hessian.values) else { return start };
    let ratios = core::array::from_fn(|i| core::array::from_fn(|j| factor[i][j] / factor[i][i]));
    let mut best = start;
    let mut search = Search {
        ratios,
        squares: core::array::from_fn(|i| factor[i][i] * factor[i][i]),
        values: element_values().map(f64::from),
        problem: problem.scaled.map(f64::from),
        scale: 0.0,
        chosen: [0.0; B],
        best: f64::from(start.cost),
        found: None,
        branches: 0,
    };
    for scale in problem.normalization.lowest()..=problem.normalization.zeros(problem.amax) {
        search.scale = problem.normalization.value(scale).into();
        search.found = None;
        search.descend(B, 0.0);
        if let Some(found) = search.found {
            let elements = found.map(|value| value as f32);
            // Better in the arithmetic that all methods are compared in.
            let cost = problem.cost(scale, &elements);
            if cost < best.cost {
                best = Solution { scale, elements, cost };
            }
        }
    }
    best
}

impl<const B: usize> Search<B> {
    /// Chooses the elements before `level`, given those after and what they cost.
    fn descend(&mut self, level: usize, cost: f64) {
        let Some(i) = level.checked_sub(1) else {
            self.best = cost;
            self.found = Some(self.chosen);
            return;
        };
        // Where this element would cost nothing.
        let mut center = self.problem[i];
        for j in level..B {
            center += self.ratios[i][j] * (self.problem[j] - self.chosen[j] * self.scale);
        }
        let center = center / self.scale;
        let next = self.values.partition_point(|&value| value < center);
        let (mut below, mut above) = (next, next);
        while below > 0 || above < self.values.len() {
            let nearer_above = above < self.values.len()
                && (below == 0 || self.values[above] - center < center - self.values[below - 1]);
            let value = if nearer_above {
                above += 1;
                self.values[above - 1]
            } else {
                below -= 1;
                self.values[below]
            };
            let error = (center - value) * self.scale;
            let sum = self.squares[i].mul_add(error * error, cost);
            // All others are farther.
            if sum >= self.best || self.branches >= BRANCHES {
                return;
            }
            self.branches += 1;
            self.chosen[i] = value;
            self.descend(i, sum);
        }
    }
}

/// R of `H = R^T R`; nothing if H is singular: then a tree has no bounds.
fn cholesky<const B: usize>(hessian: &[f32]) -> Option<[[f64; B]; B]> {
    let mut factor = [[0.0; B]; B];
    for i in 0..B {
        for j in i..B {
            let dot: f64 = (0..i).map(|k| factor[k][i] * factor[k][j]).sum();
            let rest = f64::from(hessian[j * B + i]) - dot;
            if i < j {
                factor[i][j] = rest / factor[i][i];
            } else if rest > 1e-6 * f64::from(hessian[i * (B + 1)]) {
                factor[i][i] = rest.sqrt();
            } else {
                return None;
            }
        }
    }
    Some(factor)
}

/// The magnitudes and signs an element may have, ascending.
fn element_values() -> [f32; 15] {
    core::array::from_fn(|index| {
        let magnitude = E2M1.decode(index.abs_diff(7) as u8);
        if index < 7 { -magnitude } else { magnitude }
    })
}
