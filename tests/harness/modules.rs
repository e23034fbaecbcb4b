//! Modules with the same parameters in every run. Burn's initializers cannot do that: tests that
//! run in parallel share the random numbers of a device.

use std::fmt::Display;

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};

use crate::inputs::normals;

/// Two linear layers with a tanh between them.
#[derive(Module, Debug)]
pub struct Net {
    /// First layer.
    pub first: Linear,
    /// Second layer.
    pub second: Linear,
}

impl Net {
    /// Creates a net with these numbers of inputs, hidden values, and outputs.
    pub fn new([inputs, inner, outputs]: [usize; 3], device: &Device) -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(device);
        seeded(Self { first: linear(inputs, inner), second: linear(inner, outputs) }, 3)
    }

    /// Maps `[.., inputs]` to `[.., outputs]`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.second.forward(self.first.forward(x).tanh())
    }
}

/// Fills every weight and bias with normal values, scaled as Burn's initializers do. Scales of
/// normalizations stay.
pub fn seeded<M: Module>(module: M, seed: u64) -> M {
    module.map(&mut Fill { seed, name: Vec::new() })
}

/// Returns what a report prints in one line, wherever it breaks lines.
pub fn unwrapped(report: &impl Display) -> String {
    report.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

struct Fill {
    seed: u64,
    name: Vec<String>,
}

impl ModuleMapper for Fill {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.name.push(name.to_owned());
    }
    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.name.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let bias = self.name.last().is_some_and(|name| name == "bias");
        if D == 1 && !bias {
            return param;
        }
        self.seed += 1;
        let values = normals(self.seed, param.shape().num_elements());
        param.map(|tensor| {
            let shape = tensor.shape();
            let scale = 1.0 / (3.0 * shape[0] as f32).sqrt();
            let values: Vec<_> = values.iter().map(|value| value * scale).collect();
            let options = (&tensor.device(), tensor.dtype());
            let filled = Tensor::from_data(TensorData::new(values, shape), options);
            if tensor.is_require_grad() { filled.require_grad() } else { filled }
        })
    }
}
