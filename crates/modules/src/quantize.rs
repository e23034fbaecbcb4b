use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use burn::module::{Module, ModuleMapper, Param, Reparameterizer};
use burn::tensor::{Device, Tensor};
use burn_fp4_ops::formats::check_length;
use burn_fp4_ops::{
    Fp4Scheme, Fp4Tensor, Gptq, Gram, Importance, NonFinite, OpsError, ScaleSearch, TensorScaling,
    amax, multiplies_codes, quantize as quantize_tensor, quantize_by_importance, quantize_gptq,
};

use crate::calibrate::{CalibrationOptions, Prepared};
use crate::packed::{PackedWeight, placeholder};
use crate::paths::{TakeFloats, each_float};
use crate::report::{ChosenBy, Fp4Report, Outcome};
use crate::select::{Decision, Parameter, Plan, select};
use crate::{Calibration, Fp4Config, Fp4Error};

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
    pack(module, &decisions, Source { amaxes, inputs, gptq: config.gptq, ..Source::default() })
}

/// See [`Fp4Module::quantize_fp4_sequential`](crate::Fp4Module::quantize_fp4_sequential).
pub(crate) fn sequential<M: Module, I: Module, O>(
    module: &mut M,
    config: &Fp4Config,
    options: CalibrationOptions<'_>,
    batches: impl IntoIterator<Item = I>,
    mut forward: impl FnMut(&M, I) -> O,
) -> Result<Fp4Report, Fp4Error> {
    let decisions = select(module, config)?;
    check_selected(&decisions)?;
    if let Some(options) = &config.gptq {
        options.validate(&config.scheme).map_err(OpsError::from)?;
    }
    let amaxes = measure(module, &decisions, true)?;
    let prepared = Prepared::new(module, batches, &mut forward)?;
    // What layers meet depends on what was made of those before them.
    let how = serde_json::to_string(config).expect("plain data");

    let plans: BTreeMap<_, _> = decisions
        .iter()
        .filter_map(|(parameter, decision)| match decision {
            Decision::Quantize(plan) => Some((parameter.path.as_str(), (parameter.id.val(), plan))),
            Decision::Keep(_) => None,
        })
        .collect();
    let mut dense = Matrices { wanted: &plans, found: BTreeMap::new() };
    each_float(module, &mut dense);
    let dense = dense.found;
    // Inputs that are still to come, by parameter id.
    let mut to_come: BTreeMap<u64, usize> = BTreeMap::new();
    for weight in prepared.inputs().iter().flat_map(|input| &input.weights) {
        if let Some((id, _)) = plans.get(weight.path.as_str()) {
            *to_come.entry(*id).or_default() += 1;
        }
    }
    let mut inputs: BTreeMap<u64, Gram> = BTreeMap::new();
    let mut packed = BTreeMap::new();
    prepared.run(options, usize::MAX, &how, |input, gram| {
        let mut replaced = Vec::new();
        for weight in &input.weights {
            let Some((id, plan)) = plans.get(weight.path.as_str()) else { continue };
            let named = |source| Fp4Error::Parameter { path: weight.path.clone(), source };
            let gram = match inputs.remove(id) {
                Some(mut sum) => {
                    sum.merge(&gram).map_err(|error| named(error.into()))?;
                    Cow::Owned(sum)
                }
                None => Cow::Borrowed(&gram),
            };
            let left = to_come.get_mut(id).expect("counted above");
            *left -= 1;
            if *left > 0 {
                inputs.insert(*id, gram.into_owned());
                continue;
            }
            let chosen_by = chosen_by(config.gptq, plan.scheme.search, true);
            let scheme = scheme_of(plan, amaxes.get(&weight.path));
            let values = &dense[&weight.path];
            let tensor = quantize_weight(values, plan.layout.axis, &scheme, chosen_by, Some(&gram));
            let tensor = tensor.map_err(named)?;
            let rounded = tensor.dequantize_to(values.dtype().into());
            let tied = plans.iter().filter(|(_, (other, _))| other == id);
            replaced.extend(tied.map(|(path, _)| ((*path).to_owned(), rounded.clone())));
            packed.insert(*id, (PackedWeight::new(&tensor), chosen_by));
        }
        Ok(replaced)
    })?;
    drop((prepared, dense));
    pack(module, &decisions, Source { amaxes, packed, gptq: config.gptq, ..Source::default() })
}

/// The dense values of matrices that are to be quantized.
struct Matrices<'a> {
    wanted: &'a BTreeMap<&'a str, (u64, &'a Plan)>,
    found: BTreeMap<String, Tensor<2>>,
}

impl TakeFloats for Matrices<'_> {
    fn take<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>) {
        if D == 2 && self.wanted.contains_key(path.as_str()) {
            let shape: [usize; 2] = param.shape().dims();
            self.found.insert(path, param.base().without_autodiff().reshape(shape));
        }
    }
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
        inputs: source.inputs,
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

/// What is known of the inputs of weights, by parameter id: a tied weight meets those of all its places.
///
/// # Errors
/// [`Fp4Error::Calibration`] for a path that no parameter has, [`Fp4Error::Parameter`] if what is known is of
/// another number of inputs than the weight has.
fn inputs_by_id<'a>(
    decisions: &[(Parameter, Decision)],
    calibration: &'a Calibration,
) -> Result<BTreeMap<u64, Cow<'a, Gram>>, Fp4Error> {
    let mut inputs: BTreeMap<u64, Cow<'a, Gram>> = BTreeMap::new();
    for (path, gram) in calibration.iter() {
        let of_path = decisions.iter().find(|(parameter, _)| parameter.path == path);
        let Some((parameter, decision)) = of_path else {
            return Err(Fp4Error::Calibration { path: path.to_owned() });
        };
        let Decision::Quantize(plan) = decision else { continue };
        let named = |source: OpsError| Fp4Error::Parameter { path: path.to_owned(), source };
        let expected = plan.layout.shape[plan.layout.axis];
        check_length("calibrated inputs", expected, gram.channels())
            .map_err(|error| named(error.into()))?;
        match inputs.get_mut(&parameter.id.val()) {
            Some(sum) => sum.to_mut().merge(gram).map_err(|error| named(error.into()))?,
            None => {
                inputs.insert(parameter.id.val(), Cow::Borrowed(gram));
            }
        }
    }
    Ok(inputs)
}

/// amax of every weight that needs one: of its group where it shares a tensor scale.
///
/// One read-back per device tells whether everything is finite, which it has to be if its scheme or `reject`
/// says so.
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
            Decision::Quantize(plan) if from_amax(&plan.scheme) || rejects(&plan.scheme) => {
                Some((parameter.path.as_str(), plan))
            }
            _ => None,
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
    inputs: BTreeMap<u64, Cow<'a, Gram>>,
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
                let chosen_by = chosen_by(self.gptq, scheme.search, inputs.is_some());
                let tensor = quantize_weight(dense, plan.layout.axis, &scheme, chosen_by, inputs)?;
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

/// The scheme of a weight whose amax may be known.
fn scheme_of(plan: &Plan, amax: Option<&f32>) -> Fp4Scheme {
    // The weight was found finite, or was not to be looked at.
    let scheme = plan.scheme.with_non_finite(NonFinite::FollowReference);
    match amax {
        Some(&amax) if amax.is_finite() => scheme.with_tensor_scale(TensorScaling::Amax(amax)),
        _ => scheme,
    }
}

/// How a weight is quantized.
fn chosen_by(gptq: Option<Gptq>, search: ScaleSearch, has_inputs: bool) -> ChosenBy {
    match (gptq, has_inputs) {
        (Some(options), true) => ChosenBy::Gptq(options),
        (None, true) => ChosenBy::Search(search),
        (Some(_), false) => ChosenBy::Search(ScaleSearch::Sse),
        (None, false) if search.needs_hessians() => ChosenBy::Search(ScaleSearch::Sse),
        (None, false) => ChosenBy::Search(search),
    }
}

fn quantize_weight<const D: usize>(
    dense: &Tensor<D>,
    axis: usize,
    scheme: &Fp4Scheme,
    chosen_by: ChosenBy,
    inputs: Option<&Gram>,
) -> Result<Fp4Tensor<D>, OpsError> {
    let dense = dense.clone();
    match (chosen_by, inputs) {
        (ChosenBy::Gptq(options), Some(gram)) => quantize_gptq(dense, axis, scheme, &options, gram),
        (ChosenBy::Search(search), Some(gram)) if search.needs_hessians() => {
            let hessians = gram.blocks(scheme.block_size)?;
            let scheme = scheme.with_search(search);
            quantize_by_importance(dense, axis, &scheme, Importance::Blocks(&hessians))
        }
        (ChosenBy::Search(search), _) => quantize_tensor(dense, axis, &scheme.with_search(search)),
        (ChosenBy::Gptq(_), None) => unreachable!("`chosen_by` asks for activations"),
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
