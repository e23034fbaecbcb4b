//! What candidates cost the loss, by second order.
//!
//! The loss grows by `dW^T F dW / 2` near a minimum, with the Fisher information `F`: the mean of
//! `g g^T` over gradients `g` of the logarithm of the likelihood. So it is the mean of the squares
//! of `dW^T g`, one number for each batch, candidate and group, and `F` is never formed.

use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::tensor::{DType, Gradients, Tensor};

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::transfer::read_vectors;
use crate::walk::paths::{ModulePath, VisitParameters, visit_parameters};

use super::candidate::Candidate;
use super::measure::{self, Measured, error};
use super::report::Sensitivity;

/// Measures every candidate, and what it costs the loss of the batches.
pub(crate) fn measure<M: Module, I>(
    module: &M,
    config: &Fp4Config,
    candidates: &[Candidate],
    batches: impl IntoIterator<Item = I>,
    mut loss: impl FnMut(&M, I) -> Tensor<1>,
) -> Result<Sensitivity, Fp4Error> {
    let measured = measure::measure(module, config, candidates)?;
    let trained = module.clone().train();
    // By group and candidate.
    let groups = measured.sensitivity.groups.len();
    let mut sums = vec![vec![0.0; candidates.len()]; groups];
    let mut batches_seen = 0;
    for batch in batches {
        let gradients = loss(&trained, batch).backward();
        let products = products(&trained, &measured, &gradients)?;
        for (group, sums) in measured.sensitivity.groups.iter().zip(&mut sums) {
            let of_group: Vec<&Vec<f32>> =
                group.paths.iter().filter_map(|path| products.get(path)).collect();
            for (at, sum) in sums.iter_mut().enumerate() {
                let product: f64 = of_group.iter().map(|products| f64::from(products[at])).sum();
                *sum += product * product;
            }
        }
        batches_seen += 1;
    }
    if batches_seen == 0 {
        return Err(Fp4Error::Sensitivity("no batches"));
    }
    let mut sensitivity = measured.sensitivity;
    for (group, sums) in sensitivity.groups.iter_mut().zip(sums) {
        for one in &mut group.candidates {
            let at = candidates.iter().position(|candidate| *candidate == one.candidate);
            let sum = at.map_or(0.0, |at| sums[at]);
            one.loss = Some(sum / f64::from(batches_seen) / 2.0);
        }
    }
    Ok(sensitivity)
}

/// By path `dW^T g` of every candidate.
fn products<M: Module>(
    trained: &M,
    measured: &Measured,
    gradients: &Gradients,
) -> Result<BTreeMap<String, Vec<f32>>, Fp4Error> {
    let mut products = Products { measured, gradients, found: Vec::new() };
    visit_parameters(trained, &mut products);
    if products.found.is_empty() {
        return Err(Fp4Error::Sensitivity("the loss depends on no selected weight"));
    }
    read_vectors(products.found)
}

struct Products<'a> {
    measured: &'a Measured,
    gradients: &'a Gradients,
    found: Vec<(String, Tensor<1>)>,
}

impl VisitParameters for Products<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        let path = path.join();
        let Some(dense) = self.measured.dense.get(&path) else { return };
        let Some(dense) = dense.values.downcast_ref::<Tensor<D>>() else { return };
        let Some(gradient) = param.val().grad(self.gradients) else { return };
        let (dense, gradient) = (dense.clone().cast(DType::F32), gradient.cast(DType::F32));
        let of = self.measured.packed.iter().map(|packed| match packed.get(&path) {
            Some(packed) => (error(dense.clone(), packed) * gradient.clone()).sum(),
            None => Tensor::zeros([1], &gradient.device()),
        });
        let products = Tensor::cat(of.collect(), 0);
        self.found.push((path, products));
    }
}
