//! A planned product is run: the kernel that its plan names, compiled for its dtype.

use cubecl::client::Client;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::ahead::NextWeight;
use super::finish::{OperandHandles, ProductRecipe};
use super::plain::Plain;
use super::plan::{Kernel, PlannedProduct, Product};
#[cfg(feature = "cuda")]
use super::ptx::Ptx;
use super::{few, gemv, mma, wgmma};
use crate::memory::check_memory;
use crate::packed::PackedHandles;
#[cfg(feature = "cuda")]
use crate::plan::Warpgroups;
use crate::plan::{Dtype, Refusal};

impl PlannedProduct {
    /// The product that was planned.
    pub fn product(&self) -> &Product {
        &self.product
    }

    /// `input x weight^T + bias`: sums in f32, multiplied with the tensor scale, rounded once.
    ///
    /// The input is `[inputs, channels]`, the bias `[outputs]`, both in the dtype of the product;
    /// so is the output `[inputs, outputs]`. The client is of the device that was planned for.
    ///
    /// # Errors
    /// [`Refusal::Memory`] and [`Refusal::TensorScales`]; nothing is launched then.
    pub fn run(
        &self,
        client: &Client,
        weight: PackedHandles,
        input: Handle,
        bias: Option<Handle>,
    ) -> Result<Handle, Refusal> {
        self.run_and_read_ahead(client, weight, input, bias, None)
    }

    /// As [`run`](Self::run), with the same bits. It also brings the weight that is read next, or
    /// the first part of it, into the device's cache: with at most 16 rows of the input, by the
    /// kernel for these, on compute capability 9.0. Otherwise it makes no difference.
    ///
    /// # Errors
    /// As [`run`](Self::run), and [`Refusal::Memory`] of the next weight.
    pub fn run_and_read_ahead(
        &self,
        client: &Client,
        weight: PackedHandles,
        input: Handle,
        bias: Option<Handle>,
        next: Option<NextWeight>,
    ) -> Result<Handle, Refusal> {
        let Self { product, device, kernel } = self;
        let Product { inputs, outputs, channels, block_size, dtype, .. } = *product;
        check_memory("codes", &weight.codes, outputs * channels / 2)?;
        check_memory("scales", &weight.scales, outputs * channels / block_size)?;
        weight.check_tensor_scales(outputs)?;
        check_memory("input", &input, inputs * channels * dtype.size())?;
        if let Some(bias) = &bias {
            check_memory("bias", bias, outputs * dtype.size())?;
        }
        let ahead = next.filter(|_| self.reads_ahead());
        if let Some(next) = &ahead {
            next.check()?;
        }
        let output = client.empty(inputs * outputs * dtype.size());
        if inputs * outputs == 0 {
            return Ok(output);
        }
        let handles = OperandHandles { weight, input, bias, ahead };
        let recipe = ProductRecipe::new(product, device, &handles);
        let made = output.clone();
        match *kernel {
            Kernel::Gemv(plan) => {
                let launch = match dtype {
                    Dtype::F32 => gemv::launch::<f32>,
                    Dtype::F16 => gemv::launch::<f16>,
                    Dtype::Bf16 => gemv::launch::<bf16>,
                };
                launch(client, handles, made, product, recipe, plan);
            }
            Kernel::Few(plan) => {
                // f32 has no such plan.
                let launch = match (dtype == Dtype::Bf16, block_size) {
                    (true, 16) => few::launch::<bf16, u32>,
                    (true, _) => few::launch::<bf16, u16>,
                    (false, 16) => few::launch::<f16, u32>,
                    (false, _) => few::launch::<f16, u16>,
                };
                launch(client, handles, made, product, recipe, plan);
            }
            Kernel::Wgmma(plan) => {
                let launch = match (device.warpgroups, dtype == Dtype::Bf16) {
                    #[cfg(feature = "cuda")]
                    (Warpgroups::Ptx, true) => wgmma::launch::<Ptx, bf16>,
                    #[cfg(feature = "cuda")]
                    (Warpgroups::Ptx, false) => wgmma::launch::<Ptx, f16>,
                    // Without the feature no device has others.
                    (_, true) => wgmma::launch::<Plain, bf16>,
                    (_, false) => wgmma::launch::<Plain, f16>,
                };
                launch(client, handles, made, product, recipe, plan);
            }
            Kernel::Mma(plan) => {
                // f32 has no such plan.
                let launch = match (dtype == Dtype::Bf16, block_size) {
                    (true, 16) => mma::launch::<bf16, u16>,
                    (true, _) => mma::launch::<bf16, u8>,
                    (false, 16) => mma::launch::<f16, u16>,
                    (false, _) => mma::launch::<f16, u8>,
                };
                launch(client, handles, made, product, recipe, plan);
            }
        }
        Ok(output)
    }
}
