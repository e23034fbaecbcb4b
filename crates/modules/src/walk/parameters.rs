//! Every parameter of a module: what it is, where it is, and what is attached to it. Its path is
//! kept once for all visitors and mappers.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::{Bool, DType, Device, Int, Shape, Tensor};
use burn_fp4_ops::{DequantizeReason, MatmulPath};

use crate::fake_quant_weight::{FakeQuantSettings, FakeQuantWeight};
use crate::packed_weight::PackedWeight;
use crate::report::{KeepReason, Outcome, ParameterReport};

/// A float parameter as the walk found it.
#[derive(Debug, Clone)]
pub(crate) struct Parameter {
    pub(crate) path: String,
    pub(crate) id: ParamId,
    /// Name of the struct that holds it, such as `Linear`.
    pub(crate) container: String,
    /// Name of the struct that holds that struct.
    parent: String,
    pub(crate) shape: Vec<usize>,
    /// Known after [`Walk::over_values`].
    pub(crate) dtype: Option<DType>,
    /// Path of the outermost list it lies in, and where in the list.
    pub(crate) list: Option<(String, usize)>,
    /// Name of what is attached to it.
    pub(crate) reparameterization: Option<String>,
    /// Set if it belongs to something attached to another parameter.
    pub(crate) inside_reparameterization: bool,
    /// How it is fake-quantized.
    pub(crate) fake_quantized: Option<FakeQuantSettings>,
    /// Bytes of codes and scales, if it is packed.
    packed_bytes: usize,
}

/// Layers of Burn that hold a `Linear` of Burn, in the place of which no other type can be.
const HOLDERS: [&str; 5] =
    ["CrossAttention", "GateController", "MultiHeadAttention", "PositionWiseFeedForward", "SwiGlu"];

impl Parameter {
    /// With the shape and dtype that its values are found to have.
    pub(crate) fn with_values(self, shape: &[usize], dtype: DType) -> Self {
        Self { shape: shape.to_vec(), dtype: Some(dtype), ..self }
    }

    /// The names that patterns may have: its path, and that of its module.
    pub(crate) fn names(&self) -> [&str; 2] {
        [&self.path, self.path.strip_suffix(".weight").unwrap_or(&self.path)]
    }

    /// The dtype of a parameter whose value was looked at.
    pub(crate) fn stored_dtype(&self) -> DType {
        self.dtype.unwrap_or(DType::F32)
    }

    /// Returns the bytes that it takes now.
    pub(crate) fn bytes_now(&self) -> usize {
        match self.packed_bytes {
            0 => self.bytes(),
            // The placeholder stores one value.
            packed => packed + self.stored_dtype().size(),
        }
    }

    /// Bytes of its dense values.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.stored_dtype().size()
    }

    /// Returns the reason for which nothing can be attached to it, if something is.
    pub(crate) fn attached(&self) -> Option<KeepReason> {
        if self.inside_reparameterization {
            return Some(KeepReason::PartOfReparameterization);
        }
        self.reparameterization.as_ref().map(|name| match name == PackedWeight::NAME {
            true => KeepReason::AlreadyQuantized,
            false => KeepReason::Reparameterized { name: name.clone() },
        })
    }

    /// Returns how products and lookups run once it is packed along an axis. Layers of this crate
    /// multiply where layers of Burn cannot, and embeddings look up rows.
    pub(crate) fn products(&self, by_burn: &MatmulPath, axis: usize) -> MatmulPath {
        use MatmulPath::Dequantized;

        match (self.container.as_str(), axis, by_burn) {
            ("Fp4Linear", 0, Dequantized(DequantizeReason::Host)) => MatmulPath::FromCodes,
            (
                "Fp4Embedding",
                1,
                Dequantized(DequantizeReason::Host | DequantizeReason::NotInitialized),
            ) => MatmulPath::Lookups,
            ("Embedding" | "Fp4Embedding", 0, _) => Dequantized(DequantizeReason::Axis { axis }),
            ("Linear", _, Dequantized(DequantizeReason::Host))
                if HOLDERS.contains(&self.parent.as_str()) =>
            {
                Dequantized(DequantizeReason::Inside { layer: self.parent.clone() })
            }
            _ => by_burn.clone(),
        }
    }

    /// Returns its report entry.
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

/// The kind of values of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Float,
    Int,
    Bool,
}

/// A parameter of any kind, as a record has to fit it.
#[derive(Debug, Clone)]
pub(crate) struct StoredParameter {
    pub(crate) path: String,
    pub(crate) kind: Kind,
    /// Shape of the stored value, or of the one that it will be initialized with.
    pub(crate) shape: Vec<usize>,
    pub(crate) device: Device,
}

/// Every parameter of a module, in its order.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    values: bool,
    pub(crate) parameters: Vec<Parameter>,
    /// Parameters of every kind.
    pub(crate) stored: Vec<StoredParameter>,
}

impl Walk {
    /// Looks at names only: a parameter that is not initialized yet stays so.
    pub(crate) fn over<M: Module>(module: &M) -> Self {
        let mut walk = Self::default();
        visit_parameters(module, &mut walk);
        walk
    }

    /// Looks at shapes and dtypes, which initializes every parameter.
    pub(crate) fn over_values<M: Module>(module: &M) -> Self {
        let mut walk = Self { values: true, ..Self::default() };
        visit_parameters(module, &mut walk);
        walk
    }

    fn store(&mut self, path: &ModulePath, kind: Kind, shape: Shape, device: Device) {
        self.stored.push(StoredParameter {
            path: path.join(),
            kind,
            shape: shape.to_vec(),
            device,
        });
    }
}

impl VisitParameters for Walk {
    fn enter(&mut self, path: &ModulePath, name: &str, container_type: &str) {
        let attached = path.is_attached();
        if !attached && container_type != REPARAMETERIZATION {
            return;
        }
        // What is attached to a parameter is visited right after it.
        let parameter = self.parameters.last_mut().expect("it is attached to a parameter");
        if !attached {
            parameter.reparameterization = Some(name.to_owned());
        } else if let Some(settings) = FakeQuantWeight::settings_of(container_type) {
            parameter.fake_quantized = Some(settings);
        }
    }

    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>) {
        self.store(path, Kind::Float, param.lazy_shape(), param.lazy_device());
        self.parameters.push(Parameter {
            path: path.join(),
            id: param.id,
            container: path.container().to_owned(),
            parent: path.parent().to_owned(),
            shape: if self.values { param.shape() } else { param.lazy_shape() }.to_vec(),
            dtype: self.values.then(|| param.dtype()),
            list: path.outermost_list(),
            reparameterization: None,
            inside_reparameterization: path.is_attached(),
            fake_quantized: None,
            packed_bytes: 0,
        });
    }

    fn int<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D, Int>>) {
        self.store(path, Kind::Int, param.lazy_shape(), param.lazy_device());
        // Codes and scales come right after the parameter that they are attached to.
        if let Some(parameter) = self.parameters.last_mut()
            && parameter.reparameterization.as_deref() == Some(PackedWeight::NAME)
            && path.is_attached()
        {
            parameter.packed_bytes += param.shape().num_elements() * param.dtype().size();
        }
    }

    fn bool<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D, Bool>>) {
        self.store(path, Kind::Bool, param.lazy_shape(), param.lazy_device());
    }
}

/// Where a visitor or mapper is in a module: the names of the modules that it is in, outermost
/// first, with the types of the containers that hold them.
#[derive(Debug, Default)]
pub(crate) struct ModulePath {
    names: Vec<String>,
    containers: Vec<String>,
}

impl ModulePath {
    fn enter(&mut self, name: &str, container_type: &str) {
        self.names.push(name.to_owned());
        self.containers.push(container_type.to_owned());
    }

    fn exit(&mut self) {
        self.names.pop();
        self.containers.pop();
    }

    /// As in Burn's records: `layers.0.weight`.
    pub(crate) fn join(&self) -> String {
        self.names.join(".")
    }

    /// Name of the struct that holds the parameter, such as `Linear`.
    pub(crate) fn container(&self) -> &str {
        self.outer_container(0)
    }

    /// Name of the struct that holds that struct, such as `MultiHeadAttention`.
    pub(crate) fn parent(&self) -> &str {
        self.outer_container(1)
    }

    fn outer_container(&self, levels: usize) -> &str {
        let container = self.containers.iter().rev().nth(levels).map_or("", String::as_str);
        container.split_once(':').map_or(container, |(_, name)| name)
    }

    /// Path of the outermost list, and where in it this is.
    pub(crate) fn outermost_list(&self) -> Option<(String, usize)> {
        let is_list = |container: &String| matches!(container.as_str(), "Vec" | "Array");
        let at = self.containers.iter().position(is_list)?;
        Some((self.names[..at].join("."), self.names[at].parse().ok()?))
    }

    /// Returns true inside something that is attached to a parameter.
    pub(crate) fn is_attached(&self) -> bool {
        self.containers.iter().any(|container| container == REPARAMETERIZATION)
    }
}

/// The container type that Burn names to visitors and mappers for an attachment of a parameter.
pub(crate) const REPARAMETERIZATION: &str = "Reparameterization";

/// Looks at the parameters of a module, of any rank, in their order.
pub(crate) trait VisitParameters {
    /// A module of this name, in a container of this type, is visited next. `path` is that of the
    /// container.
    fn enter(&mut self, _path: &ModulePath, _name: &str, _container_type: &str) {}

    fn float<const D: usize>(&mut self, path: &ModulePath, param: &Param<Tensor<D>>);

    fn int<const D: usize>(&mut self, _path: &ModulePath, _param: &Param<Tensor<D, Int>>) {}

    fn bool<const D: usize>(&mut self, _path: &ModulePath, _param: &Param<Tensor<D, Bool>>) {}
}

/// Shows a visitor every parameter of a module.
pub(crate) fn visit_parameters<M: Module>(module: &M, visitor: &mut impl VisitParameters) {
    module.visit(&mut Paths { path: ModulePath::default(), handler: visitor });
}

/// Replaces parameters of any rank, one after the other.
pub(crate) trait MapParameters {
    fn float<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>>;

    fn int<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D, Int>>,
    ) -> Param<Tensor<D, Int>> {
        param
    }

    fn bool<const D: usize>(
        &mut self,
        _path: &str,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        param
    }
}

/// Has every parameter of a module replaced, in its order.
pub(crate) fn map_parameters<M: Module>(module: M, mapper: &mut impl MapParameters) -> M {
    module.map(&mut Paths { path: ModulePath::default(), handler: mapper })
}

/// The one visitor and mapper of this crate: keeps the path and hands parameters on.
struct Paths<'a, T> {
    path: ModulePath,
    handler: &'a mut T,
}

impl<T: VisitParameters> ModuleVisitor for Paths<'_, T> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.handler.enter(&self.path, name, container_type);
        self.path.enter(name, container_type);
    }
    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.handler.float(&self.path, param);
    }
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.handler.int(&self.path, param);
    }
    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.handler.bool(&self.path, param);
    }
}

impl<T: MapParameters> ModuleMapper for Paths<'_, T> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }
    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.handler.float(&self.path.join(), param)
    }
    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.handler.int(&self.path.join(), param)
    }
    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.handler.bool(&self.path.join(), param)
    }
}
