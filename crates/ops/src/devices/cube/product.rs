//! Products straight from the codes of a weight.

use burn_fp4_cubecl::{Capability, Dtype, PlannedProduct, Product};

use crate::layout::Fp4Layout;

/// The product of an input of so many rows with a weight of this layout, unless a plan refuses it
/// or a dense product is faster.
pub(crate) fn planned(
    inputs: usize,
    layout: &Fp4Layout,
    dtype: Dtype,
    device: &Capability,
) -> Option<PlannedProduct> {
    let [channels, outputs] = layout.shape[..] else { return None };
    if layout.axis != 0 {
        return None;
    }
    let Fp4Layout { format, block_size, .. } = *layout;
    let product = Product { inputs, outputs, channels, format, block_size, dtype };
    product.plan(device).ok().flatten()
}
