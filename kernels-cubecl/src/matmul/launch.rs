//! Launches a [`MatmulPlan`]: the kernel of the plan, compiled for its dtype. A [`FamilyPlan`] has
//! several weights for one input, in one launch of `small_m.rs`.

use cubecl::client::Client;
use cubecl::server::Handle;
use half::{bf16, f16};

use super::operands::{MatmulBlueprint, MemberHandles, OperandHandles};
use super::plan::{Fp8Plan, Kernel, Matmul, MatmulPlan, Mma, NormPlan, ROW_CUBES, SmallM};
use super::prefetch::Prefetch;
use super::small_m::LinkHandles;
use super::small_m_input::NormOperands;
use super::{
    fp8_input, gemv, mma, portable_cmma, portable_gemm, portable_gemv, small_m, wgmma, wgmma_fp8,
};
use crate::instructions::{
    EmulatedMma, EmulatedWgmma, MmaInstructions, PlaneMma, WgmmaInstructions,
};
#[cfg(feature = "cuda")]
use crate::instructions::{PtxMma, PtxWgmma};
use crate::memory::{PackedHandles, check_memory};
#[cfg(feature = "cuda")]
use crate::plan::WgmmaSupport;
use crate::plan::{Capability, Dtype, Refusal};

impl MatmulPlan {
    /// Returns the matmul that was planned.
    #[must_use]
    pub fn matmul(&self) -> &Matmul {
        &self.matmul
    }

    /// Returns the device that it was planned for.
    #[must_use]
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
        let Matmul { m, n, k, dtype, .. } = *matmul;
        matmul.check_weight(&weight, bias.as_ref())?;
        check_memory("input", &input, m * k * dtype.size())?;
        let prefetch = Prefetch::checked(prefetch.filter(|_| self.prefetches()), device)?;
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
                let link = LinkHandles {
                    handles,
                    output: made,
                    matmul: *matmul,
                    family: Vec::new(),
                    norm: None,
                    blueprint,
                    plan,
                };
                launch_small_m(client, device, vec![link], None);
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
                let launch = match (plan.scratch, device.wgmma) {
                    #[cfg(feature = "cuda")]
                    (0, WgmmaSupport::Ptx) => mma_of::<PtxMma>(matmul),
                    (0, _) => mma_of::<PlaneMma>(matmul),
                    _ => mma_of::<EmulatedMma>(matmul),
                };
                launch(client, handles, made, matmul, blueprint, plan);
            }
        }
        Ok(output)
    }
}

impl Fp8Plan {
    /// Returns the matmul that was planned.
    #[must_use]
    pub fn matmul(&self) -> &Matmul {
        &self.matmul
    }

    /// Computes `input x weight^T + bias` with the input rounded to E4M3 by rows: to nearest,
    /// relative to a 448th of the largest magnitude of the row. `rows` comes from
    /// [`fp8_rows`](super::fp8_rows) for the same weight; products with it are exact if E4M3 holds
    /// those of all blocks. The matrix instructions add them with fewer bits than f32.
    ///
    /// Shapes and dtypes are those of [`MatmulPlan::run`]. A row of the input with NaN or infinity
    /// gives NaN, one below 2^-118 is zeros.
    ///
    /// # Errors
    /// [`Refusal::Memory`] and [`Refusal::TensorScales`]; nothing is launched then.
    pub fn run(
        &self,
        client: &Client,
        weight: PackedHandles,
        rows: Handle,
        input: Handle,
        bias: Option<Handle>,
    ) -> Result<Handle, Refusal> {
        let Self { matmul, device, launch: plan } = self;
        let Matmul { m, n, k, dtype, .. } = *matmul;
        matmul.check_weight(&weight, bias.as_ref())?;
        check_memory("input", &input, m * k * dtype.size())?;
        check_memory("rows", &rows, 2 * 4 * n)?;
        let output = client.empty(m * n * dtype.size());
        if m * n == 0 {
            return Ok(output);
        }
        let quantize = match (device.wgmma, dtype == Dtype::Bf16) {
            #[cfg(feature = "cuda")]
            (WgmmaSupport::Ptx, true) => fp8_input::quantize::<PtxWgmma, bf16>,
            #[cfg(feature = "cuda")]
            (WgmmaSupport::Ptx, false) => fp8_input::quantize::<PtxWgmma, f16>,
            (_, true) => fp8_input::quantize::<EmulatedWgmma, bf16>,
            (_, false) => fp8_input::quantize::<EmulatedWgmma, f16>,
        };
        let quantized = quantize(client, device, input.clone(), matmul, plan.padded(m));
        let handles = OperandHandles { weight, input, bias, prefetch: None, rows: n };
        let blueprint = MatmulBlueprint::new(matmul, device, &handles);
        let launch = match (device.wgmma, dtype == Dtype::Bf16) {
            #[cfg(feature = "cuda")]
            (WgmmaSupport::Ptx, true) => wgmma_fp8::launch::<PtxWgmma, bf16>,
            #[cfg(feature = "cuda")]
            (WgmmaSupport::Ptx, false) => wgmma_fp8::launch::<PtxWgmma, f16>,
            // Without the CUDA feature every device emulates.
            (_, true) => wgmma_fp8::launch::<EmulatedWgmma, bf16>,
            (_, false) => wgmma_fp8::launch::<EmulatedWgmma, f16>,
        };
        launch(client, handles, quantized, rows, output.clone(), matmul, blueprint, *plan);
        Ok(output)
    }
}

impl Matmul {
    /// Checks that the memory of a weight and of a bias is long enough.
    fn check_weight(&self, weight: &PackedHandles, bias: Option<&Handle>) -> Result<(), Refusal> {
        let Self { n, k, block_size, dtype, .. } = *self;
        check_memory("codes", &weight.codes, n * k / 2)?;
        check_memory("scales", &weight.scales, n * k / block_size)?;
        weight.check_tensor_scales(n)?;
        bias.map_or(Ok(()), |bias| check_memory("bias", bias, n * dtype.size()))
    }
}

/// Launch of `mma.rs`.
type LaunchMma = fn(&Client, OperandHandles, Handle, &Matmul, MatmulBlueprint, Mma);

/// Launch of `small_m.rs`.
type LaunchSmallM = fn(&Client, Vec<LinkHandles>, Handle);

/// Returns the launch of `mma.rs` for a dtype, which is never f32.
fn mma_of<I: MmaInstructions>(matmul: &Matmul) -> LaunchMma {
    match (matmul.dtype == Dtype::Bf16, matmul.block_size) {
        (true, 16) => mma::launch::<I, bf16, u16>,
        (true, _) => mma::launch::<I, bf16, u8>,
        (false, 16) => mma::launch::<I, f16, u16>,
        (false, _) => mma::launch::<I, f16, u8>,
    }
}

/// Returns the launch of `small_m.rs` for a dtype, which is never f32.
fn small_m_of<I: MmaInstructions, C: WgmmaInstructions>(matmul: &Matmul) -> LaunchSmallM {
    match (matmul.dtype == Dtype::Bf16, matmul.block_size) {
        (true, 16) => small_m::launch::<I, C, bf16, u32>,
        (true, _) => small_m::launch::<I, C, bf16, u16>,
        (false, 16) => small_m::launch::<I, C, f16, u32>,
        (false, _) => small_m::launch::<I, C, f16, u16>,
    }
}

/// Launches `small_m.rs` for links of one kind, with the instructions that the plans are for.
/// Several links need counters.
fn launch_small_m(
    client: &Client,
    device: &Capability,
    links: Vec<LinkHandles>,
    counters: Option<Handle>,
) {
    let Some(first) = links.first() else { return };
    // A single link does not read them.
    let counters = counters.unwrap_or_else(|| first.handles.input.clone());
    let launch = match (first.plan.scratch, device.wgmma) {
        #[cfg(feature = "cuda")]
        (0, WgmmaSupport::Ptx) => small_m_of::<PtxMma, PtxWgmma>(&first.matmul),
        (0, _) => small_m_of::<PlaneMma, EmulatedWgmma>(&first.matmul),
        _ => small_m_of::<EmulatedMma, EmulatedWgmma>(&first.matmul),
    };
    launch(client, links, counters);
}

/// Matmuls of one input with some weights in one launch, also with what comes before and after them
/// in a decoder: see [`Matmul::family`], [`with_norm`](Self::with_norm) and
/// [`with_swiglu`](Self::with_swiglu).
///
/// ```
/// use burn_fp4_cubecl::{Capability, Dtype, Matmul};
/// use burn_fp4_search::formats::Fp4Format;
/// # let gpu = Capability {
/// #     plane: 32, cubes: 528, max_cubes: u32::MAX, converts_bf16: true, mma: true,
/// #     wgmma: burn_fp4_cubecl::WgmmaSupport::None, fast_shared_memory: true, doubles: true,
/// #     decoding: burn_fp4_cubecl::Decoding::Subnormals, portable: None,
/// # };
///
/// // `gpu` is the one in the example of `Capability`.
/// let (format, block_size, dtype) = (Fp4Format::NvFp4, 16, Dtype::Bf16);
/// let query = Matmul { m: 1, n: 4096, k: 4096, format, block_size, dtype };
/// let key = Matmul { n: 1024, ..query };
/// let family = Matmul::family(&[query, key, key], &gpu).expect("few rows");
/// assert_eq!(*family.first(), query);
/// assert!(family.with_norm(true).is_some());
/// assert!(family.with_swiglu().is_none(), "three outputs");
///
/// let prompt = Matmul { m: 128, ..query };
/// assert_eq!(Matmul::family(&[prompt, prompt], &gpu), None); // many rows
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct FamilyPlan {
    first: Matmul,
    /// Packed rows of the other weights.
    others: Vec<usize>,
    device: Capability,
    launch: SmallM,
}

/// Outputs of [`FamilyPlan::run`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FamilyOutputs {
    /// The input plus the update of the norm, in the shape of the input; none without an update.
    pub sums: Option<Handle>,
    /// `[m, n]` for each weight, or one for SwiGLU.
    pub outputs: Vec<Handle>,
}

impl Matmul {
    /// Plans matmuls of one input as one launch, or returns `None` if they differ in more than
    /// their packed rows, or the kernel for at most 16 rows of the input does not take them all.
    ///
    /// One launch keeps more of the device busy than short ones in turn. Sums have the order of a
    /// matmul with the packed rows of all weights, so that bits may differ from a launch of
    /// [`plan`](Self::plan).
    #[must_use]
    pub fn family(matmuls: &[Self], device: &Capability) -> Option<FamilyPlan> {
        let [first, others @ ..] = matmuls else { return None };
        let all = matmuls.iter().map(|matmul| matmul.n).sum();
        let same = |matmul: &Self| Self { n: first.n, ..*matmul } == *first && matmul.n > 0;
        if first.m == 0 || !matmuls.iter().all(same) {
            return None;
        }
        let mut launch = Self { n: all, ..*first }.small_m_launch(device).ok()?;
        launch.whole = matmuls.iter().all(|matmul| matmul.n.is_multiple_of(16));
        let others = others.iter().map(|matmul| matmul.n).collect();
        Some(FamilyPlan { first: *first, others, device: *device, launch })
    }
}

impl FamilyPlan {
    /// Returns the matmul with the first weight.
    #[must_use]
    pub fn first(&self) -> &Matmul {
        &self.first
    }

    /// Returns the matmul with each weight.
    fn matmuls(&self) -> impl Iterator<Item = Matmul> {
        let first = self.first;
        let others = self.others.iter().map(move |&n| Matmul { n, ..first });
        [first].into_iter().chain(others)
    }

    /// Returns the plan with an RMSNorm of the input before the matmuls, after an addition if
    /// `adds`, or `None` if the input has several rows, or one that the registers of a cube do not
    /// hold. The bits are those of [`rms_norm`](crate::rms_norm).
    #[must_use]
    pub fn with_norm(&self, adds: bool) -> Option<Self> {
        let norm = NormPlan::of(self.first.k, self.launch.units(), adds);
        // Planes add the squares; where matrix instructions are emulated there are none.
        let norm = norm.filter(|_| self.first.m == 1 && self.launch.scratch == 0)?;
        // Each cube repeats the norm: no more of them than run at once.
        let at_once = if self.device.wgmma.is_native() { ROW_CUBES } else { 2 };
        let cubes = self.device.cubes / 4 * at_once;
        let launch = SmallM { norm: Some(norm), cubes, ..self.launch };
        Some(Self { launch, ..self.clone() })
    }

    /// Returns the plan with SwiGLU of its outputs, `silu(first) x second`, or `None` unless there
    /// are two of one length.
    #[must_use]
    pub fn with_swiglu(&self) -> Option<Self> {
        let launch = SmallM { gated: true, ..self.launch };
        let two = self.others == [self.first.n];
        two.then(|| Self { launch, ..self.clone() })
    }

    /// Returns the number of outputs.
    fn outputs(&self) -> usize {
        if self.launch.gated { 1 } else { 1 + self.others.len() }
    }

    /// Computes the products of an input `[m, k]` with all weights, an output `[m, n]` each; see
    /// [`MatmulPlan::run`]. All weights have one tensor scale, or one per packed row. All have a
    /// bias `[n]`, or none. `norm` must match the plan; its operands are `[k]`, in the dtype of the
    /// matmul.
    ///
    /// ```no_run
    /// use burn_fp4_cubecl::cubecl::Device;
    /// use burn_fp4_cubecl::{Capability, Dtype, Matmul, PackedHandles};
    /// use burn_fp4_search::formats::Fp4Format;
    ///
    /// let client = Device::cuda(0).expect("a GPU").client();
    /// let device = Capability::of(&client);
    /// let (format, block_size, dtype) = (Fp4Format::NvFp4, 16, Dtype::Bf16);
    /// let query = Matmul { m: 1, n: 4096, k: 4096, format, block_size, dtype };
    /// let key = Matmul { n: 1024, ..query };
    /// let family = Matmul::family(&[query, key, key], &device).expect("matrix instructions");
    /// let weight = |n: usize| PackedHandles {
    ///     codes: client.empty(n * 4096 / 2),
    ///     scales: client.empty(n * 4096 / 16),
    ///     tensor_scale: client.empty(4),
    ///     tensor_scales: 1,
    /// };
    /// let weights = vec![(weight(4096), None), (weight(1024), None), (weight(1024), None)];
    /// let input = client.empty(4096 * dtype.size());
    /// let found = family.run(&client, weights, input, None, None)?;
    /// assert_eq!(found.outputs.len(), 3);
    /// # Ok::<(), burn_fp4_cubecl::Refusal>(())
    /// ```
    ///
    /// # Errors
    /// [`Refusal::Memory`], [`Refusal::TensorScales`], and [`Refusal::Mismatch`] if there is not
    /// one weight per matmul, weights differ in their bias or tensor scales, or the norm is not the
    /// planned one; nothing is launched then.
    pub fn run(
        &self,
        client: &Client,
        weights: Vec<(PackedHandles, Option<Handle>)>,
        input: Handle,
        norm: Option<NormOperands>,
        prefetch: Option<Prefetch>,
    ) -> Result<FamilyOutputs, Refusal> {
        let launch = self.prepare(client, weights, input, norm, prefetch)?;
        let outputs = launch.outputs().clone();
        launch.run(client);
        Ok(outputs)
    }

    /// Prepares the launch of [`run`](Self::run), which may be a link of a
    /// [`Chain`](super::Chain). The outputs have memory, and no values yet.
    ///
    /// # Errors
    /// Same as [`run`](Self::run).
    pub fn prepare(
        &self,
        client: &Client,
        weights: Vec<(PackedHandles, Option<Handle>)>,
        input: Handle,
        norm: Option<NormOperands>,
        prefetch: Option<Prefetch>,
    ) -> Result<FamilyLaunch, Refusal> {
        let Self { first, others, device, launch } = self;
        let Matmul { m, k, dtype, .. } = *first;
        let same = |what, expected, found| match expected == found {
            true => Ok(()),
            false => Err(Refusal::Mismatch { what, expected, found }),
        };
        same("weights of a family", others.len() + 1, weights.len())?;
        check_memory("input", &input, m * k * dtype.size())?;
        let planned = launch.norm.map_or([false; 2], |norm| [true, norm.adds]);
        let added = norm.as_ref().and_then(|norm| norm.update.as_ref());
        same("norms of a family", planned[0].into(), norm.is_some().into())?;
        same("updates before a norm", planned[1].into(), added.is_some().into())?;
        if let Some(norm) = &norm {
            check_memory("weight of the norm", &norm.weight, k * dtype.size())?;
        }
        if let Some(update) = added {
            check_memory("update", update, k * dtype.size())?;
        }
        let prefetch = Prefetch::checked(prefetch, device)?;
        let facts = |(weight, bias): &(PackedHandles, Option<Handle>)| {
            [bias.is_some(), weight.tensor_scales > 1].map(usize::from)
        };
        let [has_bias, by_row] = facts(&weights[0]);
        for (weight, matmul) in weights.iter().zip(self.matmuls()) {
            matmul.check_weight(&weight.0, weight.1.as_ref())?;
            let [bias, scales] = facts(weight);
            same("biases of a weight", has_bias, bias)?;
            same("tensor scales per row", by_row, scales)?;
        }
        let outputs: Vec<Handle> = self
            .matmuls()
            .take(self.outputs())
            .map(|matmul| client.empty(m * matmul.n * dtype.size()))
            .collect();
        let sums = added.map(|_| client.empty(k * dtype.size()));
        let found = FamilyOutputs { sums, outputs };
        // The other weight of SwiGLU stores nothing.
        let stored = found.outputs.iter().cycle();
        let members = weights.into_iter().zip(self.matmuls()).zip(stored);
        let mut members = members.map(|(((weight, bias), Matmul { n, .. }), output)| {
            MemberHandles { weight, bias, output: output.clone(), n }
        });
        let first_member = members.next().expect("as many weights as matmuls, one or more");
        let MemberHandles { weight, bias, output, .. } = first_member;
        let members = members.collect();
        let rows = self.matmuls().map(|matmul| matmul.n).sum();
        // Without an update no sums are stored.
        let norm = norm.map(|norm| (norm, found.sums.clone().unwrap_or_else(|| input.clone())));
        let handles = OperandHandles { weight, input, bias, prefetch, rows };
        let blueprint = MatmulBlueprint::new(first, device, &handles);
        let link = LinkHandles {
            handles,
            output,
            matmul: *first,
            family: members,
            norm,
            blueprint,
            plan: *launch,
        };
        Ok(FamilyLaunch { device: *device, link, found })
    }
}

/// A family with its operands, made by [`FamilyPlan::prepare`].
#[derive(Clone)]
pub struct FamilyLaunch {
    device: Capability,
    link: LinkHandles,
    found: FamilyOutputs,
}

impl FamilyLaunch {
    /// Returns the outputs, which have no values before the launch.
    #[must_use]
    pub fn outputs(&self) -> &FamilyOutputs {
        &self.found
    }

    /// Launches the kernel.
    pub fn run(self, client: &Client) {
        launch_small_m(client, &self.device, vec![self.link], None);
    }

    /// Returns true if the family may be a link of a [`Chain`](super::Chain).
    #[must_use]
    pub fn may_be_linked(&self) -> bool {
        let plan = &self.link.plan;
        self.device.wgmma.is_native() && plan.is_row() && plan.scratch == 0
    }

    /// Returns true if one launch takes both as links.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let kind = |launch: &Self| {
            let LinkHandles { matmul, plan, .. } = &launch.link;
            (launch.device, matmul.dtype, matmul.block_size, plan.units())
        };
        kind(self) == kind(other)
    }

    /// Returns true if an output of this family is a bias, or the weight of the norm, of another:
    /// kernels expect these to be there before the launch.
    pub(super) fn makes_constants(&self, other: &Self) -> bool {
        let LinkHandles { handles, family, norm, .. } = &other.link;
        let biases = family.iter().filter_map(|member| member.bias.as_ref());
        let of_norm = norm.iter().map(|(norm, _)| &norm.weight);
        let mut constants = handles.bias.iter().chain(biases).chain(of_norm);
        let memory = |handle: &Handle| handle.memory.descriptor().id.value;
        let made = || self.found.outputs.iter().chain(&self.found.sums);
        constants.any(|constant| made().any(|made| memory(made) == memory(constant)))
    }

    /// Launches families that [are alike](Self::is_like) as links of one kernel, given counters of
    /// 0. Only the last one prefetches the weight of another matmul.
    pub(super) fn run_linked(client: &Client, families: Vec<Self>, counters: Handle) {
        let Some(last) = families.len().checked_sub(1) else { return };
        let device = families[last].device;
        let mut links: Vec<_> = families.into_iter().map(|family| family.link).collect();
        links[..last].iter_mut().for_each(|link| link.handles.prefetch = None);
        launch_small_m(client, &device, links, Some(counters));
    }
}

#[cfg(test)]
mod tests {
    use burn_fp4_search::formats::Fp4Format;

    use super::*;
    use crate::plan::{Dtype, GPU};

    fn matmul(m: usize, n: usize, k: usize) -> Matmul {
        let (format, block_size, dtype) = (Fp4Format::NvFp4, 16, Dtype::Bf16);
        Matmul { m, n, k, format, block_size, dtype }
    }

    #[test]
    fn a_family_is_launched_as_one_matmul_with_all_of_its_rows() {
        let of = |lengths: &[usize], m| {
            let matmuls: Vec<_> = lengths.iter().map(|&n| matmul(m, n, 4096)).collect();
            let plan = Matmul::family(&matmuls, &GPU)?;
            assert!(plan.matmuls().eq(matmuls));
            Some(plan.launch)
        };
        let launch = |m, n| matmul(m, n, 4096).small_m_launch(&GPU).unwrap();
        assert_eq!(of(&[4096, 1024, 1024], 1), Some(launch(1, 6144)));
        // There are enough rows together, not alone.
        assert_eq!(of(&[1024, 7168], 16), Some(launch(16, 8192)));
        assert_eq!(of(&[4096], 1), Some(launch(1, 4096)));
        // Each weight counts, not their sum.
        assert!(!of(&[40, 40], 1).expect("few rows").whole);
        assert!(of(&[64, 16], 1).expect("few rows").whole);
        assert_eq!(of(&[4096, 0], 1), None);
        assert_eq!(of(&[4096, 4096], 17), None);
        let other = [matmul(1, 4096, 4096), matmul(1, 4096, 8192)];
        assert_eq!(Matmul::family(&other, &GPU), None);
    }

    #[test]
    fn norms_of_one_short_row_and_swiglu_of_two_equal_weights_join_a_family() {
        let of = |m, k, lengths: &[usize]| {
            let matmuls: Vec<_> = lengths.iter().map(|&n| matmul(m, n, k)).collect();
            Matmul::family(&matmuls, &GPU).expect("few rows")
        };
        assert!(of(1, 4096, &[4096]).with_norm(true).is_some());
        assert!(of(1, 8192, &[6144]).with_norm(false).is_some());
        assert_eq!(of(1, 16384, &[4096]).with_norm(false), None);
        assert_eq!(of(2, 4096, &[4096]).with_norm(false), None);
        let gated = of(16, 4096, &[14336, 14336]).with_swiglu().expect("two equal weights");
        assert_eq!((gated.outputs(), gated.launch.tile_n()), (1, 32));
        assert_eq!(of(1, 4096, &[14336]).with_swiglu(), None);
        assert_eq!(of(1, 4096, &[14336, 4096]).with_swiglu(), None);
        assert_eq!(of(1, 4096, &[4096; 3]).with_swiglu(), None);
    }
}
