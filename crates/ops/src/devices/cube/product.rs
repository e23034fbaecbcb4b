//! Products straight from the codes of a weight.

use burn_fp4_cubecl::{Capability, Dtype, Matmul, MatmulPlan};

use crate::layout::Fp4Layout;

/// The product of an input of so many rows with a weight of this layout, unless a plan refuses it
/// or a dense product is faster.
pub(crate) fn planned(
    m: usize,
    layout: &Fp4Layout,
    dtype: Dtype,
    device: &Capability,
) -> Option<MatmulPlan> {
    let [k, n] = layout.shape[..] else { return None };
    if layout.axis != 0 {
        return None;
    }
    let Fp4Layout { format, block_size, .. } = *layout;
    Matmul { m, n, k, format, block_size, dtype }.plan(device).ok().flatten()
}
