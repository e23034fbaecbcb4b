//! [`Rerun`]: recorded operations, run one at a time.

use burn::tensor::{Device, Tensor, TensorData};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};

use crate::devices::interpreter;
use crate::devices::interpreter::Interpret;
use crate::error::OpsError;

/// Runs recorded operations on a device, one at a time: between two of them any tensor can be
/// read, or replaced by another. Nothing is fused, and sums use fixed, not autotuned,
/// kernels: the results are the same in every run, on any device of a kind. Of convolutions, and of
/// attention that is one operation, Burn may choose another kernel.
///
/// Operations are those of a [`CapturedGraph`](burn::backend::capture::CapturedGraph).
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::Rerun;
///
/// let recorder = Device::capture();
/// let recorded = recorder.capture_scope(|scope| {
///     let _product = Tensor::<2>::from_floats([[1.0, -2.0]], &recorder) * 3.0;
///     scope.complete([], [])
/// });
/// let (recorded, mut rerun) = (recorded.unwrap(), Rerun::on(&Device::flex())?);
/// recorded.values.into_iter().for_each(|(id, values)| rerun.insert_data(id, values));
/// recorded.graph.operations.iter().for_each(|operation| rerun.run(operation));
/// let product = recorded.graph.operations.iter().flat_map(|made| made.outputs()).last().unwrap();
/// assert_eq!(rerun.matrix(product).into_data(), TensorData::from([[3f32, -6.0]]));
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
#[derive(Debug)]
pub struct Rerun {
    interpreter: Box<dyn Interpret>,
    #[cfg(feature = "cube")]
    device: Device,
}

impl Rerun {
    /// On a device, of which the operations are not to be differentiated.
    ///
    /// # Errors
    /// [`OpsError::Device`] if the device cannot run recorded operations.
    pub fn on(device: &Device) -> Result<Self, OpsError> {
        let plain = device.clone().inner();
        let interpreter = interpreter(&plain)?;
        Ok(Self {
            interpreter,
            #[cfg(feature = "cube")]
            device: plain,
        })
    }

    /// Gives a tensor of the operations its values.
    pub fn insert_data(&mut self, id: TensorId, data: TensorData) {
        self.interpreter.insert_data(id, data);
    }

    /// Gives a tensor of the operations its values, in place of those that it has.
    ///
    /// # Errors
    /// [`OpsError::Device`] if the tensor is on another device.
    pub fn insert<const D: usize>(
        &mut self,
        id: TensorId,
        tensor: Tensor<D>,
    ) -> Result<(), OpsError> {
        self.interpreter
            .insert(id, tensor.without_autodiff().into_dispatch())
            .map_err(OpsError::Device)
    }

    /// Gives a tensor of the operations the values that another one has in a rerun on the same
    /// device, in the same memory.
    ///
    /// # Errors
    /// [`OpsError::Device`] if the other rerun is on a device of another kind.
    pub fn share(
        &mut self,
        id: TensorId,
        other: &mut Self,
        tensor: &TensorIr,
    ) -> Result<(), OpsError> {
        let tensor = TensorIr { status: TensorStatus::ReadOnly, ..tensor.clone() };
        let values = other.interpreter.tensor(&tensor);
        self.interpreter.insert(id, values).map_err(OpsError::Device)
    }

    /// Runs an operation. Its inputs have to be there, as values or as outputs of other operations.
    pub fn run(&mut self, operation: &OperationIr) {
        self.interpreter.run(operation);
        // Otherwise it is fused with others, and what is rounded between them depends on how.
        #[cfg(feature = "cube")]
        crate::fused::drain(&self.device);
    }

    /// Forgets a tensor, if it is still there.
    pub fn forget(&mut self, tensor: &TensorIr) {
        self.interpreter.run(&OperationIr::Drop(tensor.clone()));
    }

    /// A float tensor `[.., channels]` that has been computed, as `[rows, channels]`.
    pub fn matrix(&mut self, tensor: &TensorIr) -> Tensor<2> {
        let tensor = TensorIr { status: TensorStatus::ReadOnly, ..tensor.clone() };
        Tensor::from_dispatch(self.interpreter.matrix(&tensor))
    }
}
