//! The instructions that the host engine uses.

use std::env::{self, VarError};
use std::sync::OnceLock;

use pulp::Arch;
#[cfg(target_arch = "x86_64")]
use pulp::x86::{V3, V4};

/// Values per parallel task: large enough to amortize a task, small enough to balance two cores.
pub(super) const TASK: usize = 1 << 16;

/// Values per parallel task of a search.
pub(super) const SEARCH_TASK: usize = 1 << 14;

/// Names a set of instructions, so that tests run those of other processors too.
const VARIABLE: &str = "BURN_FP4_SIMD";

/// The best instructions that the processor has, or those that `BURN_FP4_SIMD` names: `generic`,
/// and on x86-64 `avx2` and `avx512`.
///
/// # Panics
/// If the processor lacks those that are named: tests would pass without having run them.
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
