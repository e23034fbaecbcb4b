//! The tensors of a model that a capture reads.

use burn::backend::DispatchTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParameterValue};
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, Int, Tensor};
use burn_fp4_ops::{GraphState, OpsError};

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

/// A model whose parameters are all where a capture can read them.
///
/// # Errors
/// [`OpsError::Device`], [`OpsError::Capture`].
pub(crate) fn gathered<M: Module>(model: &M, state: &mut GraphState) -> Result<M, OpsError> {
    let mut gather = Gather { state, error: None };
    let model = model.clone().map(&mut gather);
    match gather.error {
        Some(error) => Err(error),
        None => Ok(model),
    }
}

struct Gather<'a> {
    state: &'a mut GraphState,
    error: Option<OpsError>,
}

impl Gather<'_> {
    /// A parameter that is where it should be is kept, with its mappers.
    fn param<const D: usize, K: Basic>(&mut self, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: ParameterValue,
    {
        match self.state.gather(param.val().into_dispatch()) {
            Ok(Some(moved)) => param.map(|_| Tensor::from_dispatch(moved)),
            Ok(None) => param,
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}

impl ModuleMapper for Gather<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.param(param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.param(param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.param(param)
    }
}
