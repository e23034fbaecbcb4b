//! [`HessianFactor`]: GPTQ's factorization of a Gram matrix, on the device of the weights.

use std::fmt;
use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_fp4_search::{Fp4Scheme, Gptq, Gram};

use crate::devices::extension::Fp4Backend;
use crate::error::OpsError;
use crate::factorization::Factorization;
use crate::gram::deterministic_matmul;

/// GPTQ's factorization of a damped Gram matrix, shared by all weights of a device that are
/// multiplied by the same activations. Computed on the device if it has kernels, otherwise on all
/// cores of the host.
pub struct HessianFactor {
    factorization: Arc<Factorization>,
    /// Multiplies a weight: the product is its [correction](Gptq::correction).
    correction: Option<Tensor<2>>,
}

impl fmt::Debug for HessianFactor {
    /// Leaves out the matrices, which have millions of elements.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HessianFactor")
            .field("options", self.options())
            .field("channels", &self.channels())
            .field("device", self.device())
            .field("corrects", &self.correction.is_some())
            .finish()
    }
}

impl HessianFactor {
    /// Factorizes the Gram matrix for weights on a device, packed in blocks of this size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_ops::{Gptq, HessianFactor, OpsError, gram, search::SearchError};
    ///
    /// let device = Device::flex();
    /// // Singular: all channels are the same.
    /// let gram = gram(Tensor::<2>::ones([4, 32], &device))?;
    /// let hessian_factor = HessianFactor::new(&gram, &Gptq::ORIGINAL, 16, &device)?;
    /// assert_eq!((hessian_factor.channels(), hessian_factor.block_size()), (32, 16));
    /// let undamped = Gptq { damping: 0.0, ..Gptq::ORIGINAL };
    /// let error = HessianFactor::new(&gram, &undamped, 16, &device).unwrap_err();
    /// assert_eq!(error, OpsError::Search(SearchError::Singular));
    /// # Ok::<(), burn_fp4_ops::OpsError>(())
    /// ```
    ///
    /// # Errors
    /// [`OpsError::Search`] if the Gram matrix is singular and not damped, if the damping is not
    /// usable, or if blocks do not divide the channels; [`OpsError::Device`] if the device fails.
    pub fn new(
        gram: &Gram,
        options: &Gptq,
        block_size: usize,
        device: &Device,
    ) -> Result<Self, OpsError> {
        let factorization = Arc::new(Factorization::new(gram, options, block_size, device)?);
        let drift = gram.drift().filter(|_| options.correction > 0.0);
        let correction = drift.map(|drift| correction(&factorization, drift));
        Ok(Self { factorization, correction })
    }

    /// Corrects a weight for the drift of its inputs, which are along an axis: `W + s (H + d I)^-1
    /// D W`, where s is the [correction](Gptq::correction), D the drift and d the damping. For s =
    /// 1 that minimizes the change of outputs that the drift makes, plus d times the squared
    /// change of the weight. In f32, and in products of CUDA in TF32. Without a drift the weight
    /// stays the same.
    pub(crate) fn corrected<const D: usize>(&self, weight: Tensor<D>, axis: usize) -> Tensor<D> {
        let Some(correction) = &self.correction else { return weight };
        let weight = weight.cast(DType::F32).swap_dims(0, axis);
        let shape = weight.dims();
        let rows = shape.iter().product::<usize>() / self.channels().max(1);
        let columns = weight.reshape([self.channels(), rows]);
        let correction = correction.clone().to_device(&columns.device());
        let change = deterministic_matmul(correction, columns.clone());
        (columns + change).reshape(shape).swap_dims(0, axis)
    }

    pub(crate) fn factorization(&self) -> &Arc<Factorization> {
        &self.factorization
    }

    /// Returns the options it was made with.
    #[must_use]
    pub fn options(&self) -> &Gptq {
        self.factorization.damped().options()
    }

    /// Returns the number of input channels.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.factorization.channels()
    }

    /// Returns the block size.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.factorization.damped().blocks().block_size()
    }

    /// Returns the device of its weights.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.factorization.device()
    }

    /// Returns the scheme that chooses blocks anew.
    pub(crate) fn scheme(&self, scheme: &Fp4Scheme) -> Result<Fp4Scheme, OpsError> {
        Ok(self.factorization.damped().scheme(scheme)?)
    }
}

/// Returns the matrix whose product with a weight is its correction, `s (H + d I)^-1 D`.
fn correction(factorization: &Arc<Factorization>, drift: &[f32]) -> Tensor<2> {
    let (order, device) = (factorization.order(), factorization.device());
    let channels = order.len();
    let mut back = vec![0; order.len()];
    order.iter().enumerate().for_each(|(at, &channel)| back[channel] = at as i32);
    let order = order.iter().map(|&channel| channel as i32).collect();
    let [order, back] = [order, back].map(|at: Vec<i32>| {
        let data = TensorData::new(at, [channels]);
        Tensor::<1, Int>::from_data(data, device)
    });
    let data = TensorData::new(drift.to_vec(), [channels; 2]);
    let drift = Tensor::<2>::from_data(data, (device, DType::F32));
    let drift = (drift * factorization.damped().options().correction).select(0, order);
    let solved = Dispatch::fp4_solve(drift.into_dispatch(), factorization.clone());
    Tensor::<2>::from_dispatch(solved).select(0, back)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::Distribution;
    use burn_fp4_search::Hadamard;

    use super::*;
    use crate::gram::GramSum;

    /// `max |A|`.
    fn largest<const D: usize>(values: Tensor<D>) -> f32 {
        values.abs().max().into_scalar()
    }

    /// The corrected weight W* leaves `(H + d I) (W* - W) = s D W`, whatever the order of channels.
    #[test]
    fn a_corrected_weight_solves_its_equation() {
        let device = Device::flex();
        let normal = |shape| Tensor::<2>::random(shape, Distribution::Normal(0.0, 1.0), &device);
        let (channels, outputs) = (64, 24);
        device.seed(7);
        // The last block is the most active one.
        let scales = Tensor::<1>::from_floats([0.25, 1.0, 0.5, 2.0], &device).unsqueeze_dim::<2>(1);
        let scales = scales.repeat_dim(1, 16).reshape([1, channels]);
        let quantized = normal([300, channels]) * scales;
        let dense = quantized.clone() + normal([300, channels]) * 0.1;
        let mut sum = GramSum::new(channels);
        sum.add_with_drift(quantized.clone(), dense.clone()).unwrap();
        let gram = sum.finish().unwrap();
        let weight = normal([channels, outputs]);
        let options = Gptq { damping: 0.1, correction: 0.75, ..Gptq::DEFAULT };
        let added = options.damped_hessian(&gram, 16).unwrap().added() as f32;
        let hessian = quantized.clone().transpose().matmul(quantized.clone())
            + Tensor::eye(channels, &device) * added;
        let drift = quantized.clone().transpose().matmul(dense - quantized);
        let expected = drift.matmul(weight.clone()) * 0.75;
        let factor = |gram: &Gram| HessianFactor::new(gram, &options, 16, &device).unwrap();
        let plain = factor(&gram);
        assert_eq!(plain.factorization().order()[0], 48);
        let corrected = plain.corrected(weight.clone(), 0);
        let found = hessian.matmul(corrected.clone() - weight.clone());
        let bound = 1e-4 * largest(expected.clone());
        assert!(largest(found - expected) < bound);

        // The transposed weight, and transformed inputs.
        let other = plain.corrected(weight.clone().transpose(), 1).transpose();
        assert!(largest(other - corrected.clone()) < 1e-5);
        let hadamard = Hadamard::of_size(32).unwrap();
        let transformed = |values| crate::hadamard(values, 0, hadamard).unwrap();
        let behind = factor(&gram.clone().transformed(hadamard).unwrap());
        let found = behind.corrected(transformed(weight.clone()), 0);
        assert!(largest(found - transformed(corrected)) < 1e-4);

        // Without a drift, and without a correction, the weight stays what it is.
        let bare = factor(
            &Gram::from_own_tiles(
                gram.values().to_vec(),
                channels,
                channels,
                gram.rows(),
                gram.amax(),
            )
            .unwrap(),
        );
        let off = Gptq { correction: 0.0, ..options };
        let off = HessianFactor::new(&gram, &off, 16, &device).unwrap();
        for same in [bare, off] {
            let found = same.corrected(weight.clone(), 0);
            assert_eq!(found.into_data(), weight.to_data());
        }
    }
}
