//! The SIMD instructions of the host engine.

use std::env::{self, VarError};
use std::sync::OnceLock;

use pulp::Arch;
#[cfg(target_arch = "x86_64")]
use pulp::x86::{V3, V4};

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
