//! Growth of the loss by each candidate, to second order.
//!
//! Near a minimum the loss grows by `dW^T F dW / 2`, with the Fisher information `F`: the mean of
//! `g g^T` over gradients `g` of the logarithm of the likelihood. Of `F` the blocks of the outputs
//! of a layer are taken: the errors of different outputs have no sign in common, so that the rest
//! adds up to little. It is never formed: the mean of the squares of `dW^T g` is what is wanted, of
//! each output.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Flag, Module, ModuleMapper, Param};
use burn::tensor::{DType, Gradients, Tensor};

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::transfer::read_vectors;
use crate::walk::parameters::{ModulePath, VisitParameters, visit_parameters};

use super::candidate::Candidate;
use super::measure::{self, Measurement};
use super::report::Sensitivity;

/// Measures every candidate, and what it costs the loss of the batches.
pub(crate) fn measure<M: Module, I>(
    module: &M,
    config: &Fp4Config,
    candidates: &[Candidate],
    batches: impl IntoIterator<Item = I>,
    mut loss: impl FnMut(&M, I) -> Tensor<1>,
) -> Result<Sensitivity, Fp4Error> {
    let measured = measure::measure(module, config, candidates, true)?;
    // Every weight has a gradient, and layers do what they do once trained. Out of autodiff first,
    // where tied weights would share one gradient.
    let differentiated = module.valid().map(&mut Differentiate).train().map(&mut Differentiate);
    let mut sums: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut count = 0;
    for batch in batches {
        let loss = loss(&differentiated, batch);
        if !loss.is_tracked() {
            return Err(Fp4Error::Sensitivity(
                "the loss does not depend on the module it is given",
            ));
        }
        for (path, squares) in squares(&differentiated, &measured, &loss.backward())? {
            let sums = sums.entry(path).or_insert_with(|| vec![0.0; candidates.len()]);
            for (sum, square) in sums.iter_mut().zip(squares) {
                *sum += f64::from(square);
            }
        }
        count += 1;
    }
    if count == 0 {
        return Err(Fp4Error::Sensitivity("no batches"));
    }
    let mut sensitivity = measured.sensitivity;
    let selected = sensitivity.groups.iter().flat_map(|group| group.paths.iter().cloned());
    let missing: BTreeSet<String> = selected.filter(|path| !sums.contains_key(path)).collect();
    if !missing.is_empty() {
        return Err(Fp4Error::NotComparable { paths: missing.into_iter().collect() });
    }
    for group in &mut sensitivity.groups {
        for one in &mut group.candidates {
            let at = candidates.iter().position(|candidate| *candidate == one.candidate);
            let of = |path: &String| at.map_or(0.0, |at| sums[path][at]);
            let sum: f64 = group.paths.iter().map(of).sum();
            one.loss = Some(sum / f64::from(count) / 2.0);
        }
    }
    Ok(sensitivity)
}

/// Lets every weight have a gradient, and no layer behave as in training.
struct Differentiate;

impl ModuleMapper for Differentiate {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.set_require_grad(true)
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        flag.with_value(false)
    }
}

/// Returns, for each path, the squares of `dW^T g` of the outputs of every candidate, summed up.
fn squares<M: Module>(
    differentiated: &M,
    measured: &Measurement,
    gradients: &Gradients,
) -> Result<impl Iterator<Item = (String, Vec<f32>)>, Fp4Error> {
    let mut squares = Squares { measured, gradients, paths: Vec::new(), found: Vec::new() };
    visit_parameters(differentiated, &mut squares);
    Ok(squares.paths.into_iter().zip(read_vectors(squares.found)?))
}

struct Squares<'a> {
    measured: &'a Measurement,
    gradients: &'a Gradients,
    paths: Vec<String>,
    found: Vec<Tensor<1>>,
}

impl VisitParameters for Squares<'_> {
    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        let path = path.join();
        let Some(dense) = self.measured.weights.by_path.get(&path) else { return };
        let Some(gradient) = param.val().grad(self.gradients) else { return };
        let gradient = gradient.cast(DType::F32).reshape(dense.values.dims());
        let of = self.measured.packed.iter().map(|packed| match packed.get(&path) {
            Some(packed) => {
                let products = dense.error(packed) * gradient.clone();
                // Inputs along no axis of their own: as one output.
                let products = match dense.input_axis() {
                    Some(axis) => products.sum_dim(axis),
                    None => products.sum_dim(1).sum_dim(2),
                };
                (products.clone() * products).sum()
            }
            None => Tensor::zeros([1], (&gradient.device(), DType::F32)),
        });
        self.found.push(Tensor::cat(of.collect(), 0));
        self.paths.push(path);
    }
}
