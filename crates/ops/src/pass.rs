//! [`Pass`]: a forward pass as devices record it.

use burn::backend::DispatchTensor;

/// A forward pass: given the state that is carried from run to run and the inputs, the next state
/// and the outputs.
pub type Pass<'a> = dyn Fn(Tensors, Tensors) -> (Tensors, Tensors) + Sync + 'a;

/// Tensors of any rank and kind.
type Tensors = Vec<DispatchTensor>;
