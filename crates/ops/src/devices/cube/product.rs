//! Products straight from the codes of a weight: planned, then run as planned.

use burn_cubecl::tensor::CubeTensor;
use burn_fp4_cubecl::cubecl::server::Handle;
use burn_fp4_cubecl::{Capability, Dtype, Packed, Product, ProductPlan, gemv, mma};

use crate::layout::Fp4Layout;

/// A product that runs straight from the codes of its weight.
pub(crate) struct PlannedProduct {
    product: Product,
    plan: ProductPlan,
}

impl PlannedProduct {
    /// The product of an input of so many rows with a weight of this layout, unless a plan refuses
    /// it or a dense product is faster.
    pub(crate) fn new(
        inputs: usize,
        layout: &Fp4Layout,
        dtype: Dtype,
        device: &Capability,
    ) -> Option<Self> {
        let [channels, outputs] = layout.shape[..] else { return None };
        if layout.axis != 0 {
            return None;
        }
        let Fp4Layout { format, block_size, .. } = *layout;
        let product = Product { inputs, outputs, channels, format, block_size, dtype };
        match product.plan(device) {
            Ok(ProductPlan::Dense) | Err(_) => None,
            Ok(plan) => Some(Self { product, plan }),
        }
    }

    /// The contracted axis.
    pub(crate) fn channels(&self) -> usize {
        self.product.channels
    }

    /// Outputs for each row of the input.
    pub(crate) fn outputs(&self) -> usize {
        self.product.outputs
    }

    /// `[inputs, outputs]`, by the kernel that the plan names.
    pub(crate) fn run(
        &self,
        input: &CubeTensor,
        weight: Packed,
        bias: Option<Handle>,
        device: &Capability,
    ) -> Handle {
        let kernel = match self.plan {
            ProductPlan::Mma(_) => mma,
            ProductPlan::Gemv(_) => gemv,
            ProductPlan::Dense => unreachable!("not planned as one from the codes"),
        };
        kernel(&input.client, device, weight, input.handle.clone(), bias, &self.product)
            .expect("planned")
    }
}
