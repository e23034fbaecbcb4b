//! Matmuls of one input with several weights, a family, in one launch of `small_m.rs`.

use cubecl::client::Client;
use cubecl::server::Handle;

use super::launch::launch_small_m;
use super::operands::{MatmulBlueprint, MemberHandles, OperandHandles};
use super::plan::{Matmul, SmallM};
use super::prefetch::Prefetch;
use crate::memory::check_memory;
use crate::packed::PackedHandles;
use crate::plan::{Capability, Refusal, WgmmaSupport};

/// Matmuls of one input with several weights in one launch; see [`Matmul::family`].
#[derive(Debug, Clone, PartialEq)]
pub struct FamilyPlan {
    first: Matmul,
    /// Packed rows of the other weights.
    others: Vec<usize>,
    device: Capability,
    launch: SmallM,
}

impl Matmul {
    /// Plans matmuls of one input as one launch, or returns `None` if they differ in more than
    /// their packed rows, or the kernel for at most 16 rows of the input does not take them all.
    ///
    /// One launch keeps more of the device busy than short ones in turn. Sums have the order of a
    /// matmul with the packed rows of all weights, so that bits may differ from those of
    /// [`plan`](Self::plan).
    pub fn family(matmuls: &[Self], device: &Capability) -> Option<FamilyPlan> {
        let [first, others @ ..] = matmuls else { return None };
        let all = matmuls.iter().map(|matmul| matmul.n).sum();
        let same = |matmul: &Self| Self { n: first.n, ..*matmul } == *first && matmul.n > 0;
        if others.is_empty() || first.m == 0 || !matmuls.iter().all(same) {
            return None;
        }
        let launch = Self { n: all, ..*first }.small_m_launch(device).ok()?;
        let others = others.iter().map(|matmul| matmul.n).collect();
        Some(FamilyPlan { first: *first, others, device: *device, launch })
    }
}

impl FamilyPlan {
    /// Returns the matmul with the first weight.
    pub fn first(&self) -> &Matmul {
        &self.first
    }

    /// Returns the matmul with each weight.
    fn matmuls(&self) -> impl Iterator<Item = Matmul> {
        let first = self.first;
        let others = self.others.iter().map(move |&n| Matmul { n, ..first });
        [first].into_iter().chain(others)
    }

    /// Computes the products of an input `[m, k]` with all weights, an output `[m, n]` each; see
    /// [`MatmulPlan::run`](super::MatmulPlan::run). All weights have one tensor scale, or one per
    /// packed row. All have a bias `[n]`, or none.
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
        let Matmul { m, k, dtype, .. } = *first;
        let same = |what, expected, found| match expected == found {
            true => Ok(()),
            false => Err(Refusal::Mismatch { what, expected, found }),
        };
        same("weights of a family", others.len() + 1, weights.len())?;
        check_memory("input", &input, m * k * dtype.size())?;
        let prefetch = prefetch.filter(|_| device.wgmma == WgmmaSupport::Ptx);
        if let Some(next) = &prefetch {
            next.check()?;
        }
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
        let outputs: Vec<Handle> =
            self.matmuls().map(|matmul| client.empty(m * matmul.n * dtype.size())).collect();
        let members = weights.into_iter().zip(self.matmuls()).zip(&outputs);
        let mut members = members.map(|(((weight, bias), Matmul { n, .. }), output)| {
            MemberHandles { weight, bias, output: output.clone(), n }
        });
        let Some(MemberHandles { weight, bias, output, .. }) = members.next() else {
            return Ok(outputs);
        };
        let rows = self.matmuls().map(|matmul| matmul.n).sum();
        let handles = OperandHandles { weight, input, bias, prefetch, rows };
        let blueprint = MatmulBlueprint::new(first, device, &handles);
        launch_small_m(client, handles, output, first, members.collect(), blueprint, *launch);
        Ok(outputs)
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
        assert_eq!(of(&[4096], 1), None);
        assert_eq!(of(&[4096, 0], 1), None);
        assert_eq!(of(&[4096, 4096], 17), None);
        let other = [matmul(1, 4096, 4096), matmul(1, 4096, 8192)];
        assert_eq!(Matmul::family(&other, &GPU), None);
    }
}
