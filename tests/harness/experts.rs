//! A mixture of experts that classifies handwritten digits. Weights have rank 3: a matrix for each
//! expert.

use burn::module::{Module, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::activation::{relu, softmax};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

use crate::inputs::{Random, normals};
use crate::modules::seeded;

/// Pixels of an image, 8 x 8.
pub const PIXELS: usize = 64;
/// Number of experts.
pub const EXPERTS: usize = 8;
const HIDDEN: usize = 32;
const DIGITS: usize = 10;

/// Handwritten digits and their labels.
#[derive(Debug, Clone)]
pub struct Digits {
    pixels: Vec<f32>,
    labels: Vec<i32>,
}

impl Digits {
    /// Reads the digits of the examples and splits them: every fifth image is held out.
    pub fn train_and_test() -> (Self, Self) {
        let empty = || Self { pixels: Vec::new(), labels: Vec::new() };
        let (mut train, mut test) = (empty(), empty());
        for (index, line) in include_str!("../../examples/data/digits.csv").lines().enumerate() {
            let numbers: Vec<i32> =
                line.split(',').map(|number| number.parse().expect("a number")).collect();
            assert_eq!(numbers.len(), PIXELS + 1, "line {}", index + 1);
            let part = if index % 5 == 0 { &mut test } else { &mut train };
            part.pixels.extend(numbers[..PIXELS].iter().map(|&pixel| pixel as f32 / 16.0));
            part.labels.push(numbers[PIXELS]);
        }
        (train, test)
    }

    /// Returns all images, `[n, 64]`.
    pub fn images(&self, device: &Device) -> Tensor<2> {
        let shape = [self.labels.len(), PIXELS];
        Tensor::from_data(TensorData::new(self.pixels.clone(), shape), device)
    }

    /// Returns the images at these indices, `[n, 64]`, and their labels `[n]`.
    fn batch(&self, indices: &[usize], device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
        let pixels: Vec<_> = indices
            .iter()
            .flat_map(|index| &self.pixels[index * PIXELS..][..PIXELS])
            .copied()
            .collect();
        let labels: Vec<_> = indices.iter().map(|&index| self.labels[index]).collect();
        let images = Tensor::from_data(TensorData::new(pixels, [indices.len(), PIXELS]), device);
        (images, Tensor::from_data(TensorData::new(labels, [indices.len()]), device))
    }
}

/// Weights of all experts, two layers each, used as `x.matmul(weight)`.
#[derive(Module, Debug)]
pub struct Experts {
    /// Weights of the first layer, `[experts, pixels, hidden]`.
    pub up: Param<Tensor<3>>,
    /// Weights of the second layer, `[experts, hidden, digits]`.
    pub down: Param<Tensor<3>>,
}

/// A mixture of experts with a router, which picks two of eight experts for each image.
#[derive(Module, Debug)]
pub struct Mixture {
    /// Router of the images to experts.
    pub router: Linear,
    /// Weights of the experts.
    pub experts: Experts,
}

impl Mixture {
    /// Creates an untrained mixture, the same in every run.
    pub fn new(device: &Device) -> Self {
        let weight = |seed, [inputs, outputs]: [usize; 2]| {
            let scale = (2.0 / inputs as f32).sqrt();
            let values = normals(seed, EXPERTS * inputs * outputs);
            let values: Vec<_> = values.into_iter().map(|value| value * scale).collect();
            let data = TensorData::new(values, [EXPERTS, inputs, outputs]);
            Param::from_tensor(Tensor::<3>::from_data(data, device))
        };
        Self {
            router: seeded(LinearConfig::new(PIXELS, EXPERTS).init(device), 1),
            experts: Experts { up: weight(2, [PIXELS, HIDDEN]), down: weight(3, [HIDDEN, DIGITS]) },
        }
    }

    /// Returns the mask of experts for each image, `[n, experts]`: two per image.
    pub fn routes(&self, images: Tensor<2>) -> Tensor<2, Bool> {
        chosen(self.router.forward(images))
    }

    /// Returns the logits `[n, 10]` of images `[n, 64]`. Every expert computes all images, with
    /// zeros for the images of other experts.
    pub fn forward(&self, images: Tensor<2>) -> Tensor<2> {
        let router_logits = self.router.forward(images.clone());
        let chosen = chosen(router_logits.clone());
        let gates =
            softmax(router_logits.mask_fill(chosen.clone().bool_not(), f32::NEG_INFINITY), 1);
        // [experts, n, 1]
        let by_expert = |gates: Tensor<2>| gates.transpose().unsqueeze_dim::<3>(2);
        let own = images.unsqueeze_dim::<3>(0) * by_expert(chosen.float());
        let outputs = relu(own.matmul(self.experts.up.val())).matmul(self.experts.down.val());
        (outputs * by_expert(gates)).sum_dim(0).squeeze_dim::<2>(0)
    }

    /// Trains with Adam and a load-balancing loss.
    pub fn train_on(mut self, digits: &Digits, epochs: usize) -> Self {
        const BATCH: usize = 64;
        let device = &self.router.weight.val().device();
        let loss_function = CrossEntropyLossConfig::new().init(device);
        let mut optimizer = AdamConfig::new().init();
        let mut order: Vec<_> = (0..digits.labels.len()).collect();
        let mut random = Random::new(5);
        for _ in 0..epochs {
            for last in (1..order.len()).rev() {
                order.swap(last, random.below(last + 1));
            }
            for indices in order.chunks(BATCH) {
                let (images, labels) = digits.batch(indices, device);
                let router_logits = self.router.forward(images.clone());
                let images_each = chosen(router_logits.clone()).float().mean_dim(0);
                let unbalanced = (softmax(router_logits, 1).mean_dim(0) * images_each).sum();
                let loss = loss_function.forward(self.forward(images), labels)
                    + unbalanced * (0.1 * EXPERTS as f32);
                let gradients = GradientsParams::from_grads(loss.backward(), &self);
                self = optimizer.step(3e-3, self, gradients);
            }
        }
        self
    }

    /// Computes the share of images classified correctly.
    pub fn accuracy(&self, digits: &Digits, device: &Device) -> f64 {
        let count = digits.labels.len();
        let labels = TensorData::new(digits.labels.clone(), [count]);
        let labels = Tensor::<1, Int>::from_data(labels, device);
        let predicted = self.forward(digits.images(device)).argmax(1).reshape([count]);
        predicted.equal(labels).int().sum().into_scalar::<i64>() as f64 / count as f64
    }
}

/// Masks the two largest logits of each row.
fn chosen(logits: Tensor<2>) -> Tensor<2, Bool> {
    let shape = logits.dims();
    let largest = |logits: Tensor<2>| {
        let highest = logits.clone().max_dim(1).expand(shape);
        logits.equal(highest)
    };
    let first = largest(logits.clone());
    let second = largest(logits.mask_fill(first.clone(), f32::NEG_INFINITY));
    first.bool_or(second)
}
