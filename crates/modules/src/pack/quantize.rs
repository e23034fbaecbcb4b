//! [`quantize_fp4`](crate::Fp4Module::quantize_fp4): codes in the place of dense weights.

use std::any::Any;
use std::iter;

use burn::module::{Module, Param, Reparameterizer};
use burn::tensor::Tensor;
use burn_fp4_ops::OpsError;

use crate::config::Fp4Config;
use crate::error::Fp4Error;
use crate::packed_weight::PackedWeight;
use crate::report::{Fp4Report, Outcome};
use crate::statistics::Calibration;
use crate::transfer::caught;
use crate::walk::parameters::{MapParameters, map_parameters};
use crate::walk::select::{ModulePlan, ParameterPlan, select};

use super::devices::run_on_devices;
use super::job::{Jobs, PackedFacts};
use super::packed_parameter::placeholder;
use super::weight::{AnyWeight, Caches, Quantized, family_key, pack_family};

/// Checks everything, then quantizes.
pub(crate) fn quantize<M: Module>(
    module: &mut M,
    config: &Fp4Config,
) -> Result<Fp4Report, Fp4Error> {
    let mut selection = select(module, config)?;
    selection.check_calibration_used(config)?;
    quantize_jobs(module, &selection, Jobs::new(&selection), &config.calibration)
}

/// Quantizes selected weights. The report has the errors of the outputs of all whose inputs are
/// known, whatever their methods use.
pub(crate) fn quantize_and_compare<M: Module>(
    module: &mut M,
    selection: &ModulePlan,
    calibration: &Calibration,
) -> Result<Fp4Report, Fp4Error> {
    let mut jobs = Jobs::new(selection);
    jobs.measure_all_outputs();
    quantize_jobs(module, selection, jobs, calibration)
}

/// Quantizes the weights of jobs with statistics of their inputs.
///
/// # Errors
/// As [`Fp4Module::quantize_fp4`](crate::Fp4Module::quantize_fp4) after the selection.
pub(crate) fn quantize_jobs<M: Module>(
    module: &mut M,
    selection: &ModulePlan,
    mut jobs: Jobs<'_>,
    calibration: &Calibration,
) -> Result<Fp4Report, Fp4Error> {
    jobs.measure(module, false)?;
    jobs.calibrate(selection, calibration)?;
    selection.check_calibrated(|number, _| {
        let source = jobs.source_of(number);
        source.is_some_and(|at| jobs.list[at].task.method_used().method.needs_inputs())
    })?;
    if let devices @ [_, _, ..] = calibration.devices() {
        run_on_devices(module, &mut jobs, devices)?;
    }
    attach(module, selection, jobs)
}

/// Takes the dense weights out of a module one map at a time, and puts packed ones in their place:
/// the codes that jobs have already, or the quantized dense values.
///
/// # Errors
/// [`Fp4Error::Unmapped`] before anything is changed. After any later error every weight that is
/// not packed by then is put back as it was; if some are packed it is [`Fp4Error::Partial`].
pub(crate) fn attach<M: Module>(
    module: &mut M,
    selection: &ModulePlan,
    jobs: Jobs<'_>,
) -> Result<Fp4Report, Fp4Error> {
    // With the dense weights in a list of their own, each can be freed as soon as it is packed.
    let mut take = TakeDense { jobs: &jobs, taken: jobs.list.iter().map(|_| None).collect() };
    let emptied = map_parameters(module.clone(), &mut take);
    let taken = take.taken;
    if let Some(at) = taken.iter().position(Option::is_none) {
        return Err(Fp4Error::Unmapped { path: jobs.list[at].path().to_owned() });
    }
    *module = emptied;
    let mut attach = AttachQuantized { jobs, taken, caches: Caches::default(), error: None };
    *module = module.clone().apply_reparameterization(&mut attach);
    let AttachQuantized { mut jobs, error, .. } = attach;
    let facts = jobs.list.iter_mut().filter_map(|job| job.facts.as_mut());
    let read = error.map_or(Ok(()), Err).and_then(|()| PackedFacts::read(facts));
    match read {
        Ok(()) => Ok(report(selection, &jobs)),
        Err(problem) => {
            let packed = jobs.list.iter().filter(|job| job.facts.is_some());
            Err(partial(packed.map(|job| job.path().to_owned()).collect(), problem))
        }
    }
}

/// Returns the error of a failure after some weights were packed.
fn partial(packed: Vec<String>, problem: Fp4Error) -> Fp4Error {
    match packed.is_empty() {
        true => problem,
        false => Fp4Error::Partial { packed, problem: Box::new(problem) },
    }
}

/// A dense parameter of any rank that was taken out of a module.
trait DenseParameter: Any + Send {
    /// Returns its values.
    fn weight(&self) -> Box<dyn AnyWeight>;
}

impl<const D: usize> DenseParameter for Param<Tensor<D>> {
    fn weight(&self) -> Box<dyn AnyWeight> {
        Box::new(self.base().without_autodiff())
    }
}

/// The dense parameters that were taken out of a module, by job.
type Taken = Vec<Option<Box<dyn DenseParameter>>>;

/// Takes dense parameters out of a module and leaves placeholders.
struct TakeDense<'j, 'a> {
    jobs: &'j Jobs<'a>,
    taken: Taken,
}

impl MapParameters for TakeDense<'_, '_> {
    fn float<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(at) = self.jobs.at(path).filter(|&at| self.taken[at].is_none()) else {
            return param;
        };
        self.taken[at] = Some(Box::new(param.clone()));
        let dtype = param.base().dtype();
        placeholder(param, dtype)
    }
}

/// Attaches packed weights where dense parameters were taken.
struct AttachQuantized<'a> {
    jobs: Jobs<'a>,
    taken: Taken,
    caches: Caches,
    error: Option<Fp4Error>,
}

impl Reparameterizer for &mut AttachQuantized<'_> {
    type Reparam = PackedWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<PackedWeight>) {
        let at = self.jobs.at(path);
        let Some((at, taken)) = at.and_then(|at| Some((at, self.taken[at].take()?))) else {
            return (param, None);
        };
        let taken: Box<dyn Any> = taken;
        let original: Param<Tensor<D>> = *taken.downcast().expect("taken at the same path");
        if self.error.is_some() {
            return (original, None);
        }
        match caught(|| self.pack(at, &original)) {
            Ok(packed) => (param, Some(packed)),
            Err(problem) => {
                self.error = Some(Fp4Error::at(path, problem));
                (original, None)
            }
        }
    }
}

impl AttachQuantized<'_> {
    fn pack<const D: usize>(
        &mut self,
        at: usize,
        original: &Param<Tensor<D>>,
    ) -> Result<PackedWeight, OpsError> {
        let dense: Tensor<D> = match self.jobs.list[at].dense.take() {
            Some(dense) => {
                let dense: Box<dyn Any> = dense;
                *dense.downcast().expect("of the same path")
            }
            None => original.base().without_autodiff(),
        };
        let source = self.jobs.list[at].source;
        if self.jobs.list[source].quantized.is_none() {
            self.quantize(source, &dense)?;
        }
        let quantized = self.jobs.list[source].quantized.clone();
        let Quantized { packed, output_sums, .. } = quantized.expect("quantized above");
        let (tensor, dtype) = (packed.tensor::<D>(), dense.dtype());
        let facts = PackedFacts::new(&tensor, dtype, Some((dense, output_sums)))?;
        self.jobs.list[at].facts = Some(facts);
        Ok(packed)
    }

    /// Quantizes the weight of a job, and with it the members of its family that are on the same
    /// device and still to come.
    fn quantize(&mut self, at: usize, weight: &dyn AnyWeight) -> Result<(), OpsError> {
        let Self { jobs, taken, caches, .. } = self;
        let (device, task) = (weight.device(), &jobs.list[at].task);
        let key = family_key(task);
        let others: Vec<_> = (0..jobs.list.len())
            .filter_map(|other| {
                let job = &jobs.list[other];
                let waits = jobs.is_source(other) && job.quantized.is_none();
                let in_family = || key.is_some() && family_key(&job.task) == key;
                if other == at || !waits || !in_family() {
                    return None;
                }
                // A weight that was taken out of here is attached already.
                let weight = taken[other].as_ref()?.weight();
                (weight.device() == device).then_some((other, weight))
            })
            .collect();
        let members = others.iter().map(|(other, weight)| (&**weight, &jobs.list[*other].task));
        let members: Vec<_> = iter::once((weight, task)).chain(members).collect();
        let packed = pack_family(&members, caches)?;
        let numbers = iter::once(at).chain(others.iter().map(|(other, _)| *other));
        for (at, one) in numbers.zip(packed) {
            jobs.list[at].quantized = Some(one);
        }
        Ok(())
    }
}

fn report(selection: &ModulePlan, jobs: &Jobs<'_>) -> Fp4Report {
    let mut packed = jobs.list.iter();
    let parameters = selection.parameters.iter().map(|(parameter, plan)| match plan {
        ParameterPlan::Keep(reason) => {
            parameter.report(Outcome::Kept { reason: reason.clone() }, parameter.bytes_now())
        }
        ParameterPlan::Quantize(plan) => {
            let job = packed.next().expect("a job for each plan");
            let quantized = jobs.list[job.source].quantized.as_ref().expect("quantized");
            job.facts.as_ref().expect("packed").quantized(parameter, plan, &quantized.used)
        }
    });
    Fp4Report { parameters: parameters.collect(), unused: selection.unused.clone() }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::{Device, Distribution, Tensor};
    use burn_fp4_ops::search::{Method, Sse};
    use burn_fp4_ops::{
        Fp4Scheme, Fp4Tensor, Importance, gram, quantize_by_importance,
        quantize_with_best_tensor_scale,
    };

    use super::*;

    /// A layer that was quantized by a configuration, its dense weight, and the method reported.
    fn quantized(layer: &Linear, config: &Fp4Config) -> (Fp4Tensor<2>, Method) {
        let mut layer = layer.clone();
        let report = quantize(&mut layer, config).unwrap();
        let Outcome::Quantized { asked, scheme, .. } = report.parameters[0].outcome else {
            panic!("a packed weight")
        };
        assert_eq!(asked, scheme.method);
        let packed = layer.weight.reparameterization::<PackedWeight>().expect("packed");
        (packed.tensor(), asked)
    }

    fn assert_same(found: &Fp4Tensor<2>, expected: &Fp4Tensor<2>) {
        assert_eq!(found.codes().into_data(), expected.codes().into_data());
        assert_eq!(found.scales().into_data(), expected.scales().into_data());
        let bits = |packed: &Fp4Tensor<2>| packed.tensor_scale_bits().into_data();
        assert_eq!(bits(found), bits(expected));
    }

    #[test]
    fn weighted_and_tensor_scale_methods_take_effect() {
        let device = Device::flex();
        let layer = LinearConfig::new(64, 32).with_bias(false).init(&device);
        let dense = layer.weight.val();
        let sse = Fp4Scheme::nvfp4().with_method(Method::SSE);

        let config = Fp4Config::nvfp4().method(Method::Sse(Sse::TensorScale));
        let (found, by) = quantized(&layer, &config);
        assert_eq!(by, Method::Sse(Sse::TensorScale));
        let best = quantize_with_best_tensor_scale(dense.clone(), 0, &sse).unwrap();
        assert_same(&found, &best);

        let inputs = Tensor::<2>::random([128, 64], Distribution::Normal(0.0, 1.0), &device);
        let inputs = inputs.clone() * inputs.clone() * inputs;
        let statistics = gram(inputs).unwrap();
        let weights: Vec<f32> = statistics.diagonal().map(|value| value as f32).collect();
        let mut calibration = Calibration::new();
        calibration.insert("weight", 0, statistics);
        let config =
            Fp4Config::nvfp4().method(Method::Sse(Sse::Weighted)).with_calibration(&calibration);
        let (found, by) = quantized(&layer, &config);
        assert_eq!(by, Method::Sse(Sse::Weighted));
        let importance = Importance::Channels(&weights);
        let weighted = quantize_by_importance(dense.clone(), 0, &sse, importance).unwrap();
        assert_same(&found, &weighted);
    }

    #[test]
    fn a_method_that_the_scheme_does_not_allow_is_an_error() {
        let mut layer = LinearConfig::new(64, 32).init(&Device::flex());
        for method in [Method::Sse(Sse::TensorScale), Method::FOUR_OVER_SIX] {
            let error = quantize(&mut layer, &Fp4Config::mxfp4().method(method)).unwrap_err();
            assert!(matches!(error, Fp4Error::Scheme(_)), "{method}: {error}");
        }
        let error = quantize(&mut layer, &Fp4Config::nvfp4().method(Method::Sse(Sse::Weighted)));
        assert!(matches!(error, Err(Fp4Error::Uncalibrated { .. })));
        assert!(layer.weight.reparameterization::<PackedWeight>().is_none());
    }
}
