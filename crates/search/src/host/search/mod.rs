//! Scales and codes of a batch, using the search of a scheme. Each search has a file, named as in
//! `reference/`.
//!
//! A generic function is compiled in every crate that calls it. Searches are long, and are compiled
//! for each block size, format and instruction set. To compile them once, in this crate, they start
//! from functions that are not generic: [`Choose::choose`] for the batches of both block sizes.

mod admm;
mod coordinate_descent;
mod four_over_six;
mod hessian;
mod solution;
pub(super) mod sse;

use pulp::NullaryFnOnce;

use crate::host::arch::arch;
use crate::host::scale_grid::{ByFormat, by_format};
use crate::host::simd_batch::BlockBatch;
use crate::importance::BlockImportance;
use crate::method::{Admm, Method};
use crate::scheme::Fp4Scheme;

/// A batch with one of the supported block sizes.
pub(super) trait Choose {
    /// Chooses scales and codes of the first `n` blocks by a search.
    fn choose(&mut self, scheme: &Fp4Scheme, importance: BlockImportance<'_>, n: usize);
}

impl Choose for BlockBatch<16> {
    fn choose(&mut self, scheme: &Fp4Scheme, importance: BlockImportance<'_>, n: usize) {
        arch().dispatch(Search { batch: self, scheme, importance, n });
    }
}

impl Choose for BlockBatch<32> {
    fn choose(&mut self, scheme: &Fp4Scheme, importance: BlockImportance<'_>, n: usize) {
        arch().dispatch(Search { batch: self, scheme, importance, n });
    }
}

/// Searches scales of the first `n` blocks of a batch.
struct Search<'a, const B: usize> {
    batch: &'a mut BlockBatch<B>,
    scheme: &'a Fp4Scheme,
    importance: BlockImportance<'a>,
    n: usize,
}

impl<const B: usize> NullaryFnOnce for Search<'_, B> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        by_format(self.scheme.format(), self)
    }
}

impl<const B: usize> ByFormat for Search<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<const FORMAT: usize>(self) {
        let Self { batch, scheme, importance, n } = self;
        batch.find_scales_of::<FORMAT>(scheme.rule);
        // Elements that the search chose; without them, codes are the nearest ones.
        let mut chosen = None;
        match scheme.method {
            Method::Amax => {}
            Method::FourOverSix { error, .. } => {
                batch.search_four_over_six::<FORMAT>(scheme, error, n);
            }
            // Weights that are 1 at compile time cost no multiplication.
            Method::Sse(_) => match importance.weights() {
                Some(weights) => batch.search_sse::<FORMAT>(scheme, Some(weights), n),
                None => batch.search_sse::<FORMAT>(scheme, None, n),
            },
            Method::Hessian => batch.search_hessian::<FORMAT>(scheme, importance.hessian(), n),
            Method::Admm(Admm::Published) => {
                chosen = Some(batch.search_admm_published::<FORMAT>(importance.hessian(), n));
            }
            Method::CoordinateDescent | Method::Admm(Admm::BestIterate) => {
                let hessian = importance.hessian();
                let start = batch.search_coordinate_descent::<FORMAT>(scheme, hessian, n);
                chosen = Some(match scheme.method {
                    Method::CoordinateDescent => start,
                    _ => batch.search_admm::<FORMAT>(hessian, n, start),
                });
            }
            Method::Gptq(_) => unreachable!("refused by `Importance::check`"),
        }
        if let Some((scales, _)) = &chosen {
            batch.take_scales::<FORMAT>(scheme.rule, scales);
        }
        batch.find_codes(scheme);
        if let Some((_, elements)) = &chosen {
            batch.take_elements(elements, &batch.normalizations::<FORMAT>(n).searchable);
        }
    }
}
