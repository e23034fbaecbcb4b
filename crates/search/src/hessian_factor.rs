//! [`HessianFactor`]: the Cholesky factor of the inverse Hessian, computed from a Gram matrix once
//! for all weights that are multiplied by the same activations.

use std::fmt;

use burn_fp4_formats::check_length;
use rayon::prelude::*;

use crate::error::SearchError;
use crate::gptq::{BlockOrder, Gptq};
use crate::gram::{Gram, check_blocks};
use crate::importance::BlockHessians;
use crate::matrix::{Matrix, invert_factor, product};
use crate::method::Method;
use crate::scheme::{Fp4Scheme, check_gptq};

impl Gptq {
    /// Factorizes the damped Hessian for all weights that are multiplied by the same activations.
    ///
    /// # Errors
    /// As [`damped_hessian`](Self::damped_hessian); [`SearchError::Singular`] if H is singular.
    pub fn hessian_factor(
        &self,
        gram: &Gram,
        block_size: usize,
    ) -> Result<HessianFactor, SearchError> {
        HessianFactor::new(gram, self.damped_hessian(gram, block_size)?)
    }

    /// Computes the part of the Hessian factor that does not need a factorization of the whole of
    /// H.
    ///
    /// # Errors
    /// [`SearchError::Damping`]; [`SearchError::Correction`]; [`SearchError::Format`] if the
    /// blocks do not divide the channels or not all of the Gram matrix is known;
    /// [`SearchError::Singular`] if a block of H is singular.
    pub fn damped_hessian(
        &self,
        gram: &Gram,
        block_size: usize,
    ) -> Result<DampedHessian, SearchError> {
        check_gptq(self)?;
        DampedHessian::new(*self, gram, block_size)
    }
}

/// The method of refits: chooses a block again, given the errors of all other blocks.
pub(crate) const SEARCH: Method = Method::CoordinateDescent;

/// Holds the cheap part of a [`HessianFactor`]: everything but the whole of H and its
/// factorization. Made by [`Gptq::damped_hessian`].
#[derive(Debug, Clone, PartialEq)]
pub struct DampedHessian {
    options: Gptq,
    order: Vec<usize>,
    added: f64,
    blocks: BlockHessians,
    inverses: Vec<f32>,
}

impl DampedHessian {
    pub(crate) fn new(options: Gptq, gram: &Gram, block_size: usize) -> Result<Self, SearchError> {
        check_blocks(gram.channels(), block_size)?;
        check_length("channels of a block of the Gram matrix", gram.channels(), gram.block_size())?;
        let channels = gram.channels();
        let order = options.order.channels(gram, block_size);
        // From values that are the same in whatever order activations were summed.
        let diagonal = gram.diagonal().map(|value| f64::from(value as f32));
        let mean = diagonal.sum::<f64>() / channels.max(1) as f64;
        // Without activations, H is the identity.
        let added = if mean > 0.0 { options.damping * mean } else { 1.0 };
        let blocks = order.iter().enumerate().flat_map(|(at, &channel)| {
            let members = &order[at / block_size * block_size..][..block_size];
            members.iter().map(move |&member| {
                let added = if member == channel { added } else { 0.0 };
                (gram.known(channel, member) + added) as f32
            })
        });
        let blocks = BlockHessians::new(blocks.collect(), block_size)?;
        let inverses = blocks
            .values()
            .par_chunks_exact(block_size * block_size)
            .map(|block| inverse_of(block, block_size).ok_or(SearchError::Singular))
            .collect::<Result<Vec<_>, _>>()?
            .concat();
        Ok(Self { options, order, added, blocks, inverses })
    }

    /// Returns the options it was made with.
    #[must_use]
    pub fn options(&self) -> &Gptq {
        &self.options
    }

    /// Number of input channels.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.order.len()
    }

    /// Returns the channels in the order in which they are rounded. Channels of a block stay
    /// together.
    #[must_use]
    pub fn order(&self) -> &[usize] {
        &self.order
    }

    /// Returns the amount added to the diagonal of `X^T X`.
    #[must_use]
    pub fn added(&self) -> f64 {
        self.added
    }

    /// Returns the blocks on the diagonal of H.
    #[must_use]
    pub fn blocks(&self) -> &BlockHessians {
        &self.blocks
    }

    /// Returns the inverses of the blocks, `[blocks, block_size, block_size]`.
    #[must_use]
    pub fn inverses(&self) -> &[f32] {
        &self.inverses
    }

    /// Returns the scheme with the search of refits.
    ///
    /// # Errors
    /// As [`Fp4Scheme::validate`]; [`SearchError::Format`] for another block size.
    pub fn scheme(&self, scheme: &Fp4Scheme) -> Result<Fp4Scheme, SearchError> {
        scheme.with_method(self.options.into()).validate()?;
        check_length("block size", self.blocks.block_size(), scheme.block_size)?;
        Ok(scheme.with_method(SEARCH))
    }
}

/// Holds the damped Hessian H = `X^T X`, its channels in the order in which [`Gptq`] rounds them,
/// and the Cholesky factor of its inverse. Made by [`Gptq::hessian_factor`].
///
/// ```
/// use burn_fp4_search::{Fp4Scheme, Gptq, Gram, Method};
///
/// // The second block of channels has the larger activations.
/// let mut squares = vec![0.0; 32 * 32];
/// (0..16).for_each(|channel| squares[channel * 33] = 2.0);
/// (16..32).for_each(|channel| squares[channel * 33] = 14.0);
/// let gram = Gram::from_values(&squares, 32, 32, 64, 1.0)?;
///
/// let options = Gptq { damping: 0.25, ..Gptq::DEFAULT };
/// let factor = options.hessian_factor(&gram, 16)?;
/// assert_eq!((factor.hessian()[0], factor.factor()[0]), (16.0, 0.25)); // H and sqrt(H^-1)
///
/// let damped = factor.damped();
/// assert_eq!(*damped, options.damped_hessian(&gram, 16)?);
/// assert_eq!((damped.order()[0], damped.added()), (16, 2.0)); // 0.25 times the mean, 8
/// assert_eq!((damped.blocks().values()[0], damped.inverses()[0]), (16.0, 1.0 / 16.0));
/// assert_eq!(damped.scheme(&Fp4Scheme::nvfp4())?.method, Method::CoordinateDescent);
/// # Ok::<(), burn_fp4_search::SearchError>(())
/// ```
#[derive(Clone, PartialEq)]
pub struct HessianFactor {
    damped: DampedHessian,
    factor: Vec<f32>,
    hessian: Vec<f32>,
}

impl fmt::Debug for HessianFactor {
    /// Leaves out the matrices, which have millions of elements.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HessianFactor")
            .field("options", self.damped.options())
            .field("channels", &self.damped.channels())
            .finish()
    }
}

impl HessianFactor {
    pub(crate) fn new(gram: &Gram, damped: DampedHessian) -> Result<Self, SearchError> {
        let mut wide = hessian(gram, &damped);
        let hessian: Vec<f32> = wide.par_iter().map(|&value| value as f32).collect();
        // With both axes reversed H is `L L^T`; the inverse of L, reversed again, is U.
        wide.reverse();
        let channels = damped.channels();
        invert_factor(&mut wide, channels).ok_or(SearchError::Singular)?;
        let factor: Vec<f32> = wide.par_iter().rev().map(|&value| value as f32).collect();
        if !factor.par_iter().all(|value| value.is_finite()) {
            return Err(SearchError::Singular);
        }
        Ok(Self { damped, factor, hessian })
    }

    /// Returns everything but the two large matrices.
    #[must_use]
    pub fn damped(&self) -> &DampedHessian {
        &self.damped
    }

    /// Returns the upper triangular U of `H^-1 = U^T U`, `[channels, channels]`.
    #[must_use]
    pub fn factor(&self) -> &[f32] {
        &self.factor
    }

    /// Returns H, `[channels, channels]`.
    #[must_use]
    pub fn hessian(&self) -> &[f32] {
        &self.hessian
    }
}

impl BlockOrder {
    /// Returns the channels in this order.
    fn channels(self, gram: &Gram, block_size: usize) -> Vec<usize> {
        let diagonal: Vec<_> = gram.diagonal().collect();
        let activity: Vec<f64> = diagonal.chunks(block_size).map(|x| x.iter().sum()).collect();
        let mut blocks: Vec<_> = (0..activity.len()).collect();
        if self == Self::Activity {
            blocks.sort_by(|&a, &b| activity[b].total_cmp(&activity[a]));
        }
        blocks.into_iter().flat_map(|block| block * block_size..(block + 1) * block_size).collect()
    }
}

/// Computes the damped H in f64.
fn hessian(gram: &Gram, damped: &DampedHessian) -> Vec<f64> {
    let DampedHessian { order, added, blocks, .. } = damped;
    let (channels, size) = (order.len(), blocks.block_size());
    let mut hessian = vec![0.0; channels * channels];
    // In squares, which fit the cache together with their mirror images.
    hessian.par_chunks_mut((size * channels).max(1)).enumerate().for_each(|(block, rows)| {
        let first = block * size;
        for cols in (0..channels).step_by(size) {
            for (at, row) in (first..).zip(rows.chunks_exact_mut(channels)) {
                let members = order[cols..].iter().zip(&mut row[cols..cols + size]);
                members.for_each(|(&channel, value)| *value = gram.known(order[at], channel));
            }
        }
        for (at, row) in (first..).zip(rows.chunks_exact_mut(channels)) {
            row[at] += added;
        }
    });
    hessian
}

/// Inverts a positive definite matrix; `None` if it is singular.
fn inverse_of(matrix: &[f32], n: usize) -> Option<Vec<f32>> {
    let mut root: Vec<f64> = matrix.iter().map(|&value| value.into()).collect();
    invert_factor(&mut root, n)?;
    let root = Matrix::row_major(&root, n, n);
    Some(product(root.transposed(), root).into_iter().map(|value| value as f32).collect())
}
