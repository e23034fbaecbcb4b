//! Measures the errors of every candidate for every group of weights.
//!
//! A candidate is tried by quantizing a copy of the module, which shares the dense values with it:
//! its codes are those that [`quantize_fp4`](crate::Fp4Module::quantize_fp4) gives.

use std::collections::BTreeMap;
use std::iter;

use burn::module::{Module, Param};
use burn::tensor::{DType, FloatDType, Tensor};
use burn_fp4_ops::{Fp4Scheme, OpsError};

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::pack::job::Jobs;
use crate::pack::packed_parameter::packed_weights;
use crate::pack::quantize::quantize_and_compare;
use crate::packed_weight::PackedWeight;
use crate::report::{Fp4Report, SquaredError};
use crate::transfer::read_vectors;
use crate::walk::parameters::{ModulePath, VisitParameters, visit_parameters};
use crate::walk::select::{ModulePlan, WeightPlan, select};

use super::candidate::Candidate;
use super::report::{CandidateSensitivity, GroupSensitivity, Sensitivity};

/// The sensitivities, and the weights that they were measured on.
#[cfg_attr(
    not(feature = "autodiff"),
    expect(dead_code, reason = "only the measurement of the loss reads more than the report")
)]
pub(crate) struct Measurement {
    pub(crate) sensitivity: Sensitivity,
    pub(super) weights: Weights,
    /// By candidate the packed weights, by path; none of dense ones, and none if not asked for.
    pub(super) packed: Vec<BTreeMap<String, PackedWeight>>,
}

/// The weights that some candidate quantizes.
#[derive(Default)]
pub(super) struct Weights {
    pub(super) by_path: BTreeMap<String, Dense>,
    /// Paths by their number in the module.
    numbers: BTreeMap<usize, String>,
    /// By number that of another weight of the same group.
    joined: BTreeMap<usize, usize>,
}

/// A dense weight.
pub(super) struct Dense {
    /// `[slices, rows, cols]`.
    pub(super) values: Tensor<3>,
    rounded: fn(&PackedWeight, [usize; 3]) -> Tensor<3>,
    bytes: usize,
    #[cfg(feature = "autodiff")]
    plan: WeightPlan,
}

/// Measures every candidate. `keep` is whether packed weights are returned.
pub(crate) fn measure<M: Module>(
    module: &M,
    config: &Fp4Config,
    candidates: &[Candidate],
    keep: bool,
) -> Result<Measurement, Fp4Error> {
    if candidates.is_empty() {
        return Err(Fp4Error::Sensitivity("no candidates"));
    }
    let mut weights = Weights::default();
    let mut found: Vec<BTreeMap<String, Errors>> = Vec::new();
    let mut packed = Vec::new();
    for scheme in schemes(config, candidates)? {
        let Some(scheme) = scheme else {
            found.push(BTreeMap::new());
            packed.push(BTreeMap::new());
            continue;
        };
        let config = config.with_one_scheme(scheme);
        let selection = select(module, &config)?;
        weights.add(module, &selection)?;
        let mut copy = module.clone();
        let report = quantize_and_compare(&mut copy, &selection, &config.calibration)?;
        let codes = packed_weights(&copy);
        found.push(errors(&codes, &weights.by_path, &report)?);
        packed.push(if keep { codes } else { BTreeMap::new() });
    }
    if weights.by_path.is_empty() {
        weights.add(module, &select(module, config)?)?;
    }
    let groups = weights.groups().into_iter().map(|paths| {
        let dense = |path: &String| &weights.by_path[path];
        let of = |(&candidate, found): (&Candidate, &BTreeMap<String, Errors>)| match candidate {
            Candidate::Dense => Some(CandidateSensitivity {
                candidate,
                bytes: paths.iter().map(|path| dense(path).bytes).sum(),
                weight_error: 0.0,
                output_error: Some(0.0),
                loss: None,
            }),
            Candidate::Fp4(_) => {
                let errors: Option<Vec<_>> = paths.iter().map(|path| found.get(path)).collect();
                errors.map(|errors| together(&errors, candidate))
            }
        };
        GroupSensitivity {
            candidates: candidates.iter().zip(&found).filter_map(of).collect(),
            values: paths.iter().map(|path| dense(path).values.shape().num_elements()).sum(),
            paths,
        }
    });
    let sensitivity = Sensitivity { groups: groups.collect(), config: config.clone() };
    Ok(Measurement { sensitivity, weights, packed })
}

/// The schemes of the candidates, with the search of the method. Dense candidates have none, nor do
/// candidates that the method is not defined for.
///
/// # Errors
/// [`Fp4Error::Scheme`] for a candidate that is inconsistent by itself, or if the method is defined
/// for none of those in FP4.
fn schemes(
    config: &Fp4Config,
    candidates: &[Candidate],
) -> Result<Vec<Option<Fp4Scheme>>, Fp4Error> {
    let mut refused = None;
    let mut schemes = Vec::with_capacity(candidates.len());
    for candidate in candidates {
        if let Candidate::Fp4(own) = candidate {
            own.validate().map_err(OpsError::from)?;
        }
        let scheme = candidate.scheme(config);
        let checked = scheme.map(|scheme| scheme.validate().map(|()| scheme));
        schemes.push(checked.transpose().unwrap_or_else(|error| {
            refused.get_or_insert(error);
            None
        }));
    }
    match refused {
        Some(error) if schemes.iter().all(Option::is_none) => Err(OpsError::from(error).into()),
        _ => Ok(schemes),
    }
}

impl Weights {
    /// Adds selected weights: a candidate may have to leave some alone that another quantizes.
    fn add<M: Module>(&mut self, module: &M, selection: &ModulePlan) -> Result<(), Fp4Error> {
        struct Values<'a> {
            plans: BTreeMap<&'a str, (&'a WeightPlan, usize)>,
            found: &'a mut BTreeMap<String, Dense>,
        }

        impl VisitParameters for Values<'_> {
            fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
                let path = path.join();
                let Some(&(plan, bytes)) = self.plans.get(path.as_str()) else { return };
                let values = param.base().without_autodiff();
                let cols = plan.layout.shape[D - 1];
                let rows = values.shape().num_elements() / cols / plan.slices();
                let values = values.reshape([plan.slices(), rows, cols]);
                let dense = Dense {
                    values,
                    rounded: rounded::<D>,
                    bytes,
                    #[cfg(feature = "autodiff")]
                    plan: plan.clone(),
                };
                self.found.insert(path, dense);
            }
        }

        let mut jobs = Jobs::new(selection);
        jobs.measure(module, false)?;
        let mut first_of: BTreeMap<&str, usize> = BTreeMap::new();
        let mut plans = BTreeMap::new();
        for job in &jobs.list {
            let (at, parameter, plan) = (job.number, job.parameter, job.task.plan);
            self.numbers.insert(at, parameter.path.clone());
            let sharing = plan.shares.as_deref();
            let shared = sharing.map_or(at, |group| *first_of.entry(group).or_insert(at));
            self.join(at, shared);
            self.join(at, jobs.list[job.source].number);
            if !self.by_path.contains_key(&parameter.path) {
                plans.insert(parameter.path.as_str(), (plan, parameter.bytes()));
            }
        }
        visit_parameters(module, &mut Values { plans, found: &mut self.by_path });
        Ok(())
    }

    /// The smallest number of a group.
    fn first(&self, mut at: usize) -> usize {
        while let Some(&other) = self.joined.get(&at) {
            at = other;
        }
        at
    }

    fn join(&mut self, left: usize, right: usize) {
        let (left, right) = (self.first(left), self.first(right));
        if left != right {
            self.joined.insert(left.max(right), left.min(right));
        }
    }

    /// The paths of the weights of each group, in the order of the module.
    fn groups(&self) -> Vec<Vec<String>> {
        let mut groups: BTreeMap<usize, Vec<String>> = BTreeMap::new();
        for (&at, path) in &self.numbers {
            groups.entry(self.first(at)).or_default().push(path.clone());
        }
        groups.into_values().collect()
    }
}

/// The values of codes in f32.
fn rounded<const D: usize>(packed: &PackedWeight, dims: [usize; 3]) -> Tensor<3> {
    packed.tensor::<D>().dequantize_to(FloatDType::F32).reshape(dims)
}

/// Sums over a weight.
struct Errors {
    bytes: usize,
    /// `|dW|^2` and `|W|^2`.
    weight: [f64; 2],
    /// `tr(dW^T H dW)` and `tr(W^T H W)`.
    output: Option<[f64; 2]>,
}

/// The errors of a group.
fn together(errors: &[&Errors], candidate: Candidate) -> CandidateSensitivity {
    let ratio = |sums: &mut dyn Iterator<Item = [f64; 2]>| {
        let [error, energy] = sums.fold([0.0, 0.0], |sum, one| [sum[0] + one[0], sum[1] + one[1]]);
        // Below 0 by rounding.
        if error <= 0.0 { 0.0 } else { error / energy }
    };
    let outputs: Option<Vec<_>> = errors.iter().map(|errors| errors.output).collect();
    CandidateSensitivity {
        candidate,
        bytes: errors.iter().map(|errors| errors.bytes).sum(),
        weight_error: ratio(&mut errors.iter().map(|errors| errors.weight)),
        output_error: outputs.map(|outputs| ratio(&mut outputs.into_iter())),
        loss: None,
    }
}

/// Returns the errors of the packed weights that were selected. The errors of outputs come from the
/// report, all others in one transfer per device.
fn errors(
    packed: &BTreeMap<String, PackedWeight>,
    dense: &BTreeMap<String, Dense>,
    report: &Fp4Report,
) -> Result<BTreeMap<String, Errors>, Fp4Error> {
    let (paths, sums): (Vec<&String>, Vec<_>) = dense
        .iter()
        .filter_map(|(path, dense)| Some((path, dense.sums(packed.get(path)?))))
        .unzip();
    let read = read_vectors(sums)?;
    let outputs: BTreeMap<&str, SquaredError> = report
        .parameters
        .iter()
        .filter_map(|one| Some((one.path.as_str(), one.output_error()?)))
        .collect();
    let of = |(path, sums): (&String, Vec<f32>)| {
        let unit = f64::from(sums[0]).powi(2);
        let errors = Errors {
            bytes: packed[path].bytes(),
            weight: [f64::from(sums[1]) * unit, f64::from(sums[2]) * unit],
            output: outputs.get(path.as_str()).map(|sums| [sums.error, sums.energy]),
        };
        (path.clone(), errors)
    };
    Ok(paths.into_iter().zip(read).map(of).collect())
}

impl Dense {
    /// The axis of `[slices, rows, cols]` that inputs are along: 1 or 2. None if they are along one
    /// that slices are not divided at.
    #[cfg(feature = "autodiff")]
    pub(super) fn input_axis(&self) -> Option<usize> {
        (self.plan.layout.axis + 3).checked_sub(self.plan.layout.shape.len()).filter(|&at| at > 0)
    }

    /// `dW` in f32.
    pub(super) fn error(&self, packed: &PackedWeight) -> Tensor<3> {
        (self.rounded)(packed, self.values.dims()) - self.values.clone().cast(DType::F32)
    }

    /// Returns a unit, and in squares of it the squares of the error and of the values, summed up:
    /// `[3]`. The unit is the largest magnitude: squares of very small or large values would not be
    /// f32 numbers.
    fn sums(&self, packed: &PackedWeight) -> Tensor<1> {
        let values = [self.error(packed), self.values.clone().cast(DType::F32)];
        let unit = values[1].clone().abs().max().clamp_min(f32::MIN_POSITIVE);
        let values = values.map(|values| values / unit.clone().unsqueeze::<3>());
        let squares = values.map(|values| (values.clone() * values).sum());
        Tensor::cat(iter::once(unit).chain(squares).collect(), 0)
    }
}
