//! [`Factorization`]: the part of a Hessian factor that queued operations own.

use std::fmt;

use burn::tensor::Device;
#[cfg(feature = "cube")]
use burn_fp4_search::SearchError;
use burn_fp4_search::{DampedHessian, Gptq, Gram, HessianFactor as HostHessianFactor};

#[cfg(feature = "cube")]
use crate::devices::cube::device::with_kernels;
use crate::error::OpsError;

/// The part of a [`HessianFactor`](crate::HessianFactor) that operations take. Queued operations
/// own it, and may drop it on the thread of a device, where no tensor may be dropped.
pub struct Factorization {
    device: Device,
    place: Place,
}

/// Memory of the factorization.
enum Place {
    Host(HostHessianFactor),
    #[cfg(feature = "cube")]
    Cube(Box<(DampedHessian, burn_fp4_cubecl::HessianFactorHandles)>),
}

impl fmt::Debug for Factorization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Factorization").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Factorization {
    pub(crate) fn new(
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

    pub(crate) fn damped(&self) -> &DampedHessian {
        match &self.place {
            Place::Host(hessian_factor) => hessian_factor.damped(),
            #[cfg(feature = "cube")]
            Place::Cube(hessian_factor) => &hessian_factor.0,
        }
    }

    pub(crate) fn channels(&self) -> usize {
        self.damped().channels()
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
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
