//! [`Interpreter`]: recorded operations, run one at a time.

use burn::tensor::{Device, Tensor, TensorData};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};

use crate::devices::extension::{BackendInterpreter, interpreter};
use crate::error::OpsError;

/// Runs recorded operations on a device, one at a time. In between, any tensor can be read or
/// replaced.
///
/// Nothing is fused, and sums use fixed, not autotuned, kernels. So the results are the same in
/// every run, on any device of a kind. The exceptions are convolutions and attention as one
/// operation, for which Burn may choose another kernel.
///
/// [`Device::capture`] records the operations.
///
/// ```
/// use burn::tensor::{Device, Tensor, TensorData};
/// use burn_fp4_ops::Interpreter;
///
/// let recorder = Device::capture();
/// let recorded = recorder.capture_scope(|scope| {
///     let _product = Tensor::<2>::from_floats([[1.0, -2.0]], &recorder) * 3.0;
///     scope.complete([], [])
/// });
/// let (recorded, mut interpreter) = (recorded.unwrap(), Interpreter::on(&Device::flex())?);
/// recorded.values.into_iter().for_each(|(id, values)| interpreter.insert_data(id, values));
/// recorded.graph.operations.iter().for_each(|operation| interpreter.run(operation));
/// let product = recorded.graph.operations.iter().flat_map(|made| made.outputs()).last().unwrap();
/// assert_eq!(interpreter.matrix(product).into_data(), TensorData::from([[3f32, -6.0]]));
/// // Another one takes the result without a copy.
/// let mut other = Interpreter::on(&Device::flex())?;
/// other.share(product.id, &mut interpreter, product)?;
/// assert_eq!(other.matrix(product).into_data(), interpreter.matrix(product).into_data());
/// interpreter.forget(product); // frees its memory
/// # Ok::<(), burn_fp4_ops::OpsError>(())
/// ```
#[derive(Debug)]
pub struct Interpreter {
    interpreter: Box<dyn BackendInterpreter>,
    #[cfg(feature = "cube")]
    device: Device,
}

impl Interpreter {
    /// Makes an interpreter for a device. It does not differentiate the operations.
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

    /// Sets the values of a tensor of the operations.
    pub fn insert_data(&mut self, id: TensorId, data: TensorData) {
        self.interpreter.insert_data(id, data);
    }

    /// Sets a tensor of the operations, in place of its former values.
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

    /// Sets a tensor of the operations to a tensor of another interpreter on the same device,
    /// without a copy.
    ///
    /// # Errors
    /// [`OpsError::Device`] if the other interpreter is on a device of another kind.
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

    /// Runs an operation. Its inputs have to be set, or computed by earlier operations.
    pub fn run(&mut self, operation: &OperationIr) {
        self.interpreter.run(operation);
        // Fused with others, it would round differently.
        #[cfg(feature = "cube")]
        crate::devices::cube::queues::flush(&self.device);
    }

    /// Drops a tensor, if it still exists.
    pub fn forget(&mut self, tensor: &TensorIr) {
        self.interpreter.run(&OperationIr::Drop(tensor.clone()));
    }

    /// Reads a computed float tensor `[.., channels]` as a matrix `[rows, channels]`.
    pub fn matrix(&mut self, tensor: &TensorIr) -> Tensor<2> {
        let tensor = TensorIr { status: TensorStatus::ReadOnly, ..tensor.clone() };
        Tensor::from_dispatch(self.interpreter.matrix(&tensor))
    }
}
