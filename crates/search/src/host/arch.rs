//! The SIMD instructions and the sizes of tasks of the host engine.

use std::env::{self, VarError};
use std::sync::OnceLock;

use pulp::Arch;
#[cfg(target_arch = "x86_64")]
use pulp::x86::{V3, V4};

/// Values per parallel task: large enough to amortize a task, small enough to balance two cores.
pub(super) const TASK: usize = 1 << 16;

/// Values per parallel task of a search.
pub(super) const SEARCH_TASK: usize = 1 << 14;

/// Work of a thread in a microsecond, by kind: what [`is_worth_threads`] is asked with.
pub(super) mod per_microsecond {
    /// Multiplications by elements of a packed weight, which are decoded to f32.
    pub(in crate::host) const PACKED: usize = 1 << 14;
    /// The same with an input of 8-bit integers.
    pub(in crate::host) const PACKED_INT8: usize = 1 << 15;
    /// Multiplications by a matrix of signed bytes.
    pub(in crate::host) const SIGNED_BYTES: usize = 1 << 13;
    /// Multiplications by a dense weight, whose values come from memory.
    pub(in crate::host) const DENSE: usize = 1 << 12;
    /// Multiplications of attention.
    pub(in crate::host) const ATTENTION: usize = 1 << 13;
    /// Values that are read, changed and written.
    pub(in crate::host) const VALUES: usize = 1 << 10;
    /// Values that are written in another order.
    pub(in crate::host) const WRITTEN: usize = 1 << 12;
}

/// Returns true if work is worth the time to wake other threads, and to wait for them. A thread
/// does `per_microsecond` of it in a microsecond.
///
/// A thread of rayon's pool shares its work with those that are awake. Any other one sleeps until
/// a thread of the pool has woken up and has done the work.
pub(super) fn is_worth_threads(work: usize, per_microsecond: usize) -> bool {
    let microseconds = match rayon::current_thread_index() {
        Some(_) => 8,
        None => 80,
    };
    work > microseconds * per_microsecond && rayon::current_num_threads() > 1
}

/// Variable that names an instruction set, so that tests can run the code of other processors.
const VARIABLE: &str = "BURN_FP4_SIMD";

/// Returns the best instructions of the processor, or the set that `BURN_FP4_SIMD` names:
/// `generic`, and on x86-64 `avx2` and `avx512`.
///
/// # Panics
/// If the processor lacks the named set: tests would pass without having run it.
pub(super) fn arch() -> Arch {
    static ARCH: OnceLock<Arch> = OnceLock::new();
    *ARCH.get_or_init(|| match env::var(VARIABLE) {
        Err(VarError::NotPresent) => Arch::new(),
        Ok(name) => named(&name).unwrap_or_else(|| {
            panic!(
                "{VARIABLE}={name}: expected `generic`, `avx2` or `avx512` that this machine has"
            )
        }),
        Err(error) => panic!("{VARIABLE}: {error}"),
    })
}

/// Returns true if `BURN_FP4_SIMD` names a set.
#[cfg(target_arch = "x86_64")]
pub(super) fn is_named() -> bool {
    env::var_os(VARIABLE).is_some()
}

fn named(name: &str) -> Option<Arch> {
    match name {
        "generic" => Some(Arch::Scalar),
        #[cfg(target_arch = "x86_64")]
        "avx2" => V3::try_new().map(Arch::V3),
        #[cfg(target_arch = "x86_64")]
        "avx512" => V4::try_new().map(Arch::V4),
        _ => None,
    }
}
