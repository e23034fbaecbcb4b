//! The order of products while they are computed: panels of 16 packed rows.

use super::dense::HostElement;
use super::threads::{Work, for_each_chunk, per_microsecond};

/// Number of packed rows of a panel.
pub(super) const PANEL: usize = 16;

/// Writes products `[panels, inputs, PANEL]` as `[inputs, outputs]`.
pub(super) fn write<T: HostElement>(products: &[f32], inputs: usize, output: &mut [T]) {
    let outputs = output.len() / inputs;
    let work = Work::new(output.len(), per_microsecond::WRITTEN);
    for_each_chunk(
        work,
        output,
        outputs,
        || (),
        |(), row, output| {
            let panels = products.chunks_exact(PANEL).skip(row).step_by(inputs);
            for (output, products) in output.chunks_mut(PANEL).zip(panels) {
                T::write(&products[..output.len()], output);
            }
        },
    );
}
