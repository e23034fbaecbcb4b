//! [`Instructions`]: the instruction sets for products of bytes.

use std::sync::OnceLock;

use pulp::Arch;

use super::arch::arch;
#[cfg(target_arch = "x86_64")]
use super::arch::is_named;
use super::int8_lanes::{Generic, LaneWork, Lanes};
#[cfg(target_arch = "aarch64")]
use super::int8_neon::Neon;
#[cfg(target_arch = "x86_64")]
use super::int8_x86::{Avx2, Avx512};

/// An instruction set for products of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Instructions {
    Generic,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "aarch64")]
    NeonDot,
}

impl Instructions {
    /// All of this architecture, the best last.
    pub(super) const ALL: &[Self] = &[
        Self::Generic,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        #[cfg(target_arch = "x86_64")]
        Self::AvxVnni,
        #[cfg(target_arch = "x86_64")]
        Self::Avx512Vnni,
        #[cfg(target_arch = "aarch64")]
        Self::Neon,
        #[cfg(target_arch = "aarch64")]
        Self::NeonDot,
    ];

    /// Returns the best of the processor, or of the set that `BURN_FP4_SIMD` names: `avx2` has
    /// none of VNNI.
    pub(super) fn best() -> Self {
        static BEST: OnceLock<Instructions> = OnceLock::new();
        *BEST.get_or_init(|| {
            let allowed = |instructions: &&Self| match arch() {
                Arch::Scalar => **instructions == Self::Generic,
                #[cfg(target_arch = "x86_64")]
                Arch::V3(_) => match instructions {
                    // Where F16C is missing, which pulp does not ask for.
                    Self::Generic | Self::Avx2 => true,
                    Self::AvxVnni => !is_named(),
                    Self::Avx512Vnni => false,
                },
                _ => true,
            };
            let runs = |instructions: &&Self| allowed(instructions) && instructions.is_available();
            *Self::ALL.iter().rev().find(runs).expect("every processor has the first")
        })
    }

    /// Returns true if the processor has the instructions.
    pub(super) fn is_available(self) -> bool {
        self.run(Nothing).is_some()
    }

    /// Runs work. Returns None if the processor lacks the instructions.
    pub(super) fn run<W: LaneWork>(self, work: W) -> Option<W::Output> {
        fn run<L: Lanes, W: LaneWork>(lanes: Option<L>, work: W) -> Option<W::Output> {
            lanes.map(|lanes| lanes.run(work))
        }
        match self {
            Self::Generic => run(Some(Generic), work),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => run(Avx2::<false>::detect(), work),
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => run(Avx2::<true>::detect(), work),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => run(Avx512::detect(), work),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => run(Neon::<false>::detect(), work),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot => run(Neon::<true>::detect(), work),
        }
    }
}

/// Work that does nothing, to find out if a processor has instructions.
struct Nothing;

impl LaneWork for Nothing {
    type Output = ();

    fn run<L: Lanes>(self, _: L) {}
}
