//! Float parameters of a module, with their paths.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;

/// Takes float parameters of any rank, one after the other.
pub(crate) trait TakeFloats {
    fn take<const D: usize>(&mut self, path: String, param: &Param<Tensor<D>>);
}

/// Hands every float parameter of a module on, in its order.
pub(crate) fn each_float<M: Module>(module: &M, take: &mut impl TakeFloats) {
    module.visit(&mut Paths { stack: Vec::new(), take });
}

struct Paths<'a, T> {
    stack: Vec<String>,
    take: &'a mut T,
}

impl<T: TakeFloats> ModuleVisitor for Paths<'_, T> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.stack.push(name.to_owned());
    }
    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.stack.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.take.take(self.stack.join("."), param);
    }
}
