//! A planned product is run: the kernel that its plan names, compiled for its dtype.

use cubecl::client::Client;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::finish::{Factors, ProductRecipe};
use super::plan::{Kernel, PlannedProduct, Product};
use super::{gemv, mma};
use crate::packed::PackedHandles;
use crate::plan::Dtype;

impl PlannedProduct {
    /// The product that was planned.
    pub fn product(&self) -> &Product {
        &self.product
    }

    /// `input x weight^T + bias`: sums in f32, multiplied with the tensor scale, rounded once.
    ///
    /// The input is `[inputs, channels]`, the bias `[outputs]`, both in the dtype of the product;
    /// so is the output `[inputs, outputs]`. The client is of the device that was planned for.
    pub fn run(
        &self,
        client: &Client,
        weight: PackedHandles,
        input: Handle,
        bias: Option<Handle>,
    ) -> Handle {
        let Self { product, device, kernel } = self;
        let length = product.inputs * product.outputs;
        let output = client.empty(length * product.dtype.size());
        if length == 0 {
            return output;
        }
        let factors = Factors { weight, input, bias };
        let recipe = ProductRecipe::new(product, device, &factors);
        let made = output.clone();
        match *kernel {
            Kernel::Gemv(plan) => {
                let launch = match product.dtype {
                    Dtype::F32 => gemv::launch::<f32>,
                    Dtype::F16 => gemv::launch::<f16>,
                    Dtype::Bf16 => gemv::launch::<bf16>,
                };
                launch(client, factors, made, product, recipe, plan);
            }
            Kernel::Mma(plan) => {
                // f32 has no such plan.
                let launch = match (product.dtype == Dtype::Bf16, product.block_size) {
                    (true, 16) => mma::launch::<bf16, u16>,
                    (true, _) => mma::launch::<bf16, u8>,
                    (false, 16) => mma::launch::<f16, u16>,
                    (false, _) => mma::launch::<f16, u8>,
                };
                launch(client, factors, made, product, recipe, plan);
            }
        }
        output
    }
}
