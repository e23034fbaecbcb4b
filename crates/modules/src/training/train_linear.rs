//! [`Fp4TrainLinear`]: a linear layer whose three products are quantized.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn_fp4_ops::{Draw, OpsError, TrainRecipe, train_product};

/// A linear layer whose three products, forward and backward, multiply quantized values as a
/// [`TrainRecipe`] says, by default NVIDIA's for pretraining in NVFP4. Records are the same as
/// of [`Linear`].
///
/// Random bits for gradients depend on the seed and the number of forward passes on an autodiff
/// device, which clones count together.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_fp4_modules::{Fp4TrainLinear, ops::TrainRecipe};
///
/// let device = Device::flex().autodiff();
/// let layers = 8;
/// let stack: Vec<_> = (0..layers)
///     .map(|layer| {
///         let linear = LinearConfig::new(64, 64).init(&device);
///         // The last two in high precision.
///         let recipe = TrainRecipe::NVFP4.for_layer(layer, layers, 2);
///         Fp4TrainLinear::new(linear, recipe, layer as u64)
///     })
///     .collect::<Result<_, _>>()?;
/// let input = Tensor::<2>::ones([4, 64], &device);
/// let output = stack.iter().fold(input, |x, layer| layer.forward(x));
/// let gradients = output.sum().backward();
/// # assert!(stack[0].weight.grad(&gradients).is_some());
/// # Ok::<(), burn_fp4_modules::ops::OpsError>(())
/// ```
#[derive(Module, Debug)]
pub struct Fp4TrainLinear {
    /// `[d_input, d_output]`, in full precision.
    pub weight: Param<Tensor<2>>,
    /// `[d_output]`; it is added in full precision.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    recipe: TrainRecipe,
    #[module(skip)]
    seed: u64,
    #[module(skip)]
    step: Arc<AtomicU64>,
}

impl Fp4TrainLinear {
    /// Trains a layer by a recipe; the seed is for what is drawn, and should be another for every
    /// layer.
    ///
    /// # Errors
    /// [`OpsError`] for an inconsistent recipe.
    pub fn new(linear: Linear, recipe: TrainRecipe, seed: u64) -> Result<Self, OpsError> {
        recipe.validate()?;
        let Linear { weight, bias, .. } = linear;
        Ok(Self { weight, bias, recipe, seed, step: Arc::default() })
    }

    /// The layer for inputs `[.., d_input]`, giving `[.., d_output]`.
    ///
    /// # Panics
    /// If the last axis of the input is not `d_input`, or its dtype is not that of the weight.
    #[must_use]
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let step = match input.device().is_autodiff() {
            true => self.step.fetch_add(1, Ordering::Relaxed),
            false => 0,
        };
        let draw = Draw { seed: self.seed, step };
        let output = train_product(input, self.weight.val(), &self.recipe, draw);
        let output = output.unwrap_or_else(|error| panic!("Fp4TrainLinear: {error}"));
        match &self.bias {
            Some(bias) => output + bias.val().unsqueeze(),
            None => output,
        }
    }

    /// Returns the recipe of its three products.
    #[must_use]
    pub fn recipe(&self) -> &TrainRecipe {
        &self.recipe
    }

    /// Forward passes so far: what a resumed training has to [set](Self::set_step) to draw on.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step.load(Ordering::Relaxed)
    }

    /// Sets the number of forward passes, of this layer and its clones.
    ///
    /// ```
    /// use burn::nn::LinearConfig;
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_modules::Fp4TrainLinear;
    ///
    /// let device = Device::flex().autodiff();
    /// let layer = Fp4TrainLinear::from(LinearConfig::new(64, 64).init(&device));
    /// layer.set_step(100);
    /// let output = layer.forward(Tensor::<2>::ones([4, 64], &device));
    /// assert_eq!((output.dims(), layer.step()), ([4, 64], 101));
    /// ```
    pub fn set_step(&self, step: u64) {
        self.step.store(step, Ordering::Relaxed);
    }
}

impl From<Linear> for Fp4TrainLinear {
    /// By NVIDIA's recipe, seeded by the id of the weight, which is another in every run.
    fn from(linear: Linear) -> Self {
        let seed = linear.weight.id.val();
        Self::new(linear, TrainRecipe::NVFP4, seed).expect("a consistent recipe")
    }
}

impl From<Fp4TrainLinear> for Linear {
    /// The layer with the weights that were trained, for inference or to be quantized in place.
    fn from(layer: Fp4TrainLinear) -> Self {
        let Fp4TrainLinear { weight, bias, .. } = layer;
        Self { weight, bias }
    }
}
