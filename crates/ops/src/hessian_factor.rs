//! [`HessianFactor`]: GPTQ's factorization of a Gram matrix, on the device of the weights.

use std::fmt;
use std::sync::{Arc, OnceLock};

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
#[cfg(feature = "cube")]
use burn_fp4_search::SearchError;
use burn_fp4_search::{DampedHessian, Fp4Scheme, Gptq, Gram, HessianFactor as HostHessianFactor};

#[cfg(feature = "cube")]
use crate::devices::cube::device::with_kernels;
use crate::devices::extension::Fp4Backend;
use crate::error::OpsError;
use crate::gram::deterministic_matmul;

/// GPTQ's factorization of a damped Gram matrix, shared by all weights of a device that are
/// multiplied by the same activations. Computed on the device if it has kernels, otherwise on all
/// cores of the host.
pub struct HessianFactor {
    device: Device,
    place: Place,
    /// The [drift](Gram::drift) of the inputs, if weights are corrected for it.
    drift: Option<Tensor<2>>,
    /// What a weight is multiplied by for its [correction](Gptq::correction), once one was.
    correction: OnceLock<Tensor<2>>,
}

/// Memory of the factorization.
enum Place {
    Host(HostHessianFactor),
    #[cfg(feature = "cube")]
    Cube(Box<(DampedHessian, burn_fp4_cubecl::HessianFactorHandles)>),
}

impl fmt::Debug for HessianFactor {
    /// Leaves out the matrices, which have millions of elements.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HessianFactor")
            .field("options", self.options())
            .field("channels", &self.channels())
            .field("device", &self.device)
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
        let device = device.clone().inner();
        let drift = gram.drift().filter(|_| options.correction > 0.0).map(|drift| {
            let data = TensorData::new(drift.to_vec(), [gram.channels(); 2]);
            Tensor::from_data(data, (&device, DType::F32))
        });
        let correction = OnceLock::new();
        #[cfg(feature = "cube")]
        if let Some(cube) = with_kernels(&device) {
            let damped = options.damped_hessian(gram, block_size)?;
            // The host factorizes matrices that the kernels refuse.
            if let Some(hessian_factor) = on_cube(&cube, gram, &damped)? {
                let place = Place::Cube(Box::new((damped, hessian_factor)));
                return Ok(Self { device, place, drift, correction });
            }
        }
        let place = Place::Host(options.hessian_factor(gram, block_size)?);
        Ok(Self { device, place, drift, correction })
    }

    /// Corrects a weight for the drift of its inputs, which are along an axis: `W + s (H + d I)^-1
    /// D W` in f32, where s is the [correction](Gptq::correction), D the drift and d the damping.
    /// For s = 1 that minimizes the change of outputs that the drift makes, plus d times the change
    /// of the weight. Without a drift the weight stays what it is.
    pub(crate) fn corrected<const D: usize>(
        self: &Arc<Self>,
        weight: Tensor<D>,
        axis: usize,
    ) -> Tensor<D> {
        let Some(drift) = &self.drift else { return weight };
        let correction = self.correction.get_or_init(|| self.correction_of(drift.clone()));
        let weight = weight.cast(DType::F32).swap_dims(0, axis);
        let shape = weight.dims();
        let rows = shape.iter().product::<usize>() / self.channels().max(1);
        let columns = weight.reshape([self.channels(), rows]);
        let change = deterministic_matmul(correction.clone(), columns.clone());
        (columns + change).reshape(shape).swap_dims(0, axis)
    }

    fn correction_of(self: &Arc<Self>, drift: Tensor<2>) -> Tensor<2> {
        let order = self.order();
        let mut back = vec![0; order.len()];
        order.iter().enumerate().for_each(|(at, &channel)| back[channel] = at as i32);
        let order = order.iter().map(|&channel| channel as i32).collect();
        let [order, back] = [order, back].map(|at: Vec<i32>| {
            let data = TensorData::new(at, [self.channels()]);
            Tensor::<1, Int>::from_data(data, &self.device)
        });
        let drift = (drift * self.options().correction).select(0, order);
        let solved = Dispatch::fp4_solve(drift.into_dispatch(), self.clone());
        Tensor::<2>::from_dispatch(solved).select(0, back)
    }

    fn damped(&self) -> &DampedHessian {
        match &self.place {
            Place::Host(hessian_factor) => hessian_factor.damped(),
            #[cfg(feature = "cube")]
            Place::Cube(hessian_factor) => &hessian_factor.0,
        }
    }

    /// Returns the options it was made with.
    #[must_use]
    pub fn options(&self) -> &Gptq {
        self.damped().options()
    }

    /// Returns the number of input channels.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.damped().channels()
    }

    /// Returns the block size.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.damped().blocks().block_size()
    }

    /// Returns the device of its weights.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the scheme that chooses blocks anew.
    pub(crate) fn scheme(&self, scheme: &Fp4Scheme) -> Result<Fp4Scheme, OpsError> {
        Ok(self.damped().scheme(scheme)?)
    }

    /// Returns the channels in the order in which they are rounded.
    pub(crate) fn order(&self) -> &[usize] {
        self.damped().order()
    }

    /// Returns the factorization if the host made it.
    pub(crate) fn on_host(&self) -> Option<&HostHessianFactor> {
        match &self.place {
            Place::Host(hessian_factor) => Some(hessian_factor),
            #[cfg(feature = "cube")]
            Place::Cube(..) => None,
        }
    }

    /// Returns the factorization if the device made it.
    #[cfg(feature = "cube")]
    pub(crate) fn on_cube(&self) -> Option<&burn_fp4_cubecl::HessianFactorHandles> {
        match &self.place {
            Place::Host(_) => None,
            Place::Cube(hessian_factor) => Some(&hessian_factor.1),
        }
    }
}

/// Factorizes on a Cube device; none if its kernels refuse the matrix.
#[cfg(feature = "cube")]
fn on_cube(
    device: &burn_cubecl::CubeDevice,
    gram: &Gram,
    damped: &DampedHessian,
) -> Result<Option<burn_fp4_cubecl::HessianFactorHandles>, OpsError> {
    let client = device.client();
    let capability = burn_fp4_cubecl::Capability::of(&client);
    let Ok(hessian_factor) = burn_fp4_cubecl::hessian_factor(&client, &capability, gram, damped)
    else {
        return Ok(None);
    };
    let definite = client.read_one(hessian_factor.definite().clone()).map_err(OpsError::device)?;
    if definite.iter().all(|byte| *byte == 0) {
        return Err(SearchError::Singular.into());
    }
    Ok(Some(hessian_factor))
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
        let scales = Tensor::<1>::from_floats([0.25, 1.0, 0.5, 2.0], &device).repeat_dim(0, 16);
        let quantized = normal([300, channels]) * scales.unsqueeze();
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
        let factor =
            |gram: &Gram| Arc::new(HessianFactor::new(gram, &options, 16, &device).unwrap());
        let plain = factor(&gram);
        assert_ne!(plain.order()[0], 0, "channels are in another order");
        let corrected = plain.corrected(weight.clone(), 0);
        let found = hessian.matmul(corrected.clone() - weight.clone());
        let bound = 1e-4 * largest(expected.clone());
        assert!(largest(found - expected) < bound);

        // Of the transposed weight, and of transformed inputs.
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
        let off = Arc::new(HessianFactor::new(&gram, &off, 16, &device).unwrap());
        for same in [bare, off] {
            let found = same.corrected(weight.clone(), 0);
            assert_eq!(found.into_data(), weight.to_data());
        }
    }
}
