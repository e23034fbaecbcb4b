use std::collections::{BTreeMap, BTreeSet, VecDeque};

use burn::module::{
    Devices, Module, ModuleMapper, ModuleVisitor, Param, Reparameterization, Reparameterizer,
};
use burn::tensor::{DType, Device, Tensor};
use burn_fp4_ops::{
    Fp4Layout, Fp4Scheme, OpsError, Rounding, Saturated, TensorScaling, fake_quantize_for_training,
    fake_quantize_with_amax,
};
use serde::{Deserialize, Serialize};

use crate::paths::{TakeFloats, each_float};
use crate::quantize::{Dense, Source, check_selected, measure, pack, read_vectors};
use crate::report::{Fp4Report, Outcome, Reason};
use crate::select::{Decision, Plan, Walk, select};
use crate::{Fp4Config, Fp4Error};

/// A weight that is trained in full precision and used as if it were quantized.
///
/// Attached to a parameter it makes `val()` round the values to those that quantization leaves. The stored
/// values stay as they are: an optimizer changes them by gradients that pass straight through the rounding.
/// Where the tensor scale is learned it is a parameter of its own, `<parameter>.fp4_fake.amax`: the magnitude
/// that the scale is made from.
#[derive(Debug, Clone)]
pub struct FakeQuantWeight {
    settings: FakeQuantSettings,
    amax: Option<Param<Tensor<1>>>,
}

/// How a weight is fake-quantized.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct FakeQuantSettings {
    pub(crate) scheme: Fp4Scheme,
    pub(crate) axis: usize,
    pub(crate) saturated: Saturated,
}

/// What a visitor is told as the type of the container, followed by the settings: a visitor sees parameters
/// without what is attached to them, and the name would become part of record paths.
const CONTAINER: &str = "Struct:FakeQuantWeight:";

const AMAX: &str = "amax";

impl FakeQuantWeight {
    /// How it is quantized.
    pub fn scheme(&self) -> &Fp4Scheme {
        &self.settings.scheme
    }

    /// Axis that its blocks run along.
    pub fn axis(&self) -> usize {
        self.settings.axis
    }

    /// The learned parameter of the tensor scale, if it is learned: `[1]`, of which the magnitude counts.
    pub fn amax(&self) -> Option<&Param<Tensor<1>>> {
        self.amax.as_ref()
    }

    fn container(&self) -> String {
        let settings = serde_json::to_string(&self.settings).expect("plain data");
        format!("{CONTAINER}{settings}")
    }

    /// What [`container`](Self::container) tells.
    pub(crate) fn settings_of(container: &str) -> Option<FakeQuantSettings> {
        serde_json::from_str(container.strip_prefix(CONTAINER)?).ok()
    }
}

impl Reparameterization for FakeQuantWeight {
    const NAME: &'static str = "fp4_fake";

    /// # Panics
    /// If the parameter was given another shape since, or a dtype that is not quantized.
    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let FakeQuantSettings { scheme, axis, saturated } = &self.settings;
        let output = match &self.amax {
            Some(amax) => {
                let amax = amax.val().cast(DType::F32).abs();
                fake_quantize_with_amax(base, amax, *axis, scheme, *saturated)
            }
            None => fake_quantize_for_training(base, *axis, scheme, *saturated),
        };
        output.expect("checked when it was attached")
    }
}

impl Module for FakeQuantWeight {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let container = self.container();
        visitor.enter_module(AMAX, &container);
        if let Some(amax) = &self.amax {
            visitor.visit_float(amax);
        }
        visitor.exit_module(AMAX, &container);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        let container = self.container();
        mapper.enter_module(AMAX, &container);
        let amax = self.amax.map(|amax| mapper.map_float(amax));
        mapper.exit_module(AMAX, &container);
        Self { amax, ..self }
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.amax.collect_devices(devices)
    }

    fn to_device(self, device: &Device) -> Self {
        Self { amax: self.amax.to_device(device), ..self }
    }

    fn fork(self, device: &Device) -> Self {
        Self { amax: self.amax.fork(device), ..self }
    }

    fn valid(&self) -> Self {
        Self { amax: self.amax.valid(), ..self.clone() }
    }

    fn train(self) -> Self {
        Self { amax: self.amax.train(), ..self }
    }

    fn materialize(self) -> Self {
        self
    }
}

/// See [`Fp4Module::fake_quantize_fp4`](crate::Fp4Module::fake_quantize_fp4).
pub(crate) fn fake_quantize<M: Module>(
    module: &mut M,
    config: &Fp4Config,
) -> Result<Fp4Report, Fp4Error> {
    check(config)?;
    let decisions = select(module, config)?;
    check_selected(&decisions)?;
    let amaxes = measure(module, &decisions, config.learn_tensor_scale)?;
    let plans = decisions.iter().filter_map(|(parameter, decision)| match decision {
        Decision::Quantize(plan) => Some((parameter.path.as_str(), plan)),
        Decision::Keep(_) => None,
    });
    let learned = BTreeMap::new();
    let mut attach = Attach { config, plans: plans.collect(), amaxes, learned };
    *module = module.clone().apply_reparameterization(&mut attach);
    let parameters = decisions.iter().map(|(parameter, decision)| match decision {
        Decision::Keep(reason) => {
            parameter.report(Outcome::Kept { reason: reason.clone() }, parameter.bytes())
        }
        Decision::Quantize(plan) => {
            let learned = config.learn_tensor_scale;
            let outcome =
                Outcome::FakeQuantized { scheme: plan.scheme, axis: plan.layout.axis, learned };
            let amax = if learned { DType::F32.size() } else { 0 };
            parameter.report(outcome, parameter.bytes() + amax)
        }
    });
    Ok(Fp4Report { parameters: parameters.collect(), multiplies_codes: false })
}

/// # Errors
/// [`Fp4Error::FakeQuantization`] naming what only makes sense once.
fn check(config: &Fp4Config) -> Result<(), Fp4Error> {
    let refuse = |what, reason| Err(Fp4Error::FakeQuantization { what, reason });
    let scheme = &config.scheme;
    if scheme.search.needs_hessians() {
        return refuse(
            "the scale search",
            "it needs activations, which change as the model trains",
        );
    }
    if config.gptq.is_some() {
        return refuse("GPTQ", "it needs activations, which change as the model trains");
    }
    if config.calibration.iter().next().is_some() {
        return refuse("calibration", "what layers meet changes as the model trains");
    }
    if scheme.rounding != Rounding::Nearest {
        return refuse("stochastic rounding", "every step would draw the same numbers");
    }
    if !config.share_scale.is_empty() {
        return refuse("a shared tensor scale", "each weight follows its own amax");
    }
    if config.learn_tensor_scale {
        if !scheme.rule.row().tensor_scale {
            return refuse("a learned tensor scale", "the rule of the scheme has none");
        }
        if scheme.tensor_scale != TensorScaling::Tensor {
            return refuse("a learned tensor scale", "it begins as that of the tensor's amax");
        }
    }
    Ok(())
}

struct Attach<'a> {
    config: &'a Fp4Config,
    /// By path, as the amaxes.
    plans: BTreeMap<&'a str, &'a Plan>,
    amaxes: BTreeMap<String, f32>,
    /// By parameter id, so that tied weights learn one scale.
    learned: BTreeMap<u64, Param<Tensor<1>>>,
}

impl Reparameterizer for &mut Attach<'_> {
    type Reparam = FakeQuantWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<FakeQuantWeight>) {
        let Some(plan) = self.plans.get(path) else { return (param, None) };
        let settings = FakeQuantSettings {
            scheme: plan.scheme,
            axis: plan.layout.axis,
            saturated: self.config.saturated,
        };
        let amax = self.config.learn_tensor_scale.then(|| {
            let learned = self.learned.entry(param.id.val()).or_insert_with(|| {
                let device = param.lazy_device();
                Param::from_tensor(Tensor::from_data([self.amaxes[path]], (&device, DType::F32)))
            });
            learned.clone()
        });
        (param, Some(FakeQuantWeight { settings, amax }))
    }
}

/// See [`Fp4Module::convert_fp4`](crate::Fp4Module::convert_fp4).
pub(crate) fn convert<M: Module>(module: &mut M) -> Result<Fp4Report, Fp4Error> {
    let walk = Walk::over_values(module);
    let mut decisions = Vec::new();
    let mut learned = BTreeSet::new();
    for parameter in walk.parameters {
        let decision = match (&parameter.fake_quantized, &parameter.reparameterization) {
            (Some(FakeQuantSettings { scheme, axis, .. }), _) => {
                let layout = Fp4Layout::new(&parameter.shape.clone().into(), *axis, scheme);
                let layout = layout.map_err(|source| Fp4Error::Parameter {
                    path: parameter.path.clone(),
                    source,
                })?;
                Decision::Quantize(Plan { layout, shares: None, scheme: *scheme })
            }
            (None, Some(name)) => {
                return Err(Fp4Error::Attached { path: parameter.path, name: name.clone() });
            }
            (None, None) if parameter.inside_reparameterization => {
                learned.insert(parameter.path);
                continue;
            }
            (None, None) => Decision::Keep(Reason::NotFakeQuantized),
        };
        decisions.push((parameter, decision));
    }
    if !decisions.iter().any(|(_, decision)| matches!(decision, Decision::Quantize(_))) {
        return Err(Fp4Error::NothingFakeQuantized);
    }
    let mut amaxes = measure(module, &decisions, false)?;

    let wanted = decisions
        .iter()
        .filter(|(_, decision)| matches!(decision, Decision::Quantize(_)))
        .map(|(parameter, _)| parameter.path.clone());
    let mut collect =
        Collect { wanted: wanted.collect(), learned, dense: VecDeque::new(), amaxes: Vec::new() };
    each_float(module, &mut collect);
    for (path, amax) in read_vectors(collect.amaxes)? {
        if !amax[0].is_finite() {
            let source = OpsError::NonFinite { found: amax[0] };
            return Err(Fp4Error::Parameter { path, source });
        }
        amaxes.insert(path, amax[0]);
    }
    // Burn takes attachments off a module as a whole.
    let mut packed = module.clone().materialize();
    // An optimizer may have moved weights that were tied by their id apart.
    let source = Source { amaxes, dense: Some(collect.dense), apart: true, ..Source::default() };
    let report = pack(&mut packed, &decisions, source)?;
    *module = packed;
    Ok(report)
}

/// Collects the stored values of weights, and learned amaxes by the paths of their weights.
struct Collect {
    wanted: BTreeSet<String>,
    learned: BTreeSet<String>,
    dense: VecDeque<Dense>,
    amaxes: Vec<(String, Tensor<1>)>,
}

impl TakeFloats for Collect {
    fn take<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        if self.wanted.contains(&path) {
            self.dense.push_back(Dense::new(param.base().without_autodiff()));
        } else if self.learned.contains(&path) {
            let amax = param.base().without_autodiff().cast(DType::F32).abs().reshape([1]);
            let attached = format!(".{}.{AMAX}", FakeQuantWeight::NAME);
            let weight = path.strip_suffix(&attached).unwrap_or(&path);
            self.amaxes.push((weight.to_owned(), amax));
        }
    }
}
