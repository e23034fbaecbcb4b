//! Float parameters of a module with their paths, for whatever looks at them or replaces them.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;

/// Takes float parameters of any rank, one after the other.
pub(crate) trait TakeFloats {
    fn take<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>);
}

/// Hands every float parameter of a module on, in its order.
pub(crate) fn each_float<M: Module>(module: &M, take: &mut impl TakeFloats) {
    module.visit(&mut Paths { stack: Vec::new(), handler: take });
}

/// Replaces float parameters of any rank, one after the other.
pub(crate) trait MapFloats {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>>;
}

/// Has every float parameter of a module replaced, in its order.
pub(crate) fn map_floats<M: Module>(module: M, map: &mut impl MapFloats) -> M {
    module.map(&mut Paths { stack: Vec::new(), handler: map })
}

struct Paths<'a, T> {
    stack: Vec<String>,
    handler: &'a mut T,
}

impl<T: TakeFloats> ModuleVisitor for Paths<'_, T> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.stack.push(name.to_owned());
    }
    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.stack.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.handler.take(self.stack.join("."), param);
    }
}

impl<T: MapFloats> ModuleMapper for Paths<'_, T> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.stack.push(name.to_owned());
    }
    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.stack.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.handler.map(&self.stack.join("."), param)
    }
}
