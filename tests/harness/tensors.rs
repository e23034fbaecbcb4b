//! Burn tensors with known values, and their values.

use burn::tensor::{Device, Tensor, TensorData};

use burn_fp4_ops::squared_sums;

use crate::inputs::normals;

/// Draws standard normal f32 values, the same on every device.
pub fn random<const D: usize>(seed: u64, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(normals(seed, shape.iter().product()), shape), device)
}

/// Reads the values of a tensor.
pub fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// Reads the squared error and the energy that `squared_error` leaves on the device.
pub fn sums(on_device: Tensor<1>) -> [f64; 2] {
    squared_sums(&floats(on_device)).expect("the sums of squared_error")
}
