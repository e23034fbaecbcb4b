//! The tensors of a model that a recording reads.

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor};

/// The parameters of a model as they are stored: codes and scales of what is packed.
pub(crate) fn weights(model: &impl Module) -> Vec<DispatchTensor> {
    let mut stored = Stored::default();
    model.visit(&mut stored);
    stored.tensors
}

#[derive(Default)]
struct Stored {
    tensors: Vec<DispatchTensor>,
}

impl ModuleVisitor for Stored {
    // Of a packed weight this is a placeholder; its codes and scales follow.
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.tensors.push(param.val().into_dispatch());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.tensors.push(param.val().into_dispatch());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.tensors.push(param.val().into_dispatch());
    }
}
