//! Handwritten digits, and a small classifier of them.

use anyhow::{Context, ensure};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::random::Random;

/// Pixels of an image, 8 x 8.
pub const PIXELS: usize = 64;

/// Images and their labels.
#[derive(Debug, Clone)]
pub struct Digits {
    pixels: Vec<f32>,
    labels: Vec<i32>,
}

impl Digits {
    /// Reads the embedded data and splits it: every fifth image is for testing.
    ///
    /// # Errors
    /// The embedded file is malformed.
    pub fn train_and_test() -> anyhow::Result<(Self, Self)> {
        let empty = || Self { pixels: Vec::new(), labels: Vec::new() };
        let (mut train, mut test) = (empty(), empty());
        for (index, line) in include_str!("data/digits.csv").lines().enumerate() {
            let numbers = line.split(',').map(str::parse::<i32>).collect::<Result<Vec<_>, _>>();
            let numbers = numbers.with_context(|| format!("line {}", index + 1))?;
            ensure!(
                numbers.len() == PIXELS + 1,
                "line {} has {} numbers",
                index + 1,
                numbers.len()
            );
            let part = if index % 5 == 0 { &mut test } else { &mut train };
            part.pixels.extend(numbers[..PIXELS].iter().map(|&pixel| pixel as f32 / 16.0));
            part.labels.push(numbers[PIXELS]);
        }
        Ok((train, test))
    }

    /// Returns the number of images.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Returns true if there are no images.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Returns the images at these indices, `[n, 64]`, and their labels.
    pub fn batch(&self, indices: &[usize], device: &Device) -> (Tensor<2>, Tensor<1, Int>) {
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

/// Computes how much of the accuracy lost to quantization after training is recovered with
/// quantization in training, in percent. None if quantization after training loses nothing.
pub fn recovered_percent(dense: f64, after: f64, aware: f64) -> Option<f64> {
    (after < dense).then(|| 100.0 * (aware - after) / (dense - after))
}

/// Three linear layers: an ordinary Burn module that does not know of FP4.
#[derive(Module, Debug)]
pub struct Classifier {
    input: Linear,
    hidden: Linear,
    output: Linear,
    relu: Relu,
}

impl Classifier {
    /// Creates an untrained network with two hidden layers of these widths.
    pub fn new(device: &Device, [first, second]: [usize; 2]) -> Self {
        Self {
            input: LinearConfig::new(PIXELS, first).init(device),
            hidden: LinearConfig::new(first, second).init(device),
            output: LinearConfig::new(second, 10).init(device),
            relu: Relu::new(),
        }
    }

    /// Returns the logits `[n, 10]` of images `[n, 64]`.
    pub fn forward(&self, images: Tensor<2>) -> Tensor<2> {
        let hidden = self.relu.forward(self.input.forward(images));
        let hidden = self.relu.forward(self.hidden.forward(hidden));
        self.output.forward(hidden)
    }

    /// Computes the share of images classified correctly.
    pub fn accuracy(&self, digits: &Digits, device: &Device) -> f64 {
        let all: Vec<_> = (0..digits.len()).collect();
        let (images, labels) = digits.batch(&all, device);
        let predicted = self.forward(images).argmax(1).reshape([all.len()]);
        let correct = predicted.equal(labels).int().sum().into_scalar::<i64>();
        correct as f64 / all.len() as f64
    }

    /// Trains with Adam, in an order that depends on the seed. Calls `progress` with the loss after
    /// each epoch.
    pub fn train_on(
        mut self,
        digits: &Digits,
        epochs: usize,
        learning_rate: f64,
        seed: u64,
        device: &Device,
        mut progress: impl FnMut(f64),
    ) -> Self {
        const BATCH: usize = 64;
        let device = &device.clone().autodiff();
        let loss_function = CrossEntropyLossConfig::new().init(device);
        let mut optimizer = AdamConfig::new().init();
        let mut order: Vec<_> = (0..digits.len()).collect();
        let mut random = Random::new(seed);
        for _ in 0..epochs {
            random.shuffle(&mut order);
            let mut sum = 0.0;
            for indices in order.chunks(BATCH) {
                let (images, labels) = digits.batch(indices, device);
                let loss = loss_function.forward(self.forward(images), labels);
                sum += loss.clone().into_scalar::<f64>() * indices.len() as f64;
                let gradients = GradientsParams::from_grads(loss.backward(), &self);
                self = optimizer.step(learning_rate, self, gradients);
            }
            progress(sum / digits.len() as f64);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::recovered_percent;

    #[test]
    fn the_recovered_share_is_none_if_nothing_was_lost() {
        assert_eq!(recovered_percent(96.0, 92.0, 95.0), Some(75.0));
        assert_eq!(recovered_percent(96.0, 92.0, 97.0), Some(125.0));
        assert_eq!(recovered_percent(96.0, 96.0, 95.0), None);
        assert_eq!(recovered_percent(96.0, 97.0, 97.0), None);
    }
}
