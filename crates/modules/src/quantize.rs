use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use burn::module::{Module, ModuleMapper, Param, Reparameterizer};
use burn::tensor::{Device, Tensor};
use burn_fp4_ops::{
    Fp4Scheme, Gptq, Gram, NonFinite, OpsError, ScaleSearch, TensorScaling, amax, multiplies_codes,
};

use crate::calibrated::{divided, inputs_by_id};
use crate::packed::{PackedWeight, placeholder};
use crate::paths::{TakeFloats, each_float};
use crate::report::{ChosenBy, Fp4Report, Outcome};
use crate::select::{Decision, Parameter, Plan, select};
use crate::weight::{Curvatures, chosen_by, quantize_weight, scheme_of};
use crate::{Fp4Config, Fp4Error};

/// Checks everything, then [packs](pack).
pub(crate) fn quantize<M: Module>(
    module: &mut M,
    config: &Fp4Config,
) -> Result<Fp4Report, Fp4Error> {
    let decisions = select(module, config)?;
    check_selected(&decisions)?;
    if let Some(options) = &config.gptq {
        options.validate(&config.scheme).map_err(OpsError::from)?;
    }
    let inputs = inputs_by_id(&decisions, &config.calibration)?;
    // No reference says what GPTQ makes of a value that is not finite.
    let amaxes = measure(module, &decisions, config.gptq.is_some())?;
    let packed = divided(module, &decisions, config, &inputs, &amaxes)?;
    let gptq = config.gptq;
    pack(module, &decisions, Source { amaxes, inputs, packed, gptq, ..Source::default() })
}

/// # Errors
/// [`Fp4Error::NothingSelected`] with the reasons.
pub(crate) fn check_selected(decisions: &[(Parameter, Decision)]) -> Result<(), Fp4Error> {
    if decisions.iter().any(|(_, decision)| matches!(decision, Decision::Quantize(_))) {
        return Ok(());
    }
    let reasons = decisions.iter().filter_map(|(parameter, decision)| match decision {
        Decision::Keep(reason) => Some(format!("\n  {}: {reason}", parameter.path)),
        Decision::Quantize(_) => None,
    });
    Err(Fp4Error::NothingSelected(reasons.collect()))
}

/// What packed weights are made from.
#[derive(Default)]
pub(crate) struct Source<'a> {
    /// Of the weights whose tensor scale is made from it, by path.
    pub(crate) amaxes: BTreeMap<String, f32>,
    /// By parameter id.
    pub(crate) inputs: BTreeMap<u64, Cow<'a, Gram>>,
    /// What is packed already, by parameter id.
    pub(crate) packed: BTreeMap<u64, (PackedWeight, ChosenBy)>,
    pub(crate) gptq: Option<Gptq>,
    /// The dense weights, in the order of the module, if not those that it stores.
    pub(crate) dense: Option<VecDeque<Dense>>,
    /// Whether weights with the same id may differ, so that each is packed by itself.
    pub(crate) apart: bool,
}

/// Takes the dense weights out of a module one map at a time, and puts packed ones in their place.
pub(crate) fn pack<M: Module>(
    module: &mut M,
    decisions: &[(Parameter, Decision)],
    source: Source<'_>,
) -> Result<Fp4Report, Fp4Error> {
    let plans: VecDeque<_> = decisions
        .iter()
        .filter_map(|(parameter, decision)| match decision {
            Decision::Quantize(plan) => Some((parameter, plan)),
            Decision::Keep(_) => None,
        })
        .collect();
    // With the dense weights in a queue of their own, each can be freed as soon as it is packed.
    let mut take = Take {
        stack: Vec::new(),
        wanted: plans.iter().map(|(parameter, _)| parameter.path.clone()).collect(),
        dense: VecDeque::new(),
    };
    *module = module.clone().map(&mut take);
    let mut pack = Pack {
        gptq: source.gptq,
        inputs: &source.inputs,
        curvatures: Curvatures::default(),
        apart: source.apart,
        plans,
        dense: source.dense.unwrap_or(take.dense),
        amaxes: source.amaxes,
        packed: source.packed,
        results: BTreeMap::new(),
        error: None,
    };
    *module = module.clone().apply_reparameterization(&mut pack);
    match pack.error {
        None => {
            let devices = module.devices();
            let multiplies_codes = devices.iter().all(multiplies_codes);
            report(decisions, &pack.results, multiplies_codes)
        }
        Some(error) => Err(error),
    }
}

/// amax of every weight that needs one before the first is quantized: of its group where it shares a tensor scale, and
/// of what has to be finite, because its scheme or `reject` says so.
///
/// One read-back per device. All others follow their own amax, which stays where it is.
pub(crate) fn measure<M: Module>(
    module: &M,
    decisions: &[(Parameter, Decision)],
    reject: bool,
) -> Result<BTreeMap<String, f32>, Fp4Error> {
    struct Measure<'a> {
        wanted: BTreeMap<&'a str, &'a Plan>,
        amaxes: Vec<(String, Tensor<1>)>,
        error: Option<Fp4Error>,
    }

    impl TakeFloats for Measure<'_> {
        fn take<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
            if self.wanted.contains_key(path.as_str()) {
                match amax(param.base()) {
                    Ok(amax) => self.amaxes.push((path, amax)),
                    Err(source) => {
                        self.error.get_or_insert(Fp4Error::Parameter { path, source });
                    }
                }
            }
        }
    }

    let from_amax = |scheme: &Fp4Scheme| {
        scheme.rule.row().tensor_scale && scheme.tensor_scale == TensorScaling::Tensor
    };
    let rejects = |scheme: &Fp4Scheme| reject || scheme.non_finite == NonFinite::Reject;
    let wanted: BTreeMap<_, _> = decisions
        .iter()
        .filter_map(|(parameter, decision)| match decision {
            Decision::Quantize(plan) => {
                let shares = plan.shares.is_some() && from_amax(&plan.scheme);
                (shares || rejects(&plan.scheme)).then_some((parameter.path.as_str(), plan))
            }
            Decision::Keep(_) => None,
        })
        .collect();
    if wanted.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut measure = Measure { wanted, amaxes: Vec::new(), error: None };
    each_float(module, &mut measure);
    if let Some(error) = measure.error {
        return Err(error);
    }
    let mut found: BTreeMap<_, _> =
        read_vectors(measure.amaxes)?.into_iter().map(|(path, amax)| (path, amax[0])).collect();
    let refused = found
        .iter()
        .find(|(path, amax)| !amax.is_finite() && rejects(&measure.wanted[path.as_str()].scheme));
    if let Some((path, &found)) = refused {
        let source = OpsError::NonFinite { found };
        return Err(Fp4Error::Parameter { path: path.clone(), source });
    }
    found.retain(|path, _| from_amax(&measure.wanted[path.as_str()].scheme));
    let mut groups: BTreeMap<&str, f32> = BTreeMap::new();
    for (path, plan) in &measure.wanted {
        if let (Some(group), true) = (&plan.shares, found.contains_key(*path)) {
            let largest = groups.entry(group).or_default();
            // NaN, once there, stays: a maximum of floats would drop it.
            if found[*path].is_nan() || found[*path] > *largest {
                *largest = found[*path];
            }
        }
    }
    let shared = |path: &str| measure.wanted[path].shares.as_deref().map(|group| groups[group]);
    Ok(found.iter().map(|(path, &own)| (path.clone(), shared(path).unwrap_or(own))).collect())
}

/// Reads vectors back, in one transfer per device.
pub(crate) fn read_vectors(
    vectors: Vec<(String, Tensor<1>)>,
) -> Result<BTreeMap<String, Vec<f32>>, Fp4Error> {
    let mut by_device: Vec<(Device, Vec<(String, Tensor<1>)>)> = Vec::new();
    for (path, vector) in vectors {
        let device = vector.device();
        match by_device.iter_mut().find(|(known, _)| *known == device) {
            Some((_, vectors)) => vectors.push((path, vector)),
            None => by_device.push((device, vec![(path, vector)])),
        }
    }
    let mut read = BTreeMap::new();
    for (_, vectors) in by_device {
        let (paths, tensors): (Vec<_>, Vec<_>) = vectors.into_iter().unzip();
        let lengths: Vec<_> = tensors.iter().map(|tensor| tensor.dims()[0]).collect();
        let data = Tensor::cat(tensors, 0).try_into_data();
        let data = data.map_err(|error| OpsError::Device(format!("{error:?}")))?;
        let mut values = data.iter::<f32>();
        for (path, length) in paths.into_iter().zip(lengths) {
            read.insert(path, values.by_ref().take(length).collect());
        }
    }
    Ok(read)
}

/// A dense weight of any rank.
pub(crate) struct Dense {
    tensor: Box<dyn std::any::Any + Send>,
}

impl Dense {
    pub(crate) fn new<const D: usize>(tensor: Tensor<D>) -> Self {
        Self { tensor: Box::new(tensor) }
    }
}

/// Takes the dense weights out of a module, in its order.
struct Take {
    stack: Vec<String>,
    wanted: BTreeSet<String>,
    dense: VecDeque<Dense>,
}

impl ModuleMapper for Take {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.stack.push(name.to_owned());
    }
    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.stack.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.wanted.contains(&self.stack.join(".")) {
            return param;
        }
        let tensor = param.base().without_autodiff();
        let dtype = tensor.dtype();
        self.dense.push_back(Dense::new(tensor));
        placeholder(param, dtype)
    }
}

/// Attaches packed weights, in the order in which the dense ones were taken.
struct Pack<'a> {
    gptq: Option<Gptq>,
    inputs: &'a BTreeMap<u64, Cow<'a, Gram>>,
    curvatures: Curvatures<'a>,
    apart: bool,
    plans: VecDeque<(&'a Parameter, &'a Plan)>,
    dense: VecDeque<Dense>,
    amaxes: BTreeMap<String, f32>,
    /// By parameter id, so that weights tied in the dense module stay tied.
    packed: BTreeMap<u64, (PackedWeight, ChosenBy)>,
    results: BTreeMap<String, Packed>,
    error: Option<Fp4Error>,
}

/// What the report says of a packed weight.
struct Packed {
    bytes: usize,
    chosen_by: ChosenBy,
    /// `[2]`: squared error and energy, still on the device.
    squared_error: Tensor<1>,
}

impl Reparameterizer for &mut Pack<'_> {
    type Reparam = PackedWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<PackedWeight>) {
        if self.plans.front().is_none_or(|(parameter, _)| parameter.path != path) {
            return (param, None);
        }
        let (_, plan) = self.plans.pop_front().expect("just looked at");
        let dense = self.dense.pop_front().expect("one was taken for every plan");
        let dense: Box<Tensor<D>> = dense.tensor.downcast().expect("taken at the same place");
        match self.pack(path, &param, &dense, plan) {
            Ok(packed) => (param, Some(packed)),
            Err(source) => {
                let path = path.to_owned();
                self.error.get_or_insert(Fp4Error::Parameter { path, source });
                (param.map(|_| *dense), None)
            }
        }
    }
}

impl Pack<'_> {
    fn pack<const D: usize>(
        &mut self,
        path: &str,
        param: &Param<Tensor<D>>,
        dense: &Tensor<D>,
        plan: &Plan,
    ) -> Result<PackedWeight, OpsError> {
        let scheme = scheme_of(plan, self.amaxes.get(path));
        let id = param.id.val();
        let tied = self.packed.get(&id).filter(|_| !self.apart);
        let (packed, chosen_by) = match tied {
            Some(tied) => tied.clone(),
            None => {
                let inputs = self.inputs.get(&id).map(|gram| &**gram);
                let chosen_by = chosen_by(self.gptq, &plan.scheme, inputs);
                let axis = plan.layout.axis;
                let curvatures = &mut self.curvatures;
                let tensor = quantize_weight(dense, axis, &scheme, chosen_by, inputs, curvatures)?;
                self.packed
                    .entry(id)
                    .insert_entry((PackedWeight::new(&tensor), chosen_by))
                    .get()
                    .clone()
            }
        };
        let tensor = packed.tensor::<D>();
        let squared_error = tensor.squared_error(dense.clone())?;
        let result = Packed { bytes: tensor.bytes(), squared_error, chosen_by };
        self.results.insert(path.to_owned(), result);
        Ok(packed)
    }
}

fn report(
    decisions: &[(Parameter, Decision)],
    results: &BTreeMap<String, Packed>,
    multiplies_codes: bool,
) -> Result<Fp4Report, Fp4Error> {
    let errors =
        results.iter().map(|(path, packed)| (path.clone(), packed.squared_error.clone())).collect();
    let errors = read_vectors(errors)?;
    let parameters = decisions.iter().map(|(parameter, decision)| match decision {
        Decision::Keep(reason) => {
            parameter.report(Outcome::Kept { reason: reason.clone() }, parameter.bytes())
        }
        Decision::Quantize(plan) => {
            let [squared_error, energy] = errors[&parameter.path][..] else {
                unreachable!("two sums for every weight")
            };
            let Packed { bytes, chosen_by, .. } = results[&parameter.path];
            let scheme = match chosen_by {
                ChosenBy::Search(search) => plan.scheme.with_search(search),
                ChosenBy::Gptq(_) => plan.scheme.with_search(ScaleSearch::Amax),
            };
            let outcome = Outcome::Quantized {
                scheme,
                chosen_by,
                axis: plan.layout.axis,
                shares_scale_with: plan.shares.clone(),
                squared_error: squared_error.into(),
                energy: energy.into(),
            };
            // One stored value stands for the shape.
            parameter.report(outcome, bytes + parameter.stored_dtype().size())
        }
    });
    Ok(Fp4Report { parameters: parameters.collect(), multiplies_codes })
}
