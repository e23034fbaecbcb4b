//! [`BackendInterpreter`] of every backend.

use burn::backend::{BackendTensor, DispatchKindConversion, DispatchTensor};
use burn::tensor::{Shape, TensorData};
use burn_ir::{BackendIr, HandleKind, OperationIr, TensorId, TensorIr};
use burn_router::TensorInterpreter;

use super::extension::{BackendInterpreter, Fp4Backend};
use crate::deterministic;

impl<B: BackendIr + Fp4Backend> BackendInterpreter for TensorInterpreter<B>
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
        if !deterministic::run(self, operation) {
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
            _ => unreachable!("callers check that it is a float"),
        }
    }
}
