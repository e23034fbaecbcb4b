//! [`HessianFactor`]: GPTQ's factorization of a Gram matrix, on the device of the weights.

use std::fmt;

use burn::tensor::Device;
#[cfg(feature = "cube")]
use burn_fp4_search::SearchError;
use burn_fp4_search::{DampedHessian, Fp4Scheme, Gptq, Gram, HessianFactor as HostHessianFactor};

#[cfg(feature = "cube")]
use crate::devices::cube::device::with_kernels;
use crate::error::OpsError;

/// GPTQ's factorization of a damped Gram matrix, shared by all weights of a device that are
/// multiplied by the same activations. Computed on the device if it has kernels, otherwise on all
/// cores of the host.
pub struct HessianFactor {
    device: Device,
    place: Place,
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
        #[cfg(feature = "cube")]
        if let Some(cube) = with_kernels(&device) {
            let damped = options.damped_hessian(gram, block_size)?;
            // The host factorizes matrices that the kernels refuse.
            if let Some(hessian_factor) = on_cube(&cube, gram, &damped)? {
                return Ok(Self { device, place: Place::Cube(Box::new((damped, hessian_factor))) });
            }
        }
        Ok(Self { device, place: Place::Host(options.hessian_factor(gram, block_size)?) })
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
    #[cfg(feature = "cube")]
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
