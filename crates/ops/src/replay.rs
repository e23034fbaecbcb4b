//! Recorded operations, run one at a time.

// Burn 0.22 deprecates `NdArray`.
#![allow(deprecated)]
// Without any device there is nothing to replay on.
#![cfg_attr(
    not(any(feature = "flex", feature = "ndarray", feature = "cube")),
    allow(dead_code, unreachable_code, unused_imports, unused_variables)
)]

use burn::backend::{BackendTensor, DispatchDevice, DispatchKindConversion, DispatchTensor};
use burn::tensor::{Device, Shape, Tensor, TensorData};
use burn_ir::{BackendIr, HandleKind, OperationIr, TensorId, TensorIr, TensorStatus};
use burn_router::TensorInterpreter;

use crate::{Fp4Backend, OpsError, untuned};

/// Runs recorded operations on a device, one at a time: between two of them any tensor can be
/// looked at, or be replaced by another. Nothing is fused, and what is added up is so in an order
/// that no tuning decides: the results are the same in every run, on any device of a kind. Of
/// convolutions, and of attention that is one operation, Burn may choose another kernel.
///
/// Operations are those of a [`CapturedGraph`](burn::backend::capture::CapturedGraph).
pub struct Replay {
    interpreter: Box<dyn Interpret>,
    #[cfg(feature = "cube")]
    device: Device,
}

impl Replay {
    /// On a device, of which the operations are not to be differentiated.
    ///
    /// # Errors
    /// [`OpsError::Device`] if the device cannot run recorded operations.
    pub fn on(device: &Device) -> Result<Self, OpsError> {
        let plain = device.clone().inner();
        let interpreter: Box<dyn Interpret> = match plain.as_dispatch() {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(device) => {
                Box::new(TensorInterpreter::<burn::backend::Flex>::new(*device))
            }
            #[cfg(feature = "ndarray")]
            DispatchDevice::NdArray(device) => {
                Box::new(TensorInterpreter::<burn::backend::NdArray>::new(*device))
            }
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(device) => {
                Box::new(TensorInterpreter::<burn::backend::Cube>::new(device.clone()))
            }
            #[allow(unreachable_patterns)]
            other => {
                return Err(OpsError::Device(format!("{other:?} does not replay operations")));
            }
        };
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

    /// Gives a tensor of the operations the values that another one has in a replay on the same
    /// device, in the same memory.
    ///
    /// # Errors
    /// [`OpsError::Device`] if the other replay is on a device of another kind.
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

trait Interpret {
    fn insert_data(&mut self, id: TensorId, data: TensorData);
    fn insert(&mut self, id: TensorId, tensor: DispatchTensor) -> Result<(), String>;
    fn run(&mut self, operation: &OperationIr);
    fn tensor(&mut self, tensor: &TensorIr) -> DispatchTensor;
    fn matrix(&mut self, tensor: &TensorIr) -> DispatchTensor;
}

impl<B: BackendIr + Fp4Backend> Interpret for TensorInterpreter<B>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn insert_data(&mut self, id: TensorId, data: TensorData) {
        self.register_tensor_data_id(id, data);
    }

    fn insert(&mut self, id: TensorId, tensor: DispatchTensor) -> Result<(), String> {
        let tensor = match DispatchTensor::try_into_backend(tensor)? {
            BackendTensor::Float(tensor) => HandleKind::Float(tensor),
            BackendTensor::Int(tensor) => HandleKind::Int(tensor),
            BackendTensor::Bool(tensor) => HandleKind::Bool(tensor),
            other => return Err(format!("expected plain values, found {}", other.name())),
        };
        self.register_tensor_to_device(id, tensor);
        Ok(())
    }

    fn run(&mut self, operation: &OperationIr) {
        if !untuned::run(self, operation) {
            self.register_op(operation.clone());
        }
    }

    fn tensor(&mut self, tensor: &TensorIr) -> DispatchTensor {
        DispatchTensor::from_backend(match self.get_tensor(tensor) {
            HandleKind::Float(tensor) => BackendTensor::Float(tensor),
            HandleKind::Int(tensor) => BackendTensor::Int(tensor),
            HandleKind::Bool(tensor) => BackendTensor::Bool(tensor),
            HandleKind::Quantized(tensor) => BackendTensor::Quantized(tensor),
        })
    }

    fn matrix(&mut self, tensor: &TensorIr) -> DispatchTensor {
        let channels = tensor.shape.last().copied().unwrap_or(1);
        let rows = tensor.shape.num_elements().checked_div(channels).unwrap_or(0);
        match self.get_tensor(tensor) {
            HandleKind::Float(tensor) => {
                let matrix = B::float_reshape(tensor, Shape::new([rows, channels]));
                DispatchTensor::from_backend(BackendTensor::Float(matrix))
            }
            _ => unreachable!("asked for by the dtype of a float"),
        }
    }
}
