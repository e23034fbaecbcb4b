//! Quantization of a weight with a [`Method`] and the [`Statistics`] that it needs.

use burn_fp4_formats::{Fp4Format, Packed};

use crate::best_tensor_scale::quantize_with_best_tensor_scale;
use crate::error::SearchError;
use crate::gram::Gram;
use crate::host::{self, HostElement, View};
use crate::importance::Importance;
use crate::method::{Method, Needs, Sse};
use crate::rule::ScaleRule;
use crate::scheme::Fp4Scheme;

/// Statistics of the inputs of a layer.
#[derive(Debug, Clone, Copy, Default)]
pub enum Statistics<'a> {
    /// No statistics.
    #[default]
    None,
    /// The mean square of every channel, or a multiple of it.
    SecondMoments(&'a [f32]),
    /// `X^T X`.
    Gram(&'a Gram),
}

impl Method {
    /// Returns the scheme of the method for a format and block size.
    pub fn scheme(self, format: Fp4Format, block_size: usize) -> Fp4Scheme {
        let rule = ScaleRule::of_format(format);
        Fp4Scheme::of(rule).with_block_size(block_size).with_method(self)
    }

    /// Quantizes a weight `[rows, cols]` whose rows are multiplied by activations with this Gram
    /// matrix.
    ///
    /// ```
    /// use burn_fp4_search::formats::Fp4Format;
    /// use burn_fp4_search::{Gram, Method};
    ///
    /// let weight: Vec<f32> = (0..2 * 32).map(|at| (at as f32).sin()).collect();
    /// let inputs: Vec<f32> = (0..64 * 32).map(|at| (at as f32 * 0.7).cos()).collect();
    /// let gram = Gram::of(&inputs, 32)?; // 64 inputs of 32 channels
    /// let packed = Method::GPTQ.quantize(&weight, 2, 32, Fp4Format::NvFp4, 16, Some(&gram))?;
    /// assert_eq!(packed.bytes(), 2 * 32 / 2 + 2 * 2 + 4);
    /// # Ok::<(), burn_fp4_search::SearchError>(())
    /// ```
    ///
    /// # Errors
    /// A weight that is not finite; a format that the method is not defined for; a block size that
    /// does not divide the columns; a Gram matrix of another number of channels, or a missing one
    /// ([`SearchError::Uncalibrated`]).
    pub fn quantize(
        self,
        weight: &[f32],
        rows: usize,
        cols: usize,
        format: Fp4Format,
        block_size: usize,
        gram: Option<&Gram>,
    ) -> Result<Packed, SearchError> {
        let scheme = self.scheme(format, block_size);
        let statistics = gram.map_or(Statistics::None, Statistics::Gram);
        self.quantize_view(weight, View::rows(rows, cols), &scheme, statistics)
    }

    /// Quantizes a tensor of any float type along any axis. This method replaces that of
    /// the scheme. With a Hadamard transform, the codes are those of the transformed tensor;
    /// statistics are of the inputs as they are.
    ///
    /// ```
    /// use burn_fp4_search::formats::{Fp4Format, bf16};
    /// use burn_fp4_search::host::View;
    /// use burn_fp4_search::{Method, Statistics};
    ///
    /// let weight: Vec<bf16> = (0..32 * 4).map(|at| bf16::from_f32(at as f32)).collect();
    /// let view = View::along(&[32, 4], 0); // blocks along the first axis
    /// let scheme = Method::SSE.scheme(Fp4Format::NvFp4, 16);
    /// let packed = Method::SSE.quantize_view(&weight, view, &scheme, Statistics::None)?;
    /// assert_eq!((packed.rows, packed.cols), (4, 32));
    /// # Ok::<(), burn_fp4_search::SearchError>(())
    /// ```
    ///
    /// # Errors
    /// As [`quantize`](Self::quantize); [`SearchError::Importance`] for second moments if the
    /// method takes Gram matrices.
    pub fn quantize_view<T: HostElement>(
        self,
        weight: &[T],
        view: View,
        scheme: &Fp4Scheme,
        statistics: Statistics<'_>,
    ) -> Result<Packed, SearchError> {
        let scheme = &scheme.with_method(self);
        if let Some(hadamard) = scheme.hadamard {
            let scheme = scheme.without_hadamard();
            let mut transformed = vec![0.0f32; weight.len()];
            host::hadamard(weight, view, hadamard, false, &mut transformed)?;
            return match statistics {
                Statistics::None => self.quantize_view(&transformed, view, &scheme, statistics),
                Statistics::Gram(gram) => {
                    let gram = gram.clone().transformed(hadamard)?;
                    self.quantize_view(&transformed, view, &scheme, Statistics::Gram(&gram))
                }
                Statistics::SecondMoments(_) => Err(SearchError::TransformedMoments),
            };
        }
        scheme.check_columns(view.axis)?;
        let amax = host::amax(weight, view, scheme);
        if amax.iter().any(|amax| !amax.is_finite()) {
            let found = weight.iter().map(|value| value.to_f32()).find(|value| !value.is_finite());
            return Err(SearchError::NonFinite { found: found.unwrap_or(f32::NAN) });
        }
        if self == Self::Sse(Sse::TensorScale) {
            return quantize_with_best_tensor_scale(weight, view, scheme, Importance::Uniform);
        }
        let by = |importance| host::quantize_packed(weight, view, scheme, &amax, importance);
        match (self.needs(), statistics) {
            (Needs::Nothing, _) => by(Importance::Uniform),
            (_, Statistics::None) => Err(SearchError::Uncalibrated { method: self }),
            (Needs::SecondMoments | Needs::BlockHessians, Statistics::SecondMoments(weights)) => {
                by(Importance::Channels(weights))
            }
            (Needs::SecondMoments, Statistics::Gram(gram)) => by(Importance::Channels(
                &gram.diagonal().map(|value| value as f32).collect::<Vec<_>>(),
            )),
            (Needs::BlockHessians, Statistics::Gram(gram)) => {
                by(Importance::Blocks(&gram.blocks(scheme.block_size)?))
            }
            (Needs::Gram, Statistics::SecondMoments(_)) => {
                let (expected, found) = ("a Gram matrix", "channel weights");
                Err(SearchError::Importance { method: self, expected, found })
            }
            (Needs::Gram, Statistics::Gram(gram)) => {
                let options = self.gptq().expect("nothing else needs all of it");
                let (rows, cols) = (view.packed_rows(), view.axis);
                options.quantize(&dense_rows(weight, view), rows, cols, scheme, &amax, gram)
            }
        }
    }
}

/// Copies the packed rows of a tensor, in f32.
pub(crate) fn dense_rows<T: HostElement>(weight: &[T], view: View) -> Vec<f32> {
    let row = |row: usize| {
        let start = row / view.inner * view.axis * view.inner + row % view.inner;
        (0..view.axis).map(move |k| weight[start + k * view.inner].to_f32())
    };
    (0..view.packed_rows()).flat_map(row).collect()
}
