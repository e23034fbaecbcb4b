//! Launches a [`MatmulPlan`]: the kernel of the plan, compiled for its dtype.

use cubecl::client::Client;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::emulated::EmulatedWgmma;
use super::operands::{MatmulBlueprint, MemberHandles, OperandHandles};
use super::plan::{FamilyPlan, Kernel, Matmul, MatmulPlan, SmallM};
use super::prefetch::Prefetch;
#[cfg(feature = "cuda")]
use super::ptx::PtxWgmma;
use super::{gemv, mma, portable_cmma, portable_gemm, portable_gemv, small_m, wgmma};
use crate::memory::check_memory;
use crate::packed::PackedHandles;
use crate::plan::{Capability, Dtype, Refusal, WgmmaSupport};

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
        check_memory("codes", &weight.codes, n * k / 2)?;
        check_memory("scales", &weight.scales, n * k / block_size)?;
        weight.check_tensor_scales(n)?;
        check_memory("input", &input, m * k * dtype.size())?;
        if let Some(bias) = &bias {
            check_memory("bias", bias, n * dtype.size())?;
        }
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

impl FamilyPlan {
    /// Computes the products of an input with all weights; see [`MatmulPlan::run`]. Every weight
    /// has as many tensor scales as the first: one, or one per packed row. All have a bias, or
    /// none.
    ///
    /// # Errors
    /// [`Refusal::Memory`], [`Refusal::TensorScales`], and [`Refusal::Mismatch`] if there is not
    /// one weight per matmul, or weights differ in their bias or tensor scales; nothing is
    /// launched then.
    pub fn run(
        &self,
        client: &Client,
        weights: Vec<(PackedHandles, Option<Handle>)>,
        input: Handle,
        prefetch: Option<Prefetch>,
    ) -> Result<Vec<Handle>, Refusal> {
        let Self { first, others, device, launch } = self;
        let Matmul { m, k, block_size, dtype, .. } = *first;
        let mismatch = |what, expected, found| Err(Refusal::Mismatch { what, expected, found });
        let (expected, found) = (others.len() + 1, weights.len());
        if found != expected {
            return mismatch("weights of a family", expected, found);
        }
        check_memory("input", &input, m * k * dtype.size())?;
        let mut members = Vec::with_capacity(found);
        for ((weight, bias), n) in weights.into_iter().zip(self.lengths()) {
            check_memory("codes", &weight.codes, n * k / 2)?;
            check_memory("scales", &weight.scales, n * k / block_size)?;
            weight.check_tensor_scales(n)?;
            if let Some(bias) = &bias {
                check_memory("bias", bias, n * dtype.size())?;
            }
            let output = client.empty(m * n * dtype.size());
            members.push(MemberHandles { weight, bias, output, n });
        }
        let prefetch = prefetch.filter(|_| device.wgmma == WgmmaSupport::Ptx);
        if let Some(next) = &prefetch {
            next.check()?;
        }
        let outputs = members.iter().map(|member| member.output.clone()).collect();
        let MemberHandles { weight, bias, output, .. } = members.remove(0);
        for member in &members {
            let [expected, found] = [&bias, &member.bias].map(|bias| usize::from(bias.is_some()));
            if expected != found {
                return mismatch("biases of a weight", expected, found);
            }
            let [expected, found] =
                [&weight, &member.weight].map(|weight| usize::from(weight.tensor_scales > 1));
            if expected != found {
                return mismatch("tensor scales per row", expected, found);
            }
        }
        let rows = self.lengths().sum();
        let handles = OperandHandles { weight, input, bias, prefetch, rows };
        let blueprint = MatmulBlueprint::new(first, device, &handles);
        launch_small_m(client, handles, output, first, members, blueprint, *launch);
        Ok(outputs)
    }
}

/// Launches `small_m.rs` for a dtype, which is never f32.
fn launch_small_m(
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
