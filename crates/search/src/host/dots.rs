//! Dot products of f32 rows, with as many streams of memory as there are rows.

use core::array::from_fn;

use pulp::Simd;

/// Computes the products of a row with each of `N` others. `SUMS` vectors of each are summed in
/// turn: more hide the latency of an addition where `N` is small.
#[inline(always)]
pub(super) fn dots<S: Simd, const N: usize, const SUMS: usize>(
    simd: S,
    row: &[f32],
    others: [&[f32]; N],
    mut prefetch: impl FnMut(&[S::f32s]),
) -> [f32; N] {
    let (row, row_tail) = S::as_simd_f32s(row);
    let vectors: [&[S::f32s]; N] = from_fn(|other| &S::as_simd_f32s(others[other]).0[..row.len()]);
    let mut sums = [[simd.splat_f32s(0.0); SUMS]; N];
    for at in 0..row.len() {
        for other in 0..N {
            prefetch(&vectors[other][at..]);
            let sum = &mut sums[other][at % SUMS];
            *sum = simd.mul_add_f32s(vectors[other][at], row[at], *sum);
        }
    }
    let mut dots = total::<S, N, SUMS>(simd, &sums);
    for other in 0..N {
        let tail = S::as_simd_f32s(others[other]).1;
        for (value, factor) in tail.iter().zip(row_tail) {
            dots[other] += value * factor;
        }
    }
    dots
}

/// Adds the vectors of each row, then their lanes.
#[inline(always)]
pub(super) fn total<S: Simd, const N: usize, const SUMS: usize>(
    simd: S,
    sums: &[[S::f32s; SUMS]; N],
) -> [f32; N] {
    let mut totals = [0.0; N];
    for (total, sums) in totals.iter_mut().zip(sums) {
        let mut sum = sums[0];
        for other in &sums[1..] {
            sum = simd.add_f32s(sum, *other);
        }
        *total = simd.reduce_sum_f32s(sum);
    }
    totals
}
