//! Paths of parameters, kept once for everything that visits a module or maps it.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor};

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
