//! The order of products while they are computed: panels of 16 packed rows.

use rayon::prelude::*;

use super::arch::{is_worth_threads, per_microsecond};
use super::dense::HostElement;

/// Number of packed rows of a panel.
pub(super) const PANEL: usize = 16;

/// Writes products `[panels, inputs, PANEL]` as `[inputs, outputs]`.
pub(super) fn write<T: HostElement>(products: &[f32], inputs: usize, output: &mut [T]) {
    let outputs = output.len() / inputs;
    let row = |(row, output): (usize, &mut [T])| {
        let panels = products.chunks_exact(PANEL).skip(row).step_by(inputs);
        for (output, products) in output.chunks_mut(PANEL).zip(panels) {
            T::write(&products[..output.len()], output);
        }
    };
    if is_worth_threads(output.len(), per_microsecond::WRITTEN) {
        output.par_chunks_mut(outputs).enumerate().for_each(row);
    } else {
        output.chunks_mut(outputs).enumerate().for_each(row);
    }
}
