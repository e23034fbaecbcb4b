//! What every candidate costs every group of weights.
//!
//! A candidate is tried by quantizing a copy of the module, which shares the dense values with it:
//! its codes are those that [`quantize_fp4`](crate::Fp4Module::quantize_fp4) gives.

use std::any::Any;
use std::collections::BTreeMap;

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_fp4_ops::Gram;

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::pack::edit::packed_weights;
use crate::pack::quantize::quantize;
use crate::packed_weight::PackedWeight;
use crate::statistics::Calibration;
use crate::transfer::read_vectors;
use crate::walk::paths::{ModulePath, VisitParameters, visit_parameters};
use crate::walk::plan::WeightPlan;
use crate::walk::select::select;

use super::candidate::Candidate;
use super::report::{CandidateSensitivity, GroupSensitivity, Sensitivity};

/// What was found, and what it was found from.
pub(crate) struct Measured {
    pub(crate) sensitivity: Sensitivity,
    pub(super) dense: BTreeMap<String, Dense>,
    /// By candidate the packed weights, by path; empty for the dense one.
    pub(super) packed: Vec<BTreeMap<String, PackedWeight>>,
}

/// A dense weight.
pub(super) struct Dense {
    /// A tensor of its rank.
    pub(super) values: Box<dyn Any>,
    bytes: usize,
    elements: usize,
    plan: WeightPlan,
}

/// Measures every candidate.
pub(crate) fn measure<M: Module>(
    module: &M,
    config: &Fp4Config,
    candidates: &[Candidate],
) -> Result<Measured, Fp4Error> {
    if candidates.is_empty() {
        return Err(Fp4Error::Sensitivity("no candidates"));
    }
    let mut groups: Vec<(String, Vec<String>)> = Vec::new();
    let mut dense = BTreeMap::new();
    let mut packed = Vec::new();
    let mut found: Vec<BTreeMap<String, Errors>> = Vec::new();
    for candidate in candidates {
        let Some(scheme) = candidate.scheme(config) else {
            packed.push(BTreeMap::new());
            found.push(BTreeMap::new());
            continue;
        };
        let mut config = config.clone();
        config.overrides.clear();
        config.scheme = scheme;
        add_weights(module, &config, &mut groups, &mut dense)?;
        let mut copy = module.clone();
        quantize(&mut copy, &config)?;
        let weights = packed_weights(&copy);
        found.push(errors(&weights, &dense, &config.calibration)?);
        packed.push(weights);
    }
    if groups.is_empty() {
        add_weights(module, config, &mut groups, &mut dense)?;
    }
    let groups = groups.into_iter().map(|(_, paths)| {
        let sum = |of: &dyn Fn(&str) -> usize| paths.iter().map(|path| of(path)).sum::<usize>();
        let values = sum(&|path| dense[path].elements);
        let candidates = candidates.iter().zip(&packed).zip(&found);
        let candidates = candidates.filter_map(|((&candidate, packed), found)| match candidate {
            Candidate::Dense => Some(CandidateSensitivity {
                candidate,
                bytes: sum(&|path| dense[path].bytes),
                weight_error: 0.0,
                output_error: Some(0.0),
                loss: None,
            }),
            Candidate::Fp4(_) => {
                let errors: Option<Vec<&Errors>> =
                    paths.iter().map(|path| found.get(path)).collect();
                let bytes = || sum(&|path| packed[path].bytes());
                errors.map(|errors| together(&errors, candidate, bytes()))
            }
        });
        GroupSensitivity { candidates: candidates.collect(), values, paths }
    });
    let sensitivity = Sensitivity { groups: groups.collect(), config: config.clone() };
    Ok(Measured { sensitivity, dense, packed })
}

/// Adds the weights that a configuration selects and that are not known yet, to the group that they
/// belong to. A candidate may have to leave some alone that another quantizes.
fn add_weights<M: Module>(
    module: &M,
    config: &Fp4Config,
    groups: &mut Vec<(String, Vec<String>)>,
    dense: &mut BTreeMap<String, Dense>,
) -> Result<(), Fp4Error> {
    struct Values<'a> {
        plans: BTreeMap<&'a str, (&'a WeightPlan, usize)>,
        dense: &'a mut BTreeMap<String, Dense>,
    }

    impl VisitParameters for Values<'_> {
        fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
            let path = path.join();
            if let Some(&(plan, bytes)) = self.plans.get(path.as_str()) {
                let values = param.base().without_autodiff();
                let elements = values.shape().num_elements();
                let values = Box::new(values);
                self.dense.insert(path, Dense { values, bytes, elements, plan: plan.clone() });
            }
        }
    }

    let selection = select(module, config)?;
    let mut plans = BTreeMap::new();
    for (_, parameter, plan) in selection.plans() {
        let Some(path) = Some(&parameter.path).filter(|path| !dense.contains_key(*path)) else {
            continue;
        };
        plans.insert(path.as_str(), (plan, parameter.bytes()));
        let id = parameter.id.val().to_string();
        let group = plan.shares.clone().unwrap_or(id);
        match groups.iter_mut().find(|(known, _)| *known == group) {
            Some((_, paths)) => paths.push(path.clone()),
            None => groups.push((group, vec![path.clone()])),
        }
    }
    visit_parameters(module, &mut Values { plans, dense });
    Ok(())
}

/// Sums over a weight.
struct Errors {
    /// `|dW|^2` and `|W|^2`.
    weight: [f64; 2],
    /// `tr(dW^T H dW)` and `tr(W^T H W)`.
    output: Option<[f64; 2]>,
}

/// The errors of a group.
fn together(errors: &[&Errors], candidate: Candidate, bytes: usize) -> CandidateSensitivity {
    let ratio = |sums: &mut dyn Iterator<Item = [f64; 2]>| {
        let [error, energy] = sums.fold([0.0, 0.0], |sum, one| [sum[0] + one[0], sum[1] + one[1]]);
        if error == 0.0 { 0.0 } else { error / energy }
    };
    let outputs: Option<Vec<_>> = errors.iter().map(|errors| errors.output).collect();
    CandidateSensitivity {
        candidate,
        bytes,
        weight_error: ratio(&mut errors.iter().map(|errors| errors.weight)),
        output_error: outputs.map(|outputs| ratio(&mut outputs.into_iter())),
        loss: None,
    }
}

/// The errors of packed weights, of those that were selected; one read-back for each device.
fn errors(
    packed: &BTreeMap<String, PackedWeight>,
    dense: &BTreeMap<String, Dense>,
    calibration: &Calibration,
) -> Result<BTreeMap<String, Errors>, Fp4Error> {
    let weights = dense.iter().filter_map(|(path, dense)| Some((path, packed.get(path)?, dense)));
    let sums = weights.map(|(path, packed, dense)| {
        let axis = dense.plan.layout.axis;
        let gram = |slice| calibration.get_slice(path, axis, slice).filter(|gram| gram.is_whole());
        let grams: Option<Vec<_>> = (0..dense.plan.slices()).map(gram).collect();
        (path.clone(), dense.sums(packed, grams))
    });
    let read = read_vectors(sums.collect())?;
    Ok(read
        .into_iter()
        .map(|(path, sums)| {
            let sums: Vec<f64> = sums.into_iter().map(f64::from).collect();
            let output = (sums.len() > 2).then(|| [sums[2], sums[3]]);
            (path, Errors { weight: [sums[0], sums[1]], output })
        })
        .collect())
}

impl Dense {
    /// The squares of the error and of the values, summed up, and if there are Gram matrices of all
    /// slices those of the outputs, `[2]` or `[4]`.
    fn sums(&self, packed: &PackedWeight, grams: Option<Vec<&Gram>>) -> Tensor<1> {
        let values = self.rounded_and_dense(packed);
        let squares = values.clone().map(|values| (values.clone() * values).sum());
        let mut sums = Vec::from(squares);
        if let Some(grams) = grams {
            let axis = self.plan.layout.axis + 2 - self.plan.layout.shape.len();
            sums.extend(values.map(|values| energy(values, axis, &grams)));
        }
        Tensor::cat(sums, 0)
    }

    /// The error and the values in f32, `[slices, rows, cols]`.
    fn rounded_and_dense(&self, packed: &PackedWeight) -> [Tensor<3>; 2] {
        let shape = &self.plan.layout.shape;
        let cols = shape[shape.len() - 1];
        let rows = self.elements / cols / self.plan.slices();
        let dims = [self.plan.slices(), rows, cols];
        /// Of the rank of a weight.
        fn of<const D: usize>(
            dense: &Dense,
            packed: &PackedWeight,
            dims: [usize; 3],
        ) -> Option<[Tensor<3>; 2]> {
            let values = dense.values.downcast_ref::<Tensor<D>>()?.clone().cast(DType::F32);
            let error = error::<D>(values.clone(), packed);
            Some([error.reshape(dims), values.reshape(dims)])
        }
        let all = [of::<2>, of::<3>, of::<4>, of::<5>, of::<6>];
        let found = all.iter().find_map(|of| of(self, packed, dims));
        found.expect("a weight has two to six axes")
    }
}

/// `dW`.
pub(super) fn error<const D: usize>(dense: Tensor<D>, packed: &PackedWeight) -> Tensor<D> {
    packed.tensor::<D>().dequantize_to(FloatDType::F32) - dense
}

/// `tr(W^T H W)` of all slices, or `tr(W H W^T)` if the inputs are along the last axis, `[1]`.
fn energy(values: Tensor<3>, axis: usize, grams: &[&Gram]) -> Tensor<1> {
    let [_, rows, cols] = values.dims();
    let device = values.device();
    let of_slice = |(slice, gram): (usize, &&Gram)| {
        let matrix = values.clone().slice([slice..slice + 1, 0..rows, 0..cols]);
        let matrix: Tensor<2> = matrix.reshape([rows, cols]);
        let hessian = hessian(gram, &device);
        let product = match axis {
            0 => hessian.matmul(matrix.clone()),
            _ => matrix.clone().matmul(hessian),
        };
        (product * matrix).sum()
    };
    let sums: Vec<_> = grams.iter().enumerate().map(of_slice).collect();
    Tensor::cat(sums, 0).sum()
}

fn hessian(gram: &Gram, device: &Device) -> Tensor<2> {
    let channels = gram.channels();
    Tensor::from_data(TensorData::new(gram.to_f32(), [channels, channels]), device)
}
