//! Matrix products straight from the codes of a weight, counters of them, and packed tensors as
//! kernels take them.

use core::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fp4_cubecl::cubecl::client::Client;
use burn_fp4_cubecl::{Capability, FamilyPlan, Matmul, MatmulPlan, PackedHandles, Refusal};
use burn_fp4_search::{Fp4Scheme, ScaleRule};

use super::device::{capability, kernel_dtype, output_tensor};
use super::{prefetch, queues};
use crate::layout::Fp4Layout;
use crate::primitive::Fp4Primitive;

/// Plans products on a device. It keeps the last plan with the capability of the device, because
/// layers are called with the same number of rows again and again.
pub(crate) struct Planner {
    capability: Capability,
    last: Option<(Matmul, Option<MatmulPlan>)>,
}

impl Planner {
    /// Makes the planner of a device.
    ///
    /// # Errors
    /// The reason why the device multiplies without kernels.
    pub(crate) fn new(device: &CubeDevice, client: &Client) -> Result<Self, Refusal> {
        Ok(Self { capability: capability(device, client)?, last: None })
    }

    /// Plans the product of an input `[m, k]` with a weight `[k, n]`; none if its blocks run along
    /// `n`, a plan refuses it, or a dense product is faster.
    pub(crate) fn plan(
        &mut self,
        m: usize,
        layout: &Fp4Layout,
        dtype: DType,
    ) -> Option<MatmulPlan> {
        let [k, n] = layout.shape[..] else { return None };
        if layout.axis != 0 {
            return None;
        }
        let Fp4Layout { format, block_size, .. } = *layout;
        let matmul = Matmul { m, n, k, format, block_size, dtype: kernel_dtype(dtype) };
        match self.last {
            Some((known, plan)) if known == matmul => plan,
            _ => {
                let plan = matmul.plan(&self.capability).ok().flatten();
                self.last = Some((matmul, plan));
                plan
            }
        }
    }
}

/// Runs a planned product, as a tensor of a shape. While a graph is captured it also prefetches the
/// weight of the next product.
pub(crate) fn run(
    plan: &MatmulPlan,
    input: CubeTensor,
    weight: Fp4Primitive<CubeBackend>,
    bias: Option<CubeTensor>,
    shape: Shape,
) -> CubeTensor {
    let input = into_contiguous(input);
    let bias = bias.map(|bias| into_contiguous(bias).handle);
    let weight = handles(weight);
    let next = prefetch::next_weight(plan.matmul(), &weight);
    let output = plan
        .run(&input.client, weight, input.handle.clone(), bias, next)
        .expect("tensors have the lengths of their shapes");
    queues::submit_launches(&input.device);
    output_tensor(&input, output, shape, input.dtype)
}

/// Runs planned products of one input with some weights, each with a bias or none with one, as
/// tensors of some shapes; see [`run`].
pub(crate) fn run_family(
    family: &FamilyPlan,
    input: CubeTensor,
    weights: Vec<(Fp4Primitive<CubeBackend>, Option<CubeTensor>)>,
    shapes: Vec<Shape>,
) -> Vec<CubeTensor> {
    let input = into_contiguous(input);
    let weights: Vec<_> = weights
        .into_iter()
        .map(|(weight, bias)| (handles(weight), bias.map(|bias| into_contiguous(bias).handle)))
        .collect();
    // The first one stands for its family.
    let next = prefetch::next_weight(family.first(), &weights[0].0);
    let outputs = family
        .run(&input.client, weights, input.handle.clone(), next)
        .expect("tensors have the lengths of their shapes");
    queues::submit_launches(&input.device);
    let tensors = outputs.into_iter().zip(shapes);
    tensors.map(|(output, shape)| output_tensor(&input, output, shape, input.dtype)).collect()
}

/// Returns the parts of a packed tensor in contiguous memory.
pub(super) fn handles(packed: Fp4Primitive<CubeBackend>) -> PackedHandles {
    let tensor_scales = packed.tensor_scale.meta.shape().num_elements();
    let [codes, scales, tensor_scale] = [packed.codes, packed.scales, packed.tensor_scale]
        .map(|tensor| into_contiguous(tensor).handle);
    PackedHandles { codes, scales, tensor_scale, tensor_scales }
}

/// Makes a scheme with the format of a packed tensor. Its values do not depend on how the scales
/// and codes were chosen.
pub(super) fn scheme_of(layout: &Fp4Layout) -> Fp4Scheme {
    Fp4Scheme::of(ScaleRule::of_format(layout.format)).with_block_size(layout.block_size)
}

/// Counts of products with packed weights and of lookups of their rows, since the program started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FusedProducts {
    /// Products straight from the codes.
    pub fused: u64,
    /// Groups of these that were found together in a stream of operations: products of one input,
    /// or one product. Kernels may run a group in one launch.
    pub groups: u64,
    /// Lookups of rows straight from the codes.
    pub lookups: u64,
    /// Products and lookups of a dequantized weight, because a dense product is faster, a plan
    /// refused, or the device has no kernels.
    pub dense: u64,
}

pub(crate) static FUSED: AtomicU64 = AtomicU64::new(0);
pub(crate) static GROUPS: AtomicU64 = AtomicU64::new(0);
pub(crate) static LOOKUPS: AtomicU64 = AtomicU64::new(0);
pub(crate) static DENSE: AtomicU64 = AtomicU64::new(0);

/// Returns the counts of products with packed weights and of lookups since the program started.
///
/// ```
/// use burn_fp4_ops::{FusedProducts, fused_products};
///
/// assert_eq!(fused_products(), FusedProducts::default()); // nothing ran yet
/// ```
#[must_use]
pub fn fused_products() -> FusedProducts {
    FusedProducts {
        fused: FUSED.load(Ordering::Relaxed),
        groups: GROUPS.load(Ordering::Relaxed),
        lookups: LOOKUPS.load(Ordering::Relaxed),
        dense: DENSE.load(Ordering::Relaxed),
    }
}

#[cfg(test)]
mod tests {
    use burn_fp4_cubecl::{Decoding, WgmmaSupport};

    use super::*;

    #[test]
    fn a_plan_is_made_once_for_a_product_and_anew_for_another_one() {
        let capability = Capability {
            plane: 32,
            cubes: 528,
            max_cubes: u32::MAX,
            converts_bf16: true,
            mma: true,
            wgmma: WgmmaSupport::None,
            fast_shared_memory: true,
            doubles: true,
            decoding: Decoding::Subnormals,
            portable: None,
        };
        let mut planner = Planner { capability, last: None };
        let layout = Fp4Layout::new(&[512, 256].into(), 0, &Fp4Scheme::nvfp4()).unwrap();
        let first = planner.plan(1, &layout, DType::F32).expect("a plan");
        // A plan that is made anew is for this device.
        planner.capability.cubes = 264;
        assert_eq!(planner.plan(1, &layout, DType::F32), Some(first));
        for (m, dtype) in [(2, DType::F32), (1, DType::F32), (1, DType::BF16), (1, DType::F32)] {
            let fresh = Planner { capability: planner.capability, last: None }
                .plan(m, &layout, dtype)
                .expect("a plan");
            assert_eq!(planner.plan(m, &layout, dtype), Some(fresh));
            assert_ne!(fresh, first);
        }
        let other = Fp4Layout::new(&[256, 512].into(), 0, &Fp4Scheme::nvfp4()).unwrap();
        let plan = planner.plan(1, &other, DType::F32).expect("a plan");
        assert_eq!((plan.matmul().n, plan.matmul().k), (512, 256));
        assert_eq!(planner.plan(1, &layout.transposed(), DType::F32), None);
    }
}
