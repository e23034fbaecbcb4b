//! SwiGLU: the gate of an MLP.

use burn_fp4_formats::check_length;
use pulp::{Simd, WithSimd};

use super::exp::exp;
use crate::error::SearchError;
use crate::host::arch::arch;
use crate::host::threads::{Work, for_each_chunk, per_microsecond};

/// Number of values of a parallel task.
const PART: usize = 1 << 12;

/// Replaces each gate `g` by `g / (1 + e^-g)` times the value of `up`.
///
/// # Errors
/// The slices differ in length.
pub fn swiglu(gate: &mut [f32], up: &[f32]) -> Result<(), SearchError> {
    check_length("up", gate.len(), up.len())?;
    let work = Work::new(gate.len(), per_microsecond::VALUES);
    for_each_chunk(
        work,
        gate,
        PART,
        || (),
        |(), part, gate| {
            let up = &up[part * PART..][..gate.len()];
            arch().dispatch(SwiGlu { gate, up });
        },
    );
    Ok(())
}

struct SwiGlu<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl WithSimd for SwiGlu<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        for (gate, up) in self.gate.iter_mut().zip(self.up) {
            *gate = *gate / (1.0 + exp(-*gate)) * up;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swiglu_is_silu_times_up_for_one_task_and_for_many() {
        for len in [0, 7, 1536, 40 * PART + 9] {
            let gate: Vec<_> = (0..len).map(|at| (at * 37 % 1001) as f32 / 40.0 - 12.0).collect();
            let up: Vec<_> = (0..len).map(|at| (at * 13 % 101) as f32 / 7.0 - 6.0).collect();
            let mut found = gate.clone();
            swiglu(&mut found, &up).unwrap();
            for ((gate, up), found) in gate.iter().zip(&up).zip(found) {
                let (gate, up) = (f64::from(*gate), f64::from(*up));
                let expected = gate / (1.0 + (-gate).exp()) * up;
                assert!((f64::from(found) - expected).abs() <= 1e-6 * expected.abs());
            }
        }
        assert!(swiglu(&mut [1.0], &[]).is_err());
    }
}
