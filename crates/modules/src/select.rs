use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::{Bool, DType, Int, Tensor};
use burn_fp4_ops::search::SearchError;
use burn_fp4_ops::search::formats::FormatError;
use burn_fp4_ops::{Fp4Layout, Fp4Scheme, OpsError, TensorScaling};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use crate::fake_quant::FakeQuantSettings;
use crate::report::{Outcome, ParameterReport, Reason};
use crate::{FakeQuantWeight, Fp4Config, Fp4Error, Indivisible, PackedWeight};

/// A float parameter as the walk found it.
#[derive(Debug, Clone)]
pub(crate) struct Parameter {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    /// Name of the struct that holds it, such as `Linear`.
    pub(crate) container: String,
    pub(crate) shape: Vec<usize>,
    /// Known after [`Walk::over_values`].
    pub(crate) dtype: Option<DType>,
    /// Path of the outermost list it lies in, and where in the list.
    list: Option<(String, usize)>,
    /// Name of what is attached to it.
    pub(crate) reparameterization: Option<String>,
    /// Whether it belongs to something attached to another parameter.
    pub(crate) inside_reparameterization: bool,
    /// How it is fake-quantized.
    pub(crate) fake_quantized: Option<FakeQuantSettings>,
}

impl Parameter {
    /// The dtype of a parameter whose value was looked at.
    pub(crate) fn stored_dtype(&self) -> DType {
        self.dtype.unwrap_or(DType::F32)
    }

    /// Bytes of its dense values.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.stored_dtype().size()
    }

    /// What is reported of it.
    pub(crate) fn report(&self, outcome: Outcome, bytes_after: usize) -> ParameterReport {
        ParameterReport {
            path: self.path.clone(),
            container: self.container.clone(),
            shape: self.shape.clone(),
            dtype: format!("{:?}", self.stored_dtype()).to_lowercase(),
            outcome,
            bytes_before: self.bytes(),
            bytes_after,
        }
    }
}

/// Every parameter of a module, in its order.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    stack: Vec<(String, String)>,
    values: bool,
    pub(crate) parameters: Vec<Parameter>,
    /// Paths of parameters of every kind.
    pub(crate) paths: Vec<String>,
}

impl Walk {
    /// Looks at names only: a parameter that is not initialized yet stays so.
    pub(crate) fn over<M: Module>(module: &M) -> Self {
        let mut walk = Self::default();
        module.visit(&mut walk);
        walk
    }

    /// Looks at shapes and dtypes, which initializes every parameter.
    pub(crate) fn over_values<M: Module>(module: &M) -> Self {
        let mut walk = Self { values: true, ..Self::default() };
        module.visit(&mut walk);
        walk
    }

    fn path(&self) -> String {
        let names: Vec<_> = self.stack.iter().map(|(name, _)| name.as_str()).collect();
        names.join(".")
    }
}

impl ModuleVisitor for Walk {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        let inside = self.stack.iter().any(|(_, container)| container == REPARAMETERIZATION);
        if container_type == REPARAMETERIZATION && !inside {
            // What is attached to a parameter is visited right after it.
            let parameter = self.parameters.last_mut().expect("it is attached to a parameter");
            parameter.reparameterization = Some(name.to_owned());
        }
        if let Some(settings) = FakeQuantWeight::settings_of(container_type) {
            let parameter = self.parameters.last_mut().expect("it is attached to a parameter");
            parameter.fake_quantized = Some(settings);
        }
        self.stack.push((name.to_owned(), container_type.to_owned()));
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.stack.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let list = self
            .stack
            .iter()
            .position(|(_, container)| matches!(container.as_str(), "Vec" | "Array"));
        let list = list.and_then(|at| {
            let names: Vec<_> = self.stack[..at].iter().map(|(name, _)| name.as_str()).collect();
            Some((names.join("."), self.stack[at].0.parse().ok()?))
        });
        let container = self.stack.last().map_or("", |(_, container)| container.as_str());
        let container = container.split_once(':').map_or(container, |(_, name)| name);
        self.paths.push(self.path());
        self.parameters.push(Parameter {
            path: self.path(),
            id: param.id,
            container: container.to_owned(),
            shape: if self.values { param.shape() } else { param.lazy_shape() }.to_vec(),
            dtype: self.values.then(|| param.dtype()),
            list,
            reparameterization: None,
            inside_reparameterization: self
                .stack
                .iter()
                .any(|(_, container)| container == REPARAMETERIZATION),
            fake_quantized: None,
        });
    }

    fn visit_int<const D: usize>(&mut self, _param: &Param<Tensor<D, Int>>) {
        self.paths.push(self.path());
    }

    fn visit_bool<const D: usize>(&mut self, _param: &Param<Tensor<D, Bool>>) {
        self.paths.push(self.path());
    }
}

const REPARAMETERIZATION: &str = "Reparameterization";

/// What is to happen to a parameter.
#[derive(Debug, Clone)]
pub(crate) enum Decision {
    Quantize(Plan),
    Keep(Reason),
}

/// How a parameter is to be quantized.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) layout: Fp4Layout,
    /// The group of parameters whose tensor scale it shares.
    pub(crate) shares: Option<String>,
    pub(crate) scheme: Fp4Scheme,
}

/// Decides about every float parameter of a module.
pub(crate) fn select<M: Module>(
    module: &M,
    config: &Fp4Config,
) -> Result<Vec<(Parameter, Decision)>, Fp4Error> {
    config.scheme.validate().map_err(OpsError::from)?;
    let include = globs(&config.include)?;
    let exclude = globs(&config.exclude)?;
    let parameters = Walk::over_values(module).parameters;
    let mut reasons: Vec<Option<Reason>> =
        parameters.iter().map(|parameter| refusal(parameter, config, &include, &exclude)).collect();
    keep_layers(&parameters, &mut reasons, config);
    let groups = shared_scales(&parameters, &reasons, config)?;

    let mut decisions = Vec::with_capacity(parameters.len());
    for (index, (parameter, reason)) in parameters.into_iter().zip(reasons).enumerate() {
        let decision = match reason {
            Some(reason) => Decision::Keep(reason),
            None => match plan(&parameter, config)? {
                Ok(layout) => Decision::Quantize(Plan {
                    layout,
                    shares: groups.get(&index).cloned(),
                    scheme: config.scheme,
                }),
                Err(reason) => Decision::Keep(reason),
            },
        };
        decisions.push((parameter, decision));
    }
    Ok(decisions)
}

/// Paths match component by component, so dots are to a pattern what slashes are to a glob.
fn globs(patterns: &[String]) -> Result<GlobSet, Fp4Error> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        let glob = GlobBuilder::new(&pattern.replace('.', "/")).literal_separator(true).build();
        let error = |source| Fp4Error::Pattern { pattern: pattern.clone(), source };
        set.add(glob.map_err(error)?);
    }
    set.build().map_err(|source| Fp4Error::Pattern { pattern: patterns.join(", "), source })
}

fn refusal(
    parameter: &Parameter,
    config: &Fp4Config,
    include: &GlobSet,
    exclude: &GlobSet,
) -> Option<Reason> {
    if parameter.inside_reparameterization {
        return Some(Reason::PartOfReparameterization);
    }
    if let Some(name) = &parameter.reparameterization {
        return Some(if name == PackedWeight::NAME {
            Reason::AlreadyQuantized
        } else {
            Reason::Reparameterized { name: name.clone() }
        });
    }
    if !config.containers.iter().any(|container| container.name == parameter.container) {
        return Some(Reason::Container);
    }
    if parameter.shape.len() < 2 {
        return Some(Reason::Rank);
    }
    let path = parameter.path.replace('.', "/");
    if !config.include.is_empty() && !include.is_match(&path) {
        return Some(Reason::NotIncluded);
    }
    if let Some(&pattern) = exclude.matches(&path).first() {
        return Some(Reason::Excluded { pattern: config.exclude[pattern].clone() });
    }
    None
}

/// Keeps the first and last layers dense; see [`Fp4Config::keep_first`].
fn keep_layers(parameters: &[Parameter], reasons: &mut [Option<Reason>], config: &Fp4Config) {
    let selected: Vec<_> = (0..parameters.len()).filter(|&at| reasons[at].is_none()).collect();
    let mut lengths: BTreeMap<&str, usize> = BTreeMap::new();
    for (list, index) in parameters.iter().filter_map(|parameter| parameter.list.as_ref()) {
        let length = lengths.entry(list).or_default();
        *length = (*length).max(index + 1);
    }
    let lists_matter = selected.iter().any(|&at| parameters[at].list.is_some());
    for (order, &at) in selected.iter().enumerate() {
        let (layer, layers) = match &parameters[at].list {
            Some((list, index)) => (*index, lengths[list.as_str()]),
            None if lists_matter => continue,
            None => (order, selected.len()),
        };
        if layer < config.keep_first {
            reasons[at] = Some(Reason::FirstLayers { layer });
        } else if layer + config.keep_last >= layers {
            reasons[at] = Some(Reason::LastLayers { layer });
        }
    }
}

/// The name of the group that each parameter shares its tensor scale with, if any.
fn shared_scales(
    parameters: &[Parameter],
    reasons: &[Option<Reason>],
    config: &Fp4Config,
) -> Result<BTreeMap<usize, String>, Fp4Error> {
    let mut members: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (at, parameter) in parameters.iter().enumerate() {
        if reasons[at].is_some() {
            continue;
        }
        let components: Vec<_> = parameter.path.split('.').collect();
        let [parents @ .., sibling, name] = components.as_slice() else { continue };
        let group = config.share_scale.iter().find(|group| group.iter().any(|one| one == sibling));
        if let Some(group) = group {
            let parent = parents.join(".");
            let group = format!("{parent}.{{{}}}.{name}", group.join(","));
            members.entry(group.trim_start_matches('.').to_owned()).or_default().push(at);
        }
    }
    members.retain(|_, members| members.len() > 1);
    let own_scale = config.scheme.tensor_scale != TensorScaling::Tensor;
    if own_scale && let Some(&at) = members.values().flatten().next() {
        return Err(Fp4Error::SharedScale { path: parameters[at].path.clone() });
    }
    Ok(members
        .into_iter()
        .flat_map(|(group, at)| at.into_iter().map(move |at| (at, group.clone())))
        .collect())
}

/// The layout of a selected parameter, or why the configuration lets it be skipped.
fn plan(parameter: &Parameter, config: &Fp4Config) -> Result<Result<Fp4Layout, Reason>, Fp4Error> {
    let Parameter { path, container, shape, .. } = parameter;
    let container = config.containers.iter().find(|known| known.name == *container);
    let container = container.expect("only parameters of known containers are selected");
    if container.axis >= shape.len() {
        return Err(Fp4Error::Axis {
            path: path.clone(),
            container: container.name.clone(),
            axis: container.axis,
            rank: shape.len(),
        });
    }
    if let Some(found) = parameter.dtype
        && !matches!(found, DType::F32 | DType::F16 | DType::BF16)
    {
        let source = OpsError::DType { found };
        return Err(Fp4Error::Parameter { path: path.clone(), source });
    }
    match Fp4Layout::new(&shape.clone().into(), container.axis, &config.scheme) {
        Ok(layout) => Ok(Ok(layout)),
        Err(OpsError::Search(SearchError::Format(FormatError::Indivisible {
            cols,
            block_size,
        }))) if config.indivisible == Indivisible::Skip => {
            Ok(Err(Reason::Indivisible { axis: container.axis, length: cols, block_size }))
        }
        Err(source) => Err(Fp4Error::Parameter { path: path.clone(), source }),
    }
}
