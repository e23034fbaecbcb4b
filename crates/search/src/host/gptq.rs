//! GPTQ: propagates every rounding error to the weights that are still to be rounded.
//!
//! With `H = X^T X`, the cost is `(w - q)^T H (w - q)` over a whole row, not over its blocks one by
//! one. Blocks of input channels are taken one after the other:
//!
//! 1. `weighted_scales`: the scales of a block are chosen for the current weights.
//! 2. `round_block`: its channels are rounded in turn, each error propagated to the channels that
//!    follow by the Cholesky factor U of `H^-1 = U^T U` (Frantar et al., arXiv 2210.17323).
//! 3. `improve`: sweeps go over the blocks again, with `R = (w - q) H` kept up to date. Every code
//!    may move to its best value while all others stay (`move_codes`), and every block may choose
//!    scale and codes again (`choose_anew`).
//!
//! Rows are independent of each other, so they are done in parallel.

use burn_fp4_formats::{E2M1, E2M1_VALUES, Packed, check_length};
use rayon::prelude::*;

use super::dense::View;
use super::quantize::quantize_packed;
use super::simd_batch::MAX_BLOCK;
use crate::error::SearchError;
use crate::gptq::Gptq;
use crate::gram::Gram;
use crate::hessian_factor::HessianFactor;
use crate::importance::Importance;
use crate::matrix::{Matrix, add_product, product};
use crate::method::Method;
use crate::rounding::nearest_element;
use crate::rule::TensorFactor;
use crate::scheme::Fp4Scheme;

impl Gptq {
    /// Quantizes a weight `[rows, cols]` whose rows are multiplied by activations with this Gram
    /// matrix.
    ///
    /// # Errors
    /// As [`Fp4Scheme::validate`], [`hessian_factor`](Self::hessian_factor) and
    /// [`HessianFactor::quantize`].
    pub fn quantize(
        &self,
        values: &[f32],
        rows: usize,
        cols: usize,
        scheme: &Fp4Scheme,
        amax: &[f32],
        gram: &Gram,
    ) -> Result<Packed, SearchError> {
        scheme.with_method((*self).into()).validate()?;
        scheme.check_columns(cols)?;
        check_length("channels of the Gram matrix", cols, gram.channels())?;
        self.hessian_factor(gram, scheme.block_size)?.quantize(values, rows, scheme, amax)
    }
}

impl HessianFactor {
    /// Quantizes a weight `[rows, channels]`.
    ///
    /// `scheme` sets the format, rule and tensor scale; its search is not used. `amax` is the
    /// result of [`amax`](super::amax).
    ///
    /// # Errors
    /// As [`Fp4Scheme::validate`]; lengths that do not fit, or a value that is not finite.
    pub fn quantize(
        &self,
        values: &[f32],
        rows: usize,
        scheme: &Fp4Scheme,
        amax: &[f32],
    ) -> Result<Packed, SearchError> {
        let (damped, cols) = (self.damped(), self.damped().channels());
        let scheme = damped.scheme(scheme)?;
        check_length("values", rows * cols, values.len())?;
        check_length("amax", scheme.tensor_scales(rows), amax.len())?;
        if let Some(&found) = values.iter().find(|value| !value.is_finite()) {
            return Err(SearchError::NonFinite { found });
        }
        if rows * cols == 0 {
            let by_rule = scheme.with_method(Method::Amax);
            return crate::reference::quantize_with_amax(values, rows, cols, &by_rule, amax);
        }
        let mut rounded = Rounded::new(values, rows, &scheme, amax, self);
        rounded.round()?;
        if damped.options().sweeps + damped.options().refits > 0 {
            rounded.improve()?;
        }
        Ok(rounded.packed())
    }
}

/// A partly rounded weight, its channels in the order in which they are rounded.
struct Rounded<'a> {
    hessian_factor: &'a HessianFactor,
    scheme: &'a Fp4Scheme,
    amax: &'a [f32],
    factors: Vec<TensorFactor>,
    rows: usize,
    cols: usize,
    /// Values to approximate, `[rows, cols]`; while rounding, with the errors so far propagated to
    /// them.
    weights: Vec<f32>,
    original: Vec<f32>,
    /// E2M1 values of the codes, `[rows, cols]`.
    elements: Vec<f32>,
    /// `[blocks, rows]`.
    scales: Vec<u8>,
}

/// Returns the factor of a row, of one factor for all or one for each.
fn of_row(factors: &[TensorFactor], row: usize) -> TensorFactor {
    if factors.len() == 1 { factors[0] } else { factors[row] }
}

impl<'a> Rounded<'a> {
    fn new(
        values: &[f32],
        rows: usize,
        scheme: &'a Fp4Scheme,
        amax: &'a [f32],
        hessian_factor: &'a HessianFactor,
    ) -> Self {
        let cols = hessian_factor.damped().channels();
        let weights: Vec<f32> = values
            .chunks_exact(cols)
            .flat_map(|row| hessian_factor.damped().order().iter().map(|&channel| row[channel]))
            .collect();
        Self {
            hessian_factor,
            scheme,
            amax,
            factors: amax.iter().map(|&amax| TensorFactor::new(scheme, amax)).collect(),
            rows,
            cols,
            original: weights.clone(),
            weights,
            elements: vec![0.0; rows * cols],
            scales: vec![0; rows * cols / scheme.block_size],
        }
    }

    /// Returns the multiplier of elements in a row with this scale.
    fn scale_value(&self, row: usize, scale: u8) -> f32 {
        self.scheme.format().row().block_scale.decode(scale) * of_row(&self.factors, row).decode
    }

    /// Rounds block after block, and propagates each error to the channels that follow.
    fn round(&mut self) -> Result<(), SearchError> {
        let factor = self.hessian_factor.factor();
        let (cols, size) = (self.cols, self.scheme.block_size);
        let mut errors = vec![0.0; self.rows * Gptq::GROUP.min(cols)];
        for group in (0..cols).step_by(Gptq::GROUP) {
            let width = Gptq::GROUP.min(cols - group);
            for block in (group..group + width).step_by(size) {
                let scales = self.weighted_scales(block)?;
                self.round_block(block, group, width, &scales, &mut errors);
            }
            let rest = group + width;
            if rest < cols {
                let propagation = Propagation { matrix: factor, n: cols, from: group, width };
                propagation.subtract(&mut self.weights, rest..cols, &errors);
            }
        }
        Ok(())
    }

    /// Chooses the scales of a block of the current weights, with errors weighted by `1 / U_ii^2`:
    /// their cost after the channels that follow have been adapted.
    fn weighted_scales(&self, block: usize) -> Result<Vec<u8>, SearchError> {
        let (factor, size) = (self.hessian_factor.factor(), self.scheme.block_size);
        let weights: Vec<f32> = (block..block + size)
            .map(|channel| factor[channel * (self.cols + 1)].powi(-2))
            .collect();
        let scheme = self.scheme.with_method(Method::SSE);
        let importance = Importance::Channels(&weights);
        let (scales, _) = self.choose(&self.columns(&self.weights, block), &scheme, importance)?;
        Ok(scales)
    }

    /// Copies a block of columns, `[rows, block_size]`.
    fn columns(&self, matrix: &[f32], block: usize) -> Vec<f32> {
        let size = self.scheme.block_size;
        let mut columns = vec![0.0; self.rows * size];
        let rows = matrix.chunks_exact(self.cols);
        for (columns, row) in columns.chunks_exact_mut(size).zip(rows) {
            columns.copy_from_slice(&row[block..block + size]);
        }
        columns
    }

    /// Chooses scales and packed codes of a block of columns `[rows, block_size]`.
    fn choose(
        &self,
        targets: &[f32],
        scheme: &Fp4Scheme,
        importance: Importance<'_>,
    ) -> Result<(Vec<u8>, Vec<u8>), SearchError> {
        let view = View::rows(self.rows, scheme.block_size);
        let packed = quantize_packed(targets, view, scheme, self.amax, importance)?;
        Ok((packed.scales, packed.codes))
    }

    /// Rounds the channels of a block in turn. Their errors are propagated to the rest of the
    /// group, and left in `errors` for the channels beyond the group.
    fn round_block(
        &mut self,
        block: usize,
        group: usize,
        width: usize,
        scales: &[u8],
        errors: &mut [f32],
    ) {
        let factor = self.hessian_factor.factor();
        let (cols, size, scheme) = (self.cols, self.scheme.block_size, self.scheme);
        let stride = Gptq::GROUP.min(cols);
        let factors = &self.factors;
        self.scales[block / size * self.rows..][..self.rows].copy_from_slice(scales);
        self.weights
            .par_chunks_exact_mut(cols)
            .zip(self.elements.par_chunks_exact_mut(cols))
            .zip(errors.par_chunks_exact_mut(stride))
            .zip(scales)
            .enumerate()
            .for_each(|(row, (((weights, elements), errors), &scale))| {
                let tensor = of_row(factors, row);
                let value = scheme.format().row().block_scale.decode(scale) * tensor.decode;
                let multiplier = scheme.rule.multiplier(scale, tensor);
                for channel in block..block + size {
                    let weight = weights[channel];
                    let code = scheme.rule.code(weight, scale, multiplier);
                    let element = E2M1.decode(code);
                    elements[channel] = element;
                    let factor_row = &factor[channel * cols..][..cols];
                    let error = (weight - element * value) / factor_row[channel];
                    errors[channel - group] = error;
                    let rest = channel + 1..group + width;
                    for (weight, &share) in weights[rest.clone()].iter_mut().zip(&factor_row[rest])
                    {
                        *weight -= error * share;
                    }
                }
            });
    }

    /// Sweeps over all blocks, with `R = (w - q) H` kept up to date.
    fn improve(&mut self) -> Result<(), SearchError> {
        let (hessian, options) =
            (self.hessian_factor.hessian(), self.hessian_factor.damped().options());
        let (rows, cols) = (self.rows, self.cols);
        let mut left = self.original.clone();
        for (row, (left, elements)) in
            left.chunks_exact_mut(cols).zip(self.elements.chunks_exact(cols)).enumerate()
        {
            for (channel, (left, element)) in left.iter_mut().zip(elements).enumerate() {
                let block = channel / self.scheme.block_size;
                *left -= element * self.scale_value(row, self.scales[block * rows + row]);
            }
        }
        let left = Matrix::row_major(&left, rows, cols);
        let mut residuals = product(left, Matrix::row_major(hessian, cols, cols));
        for sweep in 0..options.sweeps.max(options.refits) {
            if sweep < options.sweeps {
                self.sweep(&mut residuals, |state, block, residuals, changes| {
                    state.move_codes(block, residuals, changes);
                    Ok(())
                })?;
            }
            if sweep < options.refits {
                self.sweep(&mut residuals, Self::choose_anew)?;
            }
        }
        Ok(())
    }

    /// Lets `improve` change one block after the other, and updates the residuals. `improve` takes
    /// the residuals of its block, `[rows, block_size]`, and writes the changes of the values.
    fn sweep(
        &mut self,
        residuals: &mut [f32],
        improve: impl Fn(&mut Self, usize, &[f32], &mut [f32]) -> Result<(), SearchError>,
    ) -> Result<(), SearchError> {
        let hessian = self.hessian_factor.hessian();
        let (rows, cols, size) = (self.rows, self.cols, self.scheme.block_size);
        let stride = Gptq::GROUP.min(cols);
        let mut changes = vec![0.0; rows * stride];
        let mut of_block = vec![0.0; rows * size];
        for group in (0..cols).step_by(Gptq::GROUP) {
            let width = Gptq::GROUP.min(cols - group);
            changes.fill(0.0);
            for block in (group..group + width).step_by(size) {
                let current = self.columns(residuals, block);
                improve(self, block, &current, &mut of_block)?;
                for (changes, of_block) in
                    changes.chunks_exact_mut(stride).zip(of_block.chunks_exact(size))
                {
                    changes[block - group..][..size].copy_from_slice(of_block);
                }
                // Within the group at once, beyond it together.
                let propagation =
                    Propagation { matrix: hessian, n: cols, from: block, width: size };
                propagation.subtract(residuals, group..group + width, &of_block);
            }
            let propagation = Propagation { matrix: hessian, n: cols, from: group, width };
            propagation.subtract(residuals, 0..group, &changes);
            propagation.subtract(residuals, group + width..cols, &changes);
        }
        Ok(())
    }

    /// Moves every code of a block to the one that is best while all others stay.
    fn move_codes(&mut self, block: usize, residuals: &[f32], changes: &mut [f32]) {
        let (rows, cols, size) = (self.rows, self.cols, self.scheme.block_size);
        let block_hessian = self.hessian_factor.damped().blocks().block(block / size).values;
        let steps: Vec<f32> = (0..size).map(|i| 1.0 / block_hessian[i * (size + 1)]).collect();
        let values: Vec<f32> = self.scales[block / size * rows..][..rows]
            .iter()
            .enumerate()
            .map(|(row, &scale)| self.scale_value(row, scale))
            .collect();
        self.elements
            .par_chunks_exact_mut(cols)
            .zip(residuals.par_chunks_exact(size))
            .zip(changes.par_chunks_exact_mut(size))
            .zip(values)
            .for_each(|(((elements, residuals), changes), value)| {
                let elements = &mut elements[block..block + size];
                let mut copy = [0.0; MAX_BLOCK];
                copy[..size].copy_from_slice(residuals);
                let residuals = &mut copy[..size];
                for i in 0..size {
                    changes[i] = 0.0;
                    if value == 0.0 {
                        continue;
                    }
                    let target = elements[i] + residuals[i] * steps[i] / value;
                    let next = nearest_element(target);
                    let change = (next - elements[i]) * value;
                    if change != 0.0 {
                        elements[i] = next;
                        changes[i] = change;
                        let row = &block_hessian[i * size..][..size];
                        for (residual, element) in residuals.iter_mut().zip(row) {
                            *residual -= change * element;
                        }
                    }
                }
            });
    }

    /// Chooses scale and codes of a block again, given the errors of all other blocks.
    fn choose_anew(
        &mut self,
        block: usize,
        residuals: &[f32],
        changes: &mut [f32],
    ) -> Result<(), SearchError> {
        let (rows, cols, size) = (self.rows, self.cols, self.scheme.block_size);
        let inverse = &self.hessian_factor.damped().inverses()[block * size..][..size * size];
        let hessians = self.hessian_factor.damped().blocks().only(block / size);
        let mut now = self.columns(&self.elements, block);
        for (row, now) in now.chunks_exact_mut(size).enumerate() {
            let value = self.scale_value(row, self.scales[block / size * rows + row]);
            now.iter_mut().for_each(|element| *element *= value);
        }
        // The minimum of the cost, a quadratic form, where it is 0.
        let mut targets = now.clone();
        let inverse = Matrix::row_major(inverse, size, size);
        add_product(&mut targets, size, 1.0, Matrix::row_major(residuals, rows, size), inverse);
        let (scales, codes) = self.choose(&targets, self.scheme, Importance::Blocks(&hessians))?;
        let values: Vec<f32> =
            scales.iter().enumerate().map(|(row, &scale)| self.scale_value(row, scale)).collect();
        let mut of_block = self.scales[block / size * rows..][..rows].to_vec();
        self.elements
            .par_chunks_exact_mut(cols)
            .zip(changes.par_chunks_exact_mut(size))
            .zip(&mut of_block)
            .enumerate()
            .for_each(|(row, ((elements, changes), scale))| {
                let of_row = row * size..(row + 1) * size;
                let (target, now) = (&targets[of_row.clone()], &now[of_row]);
                let element = |i: usize| {
                    E2M1_VALUES[usize::from(codes[(row * size + i) / 2] >> (4 * (i % 2)) & 0xF)]
                };
                let mut next = [0.0; MAX_BLOCK];
                let next = &mut next[..size];
                next.iter_mut().enumerate().for_each(|(i, next)| *next = element(i) * values[row]);
                changes.fill(0.0);
                if distance(hessians.values(), target, next)
                    < distance(hessians.values(), target, now)
                {
                    *scale = scales[row];
                    for i in 0..size {
                        elements[block + i] = element(i);
                        changes[i] = next[i] - now[i];
                    }
                }
            });
        self.scales[block / size * rows..][..rows].copy_from_slice(&of_block);
        Ok(())
    }

    /// Packs codes and scales, their channels back in the order of the weight.
    fn packed(&self) -> Packed {
        let (rows, cols, size) = (self.rows, self.cols, self.scheme.block_size);
        let blocks = cols / size;
        let mut codes = vec![0; rows * cols / 2];
        let mut scales = vec![0; rows * blocks];
        let of_rows = codes.par_chunks_exact_mut(cols / 2).zip(scales.par_chunks_exact_mut(blocks));
        of_rows.enumerate().for_each(|(row, (codes, scales))| {
            for (channel, &target) in self.hessian_factor.damped().order().iter().enumerate() {
                let code = E2M1.encode(self.elements[row * cols + channel] + 0.0);
                codes[target / 2] |= code << (4 * (target % 2));
                scales[target / size] = self.scales[channel / size * rows + row];
            }
        });
        Packed {
            format: self.scheme.format(),
            block_size: size,
            rows,
            cols,
            codes,
            scales,
            tensor_scale: self.scheme.tensor_scale.stored(&self.factors),
        }
    }
}

/// Borrows `width` rows of a square matrix `[n, n]`, starting at `from`: they propagate the steps
/// of as many channels to the others.
struct Propagation<'a> {
    matrix: &'a [f32],
    n: usize,
    from: usize,
    width: usize,
}

impl Propagation<'_> {
    /// Subtracts the product of the first `width` columns of `steps` and these rows from some
    /// columns of `target [rows, n]`.
    fn subtract(&self, target: &mut [f32], cols: core::ops::Range<usize>, steps: &[f32]) {
        let rows = target.len() / self.n;
        let steps = Matrix::row_major(steps, rows, steps.len() / rows);
        let matrix = Matrix::row_major(self.matrix, self.n, self.n);
        let right = matrix.part(self.from..self.from + self.width, cols.clone());
        let left = steps.part(0..rows, 0..self.width);
        add_product(&mut target[cols.start..], self.n, -1.0, left, right);
    }
}

/// Computes `(a - b)^T H (a - b)`.
fn distance(hessian: &[f32], a: &[f32], b: &[f32]) -> f32 {
    let mut errors = [0.0; MAX_BLOCK];
    let errors = &mut errors[..a.len()];
    errors.iter_mut().zip(a.iter().zip(b)).for_each(|(error, (a, b))| *error = a - b);
    let rows = hessian.chunks_exact(errors.len()).zip(&*errors);
    rows.map(|(row, error)| row.iter().zip(&*errors).map(|(h, e)| h * e).sum::<f32>() * error).sum()
}
