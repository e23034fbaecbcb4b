//! Launches a [`MatmulPlan`]: the kernel of the plan, compiled for its dtype.

use cubecl::client::Client;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::emulated::EmulatedWgmma;
use super::operands::{MatmulBlueprint, MemberHandles, OperandHandles};
use super::plan::{Kernel, Matmul, MatmulPlan, SmallM};
use super::prefetch::Prefetch;
#[cfg(feature = "cuda")]
use super::ptx::PtxWgmma;
use super::{gemv, mma, portable_cmma, portable_gemm, portable_gemv, small_m, wgmma};
use crate::memory::check_memory;
use crate::packed::PackedHandles;
#[cfg(feature = "cuda")]
use crate::plan::WgmmaSupport;
use crate::plan::{Capability, Dtype, Refusal};

impl MatmulPlan {
    /// Returns the matmul that was planned.
    pub fn matmul(&self) -> &Matmul {
        &self.matmul
    }

    /// Returns the device that it was planned for.
    pub fn device(&self) -> &Capability {
        &self.device
    }

    /// Computes `input x weight^T + bias`: sums in f32, multiplied by the tensor scale, rounded
    /// once.
    ///
    /// The input is `[m, k]`, the bias `[n]` and the output `[m, n]`, all in the dtype of the
    /// matmul. The client belongs to the device of the plan. `prefetch` is the weight of the next
    /// matmul: the kernel for at most 16 rows of the input brings it into the L2 cache on compute
    /// capability 9.0. The bits are the same without.
    ///
    /// # Errors
    /// [`Refusal::Memory`] and [`Refusal::TensorScales`]; nothing is launched then.
    pub fn run(
        &self,
        client: &Client,
        weight: PackedHandles,
        input: Handle,
        bias: Option<Handle>,
        prefetch: Option<Prefetch>,
    ) -> Result<Handle, Refusal> {
        let Self { matmul, device, kernel } = self;
        let Matmul { m, n, k, block_size, dtype, .. } = *matmul;
        matmul.check_weight(&weight, bias.as_ref())?;
        check_memory("input", &input, m * k * dtype.size())?;
        let prefetch = prefetch.filter(|_| self.prefetches());
        if let Some(next) = &prefetch {
            next.check()?;
        }
        let output = client.empty(m * n * dtype.size());
        if m * n == 0 {
            return Ok(output);
        }
        let handles = OperandHandles { weight, input, bias, prefetch, rows: n };
        let blueprint = MatmulBlueprint::new(matmul, device, &handles);
        let made = output.clone();
        match *kernel {
            Kernel::Gemv(plan) => {
                let launch = match dtype {
                    Dtype::F32 => gemv::launch::<f32>,
                    Dtype::F16 => gemv::launch::<f16>,
                    Dtype::Bf16 => gemv::launch::<bf16>,
                };
                launch(client, handles, made, matmul, blueprint, plan);
            }
            Kernel::PortableGemv(plan) => {
                let launch = match dtype {
                    Dtype::F32 => portable_gemv::launch::<f32>,
                    Dtype::F16 => portable_gemv::launch::<f16>,
                    Dtype::Bf16 => portable_gemv::launch::<bf16>,
                };
                launch(client, handles, made, matmul, blueprint, plan);
            }
            Kernel::PortableGemm(plan) => {
                let launch = match dtype {
                    Dtype::F32 => portable_gemm::launch::<f32>,
                    Dtype::F16 => portable_gemm::launch::<f16>,
                    Dtype::Bf16 => portable_gemm::launch::<bf16>,
                };
                launch(client, handles, made, matmul, blueprint, plan);
            }
            Kernel::PortableCmma(plan) => {
                // f32 is never planned for this kernel.
                let launch = match dtype {
                    Dtype::Bf16 => portable_cmma::launch::<bf16>,
                    Dtype::F16 | Dtype::F32 => portable_cmma::launch::<f16>,
                };
                launch(client, handles, made, matmul, blueprint, plan);
            }
            Kernel::SmallM(plan) => {
                launch_small_m(client, handles, made, matmul, Vec::new(), blueprint, plan);
            }
            Kernel::Wgmma(plan) => {
                let launch = match (device.wgmma, dtype == Dtype::Bf16) {
                    #[cfg(feature = "cuda")]
                    (WgmmaSupport::Ptx, true) => wgmma::launch::<PtxWgmma, bf16>,
                    #[cfg(feature = "cuda")]
                    (WgmmaSupport::Ptx, false) => wgmma::launch::<PtxWgmma, f16>,
                    // Without the CUDA feature every device emulates.
                    (_, true) => wgmma::launch::<EmulatedWgmma, bf16>,
                    (_, false) => wgmma::launch::<EmulatedWgmma, f16>,
                };
                launch(client, handles, made, matmul, blueprint, plan);
            }
            Kernel::Mma(plan) => {
                // f32 is never planned for this kernel.
                let launch = match (dtype == Dtype::Bf16, block_size) {
                    (true, 16) => mma::launch::<bf16, u16>,
                    (true, _) => mma::launch::<bf16, u8>,
                    (false, 16) => mma::launch::<f16, u16>,
                    (false, _) => mma::launch::<f16, u8>,
                };
                launch(client, handles, made, matmul, blueprint, plan);
            }
        }
        Ok(output)
    }
}

impl Matmul {
    /// Checks that the memory of a weight and of a bias is long enough.
    pub(super) fn check_weight(
        &self,
        weight: &PackedHandles,
        bias: Option<&Handle>,
    ) -> Result<(), Refusal> {
        let Self { n, k, block_size, dtype, .. } = *self;
        check_memory("codes", &weight.codes, n * k / 2)?;
        check_memory("scales", &weight.scales, n * k / block_size)?;
        weight.check_tensor_scales(n)?;
        bias.map_or(Ok(()), |bias| check_memory("bias", bias, n * dtype.size()))
    }
}

/// Launches `small_m.rs` for a dtype, which is never f32.
pub(super) fn launch_small_m(
    client: &Client,
    handles: OperandHandles,
    output: Handle,
    matmul: &Matmul,
    family: Vec<MemberHandles>,
    blueprint: MatmulBlueprint,
    plan: SmallM,
) {
    let launch = match (matmul.dtype == Dtype::Bf16, matmul.block_size) {
        (true, 16) => small_m::launch::<bf16, u32>,
        (true, _) => small_m::launch::<bf16, u16>,
        (false, 16) => small_m::launch::<f16, u32>,
        (false, _) => small_m::launch::<f16, u16>,
    };
    launch(client, handles, output, matmul, family, blueprint, plan);
}
