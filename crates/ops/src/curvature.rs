//! [`Curvature`]: GPTQ's factorization of a Gram matrix, on the device of the weights.

use std::fmt;

use burn::tensor::Device;
#[cfg(feature = "cube")]
use burn_fp4_search::SearchError;
use burn_fp4_search::{Curvature as HostCurvature, Damped, Fp4Scheme, Gptq, Gram};

#[cfg(feature = "cube")]
use crate::devices::cube::device::with_kernels;
use crate::error::OpsError;

/// GPTQ's factorization of a damped Gram matrix, shared by all weights of a device that are
/// multiplied by the same activations. Computed on the device if it has kernels, otherwise on all
/// cores of the host.
pub struct Curvature {
    device: Device,
    place: Place,
}

/// Memory of the factorization.
enum Place {
    Host(HostCurvature),
    #[cfg(feature = "cube")]
    Cube(Box<(Damped, burn_fp4_cubecl::CurvatureHandles)>),
}

impl fmt::Debug for Curvature {
    /// Leaves out the matrices, which have millions of elements.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Curvature")
            .field("options", self.options())
            .field("channels", &self.channels())
            .field("device", &self.device)
            .finish()
    }
}

impl Curvature {
    /// Factorizes the Gram matrix for weights on a device, packed in blocks of this size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_fp4_ops::{Curvature, Gptq, OpsError, gram, search::SearchError};
    ///
    /// let device = Device::flex();
    /// // Singular: all channels are the same.
    /// let gram = gram(Tensor::<2>::ones([4, 32], &device))?;
    /// let curvature = Curvature::new(&gram, &Gptq::TEXTBOOK, 16, &device)?;
    /// assert_eq!((curvature.channels(), curvature.block_size()), (32, 16));
    /// let undamped = Gptq { damping: 0.0, ..Gptq::TEXTBOOK };
    /// let error = Curvature::new(&gram, &undamped, 16, &device).unwrap_err();
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
            let damped = options.damped(gram, block_size)?;
            // The host factorizes matrices that the kernels refuse.
            if let Some(curvature) = on_cube(&cube, gram, &damped)? {
                return Ok(Self { device, place: Place::Cube(Box::new((damped, curvature))) });
            }
        }
        Ok(Self { device, place: Place::Host(options.curvature(gram, block_size)?) })
    }

    fn damped(&self) -> &Damped {
        match &self.place {
            Place::Host(curvature) => curvature.damped(),
            #[cfg(feature = "cube")]
            Place::Cube(curvature) => &curvature.0,
        }
    }

    /// Returns the options it was made with.
    pub fn options(&self) -> &Gptq {
        self.damped().options()
    }

    /// Returns the number of input channels.
    pub fn channels(&self) -> usize {
        self.damped().channels()
    }

    /// Returns the block size.
    pub fn block_size(&self) -> usize {
        self.damped().blocks().block_size()
    }

    /// Returns the device of its weights.
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
    pub(crate) fn on_host(&self) -> Option<&HostCurvature> {
        match &self.place {
            Place::Host(curvature) => Some(curvature),
            #[cfg(feature = "cube")]
            Place::Cube(..) => None,
        }
    }

    /// Returns the factorization if the device made it.
    #[cfg(feature = "cube")]
    pub(crate) fn on_cube(&self) -> Option<&burn_fp4_cubecl::CurvatureHandles> {
        match &self.place {
            Place::Host(_) => None,
            Place::Cube(curvature) => Some(&curvature.1),
        }
    }
}

/// Factorizes on a Cube device; none if its kernels refuse the matrix.
#[cfg(feature = "cube")]
fn on_cube(
    device: &burn_cubecl::CubeDevice,
    gram: &Gram,
    damped: &Damped,
) -> Result<Option<burn_fp4_cubecl::CurvatureHandles>, OpsError> {
    let client = device.client();
    let capability = burn_fp4_cubecl::Capability::of(&client);
    let Ok(curvature) = burn_fp4_cubecl::curvature(&client, &capability, gram, damped) else {
        return Ok(None);
    };
    let definite = client.read_one(curvature.definite().clone()).map_err(OpsError::device)?;
    if definite.iter().all(|byte| *byte == 0) {
        return Err(SearchError::Singular.into());
    }
    Ok(Some(curvature))
}
