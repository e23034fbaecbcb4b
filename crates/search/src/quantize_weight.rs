//! A weight quantized by a [`Method`], with whatever of the activations that needs.

use burn_fp4_formats::{Fp4Format, Packed};

use crate::host::{self, View};
use crate::{
    Fp4Scheme, Gram, Importance, Method, ScaleRule, SearchError, quantize_with_best_tensor_scale,
};

impl Method {
    /// The scheme of the method for a format and block size.
    pub fn scheme(self, format: Fp4Format, block_size: usize) -> Fp4Scheme {
        let rule = ScaleRule::of_format(format);
        Fp4Scheme::of(rule).with_block_size(block_size).with_search(self.row().search)
    }

    /// Quantizes a weight `[rows, cols]` whose rows are multiplied by activations with this Gram
    /// matrix.
    ///
    /// # Errors
    /// A weight that is not finite; a block size or format that the method is not defined for, or
    /// that does not divide the columns; a Gram matrix of another number of channels; one that is
    /// missing ([`SearchError::Uncalibrated`]).
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
        scheme.check_columns(cols)?;
        if let Some(&found) = weight.iter().find(|value| !value.is_finite()) {
            return Err(SearchError::NonFinite { found });
        }
        let view = View::rows(rows, cols);
        if self == Self::SseTensorScale {
            return quantize_with_best_tensor_scale(weight, view, &scheme, Importance::Uniform);
        }
        let amax = host::amax(weight, view, &scheme);
        let gram = match (self.row().calibrated, gram) {
            (true, Some(gram)) => gram,
            (true, None) => return Err(SearchError::Uncalibrated { method: self }),
            (false, _) => {
                return host::quantize_packed(weight, view, &scheme, &amax, Importance::Uniform);
            }
        };
        if let Some(options) = self.gptq() {
            return options.quantize(weight, rows, cols, &scheme, &amax, gram);
        }
        let weights: Vec<f32>;
        let hessians;
        let importance = if scheme.search.needs_hessians() {
            hessians = gram.blocks(block_size)?;
            Importance::Blocks(&hessians)
        } else {
            weights = gram.diagonal().map(|value| value as f32).collect();
            Importance::Channels(&weights)
        };
        host::quantize_packed(weight, view, &scheme, &amax, importance)
    }
}
